"""Reading the index regions of WAL segments: what each has for which slot (K2). No page body is looked at.

Terms
  input   a segment that a plan absorbs, and up to where
  part    what a segment has for one slot: the newest frame in it of each page that changed
  dirty   how many pages of a slot changed, and how many segments have a part of it

Rules
  1. Both passes read the same regions: the first counts, so that the plan can decide between a base and a delta and be stored
     (P10); the second brings the parts of a slot to who writes it.
  2. A part has 8 bytes for each page: a frame's lsn follows from its number, so a slot that was written in a thousand segments
     takes 32 MiB at most.

Safe to run on an executor. Raises `Corruption`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap

from quire.jobs.runner import Key, Tools
from quire.pages.segment_scan import page_map, sealed_entries
from quire.pages.sources import SegmentPlace

PART_DTYPE = np.dtype([("page", "<u4"), ("frame_no", "<u4")])
FRAME_DTYPE = np.dtype(
    [("page", "<u4"), ("frame_no", "<u4"), ("lsn", "<u8"), ("segment_id", "<u4"), ("origin_db_id", "<u4")]
)
"""A version of a page, and where its frame is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInput:
    """A segment, as the checkpoint of a database absorbs it."""

    db_id: int
    place: SegmentPlace
    last_lsn: int
    """Of the segment, as this database tracks it: a fork may have inherited less of it than it has."""
    covered_lsn: int
    size_pages: int
    """The database's at `covered_lsn`: pages from there on are not there any more (P15)."""
    pages_per_chunk: int


@dataclass(frozen=True, slots=True)
class Part:
    """What one segment has for one slot."""

    place: SegmentPlace
    first_lsn: int
    rows: NDArray[np.void]
    """`PART_DTYPE`, by page."""


@dataclass(frozen=True, slots=True)
class Dirty:
    """What changed of one slot."""

    pages: int
    parts: int


def split_rows(given: SegmentInput, tools: Tools) -> Iterator[tuple[Key, Part]]:
    """The parts of a segment, slot by slot."""
    for slot, newest, first_lsn in _by_slot(given, tools):
        rows = np.zeros(len(newest), PART_DTYPE)
        rows["page"], rows["frame_no"] = newest["page"], newest["lsn"] - np.uint64(first_lsn)
        yield (given.db_id, slot), Part(given.place, first_lsn, rows)


def split_pages(given: SegmentInput, tools: Tools) -> Iterator[tuple[Key, bytes]]:
    """Which pages of each slot a segment has, as bitmaps: all that counting needs."""
    for slot, newest, _ in _by_slot(given, tools):
        yield (given.db_id, slot), BitMap(packed(newest["page"] % np.uint32(given.pages_per_chunk))).serialize()


def packed(pages: NDArray[np.uint32]) -> array[int]:
    """The same pages as roaring takes them all at once; those of a numpy array it takes one by one."""
    return array("I", np.ascontiguousarray(pages, np.uint32).tobytes())


def join_pages(_key: Key, _task: None, bitmaps: list[bytes], _tools: Tools) -> Dirty:
    """Count the pages of a slot, each once."""
    return Dirty(len(BitMap.union(*(BitMap.deserialize(each) for each in bitmaps))), len(bitmaps))


def newest_frames(parts: list[Part], covered_lsn: int) -> NDArray[np.void]:
    """The newest version of each page of a slot, by page."""
    frames = np.zeros(sum(len(part.rows) for part in parts), FRAME_DTYPE)
    start = 0
    for part in parts:
        into = frames[start : start + len(part.rows)]
        into["page"], into["frame_no"] = part.rows["page"], part.rows["frame_no"]
        into["lsn"] = part.rows["frame_no"].astype(np.uint64) + np.uint64(part.first_lsn)
        into["segment_id"], into["origin_db_id"] = part.place.segment_id, part.place.origin_db_id
        start += len(part.rows)
    return page_map(frames, covered_lsn)


def _by_slot(given: SegmentInput, tools: Tools) -> Iterator[tuple[int, NDArray[np.void], int]]:
    """(slot, its newest entries by page, the segment's first lsn)."""
    place = given.place
    file = tools.sources.segment(place.origin_db_id, place.segment_id, place)
    count = given.last_lsn - file.header.first_lsn + 1
    entries = sealed_entries(file.header, file.read_index(count), count, path=file.path)
    newest = page_map(entries, given.covered_lsn)
    newest = newest[newest["page"] < np.uint32(given.size_pages)]
    slots = newest["page"] // np.uint32(given.pages_per_chunk)
    starts = [0, *(np.flatnonzero(np.diff(slots)) + 1).tolist()] if len(slots) else []
    for start, end in pairwise([*starts, len(newest)]):
        yield int(slots[start]), newest[start:end], file.header.first_lsn
