"""The checkpoint and merge jobs: plan, store the plan, run it, publish in the transaction that ends the job.

The state after a crash, step by step
  versions kept            an expiring snapshot of the old live set (`plan.py`); the next attempt finds it and makes no other
  before `BeginPlan`       nothing; the next attempt makes a new plan
  plan stored, running     some objects of the plan's generation; the next attempt builds the same plan from the same segments
                           and adopts them (P11), or abandons the plan and has them deleted (P10)
  published                everything, in one transaction with the end of the job

A stored plan is run again only if rebuilding it gives the same digest and names; otherwise it is abandoned. Another job's plan
is abandoned when that job has ended, and waited for until then. Every intermediate commit renews the job's lease
(`commit_step`), and publishing requires the current attempt: a worker that has lost its job stores, abandons and publishes
nothing. Absorbed rows are removed from the page index afterwards, by a truncate job: readers may still use them (P8).

For a runner that does not see the store's files, the segments are uploaded first and read as objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from quire.core.errors import IllegalTransition, StalePlan
from quire.core.events import emit
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.tracing import span
from quire.durable.failpoints import hit
from quire.jobs.checkpoint import plan as limits
from quire.jobs.checkpoint.plan import (
    MERGE_ALL,
    CheckpointPlan,
    engine_of,
    inputs_of,
    is_long,
    keep_versions,
    plan_checkpoint,
    plan_merge,
    select_segments,
    shape_of,
    waiting_for_readers,
)
from quire.jobs.checkpoint.run import (
    Dirty,
    SegmentInput,
    SlotResult,
    SlotTask,
    join_pages,
    join_slot,
    split_pages,
    split_rows,
)
from quire.jobs.context import JobContext
from quire.jobs.handler import Completed, Deferred, Outcome, Progress, commit_step, options
from quire.jobs.residency import upload_now
from quire.jobs.runner import Runner, results_of
from quire.jobs.stream_checkpoint.job import stream_checkpoint_job
from quire.jobs.tiers.job import upload_job
from quire.jobs.worker import Worker
from quire.manifest import tables as t
from quire.manifest.jobqueue import Job
from quire.manifest.ops.artifacts import PutChunk, PutDelta, RecordUploads
from quire.manifest.ops.base import Counter, Op
from quire.manifest.ops.jobs import EnsureJob
from quire.manifest.ops.plans import AbandonPlan, BeginPlan, FinishPlan
from quire.manifest.ops.slots import SetSlots
from quire.manifest.ops.wal import AdvanceCheckpoint
from quire.manifest.reads import ReadTxn
from quire.manifest.records import ChunkRecord, DbKind, DeltaRecord, JobKind, PlanRecord, Residency, WalRecord
from quire.manifest.slots import Chain, Leaf, Link, pack_leaf, place
from quire.pages.catalog import chunk_place, segment_place
from quire.pages.changes import history_after, rows_of

TAKEN_MS = 1_000
"""How long a job is deferred while another job's plan is running on its database."""


Choose = Callable[[int], Runner]
"""Returns the runner for this many bytes of work."""


def checkpoint_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Absorb sealed segments up to the floor into chunks; for a stream, publish its sealed segments as chunks."""
    given = options(job, sealed_only=False, runner="")
    with ctx.manifest.read() as txn:
        record = txn.database(job.db_id)
    if record is not None and record.kind is DbKind.STREAM:
        return stream_checkpoint_job(ctx, job, progress)
    if not given["sealed_only"]:
        engine_of(ctx).flush(job.db_id)
    return _run(ctx, job, progress, chooser(ctx, given["runner"]))


def merge_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Rewrite slots with long or heavy chains."""
    runner_name = options(job, chain_min=MERGE_ALL, ratio=0.0, runner="")["runner"]
    return _run(ctx, job, progress, chooser(ctx, runner_name))


def chooser(ctx: JobContext, runner_name: str) -> Choose:
    """Return a function that chooses the runner by name and size once, so that an attempt counts and writes with the same."""
    chosen: list[Runner] = []

    def runner_for(size_bytes: int) -> Runner:
        if not chosen:
            chosen.append(ctx.choose_runner(runner_name, size_bytes, label="quire-checkpoint"))
            if chosen[0].name == "threads":
                engine_of(ctx)
        return chosen[0]

    return runner_for


