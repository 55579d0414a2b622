"""What the owner does for each action: a function per name, from a request to its answer.

Rules
  1. A handler delegates to the store; what takes effect does so once per key (`idempotency.py`).
  2. Nothing here waits for a client, and waiting for others (long polls) ends when the server stops.

The rest of the actions are in `handlers_jobs.py` (workers and readers), `handlers_streams.py` and `commands.py`.

Threads: any; one call is one thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import msgspec

from quire.core.errors import AccessDenied, InvalidInput, QuireError, TimedOut, UnknownDatabase
from quire.core.json_values import plain
from quire.core.reader_info import ReaderInfo
from quire.core.tracing import continued
from quire.manifest import feed
from quire.manifest import tables as t
from quire.manifest.change import ChangePage
from quire.manifest.guard import ManifestGuard
from quire.manifest.leases import leases_of
from quire.manifest.ops.cursors import DropCursor, RegisterCursor
from quire.manifest.ops.databases import DropDb, RegisterDb, RenameDb
from quire.manifest.ops.registry import AnyOp
from quire.manifest.ops.snapshots import DropSnapshot, ForkDb, PublishSnapshot
from quire.manifest.records import DbKind
from quire.manifest.snapshots import SnapshotInfo
from quire.pages.anchors import lend
from quire.pages.view import SnapshotView
from quire.service import messages as m
from quire.service.api import Asked, StoreApi
from quire.service.commands import CommandHandlers
from quire.service.handlers_jobs import JobHandlers
from quire.service.handlers_streams import StreamHandlers
from quire.service.idempotency import once
from quire.service.kv_loads import KvLoads
from quire.service.loads import Loads
from quire.service.tables import cuts
from quire.service.values import DatabaseInfo, Hello, NamespacePlace
from quire.service.wire import WIRE_VERSION, form_of

WAIT_PIECE_SECONDS = 0.25
"""A long poll looks this often whether the server stops or its client has left; a commit wakes it at once."""

SUBMIT_SECONDS_MAX = 60.0

READER_SECONDS_MAX = 3_600.0
"""What who may only read may hold what would be deleted: longer ones are for who could make a snapshot."""

_DECODE_OPS = msgspec.msgpack.Decoder(tuple[AnyOp, ...]).decode


class Handlers:
    """The actions of one store."""

    def __init__(self, store: StoreApi, figures: Callable[[], dict[str, Any]]) -> None:
        self._store = store
        self._figures = figures
        self._manifest = store.manifest
        self._jobs = JobHandlers(store)
        self._streams = StreamHandlers(store)
        self._commands = CommandHandlers(store)
        self._loads = Loads(store)
        self._kv_loads = KvLoads(store)

    def of(self, name: str) -> Callable[[Any, Asked], Any]:
        """The handler of an action."""
        method = "do_" + name.replace(".", "_")
        whose = next(each for each in (self, self._streams, self._jobs, self._commands) if hasattr(each, method))
        handler: Callable[[Any, Asked], Any] = getattr(whose, method)
        return handler

    def close(self) -> None:
        """Nothing more is begun."""
        self._jobs.close()

    # ── the whole ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def do_hello(self, _: m.Nothing, asked: Asked) -> Hello:
        settings = self._store.settings.service
        with self._manifest.read() as txn:
            prefixes = txn.object_prefixes()
            named = [(key[0], row) for key, row in txn.scan(t.REMOTE_NAMESPACE) if row.name]
            places = [NamespacePlace(row.name, row.url, txn.object_prefixes(number)) for number, row in named]
        return Hello(
            WIRE_VERSION,
            version("quire"),
            self._manifest.feed.store_id(),
            self._store.path,
            os.getpid(),
            asked.role,
            settings.body_bytes_max,
            settings.wait_seconds_max,
            self._store.objects_url,
            prefixes,
            tuple(places),
        )

    def do_info(self, _: m.Nothing, __: Asked) -> Any:
        return self._store.info()

    def do_figures(self, _: m.Nothing, __: Asked) -> dict[str, Any]:
        stats = self._manifest.writer.stats
        written = {name: getattr(stats, name) for name in ("commits", "batches", "failed", "ops", "rows", "seconds")}
        lag = {str(name): behind for name, behind in self._manifest.feed.lag().items()}
        pages = plain(self._store.pages.figures())
        followed = plain(self._store.followers.files())
        return {**self._figures(), "manifest": written, "feed_lag": lag, "pages": pages, "followed": followed}

    # ── databases ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def do_databases(self, _: m.Nothing, __: Asked) -> Any:
        return self._store.databases()

    def do_database(self, request: m.OfDatabase, _: Asked) -> Any:
        return self._store.database(request.name)

    def do_readers(self, request: m.OfDatabase, _: Asked) -> list[ReaderInfo]:
        info = self._store.database(request.name)
        return [lease.info for lease in self._store.pages.readers(info.db_id)] if info.kind is DbKind.PAGES else []

    def do_create(self, request: m.Create, asked: Asked) -> Any:
        def do() -> Any:
            return self._store.create(request.name, request.kind, tags=request.tags, namespace=request.namespace)

        return once(self._manifest, asked.key, "create", (RegisterDb,), _db_id, do, self._by_id)

    def do_rename(self, request: m.Rename, asked: Asked) -> Any:
        def do() -> Any:
            return self._store.rename(request.old, request.new)

        return once(self._manifest, asked.key, "rename", (RenameDb,), _db_id, do, self._by_id)

    def do_fork(self, request: m.Fork, asked: Asked) -> Any:
        def do() -> Any:
            return self._store.fork(
                request.name, request.new_name, at=request.at, tags=request.tags, compression=request.compression
            )

        return once(self._manifest, asked.key, "fork", (ForkDb,), _db_id, do, self._by_id)

    def do_status(self, request: m.SetStatus, _: Asked) -> Any:
        return self._store.set_status(request.name, request.status)

    def do_options(self, request: m.SetOptions, _: Asked) -> Any:
        return self._store.set_options(request.name, tags=request.tags, compression=request.compression)

    def do_drop(self, request: m.Drop, asked: Asked) -> Any:
        found: list[Any] = []

        def do() -> Any:
            found.append(self._store.database(request.name))
            return self._store.drop(request.name, snapshots=request.snapshots)

        return once(self._manifest, asked.key, "drop", (DropDb,), lambda _: found[-1], do, _database)

    def _by_id(self, db_id: int) -> Any:
        found = next((each for each in self._store.databases() if each.db_id == db_id), None)
        if found is None:
            raise UnknownDatabase("the call was done, and its database has been dropped since", db_id=db_id)
        return found

    # ── versions ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def do_snapshot_create(self, request: m.MakeSnapshot, asked: Asked) -> SnapshotInfo:
        def do() -> SnapshotInfo:
            return self._store.snapshot(request.name, request.snapshot, tags=request.tags)

        def again(told: tuple[int, int]) -> SnapshotInfo:
            return self._manifest.snapshots.get(*told)

        def tell(op: PublishSnapshot) -> tuple[int, int]:
            return op.db_id, op.snapshot_id

        return once(self._manifest, asked.key, "snapshot.create", (PublishSnapshot,), tell, do, again)

    def do_snapshot_drop(self, request: m.OfSnapshot, asked: Asked) -> SnapshotInfo:
        found: list[SnapshotInfo] = []

        def do() -> SnapshotInfo:
            found.append(self._manifest.snapshots.get(request.db, request.snapshot))
            return self._manifest.snapshots.drop(request.db, request.snapshot)

        def again(told: Any) -> SnapshotInfo:
            return msgspec.convert(told, SnapshotInfo)

        return once(self._manifest, asked.key, "snapshot.drop", (DropSnapshot,), lambda _: found[-1], do, again)

    def do_snapshot_list(self, request: m.Snapshots, _: Asked) -> list[SnapshotInfo]:
        return self._manifest.snapshots.of(request.db)

    def do_snapshot_get(self, request: m.OfSnapshot, _: Asked) -> SnapshotInfo:
        return self._manifest.snapshots.get(request.db, request.snapshot)

    def do_snapshot_view(self, request: m.OfView, asked: Asked) -> SnapshotView:
        if request.upload and asked.role != m.Access.ADMIN.value:
            raise AccessDenied("to upload needs the admin token", hint="ask for the view without upload")
        return self._store.pages.view(request.db, request.snapshot, upload=request.upload)

    def do_lease_open(self, request: m.Lend, asked: Asked) -> m.LentViews:
        self._check_lending(request.seconds, asked, upload=request.upload)
        lease_id, views = lend(
            self._store.pages, request.databases, request.seconds, lease_id=request.lease_id, upload=request.upload
        )
        return m.LentViews(lease_id, views)

    def do_lease_open_kv(self, request: m.LendKv, asked: Asked) -> m.LentKv:
        self._check_lending(request.seconds, asked)
        return m.LentKv(*self._store.kvs.lend(request.db, request.seconds))

    def _check_lending(self, seconds: float, asked: Asked, *, upload: bool = False) -> None:
        if asked.role == m.Access.ADMIN.value:
            return
        if upload:
            raise AccessDenied("to upload needs the admin token", hint="ask for the versions without upload")
        if seconds > READER_SECONDS_MAX:
            raise AccessDenied("to lend a version for more than an hour needs the admin token", seconds=seconds)

    def do_lease_renew(self, request: m.OfLease, _: Asked) -> None:
        leases_of(self._manifest).renew(request.lease_id)

    def do_lease_release(self, request: m.OfLease, _: Asked) -> None:
        leases_of(self._manifest).release(request.lease_id)

    # ── tables, and rows into SQLite ──────────────────────────────────────────────────────────────────────────────────
    def do_table_cuts(self, request: m.TableCuts, _: Asked) -> list[tuple[Any, ...]]:
        return cuts(self._manifest, request)

    def do_load_put(self, request: m.PutPart, _: Asked) -> None:
        self._loads.put(request)

    def do_load_rows(self, request: m.LoadRows, _: Asked) -> int:
        return self._loads.insert(request)

    def do_load_drop(self, request: m.OfLoad, _: Asked) -> None:
        self._loads.drop(request.load)

    # ── key-value databases ───────────────────────────────────────────────────────────────────────────────────────────
    def do_kv_version(self, request: m.OfSnapshot, _: Asked) -> Any:
        return self._store.kvs.version(request.db, request.snapshot)

    def do_kv_load_ids(self, request: m.TakeIds, _: Asked) -> m.Shelf:
        return self._kv_loads.take(request)

    def do_kv_load_publish(self, request: m.PublishTables, _: Asked) -> int:
        return self._kv_loads.publish(request)

    def do_kv_load_drop(self, request: m.OfLoad, _: Asked) -> None:
        self._kv_loads.drop(request.load)

    # ── operations ────────────────────────────────────────────────────────────────────────────────────────────────────
    def do_submit(self, request: m.Submit, _: Asked) -> list[m.Outcome]:
        seconds = min(max(request.queue_seconds, 0.0), SUBMIT_SECONDS_MAX)
        pending = [self._submit(batch, seconds) for batch in request.batches]
        return [each if isinstance(each, m.Outcome) else _outcome(each) for each in pending]

    def _submit(self, batch: m.Batch, seconds: float) -> ManifestGuard | m.Outcome:
        try:
            ops = _DECODE_OPS(batch.ops)
            with continued(batch.trace):
                return self._manifest.submit(ops, key=batch.key or None, result=batch.result, timeout=seconds)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return m.Outcome(error=form_of(InvalidInput(f"the operations cannot be read: {error}")))
        except QuireError as error:
            return m.Outcome(error=form_of(error))

    def do_reserve(self, request: m.Reserve, _: Asked) -> int:
        if request.what == "generation":
            return self._manifest.reserve_generation(request.db_id)
        reserve = {"db": self._manifest.reserve_db_id, "job": self._manifest.reserve_job_id}.get(request.what)
        if reserve is None:
            raise InvalidInput("no such ids are reserved", hint="one of db, job, generation", ids=request.what)
        return reserve()

    # ── the feed ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def do_feed_store_id(self, _: m.Nothing, __: Asked) -> str:
        return self._manifest.feed.store_id()

    def do_feed_head(self, _: m.Nothing, __: Asked) -> int:
        return self._manifest.feed.head()

    def do_feed_cursors(self, _: m.Nothing, __: Asked) -> list[feed.CursorInfo]:
        return self._manifest.feed.cursors()

    def do_feed_cursor(self, request: m.OfCursor, _: Asked) -> feed.CursorInfo:
        return self._manifest.feed.cursor(request.cursor)

    def do_feed_fetch(self, request: m.Fetch, _: Asked) -> ChangePage:
        databases = list(request.databases) if request.databases is not None else None
        return self._manifest.feed.fetch(
            request.cursor, request.limit, after=request.after, databases=databases, tables=request.tables
        )

    def do_feed_wait(self, request: m.Wait, asked: Asked) -> int:
        """Long poll for the next change; it ends when the server stops (rule 2)."""
        clock = self._manifest.clock
        deadline = clock.monotonic() + min(max(request.seconds, 0.0), self._store.settings.service.wait_seconds_max)
        while True:
            rest = deadline - clock.monotonic()
            try:
                return self._manifest.feed.wait(request.after, max(min(rest, WAIT_PIECE_SECONDS), 0.0))
            except TimedOut:
                if rest <= WAIT_PIECE_SECONDS or asked.is_over():
                    return self._manifest.feed.head()

    def do_feed_register(self, request: m.Register, asked: Asked) -> feed.CursorInfo:
        start: feed.Start | int
        if isinstance(request.start, str):
            if request.start not in ("oldest", "latest"):
                raise InvalidInput("a cursor starts at `oldest`, `latest` or a sequence", start=request.start)
            start = feed.Start(request.start)
        else:
            start = request.start

        def do() -> feed.CursorInfo:
            return self._manifest.feed.register(
                start, name=request.name, ttl_seconds=request.ttl_seconds, max_lag=request.max_lag
            )

        def tell(op: RegisterCursor) -> int:
            return op.cursor_id

        return once(self._manifest, asked.key, "feed.register", (RegisterCursor,), tell, do, self._manifest.feed.cursor)

    def do_feed_acknowledge(self, request: m.Acknowledge, _: Asked) -> None:
        self._manifest.feed.acknowledge(request.cursor, request.upto)

    def do_feed_resume(self, request: m.OfCursor, _: Asked) -> feed.CursorInfo:
        return self._manifest.feed.resume(request.cursor)

    def do_feed_drop(self, request: m.OfCursor, asked: Asked) -> None:
        def do() -> None:
            self._manifest.feed.drop(request.cursor)

        once(self._manifest, asked.key, "feed.drop", (DropCursor,), _nothing, do, _nothing)


# ── what is kept with keys ────────────────────────────────────────────────────────────────────────────────────────────
def _db_id(op: RegisterDb | RenameDb | ForkDb) -> int:
    return op.db_id


def _nothing(_: Any) -> None:
    return None


def _database(told: Any) -> DatabaseInfo:
    return msgspec.convert(told, DatabaseInfo)


def _outcome(guard: ManifestGuard) -> m.Outcome:
    try:
        return m.Outcome(receipt=guard.result(SUBMIT_SECONDS_MAX))
    except QuireError as error:
        return m.Outcome(error=form_of(error))
