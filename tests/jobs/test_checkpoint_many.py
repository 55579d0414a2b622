"""Checkpoints and merges of many databases in one run: each ends as it would alone, whatever happens to the others
(K1)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import InternalError
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk
from quire.jobs.checkpoint import many, plan
from quire.jobs.checkpoint import run as writing
from quire.jobs.checkpoint.many import run_many
from quire.jobs.checkpoint.run import newest_frames
from quire.jobs.runner import Runners, ThreadRunner, Tools
from quire.manifest import tables as t
from quire.manifest.jobqueue import Job
from quire.manifest.records import JobKind, JobState, Residency
from quire.pages.cache import PageCache
from quire.pages.sources import Sources
from tests.jobs.checkpoint_child import Owner, images
from tests.jobs.job_store import is_renewed
from tests.pages.engine_harness import Model, assert_reads, write

COUNT = 12


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path)
    yield owner
    owner.stop()


def fill(owner: Owner, count: int = COUNT) -> dict[int, Model]:
    """Create databases of one to three slots with versions to absorb; returns db_id → model."""
    models = {}
    for number in range(count):
        store, model = owner.database(f"db-{number:03}"), Model()
        write(store, model, images(*range(1 + 2 * number % 20)))
        write(store, model, images(0))
        models[store.db_id] = model
    return models


def run(
    owner: Owner, kind: JobKind = JobKind.CHECKPOINT, runners: Runners | None = None, **options: Any
) -> dict[int, Job]:
    """Run the job for all databases at once; returns db_id → job."""
    with owner.manifest.read() as txn:
        db_ids = [db_id for db_id, _ in txn.databases()]
    jobs = run_many(replace(owner.context(), runners=runners or Runners()), kind, db_ids, **options)
    return {job.db_id: job for job in jobs}


def drop(owner: Owner, db_id: int) -> None:
    """Drop a database; called from a failpoint."""
    owner.manifest.drop_db(db_id).result()


def assert_all(owner: Owner, models: dict[int, Model]) -> None:
    for db_id, model in models.items():
        with owner.engine.open(db_id).open_snapshot() as reader:
            assert_reads(reader, model.newest)


def states(jobs: dict[int, Job]) -> set[JobState]:
    return {job.state for job in jobs.values()}


def test_all_databases_are_absorbed_each_by_its_own_job(owner: Owner) -> None:
    models = fill(owner)
    progress: list[tuple[int, int]] = []
    jobs = run(owner, progress=lambda *counts: progress.append(counts))
    assert jobs.keys() == models.keys()
    assert states(jobs) == {JobState.SUCCEEDED}
    slots = sum(job.result["slots"] for job in jobs.values())
    assert progress[-1] == (slots, slots)
    assert all(owner.chain(0, db_id) for db_id in models)
    assert_all(owner, models)
    owner.settle()
    assert_all(owner, models)
    again = run(owner)
    assert states(again) == {JobState.SUCCEEDED}
    assert all(job.result == {"slots": 0} for job in again.values()), "nothing is left to absorb"


def test_merges_of_many_databases_run_together(owner: Owner) -> None:
    models = fill(owner)
    run(owner)
    for db_id, model in models.items():
        if model.newest.size > 4:
            write(owner.engine.open(db_id), model, images(1))
    run(owner)
    long = {db_id for db_id in models if len(owner.chain(0, db_id)) == 2}
    assert long
    jobs = run(owner, JobKind.MERGE)
    assert {db_id for db_id, job in jobs.items() if job.result["slots"]} == long
    assert {len(owner.chain(0, db_id)) for db_id in models} == {1}
    assert_all(owner, models)
    owner.settle()


@pytest.mark.parametrize("point", ["planned", "written"])
def test_a_database_dropped_meanwhile_fails_alone(owner: Owner, point: str) -> None:
    models = fill(owner)
    dropped_id = 3
    with armed(f"jobs.checkpoint.{point}", lambda _: drop(owner, dropped_id)):
        jobs = run(owner)
    assert jobs[dropped_id].state is JobState.FAILED_PERMANENT
    assert states({db_id: job for db_id, job in jobs.items() if db_id != dropped_id}) == {JobState.SUCCEEDED}
    del models[dropped_id]
    assert_all(owner, models)
    owner.engine.close_database(dropped_id)
    owner.settle()
    with owner.manifest.read() as txn:
        assert txn.database(dropped_id) is None


@pytest.mark.parametrize("part", ["index", "body"])
def test_a_damaged_database_fails_alone(owner: Owner, part: str) -> None:
    models = fill(owner)
    owner.engine.flush(2)
    owner.engine.close_database(2)
    (path,) = Path(owner.root, "pages", "00000002", "wal").glob("*.seg")
    data = bytearray(path.read_bytes())
    offset = 70 if part == "index" else data.index(models[2].newest.pages[1])
    data[offset] ^= 1
    path.write_bytes(data)
    jobs = run(owner)
    assert jobs[2].state is JobState.FAILED_PERMANENT
    assert "ChecksumMismatch" in jobs[2].record.error or "Corruption" in jobs[2].record.error
    assert states({db_id: job for db_id, job in jobs.items() if db_id != 2}) == {JobState.SUCCEEDED}
    del models[2]
    assert_all(owner, models)


def test_an_interrupted_run_puts_its_jobs_back_and_the_next_continues(owner: Owner) -> None:
    models = fill(owner)

    def interrupt(done: int, total: int) -> None:
        if done >= 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(owner, progress=interrupt)
    jobs = owner.manifest.jobs.jobs()
    assert {(job.state, job.record.failures) for job in jobs} == {(JobState.PENDING, 0)}
    before, plans = owner.objects(), {db_id: set(owner.plans(db_id)) for db_id in models}
    assert before
    jobs_after = run(owner)
    assert {job_id: job.state for job_id, job in jobs_after.items()} == dict.fromkeys(models, JobState.SUCCEEDED)
    assert all({job.result["generation"]} == plans[db_id] for db_id, job in jobs_after.items()), (
        "the stored plan was not used"
    )
    after = owner.objects()
    assert all(after[name] == stamp for name, stamp in before.items()), "an existing object was written again"
    assert_all(owner, models)
    owner.settle()


def test_a_stored_plan_that_can_no_longer_be_reproduced_is_abandoned(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = fill(owner, 3)
    for db_id, model in models.items():
        write(owner.engine.open(db_id), model, images(*range(8)))
    run(owner)
    for db_id, model in models.items():
        write(owner.engine.open(db_id), model, images(0))
    with armed("jobs.checkpoint.written", "1*raise:EIO"), pytest.raises(OSError, match="Input/output"):
        run(owner)
    plans = {db_id: set(owner.plans(db_id)) for db_id in models}
    monkeypatch.setattr(plan, "CHAIN_MAX", 1)
    assert states(run(owner)) == {JobState.PENDING}, "the plan is abandoned, the job is for the next run"
    jobs = run(owner)
    assert states(jobs) == {JobState.SUCCEEDED}
    assert all(job.result["generation"] not in plans[db_id] for db_id, job in jobs.items())
    assert_all(owner, models)
    owner.settle()


def test_jobs_claimed_by_another_worker_are_left_to_it(owner: Owner) -> None:
    models = fill(owner, 3)
    owner.manifest.jobs.claim_job(owner.enqueue(), "somebody")
    jobs = run(owner)
    assert jobs.keys() == {2, 3}
    assert states(jobs) == {JobState.SUCCEEDED}
    assert_all(owner, models)


def test_leases_are_renewed_while_a_run_lasts(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    models = fill(owner, 3)
    monkeypatch.setattr(many, "LEASE_SECONDS", 0.3)
    renewed = threading.Event()

    def wait(_point: str) -> None:
        if is_renewed(owner.manifest, owner.clock):
            renewed.set()

    with armed("jobs.checkpoint.planned", wait):
        jobs = run(owner)
    assert renewed.is_set()
    assert states(jobs) == {JobState.SUCCEEDED}
    assert_all(owner, models)


def test_a_slot_is_only_written_from_all_of_its_parts(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt would adopt the object by its name, and with it an old version of a page."""
    fill(owner, 1)
    store = owner.engine.open(1)
    owner.engine.flush(1)
    model = Model()
    write(store, model, images(0))
    original = newest_frames

    def drop_newest(parts: Any, covered: int) -> Any:
        # its newest version of page 0 is lost; an older one is in the other part, so the page count stays the same
        parts.pop()
        return original(parts, covered)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "newest_frames", drop_newest)
        jobs = run(owner)
    assert jobs[1].state is JobState.PENDING
    assert InternalError.__name__ in jobs[1].record.error
    assert owner.objects() == {}, "an object of an incomplete slot was written"