def _run(ctx: JobContext, job: Job, progress: Progress, runner_for: Choose) -> Outcome:
    with span("Checkpoint.plan", db_id=job.db_id):
        # A stored plan comes first: a database has at most one, and its objects may already exist.
        plan = _resume(ctx, job, runner_for)
        if plan is None:
            if _is_taken(ctx, job.db_id):
                return Deferred(ctx.clock.now_ms() + TAKEN_MS)
            try:
                plan = _begin(ctx, job, runner_for)
            except IllegalTransition:
                if not _is_taken(ctx, job.db_id):
                    raise
                return Deferred(ctx.clock.now_ms() + TAKEN_MS)  # another job stored its plan while this one was made
    if plan is None:
        return Completed({"slots": 0, **({} if is_merge(job) else waiting_for_readers(ctx, job.db_id))})
    hit("jobs.checkpoint.planned")
    runner = runner_for(plan.read_bytes)
    with span("Checkpoint.write", db_id=job.db_id, slots=len(plan.tasks), bytes=plan.read_bytes, runner=runner.name):
        ctx.before_put()  # tasks on executors cannot check for fencing themselves
        results = _write(plan, runner, progress)
    hit("jobs.checkpoint.written")
    with span("Checkpoint.publish", db_id=job.db_id, generation=plan.generation, covered_lsn=plan.covered_lsn):
        return publish(ctx, job, plan, results)


def is_merge(job: Job) -> bool:
    """Return whether a job is a merge, not a checkpoint."""
    return job.kind is JobKind.MERGE


def counter_for(ctx: JobContext, runner: Runner, segments: Iterable[tuple[int, WalRecord]]) -> Runner:
    """Return the runner that counts changed pages: this process, unless the WAL is too large for it (docs/decisions/010)."""
    frames = sum(row.last_lsn - row.first_lsn + 1 for _, row in segments)
    return ctx.thread_runner("quire-count") if frames <= limits.COUNT_HERE_FRAMES else runner


def count_dirty(runner: Runner, inputs: Sequence[SegmentInput]) -> dict[int, Dirty]:
    """Count the changes of each slot of one database."""
    answers = runner.regroup(split_pages, inputs, join_pages)
    return {answer.key[1]: answer.result() for answer in answers}


def reachable(ctx: JobContext, runner: Runner, inputs: Iterable[SegmentInput]) -> list[SegmentInput]:
    """Return the inputs at places that the runner can read: segments that are only files are uploaded first."""
    inputs = list(inputs)
    wanted = {
        (segment.place.origin_db_id, segment.place.segment_id) for segment in inputs if not segment.place.object_key
    }
    if runner.shares_disk or not wanted:
        return inputs
    keys = [ArtifactKey(origin, ArtifactKind.WAL, segment_id, 0) for origin, segment_id in sorted(wanted)]
    upload_now(ctx.manifest, Worker(ctx, {JobKind.UPLOAD: upload_job}), keys)
    with ctx.manifest.read() as txn:
        return [
            replace(
                segment,
                place=segment_place(txn, segment.place.origin_db_id, segment.place.segment_id, ctx.objects_url)
                or segment.place,
            )
            for segment in inputs
        ]


def _write(plan: CheckpointPlan, runner: Runner, progress: Progress) -> list[SlotResult]:
    """Write the plan's objects; return results in the order of its tasks. After a failure no further slot is started, and those
    in progress are waited for."""
    tasks = {(plan.db_id, task.key.id): task for task in plan.tasks}
    written = dict(results_of(runner.regroup(split_rows, plan.inputs, join_slot, tasks, tick=progress)))
    return [written[key] for key in tasks]


