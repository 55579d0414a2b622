"""What an audit compares: rows of one transaction, as blocks of numbers, and the floors, which are few.

Rules
  1. All blocks are of one transaction: what is committed meanwhile cannot look like a difference.
  2. They are made a few thousand rows at a time and say only what is compared: 24 bytes for the references of some rows to one
     artifact, a count or a catalog row, 32 for a version of a page. They are compared a wave after the other, and what is
     about one piece (`run.ID_BITS`, `run.PIECE_BITS`) in the same: in memory are at most `REFERENCE_ROWS` or `WAVE_ROWS`, or
     one piece if that is more, and 16 bytes for each piece of references. Pages come in order, so they are read once;
     references do not, so they are read once more for each wave if there are several (`jobs/row_groups.py`).
  3. A floor's row (`pages/floors.py`) lies between what was absorbed and what was published: readers above it find everything,
     and no reader was promised a version that is not there.
  4. Where rows cannot be read that is a difference, too (K1), and what else there is to compare is compared.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import Corruption
from quire.core.ids import KINDS_WITH_OBJECTS
from quire.durable.names import object_key
from quire.jobs.audit.run import PIECE_BITS, Block, Difference, piece_of
from quire.jobs.row_groups import cut
from quire.manifest import tables as t
from quire.manifest.holders import decode, inventory
from quire.manifest.reads import ReadTxn

STEP_ROWS = 8_192
WAVE_ROWS = 4_000_000
"""Versions of pages that are compared in one run of the runner: 128 MB of numbers."""

REFERENCE_ROWS = 5_000_000
"""References, counts and catalog rows that are compared in one run of the runner: 120 MB of numbers."""

END = (1 << 64) - 1
"""A border behind everything: no database has all ids."""

WHAT = {
    "R1": "its reference count is {have}, it is held {want} times",
    "S2": "something refers to it, and it is not in the catalog",
    "R4": "nothing refers to it, and nothing will delete it",
    "P1": "the head of a page is {have}, its newest version {want} (lsn, segment)",
    "L1": "the floor of a database is {have}, by its WAL it is within {want}",
}
"""Rule → what a difference says."""


_REFERRING: tuple[t.Table[Any], ...] = (
    t.LIVE_LEAF, t.SNAPSHOT_INDEX, t.SLOT_LEAF, t.WAL_CATALOG, t.CHUNK_CATALOG, t.CHUNK_DELTA_INDEX, t.GC_REFCOUNTS,
)  # fmt: skip
_PAGES: tuple[t.Table[Any], ...] = (t.PAGE_VERSION_INDEX, t.PAGE_VERSION_HEAD)


@dataclass(frozen=True, slots=True)
class Wave:
    """What is compared in one run of the runner."""

    blocks: list[Block]
    done: int
    """How much of `work` is done when this is."""
    unread: str = ""
    """Why there is no more of it (rule 4)."""

    @property
    def rows(self) -> int:
        """How many rows of the manifest this is about, each reference counted."""
        return sum(int(each.rows[:, 2].sum()) if each.sort == "held" else len(each.rows) for each in self.blocks)


def work(txn: ReadTxn) -> int:
    """How much there is to compare, about: in rows, by the sizes of tables."""
    return max(1, sum(txn.count(table) for table in (*_REFERRING, *_PAGES)))


def waves(txn: ReadTxn) -> Iterator[Wave]:
    """Everything that is compared by the runner, as much at a time as memory should hold (rule 2)."""
    referring = sum(txn.count(table) for table in _REFERRING)
    for compared, done, found in (("references", referring, _reference_waves), ("pages", work(txn), _page_waves)):
        try:
            yield from found(txn, referring)
        except (Corruption, ValueError, struct.error) as error:
            yield Wave([], done, f"{compared} cannot be compared: {error}")


def _reference_waves(txn: ReadTxn, referring: int) -> Iterator[Wave]:
    found = cut(lambda: _references(txn), piece_of, REFERENCE_ROWS)
    for number, blocks in enumerate(found, 1):
        yield Wave(blocks, referring * number // found.count)


def _page_waves(txn: ReadTxn, done: int) -> Iterator[Wave]:
    versions = _Sorted(_pages(txn, "version", t.PAGE_VERSION_INDEX))
    heads = _Sorted(_pages(txn, "head", t.PAGE_VERSION_HEAD))
    more = True
    while more:
        more = versions.fill(WAVE_ROWS)
        border = versions.border if more else END
        blocks = versions.take(border) + heads.take(border)
        done += sum(len(each.rows) for each in blocks)
        yield Wave(blocks, done)


class _Sorted:
    """Blocks of pages in the order of their keys, taken up to a border."""

    def __init__(self, blocks: Iterator[Block]) -> None:
        self._blocks = blocks
        self._held: deque[Block] = deque()
        self.border = 0

    def fill(self, rows: int) -> bool:
        """Hold at least so many rows, and more than one piece; whether there were as many. `border` is the last piece's."""
        held = sum(len(each.rows) for each in self._held)
        for block in self._blocks:
            self._held.append(block)
            held += len(block.rows)
            first, last = (_page_key(each.rows)[at] for each, at in ((self._held[0], 0), (block, -1)))
            self.border = int(last) >> PIECE_BITS << PIECE_BITS
            if held >= rows and first < self.border:
                return True
        return False

    def take(self, border: int) -> list[Block]:
        """The rows before a border."""
        taken: list[Block] = []
        while (block := self._next()) is not None:
            place = int(np.searchsorted(_page_key(block.rows), np.uint64(border)))
            if place:
                taken.append(Block(block.sort, block.rows[:place]))
            if place < len(block.rows):
                self._held.appendleft(Block(block.sort, block.rows[place:]))
                break
        return taken

    def _next(self) -> Block | None:
        return self._held.popleft() if self._held else next(self._blocks, None)


