"""Verifying a whole store, a bit at a time: oldest first, within its time, what was seen is not looked at again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.core.errors import ObjectStoreUnavailable
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.limits import GIB, MIB
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
from tests.jobs.test_verify import ask, damage
from tests.jobs.world import ARCHIVED, BOTH, LOCAL, World
from tests.pages.world import Model, write


def fill(world: World) -> list[ArtifactKey]:
    """Artifacts of two databases, of all residencies."""
    return [world.artifact(residency) for residency in (LOCAL, BOTH, ARCHIVED)] + [world.segment(1)]


def times(world: World, keys: list[ArtifactKey]) -> list[int]:
    return [world.row(key).verified_at_ms for key in keys]


def test_everything_is_looked_at_once(world: World) -> None:
    keys = fill(world)
    result = world.done(ask(world))
    assert (result["verified"], result["missing"], result["altered"], result["left"]) == (4, 0, 0, 0)
    assert result["complete"]
    assert result["bytes"] == sum(world.place(key).size_bytes for key in keys)
    assert {world.row(key).verify_state for key in keys} == {VerifyState.VERIFIED}


def test_damage_of_any_tier_is_found_and_named(world: World) -> None:
    local, both, archived, segment = fill(world)
    damage(world, local, "file", "truncated")
    damage(world, both, "object", "missing")
    damage(world, archived, "object", "truncated")
    result = world.done(ask(world))
    assert (result["verified"], result["missing"], result["altered"]) == (1, 1, 2)
    assert len(result["damaged"]) == 3
    assert world.row(segment).verify_state is VerifyState.VERIFIED


def test_what_is_younger_than_the_age_is_left_alone(world: World) -> None:
    keys = fill(world)
    world.done(ask(world))
    before = times(world, keys)
    world.clock.advance(3_600)
    later = world.artifact(LOCAL)
    result = world.done(ask(world, max_age_seconds=7_200.0))
    assert result["verified"] == 1, "only what was never verified"
    assert times(world, keys) == before
    assert world.row(later).verified_at_ms
    world.clock.advance(3_700)
    assert world.done(ask(world, max_age_seconds=7_200.0))["verified"] == len(keys)


def test_when_its_time_is_over_the_next_one_goes_on_with_the_oldest(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "WAVE_BYTES", 1)
    keys = fill(world)
    real = verify_module.describe_artifacts

    def slow(*arguments: Any) -> Any:
        world.clock.advance(10)
        return real(*arguments)

    monkeypatch.setattr(verify_module, "describe_artifacts", slow)
    result = world.done(ask(world, max_duration_seconds=15.0))
    assert (result["verified"], result["left"], result["complete"]) == (2, 2, False)
    seen = {key for key in keys if world.row(key).verified_at_ms}
    world.done(ask(world, max_age_seconds=1e6, max_duration_seconds=15.0))
    assert len([key for key in keys if world.row(key).verified_at_ms]) == 4
    assert len(seen) == 2


def test_an_object_store_that_does_not_answer_fails_the_attempt_and_nothing_is_called_missing(
    local: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = fill(local)

    def refuse(*_: object, **__: object) -> Any:
        raise ObjectStoreUnavailable("it does not answer", hint="wait")

    store: ObjectStore = local.stores(local.objects_url)
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "head", refuse)
        job_id = ask(local)
        local.worker.drain()
    job = local.job(job_id)
    assert job.state is JobState.PENDING
    assert "ObjectStoreUnavailable" in job.record.error
    assert {local.row(key).verify_state for key in keys} == {VerifyState.UNVERIFIED, VerifyState.VERIFIED}
    local.clock.advance(100)
    assert local.done(job_id)["unreadable"] == 0


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
def test_a_wave_is_cut_into_few_tasks_and_cores_are_done_at_the_same_time(
    sizes: list[int], width: int, weights: list[int]
) -> None:
    place = ArtifactLocation(
        key=ArtifactKey(1, ArtifactKind.BASE, 0, 1), residency=ARCHIVED, local="", url="", object_key="", size_bytes=0,
        sha256=b"",
    )  # fmt: skip
    wave = [(replace(place, size_bytes=size), number) for number, size in enumerate(sizes)]
    made = verify_module.tasks(wave, width)
    assert sorted(bitmap for task in made for bitmap in task.bitmaps) == list(range(len(sizes))), "each once"
    assert all(wave[bitmap][0] is place for task in made for place, bitmap in zip(task.places, task.bitmaps))
    assert [sum(each.size_bytes for each in task.places) for task in made] == weights


class Elsewhere(ThreadRunner):
    """Threads that see no file of the store."""

    shares_disk = False


def test_files_are_looked_at_here_where_executors_do_not_see_them(local: World) -> None:
    keys = fill(local)
    asked: list[ArtifactKey] = []
    real = run_task

    def told(task: Any, tools: Any) -> Any:
        asked.extend(place.key for place in task.places)
        return real(task, tools)

    class Far(Elsewhere):
        def map(self, run: Any, tasks: Any, **more: Any) -> Any:
            return super().map(told, tasks, **more)

    made = local.ctx.thread_runner()
    far = Far(made._tools, 1)
    job_id = ask(local)

    Worker(replace(local.ctx, runners=Runners(lambda: far, "spark")), {JobKind.VERIFY: verify_job}).drain()
    assert local.job(job_id).result["verified"] == 4
    assert asked == [keys[2]], "only what has no file"


def test_a_bitmap_that_its_row_does_not_describe_is_found(tmp_path: Any) -> None:
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
