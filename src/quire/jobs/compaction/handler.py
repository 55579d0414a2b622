"""The compaction job of a key-value database: everything into one level (`{"major": True}`), or what is due.

Rules
  1. A major compaction is planned here, run by threads or Spark (`runner`), and published here with one event of the database's
     manifest. Writes, flushes and reads go on meanwhile; no other compaction of the database begins.
  2. Jobs that are not major are those of the engine's background (`lsm/compaction_jobs.py`): the worker meets one only if
     its process died, or gave up. Then what is due by now is merged, which may be nothing.
  3. The database's manifest is the truth: a job that is repeated after its event was written finds nothing to do.

    before the event: files that nobody names · after it: the new tables are the database · the job's row follows

Raises what opening the database and reading and writing tables raise, `InvalidConfig` if executors do not see the store.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from quire.core.errors import InvalidConfig
from quire.jobs.compaction.plan import tasks_for
from quire.jobs.compaction.publish import publish
from quire.jobs.compaction.run import merge_range
from quire.jobs.context import JobContext
from quire.jobs.handler import Done, Outcome, Progress, options
from quire.jobs.runner import Runner, Runners
from quire.jobs.threads import thread_runner
from quire.lsm.kv import Kv
from quire.lsm.remote_compaction import plan_major
from quire.manifest.jobqueue import Job

SPARK_WORKERS = 8
"""Executors that a compaction on Spark counts with; how many there are is Spark's business."""


class KvOfStore(Protocol):
    """What jobs about key-value databases need of their engine."""

    def open(self, db: int | str, *, create: bool = False) -> Kv: ...


def compaction_job(
    ctx: JobContext, job: Job, progress: Progress, *, runners: Runners, kvs: Callable[[], KvOfStore]
) -> Outcome:
    """Merge tables of a database."""
    given = options(job, major=False, runner="", level=0, inputs=0, size_bytes=0)
    kv = kvs().open(job.db_id)
    if not given["major"]:
        return Done(_merge_due(kv, progress))
    kv.flush()
    before = kv.stats()
    runner = runners.choose(given["runner"], before.table_bytes, partial(thread_runner, ctx, label="quire-compact"))
    _require_disk(runner)
    workers = ctx.settings.workers if runner.name == "threads" else SPARK_WORKERS
    with plan_major(kv, tasks=tasks_for(before.table_bytes, workers)) as plan:
        tasks = len(plan.tasks)
        tables = publish(plan, runner.map(merge_range, plan.tasks, tick=progress)) if tasks else before.tables
    after = kv.stats()
    return Done(
        {
            "tasks": tasks,
            "tables": tables,
            "before_bytes": before.table_bytes,
            "after_bytes": after.table_bytes,
            "runner": runner.name,
        }
    )


def _merge_due(kv: Kv, progress: Progress) -> dict[str, Any]:
    """Do what the background of a dead process left; nothing, if nothing is due by now (rule 2)."""
    done = 0
    while kv.upkeep.compact_due(told=False):
        done += 1
        progress(done, 0)
    return {"compactions": done}


def _require_disk(runner: Runner) -> None:
    if not runner.shares_disk:
        raise InvalidConfig(
            "executors do not see the directory of the store, and a compaction reads and writes there",
            hint="`--runner threads`, or mount it there and set maintenance.executors_see_store",
        )
