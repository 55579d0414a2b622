"""Maps pages to frames for WAL segments that are pinned rather than indexed: those of snapshots and forks (P12).

A pin is a segment up to an lsn. The map, page → (lsn, origin, segment) of the newest version in all pins, is built from their
index regions alone: 1 % of their bytes. It takes 20 bytes per page. A damaged entry is `Corruption` of the snapshot or fork
that needs the map, not of the segment's own database.

Threads: any; immutable once built. Executor-safe.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.pages.segment import SegmentHeader
from quire.pages.segment_scan import ROW_DTYPE, as_rows, page_map, sealed_entries
from quire.pages.sources import Handles, SegmentPlace, Sources

REGIONS_KEPT = 32
"""Parsed index regions in memory: 200 KB each for segments of 4 KiB pages."""

Location = tuple[int, int, int]
"""(lsn, origin, segment) of a version; the frame number follows from the lsn."""


class PinnedSegment(NamedTuple):
    """A pin, and the location of its bytes."""

    origin_db_id: int
    segment_id: int
    upto_lsn: int
    place: SegmentPlace | None = None


class Region(NamedTuple):
    """A segment's index region up to a pin's lsn."""

    header: SegmentHeader
    entries: NDArray[np.void]
    """`ENTRY_DTYPE`, verified, oldest first."""


class Regions:
    """Caches parsed index regions by segment, so that a second snapshot of the same segments reads nothing."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._kept: Handles[Region] = Handles(REGIONS_KEPT)

    def of(self, pin: PinnedSegment) -> Region:
        """Return the region of a pinned segment."""
        # The lsn is part of the key, because the region of an open segment grows.
        key = (pin.origin_db_id, pin.segment_id, pin.upto_lsn)
        return self._kept.keep(key, lambda: self._read(pin))

    def _read(self, pin: PinnedSegment) -> Region:
        file = self.sources.segment(pin.origin_db_id, pin.segment_id, pin.place)
        count = min(max(pin.upto_lsn - file.header.first_lsn + 1, 0), file.header.geometry.capacity)
        return Region(file.header, sealed_entries(file.header, file.read_index(count), count, path=file.path))


class FrameMap:
    """Page → location of its newest version in a set of pins."""

    __slots__ = ("_lsns", "_origins", "_pages", "_segments")

    def __init__(self, newest: NDArray[np.void]) -> None:
        self._pages = array("I", newest["page"].astype("<u4").tobytes())
        self._lsns = array("Q", newest["lsn"].astype("<u8").tobytes())
        self._origins = array("I", newest["origin_db_id"].astype("<u4").tobytes())
        self._segments = array("I", newest["segment_id"].astype("<u4").tobytes())

    @classmethod
    def of(cls, regions: Regions, pins: Iterable[PinnedSegment], upto_lsn: int) -> FrameMap:
        """Build the map of the newest version of each page in `pins` at or below an lsn."""
        rows = [as_rows(*regions.of(pin)) for pin in pins]
        return cls(page_map(np.concatenate(rows), upto_lsn) if rows else np.zeros(0, ROW_DTYPE))

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[int]:
        return iter(self._pages)

    def find(self, page: int) -> Location | None:
        """Return the location of the newest version of a page, `None` if the pins have no version of it."""
        pages = self._pages
        at = bisect_left(pages, page)
        if at == len(pages) or pages[at] != page:
            return None
        return self._lsns[at], self._origins[at], self._segments[at]

    def within(self, first: int, stop: int) -> array[int]:
        """Return the pages in this range that have a version in the pins, in order."""
        return self._pages[bisect_left(self._pages, first) : bisect_left(self._pages, stop)]


EMPTY_MAP = FrameMap(np.zeros(0, ROW_DTYPE))
