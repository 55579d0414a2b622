"""Sweeps: unreferenced objects are found and deleted, objects that may still be in use are spared, missing ones are
reported (O3)."""

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
from tests.pages.engine_harness import Model, write

HOUR = 3_600.0
BURNED = 2
"""A generation under which nothing was published: what a driver leaves that died permanently."""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path)
    store, model = owner.database(), Model()
    write(store, model, images(*range(80)))
    owner.checkpoint(store)
    owner.settle()
    assert owner.manifest.reserve_generation(1) == BURNED
    yield owner
    owner.stop()


def sweep(owner: Owner, **payload: Any) -> dict[str, Any]:
    """Run a sweep now; returns its result. The test's clock stands still in 2025 and files are newer, so they count as
    old."""
    options = {"grace_seconds": -10 * 365 * 86_400.0, **payload}
    job_id = owner.manifest.jobs.enqueue(JobKind.SWEEP, 0, options)
    Worker(owner.context(), {JobKind.SWEEP: partial(sweep_job)}).drain()
    job = owner.job(job_id)
    assert job.state is JobState.SUCCEEDED, job.record.error
    result: dict[str, Any] = job.result
    return result


def put(owner: Owner, key: str, body: bytes = b"stray", prefix: str = "") -> str:
    """Put an object of this name in the current owner epoch, in the store's own namespace or below a prefix."""
    key = f"{prefix}{epoch_prefix(owner)}/{key}"
    open_store(owner.objects_url).put(key, body)
    return key


def epoch_prefix(owner: Owner) -> str:
    with owner.manifest.read() as txn:
        return txn.object_prefixes()[0]


def orphan(slot: int, generation: int = BURNED, db_id: int = 1) -> str:
    return object_key(ArtifactKey(db_id, ArtifactKind.BASE, slot, generation))


def test_a_clean_store_has_no_differences(owner: Owner) -> None:
    result = sweep(owner)
    assert (result["objects"], result["orphaned"], result["missing"], result["more"]) == (10, 0, [], False)
    assert result["bytes_listed"] > 0


@pytest.mark.parametrize("names", [1, 3, 100])
def test_orphans_anywhere_are_found_and_only_deleted_on_request(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, names: int
) -> None:
    """For any split into ranges: before the first name, between two, of an unknown database, after the last."""
    monkeypatch.setattr(sweep_module, "RANGE_NAMES", names)
    strays = {put(owner, orphan(slot)) for slot in (0, 4, 9, 5_000)} | {put(owner, orphan(3, db_id=77))}
    before = owner.objects()
    result = sweep(owner)
    assert {row["object"] for row in result["orphans"]} == strays
    assert (result["orphaned"], result["deleted"], result["bytes"]) == (5, 0, 25)
    assert owner.objects() == before
    result = sweep(owner, delete=True)
    assert result["deleted"] == 5
    assert owner.objects().keys() == before.keys() - strays
    assert sweep(owner)["orphaned"] == 0


def test_foreign_recent_and_future_objects_are_kept(owner: Owner) -> None:
    foreign = [put(owner, "README"), put(owner, manifest_log_key(1, 0)), put(owner, "00000001/other/thing")]
    with owner.manifest.read() as txn:
        record = txn.database(1)
    assert record is not None
    future = put(owner, orphan(0, record.next_generation))
    young = put(owner, orphan(0))
    result = sweep(owner, delete=True, grace_seconds=HOUR)
    assert result["orphaned"] == 0
    result = sweep(owner, delete=True)
    assert [row["object"] for row in result["orphans"]] == [young]
    assert {*foreign, future} <= owner.objects().keys()


def test_old_staging_files_of_crashed_puts_are_removed_if_deletion_is_requested(owner: Owner) -> None:
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


def test_the_objects_of_a_running_plan_are_spared(owner: Owner) -> None:
    """The objects exist but the rows do not: a sweep during a checkpoint must not delete them."""
    store, model = owner.database(), Model()
    write(store, model, images(*range(80)))
    owner.enqueue()
    results: list[dict[str, Any]] = []

    def sweep_once(_: str) -> None:
        if not results:
            results.append({})  # the sweep hits failpoints too
            results[0] = sweep(owner, delete=True)

    with armed("jobs.checkpoint.written", sweep_once):
        owner.worker(JobKind.CHECKPOINT).drain()
    assert results[0]["objects"] == 20
    assert results[0]["orphaned"] == 0
    with store.open_snapshot() as reader:
        assert reader.read_pages(range(80)) == dict(model.newest.pages)
    owner.settle()


