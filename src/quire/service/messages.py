"""The table of actions: name, request, response and required role of each.

Client and server share it; docs/formats/wire.md lists it, and a test compares the two.

Rules
  1. Requests are msgpack arrays of their fields, in order. Fields are only appended, with defaults.
  2. `READ` actions have no visible effect; the others need the admin token (or the Unix socket).
  3. `keyed` actions are sent with an idempotency key; all others may be repeated without one.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from quire.core.reader_info import ReaderInfo
from quire.lsm.engine import KvVersion
from quire.manifest.change import ChangePage, CursorInfo
from quire.manifest.guard import Receipt
from quire.manifest.jobqueue import Job
from quire.manifest.leases import HeldVersion
from quire.manifest.ops.registry import AnyOp
from quire.manifest.records import JobKind, JobState
from quire.manifest.snapshots import RolledBack, SnapshotInfo
from quire.pages.remote import RemoteReader
from quire.pages.view import SnapshotView
from quire.service.commands import COMMAND
from quire.service.data_actions import DATA_ACTIONS
from quire.service.sql_actions import SQL_ACTIONS
from quire.service.tickets import (
    KV_IDS,
    LEASE_RANGE,
    LEASE_RENEW,
    LOAD_PAIRS,
    LOAD_PUT,
    LOAD_RECORDS,
    STREAM_ACTIONS,
    Action,
    DatabaseRequest,
    OfLease,
    Role,
    Scope,
    on_database,
)
from quire.service.values import DatabaseFilter, DatabaseInfo, DroppedDatabase, Hello, Request, StoreInfo
from quire.service.wire import ErrorForm

Tags = dict[str, str]

READ_PAGES_MAX = 256
"""Pages per call: at most 16 MiB."""


class Nothing(Request, frozen=True):
    """The request of actions without arguments."""


# ── databases ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class OfDatabase(DatabaseRequest, frozen=True):
    """A database by its name."""


class Create(Request, frozen=True):
    name: str
    kind: str
    tags: Tags = msgspec.field(default_factory=dict)
    namespace: str = ""


class Drop(Request, frozen=True):
    name: str
    snapshots: bool = False
    undoable: bool = False


class Undrop(Request, frozen=True):
    name: str | int
    new_name: str = ""


class OfDropped(Request, frozen=True):
    name: str | int


class Rename(Request, frozen=True):
    old: str
    new: str


class MakeSnapshot(Request, frozen=True):
    name: str
    snapshot: str = ""
    tags: Tags = msgspec.field(default_factory=dict)


class Fork(Request, frozen=True):
    name: str
    new_name: str
    at: int | str | None = None
    tags: Tags = msgspec.field(default_factory=dict)
    compression: str = ""


class Rollback(Request, frozen=True):
    name: str
    to: str
    """A snapshot's name, an epoch (3:4711) or a time."""


class SetStatus(Request, frozen=True):
    name: str
    status: str


class SetOptions(Request, frozen=True):
    name: str
    tags: Tags | None = None
    compression: str = ""


class ListSnapshots(Request, frozen=True):
    db: int | str


class OfSnapshot(Request, frozen=True):
    db: int | str
    snapshot: int | str


class DropOneSnapshot(Request, frozen=True):
    db: int | str
    snapshot: int | str
    undoable: bool = False


class UndropOneSnapshot(Request, frozen=True):
    db: int | str
    snapshot: int | str
    new_name: str = ""


class OfView(Request, frozen=True):
    """`upload`: first upload the WAL segments that the view needs to the object store, for readers that share no disk."""

    db: int | str
    snapshot: int | str
    upload: bool = False


class OfViews(Request, frozen=True):
    """Request views of the snapshots that several databases have under one name."""

    databases: tuple[int | str, ...]
    snapshot: int | str


class Lend(Request, frozen=True):
    """Lend the newest versions of some databases, as a new lease (0) or as part of an existing one. A `holder` can request them
    again, by names. With `keep`, so can any client that has the lease's id (`OfLentRange`), also by names. With `snapshot`,
    each database that has a snapshot of this name or id lends that instead."""

    databases: tuple[int | str, ...]
    seconds: float
    lease_id: int = 0
    upload: bool = False
    holder: str = ""
    keep: bool = False
    snapshot: str = ""


class LentViews(Request, frozen=True):
    """The lease, 0 if there is none, and its views, in the order of the request."""

    lease_id: int
    views: list[SnapshotView]
    missing: tuple[str, ...] = ()
    """Databases without the snapshot: `views` omits them."""


class OfHolder(Request, frozen=True):
    """A holder of versions."""

    holder: str


class MarkDropped(Request, frozen=True):
    """Databases, as (id, name), of which a holder has versions and which no longer exist."""

    holder: str
    dropped: tuple[tuple[int, str], ...]
    seconds: float


class OfHeldVersions(Request, frozen=True):
    """Versions of a holder, as (lease, database)."""

    versions: tuple[tuple[int, int], ...]


