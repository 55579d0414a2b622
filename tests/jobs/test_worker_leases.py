"""The worker's leases: renewed while it works, and what happens when one is lost."""

from __future__ import annotations

from typing import Any

import pytest
import structlog

from quire.core.errors import IllegalTransition
from quire.jobs import handler
from quire.jobs import leases as leases_module
from quire.jobs.batches import BatchRun
from quire.jobs.context import JobContext
from quire.jobs.handler import Completed, Outcome, Progress, commit_step
from quire.manifest import tables as t
from quire.manifest.jobqueue import BACKOFF_SECONDS, LEASE_SECONDS, Job
from quire.manifest.ops.jobs import RenewJobLease
from quire.manifest.ops.local import RecordMetric
from quire.manifest.records import JobKind, JobState
from tests.jobs.handlers import KIND, BlockingHandler, enqueue, running, state, worker_with
from tests.jobs.job_store import JobStore
from tests.manifest.helpers import eventually


def test_heartbeats_renew_the_lease_and_record_progress(local_store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "PROGRESS_SECONDS", 0.01)
    blocking, job_id = BlockingHandler(), enqueue(local_store)
    with running(worker_with(local_store, blocking)) as worker:
        assert blocking.begun.wait(60)
        first = local_store.job(job_id).lease
        assert first is not None
        assert first.worker.startswith(worker.name)

        def renewed() -> bool:
            local_store.clock.advance(1)
            lease = local_store.job(job_id).lease
            return lease is not None and lease.done > 0 and lease.expires_at_ms > first.expires_at_ms + 5_000

        assert eventually(renewed)
        lease = local_store.job(job_id).lease
        assert lease is not None
        assert lease.total == 1_000
        blocking.end.set()
        assert eventually(lambda: state(local_store, job_id) is JobState.SUCCEEDED)


