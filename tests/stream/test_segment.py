"""The stream segment's page and its code agree; encoding round-trips; damage is detected, a torn end is cut."""

from __future__ import annotations

import re
import struct
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import Corruption, FormatTooNew, InvalidInput
from quire.durable.checksums import crc64
from quire.stream import segment as fmt
from quire.stream.segment import (
    NextBlock,
    StreamSegmentHeader,
    body_of,
    body_of_arrow,
    parts,
    records_of,
    scan,
    sealed_blocks,
)
from tests.stream.blocks import encode_block, new_header, segment_of

PAGE = (Path(__file__).parents[2] / "docs/formats/stream-segment.md").read_text("utf-8")

payloads = st.lists(st.binary(max_size=300), min_size=1, max_size=12)
appends = st.lists(st.lists(payloads, min_size=1, max_size=3), max_size=5)


def fields(page: str, title: str) -> list[tuple[str, ...]]:
    """The rows of a table on a page: (field, offset, bytes)."""
    table = page.split(f"| {title} |", 1)[1].split("\n\n", 1)[0]
    return [tuple(cell.strip() for cell in line.split("|")[1:4]) for line in table.splitlines()[2:]]


def dumped(page: str) -> bytes:
    """The bytes of a page's example."""
    lines = re.findall(r"^[0-9a-f]{4}  ((?:[0-9a-f]{2} ?){1,16})$", page, re.MULTILINE)
    return bytes.fromhex("".join(lines))


def agree(page: str, title: str, layout: struct.Struct, names: str) -> None:
    """Assert that a table on a page matches a struct."""
    offset, expected = 0, []
    for name, code in zip(names.split(), re.findall(r"\d*[A-Za-z]", layout.format.lstrip("<"))):
        size = struct.calcsize("<" + code)
        expected.append((name, str(offset), str(size)))
        offset += size
    assert fields(page, title) == expected
    assert offset == layout.size


def test_the_tables_of_the_page_match_the_structs() -> None:
    header = "magic version reserved reserved stream_id segment_id base_record created_at_ms salt crc64"
    agree(PAGE, "header field", fmt.HEADER, header)
    block = "mark flags body_bytes count first_record timestamp_ms durable_upto body_crc64 call head_crc64"
    agree(PAGE, "head field", fmt.BLOCK, block)


def test_the_example_of_the_page_is_what_the_code_writes() -> None:
    raw = segment_of([[[b"one", b"", b"three"]]])
    assert dumped(PAGE) == raw
    scanned = scan(raw)
    assert (scanned.end_record, scanned.cut, scanned.torn_bytes) == (1003, len(raw), 0)


VERSION_1 = (
    "5153545245414d31010000000000000007000000000000000300000000000000e8030000000000000068e5cf8b010000"
    "efcdab89674523016fd76a2d2e27704651424c4b010000001800000003000000e8030000000000000068e5cf8b010000"
    "e80300000000000083d23576290d47990000000000000000ee80bcb2a4b64f7c00000000030000000300000008000000"
    "6f6e65746872656500000000000000000000000000000000000000000000000000000000000000000000000000000000"
)
"""The page's example, as written before appends had keys."""


def test_segments_of_version_1_are_read() -> None:
    scanned = scan(bytes.fromhex(VERSION_1))
    assert (scanned.end_record, scanned.calls) == (1003, {})


@given(appends)
def test_segments_round_trip(given_appends: list[list[list[bytes]]]) -> None:
    raw = segment_of(given_appends)
    scanned = scan(raw + bytes(1000))
    blocks = [block for append in given_appends for block in append]
    assert [records_of(block, body(raw, block)).to_pylist() for block in scanned.blocks] == blocks
    assert scanned.cut == len(raw)
    assert scanned.end_record == 1000 + sum(map(len, blocks))
    assert sealed_blocks(raw + b"old life", len(raw)) == scanned


def body(raw: bytes, block: fmt.RecordBlock) -> bytes:
    start = block.offset + fmt.BLOCK_HEAD_BYTES
    return raw[start : start + block.body_bytes]


@given(payloads, st.data())
def test_arrow_columns_are_written_as_they_are(records: list[bytes], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(records) - 1))
    stop = data.draw(st.integers(start + 1, len(records)))
    column, plain = body_of_arrow(pa.array(records, pa.binary())[start:stop]), body_of(records[start:stop])
    assert b"".join(column.pieces) == b"".join(plain.pieces)
    assert column[1:] == plain[1:]


@given(st.lists(st.integers(0, 500), max_size=50), st.integers(1, 1000))
def test_records_are_divided_into_blocks(sizes: list[int], limit: int) -> None:
    divided = list(parts(list(accumulate(sizes)), limit))
    ends: Any = np.cumsum(sizes, dtype=np.int64)
    assert divided == list(parts(ends, limit)), "as for a column"
    assert [number for start, stop in divided for number in range(start, stop)] == list(range(len(sizes)))
    for start, stop in divided:
        assert sum(sizes[start:stop]) + 4 * (stop - start) <= limit or stop == start + 1


