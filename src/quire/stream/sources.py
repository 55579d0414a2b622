"""Reads records of one segment from one of its copies: the hot file, the compressed file or the object.

Records are exactly those that were written: blocks are verified against the segment's header, whose salt is new whenever a file
is reused, so that a recycled file cannot pass for the old segment; a compressed copy must have the checksum with which the
segment was sealed. Bytes are read once and then verified, so that the verified bytes are the ones returned.

Importable on executors. Threads: a source belongs to one reader; cached values are immutable or have their own lock.
Raises: `Lost`, with the error to raise if the copy has not moved."""

from __future__ import annotations

import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from quire.core.cache import ByteCache
from quire.core.checked_read import checked_read
from quire.core.errors import Corruption, ObjectNotFound, OutOfRange, QuireError, Unavailable
from quire.core.events import emit
from quire.core.limits import KIB
from quire.durable.files import File
from quire.durable.names import Tier
from quire.stream.files import StreamFiles
from quire.stream.segment import BLOCK_HEAD_BYTES, HEADER_BYTES, StreamSegmentHeader, decode_head
from quire.stream.spans import BATCH_BYTES, RecordSpan, spans_of
from quire.stream.warm import WarmReader

if TYPE_CHECKING:
    from quire.objects.api import ObjectStore
    from quire.stream.remote_read import SharedSegment
    from quire.stream.segments import StreamSegment

WINDOW_BYTES = 512 * KIB
"""Most bytes that one read of a file fetches, unless a block is larger: small enough for the CPU's cache."""
FIRST_WINDOW_BYTES = 128 * KIB
"""The same for the first read: reading one record does not wait for more."""

Retry = Callable[[Callable[[], bytes]], bytes]
"""Calls a function, and retries transient failures."""
Segment: TypeAlias = "StreamSegment | SharedSegment"

StreamCache = ByteCache[Hashable, Any]
"""The cache of all streams of a store: spans of frames, marks and open objects. Keys begin with the stream's id."""

VERIFY = "`quire stream verify` shows what is lost"


class Lost(Exception):
    """A copy could not be read. `error` is the error to raise if the copy has not moved."""

    def __init__(self, error: QuireError) -> None:
        super().__init__(str(error))
        self.error = error


class Marks(NamedTuple):
    """First record, offset and timestamp of each block of a segment."""

    firsts: array[int]
    offsets: array[int]
    stamps: array[int]

    def with_record(self, record: int) -> int:
        """Return the offset of the block that has a record."""
        return self.offsets[max(bisect_right(self.firsts, record) - 1, 0)]

    def first_at(self, timestamp_ms: int) -> int | None:
        """Return the first record of the first block at or after a timestamp; `None` if there is none."""
        place = bisect_left(self.stamps, timestamp_ms)
        return self.firsts[place] if place < len(self.stamps) else None


