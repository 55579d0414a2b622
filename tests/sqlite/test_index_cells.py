"""Cells of tables WITHOUT ROWID: hostile pages cost no more reads and no more bytes than the database has."""

from __future__ import annotations

from collections import Counter

import pytest

from quire.sqlite.index_cells import IndexFormat, payloads
from quire.sqlite.trees import Unreadable

PAGE, CHAIN = 512, range(10, 20)
FORM = IndexFormat(PAGE, "utf-8", 100 * PAGE)
LONG = 5_000
"""Bytes of a payload that continues in the pages of `CHAIN`."""


class Pages:
    """Two leaves, pages 2 and 3, and one chain of overflow pages."""

    def __init__(self, cell: bytes, pointers: int) -> None:
        at = PAGE - len(cell)
        head = bytes([10, 0, 0]) + pointers.to_bytes(2) + bytes(3) + at.to_bytes(2) * pointers
        leaf = head + bytes(at - len(head)) + cell
        self.images = dict.fromkeys((2, 3), leaf)
        for page in CHAIN:
            self.images[page] = (page + 1).to_bytes(4) + bytes([page]) * (PAGE - 4)
        self.reads = Counter[int]()

    def read_page(self, page: int) -> bytes:
        self.reads[page] += 1
        return self.images[page]


def long_cell() -> bytes:
    """A cell of `LONG` bytes: its length, the bytes that SQLite keeps in the page, and the first page of the chain."""
    least = (PAGE - 12) * 32 // 255 - 23
    local = least + (LONG - least) % (PAGE - 4)
    local = local if local <= (PAGE - 12) * 64 // 255 - 23 else least
    return bytes([0x80 | LONG >> 7, LONG & 0x7F]) + bytes(local) + CHAIN[0].to_bytes(4)


def test_a_payload_is_assembled_from_its_overflow_pages() -> None:
    pages = Pages(long_cell(), pointers=1)
    (payload,) = payloads(pages.read_page, [2], FORM)
    assert len(payload) == LONG
    assert payload.endswith(bytes([CHAIN[-1]]))


@pytest.mark.parametrize(("leaves", "pointers"), [([2], 100), ([2, 3], 1)])
def test_no_overflow_page_is_read_twice(leaves: list[int], pointers: int) -> None:
    """Hazard: all cells of a hostile database point to one long chain, which is read once for each of them."""
    pages = Pages(long_cell(), pointers)
    with pytest.raises(Unreadable):
        list(payloads(pages.read_page, leaves, FORM))
    assert set(pages.reads.values()) == {1}


def test_the_cells_of_a_page_have_no_more_bytes_than_the_page() -> None:
    """Hazard: overlapping cells of a hostile page take many times its size in memory."""
    pages = Pages(bytes([100]) + bytes(100), pointers=150)
    taken = list[bytes]()
    with pytest.raises(Unreadable):
        taken.extend(payloads(pages.read_page, [2], FORM))
    assert sum(map(len, taken)) <= PAGE
