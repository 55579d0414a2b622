"""The durable queue: gates, tokens, backoff, permanent failure, expired leases."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from quire.core.barrier import Barrier
from quire.core.errors import (
    IllegalTransition,
    InvalidInput,
    JobAlreadyPending,
    StillReferenced,
    UnknownDatabase,
    UnknownJob,
)
from quire.manifest.jobqueue import (
    ATTEMPTS,
    BACKOFF_SECONDS_MAX,
    ERROR_CHARS_MAX,
    LEASE_SECONDS,
    Job,
    worker_name,
)
from quire.manifest.ops.databases import DropDb
from quire.manifest.ops.jobs import CompleteJob
from quire.manifest.records import EXCLUSIVE_JOBS, DbKind, JobKind, JobState
from quire.manifest.store import ManifestStore
from quire.testing.clock import ManualClock
from quire.testing.manifest import assert_clean, assert_replays

LOCAL_WORKER = "owner:1:test"
REMOTE_WORKER = "far-away:7"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "manifest.lmdb")


@pytest.fixture
def manifest(path: str, clock: ManualClock) -> Iterator[ManifestStore]:
    with ManifestStore.open(path, clock=clock) as manifest:
        manifest.register_db("shop", DbKind.PAGES)
        yield manifest
        assert_clean(manifest)
        assert_replays(manifest)


def claim(manifest: ManifestStore, worker: str = LOCAL_WORKER) -> Job:
    job = manifest.jobs.claim(worker)
    assert job is not None
    return job


# ── enqueuing ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_oldest_due_job_is_claimed_first(manifest: ManifestStore, clock: ManualClock) -> None:
    jobs = manifest.jobs
    later = jobs.enqueue(JobKind.VERIFY, delay_seconds=60)
    first, second = jobs.enqueue(JobKind.VERIFY, payload={"n": 1}), jobs.enqueue(JobKind.SWEEP)
    assert (claim(manifest).job_id, claim(manifest).job_id, jobs.claim(LOCAL_WORKER)) == (first, second, None)
    assert jobs.get(first).payload == {"n": 1}
    clock.advance(59.9)
    assert jobs.claim(LOCAL_WORKER) is None
    clock.advance(0.1)
    assert claim(manifest).job_id == later


def test_a_worker_gets_only_kinds_that_it_knows(manifest: ManifestStore) -> None:
    job_ids = [manifest.jobs.enqueue(kind) for kind in (JobKind.SWEEP, JobKind.VERIFY)]
    assert manifest.jobs.claim(LOCAL_WORKER, {JobKind.BUNDLE}) is None
    job = manifest.jobs.claim(LOCAL_WORKER, {JobKind.VERIFY})
    assert job is not None
    assert job.job_id == job_ids[1]


def test_the_gate_of_an_exclusive_kind_names_the_job_that_holds_it(manifest: ManifestStore) -> None:
    for kind in sorted(EXCLUSIVE_JOBS):
        holder = manifest.jobs.enqueue(kind, 1)
        with pytest.raises(JobAlreadyPending) as caught:
            manifest.jobs.enqueue(kind, 1)
        assert caught.value.where["job_id"] == holder
        assert f"jobs cancel {holder}" in str(caught.value)
        assert manifest.jobs.outstanding(1, kind) == holder
        manifest.jobs.cancel(holder)
        assert manifest.jobs.outstanding(1, kind) == 0
        again = manifest.jobs.enqueue(kind, 1)
        manifest.jobs.complete(claim(manifest))
        assert manifest.jobs.get(again).state is JobState.SUCCEEDED


def test_another_database_has_another_gate(manifest: ManifestStore) -> None:
    other = manifest.register_db("other", DbKind.PAGES)
    assert manifest.jobs.enqueue(JobKind.MERGE, 1) != manifest.jobs.enqueue(JobKind.MERGE, other)


def test_a_token_makes_enqueuing_safe_to_repeat(manifest: ManifestStore, path: str, clock: ManualClock) -> None:
    token = uuid4().bytes
    first = manifest.jobs.enqueue(JobKind.CHECKPOINT, 1, {"a": 1}, token=token)
    assert manifest.jobs.enqueue(JobKind.CHECKPOINT, 1, {"a": 1}, token=token) == first, "the job itself holds its gate"
    manifest.jobs.complete(claim(manifest), "done")
    assert manifest.jobs.enqueue(JobKind.CHECKPOINT, 1, {"a": 1}, token=token) == first
    assert len(manifest.jobs.jobs()) == 1
    assert manifest.jobs.get(first).result == "done"
    assert manifest.jobs.enqueue(JobKind.CHECKPOINT, 1, token=uuid4().bytes) != first
    with pytest.raises(InvalidInput, match="16 bytes"):
        manifest.jobs.enqueue(JobKind.VERIFY, 1, token=b"short")


def test_a_job_of_an_unknown_database_is_refused(manifest: ManifestStore) -> None:
    with pytest.raises(UnknownDatabase):
        manifest.jobs.enqueue(JobKind.VERIFY, 99)
    with pytest.raises(UnknownJob):
        manifest.jobs.get(99)
    with pytest.raises(UnknownJob):
        manifest.jobs.cancel(99)


# ── failing ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_wait_after_a_failure_doubles_up_to_a_limit(manifest: ManifestStore, clock: ManualClock) -> None:
    job_id = manifest.jobs.enqueue(JobKind.VERIFY, max_attempts=0)
    waits = []
    for _ in range(11):
        job = claim(manifest)
        assert manifest.jobs.fail(job, "no luck") is JobState.PENDING
        record = manifest.jobs.get(job_id).record
        waits.append((record.not_before_ms - clock.now_ms()) / 1000)
        clock.advance(waits[-1] - 0.001)
        assert manifest.jobs.claim(LOCAL_WORKER) is None, "not before its time"
        clock.advance(0.001)
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, BACKOFF_SECONDS_MAX, BACKOFF_SECONDS_MAX]
    assert manifest.jobs.get(job_id).record.failures == 11


def test_after_its_last_attempt_a_job_has_failed_permanently_and_keeps_the_error(
    manifest: ManifestStore, clock: ManualClock
) -> None:
    job_id = manifest.jobs.enqueue(JobKind.MERGE, 1)
    for attempt in range(1, ATTEMPTS + 1):
        job = claim(manifest)
        assert job.record.attempt == attempt
        state = manifest.jobs.fail(job, f"attempt {attempt}: " + "x" * 5_000)
        clock.advance(600)
    job = manifest.jobs.get(job_id)
    assert job.state is state is JobState.FAILED_PERMANENT
    assert job.record.error == ("attempt 5: " + "x" * 5_000)[:ERROR_CHARS_MAX]
    assert job.record.finished_at_ms > 0
    assert manifest.jobs.claim(LOCAL_WORKER) is None
    assert manifest.jobs.outstanding(1, JobKind.MERGE) == 0, "it no longer holds the gate"


def test_a_permanent_error_fails_at_once(manifest: ManifestStore) -> None:
    job_id = manifest.jobs.enqueue(JobKind.VERIFY, 1)
    assert manifest.jobs.fail(claim(manifest), "never", permanent=True) is JobState.FAILED_PERMANENT
    assert manifest.jobs.get(job_id).record.error == "never"


def test_deferring_is_not_a_failure(manifest: ManifestStore, clock: ManualClock) -> None:
    job_id = manifest.jobs.enqueue(JobKind.VERIFY, max_attempts=2)
    for _ in range(5):
        manifest.jobs.defer(claim(manifest), clock.now_ms())
    record = manifest.jobs.get(job_id).record
    assert (record.failures, record.attempt, record.error) == (0, 5, "")
    manifest.jobs.fail(claim(manifest), "one")
    clock.advance(10)
    assert manifest.jobs.fail(claim(manifest), "two") is JobState.FAILED_PERMANENT


# ── control by users ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_job_that_has_not_ended_can_be_cancelled(manifest: ManifestStore) -> None:
    waiting, running = manifest.jobs.enqueue(JobKind.SWEEP), manifest.jobs.enqueue(JobKind.VERIFY)
    manifest.jobs.cancel(waiting)
    job = claim(manifest)
    assert job.job_id == running
    manifest.jobs.cancel(running)
    for transition in (
        lambda: manifest.jobs.complete(job),
        lambda: manifest.jobs.fail(job, "x"),
        lambda: manifest.jobs.defer(job, 0),
        lambda: manifest.jobs.renew(job, LOCAL_WORKER),
        lambda: manifest.jobs.cancel(running),
    ):
        with pytest.raises(IllegalTransition):
            transition()
    assert [listed.state for listed in manifest.jobs.jobs()] == [JobState.CANCELLED] * 2


def test_a_job_that_failed_or_was_cancelled_can_be_retried(manifest: ManifestStore) -> None:
    cancelled = manifest.jobs.enqueue(JobKind.RETENTION, 1, {"force": True}, token=uuid4().bytes)
    with pytest.raises(IllegalTransition):
        manifest.jobs.retry(cancelled)
    manifest.jobs.cancel(cancelled)
    again = manifest.jobs.retry(cancelled)
    job = manifest.jobs.get(again)
    assert (job.state, job.kind, job.db_id, job.payload) == (JobState.PENDING, JobKind.RETENTION, 1, {"force": True})
    with pytest.raises(JobAlreadyPending):
        manifest.jobs.retry(cancelled)
    manifest.jobs.fail(claim(manifest), "x", permanent=True)
    third = manifest.jobs.retry(again)
    manifest.jobs.complete(claim(manifest))
    with pytest.raises(IllegalTransition):
        manifest.jobs.retry(third)
    assert manifest.jobs.get(cancelled).state is JobState.CANCELLED, "a retried job keeps its final state"


def test_all_old_jobs_are_forgotten_however_many_ended(manifest: ManifestStore, clock: ManualClock) -> None:
    """Hazard: a round forgot a fixed number of jobs of each state, and more than that accumulated forever."""
    for _ in range(5):
        manifest.jobs.enqueue(JobKind.VERIFY)
        manifest.jobs.complete(claim(manifest))
    clock.advance(101)
    assert manifest.jobs.forget(older_than_seconds=100, limit=2) == 5
    assert manifest.jobs.jobs() == []


def test_old_jobs_are_forgotten_recent_and_unfinished_ones_are_not(manifest: ManifestStore, clock: ManualClock) -> None:
    old, failed = manifest.jobs.enqueue(JobKind.SWEEP), manifest.jobs.enqueue(JobKind.VERIFY)
    manifest.jobs.complete(claim(manifest))
    manifest.jobs.fail(claim(manifest), "x", permanent=True)
    clock.advance(100)
    young, pending = manifest.jobs.enqueue(JobKind.SWEEP), manifest.jobs.enqueue(JobKind.VERIFY)
    manifest.jobs.complete(claim(manifest))
    assert manifest.jobs.forget(older_than_seconds=100) == 0
    assert [job.job_id for job in manifest.jobs.jobs(newest=3)] == [failed, young, pending]
    assert [job.job_id for job in manifest.jobs.jobs(JobState.SUCCEEDED, newest=1)] == [young]
    assert [job.job_id for job in manifest.jobs.jobs(JobState.SUCCEEDED, newest=9)] == [old, young]
    assert manifest.jobs.jobs(db_id=1, newest=9) == manifest.jobs.jobs(db_id=1) == []
    assert manifest.jobs.jobs(db_id=0, newest=9) == manifest.jobs.jobs()
    clock.advance(1)
    assert manifest.jobs.forget(older_than_seconds=100) == 2
    assert [job.job_id for job in manifest.jobs.jobs()] == [young, pending]
    for job_id in (old, failed):
        with pytest.raises(UnknownJob):
            manifest.jobs.get(job_id)


# ── leases ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_renewed_lease_does_not_expire_and_carries_progress(manifest: ManifestStore, clock: ManualClock) -> None:
    manifest.jobs.enqueue(JobKind.VERIFY)
    job = claim(manifest)
    assert job.lease is not None
    assert job.lease.expires_at_ms == clock.now_ms() + LEASE_SECONDS * 1000
    clock.advance(LEASE_SECONDS - 1)
    manifest.jobs.renew(job, LOCAL_WORKER, done=3, total=9)
    clock.advance(LEASE_SECONDS - 1)
    assert manifest.jobs.expire() == 0
    lease = manifest.jobs.get(job.job_id).lease
    assert lease is not None
    assert (lease.worker, lease.done, lease.total) == (LOCAL_WORKER, 3, 9)
    with pytest.raises(IllegalTransition):
        manifest.jobs.renew(job, "somebody else")


def test_an_expired_lease_makes_the_job_pending_exactly_once(manifest: ManifestStore, clock: ManualClock) -> None:
    job_id = manifest.jobs.enqueue(JobKind.VERIFY)
    job = claim(manifest)
    clock.advance(LEASE_SECONDS)
    assert (manifest.jobs.expire(), manifest.jobs.expire()) == (1, 0)
    record = manifest.jobs.get(job_id).record
    assert (record.state, record.failures) == (JobState.PENDING, 1)
    assert "lease expired" in record.error
    clock.advance(10)
    successor = claim(manifest, "another")
    with pytest.raises(IllegalTransition):
        manifest.jobs.complete(job, "too late")
    manifest.jobs.complete(successor, "in time")
    assert manifest.jobs.get(job_id).result == "in time"


def test_two_expirers_at_once_requeue_each_job_once(manifest: ManifestStore, clock: ManualClock) -> None:
    ids = [manifest.jobs.enqueue(JobKind.VERIFY) for _ in range(20)]
    for _ in ids:
        claim(manifest)
    clock.advance(LEASE_SECONDS)
    counts: list[int] = []
    start = threading.Barrier(4)

    def expire() -> None:
        start.wait()
        counts.append(manifest.jobs.expire())

    threads = [threading.Thread(target=expire) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts) == len(ids)
    assert {manifest.jobs.get(job_id).record.failures for job_id in ids} == {1}


def test_many_workers_at_once_claim_each_job_once(manifest: ManifestStore) -> None:
    ids = {manifest.jobs.enqueue(JobKind.VERIFY) for _ in range(30)}
    claimed: list[int] = []

    def work(name: str) -> None:
        while (job := manifest.jobs.claim(name)) is not None:
            claimed.append(job.job_id)

    threads = [threading.Thread(target=work, args=(f"w{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == sorted(ids)


def test_an_expired_lease_of_the_last_attempt_fails_the_job(manifest: ManifestStore, clock: ManualClock) -> None:
    job_id = manifest.jobs.enqueue(JobKind.VERIFY, max_attempts=2)
    for _ in range(2):
        clock.advance(10)
        claim(manifest)
        clock.advance(LEASE_SECONDS)
        assert manifest.jobs.expire() == 1
    job = manifest.jobs.get(job_id)
    assert job.state is JobState.FAILED_PERMANENT
    assert "lease expired" in job.record.error


def test_at_open_jobs_of_the_dead_owner_are_pending_and_those_of_others_get_a_lease(path: str) -> None:
    clock = ManualClock()
    with ManifestStore.open(path, clock=clock) as manifest:
        mine, theirs = manifest.jobs.enqueue(JobKind.VERIFY), manifest.jobs.enqueue(JobKind.VERIFY)
        assert manifest.jobs.claim(worker_name("worker")) is not None
        remote = claim(manifest, REMOTE_WORKER)
        manifest.jobs.renew(remote, REMOTE_WORKER, done=1, total=2)
    clock.advance(3600)  # longer than any lease
    with ManifestStore.open(path, clock=clock) as manifest:
        assert manifest.jobs.recover() == 1
        assert manifest.jobs.get(mine).state is JobState.PENDING
        assert "process ended" in manifest.jobs.get(mine).record.error
        recovered = manifest.jobs.get(theirs)
        assert recovered.state is JobState.IN_FLIGHT
        assert recovered.lease is not None
        assert recovered.lease.expires_at_ms == clock.now_ms() + LEASE_SECONDS * 1000
        assert (recovered.lease.done, recovered.lease.total) == (1, 2)
        assert (manifest.jobs.recover(), manifest.jobs.expire()) == (0, 0)
        manifest.jobs.complete(remote)
        assert manifest.jobs.get(theirs).state is JobState.SUCCEEDED
        assert_clean(manifest)


def test_a_remote_worker_that_does_not_return_loses_its_job_when_its_lease_expires(path: str) -> None:
    clock = ManualClock()
    with ManifestStore.open(path, clock=clock) as manifest:
        job_id = manifest.jobs.enqueue(JobKind.VERIFY)
        claim(manifest, REMOTE_WORKER)
    with ManifestStore.open(path, clock=clock) as manifest:
        manifest.jobs.recover()
        clock.advance(LEASE_SECONDS)
        assert manifest.jobs.expire() == 1
        assert manifest.jobs.get(job_id).state is JobState.PENDING
        assert_clean(manifest)


def test_workers_of_the_owner_carry_its_process_in_their_names() -> None:
    assert worker_name("x") == f"owner:{os.getpid()}:x"


# ── completion ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_only_the_running_attempt_completes_a_job(manifest: ManifestStore) -> None:
    manifest.jobs.enqueue(JobKind.VERIFY)
    job = claim(manifest)
    with pytest.raises(IllegalTransition):
        manifest.submit([CompleteJob(job.job_id, JobState.SUCCEEDED, job.record.attempt + 1)]).result()
    with pytest.raises(IllegalTransition):
        manifest.submit([CompleteJob(job.job_id, JobState.SUCCEEDED)]).result()
    manifest.jobs.complete(job)
    with pytest.raises(IllegalTransition):
        manifest.jobs.complete(job)


def test_a_job_s_effects_commit_with_its_end_or_not_at_all(manifest: ManifestStore) -> None:
    db_id = manifest.register_db("kept", DbKind.PAGES)
    manifest.jobs.enqueue(JobKind.VERIFY)
    job = claim(manifest)
    manifest.snapshots.publish(db_id, "safe")
    with pytest.raises(StillReferenced):
        manifest.jobs.complete(job, ops=[DropDb(db_id)])
    assert manifest.jobs.get(job.job_id).state is JobState.IN_FLIGHT


def test_a_job_record_that_is_not_enqueued_does_not_wait_for_the_archive(manifest: ManifestStore) -> None:
    waits: list[str] = []
    Barrier(lambda: waits.append("waited")).cover(manifest.jobs)
    record = manifest.jobs.record(JobKind.CHECKPOINT, 1)
    assert waits == []
    manifest.jobs.enqueue(record.kind, record.db_id)
    assert waits == ["waited"]
