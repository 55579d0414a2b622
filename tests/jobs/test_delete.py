"""The delete job: it deletes every residency after the grace, keeps shared artifacts, and leaves nothing behind."""

from __future__ import annotations

import os

import pytest

from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.failpoints import armed
from quire.durable.names import object_key
from quire.jobs.delete import job as delete_module
from quire.jobs.delete.job import DELAY_SECONDS_MAX
from quire.jobs.handler import update
from quire.jobs.residency import request_evict, request_upload
from quire.manifest import tables as t
from quire.manifest.jobqueue import Job
from quire.manifest.namespaces import drop_namespace
from quire.manifest.ops.artifacts import PutChunk
from quire.manifest.ops.pageindex import ROW, PublishPages
from quire.manifest.ops.plans import BeginPlan
from quire.manifest.records import ChunkRecord, JobKind, JobState, PlanRecord, Residency
from quire.objects.open import open_store
from tests.jobs.job_store import ARCHIVED, BOTH, EVICTED, GRACE_SECONDS, LOCAL, JobStore, delete_job, drop, is_known


# ── by residency ──────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("residency", [LOCAL, BOTH, ARCHIVED, EVICTED], ids=lambda residency: residency.name)
def test_the_bytes_of_every_residency_are_deleted_then_the_rows(job_store: JobStore, residency: Residency) -> None:
    key = job_store.artifact(residency)
    location = job_store.location(key)
    drop(job_store, key.origin_db_id)
    job_store.settle()
    assert job_store.row(key) is None
    assert not os.path.exists(location.local)
    assert not is_known(job_store, key.origin_db_id)
    job_store.assert_settled()


def test_chunks_deltas_and_segments_of_a_database_are_all_deleted(job_store: JobStore) -> None:
    db_id, other = job_store.database(), job_store.database("other")
    other_chunks = job_store.chunks(other, 1)
    keys = [
        *job_store.chunks(db_id, 0, 1, 300),
        *job_store.deltas(db_id, 1, 300),
        job_store.segment(db_id),
        job_store.segment(db_id),
    ]
    for key in keys[::2]:
        job_store.succeed(request_upload(job_store.manifest, key))
    job_store.manifest.snapshots.publish(db_id, "s")
    job_store.chunks(db_id, 1)
    drop(job_store, db_id)
    job_store.settle()
    assert job_store.artifacts().keys() == set(other_chunks)
    assert not os.path.exists(os.path.join(job_store.root, f"pages/{db_id:08x}")), "its directories are removed too"
    job_store.assert_settled()


def test_a_delete_job_reports_what_it_deleted(local_store: JobStore) -> None:
    db_id = local_store.database()
    local_store.chunks(db_id, 1, 2)
    local_store.chunks(db_id, 1, 2)
    job_id = delete_job(local_store, db_id)
    local_store.worker.drain()
    assert local_store.job(job_id).state is JobState.PENDING
    local_store.clock.advance(GRACE_SECONDS)
    assert local_store.succeed(job_id) == {"artifacts": 2, "freed_bytes": 200}
    local_store.assert_settled()


# ── when ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_bytes_are_kept_for_the_grace_by_the_owner_s_clock(local_store: JobStore) -> None:
    db_id = local_store.database()
    (old,) = local_store.chunks(db_id, 1)
    local_store.chunks(db_id, 1)
    local_store.worker.drain()
    local_store.clock.advance(GRACE_SECONDS - 0.001)
    local_store.upkeep.run_once()
    assert local_store.file(old) == local_store.bodies[old]
    local_store.clock.jump(-3600)  # setting the clock back only delays the deletion
    local_store.upkeep.run_once()
    assert local_store.file(old) == local_store.bodies[old]
    local_store.clock.jump(3600)
    local_store.clock.advance(0.001)
    local_store.upkeep.run_once()
    assert local_store.row(old) is None
    local_store.assert_settled()


