"""Spans: the records of one or many blocks, as a read returns them.

A *span* is consecutive records: ids, one timestamp for all or one for each, and payloads as a column. Every block of it is
verified. Large blocks, and a few small ones, each become a span over the bytes as they were read; many small ones are joined,
which copies their payloads. Arrow takes 200 ms to load, and then returns records five times as fast: so the first
`EARLY_RECORDS` records of a process come from plain columns; after those, or when a batch is requested, Arrow is loaded and
used for everything.

Importable on executors. Threads: any (functions and values). Format: docs/formats/stream-segment.md."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import count, pairwise, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire.core.limits import KIB
from quire.durable.checksums import Bytes, crc64, crc64_rows
from quire.stream.segment import (
    ALIGN,
    BLOCK_HEAD_BYTES,
    BODY_ALIGN,
    CHECKED_BYTES,
    MARK,
    RecordBlock,
    decode_head,
    is_body_good,
    records_of,
    table_bytes,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

SMALL_BYTES = 12 * KIB
"""Blocks that are smaller than this on average are joined."""

FEW_BLOCKS = 16
"""Fewer blocks than this are not joined: joining has a fixed cost, and a tail reads one block at a time."""

BATCH_BYTES = 128 * KIB
"""Spans are joined, which copies them, until an Arrow batch has this size; a larger span is a batch by itself."""

EARLY_RECORDS = 1024
"""Records that are read from plain columns before Arrow is loaded (0.2 ms in total)."""

_early_records = 0
"""Records read from plain columns so far; above `EARLY_RECORDS` once Arrow is loaded. Concurrent threads may make it slightly
inaccurate."""


class Plain:
    """The records of one verified block, with the part of the interface of `pyarrow.BinaryArray` that reads need."""

    __slots__ = ("_at", "_block", "_body", "_count")

    def __init__(self, block: RecordBlock, body: Bytes, at: int = 0, count: int | None = None) -> None:
        self._block = block
        self._body = memoryview(body)
        self._at = at
        self._count = block.records if count is None else count

    def __len__(self) -> int:
        return self._count

    def slice(self, at: int, count: int) -> Plain:
        """Return `count` records from position `at` on."""
        return Plain(self._block, self._body, self._at + at, count)

    def to_pylist(self) -> list[bytes]:
        """Return the records as bytes."""
        global _early_records
        _early_records += self._count
        if _early_records > EARLY_RECORDS:
            records: list[bytes] = self.arrow().to_pylist()
            return records
        ends = struct.unpack_from(f"<{self._count + 1}i", self._body, 4 * self._at)
        payloads = self._body[table_bytes(self._block.records) :]
        return [payloads[begin:end].tobytes() for begin, end in pairwise(ends)]

    def arrow(self) -> Any:
        """Return the records as a `pyarrow.BinaryArray`."""
        global _early_records
        _early_records = EARLY_RECORDS + 1
        return records_of(self._block, self._body).slice(self._at, self._count)


class StreamRecord(NamedTuple):
    """One record of a stream."""

    id: int
    timestamp_ms: int
    payload: bytes


class RecordSpan(NamedTuple):
    """Consecutive records."""

    first_record: int
    timestamp_ms: int | NDArray[np.int64]
    """One timestamp for all records, or one for each."""
    column: Any
    """The payloads: a `pyarrow.BinaryArray` or `Plain`."""
    size_bytes: int
    """Bytes of their blocks."""

    @property
    def end_record(self) -> int:
        """The id after the last record."""
        return self.first_record + len(self.column)

    @property
    def last_ms(self) -> int:
        """The newest timestamp."""
        return self.timestamp_ms if isinstance(self.timestamp_ms, int) else int(self.timestamp_ms[-1])

    def within(self, start: int, stop: int) -> RecordSpan:
        """Return the part in [start, stop)."""
        begin, end = max(start, self.first_record), min(stop, self.end_record)
        if end - begin == len(self.column):
            return self
        at, count = begin - self.first_record, end - begin
        stamps = self.timestamp_ms
        return RecordSpan(
            begin,
            stamps if isinstance(stamps, int) else stamps[at : at + count],
            self.column.slice(at, count),
            self.size_bytes,
        )

    def records(self) -> Iterator[StreamRecord]:
        """Return an iterator over the records."""
        stamps = self.timestamp_ms
        stamp_each = repeat(stamps) if isinstance(stamps, int) else stamps.tolist()
        return map(StreamRecord, count(self.first_record), stamp_each, self.column.to_pylist())

    def first_at(self, timestamp_ms: int) -> int | None:
        """Return the first record at or after a timestamp; `None` if there is none."""
        if self.last_ms < timestamp_ms:
            return None
        stamps = self.timestamp_ms
        return self.first_record + (0 if isinstance(stamps, int) else int(stamps.searchsorted(timestamp_ms)))


class SpanScan(NamedTuple):
    """The contents of a range of a segment's bytes."""

    spans: list[RecordSpan]
    used_bytes: int
    """Bytes up to the end of the last complete block."""
    need_bytes: int
    """Bytes that the next, incomplete block needs; 0 if there is none, or if its head is incomplete."""
    bad_at: int | None
    """Offset, in the given bytes, of a block that differs from what was written."""


