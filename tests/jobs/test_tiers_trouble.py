"""Moves of artifacts whose copies are damaged, and moves that are given up half-way."""

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
from tests.jobs.world import BOTH, EVICTED, LOCAL, World, unlike

REQUESTS = {JobKind.UPLOAD: request_upload, JobKind.EVICT: request_evict, JobKind.HYDRATE: request_hydrate}


# ── damage ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_file_that_is_not_there_is_not_uploaded(local: World) -> None:
    local.is_damaged = True
    (key,) = local.chunks(local.database(), 1)
    os.remove(local.place(key).local)
    assert "a file that the catalog lists is missing" in local.failed(request_upload(local.manifest, key))


@pytest.mark.parametrize("length", [99, 101])
def test_a_file_of_another_size_is_not_uploaded(local: World, length: int) -> None:
    local.is_damaged = True
    (key,) = local.chunks(local.database(), 1)
    Path(local.place(key).local).write_bytes(bytes(length))
    assert f"it has {length} bytes instead of 100" in local.failed(request_upload(local.manifest, key))
    assert local.object(key) is None


def test_bytes_that_are_not_the_recorded_ones_are_not_uploaded(local: World) -> None:
    local.is_damaged = True
    db_id = local.database()
    segment = local.segment(db_id, crc64=1)
    assert "crc64" in local.failed(request_upload(local.manifest, segment))
    (key,) = local.chunks(db_id, 1)
    local.manifest.submit([update(key, sha256=sha256(b"other"))]).result()
    assert "sha256" in local.failed(request_upload(local.manifest, key))
    assert local.object(key) is None


def test_a_good_crc64_is_accepted(local: World) -> None:
    key = local.segment(local.database(), 80, crc64=crc64(bytes(80)))
    local.bodies[key] = bytes(80)
    local.write(key)
    local.done(request_upload(local.manifest, key))
    local.done(request_evict(local.manifest, key))
    local.done(request_hydrate(local.manifest, key))


def test_without_its_object_a_file_is_not_evicted(world: World) -> None:
    key = world.artifact(BOTH)
    place = world.place(key)
    open_store(place.url).delete(place.object_key)
    assert "ObjectNotFound" in world.failed(request_evict(world.manifest, key))
    open_store(place.url).put(place.object_key, b"short")
    assert "5 bytes instead of 100" in world.failed(request_evict(world.manifest, key))
    assert world.row(key).residency is BOTH
    assert world.file(key) == world.bodies[key]
    open_store(place.url).put(place.object_key, world.bodies[key])


def test_a_damaged_object_is_not_hydrated(world: World) -> None:
    key = world.artifact(EVICTED)
    place = world.place(key)
    for bad in (unlike(world.bodies[key]), world.bodies[key][:-1], world.bodies[key] + b"x"):
        open_store(place.url).put(place.object_key, bad)
        assert "ChecksumMismatch" in world.failed(request_hydrate(world.manifest, key))
        assert world.row(key).residency is EVICTED
        assert world.files() == set()
    open_store(place.url).delete(place.object_key)
    assert "ObjectNotFound" in world.failed(request_hydrate(world.manifest, key))
    open_store(place.url).put(place.object_key, world.bodies[key])


def found(world: World, key: ArtifactKey, state: VerifyState) -> None:
    """A verification has come to this."""
    world.manifest.submit([update(key, verify_state=state, verified_at_ms=1)]).result()


def test_a_missing_object_is_repaired_by_an_upload(world: World) -> None:
    key = world.artifact(BOTH)
    place = world.place(key)
    open_store(place.url).delete(place.object_key)
    found(world, key, VerifyState.MISSING)
    assert world.done(request_upload(world.manifest, key)) == {"moved_bytes": 100}
    assert world.row(key).verify_state is VerifyState.UNVERIFIED
    world.assert_settled()


@pytest.mark.parametrize("state", [VerifyState.MISSING, VerifyState.ALTERED])
def test_a_damaged_file_is_repaired_by_a_hydration(local: World, state: VerifyState) -> None:
    key = local.artifact(BOTH)
    if state is VerifyState.MISSING:
        os.remove(local.place(key).local)
    else:
        Path(local.place(key).local).write_bytes(unlike(local.bodies[key]))
    found(local, key, state)
    assert local.done(request_hydrate(local.manifest, key)) == {"moved_bytes": 100}
    assert local.row(key).verify_state is VerifyState.UNVERIFIED
    local.assert_settled()


