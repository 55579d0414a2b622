"""Verification: missing, altered and truncated copies are found in every tier, and what was verified is recorded."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import ObjectStoreUnavailable
from quire.core.ids import ArtifactKey
from quire.durable.checksums import crc64, sha256
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk, OsFile
from quire.durable.names import object_key
from quire.jobs.handler import update
from quire.jobs.residency import request_evict, request_upload
from quire.jobs.verify import job as verify_module
from quire.jobs.verify import run as verify_run
from quire.jobs.verify.run import ArtifactFinding, VerifyTask, verify
from quire.manifest.ops.wal import OpenSegment
from quire.manifest.records import AuditAction, JobKind, JobState, Residency, VerifyState, WalFormat
from quire.objects.api import ObjectStore
from quire.objects.open import open_store
from tests.jobs.job_store import ARCHIVED, BOTH, EVICTED, LOCAL, JobStore, altered

VERIFIED, MISSING, ALTERED = VerifyState.VERIFIED, VerifyState.MISSING, VerifyState.ALTERED


def damage(job_store: JobStore, key: ArtifactKey, copy: str, kind: str) -> None:
    """Damage the file or the object of an artifact."""
    job_store.is_damaged = True
    location, data = job_store.location(key), job_store.bodies[key]
    content = {"missing": None, "altered": altered(data), "truncated": data[:-1], "longer": data + b"x", "empty": b""}[
        kind
    ]
    store = open_store(location.url)
    if copy == "file" and content is None:
        os.remove(location.local)
    elif copy == "file":
        Path(location.local).write_bytes(content or b"")
    elif content is None:
        store.delete(location.object_key)
    else:
        store.put(location.object_key, content)


def request_verification(job_store: JobStore, **payload: Any) -> int:
    return job_store.manifest.jobs.enqueue(JobKind.VERIFY, 0, {"scope": "store", **payload})


def finding(job_store: JobStore, key: ArtifactKey) -> ArtifactFinding:
    """The finding of a verification of one artifact."""
    (artifact_finding,) = verify(
        VerifyTask((job_store.location(key),)), disk=job_store.ctx.disk, open_store=job_store.ctx.open_store
    )
    return artifact_finding


def states(job_store: JobStore, *keys: ArtifactKey) -> list[VerifyState]:
    return [job_store.row(key).verify_state for key in keys]


# ── one artifact ──────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("residency", [LOCAL, BOTH, ARCHIVED, EVICTED], ids=lambda residency: residency.name)
def test_a_good_artifact_is_verified_and_the_time_recorded(job_store: JobStore, residency: Residency) -> None:
    key = job_store.artifact(residency)
    job_store.clock.advance(77)
    assert job_store.succeed(request_verification(job_store))["verified"] == 1
    row = job_store.row(key)
    assert (row.verify_state, row.verified_at_ms) == (VERIFIED, job_store.clock.now_ms())
    assert row.sha256 == sha256(job_store.bodies[key]), "an unknown digest is recorded"
    assert row.residency is residency
    job_store.assert_settled()


@pytest.mark.parametrize("kind", ["missing", "altered", "truncated", "longer", "empty"])
@pytest.mark.parametrize(
    ("residency", "copy"), [(LOCAL, "file"), (BOTH, "file"), (BOTH, "object"), (EVICTED, "object")]
)
def test_damage_of_any_copy_is_found(local_store: JobStore, residency: Residency, copy: str, kind: str) -> None:
    key = local_store.artifact(residency)
    local_store.succeed(request_verification(local_store))
    damage(local_store, key, copy, kind)
    local_store.clock.advance(1)
    result = local_store.succeed(request_verification(local_store))
    expected = MISSING if kind == "missing" else ALTERED
    assert result[expected.name.lower()] == 1
    assert [copy in problem for problem in finding(local_store, key).problems] == [True]
    assert local_store.row(key).verify_state is expected
    assert local_store.row(key).sha256 == sha256(local_store.bodies[key]), "a known digest is kept"
    assert local_store.manifest.audit(key.origin_db_id)[-1].action is AuditAction.FOUND_DAMAGED


def test_a_repaired_artifact_is_verified_again(local_store: JobStore) -> None:
    key = local_store.artifact(BOTH)
    damage(local_store, key, "object", "missing")
    local_store.succeed(request_verification(local_store))
    assert states(local_store, key) == [MISSING]
    local_store.succeed(request_upload(local_store.manifest, key))
    local_store.clock.advance(1)
    local_store.succeed(request_verification(local_store))
    assert states(local_store, key) == [VERIFIED]
    local_store.is_damaged = False


def test_a_segment_is_compared_by_its_crc64_and_may_be_preallocated(local_store: JobStore) -> None:
    db_id = local_store.database()
    key = local_store.segment(db_id, file_bytes=4096)
    local_store.succeed(request_verification(local_store))
    assert states(local_store, key) == [VERIFIED]
    local_store.bodies[mismatched := local_store.segment(db_id, crc64=crc64(b"?"))] = b""
    local_store.is_damaged = True
    local_store.clock.advance(1)
    assert "crc64" in finding(local_store, mismatched).problems[0]
    assert local_store.succeed(request_verification(local_store))["altered"] == 1
    data = local_store.bodies[key]
    Path(local_store.location(key).local).write_bytes(altered(data).ljust(4096, b"\0"))
    local_store.clock.advance(1)
    assert local_store.succeed(request_verification(local_store))["altered"] == 2


def test_copies_that_differ_are_both_suspect_if_no_digest_says_which_is_right(local_store: JobStore) -> None:
    key = local_store.artifact(BOTH)
    local_store.manifest.submit([update(key, sha256=b"")]).result()
    damage(local_store, key, "file", "altered")
    result = local_store.succeed(request_verification(local_store))
    assert result["altered"] == 1
    assert "no digest says which" in finding(local_store, key).problems[0]
    assert local_store.row(key).sha256 == b"", "no digest is recorded from differing copies"


def test_anything_but_the_whole_store_is_refused(local_store: JobStore) -> None:
    db_id, enqueue = local_store.database(), local_store.manifest.jobs.enqueue
    assert "covers the whole store" in local_store.fail(enqueue(JobKind.VERIFY, db_id))
    assert "scope" in local_store.fail(enqueue(JobKind.VERIFY, 0, {"scope": "everything"}))
    assert "payload" in local_store.fail(enqueue(JobKind.VERIFY, 0, {"scope": 1}))


# ── all of them ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_result_counts_and_lists_damaged_artifacts(local_store: JobStore) -> None:
    keys = local_store.chunks(local_store.database(), 1, 2, 3)
    damage(local_store, keys[0], "file", "missing")
    damage(local_store, keys[2], "file", "truncated")
    result = local_store.succeed(request_verification(local_store))
    assert (result["verified"], result["missing"], result["altered"]) == (1, 1, 1)
    assert result["damaged"] == [f"{object_key(keys[0])} MISSING", f"{object_key(keys[2])} ALTERED"]


def test_the_least_recently_verified_artifacts_come_first(
    local_store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "WAVE_BYTES", 1)
    keys = local_store.chunks(local_store.database(), 1, 2, 3, 4)
    for verified_at, key in ((30, keys[0]), (10, keys[2]), (20, keys[3])):
        local_store.manifest.submit([update(key, verified_at_ms=verified_at)]).result()
    order: list[ArtifactKey] = []

    def record_order(_: str) -> None:
        verified = {key for key in keys if local_store.row(key).verified_at_ms > 1_000}
        order.extend(verified - set(order))

    with armed("jobs.verify.published", record_order):
        local_store.succeed(request_verification(local_store))
    assert order == [keys[1], keys[2], keys[3], keys[0]], "those never verified first, then the oldest"


def test_an_interrupted_verification_repeats_only_what_was_not_committed(
    local_store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "WAVE_ARTIFACTS", 2)
    keys = local_store.chunks(local_store.database(), *range(6))
    job_id = request_verification(local_store)
    steps: list[str] = []
    with armed("jobs.verify.published", "1*off->raise:EIO"), armed("jobs.verify.looked", steps.append):
        local_store.worker.drain()
        local_store.clock.advance(5)
    with armed("jobs.verify.looked", steps.append):
        assert local_store.succeed(job_id)["complete"]
    assert len(steps) == 6
    assert set(states(local_store, *keys)) == {VERIFIED}


def test_a_new_verification_checks_everything_again(local_store: JobStore) -> None:
    local_store.chunks(local_store.database(), 1, 2)
    for _ in range(2):
        steps: list[str] = []
        local_store.clock.advance(1)
        with armed("jobs.verify.looked", steps.append):
            local_store.succeed(request_verification(local_store))
        assert len(steps) == 2


def test_a_verification_ends_although_the_clock_goes_back(local_store: JobStore) -> None:
    local_store.chunks(local_store.database(), 1, 2)
    job_id = request_verification(local_store)
    before = local_store.clock.now_ms()
    local_store.clock.jump(-3600)
    assert local_store.succeed(job_id)["verified"] == 2
    local_store.clock.jump(3600)
    assert local_store.job(job_id).record.created_at_ms == before


def test_artifacts_created_after_the_request_are_not_verified(local_store: JobStore) -> None:
    db_id = local_store.database()
    local_store.chunks(db_id, 1)
    job_id = request_verification(local_store)
    local_store.clock.advance(1)
    (new,) = local_store.chunks(db_id, 2)
    local_store.segment(db_id)
    local_store.manifest.submit([OpenSegment(db_id, 9, WalFormat.PAGER, 4096, b"salt", 9)]).result()
    assert local_store.succeed(job_id)["verified"] == 1
    assert states(local_store, new) == [VerifyState.UNVERIFIED]
    local_store.is_damaged = True  # the open segment has no file


def test_artifacts_being_deleted_are_not_verified(local_store: JobStore) -> None:
    db_id = local_store.database()
    (old,) = local_store.chunks(db_id, 1)
    local_store.chunks(db_id, 1)
    os.remove(local_store.location(old).local)  # as the delete job does before it removes the row
    result = local_store.succeed(request_verification(local_store))
    assert (result["verified"], result["missing"], result["altered"], result["damaged"]) == (1, 0, 0, [])


def test_an_artifact_evicted_meanwhile_is_not_reported_missing(local_store: JobStore) -> None:
    key = local_store.artifact(BOTH)
    job_id = request_verification(local_store)
    first_call = iter([True])

    def evict(_: str) -> None:
        if next(first_call, False):
            request_evict(local_store.manifest, key)
            local_store.worker_of().drain()

    with armed("jobs.verify.looked", evict):
        local_store.worker.drain()
    assert local_store.row(key).residency is EVICTED
    local_store.clock.advance(5)
    assert local_store.succeed(job_id)["verified"] == 1
    local_store.assert_settled()


class EventDisk(OsDisk):
    """A disk that runs a callback before it opens a file."""

    def __init__(self, *events: Callable[[], None]) -> None:
        self._events = iter(events)

    def open(self, path: str, **options: bool) -> OsFile:
        next(self._events, lambda: None)()
        return super().open(path, **options)


@pytest.mark.parametrize("residency", [LOCAL, EVICTED])
def test_a_copy_that_is_removed_while_it_is_verified_is_missing(
    local_store: JobStore, monkeypatch: pytest.MonkeyPatch, residency: Residency
) -> None:
    """Hazard: a file that was evicted between its digest and the check of its page bitmap ended the whole attempt with
    `FileNotFoundError`; an object that was deleted then counted as unreadable, and ended it too."""
    monkeypatch.setattr(verify_run, "load_footer", lambda read, *_, **__: read(0, 1))
    key = local_store.artifact(residency)
    place, copy = local_store.location(key), "file" if residency is LOCAL else "object"
    task, context = VerifyTask((place,), bitmaps=(1,)), local_store.ctx
    with armed("jobs.verify.looked", lambda _: damage(local_store, key, copy, "missing")):
        (result,) = verify(task, disk=context.disk, open_store=context.open_store)
    assert (result.state, result.error) == (MISSING, None)


def test_a_verdict_on_an_artifact_moved_during_the_second_check_does_not_count(local_store: JobStore) -> None:
    key = local_store.artifact(BOTH)
    path = Path(local_store.location(key).local)
    job_id = request_verification(local_store)
    mover = local_store.worker_of()

    def hide_file() -> None:
        path.rename(path.with_suffix(".away"))

    def evict() -> None:
        path.with_suffix(".away").rename(path)
        request_evict(local_store.manifest, key)
        mover.drain()

    local_store.ctx = replace(local_store.ctx, disk=EventDisk(hide_file, evict))
    local_store.worker_of().drain()
    assert local_store.row(key).residency is EVICTED
    assert states(local_store, key) == [VERIFIED], "only the verdict on its present place counts"
    result = local_store.job(job_id).result
    assert (result["verified"], result["missing"], result["complete"]) == (1, 0, True)
    local_store.assert_settled()


def test_bytes_garbled_in_transit_are_read_again(local_store: JobStore) -> None:
    """The second check decides."""
    key = local_store.artifact(BOTH)
    path, data = Path(local_store.location(key).local), local_store.bodies[key]
    path.write_bytes(altered(data))
    first_call = iter([True])

    def restore(_: str) -> None:
        if next(first_call, False):
            path.write_bytes(data)

    with armed("jobs.verify.looked", restore):
        assert local_store.succeed(request_verification(local_store))["verified"] == 1


def test_an_unavailable_bucket_does_not_prevent_other_verifications(local_store: JobStore) -> None:
    bucket = f"memory://mute-{id(local_store)}"
    namespace_id = local_store.manifest.put_namespace(bucket)
    db_id = local_store.database()
    remote_keys = local_store.chunks(db_id, *range(5), residency=ARCHIVED, namespace_id=namespace_id)
    local_keys = local_store.chunks(db_id, 8, 9)
    opened_urls: list[str] = []

    def opener(url: str) -> ObjectStore:
        opened_urls.append(url)
        if url == bucket:
            raise ObjectStoreUnavailable("no response", store=url)
        return open_store(url)

    local_store.opener = opener
    job_id = request_verification(local_store)
    local_store.worker.drain()
    assert states(local_store, *local_keys) == [VERIFIED] * 2
    assert states(local_store, *remote_keys) == [VerifyState.UNVERIFIED] * 5
    job = local_store.job(job_id)
    assert (job.state, job.record.failures) == (JobState.PENDING, 1)
    assert "no response" in job.record.error
    assert opened_urls.count(bucket) == 1, "opened once, not once per artifact"
    local_store.opener = open_store
    local_store.clock.advance(5)
    assert local_store.succeed(job_id)["verified"] == 5, "the others were recorded before"
    assert states(local_store, *local_keys, *remote_keys) == [VERIFIED] * 7


def test_an_empty_store_is_verified_at_once(local_store: JobStore) -> None:
    local_store.database()
    assert local_store.succeed(request_verification(local_store))["verified"] == 0
