"""The stream segment's page and its code agree; what is encoded is read back; damage is found, a torn end is cut."""

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
    """The rows of a table of a page: (field, offset, bytes)."""
    table = page.split(f"| {title} |", 1)[1].split("\n\n", 1)[0]
    return [tuple(cell.strip() for cell in line.split("|")[1:4]) for line in table.splitlines()[2:]]


def dumped(page: str) -> bytes:
    """The bytes of a page's example."""
    lines = re.findall(r"^[0-9a-f]{4}  ((?:[0-9a-f]{2} ?){1,16})$", page, re.MULTILINE)
    return bytes.fromhex("".join(lines))


def agree(page: str, title: str, layout: struct.Struct, names: str) -> None:
    """A table of a page is a struct."""
    offset, expected = 0, []
    for name, code in zip(names.split(), re.findall(r"\d*[A-Za-z]", layout.format.lstrip("<"))):
        size = struct.calcsize("<" + code)
        expected.append((name, str(offset), str(size)))
        offset += size
    assert fields(page, title) == expected
    assert offset == layout.size


def test_the_pages_tables_are_the_structs() -> None:
    header = "magic version reserved reserved stream_id segment_id base_record created_at_ms salt crc64"
    agree(PAGE, "header field", fmt.HEADER, header)
    block = "mark flags body_bytes count first_record timestamp_ms durable_upto body_crc64 call head_crc64"
    agree(PAGE, "head field", fmt.BLOCK, block)


def test_the_pages_example_is_what_the_code_writes() -> None:
    raw = segment_of([[[b"one", b"", b"three"]]])
    assert dumped(PAGE) == raw
    found = scan(raw)
    assert (found.end_record, found.cut, found.torn_bytes) == (1003, len(raw), 0)


VERSION_1 = (
    "5153545245414d31010000000000000007000000000000000300000000000000e8030000000000000068e5cf8b010000"
    "efcdab89674523016fd76a2d2e27704651424c4b010000001800000003000000e8030000000000000068e5cf8b010000"
    "e80300000000000083d23576290d47990000000000000000ee80bcb2a4b64f7c00000000030000000300000008000000"
    "6f6e65746872656500000000000000000000000000000000000000000000000000000000000000000000000000000000"
)
"""The page's example before appends had keys."""


def test_segments_of_version_1_are_read() -> None:
    found = scan(bytes.fromhex(VERSION_1))
    assert (found.end_record, found.calls) == (1003, {})


@given(appends)
def test_what_is_written_is_read(given_appends: list[list[list[bytes]]]) -> None:
    raw = segment_of(given_appends)
    found = scan(raw + bytes(1000))
    blocks = [block for append in given_appends for block in append]
    assert [records_of(each, body(raw, each)).to_pylist() for each in found.blocks] == blocks
    assert found.cut == len(raw)
    assert found.end_record == 1000 + sum(map(len, blocks))
    assert sealed_blocks(raw + b"old life", len(raw)) == found


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
def test_records_are_divided_into_blocks(sizes: list[int], most: int) -> None:
    divided = list(parts(list(accumulate(sizes)), most))
    ends: Any = np.cumsum(sizes, dtype=np.int64)
    assert divided == list(parts(ends, most)), "as they come from a column"
    assert [number for start, stop in divided for number in range(start, stop)] == list(range(len(sizes)))
    for start, stop in divided:
        assert sum(sizes[start:stop]) + 4 * (stop - start) <= most or stop == start + 1


def test_a_block_has_a_bounded_number_of_records() -> None:
    assert list(parts([0] * 70_000, 1 << 30)) == [(0, 65_536), (65_536, 70_000)]


SMALL = [[[b"first"], [b"append"]], [[b"second", b"2"]], [[b"third" * 20]]]