def test_a_block_has_a_bounded_number_of_records() -> None:
    assert list(parts([0] * 70_000, 1 << 30)) == [(0, 65_536), (65_536, 70_000)]


SMALL = [[[b"first"], [b"append"]], [[b"second", b"2"]], [[b"third" * 20]]]


def test_every_flipped_bit_of_synced_bytes_is_detected() -> None:
    """All appends but the last were synced before the next one was written; a bit flip in them is damage."""
    raw = segment_of(SMALL)
    blocks = scan(raw).blocks
    promised = blocks[-1].offset
    for offset in range(len(raw)):
        damaged = bytearray(raw)
        damaged[offset] ^= 1 << (offset % 8)
        if offset < promised and not _is_padding(blocks, offset):
            with pytest.raises(Corruption):
                scan(damaged)
        elif _is_padding(blocks, offset):
            assert scan(damaged).blocks == blocks
        else:
            assert scan(damaged).blocks == blocks[:-1], "indistinguishable from a torn end"
            with pytest.raises(Corruption):
                sealed_blocks(damaged, len(raw))


def _is_padding(blocks: tuple[fmt.RecordBlock, ...], offset: int) -> bool:
    return any(block.offset + 64 + block.body_bytes <= offset < block.end for block in blocks)


def test_a_truncated_segment_ends_after_its_last_complete_append() -> None:
    raw = segment_of(SMALL)
    ends = [0, *(block.end for block in scan(raw).blocks if block.is_commit)]
    for length in range(fmt.HEADER_BYTES, len(raw)):
        remaining = raw[:length]
        reachable = [end for end in ends if end <= length or not any(raw[length:end])]
        scanned = scan(remaining + bytes(len(raw) - length))
        assert scanned.cut == max([fmt.HEADER_BYTES, *reachable])


def test_a_partial_append_is_ignored() -> None:
    raw = segment_of(SMALL)
    first, second, *_ = scan(raw).blocks
    assert not first.is_commit
    scanned = scan(raw[: second.offset] + bytes(500))
    assert (scanned.blocks, scanned.cut, scanned.end_record) == ((), fmt.HEADER_BYTES, 1000)
    assert scanned.torn_bytes > 0


def test_blocks_of_a_previous_use_of_the_file_are_ignored() -> None:
    old, new = segment_of(SMALL), segment_of(SMALL[:1], header=new_header(salt=99))
    scanned = scan(new + old[len(new) :])
    assert (scanned.cut, scanned.end_record) == (len(new), 1002)


def test_a_block_at_another_offset_of_its_file_is_ignored() -> None:
    raw = segment_of(SMALL)
    *_, last = scan(raw).blocks
    scanned = scan(raw + raw[last.offset : last.end])
    assert scanned.cut == len(raw)


def test_a_scan_reports_missing_records_that_the_caller_knows_to_be_durable() -> None:
    raw = segment_of(SMALL)
    *_, last = scan(raw).blocks
    with pytest.raises(Corruption, match="damaged") as caught:
        scan(raw[: last.offset] + bytes(200), durable_upto=last.end_record)
    assert caught.value.where["record"] == last.first_record


def test_blocks_that_cannot_be_encoded_are_refused() -> None:
    header = new_header()
    with pytest.raises(InvalidInput, match="vouch"):
        encode_block(header.crc64, NextBlock(64, 1000, 0, 1001), body_of([b"x"]), is_commit=True)


def test_invalid_headers_are_refused() -> None:
    raw = bytearray(new_header().encode())
    with pytest.raises(Corruption, match="shorter"):
        StreamSegmentHeader.decode(raw[:63])
    raw[8] = 3
    newer = raw[:56] + crc64(raw[:56]).to_bytes(8, "little")
    with pytest.raises(FormatTooNew):
        StreamSegmentHeader.decode(newer)
    with pytest.raises(Corruption, match="not the header"):
        StreamSegmentHeader.decode(raw)


def test_keys_of_appends_are_ordered_oldest_first() -> None:
    """Only the newest keys are kept: in the opposite order, the key of the call that is repeated next would be dropped."""
    header = new_header()
    raw = bytearray(header.encode())
    for number, call in enumerate([7, 5, 5, 9]):  # one append has two blocks
        next_block = NextBlock(len(raw), header.base_record + number, header.created_at_ms, header.base_record, call)
        raw += encode_block(header.crc64, next_block, body_of([b"x"]), is_commit=number != 1)
    assert list(scan(bytes(raw)).calls.items()) == [(7, 1000), (5, 1001), (9, 1003)]
