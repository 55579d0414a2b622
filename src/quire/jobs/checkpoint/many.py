"""Checkpoints or merges of many databases in one run: each has its own job, the work of all is two calls of one runner (K1).

Every step is done for all databases at once: draft, count, store the plans, write, publish. Index rows are counted in one call
of the runner, slots are written in another; commits are pipelined. For each database the steps are the same as when its job
runs alone (`job.py`); a job that is requeued continues from its stored plan, in whichever run takes it next.

Threads: one caller; leases and drafts have their own threads. Raises what the runner raises, and what interrupts the caller.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import msgspec

from quire.core.errors import QuireError
from quire.durable.failpoints import hit
from quire.jobs.batches import BatchRun
from quire.jobs.checkpoint import job as one
from quire.jobs.checkpoint import plan as limits
from quire.jobs.checkpoint.plan import (
    CheckpointPlan,
    engine_of,
    inputs_of,
    keep_versions,
    plan_checkpoint,
    plan_merge,
    select_segments,
    shape_of,
    waiting_for_readers,
)
from quire.jobs.checkpoint.run import Dirty, SegmentInput, SlotResult, join_pages, join_slot, split_pages, split_rows
from quire.jobs.context import JobContext
from quire.jobs.enqueue import prepare_checkpoint
from quire.jobs.handler import Completed, Progress, options
from quire.jobs.leases import LeasedJob
from quire.jobs.runner import AUTO_BYTES, Runner, no_tick
from quire.manifest.jobqueue import LEASE_SECONDS, Job
from quire.manifest.ops.base import Op
from quire.manifest.ops.jobs import CompleteJob
from quire.manifest.records import JobKind, JobState, PlanRecord, WalRecord

DRAFTS = 16
"""Databases that are drafted concurrently: each may commit a floor and wait for it."""


@dataclass(slots=True, eq=False)
class Held(LeasedJob):
    """A job of the run."""

    segments: list[tuple[int, WalRecord]] = field(default_factory=list)
    inputs: list[SegmentInput] = field(default_factory=list)
    more: bool = False
    stored: tuple[int, PlanRecord] | None = None
    """(generation, plan) of an earlier attempt."""
    plan: CheckpointPlan | None = None
    dirty: dict[int, Dirty] = field(default_factory=dict)
    results: dict[int, SlotResult] = field(default_factory=dict)
    outcome: Completed | None = None
    """The outcome that its publication commits, and whose events are logged afterwards."""


def run_many(
    ctx: JobContext,
    kind: JobKind,
    db_ids: Iterable[int],
    *,
    runner_name: str = "",
    progress: Progress = no_tick,
) -> list[Job]:
    """Checkpoint or merge these databases now; return the jobs as they ended, except those that another worker holds."""
    run = _CheckpointRun(ctx, kind, runner_name)
    with run.alive():
        job_ids = run.claim(run.enqueue(db_ids))
        run.draft()
        run.count(progress)
        run.store_plans()
        run.write(progress)
        run.publish()
    return [ctx.manifest.jobs.get(job_id) for job_id in job_ids]


class _CheckpointRun(BatchRun[Held]):
    """One run over the checkpoint or merge jobs of many databases. Drafting uses `DRAFTS` threads."""

    def __init__(self, ctx: JobContext, kind: JobKind, runner_name: str) -> None:
        super().__init__(ctx.manifest, kind, Held, lease_seconds=LEASE_SECONDS)
        self._ctx = ctx
        self._runner_name = runner_name or ctx.runners.usual
        self._runner_for = one.chooser(ctx, self._runner_name)

    # ── the steps ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def draft(self) -> None:
        """Find the work of each database, several concurrently, so that their commits share groups."""
        self._ctx.manifest.ensure_owner_epoch()
        with ThreadPoolExecutor(DRAFTS, thread_name_prefix="quire-draft") as pool:
            for _ in pool.map(self._draft_alone, list(self.held.values())):
                pass

    def _draft_alone(self, held: Held) -> None:
        with self.confine_errors(held):
            self._draft(held)

    def _draft(self, held: Held) -> None:
        ctx, db_id = self._ctx, held.db_id
        if not one.is_merge(held.job):
            # Here, not before the jobs exist: a database that cannot be opened fails alone, and its job reports it.
            prepare_checkpoint(ctx, db_id, leave_open=False)
            if not options(held.job, sealed_only=False, runner="")["sealed_only"]:
                engine_of(ctx).flush(db_id)
        for generation, record in one.stored_plans(ctx, db_id):
            if record.job_id == held.job.job_id:
                held.stored = (generation, record)
            elif one.has_ended(ctx, record.job_id):
                one.abandon(ctx, held.job, generation)
            else:
                self._put_off(held, one.TAKEN_MS)
                return
        if one.is_merge(held.job):
            self._plan_merge(held)
            return
        if held.stored is not None:
            keep_versions(ctx, db_id)
            with ctx.manifest.read() as txn:
                held.segments = one.segments_of(txn, db_id, held.stored[1])
            if not held.segments:
                self._start_over(held)
                return
        else:
            held.segments, held.more = select_segments(ctx, db_id, frames_max=self._frames_max)
        if not held.segments:
            self._end(held, Completed({"slots": 0, **waiting_for_readers(ctx, db_id)}))
            return
        with ctx.manifest.read() as txn:
            held.inputs = inputs_of(txn, db_id, held.segments, shape_of(txn, db_id, ctx.objects_url))

    def _frames_max(self, waiting_bytes: int) -> int:
        """Return how many frames one database's plan takes. The runner is chosen later, for the work of all databases, so a
        large plan assumes Spark."""
        is_large = self._runner_name == "spark" or (self._runner_name == "auto" and waiting_bytes >= AUTO_BYTES)
        return limits.SPARK_FRAMES_MAX if is_large else limits.PLAN_FRAMES_MAX

    def count(self, progress: Progress) -> None:
        """Count the changed pages of all databases in one call of the runner, and make the plans."""
        waiting = [held for held in self.held.values() if held.segments]
        if not waiting:
            return
        runner = self._runner_for(sum(row.used_bytes for held in waiting for _, row in held.segments))
        inputs = one.reachable(self._ctx, runner, [segment for held in waiting for segment in held.inputs])
        for held in waiting:
            held.inputs = []
        for segment in inputs:
            self.held[segment.db_id].inputs.append(segment)
        counter = one.counter_for(self._ctx, runner, (segment for held in waiting for segment in held.segments))
        answers = counter.regroup(split_pages, inputs, join_pages, tick=lambda *_: progress(0, 0))
        for answer in answers:
            held_or_none = self.held.get(answer.key[0])
            if held_or_none is None:
                continue
            if answer.error is not None:
                self.fail(held_or_none, answer.error)
            else:
                held_or_none.dirty[answer.key[1]] = answer.result()
        for held in [job for job in waiting if job.db_id in self.held]:
            with self.confine_errors(held):
                self._plan_checkpoint(held)

    def _plan_checkpoint(self, held: Held) -> None:
        with self._ctx.manifest.read() as txn:
            shape = shape_of(txn, held.db_id, self._ctx.objects_url, held.stored)
            plan = plan_checkpoint(txn, held.db_id, held.segments, shape, held.dirty)
        self._settle(held, replace(plan, inputs=tuple(held.inputs), more=held.more))

    def _plan_merge(self, held: Held) -> None:
        with self._ctx.manifest.read() as txn:
            shape = shape_of(txn, held.db_id, self._ctx.objects_url, held.stored)
            plan = plan_merge(txn, held.db_id, shape, **one.merge_rule(held.job))
        if plan is None and held.stored is None:
            self._end(held, Completed({"slots": 0}))
        else:
            self._settle(held, plan)

    def _settle(self, held: Held, plan: CheckpointPlan | None) -> None:
        if held.stored is not None and (plan is None or not one.is_same(plan, held.stored[1])):
            self._start_over(held)
        else:
            held.plan = plan

    def store_plans(self) -> None:
        """Store every new plan in the manifest before anything is written under it (P10)."""
        ctx, new = self._ctx, [held for held in self.held.values() if held.plan is not None and held.stored is None]

        def batch(held: Held) -> list[Op]:
            assert held.plan is not None
            # The renewal is what `commit_step` does for a single job: it fails the batch if the job was taken away.
            return [self.leases.renewal(held), one.begin_op(ctx, held.job, held.plan)]

        for held, error in self.commit((held, batch(held)) for held in new):
            if error is not None:
                self.fail(held, error)
            elif held.plan is not None:
                one.emit_begun(held.plan)
        hit("jobs.checkpoint.planned")

    def write(self, progress: Progress) -> None:
        """Write the objects of all plans in one call of the runner."""
        plans = [held.plan for held in self.held.values() if held.plan is not None]
        tasks = {(plan.db_id, task.key.id): task for plan in plans for task in plan.tasks}
        if not tasks:
            return
        runner: Runner = self._runner_for(sum(plan.read_bytes for plan in plans))
        inputs = [segment for plan in plans for segment in plan.inputs]
        self._ctx.before_put()  # tasks on executors cannot check for fencing themselves
        for answer in runner.regroup(split_rows, inputs, join_slot, tasks, tick=progress):
            held = self.held.get(answer.key[0])
            if held is None:
                continue
            if answer.error is not None:
                self.fail(held, answer.error)
            else:
                held.results[answer.key[1]] = answer.result()
        hit("jobs.checkpoint.written")

    def publish(self) -> None:
        """Commit one batch for each database, together with the end of its job."""
        finished = self.commit(
            (held, batch) for held in list(self.held.values()) if (batch := self._publication(held)) is not None
        )
        for held, error in finished:
            if error is not None:
                self.fail(held, error)
            else:
                self.held.pop(held.db_id, None)
                if held.outcome is not None:
                    held.outcome.log()
        hit("jobs.checkpoint.published")

    def _publication(self, held: Held) -> list[Op] | None:
        assert held.plan is not None, "what has no plan was let go"
        try:
            results = [held.results[task.key.id] for task in held.plan.tasks]
            done = one.publish(self._ctx, held.job, held.plan, results)
            assert isinstance(done, Completed)
        except QuireError as error:
            self.fail(held, error)
            return None
        held.outcome = done
        packed = msgspec.msgpack.encode(done.result)
        end = CompleteJob(held.job.job_id, JobState.SUCCEEDED, held.job.record.attempt, result=packed)
        return [*done.ops, end, *done.after]

    # ── releasing jobs ────────────────────────────────────────────────────────────────────────────────────────────────
    def _put_off(self, held: Held, wait_ms: int) -> None:
        until = self._ctx.clock.now_ms() + wait_ms
        self.release_job(held, lambda job: self._ctx.manifest.jobs.defer(job, until))

    def _start_over(self, held: Held) -> None:
        """Abandon a stored plan that comes out differently, and requeue its job for the next run."""
        assert held.stored is not None
        one.abandon(self._ctx, held.job, held.stored[0])
        self._put_off(held, 0)

    def _end(self, held: Held, done: Completed) -> None:
        self.release_job(held, lambda job: self._ctx.manifest.jobs.complete(job, done.result))