def publish(ctx: JobContext, job: Job, plan: CheckpointPlan, results: Sequence[SlotResult]) -> Outcome:
    """Return the outcome that ends the job and publishes its chunks."""
    ctx.before_put()  # writing may have taken long: a fenced owner must not publish
    manifest, db_id = ctx.manifest, plan.db_id
    with manifest.read() as txn:
        ops, origins = publish_ops(txn, plan, results, job.record.attempt, ctx.clock.now_ms())
        merge_is_due = not is_merge(job) and _has_long_chain(ctx, txn, plan, results)
    after: list[Op] = []
    if plan.segments:
        after.append(_ensure(ctx, JobKind.TRUNCATE, db_id))
    if merge_is_due:
        rule = {"chain_min": ctx.settings.merge_chain, "ratio": ctx.settings.merge_ratio}
        after.append(_ensure(ctx, JobKind.MERGE, db_id, rule))
    # In `after`: while this job holds its gate, `EnsureJob` would find it outstanding and enqueue nothing.
    if plan.more:
        after.append(_ensure(ctx, job.kind, db_id, _payload_after(job)))
    events = tuple(
        ("wal.checkpointed", {"db_id": db_id, "segment_id": segment_id, "generation": plan.generation})
        for segment_id in plan.segments
    )
    summary = {
        "slots": len(results),
        "cleared": len(plan.cleared),
        "segments": len(plan.segments),
        "bytes": sum(result.size_bytes for result in results),
        "pages": sum(result.page_count for result in results),
        "covered_lsn": plan.covered_lsn,
        "generation": plan.generation,
    }
    return Completed(summary, ops=(*ops, *manifest.jobs.deletions(origins)), after=tuple(after), events=events)


def _payload_after(job: Job) -> dict[str, Any]:
    """Return the payload of the job that continues where this one ends."""
    given: dict[str, Any] = job.payload or {}
    return given if is_merge(job) else {**given, "sealed_only": True}


def _has_long_chain(ctx: JobContext, txn: ReadTxn, plan: CheckpointPlan, results: Sequence[SlotResult]) -> bool:
    """Return whether the checkpoint leaves a chain that is due for a merge."""
    settings = ctx.settings
    for task, result in zip(plan.tasks, results, strict=True):
        before = txn.chain(plan.db_id, task.key.id)
        length = len(chain_after(task, before))
        if length > 1:
            base, *deltas = (
                chunk_place(txn, link.artifact(task.key.id), ctx.objects_url).size_bytes for link in before
            )
            heavy = sum(deltas) + result.size_bytes
            if is_long(length, base, heavy, chain_min=settings.merge_chain, ratio=settings.merge_ratio):
                return True
    return False


def _ensure(ctx: JobContext, kind: JobKind, db_id: int, payload: Any = None) -> Op:
    return EnsureJob(ctx.manifest.allocate(Counter.JOB), ctx.manifest.jobs.record(kind, db_id, payload))


def _begin(ctx: JobContext, job: Job, runner_for: Choose) -> CheckpointPlan | None:
    """Plan, and store the plan before anything is written under it (P10)."""
    db_id = job.db_id
    # Before the plan is made: the names of its objects begin with the prefix of the current owner epoch (A1).
    ctx.manifest.ensure_owner_epoch()
    if is_merge(job):
        with ctx.manifest.read() as txn:
            plan = plan_merge(txn, db_id, shape_of(txn, db_id, ctx.objects_url), **merge_rule(job))
    else:
        segments, more = select_segments(ctx, db_id, frames_max=partial(frames_max, runner_for))
        if not segments:
            return None
        plan = replace(_planned(ctx, db_id, segments, runner_for), more=more)
    if plan is None:
        return None
    # Before the first put: the row is the only record of the names that may exist from now on, and it uses up the
    # generation, so that no other plan gives these names to other bytes.
    commit_step(ctx, job, [begin_op(ctx, job, plan)])
    hit("jobs.checkpoint.begun")
    emit_begun(plan)
    return plan


def frames_max(runner_for: Choose, waiting_bytes: int) -> int:
    """Return how many frames one plan takes: more on Spark, where the rows are not sent to this process."""
    return limits.SPARK_FRAMES_MAX if runner_for(waiting_bytes).name == "spark" else limits.PLAN_FRAMES_MAX


def begin_op(ctx: JobContext, job: Job, plan: CheckpointPlan) -> Op:
    """Return the operation that stores a plan."""
    readers = engine_of(ctx).readers(plan.db_id) if plan.segments else []
    newest = max((lease.lsn for lease in readers), default=0)
    record = plan.record(job.job_id, job.record.attempt, ctx.clock.now_ms())
    return BeginPlan(plan.db_id, plan.generation, record, newest)


