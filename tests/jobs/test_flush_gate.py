"""The flush gate in `wal_state` (active job, last success, errored since) stays consistent with the checkpoint job."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.manifest.jobqueue import LEASE_SECONDS, Job
from quire.manifest.records import DbKind, JobKind, JobState
from quire.manifest.store import ManifestStore
from quire.testing.clock import ManualClock
from quire.testing.manifest import assert_clean, assert_replays


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def manifest(tmp_path: Path, clock: ManualClock) -> Iterator[ManifestStore]:
    with ManifestStore.open(str(tmp_path / "manifest.lmdb"), clock=clock) as manifest:
        manifest.register_db("shop", DbKind.PAGES)
        yield manifest
        assert_clean(manifest)
        assert_replays(manifest)


def claim(manifest: ManifestStore) -> Job:
    job = manifest.jobs.claim("owner:1:test")
    assert job is not None
    return job


def gate(manifest: ManifestStore) -> tuple[int, int, int]:
    with manifest.read() as txn:
        state = txn.wal_state(1)
    assert state is not None
    return state.active_job_id, state.last_success_at_ms, state.errored_since_ms


def test_the_flush_gate_follows_the_checkpoint_job(manifest: ManifestStore, clock: ManualClock) -> None:
    """Start, fail, start, succeed: each changes the gate in the job's own transaction."""
    jobs = manifest.jobs
    job_id = jobs.enqueue(JobKind.CHECKPOINT, 1)
    assert gate(manifest) == (0, 0, 0), "a pending job does not hold the gate"
    clock.advance(1)
    job = claim(manifest)
    assert gate(manifest) == (job_id, 0, 0)
    clock.advance(1)
    jobs.fail(job, "disk on fire")
    failed_at = clock.now_ms()
    assert gate(manifest) == (0, 0, failed_at)
    clock.advance(10)
    job = claim(manifest)
    clock.advance(1)
    jobs.fail(job, "still")
    assert gate(manifest) == (0, 0, failed_at), "the time of the first failure, not of the last"
    clock.advance(10)
    jobs.complete(claim(manifest))
    assert gate(manifest) == (0, clock.now_ms(), 0)


def test_deferring_a_checkpoint_is_not_an_error_and_cancelling_one_is(
    manifest: ManifestStore, clock: ManualClock
) -> None:
    jobs = manifest.jobs
    job_id = jobs.enqueue(JobKind.CHECKPOINT, 1)
    jobs.defer(claim(manifest), clock.now_ms())
    assert gate(manifest) == (0, 0, 0)
    claim(manifest)
    jobs.cancel(job_id)
    assert gate(manifest) == (0, 0, clock.now_ms())
    jobs.enqueue(JobKind.CHECKPOINT, 1)
    claim(manifest)
    clock.advance(LEASE_SECONDS)
    jobs.expire()
    assert gate(manifest)[0] == 0, "an expired lease also frees the gate"


def test_only_checkpoints_change_the_flush_gate(manifest: ManifestStore) -> None:
    manifest.jobs.enqueue(JobKind.MERGE, 1)
    job = claim(manifest)
    assert gate(manifest) == (0, 0, 0)
    manifest.jobs.fail(job, "x")
    assert gate(manifest) == (0, 0, 0)


def test_gate_and_job_change_in_one_transaction(manifest: ManifestStore) -> None:
    """A reader never sees them disagree."""
    job_id = manifest.jobs.enqueue(JobKind.CHECKPOINT, 1)
    observed: set[tuple[JobState, bool]] = set()
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            with manifest.read() as txn:
                job, state = txn.job(job_id), txn.wal_state(1)
            assert job is not None
            assert state is not None
            observed.add((job.state, state.active_job_id == job_id))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(25):
        manifest.jobs.defer(claim(manifest), 0)
    manifest.jobs.complete(claim(manifest))
    stop.set()
    watcher.join()
    assert observed <= {(JobState.PENDING, False), (JobState.IN_FLIGHT, True), (JobState.SUCCEEDED, False)}
