"""What an owner says about itself, its store and its databases: frozen values, the same for a local store and a client."""

from __future__ import annotations

from typing import TypedDict

import msgspec

from quire.archive.status import ArchiveStatus
from quire.core.reader_info import ReaderInfo
from quire.manifest.records import DbKind, DbStatus


class Request(msgspec.Struct, frozen=True, array_like=True):
    """Base of all requests."""


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
    is_copy: bool = False
    """Whether it is a copy of an archive: nothing is uploaded for a reader, and nothing has to be."""


class DatabaseInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One live database."""

    db_id: int
    name: str
    kind: DbKind
    status: DbStatus
    created_at_ms: int
    page_size: int
    """Of a page database, in bytes; 0 until its first commit decides it."""
    snapshots: int
    parent_db_id: int
    """The database it was forked from; 0 if it is no fork."""
    parent: str
    """That database's name; empty if it is no fork, or the parent is gone."""
    tags: dict[str, str]
    follows: str = ""
    """The SQLite file that the owner follows into it, if there is one."""
    namespace: str = ""
    """Where its objects go; empty for the store's own object store."""


class DatabaseFilter(Request, frozen=True, kw_only=True):
    """Which databases a list has, and in which order."""

    prefix: str = ""
    """Names begin with it."""
    kind: str = ""
    """pages, stream or lsm."""
    tag: str = ""
    """Databases with this tag, or with this `tag=value`."""
    sort: str = "name"
    """name; written: the one with the newest change first; size: the largest first."""
    limit: int = 0
    """Maximum number of rows; 0 for all."""
    after: str = ""
    """Begin behind this name: the last of the page before."""


class DatabaseFilterOptions(TypedDict, total=False):
    """The same as arguments."""

    prefix: str
    kind: str
    tag: str
    sort: str
    limit: int
    after: str


class DroppedDatabase(msgspec.Struct, frozen=True, kw_only=True):
    """A database that was dropped and can be brought back."""

    db_id: int
    name: str
    """What it was called."""
    kind: DbKind
    dropped_at_ms: int
    until_ms: int
    """When it goes for good."""
    snapshots: int
    size_bytes: int
    """Of what it has made; forks may hold some of it."""


class MirrorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A mirror, and how far its target is behind."""

    name: str
    databases: list[str]
    """Names and patterns."""
    table: str
    target: str
    options: dict[str, str]
    every_seconds: float
    """Between two scheduled runs; 0: it runs on request."""
    created_at_ms: int
    started_at_ms: int
    """When the last run began; 0 for never."""
    synced_at_ms: int
    """When the target was last brought up to date; 0 for never."""
    batch_id: int
    """The last commit in the target."""
    followed: int
    """Databases that match now."""
    held: int
    """Databases that the target holds …"""
    rows: int
    """… with so many rows …"""
    size_bytes: int
    """… in so many bytes of files."""
    changed: int
    """Databases that have changed since, or are new."""
    dropped: int
    """Databases that are gone, and are in the target still."""
    lag_seconds: float
    """Since the target was last up to date, or the mirror was created; 0 while nothing has changed. What it lacks was written
    at most so long ago."""
    lag_frames: int
    """Page versions that were written to the databases and are not in the target, as their lsn count them."""
    failures: int
    """Runs that have failed since the target was last up to date …"""
    error: str
    """… and the last one's error."""

    @property
    def is_late(self) -> bool:
        """Whether it has missed two of its scheduled runs, and the target lacks something."""
        return self.every_seconds > 0 and self.lag_seconds > 3 * self.every_seconds


class MirrorRun(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of a mirror did."""

    mirror: str
    batch_id: int
    """The commit that the target holds now."""
    full: bool
    """Whether everything was written: the first time, and when target and store disagree."""
    databases: int
    changed: int
    dropped: int
    copied: int
    """Databases that did not change and were written again, because they share a file with one that did."""
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
    """How often the store was taken over, its creation included."""
    owner_session: int
    """Counts the openings of this epoch that put objects; 0 if none has, or none need be counted."""
    owner_state: str
    """`not needed`, `unconfirmed`, `confirmed` or `fenced`: whether the bucket is known to be this directory's to write."""
    databases: dict[str, int]
    """Live databases of each kind."""
    dropped: int
    """Dropped databases of which something is left."""
    snapshots: int
    chunks: int
    deltas: int
    wal_segments: int
    jobs: int
    unreferenced: int
    """Artifacts at zero references, waiting for the collector."""
    oldest_change: int
    newest_change: int
    manifest_bytes: int
    map_bytes: int
    readers: int
    """Reader slots of the manifest in use, over all processes."""
    disk_bytes: int = 0
    """What the file system has given to everything in the store's directory, as `du` says."""
    followed_files: int = 0
    """SQLite files that the owner follows."""
    page_readers: tuple[ReaderInfo, ...] = ()
    """Processes that read page databases of this store beside its owner, oldest first."""
    archive: ArchiveStatus | None = None
    """How the archive is doing; `None` if `archive.mode` is off."""
    mirrors: tuple[MirrorStatus, ...] = ()
    """Lakehouse tables that follow databases of the store, by name."""


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