def test_artifacts_at_zero_since_different_times_are_deleted_at_different_times(local_store: JobStore) -> None:
    db_id = local_store.database()
    first, second = local_store.chunks(db_id, 1, 2)
    local_store.chunks(db_id, 1)
    local_store.clock.advance(30)
    local_store.chunks(db_id, 2)
    local_store.clock.advance(GRACE_SECONDS - 30)
    local_store.upkeep.run_once()
    assert local_store.row(first) is None
    assert local_store.file(second) == local_store.bodies[second]
    local_store.clock.advance(30)
    local_store.upkeep.run_once()
    assert local_store.row(second) is None
    local_store.assert_settled()


def test_purge_after_is_honoured(local_store: JobStore) -> None:
    db_id = local_store.database()
    (key,) = local_store.chunks(db_id, 1)
    local_store.manifest.submit([update(key, purge_after_ms=local_store.clock.now_ms() + 600_000)]).result()
    local_store.chunks(db_id, 1)
    for _ in range(9):
        local_store.clock.advance(66)
        local_store.upkeep.run_once()
        assert local_store.file(key) == local_store.bodies[key]
    local_store.clock.advance(6)
    local_store.upkeep.run_once()
    assert local_store.row(key) is None
    local_store.assert_settled()


def test_an_artifact_that_is_kept_for_long_does_not_delay_others(local_store: JobStore) -> None:
    """Hazard: the job slept until the kept one was due, and was the database's only delete job: nothing else was deleted."""
    db_id = local_store.database()
    kept, other = local_store.chunks(db_id, 1, 2)
    year_ms = 365 * 86_400_000
    local_store.manifest.submit([update(kept, purge_after_ms=local_store.clock.now_ms() + year_ms)]).result()
    local_store.chunks(db_id, 1)
    local_store.upkeep.run_once()
    local_store.chunks(db_id, 2)
    local_store.clock.advance(max(GRACE_SECONDS, DELAY_SECONDS_MAX) + 1)
    local_store.upkeep.run_once()
    assert local_store.row(other) is None
    assert local_store.file(kept) == local_store.bodies[kept]
    local_store.manifest.submit([update(kept, purge_after_ms=0)]).result()
    local_store.clock.advance(DELAY_SECONDS_MAX)
    local_store.upkeep.run_once()
    assert local_store.row(kept) is None
    local_store.assert_settled()


def test_leaves_have_no_bytes_and_are_deleted_at_once(local_store: JobStore) -> None:
    db_id = local_store.database()
    local_store.chunks(db_id, 1)
    drop(local_store, db_id)
    local_store.worker.drain()
    with local_store.manifest.read() as txn:
        assert not list(txn.raw_scan(t.SLOT_LEAF, db_id))
    local_store.settle()


# ── shared artifacts are kept ─────────────────────────────────────────────────────────────────────────────────────────
def test_artifacts_shared_with_a_fork_outlive_the_origin_and_are_deleted_with_the_fork(job_store: JobStore) -> None:
    db_id = job_store.database()
    shared, unshared = job_store.chunks(db_id, 1, 2)
    segment = job_store.segment(db_id)
    for key in (shared, segment):
        job_store.succeed(request_upload(job_store.manifest, key))
    fork = job_store.manifest.snapshots.fork(db_id, "fork")
    job_store.chunks(db_id, 2)
    drop(job_store, db_id)
    job_store.settle()
    assert is_known(job_store, db_id), "the fork still needs its artifacts"
    assert {shared, segment, unshared} == job_store.artifacts().keys()
    job_store.assert_settled()
    drop(job_store, fork)
    job_store.settle()
    assert not job_store.artifacts()
    assert not is_known(job_store, db_id)
    assert not is_known(job_store, fork)
    job_store.assert_settled()


def test_a_snapshot_keeps_its_artifacts_until_it_is_dropped(local_store: JobStore) -> None:
    db_id = local_store.database()
    old, both = local_store.chunks(db_id, 1, 2)
    local_store.manifest.snapshots.publish(db_id, "before")
    (new,) = local_store.chunks(db_id, 1)
    local_store.settle()
    assert local_store.artifacts().keys() == {old, both, new}
    local_store.manifest.snapshots.drop(db_id, "before")
    local_store.settle()
    assert local_store.artifacts().keys() == {both, new}
    local_store.assert_settled()


