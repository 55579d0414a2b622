"""Segments with valid checksums and wrong numbers: refused or read, within bounds, never a crash."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.core.errors import QuireError
from quire.core.limits import MIB
from quire.durable.checksums import crc64
from quire.durable.files import OsDisk
from quire.pages.segment import (
    ENTRY,
    ENTRY_CHECKED_BYTES,
    FRAME,
    FRAME_CHECKED_BYTES,
    HEADER,
    HEADER_CHECKED_BYTES,
    MAGIC,
    WORD,
)
from quire.pages.segment_file import SegmentFile
from quire.pages.segment_scan import page_map, recover_segment, sealed_entries
from tests.hostile import memory_limit, numbers

PAGE_SIZE = 512
MEMORY_LIMIT = 64 * MIB
"""The largest single read is 4 MiB; the files here are smaller than 1 MiB."""


def signed(fields: tuple[int, ...]) -> bytes:
    raw = HEADER.pack(MAGIC, *fields, 0)[:HEADER_CHECKED_BYTES]
    return raw + WORD.pack(crc64(raw))


def entry(fields: tuple[int, ...], seed: int) -> bytes:
    raw = ENTRY.pack(*fields, 0)[:ENTRY_CHECKED_BYTES]
    return raw + WORD.pack(crc64(raw, seed))


def frame(fields: tuple[int, ...], body: bytes, seed: int) -> bytes:
    raw = FRAME.pack(*fields, 0)[:FRAME_CHECKED_BYTES]
    crc = crc64(raw, seed)
    return raw + WORD.pack(crc if fields[5] & 1 else crc64(body, crc)) + body


HEADERS = st.tuples(
    st.sampled_from([0, 1, 2]),
    numbers(16),
    st.sampled_from([PAGE_SIZE, 1024, 65_536]) | numbers(32),
    numbers(32),
    numbers(32),
    st.integers(0, 8) | numbers(32),
    numbers(32),
    st.integers(0, 3) | numbers(64),
    numbers(64),
    numbers(64),
)
FRAMES = st.lists(
    st.tuples(
        numbers(32),
        numbers(32),
        st.none() | numbers(64),
        numbers(64),
        numbers(32),
        numbers(32),
        numbers(64),
        numbers(64),
    ),
    max_size=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=HEADERS, frames=FRAMES, indexed=st.integers(0, 8), pad=st.sampled_from([0, 1, 4096, 70_000]))
def test_a_signed_segment_is_refused_or_read_within_bounds(
    tmp_path: Path, fields: tuple[int, ...], frames: list[tuple[int, ...]], indexed: int, pad: int
) -> None:
    head = signed(fields)
    (base,) = struct.unpack("<Q", head[-8:])
    page_size, capacity, first_lsn = fields[2], fields[5], fields[7]
    body = bytes(min(page_size, 65_536))
    entries, bodies = b"", b""
    for number, (page, size, lsn, prev, segment, flags, durable, time_ms) in enumerate(frames[: max(capacity, 1)]):
        frame_lsn = (first_lsn + number) % (1 << 64) if lsn is None else lsn
        shared = (page, size, frame_lsn, prev, segment, flags)
        encoded_frame = frame((*shared, durable, time_ms, 0), body, base ^ number)
        entries += entry((*shared, struct.unpack_from("<Q", encoded_frame, FRAME_CHECKED_BYTES)[0]), base ^ number)
        bodies += encoded_frame
    region = entries.ljust(min(capacity, 1_000) * ENTRY.size, b"\0")
    path = str(tmp_path / "hostile.seg")
    Path(path).write_bytes(head + region + bodies + bytes(pad))
    with memory_limit(MEMORY_LIMIT):
        try:
            with SegmentFile.open(OsDisk(), path) as file:
                scan = recover_segment(file, indexed_upto_lsn=(first_lsn + indexed - 1) % (1 << 64) if indexed else 0)
                page_map(scan.entries, (1 << 64) - 1)
                sealed_entries(file.header, file.read_index(scan.cut), scan.cut, path=path)
                for number in range(scan.good):
                    assert len(file.read_frame(number)) == page_size
        except QuireError:
            pass


def test_a_capacity_larger_than_the_file_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hostile.seg"
    path.write_bytes(signed((2, 0, PAGE_SIZE, 7, 1, 0xFFFF_FFFF, 0, 1, 5, 0)) + bytes(4096))
    with memory_limit(MIB), pytest.raises(QuireError, match="ends within its index"):
        SegmentFile.open(OsDisk(), str(path))