def test_a_damaged_object_never_replaces_a_good_file(world: World) -> None:
    """The object has the right size, so that only its bytes tell."""
    key = world.artifact(BOTH)
    place = world.place(key)
    open_store(place.url).put(place.object_key, unlike(world.bodies[key]))
    found(world, key, VerifyState.ALTERED)
    assert world.done(request_hydrate(world.manifest, key)) == {"moved_bytes": 0}
    assert world.row(key).verify_state is VerifyState.ALTERED, "that the file is good says nothing about the object"
    assert "ChecksumMismatch" in world.failed(request_evict(world.manifest, key))
    assert "a different object" in world.failed(request_upload(world.manifest, key))
    assert world.file(key) == world.bodies[key]
    open_store(place.url).delete(place.object_key)
    assert world.done(request_upload(world.manifest, key)) == {"moved_bytes": 100}
    world.assert_settled()


def test_where_nobody_knows_which_copy_is_good_neither_goes(local: World) -> None:
    local.is_damaged = True
    key = local.artifact(BOTH)
    Path(local.place(key).local).write_bytes(unlike(local.bodies[key]))
    found(local, key, VerifyState.ALTERED)
    local.manifest.submit([update(key, sha256=b"")]).result()
    for request in (request_evict, request_hydrate):
        assert "no digest says which copy is good" in local.failed(request(local.manifest, key))
    assert "a different object" in local.failed(request_upload(local.manifest, key))
    assert local.object(key) == local.bodies[key]


def test_a_damaged_object_without_a_file_is_said_aloud(local: World) -> None:
    key = local.artifact(EVICTED)
    found(local, key, VerifyState.ALTERED)
    assert "no file to upload again" in local.failed(request_upload(local.manifest, key))


def test_a_suspect_file_is_evicted_if_every_byte_of_the_object_is_good(local: World) -> None:
    key = local.artifact(BOTH)
    Path(local.place(key).local).write_bytes(b"garbage")
    found(local, key, VerifyState.ALTERED)
    local.done(request_evict(local.manifest, key))
    assert local.row(key).residency is EVICTED
    local.assert_settled()


# ── given up half-way ─────────────────────────────────────────────────────────────────────────────────────────────────
def cancelled_at(world: World, point: str, kind: JobKind, key: ArtifactKey) -> int:
    """A job that is cancelled while it is at a step, and whose handler goes on regardless."""
    job_id = REQUESTS[kind](world.manifest, key)
    with armed(point, lambda _: world.manifest.jobs.cancel(job_id)):
        world.worker.drain()
    assert world.job(job_id).state is JobState.CANCELLED
    return job_id


@pytest.mark.parametrize("point", ["announced", "hashed", "sent", "checked"])
def test_a_cancelled_upload_changes_no_row_and_its_object_goes_with_the_artifact(local: World, point: str) -> None:
    (key,) = local.chunks(local.database(), 1)
    cancelled_at(local, f"jobs.upload.{point}", JobKind.UPLOAD, key)
    assert local.row(key).residency is LOCAL
    assert local.object(key) == local.bodies[key], "the handler had no way to notice"
    local.assert_sound()
    local.manifest.drop_db(key.origin_db_id).result()
    local.settle()
    local.assert_settled()


def test_after_a_cancelled_upload_the_next_one_goes_to_the_same_name(local: World) -> None:
    """A database's namespace may be another by then; the object that was sent must not be forgotten."""
    (key,) = local.chunks(local.database(), 1)
    cancelled_at(local, "jobs.upload.sent", JobKind.UPLOAD, key)
    assert local.done(request_upload(local.manifest, key)) == {"moved_bytes": 0}
    local.assert_settled()


def test_a_cancelled_eviction_leaves_a_file_that_the_next_one_or_the_deletion_removes(local: World) -> None:
    for end in ("evict", "drop"):
        key = local.artifact(BOTH)
        job_id = request_evict(local.manifest, key)
        with armed("jobs.evict.published", "raise:EIO"):
            local.worker.drain()
        local.manifest.jobs.cancel(job_id)
        assert local.row(key).residency is EVICTED
        assert local.file(key) is not None
        if end == "evict":
            local.done(request_evict(local.manifest, key))
            assert local.file(key) is None
        else:
            local.manifest.drop_db(key.origin_db_id).result()
            local.settle()
    local.assert_settled()


