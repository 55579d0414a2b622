"""The worker's leases: renewed while it works, and what happens when one is lost."""

from __future__ import annotations

from typing import Any

import pytest

from quire.jobs import handler
from quire.jobs import leases as leases_module
from quire.jobs.context import JobContext
from quire.jobs.handler import Completed, Outcome, Progress, commit_step
from quire.manifest import tables as t
from quire.manifest.jobqueue import BACKOFF_SECONDS, LEASE_SECONDS, Job
from quire.manifest.ops.jobs import RenewJobLease
from quire.manifest.ops.local import RecordMetric
from quire.manifest.records import JobState
from tests.jobs.handlers import Slow, enqueue, started, state, worker_with
from tests.jobs.world import World
from tests.manifest.helpers import eventually


def test_the_heart_renews_and_tells_progress(local: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "PROGRESS_SECONDS", 0.01)
    slow, job_id = Slow(), enqueue(local)
    with started(worker_with(local, slow)) as worker:
        assert slow.begun.wait(60)
        first = local.job(job_id).lease
        assert first is not None
        assert first.worker.startswith(worker.name)

        def renewed() -> bool:
            local.clock.advance(1)
            lease = local.job(job_id).lease
            return lease is not None and lease.done > 0 and lease.expires_at_ms > first.expires_at_ms + 5_000

        assert eventually(renewed)
        lease = local.job(job_id).lease
        assert lease is not None
        assert lease.total == 1_000
        slow.end.set()
        assert eventually(lambda: state(local, job_id) is JobState.SUCCEEDED)


def test_a_heartbeat_is_not_a_commit_each_time(local: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """M10: nothing has moved and the lease is young."""
    renewals = []
    monkeypatch.setattr(leases_module, "RenewJobLease", lambda *given: renewals.append(given))

    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        for _ in range(100):
            progress(1, 2)
            keeper.beat()
        return Completed()

    worker = worker_with(local, work)
    keeper = worker._new_keeper()
    enqueue(local)
    worker.drain()
    assert renewals == []


def test_during_a_drain_the_heart_beats_too(local: World) -> None:
    """A lease shorter than the work, by the clock of the machine and that of the store."""
    seen: list[bool] = []

    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        before = local.job(job.job_id).lease
        assert before is not None

        def renewed() -> bool:
            local.clock.advance(0.001)
            lease = local.job(job.job_id).lease
            return lease is not None and lease.heartbeat_at_ms > before.heartbeat_at_ms

        seen.append(eventually(renewed))
        return Completed()

    enqueue(local)
    worker_with(local, work, lease_seconds=0.3).drain()
    assert seen == [True]


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_a_lost_lease_interrupts_the_handler(local: World, how: str) -> None:
    slow, job_id = Slow(), enqueue(local)
    with started(worker_with(local, slow, lease_seconds=0.2)):
        assert slow.begun.wait(60)
        if how == "cancelled":
            local.manifest.jobs.cancel(job_id)
        else:
            while state(local, job_id) is JobState.IN_FLIGHT:  # the heart may renew in between
                local.clock.advance(LEASE_SECONDS)
                local.manifest.jobs.expire()
        assert slow.interrupted.wait(60)
    assert state(local, job_id) is (JobState.CANCELLED if how == "cancelled" else JobState.PENDING)


def test_another_slot_of_the_same_worker_is_somebody_else(local: World) -> None:
    """A slot whose job was given to its neighbour must not renew the neighbour's lease, nor commit steps in its place."""
    first, second = Slow(), Slow()
    turns = iter([first, second])
    committed: dict[Slow, BaseException | None] = {}

    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        mine = next(turns)
        try:
            return mine(ctx, job, progress)
        finally:
            try:
                commit_step(ctx, job, [RecordMetric(1, 1, [1.0])])
                committed[mine] = None
            except Exception as error:
                committed[mine] = error

    job_id = enqueue(local)
    with started(worker_with(local, work, threads=2, lease_seconds=0.2)):
        assert first.begun.wait(60)
        while state(local, job_id) is JobState.IN_FLIGHT:  # the heart may renew in between
            local.clock.advance(LEASE_SECONDS)
            local.manifest.jobs.expire()
        # From here the clock stands still, or the neighbour would lose its lease too: its thread may wait for its turn.
        local.clock.advance(BACKOFF_SECONDS)
        local.manifest.jobs.work_available.set()
        assert second.begun.wait(60)
        assert first.interrupted.wait(60)
        assert not second.interrupted.is_set()
        second.end.set()
        assert eventually(lambda: state(local, job_id) is JobState.SUCCEEDED)
    assert [type(committed[slow]).__name__ for slow in (first, second)] == ["IllegalTransition", "NoneType"]


def test_a_step_and_its_right_to_be_taken_are_one_transaction(local: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is cancelled after the step has looked and before it commits."""

    def cancelled_meanwhile(job_id: int, *rest: Any) -> RenewJobLease:
        local.manifest.jobs.cancel(job_id)
        return RenewJobLease(job_id, *rest)

    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        commit_step(ctx, job, [RecordMetric(1, 1, [1.0])])
        return Completed()

    monkeypatch.setattr(handler, "RenewJobLease", cancelled_meanwhile)
    job_id = enqueue(local)
    worker_with(local, work).drain()
    assert state(local, job_id) is JobState.CANCELLED
    with local.manifest.read() as txn:
        assert txn.count(t.METRICS) == 0


def test_a_step_keeps_lease_and_progress_as_they_are(local: World) -> None:
    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        assert job.lease is not None
        ctx.manifest.jobs.renew(job, job.lease.worker, done=7, total=8)
        before = ctx.manifest.jobs.get(job.job_id).lease
        commit_step(ctx, job, [RecordMetric(1, 1, [1.0])])
        assert ctx.manifest.jobs.get(job.job_id).lease == before
        return Completed()

    job_id = enqueue(local)
    worker_with(local, work).drain()
    assert state(local, job_id) is JobState.SUCCEEDED, local.job(job_id).record.error
