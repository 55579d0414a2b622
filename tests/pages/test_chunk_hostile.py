"""Chunks with valid checksums and wrong numbers, bitmaps or frames: reading them is bounded and never crashes.

test_chunk_footer.py tests wrong values of a footer one by one; this module combines them, with a memory limit.
"""

from __future__ import annotations

import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from quire.core.errors import QuireError
from quire.core.limits import MIB
from quire.durable.checksums import crc64
from quire.manifest.records import Compression
from quire.pages.chunk_format import (
    FOOTER,
    FRAME,
    HEADER,
    HEADER_SIGNED_BYTES,
    MAGIC,
    PAGE_CRC,
    encode_trailer,
    frames_of,
)
from tests.hostile import memory_limit, numbers
from tests.pages.chunks import Blob

PAGE_SIZE = 512
MEMORY_LIMIT = 64 * MIB


def header(fields: tuple[object, ...]) -> bytes:
    raw = HEADER.pack(MAGIC, *fields, 0)[:HEADER_SIGNED_BYTES]
    return raw + PAGE_CRC.pack(crc64(raw))


def valid_header(pages: int) -> tuple[object, ...]:
    """version, kind, compression, page size, pages per chunk, origin, id, generation, delta, reserved, base, lsns, digest."""
    return (1, 0, Compression.ZSTD, PAGE_SIZE, max(pages, 1), 7, 2, 1, 0, 0, 0, 0, 100, bytes(32))


def valid_frames(pages: int) -> list[bytes]:
    sizes = [min(16, pages - number * 16) * PAGE_SIZE for number in range(frames_of(pages))]
    return [zstandard.ZstdCompressor().compress(bytes(size)) for size in sizes]


def headers(pages: int) -> st.SearchStrategy[tuple[object, ...]]:
    good = valid_header(pages)
    widths = (16, 8, 8, 32, 32, 32, 32, 32, 16, 16, 32, 64, 64)
    changes = st.dictionaries(st.integers(0, 12), st.integers(0, 1 << 64), max_size=2)
    return changes.map(
        lambda changed: tuple(
            changed[index] % (1 << widths[index]) if index in changed else value for index, value in enumerate(good)
        )
    )


@st.composite
def bitmaps(draw: st.DrawFn, pages: int) -> bytes:
    """The right bitmap, another one, a short one that stands for billions of pages, or one with a few bytes changed."""
    kind = draw(st.sampled_from(["true", "other", "full", "changed", "any"]))
    if kind == "any":
        return draw(st.binary(max_size=64))
    bitmap = (
        BitMap(range(pages)) if kind != "other" else BitMap(draw(st.lists(st.integers(0, (1 << 32) - 1), max_size=20)))
    )
    if kind == "full":
        bitmap = BitMap.flip(BitMap(), 0, draw(st.sampled_from([1 << 17, 1 << 20, 1 << 26])))
    bitmap.run_optimize()
    data = bytearray(bitmap.serialize())
    if kind == "changed" and data:
        for _ in range(draw(st.integers(1, 4))):
            offset = draw(st.integers(0, len(data) - 1))
            data[offset] = draw(st.integers(0, 255))
    return bytes(data)


@st.composite
def stored_frames(draw: st.DrawFn, pages: int) -> list[bytes]:
    """Frames as they could be stored: plain, compressed, a decompression bomb, one with a wrong size, any bytes."""
    frames = []
    for number in range(frames_of(pages)):
        plain = bytes(min(16, pages - number * 16) * PAGE_SIZE)
        kind = draw(st.sampled_from(["plain", "packed", "bomb", "lying bomb", "no size", "any"]))
        if kind == "plain":
            frames.append(plain)
        elif kind == "any":
            frames.append(draw(st.binary(min_size=1, max_size=len(plain) - 1)))
        else:
            size = len(plain) if kind == "packed" else draw(st.sampled_from([1 * MIB, 128 * MIB]))
            packed = BOMBS[size] if size in BOMBS else zstandard.ZstdCompressor().compress(plain)
            if kind == "no size":
                packed = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 * MIB))
            if kind == "lying bomb":  # the size follows magic and descriptor, in four bytes if it needs that many
                packed = packed[:5] + len(plain).to_bytes(4, "little") + packed[9:]
            frames.append(packed)
    return frames


BOMBS = {size: zstandard.ZstdCompressor().compress(bytes(size)) for size in (1 * MIB, 128 * MIB)}


@given(
    data=st.data(),
    pages=st.integers(0, 40),
    wrong_parts=st.sets(st.sampled_from(["header", "bitmap", "frames", "table", "count"]), max_size=2),
)
def test_a_signed_chunk_is_refused_or_read_within_bounds(
    data: st.DataObject, pages: int, wrong_parts: set[str]
) -> None:
    frames = data.draw(stored_frames(pages)) if "frames" in wrong_parts else valid_frames(pages)
    table, offset = b"", HEADER.size
    for stored in frames:
        length = data.draw(numbers(32)) if "table" in wrong_parts else len(stored)
        table += FRAME.pack(offset, length, crc64(stored))
        offset += len(stored)
    head = header(data.draw(headers(pages)) if "header" in wrong_parts else valid_header(pages))
    bitmap = data.draw(bitmaps(pages)) if "bitmap" in wrong_parts else BitMap(range(pages)).serialize()
    count = data.draw(st.sampled_from([pages + 1, max(pages - 1, 0), 0xFFFF_FFFF])) if "count" in wrong_parts else pages
    crcs = PAGE_CRC.pack(crc64(bytes(PAGE_SIZE))) * pages
    footer = FOOTER.pack(head, count, frames_of(pages), len(bitmap), 0) + bitmap + table + crcs
    blob = Blob(head + b"".join(frames) + footer + encode_trailer(offset, footer))
    with memory_limit(MEMORY_LIMIT):
        try:
            read = dict(blob.reader().iter_pages())
            assert wrong_parts or len(read) == pages, "a valid chunk must be read completely"
            assert all(len(image) == PAGE_SIZE for image in read.values())
        except QuireError:
            assert wrong_parts