def test_a_heartbeat_is_not_a_commit_each_time(local_store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """M10: progress is unchanged and the lease is recent."""
    renewals = []
    monkeypatch.setattr(leases_module, "RenewJobLease", lambda *args: renewals.append(args))

    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        for _ in range(100):
            progress(1, 2)
            keeper.beat()
        return Completed()

    worker = worker_with(local_store, work)
    keeper = worker._new_keeper()
    enqueue(local_store)
    worker.drain()
    assert renewals == []


def test_leases_are_renewed_during_a_drain(local_store: JobStore) -> None:
    """The lease is shorter than the work, by the machine's clock and by the store's."""
    renewals: list[bool] = []

    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        before = local_store.job(job.job_id).lease
        assert before is not None

        def renewed() -> bool:
            local_store.clock.advance(0.001)
            lease = local_store.job(job.job_id).lease
            return lease is not None and lease.heartbeat_at_ms > before.heartbeat_at_ms

        renewals.append(eventually(renewed))
        return Completed()

    enqueue(local_store)
    worker_with(local_store, work, lease_seconds=0.3).drain()
    assert renewals == [True]


def test_a_renewal_that_comes_after_the_result_is_not_reported_as_a_lost_lease(local_store: JobStore) -> None:
    """Runs over 20,000 databases warned of more than a thousand leases, none of which had been taken."""
    jobs = local_store.manifest.jobs
    held: list[leases_module.LeasedJob] = []
    for end in (jobs.complete, lambda job: jobs.cancel(job.job_id)):
        job = jobs.claim_job(enqueue(local_store), "me")
        assert job is not None
        held.append(leases_module.LeasedJob(job, "me"))
        end(job)
    keeper = leases_module.LeaseKeeper(local_store.manifest, lambda: held, 1e-6, label="quire-test")
    with structlog.testing.capture_logs() as logs:
        keeper.beat()
    structlog.reset_defaults()
    assert [leased.lost for leased in held] == [False, True]
    assert [entry["job_id"] for entry in logs if entry["event"] == "job.lease_taken"] == [held[1].job.job_id]


def test_leases_of_many_jobs_are_counted_from_their_own_commits(
    local_store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: all claims of a run, and all renewals of a beat, had the same expiry. If committing them took most of a lease,
    the last ones expired before they were renewed, and other workers took the jobs."""
    manifest, submit = local_store.manifest, local_store.manifest.submit
    monkeypatch.setattr(handler, "PIPELINE", 1)
    run: BatchRun[leases_module.LeasedJob] = BatchRun(manifest, JobKind.RETENTION, leases_module.LeasedJob)
    job_ids = run.enqueue([local_store.database(f"db-{number}") for number in range(3)])

    def slow(ops: Any) -> Any:
        local_store.clock.advance(20)
        return submit(ops)

    def remaining_seconds() -> list[float]:
        leases = [local_store.job(job_id).lease for job_id in job_ids]
        return [(lease.expires_at_ms - lease.heartbeat_at_ms) / 1000 for lease in leases if lease is not None]

    monkeypatch.setattr(manifest, "submit", slow)
    assert run.claim(job_ids) == job_ids
    assert remaining_seconds() == [LEASE_SECONDS - 20] * 3
    for leased in run.held.values():
        leased.renewed_at -= LEASE_SECONDS
    run.leases.beat()
    assert remaining_seconds() == [LEASE_SECONDS - 20] * 3


@pytest.mark.parametrize("cause", ["cancelled", "expired"])
def test_a_lost_lease_interrupts_the_handler(local_store: JobStore, cause: str) -> None:
    blocking, job_id = BlockingHandler(), enqueue(local_store)
    with running(worker_with(local_store, blocking, lease_seconds=0.2)):
        assert blocking.begun.wait(60)
        if cause == "cancelled":
            local_store.manifest.jobs.cancel(job_id)
        else:
            while state(local_store, job_id) is JobState.IN_FLIGHT:  # a heartbeat may renew in between
                local_store.clock.advance(LEASE_SECONDS)
                local_store.manifest.jobs.expire()
        assert blocking.interrupted.wait(60)
    assert state(local_store, job_id) is (JobState.CANCELLED if cause == "cancelled" else JobState.PENDING)


@pytest.mark.parametrize("noticed_by", ["renewal", "commit"])
def test_a_caller_that_has_lost_its_job_does_not_cancel_the_attempt_of_another_worker(
    local_store: JobStore, noticed_by: str
) -> None:
    """Hazard: a call that waits for its job cancelled the job after its own attempt had failed, although another worker had
    taken the job, and raised an internal exception without a message."""
    jobs, job_ids = local_store.manifest.jobs, list[int]()

    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        job_ids.append(job.job_id)
        while state(local_store, job.job_id) is JobState.IN_FLIGHT:  # a heartbeat may renew in between
            local_store.clock.advance(LEASE_SECONDS)
            jobs.expire()
        assert jobs.claim_job(job.job_id, "another worker") is not None
        if noticed_by == "commit":
            commit_step(ctx, job, [])

        def never() -> bool:
            progress(1, 2)  # raises when the keeper has noticed
            return False

        eventually(never)
        return Completed()

    with pytest.raises(IllegalTransition):
        worker_with(local_store, work, lease_seconds=0.2).run_new(KIND, reraise=True)
    [job_id] = job_ids
    assert state(local_store, job_id) is JobState.IN_FLIGHT
    lease = local_store.job(job_id).lease
    assert lease is not None
    assert lease.worker == "another worker"


def test_a_slot_does_not_act_for_another_slot_of_its_worker(local_store: JobStore) -> None:
    """A slot whose job was claimed by another slot must neither renew that slot's lease nor commit steps in its
    place."""
    first, second = BlockingHandler(), BlockingHandler()
    handlers = iter([first, second])
    committed: dict[BlockingHandler, BaseException | None] = {}

    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        handler = next(handlers)
        try:
            return handler(ctx, job, progress)
        finally:
            try:
                commit_step(ctx, job, [RecordMetric(1, 1, [1.0])])
                committed[handler] = None
            except Exception as error:
                committed[handler] = error

    job_id = enqueue(local_store)
    with running(worker_with(local_store, work, threads=2, lease_seconds=0.2)):
        assert first.begun.wait(60)
        while state(local_store, job_id) is JobState.IN_FLIGHT:  # a heartbeat may renew in between
            local_store.clock.advance(LEASE_SECONDS)
            local_store.manifest.jobs.expire()
        # From here the clock stands still, or the second slot would lose its lease too: its thread may have to wait.
        local_store.clock.advance(BACKOFF_SECONDS)
        local_store.manifest.jobs.work_available.set()
        assert second.begun.wait(60)
        assert first.interrupted.wait(60)
        assert not second.interrupted.is_set()
        second.end.set()
        assert eventually(lambda: state(local_store, job_id) is JobState.SUCCEEDED)
    assert [type(committed[handler]).__name__ for handler in (first, second)] == ["IllegalTransition", "NoneType"]


def test_a_step_and_the_check_of_its_lease_are_one_transaction(
    local_store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is cancelled after the step's check and before its commit."""

    def cancelled_meanwhile(job_id: int, *args: Any) -> RenewJobLease:
        local_store.manifest.jobs.cancel(job_id)
        return RenewJobLease(job_id, *args)

    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        commit_step(ctx, job, [RecordMetric(1, 1, [1.0])])
        return Completed()

    monkeypatch.setattr(handler, "RenewJobLease", cancelled_meanwhile)
    job_id = enqueue(local_store)
    worker_with(local_store, work).drain()
    assert state(local_store, job_id) is JobState.CANCELLED
    with local_store.manifest.read() as txn:
        assert txn.count(t.METRICS) == 0


def test_a_step_keeps_lease_and_progress_as_they_are(local_store: JobStore) -> None:
    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        assert job.lease is not None
        ctx.manifest.jobs.renew(job, job.lease.worker, done=7, total=8)
        before = ctx.manifest.jobs.get(job.job_id).lease
        commit_step(ctx, job, [RecordMetric(1, 1, [1.0])])
        assert ctx.manifest.jobs.get(job.job_id).lease == before
        return Completed()

    job_id = enqueue(local_store)
    worker_with(local_store, work).drain()
    assert state(local_store, job_id) is JobState.SUCCEEDED, local_store.job(job_id).record.error
