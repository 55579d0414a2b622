"""Which pages differ between two versions of a database.

Terms
  place   where a version reads a page from: a frame of a pinned WAL segment, or the chain of its slot

Rules
  1. The same place means the same bytes: such pages are not read. Places are immutable (M6).
  2. Of the others both bodies are read and compared.

Importable on executors. Raises what reading raises.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np

from quire.pages.framemap import FrameMap, Regions
from quire.pages.snapshot import SCAN_PAGES
from quire.pages.view import LINK_DTYPE, ViewReader

Changed = tuple[int, bytes | None, bytes | None]


class Places:
    """Where a view reads its pages from."""

    def __init__(self, reader: ViewReader, start: int, stop: int) -> None:
        """Of the pages in [start, stop)."""
        view = reader.view
        self._view = view
        self._map = FrameMap.of(Regions(reader.sources), view.pins, view.lsn)
        links = np.frombuffer(view.links, LINK_DTYPE)
        slots = np.ascontiguousarray(links["slot"])
        self._chains: dict[int, tuple[int, Hashable]] = {}
        for slot in range(start // view.pages_per_chunk, (stop - 1) // view.pages_per_chunk + 1):
            chain = links[np.searchsorted(slots, slot, "left") : np.searchsorted(slots, slot, "right")]
            if not len(chain):
                continue
            objects = tuple((*row.tolist()[:6], *view.spaces[row["space"]], view.names[row["name"]]) for row in chain)
            self._chains[slot] = int(chain["covered_lsn"][-1]), objects

    def of(self, page: int) -> Hashable:
        """The place of a page; `None` for a page that never was written."""
        covered, objects = self._chains.get(page // self._view.pages_per_chunk, (0, None))
        found = self._map.find(page)
        return found if found is not None and found[0] > covered else objects


def changed_pages(before: ViewReader, after: ViewReader, start: int, stop: int) -> Iterator[Changed]:
    """(page, before, after) of the pages in [start, stop) that differ; `None` where a version has no such page."""
    places = Places(before, start, stop), Places(after, start, stop)
    sizes = before.size_pages, after.size_pages
    same_slots = before.view.pages_per_chunk == after.view.pages_per_chunk
    for first in range(start, stop, SCAN_PAGES):
        pages = range(first, min(first + SCAN_PAGES, stop))
        doubtful = [
            page for page in pages if page >= min(sizes) or not same_slots or places[0].of(page) != places[1].of(page)
        ]
        images = [
            reader.read_pages([page for page in doubtful if page < size], cold=True)
            for reader, size in zip((before, after), sizes)
        ]
        for page in doubtful:
            pair = images[0].get(page), images[1].get(page)
            if pair[0] != pair[1]:
                yield page, *pair
