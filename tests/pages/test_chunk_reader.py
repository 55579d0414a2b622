"""One page is one ranged read; many pages share reads; every page is checked, and damage is reported by the reads it
affects."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import ChecksumMismatch, Corruption, InvalidInput
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.pages.chunk_format import HEADER_BYTES, TAIL_BYTES
from quire.pages.chunk_reader import GAP_BYTES, PIECE_BYTES, ChunkReader, check_chain
from tests.pages.chunks import (
    Blob,
    Pages,
    compact_pages,
    footer_of,
    identity,
    image,
    page_sets,
    some_pages,
    with_footer,
    write_chunk,
)

NOISE = {offset: image(4096, 2 + 4 * offset) for offset in range(0, 3000, 2)}
"""6 MiB of incompressible pages: far more than one read."""


@pytest.fixture(scope="module")
def large() -> bytes:
    return write_chunk(NOISE, identity(4096))[0]


# ── number of reads ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_page_is_one_read_if_the_footer_is_cached(large: bytes) -> None:
    cold = Blob(large)
    footer = cold.reader().footer
    assert cold.reads == [(len(large) - TAIL_BYTES, TAIL_BYTES)]
    for offset in (0, 2, 40, 1500, 2000):
        blob = Blob(large)
        reader = ChunkReader(blob.read, len(blob), footer=footer)
        assert blob.reads == []
        assert reader.read_page(offset) == NOISE[offset]
        location = footer.frame(offset // 2 // 16)
        assert blob.reads == [(location.offset, location.length)]


def test_a_cold_page_is_two_reads(large: bytes) -> None:
    blob = Blob(large)
    assert blob.reader().read_page(700) == NOISE[700]
    assert len(blob.reads) == 2


def test_an_absent_page_needs_no_read(large: bytes) -> None:
    blob = Blob(large)
    reader = ChunkReader(blob.read, len(blob), footer=Blob(large).reader().footer)
    assert reader.read_page(1) is None
    assert reader.read_frame(1) == {}
    assert dict(reader.iter_pages([1, 3, 16_383])) == {}
    assert blob.reads == []


def test_a_small_chunk_comes_with_its_footer() -> None:
    pages = some_pages(4096, range(30))
    blob = Blob(write_chunk(pages, identity(4096))[0])
    reader = blob.reader()
    assert {offset: reader.read_page(offset) for offset in pages} == pages
    assert blob.reads == [(0, len(blob))]


def test_a_frame_gives_its_other_pages_for_the_same_read(large: bytes) -> None:
    blob = Blob(large)
    reader = ChunkReader(blob.read, len(blob), footer=Blob(large).reader().footer)
    pages_read = reader.read_frame(70)
    assert pages_read == {offset: NOISE[offset] for offset in range(64, 96, 2)}
    assert len(blob.reads) == 1


def test_neighbouring_frames_share_a_read_and_far_ones_do_not(large: bytes) -> None:
    footer = Blob(large).reader().footer
    blob = Blob(large)
    reader = ChunkReader(blob.read, len(blob), footer=footer)
    # Frames 0 and 1 are adjacent, 3 is one frame (64 KiB) after 1, and 40 is far from all.
    wanted = [0, 32, 96, 40 * 32, 1, 3]
    assert dict(reader.iter_pages(wanted)) == {offset: NOISE[offset] for offset in wanted if offset in NOISE}
    first, second = blob.reads
    assert first == (HEADER_BYTES, 4 * 16 * 4096)
    assert second == (footer.frame(40).offset, 16 * 4096)
    assert footer.frame(3).offset - footer.frame(2).offset == GAP_BYTES


def test_walking_a_chunk_reads_it_once_in_pieces(large: bytes) -> None:
    footer = Blob(large).reader().footer
    blob = Blob(large)
    assert dict(ChunkReader(blob.read, len(blob), footer=footer).iter_pages()) == NOISE
    assert all(length <= PIECE_BYTES for _, length in blob.reads)
    assert len(blob.reads) == 2
    assert sum(length for _, length in blob.reads) == footer.offset - HEADER_BYTES


@given(case=page_sets(), requested=st.lists(st.integers(0, 60)))
def test_reads_of_many_pages_equal_single_reads(case: tuple[int, int, Pages], requested: list[int]) -> None:
    page_size, limit, pages = case
    data, _ = write_chunk(pages, identity(page_size, limit))
    wanted = [offset for offset in requested if offset < limit]
    reader = Blob(data).reader()
    assert dict(reader.iter_pages(wanted)) == {offset: pages[offset] for offset in wanted if offset in pages}
    assert [offset for offset, _ in reader.iter_pages(wanted)] == sorted({*wanted} & {*pages})
    for offset in wanted:
        assert reader.read_page(offset) == pages.get(offset)
        assert reader.read_frame(offset).get(offset) == pages.get(offset)


# ── the footer as a value ─────────────────────────────────────────────────────────────────────────────────────────────
def test_a_footer_can_be_pickled_and_used_elsewhere(large: bytes) -> None:
    footer = Blob(large).reader().footer
    copy = pickle.loads(pickle.dumps(footer))
    assert copy == footer
    assert len(pickle.dumps(footer)) < 1500 * 9 + 2 * len(footer.bitmap) + 1024
    assert ChunkReader(Blob(large).read, len(large), footer=copy).read_page(1500) == NOISE[1500]


def test_a_footer_of_another_object_is_refused(large: bytes) -> None:
    footer = Blob(large).reader().footer
    with pytest.raises(Corruption):
        ChunkReader(Blob(large).read, len(large) - 1, footer=footer)


def test_another_artifact_than_expected_is_refused(large: bytes) -> None:
    other = ArtifactKey(origin_db_id=7, kind=ArtifactKind.BASE, id=2, generation=2)
    footer = Blob(large).reader().footer
    assert ChunkReader(Blob(large).read, len(large), expect=footer.identity.key).read_page(0) == NOISE[0]
    with pytest.raises(Corruption) as raised:
        ChunkReader(Blob(large).read, len(large), expect=other).read_page(0)
    assert raised.value.where["expected"] == other
    assert raised.value.where["object"] == "00000007/00000002/base:00000002"
    with pytest.raises(Corruption):
        ChunkReader(Blob(large).read, len(large), footer=footer, expect=other)


def test_threads_may_share_a_reader(large: bytes) -> None:
    reader = Blob(large).reader()
    with ThreadPoolExecutor(4) as pool:
        pages_read = dict(zip(NOISE, pool.map(reader.read_page, NOISE), strict=True))
    assert pages_read == NOISE


# ── damage ────────────────────────────────────────────────────────────────────────────────────────────────────────────
SMALL = compact_pages(512, [0, *range(3, 40), 900])


@pytest.fixture(scope="module")
def small() -> bytes:
    return write_chunk(SMALL, identity())[0]


def test_any_flipped_byte_is_detected_by_the_reads_it_affects(small: bytes) -> None:
    footer = Blob(small).reader().footer
    for position in range(len(small)):
        damaged = bytearray(small)
        damaged[position] ^= 1 << position % 8
        for offset in (0, 17, 900):
            rank = footer.rank(offset)
            assert rank is not None
            location = footer.frame(rank // 16)
            if location.offset <= position < location.offset + location.length or position >= footer.offset:
                with pytest.raises(Corruption) as raised:
                    Blob(bytes(damaged)).reader().read_page(offset)
                assert raised.value.where["object"] == "demo"
            else:
                assert Blob(bytes(damaged)).reader().read_page(offset) == SMALL[offset]


def test_a_damaged_frame_is_reported_with_page_frame_and_offset(small: bytes) -> None:
    location = Blob(small).reader().footer.frame(1)
    damaged = bytearray(small)
    damaged[location.offset + 3] ^= 8
    with pytest.raises(ChecksumMismatch) as raised:
        Blob(bytes(damaged)).reader().read_page(20)
    assert raised.value.where == {
        "object": "demo",
        "page": 20,
        "frame": 1,
        "offset": location.offset,
        "length": location.length,
    }


def test_a_page_that_differs_from_the_one_packed_is_reported(small: bytes) -> None:
    """The frame is intact but a page in it is wrong: the writer's memory was at fault."""
    footer = bytearray(footer_of(small))
    footer[-8 * (len(SMALL) - 4)] ^= 1
    with pytest.raises(ChecksumMismatch) as raised:
        dict(Blob(with_footer(small, bytes(footer))).reader().iter_pages(SMALL))
    assert raised.value.where["page"] == sorted(SMALL)[4]


