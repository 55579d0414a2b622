"""What a database is at one moment: the memtable, the frozen memtables and the tables by level; and reading it at an lsn.

Views and levels never change (a view's memtable grows, which reads at an lsn do not see): a flush or a compaction makes new
ones. Whoever holds a view holds its tables, and with them their files. Which version of a key is newest is decided by lsn
alone, never by level: tables that are loaded in bulk have the lsn of the beginning of the load.

Threads: any."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from quire.durable.files import Disk
from quire.durable.log_reader import LogEnd
from quire.lsm.bloom import hash_key
from quire.lsm.memtable import Memtable

if TYPE_CHECKING:
    import pyarrow as pa

    from quire.lsm.merge import Hidden, RowSource
    from quire.lsm.sst_reader import BlockCache, SSTable, VersionedValue


def open_table(disk: Disk, path: str, sst_id: int, cache: BlockCache | None) -> SSTable:
    """`SSTable.open`, for modules that must not load Arrow: a database without tables does without it."""
    from quire.lsm.sst_reader import SSTable

    return SSTable.open(disk, path, sst_id, cache)


class Levels:
    """The tables by level. Key ranges may overlap in level 0; deeper levels have disjoint ranges, sorted by key."""

    __slots__ = ("_starts", "deeper", "level0", "lsn_max")

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
        self._starts = tuple([table.meta.key_min for table in level] for level in self.deeper)
        self.lsn_max = max((table.meta.lsn_max for table in self), default=0)

    def __iter__(self) -> Iterator[SSTable]:
        yield from self.level0
        for level in self.deeper:
            yield from level

    def __len__(self) -> int:
        return len(self.level0) + sum(map(len, self.deeper))

    def get(self, key: bytes, key_hash: int, lsn: int, best: VersionedValue | None) -> VersionedValue | None:
        """The newest version of a key at or below an lsn, `best` being what was found elsewhere."""
        for table in self.level0:
            if best is not None and best[0] >= table.meta.lsn_max:
                break  # the others are older still
            value = table.get(key, key_hash, lsn)
            if value is not None and (best is None or value[0] > best[0]):
                best = value
        for starts, level in zip(self._starts, self.deeper):
            at = bisect_right(starts, key) - 1
            if at < 0 or (best is not None and best[0] >= level[at].meta.lsn_max):
                continue
            value = level[at].get(key, key_hash, lsn)
            if value is not None and (best is None or value[0] > best[0]):
                best = value
        return best

    def overlapping(self, low: bytes, high: bytes | None) -> list[SSTable]:
        """The tables that may have keys in [low, high)."""
        return [table for table in self if table.meta.key_max >= low and (high is None or table.meta.key_min < high)]

    def level(self, number: int) -> tuple[SSTable, ...]:
        """The tables of a level."""
        if number == 0:
            return self.level0
        return self.deeper[number - 1] if number <= len(self.deeper) else ()

    def changed(self, added: Iterable[SSTable], removed: Iterable[SSTable]) -> Levels:
        """The levels with some tables more and some less."""
        gone = {id(table) for table in removed}
        return Levels([*(table for table in self if id(table) not in gone), *added])


LSN_MAX = (1 << 64) - 1


class Frozen(msgspec.Struct, frozen=True):
    """A memtable that waits for its flush, and the WAL that it came from."""

    memtable: Memtable
    wal: int
    end: LogEnd
    """Of that WAL, which takes no more."""


class KvView(msgspec.Struct, frozen=True):
    """A database at one moment."""

    memtable: Memtable
    frozen: tuple[Frozen, ...]
    """The newest first."""
    levels: Levels

    def get(self, key: bytes, lsn: int, hidden: Hidden = frozenset()) -> bytes | None:
        """The value of a key at an lsn."""
        if hidden:
            batches = list(self.scan(key, key + b"\0", lsn, hidden=hidden))
            value: bytes | None = batches[0].column(1)[0].as_py() if batches else None
            return value
        best: VersionedValue | None = self.memtable.get(key, lsn)
        if best is None:
            for frozen in self.frozen:
                best = frozen.memtable.get(key, lsn)
                if best is not None:
                    break
        levels = self.levels
        if best is None or best[0] < levels.lsn_max:
            best = levels.get(key, hash_key(key), lsn, best)
        return best[1] if best is not None else None

    def scan(
        self, low: bytes, high: bytes | None, lsn: int, *, hidden: Hidden = frozenset(), reverse: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """The keys and values in [low, high) at an lsn, as batches in order, or in the opposite one."""
        from quire.lsm.merge import scan_parts  # Arrow: gets and puts do without

        sources: list[RowSource] = [self.memtable, *(frozen.memtable for frozen in self.frozen)]
        sources += self.levels.overlapping(low, high)
        return scan_parts(sources, low, high, lsn, hidden=hidden, reverse=reverse)


def prefix_end(prefix: bytes) -> bytes | None:
    """The smallest key above all that begin with a prefix; `None` if there is none.

    >>> prefix_end(b"ab"), prefix_end(b"a\\xff"), prefix_end(b"\\xff"), prefix_end(b"")
    (b'ac', b'b', None, None)
    """
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else None