def emit_begun(plan: CheckpointPlan) -> None:
    """Emit an event for each segment of a plan."""
    for segment_id in plan.segments:
        emit("info", "wal.checkpoint_ready", db_id=plan.db_id, segment_id=segment_id, generation=plan.generation)


def _planned(
    ctx: JobContext,
    db_id: int,
    segments: Sequence[tuple[int, WalRecord]],
    runner_for: Choose,
    stored: tuple[int, PlanRecord] | None = None,
) -> CheckpointPlan:
    """Build the plan for these segments: a new one, or the one that is stored under this generation."""
    runner = runner_for(sum(row.used_bytes for _, row in segments))
    with ctx.manifest.read() as txn:
        shape = shape_of(txn, db_id, ctx.objects_url)
        inputs = inputs_of(txn, db_id, segments, shape)
    inputs = reachable(ctx, runner, inputs)
    dirty = count_dirty(counter_for(ctx, runner, segments), inputs)
    with ctx.manifest.read() as txn:
        shape = shape_of(txn, db_id, ctx.objects_url, stored)
        return replace(plan_checkpoint(txn, db_id, segments, shape, dirty), inputs=tuple(inputs))


def merge_rule(job: Job) -> dict[str, Any]:
    """Return which chains a merge rewrites: all of them, unless the payload limits it."""
    given = options(job, chain_min=MERGE_ALL, ratio=0.0, runner="")
    return {name: given[name] for name in ("chain_min", "ratio")}


def _resume(ctx: JobContext, job: Job, runner_for: Choose) -> CheckpointPlan | None:
    """Rebuild the plan that an earlier attempt has stored; abandon it and return `None` if it comes out differently."""
    db_id = job.db_id
    for generation, record in stored_plans(ctx, db_id):
        if record.job_id == job.job_id:
            if not is_merge(job):
                keep_versions(ctx, db_id)
            if (plan := _rebuild(ctx, job, generation, record, runner_for)) is not None:
                return plan
        elif not has_ended(ctx, record.job_id):
            # That job will run its plan again and adopt what it has written; abandoning the plan would have these
            # objects deleted.
            continue
        abandon(ctx, job, generation)
    return None


def stored_plans(ctx: JobContext, db_id: int) -> list[tuple[int, PlanRecord]]:
    """Return (generation, plan) of the plans that are stored for a database."""
    with ctx.manifest.read() as txn:
        return [(key[1], record) for key, record in txn.scan(t.CHECKPOINT_PLAN, db_id)]


def abandon(ctx: JobContext, job: Job, generation: int) -> None:
    """Abandon a plan, and enqueue the deletion of its objects."""
    commit_step(ctx, job, [AbandonPlan(job.db_id, generation), *ctx.manifest.jobs.deletions([job.db_id])])
    hit("jobs.checkpoint.abandoned")
    emit("info", "checkpoint.plan_abandoned", db_id=job.db_id, generation=generation)


def _is_taken(ctx: JobContext, db_id: int) -> bool:
    """Return whether another job's plan is running on the database. There is one at a time, and waiting is not a failure."""
    with ctx.manifest.read() as txn:
        return next(iter(txn.raw_scan(t.CHECKPOINT_PLAN, db_id)), None) is not None


def has_ended(ctx: JobContext, job_id: int) -> bool:
    """Return whether a job will never resume its plan. A job that waits for its next attempt will."""
    with ctx.manifest.read() as txn:
        owner = txn.job(job_id)
    return owner is None or owner.finished_at_ms > 0


def _rebuild(
    ctx: JobContext, job: Job, generation: int, record: PlanRecord, runner_for: Choose
) -> CheckpointPlan | None:
    """Rebuild a stored plan; `None` if its digest or names come out differently."""
    db_id = job.db_id
    with ctx.manifest.read() as txn:
        if is_merge(job):
            shape = shape_of(txn, db_id, ctx.objects_url, (generation, record))
            plan = plan_merge(txn, db_id, shape, **merge_rule(job))
        segments = segments_of(txn, db_id, record)
    if not is_merge(job):
        plan = _planned(ctx, db_id, segments, runner_for, (generation, record)) if segments else None
    return plan if plan is not None and is_same(plan, record) else None


