"""Deletion under way: work that comes in, jobs that were given up, and what cannot be deleted."""

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
from tests.jobs.world import ARCHIVED, GRACE_SECONDS, World, delete_job, drop, is_known


def test_what_comes_in_while_the_job_runs_is_its_work_too(local: World) -> None:
    """M8: the job ends when nothing is left, in its completing transaction."""
    db_id = local.database()
    first, second = local.chunks(db_id, 1, 2)
    local.chunks(db_id, 1)
    job_id = delete_job(local, db_id)
    local.worker.drain()
    local.clock.advance(GRACE_SECONDS)
    once = iter([True])

    def more(_: str) -> None:
        if next(once, False):
            local.chunks(db_id, 2)

    with armed("jobs.worker.worked", more):
        local.worker.drain()
    assert local.row(first) is None
    assert local.job(job_id).state is JobState.PENDING, "it waits for what came in"
    assert delete_job(local, db_id) == job_id
    local.settle()
    assert local.job(job_id).state is JobState.SUCCEEDED
    assert local.row(second) is None
    local.assert_settled()


def test_work_without_a_job_is_found_by_upkeep(local: World) -> None:
    db_id = local.database()
    local.chunks(db_id, 1)
    snapshot = local.manifest.snapshots.publish(db_id)
    local.chunks(db_id, 1)
    local.manifest.submit([DropSnapshot(db_id, snapshot.snapshot_id)]).result()  # by hand, without the delete job
    assert delete_job(local, db_id) == 0
    assert local.upkeep.round().delete_jobs == 1
    local.manifest.jobs.cancel(delete_job(local, db_id))
    assert local.upkeep.round().delete_jobs == 1, "cancelling it does not make the work go away"
    local.settle()
    local.assert_settled()


def test_two_delete_jobs_at_once_lose_nothing(local: World) -> None:
    """One of them was given up, and goes on regardless."""
    db_id = local.database()
    local.chunks(db_id, 1, 2, 3)
    kept = local.chunks(db_id, 1, 2)
    local.worker.drain()
    local.clock.advance(GRACE_SECONDS)
    reached, go_on = threading.Event(), threading.Event()

    def hold(_: str) -> None:
        if not reached.is_set():
            reached.set()
            assert go_on.wait(30)

    with armed("jobs.delete.files_gone", hold):
        zombie = threading.Thread(target=local.worker.drain)
        zombie.start()
        assert reached.wait(30)
        local.clock.advance(60)
        assert local.manifest.jobs.expire() == 1
        local.clock.advance(60)
        assert local.worker_of().drain() >= 1
        go_on.set()
        zombie.join()
    local.settle()
    assert local.artifacts().keys() >= set(kept)
    local.assert_settled()


# ── what cannot be deleted ────────────────────────────────────────────────────────────────────────────────────────────
def test_a_bucket_that_does_not_answer_keeps_nothing_else_from_going(local: World) -> None:
    bucket = f"memory://away-{id(local)}"
    space = local.manifest.put_namespace(bucket)
    db_id = local.database()
    far = local.chunks(db_id, 1, 2, residency=ARCHIVED, namespace_id=space)
    near = [*local.chunks(db_id, 3, 4), local.segment(db_id)]
    asked: list[str] = []

    def opener(url: str) -> ObjectStore:
        asked.append(url)
        if url == bucket:
            raise ObjectStoreUnavailable("no answer", store=url)
        return open_store(url)

    local.opener = opener
    drop(local, db_id)
    for _ in range(3):
        local.upkeep.run_once()
        local.clock.advance(600)
    assert local.artifacts() == {}
    assert [local.row(key) for key in near] == [None] * 3
    assert all(local.row(key) is not None for key in far)
    job = local.job(delete_job(local, db_id))
    assert job.record.failures == asked.count(bucket) > 0, "each attempt asks once, not once per artifact"
    assert "no answer" in job.record.error
    local.opener = open_store
    local.settle()
    assert not is_known(local, db_id)
    local.assert_settled(bucket)


def test_a_file_that_cannot_be_removed_keeps_nothing_else_from_going(tmp_path: Path) -> None:
    world = World(str(tmp_path), str(tmp_path / "objects"))
    db_id = world.database()
    stuck, other = world.chunks(db_id, 1, 2)
    faulty = FaultyDisk(world.disk, Fault.EIO, fail_at=1, operation="remove", path=world.place(stuck).local)
    world.ctx = replace(world.ctx, disk=faulty)
    world.worker = world.worker_of()
    world.upkeep._worker = world.worker
    world.chunks(db_id, 1, 2)
    world.worker.drain()
    world.clock.advance(GRACE_SECONDS)
    world.worker.drain()
    assert world.row(other) is None
    assert world.file(stuck) == world.bodies[stuck]
    world.settle()
    assert world.row(stuck) is None
    world.assert_settled()
    world.close()
