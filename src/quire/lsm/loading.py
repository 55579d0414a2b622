"""Bulk loads: tables that were written elsewhere (on executors, say) enter a database in one step.

Terms
  load   from `begin` to `publish`: an lsn for all its rows, and ids for its tables

Rules
  1. The lsn is taken when the load begins: what is written before is older than the loaded rows, what is written after is
     newer, although it may be there before them.
  2. Ids come from the database's manifest, so that loads at the same time never collide.
  3. Everything older than the load is in tables before it is published (recovery's rule 1 counts on it); then one
     `Compaction{added, removed: []}` makes all of it visible at once. Its level is chosen then (rule 4 of compaction.py).
  4. A snapshot that was taken while the load was under way does not see it. Tombstones that hide its rows stay until it
     is over.
  5. A load that is not published leaves files that go when it is closed, with the next compaction (those of who wrote on
     after that), or at the next open; and nothing else.
  6. A key comes once in a load: all its rows have the same lsn, so nobody could say which of two is the newer one.
  7. A load that has a number is remembered with it (load_notes.py): publishing it again answers, and does nothing.

    with begin_load(kv) as load:
        for sst_id in load.allocate(2):
            writer = TableWriter(sst_id)        # here or on another machine that shares the directory
            writer.add(rows)                    # sorted, every lsn = load.lsn
            writer.write(disk, load.path(sst_id))
        load.publish(ids)

Threads: one for each load. Raises `InvalidInput` for tables that do not belong to the load, `Corruption`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

import numpy as np

from quire.core.errors import InvalidInput
from quire.lsm.compaction import clusters
from quire.lsm.load_notes import LoadNote, read_note
from quire.lsm.merge import PART_BYTES, merged, parts
from quire.lsm.sst_reader import SSTable
from quire.lsm.sst_writer import key_changes

if TYPE_CHECKING:
    from quire.lsm.kv import Kv


class Load:
    """A load that is under way; made by `begin_load`."""

    def __init__(self, kv: Kv, lsn: int) -> None:
        self.lsn = lsn
        self._kv = kv
        self._ids: set[int] = set()
        self._over = False

    def allocate(self, count: int) -> range:
        """Ids for tables of this load (rule 2)."""
        ids = self._kv.manifest.allocate_sst_ids(count)
        self._ids.update(ids)
        return ids

    def path(self, sst_id: int) -> str:
        """Where the table with this id is to be written."""
        return self._kv.home.sst(sst_id)

    def publish(self, ids: Iterable[int], *, number: int = 0) -> int:
        """Have these tables in the database, all at once (rules 3 and 7); how many rows they bring."""
        kv = self._kv
        chosen = sorted(set(ids))
        if self._over or not self._ids.issuperset(chosen):
            raise InvalidInput("these tables do not belong to this load", hint="use ids from `allocate`", ids=chosen)
        tables = [SSTable.open(kv.disk, self.path(sst_id), sst_id) for sst_id in chosen]
        try:
            for table in tables:
                self._check(table)
            _refuse_doubles(tables)
        finally:
            for table in tables:
                table.close()
        rows = sum(table.meta.rows for table in tables)
        note = LoadNote(number=number, at_ms=kv.clock.now_ms(), rows=rows, ids=tuple(chosen)) if number else None
        self._ids.difference_update(chosen)  # from here on an event may name them: they are not this load's to remove
        try:
            kv.upkeep.add_tables(tables, self.lsn, note)
        except BaseException:
            if kv.failure is None and kv.manifest.state().tables.keys().isdisjoint(chosen):
                self._ids.update(chosen)
            raise
        self.close()
        return rows

    def _check(self, table: SSTable) -> None:
        meta = table.meta
        if (meta.lsn_min, meta.lsn_max) != (self.lsn, self.lsn):
            lsns = (meta.lsn_min, meta.lsn_max)
            raise InvalidInput("every row of a loaded table must have the load's lsn", sst_id=meta.sst_id, lsns=lsns)

    def close(self) -> None:
        """The load is over; tables that were not published are removed. A second time: nothing."""
        if self._over:
            return
        self._over = True
        self._kv.end_load(self.lsn)
        self._kv.upkeep.forsake(self._ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def begin_load(kv: Kv) -> Load:
    """Begin a load (rule 1)."""
    return Load(kv, kv.begin_load())


def published(kv: Kv, number: int) -> int | None:
    """How many rows a load with this number has brought; `None` if it was not published (rule 7)."""
    note = read_note(kv.disk, kv.home, number)
    return note.rows if note is not None and note.done else None


def _refuse_doubles(tables: list[SSTable]) -> None:
    """Refuse a key that comes twice in a load. Inside a table the writer has seen to it, so only tables that overlap
    are read."""
    for together in clusters(tables):
        for low, high in parts(together, b"", None, first_bytes=PART_BYTES):
            keys = merged(together, low, high).column(0)
            changes = key_changes(keys)
            if not changes.all():
                raise double_key(keys[int(np.argmin(changes))].as_py())


def double_key(key: bytes = b"") -> InvalidInput:
    """The error for a key that comes twice in a load."""
    text = "a key occurs twice in a load, so its newest value is ambiguous"
    where = {"key": key[:60]} if key else {}
    return InvalidInput(text, hint="keep one row per key first, with dropDuplicates or an aggregate", **where)
