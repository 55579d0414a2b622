"""Merging a range of keys: what an executor does in a compaction.

Everything is in `quire.lsm.remote_compaction`: immutable tables are read, new ones written under ids that only this task
has, each named when it is whole. A task that is repeated, or run twice at a time, writes the same tables once more.

Safe to run on an executor that sees the store's directory. Raises what reading and writing tables raise.
"""

from __future__ import annotations

from quire.jobs.runner import Tools
from quire.lsm.remote_compaction import Task, run_task


def merge_range(task: Task, tools: Tools) -> tuple[int, ...]:
    """Merge a range; the ids of the tables that were written."""
    return tuple(run_task(task, tools.disk))
