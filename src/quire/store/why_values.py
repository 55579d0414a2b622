"""The answers of `why`, and the words they share: names of databases and snapshots, and the commands that release them."""

from __future__ import annotations

import shlex

import msgspec

from quire.core.clock import moment
from quire.manifest.reads import ReadTxn
from quire.manifest.records import SnapshotRecord
from quire.manifest.retention import WINDOW_TAG

OWNER_OPENS = "when the store is opened for writing the next time"


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
    """"database", "namespace", "snapshot", "page", "segment", "base" or "delta";
    "log", "table", "backup" or "file" for what is no artifact."""
    state: str
    size_bytes: int
    references: int
    """As they are counted; 0 of what is no artifact."""
    holders: tuple[Holder, ...]
    disk_bytes: int = 0
    """What the file system has given for it in the store's directory: of a database for all its files, with zeros that are
    reserved ahead. 0 of what is not there, and of a snapshot, whose files are its database's."""


def snapshot_holder(txn: ReadTxn, db_id: int, snapshot_id: int, row: SnapshotRecord, what: str) -> Holder:
    """A snapshot that holds something of any database."""
    name = name_of(txn, db_id)
    return Holder("snapshot", f"{name}@{title(row, snapshot_id)}", lent(row, what), drop(name, row, snapshot_id))


def title(row: SnapshotRecord, snapshot_id: int) -> str:
    """What a snapshot is called; its id if nobody has named it."""
    return row.name or f"#{snapshot_id}"


def drop(name: str, row: SnapshotRecord, snapshot_id: int) -> str:
    """What would end a snapshot."""
    command = f"quire snapshot drop {quoted(name)} {quoted(row.name or str(snapshot_id))}"
    if row.expires_at_ms:
        return f"by itself {moment(row.expires_at_ms)}, or {command}"
    return command


def lent(row: SnapshotRecord, what: str) -> str:
    """How a snapshot holds on that nobody has named: for whom it is there."""
    if row.tags.get("by") == "lend":
        return f"is lent to a query (Spark, or another reader), and {what}"
    if WINDOW_TAG in row.tags:
        return f"is there for time travel, and {what}"
    return what


def quoted(name: str) -> str:
    """A name as a command takes it: most are as they are."""
    return shlex.quote(name)


def name_of(txn: ReadTxn, db_id: int) -> str:
    """A database's name; its id if it has none any more."""
    record = txn.database(db_id)
    return record.name if record is not None and record.name else f"#{db_id}"


def number(db_id: int) -> str:
    """A database's id, also as directories and keys have it.

    >>> number(153)
    '153 (0x99)'
    """
    return f"{db_id} (0x{db_id:x})"
