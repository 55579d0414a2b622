"""Upload, evict, hydrate: each move, repeated, refused, repaired, given up half-way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.core.errors import ArtifactGone, InvalidInput, UnknownArtifact
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.checksums import sha256
from quire.durable.names import object_key
from quire.jobs.copies import STEP_BYTES
from quire.jobs.residency import request_evict, request_hydrate, request_upload
from quire.manifest.ops.wal import OpenSegment
from quire.manifest.records import AuditAction, JobKind, JobState, Residency, VerifyState, WalFormat
from quire.objects.open import open_store
from tests.jobs.world import ARCHIVED, BOTH, EVICTED, LOCAL, World, epoch_name, unlike

REQUESTS = {JobKind.UPLOAD: request_upload, JobKind.EVICT: request_evict, JobKind.HYDRATE: request_hydrate}
GOALS = {JobKind.UPLOAD: BOTH, JobKind.EVICT: EVICTED, JobKind.HYDRATE: BOTH}


# ── the moves ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_upload_makes_the_object_and_records_what_it_is(world: World) -> None:
    (key,) = world.chunks(world.database(), 7)
    world.clock.advance(5)
    result = world.done(request_upload(world.manifest, key))
    row, data = world.row(key), world.bodies[key]
    assert result == {"moved_bytes": len(data)}
    assert (row.residency, row.sha256) == (BOTH, sha256(data))
    assert row.uploaded_at_ms == world.clock.now_ms()
    assert (row.namespace_id, row.suffix) == (1, object_key(key))
    assert row.verify_state is VerifyState.UNVERIFIED
    assert world.object(key) == world.file(key) == data
    world.assert_settled()


def test_an_eviction_takes_the_file_and_a_hydration_brings_it_back(world: World) -> None:
    key = world.artifact(BOTH)
    assert world.done(request_evict(world.manifest, key)) == {"moved_bytes": 100}
    assert world.row(key).residency is EVICTED
    assert world.file(key) is None
    world.assert_settled()
    assert world.done(request_hydrate(world.manifest, key)) == {"moved_bytes": 100}
    assert world.row(key).residency is BOTH
    assert world.file(key) == world.bodies[key]
    world.assert_settled()


def test_what_was_archived_by_a_checkpoint_is_hydrated_too(world: World) -> None:
    key = world.artifact(ARCHIVED)
    assert world.done(request_hydrate(world.manifest, key)) == {"moved_bytes": 100}
    assert world.row(key).residency is BOTH
    world.assert_settled()


def test_moves_are_in_the_audit(local: World) -> None:
    key = local.artifact(EVICTED)
    local.done(request_hydrate(local.manifest, key))
    actions = [entry.action for entry in local.manifest.audit(key.origin_db_id)]
    assert actions == [AuditAction.UPLOADED, AuditAction.EVICTED, AuditAction.HYDRATED]


def test_deltas_and_segments_move_as_chunks_do(world: World) -> None:
    db_id = world.database()
    world.chunks(db_id, 1)
    for key in (*world.deltas(db_id, 1), world.segment(db_id)):
        for request in (request_upload, request_evict, request_hydrate):
            world.done(request(world.manifest, key))
        assert world.row(key).residency is BOTH
        assert world.file(key) == world.object(key) == world.bodies[key]
    world.assert_settled()


def test_of_a_preallocated_segment_only_what_is_used_is_uploaded(world: World) -> None:
    db_id = world.database()
    key = world.segment(db_id, 80, file_bytes=4096)
    assert world.done(request_upload(world.manifest, key)) == {"moved_bytes": 80}
    assert world.object(key) == world.bodies[key]
    assert world.row(key).sha256 == sha256(world.bodies[key])
    world.done(request_evict(world.manifest, key))
    world.done(request_hydrate(world.manifest, key))
    assert world.file(key) == world.bodies[key]


def test_large_files_move_in_steps(local: World) -> None:
    (key,) = local.chunks(local.database(), 1, size=STEP_BYTES + 17)
    local.done(request_upload(local.manifest, key))
    local.done(request_evict(local.manifest, key))
    local.done(request_hydrate(local.manifest, key))
    assert local.file(key) == local.object(key) == local.bodies[key]


def test_empty_artifacts_move_too(world: World) -> None:
    (key,) = world.chunks(world.database(), 1, size=0)
    for request in (request_upload, request_evict, request_hydrate):
        world.done(request(world.manifest, key))
    assert world.file(key) == world.object(key) == b""
    world.assert_settled()


def test_an_object_goes_to_the_namespace_of_its_row_or_of_its_database(world: World) -> None:
    bucket = "memory://elsewhere-" + os.path.basename(world.objects_url)
    mine = world.manifest.put_namespace(bucket, "mine")
    other = world.manifest.put_namespace(bucket, "other")
    db_id = world.database(namespace_id=mine)
    first, second = world.chunks(db_id, 1)[0], world.chunks(db_id, 2, namespace_id=other)[0]
    for key, prefix, namespace_id in ((first, "mine", mine), (second, "other", other)):
        world.done(request_upload(world.manifest, key))
        with world.manifest.read() as txn:
            below, epoch = f"{prefix}/{txn.store_id()}/e/00000001", txn.current_namespace(namespace_id)[0]
        assert open_store(bucket).get(f"{below}/{object_key(key)}") == world.bodies[key]
        assert world.row(key).namespace_id == epoch != namespace_id
        world.done(request_evict(world.manifest, key))
        world.done(request_hydrate(world.manifest, key))
    world.settle()  # nothing names the other place any more, only its namespace of this epoch
    world.assert_settled(bucket)


# ── again ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("start", [LOCAL, BOTH, ARCHIVED, EVICTED], ids=lambda residency: residency.name)
def test_every_move_from_every_residency(local: World, kind: JobKind, start: Residency) -> None:
    """A goal that is reached is a success without work; only evicting what has no object is impossible."""
    key = local.artifact(start)
    job_id = REQUESTS[kind](local.manifest, key)
    if (kind, start) == (JobKind.EVICT, LOCAL):
        assert "evicting it would lose it" in local.failed(job_id)
        assert local.row(key).residency is LOCAL
        local.assert_settled()
        return
    moved = local.done(job_id)["moved_bytes"]
    reached = local.row(key).residency
    without_work = {
        JobKind.UPLOAD: (BOTH, ARCHIVED, EVICTED),
        JobKind.EVICT: (ARCHIVED, EVICTED),
        JobKind.HYDRATE: (LOCAL, BOTH),
    }
    if start in without_work[kind]:
        assert (moved, reached) == (0, start)
    else:
        assert (moved, reached) == (100, GOALS[kind])
    local.assert_settled()
    again = REQUESTS[kind](local.manifest, key)
    assert local.done(again) == {"moved_bytes": 0}
    assert local.row(key).residency is reached


def test_an_upload_adopts_the_object_that_a_lost_answer_left(world: World) -> None:
    """P11: the put went through, nobody heard of it."""
    (key,) = world.chunks(world.database(), 1)
    open_store(world.objects_url).put(epoch_name(world.manifest, key), world.bodies[key])
    assert world.done(request_upload(world.manifest, key)) == {"moved_bytes": 0}
    assert world.row(key).residency is BOTH


@pytest.mark.parametrize("size", [100, 99])
def test_an_upload_overwrites_no_other_object(world: World, size: int) -> None:
    (key,) = world.chunks(world.database(), 1)
    open_store(world.objects_url).put(epoch_name(world.manifest, key), unlike(world.bodies[key])[:size])
    assert "a different object" in world.failed(request_upload(world.manifest, key))
    assert world.row(key).residency is LOCAL
    assert world.object(key) == unlike(world.bodies[key])[:size]


def test_an_eviction_waits_for_the_upload_that_was_asked_for_before(local: World) -> None:
    (key,) = local.chunks(local.database(), 1)
    local.clock.advance(1)
    upload = local.manifest.jobs.enqueue(JobKind.UPLOAD, key.origin_db_id, artifact=key, delay_seconds=3)
    evict = request_evict(local.manifest, key)
    local.worker.drain()
    assert local.job(evict).state is JobState.PENDING
    assert local.job(evict).record.failures == 0
    local.clock.advance(5)
    local.done(upload)
    local.clock.advance(5)
    local.done(evict)
    assert local.row(key).residency is EVICTED
    local.assert_settled()


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_what_has_no_bytes_is_refused_when_it_is_asked_for(local: World) -> None:
    db_id = local.database()
    local.chunks(db_id, 1)
    for request in REQUESTS.values():
        with pytest.raises(InvalidInput):
            request(local.manifest, ArtifactKey(db_id, ArtifactKind.LEAF, 0, 1))
        with pytest.raises(UnknownArtifact):
            request(local.manifest, ArtifactKey(db_id, ArtifactKind.BASE, 1, 99))


def test_a_fork_s_row_of_an_inherited_segment_is_not_an_artifact(local: World) -> None:
    db_id = local.database()
    segment = local.segment(db_id)
    fork = local.manifest.snapshots.fork(db_id, "fork")
    with pytest.raises(UnknownArtifact):
        request_upload(local.manifest, ArtifactKey(fork, ArtifactKind.WAL, segment.id, 0))
    with local.manifest.read() as txn:
        assert local.ctx.place(txn, ArtifactKey(fork, ArtifactKind.WAL, segment.id, 0)) is None


def test_what_is_being_deleted_is_refused(local: World) -> None:
    key = local.artifact(LOCAL)
    local.manifest.drop_db(key.origin_db_id).result()
    local.worker.drain()  # the leaf goes at once, and lets the chunk go
    with pytest.raises(ArtifactGone):
        request_upload(local.manifest, key)


def test_a_segment_that_is_still_written_is_not_uploaded(local: World) -> None:
    db_id = local.database()
    local.manifest.submit([OpenSegment(db_id, 1, WalFormat.PAGER, 4096, b"salt", 1)]).result()
    key = ArtifactKey(db_id, ArtifactKind.WAL, 1, 0)
    Path(local.place(key).local).parent.mkdir(parents=True)
    Path(local.place(key).local).write_bytes(bytes(4096))
    assert "sealed" in local.failed(request_upload(local.manifest, key))
    assert not local.place(key).is_announced


def test_jobs_with_bad_payloads_fail_for_good(local: World) -> None:
    (key,) = local.chunks(local.database(), 1)
    enqueue = local.manifest.jobs.enqueue
    for kind, payload in (
        (JobKind.UPLOAD, {"bitmap_hash": 7}),
        (JobKind.UPLOAD, [1]),
        (JobKind.EVICT, {"force": True}),
        (JobKind.HYDRATE, 7),
    ):
        assert "InvalidInput" in local.failed(enqueue(kind, key.origin_db_id, payload, artifact=key))
    for kind in REQUESTS:
        assert "names no artifact" in local.failed(enqueue(kind, key.origin_db_id))
    assert local.row(key).residency is LOCAL