def test_a_job_on_an_artifact_holds_it_from_deletion_until_it_ends(local_store: JobStore) -> None:
    db_id = local_store.database()
    (key,) = local_store.chunks(db_id, 1)
    job_id = request_upload(local_store.manifest, key)
    local_store.manifest.jobs.defer(_claimed(local_store, job_id), local_store.clock.now_ms() + 3_600_000)
    local_store.chunks(db_id, 1)
    local_store.clock.advance(10 * GRACE_SECONDS)
    local_store.upkeep.run_once()
    assert local_store.file(key) == local_store.bodies[key]
    local_store.clock.advance(3600)
    local_store.succeed(job_id)
    assert local_store.row(key) is not None, "it reaches zero only now, and the grace begins"
    local_store.settle()
    assert local_store.row(key) is None
    local_store.assert_settled()


def _claimed(job_store: JobStore, job_id: int) -> Job:
    job = job_store.manifest.jobs.claim("owner:1:test", {job_store.job(job_id).kind})
    assert job is not None
    assert job.job_id == job_id
    return job


@pytest.mark.parametrize("end", ["cancel", "fail"])
def test_a_failed_or_cancelled_move_releases_its_artifact(local_store: JobStore, end: str) -> None:
    db_id = local_store.database()
    (key,) = local_store.chunks(db_id, 1)
    job_id = request_evict(local_store.manifest, key)
    local_store.chunks(db_id, 1)
    if end == "cancel":
        local_store.manifest.jobs.cancel(job_id)
    local_store.settle()
    assert local_store.row(key) is None
    local_store.assert_settled()


# ── everything is deleted ─────────────────────────────────────────────────────────────────────────────────────────────
def test_namespaces_are_deleted_when_nothing_refers_to_them(job_store: JobStore) -> None:
    bucket = f"memory://bucket-{os.path.basename(job_store.root)}-{id(job_store)}"
    row_namespace, db_namespace = (
        job_store.manifest.put_namespace(bucket, "a"),
        job_store.manifest.put_namespace(bucket, "b"),
    )
    unused = job_store.manifest.put_namespace(bucket, "c")
    db_id = job_store.database(namespace_id=db_namespace)
    (first,) = job_store.chunks(db_id, 1, residency=ARCHIVED, namespace_id=row_namespace)
    (second,) = job_store.chunks(db_id, 2)
    job_store.succeed(request_upload(job_store.manifest, second))
    with job_store.manifest.read() as txn:
        epoch_namespaces = {row.place_id: key[0] for key, row in txn.scan(t.REMOTE_NAMESPACE) if row.owner_epoch}
        assert job_store.row(second).namespace_id == txn.current_namespace(db_namespace)[0]
    job_store.chunks(db_id, 1)
    job_store.settle()
    assert job_store.row(first) is None
    with job_store.manifest.read() as txn:
        assert [key[0] for key, _ in txn.scan(t.REMOTE_NAMESPACE)] == sorted(
            [db_namespace, unused, epoch_namespaces[0], epoch_namespaces[db_namespace], epoch_namespaces[unused]]
        )
    drop(job_store, db_id)
    job_store.settle()
    with job_store.manifest.read() as txn:
        assert [key[0] for key, _ in txn.scan(t.REMOTE_NAMESPACE)] == [
            unused,
            epoch_namespaces[0],
            epoch_namespaces[unused],
        ], "a namespace that was never used is kept"
    drop_namespace(job_store.manifest, unused)
    job_store.settle()
    with job_store.manifest.read() as txn:
        assert [key[0] for key, _ in txn.scan(t.REMOTE_NAMESPACE)] == [epoch_namespaces[0]]
    job_store.assert_settled(bucket)


def test_unreferenced_rows_of_a_dropped_database_are_deleted(local_store: JobStore) -> None:
    """A checkpoint was abandoned after it wrote its chunks and before it published its slots."""
    db_id = local_store.database()
    for slot in range(3):
        local_store.manifest.submit([PutChunk(db_id, slot, 9, ChunkRecord(LOCAL, 5, 0))]).result()
        local_store.bodies[ArtifactKey(db_id, ArtifactKind.BASE, slot, 9)] = b"stray"
        local_store.write(ArtifactKey(db_id, ArtifactKind.BASE, slot, 9))
    drop(local_store, db_id)
    local_store.settle()
    assert not is_known(local_store, db_id)
    local_store.assert_settled()


