"""Handlers for the actions: one method per name, from a request to its answer.

A handler delegates to the store; an effect happens once per key (`idempotency.py`). No handler waits for a client, and a long
poll ends when the server stops or its client has left. Actions of workers and readers are in `handlers_jobs.py`, commands in
`commands.py`.

Threads: any; one call is one thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from typing import Any

import msgspec

from quire.core.decoding import UNDECODABLE
from quire.core.errors import (
    AccessDenied,
    InvalidInput,
    QuireError,
    StoreClosed,
    StoreUnusable,
    TimedOut,
    UnknownDatabase,
    UnknownSnapshot,
)
from quire.core.json_values import plain
from quire.core.reader_info import ReaderInfo
from quire.core.tracing import attached_trace
from quire.manifest import feed
from quire.manifest import tables as t
from quire.manifest.change import ChangePage
from quire.manifest.guard import ManifestGuard
from quire.manifest.leases import HeldVersion
from quire.manifest.ops.cursors import DropCursor, RegisterCursor
from quire.manifest.ops.databases import DropDb, RecordRollback, RegisterDb, RenameDb, SoftDropDb, UndropDb
from quire.manifest.ops.registry import AnyOp
from quire.manifest.ops.snapshots import DropSnapshot, ForkDb, PublishSnapshot, SoftDropSnapshot, UndropSnapshot
from quire.manifest.records import DbKind
from quire.manifest.snapshots import RolledBack, SnapshotInfo
from quire.pages.held_versions import held_range, held_view, lend_snapshots, lend_to, mark_dropped, newest_lsns
from quire.pages.view import SnapshotView
from quire.service import messages as m
from quire.service import tickets
from quire.service.api import CallContext, StoreApi
from quire.service.client_holdings import Holdings
from quire.service.commands import CommandHandlers
from quire.service.handlers_data import DataHandlers
from quire.service.handlers_jobs import JobHandlers
from quire.service.handlers_sql import SqlHandlers
from quire.service.idempotency import run_once
from quire.service.loads import KvLoads, Loads
from quire.service.tables import cuts
from quire.service.tickets import OfLease, OfLentRange, PutPart, TableDestination, TakeIds
from quire.service.values import DatabaseFilter, DatabaseInfo, DroppedDatabase, Hello, NamespacePlace
from quire.service.wire import WIRE_VERSION, form_of
from quire.stream.gaps import begin_at, begin_within
from quire.stream.poll import poll_streams
from quire.stream.remote_read import PolledStream, SharedStream, share

WAIT_PIECE_SECONDS = 0.25
"""How often a long poll checks whether the server stops or its client has left; a commit wakes it at once."""

SUBMIT_SECONDS_MAX = 60.0

READER_SECONDS_MAX = 3_600.0
"""The longest lease of a caller that may only read: it keeps data from deletion. Longer ones need the admin token."""

_DECODE_OPS = msgspec.msgpack.Decoder(tuple[AnyOp, ...]).decode


class Handlers:
    """Handlers for the actions of one store."""

    def __init__(self, store: StoreApi, figures: Callable[[], dict[str, Any]], holdings: Holdings) -> None:
        self._store = store
        self._figures = figures
        self._manifest = store.manifest
        self._jobs = JobHandlers(store)
        self._commands = CommandHandlers(store)
        self._data = DataHandlers(store, holdings)
        self._sql = SqlHandlers(store, holdings)
        self._loads = Loads(store)
        self._kv_loads = KvLoads(store)

    def of(self, name: str) -> Callable[[Any, CallContext], Any]:
        """Return the handler of an action."""
        method = "do_" + name.replace(".", "_")
        whose = next(
            handlers
            for handlers in (self, self._data, self._sql, self._jobs, self._commands)
            if hasattr(handlers, method)
        )
        handler: Callable[[Any, CallContext], Any] = getattr(whose, method)
        return handler

    def close(self) -> None:
        """Start no more jobs."""
        self._jobs.close()

    # ── the store ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def do_hello(self, _: m.Nothing, call: CallContext) -> Hello:
        settings = self._store.settings.service
        common = WIRE_VERSION, version("quire"), self._manifest.feed.store_id()
        limits = settings.body_bytes_max, settings.wait_seconds_max
        if not call.grant.everywhere:  # callers limited to single databases do not learn these locations
            return Hello(*common, "", 0, call.grant.holder, *limits, "")
        with self._manifest.read() as txn:
            prefixes = txn.object_prefixes()
            named = [(key[0], row) for key, row in txn.scan(t.REMOTE_NAMESPACE) if row.name]
            own = self._store.objects_url
            places = [NamespacePlace(row.name, row.url or own, txn.object_prefixes(number)) for number, row in named]
        return Hello(
            *common,
            self._store.path,
            os.getpid(),
            call.grant.holder,
            *limits,
            self._store.objects_url,
            prefixes,
            tuple(places),
            bool(self._store.copy_of),
        )

    def do_info(self, _: m.Nothing, __: CallContext) -> Any:
        return self._store.info()

    def do_figures(self, _: m.Nothing, __: CallContext) -> dict[str, Any]:
        stats = self._manifest.writer.stats
        written = {name: getattr(stats, name) for name in ("commits", "batches", "failed", "ops", "rows", "seconds")}
        lag = {str(name): behind for name, behind in self._manifest.feed.lag().items()}
        pages = plain(self._store.pages.figures())
        followed = plain(self._store.followers.files())
        return {**self._figures(), "manifest": written, "feed_lag": lag, "pages": pages, "followed": followed}

    # ── databases ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def do_databases(self, request: DatabaseFilter, _: CallContext) -> Any:
        return self._store.databases(**msgspec.structs.asdict(request))

    def do_database(self, request: m.OfDatabase, _: CallContext) -> Any:
        return self._store.database(request.name)

    def do_readers(self, request: m.OfDatabase, _: CallContext) -> list[ReaderInfo]:
        info = self._store.database(request.name)
        return [lease.info for lease in self._store.pages.readers(info.db_id)] if info.kind is DbKind.PAGES else []

    def do_create(self, request: m.Create, call: CallContext) -> Any:
        def do() -> Any:
            return self._store.create(request.name, request.kind, tags=request.tags, namespace=request.namespace)

        return run_once(self._manifest, call.key, "create", (RegisterDb,), _db_id, do, self._by_id)

    def do_rename(self, request: m.Rename, call: CallContext) -> Any:
        rename = partial(self._store.rename, request.old, request.new)
        return run_once(self._manifest, call.key, "rename", (RenameDb,), _db_id, rename, self._by_id)

    def do_fork(self, request: m.Fork, call: CallContext) -> Any:
        def do() -> Any:
            return self._store.fork(
                request.name, request.new_name, at=request.at, tags=request.tags, compression=request.compression
            )

        return run_once(self._manifest, call.key, "fork", (ForkDb,), _db_id, do, self._by_id)

    def do_rollback(self, request: m.Rollback, call: CallContext) -> RolledBack:
        def replay(kept: dict[str, Any]) -> RolledBack:
            return RolledBack(database=request.name, **kept)

        do = partial(self._store.rollback, request.name, to=request.to)
        return run_once(self._manifest, call.key, "rollback", (RecordRollback,), msgspec.structs.asdict, do, replay)

    def do_status(self, request: m.SetStatus, _: CallContext) -> Any:
        return self._store.set_status(request.name, request.status)

    def do_options(self, request: m.SetOptions, _: CallContext) -> Any:
        return self._store.set_options(request.name, tags=request.tags, compression=request.compression)

    def do_drop(self, request: m.Drop, call: CallContext) -> Any:
        dropped: list[Any] = []

        def do() -> Any:
            dropped.append(self._store.database(request.name))
            return self._store.drop(request.name, snapshots=request.snapshots, undoable=request.undoable)

        replay = partial(msgspec.convert, type=DatabaseInfo)
        return run_once(self._manifest, call.key, "drop", (DropDb, SoftDropDb), lambda _: dropped[-1], do, replay)

    def do_undrop(self, request: m.Undrop, call: CallContext) -> Any:
        undrop = partial(self._store.undrop, request.name, new_name=request.new_name)
        return run_once(self._manifest, call.key, "undrop", (UndropDb,), _db_id, undrop, self._by_id)

    def do_purge(self, request: m.OfDropped, call: CallContext) -> DroppedDatabase:
        dropped: list[DroppedDatabase] = []

        def do() -> DroppedDatabase:
            db_id = self._manifest.find_dropped(request.name)
            dropped.extend(info for info in self._store.dropped() if info.db_id == db_id)
            return self._store.purge(db_id)

        replay: Callable[[Any], DroppedDatabase] = partial(msgspec.convert, type=DroppedDatabase)
        return run_once(self._manifest, call.key, "purge", (DropDb,), lambda _: dropped[-1], do, replay)

    def do_dropped(self, _: m.Nothing, __: CallContext) -> list[DroppedDatabase]:
        return self._store.dropped()

    def _by_id(self, db_id: int) -> Any:
        try:
            return self._store.database(db_id)
        except UnknownDatabase:
            what = "the call succeeded, but its database has been dropped since"
            raise UnknownDatabase(what, db_id=db_id) from None

    # ── versions ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def do_snapshot_create(self, request: m.MakeSnapshot, call: CallContext) -> SnapshotInfo:
        def ids(op: PublishSnapshot) -> tuple[int, int]:
            return op.db_id, op.snapshot_id

        do = partial(self._store.snapshot, request.name, request.snapshot, tags=request.tags)
        return run_once(
            self._manifest, call.key, "snapshot.create", (PublishSnapshot,), ids, do,
            lambda kept: self._manifest.snapshots.get(*kept),
        )  # fmt: skip

    def do_snapshot_drop(self, request: m.DropOneSnapshot, call: CallContext) -> SnapshotInfo:
        dropped: list[SnapshotInfo] = []

        def do() -> SnapshotInfo:
            dropped.append(self._manifest.snapshots.get(request.db, request.snapshot))
            return self._store.drop_snapshot(request.db, request.snapshot, undoable=request.undoable)

        replay: Callable[[Any], SnapshotInfo] = partial(msgspec.convert, type=SnapshotInfo)
        kinds = (DropSnapshot, SoftDropSnapshot)
        return run_once(self._manifest, call.key, "snapshot.drop", kinds, lambda _: dropped[-1], do, replay)

    def do_snapshot_undrop(self, request: m.UndropOneSnapshot, call: CallContext) -> SnapshotInfo:
        def ids(op: UndropSnapshot) -> tuple[int, int]:
            return op.db_id, op.snapshot_id

        do = partial(self._store.undrop_snapshot, request.db, request.snapshot, new_name=request.new_name)
        return run_once(
            self._manifest, call.key, "snapshot.undrop", (UndropSnapshot,), ids, do,
            lambda kept: self._manifest.snapshots.get(*kept),
        )  # fmt: skip

    def do_snapshot_list(self, request: m.ListSnapshots, _: CallContext) -> list[SnapshotInfo]:
        return self._manifest.snapshots.of(request.db)

    def do_snapshot_get(self, request: m.OfSnapshot, _: CallContext) -> SnapshotInfo:
        return self._manifest.snapshots.get(request.db, request.snapshot)

    def do_snapshot_view(self, request: m.OfView, call: CallContext) -> SnapshotView:
        if request.upload and not call.grant.is_admin:
            raise AccessDenied("uploading needs the admin token", hint="request the view without upload")
        return self._store.pages.view(request.db, request.snapshot, upload=request.upload)

    def do_snapshot_views(self, request: m.OfViews, _: CallContext) -> list[SnapshotView | None]:
        def view(db: int | str) -> SnapshotView | None:
            try:
                return self._store.pages.view(db, request.snapshot)
            except UnknownSnapshot:
                return None

        return [view(db) for db in request.databases]

    def do_lease_open(self, request: m.Lend, call: CallContext) -> m.LentViews:
        self._check_lending(request.seconds, call, upload=request.upload)
        pages, names = self._store.pages, [str(name) for name in request.databases]
        given: dict[str, Any] = {"lease_id": request.lease_id, "upload": request.upload}
        if request.keep and request.snapshot:
            return m.LentViews(*lend_snapshots(pages, request.snapshot, names, request.seconds, **given))
        if request.holder or request.keep:
            return m.LentViews(*lend_to(pages, request.holder, names, request.seconds, **given))
        return m.LentViews(*pages.lend(request.databases, request.seconds, **given))

    def do_lease_held(self, request: m.OfHolder, _: CallContext) -> list[HeldVersion]:
        return self._manifest.leases.held(request.holder)

    def do_lease_mark_dropped(self, request: m.MarkDropped, call: CallContext) -> int:
        self._check_lending(request.seconds, call)
        return mark_dropped(self._store.pages, request.holder, request.dropped, request.seconds)

    def do_lease_views(self, request: m.OfHeldVersions, _: CallContext) -> list[SnapshotView]:
        return [held_view(self._store.pages, *version) for version in request.versions]

    def do_lease_range(self, request: OfLentRange, _: CallContext) -> list[tuple[str, SnapshotView]]:
        return held_range(self._store.pages, request.lease_id, request.after, request.last)

    def do_lease_let_go(self, request: m.OfHeldVersions, _: CallContext) -> None:
        self._manifest.leases.release_versions(request.versions)

    def do_lease_newest(self, request: m.NewestLsns, _: CallContext) -> list[int]:
        return newest_lsns(self._store.pages, request.databases)

    def do_lease_open_kv(self, request: m.LendKv, call: CallContext) -> m.LentKv:
        self._check_lending(request.seconds, call)
        return m.LentKv(*self._store.kvs.lend(request.db, request.seconds, lease_id=request.lease_id))

    def _check_lending(self, seconds: float, call: CallContext, *, upload: bool = False) -> None:
        if call.grant.is_admin:
            return
        if upload:
            raise AccessDenied("uploading needs the admin token", hint="request the versions without upload")
        if seconds > READER_SECONDS_MAX:
            raise AccessDenied("holding a version for more than an hour needs the admin token", seconds=seconds)

    def do_lease_renew(self, request: OfLease, _: CallContext) -> None:
        self._manifest.leases.renew(request.lease_id)

    def do_lease_release(self, request: OfLease, _: CallContext) -> None:
        self._manifest.leases.release(request.lease_id)

    # ── tables, and rows into SQLite ──────────────────────────────────────────────────────────────────────────────────
    def do_table_cuts(self, request: m.TableCuts, _: CallContext) -> list[tuple[Any, ...]]:
        return cuts(self._manifest, request)

    def do_load_put(self, request: PutPart, _: CallContext) -> None:
        self._loads.put(request)

    def do_load_rows(self, request: m.LoadRows, _: CallContext) -> int:
        return self._loads.insert(request)

    def do_load_pairs(self, request: tickets.LoadPairs, _: CallContext) -> int:
        return self._loads.write_pairs(request)

    def do_load_records(self, request: tickets.LoadRecords, _: CallContext) -> int:
        return self._loads.append_records(request)

    def do_load_drop(self, request: m.OfLoad, _: CallContext) -> None:
        self._loads.drop(request.load)

    # ── key-value databases ───────────────────────────────────────────────────────────────────────────────────────────
    def do_kv_version(self, request: m.OfSnapshot, _: CallContext) -> Any:
        return self._store.kvs.version(request.db, request.snapshot)

    def do_kv_load_ids(self, request: TakeIds, _: CallContext) -> TableDestination:
        return self._kv_loads.take(request)

    def do_kv_load_publish(self, request: m.PublishTables, _: CallContext) -> int:
        return self._kv_loads.publish(request)

    def do_kv_load_drop(self, request: m.OfLoad, _: CallContext) -> None:
        self._kv_loads.drop(request.load)

    # ── operations ────────────────────────────────────────────────────────────────────────────────────────────────────
    def do_submit(self, request: m.Submit, _: CallContext) -> list[m.BatchOutcome]:
        seconds = min(max(request.queue_seconds, 0.0), SUBMIT_SECONDS_MAX)
        pending = [self._submit(batch, seconds) for batch in request.batches]
        return [outcome if isinstance(outcome, m.BatchOutcome) else _outcome(outcome) for outcome in pending]

    def _submit(self, batch: m.Batch, seconds: float) -> ManifestGuard | m.BatchOutcome:
        try:
            ops = _DECODE_OPS(batch.ops)
            with attached_trace(batch.trace):
                return self._manifest.submit(ops, key=batch.key or None, result=batch.result, timeout=seconds)
        except UNDECODABLE as error:
            return m.BatchOutcome(error=form_of(InvalidInput(f"the operations cannot be read: {error}")))
        except QuireError as error:
            return m.BatchOutcome(error=form_of(error))

    def do_reserve(self, request: m.Reserve, _: CallContext) -> int:
        if request.what == "generation":
            return self._manifest.reserve_generation(request.db_id)
        reserve = {"db": self._manifest.reserve_db_id, "job": self._manifest.reserve_job_id}.get(request.what)
        if reserve is None:
            raise InvalidInput(
                "ids of this kind cannot be reserved", hint="use db, job or generation", ids=request.what
            )
        return reserve()

    # ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def do_stream_share(self, request: tickets.OfStream, call: CallContext) -> SharedStream:
        if request.upload and not call.grant.is_admin:
            raise AccessDenied("uploading needs the admin token", hint="request it without upload")
        stream = self._store.stream(request.name)
        return share(
            stream,
            request.start,
            request.stop,
            upload=request.upload,
            store_id=self._store.manifest.feed.store_id(),
            objects_url=self._store.namespaces.url_of(request.name),
        )

    def do_stream_wait(self, request: tickets.WaitForRecord, call: CallContext) -> int:
        """Wait for a record; return the end of the stream, which is beyond `record` unless the time was over."""
        stream, clock = self._store.stream(request.name), self._store.manifest.clock
        deadline = clock.monotonic() + min(max(request.seconds, 0.0), self._store.settings.service.wait_seconds_max)
        record = begin_at(stream.gaps, request.record)
        while stream.end_record <= record and stream.failure is None:
            remaining = deadline - clock.monotonic()
            if remaining <= 0 or call.is_over():
                break
            with suppress(StoreClosed, StoreUnusable):  # the next access opens the stream again
                stream.wait(record, min(remaining, WAIT_PIECE_SECONDS))
        end: int = stream.end_record
        return end

    def do_stream_position(self, request: tickets.OfConsumer, _: CallContext) -> int:
        position: int = self._store.stream(request.name).position(request.consumer)
        return position

    def do_stream_register(self, request: tickets.RegisterConsumer, _: CallContext) -> int:
        stream = self._store.stream(request.name)
        first, end = stream.first_record, stream.end_record
        ends = {"oldest": first, "latest": end}
        start = request.start if isinstance(request.start, int) else ends.get(request.start)
        if start is None:
            raise InvalidInput("a consumer must start at `oldest`, `latest` or a record", start=request.start)
        if request.consumer not in stream.consumers:
            start = begin_within(stream.gaps, start, first, end)
        position: int = stream.register(request.consumer, start)
        return position

    def do_stream_ack(self, request: tickets.AckRecords, _: CallContext) -> None:
        self._store.stream(request.name).ack(request.consumer, request.position)

    def do_stream_poll(self, request: tickets.PollStreams, _: CallContext) -> list[PolledStream | None]:
        return poll_streams(self._store.streams, self._manifest, request.consumer, request.positions)

    def do_stream_log_mode(self, request: tickets.LogMode, _: CallContext) -> str:
        engine = self._store.streams
        if request.mode:
            engine.switch(request.mode)
        mode: str = engine.mode.value
        return mode

    # ── the feed ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def do_feed_store_id(self, _: m.Nothing, __: CallContext) -> str:
        return self._manifest.feed.store_id()

    def do_feed_head(self, _: m.Nothing, __: CallContext) -> int:
        return self._manifest.feed.head()

    def do_feed_cursors(self, _: m.Nothing, __: CallContext) -> list[feed.CursorInfo]:
        return self._manifest.feed.cursors()

    def do_feed_cursor(self, request: m.OfCursor, _: CallContext) -> feed.CursorInfo:
        return self._manifest.feed.cursor(request.cursor)

    def do_feed_fetch(self, request: m.Fetch, _: CallContext) -> ChangePage:
        databases = list(request.databases) if request.databases is not None else None
        return self._manifest.feed.fetch(
            request.cursor, request.limit, after=request.after, databases=databases, tables=request.tables
        )

    def do_feed_wait(self, request: m.Wait, call: CallContext) -> int:
        """Wait for the next change, in pieces, so that the poll ends when the server stops; return the head."""
        clock = self._manifest.clock
        deadline = clock.monotonic() + min(max(request.seconds, 0.0), self._store.settings.service.wait_seconds_max)
        while True:
            remaining = deadline - clock.monotonic()
            try:
                return self._manifest.feed.wait(request.after, max(min(remaining, WAIT_PIECE_SECONDS), 0.0))
            except TimedOut:
                if remaining <= WAIT_PIECE_SECONDS or call.is_over():
                    return self._manifest.feed.head()

    def do_feed_register(self, request: m.Register, call: CallContext) -> feed.CursorInfo:
        start: feed.Start | int
        if isinstance(request.start, str):
            if request.start not in ("oldest", "latest"):
                raise InvalidInput("a cursor must start at `oldest`, `latest` or a sequence", start=request.start)
            start = feed.Start(request.start)
        else:
            start = request.start

        def cursor_id(op: RegisterCursor) -> int:
            return op.cursor_id

        cursors, ttl = self._manifest.feed, request.ttl_seconds
        do = partial(cursors.register, start, name=request.name, ttl_seconds=ttl, max_lag=request.max_lag)
        return run_once(self._manifest, call.key, "feed.register", (RegisterCursor,), cursor_id, do, cursors.cursor)

    def do_feed_acknowledge(self, request: m.Acknowledge, _: CallContext) -> None:
        self._manifest.feed.acknowledge(request.cursor, request.upto)

    def do_feed_resume(self, request: m.OfCursor, _: CallContext) -> feed.CursorInfo:
        return self._manifest.feed.resume(request.cursor)

    def do_feed_drop(self, request: m.OfCursor, call: CallContext) -> None:
        drop = partial(self._manifest.feed.drop, request.cursor)
        run_once(self._manifest, call.key, "feed.drop", (DropCursor,), _nothing, drop, _nothing)


# ── values kept with keys ─────────────────────────────────────────────────────────────────────────────────────────────
def _db_id(op: RegisterDb | RenameDb | ForkDb) -> int:
    return op.db_id


def _nothing(_: Any) -> None:
    return None


def _outcome(guard: ManifestGuard) -> m.BatchOutcome:
    try:
        return m.BatchOutcome(receipt=guard.result(SUBMIT_SECONDS_MAX))
    except QuireError as error:
        return m.BatchOutcome(error=form_of(error))
