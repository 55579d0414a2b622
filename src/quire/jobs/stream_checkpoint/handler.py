"""The checkpoint job of a stream: its sealed segments become chunks, being already in their final form (the catalog document).

What is there after a crash, step by step
  planned, seen            nothing; the next attempt plans anew
  generation reserved      a number that nothing has; the next attempt takes another
  published                rows and slots, in one transaction with the end of the job; the next job finds nothing to do

Rules
  1. No byte is read beyond a look that a copy is there, and none is written: threads do it, whatever the runner.
  2. A stream that retires segments of the plan meanwhile makes the attempt fail as a whole, and the next one plans on what
     is there by then.
  3. Who owns the bytes: docs/decisions/009-stream-chunks.md.
"""

from __future__ import annotations

from quire.core.events import emit
from quire.durable.failpoints import hit
from quire.jobs.checkpoint.handler import checkpoint_job
from quire.jobs.context import JobContext
from quire.jobs.handler import Done, Outcome, Progress, options
from quire.jobs.runner import Runners
from quire.jobs.stream_checkpoint.plan import plan_stream, to_see
from quire.jobs.stream_checkpoint.publish import publish_ops
from quire.jobs.stream_checkpoint.run import see
from quire.manifest.jobqueue import Job
from quire.manifest.ops.base import Counter, Op
from quire.manifest.ops.jobs import EnsureJob
from quire.manifest.records import DbKind, JobKind

THREADS = Runners()


def any_checkpoint_job(ctx: JobContext, job: Job, progress: Progress, *, runners: Runners = THREADS) -> Outcome:
    """The checkpoint of a database, whatever it is made of."""
    with ctx.manifest.read() as txn:
        record = txn.database(job.db_id)
    if record is not None and record.kind is DbKind.STREAM:
        return stream_checkpoint_job(ctx, job, progress)
    return checkpoint_job(ctx, job, progress, runners=runners)


def stream_checkpoint_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Publish the sealed segments of a stream that are no chunks yet."""
    options(job, runner="", sealed_only=False)
    manifest = ctx.manifest
    with manifest.read() as txn:
        plan = plan_stream(txn, job.db_id)
        wanted = to_see(ctx, txn, plan)
    progress(0, len(wanted))
    hit("jobs.stream_checkpoint.planned")
    if not wanted:
        return Done({"chunks": 0, "bytes": 0, "missing": 0})
    seen = see(wanted, disk=ctx.disk, open_store=ctx.open_store)
    progress(len(seen), len(wanted))
    generation = manifest.reserve_generation(job.db_id)
    hit("jobs.stream_checkpoint.reserved")
    with manifest.read() as txn:
        ops = publish_ops(txn, plan, seen, generation)
    missing = [each.segment_id for each in wanted if each.segment_id not in seen]
    for segment_id in missing:
        emit("error", "stream.checkpoint_copy_missing", stream=job.db_id, segment_id=segment_id)
    after: tuple[Op, ...] = ()
    if plan.more:
        record = manifest.jobs.record(JobKind.CHECKPOINT, job.db_id, None)
        after = (EnsureJob(manifest.allocate(Counter.JOB), record),)
    size = sum(row.used_bytes for segment_id, row in plan.segments if segment_id in seen)
    emit("info", "stream.checkpointed", stream=job.db_id, chunks=len(seen), bytes=size, generation=generation)
    return Done({"chunks": len(seen), "bytes": size, "missing": len(missing)}, ops=tuple(ops), after=after)