def test_every_truncation_is_detected(small: bytes) -> None:
    """Whether the size comes from the row or the store, and whether a read beyond the end raises or returns less."""
    for size in range(len(small)):
        truncated = small[:size]

        def short(offset: int, length: int, truncated: bytes = truncated) -> bytes:
            return truncated[offset : offset + length]

        for reader in (
            Blob(truncated).reader(),
            ChunkReader(Blob(truncated).read, len(small)),
            ChunkReader(short, len(small)),
        ):
            with pytest.raises(Corruption):
                reader.read_page(3)
        with pytest.raises(Corruption, match="ends early"):
            ChunkReader(short, len(small)).read_page(3)


def test_an_object_truncated_after_its_footer_was_cached_is_detected(large: bytes) -> None:
    footer = Blob(large).reader().footer
    with pytest.raises(Corruption):
        ChunkReader(Blob(large[:100_000]).read, len(large), footer=footer).read_page(2000)


def test_bytes_garbled_in_transit_are_read_again(large: bytes) -> None:
    blob = Blob(large)
    blob.garbled_reads = 1
    reader = blob.reader()
    assert reader.footer.page_count == len(NOISE)
    blob.garbled_reads = 1
    assert reader.read_page(700) == NOISE[700]
    blob.garbled_reads = 1
    assert dict(reader.iter_pages()) == NOISE
    blob.garbled_reads = 2
    with pytest.raises(ChecksumMismatch):
        reader.read_page(700)


def test_errors_can_be_pickled(small: bytes) -> None:
    with pytest.raises(Corruption) as raised:
        Blob(small[:-1]).reader().read_page(0)
    assert pickle.loads(pickle.dumps(raised.value)).where == raised.value.where


def test_chunks_that_do_not_form_a_chain_are_refused() -> None:
    def chunk(number: int, page_size: int = 512) -> ChunkReader:
        chunk_identity = identity(
            page_size, 80, delta_id=number or None, covered_lsn=100 + number, generation=1 + number
        )
        return Blob(write_chunk({number: bytes(page_size)}, chunk_identity)[0]).reader()

    base, first_delta, second_delta = chunk(0), chunk(1), chunk(2)
    check_chain([base, first_delta, second_delta])
    check_chain([first_delta, second_delta])
    for chain in (
        [],
        [first_delta, base],
        [base, base],
        [base, second_delta, first_delta],
        [base, first_delta, first_delta],
        [chunk(0, 1024), first_delta],
    ):
        with pytest.raises(InvalidInput):
            check_chain(chain)