def segments_of(txn: ReadTxn, db_id: int, record: PlanRecord) -> list[tuple[int, WalRecord]]:
    """Return the segments of a stored plan; an empty list if one of them is gone."""
    rows = [(segment_id, txn.get(t.WAL_CATALOG, db_id, segment_id)) for segment_id in record.segments]
    present = [(segment_id, row) for segment_id, row in rows if row is not None]
    return present if len(present) == len(rows) else []


def is_same(plan: CheckpointPlan, record: PlanRecord) -> bool:
    """Return whether a rebuilt plan is the one that was stored."""
    again = plan.record(record.job_id, record.attempt, record.created_at_ms)
    return plan.digest == record.digest and again.artifacts == record.artifacts


# ── publishing ────────────────────────────────────────────────────────────────────────────────────────────────────────
def publish_ops(
    txn: ReadTxn, plan: CheckpointPlan, results: Sequence[SlotResult], attempt: int, now_ms: int
) -> tuple[list[Op], set[int]]:
    """Return the batch, based on the state in `txn`, and the databases whose artifacts it releases.

    The batch fails as a whole (`StalePlan`) if the job's attempt is over, or a leaf is not the one in the plan.
    """
    ops: list[Op] = []
    leaves: dict[int, Leaf] = {}
    origins = {plan.db_id}
    for task, result in zip(plan.tasks, results, strict=True):
        leaf, offset = place(task.key.id)
        before = txn.chain(plan.db_id, task.key.id)
        origins.update(link.origin_db_id for link in before)
        ops.append(_row(txn, task, result, before, now_ms))
        leaves.setdefault(leaf, {})[offset] = chain_after(task, before)
    cleared: dict[int, bytearray] = {}
    for slot in plan.cleared:
        leaf, offset = place(slot)
        cleared.setdefault(leaf, bytearray()).append(offset)
        leaves.setdefault(leaf, {})
        origins.update(link.origin_db_id for link in txn.chain(plan.db_id, slot))
    for leaf, changes in sorted(leaves.items()):
        held = plan.leaves[leaf]
        origins.add(held.origin_db_id or plan.db_id)
        gone = bytes(cleared.get(leaf, b""))
        ops.append(
            SetSlots(plan.db_id, leaf, plan.generation, held.origin_db_id, held.generation, pack_leaf(changes), gone)
        )
    if plan.tasks:
        written = [(int(task.key.kind), task.key.id, task.key.generation, task.key.delta_id) for task in plan.tasks]
        ops.append(RecordUploads(plan.db_id, written))
    if plan.segments:
        ops.append(AdvanceCheckpoint(plan.db_id, plan.generation, plan.covered_lsn))
    ops.append(FinishPlan(plan.db_id, plan.generation, attempt))
    return ops, origins


def _row(txn: ReadTxn, task: SlotTask, result: SlotResult, before: Chain, now_ms: int) -> Op:
    key, remote, size = task.key, Residency.REMOTE_ARCHIVED, result.size_bytes
    common: dict[str, Any] = {
        "lsn_start": task.lsn_start,
        "lsn_end": task.covered_lsn,
        "page_count": result.page_count,
        "sha256": result.sha256,
        "bitmap_hash": result.bitmap_hash,
        "plan_digest": task.digest,
        "compression": task.compression,
        "uploaded_at_ms": now_ms,
        "namespace_id": task.namespace_id,
    }
    if key.kind is ArtifactKind.BASE:
        changes = history_after(rows_of(txn, key.id, before), task.covered_lsn, result.fresh, now_ms)
        record = ChunkRecord(remote, size, now_ms, changes=changes, **common)
        return PutChunk(key.origin_db_id, key.id, key.generation, record)
    # A delta has only changed pages. On any other base the remaining pages would be of a different version.
    if not before or before[0].generation != task.base_generation:
        raise StalePlan("the base of a delta no longer exists", hint="plan again", artifact=key)
    base = before[0]
    delta = DeltaRecord(base.generation, remote, size, now_ms, dirty_pages=result.bitmap, **common)
    return PutDelta(key.origin_db_id, key.id, key.generation, key.delta_id, base.origin_db_id, delta)


def chain_after(task: SlotTask, before: Chain) -> Chain:
    """Return the chain of a slot after its task is published."""
    key = task.key
    link = Link(key.kind, key.origin_db_id, key.generation, task.covered_lsn, key.delta_id)
    return (link,) if key.kind is ArtifactKind.BASE else (*before, link)
