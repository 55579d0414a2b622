"""Sweeps: what no row speaks of is found and deleted, what somebody may be writing is spared, what is gone is told (O3)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import ObjectStoreUnavailable
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.failpoints import armed
from quire.durable.names import object_key
from quire.durable.object_names import manifest_log_key
from quire.jobs.sweep import job as sweep_module
from quire.jobs.sweep.job import sweep_job
from quire.jobs.sweep.run import Listed, ListTask, list_range
from quire.jobs.worker import Worker
from quire.manifest.namespaces import collector_of
from quire.manifest.records import JobKind, JobState
from quire.objects.api import TEMPORARY_SEGMENT
from quire.objects.open import open_store
from tests.jobs.checkpoint_child import Owner, images
from tests.pages.world import Model, write

HOUR = 3_600.0
BURNED = 2
"""A generation that nothing was published under: as a driver leaves it that died for good."""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    made = Owner(tmp_path)
    store, model = made.database(), Model()
    write(store, model, images(*range(80)))
    made.checkpoint(store)
    made.settle()
    assert made.manifest.reserve_generation(1) == BURNED
    yield made
    made.stop()


def sweep(owner: Owner, **payload: Any) -> dict[str, Any]:
    """Run a sweep now; its result. The test's clock stands still in 2025, files are of today: they count as old."""
    given = {"grace_seconds": -10 * 365 * 86_400.0, **payload}
    job_id = owner.manifest.jobs.enqueue(JobKind.SWEEP, 0, given)
    Worker(owner.context(), {JobKind.SWEEP: partial(sweep_job)}).drain()
    job = owner.job(job_id)
    assert job.state is JobState.SUCCEEDED, job.record.error
    result: dict[str, Any] = job.result
    return result


def put(owner: Owner, key: str, body: bytes = b"stray", place: str = "") -> str:
    """An object of this name in the current owner epoch, in the store's own place or one below that."""
    key = f"{place}{below(owner)}/{key}"
    open_store(owner.objects_url).put(key, body)
    return key


def below(owner: Owner) -> str:
    with owner.manifest.read() as txn:
        return txn.object_prefixes()[0]


def orphan(slot: int, generation: int = BURNED, db_id: int = 1) -> str:
    return object_key(ArtifactKey(db_id, ArtifactKind.BASE, slot, generation))


def test_a_clean_store_has_no_differences(owner: Owner) -> None:
    result = sweep(owner)
    assert (result["objects"], result["orphaned"], result["missing"], result["more"]) == (10, 0, [], False)
    assert result["bytes_listed"] > 0


@pytest.mark.parametrize("names", [1, 3, 100])
def test_orphans_anywhere_are_found_and_only_deleted_if_asked(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, names: int
) -> None:
    """Whatever the ranges: before the first name, between two, of a database that nobody knows, behind the last."""
    monkeypatch.setattr(sweep_module, "RANGE_NAMES", names)
    put_there = {put(owner, orphan(slot)) for slot in (0, 4, 9, 5_000)} | {put(owner, orphan(3, db_id=77))}
    before = owner.objects()
    result = sweep(owner)
    assert {each["object"] for each in result["orphans"]} == put_there
    assert (result["orphaned"], result["deleted"], result["bytes"]) == (5, 0, 25)
    assert owner.objects() == before
    result = sweep(owner, delete=True)
    assert result["deleted"] == 5
    assert owner.objects().keys() == before.keys() - put_there
    assert sweep(owner)["orphaned"] == 0


def test_what_is_no_artifact_or_too_young_or_of_the_future_is_left_alone(owner: Owner) -> None:
    foreign = [put(owner, "README"), put(owner, manifest_log_key(1, 0)), put(owner, "00000001/other/thing")]
    with owner.manifest.read() as txn:
        record = txn.database(1)
    assert record is not None
    future = put(owner, orphan(0, record.next_generation))
    young = put(owner, orphan(0))
    result = sweep(owner, delete=True, grace_seconds=HOUR)
    assert result["orphaned"] == 0
    result = sweep(owner, delete=True)
    assert [each["object"] for each in result["orphans"]] == [young]
    assert {*foreign, future} <= owner.objects().keys()