def test_the_page_index_of_a_dropped_database_is_deleted_in_pieces(
    local_store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two pieces all rules of the manifest hold: a store that is closed at that point must open again."""
    monkeypatch.setattr(delete_module, "STEP_PAGE_ROWS", 4)
    db_id = local_store.database()
    rows = [ROW.pack(page, 0, lsn, 0, 7, 1, 1, 0, 0) for page in (1, 2, 3) for lsn in (1, 2, 3)]
    local_store.manifest.submit([PublishPages(db_id, b"".join(rows))]).result()
    drop(local_store, db_id)
    remaining_rows = []

    def record_rows(_: str) -> None:
        assert local_store.manifest.check() == []
        with local_store.manifest.read() as txn:
            remaining_rows.append(len(list(txn.raw_scan(t.PAGE_VERSION_INDEX, db_id))))

    with armed("jobs.delete.published", record_rows):
        local_store.settle()
    assert remaining_rows == [5, 1, 0]
    assert not is_known(local_store, db_id)


def test_objects_of_an_abandoned_checkpoint_of_a_dropped_database_are_deleted(local_store: JobStore) -> None:
    """P10: only the stored plan has the names of its objects."""
    db_id = local_store.database()
    local_store.chunks(db_id, 1)
    job_id = local_store.manifest.jobs.enqueue(JobKind.CHECKPOINT, db_id)
    job = _claimed(local_store, job_id)
    plan = PlanRecord(job_id, job.record.attempt, 1, 8, b"digest", artifacts=[(1, 0, False), (2, 0, False)])
    local_store.manifest.submit([BeginPlan(db_id, 2, plan)]).result()
    for slot in (1, 2):
        open_store(local_store.objects_url).put(
            object_key(ArtifactKey(db_id, ArtifactKind.BASE, slot, 2)), b"half done"
        )
    drop(local_store, db_id)
    local_store.worker.drain()
    local_store.clock.advance(GRACE_SECONDS)
    local_store.worker.drain()
    assert is_known(local_store, db_id), "the checkpoint may still be running"
    local_store.manifest.jobs.cancel(job_id)
    local_store.settle()
    assert not is_known(local_store, db_id)
    local_store.assert_settled()


def test_an_empty_dropped_database_is_removed_at_once(local_store: JobStore) -> None:
    db_id = local_store.database()
    drop(local_store, db_id)
    local_store.worker.drain()
    assert not is_known(local_store, db_id)


def test_a_database_with_an_outstanding_job_keeps_its_tombstone_without_a_busy_loop(local_store: JobStore) -> None:
    """Its removal is refused while the gate is held; the delete job must neither retry in a loop nor be enqueued
    forever."""
    db_id = local_store.database()
    local_store.chunks(db_id, 1)
    checkpoint_id = local_store.manifest.jobs.enqueue(JobKind.CHECKPOINT, db_id, delay_seconds=86_400)
    drop(local_store, db_id)
    for _ in range(6):
        local_store.upkeep.run_once()
        local_store.clock.advance(120)
    assert not local_store.artifacts()
    assert is_known(local_store, db_id)
    assert len([job for job in local_store.manifest.jobs.jobs() if job.kind is JobKind.DELETE]) == 1
    local_store.manifest.jobs.cancel(checkpoint_id)
    local_store.settle()
    assert not is_known(local_store, db_id)


def test_many_artifacts_are_deleted_in_bounded_steps(local_store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delete_module, "STEP_ARTIFACTS", 4)
    monkeypatch.setattr(delete_module, "STEP_LEAVES", 1)
    db_id = local_store.database()
    for _ in range(2):
        local_store.chunks(db_id, 1, 300, *range(512, 517))
    remaining_counts: list[int] = []
    with armed("jobs.delete.published", lambda _: remaining_counts.append(len(local_store.artifacts()))):
        local_store.settle()
    assert len(remaining_counts) >= 2
    drop(local_store, db_id)
    local_store.settle()
    assert not local_store.artifacts()
    local_store.assert_settled()
