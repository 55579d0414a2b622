"""A stream: an append-only log of records whose segments move between disk, compressed files and an object store.

A record is opaque bytes with an id and a timestamp. Ids start at 1, rise by one except where the store was taken over, and are
never reused; timestamps never decrease. A segment is a file of records; it is sealed when it is full or old, and immutable from
then on. Tiers: 0 hot, as it was written; 1 warm, compressed; 2 the object store. The keeper, a task on the background threads
that all streams share, syncs records that no thread waits for, preallocates files, and seals by time.

    append ──▶ open segment ──seal──▶ tier 0 ──compress──▶ tier 1 ──upload──▶ tier 2
                                        ▲                                       │
                                        └───────────────hydrate─────────────────┘

There is one writer process: the manifest log's lock is the stream's (`StoreLocked`). Records are durable when `result()` of
their append returns; readers and tails see durable records only. Closing seals the open segment, so that the next opening has
nothing to cut.

Threads: any. Raises: `StoreLocked`, `StoreUnusable`, `StoreClosed`, `DiskFull`, `OutOfRange`, `CursorLost`, `Corruption`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import msgspec

from quire.core.background import Background, Task
from quire.core.barrier import changes
from quire.core.cache import ByteCache
from quire.core.clock import Clock
from quire.core.closing import ClosedOnExit
from quire.core.errors import QuireError, StorageFault, StoreClosed, StoreUnusable
from quire.core.events import emit
from quire.core.limits import IDEMPOTENCY_KEY_BYTES
from quire.core.recent_keys import RecentKeys, call_number
from quire.core.settings import ManifestLogSettings, StreamSettings
from quire.core.timeline import Gap, Gaps
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.manifest.store import ManifestStore
from quire.stream.append_buffer import Appended, Records
from quire.stream.files import LogFiles, StreamClock, StreamFiles
from quire.stream.gaps import begin_at, count_records
from quire.stream.hot import HotLog, SegmentEnd, SegmentStart
from quire.stream.maintenance import Moved, StreamMaintenance
from quire.stream.metrics import LogFigures
from quire.stream.mlog_log import AbsentLog, Collect
from quire.stream.mlog_modes import Divergence, Mode
from quire.stream.mlog_records import SealSegment, SegmentOpened
from quire.stream.mlog_tier2 import LogObjects
from quire.stream.projection import StreamProjection
from quire.stream.reader import StreamReader
from quire.stream.recovery import RecoveredStream, open_checked, open_log, recover_stream
from quire.stream.remote_read import SharedSegment, shared_segments
from quire.stream.segment_events import Ledger
from quire.stream.sources import StreamCache
from quire.stream.spans import StreamRecord
from quire.stream.state import Consumer, Retention, StreamState
from quire.stream.tiers import Tiers

if TYPE_CHECKING:
    from quire.objects.api import ObjectStore


class StreamInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a stream."""

    stream_id: int
    first_record: int
    end_record: int
    segments: int
    hot_segments: int
    hot_bytes: int
    warm_segments: int
    warm_bytes: int
    remote_segments: int
    remote_bytes: int
    mode: str
    consumers: dict[str, Consumer]
    retention: Retention
    torn_bytes: int
    """Bytes after the cut of the last recovery."""
    needs_repair: list[int] = []
    """Segments whose only copy was an object that no longer exists."""
    gaps: tuple[Gap, ...] = ()
    """Record ids that takeovers have skipped."""

    @property
    def records(self) -> int:
        return count_records(self.gaps, self.first_record, self.end_record)

    @property
    def appended(self) -> int:
        """The number of records ever appended, without those lost in takeovers."""
        return count_records(self.gaps, 1, self.end_record)

    def lag(self, consumer: str) -> int:
        """Return how many records a consumer has not read."""
        return count_records(self.gaps, self.consumers[consumer].position, self.end_record)