def spans_of(raw: memoryview, offset: int, seed: int, *, at: int = 0, stop: int | None = None) -> SpanScan:
    """Return the records of the complete blocks in `raw`, the bytes of a segment from `offset` on, starting at `at` in `raw`
    and up to the record `stop`.

    `seed` is the crc64 of the segment's header.
    """
    starts, bodies, used, need, bad = _walk(raw, at, stop)
    if not starts:
        return SpanScan([], used, need, bad)
    few = FEW_BLOCKS if _early_records > EARLY_RECORDS else EARLY_RECORDS
    if len(starts) < few or used - at >= SMALL_BYTES * len(starts):
        spans, wrong = _large(raw, offset, seed, starts)
    else:
        spans, wrong = _small(raw, offset, seed, starts, bodies)
    if wrong is not None:
        return SpanScan(spans, wrong, 0, wrong)
    return SpanScan(spans, used, need, bad)


def _walk(raw: memoryview, at: int, stop: int | None) -> tuple[list[int], list[int], int, int, int | None]:
    """Return the offsets of complete blocks and the sizes of their bodies, from their unverified heads; then used bytes,
    needed bytes and the offset of a bad block, as in `SpanScan`."""
    words = raw[: len(raw) & ~3].cast("I")
    starts: list[int] = []
    bodies: list[int] = []
    last = len(raw) - BLOCK_HEAD_BYTES
    record: int | None = None
    while at <= last:
        place = at >> 2
        # Sizes of unverified heads decide only where to look: every head is verified before its records are returned.
        if words[place] != MARK:
            return starts, bodies, at, 0, at
        body = words[place + 2]
        if at + BLOCK_HEAD_BYTES + body > len(raw):
            return starts, bodies, at, BLOCK_HEAD_BYTES + body, None
        starts.append(at)
        bodies.append(body)
        at += (BLOCK_HEAD_BYTES + body + ALIGN - 1) & -ALIGN
        if stop is not None:
            if record is None:
                record = words[place + 4] | words[place + 5] << 32
            record += words[place + 3]
            if record >= stop:
                break
    return starts, bodies, at, 0, None


def _large(raw: memoryview, offset: int, seed: int, starts: list[int]) -> tuple[list[RecordSpan], int | None]:
    """Return one span for each block, and the offset of the first bad block."""
    column = records_of if _early_records > EARLY_RECORDS else Plain
    spans: list[RecordSpan] = []
    expected: int | None = None
    for at in starts:
        block = decode_head(raw, offset + at, seed, at=at)
        if block is None or (expected is not None and block.first_record != expected):
            return spans, at
        start = at + BLOCK_HEAD_BYTES
        body = raw[start : start + block.body_bytes]
        if not is_body_good(block, body):
            return spans, at
        expected = block.end_record
        spans.append(RecordSpan(block.first_record, block.timestamp_ms, column(block, body), block.body_bytes))
    return spans, None


