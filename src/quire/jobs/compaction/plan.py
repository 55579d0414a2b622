"""What a compaction has to merge, and in how many pieces.

Rules
  1. A major compaction is cut into ranges of keys of about `TASK_BYTES`, but at least one for each worker as long as that
     is worth a task.
  2. Ids for what the tasks write are reserved before the first of them leaves (`quire.lsm.remote_compaction`).

Pure. Raises nothing.
"""

from __future__ import annotations

from quire.core.limits import MIB

TASK_BYTES = 128 * MIB
"""Of tables, for one task."""

TASK_BYTES_MIN = 4 * MIB
"""Less than this is not worth another task."""

TASKS_MAX = 1_024


def tasks_for(size_bytes: int, workers: int) -> int:
    """Into how many ranges so many bytes are cut (rule 1).

    >>> tasks_for(1 << 30, 2), tasks_for(64 << 20, 2), tasks_for(1 << 20, 8), tasks_for(1 << 40, 8)
    (8, 2, 1, 1024)
    """
    wanted = max(-(-size_bytes // TASK_BYTES), min(workers, size_bytes // TASK_BYTES_MIN))
    return max(1, min(wanted, TASKS_MAX))
