"""SQLite's B-trees, read page by page: finds where a table's rows are, without reading them.

Terms
  tree      the pages of a table or an index: interior pages that lead to leaves. All leaves have the same depth
  interior  a page of child pages; in the tree of a table with rowids each child has the largest rowid below it
  leaf      a page of rows, identified by its number and the rowids it may hold

Pages have SQLite's numbers, from 1, and SQLite's format (https://www.sqlite.org/fileformat2.html). They may come from a
damaged file: a page that is malformed or that leads in a circle raises `Unreadable`, and the caller leaves the question to
SQLite. Nothing here decodes a row.

Threads: any; nothing is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from struct import error as StructError  # noqa: N812 - it is a class
from struct import unpack_from
from typing import Protocol

from quire.core.errors import OutOfRange
from quire.sqlite.dbfile import PENDING_BYTE

LEAST, MOST = -(2**63), 2**63 - 1
"""The smallest and the largest rowid."""

Rowids = tuple[int, int]
"""(first, last), both inclusive."""
EVERYTHING: Rowids = (LEAST, MOST)

ReadPage = Callable[[int], bytes]
"""Returns a page by its number, from 1."""

PAGES_MAX = 600
"""Pages that are read to cut a table into ranges, at most."""

INTERIOR_INDEX, INTERIOR_TABLE, LEAF_INDEX, LEAF_TABLE = 2, 5, 10, 13
FIRST_HEADER = 100
"""Offset of the page header in the first page: it follows the database's header."""
INTERIOR_CELLS = 12
"""Offset of the array of cells in an interior page."""

Node = tuple[int, int | None]
"""A page of a table's tree, and the largest rowid below it; `None` for the last page of its level."""


class Unreadable(Exception):  # never leaves quire.sqlite and its callers in quire.spark
    """A page does not match the tree."""


class PageArray(Protocol):
    """Pages with quire's numbers, from 0."""

    def read_page(self, page: int, /) -> bytes: ...


def by_number(pages: PageArray) -> ReadPage:
    """Return a function that reads pages by SQLite's numbers."""
    return lambda page: pages.read_page(page - 1)


# ── one page ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def kind_of(image: bytes, page: int) -> int:
    """Return the type byte of a page."""
    try:
        return image[FIRST_HEADER if page == 1 else 0]
    except IndexError as error:
        raise Unreadable(page) from error


def children(image: bytes, page: int, most: int | None = None) -> list[Node]:
    """Return the children of an interior page, in order; without rowids in the tree of an index."""
    at = FIRST_HEADER if page == 1 else 0
    try:
        kind, _, count = unpack_from(">BHH", image, at)
        if kind not in (INTERIOR_INDEX, INTERIOR_TABLE):
            raise Unreadable(page)
        nodes: list[Node] = []
        for cell in unpack_from(f">{count}H", image, at + INTERIOR_CELLS):
            (child,) = unpack_from(">I", image, cell)
            nodes.append((child, varint(image, cell + 4) if kind == INTERIOR_TABLE else None))
        (last,) = unpack_from(">I", image, at + 8)
    except (StructError, IndexError) as error:
        raise Unreadable(page) from error
    return [*nodes, (last, most)]


def varint(image: bytes, at: int) -> int:
    """Return a SQLite varint: seven bits per byte, at most nine bytes, signed.

    >>> varint(bytes([0x81, 0x00]), 0)
    128
    """
    value = 0
    for number in range(8):
        byte = image[at + number]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value
    value = value << 8 | image[at + 8]
    return value - (1 << 64) if value >= 1 << 63 else value


# ── a whole tree ──────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(slots=True)
class BTree:
    """The pages of one tree. Its leaves are not read."""

    interior: set[int] = field(default_factory=set)
    leaves: dict[int, Rowids] = field(default_factory=dict)
    """Page → the rowids that it may hold; all rowids in the tree of an index."""

    def pages(self) -> set[int]:
        """Return all pages."""
        return self.interior | self.leaves.keys()


