"""Compactions of key-value databases are jobs: those of the background, those a user starts, and those left by a
crash."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.core.errors import InvalidConfig, StorageFault
from quire.core.settings import LsmSettings, MaintenanceSettings, StoreSettings
from quire.durable import failpoints
from quire.jobs.compaction.job import compaction_job, tasks_for
from quire.jobs.handler import Completed
from quire.jobs.runner import ThreadRunner
from quire.lsm.kv import Kv
from quire.lsm.verify import problems
from quire.manifest.jobqueue import Job
from quire.manifest.records import JobKind, JobState
from quire.store.store import Store
from tests.fork_server import ForkServer

SMALL = LsmSettings(memtable_bytes=16 << 10, table_bytes=8 << 10, level0_tables=2, level_bytes=32 << 10)
QUIET = StoreSettings(maintenance=MaintenanceSettings(enabled=False), lsm=SMALL)
BY_HAND = StoreSettings(
    maintenance=MaintenanceSettings(enabled=False), lsm=LsmSettings(level0_tables=20, table_bytes=8 << 10)
)
"""Compactions only run when a test starts them."""
EAGER = StoreSettings(
    maintenance=MaintenanceSettings(enabled=False),
    lsm=LsmSettings(level0_tables=20, table_bytes=8 << 10, manifest_log_bytes=1),
)
"""The manifest is written as a snapshot after every event."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with quire.open(path, settings=BY_HAND) as store:
        yield store
        assert store.manifest.check() == []
        for kv in store.kvs.databases().values():
            assert list(problems(kv)) == []


def filled(store: Store, tables: int = 4) -> tuple[Kv, dict[bytes, bytes]]:
    """A database of this many overlapping tables, and its expected contents."""
    kv, model = store.kv("cart", create=True), dict[bytes, bytes]()
    for number in range(tables):
        batch = {b"%05d" % (i * 3 + number): b"v%d" % number * 20 for i in range(500)}
        kv.write({**batch, b"gone": None if number else b"x"})
        model.update(batch)
        kv.flush()
    return kv, model


def compactions(store: Store) -> list[Job]:
    return [job for job in store.manifest.jobs.jobs() if job.kind is JobKind.COMPACTION]


def test_a_compaction_that_a_user_starts_is_a_job(store: Store) -> None:
    kv, model = filled(store)
    job = store.heavy.compact("cart")
    assert job.state is JobState.SUCCEEDED
    assert job.result["runner"] == "threads"
    assert job.result["tables"] == kv.stats().tables
    assert kv.stats().levels[0] == 0
    assert kv.stats().tombstones == 0
    assert dict(kv.scan()) == model
    again = store.heavy.compact("cart")
    assert (again.state, again.result["tasks"]) == (JobState.SUCCEEDED, 0)


