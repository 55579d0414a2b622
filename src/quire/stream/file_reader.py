"""Reads a stream from its files in a process that does not own the store, whether or not another process owns it.

*Listed* segments are sealed ones with a row in LMDB; they are read from any of their copies (`remote_read.py`). *Unlisted* ones
are the hot files after those: the segment that is being written, and segments that were sealed a moment ago. Records are
returned in order, each once, and only when they are durable. The reader changes and holds nothing, so it does not affect the
writer. A file that the writer removes stays readable while it is open here; a copy that has moved is looked up again; records
that retention removes meanwhile are `CursorLost`, as for readers inside the owner.

Threads: any; an iterator belongs to one. Raises: `CursorLost`, `OutOfRange`, `Corruption`, `UnknownDatabase`, `WrongKind`,
`StoreClosed`, and what disk, object store and manifest raise."""

from __future__ import annotations

import shlex
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.core.clock import Clock
from quire.core.errors import Corruption, CursorLost, QuireError, StoreClosed
from quire.core.timeline import Gaps, skip_gap
from quire.durable.checksums import Bytes
from quire.durable.failpoints import hit
from quire.durable.files import File, directories_id
from quire.durable.names import Tier
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbKind, Residency, WalState
from quire.manifest.store import ManifestStore
from quire.stream.files import StreamFiles
from quire.stream.gaps import begin_at, begin_within, gaps_with_range
from quire.stream.remote_read import SharedReader, SharedSegment, SharedStream
from quire.stream.segment import (
    BLOCK_HEAD_BYTES,
    HEADER_BYTES,
    RecordBlock,
    StreamSegmentHeader,
    decode_head,
    is_body_good,
)
from quire.stream.sources import WINDOW_BYTES, record_batches
from quire.stream.spans import RecordSpan, StreamRecord
from quire.stream.state import load_state

if TYPE_CHECKING:
    from quire.objects.api import ObjectStore

Piece = tuple[RecordBlock, Bytes]
"""A verified block and its body."""

GAP_SECONDS = 5.0
"""How long a record may be missing before it counts as removed: its segment may be changing from unlisted to listed."""
POLL_SECONDS = 0.05
"""Interval of polling for the next record: the writer is another process and sends no notification."""


@dataclass(slots=True)
class _Place:
    """The position up to which an unlisted file was read."""

    header: StreamSegmentHeader
    offset: int
    record: int
    stamp: int = 0