def _small(
    raw: memoryview, offset: int, seed: int, starts: list[int], bodies: list[int]
) -> tuple[list[RecordSpan], int | None]:
    """Return all blocks as one span, and the offset of the first bad block."""
    at = np.array(starts, np.int64)
    lines = np.frombuffer(raw, np.uint8, len(raw) // ALIGN * ALIGN).reshape(-1, ALIGN)
    heads = lines[at // ALIGN]
    fields, words = heads.view("<u8"), heads.view("<u4")
    counts, body_bytes = words[:, 3].astype(np.int64), words[:, 2].astype(np.int64)
    firsts = fields[:, 2]
    tables = (4 * counts + 4 + BODY_ALIGN - 1) & -BODY_ALIGN
    seeds = np.uint64(seed) ^ (at + offset).astype(np.uint64)
    good = crc64_rows(heads[:, :CHECKED_BYTES], seeds) == fields[:, 7]
    good &= (counts > 0) & (tables <= body_bytes)
    good[1:] &= firsts[1:] == firsts[:-1] + counts[:-1].astype(np.uint64)
    begins = [start + BLOCK_HEAD_BYTES for start in starts]
    crcs = [crc64(raw[begin : begin + size]) for begin, size in zip(begins, bodies, strict=True)]
    good &= np.array(crcs, np.uint64) == fields[:, 5]
    numbers = np.frombuffer(raw, "<i4", len(raw) // 4)
    origin = at // 4 + BLOCK_HEAD_BYTES // 4
    # The table of a bad head may point anywhere: only tables of good heads are read.
    good[good] &= numbers[(origin + counts)[good]] == (body_bytes - tables)[good]
    good[good] &= _are_rising(numbers, counts[good], origin[good])
    upto = len(starts) if good.all() else int(np.argmin(good))
    wrong = None if upto == len(starts) else starts[upto]
    if not upto:
        return [], wrong
    payload = b"".join(
        [raw[begin + table : begin + size] for begin, size, table in zip(begins, bodies, tables[:upto].tolist())]
    )
    counts, origin = counts[:upto], origin[:upto]
    column = _joined(numbers, counts, origin, payload)
    stamps = fields[:upto, 3].astype(np.int64)
    alike = int(stamps[0]) == int(stamps[-1])  # timestamps never decrease, so all between are the same too
    timestamps = int(stamps[0]) if alike else np.repeat(stamps, counts)
    used = int(at[upto - 1]) + BLOCK_HEAD_BYTES + bodies[upto - 1] - starts[0]
    return [RecordSpan(int(firsts[0]), timestamps, column, used)], wrong


def _are_rising(numbers: NDArray[Any], counts: NDArray[np.int64], origin: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for each block whether its offsets begin at 0 and never decrease: Arrow reads wherever they point."""
    if not len(counts):
        return np.ones(0, np.bool_)
    before = np.cumsum(counts) - counts
    place = np.repeat(origin - before, counts) + np.arange(int(counts.sum()))
    falls = numbers[place + 1] < numbers[place]
    rising: NDArray[np.bool_] = (np.add.reduceat(falls, before) == 0) & (numbers[origin] == 0)
    return rising


def _joined(numbers: NDArray[Any], counts: NDArray[np.int64], origin: NDArray[np.int64], payload: bytes) -> Any:
    """Return the records of blocks whose tables begin at `origin` as one column over their joined payloads."""
    import pyarrow as pa

    total = int(counts.sum())
    before = np.cumsum(counts) - counts
    place = np.repeat(origin - before, counts) + np.arange(total)
    offsets = np.zeros(total + 1, np.int32)
    np.cumsum(numbers[place + 1] - numbers[place], out=offsets[1:])
    return pa.Array.from_buffers(pa.binary(), total, [None, pa.py_buffer(offsets), pa.py_buffer(payload)])
