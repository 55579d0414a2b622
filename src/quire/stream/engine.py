"""The streams of a store: opens them, moves their segments in the background, and removes dropped ones.

The store's manifest has a row of kind `stream` for each stream; its own manifest log is the truth about its segments (S1). Each
stream is opened once per process; one that has become unusable (M12) is recovered by the next `open`. Unused streams are
closed, the longest unused first (N1). The mover, a thread, runs rounds of upkeep over the open streams: in every round over
those that have changed, and occasionally over resting ones. Dropping a stream removes its row; the next sweep removes its files
and the objects of its log, and the database's delete job removes the objects of its segments.

Threads: any. Raises: `UnknownDatabase`, `WrongKind`, `DatabaseTombstoned`, `ReadOnly`, `StoreClosed`, `StoreLocked`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from quire.core.background import Background
from quire.core.barrier import changes, may_change
from quire.core.cache import ByteCache
from quire.core.clock import Clock
from quire.core.closing import close_all
from quire.core.errors import (
    DatabaseTombstoned,
    ForeignObject,
    InvalidInput,
    QuireError,
    ReadOnly,
    StorageFault,
    StoreClosed,
    StoreUnusable,
    Unavailable,
    WrongKind,
)
from quire.core.events import emit
from quire.core.open_databases import OpenSet
from quire.core.read_only import refuse
from quire.core.settings import ManifestLogSettings, StreamSettings
from quire.core.timeline import Gap
from quire.durable.files import Disk, remove_tree
from quire.durable.names import STREAMS, parse_stream_home, stream_home
from quire.durable.object_names import log_prefix
from quire.manifest import tables as t
from quire.manifest.records import DbKind, DbStatus
from quire.manifest.store import ManifestStore
from quire.manifest.writability import Writability
from quire.objects.api import list_objects
from quire.stream.files import StreamClock, StreamFiles
from quire.stream.maintenance import Moved
from quire.stream.metrics import LogFigures
from quire.stream.mlog_modes import Mode
from quire.stream.projection import StreamProjection
from quire.stream.read_only import ReadOnlyStream
from quire.stream.repair import Repair
from quire.stream.sources import StreamCache
from quire.stream.state import Consumer, load_mode, log_objects, save_mode
from quire.stream.stream import Stream

if TYPE_CHECKING:
    from quire.manifest.snapshots import SnapshotInfo
    from quire.objects.api import ObjectStore
    from quire.stream.repair import StreamSurvey


RESTING_SECONDS = 30.0
"""Seconds between rounds of upkeep for a stream that has not changed since a round that found nothing to do."""

CLOSED_PER_ROUND = 64
"""Idle streams closed in one round: each may sync, and opening other streams waits for it."""


class StreamExtent(msgspec.Struct, frozen=True):
    """Where a stream ends, and its consumers."""

    end_record: int
    gaps: tuple[Gap, ...]
    consumers: dict[str, Consumer]
    hold_seconds: float

    @classmethod
    def of(cls, stream: Stream) -> StreamExtent:
        return cls(stream.end_record, tuple(stream.gaps), stream.consumers, stream.retention.hold_seconds)


class StreamEngine:
    """The streams of one store."""

    def __init__(
        self,
        *,
        manifest: ManifestStore,
        root: str,
        disk: Disk,
        clock: Clock,
        objects_url: str,
        open_store: Callable[[str], ObjectStore],
        collect: Callable[[str, Iterable[str]], None],
        settings: StreamSettings,
        log_settings: ManifestLogSettings,
        background: bool = True,
        store_locked: bool = False,
        is_archived: bool = False,
    ) -> None:
        """`store_locked`: the caller holds the store's lock, which makes the locks of the streams' logs unnecessary."""
        # constant after construction
        self._manifest = manifest
        self._root = root
        self._disk = disk
        self._clock = clock
        self._objects_url = objects_url
        self._open_store = open_store
        self._collect = collect
        """Passes objects of streams and their logs to the collector (A3), with the URL of their location."""
        self._settings = settings
        stored = load_mode(disk, root)
        self._log_settings = log_settings if stored is None else replace(log_settings, mode=stored)
        self._background = Background("stream-keeper", threads_max=settings.threads) if background else None
        self._store_locked = store_locked
        self._is_archived = is_archived
        self._stopping = threading.Event()
        self.cache: StreamCache = ByteCache(settings.cache_bytes)
        # guarded by _lock
        self._lock = threading.RLock()
        self._open: OpenSet[Stream] = OpenSet(
            open_max=settings.open_max, idle_seconds=settings.idle_seconds, clock=clock
        )
        self._resting: dict[int, tuple[object, float]] = {}
        """Stream → its mark after a round that found nothing to do, and the monotonic time until which it rests."""
        self._closed_extents: dict[int, StreamExtent] = {}
        """Extents of streams that were closed because they were unused. Opening a stream removes its extent."""
        self._seen: set[int] = set()
        """Ids of streams that this engine has opened."""
        self._mover: threading.Thread | None = None
        self._closed = False
        manifest.env.fork_hooks.append(self._forked)
        manifest.cover(self)

    # ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────
    @may_change
    def open(self, db: int | str, *, create: bool = False) -> Stream:
        """Open and recover a stream; with `create`, register it first if its name is new. In a store that was opened for
        reading, the stream can only be read."""
        with self._lock:
            self._require()
            if create and isinstance(db, str):
                db = self._manifest.find_or_register(db, DbKind.STREAM)
            with self._manifest.read() as txn:
                stream_id, _ = txn.live(db, DbKind.STREAM)
            if (stream := self._usable(stream_id)) is not None:
                return stream
            if (former := self._open.pop(stream_id)) is not None:
                former.abandon()
            if self._manifest.read_only:
                return self._open.add(stream_id, self._open_to_read(stream_id))
            self._closed_extents.pop(stream_id, None)
            stream = self._open.add(stream_id, self._recover(stream_id))
            self._seen.add(stream_id)
            self._close_unused(self._open.surplus())
            self._start()
            return stream

    def _usable(self, stream_id: int) -> Stream | None:
        """Return the stream if it is open and has not failed. REQUIRES the lock."""
        stream = self._open.get(stream_id)
        return stream if stream is not None and stream.failure is None else None

    def extent(self, stream_id: int) -> StreamExtent:
        """Return where a stream ends, for callers that poll. This is not a use: the stream may be closed as idle. A closed
        stream is opened only if this process has not closed it itself."""
        with self._lock:
            stream = self._open.peek(stream_id)
            if stream is not None and stream.failure is None:
                return StreamExtent.of(stream)
            return self._closed_extents.get(stream_id) or StreamExtent.of(self.open(stream_id))

    def _open_to_read(self, stream_id: int) -> Stream:
        return ReadOnlyStream(
            self._manifest,
            stream_id,
            lambda number: StreamFiles(self._disk, self._root, number),
            lambda: self._open_store(self.objects_url(stream_id)),
            self._settings,
        )

    def _recover(self, stream_id: int) -> Stream:
        url = self.objects_url(stream_id)
        stream = Stream.open(
            stream_id=stream_id,
            root=self._root,
            disk=self._disk,
            manifest=self._manifest,
            store=partial(self._open_store, url),
            collect=partial(self._collect, url),
            clock=self._clock,
            settings=self._settings,
            log_settings=self._log_settings,
            cache=self.cache,
            background=self._background,
            store_locked=self._store_locked,
        )
        stream.hot.barrier = self._manifest.barrier
        stream.hot.is_archived = self._is_archived
        self._manifest.cover(stream)
        stream.hot.set_write_check(Writability(self._manifest, stream_id).require)
        return stream

    def objects_url(self, stream_id: int) -> str:
        """Return the URL of a stream's objects and those of its log: its namespace, or the store's own object store."""
        with self._manifest.read() as txn:
            return txn.place_of(stream_id, self._objects_url)[1]

    def collect_of(self, stream_id: int, keys: Iterable[str]) -> None:
        """Pass objects of a stream to the collector."""
        self._collect(self.objects_url(stream_id), keys)

    @may_change
    def repair(self, db: int | str, *, apply: bool = False) -> StreamSurvey:
        """Determine what can be rebuilt of a stream whose manifest log is damaged or behind; with `apply`, rebuild it.

        The stream is closed meanwhile and stays closed: the next `open` shows whether the repair was sufficient.
        """
        if self._manifest.read_only:
            refuse("the store", path=self._root)
        with self._lock:
            self._require()
            with self._manifest.read() as txn:
                stream_id, _ = txn.live(db, DbKind.STREAM)
            stream = self._open.pop(stream_id)
            self._closed_extents.pop(stream_id, None)
            if stream is not None:
                stream.close()
            files, clock = StreamFiles(self._disk, self._root, stream_id), StreamClock(self._clock)
            projection = StreamProjection(self._manifest, files)
            store = self._open_store(self.objects_url(stream_id))
            objects = log_objects(files, store, projection.prefixes(), projection.store_id())
            repair = Repair(files, projection, objects, clock, self._log_settings, store_locked=self._store_locked)
            survey = repair.survey()
            if apply and survey.steps:
                repair.apply(survey)
        return survey

    @contextmanager
    def borrowed(self, db: int | str) -> Iterator[tuple[Stream, bool]]:
        """Yield a stream for a short time, and whether it was already open. A stream that was not is closed again, and no other
        thread opens it meanwhile: a job over thousands of streams must not leave them all open."""
        with self._lock:
            with self._manifest.read() as txn:
                stream_id, _ = txn.live(db, DbKind.STREAM)
            open_stream = self._usable(stream_id)
            if open_stream is None:
                stream = self.open(stream_id)
                try:
                    yield stream, False
                finally:
                    self._open.pop(stream_id)
                    stream.close()
                return
        yield open_stream, True

    def streams(self) -> list[Stream]:
        """Return the open streams."""
        with self._lock:
            return self._open.cores()

    def last_appends(self) -> dict[int, int]:
        """Return stream → time of its last append in milliseconds, of the open streams that were appended to.

        The feed has the appends of all others: closing a stream seals its segment.
        """
        if self._manifest.read_only:
            return {}
        return {stream.stream_id: stream.hot.last_append_ms for stream in self.streams() if stream.hot.last_append_ms}

    @changes
    def snapshot(self, db: int | str, name: str = "", *, tags: dict[str, str] | None = None) -> SnapshotInfo:
        """Take a snapshot of a stream as of now."""
        with self.borrowed(db) as (stream, _):  # a schedule over many streams must not leave them all open
            stream.sync()
            stream.seal()
            # Retention ends a removal that has begun, then removes nothing until the snapshot has its own references:
            # otherwise the snapshot could refer to a segment whose object is just being deleted.
            with stream.pin():
                # A snapshot pins rows of LMDB: the segment that was just sealed needs one.
                stream.ledger.project_now()
                return self._manifest.snapshots.publish(stream.stream_id, name, tags=tags)

    @changes
    def fork(self, db: int | str, new_name: str, *, at: int | str | None = None, options: object = None) -> int:
        """Raise `WrongKind`: a record is in one stream only, and a range is copied by appending it to another stream."""
        hint = "append its `read_batches()` to a new stream"
        raise WrongKind("a stream cannot be forked", hint=hint, stream=db, name=new_name, at=at, options=options)

    def figures(self) -> list[LogFigures]:
        """Return the metrics of the manifest logs of open streams, under the design document's names."""
        return [] if self._manifest.read_only else [stream.figures() for stream in self.streams()]

    # ── manifest logs ─────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def mode(self) -> Mode:
        """The mode of the manifest logs of all streams: the last one passed to `switch`, otherwise that of quire.toml."""
        return Mode(self._log_settings.mode)

    @changes
    def switch(self, mode: Mode | str) -> None:
        """Change the mode for the whole store: now for open streams, for all others when they are opened.

        The mode is recorded before the first stream is switched. A stream that cannot be switched keeps its mode; the first
        such failure is raised after all streams were tried.
        """
        try:
            wanted = Mode(mode)
        except ValueError:
            raise InvalidInput("unknown mode", hint=f"modes: {', '.join(Mode)}", mode=mode) from None
        if self._manifest.read_only:
            raise ReadOnly(
                "only the process that owns the store can switch manifest-log modes",
                hint='open the store with mode="rw"',
            )
        failures: list[QuireError] = []
        with self._lock:
            self._require()
            save_mode(self._disk, self._root, wanted.value)
            self._log_settings = replace(self._log_settings, mode=wanted.value)
            for stream in self._open.cores():
                try:
                    stream.switch(wanted)
                except QuireError as error:
                    failures.append(error)
        if failures:
            raise failures[0]

    # ── the mover ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _start(self) -> None:
        if self._background is not None and self._mover is None:
            self._mover = threading.Thread(target=self._move, name="quire-streams", daemon=True)
            self._mover.start()

    def _move(self) -> None:
        while not self._stopping.wait(self._settings.tick_seconds):
            self.tick(resting=False)
            self.close_idle()

    @changes
    def tick(self, *, resting: bool = True) -> dict[int, Moved]:
        """Run a round of upkeep for open streams, with or without resting ones, and return what was done."""
        done = {}
        for stream in self.streams():
            if stream.failure is not None or (not resting and self._rests(stream)):
                continue
            try:
                moved = done[stream.stream_id] = stream.tick()
                if moved.total or moved.failed:
                    self._resting.pop(stream.stream_id, None)
                else:
                    self._resting[stream.stream_id] = (stream.mark(), self._clock.monotonic() + RESTING_SECONDS)
            except DatabaseTombstoned:  # dropped meanwhile: the drop sweeps it
                pass
            except (StoreClosed, StoreUnusable) as error:
                emit("warning", "stream.tick_stopped", stream=stream.stream_id, error=str(error))
            except Exception as error:  # whatever it is, it must not stop the upkeep of the other streams
                emit("error", "stream.tick_failed", stream=stream.stream_id, error=error)
        return done

    def _rests(self, stream: Stream) -> bool:
        mark, until = self._resting.get(stream.stream_id, (None, 0.0))
        return self._clock.monotonic() < until and mark == stream.mark()

    def close_idle(self) -> int:
        """Close streams that have been idle for a while, a limited number at a time; return how many."""
        with self._lock:
            return 0 if self._closed else self._close_unused(self._open.idle()[:CLOSED_PER_ROUND])

    def _close_unused(self, stream_ids: Iterable[int]) -> int:
        """Close streams and return how many. REQUIRES the lock, so that none of them is opened meanwhile."""
        count = 0
        for stream_id in stream_ids:
            stream = self._open.pop(stream_id)
            self._resting.pop(stream_id, None)
            if stream is not None:
                count += 1
                try:
                    stream.close()
                    self._closed_extents[stream_id] = StreamExtent.of(stream)  # closing makes its last records durable
                except Exception as error:  # the next `open` recovers it, and the thread that closes goes on
                    emit("error", "stream.close_failed", stream=stream_id, error=error)
        return count

    # ── dropped streams ───────────────────────────────────────────────────────────────────────────────────────────────
    def sweep(self) -> int:
        """Remove the directories and log objects of streams that no longer have a row; return how many streams."""
        removed = 0
        with self._lock:
            try:
                names = self._disk.names(os.path.join(self._root, STREAMS))
            except FileNotFoundError:
                return 0
            with self._manifest.read() as txn:
                live = txn.refused_databases()
                for stream_id in map(parse_stream_home, names):
                    if stream_id is None or stream_id in live:
                        continue
                    record = txn.database(stream_id)
                    if record is not None and record.kind is DbKind.STREAM and record.status is not DbStatus.TOMBSTONED:
                        live.add(stream_id)
            first_db_id = self._manifest.first_db_id
            for name in names:
                stream_id = parse_stream_home(name)
                if stream_id is None or stream_id in live or not (stream_id in self._seen or stream_id < first_db_id):
                    continue
                removed += self._forget(stream_id)
        return removed

    def _forget(self, stream_id: int) -> bool:
        stream = self._open.pop(stream_id)
        self._closed_extents.pop(stream_id, None)
        if stream is not None:
            stream.abandon()
        try:
            # Objects first: if this fails half-way, the directory is how the next sweep finds the stream.
            for url, prefixes in self._log_places(stream_id):
                store = self._open_store(url)
                logs = [f"{prefix}/{log_prefix(stream_id)}".lstrip("/") for prefix in prefixes]
                self._collect(url, [info.key for log in logs for info in list_objects(store, log)])
            remove_tree(self._disk, os.path.join(self._root, stream_home(stream_id)))
        except (Unavailable, StorageFault, ForeignObject) as error:  # the next sweep tries again
            emit("warning", "stream.sweep_failed", stream=stream_id, error=str(error))
            return False
        return True

    def _log_places(self, stream_id: int) -> list[tuple[str, tuple[str, ...]]]:
        """Return (URL, prefixes) where a stream's log may have objects: every location, if its row is gone."""
        with self._manifest.read() as txn:
            place_id, url = txn.place_of(stream_id, self._objects_url)
            places = [(url, txn.object_prefixes(place_id))]
            if txn.database(stream_id) is None:
                named = [(key[0], row) for key, row in txn.scan(t.REMOTE_NAMESPACE) if row.name]
                places += [(row.url, txn.object_prefixes(number)) for number, row in named]
        return places

    # ── closing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def close_stream(self, db: int | str) -> None:
        """Close a stream if it is open."""
        with self._manifest.read() as txn:
            stream_id = txn.database_id(db) if isinstance(db, str) else db
        with self._lock:
            stream = self._open.pop(stream_id)
        if stream is not None:
            stream.close()

    def close(self) -> None:
        """Close every stream, then raise the first failure. Closing twice is allowed."""
        self._stopping.set()
        mover = self._mover
        # Joined without the lock, which the mover takes.
        if mover is not None:
            mover.join()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            opened = [stream for stream_id in self._open if (stream := self._open.pop(stream_id)) is not None]
        try:
            close_all(opened)
        finally:
            if self._background is not None:
                self._background.stop()

    def _require(self) -> None:
        if self._closed:
            raise StoreClosed("the store is closed", hint="open it again")

    def _forked(self) -> None:
        """Close the streams in a forked child."""
        self._closed = True
        self._lock = threading.RLock()
        self._mover = None
        if self._background is not None:
            self._background.forked()
        for stream in self._open.cores():
            stream.forked()
