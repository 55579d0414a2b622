"""Finds the leaves of a table that may hold rows of a range of rowids, through the interior pages of its B-tree.

Threads: any. Executor-safe. Raises `Unreadable`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from quire.sqlite.trees import (
    FIRST_HEADER,
    INTERIOR_CELLS,
    INTERIOR_TABLE,
    LEAST,
    MOST,
    ReadPage,
    Rowids,
    Unreadable,
    children,
    kind_of,
)

HEIGHT_MAX = 20
"""Height of a tree, at most: SQLite reads no higher one."""
CELL_BYTES_MAX = 13
"""Bytes of a cell of an interior page, at most: a page number and a rowid."""
_BIG = np.array([1 << 24, 1 << 16, 1 << 8, 1], np.int64)


@dataclass(frozen=True, slots=True)
class Leaves:
    """Consecutive leaves."""

    pages: NDArray[np.int64]
    """Page numbers, as SQLite counts them."""
    first: int
    """The smallest rowid that the first leaf may hold."""
    lasts: NDArray[np.int64]
    """The largest rowid that each leaf may hold; the next leaf begins after it."""

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def last(self) -> int:
        """The largest rowid that any leaf may hold."""
        return int(self.lasts[-1])

    def part(self, start: int, stop: int) -> Leaves:
        """Return the leaves from `start` to `stop`, exclusive."""
        first = int(self.lasts[start - 1]) + 1 if start else self.first
        return Leaves(self.pages[start:stop], first, self.lasts[start:stop])

    @staticmethod
    def joined(parts: list[Leaves]) -> Leaves:
        """Join consecutive parts."""
        pages, lasts = (np.concatenate(arrays) for arrays in zip(*((part.pages, part.lasts) for part in parts)))
        return Leaves(pages, parts[0].first, lasts)


def leaves_within(read_page: ReadPage, root: int, rowids: Rowids, pages_max: int) -> Iterator[Leaves]:
    """Yield the leaves that may hold rows of this range, in order: those of one interior page at a time.

    Reads the interior pages on the way and the first leaf. A tree of more than `pages_max` pages is `Unreadable`, as is one
    whose rowids do not rise.
    """
    height, page = 0, root
    while kind_of(image := read_page(page), page) == INTERIOR_TABLE:
        page, height = children(image, page)[0][0], height + 1
        if height > HEIGHT_MAX:
            raise Unreadable(page)
    left = pages_max

    def below(page: int, first: int, last: int, level: int) -> Iterator[Leaves]:
        nonlocal left
        leaves = _within(_children(read_page(page), page, first, last), rowids)
        left -= len(leaves)
        if left < 0:
            raise Unreadable(page)  # a cycle
        if level == 1:
            yield leaves
            return
        lasts = leaves.lasts.tolist()
        firsts = chain([leaves.first], (before + 1 for before in lasts))
        for child, start, stop in zip(leaves.pages.tolist(), firsts, lasts):
            yield from below(child, start, stop, level - 1)

    if height:
        yield from below(root, LEAST, MOST, height)
    else:
        yield Leaves(np.array([root]), LEAST, np.array([MOST]))


def _within(nodes: Leaves, rowids: Rowids) -> Leaves:
    start, stop = (int(np.searchsorted(nodes.lasts, rowid)) for rowid in rowids)
    return nodes.part(start, stop + 1)


def _children(image: bytes, page: int, first: int, last: int) -> Leaves:
    """Return the children of an interior page that covers the rowids from `first` to `last`."""
    at = FIRST_HEADER if page == 1 else 0
    count = int.from_bytes(image[at + 3 : at + 5])
    pages = lasts = None
    if count and len(image) > at + INTERIOR_CELLS + 2 * count and image[at] == INTERIOR_TABLE:
        cells = np.frombuffer(image, ">u2", count, at + INTERIOR_CELLS).astype(np.intp)
        if cells.max() < len(image):
            data = np.frombuffer(image + bytes(CELL_BYTES_MAX), np.uint8)
            pages = np.append(data[cells[:, None] + np.arange(4)] @ _BIG, int.from_bytes(image[at + 8 : at + 12]))
            lasts = _varints(data, cells + 4, len(image))
    if pages is None or lasts is None:  # a negative rowid, or damage
        nodes = children(image, page, last)
        if any(most is None for _, most in nodes):
            raise Unreadable(page)
        pages, lasts = (np.array(column, np.int64) for column in zip(*nodes))
    else:
        lasts = np.append(lasts, last)
    if lasts[0] < first or (lasts[1:] <= lasts[:-1]).any():
        raise Unreadable(page)
    return Leaves(pages, first, lasts)


def _varints(data: NDArray[np.uint8], at: NDArray[np.intp], end: int) -> NDArray[np.int64] | None:
    """Decode SQLite varints of at most eight bytes each; `None` if one is longer or passes the end."""
    values, is_open = np.zeros(len(at), np.int64), np.ones(len(at), np.bool_)
    for number in range(8):
        if (at[is_open] + number >= end).any():
            return None
        byte = data[at + number].astype(np.int64)
        values = np.where(is_open, values << 7 | byte & 0x7F, values)
        is_open &= byte >= 0x80
        if not is_open.any():
            return values
    return None
