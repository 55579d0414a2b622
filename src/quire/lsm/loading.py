"""Bulk loads: tables that were written elsewhere (on executors, say) enter a database in one step.

Terms
  load   from `begin` to `publish`: an lsn for all its rows, and ids for its tables

Rules
  1. The lsn is taken when the load begins: what is written before is older than the loaded rows, what is written after is
     newer, although it may be there before them.
  2. Ids come from the database's manifest, so that loads at the same time never collide.
  3. Everything older than the load is in tables before it is published (recovery's rule 1 counts on it); then one
     `Compaction{added, removed: []}` makes all of it visible at once.
  4. A snapshot that was taken while the load was under way does not see it. Tombstones that hide its rows stay until it
     is over.
  5. A load that is not published leaves files that the next open sweeps, and nothing else.

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
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from quire.core.errors import InvalidInput, StorageFault
from quire.lsm.sst_reader import Table

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

    def publish(self, ids: Iterable[int]) -> int:
        """Have these tables in the database, all at once (rule 3); how many rows they bring."""
        kv = self._kv
        chosen = sorted(set(ids))
        if self._over or not self._ids.issuperset(chosen):
            raise InvalidInput("these tables are not of this load", hint="use ids from `allocate`", ids=chosen)
        tables = [Table.open(kv.disk, self.path(sst_id), sst_id, kv.cache) for sst_id in chosen]
        try:
            for table in tables:
                meta = table.meta
                if (meta.level, meta.lsn_min, meta.lsn_max) != (0, self.lsn, self.lsn):
                    raise InvalidInput(
                        "a loaded table has level 0 and the load's lsn in every row",
                        sst_id=meta.sst_id,
                        level=meta.level,
                        lsns=(meta.lsn_min, meta.lsn_max),
                    )
            kv.upkeep.add_tables(tables)
        except BaseException:
            for table in tables:
                table.close()
            raise
        self._ids.difference_update(chosen)
        self.close()
        return sum(table.meta.rows for table in tables)

    def close(self) -> None:
        """The load is over; tables that were not published are removed. A second time: nothing."""
        if self._over:
            return
        self._over = True
        self._kv.end_load(self.lsn)
        for sst_id in self._ids:
            with suppress(StorageFault, FileNotFoundError):
                self._kv.disk.remove(self.path(sst_id))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def begin_load(kv: Kv) -> Load:
    """Begin a load (rule 1)."""
    return Load(kv, kv.begin_load())
