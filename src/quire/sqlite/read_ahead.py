"""Reads pages of a version in runs, for SQLite, which asks for one page at a time.

Importable on executors. Thread: one.
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
"""Frames that are read together where somebody walks, and pages kept by who reads ahead."""


class ReadAhead:
    """A reader whose pages come in runs: SQLite asks for one page at a time, chunks have frames of 16 (P11).

    A page that is missing brings its frame with it; if the frame before it is here, somebody walks, and the next ones come too,
    past the reader's own cache: nobody walks back.
    """

    def __init__(self, reader: ViewReader) -> None:
        self.lsn, self.page_size, self.size_pages = reader.lsn, reader.page_size, reader.size_pages
        self._reader = reader
        self._pages_per_chunk = reader.view.pages_per_chunk
        self._images: dict[int, bytes] = {}
        self._slots: set[int] = set()
        """Whose chunks are open: a read past the cache would open them each time."""

    def read_page(self, page: int) -> bytes:
        """The page as of this version."""
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
        """Pages that are read once, one in each row: past everything that is kept."""
        return self._reader.read_rows(pages)

    def close(self) -> None:
        """Let the pages go."""
        self._images.clear()