# ── tier 0 ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class HotSource:
    """The hot file of a segment. `end` is the offset at which its blocks end: `durable_bytes` if it is sealed."""

    def __init__(self, files: StreamFiles, segment: Segment, file: File, end: int) -> None:
        self._segment = segment
        self._file = file
        self._end = end
        header = self._header(files)
        self._seed = header.crc64
        self.created_at_ms = header.created_at_ms

    def _header(self, files: StreamFiles) -> StreamSegmentHeader:
        try:
            header = StreamSegmentHeader.decode(self._file.read_at(HEADER_BYTES, 0), path=self._file.path)
        except QuireError as error:
            raise Lost(error) from error
        expected = (files.stream_id, self._segment.segment_id, self._segment.base_record)
        # The file may have been recycled since the view was read: it then has the header of another segment.
        if (header.stream_id, header.segment_id, header.base_record) != expected:
            raise Lost(self._damaged("the file belongs to another segment", 0))
        return header

    def _damaged(self, what: str, offset: int) -> Corruption:
        where = {"path": self._file.path, "segment": self._segment.segment_id, "offset": offset}
        return Corruption(f"a stream's segment is damaged: {what}", hint=VERIFY, **where)

    def marks(self) -> Marks:
        """Return the marks of its blocks. Heads are verified, bodies are not."""
        marks = Marks(array("Q"), array("Q"), array("Q"))
        offset, raw, start = HEADER_BYTES, b"", 0
        while offset < self._end:
            if offset + BLOCK_HEAD_BYTES > start + len(raw):
                start = offset
                raw = self._file.read_at(min(WINDOW_BYTES, self._end - offset), offset)
            block = decode_head(raw, offset, self._seed, at=offset - start)
            if block is None:
                raise Lost(self._damaged("a block differs from what was written", offset))
            marks.firsts.append(block.first_record)
            marks.offsets.append(offset)
            marks.stamps.append(block.timestamp_ms)
            offset = block.end
        return marks

    def spans(self, offset: int, stop: int) -> Iterator[RecordSpan]:
        """Yield records from an offset on, up to before `stop`; many small blocks are joined to one span."""
        want = FIRST_WINDOW_BYTES
        while offset < self._end:
            size = min(want, self._end - offset)
            raw = memoryview(self._file.read_at(size, offset))
            span_scan = spans_of(raw, offset, self._seed, stop=stop)
            for span in span_scan.spans:
                yield span
                if span.end_record >= stop:
                    return
            if span_scan.bad_at is not None:
                raise Lost(self._damaged("a block differs from what was written", offset + span_scan.bad_at))
            is_short = len(raw) < size or span_scan.need_bytes <= len(raw) or offset + span_scan.need_bytes > self._end
            if not span_scan.used_bytes and is_short:
                raise Lost(self._damaged("it ends within a block", offset))
            offset += span_scan.used_bytes
            want = max(WINDOW_BYTES, span_scan.need_bytes)


def _opened(files: StreamFiles, segment: Segment, tier: Tier, what: str) -> closing[File]:
    path = files.segment(tier, segment.segment_id)
    try:
        return closing(files.disk.open(path, write=False))
    except FileNotFoundError as error:
        where = {"path": path, "segment": segment.segment_id}
        raise Lost(Corruption(f"{what}'s file is missing", hint=VERIFY, **where)) from error


@contextmanager
def hot_source(files: StreamFiles, segment: Segment, end: int) -> Iterator[HotSource]:
    """Open the hot file of a segment."""
    with _opened(files, segment, Tier.HOT, "a segment") as file:
        yield HotSource(files, segment, file, end)


# ── tiers 1 and 2 ─────────────────────────────────────────────────────────────────────────────────────────────────────
class WarmSource:
    """A compressed copy, whose frames are cached."""

    def __init__(
        self,
        stream_id: int,
        segment: Segment,
        reader: WarmReader,
        cache: StreamCache,
        *,
        lock: threading.Lock | None = None,
    ) -> None:
        self._stream_id = stream_id
        self._segment = segment
        self._cache = cache
        self._lock = lock or threading.Lock()
        """A zstd context can be used by one thread at a time."""
        self.reader = reader
        if reader.raw_crc64 != segment.crc64 or reader.end_record != segment.end_record:
            raise Lost(
                Corruption(
                    "a compressed segment is not the one that was sealed",
                    hint=VERIFY,
                    path=reader.path,
                    segment=segment.segment_id,
                )
            )

    def _frame_spans(self, number: int) -> list[RecordSpan]:
        key = (self._stream_id, self._segment.segment_id, number)
        spans: list[RecordSpan] | None = self._cache.get(key)
        if spans is None:
            try:
                spans = checked_read(lambda: self._read_spans(number))
            except (Corruption, ObjectNotFound, OutOfRange) as error:
                raise Lost(error) from error
            self._cache.put(key, spans, self.reader.frame(number).raw_bytes)
        return spans

    def _read_spans(self, number: int) -> list[RecordSpan]:
        with self._lock:
            return self.reader.spans(number)

    def spans(self, record: int, stop: int) -> Iterator[RecordSpan]:
        """Yield records from a record's block on, up to before `stop`; many small blocks are joined to one span."""
        for number in range(self.reader.frame_with(record), self.reader.frames):
            for span in self._frame_spans(number):
                if span.end_record > record:
                    yield span
                if span.end_record >= stop:
                    return

    def first_at(self, timestamp_ms: int) -> int | None:
        """Return the first record at or after a timestamp; `None` if there is none."""
        for number in range(self.reader.frame_at(timestamp_ms), self.reader.frames):
            for span in self._frame_spans(number):
                if (record := span.first_at(timestamp_ms)) is not None:
                    return record
        return None


