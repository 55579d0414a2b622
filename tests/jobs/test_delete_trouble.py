"""Deletion while work arrives, after jobs were abandoned, and of what cannot be deleted."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from quire.core.errors import ObjectStoreUnavailable
from quire.durable.failpoints import armed
from quire.manifest.ops.snapshots import DropSnapshot
from quire.manifest.records import JobState
from quire.objects.api import ObjectStore
from quire.objects.open import open_store
from quire.testing.faults import Fault, FaultyDisk
from tests.jobs.job_store import ARCHIVED, GRACE_SECONDS, JobStore, delete_job, drop, is_known


def test_work_that_arrives_while_the_job_runs_is_done_by_it(local_store: JobStore) -> None:
    """M8: the job ends in the transaction that finds nothing left to do."""
    db_id = local_store.database()
    first, second = local_store.chunks(db_id, 1, 2)
    local_store.chunks(db_id, 1)
    job_id = delete_job(local_store, db_id)
    local_store.worker.drain()
    local_store.clock.advance(GRACE_SECONDS)
    first_call = iter([True])

    def add_work(_: str) -> None:
        if next(first_call, False):
            local_store.chunks(db_id, 2)

    with armed("jobs.worker.worked", add_work):
        local_store.worker.drain()
    assert local_store.row(first) is None
    assert local_store.job(job_id).state is JobState.PENDING, "it waits for the new work"
    assert delete_job(local_store, db_id) == job_id
    local_store.settle()
    assert local_store.job(job_id).state is JobState.SUCCEEDED
    assert local_store.row(second) is None
    local_store.assert_settled()


def test_work_without_a_job_is_found_by_upkeep(local_store: JobStore) -> None:
    db_id = local_store.database()
    local_store.chunks(db_id, 1)
    snapshot = local_store.manifest.snapshots.publish(db_id)
    local_store.chunks(db_id, 1)
    local_store.manifest.submit([DropSnapshot(db_id, snapshot.snapshot_id)]).result()  # directly, without a delete job
    assert delete_job(local_store, db_id) == 0
    assert local_store.upkeep.round().delete_jobs == 1
    local_store.manifest.jobs.cancel(delete_job(local_store, db_id))
    assert local_store.upkeep.round().delete_jobs == 1, "the work remains after a cancellation"
    local_store.settle()
    local_store.assert_settled()


def test_two_delete_jobs_at_once_lose_nothing(local_store: JobStore) -> None:
    """One of them has lost its lease and continues nevertheless."""
    db_id = local_store.database()
    local_store.chunks(db_id, 1, 2, 3)
    newest = local_store.chunks(db_id, 1, 2)
    local_store.worker.drain()
    local_store.clock.advance(GRACE_SECONDS)
    reached, resume = threading.Event(), threading.Event()

    def wait_once(_: str) -> None:
        if not reached.is_set():
            reached.set()
            assert resume.wait(30)

    with armed("jobs.delete.files_gone", wait_once):
        zombie = threading.Thread(target=local_store.worker.drain)
        zombie.start()
        assert reached.wait(30)
        local_store.clock.advance(60)
        assert local_store.manifest.jobs.expire() == 1
        local_store.clock.advance(60)
        assert local_store.worker_of().drain() >= 1
        resume.set()
        zombie.join()
    local_store.settle()
    assert local_store.artifacts().keys() >= set(newest)
    local_store.assert_settled()


# ── what cannot be deleted ────────────────────────────────────────────────────────────────────────────────────────────
def test_an_unavailable_bucket_does_not_prevent_other_deletions(local_store: JobStore) -> None:
    bucket = f"memory://away-{id(local_store)}"
    namespace_id = local_store.manifest.put_namespace(bucket)
    db_id = local_store.database()
    remote_keys = local_store.chunks(db_id, 1, 2, residency=ARCHIVED, namespace_id=namespace_id)
    local_keys = [*local_store.chunks(db_id, 3, 4), local_store.segment(db_id)]
    opened_urls: list[str] = []

    def opener(url: str) -> ObjectStore:
        opened_urls.append(url)
        if url == bucket:
            raise ObjectStoreUnavailable("no response", store=url)
        return open_store(url)

    local_store.opener = opener
    drop(local_store, db_id)
    for _ in range(3):
        local_store.upkeep.run_once()
        local_store.clock.advance(600)
    assert local_store.artifacts() == {}
    assert [local_store.row(key) for key in local_keys] == [None] * 3
    assert all(local_store.row(key) is not None for key in remote_keys)
    job = local_store.job(delete_job(local_store, db_id))
    assert job.record.failures == opened_urls.count(bucket) > 0, (
        "each attempt opens the bucket once, not once per artifact"
    )
    assert "no response" in job.record.error
    local_store.opener = open_store
    local_store.settle()
    assert not is_known(local_store, db_id)
    local_store.assert_settled(bucket)


def test_a_file_that_cannot_be_removed_does_not_prevent_other_deletions(tmp_path: Path) -> None:
    job_store = JobStore(str(tmp_path), str(tmp_path / "objects"))
    db_id = job_store.database()
    stuck, other = job_store.chunks(db_id, 1, 2)
    faulty = FaultyDisk(job_store.disk, Fault.EIO, fail_at=1, operation="remove", path=job_store.location(stuck).local)
    job_store.ctx = replace(job_store.ctx, disk=faulty)
    job_store.worker = job_store.worker_of()
    job_store.upkeep._worker = job_store.worker
    job_store.chunks(db_id, 1, 2)
    job_store.worker.drain()
    job_store.clock.advance(GRACE_SECONDS)
    job_store.worker.drain()
    assert job_store.row(other) is None
    assert job_store.file(stuck) == job_store.bodies[stuck]
    job_store.settle()
    assert job_store.row(stuck) is None
    job_store.assert_settled()
    job_store.close()
