"""What `why` answers: values, for people and programs."""

from __future__ import annotations

import msgspec


class Holder(msgspec.Struct, frozen=True):
    """One thing that keeps the subject."""

    kind: str
    """"database", "snapshot", "fork", "reader", "job", "plan", "backup", "store" or "time"."""
    name: str
    what: str
    """How it holds on, in words."""
    release: str
    """What would end that: a command, or what to wait for."""


class Answer(msgspec.Struct, frozen=True):
    """Everything that keeps a subject."""

    subject: str
    kind: str
    """"database", "snapshot", "segment", "base" or "delta"; "log", "table", "backup" or "file" for what is no artifact."""
    state: str
    size_bytes: int
    references: int
    """As they are counted; 0 of what is no artifact."""
    holders: tuple[Holder, ...]
    disk_bytes: int = 0
    """What the file system has given for it in the store's directory: of a database for all its files, with zeros that are
    reserved ahead. 0 of what is not there, and of a snapshot, whose files are its database's."""