@contextmanager
def warm_source(files: StreamFiles, segment: Segment, cache: StreamCache) -> Iterator[WarmSource]:
    """Open the compressed file of a segment."""
    with _opened(files, segment, Tier.WARM, "a compressed segment") as file:
        try:
            reader = WarmReader(
                lambda offset, size: file.read_at(size, offset),
                file.size(),
                path=file.path,
                raw_bytes=segment.durable_bytes,
            )
        except Corruption as error:
            raise Lost(error) from error
        yield WarmSource(files.stream_id, segment, reader, cache)


def remote_source(stream_id: int, segment: Segment, store: ObjectStore, cache: StreamCache, retry: Retry) -> WarmSource:
    """Open the object of a segment. Its table is fetched once and cached; frames are fetched when they are needed."""
    kept = (stream_id, segment.segment_id, segment.key)
    opened: tuple[WarmReader, threading.Lock] | None = cache.get(kept)
    if opened is None:

        def read(offset: int, size: int) -> bytes:
            return retry(lambda: store.get_range(segment.key, offset, size))

        try:
            # A log that was off while the object was uploaded has its key, but not its size.
            size = segment.warm_bytes or int.from_bytes(retry(lambda: _size_of(store, segment.key)), "little")
            path = f"{store.url}/{segment.key}"
            reader = checked_read(lambda: WarmReader(read, size, path=path, raw_bytes=segment.durable_bytes))
        except (Corruption, ObjectNotFound, OutOfRange) as error:
            raise Lost(_remote_error(error, segment)) from error
        opened = (reader, threading.Lock())
        cache.put(kept, opened, 1024 + reader.frames * 128)
    return WarmSource(stream_id, segment, opened[0], cache, lock=opened[1])


def retried(work: Callable[[], bytes], *, stream_id: int, attempts: int, pause_seconds: float) -> bytes:
    """Retry `work` while the object store is unavailable; each pause is twice as long as the previous one."""
    for _ in range(attempts - 1):
        try:
            return work()
        except Unavailable as error:
            emit("info", "stream.read_retried", stream=stream_id, seconds=pause_seconds, error=str(error))
        time.sleep(pause_seconds)
        pause_seconds *= 2
    return work()


def _size_of(store: ObjectStore, key: str) -> bytes:
    return store.head(key).size_bytes.to_bytes(8, "little")


def _remote_error(error: QuireError, segment: Segment) -> QuireError:
    if isinstance(error, OutOfRange):
        return Corruption("a segment's object is too short", hint=VERIFY, segment=segment.segment_id, key=segment.key)
    if isinstance(error, ObjectNotFound):
        where = {"segment": segment.segment_id, "key": segment.key}
        return ObjectNotFound("a segment's object is missing", hint=VERIFY, **where)
    return error


def record_batches(spans: Iterable[RecordSpan], batch_bytes: int = BATCH_BYTES) -> Iterator[Any]:
    """Return Arrow record batches of spans (`arrow_batches.SCHEMA`), each of about `batch_bytes`."""
    from quire.stream.arrow_batches import Batches  # loads Arrow, which most commands do not need

    return Batches(batch_bytes).of(spans)
