"""What an owner tells its clients about itself, its store and its databases: frozen values.

`DatabaseInfo` and `StoreInfo` have the fields of the values that a local `Store` gives (a test compares them). Those belong
to packages above this one, which a client must not need.
"""

from __future__ import annotations

import msgspec

from quire.core.reader_info import ReaderInfo
from quire.manifest.records import DbKind, DbStatus


class NamespacePlace(msgspec.Struct, frozen=True, array_like=True):
    """Where the objects of a namespace are; how they are reached is in the quire.toml of whoever reads them."""

    name: str
    url: str
    prefixes: tuple[str, ...]


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """Who answers."""

    wire: int
    quire: str
    store_id: str
    path: str
    pid: int
    role: str
    body_bytes_max: int
    wait_seconds_max: float
    objects_url: str
    object_prefixes: tuple[str, ...] = ("",)
    """Below which of its prefixes the store's objects are, the current owner epoch's first."""
    namespaces: tuple[NamespacePlace, ...] = ()


class DatabaseInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One live database."""

    db_id: int
    name: str
    kind: DbKind
    status: DbStatus
    created_at_ms: int
    page_size: int
    snapshots: int
    parent_db_id: int
    parent: str
    tags: dict[str, str]
    follows: str = ""
    namespace: str = ""


class StoreInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A store as a whole."""

    path: str
    mode: str
    store_id: str
    schema: int
    object_store: str
    owner_epoch: int
    owner_session: int
    owner_state: str
    databases: dict[str, int]
    dropped: int
    snapshots: int
    chunks: int
    deltas: int
    wal_segments: int
    jobs: int
    unreferenced: int
    oldest_change: int
    newest_change: int
    manifest_bytes: int
    map_bytes: int
    readers: int
    disk_bytes: int = 0
    followed_files: int = 0
    page_readers: tuple[ReaderInfo, ...] = ()


class ServiceFigures(msgspec.Struct, frozen=True):
    """What a server has counted since it started."""

    calls: int
    failed: int
    """Calls that were answered with an error."""
    refused: int
    """Calls without the right to be made: no token, a wrong one, one for reading, another version."""
    busy: int
    """Calls that found no place."""
    calls_now: int
    waits_now: int
    streams_now: int
    batches_sent: int
    rows_sent: int
