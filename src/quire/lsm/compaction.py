"""Chooses which tables are merged; `merge.py` merges them.

When level 0 has `level0_tables` tables, all of them are merged with the overlapping tables of level 1. When a deeper level is
too large, one of its tables is merged with the overlapping tables of the next level. The lsn decides which version of a key is
newest, not the level. This module does not import Arrow. Threads: any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from quire.core.settings import LsmSettings

if TYPE_CHECKING:
    from quire.lsm.sst_reader import SSTable
    from quire.lsm.view import Levels


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRetention:
    """What a compaction must keep. Small and picklable."""

    snapshots: tuple[int, ...] = ()
    """Lsns of open snapshots, ascending."""
    drop_tombstones_below: int = 0
    """Tombstones with smaller lsns may be dropped: no older version of their keys exists outside the merged tables."""


GROWTH = 10
"""Ratio of the sizes of two adjacent levels."""

LEVELS_MAX = 7
"""The deepest level that a load may create: a read has to check every level."""


class MergeJob(msgspec.Struct, frozen=True):
    """Tables to merge, and the level of the outputs."""

    inputs: tuple[SSTable, ...]
    level: int
    drop_below: int
    """Tombstones below this lsn may be dropped; 0: none."""


def pick(levels: Levels, settings: LsmSettings, turn: int) -> MergeJob | None:
    """Return the compaction that is due, or `None`. `turn` rotates through the tables of a level."""
    if len(levels.level0) >= settings.level0_tables:
        return job(levels, levels.level0, 1)
    limit = settings.level_bytes
    for number, level in enumerate(levels.deeper, 1):
        if sum(table.size_bytes for table in level) > limit:
            return job(levels, (level[turn % len(level)],), number + 1)
        limit *= GROWTH
    return None


def pick_all(levels: Levels) -> MergeJob | None:
    """Return the merge of all tables into one level, or `None` if they are in one level and have nothing to drop.

    Tables with older versions of keys are merged again: the snapshots that needed those versions may be closed by now.
    """
    tables = tuple(levels)
    deepest = max(1, len(levels.deeper))
    if all(t.meta.level == deepest and not t.meta.tombstones and t.meta.keys == t.meta.rows for t in tables):
        return None
    return MergeJob(tables, deepest, max(table.meta.lsn_max for table in tables) + 1)


def level_for(levels: Levels, tables: Sequence[SSTable], settings: LsmSettings) -> int:
    """Return the first level below 0 where loaded tables fit without overlap; otherwise 0, where ranges may overlap."""
    if clusters(tables):
        return 0
    size, limit = sum(table.size_bytes for table in tables), settings.level_bytes
    for level in range(1, LEVELS_MAX + 1):
        there = levels.level(level)
        if size + sum(table.size_bytes for table in there) <= limit and not clusters([*there, *tables]):
            return level
        limit *= GROWTH
    return 0


def clusters(tables: Sequence[SSTable]) -> list[list[SSTable]]:
    """Return the groups of tables whose key ranges overlap, directly or transitively; none if all ranges are disjoint."""
    groups: list[list[SSTable]] = []
    reach = b""
    for table in sorted(tables, key=lambda table: table.meta.key_min):
        # `<=`: ranges include both ends, and two tables with one common key overlap.
        if groups and table.meta.key_min <= reach:
            groups[-1].append(table)
            reach = max(reach, table.meta.key_max)
        else:
            groups.append([table])
            reach = table.meta.key_max
    return [group for group in groups if len(group) > 1]


def job(levels: Levels, chosen: Sequence[SSTable], level: int) -> MergeJob:
    """Return the merge of `chosen` with the tables of `level` that they overlap, into that level."""
    low, high = min(t.meta.key_min for t in chosen), max(t.meta.key_max for t in chosen)
    below = [t for t in levels.level(level) if t.meta.key_max >= low and t.meta.key_min <= high]
    inputs = (*chosen, *below)
    # Again, over all inputs: the tables below may reach beyond the chosen ones, and have tombstones there too.
    low, high = min(t.meta.key_min for t in inputs), max(t.meta.key_max for t in inputs)
    taken = {id(table) for table in inputs}
    others = [t for t in levels if id(t) not in taken and t.meta.key_max >= low and t.meta.key_min <= high]
    # A tombstone may be dropped if every older version that it could hide is among the inputs.
    newest = max(table.meta.lsn_max for table in inputs) + 1
    return MergeJob(inputs, level, min((table.meta.lsn_min for table in others), default=newest))