def test_a_cancelled_eviction_commits_nothing_any_more(local: World) -> None:
    """It lost its job between the check and the commit; committing then would undo whatever its successor did."""
    key = local.artifact(BOTH)
    cancelled_at(local, "jobs.evict.checked", JobKind.EVICT, key)
    assert local.row(key).residency is BOTH
    assert local.file(key) == local.bodies[key]
    local.assert_settled()


@pytest.mark.parametrize("point", ["begun", "staged", "renamed", "named"])
def test_what_a_cancelled_hydration_leaves_goes_with_the_artifact(local: World, point: str) -> None:
    key = local.artifact(EVICTED)
    job_id = request_hydrate(local.manifest, key)
    with armed(f"jobs.hydrate.{point}", "raise:EIO"):
        local.worker.drain()
    local.manifest.jobs.cancel(job_id)
    assert local.row(key).residency is EVICTED
    assert local.files(), "it had got somewhere"
    local.assert_sound()
    local.manifest.drop_db(key.origin_db_id).result()
    local.settle()
    local.assert_settled()


def test_a_hydration_adopts_the_file_that_is_there(local: World) -> None:
    key = local.artifact(EVICTED)
    job_id = request_hydrate(local.manifest, key)
    with armed("jobs.hydrate.named", "raise:EIO"):
        local.worker.drain()
    local.clock.advance(10)
    assert local.done(job_id) == {"moved_bytes": 0}
    local.assert_settled()


class Late:
    """An object store whose transfers end after something else has happened."""

    def __init__(self, inner: ObjectStore, happen: Callable[[], None]) -> None:
        self._inner = inner
        self._happen = happen

    def put_file(self, key: str, path: str, **more: Any) -> PutResult:
        data = Path(path).read_bytes()
        self._happen()
        return self._inner.put(key, data, **more)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        data = self._inner.get_range(key, offset, length)
        self._happen()
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize(("kind", "start"), [(JobKind.UPLOAD, LOCAL), (JobKind.HYDRATE, EVICTED)])
def test_what_a_zombie_makes_after_the_deletion_goes_again(local: World, kind: JobKind, start: Residency) -> None:
    """A handler that lost its job a long time ago finishes its copy when the artifact has been deleted."""
    key = local.artifact(start)
    job_id = REQUESTS[kind](local.manifest, key)

    def bury() -> None:
        if local.job(job_id).state is JobState.IN_FLIGHT:
            local.manifest.jobs.cancel(job_id)
            local.manifest.drop_db(key.origin_db_id).result()
            undertaker = local.worker_of()
            for _ in range(3):
                undertaker.drain()
                local.clock.advance(120)
            assert local.row(key) is None

    local.stores.close()
    local.opener = lambda url: cast(ObjectStore, Late(open_store(url), bury))
    local.worker.drain()
    assert local.job(job_id).state is JobState.CANCELLED
    local.settle()
    local.assert_settled()


def test_two_moves_of_one_artifact_never_overlap(local: World) -> None:
    """An eviction that lost its job removes a file at last: not the one that a hydration has fetched meanwhile."""
    key = local.artifact(BOTH)
    reached, go_on = threading.Event(), threading.Event()

    def hold(_: str) -> None:
        reached.set()
        assert go_on.wait(30)

    evict = request_evict(local.manifest, key)
    with armed("jobs.evict.published", hold):
        slow = threading.Thread(target=local.worker.drain)
        slow.start()
        assert reached.wait(30)
    local.manifest.jobs.cancel(evict)
    hydrate = request_hydrate(local.manifest, key)
    other = local.worker_of()
    other.drain()
    assert local.job(hydrate).state is JobState.PENDING, "it waits for the one that was given up"
    go_on.set()
    slow.join()
    local.clock.advance(5)
    other.drain()
    assert local.job(hydrate).state is JobState.SUCCEEDED
    assert local.row(key).residency is BOTH
    local.assert_settled()
