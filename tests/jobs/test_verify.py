"""Verification: what is missing, altered or truncated is found, wherever it is, and what was verified is written down."""

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
from quire.jobs.verify.run import ArtifactFinding, VerifyTask, verify
from quire.manifest.ops.wal import OpenSegment
from quire.manifest.records import AuditAction, JobKind, JobState, Residency, VerifyState, WalFormat
from quire.objects.api import ObjectStore
from quire.objects.open import open_store
from tests.jobs.world import ARCHIVED, BOTH, EVICTED, LOCAL, World, unlike

VERIFIED, MISSING, ALTERED = VerifyState.VERIFIED, VerifyState.MISSING, VerifyState.ALTERED


def damage(world: World, key: ArtifactKey, copy: str, how: str) -> None:
    """Do something to the file or the object of an artifact."""
    world.is_damaged = True
    place, data = world.place(key), world.bodies[key]
    bad = {"missing": None, "altered": unlike(data), "truncated": data[:-1], "longer": data + b"x", "empty": b""}[how]
    store = open_store(place.url)
    if copy == "file" and bad is None:
        os.remove(place.local)
    elif copy == "file":
        Path(place.local).write_bytes(bad or b"")
    elif bad is None:
        store.delete(place.object_key)
    else:
        store.put(place.object_key, bad)


def ask(world: World, **payload: Any) -> int:
    return world.manifest.jobs.enqueue(JobKind.VERIFY, 0, {"scope": "store", **payload})


def finding(world: World, key: ArtifactKey) -> ArtifactFinding:
    """What looking at one artifact gives."""
    (found,) = verify(VerifyTask((world.place(key),)), disk=world.ctx.disk, open_store=world.ctx.open_store)
    return found


def states(world: World, *keys: ArtifactKey) -> list[VerifyState]:
    return [world.row(key).verify_state for key in keys]


# ── one artifact ──────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("residency", [LOCAL, BOTH, ARCHIVED, EVICTED], ids=lambda residency: residency.name)
def test_a_good_artifact_is_verified_and_the_moment_recorded(world: World, residency: Residency) -> None:
    key = world.artifact(residency)
    world.clock.advance(77)
    assert world.done(ask(world))["verified"] == 1
    row = world.row(key)
    assert (row.verify_state, row.verified_at_ms) == (VERIFIED, world.clock.now_ms())
    assert row.sha256 == sha256(world.bodies[key]), "if it was not known it is now"
    assert row.residency is residency
    world.assert_settled()


@pytest.mark.parametrize("how", ["missing", "altered", "truncated", "longer", "empty"])
@pytest.mark.parametrize(
    ("residency", "copy"), [(LOCAL, "file"), (BOTH, "file"), (BOTH, "object"), (EVICTED, "object")]
)
def test_damage_is_found_wherever_it_is(local: World, residency: Residency, copy: str, how: str) -> None:
    key = local.artifact(residency)
    local.done(ask(local))
    damage(local, key, copy, how)
    local.clock.advance(1)
    result = local.done(ask(local))
    expected = MISSING if how == "missing" else ALTERED
    assert result[expected.name.lower()] == 1
    assert [copy in problem for problem in finding(local, key).problems] == [True]
    assert local.row(key).verify_state is expected
    assert local.row(key).sha256 == sha256(local.bodies[key]), "what was known is not unlearned"
    assert local.manifest.audit(key.origin_db_id)[-1].action is AuditAction.FOUND_DAMAGED


def test_what_was_repaired_is_verified_again(local: World) -> None:
    key = local.artifact(BOTH)
    damage(local, key, "object", "missing")
    local.done(ask(local))
    assert states(local, key) == [MISSING]
    local.done(request_upload(local.manifest, key))
    local.clock.advance(1)
    local.done(ask(local))
    assert states(local, key) == [VERIFIED]
    local.is_damaged = False


