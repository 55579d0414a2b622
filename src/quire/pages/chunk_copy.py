"""Copies many pages of chunks into the rows of one array with numpy; the only Python work per page is its checksum.

Threads: any; importable on executors (no lmdb). Raises what `ChunkReader` raises.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from quire.pages.chunk_format import PAGES_PER_FRAME
from quire.pages.chunk_reader import ChunkReader

PageRows = NDArray[np.uint8]
"""One page per row."""


def packed(pages: NDArray[np.uint32]) -> array[int]:
    """Return the pages as an `array`, which roaring bitmaps read in bulk; they read a numpy array item by item."""
    return array("I", np.ascontiguousarray(pages, np.uint32).tobytes())


def copy_pages(chunk: ChunkReader, offsets: NDArray[np.uint32], rows: NDArray[np.intp], images: PageRows) -> None:
    """Copy pages of a chunk into these rows of `images`. REQUIRES that the chunk has all of them, and ascending offsets."""
    if not len(offsets):
        return
    ranks = np.searchsorted(np.array(chunk.pages.to_array(), np.uint32), offsets)
    frames, starts = np.unique(ranks // PAGES_PER_FRAME, return_index=True)
    stops = [*starts[1:].tolist(), len(ranks)]
    indexes = ranks % PAGES_PER_FRAME
    parts = list(zip(starts.tolist(), stops))
    wanted = [(frame, indexes[start:stop].tolist()) for frame, (start, stop) in zip(frames.tolist(), parts)]
    for (start, stop), plain in zip(parts, chunk.iter_frames(wanted)):
        pages = np.frombuffer(plain, np.uint8).reshape(-1, images.shape[1])
        first, last, count = int(rows[start]), int(rows[stop - 1]), stop - start
        if last - first + 1 == count == len(pages) and (rows[start:stop] == np.arange(first, last + 1)).all():
            images[first : last + 1] = pages  # a whole frame, in order: one contiguous copy
        else:
            images[rows[start:stop]] = pages[indexes[start:stop]]
