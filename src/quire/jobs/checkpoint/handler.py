"""The checkpoint and merge jobs: plan, store the plan, run it, publish in the transaction that ends the job.

What is there after a crash, step by step
  before `BeginPlan`       nothing; the next attempt plans anew
  plan stored, running     some objects of the burned generation; the next attempt builds the same plan from the same segments
                           and adopts them (P11), or abandons it and has them deleted (P10)
  published                everything, in one transaction with the end of the job

Rules
  1. A stored plan is run again only if building it again gives the same digest; otherwise it is abandoned.
  2. What a checkpoint absorbed leaves the page index afterwards, in a truncate job: readers may still be at it (P8).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from quire.core.errors import InternalError
from quire.core.events import emit
from quire.durable.failpoints import hit
from quire.jobs.checkpoint.plan import CheckpointPlan, Shape, candidates, plan_checkpoint, plan_merge, shape_of
from quire.jobs.checkpoint.publish import publish_ops
from quire.jobs.checkpoint.run import SlotResult, write_slot
from quire.jobs.context import JobContext, PagesOfStore
from quire.jobs.handler import Done, Later, Outcome, Progress
from quire.manifest import tables as t
from quire.manifest.jobqueue import Job
from quire.manifest.ops.base import Counter, Op
from quire.manifest.ops.jobs import EnsureJob
from quire.manifest.ops.plans import AbandonPlan, BeginPlan
from quire.manifest.reads import ReadTxn
from quire.manifest.records import JobKind, PlanRecord, WalRecord

MERGE_CHAIN = 6
"""A chain this long is merged by a job of its own, before it is so long that a checkpoint rewrites it."""

TAKEN_MS = 1_000
"""How long a job waits that finds another one's plan running on its database."""


def checkpoint_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Absorb what is sealed and below the floor into chunks."""
    pages = _pages(ctx)
    if not (job.payload or {}).get("sealed_only"):
        pages.flush(job.db_id)
    return _run(ctx, job, progress, merge=False)


def merge_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Rewrite slots whose chains have grown."""
    return _run(ctx, job, progress, merge=True)


def _pages(ctx: JobContext) -> PagesOfStore:
    if ctx.pages is None:
        raise InternalError("this worker has no page engine", hint="run the job in the owner's process")
    return ctx.pages


def _run(ctx: JobContext, job: Job, progress: Progress, *, merge: bool) -> Outcome:
    manifest, db_id, pages = ctx.manifest, job.db_id, _pages(ctx)
    plan = _resume(ctx, job, merge=merge)
    if plan is None and _is_taken(ctx, db_id):
        return Later(ctx.clock.now_ms() + TAKEN_MS)
    plan = plan or _begin(ctx, job, merge=merge)
    if plan is None:
        return Done({"slots": 0})
    hit("jobs.checkpoint.planned")
    results: list[SlotResult] = []
    with ThreadPoolExecutor(ctx.settings.workers or 1, thread_name_prefix="quire-checkpoint") as pool:
        written = pool.map(lambda task: write_slot(task, sources=pages.sources, open_store=ctx.open_store), plan.tasks)
        for result in written:
            results.append(result)
            progress(len(results), len(plan.tasks))
    hit("jobs.checkpoint.written")
    now_ms = ctx.clock.now_ms()
    with manifest.read() as txn:
        ops, origins = publish_ops(txn, plan, results, job.record.attempt, now_ms)
        long = any(len(txn.chain(db_id, task.key.id)) + 1 >= MERGE_CHAIN for task in plan.tasks)
    follow: list[Op] = []
    if plan.segments:
        follow.append(_ensure(ctx, JobKind.TRUNCATE, db_id))
    if long and not merge:
        follow.append(_ensure(ctx, JobKind.MERGE, db_id))
    summary = {
        "slots": len(results),
        "cleared": len(plan.cleared),
        "segments": len(plan.segments),
        "bytes": sum(result.size_bytes for result in results),
        "pages": sum(result.page_count for result in results),
        "covered_lsn": plan.covered_lsn,
        "generation": plan.generation,
    }
    return Done(summary, ops=(*ops, *manifest.jobs.deletions(origins)), after=tuple(follow))


def _ensure(ctx: JobContext, kind: JobKind, db_id: int) -> Op:
    return EnsureJob(ctx.manifest.allocate(Counter.JOB), ctx.manifest.jobs.record(kind, db_id))


def _begin(ctx: JobContext, job: Job, *, merge: bool) -> CheckpointPlan | None:
    """Plan, and store the plan before anything is written under it (P10)."""
    pages, db_id = _pages(ctx), job.db_id
    floor = pages.floor(db_id)
    with ctx.manifest.read() as txn:
        shape = shape_of(txn, db_id, ctx.objects_url)
        plan = (
            plan_merge(txn, db_id, shape) if merge else _plan(txn, pages, db_id, candidates(txn, db_id, floor), shape)
        )
    if plan is None:
        return None
    record = plan.record(job.job_id, job.record.attempt, ctx.clock.now_ms())
    ctx.manifest.submit([BeginPlan(db_id, plan.generation, record)]).result()
    hit("jobs.checkpoint.begun")
    return plan


def _plan(
    txn: ReadTxn, pages: PagesOfStore, db_id: int, segments: list[tuple[int, WalRecord]], shape: Shape
) -> CheckpointPlan | None:
    return plan_checkpoint(txn, pages.sources, db_id, segments, shape) if segments else None


def _resume(ctx: JobContext, job: Job, *, merge: bool) -> CheckpointPlan | None:
    """The plan an earlier attempt has stored, built again; abandoned if it comes out differently (rule 1)."""
    pages, db_id = _pages(ctx), job.db_id
    with ctx.manifest.read() as txn:
        stored = [(key[1], record) for key, record in txn.scan(t.CHECKPOINT_PLAN, db_id)]
    for generation, record in stored:
        if record.job_id == job.job_id and (plan := _rebuild(ctx, pages, db_id, generation, record, merge=merge)):
            return plan
        if _is_over(ctx, record):
            emit("info", "checkpoint.plan_abandoned", db_id=db_id, generation=generation)
            ops = [AbandonPlan(db_id, generation), *ctx.manifest.jobs.deletions([db_id])]
            ctx.manifest.submit(ops).result()
    return None


def _is_taken(ctx: JobContext, db_id: int) -> bool:
    """Whether another job's plan is running on the database: there is one at a time, and waiting for it is no failure."""
    with ctx.manifest.read() as txn:
        return next(iter(txn.raw_scan(t.CHECKPOINT_PLAN, db_id)), None) is not None


def _is_over(ctx: JobContext, record: PlanRecord) -> bool:
    """Whether nobody works on a plan: its job has ended, or it is this very job, which has come to another plan."""
    with ctx.manifest.read() as txn:
        owner = txn.job(record.job_id)
    return owner is None or owner.attempt != record.attempt or owner.finished_at_ms > 0


def _rebuild(
    ctx: JobContext, pages: PagesOfStore, db_id: int, generation: int, record: PlanRecord, *, merge: bool
) -> CheckpointPlan | None:
    with ctx.manifest.read() as txn:
        shape = replace(shape_of(txn, db_id, ctx.objects_url), generation=generation)
        if merge:
            plan = plan_merge(txn, db_id, shape)
        else:
            rows = [(each, txn.get(t.WAL_CATALOG, db_id, each)) for each in record.segments]
            present = [(each, row) for each, row in rows if row is not None]
            plan = _plan(txn, pages, db_id, present, shape) if len(present) == len(rows) else None
    return plan if plan is not None and plan.digest == record.digest else None
