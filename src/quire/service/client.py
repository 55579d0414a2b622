"""`quire.connect`: a store that another process owns, with the API of a local store as far as that makes sense over a wire.

    with quire.connect("grpc+unix:///data/quire.sock") as store:
        store.create("shop", "pages")
        store.feed.register(name="my-app")
        table = store.table("db", columns=["db_id", "name"])

Rules
  1. A call makes its changes once, however often its response is lost (`channel.py`, `idempotency.py`).
  2. Tables are read in batches, each as of its own moment (M4): rows committed meanwhile are seen if their keys lie ahead.
  3. A client pickles as its address and the *names* of its token and certificate files: the secrets stay in the files.

Threads: any. Raises what the store raises, and `Unavailable`, `TimedOut`, `AccessDenied`, `Incompatible`, `Overloaded`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, Unpack
from weakref import WeakSet

import pyarrow as pa

from quire.core.closing import ClosedOnExit
from quire.core.errors import InvalidInput, NameTaken, TimedOut, UnknownDatabase
from quire.core.ids import Epoch
from quire.core.reader_info import ReaderInfo
from quire.core.time_parsing import version_parameter
from quire.durable.files import OsDisk
from quire.lsm.engine import KvVersion
from quire.manifest.arrow import schema
from quire.manifest.jobqueue import LEASE_SECONDS, Job
from quire.manifest.leases import HeldVersion
from quire.manifest.ops.base import Op
from quire.manifest.reads import table_named
from quire.manifest.records import DbKind, JobKind, JobState
from quire.manifest.snapshots import RolledBack, SnapshotInfo
from quire.pages.remote import RemoteReader
from quire.pages.view import SnapshotView
from quire.service import messages as m
from quire.service.channel import CALL_SECONDS, Channel
from quire.service.commands import CommandResult, RemoteCommand
from quire.service.data_actions import OfName
from quire.service.lease_renewal import LeaseRenewal
from quire.service.pipeline import Pipeline, RemoteGuard
from quire.service.remote_feed import RemoteFeed
from quire.service.remote_jobs import RemoteJobs, RemotePageReader
from quire.service.remote_kv import RemoteKv
from quire.service.remote_sqlite import RemoteDriver
from quire.service.remote_stream import RemoteStream
from quire.service.sockets import SCHEME, await_owner, where_owner_listens
from quire.service.sql_actions import OpenSql
from quire.service.tickets import (
    Action,
    LoadPairs,
    LoadRecords,
    LogMode,
    OfLease,
    PollStreams,
    RegisterConsumer,
    TableTicket,
)
from quire.service.values import DatabaseFilter, DatabaseFilterOptions, DatabaseInfo, DroppedDatabase, Hello, StoreInfo
from quire.sqlite.pep249.connection import LEGACY_TRANSACTION_CONTROL, Connection

if TYPE_CHECKING:
    from quire.sqlite.connect import At
    from quire.stream.remote_read import PolledStream

JOB_POLL_SECONDS = 0.05
COMMAND_SECONDS = 7 * 24 * 3_600.0
_ENDED = (JobState.SUCCEEDED, JobState.FAILED_PERMANENT, JobState.CANCELLED)

TOKEN_VARIABLE = "QUIRE_TOKEN_FILE"


def connect(
    uri: str | os.PathLike[str],
    *,
    token_file: str = "",
    tls_ca_file: str = "",
    timeout: float = CALL_SECONDS,
    wait: float = 0.0,
) -> Client:
    """Connect to the owner of a store, given its directory, `http://HOST:PORT` or `https://HOST:PORT` (`quire serve --http`),
    `grpc://HOST:PORT` or `grpc+tls://HOST:PORT` (`--listen`), or `grpc+unix:///PATH`.

    `token_file` (otherwise the environment variable QUIRE_TOKEN_FILE) holds the token that an owner on the network requires;
    `tls_ca_file` holds the certificate that signed the owner's. `timeout` applies to each call, retries included.
    For a directory, `wait` is the time in seconds for which an owner may still be starting.
    """
    address = os.fspath(uri)
    if "://" not in address:
        root = os.path.abspath(address)
        path = where_owner_listens(OsDisk(), root) if not wait else await_owner(root, wait)
        if not path:
            raise InvalidInput("no owner listens for this store", hint="run `quire serve` on the store", path=root)
        address = SCHEME + path
    over_network = not address.startswith(SCHEME)
    token = token_file or (os.environ.get(TOKEN_VARIABLE, "") if over_network else "")
    return Client(Channel(address, token_file=token, tls_ca_file=tls_ca_file, call_seconds=timeout))


class Client(ClosedOnExit):
    """A remote store. Created by `quire.connect`; use it as a context manager."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pipeline = Pipeline(channel)
        self.feed = RemoteFeed(channel)
        """Every committed change, in order, for subscribers."""
        self.jobs = RemoteJobs(channel)
        """The job queue: work that survives crashes."""
        self._renewing = LeaseRenewal(channel)
        self._streams = WeakSet[RemoteStream]()
        try:
            self.server: Hello = channel.call("hello", m.Nothing())
            """The identity and limits of the server, as of connecting."""
            channel.body_bytes_max = self.server.body_bytes_max
        except BaseException:
            channel.close()
            raise

    # ── lifecycle ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def uri(self) -> str:
        """The address of the owner."""
        return self._channel.uri

    @property
    def path(self) -> str:
        """The store's directory, on the owner's machine."""
        return self.server.path

    @property
    def objects_url(self) -> str:
        """The URL of the object store, as configured at the owner."""
        return self.server.objects_url

    @property
    def object_prefixes(self) -> tuple[str, ...]:
        """The prefixes of this store's objects below `objects_url`, that of the current owner epoch first."""
        return self.server.object_prefixes

    def close(self) -> None:
        """Send queued appends and batches, and disconnect. Idempotent. Raises the error of an append that failed and whose
        result no caller has requested."""
        with ExitStack() as closing:  # all of it, even if an append has failed
            closing.callback(self._channel.close)
            closing.callback(self._pipeline.close)
            closing.callback(self._renewing.close)
            for stream in list(self._streams):
                closing.callback(stream.close)

    def __reduce__(self) -> tuple[Any, ...]:
        channel = self._channel
        return _connect_again, (channel.uri, channel.token_file, channel.tls_ca_file, channel.call_seconds)

    # ── databases ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def create(
        self, name: str, kind: DbKind | str, *, tags: dict[str, str] | None = None, namespace: str = ""
    ) -> DatabaseInfo:
        """Create a database of kind "pages", "stream" or "lsm"; `tags` are stored with it."""
        kind_name = kind.name.lower() if isinstance(kind, DbKind) else kind
        return self._channel.call("create", m.Create(name, kind_name, tags or {}, namespace))

    def drop(self, name: str, *, snapshots: bool = False, undoable: bool = False) -> DatabaseInfo:
        """Drop a database and return its last state. One that has snapshots needs `snapshots`, which drops them, too.

        With `undoable` it keeps its space for a day (`maintenance.undrop_seconds`), and `undrop` restores it until then.
        """
        return self._channel.call("drop", m.Drop(name, snapshots, undoable))

    def undrop(self, name: str | int, *, new_name: str = "") -> DatabaseInfo:
        """Restore a dropped database: the last one of this name, or by its id."""
        return self._channel.call("undrop", m.Undrop(name, new_name))

    def purge(self, name: str | int) -> DroppedDatabase:
        """Delete a dropped database that could still be restored; return its last state."""
        return self._channel.call("purge", m.OfDropped(name))

    def dropped(self) -> list[DroppedDatabase]:
        """Return the dropped databases that can be restored, the last one first."""
        return self._channel.call("dropped", m.Nothing())

    def rename(self, old: str, new: str) -> DatabaseInfo:
        """Rename a database; return it with its new name."""
        return self._channel.call("rename", m.Rename(old, new))

    def databases(self, **wanted: Unpack[DatabaseFilterOptions]) -> list[DatabaseInfo]:
        """Return the live databases, by name; see `Store.databases`."""
        return self._channel.call("databases", DatabaseFilter(**wanted))

    def database(self, name: str) -> DatabaseInfo:
        """Return a database by name."""
        return self._channel.call("database", m.OfDatabase(name))

    def readers(self, name: str) -> list[ReaderInfo]:
        """Return the readers of a page database, in the owner's process and in others."""
        return self._channel.call("readers", m.OfDatabase(name))

    # ── streams, keys and values ──────────────────────────────────────────────────────────────────────────────────────
    def stream(self, name: str, *, create: bool = False) -> RemoteStream:
        """Return a stream with the API of `store.stream(name)`; with `create=True` it is created if it does not exist."""
        self._open(name, "stream.marks", DbKind.STREAM, create)
        stream = RemoteStream(self._channel, name, self.server.body_bytes_max)
        self._streams.add(stream)
        return stream

    def kv(self, name: str, *, create: bool = False) -> RemoteKv:
        """Return a key-value set with the API of `store.kv(name)`; with `create=True` it is created if it does not exist."""
        self._open(name, "kv.stats", DbKind.LSM, create)
        return RemoteKv(self._channel, name, self._renewing)

    # ── SQL ───────────────────────────────────────────────────────────────────────────────────────────────────────────
    def sqlite(
        self,
        name: str,
        *,
        at: At | None = None,
        create: bool = False,
        timeout: float = 5.0,
        isolation_level: str | None = "",
        check_same_thread: bool = True,
        autocommit: bool | int = LEGACY_TRANSACTION_CONTROL,
    ) -> Connection:
        """Open a PEP 249 connection to the newest version of a page database, or read-only `at` a snapshot, lsn or time.

        It has the class that `quire.sqlite.dbapi.connect` returns in the owner's process. With `create=True` the database is
        created if it does not exist. `timeout` is how long a statement waits for the lock, in seconds.
        """
        driver = self.sqlite_driver(name, at=at, create=create, timeout=timeout)
        return Connection(
            driver, isolation_level=isolation_level, check_same_thread=check_same_thread, autocommit=autocommit
        )

    def sqlite_driver(
        self,
        name: str,
        *,
        at: At | None = None,
        create: bool = False,
        timeout: float = 5.0,
        read_only: bool = False,
        functions: tuple[str, ...] = (),
        close: Callable[[], None] = lambda: None,
    ) -> RemoteDriver:
        """Return the driver of such a connection; `close` is called when the driver is closed."""
        version = None if at is None else version_parameter(at)
        request = OpenSql(name, version, create, timeout, read_only, functions)
        return RemoteDriver(self._channel, self._renewing, request, close)

    def _open(self, name: str, action: str, kind: DbKind, create: bool) -> None:
        """Raise if the database does not exist or is of another kind; with `create`, create it."""
        try:
            self._channel.call(action, OfName(name))
        except UnknownDatabase:
            if not create:
                raise
            with suppress(NameTaken):  # another client created it first
                self.create(name, kind)
            self._channel.call(action, OfName(name))

    # ── versions ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def snapshot(self, name: str, snapshot: str = "", *, tags: dict[str, str] | None = None) -> SnapshotInfo:
        """Keep the current version of a database as a snapshot, with or without a name."""
        return self._channel.call("snapshot.create", m.MakeSnapshot(name, snapshot, tags or {}))

    def snapshots(self, db: int | str) -> list[SnapshotInfo]:
        """Return the snapshots of a database, oldest first."""
        return self._channel.call("snapshot.list", m.ListSnapshots(db))

    def get_snapshot(self, db: int | str, snapshot: int | str) -> SnapshotInfo:
        """Return a snapshot by id or by name."""
        return self._channel.call("snapshot.get", m.OfSnapshot(db, snapshot))

    def drop_snapshot(self, db: int | str, snapshot: int | str, *, undoable: bool = False) -> SnapshotInfo:
        """Drop a snapshot, delete what only it held, and return its last state.

        With `undoable` the deletion waits for a day (`maintenance.undrop_seconds`); until then `undrop_snapshot` restores it.
        """
        return self._channel.call("snapshot.drop", m.DropOneSnapshot(db, snapshot, undoable))

    def undrop_snapshot(self, db: int | str, snapshot: int | str, *, new_name: str = "") -> SnapshotInfo:
        """Restore a snapshot that was dropped with `undoable`: the last one of this name, or by its id."""
        return self._channel.call("snapshot.undrop", m.UndropOneSnapshot(db, snapshot, new_name))

    def fork(
        self,
        name: str,
        new_name: str,
        *,
        at: int | str | Epoch | datetime | None = None,
        tags: dict[str, str] | None = None,
        compression: str = "",
    ) -> DatabaseInfo:
        """Create a database that begins as another one is now, or was `at` a snapshot (its id or name), an epoch or a time
        ("2 hours ago"). The two share all data that neither has changed."""
        return self._channel.call("fork", m.Fork(name, new_name, version_text(at), tags or {}, compression))

    def rollback(self, name: str, *, to: At, timeout: float = 600.0) -> RolledBack:
        """Undo every change since a snapshot, an lsn, an epoch or a time: a page database gets its old state as a new version.

        The state before the rollback is kept as the snapshot that the result names; rolling back to it undoes the rollback.
        """
        text = str(Epoch(to, 0)) if isinstance(to, int) else str(version_text(to))
        return self._channel.call("rollback", m.Rollback(name, text), timeout=timeout, attempt_seconds=timeout)

    def set_status(self, name: str, status: str) -> DatabaseInfo:
        """Make a database "read_only", so that every write is refused, or "active" again."""
        return self._channel.call("status", m.SetStatus(name, status))

    def set_options(self, name: str, *, tags: dict[str, str] | None = None, compression: str = "") -> DatabaseInfo:
        """Replace the tags of a database, or change the compression of its future chunks (none or zstd)."""
        return self._channel.call("options", m.SetOptions(name, tags, compression))

    def view(self, db: int | str, snapshot: int | str, *, upload: bool = False, timeout: float = 600.0) -> SnapshotView:
        """Return a snapshot as a value that is read without the owner (P16); `upload` is for readers on other disks."""
        request = m.OfView(db, snapshot, upload)
        return self._channel.call("snapshot.view", request, timeout=timeout, attempt_seconds=timeout)

    def views(self, databases: Sequence[int | str], snapshot: int | str) -> list[SnapshotView | None]:
        """Return such views of several databases, without uploading; `None` for one that has no such snapshot."""
        return self._channel.call("snapshot.views", m.OfViews(tuple(databases), snapshot))

    def lend(
        self,
        databases: Sequence[int | str],
        seconds: float,
        *,
        lease_id: int = 0,
        upload: bool = False,
        holder: str = "",
        keep: bool = False,
        snapshot: str = "",
        timeout: float = 600.0,
    ) -> m.LentViews:
        """Lend the newest versions of page databases, to be read without the owner (P16). The data that they need is not
        deleted until `seconds` after the lease was last renewed. With `lease_id` they become part of that lease. A `holder` can
        request them again, by the names of the databases; with `keep` so can any client that has the lease's id
        (`OfLentRange`). With `keep` and a `snapshot`, the lent versions are the snapshots of this name or id, of the databases
        that have one."""
        request = m.Lend(tuple(databases), float(seconds), lease_id, upload, holder, keep, snapshot)
        return self._channel.call("lease.open", request, timeout=timeout, attempt_seconds=timeout)

    def lend_kv(self, db: int | str, seconds: float, *, lease_id: int = 0) -> m.LentKv:
        """Lend the newest version of a key-value set in the same way."""
        return self._channel.call("lease.open_kv", m.LendKv(db, float(seconds), lease_id))

    def held(self, holder: str) -> list[HeldVersion]:
        """Return the versions that a holder has, oldest first."""
        return self._channel.call("lease.held", m.OfHolder(holder))

    def mark_dropped(self, holder: str, dropped: Sequence[tuple[int, str]], seconds: float) -> int:
        """Record for a holder that databases, given as (id, name), no longer exist; return the id of the lease."""
        return self._channel.call("lease.mark_dropped", m.MarkDropped(holder, tuple(dropped), float(seconds)))

    def held_views(self, versions: Sequence[tuple[int, int]]) -> list[SnapshotView]:
        """Return views of a holder's versions, given as (lease, database)."""
        return self._channel.call("lease.views", m.OfHeldVersions(tuple(versions)))

    def release_versions(self, versions: Sequence[tuple[int, int]]) -> None:
        """Release a holder's versions, given as (lease, database)."""
        self._channel.call("lease.let_go", m.OfHeldVersions(tuple(versions)))

    def newest_lsns(self, databases: Sequence[str]) -> list[int]:
        """Return the newest lsn of each page database."""
        return self._channel.call("lease.newest", m.NewestLsns(tuple(databases)))

    def register_consumer(self, stream: str, consumer: str, start: int | str) -> int:
        """Create a consumer of a stream at `oldest`, `latest` or a record, unless it exists; return its position."""
        return self._channel.call("stream.register", RegisterConsumer(stream, consumer, start))

    def poll_streams(self, consumer: str, positions: Sequence[tuple[int, int]]) -> list[PolledStream | None]:
        """Acknowledge everything below the positions of streams, given as (id, position), and return where the streams end."""
        return self._channel.call("stream.poll", PollStreams(consumer, tuple(positions)))

    def renew_lease(self, lease_id: int) -> None:
        """Extend a lease on lent versions. Raises `LeaseExpired` if it has ended."""
        self._channel.call("lease.renew", OfLease(lease_id))

    def release_lease(self, lease_id: int) -> None:
        """End a lease; do nothing if it has ended."""
        self._channel.call("lease.release", OfLease(lease_id))

    def reader(
        self, db: int | str, *, tags: dict[str, str] | None = None, ttl_seconds: float = LEASE_SECONDS
    ) -> RemotePageReader:
        """Lease the newest durable version of a page database; return a reader of it, which renews the lease until closed."""
        lease: RemoteReader = self._channel.call("reader.open", m.OpenReader(db, tags or {}, ttl_seconds))
        return RemotePageReader(self._channel, lease)

    # ── jobs and batches ──────────────────────────────────────────────────────────────────────────────────────────────
    def checkpoint(self, name: str, *, wait: bool = True, timeout: float = 3_600.0) -> Job:
        """Write a database's WAL into chunks, at the owner; return the job as it ended (or, without `wait`, as it started).

        As in a local store, a job that was deferred or whose attempt failed is pending: the owner's upkeep continues it.
        """
        return self._start(name, JobKind.CHECKPOINT, wait, timeout)

    def merge(self, name: str, *, wait: bool = True, timeout: float = 3_600.0) -> Job:
        """Merge slots of a database that consist of several chunks, at the owner; return the job as `checkpoint` does."""
        return self._start(name, JobKind.MERGE, wait, timeout)

    def _start(self, name: str, kind: JobKind, wait: bool, timeout: float) -> Job:
        started: m.Started = self._channel.call("start", m.RunJob(name, kind))
        deadline, pause = time.monotonic() + timeout, JOB_POLL_SECONDS
        while True:
            job = self.jobs.get(started.job_id)
            is_put_off = job.state is JobState.PENDING and job.record.attempt >= started.attempt
            if not wait or is_put_off or job.state in _ENDED:
                return job
            if time.monotonic() >= deadline:
                hint = f"`quire jobs show {job.job_id}`"
                raise TimedOut("the job did not end in time", hint=hint, job_id=job.job_id, seconds=timeout)
            time.sleep(pause)
            pause = min(pause * 1.5, 1.0)

    def manifest_log_mode(self, mode: str = "") -> str:
        """Return how far the owner relies on the manifest logs of its streams; `mode` (off, shadow, on) sets that first."""
        return self._channel.call("stream.log_mode", LogMode(mode))

    def submit(
        self, ops: Iterable[Op], *, key: bytes | None = None, result: bytes = b"", timeout: float | None = None
    ) -> RemoteGuard:
        """Queue a batch of operations for the owner's manifest; the guard resolves when the batch is durable there.

        Ids in the operations come from `reserve_db_id` and its siblings: the owner allocates them.
        """
        return self._pipeline.submit(ops, key=key, result=result, timeout=timeout)

    def reserve_db_id(self) -> int:
        """Return a database id that will never be allocated again."""
        return self._reserve("db")

    def reserve_job_id(self) -> int:
        """Return a job id that will never be allocated again."""
        return self._reserve("job")

    def reserve_generation(self, db_id: int) -> int:
        """Return a generation of the database that will never be allocated again."""
        return self._reserve("generation", db_id)

    def _reserve(self, what: str, db_id: int = 0) -> int:
        return self._channel.call("reserve", m.Reserve(what, db_id))

    def run_command(self, command: RemoteCommand) -> CommandResult:
        """Run a command of the command line at the owner (`commands.py`), for up to `COMMAND_SECONDS`."""
        return self._channel.call("command", command, timeout=COMMAND_SECONDS, attempt_seconds=COMMAND_SECONDS)

    # ── figures and tables ────────────────────────────────────────────────────────────────────────────────────────────
    def info(self) -> StoreInfo:
        """Return the store's figures."""
        return self._channel.call("info", m.Nothing())

    def figures(self) -> dict[str, Any]:
        """Return the owner's counters: service, manifest writer, feed subscribers, page engine."""
        return self._channel.call("figures", m.Nothing())

    def scan(
        self,
        table: str,
        *,
        prefix: Iterable[Any] = (),
        start: Iterable[Any] | None = None,
        stop: Iterable[Any] | None = None,
        columns: Iterable[str] | None = None,
        limit: int = 0,
    ) -> Iterator[pa.RecordBatch]:
        """Yield a manifest table's rows as Arrow batches (rule 2): keys that begin with `prefix` and lie in [start, stop)."""
        ticket = TableTicket(
            table,
            tuple(prefix),
            None if start is None else tuple(start),
            None if stop is None else tuple(stop),
            None if columns is None else tuple(columns),
            limit,
        )
        return self._channel.stream(ticket)

    def table_cuts(
        self,
        table: str,
        parts: int,
        *,
        prefix: Iterable[Any] = (),
        start: Iterable[Any] | None = None,
        stop: Iterable[Any] | None = None,
    ) -> list[tuple[Any, ...]]:
        """Return keys that split a table, or a window of it, into at most `parts` parts; none if it has few rows."""
        ends = [None if key is None else tuple(key) for key in (start, stop)]
        return self._channel.call("table.cuts", m.TableCuts(table, parts, tuple(prefix), *ends))

    # ── loads ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def load_rows(
        self,
        load: int,
        database: str,
        table: str,
        parts: Iterable[str],
        *,
        columns: Iterable[tuple[str, str]],
        timeout: float = 3_600.0,
        **how: Any,
    ) -> int:
        """Write the parts of a load to a table, in one transaction, once; return the number of rows (`sqlite/bulk_insert.py`).

        `how`: `overwrite`, `create` and the other fields of `LoadRows`.
        """
        request = m.LoadRows(load, database, table, tuple(parts), tuple(columns), **how)
        return self._channel.call("load.rows", request, timeout=timeout, attempt_seconds=timeout)

    def take_parts(self, action: Action, request: LoadPairs | LoadRecords, *, timeout: float = 3_600.0) -> int:
        """Apply the parts of a load at the owner in one step, once; return the number of rows."""
        rows: int = self._channel.ask(action, request, timeout=timeout, attempt_seconds=timeout)
        return rows

    def drop_load(self, load: int) -> None:
        """Discard the parts that a load has sent; do nothing if it has ended."""
        self._channel.call("load.drop", m.OfLoad(load))

    def kv_version(self, db: int | str, snapshot: int | str) -> KvVersion:
        """Return a snapshot of a key-value database: where its tables are."""
        return self._channel.call("kv.version", m.OfSnapshot(db, snapshot))

    def publish_tables(
        self, load: int, database: str, ids: Iterable[int], *, create: bool = False, timeout: float = 3_600.0
    ) -> int:
        """Publish a load's tables in a key-value database, atomically and once; return the number of rows (`lsm/bulk.py`)."""
        request = m.PublishTables(load, database, tuple(ids), create)
        return self._channel.call("kv.load.publish", request, timeout=timeout, attempt_seconds=timeout)

    def drop_tables(self, load: int) -> None:
        """Discard a load into a key-value database; do nothing if it has ended."""
        self._channel.call("kv.load.drop", m.OfLoad(load))

    def table(
        self,
        table: str,
        *,
        prefix: Iterable[Any] = (),
        start: Iterable[Any] | None = None,
        stop: Iterable[Any] | None = None,
        columns: Iterable[str] | None = None,
        limit: int = 0,
    ) -> pa.Table:
        """Return the rows of `scan` as one Arrow table."""
        wanted = None if columns is None else list(columns)
        batches = list(self.scan(table, prefix=prefix, start=start, stop=stop, columns=wanted, limit=limit))
        if batches:
            return pa.Table.from_batches(batches)
        whole = schema(table_named(table))
        return (whole if wanted is None else pa.schema([whole.field(name) for name in wanted])).empty_table()


def version_text(at: int | str | Epoch | datetime | None) -> int | str | None:
    """Return a version in the form that the owner resolves: a snapshot's id or name, an epoch (3:4711) or a time.

    >>> version_text(Epoch(4711, 3)), version_text("monday")
    ('3:4711', 'monday')
    """
    return at.isoformat() if isinstance(at, datetime) else str(at) if isinstance(at, Epoch) else at


def _connect_again(uri: str, token_file: str, tls_ca_file: str, call_seconds: float) -> Client:
    return Client(Channel(uri, token_file=token_file, tls_ca_file=tls_ca_file, call_seconds=call_seconds))