def test_every_flipped_bit_of_what_was_synced_is_found() -> None:
    """All but the last append had been synced when the next one was written; there the bit flip is damage."""
    raw = segment_of(SMALL)
    blocks = scan(raw).blocks
    promised = blocks[-1].offset
    for place in range(len(raw)):
        damaged = bytearray(raw)
        damaged[place] ^= 1 << (place % 8)
        if place < promised and not _is_padding(blocks, place):
            with pytest.raises(Corruption):
                scan(damaged)
        elif _is_padding(blocks, place):
            assert scan(damaged).blocks == blocks
        else:
            assert scan(damaged).blocks == blocks[:-1], "a torn end, as far as anybody can tell"
            with pytest.raises(Corruption):
                sealed_blocks(damaged, len(raw))


def _is_padding(blocks: tuple[fmt.RecordBlock, ...], place: int) -> bool:
    return any(block.offset + 64 + block.body_bytes <= place < block.end for block in blocks)


def test_cut_anywhere_it_ends_behind_the_last_whole_append() -> None:
    raw = segment_of(SMALL)
    ends = [0, *(block.end for block in scan(raw).blocks if block.is_commit)]
    for length in range(fmt.HEADER_BYTES, len(raw)):
        kept = raw[:length]
        reachable = [end for end in ends if end <= length or not any(raw[length:end])]
        found = scan(kept + bytes(len(raw) - length))
        assert found.cut == max([fmt.HEADER_BYTES, *reachable])


def test_a_part_of_an_append_does_not_count() -> None:
    raw = segment_of(SMALL)
    first, second, *_ = scan(raw).blocks
    assert not first.is_commit
    found = scan(raw[: second.offset] + bytes(500))
    assert (found.blocks, found.cut, found.end_record) == ((), fmt.HEADER_BYTES, 1000)
    assert found.torn_bytes > 0


def test_blocks_of_a_former_life_are_nothing() -> None:
    old, new = segment_of(SMALL), segment_of(SMALL[:1], header=new_header(salt=99))
    found = scan(new + old[len(new) :])
    assert (found.cut, found.end_record) == (len(new), 1002)


def test_a_block_elsewhere_in_its_own_file_is_nothing() -> None:
    raw = segment_of(SMALL)
    *_, last = scan(raw).blocks
    found = scan(raw + raw[last.offset : last.end])
    assert found.cut == len(raw)


def test_what_the_caller_knows_counts() -> None:
    raw = segment_of(SMALL)
    *_, last = scan(raw).blocks
    with pytest.raises(Corruption, match="damaged") as caught:
        scan(raw[: last.offset] + bytes(200), durable_upto=last.end_record)
    assert caught.value.where["record"] == last.first_record


def test_what_cannot_be_written_is_refused() -> None:
    header = new_header()
    with pytest.raises(InvalidInput, match="vouch"):
        encode_block(header.crc64, NextBlock(64, 1000, 0, 1001), body_of([b"x"]), is_commit=True)


def test_headers_that_are_none() -> None:
    raw = bytearray(new_header().encode())
    with pytest.raises(Corruption, match="shorter"):
        StreamSegmentHeader.decode(raw[:63])
    raw[8] = 3
    newer = raw[:56] + crc64(raw[:56]).to_bytes(8, "little")
    with pytest.raises(FormatTooNew):
        StreamSegmentHeader.decode(newer)
    with pytest.raises(Corruption, match="not the header"):
        StreamSegmentHeader.decode(raw)


def test_keys_of_appends_come_oldest_first() -> None:
    """Of more keys than are kept the newest stay: who has them the other way round forgets the call that is repeated next."""
    header = new_header()
    raw = bytearray(header.encode())
    for number, call in enumerate([7, 5, 5, 9]):  # one append has two blocks
        place = NextBlock(len(raw), header.base_record + number, header.created_at_ms, header.base_record, call)
        raw += encode_block(header.crc64, place, body_of([b"x"]), is_commit=number != 1)
    assert list(scan(bytes(raw)).calls.items()) == [(7, 1000), (5, 1001), (9, 1003)]
