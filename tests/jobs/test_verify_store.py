"""Verification of a whole store in parts: oldest first, within its time limit, without repeating recent checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.core.errors import ObjectStoreUnavailable
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.limits import GIB, MIB
from quire.durable.failpoints import armed
from quire.jobs.locations import ArtifactLocation
from quire.jobs.runner import Runners, ThreadRunner
from quire.jobs.verify import job as verify_module
from quire.jobs.verify.job import verify_job
from quire.jobs.verify.run import run_task
from quire.jobs.worker import Worker
from quire.manifest.records import JobKind, JobState, VerifyState
from quire.manifest.verification import artifacts
from quire.objects.api import ObjectStore, list_objects
from quire.objects.open import open_store
from tests.jobs.checkpoint_child import Owner, images
from tests.jobs.job_store import ARCHIVED, BOTH, LOCAL, JobStore
from tests.jobs.test_verify import damage, request_verification
from tests.pages.engine_harness import Model, write


def fill(job_store: JobStore) -> list[ArtifactKey]:
    """Artifacts of two databases, of all residencies."""
    return [job_store.artifact(residency) for residency in (LOCAL, BOTH, ARCHIVED)] + [job_store.segment(1)]


def verified_times(job_store: JobStore, keys: list[ArtifactKey]) -> list[int]:
    return [job_store.row(key).verified_at_ms for key in keys]


def test_every_artifact_is_verified_once(job_store: JobStore) -> None:
    keys = fill(job_store)
    result = job_store.succeed(request_verification(job_store))
    assert (result["verified"], result["missing"], result["altered"], result["left"]) == (4, 0, 0, 0)
    assert result["complete"]
    assert result["bytes"] == sum(job_store.location(key).size_bytes for key in keys)
    assert {job_store.row(key).verify_state for key in keys} == {VerifyState.VERIFIED}


def test_damage_of_any_tier_is_found_and_reported(job_store: JobStore) -> None:
    local_store, both, archived, segment = fill(job_store)
    damage(job_store, local_store, "file", "truncated")
    damage(job_store, both, "object", "missing")
    damage(job_store, archived, "object", "truncated")
    result = job_store.succeed(request_verification(job_store))
    assert (result["verified"], result["missing"], result["altered"]) == (1, 1, 2)
    assert len(result["damaged"]) == 3
    assert job_store.row(segment).verify_state is VerifyState.VERIFIED


def test_recently_verified_artifacts_are_skipped(job_store: JobStore) -> None:
    keys = fill(job_store)
    job_store.succeed(request_verification(job_store))
    before = verified_times(job_store, keys)
    job_store.clock.advance(3_600)
    later = job_store.artifact(LOCAL)
    result = job_store.succeed(request_verification(job_store, max_age_seconds=7_200.0))
    assert result["verified"] == 1, "only what was never verified"
    assert verified_times(job_store, keys) == before
    assert job_store.row(later).verified_at_ms
    job_store.clock.advance(3_700)
    assert job_store.succeed(request_verification(job_store, max_age_seconds=7_200.0))["verified"] == len(keys)


def test_after_its_time_limit_the_next_job_continues_with_the_oldest(
    job_store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "WAVE_BYTES", 1)
    keys = fill(job_store)
    original = verify_module.describe_artifacts

    def slow(*arguments: Any) -> Any:
        job_store.clock.advance(10)
        return original(*arguments)

    monkeypatch.setattr(verify_module, "describe_artifacts", slow)
    result = job_store.succeed(request_verification(job_store, max_duration_seconds=15.0))
    assert (result["verified"], result["left"], result["complete"]) == (2, 2, False)
    verified_first = {key for key in keys if job_store.row(key).verified_at_ms}
    job_store.succeed(request_verification(job_store, max_age_seconds=1e6, max_duration_seconds=15.0))
    assert len([key for key in keys if job_store.row(key).verified_at_ms]) == 4
    assert len(verified_first) == 2


def test_an_artifact_deleted_during_the_run_leaves_the_verification_complete(
    job_store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: an artifact that was deleted between the plan and its wave counted as not verified, so that neither the manifest
    nor logs nor key-value tables were read, in every verification of a busy store."""
    monkeypatch.setattr(verify_module, "WAVE_ARTIFACTS", 1)
    db_id = job_store.database()
    job_store.chunks(db_id, 1, 2, 3)
    job_id = request_verification(job_store)
    first_call = iter([True])

    def replace_chunk(_: str) -> None:
        if next(first_call, False):
            job_store.clock.advance(1)
            job_store.chunks(db_id, 3)  # the old chunk is about to be deleted

    with armed("jobs.verify.looked", replace_chunk):
        result = job_store.succeed(job_id)
    assert (result["verified"], result["left"], result["complete"]) == (2, 0, True)
    assert result["kinds"]["manifest"]["files"] == 1


