"""Cuts a SQLite table into ranges of rowids that take about the same time to read.

Terms
  interior   a page of a table's tree that leads to others: (child, largest rowid below it) and a last child
  cut        a rowid: rows up to it are of one range, those above it of the next

Rules
  1. Cuts are taken from the upper pages of the tree itself, so that gaps and dense stretches of rowids do no harm.
  2. At most `PAGES_MAX` pages are read, whatever the size of the table.
  3. Nothing here decides what a row is: that is SQLite's. A page that is not what it should be makes one range of all.

The format is SQLite's own (https://www.sqlite.org/fileformat2.html#b_tree_pages). Pure, importable on executors.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import error as StructError  # noqa: N812 - it is a class
from struct import unpack_from

from quire.core.errors import OutOfRange

LEAST, MOST = -(2**63), 2**63 - 1
"""Of rowids."""

PAGES_MAX = 600
INTERIOR = 5
_FIRST_HEADER = 100

Node = tuple[int, int | None]
"""(page of SQLite's, the largest rowid below it; `None` for the last)."""


def rowid_ranges(read_page: Callable[[int], bytes], root: int, wanted: int) -> list[tuple[int, int]]:
    """Ranges (first, last) of rowids, both inclusive, that together are all of them."""
    cuts = _spread(_cuts(read_page, root, wanted), wanted)
    firsts = [LEAST, *(cut + 1 for cut in cuts)]
    return list(zip(firsts, [*cuts, MOST]))


def _cuts(read_page: Callable[[int], bytes], root: int, wanted: int) -> list[int]:
    """The rowids that separate the subtrees of the highest level that has enough of them."""
    level: list[Node] = [(root, None)]
    reads = 0
    while reads + len(level) <= PAGES_MAX:
        below: list[Node] = []
        for page, most in level:
            children = _children(read_page, page, most)
            if children is None:
                return _separators(level)
            below += children
        reads += len(level)
        level = below
        if len(level) >= 4 * wanted:
            break
    return _separators(level)


def _separators(level: list[Node]) -> list[int]:
    return [most for _, most in level[:-1] if most is not None and most < MOST]


def _children(read_page: Callable[[int], bytes], page: int, most: int | None) -> list[Node] | None:
    """What an interior page leads to; `None` if it is none (rule 3)."""
    try:
        image = read_page(page - 1)
        at = _FIRST_HEADER if page == 1 else 0
        kind, _, cells = unpack_from(">BHH", image, at)
        if kind != INTERIOR:
            return None
        found: list[Node] = []
        for number in range(cells):
            (cell,) = unpack_from(">H", image, at + 12 + 2 * number)
            (child,) = unpack_from(">I", image, cell)
            found.append((child, _varint(image, cell + 4)))
        (last,) = unpack_from(">I", image, at + 8)
    except (StructError, IndexError, OutOfRange):
        return None
    return [*found, (last, most)]


def _varint(image: bytes, at: int) -> int:
    """A number of SQLite's: seven bits a byte, at most nine bytes, signed.

    >>> _varint(bytes([0x81, 0x00]), 0)
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


def _spread(cuts: list[int], wanted: int) -> list[int]:
    """At most `wanted - 1` of the cuts, evenly.

    >>> _spread([10, 20, 30, 40, 50, 60, 70], 4)
    [20, 40, 60]
    """
    rising = [cut for place, cut in enumerate(cuts) if place == 0 or cut > cuts[place - 1]]
    if len(rising) < wanted:
        return rising
    return [rising[(len(rising) + 1) * number // wanted - 1] for number in range(1, wanted)]
