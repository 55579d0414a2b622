"""Upload, evict, hydrate: each move, when it is repeated, refused or repaired."""

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
from tests.jobs.job_store import ARCHIVED, BOTH, EVICTED, LOCAL, JobStore, altered, epoch_name

REQUESTS = {JobKind.UPLOAD: request_upload, JobKind.EVICT: request_evict, JobKind.HYDRATE: request_hydrate}
GOALS = {JobKind.UPLOAD: BOTH, JobKind.EVICT: EVICTED, JobKind.HYDRATE: BOTH}


# ── the moves ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_upload_creates_the_object_and_records_its_digest(job_store: JobStore) -> None:
    (key,) = job_store.chunks(job_store.database(), 7)
    job_store.clock.advance(5)
    result = job_store.succeed(request_upload(job_store.manifest, key))
    row, data = job_store.row(key), job_store.bodies[key]
    assert result == {"moved_bytes": len(data)}
    assert (row.residency, row.sha256) == (BOTH, sha256(data))
    assert row.uploaded_at_ms == job_store.clock.now_ms()
    assert (row.namespace_id, row.suffix) == (1, object_key(key))
    assert row.verify_state is VerifyState.UNVERIFIED
    assert job_store.object(key) == job_store.file(key) == data
    job_store.assert_settled()


def test_an_eviction_removes_the_file_and_a_hydration_restores_it(job_store: JobStore) -> None:
    key = job_store.artifact(BOTH)
    assert job_store.succeed(request_evict(job_store.manifest, key)) == {"moved_bytes": 100}
    assert job_store.row(key).residency is EVICTED
    assert job_store.file(key) is None
    job_store.assert_settled()
    assert job_store.succeed(request_hydrate(job_store.manifest, key)) == {"moved_bytes": 100}
    assert job_store.row(key).residency is BOTH
    assert job_store.file(key) == job_store.bodies[key]
    job_store.assert_settled()


def test_chunks_written_remotely_by_a_checkpoint_are_hydrated_too(job_store: JobStore) -> None:
    key = job_store.artifact(ARCHIVED)
    assert job_store.succeed(request_hydrate(job_store.manifest, key)) == {"moved_bytes": 100}
    assert job_store.row(key).residency is BOTH
    job_store.assert_settled()


def test_moves_are_in_the_audit(local_store: JobStore) -> None:
    key = local_store.artifact(EVICTED)
    local_store.succeed(request_hydrate(local_store.manifest, key))
    actions = [entry.action for entry in local_store.manifest.audit(key.origin_db_id)]
    assert actions == [AuditAction.UPLOADED, AuditAction.EVICTED, AuditAction.HYDRATED]


def test_deltas_and_segments_move_like_chunks(job_store: JobStore) -> None:
    db_id = job_store.database()
    job_store.chunks(db_id, 1)
    for key in (*job_store.deltas(db_id, 1), job_store.segment(db_id)):
        for request in (request_upload, request_evict, request_hydrate):
            job_store.succeed(request(job_store.manifest, key))
        assert job_store.row(key).residency is BOTH
        assert job_store.file(key) == job_store.object(key) == job_store.bodies[key]
    job_store.assert_settled()


def test_only_the_used_part_of_a_preallocated_segment_is_uploaded(job_store: JobStore) -> None:
    db_id = job_store.database()
    key = job_store.segment(db_id, 80, file_bytes=4096)
    assert job_store.succeed(request_upload(job_store.manifest, key)) == {"moved_bytes": 80}
    assert job_store.object(key) == job_store.bodies[key]
    assert job_store.row(key).sha256 == sha256(job_store.bodies[key])
    job_store.succeed(request_evict(job_store.manifest, key))
    job_store.succeed(request_hydrate(job_store.manifest, key))
    assert job_store.file(key) == job_store.bodies[key]