class NewestLsns(Request, frozen=True):
    """Request the newest lsn of page databases."""

    databases: tuple[str, ...]


class LendKv(Request, frozen=True):
    db: int | str
    seconds: float
    lease_id: int = 0


class LentKv(Request, frozen=True):
    lease_id: int
    version: KvVersion


class RunJob(Request, frozen=True):
    """Run a checkpoint or a merge at the owner."""

    name: str
    kind: JobKind


class Started(Request, frozen=True):
    """A job, and the attempt to wait for: it may succeed, fail, or be deferred."""

    job_id: int
    attempt: int


# ── operations ────────────────────────────────────────────────────────────────────────────────────────────────────────
class Batch(Request, frozen=True):
    """Operations (`tuple[AnyOp, ...]`) that commit together; `key` makes the batch safe to repeat. `ops` is decoded one batch
    at a time, so that a batch that cannot be decoded fails alone."""

    key: bytes
    ops: msgspec.Raw
    result: bytes = b""
    trace: str = ""
    """The trace of its submitter: batches of several traces share a call."""


class Submit(Request, frozen=True):
    """Batches, in order; each succeeds or fails independently."""

    batches: tuple[Batch, ...]
    queue_seconds: float = 10.0


class BatchOutcome(Request, frozen=True):
    """The result of a batch: either a receipt or an error."""

    receipt: Receipt | None = None
    error: ErrorForm | None = None


class Reserve(Request, frozen=True):
    """Allocate an id that will never be allocated again: `what` is "db", "job" or "generation" (of `db_id`)."""

    what: str
    db_id: int = 0


# ── the feed ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class Register(Request, frozen=True):
    """`start` is "oldest", "latest", or the sequence to begin after."""

    start: int | str
    name: str = ""
    ttl_seconds: float = 0.0
    max_lag: int = 0


class OfCursor(Request, frozen=True):
    cursor: int | str


class Fetch(Request, frozen=True):
    cursor: int | str
    limit: int
    after: int | None = None
    databases: tuple[int | str, ...] | None = None
    tables: tuple[str, ...] | None = None


class Acknowledge(Request, frozen=True):
    cursor: int | str
    upto: int


class Wait(Request, frozen=True):
    """Returns the head: above `after`, or the current one on a timeout."""

    after: int
    seconds: float


# ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
class Enqueue(Request, frozen=True):
    kind: JobKind
    db_id: int = 0
    payload: bytes = b""
    max_attempts: int = 5
    delay_seconds: float = 0.0
    artifact: tuple[int, int, int, int, int] | None = None
    job_id: int = 0
    """An id from `reserve`; 0 for the next one."""


class Claim(Request, frozen=True):
    """Claim the oldest job that is due, or, with `job_id`, that job."""

    worker: str
    kinds: tuple[JobKind, ...] | None = None
    lease_seconds: float = 30.0
    job_id: int = 0


class RenewJob(Request, frozen=True):
    job_id: int
    worker: str
    done: int = 0
    total: int = 0
    lease_seconds: float = 30.0


class Complete(Request, frozen=True):
    job_id: int
    attempt: int
    result: bytes = b""
    ops: tuple[AnyOp, ...] = ()
    after: tuple[AnyOp, ...] = ()


class Fail(Request, frozen=True):
    job_id: int
    attempt: int
    error: str
    permanent: bool = False


class Defer(Request, frozen=True):
    job_id: int
    attempt: int
    until_ms: int


class OfJob(Request, frozen=True):
    job_id: int


class ListJobs(Request, frozen=True):
    state: JobState | None = None


class Outstanding(Request, frozen=True):
    db_id: int
    kind: JobKind


# ── readers ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class OpenReader(Request, frozen=True):
    db: int | str
    tags: Tags = msgspec.field(default_factory=dict)
    ttl_seconds: float = 30.0


class OfReader(Request, frozen=True):
    db_id: int
    reader_id: int


class ReadPages(Request, frozen=True):
    """At most `READ_PAGES_MAX` pages of the version that a reader has leased."""

    db_id: int
    reader_id: int
    pages: tuple[int, ...]


# ── tables ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class TableCuts(Request, frozen=True):
    """Request keys that split a table, or a window of it, into at most `parts` parts."""

    table: str
    parts: int
    prefix: tuple[Any, ...] = ()
    start: tuple[Any, ...] | None = None
    stop: tuple[Any, ...] | None = None


# ── rows into SQLite ──────────────────────────────────────────────────────────────────────────────────────────────────
class LoadRows(Request, frozen=True):
    """Write the parts of a load to a table, in one transaction. `columns` are (name, declared type).

    With `query` they are a batch of a streaming query, which is written once, whichever load contains it.
    """

    load: int
    database: str
    table: str
    parts: tuple[str, ...]
    columns: tuple[tuple[str, str], ...]
    overwrite: bool = False
    create: bool = False
    create_database: bool = False
    exists: Literal["", "error", "ignore"] = ""
    keys: tuple[str, ...] = ()
    delete: str = ""
    query: str = ""
    batch: int = 0