def test_more_artifacts_than_one_plan_holds_are_verified_in_one_job(
    job_store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: a verification without a time limit ended after the artifacts of its first plan, and never read the manifest,
    logs and key-value tables of a large store."""
    monkeypatch.setattr(verify_module, "PLANNED_MAX", 3)
    keys = fill(job_store)
    result = job_store.succeed(request_verification(job_store))
    assert (result["verified"], result["left"], result["complete"]) == (len(keys), 0, True)
    assert result["kinds"]["manifest"]["files"] == 1


def test_an_unavailable_object_store_fails_the_attempt_and_nothing_is_reported_missing(
    local_store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = fill(local_store)

    def refuse(*_: object, **__: object) -> Any:
        raise ObjectStoreUnavailable("it does not respond", hint="wait")

    store: ObjectStore = local_store.stores(local_store.objects_url)
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "head", refuse)
        job_id = request_verification(local_store)
        local_store.worker.drain()
    job = local_store.job(job_id)
    assert job.state is JobState.PENDING
    assert "ObjectStoreUnavailable" in job.record.error
    assert {local_store.row(key).verify_state for key in keys} == {VerifyState.UNVERIFIED, VerifyState.VERIFIED}
    local_store.clock.advance(100)
    assert local_store.succeed(job_id)["unreadable"] == 0


@pytest.mark.parametrize(
    ("sizes", "width", "weights"),
    [
        ([32 * MIB] * 32, 2, [512 * MIB] * 2),
        ([32 * MIB] * 128, 2, [992 * MIB] * 2 + [704 * MIB] * 2 + [352 * MIB] * 2),
        ([32 * MIB] * 32, 64, [128 * MIB] * 5 + [96 * MIB] * 4),
        ([MIB, 100 * MIB, 30 * MIB, 69 * MIB], 2, [100 * MIB] * 2),
        ([1] * 3_000, 4, [750] * 4),
        ([5 * GIB, 1, 1], 2, [5 * GIB, 2]),
        ([], 2, []),
    ],
)
def test_a_wave_is_split_into_few_balanced_tasks(sizes: list[int], width: int, weights: list[int]) -> None:
    location = ArtifactLocation(
        key=ArtifactKey(1, ArtifactKind.BASE, 0, 1), residency=ARCHIVED, local="", url="", object_key="", size_bytes=0,
        sha256=b"",
    )  # fmt: skip
    wave = [(replace(location, size_bytes=size), number) for number, size in enumerate(sizes)]
    tasks = verify_module.tasks(wave, width)
    assert sorted(bitmap for task in tasks for bitmap in task.bitmaps) == list(range(len(sizes))), (
        "each artifact is in one task"
    )
    assert all(wave[bitmap][0] is location for task in tasks for location, bitmap in zip(task.places, task.bitmaps))
    assert [sum(item.size_bytes for item in task.places) for task in tasks] == weights


class RemoteRunner(ThreadRunner):
    """Threads that cannot see the store's files."""

    shares_disk = False


def test_files_that_executors_cannot_see_are_verified_locally(local_store: JobStore) -> None:
    keys = fill(local_store)
    verified_keys: list[ArtifactKey] = []
    original = run_task

    def record_keys(task: Any, tools: Any) -> Any:
        verified_keys.extend(location.key for location in task.places)
        return original(task, tools)

    class RecordingRunner(RemoteRunner):
        def map(self, run: Any, tasks: Any, **options: Any) -> Any:
            return super().map(record_keys, tasks, **options)

    local_runner = local_store.ctx.thread_runner()
    remote_runner = RecordingRunner(local_runner._tools, 1)
    job_id = request_verification(local_store)

    Worker(
        replace(local_store.ctx, runners=Runners(lambda: remote_runner, "spark")), {JobKind.VERIFY: verify_job}
    ).drain()
    assert local_store.job(job_id).result["verified"] == 4
    assert verified_keys == [keys[2]], "only the artifact without a file"


def test_a_bitmap_that_differs_from_its_row_is_found(tmp_path: Any) -> None:
    from quire.jobs.handler import update
    from quire.manifest import tables as t

    owner = Owner(tmp_path)
    store, model = owner.database(), Model()
    write(store, model, images(*range(20)))
    owner.checkpoint(store)
    with owner.manifest.read() as txn:
        key, row = next((key, row) for key, row in artifacts(txn) if key.kind.name == "BASE")
        assert txn.get(t.CHUNK_CATALOG, key.origin_db_id, key.id, key.generation) == row
    owner.manifest.submit([update(key, bitmap_hash=row.bitmap_hash ^ 1)]).result()
    job_id = owner.manifest.jobs.enqueue(JobKind.VERIFY, 0, {"scope": "store"})
    owner.worker().drain()
    result = owner.job(job_id).result
    assert (result["altered"], result["missing"]) == (1, 0)
    name = result["damaged"][0].partition(" ")[0]
    assert any(info.key.endswith(name) for info in list_objects(open_store(owner.objects_url)))
    owner.stop(check=False)