def test_large_files_move_in_steps(local_store: JobStore) -> None:
    (key,) = local_store.chunks(local_store.database(), 1, size=STEP_BYTES + 17)
    local_store.succeed(request_upload(local_store.manifest, key))
    local_store.succeed(request_evict(local_store.manifest, key))
    local_store.succeed(request_hydrate(local_store.manifest, key))
    assert local_store.file(key) == local_store.object(key) == local_store.bodies[key]


def test_empty_artifacts_move_too(job_store: JobStore) -> None:
    (key,) = job_store.chunks(job_store.database(), 1, size=0)
    for request in (request_upload, request_evict, request_hydrate):
        job_store.succeed(request(job_store.manifest, key))
    assert job_store.file(key) == job_store.object(key) == b""
    job_store.assert_settled()


def test_an_object_goes_to_the_namespace_of_its_row_or_of_its_database(job_store: JobStore) -> None:
    bucket = "memory://elsewhere-" + os.path.basename(job_store.objects_url)
    first_namespace = job_store.manifest.put_namespace(bucket, "mine")
    second_namespace = job_store.manifest.put_namespace(bucket, "other")
    db_id = job_store.database(namespace_id=first_namespace)
    first, second = job_store.chunks(db_id, 1)[0], job_store.chunks(db_id, 2, namespace_id=second_namespace)[0]
    for key, prefix, namespace_id in ((first, "mine", first_namespace), (second, "other", second_namespace)):
        job_store.succeed(request_upload(job_store.manifest, key))
        with job_store.manifest.read() as txn:
            key_prefix, epoch = f"{prefix}/{txn.store_id()}/e/00000001", txn.current_namespace(namespace_id)[0]
        assert open_store(bucket).get(f"{key_prefix}/{object_key(key)}") == job_store.bodies[key]
        assert job_store.row(key).namespace_id == epoch != namespace_id
        job_store.succeed(request_evict(job_store.manifest, key))
        job_store.succeed(request_hydrate(job_store.manifest, key))
    job_store.settle()  # nothing refers to the second namespace any more, only its namespace of this epoch
    job_store.assert_settled(bucket)


# ── repeated ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("start", [LOCAL, BOTH, ARCHIVED, EVICTED], ids=lambda residency: residency.name)
def test_every_move_from_every_residency(local_store: JobStore, kind: JobKind, start: Residency) -> None:
    """A goal that is already reached is a success without work; only evicting what has no object is impossible."""
    key = local_store.artifact(start)
    job_id = REQUESTS[kind](local_store.manifest, key)
    if (kind, start) == (JobKind.EVICT, LOCAL):
        assert "evicting it would lose it" in local_store.fail(job_id)
        assert local_store.row(key).residency is LOCAL
        local_store.assert_settled()
        return
    moved = local_store.succeed(job_id)["moved_bytes"]
    reached = local_store.row(key).residency
    without_work = {
        JobKind.UPLOAD: (BOTH, ARCHIVED, EVICTED),
        JobKind.EVICT: (ARCHIVED, EVICTED),
        JobKind.HYDRATE: (LOCAL, BOTH),
    }
    if start in without_work[kind]:
        assert (moved, reached) == (0, start)
    else:
        assert (moved, reached) == (100, GOALS[kind])
    local_store.assert_settled()
    again = REQUESTS[kind](local_store.manifest, key)
    assert local_store.succeed(again) == {"moved_bytes": 0}
    assert local_store.row(key).residency is reached


def test_an_upload_adopts_the_object_of_a_put_whose_response_was_lost(job_store: JobStore) -> None:
    """P11: the put succeeded, but its response was lost."""
    (key,) = job_store.chunks(job_store.database(), 1)
    open_store(job_store.objects_url).put(epoch_name(job_store.manifest, key), job_store.bodies[key])
    assert job_store.succeed(request_upload(job_store.manifest, key)) == {"moved_bytes": 0}
    assert job_store.row(key).residency is BOTH


