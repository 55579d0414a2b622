"""A footer with wrong values is refused although its checksums are valid, and nothing large is allocated for it."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from quire.core.errors import Corruption, Incompatible
from quire.durable.checksums import crc64
from quire.manifest.records import Compression
from quire.pages.chunk_format import (
    BITMAP_BYTES_MAX,
    FOOTER,
    FOOTER_HEAD_BYTES,
    FRAME,
    FRAME_ENTRY_BYTES,
    HEADER_BYTES,
    OBJECT_BYTES_MAX,
    encode_header,
    encode_trailer,
    load_footer,
)
from quire.pages.chunk_verify import verify
from tests.pages.chunks import Blob, footer_of, identity, some_pages, with_footer, with_trailer, write_chunk

PAGES = some_pages(512, [0, *range(3, 40), 900], seed=5)
GOOD, INFO = write_chunk(PAGES, identity(512, 1000))
TABLE_OFFSET = FOOTER_HEAD_BYTES + len(INFO.bitmap)
CRCS_OFFSET = TABLE_OFFSET + 3 * FRAME_ENTRY_BYTES


def with_counts(page_count: int, frame_count: int, bitmap_bytes: int) -> bytes:
    footer = footer_of(GOOD)
    return with_footer(
        GOOD, FOOTER.pack(footer[:HEADER_BYTES], page_count, frame_count, bitmap_bytes, 0) + footer[FOOTER_HEAD_BYTES:]
    )


def with_bitmap(bitmap: bytes, page_count: int = len(PAGES)) -> bytes:
    footer = footer_of(GOOD)
    head = FOOTER.pack(footer[:HEADER_BYTES], page_count, 3, len(bitmap), 0)
    return with_footer(GOOD, head + bitmap + footer[TABLE_OFFSET:])


def with_frame(number: int, *, move: int = 0, longer: int = 0) -> bytes:
    footer = bytearray(footer_of(GOOD))
    entry_offset = TABLE_OFFSET + number * FRAME_ENTRY_BYTES
    offset, length, crc = FRAME.unpack_from(footer, entry_offset)
    FRAME.pack_into(footer, entry_offset, (offset + move) % 2**32, (length + longer) % 2**32, crc)
    return with_footer(GOOD, bytes(footer))


def with_frames(*stored: bytes) -> bytes:
    """An object with these frames, consistent with its footer."""
    end, entries = HEADER_BYTES, b""
    for frame in stored:
        entries += FRAME.pack(end, len(frame), crc64(frame))
        end += len(frame)
    footer = footer_of(GOOD)
    head = FOOTER.pack(footer[:HEADER_BYTES], len(PAGES), len(stored), len(INFO.bitmap), 0)
    footer = head + INFO.bitmap + entries + footer[CRCS_OFFSET:]
    return GOOD[:HEADER_BYTES] + b"".join(stored) + footer + encode_trailer(end, footer)


def frames() -> list[bytes]:
    footer = Blob(GOOD).reader().footer
    locations = [footer.frame(number) for number in range(3)]
    return [GOOD[location.offset : location.offset + location.length] for location in locations]


def array_bitmap(values: list[int]) -> bytes:
    """The portable serialization of one array container, sorted or not."""
    return struct.pack(f"<IIHHI{len(values)}H", 12_346, 1, 0, len(values) - 1, 16, *values)


WRONG_FOOTERS = {
    "a footer of 4 GiB": with_trailer(GOOD, length=2**32 - 1),
    "a footer far away": with_trailer(GOOD, offset=2**63),
    "a footer in the header": with_trailer(GOOD, offset=8),
    "a footer that starts later": with_trailer(GOOD, offset=len(GOOD) - 300),
    "four billion pages": with_counts(2**32 - 1, 3, len(INFO.bitmap)),
    "more pages than the slot has": with_counts(1001, 63, len(INFO.bitmap)),
    "one page too many": with_counts(len(PAGES) + 1, 3, len(INFO.bitmap)),
    "four billion frames": with_counts(len(PAGES), 2**32 - 1, len(INFO.bitmap)),
    "too few frames": with_counts(len(PAGES), 2, len(INFO.bitmap)),
    "a bitmap of 4 GiB": with_counts(len(PAGES), 3, 2**32 - 1),
    "a bitmap that is shorter": with_counts(len(PAGES), 3, len(INFO.bitmap) - 1),
    "a bitmap that is longer than any": with_bitmap(bytes(BITMAP_BYTES_MAX + 1)),
    "a bitmap with bytes behind it": with_bitmap(INFO.bitmap + bytes(BITMAP_BYTES_MAX)),
    "a bitmap of noise": with_bitmap(bytes(range(len(INFO.bitmap)))),
    "an empty bitmap": with_bitmap(BitMap().serialize()),
    "no bitmap": with_bitmap(b""),
    "a bitmap with fewer pages": with_bitmap(BitMap(sorted(PAGES)[:-1]).serialize()),
    "a bitmap with a page beyond the slot": with_bitmap(BitMap([*sorted(PAGES)[:-1], 1000]).serialize()),
    "a bitmap with a page far beyond": with_bitmap(BitMap([*sorted(PAGES)[:-1], 2**32 - 1]).serialize()),
    "a bitmap out of order": with_bitmap(array_bitmap(sorted(PAGES, reverse=True))),
    "a bitmap with one page twice": with_bitmap(array_bitmap([3, *sorted(PAGES)[1:]])),
    "frames that overlap": with_frame(1, move=-10),
    "a frame in the header": with_frame(0, move=-96),
    "a gap between frames": with_frame(1, move=1),
    "a frame beyond the object": with_frame(2, move=2**31),
    "a frame of 4 GiB": with_frame(2, longer=2**31),
    "a frame longer than its pages": with_frame(2, longer=16 * 512),
    "a last frame longer than its pages": with_frames(*frames()[:2], bytes(16 * 512)),
    "a frame that is missing": with_frames(*frames()[:2]),
    "a frame too many": with_frames(*frames(), b"more"),
    "no frames": with_frames(),
    "an empty frame": with_frame(2, longer=-Blob(GOOD).reader().footer.frame(2).length),
    "a last frame that ends in the footer": with_frame(2, longer=1),
}


def test_the_helpers_for_wrong_footers_can_build_a_valid_one() -> None:
    assert with_frames(*frames()) == with_bitmap(INFO.bitmap) == with_frame(1) == with_trailer(GOOD) == GOOD
    assert with_counts(len(PAGES), 3, len(INFO.bitmap)) == GOOD


@pytest.mark.parametrize("data", WRONG_FOOTERS.values(), ids=WRONG_FOOTERS.keys())
def test_a_footer_with_wrong_values_is_refused(data: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(Corruption) as raised:
        load_footer(Blob(data).read, len(data), name="demo")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    assert raised.value.where["object"] == "demo"
    assert {problem.rule for problem in verify(Blob(data).read, len(data))} >= {"C1"}


@given(
    changes=st.lists(st.tuples(st.integers(HEADER_BYTES, len(footer_of(GOOD)) - 1), st.integers(0, 255)), max_size=4)
)
def test_any_signed_footer_is_refused_or_read_without_harm(changes: list[tuple[int, int]]) -> None:
    footer = bytearray(footer_of(GOOD))
    for position, value in changes:
        footer[position] = value
    data = with_footer(GOOD, bytes(footer))
    try:
        pages_read = dict(Blob(data).reader().iter_pages(range(1000)))
    except (Corruption, Incompatible):
        assert list(verify(Blob(data).read, len(data)))
    else:
        # A bitmap with other offsets is also valid: only the footer says where a page belongs.
        assert sorted(pages_read.values()) == sorted(PAGES.values())


@pytest.mark.parametrize("size", [0, 1, 247, OBJECT_BYTES_MAX + 1, 2**62])
def test_an_object_of_an_impossible_size_is_not_read(size: int) -> None:
    blob = Blob(b"")
    with pytest.raises(Corruption):
        load_footer(blob.read, size, name="x")
    assert blob.reads == []


def test_frames_of_a_chunk_without_compression_are_plain() -> None:
    """Otherwise a writer that ignores its setting would not be detected."""
    footer = bytearray(footer_of(GOOD))
    footer[:HEADER_BYTES] = encode_header(INFO.identity, Compression.NONE)
    with pytest.raises(Corruption):
        Blob(with_footer(GOOD, bytes(footer))).reader().read_page(0)


def test_bitmaps_of_other_implementations_are_read() -> None:
    """Roaring has several serializations of one set, and other versions or languages write others: all are valid."""
    plain = BitMap(sorted(PAGES), optimize=False).serialize()
    optimised = BitMap(sorted(PAGES)).serialize()
    assert plain != optimised
    for bitmap in (plain, optimised):
        assert dict(Blob(with_bitmap(bitmap)).reader().iter_pages(range(1000))) == PAGES
