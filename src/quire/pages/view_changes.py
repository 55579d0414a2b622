"""Finds the pages that differ between two views of a database, without reading those that both views read from the same place.

A place, a frame of a WAL segment or the chain of a slot, is immutable (M6). So a page can differ only if its places do: it is
in a segment that one of the views pins, or in a chunk that only one of the chains has. Such pages are read in both versions and
compared byte by byte: a page that was rewritten without a change does not differ.

Threads: any; nothing is shared. Executor-safe. Raises what reading raises.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap

from quire.pages.framemap import FrameMap, Location, Regions
from quire.pages.snapshot import SCAN_PAGES
from quire.pages.view import LINK_DTYPE, SnapshotView, ViewReader, place_of

ChangedPage = tuple[int, bytes | None, bytes | None]
"""(page, before, after); `None` if a version does not have the page."""


class _PageLocations:
    """The locations of a view's pages."""

    def __init__(self, reader: ViewReader) -> None:
        self.reader, self.view = reader, reader.view
        self.frames = FrameMap.of(Regions(reader.sources), self.view.pins, self.view.lsn)
        self._links = np.frombuffer(self.view.links, LINK_DTYPE)
        self._slots = np.ascontiguousarray(self._links["slot"])

    def chain(self, slot: int) -> NDArray[np.void]:
        """Return the links of a slot, the base first."""
        first, last = np.searchsorted(self._slots, (slot, slot + 1))
        return self._links[first:last]

    def frame(self, page: int, covered_lsn: int) -> Location | None:
        """Return the frame from which a page is read; `None` if it is read from its chain."""
        location = self.frames.find(page)
        return location if location is not None and location[0] > covered_lsn else None

    def pages_of(self, link: np.void) -> BitMap:
        """Return the pages that a chunk has, as offsets in its slot."""
        return BitMap(self.reader.sources.chunk(place_of(self.view, link)).pages)


def doubtful_pages(before: ViewReader, after: ViewReader, start: int, stop: int) -> BitMap:
    """Return a superset of the pages in [start, stop) that differ."""
    sizes = before.size_pages, after.size_pages
    per_chunk = after.view.pages_per_chunk
    wanted = BitMap(range(start, stop))
    if before.view.pages_per_chunk != per_chunk:
        return wanted
    # Pages that only one version has always differ.
    doubtful = BitMap(range(min(sizes), max(sizes)))
    old, new = _PageLocations(before), _PageLocations(after)
    for slot in range(start // per_chunk, -(-stop // per_chunk)):
        doubtful |= _in_one_only(old, new, slot).shift(slot * per_chunk)
    covered: dict[int, tuple[int, int]] = {}
    for page in (BitMap(old.frames) | BitMap(new.frames)) & wanted:
        slot = page // per_chunk
        if slot not in covered:
            covered[slot] = _covered(old.chain(slot)), _covered(new.chain(slot))
        if old.frame(page, covered[slot][0]) != new.frame(page, covered[slot][1]):
            doubtful.add(page)
    return doubtful & wanted


def changed_pages(before: ViewReader, after: ViewReader, start: int, stop: int) -> Iterator[ChangedPage]:
    """Yield the pages in [start, stop) that differ."""
    doubtful = doubtful_pages(before, after, start, stop).to_array()
    sizes = before.size_pages, after.size_pages
    for first in range(0, len(doubtful), SCAN_PAGES):
        some = doubtful[first : first + SCAN_PAGES]
        images = [
            reader.read_pages([page for page in some if page < size], cold=True)
            for reader, size in zip((before, after), sizes)
        ]
        for page in some:
            pair = images[0].get(page), images[1].get(page)
            if pair[0] != pair[1]:
                yield page, *pair


def _in_one_only(old: _PageLocations, new: _PageLocations, slot: int) -> BitMap:
    """Return the pages of chunks that are in only one of the chains, as offsets in the slot."""
    chains = [_named(places.view, places.chain(slot)) for places in (old, new)]
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*chains)))
    offsets = BitMap()
    for places in (old, new):
        for link in places.chain(slot)[common:]:
            offsets |= places.pages_of(link)
    return offsets


def _covered(chain: NDArray[np.void]) -> int:
    return int(chain["covered_lsn"][-1]) if len(chain) else 0


def _named(view: SnapshotView, chain: NDArray[np.void]) -> list[Hashable]:
    """Return keys that identify the chunks of a chain across views."""
    return [(*row.tolist()[:6], *view.spaces[row["space"]], view.names[row["name"]]) for row in chain]