class StreamContents(NamedTuple):
    """The state of a stream at one moment."""

    segments: tuple[SharedSegment, ...]
    """The segments in order, each beginning where its predecessor ends."""
    first_record: int
    end_record: int
    gaps: Gaps

    def holds(self, record: int) -> bool:
        """Return whether a segment has the record."""
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
        """A position that no segment has although later records exist, and the monotonic time when it was first noticed."""

    def close(self) -> None:
        """Close the reader, and end waiting threads. Closing twice is allowed."""
        self._closed.set()

    def _require(self) -> None:
        if self._closed.is_set():
            raise StoreClosed("the stream is closed", hint="open it again", stream=self.name)

    # ── bounds ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def contents(self, after_segment: int = 0) -> StreamContents:
        """Return the current state of the stream, with only the segments after `after_segment`."""
        while True:
            self._require()
            before = directories_id(self.files.disk)
            try:
                contents = self._read_contents(after_segment)
            except QuireError:
                if directories_id(self.files.disk) == before:
                    raise
                continue
            if directories_id(self.files.disk) == before:  # otherwise files and rows may belong to two directories
                return contents

    def _read_contents(self, after_segment: int) -> StreamContents:
        while (contents := self._try_contents(after_segment)) is None:
            self._require()
        return contents

    def _try_contents(self, after_segment: int) -> StreamContents | None:
        """Return the state of the stream; `None` if an unlisted file was removed since LMDB was read: it has a row by now, and
        without it the stream would seem to end before records that were already returned."""
        hot = self.files.segments(Tier.HOT)  # before LMDB is read: a segment whose file is gone by then has a row
        with self._manifest.read() as txn:
            txn.live(self.stream_id, DbKind.STREAM)  # it may have been dropped
            segments = list(self._listed(txn, after_segment))
            first = segments[0] if segments and not after_segment else next(self._listed(txn, 0), None)
            state, first_number = txn.wal_state(self.stream_id), txn.first_number()
        hit("stream.reader.rows_read")
        listed = max(after_segment, state.last_sealed_segment if state is not None else 0)
        end = (state.last_applied_lsn if state is not None else 0) + 1
        gaps = load_state(self.files).gaps  # after the listing: a gap is recorded before its range has a segment
        first_record = first.base_record if first is not None else None
        for segment_id in hot:
            if segment_id <= listed:
                continue
            try:
                segment = self._unlisted(segment_id)
            except FileNotFoundError:
                return None
            if segment is None:
                continue
            if segment.base_record != skip_gap(gaps, end):
                break  # its predecessor is damaged: records after it are returned only when the owner has repaired it
            segments.append(segment)
            first_record, end = first_record or segment.base_record, segment.end_record
        gaps = gaps_with_range(gaps, end, first_number)
        end = skip_gap(gaps, end)
        return StreamContents(tuple(segments), end if first_record is None else first_record, end, gaps)

    def bounds(self) -> tuple[int, int]:
        """Return the id of the first retained record, and the id after the last."""
        contents = self.contents()
        return contents.first_record, contents.end_record

    @property
    def first_record(self) -> int:
        """The id of the first retained record."""
        return self.contents().first_record

    @property
    def end_record(self) -> int:
        """The id after the last durable record."""
        return self.contents().end_record

    @property
    def gaps(self) -> Gaps:
        """Record ids that takeovers have skipped."""
        return self.contents().gaps

    # ── records ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def read(self, start: int | None = None, stop: int | None = None) -> Iterator[StreamRecord]:
        """Yield records from `start` (default: the first) to before `stop` (default: the current end)."""
        for span in self._checked_spans(start, stop):
            yield from span.records()

    def read_batches(self, start: int | None = None, stop: int | None = None) -> Iterator[Any]:
        """Yield the same records as Arrow record batches."""
        yield from record_batches(self._checked_spans(start, stop))

    def _checked_spans(self, start: int | None, stop: int | None) -> Iterator[RecordSpan]:
        contents = self.contents()
        first, end = contents.first_record, contents.end_record
        begin = first if start is None else begin_within(contents.gaps, start, first, end)
        yield from self._spans(contents, begin, end if stop is None else min(stop, end))

    def _spans(self, contents: StreamContents, start: int, stop: int) -> Iterator[RecordSpan]:
        # A new reader each time: it checks for the stream's directory, which is created with the first record.
        reader = SharedReader(self.files, self._store, self.stream_id, self._locate, uploads=False, gaps=contents.gaps)
        for span in reader.spans(contents.segments, start, stop):
            yield span
            self._require()

    def _locate(self, start: int, stop: int, _upload: bool) -> SharedStream:
        """Return the current segments. `SharedReader` calls this when a copy has moved."""
        segments = self.contents().segments
        wanted = tuple(segment for segment in segments if segment.end_record > start and segment.base_record < stop)
        return SharedStream("", self.stream_id, self.files.root, "", start, stop, wanted)

    def tail(self, start: int | None = None, *, timeout: float | None = None) -> Iterator[StreamRecord]:
        """Yield records from `start` (default: the current end) without end; stop if none arrives for `timeout` seconds."""
        contents = self.contents()
        position = contents.end_record if start is None else begin_at(contents.gaps, start)
        after_segment, since = 0, self._clock.monotonic()
        while True:
            contents = self.contents(after_segment)
            position = skip_gap(contents.gaps, position)
            if contents.holds(position):
                for span in self._spans(contents, position, contents.end_record):
                    for record in span.records():
                        yield record
                        position = record.id + 1
                done = [part.segment_id for part in contents.segments if part.sealed_ms and part.end_record <= position]
                after_segment = max([after_segment, *done])
                since = self._clock.monotonic()
                continue
            self._note_gap(position, position < contents.end_record)
            if timeout is not None and self._clock.monotonic() - since >= timeout:
                return
            self._closed.wait(POLL_SECONDS)

    def wait(self, record: int, timeout: float | None = None) -> bool:
        """Wait until a record is durable; return False on timeout."""
        since = self._clock.monotonic()
        while self.end_record <= record:
            if timeout is not None and self._clock.monotonic() - since >= timeout:
                return False
            self._closed.wait(POLL_SECONDS)
        return True

    def seek(self, timestamp_ms: int) -> int:
        """Return the id of the first record at or after a timestamp; the end if there is none."""
        contents = self.contents()
        young = [segment for segment in contents.segments if not 0 < segment.sealed_ms < timestamp_ms]
        start = young[0].base_record if young else contents.end_record
        for span in self._spans(contents, start, contents.end_record):
            if (record := span.first_at(timestamp_ms)) is not None:
                return record
        return contents.end_record

    def _note_gap(self, position: int, is_ahead: bool) -> None:
        """Note since when `position` has been missing although later records exist; raise `CursorLost` after `GAP_SECONDS`."""
        with self._lock:
            now = self._clock.monotonic()
            if not is_ahead:
                self._gap = None
            elif self._gap is None or self._gap[0] != position:
                self._gap = (position, now)
            elif now - self._gap[1] > GAP_SECONDS:
                hint = f"`quire stream info {shlex.quote(self.name)}` shows which are"
                raise CursorLost("these records are no longer retained", hint=hint, start=position)

    # ── segments ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def _listed(self, txn: ReadTxn, after_segment: int) -> Iterator[SharedSegment]:
        """Yield the listed segments after segment `after_segment`, in order."""
        for (db_id, segment_id), row in txn.scan(t.WAL_CATALOG, start=(self.stream_id, after_segment + 1)):
            if db_id != self.stream_id:
                return
            if row.state is not WalState.TRUNCATED:
                key = row.suffix if row.residency is not Residency.LOCAL else ""
                yield SharedSegment(
                    segment_id, row.first_lsn, row.last_lsn + 1, row.used_bytes, row.crc64, row.sealed_at_ms, key=key
                )

    def _unlisted(self, segment_id: int) -> SharedSegment | None:
        """Return the segment of a hot file without a row, up to its last complete commit, which is synced; `None` if it has no
        commit. Raises `FileNotFoundError`."""
        with self._lock, closing(self.files.disk.open(self.files.segment(Tier.HOT, segment_id), write=False)) as file:
            begun = place = self._begin(file, segment_id)
            earlier = self._places.get(segment_id)
            if earlier is not None and place is not None and earlier.header.crc64 == place.header.crc64:
                begun = place = earlier  # otherwise the file was replaced: a standby was restored from a base
            while place is not None:
                _, following = _commits(file, place)
                if following.offset == place.offset:
                    break
                place = following
            if begun is None or place is None or place.record == place.header.base_record:
                return None
            if segment_id not in self._places or place.offset > begun.offset:
                file.sync()  # the writer may not have synced its last block: only durable records are returned
            self._places = {number: old for number, old in self._places.items() if number >= segment_id - 1}
            self._places[segment_id] = place
        return SharedSegment(segment_id, place.header.base_record, place.record, place.offset, 0, 0)

    def _begin(self, file: File, segment_id: int) -> _Place | None:
        try:
            header = StreamSegmentHeader.decode(file.read_at(HEADER_BYTES, 0), path=file.path)
        except Corruption:
            return None  # without a valid header the file has no records yet
        if (header.stream_id, header.segment_id) != (self.stream_id, segment_id):
            return None
        return _Place(header, HEADER_BYTES, header.base_record)


def _commits(file: File, place: _Place) -> tuple[list[Piece], _Place]:
    """Return the complete commits from a position on, about one window of them, and the position after them."""
    window, here = WINDOW_BYTES, file.size()
    while True:
        window = min(window, max(here - place.offset, 0))  # a head may declare more bytes than the file has
        raw = memoryview(file.read_at(window, place.offset))
        pieces, reached, need = _parsed(raw, place)
        if pieces or need <= len(raw) or len(raw) < window or window + place.offset >= here:
            return pieces, reached
        window = max(need, 2 * window)  # the commit is larger than the window


def _parsed(raw: memoryview, place: _Place) -> tuple[list[Piece], _Place, int]:
    """Return the complete commits at the start of `raw`, the position after them, and the bytes needed for the next block; 0 if
    more bytes would not help."""
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
            break  # the block is being written
        pieces.append((block, body))
        at, record, stamp = block.end - place.offset, block.end_record, block.timestamp_ms
        if block.is_commit:
            committed, reached = len(pieces), _Place(place.header, block.end, record, stamp)
    need = at + BLOCK_HEAD_BYTES if at + BLOCK_HEAD_BYTES > len(raw) else 0
    return pieces[:committed], reached, need
