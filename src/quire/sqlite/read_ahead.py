"""Reads pages of a version in runs, for SQLite, which requests one page at a time.

Importable on executors. Threads: one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.core.limits import MIB
from quire.pages.chunk_copy import PageRows
from quire.pages.chunk_format import PAGES_PER_FRAME
from quire.pages.view import ViewReader

AHEAD_FRAMES = 8
AHEAD_BYTES = 8 * MIB
"""Frames that are read together during a sequential scan, and bytes of pages that are kept."""


class ReadAhead:
    """A reader that fetches pages in runs: SQLite requests one page at a time, and chunks have frames of 16 (P11).

    A missing page is fetched with its frame. If the previous frame is cached, the access is sequential, and the next frames
    are fetched too. These bypass the reader's own cache, since a scan does not go back.
    """

    def __init__(self, reader: ViewReader) -> None:
        self.lsn, self.page_size, self.size_pages = reader.lsn, reader.page_size, reader.size_pages
        self._reader = reader
        self._pages_per_chunk = reader.view.pages_per_chunk
        self._images: dict[int, bytes] = {}
        self._slots: set[int] = set()
        """Slots whose chunks are open: a read that bypasses the cache would open them each time."""

    def read_page(self, page: int) -> bytes:
        """Return the page as of this version."""
        image = self._images.get(page)
        return self._bring(page) if image is None else image

    def _bring(self, page: int) -> bytes:
        first = page - page % PAGES_PER_FRAME
        frames = AHEAD_FRAMES if first - 1 in self._images else 1
        stop = min(first + frames * PAGES_PER_FRAME, self.size_pages)
        if len(self._images) * self.page_size >= AHEAD_BYTES:
            self._images.clear()
        wanted = range(first, max(stop, page + 1))
        slots = {page // self._pages_per_chunk for page in (wanted[0], wanted[-1])}
        self._images.update(self._reader.read_pages(wanted, cold=frames > 1 and slots <= self._slots))
        self._slots |= slots
        return self._images[page]

    def read_rows(self, pages: NDArray[np.int64]) -> PageRows:
        """Return pages that are read only once, one in each row, bypassing all caches."""
        return self._reader.read_rows(pages)

    def close(self) -> None:
        """Drop the cached pages."""
        self._images.clear()
