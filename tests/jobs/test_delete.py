"""The delete job: by residency, in its time, what is shared stays, and nothing is left behind."""

from __future__ import annotations

import os

import pytest

from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.failpoints import armed
from quire.durable.names import object_key
from quire.jobs.delete import job as delete_module
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
from tests.jobs.world import ARCHIVED, BOTH, EVICTED, GRACE_SECONDS, LOCAL, World, delete_job, drop, is_known


# ── by residency ──────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("residency", [LOCAL, BOTH, ARCHIVED, EVICTED], ids=lambda residency: residency.name)
def test_the_bytes_of_every_residency_go_then_the_rows(world: World, residency: Residency) -> None:
    key = world.artifact(residency)
    place = world.place(key)
    drop(world, key.origin_db_id)
    world.settle()
    assert world.row(key) is None
    assert not os.path.exists(place.local)
    assert not is_known(world, key.origin_db_id)
    world.assert_settled()


def test_chunks_deltas_and_segments_of_a_database_all_go(world: World) -> None:
    db_id, other = world.database(), world.database("other")
    kept = world.chunks(other, 1)
    keys = [*world.chunks(db_id, 0, 1, 300), *world.deltas(db_id, 1, 300), world.segment(db_id), world.segment(db_id)]
    for key in keys[::2]:
        world.done(request_upload(world.manifest, key))
    world.manifest.snapshots.publish(db_id, "s")
    world.chunks(db_id, 1)
    drop(world, db_id)
    world.settle()
    assert world.artifacts().keys() == set(kept)
    assert not os.path.exists(os.path.join(world.root, f"pages/{db_id:08x}")), "its directories go with it"
    world.assert_settled()


def test_a_delete_job_says_what_it_did(local: World) -> None:
    db_id = local.database()
    local.chunks(db_id, 1, 2)
    local.chunks(db_id, 1, 2)
    job_id = delete_job(local, db_id)
    local.worker.drain()
    assert local.job(job_id).state is JobState.PENDING
    local.clock.advance(GRACE_SECONDS)
    assert local.done(job_id) == {"artifacts": 2, "freed_bytes": 200}
    local.assert_settled()


# ── in its time ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_bytes_stay_for_the_grace_by_the_owner_s_clock(local: World) -> None:
    db_id = local.database()
    (old,) = local.chunks(db_id, 1)
    local.chunks(db_id, 1)
    local.worker.drain()
    local.clock.advance(GRACE_SECONDS - 0.001)
    local.upkeep.run_once()
    assert local.file(old) == local.bodies[old]
    local.clock.jump(-3600)  # somebody sets the clock back: that only makes it later
    local.upkeep.run_once()
    assert local.file(old) == local.bodies[old]
    local.clock.jump(3600)
    local.clock.advance(0.001)
    local.upkeep.run_once()
    assert local.row(old) is None
    local.assert_settled()


def test_what_reached_zero_at_different_times_goes_at_different_times(local: World) -> None:
    db_id = local.database()
    first, second = local.chunks(db_id, 1, 2)
    local.chunks(db_id, 1)
    local.clock.advance(30)
    local.chunks(db_id, 2)
    local.clock.advance(GRACE_SECONDS - 30)
    local.upkeep.run_once()
    assert local.row(first) is None
    assert local.file(second) == local.bodies[second]
    local.clock.advance(30)
    local.upkeep.run_once()
    assert local.row(second) is None
    local.assert_settled()


def test_purge_after_is_honoured(local: World) -> None:
    db_id = local.database()
    (key,) = local.chunks(db_id, 1)
    local.manifest.submit([update(key, purge_after_ms=local.clock.now_ms() + 600_000)]).result()
    local.chunks(db_id, 1)
    for _ in range(9):
        local.clock.advance(66)
        local.upkeep.run_once()
        assert local.file(key) == local.bodies[key]
    local.clock.advance(6)
    local.upkeep.run_once()
    assert local.row(key) is None
    local.assert_settled()


def test_leaves_have_no_bytes_and_go_at_once(local: World) -> None:
    db_id = local.database()
    local.chunks(db_id, 1)
    drop(local, db_id)
    local.worker.drain()
    with local.manifest.read() as txn:
        assert not list(txn.raw_scan(t.SLOT_LEAF, db_id))
    local.settle()


