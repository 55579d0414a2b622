"""Decoding many blocks at once equals decoding them one by one: the same records, and the same refusal of invalid ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import Corruption
from quire.stream import spans as spans_module
from quire.stream.arrow_batches import SCHEMA, Batches
from quire.stream.segment import ALIGN, HEADER_BYTES, NextBlock, StreamSegmentHeader, body_of
from quire.stream.sources import HotSource, Lost
from quire.stream.spans import BATCH_BYTES, Plain, RecordSpan, spans_of
from tests.stream.blocks import encode_block

HEADER = StreamSegmentHeader.decode(StreamSegmentHeader(3, 9, 100, 1_000, 77).encode())


def written(blocks: Sequence[tuple[int, list[bytes]]], calls: Sequence[int] = (0,)) -> bytes:
    """A segment with these blocks: (timestamp, records). They have these idempotency keys, in turn; 0 is none."""
    raw, record = HEADER.encode(), HEADER.base_record
    for (stamp, payloads), call in zip(blocks, cycle(calls), strict=False):
        next_block = NextBlock(len(raw), record, stamp, record, call)
        raw += encode_block(HEADER.crc64, next_block, body_of(payloads), is_commit=True)
        record += len(payloads)
    return raw


def flat(spans: Sequence[RecordSpan]) -> list[tuple[int, int, bytes]]:
    rows = []
    for span in spans:
        stamps = span.timestamp_ms
        timestamps = [stamps] * len(span.column) if isinstance(stamps, int) else stamps.tolist()
        rows += list(zip(range(span.first_record, span.end_record), timestamps, span.column.to_pylist(), strict=True))
    return rows


def expected(blocks: Sequence[tuple[int, list[bytes]]]) -> list[tuple[int, int, bytes]]:
    rows = [(stamp, payload) for stamp, payloads in blocks for payload in payloads]
    return [(number, *row) for number, row in enumerate(rows, HEADER.base_record)]


class BytesFile:
    """A file with these bytes."""

    path = "segment"

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def read_at(self, size: int, offset: int) -> bytes:
        return self.raw[offset : offset + size]


class SegmentStub:
    """The attributes of a segment, or of its files, that a source uses."""

    stream_id, segment_id, base_record = 3, 9, 100


def source(raw: bytes) -> HotSource:
    files: Any = SegmentStub()
    segment: Any = SegmentStub()
    file: Any = BytesFile(raw)
    return HotSource(files, segment, file, len(raw))


def read(raw: bytes) -> tuple[list[tuple[int, int, bytes]], Lost | None]:
    """The rows that a read returns, and the error that ended it."""
    spans: list[RecordSpan] = []
    try:
        spans.extend(source(raw).spans(HEADER_BYTES, 1 << 40))
    except Lost as lost:
        return flat(spans), lost
    return flat(spans), None


RECORDS = st.lists(st.binary(max_size=40), min_size=1, max_size=6)
BLOCKS = st.lists(st.tuples(st.integers(0, 3), RECORDS), min_size=1, max_size=30).map(
    lambda drawn: [(5 + sum(step for step, _ in drawn[: i + 1]), records) for i, (_, records) in enumerate(drawn)]
)


def pretend_arrow_is_loaded(patch: pytest.MonkeyPatch) -> None:
    """Use Arrow, as after it has been loaded."""
    patch.setattr(spans_module, "_early_records", spans_module.EARLY_RECORDS + 1)


CALLS = st.lists(st.sampled_from([0, 1, 1 << 63, (1 << 64) - 1]), min_size=1, max_size=5)


@given(blocks=BLOCKS, calls=CALLS, small=st.booleans(), first=st.integers(0, 40), count=st.integers(1, 60))
def test_spans_have_the_records_of_the_blocks(
    blocks: list[tuple[int, list[bytes]]], calls: list[int], small: bool, first: int, count: int
) -> None:
    """Hazard: blocks with an idempotency key counted as damaged when many were decoded at once."""
    raw, rows = written(blocks, calls), expected(blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans_module, "SMALL_BYTES", 1 << 30 if small else 0)
        patch.setattr(spans_module, "FEW_BLOCKS", 0)
        pretend_arrow_is_loaded(patch)
        result = spans_of(memoryview(raw), 0, HEADER.crc64, at=HEADER_BYTES)
        assert (result.used_bytes, result.bad_at) == (len(raw), None)
        assert flat(result.spans) == rows
        assert (len(result.spans) == 1) is (small or len(blocks) == 1)
        start, stop = 100 + first, 100 + first + count
        clipped = [
            span.within(start, stop) for span in result.spans if span.first_record < stop and span.end_record > start
        ]
        assert flat(clipped) == [row for row in rows if start <= row[0] < stop]
        prefix = flat(list(source(raw).spans(HEADER_BYTES, stop)))
        assert prefix == rows[: len(prefix)]
        assert len(prefix) >= min(len(rows), stop - 100)
        for moment in {stamp for stamp, _ in blocks} | {0, 10**6}:
            expected_id = next((number for number, stamp, _ in rows if stamp >= moment), None)
            candidates = (span.first_at(moment) for span in result.spans)
            assert next((number for number in candidates if number is not None), None) == expected_id


@pytest.mark.parametrize("small", [True, False])
def test_a_flip_in_any_byte_ends_a_read_after_the_preceding_block(monkeypatch: pytest.MonkeyPatch, small: bool) -> None:
    """Including block heads with wrong lengths: the read ends, and returns nothing that was not written."""
    monkeypatch.setattr(spans_module, "SMALL_BYTES", 1 << 30 if small else 0)
    monkeypatch.setattr(spans_module, "FEW_BLOCKS", 0)
    pretend_arrow_is_loaded(monkeypatch)
    blocks = [(5, [b"one"]), (6, [b"two", b"", b"three"]), (6, [b"four" * 12]), (9, [b"five"])]
    raw, rows = written(blocks), expected(blocks)
    harmless = 0
    for offset in range(HEADER_BYTES, len(raw)):
        for bit in (0, 3, 6):
            damaged = bytearray(raw)
            damaged[offset] ^= 1 << bit
            rows_read, lost = read(bytes(damaged))
            assert rows_read == rows[: len(rows_read)]
            if lost is None:
                harmless += 1
                assert rows_read == rows, "padding after a body"
            else:
                assert isinstance(lost.error, Corruption)
                assert len(rows_read) < len(rows)
    assert harmless == 3 * sum(-body_of(payloads).size % ALIGN for _, payloads in blocks)


def test_a_segment_that_ends_within_a_block_is_damaged() -> None:
    blocks = [(5, [b"one"]), (6, [b"two" * 30])]
    raw = written(blocks)
    block_ends = HEADER_BYTES + 64 + 64, HEADER_BYTES + 64 + body_of(blocks[0][1]).size
    for end in range(HEADER_BYTES + 1, len(raw) - ALIGN):
        rows_read, lost = read(raw[:end])
        assert rows_read == expected(blocks)[: len(rows_read)]
        assert (lost is None) is (block_ends[1] <= end <= block_ends[0])


def test_blocks_that_do_not_follow_each_other_are_damage() -> None:
    raw, record = HEADER.encode(), 100
    for skip in (0, 1):
        next_block = NextBlock(len(raw), record + skip, 5, 100)
        raw += encode_block(HEADER.crc64, next_block, body_of([b"x"]), is_commit=True)
        record += 1
    for size in (0, 1 << 30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spans_module, "SMALL_BYTES", size)
            patch.setattr(spans_module, "FEW_BLOCKS", 0)
            result = spans_of(memoryview(raw), 0, HEADER.crc64, at=HEADER_BYTES)
        assert [row[0] for row in flat(result.spans)] == [100]
        assert result.bad_at == HEADER_BYTES + 128


@given(blocks=BLOCKS, calls=CALLS, first=st.integers(0, 40), count=st.integers(1, 60), early=st.integers(0, 200))
def test_plain_columns_have_the_same_records(
    blocks: list[tuple[int, list[bytes]]], calls: list[int], first: int, count: int, early: int
) -> None:
    """However many records are decoded before Arrow is used, none is missing and none is repeated."""
    raw, rows = written(blocks, calls), expected(blocks)
    start, stop = 100 + first, 100 + first + count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans_module, "EARLY_RECORDS", early)
        patch.setattr(spans_module, "_early_records", 0)
        spans = spans_of(memoryview(raw), 0, HEADER.crc64, at=HEADER_BYTES).spans
        clipped = [span.within(start, stop) for span in spans if span.first_record < stop and span.end_record > start]
        assert flat(clipped) == [row for row in rows if start <= row[0] < stop]
        assert flat(spans) == rows
        for span in spans:
            if isinstance(span.column, Plain):
                assert span.column.arrow().equals(pa.array(span.column.to_pylist(), pa.binary()))
                assert spans_module._early_records > early, "Arrow is in use now"


def test_a_batch_is_made_of_plain_columns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [(5, [b"one"]), (6, [b"two", b"", b"three"]), (9, [b"four"])]
    raw = written(blocks)
    monkeypatch.setattr(spans_module, "_early_records", 0)
    spans = spans_of(memoryview(raw), 0, HEADER.crc64, at=HEADER_BYTES).spans
    assert [type(span.column) for span in spans] == [Plain] * 3
    [batch] = Batches().of(spans)
    assert batch.schema == SCHEMA
    assert batch.column("payload").to_pylist() == [row[2] for row in expected(blocks)]
    assert type(spans_of(memoryview(raw), 0, HEADER.crc64, at=HEADER_BYTES).spans[0].column) is pa.BinaryArray


def test_a_large_span_is_not_copied_for_a_small_one_before_it() -> None:
    """A batch of 300 KB is written as a large block and a small remainder: large blocks are returned without a copy."""
    large, small = pa.array([b"x" * 300] * 600, pa.binary()), pa.array([b"y" * 300] * 100, pa.binary())
    sizes = [(large, 180_000), (small, 30_000), (small, 30_000), (large, 180_000)]
    first, spans = 100, []
    for column, size in sizes:
        spans.append(RecordSpan(first, 5, column, size))
        first += len(column)
    batches = list(Batches(BATCH_BYTES).of(spans))
    assert [batch.num_rows for batch in batches] == [600, 200, 600], "small spans are still joined"
    assert [batch.column("id")[0].as_py() for batch in batches] == [100, 700, 900]
    assert batches[2].column("payload").buffers()[2].address == large.buffers()[2].address
