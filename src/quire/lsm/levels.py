"""The tables of a database at one moment, by level.

Terms
  level 0     tables as they were flushed or loaded: their key ranges may overlap
  level n     tables with disjoint key ranges, in the order of their keys

Rules
  1. A `Levels` never changes; a flush or a compaction makes a new one. Whoever holds one holds its tables, and with them their
     files (rule 3 of sst_reader.py).
  2. Which version of a key is newest is decided by lsn alone, never by the level: tables that are loaded in bulk enter level 0
     with an lsn from when the load began.

Threads: any.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.lsm.sst_reader import Found, Table


class Levels:
    """See the rules above."""

    __slots__ = ("_starts", "deeper", "level0", "lsn_max")

    def __init__(self, tables: Iterable[Table] = ()) -> None:
        by_level: dict[int, list[Table]] = {}
        for table in tables:
            by_level.setdefault(table.meta.level, []).append(table)
        newest_first = sorted(by_level.pop(0, ()), key=lambda each: (each.meta.lsn_max, each.meta.sst_id), reverse=True)
        self.level0: tuple[Table, ...] = tuple(newest_first)
        self.deeper: tuple[tuple[Table, ...], ...] = tuple(
            tuple(sorted(by_level.get(level, ()), key=lambda each: each.meta.key_min))
            for level in range(1, max(by_level, default=0) + 1)
        )
        self._starts = tuple([table.meta.key_min for table in level] for level in self.deeper)
        self.lsn_max = max((table.meta.lsn_max for table in self), default=0)

    def __iter__(self) -> Iterator[Table]:
        yield from self.level0
        for level in self.deeper:
            yield from level

    def __len__(self) -> int:
        return len(self.level0) + sum(map(len, self.deeper))

    def get(self, key: bytes, key_hash: int, lsn: int, best: Found | None) -> Found | None:
        """The newest version of a key at or below an lsn, `best` being what was found elsewhere (rule 2)."""
        for table in self.level0:
            if best is not None and best[0] >= table.meta.lsn_max:
                break  # the others are older still
            found = table.get(key, key_hash, lsn)
            if found is not None and (best is None or found[0] > best[0]):
                best = found
        for starts, level in zip(self._starts, self.deeper):
            at = bisect_right(starts, key) - 1
            if at < 0 or (best is not None and best[0] >= level[at].meta.lsn_max):
                continue
            found = level[at].get(key, key_hash, lsn)
            if found is not None and (best is None or found[0] > best[0]):
                best = found
        return best

    def overlapping(self, low: bytes, high: bytes | None) -> list[Table]:
        """The tables that may have keys in [low, high)."""
        return [table for table in self if table.meta.key_max >= low and (high is None or table.meta.key_min < high)]

    def level(self, number: int) -> tuple[Table, ...]:
        """The tables of a level."""
        if number == 0:
            return self.level0
        return self.deeper[number - 1] if number <= len(self.deeper) else ()

    def changed(self, added: Iterable[Table], removed: Iterable[Table]) -> Levels:
        """The levels with some tables more and some less."""
        gone = {id(table) for table in removed}
        return Levels([*(table for table in self if id(table) not in gone), *added])