def test_what_crashed_puts_left_goes_if_it_is_old_and_deleting_was_asked_for(owner: Owner) -> None:
    staging = Path(owner.objects_url, TEMPORARY_SEGMENT)
    staging.mkdir(exist_ok=True)
    now_ms = time.time_ns() // 1_000_000
    old, young = staging / f"{now_ms - 86_400_000:x}-aa", staging / f"{now_ms:x}-bb"
    for path in (old, young):
        path.write_bytes(b"half of a body")
    assert sweep(owner)["staged"] == 0
    assert old.exists()
    assert sweep(owner, delete=True)["staged"] == 1
    assert not old.exists()
    assert young.exists()


def test_the_names_of_a_plan_that_runs_are_spared(owner: Owner) -> None:
    """The objects are there, the rows are not: a sweep in the middle of a checkpoint must not take them."""
    store, model = owner.database(), Model()
    write(store, model, images(*range(80)))
    owner.ask()
    seen: list[dict[str, Any]] = []

    def look(_: str) -> None:
        if not seen:
            seen.append({})  # the sweep hits points, too
            seen[0] = sweep(owner, delete=True)

    with armed("jobs.checkpoint.written", look):
        owner.worker(JobKind.CHECKPOINT).drain()
    assert seen[0]["objects"] == 20
    assert seen[0]["orphaned"] == 0
    with store.open_snapshot() as reader:
        assert reader.read_pages(range(80)) == dict(model.newest.pages)
    owner.settle()


def test_rows_that_are_made_while_it_lists_are_read_after_the_listing(owner: Owner) -> None:
    store, model = owner.database(), Model()

    def checkpoint(_: str) -> None:
        write(store, model, images(*range(8)))
        owner.ask()
        owner.worker(JobKind.CHECKPOINT).drain()

    with armed("jobs.sweep.listed", checkpoint):
        assert sweep(owner, delete=True)["orphaned"] == 0
    owner.settle()