def walk(read_page: ReadPage, root: int, pages_max: int) -> BTree:
    """Return a tree of at most `pages_max` pages. Reads its interior pages and the first leaf."""
    tree = BTree()
    level: list[Node] = [(root, MOST)]
    while kind_of(read_page(level[0][0]), level[0][0]) in (INTERIOR_INDEX, INTERIOR_TABLE):
        below: list[Node] = []
        for page, most in level:
            if page in tree.interior or len(below) > pages_max:
                raise Unreadable(page)  # a cycle
            tree.interior.add(page)
            below += children(read_page(page), page, most)
        level = below
    first = LEAST
    for page, most in level:
        last = MOST if most is None else most
        tree.leaves[page] = (first, last)
        first = min(last + 1, MOST) if most is not None else LEAST
    return tree


def free_pages(read_page: ReadPage, size_pages: int) -> set[int]:
    """Return the pages of the free list."""
    free: set[int] = set()
    try:
        (trunk,) = unpack_from(">I", read_page(1), 32)
        while trunk:
            if trunk in free:
                raise Unreadable(trunk)
            free.add(trunk)
            image = read_page(trunk)
            (following, count) = unpack_from(">II", image)
            if count > size_pages:
                raise Unreadable(trunk)
            free.update(unpack_from(f">{count}I", image, 8))
            trunk = following
    except StructError as error:
        raise Unreadable(1) from error
    return free


def pointer_map_pages(first_page: bytes, size_pages: int) -> set[int]:
    """Return the pages by which a database with auto_vacuum finds the parents of pages; none without auto_vacuum."""
    try:
        (largest_root,) = unpack_from(">I", first_page, 52)
        (size,) = unpack_from(">H", first_page, 16)
        reserved = first_page[20]
    except (StructError, IndexError) as error:
        raise Unreadable(1) from error
    if not largest_root:
        return set()
    page_size = 65_536 if size == 1 else size
    locked = PENDING_BYTE // page_size + 1  # never used: a map page that would fall there is the next page
    every = range(2, size_pages + 1, (page_size - reserved) // 5 + 1)
    return {page + (page == locked) for page in every}


# ── ranges of about the same size ─────────────────────────────────────────────────────────────────────────────────────
def rowid_ranges(read_page: ReadPage, root: int, wanted: int) -> list[Rowids]:
    """Return ranges of rowids that together cover all rowids and take about the same time to read."""
    cuts = _spread(_cuts(read_page, root, wanted), wanted)
    firsts = [LEAST, *(cut + 1 for cut in cuts)]
    return list(zip(firsts, [*cuts, MOST]))


def _cuts(read_page: ReadPage, root: int, wanted: int) -> list[int]:
    """Return the rowids that separate the subtrees of the highest level that has enough of them."""
    level: list[Node] = [(root, None)]
    reads = 0
    while reads + len(level) <= PAGES_MAX:
        try:
            below = [node for page, most in level for node in children(read_page(page), page, most)]
        except (Unreadable, OutOfRange):
            break  # the leaves, or a malformed page: SQLite decides what a row is
        reads += len(level)
        level = below
        if len(level) >= 4 * wanted:
            break
    return [most for _, most in level[:-1] if most is not None and most < MOST]


def _spread(cuts: list[int], wanted: int) -> list[int]:
    """Return at most `wanted - 1` of the cuts, evenly spaced.

    >>> _spread([10, 20, 30, 40, 50, 60, 70], 4)
    [20, 40, 60]
    """
    rising = [cut for place, cut in enumerate(cuts) if place == 0 or cut > cuts[place - 1]]
    if len(rising) < wanted:
        return rising
    return [rising[(len(rising) + 1) * number // wanted - 1] for number in range(1, wanted)]


def joined(ranges: Iterator[Rowids] | list[Rowids]) -> list[Rowids]:
    """Return the same rowids in as few ranges as possible, in ascending order.

    >>> joined([(5, 7), (1, 2), (3, 4), (6, 9)])
    [(1, 9)]
    """
    merged: list[Rowids] = []
    for first, last in sorted(ranges):
        if merged and first <= min(merged[-1][1], MOST - 1) + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged
