"""`NAME@VERSION`: a database, or one of its versions, as one word of an address (W4, W7).

VERSION is a snapshot's name, an epoch (its number, or 3:4711) or a moment as parsed by `core/time_parsing.py`. If a version
could be either, the snapshot wins. A database whose own name contains an `@` cannot be addressed.

Threads: any. Raises `UnknownDatabase`, `UnknownSnapshot`, `InvalidName`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from quire.core.errors import UnknownDatabase, UnknownSnapshot, WrongKind
from quire.core.ids import Epoch
from quire.durable.names import check_name
from quire.manifest.snapshots import SnapshotInfo
from quire.manifest.store import ManifestStore
from quire.pages.catalog import find_database
from quire.service.api import StoreApi

At = str | int | datetime
"""A snapshot's name, an epoch or a time, as in `connect(at=…)`."""
EPOCH_DIGITS_MAX = 18


@dataclass(frozen=True, slots=True)
class DatabaseVersion:
    """A database and version named by an address."""

    name: str
    at: At | None = None
    """`None`: the newest version."""


def base_name(text: str) -> str:
    """Return the database part of `NAME@VERSION`. The grant is checked for it before anything is looked up.

    >>> base_name("shop@monday"), base_name("shop")
    ('shop', 'shop')
    """
    return text.partition("@")[0]


def parse_version(manifest: ManifestStore, text: str) -> DatabaseVersion:
    """Return the database and version that `NAME` or `NAME@VERSION` names. Blocks for a read of the manifest."""
    name, mark, version = text.partition("@")
    check_name("database", name)
    if not mark:
        return DatabaseVersion(name)
    return DatabaseVersion(name, find_version(manifest, name, version))


def find_version(manifest: ManifestStore, db: int | str, version: str) -> At:
    """Return the version that a text names; a number is an epoch. Blocks for a read of the manifest."""
    try:
        at = manifest.snapshots.find(db, version)
    except UnknownSnapshot:
        if version.isascii() and version.isdecimal() and len(version) <= EPOCH_DIGITS_MAX:
            return int(version)
        raise
    if isinstance(at, SnapshotInfo):
        return version
    return at.lsn if isinstance(at, Epoch) else at


def find_or_create(store: StoreApi, name: str, *, create: bool) -> int:
    """Return the id of a database, which is created if it does not exist and `create` is set. Blocks."""
    try:
        with store.manifest.read() as txn:
            return find_database(txn, name)[0]
    except UnknownDatabase:
        if not create:
            raise
    store.sqlite(name, create=True).close()
    return find_or_create(store, name, create=create)


def attachable(store: StoreApi, may_attach: Callable[[str], bool]) -> Callable[[str], bool]:
    """Return a predicate for the databases that SQL of remote users may attach. It rejects a database without pages: VACUUM
    INTO, which SQLite's authorizer cannot distinguish from ATTACH, would write to it. VACUUM INTO refuses a database with
    pages."""

    def may(name: str) -> bool:
        if not may_attach(name):
            return False
        try:
            with store.manifest.read() as txn:
                db_id = find_database(txn, name)[0]
        except (UnknownDatabase, WrongKind):
            return False
        return bool(store.pages.open(db_id).wal.written.size_pages)

    return may
