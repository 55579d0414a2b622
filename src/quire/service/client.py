"""`quire.connect`: a store that another process owns, by the API of a local one as far as that makes sense over a wire.

    with quire.connect("grpc+unix:///data/quire.sock") as store:
        store.create("shop", "pages")
        store.feed.register(name="my-app")
        table = store.table("db", columns=["db_id", "name"])

Rules
  1. Whatever a call changes, it changes once, however often the answer is lost on the way (`channel.py`, `idempotency.py`).
  2. Tables are read in batches, each of its own moment (M4): rows committed meanwhile are seen if their keys lie ahead.
  3. A client pickles as its address and the *names* of its token and certificate files: what it is allowed stays in files.

Threads: any. Raises what the store raises, and `Unavailable`, `TimedOut`, `AccessDenied`, `Incompatible`, `Overloaded`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self, Unpack
from weakref import WeakSet

import pyarrow as pa

from quire.core.errors import InvalidInput, NameTaken, TimedOut, UnknownDatabase
from quire.core.ids import Epoch
from quire.core.reader_info import ReaderInfo
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
from quire.service.remote_sqlite import RemoteDriver, version_of
from quire.service.remote_stream import RemoteStream
from quire.service.sockets import SCHEME, where_owner_listens
from quire.service.sql_actions import OpenSql
from quire.service.tickets import Action, LoadPairs, LoadRecords, LogMode
from quire.service.values import DatabaseFilter, DatabaseFilterOptions, DatabaseInfo, DroppedDatabase, Hello, StoreInfo
from quire.sqlite.pep249.connection import LEGACY_TRANSACTION_CONTROL, Connection

if TYPE_CHECKING:
    from quire.sqlite.connect import At

JOB_POLL_SECONDS = 0.05
COMMAND_SECONDS = 7 * 24 * 3_600.0
_ENDED = (JobState.SUCCEEDED, JobState.FAILED_PERMANENT, JobState.CANCELLED)

TOKEN_VARIABLE = "QUIRE_TOKEN_FILE"


def connect(
    uri: str | os.PathLike[str], *, token_file: str = "", tls_ca_file: str = "", timeout: float = CALL_SECONDS
) -> Client:
    """Connect to the owner of a store by its directory, by `http://HOST:PORT` or `https://HOST:PORT` (`quire serve --http`), by
    `grpc://HOST:PORT` or `grpc+tls://HOST:PORT` (`--listen`), or by `grpc+unix:///PATH`.

    `token_file` (else the environment's QUIRE_TOKEN_FILE) holds the token that an owner on the network asks for; `tls_ca_file`
    the certificate that its own is signed with. `timeout` is for each call, with all its retries.
    """
    address = os.fspath(uri)
    if "://" not in address:
        root = os.path.abspath(address)
        path = where_owner_listens(OsDisk(), root)
        if not path:
            raise InvalidInput("no owner listens for this store", hint="run `quire serve` there", path=root)
        address = SCHEME + path
    over_network = not address.startswith(SCHEME)
    token = token_file or (os.environ.get(TOKEN_VARIABLE, "") if over_network else "")
    return Client(Channel(address, token_file=token, tls_ca_file=tls_ca_file, call_seconds=timeout))


class Client:
    """A store at the other end of a wire. Made by `quire.connect`; use it as a context manager."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pipeline = Pipeline(channel)
        self.feed = RemoteFeed(channel)
        """Everything that was committed, in order, for subscribers."""
        self.jobs = RemoteJobs(channel)
        """Work that survives crashes."""
        self._renewing = LeaseRenewal(channel)
        self._streams = WeakSet[RemoteStream]()
        try:
            self.server: Hello = channel.call("hello", m.Nothing())
            """Who answered when we connected."""
        except BaseException:
            channel.close()
            raise

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────────────
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
        """Where the objects are, as the owner says it."""
        return self.server.objects_url

    @property
    def object_prefixes(self) -> tuple[str, ...]:
        """Below which prefixes there, the current owner epoch's first."""
        return self.server.object_prefixes

    def close(self) -> None:
        """Send what is queued, and hang up. A second time: nothing."""
        for stream in list(self._streams):
            stream.close()
        self._renewing.close()
        self._pipeline.close()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        channel = self._channel
        return _connect_again, (channel.uri, channel.token_file, channel.tls_ca_file, channel.call_seconds)

    # ── databases ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def create(
        self, name: str, kind: DbKind | str, *, tags: dict[str, str] | None = None, namespace: str = ""
    ) -> DatabaseInfo:
        """A new database of kind "pages", "stream" or "lsm"; `tags` are remembered with it."""
        kind_name = kind.name.lower() if isinstance(kind, DbKind) else kind
        return self._channel.call("create", m.Create(name, kind_name, tags or {}, namespace))

    def drop(self, name: str, *, snapshots: bool = False, undoable: bool = False) -> DatabaseInfo:
        """Drop a database, as it was; one that has snapshots only together with them, if `snapshots` says so.

        With `undoable` it keeps its space, and `undrop` brings it back, for a day (`maintenance.undrop_seconds`).
        """
        return self._channel.call("drop", m.Drop(name, snapshots, undoable))

    def undrop(self, name: str | int, *, new_name: str = "") -> DatabaseInfo:
        """Bring a database back that was dropped: the last one of this name, or by its id."""
        return self._channel.call("undrop", m.Undrop(name, new_name))

    def purge(self, name: str | int) -> DroppedDatabase:
        """End a dropped database that could be brought back; as it was."""
        return self._channel.call("purge", m.OfDropped(name))

    def dropped(self) -> list[DroppedDatabase]:
        """The dropped databases that can be brought back, the last one first."""
        return self._channel.call("dropped", m.Nothing())

    def rename(self, old: str, new: str) -> DatabaseInfo:
        """Give a database another name; the database under its new one."""
        return self._channel.call("rename", m.Rename(old, new))

    def databases(self, **wanted: Unpack[DatabaseFilterOptions]) -> list[DatabaseInfo]:
        """The live databases, by name; see `Store.databases`."""
        return self._channel.call("databases", DatabaseFilter(**wanted))

    def database(self, name: str) -> DatabaseInfo:
        """A database by name."""
        return self._channel.call("database", m.OfDatabase(name))

    def readers(self, name: str) -> list[ReaderInfo]:
        """Who reads a page database: in the owner's own process, and in others."""
        return self._channel.call("readers", m.OfDatabase(name))

    # ── streams, keys and values ──────────────────────────────────────────────────────────────────────────────────────
    def stream(self, name: str, *, create: bool = False) -> RemoteStream:
        """A stream; with `create=True` it is made if there is none. Its API is that of `store.stream(name)`."""
        self._open(name, "stream.marks", DbKind.STREAM, create)
        stream = RemoteStream(self._channel, name, self.server.body_bytes_max)
        self._streams.add(stream)
        return stream

    def kv(self, name: str, *, create: bool = False) -> RemoteKv:
        """A key-value set; with `create=True` it is made if there is none. Its API is that of `store.kv(name)`."""
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
        """A connection of PEP 249 to a page database: its newest version, or for reading the one `at` a snapshot, lsn or time.

        It is of the class that `quire.sqlite.dbapi.connect` returns in the owner's process. With `create=True` the database is
        made if there is none. `timeout` is how long a statement waits for the lock, in seconds.
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
        """What is below such a connection; `close` is called with it."""
        request = OpenSql(name, version_of(at), create, timeout, read_only, functions)
        return RemoteDriver(self._channel, self._renewing, request, close)

    def _open(self, name: str, action: str, kind: DbKind, create: bool) -> None:
        """Raise if there is no such database, or one of another kind; make it if that is wanted."""
        try:
            self._channel.call(action, OfName(name))
        except UnknownDatabase:
            if not create:
                raise
            with suppress(NameTaken):  # somebody was quicker
                self.create(name, kind)
            self._channel.call(action, OfName(name))

    # ── versions ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def snapshot(self, name: str, snapshot: str = "", *, tags: dict[str, str] | None = None) -> SnapshotInfo:
        """Keep a database as it is now, under a name or without one."""
        return self._channel.call("snapshot.create", m.MakeSnapshot(name, snapshot, tags or {}))

    def snapshots(self, db: int | str) -> list[SnapshotInfo]:
        """The snapshots of a database, oldest first."""
        return self._channel.call("snapshot.list", m.ListSnapshots(db))

    def get_snapshot(self, db: int | str, snapshot: int | str) -> SnapshotInfo:
        """A snapshot by id or by name."""
        return self._channel.call("snapshot.get", m.OfSnapshot(db, snapshot))

    def drop_snapshot(self, db: int | str, snapshot: int | str, *, undoable: bool = False) -> SnapshotInfo:
        """Let a snapshot go, and have what only it held deleted; the snapshot as it was.

        With `undoable` it holds that for a day (`maintenance.undrop_seconds`), and `undrop_snapshot` brings it back.
        """
        return self._channel.call("snapshot.drop", m.DropOneSnapshot(db, snapshot, undoable))

    def undrop_snapshot(self, db: int | str, snapshot: int | str, *, new_name: str = "") -> SnapshotInfo:
        """Bring a snapshot back that was dropped with `undoable`: the last one of this name, or by its id."""
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
        """A new database that begins as another one is now, or was `at` a snapshot (its id or name), an epoch or a time
        ("2 hours ago"); they share what neither has changed."""
        return self._channel.call("fork", m.Fork(name, new_name, version_text(at), tags or {}, compression))

    def rollback(self, name: str, *, to: At, timeout: float = 600.0) -> RolledBack:
        """Undo everything since a snapshot, an lsn, an epoch or a time: a page database becomes what it was, as a new version.

        What it was before is kept as the snapshot that the result names; rolling back to that one undoes it.
        """
        text = str(Epoch(to, 0)) if isinstance(to, int) else str(version_text(to))
        return self._channel.call("rollback", m.Rollback(name, text), timeout=timeout, attempt_seconds=timeout)

    def set_status(self, name: str, status: str) -> DatabaseInfo:
        """Make a database "read_only", so that every write is refused, or "active" again."""
        return self._channel.call("status", m.SetStatus(name, status))

    def set_options(self, name: str, *, tags: dict[str, str] | None = None, compression: str = "") -> DatabaseInfo:
        """Replace the tags of a database, or have its chunks compressed otherwise (none or zstd) from now on."""
        return self._channel.call("options", m.SetOptions(name, tags, compression))

    def view(self, db: int | str, snapshot: int | str, *, upload: bool = False, timeout: float = 600.0) -> SnapshotView:
        """A snapshot as a value that is read without the owner (P16); `upload` for readers that share no disk with it."""
        request = m.OfView(db, snapshot, upload)
        return self._channel.call("snapshot.view", request, timeout=timeout, attempt_seconds=timeout)

    def views(self, databases: Sequence[int | str], snapshot: int | str) -> list[SnapshotView | None]:
        """The same of several databases, without uploading; `None` for one that has no such snapshot."""
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
        """The newest versions of page databases, to be read without the owner (P16). What they need is not deleted until
        `seconds` after the lease was last renewed. With `lease_id` they become part of that lease. A `holder` can ask for them
        again, by the names of the databases; with `keep` so can whoever knows the lease (`OfLentRange`). With `keep` and a
        `snapshot` they are the versions of the snapshots of this name or id, of the databases that have one."""
        request = m.Lend(tuple(databases), float(seconds), lease_id, upload, holder, keep, snapshot)
        return self._channel.call("lease.open", request, timeout=timeout, attempt_seconds=timeout)

    def lend_kv(self, db: int | str, seconds: float, *, lease_id: int = 0) -> m.LentKv:
        """The same of a key-value set."""
        return self._channel.call("lease.open_kv", m.LendKv(db, float(seconds), lease_id))

    def held(self, holder: str) -> list[HeldVersion]:
        """The versions that a holder has, the oldest first."""
        return self._channel.call("lease.held", m.OfHolder(holder))

    def mark_dropped(self, holder: str, dropped: Sequence[tuple[int, str]], seconds: float) -> int:
        """Keep for a holder that databases, (id, name), are not there any more; the id of the lease."""
        return self._channel.call("lease.mark_dropped", m.MarkDropped(holder, tuple(dropped), float(seconds)))

    def held_views(self, versions: Sequence[tuple[int, int]]) -> list[SnapshotView]:
        """Versions of a holder, given as (lease, database)."""
        return self._channel.call("lease.views", m.OfHeldVersions(tuple(versions)))

    def let_go(self, versions: Sequence[tuple[int, int]]) -> None:
        """A holder does not come back for these versions, (lease, database)."""
        self._channel.call("lease.let_go", m.OfHeldVersions(tuple(versions)))

    def newest_lsns(self, databases: Sequence[str]) -> list[int]:
        """How far page databases have been written."""
        return self._channel.call("lease.newest", m.NewestLsns(tuple(databases)))

    def renew_lease(self, lease_id: int) -> None:
        """Somebody still reads what was lent. `LeaseExpired` if it is no longer kept."""
        self._channel.call("lease.renew", m.OfLease(lease_id))

    def release_lease(self, lease_id: int) -> None:
        """Nobody reads it any more; a lease that has ended is fine."""
        self._channel.call("lease.release", m.OfLease(lease_id))

    def reader(
        self, db: int | str, *, tags: dict[str, str] | None = None, ttl_seconds: float = LEASE_SECONDS
    ) -> RemotePageReader:
        """A lease on the newest durable version of a page database, renewed until it is closed; pages are read through it."""
        lease: RemoteReader = self._channel.call("reader.open", m.OpenReader(db, tags or {}, ttl_seconds))
        return RemotePageReader(self._channel, lease)

    # ── work ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    def checkpoint(self, name: str, *, wait: bool = True, timeout: float = 3_600.0) -> Job:
        """Bring what is in a database's WAL into chunks, at the owner; the job, as it ended (or as it began).

        As with a local store, a job that was put off or whose attempt failed is pending: the owner's upkeep goes on with it.
        """
        return self._start(name, JobKind.CHECKPOINT, wait, timeout)

    def merge(self, name: str, *, wait: bool = True, timeout: float = 3_600.0) -> Job:
        """Rewrite slots of a database that consist of several chunks, at the owner; the job, as it ended (or as it began)."""
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
                raise TimedOut("the job has not ended in time", hint=hint, job_id=job.job_id, seconds=timeout)
            time.sleep(pause)
            pause = min(pause * 1.5, 1.0)

    def manifest_log_mode(self, mode: str = "") -> str:
        """How much the owner believes the manifest logs of its streams; with `mode` (off, shadow, on) that is changed first."""
        return self._channel.call("stream.log_mode", LogMode(mode))

    def submit(
        self, ops: Iterable[Op], *, key: bytes | None = None, result: bytes = b"", timeout: float | None = None
    ) -> RemoteGuard:
        """Queue a batch of operations for the owner's manifest; the guard resolves when it is durable there.

        Ids in the operations come from `reserve_db_id` and its kin: the owner hands them out.
        """
        return self._pipeline.submit(ops, key=key, result=result, timeout=timeout)

    def reserve_db_id(self) -> int:
        """A database id that will never be given again."""
        return self._reserve("db")

    def reserve_job_id(self) -> int:
        """A job id that will never be given again."""
        return self._reserve("job")

    def reserve_generation(self, db_id: int) -> int:
        """A generation of the database that will never be given again."""
        return self._reserve("generation", db_id)

    def _reserve(self, what: str, db_id: int = 0) -> int:
        return self._channel.call("reserve", m.Reserve(what, db_id))

    def run_command(self, command: RemoteCommand) -> CommandResult:
        """Have a command of the command line done at the owner (`commands.py`); it may take as long as it takes."""
        return self._channel.call("command", command, timeout=COMMAND_SECONDS, attempt_seconds=COMMAND_SECONDS)

    # ── looking ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def info(self) -> StoreInfo:
        """The store in numbers."""
        return self._channel.call("info", m.Nothing())

    def figures(self) -> dict[str, Any]:
        """What the owner counts: its service, its manifest's writer, its feed's subscribers, its page engine."""
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
        """Rows of a manifest table as Arrow batches (rule 2): those whose keys begin with `prefix`, lie in [start, stop)."""
        ticket = m.TableTicket(
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
        """Keys that cut a table, or a window of it, into at most `parts` parts; none if it has few rows."""
        ends = [None if key is None else tuple(key) for key in (start, stop)]
        return self._channel.call("table.cuts", m.TableCuts(table, parts, tuple(prefix), *ends))

    # ── rows into SQLite ──────────────────────────────────────────────────────────────────────────────────────────────
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
        """Write the parts of a load to a table, in one transaction, once; how many rows (`sqlite/bulk_insert.py`).

        `how`: `overwrite`, `create` and the other fields of `LoadRows`.
        """
        request = m.LoadRows(load, database, table, tuple(parts), tuple(columns), **how)
        return self._channel.call("load.rows", request, timeout=timeout, attempt_seconds=timeout)

    def take_parts(self, action: Action, request: LoadPairs | LoadRecords, *, timeout: float = 3_600.0) -> int:
        """Have the owner take the parts of a load in one step, once; how many rows."""
        rows: int = self._channel.ask(action, request, timeout=timeout, attempt_seconds=timeout)
        return rows

    def drop_load(self, load: int) -> None:
        """Forget what a load has sent; nothing, if it is gone."""
        self._channel.call("load.drop", m.OfLoad(load))

    def kv_version(self, db: int | str, snapshot: int | str) -> KvVersion:
        """A snapshot of a key-value database: where its tables are."""
        return self._channel.call("kv.version", m.OfSnapshot(db, snapshot))

    def publish_tables(
        self, load: int, database: str, ids: Iterable[int], *, create: bool = False, timeout: float = 3_600.0
    ) -> int:
        """Have the tables of a load in a key-value database, all at once, once; how many rows (`lsm/bulk.py`)."""
        request = m.PublishTables(load, database, tuple(ids), create)
        return self._channel.call("kv.load.publish", request, timeout=timeout, attempt_seconds=timeout)

    def drop_tables(self, load: int) -> None:
        """Forget a load into a key-value database; nothing, if it is over."""
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
        """The same as one Arrow table."""
        wanted = None if columns is None else list(columns)
        batches = list(self.scan(table, prefix=prefix, start=start, stop=stop, columns=wanted, limit=limit))
        if batches:
            return pa.Table.from_batches(batches)
        whole = schema(table_named(table))
        return (whole if wanted is None else pa.schema([whole.field(name) for name in wanted])).empty_table()


def version_text(at: int | str | Epoch | datetime | None) -> int | str | None:
    """A version, to be found at the owner: a snapshot's id or name, an epoch (3:4711) or a time.

    >>> version_text(Epoch(4711, 3)), version_text("monday")
    ('3:4711', 'monday')
    """
    return at.isoformat() if isinstance(at, datetime) else str(at) if isinstance(at, Epoch) else at


def _connect_again(uri: str, token_file: str, tls_ca_file: str, call_seconds: float) -> Client:
    return Client(Channel(uri, token_file=token_file, tls_ca_file=tls_ca_file, call_seconds=call_seconds))
