"""The task that merges a range of keys on an executor that sees the store's directory; see `quire.lsm.remote_compaction`."""

from __future__ import annotations

from quire.jobs.runner import Tools
from quire.lsm.remote_compaction import MergeRange, run_task


def merge_range(task: MergeRange, tools: Tools) -> tuple[int, ...]:
    """Merge a range; return the ids of the tables that were written."""
    return tuple(run_task(task, tools.disk))
