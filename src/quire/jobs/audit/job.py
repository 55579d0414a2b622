"""The audit job: recomputes reference counts, heads and floors from rows, on the runner, and compares them with the stored
values.

It changes nothing; `quire manifest check --repair` repairs what can be repaired. The result has the first `LISTED_MAX`
differences and their total number. A table that cannot be read is a difference, too (K1), and the other tables are compared.

All rows are read in one transaction, so a concurrent commit cannot look like a difference. They are sent to the runner as
numbers, a wave at a time, with all rows of one piece (`run.ID_BITS`, `run.PIECE_BITS`) in the same wave, so that the driver's
memory does not grow with the store. Pages are in order, so they are read once; references are not, so they are read again for
each wave (`jobs/row_groups.py`).
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
from quire.jobs.audit.run import PIECE_BITS, Difference, RowBlock, join_blocks, piece_of, split_block
from quire.jobs.context import JobContext
from quire.jobs.handler import Completed, Outcome, Progress, options
from quire.jobs.row_groups import cut, part
from quire.manifest import tables as t
from quire.manifest.holders import decode, inventory
from quire.manifest.jobqueue import Job
from quire.manifest.reads import ReadTxn

LISTED_MAX = 1_000
BYTES_A_ROW = 256
"""Bytes of work that one row counts as when a runner is chosen: a million rows are worth a cluster."""


def audit_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Compare stored counts, heads and floors with those computed from rows."""
    runner_name = options(job, runner="")["runner"]
    with ctx.manifest.read() as txn:
        total, done, rows = work(txn), 0, 0
        progress(0, total)
        runner = ctx.choose_runner(runner_name, total * BYTES_A_ROW, label="quire-audit")
        listed: list[dict[str, Any]] = [described(difference) for difference in floors(txn)]
        differences = len(listed)
        for wave in waves(txn):
            rows += wave.rows
            if wave.unread:
                differences += 1
                listed.append(described_unread(wave))
            tick = part(progress, done, wave.done, total)
            for answer in runner.regroup(split_block, wave.blocks, join_blocks, tick=tick) if wave.blocks else ():
                result = answer.result()
                differences += len(result)
                listed += [described(difference) for difference in result[: max(0, LISTED_MAX - len(listed))]]
            done = wave.done
    progress(total, total)
    return Completed({"rows": rows, "differences": differences, "found": listed, "runner": runner.name})


# ── planning ──────────────────────────────────────────────────────────────────────────────────────────────────────────
STEP_ROWS = 8_192
WAVE_ROWS = 4_000_000
"""Page versions that one call of the runner compares: 128 MB of numbers."""

REFERENCE_ROWS = 5_000_000
"""References, counts and catalog rows that one call of the runner compares: 120 MB of numbers."""

END = (1 << 64) - 1
"""A border after every page key: no database uses the highest id."""

WHAT = {
    "R1": "its reference count is {have}, but it is held {want} times",
    "S2": "it is referenced but not in the catalog",
    "R4": "it is unreferenced, and nothing will delete it",
    "P1": "the head of a page is {have}, its newest version {want} (lsn, segment)",
    "L1": "the floor of a database is {have}, but its WAL puts it within {want}",
}
"""Rule → text of a difference."""


_REFERRING: tuple[t.Table[Any], ...] = (
    t.LIVE_LEAF, t.SNAPSHOT_INDEX, t.SLOT_LEAF, t.WAL_CATALOG, t.CHUNK_CATALOG, t.CHUNK_DELTA_INDEX, t.GC_REFCOUNTS,
)  # fmt: skip
_PAGES: tuple[t.Table[Any], ...] = (t.PAGE_VERSION_INDEX, t.PAGE_VERSION_HEAD)


@dataclass(frozen=True, slots=True)
class Wave:
    """The input of one call of the runner."""

    blocks: list[RowBlock]
    done: int
    """The part of `work` that is done after this wave."""
    unread: str = ""
    """Why the rest could not be read; empty if it could."""

    @property
    def rows(self) -> int:
        """Number of manifest rows in this wave, with each reference counted."""
        return sum(int(block.rows[:, 2].sum()) if block.sort == "held" else len(block.rows) for block in self.blocks)


def work(txn: ReadTxn) -> int:
    """Return the approximate number of rows to compare, from the sizes of the tables."""
    return max(1, sum(txn.count(table) for table in (*_REFERRING, *_PAGES)))


def waves(txn: ReadTxn) -> Iterator[Wave]:
    """Yield everything that the runner compares, in waves of bounded memory."""
    referring = sum(txn.count(table) for table in _REFERRING)
    for compared, done, read_waves in (("references", referring, _reference_waves), ("pages", work(txn), _page_waves)):
        try:
            yield from read_waves(txn, referring)
        except (Corruption, ValueError, struct.error) as error:
            yield Wave([], done, f"{compared} cannot be compared: {error}")


