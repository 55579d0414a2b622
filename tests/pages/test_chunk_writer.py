"""Chunks are identical however their pages are added; memory is one frame; invalid calls are refused before anything is
written."""

from __future__ import annotations

import hashlib
import pickle
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from quire.core.errors import InvalidInput, OutOfRange
from quire.durable.checksums import crc64
from quire.manifest.records import Compression
from quire.pages.chunk_format import BITMAP_BYTES_MAX
from quire.pages.chunk_reader import PIECE_BYTES
from quire.pages.chunk_verify import describe, verify
from quire.pages.chunk_writer import ChunkWriter
from tests.pages.chunks import Blob, Pages, identity, image, page_sets, some_pages, write_chunk


def add_in_portions(writer: ChunkWriter, pages: Pages, draw: st.DataObject) -> None:
    """Add the pages one by one or several at a time, as bytes or as an array, as drawn."""
    remaining = sorted(pages)
    while remaining:
        portion = remaining[: draw.draw(st.integers(1, len(remaining)))]
        remaining = remaining[len(portion) :]
        method = draw.draw(st.sampled_from(["one", "array", "scattered"]))
        images = b"".join(pages[offset] for offset in portion)
        if method == "scattered":
            writer.add_scattered(portion, images)
        elif method == "array":
            writer.add_scattered(portion, np.frombuffer(images, np.uint8).reshape(len(portion), -1))
        else:
            for offset in portion:
                writer.add(offset, memoryview(pages[offset]))


@given(case=page_sets(), draw=st.data(), compression=st.sampled_from(Compression))
def test_pages_are_read_back_and_the_object_is_the_same_however_they_were_added(
    case: tuple[int, int, Pages], draw: st.DataObject, compression: Compression
) -> None:
    page_size, limit, pages = case
    chunk_identity = identity(page_size, limit)
    expected, expected_info = write_chunk(pages, chunk_identity, compression)
    parts: list[bytes] = []
    writer = ChunkWriter(parts.append, chunk_identity, compression=compression)
    add_in_portions(writer, pages, draw)
    info = writer.finish()
    data = b"".join(parts)
    assert (data, info) == (expected, expected_info)
    blob = Blob(data)
    assert dict(blob.reader().iter_pages()) == pages
    assert {offset: blob.reader().read_page(offset) for offset in pages} == pages
    assert not list(verify(blob.read, len(blob)))


