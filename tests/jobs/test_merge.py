"""Merges: which chains are due, how many at a time, and that holders of the replaced chains can still read them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import InvalidConfig
from quire.core.settings import MaintenanceSettings
from quire.jobs.checkpoint import plan
from quire.manifest.jobqueue import Job
from quire.manifest.records import JobKind, JobState
from quire.pages.pagestore import PageStore
from tests.jobs.checkpoint_child import Owner
from tests.pages.engine_harness import GRACE_SECONDS, Model, assert_reads, image, write

CHAIN = 4
LIGHT = MaintenanceSettings(delete_grace_seconds=GRACE_SECONDS, merge_chain=CHAIN, merge_ratio=100.0)
HEAVY = MaintenanceSettings(delete_grace_seconds=GRACE_SECONDS, merge_chain=100, merge_ratio=0.3)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path, maintenance=LIGHT)
    yield owner
    owner.stop()


def _checkpoint(owner: Owner, *pages: int, model: Model) -> PageStore:
    """Change these pages and checkpoint them, without the jobs that follow."""
    store = owner.database()
    write(store, model, {page: image() for page in pages})
    owner.manifest.jobs.enqueue(JobKind.CHECKPOINT, 1)
    owner.worker(JobKind.CHECKPOINT, JobKind.TRUNCATE).drain()
    return store


def _merges(owner: Owner) -> list[Job]:
    return [job for job in owner.manifest.jobs.jobs() if job.kind is JobKind.MERGE]


def _lengths(owner: Owner, slots: int) -> list[int]:
    return [len(owner.chain(slot)) for slot in range(slots)]


def _assert_newest(owner: Owner, model: Model) -> None:
    with owner.database().open_snapshot() as reader:
        assert_reads(reader, model.newest)


def test_a_chain_of_the_configured_length_is_merged_and_shorter_ones_are_left(owner: Owner) -> None:
    model = Model()
    _checkpoint(owner, *range(24), model=model)
    _checkpoint(owner, 1, 9, model=model)
    _checkpoint(owner, 1, model=model)
    assert _lengths(owner, 3) == [3, 2, 1]
    assert not _merges(owner), "the chain is not long enough yet"
    _checkpoint(owner, 1, model=model)
    (job,) = _merges(owner)
    assert job.state is JobState.PENDING
    owner.worker().drain()
    assert _lengths(owner, 3) == [1, 2, 1]
    assert owner.job(job.job_id).result["slots"] == 1
    _assert_newest(owner, model)
    owner.settle()
    _assert_newest(owner, model)


def test_a_chain_that_was_just_rewritten_schedules_nothing(owner: Owner) -> None:
    model = Model()
    _checkpoint(owner, *range(8), model=model)
    for _ in range(CHAIN - 2):
        _checkpoint(owner, 1, model=model)
    assert _lengths(owner, 1) == [CHAIN - 1]
    _checkpoint(owner, *range(8), model=model)
    assert _lengths(owner, 1) == [1]
    assert not _merges(owner)
    _assert_newest(owner, model)


def test_deltas_that_are_large_for_their_base_are_merged_even_if_they_are_few(tmp_path: Path) -> None:
    owner, model = Owner(tmp_path, maintenance=HEAVY), Model()
    _checkpoint(owner, *range(16), model=model)
    _checkpoint(owner, 1, 9, model=model)
    assert not _merges(owner), "an eighth of the base is below the ratio"
    _checkpoint(owner, 1, 2, model=model)
    assert len(_merges(owner)) == 1
    owner.worker().drain()
    assert _lengths(owner, 2) == [1, 2]
    _assert_newest(owner, model)
    owner.stop()


def test_a_merge_that_a_user_starts_takes_every_chain(owner: Owner) -> None:
    model = Model()
    _checkpoint(owner, *range(24), model=model)
    _checkpoint(owner, 1, 9, model=model)
    owner.run(JobKind.MERGE, 1)
    assert _lengths(owner, 3) == [1, 1, 1]
    owner.run(JobKind.MERGE, 1)
    assert _merges(owner)[-1].result == {"slots": 0}
    _assert_newest(owner, model)


def test_a_merge_takes_a_bounded_number_of_slots_longest_first_and_the_next_takes_the_rest(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MERGE_SLOTS_MAX", 2)
    model = Model()
    _checkpoint(owner, *range(40), model=model)
    _checkpoint(owner, 1, 9, 17, 25, 33, model=model)
    _checkpoint(owner, 25, model=model)
    chain_lengths: list[list[int]] = []
    owner.manifest.jobs.enqueue(JobKind.MERGE, 1)
    while owner.worker(JobKind.MERGE).run(owner.manifest.jobs.outstanding(1, JobKind.MERGE)):
        chain_lengths.append(_lengths(owner, 5))
    assert chain_lengths == [[1, 2, 2, 1, 2], [1, 1, 1, 1, 2], [1, 1, 1, 1, 1]]
    _assert_newest(owner, model)
    owner.settle()


def test_snapshots_and_forks_keep_the_chain_that_a_merge_replaced(owner: Owner) -> None:
    model = Model()
    _checkpoint(owner, *range(24), model=model)
    _checkpoint(owner, 1, 9, model=model)
    owner.engine.snapshot("shop", "kept")
    snapshot_version = model.newest
    owner.engine.fork("shop", "branch")
    _checkpoint(owner, 2, 10, model=model)
    owner.run(JobKind.MERGE, 1)
    owner.settle()
    assert_reads(owner.engine.open_view("shop", "kept"), snapshot_version)
    with owner.database("branch").open_snapshot() as reader:
        assert_reads(reader, snapshot_version)
    owner.manifest.snapshots.drop("shop", "kept")
    owner.settle()
    with owner.database("branch").open_snapshot() as reader:
        assert_reads(reader, snapshot_version)
    branch = owner.database("branch").db_id
    owner.run(JobKind.MERGE, branch)
    assert [name for name, _ in owner.chain(0, branch)] == ["BASE"]
    owner.settle()
    with owner.database("branch").open_snapshot() as reader:
        assert_reads(reader, snapshot_version)
    _assert_newest(owner, model)


def test_readers_of_a_merged_chain_continue_reading(owner: Owner) -> None:
    model = Model()
    store = _checkpoint(owner, *range(24), model=model)
    _checkpoint(owner, 1, 9, model=model)
    with store.open_snapshot() as reader:
        version = model.newest
        owner.run(JobKind.MERGE, 1)
        _checkpoint(owner, 1, 2, 3, model=model)
        owner.engine.cache.forget(1)
        assert_reads(reader, version)
    _assert_newest(owner, model)


@pytest.mark.parametrize("invalid", [{"merge_chain": 1}, {"merge_ratio": 0.0}, {"time_travel_seconds": -1.0}])
def test_invalid_merge_settings_are_refused(invalid: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        MaintenanceSettings(**invalid)