def _reference_waves(txn: ReadTxn, referring: int) -> Iterator[Wave]:
    groups = cut(lambda: _references(txn), piece_of, REFERENCE_ROWS)
    for number, blocks in enumerate(groups, 1):
        yield Wave(blocks, referring * number // groups.count)


def _page_waves(txn: ReadTxn, done: int) -> Iterator[Wave]:
    versions = _Sorted(_pages(txn, "version", t.PAGE_VERSION_INDEX))
    heads = _Sorted(_pages(txn, "head", t.PAGE_VERSION_HEAD))
    more = True
    while more:
        more = versions.fill(WAVE_ROWS)
        border = versions.border if more else END
        blocks = versions.take(border) + heads.take(border)
        done += sum(len(block.rows) for block in blocks)
        yield Wave(blocks, done)


class _Sorted:
    """Blocks of page rows in key order, taken up to a border."""

    def __init__(self, blocks: Iterator[RowBlock]) -> None:
        self._blocks = blocks
        self._held: deque[RowBlock] = deque()
        self.border = 0

    def fill(self, rows: int) -> bool:
        """Read until at least `rows` rows and more than one piece are held; return whether that succeeded. `border` is the
        start of the last piece."""
        held = sum(len(block.rows) for block in self._held)
        for block in self._blocks:
            self._held.append(block)
            held += len(block.rows)
            first, last = (_page_key(block.rows)[at] for block, at in ((self._held[0], 0), (block, -1)))
            self.border = int(last) >> PIECE_BITS << PIECE_BITS
            if held >= rows and first < self.border:
                return True
        return False

    def take(self, border: int) -> list[RowBlock]:
        """Return the rows before a border."""
        taken: list[RowBlock] = []
        while (block := self._next()) is not None:
            place = int(np.searchsorted(_page_key(block.rows), np.uint64(border)))
            if place:
                taken.append(RowBlock(block.sort, block.rows[:place]))
            if place < len(block.rows):
                self._held.appendleft(RowBlock(block.sort, block.rows[place:]))
                break
        return taken

    def _next(self) -> RowBlock | None:
        return self._held.popleft() if self._held else next(self._blocks, None)


def _page_key(rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return (database, page) of each row as one number."""
    key: NDArray[np.uint64] = rows[:, 0] << np.uint64(32) | rows[:, 1]
    return key


def _references(txn: ReadTxn) -> Iterator[RowBlock]:
    for sort, codes, counts in inventory(txn):
        rows = np.column_stack([codes, counts.astype(np.uint64)])
        for start in range(0, len(rows), STEP_ROWS):
            yield RowBlock(sort, np.ascontiguousarray(rows[start : start + STEP_ROWS]))


def _pages(txn: ReadTxn, sort: str, table: t.Table[Any]) -> Iterator[RowBlock]:
    for keys, values in txn.steps(table, STEP_ROWS):
        key = np.frombuffer(b"".join(keys), table.key.numpy_fields())
        row = table.rows.columns(keys, values)
        lsns: NDArray[Any] = key["lsn"] if sort == "version" else row["lsn"]
        columns = [np.asarray(column, np.uint64) for column in (key["db_id"], key["page"], lsns, row["segment_id"])]
        yield RowBlock(sort, np.stack(columns, axis=1))


def floors(txn: ReadTxn) -> Iterator[Difference]:
    """Yield floors outside the range from the last absorbed to the last published lsn."""
    for (db_id,), row in txn.scan(t.SNAPSHOT_FLOOR):
        wal = txn.wal_state(db_id)
        low, high = (wal.checkpointed_lsn, wal.last_applied_lsn) if wal is not None else (0, 0)
        if not low <= row.min_snapshot_lsn <= high:
            yield Difference("L1", (db_id, 0), (row.min_snapshot_lsn,), (low, high))


def described_unread(wave: Wave) -> dict[str, Any]:
    """Return the row of the audit's table for a wave that could not be read."""
    return {"state": "K1", "what": wave.unread}


def described(difference: Difference) -> dict[str, Any]:
    """Return a difference as a row of the audit's table."""
    have, want = (_plain(numbers) for numbers in (difference.have, difference.want))
    what = WHAT[difference.rule].format(have=have, want=want)
    if difference.rule == "P1":
        return {
            "state": difference.rule,
            "what": f"database {difference.subject[0]}, page {difference.subject[1]}: {what}",
        }
    if difference.rule == "L1":
        return {"state": difference.rule, "what": f"database {difference.subject[0]}: {what}"}
    key = decode(difference.subject)
    named = object_key(key) if key.kind in KINDS_WITH_OBJECTS else str(key)
    return {"state": difference.rule, "artifact": named, "what": what}


def _plain(numbers: tuple[int, ...]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else (str(numbers) if numbers else "missing")