@pytest.mark.parametrize("size", [100, 99])
def test_an_upload_overwrites_no_other_object(job_store: JobStore, size: int) -> None:
    (key,) = job_store.chunks(job_store.database(), 1)
    open_store(job_store.objects_url).put(epoch_name(job_store.manifest, key), altered(job_store.bodies[key])[:size])
    assert "a different object" in job_store.fail(request_upload(job_store.manifest, key))
    assert job_store.row(key).residency is LOCAL
    assert job_store.object(key) == altered(job_store.bodies[key])[:size]


def test_an_eviction_waits_for_an_upload_enqueued_before_it(local_store: JobStore) -> None:
    (key,) = local_store.chunks(local_store.database(), 1)
    local_store.clock.advance(1)
    upload = local_store.manifest.jobs.enqueue(JobKind.UPLOAD, key.origin_db_id, artifact=key, delay_seconds=3)
    evict = request_evict(local_store.manifest, key)
    local_store.worker.drain()
    assert local_store.job(evict).state is JobState.PENDING
    assert local_store.job(evict).record.failures == 0
    local_store.clock.advance(5)
    local_store.succeed(upload)
    local_store.clock.advance(5)
    local_store.succeed(evict)
    assert local_store.row(key).residency is EVICTED
    local_store.assert_settled()


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_requests_for_artifacts_without_bytes_are_refused(local_store: JobStore) -> None:
    db_id = local_store.database()
    local_store.chunks(db_id, 1)
    for request in REQUESTS.values():
        with pytest.raises(InvalidInput):
            request(local_store.manifest, ArtifactKey(db_id, ArtifactKind.LEAF, 0, 1))
        with pytest.raises(UnknownArtifact):
            request(local_store.manifest, ArtifactKey(db_id, ArtifactKind.BASE, 1, 99))


def test_a_fork_s_row_of_an_inherited_segment_is_not_an_artifact(local_store: JobStore) -> None:
    db_id = local_store.database()
    segment = local_store.segment(db_id)
    fork = local_store.manifest.snapshots.fork(db_id, "fork")
    with pytest.raises(UnknownArtifact):
        request_upload(local_store.manifest, ArtifactKey(fork, ArtifactKind.WAL, segment.id, 0))
    with local_store.manifest.read() as txn:
        assert local_store.ctx.place(txn, ArtifactKey(fork, ArtifactKind.WAL, segment.id, 0)) is None


def test_requests_for_artifacts_being_deleted_are_refused(local_store: JobStore) -> None:
    key = local_store.artifact(LOCAL)
    local_store.manifest.drop_db(key.origin_db_id).result()
    local_store.worker.drain()  # the leaf is deleted at once, and releases the chunk
    with pytest.raises(ArtifactGone):
        request_upload(local_store.manifest, key)


def test_a_segment_that_is_still_written_is_not_uploaded(local_store: JobStore) -> None:
    db_id = local_store.database()
    local_store.manifest.submit([OpenSegment(db_id, 1, WalFormat.PAGER, 4096, b"salt", 1)]).result()
    key = ArtifactKey(db_id, ArtifactKind.WAL, 1, 0)
    Path(local_store.location(key).local).parent.mkdir(parents=True)
    Path(local_store.location(key).local).write_bytes(bytes(4096))
    assert "sealed" in local_store.fail(request_upload(local_store.manifest, key))
    assert not local_store.location(key).is_announced


def test_jobs_with_bad_payloads_fail_permanently(local_store: JobStore) -> None:
    (key,) = local_store.chunks(local_store.database(), 1)
    enqueue = local_store.manifest.jobs.enqueue
    for kind, payload in (
        (JobKind.UPLOAD, {"bitmap_hash": 7}),
        (JobKind.UPLOAD, [1]),
        (JobKind.EVICT, {"force": True}),
        (JobKind.HYDRATE, 7),
    ):
        assert "InvalidInput" in local_store.fail(enqueue(kind, key.origin_db_id, payload, artifact=key))
    for kind in REQUESTS:
        assert "names no artifact" in local_store.fail(enqueue(kind, key.origin_db_id))
    assert local_store.row(key).residency is LOCAL