def info_of(stream: Stream) -> StreamInfo:
    """Return the current statistics of an open stream."""
    segments = stream.ledger.view.segments
    hot, warm = (
        [segment for segment in segments if segment.is_hot],
        [segment for segment in segments if segment.is_warm],
    )
    remote = [segment for segment in segments if segment.is_remote]
    live = stream.hot.segment
    return StreamInfo(
        stream_id=stream.stream_id,
        first_record=stream.first_record,
        end_record=stream.end_record,
        segments=len(segments),
        hot_segments=len(hot),
        hot_bytes=sum(segment.durable_bytes for segment in hot) + (live.offset if live is not None else 0),
        warm_segments=len(warm),
        warm_bytes=sum(segment.warm_bytes for segment in warm),
        remote_segments=len(remote),
        remote_bytes=sum(
            segment.warm_bytes or stream.upkeep.object_bytes.get(segment.segment_id, 0) for segment in remote
        ),
        mode=stream.mode.value,
        consumers=stream.consumers,
        retention=stream.retention,
        torn_bytes=stream.torn_bytes,
        needs_repair=sorted(stream.ledger.index.needs_repair),
        gaps=tuple(stream.gaps),
    )


RETRY_SECONDS = 0.5
"""How long the keeper waits after a disk error."""


class Stream(ClosedOnExit):
    """An open stream, as `store.stream(name)` returns it."""

    def __init__(
        self,
        files: StreamFiles,
        recovered: RecoveredStream,
        state: StreamState,
        store: Callable[[], ObjectStore],
        collect: Collect,
        cache: StreamCache,
        settings: StreamSettings,
        clock: StreamClock,
        *,
        background: Background | None,
        check_owner: Callable[[], None],
    ) -> None:
        # constant after construction
        self.files = files
        self.stream_id = files.stream_id
        self._settings = settings
        self._epoch = recovered.epoch
        self.torn_bytes = recovered.torn_bytes
        self._state = state
        self._store = store
        self._batches = threading.Lock()
        """Held while a batch of a streaming query is appended."""
        self._keeper: Task | None = background.task(self._keep) if background is not None else None
        self._sync_requested = False
        """Whether a sync by the keeper is requested and has not begun."""
        self.ledger: Ledger = recovered.ledger
        self.hot = HotLog(
            files,
            clock,
            settings,
            self._roll,
            next_segment=recovered.next_segment,
            next_record=recovered.next_record,
            request_sync=self._request_round,
            check_owner=check_owner,
            reserve=self.ledger.reserve,
            calls=RecentKeys(call for call in state.stored.calls if call[1] < recovered.next_record),
        )
        # Saves one call per record: a sixth of the time of an append.
        self.append = self.hot.append  # type: ignore[method-assign]
        self.tiers = Tiers(files, self.ledger, self.hot, store, collect, settings, clock, recovered.dictionaries)
        self.upkeep = StreamMaintenance(self.tiers, self.ledger, state, settings, clock)
        self._reader = StreamReader(
            files,
            self.hot,
            lambda: self.ledger.view,
            store,
            cache,
            settings,
            gaps=recovered.gaps,
            touch=self.tiers.touch,
            hydrate=self.tiers.hydrate_if_room,
        )
        self._rotation_due: float | None = None
        """Seconds until the manifest log's chunk is to be sealed, as of the keeper's last round."""
        self.ledger.on_recorded = self._request_round  # the keeper schedules the sealing of the log's chunk
        if self._keeper is not None:
            self._keeper.ask()

    @classmethod
    def open(
        cls,
        *,
        stream_id: int,
        root: str,
        disk: Disk,
        manifest: ManifestStore,
        store: Callable[[], ObjectStore],
        collect: Collect,
        clock: Clock,
        settings: StreamSettings,
        log_settings: ManifestLogSettings,
        cache: StreamCache | None = None,
        background: Background | None = None,
        store_locked: bool = False,
    ) -> Stream:
        """Open and recover a stream; a new one is empty. Without a `background` it runs no background work.

        `store_locked`: the caller holds the store's lock, so the stream's log takes none.
        """
        files, ticking = StreamFiles(disk, root, stream_id), StreamClock(clock)
        projection, state = StreamProjection(manifest, files), StreamState(files, ticking)
        at = LogFiles(disk, root, stream_id, store_locked, projection.store_id())
        objects = LogObjects(_Later(store), stream_id, projection.prefixes(), at.store_id, state.stored.begins)
        mode = Mode(log_settings.mode)
        reopen = partial(open_checked, files, at, objects, projection, state, ticking, log_settings, collect)
        log = open_log(at, objects, state, ticking, mode, reopen)
        try:
            files.make()
            files.sweep()
            recovered = recover_stream(files, log, projection, state, ticking, mode, reopen)
            # After recovery, which adds the keys of the segment that was open.
            state.settle_batches({call for call, at in state.stored.calls if at < recovered.next_record})
            parts = (files, recovered, state, store, collect, cache or ByteCache(settings.cache_bytes))
            return cls(*parts, settings, ticking, background=background, check_owner=manifest.writer.check_owner)
        except BaseException:
            log.abandon()
            raise

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def append(self, records: Records, *, key: bytes = b"") -> Appended:
        """Append a record (`bytes`) or many (a sequence, an Arrow column), which become durable together or not at all.

        The returned object has the id of the first record in `.record` at once; `.result()` (or `await`) returns when the
        records are durable. A `key` of 16 random bytes makes the call safe to repeat: records with a recently used key are not
        appended again.
        """
        return self.hot.append(records, key=key)

    def has_batch(self, query: str, batch: int) -> bool:
        """Return whether a batch of a streaming query, or a later one, was appended with `append_batch`."""
        return self._state.has_batch(query, batch)

    @changes
    def append_batch(self, records: Records, *, query: str, batch: int) -> bool:
        """Append a batch of a streaming query exactly once; return False if it, or a later one of this query, was appended.

        The batch is announced in `stream.json`, appended with an idempotency key, and then recorded there. If the process is
        killed in between, the next opening looks for the key among the newest appends to decide whether it was appended.
        """
        with self._batches:
            if self._state.has_batch(query, batch):
                return False
            key = sha256(f"{query}/{batch}".encode()).digest()[:IDEMPOTENCY_KEY_BYTES]
            self._state.begin_batch(query, batch, call_number(key))
            hit("stream.batch.announced")
            self.hot.append(records, key=key).result()
            hit("stream.batch.appended")
            self._state.end_batch(query, batch)
        return True

    @changes
    def sync(self) -> int:
        """Wait until everything that was appended is durable, and return the id after the last durable record."""
        self.hot.require()
        self.hot.sync()
        return self.hot.durable

    @changes
    def seal(self) -> bool:
        """Seal the open segment, so that it can move between tiers; return False if there is none."""
        return self.hot.seal()

    def _roll(self, sealed: SegmentEnd | None, opened: SegmentStart | None) -> None:
        """Record that the hot log ended a segment and began another, in one commit of the manifest log."""
        steps: list[Any] = []
        if sealed is not None:
            # A sealed segment is not scanned at the next opening. Keys of pending records are in no segment yet.
            self._state.persist_calls(call for call in self.hot.calls if call[1] < sealed.end_record)
            steps.append((SealSegment(sealed.durable_bytes, sealed.crc64), sealed.segment_id, sealed.end_record))
        if opened is not None:
            steps.append((SegmentOpened(opened.base_record, self._epoch), opened.segment_id))
        self.ledger.record_steps(*steps)

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def first_record(self) -> int:
        """The id of the first retained record."""
        return self._reader.first_record

    @property
    def end_record(self) -> int:
        """The id after the last durable record."""
        return self._reader.end_record

    @property
    def gaps(self) -> Gaps:
        """Record ids that takeovers have skipped: no record ever has them."""
        return self._reader.gaps

    def segments(self) -> Iterable[SharedSegment]:
        """Return the segments with durable records, as other processes read them."""
        return shared_segments(self)

    def read(self, start: int | None = None, stop: int | None = None) -> Iterator[StreamRecord]:
        """Yield records from `start` (default: the first) to before `stop` (default: the current end), from any tier."""
        yield from self._reader.read(start, stop)  # a generator, so that the iterator keeps the stream open

    def read_batches(self, start: int | None = None, stop: int | None = None) -> Iterator[Any]:
        """Yield the same records as Arrow record batches with the columns id, timestamp and payload."""
        yield from self._reader.read_batches(start, stop)

    def tail(self, start: int | None = None, *, timeout: float | None = None) -> Iterator[StreamRecord]:
        """Yield records from `start` (default: the current end) without end; stop if none arrives for `timeout` seconds.

        In an event loop: `async for record in quire.core.async_bridge.iterate(stream.tail())`.
        """
        yield from self._reader.tail(start, timeout=timeout)

    def wait(self, record: int, timeout: float | None = None) -> bool:
        """Wait until a record is durable; return False on timeout."""
        return self._reader.wait(record, timeout)

    def seek(self, timestamp_ms: int) -> int:
        """Return the id of the first record at or after a timestamp; the end if there is none."""
        return self._reader.seek(timestamp_ms)

    # ── consumers ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def consumers(self) -> dict[str, Consumer]:
        """The consumers and their positions, by name."""
        return self._state.stored.consumers

    @changes
    def register(self, consumer: str, start: int | None = None) -> int:
        """Create a consumer at `start` (default: the first record) unless it exists, and return its position."""
        position = self.first_record if start is None else begin_at(self.gaps, start)
        return self._state.register(consumer, position)

    def position(self, consumer: str) -> int:
        """Return the id of the first record that a consumer has not read."""
        return self._state.position(consumer)

    @changes
    def ack(self, consumer: str, position: int) -> None:
        """Record durably that a consumer has read everything below `position`. Repeating a position is a heartbeat: it renews
        the consumer's hold on the records that it has not read."""
        self._state.ack(consumer, begin_at(self.gaps, position), end=self.end_record)

    @changes
    def drop_consumer(self, consumer: str) -> None:
        """Remove a consumer, and its hold on records that it has not read."""
        self._state.drop(consumer)

    # ── tiers ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    @changes
    def compress(self, *segment_ids: int) -> int:
        """Compress sealed segments, all if none is named, and return how many were compressed."""
        wanted = [segment for segment in self._chosen(segment_ids) if segment.is_hot and not segment.is_warm]
        for segment in wanted:
            self.tiers.compress(segment.segment_id)
        return len(wanted)

    @changes
    def upload(self, *segment_ids: int) -> int:
        """Upload sealed segments, all if none is named, then the log's own chunks; return how many segments were uploaded."""
        wanted = [segment for segment in self._chosen(segment_ids) if not segment.is_remote]
        for segment in wanted:
            self.tiers.upload(segment.segment_id)
        self.ledger.guarded(self.ledger.log.rotate)
        self.ledger.guarded(self.ledger.log.upload)
        return len(wanted)

    @changes
    def evict(self, *segment_ids: int, warm: bool = False) -> int:
        """Evict hot copies (with `warm` also warm ones) of sealed segments that have another copy; return how many copies."""
        count = 0
        for segment in self._chosen(segment_ids):
            if segment.is_hot and (segment.is_warm or segment.is_remote):
                count += self.tiers.evict(segment.segment_id)
            if warm and segment.is_warm and segment.is_remote:
                count += self.tiers.evict(segment.segment_id, warm=True)
        return count

    @changes
    def hydrate(self, *segment_ids: int) -> int:
        """Hydrate sealed segments to disk, all if none is named, and return how many were hydrated."""
        wanted = [segment for segment in self._chosen(segment_ids) if not segment.is_hot]
        for segment in wanted:
            self.tiers.hydrate(segment.segment_id)
        return len(wanted)

    def pin(self, *segment_ids: int) -> AbstractContextManager[None]:
        """Return a context manager that keeps local copies of segments, all if none is named."""
        return self.tiers.pin(segment.segment_id for segment in self._chosen(segment_ids))

    def _chosen(self, segment_ids: tuple[int, ...]) -> list[Any]:
        view = self.ledger.view
        self.hot.require()
        chosen = (segment for segment in view.sealed if not segment_ids or segment.segment_id in segment_ids)
        return [segment for segment in chosen if not segment.is_being_removed]

    @changes
    def tick(self) -> Moved:
        """Run one round of upkeep (retention, compression, uploads, eviction, the manifest log) and return what it did."""
        return self.upkeep.tick()

    def mark(self) -> object:
        """Return a value that differs from an earlier one if upkeep may have work: segments, the log, or unprojected steps."""
        log = self.ledger.log
        return self.ledger.view, self.ledger.is_behind, None if isinstance(log, AbsentLog) else log.committed

    # ── retention ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def retention(self) -> Retention:
        """The retention in effect: the stream's own, or the store's."""
        return self.upkeep.retention

    @changes
    def retain(self, retention: Retention | None) -> None:
        """Set the stream's own retention; `None` applies that of the store's settings."""
        self._state.retain(retention)

    @changes
    def retire(self) -> int:
        """Remove the segments that retention allows now, and return their number."""
        return self.upkeep.retire()

    # ── the manifest log ──────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def mode(self) -> Mode:
        """The mode of the manifest log."""
        return self.ledger.mode

    @changes
    def switch(self, mode: Mode | str) -> None:
        """Change the mode of the manifest log while the stream is open."""
        with self.hot.paused():
            self.ledger.switch(Mode(mode))

    def compare(self) -> list[Divergence]:
        """Return where the manifest log and LMDB differ."""
        return self.ledger.compare()

    def figures(self) -> LogFigures:
        """Return the manifest log's metrics, under the design document's names."""
        return self.ledger.figures()

    def info(self) -> StreamInfo:
        """Return statistics of the stream."""
        return info_of(self)

    @property
    def store(self) -> ObjectStore:
        """The object store of tier 2."""
        return self._store()

    # ── background work and closing ───────────────────────────────────────────────────────────────────────────────────
    @property
    def failure(self) -> QuireError | None:
        """The error that has made the stream unusable, if any."""
        return self.hot.failure

    def _request_round(self) -> None:
        if not self._sync_requested:
            self._sync_requested = True
            if self._keeper is not None:
                self._keeper.ask(self._settings.sync_seconds)

    def _keep(self) -> float | None:
        """Run one round of the keeper; return the seconds until the next one, `None` if none is due."""
        sync, self._sync_requested = self._sync_requested, False
        try:
            self.keep(sync=sync)
        except (StoreClosed, StoreUnusable):
            return None
        except StorageFault as error:  # for example a full disk: pending records stay pending, and are retried
            emit("warning", "stream.keeper_waits", stream=self.stream_id, error=str(error))
            self._sync_requested = True
            return RETRY_SECONDS
        due = [seconds for seconds in (self._rotation_due, self.hot.seconds_until_seal()) if seconds is not None]
        return max(min(due), 0.0) if due else None

    def keep(self, *, sync: bool = True) -> None:
        """Do the work of one keeper round: sync, seal by time, preallocate a file, update LMDB, rotate the manifest log."""
        self.hot.require()
        if sync:
            self.hot.sync_quietly()
        if self.hot.is_due():
            self.hot.seal(quietly=True)
        self.hot.prepare()
        self.ledger.project()
        self._rotation_due = self.ledger.rotate_when_due()

    def _stop(self) -> None:
        if self._keeper is not None:
            self._keeper.stop()

    def close(self) -> None:
        """Sync, seal and close. Closing twice is allowed."""
        self._stop()
        if isinstance(self.hot.failure, StoreClosed):
            return
        with ExitStack() as closing:  # runs the callbacks in reverse order, each even if another one raises
            closing.callback(self.ledger.close)
            closing.callback(self.ledger.project)
            closing.callback(self.hot.close)
        if not isinstance(self.ledger.log, AbsentLog):
            # Not reached if closing raised: a count above what the log has makes the next opening refuse it.
            self._state.persist_log_records(self.ledger.log.index.records)

    def abandon(self) -> None:
        """Release everything and write nothing more, as after a crash."""
        self.upkeep.stop()
        self.hot.abandon(StoreClosed("the stream is closed", hint="open it again", stream_id=self.stream_id))
        self.ledger.log.abandon()
        self._stop()

    def forked(self) -> None:
        """Make the stream unusable in the child of a fork()."""
        self._keeper = None
        self.hot.forked()
        self._reader.failure = self.hot.failure


class _Later:
    """The object store, opened on first use: appending to a stream needs no cloud client."""

    def __init__(self, store: Callable[[], ObjectStore]) -> None:
        self._open = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._open(), name)