# ── what is shared stays ──────────────────────────────────────────────────────────────────────────────────────────────
def test_what_a_fork_shares_survives_its_origin_and_goes_with_the_fork(world: World) -> None:
    db_id = world.database()
    shared, own = world.chunks(db_id, 1, 2)
    segment = world.segment(db_id)
    for key in (shared, segment):
        world.done(request_upload(world.manifest, key))
    fork = world.manifest.snapshots.fork(db_id, "fork")
    world.chunks(db_id, 2)
    drop(world, db_id)
    world.settle()
    assert is_known(world, db_id), "its artifacts are still needed"
    assert {shared, segment, own} == world.artifacts().keys()
    world.assert_settled()
    drop(world, fork)
    world.settle()
    assert not world.artifacts()
    assert not is_known(world, db_id)
    assert not is_known(world, fork)
    world.assert_settled()


def test_a_snapshot_keeps_what_it_holds_and_lets_it_go_with_itself(local: World) -> None:
    db_id = local.database()
    old, both = local.chunks(db_id, 1, 2)
    local.manifest.snapshots.publish(db_id, "before")
    (new,) = local.chunks(db_id, 1)
    local.settle()
    assert local.artifacts().keys() == {old, both, new}
    local.manifest.snapshots.drop(db_id, "before")
    local.settle()
    assert local.artifacts().keys() == {both, new}
    local.assert_settled()


def test_a_job_on_an_artifact_holds_it_from_deletion_until_it_ends(local: World) -> None:
    db_id = local.database()
    (key,) = local.chunks(db_id, 1)
    job_id = request_upload(local.manifest, key)
    local.manifest.jobs.defer(_claimed(local, job_id), local.clock.now_ms() + 3_600_000)
    local.chunks(db_id, 1)
    local.clock.advance(10 * GRACE_SECONDS)
    local.upkeep.run_once()
    assert local.file(key) == local.bodies[key]
    local.clock.advance(3600)
    local.done(job_id)
    assert local.row(key) is not None, "only now it is at zero, and the grace begins"
    local.settle()
    assert local.row(key) is None
    local.assert_settled()


def _claimed(world: World, job_id: int) -> Job:
    job = world.manifest.jobs.claim("owner:1:test", {world.job(job_id).kind})
    assert job is not None
    assert job.job_id == job_id
    return job


@pytest.mark.parametrize("end", ["cancel", "fail"])
def test_a_move_that_ends_badly_lets_its_artifact_go(local: World, end: str) -> None:
    db_id = local.database()
    (key,) = local.chunks(db_id, 1)
    job_id = request_evict(local.manifest, key)
    local.chunks(db_id, 1)
    if end == "cancel":
        local.manifest.jobs.cancel(job_id)
    local.settle()
    assert local.row(key) is None
    local.assert_settled()


# ── all of it ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_namespaces_go_when_nothing_points_at_them(world: World) -> None:
    bucket = f"memory://bucket-{os.path.basename(world.root)}-{id(world)}"
    of_row, of_db = world.manifest.put_namespace(bucket, "a"), world.manifest.put_namespace(bucket, "b")
    unused = world.manifest.put_namespace(bucket, "c")
    db_id = world.database(namespace_id=of_db)
    (first,) = world.chunks(db_id, 1, residency=ARCHIVED, namespace_id=of_row)
    (second,) = world.chunks(db_id, 2)
    world.done(request_upload(world.manifest, second))
    with world.manifest.read() as txn:
        epochs = {row.place_id: key[0] for key, row in txn.scan(t.REMOTE_NAMESPACE) if row.owner_epoch}
        assert world.row(second).namespace_id == txn.current_namespace(of_db)[0]
    world.chunks(db_id, 1)
    world.settle()
    assert world.row(first) is None
    with world.manifest.read() as txn:
        assert [key[0] for key, _ in txn.scan(t.REMOTE_NAMESPACE)] == sorted(
            [of_db, unused, epochs[0], epochs[of_db], epochs[unused]]
        )
    drop(world, db_id)
    world.settle()
    with world.manifest.read() as txn:
        assert [key[0] for key, _ in txn.scan(t.REMOTE_NAMESPACE)] == [unused, epochs[0], epochs[unused]], (
            "what was never used waits for its use"
        )
    drop_namespace(world.manifest, unused)
    world.settle()
    with world.manifest.read() as txn:
        assert [key[0] for key, _ in txn.scan(t.REMOTE_NAMESPACE)] == [epochs[0]]
    world.assert_settled(bucket)