def test_rows_created_during_the_listing_are_read_after_it(owner: Owner) -> None:
    store, model = owner.database(), Model()

    def checkpoint(_: str) -> None:
        write(store, model, images(*range(8)))
        owner.enqueue()
        owner.worker(JobKind.CHECKPOINT).drain()

    with armed("jobs.sweep.listed", checkpoint):
        assert sweep(owner, delete=True)["orphaned"] == 0
    owner.settle()


def test_ranges_continue_where_the_last_wave_ended_and_none_is_listed_twice(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One range per wave, per name and per group of databases: the results are the same, and nothing is listed
    twice."""
    for name in ("blog", "more"):
        store = owner.database(name)
        write(store, Model(), images(*range(24)))
        owner.manifest.jobs.enqueue(JobKind.CHECKPOINT, store.db_id, None)
        owner.worker(JobKind.CHECKPOINT).drain()
    strays = {put(owner, orphan(slot)) for slot in (0, 5, 5_000)} | {put(owner, orphan(3, db_id=7))}
    referenced = sorted(owner.objects().keys() - strays)
    removed = [referenced[2], referenced[-1]]
    for name in removed:
        os.rename(os.path.join(owner.objects_url, name), owner.base / name.replace("/", "-"))
    results = []
    for waves, names, databases in ((256, 16_384, 256), (1, 1, 1), (2, 3, 2), (1, 2, 3)):
        monkeypatch.setattr(sweep_module, "WAVE_RANGES", waves)
        monkeypatch.setattr(sweep_module, "RANGE_NAMES", names)
        monkeypatch.setattr(sweep_module, "RANGE_DATABASES", databases)
        results.append(sweep(owner))
    assert results[0]["objects"] == len(referenced) + len(strays) - len(removed)
    assert {row["object"] for row in results[0]["orphans"]} == strays
    assert sorted(row["object"] for row in results[0]["missing"]) == sorted(removed)
    assert all(result == results[0] for result in results)
    for name in removed:
        os.rename(owner.base / name.replace("/", "-"), os.path.join(owner.objects_url, name))


def test_databases_without_objects_need_no_listing_of_their_own(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: after three takeovers, which skip 2^16 ids each, a sweep of three objects made 2,300 requests."""
    monkeypatch.setattr(sweep_module, "RANGE_DATABASES", 1)
    for number in range(20):
        owner.database(f"empty-{number}")
    store = owner.database("last")
    write(store, Model(), images(*range(24)))
    owner.manifest.jobs.enqueue(JobKind.CHECKPOINT, store.db_id, None)
    owner.worker(JobKind.CHECKPOINT).drain()
    owner.database("empty")
    with owner.manifest.read() as txn:
        ((space, namespaces),) = sweep_module.spaces(owner.context(), txn).items()
        tasks = [part.task for part in sweep_module.ranges(txn, namespaces, space, sweep_module.RangeStart())]
    assert len(tasks) == 3, "before the first database, of the first, and of the last"
    assert [task.until for task in tasks] == [*(task.start_after for task in tasks[1:]), ""], "they cover every key"
    while owner.manifest.reserve_generation(7) < BURNED:  # names of generations that may still be written are spared
        pass
    strays = {put(owner, orphan(3, db_id=db_id)) for db_id in (1, 7, 77)}
    assert {row["object"] for row in sweep(owner)["orphans"]} == strays


def test_foreign_names_are_counted_by_the_executor_that_lists_them(owner: Owner) -> None:
    """They are not sent to the driver: a bucket may have millions of them."""
    for number in range(20):
        put(owner, f"tables/{number:04}.sst")
    task = ListTask(url=owner.objects_url, prefix=epoch_prefix(owner))
    listed = list(list_range(task, owner.context().thread_runner()._tools))
    assert len(listed) == 10 + 1, "ten chunks, and the totals"
    assert listed[-1][1] == Listed(30, sweep(owner)["bytes_listed"])


def test_a_namespace_with_two_ids_is_listed_once(owner: Owner) -> None:
    """A namespace below another one is not treated as a part of it: an orphan there is counted once."""
    for prefix in ("", "backup"):
        owner.manifest.put_namespace(owner.objects_url, prefix)
    strays = {put(owner, orphan(0)), put(owner, orphan(1), prefix="backup/")}
    assert sweep(owner)["orphaned"] == 2
    result = sweep(owner, delete=True)
    assert {row["object"] for row in result["orphans"]} == strays
    assert (result["orphaned"], result["deleted"], result["lost"]) == (2, 2, 0)


class Failing:
    """An object store that fails in the middle of its listing, or at a deletion."""

    def __init__(self, store: Any, failures: list[str]) -> None:
        self._store, self._failures = store, failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def list_pages(self, prefix: str = "", *, start_after: str = "", page_objects: int = 4) -> Iterator[Any]:
        pages = self._store.list_pages(prefix, start_after=start_after, page_objects=page_objects)
        yield next(pages)
        if "list" in self._failures:
            self._failures.remove("list")
            raise ObjectStoreUnavailable("the store is unavailable", url="test")
        yield from pages

    def delete_many(self, keys: Iterable[str]) -> None:
        if "delete" in self._failures:
            self._failures.remove("delete")
            self._store.delete_many(list(keys)[:1])
            raise ObjectStoreUnavailable("the store is unavailable", url="test")
        self._store.delete_many(keys)


@pytest.mark.parametrize("call", ["list", "delete"])
def test_an_unavailable_store_ends_the_attempt_and_the_next_finds_the_rest(owner: Owner, call: str) -> None:
    strays = [put(owner, orphan(slot)) for slot in (0, 4, 900)]
    before, failures = owner.objects(), [call]
    open_failing: Any = lambda url: Failing(owner.stores(url), failures)  # noqa: E731
    collector = collector_of(owner.manifest, owner.objects_url, open_failing)
    context = replace(owner.context(), open_store=open_failing, collector=collector)
    job_id = owner.manifest.jobs.enqueue(JobKind.SWEEP, 0, {"delete": True, "grace_seconds": -10 * 365 * 86_400.0})
    worker = Worker(context, {JobKind.SWEEP: sweep_job})
    worker.drain()
    assert owner.state(job_id) is JobState.PENDING
    assert "the store is unavailable" in owner.job(job_id).record.error
    remaining = 3 if call == "list" else 2
    assert len(owner.objects().keys() & set(strays)) == remaining, "an incomplete listing deletes nothing"
    owner.clock.advance(400)
    worker.drain()
    assert owner.state(job_id) is JobState.SUCCEEDED
    result = owner.job(job_id).result
    assert (result["deleted"], result["lost"]) == (remaining, 0)
    assert owner.objects().keys() == before.keys() - set(strays)


def test_two_sweeps_at_once_delete_the_same_and_nothing_else(owner: Owner) -> None:
    strays = {put(owner, orphan(slot)) for slot in range(40)}
    before = owner.objects().keys()
    second: list[dict[str, Any]] = []

    def second_sweep(_: str) -> None:
        if not second:
            second.append({})
            second[0] = sweep(owner, delete=True)

    with armed("jobs.sweep.listed", second_sweep):
        first = sweep(owner, delete=True)
    assert second[0]["deleted"] == first["deleted"] == 40
    assert (first["lost"], second[0]["lost"]) == (0, 0)
    assert owner.objects().keys() == before - strays


def test_when_every_object_is_missing_rows_are_read_once_more_not_once_per_object(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "SETTLED_AT_ONCE", 2)
    monkeypatch.setattr(sweep_module, "LOOKED_UP", 3)
    moved_objects = owner.base / "away"
    names = sorted(owner.objects())
    os.rename(owner.objects_url, moved_objects)
    os.mkdir(owner.objects_url)
    original, calls = sweep_module._names, list[Any]()

    def count_calls(*args: Any) -> Iterator[Any]:
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(sweep_module, "_names", count_calls)
    result = sweep(owner)
    os.rmdir(owner.objects_url)
    os.rename(moved_objects, owner.objects_url)
    assert sorted(row["object"] for row in result["missing"]) == names
    assert (result["lost"], result["objects"], len(calls)) == (len(names), 0, 2)


def test_a_missing_object_is_in_the_result(owner: Owner) -> None:
    name = sorted(owner.objects())[3]
    os.rename(os.path.join(owner.objects_url, name), os.path.join(owner.objects_url, "kept"))
    result = sweep(owner)
    assert [row["object"] for row in result["missing"]] == [name]
    os.rename(os.path.join(owner.objects_url, "kept"), os.path.join(owner.objects_url, name))
    assert sweep(owner)["missing"] == []
