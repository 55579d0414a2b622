"""A view: the memtable, the frozen memtables and the tables of a database at one moment, and reads of it at an lsn.

Views and levels are immutable (a view's memtable grows, but reads at an lsn do not see that); a flush or a compaction creates
new ones. A reference to a view keeps its tables and their files open. The lsn alone decides which version of a key is newest,
never the level: tables loaded in bulk have the lsn of the beginning of the load.

Threads: any."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from quire.durable.files import Disk
from quire.durable.log_reader import LogEnd
from quire.lsm.memtable import Memtable
from quire.lsm.short_scan import FIRST_ROWS, SHORT_ROWS, Pair, RowWindows, SortedRun, short_window
from quire.lsm.wal import Buffer, as_bytes

if TYPE_CHECKING:
    import pyarrow as pa

    from quire.lsm.block_cache import BlockCache, VersionedValue
    from quire.lsm.merge import Hidden, RowSource
    from quire.lsm.sst_reader import SSTable


def open_table(disk: Disk, path: str, sst_id: int, cache: BlockCache | None) -> SSTable:
    """Call `SSTable.open`. Arrow is imported here, because a database without tables does not need it."""
    from quire.lsm.sst_reader import SSTable

    return SSTable.open(disk, path, sst_id, cache)


class LevelRun:
    """The tables of a deeper level as one sorted run: their ranges are disjoint."""

    __slots__ = ("starts", "tables")

    def __init__(self, tables: tuple[SSTable, ...]) -> None:
        self.tables = tables
        self.starts = [table.meta.key_min for table in tables]

    def overlapping(self, low: bytes, high: bytes | None) -> tuple[SSTable, ...]:
        """Return the tables that may have keys in [low, high)."""
        first = max(0, bisect_right(self.starts, low) - 1)
        if first < len(self.tables) and self.tables[first].meta.key_max < low:
            first += 1
        return self.tables[first : len(self.tables) if high is None else bisect_left(self.starts, high)]

    def window(self, windows: RowWindows, low: bytes, high: bytes | None, rows: int) -> bytes | None:
        """Add the first `rows` rows of [low, high) from the first table of the range. Return the edge (short_scan.py)."""
        tables = self.overlapping(low, high)
        if not tables:
            return None
        edge = tables[0].window(windows, low, high, rows)
        return edge if edge is not None or len(tables) == 1 else tables[1].meta.key_min

    def window_before(self, windows: RowWindows, low: bytes, high: bytes | None, rows: int) -> bytes | None:
        """Add the last `rows` rows of [low, high) from the last table of the range. Return the edge."""
        tables = self.overlapping(low, high)
        if not tables:
            return None
        edge = tables[-1].window_before(windows, low, high, rows)
        return edge if edge is not None or len(tables) == 1 else tables[-1].meta.key_min


class Levels:
    """The tables by level. Key ranges may overlap in level 0; deeper levels have disjoint ranges, sorted by key."""

    __slots__ = ("_deeper_runs", "deeper", "level0", "lsn_max", "runs")

    def __init__(self, tables: Iterable[SSTable] = ()) -> None:
        by_level: dict[int, list[SSTable]] = {}
        for table in tables:
            by_level.setdefault(table.meta.level, []).append(table)
        newest_first = sorted(
            by_level.pop(0, ()), key=lambda table: (table.meta.lsn_max, table.meta.sst_id), reverse=True
        )
        self.level0: tuple[SSTable, ...] = tuple(newest_first)
        self.deeper: tuple[tuple[SSTable, ...], ...] = tuple(
            tuple(sorted(by_level.get(level, ()), key=lambda table: table.meta.key_min))
            for level in range(1, max(by_level, default=0) + 1)
        )
        self._deeper_runs = tuple(map(LevelRun, self.deeper))
        self.runs: tuple[SortedRun, ...] = (*self.level0, *self._deeper_runs)
        """All tables as sorted runs."""
        self.lsn_max = max((table.meta.lsn_max for table in self), default=0)

    def __iter__(self) -> Iterator[SSTable]:
        yield from self.level0
        for level in self.deeper:
            yield from level

    def __len__(self) -> int:
        return len(self.level0) + sum(map(len, self.deeper))

    def get(self, key: bytes, lsn: int, best: VersionedValue | None) -> VersionedValue | None:
        """Return the newest version of a key at or below `lsn`. `best`: the newest one found elsewhere."""
        for table in self.level0:
            if best is not None and best[0] >= table.meta.lsn_max:
                break  # the remaining tables are older still
            value = table.get(key, lsn)
            if value is not None and (best is None or value[0] > best[0]):
                best = value
        for run in self._deeper_runs:
            at = bisect_right(run.starts, key) - 1
            if at < 0:
                continue
            table = run.tables[at]
            if best is None:
                best = table.get(key, lsn)
            elif best[0] < table.meta.lsn_max:
                value = table.get(key, lsn)
                if value is not None and value[0] > best[0]:
                    best = value
        return best

    def find_many(self, keys: Sequence[bytes], lsn: int, best: dict[bytes, VersionedValue]) -> None:
        """Look up many keys as `get` does, and update the newest versions in `best`."""
        for table in self.level0:
            table.find_many(keys, lsn, best)
        for run in self._deeper_runs:
            if len(run.tables) == 1:
                run.tables[0].find_many(keys, lsn, best)
                continue
            by_table: dict[int, list[bytes]] = {}
            for key in keys:
                by_table.setdefault(bisect_right(run.starts, key) - 1, []).append(key)
            by_table.pop(-1, None)  # below the first table
            for at, mine in by_table.items():
                run.tables[at].find_many(mine, lsn, best)

    def overlapping(self, low: bytes, high: bytes | None) -> list[SSTable]:
        """Return the tables that may have keys in [low, high)."""
        tables = [
            table for table in self.level0 if table.meta.key_max >= low and (high is None or table.meta.key_min < high)
        ]
        for run in self._deeper_runs:
            tables += run.overlapping(low, high)
        return tables

    def level(self, number: int) -> tuple[SSTable, ...]:
        """Return the tables of a level."""
        if number == 0:
            return self.level0
        return self.deeper[number - 1] if number <= len(self.deeper) else ()

    def changed(self, added: Iterable[SSTable], removed: Iterable[SSTable]) -> Levels:
        """Return new levels, with `added` and without `removed`."""
        gone = {id(table) for table in removed}
        return Levels([*(table for table in self if id(table) not in gone), *added])


LSN_MAX = (1 << 64) - 1


class Frozen(msgspec.Struct, frozen=True):
    """A memtable that waits to be flushed, and its WAL."""

    memtable: Memtable
    wal: int
    end: LogEnd
    """The final end of that WAL."""


class KvView(msgspec.Struct, frozen=True):
    """A database at one moment."""

    memtable: Memtable
    frozen: tuple[Frozen, ...]
    """Newest first."""
    levels: Levels

    def get(self, key: bytes, lsn: int, hidden: Hidden = frozenset()) -> bytes | None:
        """Return the value of a key at an lsn, or `None`."""
        if hidden:
            pairs, _ = short_window(self._runs(), key, key + b"\0", lsn, hidden, rows=1, reverse=False)
            return pairs[0][1] if pairs else None
        best: VersionedValue | None = self.memtable.get(key, lsn)
        if best is None:
            for frozen in self.frozen:
                best = frozen.memtable.get(key, lsn)
                if best is not None:
                    break
        levels = self.levels
        if best is None or best[0] < levels.lsn_max:
            best = levels.get(key, lsn, best)
        return best[1] if best is not None else None

    def get_many(self, keys: Sequence[Buffer], lsn: int, hidden: Hidden = frozenset()) -> list[bytes | None]:
        """Return the values of keys at an lsn, in their order."""
        names = [key if type(key) is bytes else as_bytes(key) for key in keys]
        if hidden:
            return [self.get(key, lsn, hidden) for key in names]
        best: dict[bytes, VersionedValue] = {}
        for memtable in (self.memtable, *(frozen.memtable for frozen in self.frozen)):
            if memtable.entries:
                for key in names:
                    if key not in best and (version := memtable.get(key, lsn)) is not None:
                        best[key] = version
        self.levels.find_many(names, lsn, best)
        return [best[key][1] if key in best else None for key in names]

    def pairs(
        self, low: bytes, high: bytes | None, lsn: int, *, hidden: Hidden = frozenset(), reverse: bool = False
    ) -> Iterator[Iterable[Pair]]:
        """Yield the keys and values in [low, high) at an lsn in groups, in ascending or descending order. The first rows come
        from windows (short_scan.py), the rest from batches."""
        runs, rows, given = self._runs(), FIRST_ROWS, 0
        while given < SHORT_ROWS:
            pairs, edge = short_window(runs, low, high, lsn, hidden, rows=rows, reverse=reverse)
            yield pairs
            if edge is None:
                return
            low, high = (low, edge) if reverse else (edge, high)
            rows, given = min(rows * 4, SHORT_ROWS), given + max(len(pairs), FIRST_ROWS)
        for batch in self.scan(low, high, lsn, hidden=hidden, reverse=reverse):
            yield zip(batch.column(0).to_pylist(), batch.column(1).to_pylist())

    def _runs(self) -> list[SortedRun]:
        """Return all memtables and tables as sorted runs."""
        return [self.memtable, *(frozen.memtable for frozen in self.frozen), *self.levels.runs]

    def scan(
        self, low: bytes, high: bytes | None, lsn: int, *, hidden: Hidden = frozenset(), reverse: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """Return the keys and values in [low, high) at an lsn as batches, in ascending or descending order."""
        from quire.lsm.merge import scan_parts  # loads Arrow, which gets and puts do not need

        sources: list[RowSource] = [self.memtable, *(frozen.memtable for frozen in self.frozen)]
        sources += self.levels.overlapping(low, high)
        return scan_parts(sources, low, high, lsn, hidden=hidden, reverse=reverse)
