"""The compaction job of a key-value database: merges everything into one level (`{"major": True}`), or the tables that are due.

A major compaction is cut into ranges of keys of about `TASK_BYTES`, run by threads or Spark (`runner`), and published with
one event of the database's manifest after all of its tasks. Writes, flushes and reads continue in the meantime; no other
compaction of the database begins. Ids for the new tables are reserved before the first task is sent
(`lsm/remote_compaction.py`). A crash before the event leaves files that nothing names; after it a repeated job finds nothing
to do.

Jobs that are not major belong to the background work of the engine (`lsm/projection.py`): a worker gets one only if the process
that ran it died or gave up. The worker then merges what is due by now, which may be nothing.

Raises what opening the database and reading and writing tables raise, `InvalidConfig` if executors do not see the store.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire.core.errors import InvalidConfig
from quire.core.limits import MIB
from quire.durable.failpoints import hit
from quire.jobs.compaction.run import merge_range
from quire.jobs.context import JobContext
from quire.jobs.handler import Completed, Outcome, Progress, options
from quire.jobs.runner import Runner, TaskResult, results_of
from quire.lsm.kv import Kv
from quire.lsm.remote_compaction import MajorCompaction, plan_major
from quire.manifest.jobqueue import Job

SPARK_WORKERS = 8
"""Executors that the planning of a compaction on Spark assumes; the actual number is up to Spark."""


def compaction_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Merge tables of a key-value database."""
    given = options(job, major=False, runner="", level=0, inputs=0, size_bytes=0)
    assert ctx.kv is not None, "a worker of a store has the key-value engine"
    kv = ctx.kv().open(job.db_id)
    if not given["major"]:
        return Completed(_merge_due(kv, progress))
    kv.flush()
    before = kv.stats()
    runner = ctx.choose_runner(given["runner"], before.table_bytes, label="quire-compact")
    _require_disk(runner)
    workers = ctx.settings.workers if runner.name == "threads" else SPARK_WORKERS
    with plan_major(kv, tasks=tasks_for(before.table_bytes, workers)) as plan:
        tasks = len(plan.tasks)
        tables = publish(plan, runner.map(merge_range, plan.tasks, tick=progress)) if tasks else before.tables
    after = kv.stats()
    return Completed(
        {
            "tasks": tasks,
            "tables": tables,
            "before_bytes": before.table_bytes,
            "after_bytes": after.table_bytes,
            "runner": runner.name,
        }
    )


def _merge_due(kv: Kv, progress: Progress) -> dict[str, Any]:
    """Do the compactions that a dead process left, if they are still due."""
    done = 0
    while kv.upkeep.compact_due(as_job=False):
        done += 1
        progress(done, 0)
    return {"compactions": done}


def _require_disk(runner: Runner) -> None:
    if not runner.shares_disk:
        raise InvalidConfig(
            "executors cannot access the store's directory, which a compaction reads and writes",
            hint="use `--runner threads`, or mount the directory on the executors and set maintenance.executors_see_store",
        )


# ── planning ──────────────────────────────────────────────────────────────────────────────────────────────────────────
TASK_BYTES = 128 * MIB
"""Bytes of tables for one task."""

TASK_BYTES_MIN = 4 * MIB
"""Bytes of tables below which another task is not worthwhile."""

TASKS_MAX = 1_024


def tasks_for(size_bytes: int, workers: int) -> int:
    """Return into how many ranges `size_bytes` of tables are cut.

    >>> tasks_for(1 << 30, 2), tasks_for(64 << 20, 2), tasks_for(1 << 20, 8), tasks_for(1 << 40, 8)
    (8, 2, 1, 1024)
    """
    wanted = max(-(-size_bytes // TASK_BYTES), min(workers, size_bytes // TASK_BYTES_MIN))
    return max(1, min(wanted, TASKS_MAX))


# ── publishing ────────────────────────────────────────────────────────────────────────────────────────────────────────
def publish(plan: MajorCompaction, answers: Iterator[TaskResult[int, tuple[int, ...]]]) -> int:
    """Wait for all results, then replace the old tables with the new ones; return the number of new tables.

    If a task failed, the first error is raised and nothing changes.
    """
    written = [sst_id for _, sst_ids in results_of(answers) for sst_id in sst_ids]
    hit("jobs.compaction.written")
    plan.publish(written)
    hit("jobs.compaction.published")
    return len(written)