def test_the_ranges_of_a_major_compaction_are_merged_apart(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    kv, model = filled(store)
    monkeypatch.setattr("quire.jobs.compaction.job.tasks_for", lambda _size, _workers: 5)
    job = store.heavy.compact("cart")
    assert 4 <= job.result["tasks"] <= 7
    assert dict(kv.scan()) == model


def test_background_compactions_are_jobs_in_the_queue(path: Path) -> None:
    with quire.open(path, settings=QUIET) as store:
        kv = store.kv("cart", create=True)
        for number in range(60):
            kv.write({b"%05d" % (number * 7 % 50 + i): bytes(100) for i in range(50)})
        deadline = time.monotonic() + 30
        while not (done := [job for job in compactions(store) if job.state is JobState.SUCCEEDED]):
            assert time.monotonic() < deadline, "no compaction was recorded"
            time.sleep(0.02)
        assert done[0].db_id == store.database("cart").db_id
        assert done[0].payload["inputs"] >= 2
        assert done[0].result["tables"] >= 1
        kv.compact()
        assert all(job.state is JobState.SUCCEEDED for job in compactions(store))
        assert store.manifest.check() == []


def test_a_compaction_that_fails_keeps_its_row_until_it_succeeds(store: Store) -> None:
    kv, model = filled(store)
    for _ in range(3):
        with failpoints.armed("lsm.compaction.begun", "raise:ENOSPC"), pytest.raises((StorageFault, OSError)):
            kv.compact()
    (row,) = compactions(store)
    assert row.state is JobState.IN_FLIGHT
    kv.compact()
    (row,) = compactions(store)
    assert row.state is JobState.SUCCEEDED
    assert dict(kv.scan()) == model


def test_an_abandoned_compaction_is_run_by_the_next_worker(path: Path) -> None:
    with quire.open(path, settings=BY_HAND) as store:
        kv, model = filled(store)
        with failpoints.armed("lsm.compaction.begun", "raise:ENOSPC"), pytest.raises((StorageFault, OSError)):
            kv.compact()
    settings = StoreSettings(maintenance=MaintenanceSettings(enabled=False), lsm=LsmSettings(level0_tables=2))
    with quire.open(path, settings=settings) as store:
        (row,) = compactions(store)
        assert row.state is JobState.PENDING
        store.worker.drain()
        (row, *_) = compactions(store)
        assert row.state is JobState.SUCCEEDED
        assert dict(store.kv("cart").scan()) == model


def test_damage_fails_the_job_permanently_and_changes_nothing(store: Store) -> None:
    kv, _ = filled(store)
    table_path = Path(kv.view.levels.level0[0].path)
    data = bytearray(table_path.read_bytes())
    data[600] ^= 1
    table_path.write_bytes(data)
    job = store.heavy.compact("cart")
    assert job.state is JobState.FAILED_PERMANENT
    assert "ChecksumMismatch" in job.record.error
    assert kv.stats().tables == 4
    data[600] ^= 1
    table_path.write_bytes(data)


def test_compacting_a_database_of_another_kind_is_refused(store: Store) -> None:
    store.create("shop", "pages")
    with pytest.raises(quire.WrongKind):
        store.heavy.compact("shop")
    job_id = store.manifest.jobs.enqueue(JobKind.COMPACTION, store.database("shop").db_id, {"major": True})
    assert store.worker.run(job_id)
    assert store.manifest.jobs.get(job_id).record.failures >= 1


def test_executors_that_do_not_see_the_store_are_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(store)
    monkeypatch.setattr(ThreadRunner, "shares_disk", False)
    wiring = store._parts
    job = Job(1, store.manifest.jobs.record(JobKind.COMPACTION, store.database("cart").db_id, {"major": True}))
    with pytest.raises(InvalidConfig, match="cannot access"):
        compaction_job(wiring.context, job, lambda _d, _t: None)


def test_a_job_that_is_repeated_after_its_event_finds_nothing_to_do(store: Store) -> None:
    kv, model = filled(store)
    wiring = store._parts
    job = Job(1, store.manifest.jobs.record(JobKind.COMPACTION, store.database("cart").db_id, {"major": True}))
    for tasks in (1, 0):
        done = compaction_job(wiring.context, job, lambda _d, _t: None)
        assert isinstance(done, Completed)
        assert (done.result["tasks"] > 0) == bool(tasks)
    assert dict(kv.scan()) == model


def test_a_task_that_runs_twice_at_a_time_writes_the_same_tables(store: Store) -> None:
    """A speculative copy, or a task of an executor that was wrongly presumed dead, must not change tables that are
    already live."""
    from quire.lsm.remote_compaction import plan_major, run_task

    kv, model = filled(store)
    with plan_major(kv, tasks=2) as plan:
        written = [sst_id for task in plan.tasks for sst_id in run_task(task)]
        plan.publish(written)
        for task in plan.tasks:
            assert set(run_task(task)) <= set(written), "a late copy of a task wrote other tables"
    assert dict(kv.scan()) == model
    kv.close()
    assert dict(store.kv("cart").scan()) == model


@pytest.mark.parametrize("point", ["lsm.compaction.recorded", "lsm.checkpoint.begun", "lsm.manifest.appended"])
def test_a_compaction_that_fails_after_its_event_loses_nothing(path: Path, point: str) -> None:
    """Its output is already part of the database and must not be removed as a leftover."""
    with quire.open(path, settings=EAGER) as store:
        kv, model = filled(store)
        with failpoints.armed(point, "1*off->raise:EIO" if point == "lsm.manifest.appended" else "raise:EIO"):
            job = store.heavy.compact("cart")
        assert job.state is not JobState.SUCCEEDED
        assert job.record.error
        kv.abandon()
    with quire.open(path, settings=EAGER) as store:
        kv = store.kv("cart")
        assert dict(kv.scan()) == model
        assert list(problems(kv)) == []


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("tests.jobs.compaction_child:run", warm_up="tests.jobs.compaction_child:warm_up") as fork_server:
        yield fork_server


@pytest.mark.parametrize(
    "point",
    [
        "lsm.compaction.output",
        "jobs.compaction.written",
        "lsm.compaction.recorded",
        "jobs.compaction.published",
        "jobs.worker.worked",
    ],
)
def test_killed_anywhere_in_a_compaction_job_the_next_owner_completes_it(
    fork_server: ForkServer, path: Path, point: str
) -> None:
    with quire.open(path, settings=BY_HAND) as store:
        _, model = filled(store)
    with fork_server.spawn() as child:
        child.channel.send(f"{path} {point}=kill".encode())
        assert child.wait() == -9, fork_server.errors()
    with quire.open(path, settings=BY_HAND) as store:
        (row,) = compactions(store)
        assert row.state is JobState.PENDING
        assert dict(store.kv("cart").scan()) == model
        assert store.worker.run(row.job_id)
        assert store.manifest.jobs.get(row.job_id).state is JobState.SUCCEEDED
        kv = store.kv("cart")
        assert kv.stats().levels[0] == 0
        assert dict(kv.scan()) == model
        assert list(problems(kv)) == []
        assert store.manifest.check() == []


def test_number_of_tasks() -> None:
    assert tasks_for(0, 8) == 1
