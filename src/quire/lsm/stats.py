"""A key-value database in numbers.

Threads: any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from quire.lsm.kv import Kv


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """A database in numbers."""

    last_lsn: int
    rows: int
    """In tables: versions, tombstones included."""
    tombstones: int
    tables: int
    table_bytes: int
    levels: tuple[int, ...]
    """Tables in each, from level 0 on."""
    memtable_keys: int
    memtable_bytes: int
    frozen: int
    manifest_log_bytes: int
    manifest_version: int
    """Rises with every change of the manifest."""
    flushes: int
    """Since the database was opened."""
    compactions: int
    stalled_writers: int
    """Writers that wait for a flush or a compaction, now."""
    stalls: int
    stall_seconds: float


def stats_of(kv: Kv) -> Stats:
    """What a database consists of, now."""
    view = kv.view
    memtables = [view.memtable, *(each.memtable for each in view.frozen)]
    tables = list(view.levels)
    return Stats(
        last_lsn=kv.last_lsn,
        rows=sum(table.meta.rows for table in tables),
        tombstones=sum(table.meta.tombstones for table in tables),
        tables=len(tables),
        table_bytes=sum(table.size_bytes for table in tables),
        levels=(len(view.levels.level0), *map(len, view.levels.deeper)),
        memtable_keys=sum(len(each.entries) for each in memtables),
        memtable_bytes=sum(each.bytes for each in memtables),
        frozen=len(view.frozen),
        manifest_log_bytes=kv.manifest.log_bytes,
        manifest_version=kv.manifest.version,
        flushes=kv.upkeep.flushes,
        compactions=kv.upkeep.compactions,
        stalled_writers=kv.stalls.waiting,
        stalls=kv.stalls.count,
        stall_seconds=kv.stalls.seconds,
    )
