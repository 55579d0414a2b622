"""Reads a stream from its files in a process that does not own the store, whoever owns it, and whether anybody does.

Listed segments are sealed ones that LMDB has rows of; they are read wherever a copy is (`remote_read.py`). Unlisted ones are
hot files behind those: the segment that is being written, and what was sealed a moment ago. Records come in order, each once,
and what is given is durable. Nothing is changed or held: the writer does not notice. A file that it removes stays readable
while it is open here; a copy that has moved is looked up again; what retention takes meanwhile is `CursorLost`, as for readers
inside the owner.

Threads: any; an iterator belongs to one. Raises `CursorLost`, `OutOfRange`, `Corruption`, `UnknownDatabase`, `WrongKind`,
`StoreClosed`, and what disk, object store and manifest raise."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.core.clock import Clock
from quire.core.errors import Corruption, CursorLost, OutOfRange, QuireError, StoreClosed
from quire.core.timeline import Gaps, settled
from quire.durable.checksums import Bytes
from quire.durable.files import File, exchange_of
from quire.durable.names import Tier
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbKind, Residency, WalState
from quire.manifest.store import ManifestStore
from quire.stream.files import StreamFiles
from quire.stream.gaps import begin_at, gaps_with_range
from quire.stream.remote_read import SharedReader, SharedSegment, SharedStream
from quire.stream.segment import (
    BLOCK_HEAD_BYTES,
    HEADER_BYTES,
    RecordBlock,
    StreamSegmentHeader,
    decode_head,
    is_body_good,
)
from quire.stream.sources import WINDOW_BYTES
from quire.stream.spans import RecordSpan, StreamRecord, record_batches
from quire.stream.state import load_state

if TYPE_CHECKING:
    from quire.objects.api import ObjectStore

Piece = tuple[RecordBlock, Bytes]
"""A block and its body, checked."""

GAP_SECONDS = 5.0
"""How long a record may be nowhere before it is gone: a segment may be between two places."""
POLL_SECONDS = 0.05
"""Between two looks for the next record: the writer is another process, and does not call."""


@dataclass(slots=True)
class _Place:
    """How far an unlisted file was read."""

    header: StreamSegmentHeader
    offset: int
    record: int
    stamp: int = 0


class StreamLook(NamedTuple):
    """A stream at one moment."""

    segments: tuple[SharedSegment, ...]
    """In order, each where the one before ends."""
    first_record: int
    end_record: int
    gaps: Gaps

    def holds(self, record: int) -> bool:
        """Whether a segment has the record."""
        place = bisect_right(self.segments, record, key=lambda segment: segment.base_record) - 1
        return place >= 0 and record < self.segments[place].end_record


class StreamFileReader:
    """One stream, read from its files."""

    def __init__(
        self,
        manifest: ManifestStore,
        db: int | str,
        files: Callable[[int], StreamFiles],
        store: Callable[[], ObjectStore],
    ) -> None:
        # constant after construction
        with manifest.read() as txn:
            self.stream_id, record = txn.live(db, DbKind.STREAM)
        self.name = record.name
        self._manifest = manifest
        self._clock: Clock = manifest.clock
        self._store = store
        self.files = files(self.stream_id)
        self._closed = threading.Event()
        # guarded by _lock
        self._lock = threading.Lock()
        self._places: dict[int, _Place] = {}
        self._gap: tuple[int, float] | None = None
        """A position that no segment has although there are records behind it, and since when."""

    def close(self) -> None:
        """End whoever waits. A second time: nothing."""
        self._closed.set()

    def _require(self) -> None:
        if self._closed.is_set():
            raise StoreClosed("the stream is closed", hint="open it again", stream=self.name)

    # ── what there is ─────────────────────────────────────────────────────────────────────────────────────────────────
    def look(self, behind: int = 0) -> StreamLook:
        """The stream as it is now; of its segments those behind one."""
        while True:
            self._require()
            before = exchange_of(self.files.disk)
            try:
                look = self._look(behind)
            except QuireError:
                if exchange_of(self.files.disk) == before:
                    raise
                continue
            if exchange_of(self.files.disk) == before:  # else files and rows may be of two states
                return look

    def _look(self, behind: int) -> StreamLook:
        hot = self.files.segments(Tier.HOT)  # before LMDB is read: a segment whose file has gone by then has a row
        with self._manifest.read() as txn:
            txn.live(self.stream_id, DbKind.STREAM)  # it may have been dropped
            segments = list(self._listed(txn, behind))
            first = segments[0] if segments and not behind else next(self._listed(txn, 0), None)
            state, first_number = txn.wal_state(self.stream_id), txn.first_number()
        listed = max(behind, state.last_sealed_segment if state is not None else 0)
        end = (state.last_applied_lsn if state is not None else 0) + 1
        gaps = load_state(self.files).gaps  # after the files were listed: a range is known before it has a segment
        first_record = first.base_record if first is not None else None
        for segment_id in hot:
            segment = self._unlisted(segment_id) if segment_id > listed else None
            if segment is None:
                continue
            if segment.base_record != settled(gaps, end):
                break  # what comes before it is between two places: the next look sees it
            segments.append(segment)
            first_record, end = first_record or segment.base_record, segment.end_record
        gaps = gaps_with_range(gaps, end, first_number)
        end = settled(gaps, end)
        return StreamLook(tuple(segments), end if first_record is None else first_record, end, gaps)

    def bounds(self) -> tuple[int, int]:
        """The id of the first record that is retained, and the one behind the last."""
        look = self.look()
        return look.first_record, look.end_record

    @property
    def first_record(self) -> int:
        """The id of the first record that is retained."""
        return self.look().first_record

    @property
    def end_record(self) -> int:
        """The id behind the last durable record."""
        return self.look().end_record

    @property
    def gaps(self) -> Gaps:
        """Record ids that takeovers have left out."""
        return self.look().gaps

    # ── records ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def read(self, start: int | None = None, stop: int | None = None) -> Iterator[StreamRecord]:
        """Records from `start` (default: the first) to before `stop` (default: the end as it is now)."""
        for span in self._asked(start, stop):
            yield from span.records()

    def read_batches(self, start: int | None = None, stop: int | None = None) -> Iterator[Any]:
        """The same as Arrow record batches."""
        yield from record_batches(self._asked(start, stop))

    def _asked(self, start: int | None, stop: int | None) -> Iterator[RecordSpan]:
        look = self.look()
        first, end = look.first_record, look.end_record
        begin = first if start is None else begin_at(look.gaps, start)
        if begin < first:
            hint = f"the first one is {first}"
            raise CursorLost("these records are no longer retained", hint=hint, start=begin, first=first)
        if begin > end:
            raise OutOfRange("this record does not exist yet", hint=f"the next one is {end}", start=begin, end=end)
        yield from self._spans(look, begin, end if stop is None else min(stop, end))

    def _spans(self, look: StreamLook, start: int, stop: int) -> Iterator[RecordSpan]:
        # A new one each time: it looks for the stream's directory, which is made with the first record.
        reader = SharedReader(self.files, self._store, self.stream_id, self._locate, uploads=False, gaps=look.gaps)
        for span in reader.spans(look.segments, start, stop):
            yield span
            self._require()

    def _locate(self, start: int, stop: int, _upload: bool) -> SharedStream:
        """What there is by now: how the reader looks again when a copy has moved."""
        segments = self.look().segments
        wanted = tuple(segment for segment in segments if segment.end_record > start and segment.base_record < stop)
        return SharedStream("", self.stream_id, self.files.root, "", start, stop, wanted)

    def tail(self, start: int | None = None, *, timeout: float | None = None) -> Iterator[StreamRecord]:
        """Records from `start` (default: what comes from now on) for ever; ends if none comes for `timeout` seconds."""
        look = self.look()
        position = look.end_record if start is None else begin_at(look.gaps, start)
        behind, since = 0, self._clock.monotonic()
        while True:
            look = self.look(behind)
            position = settled(look.gaps, position)
            if look.holds(position):
                for span in self._spans(look, position, look.end_record):
                    for record in span.records():
                        yield record
                        position = record.id + 1
                done = [part.segment_id for part in look.segments if part.sealed_ms and part.end_record <= position]
                behind = max([behind, *done])
                since = self._clock.monotonic()
                continue
            self._note_gap(position, position < look.end_record)
            if timeout is not None and self._clock.monotonic() - since >= timeout:
                return
            self._closed.wait(POLL_SECONDS)

    def wait(self, record: int, timeout: float | None = None) -> bool:
        """Sleep until a record is durable; False if the time was up first."""
        since = self._clock.monotonic()
        while self.end_record <= record:
            if timeout is not None and self._clock.monotonic() - since >= timeout:
                return False
            self._closed.wait(POLL_SECONDS)
        return True

    def seek(self, timestamp_ms: int) -> int:
        """The id of the first record that is not before a moment; the end if there is none."""
        look = self.look()
        young = [segment for segment in look.segments if not 0 < segment.sealed_ms < timestamp_ms]
        start = young[0].base_record if young else look.end_record
        for span in self._spans(look, start, look.end_record):
            if (record := span.first_at(timestamp_ms)) is not None:
                return record
        return look.end_record

    def _note_gap(self, position: int, is_ahead: bool) -> None:
        """Remember since when there have been records ahead that do not follow the last one."""
        with self._lock:
            now = self._clock.monotonic()
            if not is_ahead:
                self._gap = None
            elif self._gap is None or self._gap[0] != position:
                self._gap = (position, now)
            elif now - self._gap[1] > GAP_SECONDS:
                hint = f"`quire stream info {self.name}` says which are"
                raise CursorLost("these records are no longer retained", hint=hint, start=position)

    # ── segments ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def _listed(self, txn: ReadTxn, behind: int) -> Iterator[SharedSegment]:
        """The listed segments behind one, in order."""
        for (db_id, segment_id), row in txn.scan(t.WAL_CATALOG, start=(self.stream_id, behind + 1)):
            if db_id != self.stream_id:
                return
            if row.state is not WalState.TRUNCATED:
                key = row.suffix if row.residency is not Residency.LOCAL else ""
                yield SharedSegment(
                    segment_id, row.first_lsn, row.last_lsn + 1, row.used_bytes, row.crc64, row.sealed_at_ms, key=key
                )

    def _unlisted(self, segment_id: int) -> SharedSegment | None:
        """A hot file that has no row yet, up to its last whole commit, which is synced; `None` if it has none."""
        with self._lock:
            try:
                file = self.files.disk.open(self.files.segment(Tier.HOT, segment_id), write=False)
            except FileNotFoundError:
                return None  # it has moved on: next time it has a row
            try:
                begun = place = self._begin(file, segment_id)
                known = self._places.get(segment_id)
                if known is not None and place is not None and known.header.crc64 == place.header.crc64:
                    begun = place = known  # else the file was replaced: a standby has begun again with a base
                while place is not None:
                    _, following = _commits(file, place)
                    if following.offset == place.offset:
                        break
                    place = following
                if begun is None or place is None or place.record == place.header.base_record:
                    return None
                if segment_id not in self._places or place.offset > begun.offset:
                    file.sync()  # its writer may have written a block and not synced it yet: only durable records are given
                self._places = {number: old for number, old in self._places.items() if number >= segment_id - 1}
                self._places[segment_id] = place
            finally:
                file.close()
        return SharedSegment(segment_id, place.header.base_record, place.record, place.offset, 0, 0)

    def _begin(self, file: File, segment_id: int) -> _Place | None:
        try:
            header = StreamSegmentHeader.decode(file.read_at(HEADER_BYTES, 0), path=file.path)
        except Corruption:
            return None  # its name comes before its header
        if (header.stream_id, header.segment_id) != (self.stream_id, segment_id):
            return None
        return _Place(header, HEADER_BYTES, header.base_record)


def _commits(file: File, place: _Place) -> tuple[list[Piece], _Place]:
    """Whole commits from a place on, about a window of them, and the place behind."""
    window, here = WINDOW_BYTES, file.size()
    while True:
        window = min(window, max(here - place.offset, 0))  # a head may ask for more than there is
        raw = memoryview(file.read_at(window, place.offset))
        pieces, reached, need = _parsed(raw, place)
        if pieces or need <= len(raw) or len(raw) < window or window + place.offset >= here:
            return pieces, reached
        window = max(need, 2 * window)  # a commit that is larger


def _parsed(raw: memoryview, place: _Place) -> tuple[list[Piece], _Place, int]:
    """The whole commits that bytes begin with, the place behind them, and how many bytes tell more."""
    pieces: list[Piece] = []
    committed, at, reached = 0, 0, place
    record, stamp = place.record, place.stamp
    while (block := decode_head(raw, place.offset + at, place.header.crc64, at=at)) is not None:
        start = at + BLOCK_HEAD_BYTES
        if block.first_record != record or not block.records or block.timestamp_ms < stamp:
            break
        if start + block.body_bytes > len(raw):
            return pieces[:committed], reached, start + block.body_bytes
        body = raw[start : start + block.body_bytes]
        if not is_body_good(block, body):
            break  # it is being written
        pieces.append((block, body))
        at, record, stamp = block.end - place.offset, block.end_record, block.timestamp_ms
        if block.is_commit:
            committed, reached = len(pieces), _Place(place.header, block.end, record, stamp)
    need = at + BLOCK_HEAD_BYTES if at + BLOCK_HEAD_BYTES > len(raw) else 0
    return pieces[:committed], reached, need
