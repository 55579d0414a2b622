"""Moves of artifacts whose copies are damaged, and moves that are abandoned halfway."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from quire.core.ids import ArtifactKey
from quire.durable.checksums import crc64, sha256
from quire.durable.failpoints import armed
from quire.jobs.handler import update
from quire.jobs.residency import request_evict, request_hydrate, request_upload
from quire.manifest.records import JobKind, JobState, Residency, VerifyState
from quire.objects.api import ObjectStore, PutResult
from quire.objects.open import open_store
from tests.jobs.job_store import BOTH, EVICTED, LOCAL, JobStore, altered

REQUESTS = {JobKind.UPLOAD: request_upload, JobKind.EVICT: request_evict, JobKind.HYDRATE: request_hydrate}


# ── damage ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_missing_file_is_not_uploaded(local_store: JobStore) -> None:
    local_store.is_damaged = True
    (key,) = local_store.chunks(local_store.database(), 1)
    os.remove(local_store.location(key).local)
    assert "a file that the catalog lists is missing" in local_store.fail(request_upload(local_store.manifest, key))


@pytest.mark.parametrize("length", [99, 101])
def test_a_file_of_another_size_is_not_uploaded(local_store: JobStore, length: int) -> None:
    local_store.is_damaged = True
    (key,) = local_store.chunks(local_store.database(), 1)
    Path(local_store.location(key).local).write_bytes(bytes(length))
    assert f"it has {length} bytes instead of 100" in local_store.fail(request_upload(local_store.manifest, key))
    assert local_store.object(key) is None


def test_bytes_with_a_wrong_checksum_are_not_uploaded(local_store: JobStore) -> None:
    local_store.is_damaged = True
    db_id = local_store.database()
    segment = local_store.segment(db_id, crc64=1)
    assert "crc64" in local_store.fail(request_upload(local_store.manifest, segment))
    (key,) = local_store.chunks(db_id, 1)
    local_store.manifest.submit([update(key, sha256=sha256(b"other"))]).result()
    assert "sha256" in local_store.fail(request_upload(local_store.manifest, key))
    assert local_store.object(key) is None


def test_a_good_crc64_is_accepted(local_store: JobStore) -> None:
    key = local_store.segment(local_store.database(), 80, crc64=crc64(bytes(80)))
    local_store.bodies[key] = bytes(80)
    local_store.write(key)
    local_store.succeed(request_upload(local_store.manifest, key))
    local_store.succeed(request_evict(local_store.manifest, key))
    local_store.succeed(request_hydrate(local_store.manifest, key))


def test_without_its_object_a_file_is_not_evicted(job_store: JobStore) -> None:
    key = job_store.artifact(BOTH)
    location = job_store.location(key)
    open_store(location.url).delete(location.object_key)
    assert "ObjectNotFound" in job_store.fail(request_evict(job_store.manifest, key))
    open_store(location.url).put(location.object_key, b"short")
    assert "5 bytes instead of 100" in job_store.fail(request_evict(job_store.manifest, key))
    assert job_store.row(key).residency is BOTH
    assert job_store.file(key) == job_store.bodies[key]
    open_store(location.url).put(location.object_key, job_store.bodies[key])


def test_a_damaged_object_is_not_hydrated(job_store: JobStore) -> None:
    key = job_store.artifact(EVICTED)
    location = job_store.location(key)
    for damaged in (altered(job_store.bodies[key]), job_store.bodies[key][:-1], job_store.bodies[key] + b"x"):
        open_store(location.url).put(location.object_key, damaged)
        assert "ChecksumMismatch" in job_store.fail(request_hydrate(job_store.manifest, key))
        assert job_store.row(key).residency is EVICTED
        assert job_store.files() == set()
    open_store(location.url).delete(location.object_key)
    assert "ObjectNotFound" in job_store.fail(request_hydrate(job_store.manifest, key))
    open_store(location.url).put(location.object_key, job_store.bodies[key])


def record_verify_state(job_store: JobStore, key: ArtifactKey, state: VerifyState) -> None:
    """Record the state that a verification found."""
    job_store.manifest.submit([update(key, verify_state=state, verified_at_ms=1)]).result()


def test_a_missing_object_is_repaired_by_an_upload(job_store: JobStore) -> None:
    key = job_store.artifact(BOTH)
    location = job_store.location(key)
    open_store(location.url).delete(location.object_key)
    record_verify_state(job_store, key, VerifyState.MISSING)
    assert job_store.succeed(request_upload(job_store.manifest, key)) == {"moved_bytes": 100}
    assert job_store.row(key).verify_state is VerifyState.UNVERIFIED
    job_store.assert_settled()


@pytest.mark.parametrize("state", [VerifyState.MISSING, VerifyState.ALTERED])
def test_a_damaged_file_is_repaired_by_a_hydration(local_store: JobStore, state: VerifyState) -> None:
    key = local_store.artifact(BOTH)
    if state is VerifyState.MISSING:
        os.remove(local_store.location(key).local)
    else:
        Path(local_store.location(key).local).write_bytes(altered(local_store.bodies[key]))
    record_verify_state(local_store, key, state)
    assert local_store.succeed(request_hydrate(local_store.manifest, key)) == {"moved_bytes": 100}
    assert local_store.row(key).verify_state is VerifyState.UNVERIFIED
    local_store.assert_settled()


def test_a_damaged_object_never_replaces_a_good_file(job_store: JobStore) -> None:
    """The object has the right size, so only its bytes reveal the damage."""
    key = job_store.artifact(BOTH)
    location = job_store.location(key)
    open_store(location.url).put(location.object_key, altered(job_store.bodies[key]))
    record_verify_state(job_store, key, VerifyState.ALTERED)
    assert job_store.succeed(request_hydrate(job_store.manifest, key)) == {"moved_bytes": 0}
    assert job_store.row(key).verify_state is VerifyState.ALTERED, "a good file proves nothing about the object"
    assert "ChecksumMismatch" in job_store.fail(request_evict(job_store.manifest, key))
    assert "a different object" in job_store.fail(request_upload(job_store.manifest, key))
    assert job_store.file(key) == job_store.bodies[key]
    open_store(location.url).delete(location.object_key)
    assert job_store.succeed(request_upload(job_store.manifest, key)) == {"moved_bytes": 100}
    job_store.assert_settled()


def test_if_it_is_unknown_which_copy_is_good_neither_is_removed(local_store: JobStore) -> None:
    local_store.is_damaged = True
    key = local_store.artifact(BOTH)
    Path(local_store.location(key).local).write_bytes(altered(local_store.bodies[key]))
    record_verify_state(local_store, key, VerifyState.ALTERED)
    local_store.manifest.submit([update(key, sha256=b"")]).result()
    for request in (request_evict, request_hydrate):
        assert "no digest says which copy is good" in local_store.fail(request(local_store.manifest, key))
    assert "a different object" in local_store.fail(request_upload(local_store.manifest, key))
    assert local_store.object(key) == local_store.bodies[key]


def test_a_damaged_object_without_a_file_is_reported(local_store: JobStore) -> None:
    key = local_store.artifact(EVICTED)
    record_verify_state(local_store, key, VerifyState.ALTERED)
    assert "no file to upload again" in local_store.fail(request_upload(local_store.manifest, key))


def test_a_suspect_file_is_evicted_if_every_byte_of_the_object_is_good(local_store: JobStore) -> None:
    key = local_store.artifact(BOTH)
    Path(local_store.location(key).local).write_bytes(b"garbage")
    record_verify_state(local_store, key, VerifyState.ALTERED)
    local_store.succeed(request_evict(local_store.manifest, key))
    assert local_store.row(key).residency is EVICTED
    local_store.assert_settled()


# ── abandoned halfway ─────────────────────────────────────────────────────────────────────────────────────────────────
def cancelled_at(job_store: JobStore, point: str, kind: JobKind, key: ArtifactKey) -> int:
    """A job that is cancelled during a step, and whose handler continues regardless."""
    job_id = REQUESTS[kind](job_store.manifest, key)
    with armed(point, lambda _: job_store.manifest.jobs.cancel(job_id)):
        job_store.worker.drain()
    assert job_store.job(job_id).state is JobState.CANCELLED
    return job_id


@pytest.mark.parametrize("point", ["announced", "hashed", "sent", "checked"])
def test_a_cancelled_upload_changes_no_row_and_its_object_is_deleted_with_the_artifact(
    local_store: JobStore, point: str
) -> None:
    (key,) = local_store.chunks(local_store.database(), 1)
    cancelled_at(local_store, f"jobs.upload.{point}", JobKind.UPLOAD, key)
    assert local_store.row(key).residency is LOCAL
    assert local_store.object(key) == local_store.bodies[key], "the handler could not notice the cancellation"
    local_store.assert_sound()
    local_store.manifest.drop_db(key.origin_db_id).result()
    local_store.settle()
    local_store.assert_settled()


def test_after_a_cancelled_upload_the_next_one_uses_the_same_name(local_store: JobStore) -> None:
    """The database's namespace may have changed meanwhile; the object that was sent must not be forgotten."""
    (key,) = local_store.chunks(local_store.database(), 1)
    cancelled_at(local_store, "jobs.upload.sent", JobKind.UPLOAD, key)
    assert local_store.succeed(request_upload(local_store.manifest, key)) == {"moved_bytes": 0}
    local_store.assert_settled()