def test_a_segment_is_compared_by_its_crc64_and_may_be_preallocated(local: World) -> None:
    db_id = local.database()
    key = local.segment(db_id, file_bytes=4096)
    local.done(ask(local))
    assert states(local, key) == [VERIFIED]
    local.bodies[wrong := local.segment(db_id, crc64=crc64(b"?"))] = b""
    local.is_damaged = True
    local.clock.advance(1)
    assert "crc64" in finding(local, wrong).problems[0]
    assert local.done(ask(local))["altered"] == 1
    data = local.bodies[key]
    Path(local.place(key).local).write_bytes(unlike(data).ljust(4096, b"\0"))
    local.clock.advance(1)
    assert local.done(ask(local))["altered"] == 2


def test_copies_that_differ_are_both_suspect_if_no_digest_says_which_is_right(local: World) -> None:
    key = local.artifact(BOTH)
    local.manifest.submit([update(key, sha256=b"")]).result()
    damage(local, key, "file", "altered")
    result = local.done(ask(local))
    assert result["altered"] == 1
    assert "no digest says which" in finding(local, key).problems[0]
    assert local.row(key).sha256 == b"", "nothing is learned from bad copies"


def test_anything_but_the_whole_store_is_refused(local: World) -> None:
    db_id, enqueue = local.database(), local.manifest.jobs.enqueue
    assert "covers the whole store" in local.failed(enqueue(JobKind.VERIFY, db_id))
    assert "scope" in local.failed(enqueue(JobKind.VERIFY, 0, {"scope": "everything"}))
    assert "payload" in local.failed(enqueue(JobKind.VERIFY, 0, {"scope": 1}))


# ── all of them ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_result_counts_and_names_what_is_damaged(local: World) -> None:
    keys = local.chunks(local.database(), 1, 2, 3)
    damage(local, keys[0], "file", "missing")
    damage(local, keys[2], "file", "truncated")
    result = local.done(ask(local))
    assert (result["verified"], result["missing"], result["altered"]) == (1, 1, 1)
    assert result["damaged"] == [f"{object_key(keys[0])} MISSING", f"{object_key(keys[2])} ALTERED"]


def test_what_was_verified_longest_ago_comes_first(local: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "WAVE_BYTES", 1)
    keys = local.chunks(local.database(), 1, 2, 3, 4)
    for moment, key in ((30, keys[0]), (10, keys[2]), (20, keys[3])):
        local.manifest.submit([update(key, verified_at_ms=moment)]).result()
    order: list[ArtifactKey] = []

    def look(_: str) -> None:
        done = {key for key in keys if local.row(key).verified_at_ms > 1_000}
        order.extend(done - set(order))

    with armed("jobs.verify.published", look):
        local.done(ask(local))
    assert order == [keys[1], keys[2], keys[3], keys[0]], "never verified, then the oldest"


def test_an_interrupted_verification_repeats_only_what_was_not_committed(
    local: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "WAVE_ARTIFACTS", 2)
    keys = local.chunks(local.database(), *range(6))
    job_id = ask(local)
    looked: list[str] = []
    with armed("jobs.verify.published", "1*off->raise:EIO"), armed("jobs.verify.looked", looked.append):
        local.worker.drain()
        local.clock.advance(5)
    with armed("jobs.verify.looked", looked.append):
        assert local.done(job_id)["complete"]
    assert len(looked) == 6
    assert set(states(local, *keys)) == {VERIFIED}


def test_a_new_verification_looks_at_everything_again(local: World) -> None:
    local.chunks(local.database(), 1, 2)
    for _ in range(2):
        looked: list[str] = []
        local.clock.advance(1)
        with armed("jobs.verify.looked", looked.append):
            local.done(ask(local))
        assert len(looked) == 2


def test_a_clock_that_goes_back_does_not_make_it_endless(local: World) -> None:
    local.chunks(local.database(), 1, 2)
    job_id = ask(local)
    before = local.clock.now_ms()
    local.clock.jump(-3600)
    assert local.done(job_id)["verified"] == 2
    local.clock.jump(3600)
    assert local.job(job_id).record.created_at_ms == before


def test_what_comes_after_the_request_is_not_its_business(local: World) -> None:
    db_id = local.database()
    local.chunks(db_id, 1)
    job_id = ask(local)
    local.clock.advance(1)
    (new,) = local.chunks(db_id, 2)
    local.segment(db_id)
    local.manifest.submit([OpenSegment(db_id, 9, WalFormat.PAGER, 4096, b"salt", 9)]).result()
    assert local.done(job_id)["verified"] == 1
    assert states(local, new) == [VerifyState.UNVERIFIED]
    local.is_damaged = True  # the open segment has no file


