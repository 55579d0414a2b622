"""The delete job: plan → run → publish, step by step, until nothing of its database is at zero (M8).

Rules
  1. Bytes go before their row: as long as the row is there, and at zero, somebody will look for them again.
  2. What cannot be deleted now keeps nothing else from being deleted; the attempt fails at its end, and the job, which is never
     given up, waits and tries again.

What is there after each durable step, and what a crash behind it leads to:
  remove files, sync    rows at zero; objects                  planned again; files that are gone are a success
  delete objects        rows at zero                           the same
  publish               no rows                                the next step, or the next attempt, finds others
  complete              no row at zero, the gate is open       for a dropped database its tombstone goes in the same transaction

A dropped database's directories go before its tombstone, with files of ours that no row names (`jobs/leftovers.py`); what a
person has put there stays.
"""

from __future__ import annotations

import os

from quire.durable import names
from quire.durable.failpoints import hit
from quire.jobs.context import JobContext
from quire.jobs.delete.plan import has_other_jobs, is_bare, plan_deletion
from quire.jobs.delete.publish import deletion_ops, next_origins
from quire.jobs.delete.run import delete
from quire.jobs.handler import Done, Later, Outcome, Progress
from quire.jobs.leftovers import remove_empty, remove_home
from quire.jobs.partial_failure import Trouble
from quire.jobs.steps import commit_step
from quire.manifest.jobqueue import Job
from quire.manifest.namespaces import NAMESPACES
from quire.manifest.ops.databases import RemoveDb

OTHER_JOBS_MS = 60_000
"""How long the tombstone of a dropped database waits before it looks again whether its last jobs have ended."""


def delete_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Delete what is at zero, and the tombstone of a dropped database when nothing is left of it."""
    manifest, db_id = ctx.manifest, job.db_id
    artifacts = freed = 0
    trouble = Trouble()
    while True:
        progress(artifacts, 0)
        with manifest.read() as txn:
            plan = plan_deletion(ctx, txn, db_id, trouble)
            origins = next_origins(txn, plan, db_id)
            bare, busy = is_bare(txn, db_id), has_other_jobs(txn, db_id)
        if plan.empty:
            trouble.settle()
            if plan.due_at_ms:
                return Later(plan.due_at_ms)
            if bare and busy:
                return Later(ctx.clock.now_ms() + OTHER_JOBS_MS)
            result = {"artifacts": artifacts, "freed_bytes": freed}
            return _end_of(ctx, db_id, result) if bare else Done(result)
        hit("jobs.delete.planned")
        done = delete(plan.task, disk=ctx.disk, collector=ctx.collector)
        for place, error in done.failed:
            trouble.add(place, error)
        if ops := deletion_ops(plan, done.gone, db_id):
            commit_step(ctx, job, [*ops, *manifest.jobs.deletions(origins - {db_id})])
            hit("jobs.delete.published")
        artifacts += len(done.gone)
        freed += done.freed_bytes


def _end_of(ctx: JobContext, db_id: int, result: dict[str, int]) -> Done:
    """Nothing is left of a dropped database: its directories go, then its tombstone, which may have held a namespace."""
    remove_home(ctx.disk, ctx.root, db_id)
    for part in (names.stream_dir(db_id, "hot"), names.lsm_dir(db_id, "wal")):
        remove_empty(os.path.join(ctx.root, os.path.dirname(part)), ctx.disk)
    hit("jobs.delete.emptied")
    return Done(result, after=(RemoveDb(db_id), *ctx.manifest.jobs.deletions({NAMESPACES})))