def test_a_cancelled_eviction_leaves_a_file_that_the_next_one_or_the_deletion_removes(local_store: JobStore) -> None:
    for end in ("evict", "drop"):
        key = local_store.artifact(BOTH)
        job_id = request_evict(local_store.manifest, key)
        with armed("jobs.evict.published", "raise:EIO"):
            local_store.worker.drain()
        local_store.manifest.jobs.cancel(job_id)
        assert local_store.row(key).residency is EVICTED
        assert local_store.file(key) is not None
        if end == "evict":
            local_store.succeed(request_evict(local_store.manifest, key))
            assert local_store.file(key) is None
        else:
            local_store.manifest.drop_db(key.origin_db_id).result()
            local_store.settle()
    local_store.assert_settled()


def test_a_cancelled_eviction_commits_nothing(local_store: JobStore) -> None:
    """It lost its job between the check and the commit; a commit would undo the work of its successor."""
    key = local_store.artifact(BOTH)
    cancelled_at(local_store, "jobs.evict.checked", JobKind.EVICT, key)
    assert local_store.row(key).residency is BOTH
    assert local_store.file(key) == local_store.bodies[key]
    local_store.assert_settled()


@pytest.mark.parametrize("point", ["begun", "staged", "renamed", "named"])
def test_leftovers_of_a_cancelled_hydration_are_deleted_with_the_artifact(local_store: JobStore, point: str) -> None:
    key = local_store.artifact(EVICTED)
    job_id = request_hydrate(local_store.manifest, key)
    with armed(f"jobs.hydrate.{point}", "raise:EIO"):
        local_store.worker.drain()
    local_store.manifest.jobs.cancel(job_id)
    assert local_store.row(key).residency is EVICTED
    assert local_store.files(), "the hydration had written a file"
    local_store.assert_sound()
    local_store.manifest.drop_db(key.origin_db_id).result()
    local_store.settle()
    local_store.assert_settled()


