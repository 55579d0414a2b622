"""Many blocks at once are what they are one by one: the same records, and the same refusal of anything else."""

from __future__ import annotations

from collections.abc import Sequence
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


def written(blocks: Sequence[tuple[int, list[bytes]]]) -> bytes:
    """A segment of these blocks: (timestamp, records)."""
    raw, record = HEADER.encode(), HEADER.base_record
    for stamp, payloads in blocks:
        place = NextBlock(len(raw), record, stamp, record)
        raw += encode_block(HEADER.crc64, place, body_of(payloads), is_commit=True)
        record += len(payloads)
    return raw


def flat(spans: Sequence[RecordSpan]) -> list[tuple[int, int, bytes]]:
    found = []
    for span in spans:
        stamps = span.timestamp_ms
        each = [stamps] * len(span.column) if isinstance(stamps, int) else stamps.tolist()
        found += list(zip(range(span.first_record, span.end_record), each, span.column.to_pylist(), strict=True))
    return found


def expected(blocks: Sequence[tuple[int, list[bytes]]]) -> list[tuple[int, int, bytes]]:
    rows = [(stamp, payload) for stamp, payloads in blocks for payload in payloads]
    return [(number, *row) for number, row in enumerate(rows, HEADER.base_record)]


class Bytes:
    """A file of these bytes."""

    path = "segment"

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def read_at(self, size: int, offset: int) -> bytes:
        return self.raw[offset : offset + size]


class Known:
    """As much of a segment, or of its files, as a source asks for."""

    stream_id, segment_id, base_record = 3, 9, 100


def source(raw: bytes) -> HotSource:
    files: Any = Known()
    segment: Any = Known()
    file: Any = Bytes(raw)
    return HotSource(files, segment, file, len(raw))


def read(raw: bytes) -> tuple[list[tuple[int, int, bytes]], Lost | None]:
    """What a read gives on, and what ended it."""
    got: list[RecordSpan] = []
    try:
        got.extend(source(raw).spans(HEADER_BYTES, 1 << 40))
    except Lost as lost:
        return flat(got), lost
    return flat(got), None


RECORDS = st.lists(st.binary(max_size=40), min_size=1, max_size=6)
BLOCKS = st.lists(st.tuples(st.integers(0, 3), RECORDS), min_size=1, max_size=30).map(
    lambda given: [(5 + sum(step for step, _ in given[: place + 1]), each) for place, (_, each) in enumerate(given)]
)


def of_arrow(patch: pytest.MonkeyPatch) -> None:
    """As it is once Arrow is loaded."""
    patch.setattr(spans_module, "_early_records", spans_module.EARLY_RECORDS + 1)


@given(blocks=BLOCKS, small=st.booleans(), first=st.integers(0, 40), count=st.integers(1, 60))
def test_spans_are_the_blocks(blocks: list[tuple[int, list[bytes]]], small: bool, first: int, count: int) -> None:
    raw, rows = written(blocks), expected(blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans_module, "SMALL_BYTES", 1 << 30 if small else 0)
        patch.setattr(spans_module, "FEW_BLOCKS", 0)
        of_arrow(patch)
        found = spans_of(memoryview(raw), 0, HEADER.crc64, at=HEADER_BYTES)
        assert (found.used_bytes, found.bad_at) == (len(raw), None)
        assert flat(found.spans) == rows
        assert (len(found.spans) == 1) is (small or len(blocks) == 1)
        start, stop = 100 + first, 100 + first + count
        inside = [
            span.within(start, stop) for span in found.spans if span.first_record < stop and span.end_record > start
        ]
        assert flat(inside) == [row for row in rows if start <= row[0] < stop]
        upto = flat(list(source(raw).spans(HEADER_BYTES, stop)))
        assert upto == rows[: len(upto)]
        assert len(upto) >= min(len(rows), stop - 100)
        for moment in {stamp for stamp, _ in blocks} | {0, 10**6}:
            wanted = next((number for number, stamp, _ in rows if stamp >= moment), None)
            heard = (span.first_at(moment) for span in found.spans)
            assert next((each for each in heard if each is not None), None) == wanted