def test_ranges_go_on_where_the_last_wave_ended_and_none_is_read_twice(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wave for each range, a range for each name and for groups of databases: the same is found, nothing is listed twice."""
    for name in ("blog", "more"):
        store = owner.database(name)
        write(store, Model(), images(*range(24)))
        owner.manifest.jobs.enqueue(JobKind.CHECKPOINT, store.db_id, None)
        owner.worker(JobKind.CHECKPOINT).drain()
    strays = {put(owner, orphan(slot)) for slot in (0, 5, 5_000)} | {put(owner, orphan(3, db_id=7))}
    kept = sorted(owner.objects().keys() - strays)
    gone = [kept[2], kept[-1]]
    for name in gone:
        os.rename(os.path.join(owner.objects_url, name), owner.base / name.replace("/", "-"))
    seen = []
    for waves, names, databases in ((256, 16_384, 256), (1, 1, 1), (2, 3, 2), (1, 2, 3)):
        monkeypatch.setattr(sweep_module, "WAVE_RANGES", waves)
        monkeypatch.setattr(sweep_module, "RANGE_NAMES", names)
        monkeypatch.setattr(sweep_module, "RANGE_DATABASES", databases)
        seen.append(sweep(owner))
    assert seen[0]["objects"] == len(kept) + len(strays) - len(gone)
    assert {each["object"] for each in seen[0]["orphans"]} == strays
    assert sorted(each["object"] for each in seen[0]["missing"]) == sorted(gone)
    assert all(each == seen[0] for each in seen)
    for name in gone:
        os.rename(owner.base / name.replace("/", "-"), os.path.join(owner.objects_url, name))


def test_other_peoples_names_are_counted_where_they_are_listed(owner: Owner) -> None:
    """They do not come to the driver: a bucket may have millions of them."""
    for number in range(20):
        put(owner, f"tables/{number:04}.sst")
    task = ListTask(url=owner.objects_url, prefix=below(owner))
    told = list(list_range(task, owner.context().thread_runner()._tools))
    assert len(told) == 10 + 1, "ten chunks, and how much there was"
    assert told[-1][1] == Listed(30, sweep(owner)["bytes_listed"])


def test_a_space_that_has_two_numbers_is_listed_once(owner: Owner) -> None:
    """And one below another is not taken for a part of it: an orphan there is one orphan."""
    for prefix in ("", "backup"):
        owner.manifest.put_namespace(owner.objects_url, prefix)
    strays = {put(owner, orphan(0)), put(owner, orphan(1), place="backup/")}
    assert sweep(owner)["orphaned"] == 2
    result = sweep(owner, delete=True)
    assert {each["object"] for each in result["orphans"]} == strays
    assert (result["orphaned"], result["deleted"], result["lost"]) == (2, 2, 0)


class Failing:
    """An object store that fails in the middle of its listing, or at its n-th deletion."""

    def __init__(self, store: Any, failures: list[str]) -> None:
        self._store, self._failures = store, failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def list_pages(self, prefix: str = "", *, start_after: str = "", page_objects: int = 4) -> Iterator[Any]:
        pages = self._store.list_pages(prefix, start_after=start_after, page_objects=page_objects)
        yield next(pages)
        if "list" in self._failures:
            self._failures.remove("list")
            raise ObjectStoreUnavailable("the store is away", url="test")
        yield from pages

    def delete_many(self, keys: Iterable[str]) -> None:
        if "delete" in self._failures:
            self._failures.remove("delete")
            self._store.delete_many(list(keys)[:1])
            raise ObjectStoreUnavailable("the store is away", url="test")
        self._store.delete_many(keys)


@pytest.mark.parametrize("where", ["list", "delete"])
def test_a_store_that_goes_away_ends_the_attempt_and_the_next_finds_what_is_left(owner: Owner, where: str) -> None:
    strays = [put(owner, orphan(slot)) for slot in (0, 4, 900)]
    before, failures = owner.objects(), [where]
    away: Any = lambda url: Failing(owner.stores(url), failures)  # noqa: E731
    collector = collector_of(owner.manifest, owner.objects_url, away)
    context = replace(owner.context(), open_store=away, collector=collector)
    job_id = owner.manifest.jobs.enqueue(JobKind.SWEEP, 0, {"delete": True, "grace_seconds": -10 * 365 * 86_400.0})
    worker = Worker(context, {JobKind.SWEEP: sweep_job})
    worker.drain()
    assert owner.state(job_id) is JobState.PENDING
    assert "the store is away" in owner.job(job_id).record.error
    left = 3 if where == "list" else 2
    assert len(owner.objects().keys() & set(strays)) == left, "half a listing is no reason to delete anything"
    owner.clock.advance(400)
    worker.drain()
    assert owner.state(job_id) is JobState.SUCCEEDED
    result = owner.job(job_id).result
    assert (result["deleted"], result["lost"]) == (left, 0)
    assert owner.objects().keys() == before.keys() - set(strays)


def test_two_sweeps_at_once_delete_the_same_and_nothing_else(owner: Owner) -> None:
    strays = {put(owner, orphan(slot)) for slot in range(40)}
    before = owner.objects().keys()
    second: list[dict[str, Any]] = []

    def other(_: str) -> None:
        if not second:
            second.append({})
            second[0] = sweep(owner, delete=True)

    with armed("jobs.sweep.listed", other):
        first = sweep(owner, delete=True)
    assert second[0]["deleted"] == first["deleted"] == 40
    assert (first["lost"], second[0]["lost"]) == (0, 0)
    assert owner.objects().keys() == before - strays


def test_when_everything_is_gone_rows_are_read_once_more_and_not_for_each(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "SETTLED_AT_ONCE", 2)
    monkeypatch.setattr(sweep_module, "LOOKED_UP", 3)
    away = owner.base / "away"
    names = sorted(owner.objects())
    os.rename(owner.objects_url, away)
    os.mkdir(owner.objects_url)
    walk, walks = sweep_module._names, list[Any]()

    def counted(*given: Any) -> Iterator[Any]:
        walks.append(given)
        return walk(*given)

    monkeypatch.setattr(sweep_module, "_names", counted)
    result = sweep(owner)
    os.rmdir(owner.objects_url)
    os.rename(away, owner.objects_url)
    assert sorted(each["object"] for each in result["missing"]) == names
    assert (result["lost"], result["objects"], len(walks)) == (len(names), 0, 2)


def test_an_object_that_is_gone_is_told(owner: Owner) -> None:
    name = sorted(owner.objects())[3]
    os.rename(os.path.join(owner.objects_url, name), os.path.join(owner.objects_url, "kept"))
    result = sweep(owner)
    assert [each["object"] for each in result["missing"]] == [name]
    os.rename(os.path.join(owner.objects_url, "kept"), os.path.join(owner.objects_url, name))
    assert sweep(owner)["missing"] == []