def test_rows_of_a_dropped_database_that_nothing_ever_referred_to_go_too(local: World) -> None:
    """A checkpoint that was abandoned between its chunks and its slots."""
    db_id = local.database()
    for slot in range(3):
        local.manifest.submit([PutChunk(db_id, slot, 9, ChunkRecord(LOCAL, 5, 0))]).result()
        local.bodies[ArtifactKey(db_id, ArtifactKind.BASE, slot, 9)] = b"stray"
        local.write(ArtifactKey(db_id, ArtifactKind.BASE, slot, 9))
    drop(local, db_id)
    local.settle()
    assert not is_known(local, db_id)
    local.assert_settled()


def test_the_page_index_of_a_dropped_database_goes_in_pieces(local: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two pieces all rules of the manifest hold: a store that is closed there must open again."""
    monkeypatch.setattr(delete_module, "STEP_PAGE_ROWS", 4)
    db_id = local.database()
    rows = [ROW.pack(page, 0, lsn, 0, 7, 1, 1, 0, 0) for page in (1, 2, 3) for lsn in (1, 2, 3)]
    local.manifest.submit([PublishPages(db_id, b"".join(rows))]).result()
    drop(local, db_id)
    pieces = []

    def look(_: str) -> None:
        assert local.manifest.check() == []
        with local.manifest.read() as txn:
            pieces.append(len(list(txn.raw_scan(t.PAGE_VERSION_INDEX, db_id))))

    with armed("jobs.delete.published", look):
        local.settle()
    assert pieces == [5, 1, 0]
    assert not is_known(local, db_id)


def test_what_an_abandoned_checkpoint_of_a_dropped_database_wrote_goes_too(local: World) -> None:
    """P10: its objects have names that only the stored plan knows."""
    db_id = local.database()
    local.chunks(db_id, 1)
    job_id = local.manifest.jobs.enqueue(JobKind.CHECKPOINT, db_id)
    job = _claimed(local, job_id)
    plan = PlanRecord(job_id, job.record.attempt, 1, 8, b"digest", artifacts=[(1, 0, False), (2, 0, False)])
    local.manifest.submit([BeginPlan(db_id, 2, plan)]).result()
    for slot in (1, 2):
        open_store(local.objects_url).put(object_key(ArtifactKey(db_id, ArtifactKind.BASE, slot, 2)), b"half done")
    drop(local, db_id)
    local.worker.drain()
    local.clock.advance(GRACE_SECONDS)
    local.worker.drain()
    assert is_known(local, db_id), "somebody may still be at it"
    local.manifest.jobs.cancel(job_id)
    local.settle()
    assert not is_known(local, db_id)
    local.assert_settled()


def test_an_empty_database_goes_at_once(local: World) -> None:
    db_id = local.database()
    drop(local, db_id)
    local.worker.drain()
    assert not is_known(local, db_id)


def test_a_database_with_an_outstanding_job_keeps_its_tombstone_and_nobody_spins(local: World) -> None:
    """Its removal is refused as long as the gate is held; the delete job must neither spin nor be enqueued for ever."""
    db_id = local.database()
    local.chunks(db_id, 1)
    held = local.manifest.jobs.enqueue(JobKind.CHECKPOINT, db_id, delay_seconds=86_400)
    drop(local, db_id)
    for _ in range(6):
        local.upkeep.run_once()
        local.clock.advance(120)
    assert not local.artifacts()
    assert is_known(local, db_id)
    assert len([job for job in local.manifest.jobs.jobs() if job.kind is JobKind.DELETE]) == 1
    local.manifest.jobs.cancel(held)
    local.settle()
    assert not is_known(local, db_id)


def test_many_artifacts_go_in_bounded_steps(local: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delete_module, "STEP_ARTIFACTS", 4)
    monkeypatch.setattr(delete_module, "STEP_LEAVES", 1)
    db_id = local.database()
    for _ in range(2):
        local.chunks(db_id, 1, 300, *range(512, 517))
    steps: list[int] = []
    with armed("jobs.delete.published", lambda _: steps.append(len(local.artifacts()))):
        local.settle()
    assert len(steps) >= 2
    drop(local, db_id)
    local.settle()
    assert not local.artifacts()
    local.assert_settled()