# ── executors with their own disk ─────────────────────────────────────────────────────────────────────────────────────
class RemoteRunner(ThreadRunner):
    """Threads that cannot see the store's files."""

    shares_disk = False


def test_segments_are_uploaded_first_for_executors_without_the_files(owner: Owner, tmp_path: Path) -> None:
    models = fill(owner, 4)
    owner.engine.fork("db-003", "fork")
    models[5] = models[4]
    sources = Sources(root=str(tmp_path / "elsewhere"), disk=OsDisk(), open_store=owner.stores, cache=PageCache(0))
    runner = RemoteRunner(Tools(sources, owner.stores, OsDisk(), ""), 2)
    jobs = run(owner, runners=Runners(lambda: runner, "spark"))
    assert states(jobs) == {JobState.SUCCEEDED}
    with owner.manifest.read() as txn:
        rows = [row for key, row in txn.scan(t.WAL_CATALOG) if row.origin_db_id == key[0]]
    assert len(rows) >= 4
    assert {row.residency for row in rows if row.used_bytes} == {Residency.LOCAL_AND_REMOTE}
    assert_all(owner, models)


def test_a_plan_for_spark_takes_more_at_once(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "PLAN_FRAMES_MAX", 3)
    models = fill(owner, 1)
    store = owner.engine.open(1)
    for _ in range(3):
        owner.engine.flush(1)
        write(store, models[1], images(0, 1))
    tools = Tools(owner.engine.sources, owner.stores, OsDisk(), owner.root)
    spark: Any = ThreadRunner(tools, 2)
    spark.name = "spark"
    jobs = run(owner, runners=Runners(lambda: spark, "spark"))
    assert jobs[1].result["segments"] == 4
    assert_all(owner, models)