@pytest.mark.parametrize("page_size", [512 << shift for shift in range(8)])
def test_every_page_size_is_read_back(page_size: int) -> None:
    pages = some_pages(page_size, [0, 1, 2, *range(20, 39), (64 << 20) // page_size - 1], seed=page_size)
    data, _ = write_chunk(pages, identity(page_size))
    assert dict(Blob(data).reader().iter_pages()) == pages


@given(case=page_sets())
def test_the_info_has_the_fields_of_the_row(case: tuple[int, int, Pages]) -> None:
    page_size, limit, pages = case
    data, info = write_chunk(pages, identity(page_size, limit))
    assert info.size_bytes == len(data)
    assert info.sha256 == hashlib.sha256(data).digest()
    assert info.page_count == len(pages)
    assert info.plain_bytes == sum(map(len, pages.values()))
    assert BitMap.deserialize(info.bitmap) == BitMap(pages)
    assert info.bitmap_hash == crc64(info.bitmap)
    assert pickle.loads(pickle.dumps(info)) == info
    assert describe(Blob(data).read, len(data)) == info


def test_a_chunk_may_be_empty() -> None:
    data, info = write_chunk({}, identity())
    assert (info.page_count, info.frame_count) == (0, 0)
    assert Blob(data).reader().read_page(0) is None
    assert list(Blob(data).reader().iter_pages()) == []


def test_zero_pages_cost_almost_nothing() -> None:
    data, _ = write_chunk(dict.fromkeys(range(16_384), bytes(4096)), identity(4096))
    assert len(data) < 16_384 * 11


def test_incompressible_pages_are_stored_plain() -> None:
    pages = {offset: image(512, 2 + 4 * offset) for offset in range(40)}
    data, info = write_chunk(pages, identity())
    footer = Blob(data).reader().footer
    assert [footer.frame(number).length for number in range(3)] == [16 * 512, 16 * 512, 8 * 512]
    assert info.size_bytes == 96 + 40 * 512 + 112 + len(info.bitmap) + 3 * 16 + 40 * 8 + 40
    assert dict(Blob(data).reader().iter_pages()) == pages


def test_memory_is_one_frame_and_the_footer() -> None:
    def pages() -> None:
        writer = ChunkWriter(lambda _: None, identity(4096))
        for offset in range(4096):
            writer.add(offset, noise)
        writer.finish()

    noise = image(4096, 2)
    tracemalloc.start()
    pages()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20, "16 MiB of pages were written"


def test_a_full_chunk_of_64_mib() -> None:
    portion = b"".join(some_pages(4096, range(1024), seed=1).values())
    parts: list[bytes] = []
    writer = ChunkWriter(parts.append, identity(4096))
    for first in range(0, 16_384, 1024):
        writer.add_scattered(range(first, first + 1024), portion)
    info = writer.finish()
    blob = Blob(b"".join(parts))
    assert (info.page_count, info.plain_bytes) == (16_384, 64 << 20)
    assert not list(verify(blob.read, len(blob)))
    assert max(length for _, length in blob.reads) <= PIECE_BYTES
    for offset in (0, 1023, 1024, 9000, 16_383):
        start = offset % 1024 * 4096
        assert blob.reader().read_page(offset) == portion[start : start + 4096]
    with pytest.raises(OutOfRange):
        ChunkWriter(parts.append, identity(4096)).add(16_384, bytes(4096))


def test_the_smallest_pages_fill_a_chunk_too() -> None:
    parts: list[bytes] = []
    writer = ChunkWriter(parts.append, identity(512))
    writer.add_scattered(range(131_072), bytes(64 << 20))
    writer.finish()
    blob = Blob(b"".join(parts))
    reader = blob.reader()
    assert reader.read_page(131_071) == bytes(512)
    assert len(blob.reads) == 3, "two for the footer, which is longer than the first read, and one for the page"
    assert not list(verify(blob.read, len(blob)))


def test_the_worst_bitmap_fits() -> None:
    """Every other page of the smallest size: roaring cannot compress this."""
    parts: list[bytes] = []
    writer = ChunkWriter(parts.append, identity(512))
    writer.add_scattered(np.arange(0, 131_072, 2), np.zeros((65_536, 512), np.uint8))
    info = writer.finish()
    blob = Blob(b"".join(parts))
    assert BITMAP_BYTES_MAX - 64 < len(info.bitmap) <= BITMAP_BYTES_MAX
    assert dict(blob.reader().iter_pages([0, 1, 131_070])) == {0: bytes(512), 131_070: bytes(512)}


# ── invalid calls ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_invalid_calls_are_refused_and_the_chunk_can_be_continued() -> None:
    parts: list[bytes] = []
    writer = ChunkWriter(parts.append, identity(512, 40))
    writer.add(5, b"a" * 512)
    page = bytes(512)
    invalid_calls: list[Callable[[], None]] = [
        lambda: writer.add(5, page),
        lambda: writer.add(4, page),
        lambda: writer.add(-1, page),
        lambda: writer.add(40, page),
        lambda: writer.add(6, page[:-1]),
        lambda: writer.add(6, page + page),
        lambda: writer.add_scattered([5], page),
        lambda: writer.add_scattered([39, 40], page + page),
        lambda: writer.add_scattered([6], page[:-1]),
        lambda: writer.add_scattered([6, 7], np.zeros((512, 4), np.uint8)[:, ::2]),
        lambda: writer.add_scattered([7, 6], page + page),
        lambda: writer.add_scattered([6, 6], page + page),
        lambda: writer.add_scattered([5, 6], page + page),
        lambda: writer.add_scattered([6, 40], page + page),
        lambda: writer.add_scattered([6], page + page),
        lambda: writer.add_scattered([-1], page),
        lambda: writer.add_scattered([2**32], page),
    ]
    for call in invalid_calls:
        with pytest.raises(InvalidInput):
            call()
    writer.add_scattered([], b"")
    writer.add(9, b"b" * 512)
    writer.finish()
    assert dict(Blob(b"".join(parts)).reader().iter_pages()) == {5: b"a" * 512, 9: b"b" * 512}


def test_a_finished_chunk_takes_nothing_more() -> None:
    writer = ChunkWriter(lambda _: None, identity())
    writer.finish()
    with pytest.raises(InvalidInput):
        writer.add(0, bytes(512))
    with pytest.raises(InvalidInput):
        writer.finish()


def test_after_its_sink_failed_a_chunk_cannot_be_finished() -> None:
    """A retry after a failed write would leave a hole or a duplicated frame, with valid checksums around it."""
    writes_left = 3

    def sink(data: bytes) -> None:
        nonlocal writes_left
        writes_left -= 1
        if not writes_left:
            raise OSError("no space left")

    writer = ChunkWriter(sink, identity())
    writer.add_scattered(range(16), bytes(16 * 512))
    with pytest.raises(OSError, match="no space"):
        writer.add_scattered(range(16, 32), bytes(16 * 512))
    with pytest.raises(InvalidInput):
        writer.finish()


def test_a_sink_may_keep_what_it_gets() -> None:
    """Frames that are stored plain must not be views of a buffer that the next page overwrites."""
    pages = {offset: image(512, 2 + 4 * offset) for offset in range(64)}
    data, _ = write_chunk(pages, identity())
    assert dict(Blob(data).reader().iter_pages()) == pages