def test_a_hydration_adopts_an_existing_file(local_store: JobStore) -> None:
    key = local_store.artifact(EVICTED)
    job_id = request_hydrate(local_store.manifest, key)
    with armed("jobs.hydrate.named", "raise:EIO"):
        local_store.worker.drain()
    local_store.clock.advance(10)
    assert local_store.succeed(job_id) == {"moved_bytes": 0}
    local_store.assert_settled()


class DelayedStore:
    """An object store whose transfers return after another event."""

    def __init__(self, inner: ObjectStore, before_return: Callable[[], None]) -> None:
        self._inner = inner
        self._before_return = before_return

    def put_file(self, key: str, path: str, **options: Any) -> PutResult:
        data = Path(path).read_bytes()
        self._before_return()
        return self._inner.put(key, data, **options)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        data = self._inner.get_range(key, offset, length)
        self._before_return()
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize(("kind", "start"), [(JobKind.UPLOAD, LOCAL), (JobKind.HYDRATE, EVICTED)])
def test_copies_that_a_zombie_makes_after_the_deletion_are_removed(
    local_store: JobStore, kind: JobKind, start: Residency
) -> None:
    """A handler that lost its job long ago finishes its copy after the artifact has been deleted."""
    key = local_store.artifact(start)
    job_id = REQUESTS[kind](local_store.manifest, key)

    def delete_artifact() -> None:
        if local_store.job(job_id).state is JobState.IN_FLIGHT:
            local_store.manifest.jobs.cancel(job_id)
            local_store.manifest.drop_db(key.origin_db_id).result()
            other_worker = local_store.worker_of()
            for _ in range(3):
                other_worker.drain()
                local_store.clock.advance(120)
            assert local_store.row(key) is None

    local_store.stores.close()
    local_store.opener = lambda url: cast(ObjectStore, DelayedStore(open_store(url), delete_artifact))
    local_store.worker.drain()
    assert local_store.job(job_id).state is JobState.CANCELLED
    local_store.settle()
    local_store.assert_settled()


def test_two_moves_of_one_artifact_never_overlap(local_store: JobStore) -> None:
    """An abandoned eviction removes a file late: not the one that a hydration has fetched meanwhile."""
    key = local_store.artifact(BOTH)
    reached, resume = threading.Event(), threading.Event()

    def wait_once(_: str) -> None:
        reached.set()
        assert resume.wait(30)

    evict = request_evict(local_store.manifest, key)
    with armed("jobs.evict.published", wait_once):
        evicting = threading.Thread(target=local_store.worker.drain)
        evicting.start()
        assert reached.wait(30)
    local_store.manifest.jobs.cancel(evict)
    hydrate = request_hydrate(local_store.manifest, key)
    other = local_store.worker_of()
    other.drain()
    assert local_store.job(hydrate).state is JobState.PENDING, "it waits for the abandoned eviction"
    resume.set()
    evicting.join()
    local_store.clock.advance(5)
    other.drain()
    assert local_store.job(hydrate).state is JobState.SUCCEEDED
    assert local_store.row(key).residency is BOTH
    local_store.assert_settled()
