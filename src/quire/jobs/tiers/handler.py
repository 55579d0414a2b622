"""The jobs that move an artifact's bytes: upload, evict, hydrate.

Rules
  1. A row never promises a copy that is not there: it says LOCAL_AND_REMOTE after the copy is complete and durable, and EVICTED
     before the file goes.
  2. A row tells of every copy that may be there: an object is announced (by the row's suffix) before its first byte is sent,
     and whoever deletes an artifact removes its file whatever the row says. So a job that is given up half-way leaks nothing.
  3. The job holds the artifact's `pending_upload`: nothing is deleted under it (M8).
  4. One move of an artifact at a time in this process, the last steps of a handler that has lost its job included: else it
     could remove the file that its successor has just fetched.

What is there after each durable step, and what a crash behind it leads to. Every job is run again from its start; steps that
were done are found done.

  upload   announce       row LOCAL with suffix; file                  sent again to the same name
           put            … and an object nobody is promised           found under its name: adopted, if it is ours (P11)
           complete       row LOCAL_AND_REMOTE; file, object           the job is done, in the same transaction
  evict    publish        row EVICTED; file, object                    a stray file: the repeat removes it
           remove, sync   row EVICTED; object                          the repeat finds nothing to remove
           complete       the same                                     the job is done
  hydrate  stage          row EVICTED; object, `<file>.tmp`            overwritten
           rename, sync   row EVICTED; object, a stray file            compared with the row: adopted
           complete       row LOCAL_AND_REMOTE; file, object           the job is done, in the same transaction

If the job is cancelled there instead, what is stray stays until the next move or the deletion of the artifact.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.core.ids import ArtifactKey
from quire.durable.failpoints import hit
from quire.jobs.context import JobContext
from quire.jobs.copies import Tick
from quire.jobs.handler import Done, Later, Outcome, Progress, artifact_of, options
from quire.jobs.locations import Place
from quire.jobs.steps import commit_step
from quire.jobs.tiers.plan import MovePlan, plan_eviction, plan_hydration, plan_upload
from quire.jobs.tiers.publish import announcement, evicted, hydrated, uploaded
from quire.jobs.tiers.run import check_before_eviction, hydrate, remove_local, upload
from quire.manifest.jobqueue import Job
from quire.manifest.reads import ReadTxn

WAIT_MS = 1_000
"""How long a move waits for another one of the same artifact before it looks again."""

_lock = threading.Lock()
_moving: set[tuple[str, ArtifactKey]] = set()
"""(store, artifact) that a thread of this process is moving; guarded by `_lock`."""

MakePlan = Callable[[JobContext, ReadTxn, ArtifactKey], MovePlan]
Work = Callable[[JobContext, Job, MovePlan, Tick], Done]


def upload_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Give an artifact an object. Its payload may tell a `bitmap_hash` to be recorded with it."""
    options(job, bitmap_hash=0)
    ctx.manifest.ensure_owner_epoch()
    return _move(ctx, job, progress, plan_upload, _upload)


def evict_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Take an artifact's file away; its object stays."""
    options(job)
    return _move(ctx, job, progress, plan_eviction, _evict)


def hydrate_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Give an artifact its file back."""
    options(job)
    return _move(ctx, job, progress, plan_hydration, _hydrate)


def _move(ctx: JobContext, job: Job, progress: Progress, make_plan: MakePlan, work: Work) -> Outcome:
    key = artifact_of(job)
    with _alone(ctx, key) as alone:
        if not alone:
            return Later(ctx.clock.now_ms() + WAIT_MS)
        with ctx.manifest.read() as txn:
            plan = make_plan(ctx, txn, key)
        if plan.must_wait:
            return Later(ctx.clock.now_ms() + WAIT_MS)
        size = plan.task.place.size_bytes
        progress(0, size)
        return work(ctx, job, plan, lambda done: progress(done, size))


@contextmanager
def _alone(ctx: JobContext, key: ArtifactKey) -> Iterator[bool]:
    """Whether nobody else in this process moves the artifact; if so, nobody will (rule 4)."""
    name = (ctx.root, key)
    with _lock:
        is_free = name not in _moving
        if is_free:
            _moving.add(name)
    try:
        yield is_free
    finally:
        if is_free:
            with _lock:
                _moving.discard(name)


def _upload(ctx: JobContext, job: Job, plan: MovePlan, tick: Tick) -> Done:
    task, place = plan.task, plan.task.place
    if plan.is_done:
        return Done({"moved_bytes": 0})
    if plan.announce is not None:
        commit_step(ctx, job, [announcement(plan)])
        hit("jobs.upload.announced")
    done = upload(task, disk=ctx.disk, open_store=ctx.open_store, tick=tick)
    if _is_gone(ctx, place):
        # Its row went while it was sent: nobody else would ever look for it.
        ctx.collector.delete(place.url, [place.object_key])
    op = uploaded(task, done, bitmap_hash=options(job, bitmap_hash=0)["bitmap_hash"], at_ms=ctx.clock.now_ms())
    return Done({"moved_bytes": 0 if done.was_there else done.size_bytes}, ops=(op,))


def _evict(ctx: JobContext, job: Job, plan: MovePlan, tick: Tick) -> Done:
    task, place = plan.task, plan.task.place
    if not plan.is_done:
        check_before_eviction(task, open_store=ctx.open_store, tick=tick)
        commit_step(ctx, job, [evicted(task)])
        hit("jobs.evict.published")
    remove_local(place, disk=ctx.disk)  # also if it is done: an earlier attempt may have ended before this
    return Done({"moved_bytes": 0 if plan.is_done else place.size_bytes})


def _hydrate(ctx: JobContext, _job: Job, plan: MovePlan, tick: Tick) -> Done:
    task, place = plan.task, plan.task.place
    if plan.is_done:
        return Done({"moved_bytes": 0})
    fetched = hydrate(task, disk=ctx.disk, open_store=ctx.open_store, tick=tick)
    if _is_gone(ctx, place):
        remove_local(place, disk=ctx.disk)
    return Done({"moved_bytes": place.size_bytes if fetched else 0}, ops=(hydrated(task, fetched=fetched),))


def _is_gone(ctx: JobContext, place: Place) -> bool:
    """Whether the artifact is deleted, or about to be: then this job was cancelled, and what it has just made is nobody's."""
    with ctx.manifest.read() as txn:
        counts = txn.refcount(place.key)
    return counts is None or not (counts.in_use or counts.pending_upload)