class OfLoad(Request, frozen=True):
    load: int


# ── tables into key-value databases ───────────────────────────────────────────────────────────────────────────────────
class PublishTables(Request, frozen=True):
    """Publish these tables of a load in the database, atomically and once."""

    load: int
    database: str
    ids: tuple[int, ...]
    create: bool = False


def _read(name: str, request: type[Request], answer: Any) -> Action:
    return Action(name, request, answer, Role.READ)


def _once(name: str, request: type[Request], answer: Any) -> Action:
    return Action(name, request, answer, Role.ADMIN, keyed=True)


ACTIONS: dict[str, Action] = {
    action.name: action
    for action in (
        Action("hello", Nothing, Hello, Role.READ, scope=Scope.HELD),
        _read("info", Nothing, StoreInfo),
        _read("figures", Nothing, dict[str, Any]),
        _read("databases", DatabaseFilter, list[DatabaseInfo]),
        on_database("database", OfDatabase, DatabaseInfo, Role.READ),
        _read("readers", OfDatabase, list[ReaderInfo]),
        _once("create", Create, DatabaseInfo),
        _once("drop", Drop, DatabaseInfo),
        _once("undrop", Undrop, DatabaseInfo),
        _once("purge", OfDropped, DroppedDatabase),
        _read("dropped", Nothing, list[DroppedDatabase]),
        _once("rename", Rename, DatabaseInfo),
        Action("status", SetStatus, DatabaseInfo),
        Action("options", SetOptions, DatabaseInfo),
        _once("fork", Fork, DatabaseInfo),
        _once("rollback", Rollback, RolledBack),
        _once("snapshot.create", MakeSnapshot, SnapshotInfo),
        _once("snapshot.drop", DropOneSnapshot, SnapshotInfo),
        _once("snapshot.undrop", UndropOneSnapshot, SnapshotInfo),
        _read("snapshot.list", ListSnapshots, list[SnapshotInfo]),
        _read("snapshot.get", OfSnapshot, SnapshotInfo),
        _read("snapshot.view", OfView, SnapshotView),
        _read("snapshot.views", OfViews, list[SnapshotView | None]),
        _read("lease.open", Lend, LentViews),
        _read("lease.open_kv", LendKv, LentKv),
        LEASE_RENEW,
        LEASE_RANGE,
        _read("lease.release", OfLease, None),
        _read("lease.held", OfHolder, list[HeldVersion]),
        _read("lease.mark_dropped", MarkDropped, int),
        _read("lease.views", OfHeldVersions, list[SnapshotView]),
        _read("lease.let_go", OfHeldVersions, None),
        _read("lease.newest", NewestLsns, list[int]),
        _once("start", RunJob, Started),
        Action("submit", Submit, list[BatchOutcome]),
        Action("reserve", Reserve, int),
        _read("feed.store_id", Nothing, str),
        _read("feed.head", Nothing, int),
        _read("feed.cursors", Nothing, list[CursorInfo]),
        _read("feed.cursor", OfCursor, CursorInfo),
        _read("feed.fetch", Fetch, ChangePage),
        _read("feed.wait", Wait, int),
        _once("feed.register", Register, CursorInfo),
        Action("feed.acknowledge", Acknowledge, None),
        Action("feed.resume", OfCursor, CursorInfo),
        _once("feed.drop", OfCursor, None),
        _read("jobs.list", ListJobs, list[Job]),
        _read("jobs.get", OfJob, Job),
        _read("jobs.outstanding", Outstanding, int),
        _once("jobs.enqueue", Enqueue, int),
        _once("jobs.claim", Claim, Job | None),
        Action("jobs.renew", RenewJob, None),
        _once("jobs.complete", Complete, None),
        _once("jobs.fail", Fail, JobState),
        _once("jobs.defer", Defer, None),
        _once("jobs.cancel", OfJob, None),
        _once("jobs.retry", OfJob, int),
        Action("reader.open", OpenReader, RemoteReader, Role.READ, keyed=True),
        _read("reader.renew", OfReader, RemoteReader),
        _read("reader.read", ReadPages, list[bytes]),
        _read("reader.close", OfReader, None),
        _read("table.cuts", TableCuts, list[tuple[Any, ...]]),
        LOAD_PUT,
        Action("load.rows", LoadRows, int),
        LOAD_PAIRS,
        LOAD_RECORDS,
        Action("load.drop", OfLoad, None),
        _read("kv.version", OfSnapshot, KvVersion),
        KV_IDS,
        Action("kv.load.publish", PublishTables, int),
        Action("kv.load.drop", OfLoad, None),
        *STREAM_ACTIONS,
        *DATA_ACTIONS,
        *SQL_ACTIONS,
        COMMAND,
    )
}
"""All actions, by name."""
