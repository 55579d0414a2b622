"""Reads a stream across all tiers: records in order, by id or by time, one by one or as Arrow batches.

A read covers [start, stop). Below the first retained record, and from a record that was lost in a takeover, it raises
`CursorLost`: there is never a silent gap. The nearest copy is read: hot file, compressed file, object; of an object only the
needed frames are fetched. A copy that moves while it is being read is looked up again. A tail sees durable records only, each
once, in order.

Threads: any; an iterator belongs to one. Raises: `CursorLost`, `OutOfRange`, `Corruption`, `ObjectNotFound`,
`ObjectStoreUnavailable`, `StoreClosed`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.core.errors import Corruption, CursorLost, QuireError, StoreClosed
from quire.core.events import emit
from quire.core.settings import StreamSettings
from quire.core.timeline import Gaps, skip_gap
from quire.stream.files import StreamFiles
from quire.stream.gaps import begin_at, begin_within
from quire.stream.hot import HotLog
from quire.stream.segment import HEADER_BYTES
from quire.stream.segments import SegmentList, StreamSegment
from quire.stream.sources import (
    VERIFY,
    Lost,
    Marks,
    StreamCache,
    WarmSource,
    hot_source,
    record_batches,
    remote_source,
    retried,
    warm_source,
)
from quire.stream.spans import RecordSpan, StreamRecord

if TYPE_CHECKING:
    from quire.objects.api import ObjectStore

RACES_MAX = 64
"""How often a read looks up moved copies again before it treats the copy as damaged."""

_HOT, _WARM, _REMOTE = 0, 1, 2


class StreamReader:
    """Reads one stream."""

    def __init__(
        self,
        files: StreamFiles,
        hot: HotLog,
        view: Callable[[], SegmentList],
        store: Callable[[], ObjectStore],
        cache: StreamCache,
        settings: StreamSettings,
        *,
        gaps: Gaps = (),
        touch: Callable[[int], None] = lambda _: None,
        hydrate: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._files = files
        self._hot = hot
        self._view = view
        self._store = store
        self._cache = cache
        self._settings = settings
        self.gaps = gaps
        """Record ids that takeovers have skipped."""
        self._touch = touch
        self._hydrate = hydrate
        self.failure: QuireError | None = None
        """Set in the child of a fork(), whose memory has the state as of the fork while the parent continues the stream."""

    def _require(self) -> None:
        if (why := self.failure) is not None:
            raise why.copied()

    # ── bounds ────────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def first_record(self) -> int:
        """The id of the first retained record."""
        for segment in self._view():
            if not segment.is_being_removed:
                return segment.base_record
        return self._hot.durable

    @property
    def end_record(self) -> int:
        """The id after the last durable record."""
        return self._hot.durable

    # ── records ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def read(self, start: int | None = None, stop: int | None = None) -> Iterator[StreamRecord]:
        """Yield records from `start` (default: the first) to before `stop` (default: the current end)."""
        first, last = self._range(start, stop)
        for span in self._spans(first, last):
            yield from span.records()

    def read_batches(self, start: int | None = None, stop: int | None = None) -> Iterator[Any]:
        """Yield the same records as Arrow record batches (`arrow_batches.SCHEMA`)."""
        first, last = self._range(start, stop)
        yield from record_batches(self._spans(first, last))

    def tail(self, start: int | None = None, *, timeout: float | None = None) -> Iterator[StreamRecord]:
        """Yield records from `start` (default: the current end) without end; stop if none arrives for `timeout` seconds."""
        self._require()
        position = self._hot.durable if start is None else begin_at(self.gaps, start)
        while True:
            position = skip_gap(self.gaps, position)
            if position < self._hot.durable:
                for record in self._newest(position) or self.read(position, self._hot.durable):
                    yield record
                    position = record.id + 1
            elif not self.wait(position, timeout):
                return

    def _newest(self, position: int) -> list[StreamRecord]:
        """Return the records from a position on if they are those that became durable last, which are still in memory."""
        first, stamp, payloads = self._hot.last_synced
        if not first <= position < first + len(payloads):
            return []
        return [
            StreamRecord(position + number, stamp, payload)
            for number, payload in enumerate(payloads[position - first :])
        ]

    def wait(self, record: int, timeout: float | None = None) -> bool:
        """Wait until a record is durable; return False on timeout."""
        hot = self._hot
        came = hot.waiters.sleep_until(lambda: hot.durable > record or hot.failure is not None, timeout)
        if hot.durable <= record and hot.failure is not None:
            if isinstance(hot.failure, StoreClosed):
                raise StoreClosed("the stream was closed", hint="open it again")
            hot.require()
        return came and hot.durable > record

    def seek(self, timestamp_ms: int) -> int:
        """Return the id of the first record at or after a timestamp; the end if there is none."""
        self._require()
        view = self._view()
        first = view.before(timestamp_ms)
        position = max(first.base_record, self.first_record) if first is not None else self.end_record
        search = _Search()
        while position < self._hot.durable:
            segment, tier = self._choose(position, position + 1, search)
            try:
                record = self._first_at(segment, tier, timestamp_ms)
            except Lost as lost:
                self._lost(position, segment, tier, lost, search)
                continue
            if record is not None:
                return min(max(record, position), self._hot.durable)
            behind = max(segment.end_record, position + 1) if segment.is_sealed else self._hot.durable
            position = skip_gap(self.gaps, behind)
        return self._hot.durable

    # ── copies ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _range(self, start: int | None, stop: int | None) -> tuple[int, int]:
        self._require()
        first, end = self.first_record, self._hot.durable
        begin = first if start is None else begin_within(self.gaps, start, first, end)
        return begin, min(end, end if stop is None else stop)

    def _spans(self, position: int, stop: int) -> Iterator[RecordSpan]:
        """Yield the verified records of [position, stop)."""
        search = _Search()
        while (position := skip_gap(self.gaps, position)) < stop:
            segment, tier = self._choose(position, stop, search)
            begun = position
            try:
                for span in self._of_copy(segment, tier, position, stop):
                    yield span.within(position, stop)
                    position = span.end_record
                if position == begun:
                    raise Lost(_incomplete_copy(segment, position))
            except Lost as lost:
                self._lost(position, segment, tier, lost, search)

    def _choose(self, position: int, stop: int, search: _Search) -> tuple[StreamSegment, int]:
        """Return the copy from which to read a position."""
        while True:
            segment = self._view().holding(position)
            if segment is None or segment.is_being_removed:
                raise CursorLost("these records are no longer retained", hint="start at `first_record`", start=position)
            tier = next(tier for tier in _tiers(segment) if (segment, tier) not in search.bad)
            wanted = min(stop, segment.end_record or stop) - position
            if tier != _REMOTE or segment.segment_id in search.hydrated or wanted * 2 <= segment.records:
                return segment, tier
            search.hydrated.add(segment.segment_id)  # more than half of the segment is wanted: hydrate it, at most once
            self._hydrate(segment.segment_id)

    def _lost(self, position: int, segment: StreamSegment, tier: int, lost: Lost, search: _Search) -> None:
        """Handle a copy that could not be read: look it up again if it moved; otherwise try another copy, or raise."""
        search.races += 1
        # A segment whose copies moved is a different value: this was a race, not damage.
        if self._view().holding(position) != segment and search.races < RACES_MAX:
            return
        search.bad.add((segment, tier))
        if all((segment, tier) in search.bad for tier in _tiers(segment)):
            raise lost.error from lost
        emit(
            "warning",
            "stream.copy_damaged",
            stream=self._files.stream_id,
            segment_id=segment.segment_id,
            tier=tier,
            error=str(lost.error),
        )

    def _of_copy(self, segment: StreamSegment, tier: int, position: int, stop: int) -> Iterator[RecordSpan]:
        """Yield the blocks of one copy of a segment that have records of [position, stop)."""
        self._touch(segment.segment_id)
        stop = min(stop, segment.end_record or stop)
        if tier == _HOT:
            marks, end = self._where(segment)
            with hot_source(self._files, segment, end) as source:
                offset = HEADER_BYTES
                if position > segment.base_record:
                    marks = marks or self._marks(segment, source.marks)
                    offset = marks.with_record(position)
                yield from source.spans(offset, stop)
        elif tier == _WARM:
            with warm_source(self._files, segment, self._cache) as warm:
                yield from warm.spans(position, stop)
        else:
            yield from self._remote(segment).spans(position, stop)

    def _first_at(self, segment: StreamSegment, tier: int, timestamp_ms: int) -> int | None:
        """Return the first record of a segment at or after a timestamp."""
        if tier == _HOT:
            marks, end = self._where(segment)
            if marks is None:
                with hot_source(self._files, segment, end) as source:
                    marks = self._marks(segment, source.marks)
            return marks.first_at(timestamp_ms)
        if tier == _WARM:
            with warm_source(self._files, segment, self._cache) as warm:
                return warm.first_at(timestamp_ms)
        return self._remote(segment).first_at(timestamp_ms)

    def _where(self, segment: StreamSegment) -> tuple[Marks | None, int]:
        """Return the marks of the segment if it is being written, and the offset up to which blocks may be read."""
        if segment.is_sealed:
            return None, segment.durable_bytes
        live, durable = self._hot.segment, self._hot.durable
        if live is None or live.segment_id != segment.segment_id:
            raise Lost(StoreClosed("the stream was closed", hint="open it again"))  # or the segment was just sealed
        return Marks(live.firsts, live.offsets, live.stamps), live.end_of(durable)

    def _marks(self, segment: StreamSegment, make: Callable[[], Marks]) -> Marks:
        key = (self._files.stream_id, segment.segment_id, "marks")
        marks: Marks | None = self._cache.get(key)
        if marks is None:
            marks = make()
            self._cache.put(key, marks, 24 * len(marks.firsts) + 256)
        return marks

    def _remote(self, segment: StreamSegment) -> WarmSource:
        settings = self._settings
        pause = settings.retry_seconds
        retry = partial(retried, stream_id=self._files.stream_id, attempts=settings.attempts, pause_seconds=pause)
        return remote_source(self._files.stream_id, segment, self._store(), self._cache, retry)


class _Search:
    """What one read has found out about copies."""

    __slots__ = ("bad", "hydrated", "races")

    def __init__(self) -> None:
        self.bad: set[tuple[StreamSegment, int]] = set()
        """Copies that were damaged or missing although they had not moved."""
        self.hydrated: set[int] = set()
        """Segments whose hydration was requested."""
        self.races = 0


def _incomplete_copy(segment: StreamSegment, record: int) -> Corruption:
    return Corruption(
        "a segment's copy lacks some of its records", hint=VERIFY, segment=segment.segment_id, record=record
    )


def _tiers(segment: StreamSegment) -> list[int]:
    """Return the tiers with a complete copy, the nearest first. If there is none, return the hot one: its missing file is then
    the error."""
    tiers = [tier for tier, there in enumerate((segment.is_hot, segment.is_warm, segment.is_remote)) if there]
    return tiers or [_HOT]
