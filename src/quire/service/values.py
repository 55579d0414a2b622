"""Information about an owner, its store and its databases: frozen values, the same for a local store and a client."""

from __future__ import annotations

from typing import TypedDict

import msgspec

from quire.archive.status import ArchiveStatus
from quire.core.reader_info import ReaderInfo
from quire.manifest.records import DbKind, DbStatus


class Request(msgspec.Struct, frozen=True, array_like=True):
    """Base of all requests."""


class NamespacePlace(msgspec.Struct, frozen=True, array_like=True):
    """Where the objects of a namespace are. The credentials are in the quire.toml of the process that reads them."""

    name: str
    url: str
    prefixes: tuple[str, ...]


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The identity and limits of a server."""

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
    """The prefixes of the store's objects below `objects_url`, that of the current owner epoch first."""
    namespaces: tuple[NamespacePlace, ...] = ()
    is_copy: bool = False
    """Whether it is a copy of an archive: nothing is uploaded for readers, and nothing needs to be."""


class DatabaseInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One live database."""

    db_id: int
    name: str
    kind: DbKind
    status: DbStatus
    created_at_ms: int
    page_size: int
    """Of a page database, in bytes; 0 until its first commit, which fixes it."""
    snapshots: int
    parent_db_id: int
    """The database it was forked from; 0 if it is not a fork."""
    parent: str
    """The parent's name; empty if it is not a fork, or the parent no longer exists."""
    tags: dict[str, str]
    follows: str = ""
    """The SQLite file that the owner follows into it; empty if there is none."""
    namespace: str = ""
    """The namespace of its objects; empty for the store's own object store."""


class DatabaseFilter(Request, frozen=True, kw_only=True):
    """Selects and orders the databases of a list."""

    prefix: str = ""
    """Databases whose name begins with it, or matches it if it is a pattern: `tenant-*`."""
    kind: str = ""
    """pages (or sqlite), stream, lsm (or kv, key-value)."""
    tag: str = ""
    """Databases with this tag, or with this `tag=value`."""
    sort: str = "name"
    """name; written: the newest change in the feed first; size: the largest first."""
    limit: int = 0
    """Maximum number of rows; 0 for all."""
    after: str = ""
    """Begin after this name: the last one of the previous page."""


class DatabaseFilterOptions(TypedDict, total=False):
    """The fields of `DatabaseFilter` as keyword arguments."""

    prefix: str
    kind: str
    tag: str
    sort: str
    limit: int
    after: str


class DroppedDatabase(msgspec.Struct, frozen=True, kw_only=True):
    """A dropped database that can be restored."""

    db_id: int
    name: str
    """Its name when it was dropped."""
    kind: DbKind
    dropped_at_ms: int
    until_ms: int
    """When it is deleted permanently."""
    snapshots: int
    size_bytes: int
    """Bytes of the artifacts it has made; forks may hold some of them."""


class MirrorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A mirror, and how far its target lags behind."""

    name: str
    databases: list[str]
    """Names and patterns."""
    table: str
    target: str
    options: dict[str, str]
    every_seconds: float
    """Seconds between two scheduled runs; 0: it runs on request."""
    created_at_ms: int
    started_at_ms: int
    """When the last run started; 0: never."""
    synced_at_ms: int
    """When the target was last brought up to date; 0: never."""
    batch_id: int
    """The number of the last commit in the target."""
    followed: int
    """Databases that match now."""
    held: int
    """Databases in the target."""
    rows: int
    """Rows in the target."""
    size_bytes: int
    """Bytes of the target's files."""
    changed: int
    """Databases that have changed since the last commit, or are new."""
    dropped: int
    """Databases that no longer exist but are still in the target."""
    lag_seconds: float
    """Seconds since the target was last up to date, or the mirror was created; 0 while nothing has changed. Changes that the
    target lacks are at most this old."""
    lag_frames: int
    """Page versions written to the databases that are not in the target, counted by lsn."""
    failures: int
    """Failed runs since the target was last up to date."""
    error: str
    """The error of the last failed run."""

    @property
    def is_late(self) -> bool:
        """Whether it has missed two scheduled runs and the target lacks changes."""
        return self.every_seconds > 0 and self.lag_seconds > 3 * self.every_seconds


class MirrorRun(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run of a mirror."""

    mirror: str
    batch_id: int
    """The commit that the target now holds."""
    full: bool
    """Whether everything was written: the first time, and when target and store disagree."""
    databases: int
    changed: int
    dropped: int
    copied: int
    """Databases that did not change and were rewritten because they share a file with one that did."""
    files_added: int
    files_removed: int
    rows_written: int
    bytes_written: int
    runner: str


class StoreInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A store as a whole."""

    path: str
    mode: str
    store_id: str
    schema: int
    object_store: str
    owner_epoch: int
    """The number of takeovers of the store, its creation included."""
    owner_session: int
    """Counts the openings of this epoch that put objects; 0 if there is none, or they need not be counted."""
    owner_state: str
    """`not needed`, `unconfirmed`, `confirmed` or `fenced`: whether this directory is known to own the bucket."""
    databases: dict[str, int]
    """The number of live databases of each kind."""
    dropped: int
    """Dropped databases that still have data."""
    snapshots: int
    chunks: int
    deltas: int
    wal_segments: int
    jobs: int
    unreferenced: int
    """Artifacts at zero, waiting for the collector."""
    oldest_change: int
    newest_change: int
    manifest_bytes: int
    map_bytes: int
    readers: int
    """Reader slots of the manifest that are in use, over all processes."""
    disk_bytes: int = 0
    """Bytes that the file system has allocated to the store's directory, as in `du`."""
    followed_files: int = 0
    """SQLite files that the owner follows."""
    page_readers: tuple[ReaderInfo, ...] = ()
    """Processes that read page databases of this store alongside its owner, oldest first."""
    archive: ArchiveStatus | None = None
    """The status of the archive; `None` if `archive.mode` is off."""
    mirrors: tuple[MirrorStatus, ...] = ()
    """Lakehouse tables that follow databases of the store, by name."""


class ServiceFigures(msgspec.Struct, frozen=True):
    """The counters of a server since it started."""

    calls: int
    failed: int
    """Calls that were answered with an error."""
    refused: int
    """Calls without the right to be made: no token, a wrong one, one for reading only, or another wire version."""
    busy: int
    """Calls that were refused because the server was full."""
    calls_now: int
    waits_now: int
    streams_now: int
    batches_sent: int
    rows_sent: int