def test_what_is_being_deleted_is_left_alone(local: World) -> None:
    db_id = local.database()
    (old,) = local.chunks(db_id, 1)
    local.chunks(db_id, 1)
    os.remove(local.place(old).local)  # as the delete job does before the row goes
    result = local.done(ask(local))
    assert (result["verified"], result["missing"], result["altered"], result["damaged"]) == (1, 0, 0, [])


def test_an_artifact_that_is_evicted_meanwhile_is_not_called_missing(local: World) -> None:
    key = local.artifact(BOTH)
    job_id = ask(local)
    once = iter([True])

    def evict(_: str) -> None:
        if next(once, False):
            request_evict(local.manifest, key)
            local.worker_of().drain()

    with armed("jobs.verify.looked", evict):
        local.worker.drain()
    assert local.row(key).residency is EVICTED
    local.clock.advance(5)
    assert local.done(job_id)["verified"] == 1
    local.assert_settled()


class Eventful(OsDisk):
    """A disk on which something happens before a file is opened."""

    def __init__(self, *events: Callable[[], None]) -> None:
        self._events = iter(events)

    def open(self, path: str, **more: bool) -> OsFile:
        next(self._events, lambda: None)()
        return super().open(path, **more)


def test_a_verdict_on_what_was_moved_under_the_second_look_too_does_not_count(local: World) -> None:
    key = local.artifact(BOTH)
    path = Path(local.place(key).local)
    job_id = ask(local)
    mover = local.worker_of()

    def away() -> None:
        path.rename(path.with_suffix(".away"))

    def evict() -> None:
        path.with_suffix(".away").rename(path)
        request_evict(local.manifest, key)
        mover.drain()

    local.ctx = replace(local.ctx, disk=Eventful(away, evict))
    local.worker_of().drain()
    assert local.row(key).residency is EVICTED
    assert states(local, key) == [VerifyState.UNVERIFIED], "it was called missing, and it is not"
    assert local.job(job_id).result["missing"] == 0
    assert local.done(ask(local))["verified"] == 1
    local.assert_settled()


def test_bytes_garbled_on_their_way_are_read_again(local: World) -> None:
    """The second look decides."""
    key = local.artifact(BOTH)
    path, data = Path(local.place(key).local), local.bodies[key]
    path.write_bytes(unlike(data))
    once = iter([True])

    def restore(_: str) -> None:
        if next(once, False):
            path.write_bytes(data)

    with armed("jobs.verify.looked", restore):
        assert local.done(ask(local))["verified"] == 1


def test_a_bucket_that_does_not_answer_keeps_nothing_else_from_being_verified(local: World) -> None:
    bucket = f"memory://mute-{id(local)}"
    space = local.manifest.put_namespace(bucket)
    db_id = local.database()
    far = local.chunks(db_id, *range(5), residency=ARCHIVED, namespace_id=space)
    near = local.chunks(db_id, 8, 9)
    asked: list[str] = []

    def opener(url: str) -> ObjectStore:
        asked.append(url)
        if url == bucket:
            raise ObjectStoreUnavailable("no answer", store=url)
        return open_store(url)

    local.opener = opener
    job_id = ask(local)
    local.worker.drain()
    assert states(local, *near) == [VERIFIED] * 2
    assert states(local, *far) == [VerifyState.UNVERIFIED] * 5
    job = local.job(job_id)
    assert (job.state, job.record.failures) == (JobState.PENDING, 1)
    assert "no answer" in job.record.error
    assert asked.count(bucket) == 1, "once, not for each artifact"
    local.opener = open_store
    local.clock.advance(5)
    assert local.done(job_id)["verified"] == 5, "the others were recorded"
    assert states(local, *near, *far) == [VERIFIED] * 7


def test_an_empty_store_is_verified_at_once(local: World) -> None:
    local.database()
    assert local.done(ask(local))["verified"] == 0