@pytest.mark.parametrize("small", [True, False])
def test_a_flip_in_every_byte_ends_a_read_behind_the_block_before_it(
    monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """Heads that lie about lengths included: a read ends, with nothing that was not written."""
    monkeypatch.setattr(spans_module, "SMALL_BYTES", 1 << 30 if small else 0)
    monkeypatch.setattr(spans_module, "FEW_BLOCKS", 0)
    of_arrow(monkeypatch)
    blocks = [(5, [b"one"]), (6, [b"two", b"", b"three"]), (6, [b"four" * 12]), (9, [b"five"])]
    raw, rows = written(blocks), expected(blocks)
    harmless = 0
    for place in range(HEADER_BYTES, len(raw)):
        for bit in (0, 3, 6):
            changed = bytearray(raw)
            changed[place] ^= 1 << bit
            got, lost = read(bytes(changed))
            assert got == rows[: len(got)]
            if lost is None:
                harmless += 1
                assert got == rows, "padding behind a body"
            else:
                assert isinstance(lost.error, Corruption)
                assert len(got) < len(rows)
    assert harmless == 3 * sum(-body_of(payloads).size % ALIGN for _, payloads in blocks)


def test_a_segment_that_ends_within_a_block_is_damaged() -> None:
    blocks = [(5, [b"one"]), (6, [b"two" * 30])]
    raw = written(blocks)
    whole = HEADER_BYTES + 64 + 64, HEADER_BYTES + 64 + body_of(blocks[0][1]).size
    for end in range(HEADER_BYTES + 1, len(raw) - ALIGN):
        got, lost = read(raw[:end])
        assert got == expected(blocks)[: len(got)]
        assert (lost is None) is (whole[1] <= end <= whole[0])


def test_blocks_that_do_not_follow_each_other_are_damage() -> None:
    raw, record = HEADER.encode(), 100
    for skip in (0, 1):
        place = NextBlock(len(raw), record + skip, 5, 100)
        raw += encode_block(HEADER.crc64, place, body_of([b"x"]), is_commit=True)
        record += 1
    for size in (0, 1 << 30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spans_module, "SMALL_BYTES", size)
            patch.setattr(spans_module, "FEW_BLOCKS", 0)
            found = spans_of(memoryview(raw), 0, HEADER.crc64, at=HEADER_BYTES)
        assert [each[0] for each in flat(found.spans)] == [100]
        assert found.bad_at == HEADER_BYTES + 128


@given(blocks=BLOCKS, first=st.integers(0, 40), count=st.integers(1, 60), early=st.integers(0, 200))
def test_plain_columns_have_the_same_records(
    blocks: list[tuple[int, list[bytes]]], first: int, count: int, early: int
) -> None:
    """However many are taken out before Arrow is asked: none is missed, and none comes twice."""
    raw, rows = written(blocks), expected(blocks)
    start, stop = 100 + first, 100 + first + count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans_module, "EARLY_RECORDS", early)
        patch.setattr(spans_module, "_early_records", 0)
        found = spans_of(memoryview(raw), 0, HEADER.crc64, at=HEADER_BYTES).spans
        inside = [span.within(start, stop) for span in found if span.first_record < stop and span.end_record > start]
        assert flat(inside) == [row for row in rows if start <= row[0] < stop]
        assert flat(found) == rows
        for span in found:
            if isinstance(span.column, Plain):
                assert span.column.arrow().equals(pa.array(span.column.to_pylist(), pa.binary()))
                assert spans_module._early_records > early, "Arrow is there now"


def test_a_batch_is_made_of_plain_columns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [(5, [b"one"]), (6, [b"two", b"", b"three"]), (9, [b"four"])]
    raw = written(blocks)
    monkeypatch.setattr(spans_module, "_early_records", 0)
    found = spans_of(memoryview(raw), 0, HEADER.crc64, at=HEADER_BYTES).spans
    assert [type(span.column) for span in found] == [Plain] * 3
    [batch] = Batches().of(found)
    assert batch.schema == SCHEMA
    assert batch.column("payload").to_pylist() == [row[2] for row in expected(blocks)]
    assert type(spans_of(memoryview(raw), 0, HEADER.crc64, at=HEADER_BYTES).spans[0].column) is pa.BinaryArray


def test_a_large_span_is_not_copied_for_a_small_one_before_it() -> None:
    """A batch of 300 KB is written as a large block and the small rest: each large one is read as it is."""
    large, small = pa.array([b"x" * 300] * 600, pa.binary()), pa.array([b"y" * 300] * 100, pa.binary())
    sizes = [(large, 180_000), (small, 30_000), (small, 30_000), (large, 180_000)]
    first, spans = 100, []
    for column, size in sizes:
        spans.append(RecordSpan(first, 5, column, size))
        first += len(column)
    batches = list(Batches(BATCH_BYTES).of(spans))
    assert [batch.num_rows for batch in batches] == [600, 200, 600], "small ones are still put together"
    assert [batch.column("id")[0].as_py() for batch in batches] == [100, 700, 900]
    assert batches[2].column("payload").buffers()[2].address == large.buffers()[2].address
