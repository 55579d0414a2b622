"""The page images of a slot, many at a time: changed pages from frames of the WAL, the others from the chain.

Terms
  window   as many pages of a slot, in rising order, as fit `WINDOW_BYTES`: their offsets, and one buffer with their images

Rules
  1. Images are moved by numpy, a window at a time; what is done for each page in Python is its checksum. A loop by hand does no
     less, and a checkpoint must not be slower than one.
  2. Every frame is verified with its segment's salt before its page goes anywhere; pages of chunks as `ChunkReader` does it.
  3. Page bodies are read once, but for the one frame of a chunk that lies across the end of a window.
  4. Memory is one window, used again for the next, and one run of frames (`RUN_BYTES`): both stay in the processor's cache.

Safe to run on an executor. Raises `Corruption`, `ChecksumMismatch`, and what reading raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap

from quire.core.limits import MIB
from quire.durable.checksums import crc64, crc64_rows
from quire.jobs.checkpoint.read import packed
from quire.pages.chunk_chain import check_chain
from quire.pages.chunk_reader import ChunkReader
from quire.pages.segment import FRAME_CHECKED_BYTES, FRAME_HEAD_BYTES, ZERO
from quire.pages.segment_file import SegmentFile
from quire.pages.segment_scan import HEAD_DTYPE
from quire.pages.sources import SegmentPlace, Sources

WINDOW_BYTES = 4 * MIB
RUN_BYTES = 4 * MIB
"""Neighbouring frames are read this much at a time."""

Places = Mapping[tuple[int, int], SegmentPlace]
Images = NDArray[np.uint8]
"""One row for each page."""
Window = tuple[NDArray[np.uint32], Images]


def windows(
    frames: NDArray[np.void],
    places: Places,
    chain: Sequence[ChunkReader],
    sources: Sources,
    *,
    page_size: int,
    pages_per_chunk: int,
    pages_below: int,
) -> Iterator[Window]:
    """The pages of a slot in rising order: those of `frames` (`FRAME_DTYPE`, by page) over what the chain holds.

    Of the chain, pages from `pages_below` on are left out: a shrunk database no longer has them (P15).
    """
    fresh = (frames["page"] % np.uint32(pages_per_chunk)).astype(np.uint32)
    owned = _owned(chain, fresh, pages_below)
    offsets = np.concatenate([fresh, *(pages for _, pages in owned)])
    offsets.sort()
    step = max(WINDOW_BYTES // page_size, 1)
    room = np.empty((min(step, len(offsets)), page_size), np.uint8)
    for start in range(0, len(offsets), step):
        here = offsets[start : start + step]
        images = room[: len(here)]
        first, last = np.searchsorted(fresh, [here[0], here[-1] + np.uint32(1)])
        _copy_frames(frames[first:last], np.searchsorted(here, fresh[first:last]), images, places, sources)
        for chunk, pages in owned:
            first, last = np.searchsorted(pages, [here[0], here[-1] + np.uint32(1)])
            _copy_chunk(chunk, pages[first:last], here, images)
        yield here, images


def _owned(
    chain: Sequence[ChunkReader], fresh: NDArray[np.uint32], pages_below: int
) -> list[tuple[ChunkReader, NDArray[np.uint32]]]:
    """(chunk, the pages of it that are the newest), for those that have any."""
    if not chain:
        return []
    check_chain(chain)
    taken = BitMap(packed(fresh))
    taken.add_range(pages_below, chain[0].identity.pages_per_chunk)
    found = []
    for chunk in reversed(chain):
        pages = BitMap(chunk.pages) - taken
        if pages:
            found.append((chunk, np.array(pages.to_array(), np.uint32)))
            taken |= pages
    return found


def _copy_chunk(chunk: ChunkReader, pages: NDArray[np.uint32], here: NDArray[np.uint32], images: Images) -> None:
    if not len(pages):
        return
    size = images.shape[1]
    for offsets, indexes, plain in chunk.iter_frames(pages.tolist()):
        rows = np.frombuffer(plain, np.uint8).reshape(-1, size)
        images[np.searchsorted(here, np.array(offsets, np.uint32))] = rows[indexes]


def _copy_frames(
    frames: NDArray[np.void], rows: NDArray[np.intp], images: Images, places: Places, sources: Sources
) -> None:
    """Put the page of each frame into its row."""
    keys = (frames["origin_db_id"].astype(np.uint64) << np.uint64(32)) | frames["segment_id"]
    for key in np.unique(keys).tolist():
        origin, segment_id = key >> 32, key & 0xFFFFFFFF
        # Opened by its place: the file may not be here.
        segment = sources.segment(origin, segment_id, places[origin, segment_id])
        of_segment = np.flatnonzero(keys == np.uint64(key))
        order = of_segment[np.argsort(frames["frame_no"][of_segment], kind="stable")]
        numbers = frames["frame_no"][order].astype(np.int64)
        for start, stop in _runs(numbers, max(RUN_BYTES // segment.header.geometry.stride, 1)):
            _copy_run(segment, int(numbers[start]), rows[order[start:stop]], images)


def _runs(numbers: NDArray[np.int64], longest: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of runs of neighbours.

    >>> list(_runs(np.array([3, 4, 5, 9, 10]), 2))
    [(0, 2), (2, 3), (3, 5)]
    """
    breaks = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
    for start, stop in pairwise(breaks):
        for first in range(start, stop, longest):
            yield first, min(first + longest, stop)


def _copy_run(segment: SegmentFile, first: int, rows: NDArray[np.intp], images: Images) -> None:
    """Read, verify and place the pages of neighbouring frames (rule 2)."""
    header, count = segment.header, len(rows)
    stride, data = header.geometry.stride, segment.read_raw(first, count)
    if len(data) == count * stride:
        heads = np.ndarray((count,), HEAD_DTYPE, data, strides=(stride,))
        numbers = np.arange(first, first + count, dtype=np.uint64)
        checked = np.ndarray((count, FRAME_CHECKED_BYTES), np.uint8, data, strides=(stride, 1))
        seeds = crc64_rows(checked, np.uint64(header.crc64) ^ numbers).tolist()
        view, is_zero = memoryview(data), (heads["flags"] & np.uint32(ZERO)) != 0
        bodies = range(FRAME_HEAD_BYTES, len(data), stride)
        size = stride - FRAME_HEAD_BYTES
        if is_zero.any():
            found = [seed if zero else crc64(view[at : at + size], seed)
                     for at, seed, zero in zip(bodies, seeds, is_zero.tolist())]  # fmt: skip
        else:
            found = [crc64(view[at : at + size], seed) for at, seed in zip(bodies, seeds)]
        lsns = numbers + np.uint64(header.first_lsn)
        if heads["crc64"].tolist() == found and np.array_equal(heads["lsn"], lsns):
            images[rows] = np.ndarray((count, size), np.uint8, data, FRAME_HEAD_BYTES, strides=(stride, 1))
            images[rows[is_zero]] = 0
            return
    # One by one: that says where the damage is, and goes on if only the reading was bad.
    for number, row in enumerate(rows.tolist(), first):
        images[row] = np.frombuffer(segment.read_frame(number), np.uint8)