def _page_key(rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """(database, page) as one number."""
    key: NDArray[np.uint64] = rows[:, 0] << np.uint64(32) | rows[:, 1]
    return key


def _references(txn: ReadTxn) -> Iterator[Block]:
    for sort, codes, counts in inventory(txn):
        rows = np.column_stack([codes, counts.astype(np.uint64)])
        for start in range(0, len(rows), STEP_ROWS):
            yield Block(sort, np.ascontiguousarray(rows[start : start + STEP_ROWS]))


def _pages(txn: ReadTxn, sort: str, table: t.Table[Any]) -> Iterator[Block]:
    for keys, values in txn.steps(table, STEP_ROWS):
        key = np.frombuffer(b"".join(keys), table.key.numpy_fields())
        row = table.rows.columns(keys, values)
        lsns: NDArray[Any] = key["lsn"] if sort == "version" else row["lsn"]
        columns = [np.asarray(each, np.uint64) for each in (key["db_id"], key["page"], lsns, row["segment_id"])]
        yield Block(sort, np.stack(columns, axis=1))


def floors(txn: ReadTxn) -> Iterator[Difference]:
    """Floors outside the range between what was absorbed and what was published (rule 3)."""
    for (db_id,), row in txn.scan(t.SNAPSHOT_FLOOR):
        wal = txn.wal_state(db_id)
        low, high = (wal.checkpointed_lsn, wal.last_applied_lsn) if wal is not None else (0, 0)
        if not low <= row.min_snapshot_lsn <= high:
            yield Difference("L1", (db_id, 0), (row.min_snapshot_lsn,), (low, high))


def told_unread(wave: Wave) -> dict[str, Any]:
    """Rule 4, as a row of the audit's table."""
    return {"state": "K1", "what": wave.unread}


def told(each: Difference) -> dict[str, Any]:
    """A difference as a row of the audit's table."""
    have, want = (_plain(numbers) for numbers in (each.have, each.want))
    what = WHAT[each.rule].format(have=have, want=want)
    if each.rule == "P1":
        return {"state": each.rule, "what": f"database {each.subject[0]}, page {each.subject[1]}: {what}"}
    if each.rule == "L1":
        return {"state": each.rule, "what": f"database {each.subject[0]}: {what}"}
    key = decode(each.subject)
    named = object_key(key) if key.kind in KINDS_WITH_OBJECTS else str(key)
    return {"state": each.rule, "artifact": named, "what": what}


def _plain(numbers: tuple[int, ...]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else (str(numbers) if numbers else "missing")
