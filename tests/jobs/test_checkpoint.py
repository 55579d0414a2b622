"""Checkpoint plans: which attempt may store, run and publish one, and what happens to a plan that is not run (P10)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import JobAlreadyPending, StalePlan
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.settings import MaintenanceSettings
from quire.durable.failpoints import armed
from quire.jobs import handler
from quire.jobs.checkpoint import job as checkpoint_module
from quire.jobs.checkpoint import plan
from quire.jobs.maintenance import Upkeep
from quire.manifest.jobqueue import Job
from quire.manifest.ops.plans import BeginPlan, FinishPlan
from quire.manifest.records import JobKind, JobState, LeafRef, WalState
from tests.jobs.checkpoint_child import Owner, images
from tests.jobs.job_store import epoch_name
from tests.pages.engine_harness import GRACE_SECONDS, PAGES_PER_CHUNK, Model, assert_reads, write


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path)
    yield owner
    owner.stop()


# ── plans that are not run ────────────────────────────────────────────────────────────────────────────────────────────
def test_a_plan_that_cannot_be_reproduced_is_abandoned_and_its_objects_are_deleted(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of quire, for example, writes deltas where the crashed one wrote full chunks."""
    store, model = owner.database(), Model()
    write(store, model, images(*range(20)))
    owner.checkpoint(store)
    write(store, model, images(0, 1, 8))
    job_id = owner.enqueue()
    with armed("jobs.checkpoint.written", "1*raise:EIO"):
        owner.worker().drain()
    ((generation, record),) = owner.plans().items()
    assert record.artifacts == [(0, 1, True), (1, 1, True)]
    names = {
        epoch_name(owner.manifest, ArtifactKey(1, ArtifactKind(is_delta), slot, generation, delta))
        for slot, delta, is_delta in record.artifacts
    }
    assert names <= owner.objects().keys()
    monkeypatch.setattr(plan, "DIRTY_RATIO", 0.05)
    owner.retry()
    job = owner.job(job_id)
    assert job.state is JobState.SUCCEEDED
    assert job.result["generation"] > generation
    assert not owner.plans()
    assert names <= owner.objects().keys(), "the grace has not passed"
    owner.assert_newest(model)
    owner.settle()
    assert not names & owner.objects().keys()
    owner.assert_newest(model)


def test_the_plan_of_a_cancelled_job_is_abandoned_by_the_next_job(owner: Owner) -> None:
    store, model = owner.database(), Model()
    write(store, model, images(*range(12)))
    job_id = owner.enqueue()
    with armed("jobs.checkpoint.stored", "1*raise:EIO"):
        owner.worker().drain()
    assert owner.segments()[0] is WalState.CHECKPOINT_READY
    owner.manifest.jobs.cancel(job_id)
    (generation,) = owner.plans()
    owner.checkpoint(store)
    assert owner.chain(0) == [("BASE", generation + 1)]
    owner.settle()
    owner.assert_newest(model)


def test_upkeep_enqueues_another_checkpoint_after_a_permanent_failure(owner: Owner) -> None:
    """Its segments are CHECKPOINT_READY and belong to no job: without another job a writer at its budget would wait
    forever."""
    store, model = owner.database(), Model()
    write(store, model, images(*range(12)))
    job_id = owner.enqueue()
    with armed("jobs.checkpoint.stored", "1*raise:EIO"):
        owner.worker().drain()
    owner.manifest.jobs.cancel(job_id)
    owner.clock.advance(MaintenanceSettings().checkpoint_seconds + 1)
    assert Upkeep(owner.context(), owner.worker()).run_once().checkpoints == 1
    owner.retry()
    assert not [state for state in owner.segments() if state < WalState.CHECKPOINTED]
    owner.assert_newest(model)


def test_a_job_that_waits_for_its_next_attempt_keeps_its_plan(owner: Owner) -> None:
    """Only the plan's own job may change it, whatever the number of the current attempt."""
    store, model = owner.database(), Model()
    for _ in range(2):
        write(store, model, images(*range(0, 12, 5)))
        owner.checkpoint(store)
    write(store, model, images(1))
    job_id = owner.enqueue()
    with armed("jobs.checkpoint.written", "2*raise:EIO"):
        owner.worker().drain()
        owner.retry()
    (generation,) = owner.plans()
    assert owner.job(job_id).record.attempt == 2
    merge = owner.enqueue(JobKind.MERGE)
    owner.worker(JobKind.MERGE).drain()
    assert owner.state(merge) is JobState.PENDING, "the merge waits"
    assert list(owner.plans()) == [generation]
    owner.retry()
    assert owner.job(job_id).result["generation"] == generation
    owner.retry()
    assert owner.state(merge) is JobState.SUCCEEDED
    owner.assert_newest(model)


def test_a_merge_does_not_abandon_the_plan_that_a_second_attempt_is_running(owner: Owner) -> None:
    """The stored plan contains the number of the attempt that made it; a later attempt still runs it."""
    store, model = owner.database(), Model()
    for _ in range(2):
        write(store, model, images(*range(0, 12, 5)))
        owner.checkpoint(store)
    write(store, model, images(1))
    job_id, merge = owner.enqueue(), 0
    with armed("jobs.checkpoint.written", "1*raise:EIO"):
        owner.worker().drain()

    def enqueue_merge(_: str) -> None:
        nonlocal merge
        if not merge:
            merge = owner.enqueue(JobKind.MERGE)
            owner.worker(JobKind.MERGE).drain()

    with armed("jobs.checkpoint.written", enqueue_merge):
        owner.retry()
    assert merge
    assert owner.state(job_id) is JobState.SUCCEEDED, owner.job(job_id).record.error
    owner.retry()
    assert owner.state(merge) is JobState.SUCCEEDED
    owner.assert_newest(model)


def test_a_job_waits_for_a_plan_stored_while_it_was_planning(owner: Owner) -> None:
    store, model = owner.database(), Model()
    for _ in range(2):
        write(store, model, images(*range(0, 12, 5)))
        owner.checkpoint(store)
    write(store, model, images(1))
    commit_step, merge = handler.commit_step, 0

    def commit(ctx: Any, job: Job, ops: Any) -> None:
        nonlocal merge
        if job.kind is JobKind.CHECKPOINT and isinstance(ops[0], BeginPlan) and not merge:
            merge = owner.enqueue(JobKind.MERGE)
            with armed("jobs.checkpoint.written", "1*raise:EIO"):
                owner.worker(JobKind.MERGE).drain()
        commit_step(ctx, job, ops)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_module, "commit_step", commit)
        job_id = owner.enqueue()
        owner.worker(JobKind.CHECKPOINT).drain()
    job = owner.job(job_id)
    assert (job.state, job.record.failures) == (JobState.PENDING, 0), "waiting does not count as a failure"
    owner.retry()
    owner.retry()
    assert {owner.state(job_id), owner.state(merge)} == {JobState.SUCCEEDED}
    owner.assert_newest(model)


# ── zombies ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("point", ["begun", "stored", "written"])
def test_an_attempt_that_wakes_up_after_a_newer_one_has_published_publishes_nothing(owner: Owner, point: str) -> None:
    store, model = owner.database(), Model()
    write(store, model, images(*range(12)))
    job_id, asleep, wake = owner.enqueue(), threading.Event(), threading.Event()
    sleeper = threading.Thread(target=lambda: owner.worker().run(job_id))

    def sleep(_: str) -> None:
        if threading.current_thread() is sleeper or not asleep.is_set():
            asleep.set()
            assert wake.wait(30)

    with armed(f"jobs.checkpoint.{point}", sleep):
        sleeper.start()
        assert asleep.wait(30)
    owner.clock.advance(60)
    assert owner.manifest.jobs.expire() == 1, "its lease has run out"
    owner.retry()
    job = owner.job(job_id)
    assert (job.state, job.record.attempt) == (JobState.SUCCEEDED, 2)
    write(store, model, images(3))
    before = owner.chain(0)
    wake.set()
    sleeper.join(30)
    assert not sleeper.is_alive()
    assert owner.chain(0) == before
    assert owner.job(job_id).record == job.record
    owner.checkpoint(store)
    owner.settle()
    owner.assert_newest(model)


def test_a_plan_is_finished_by_the_running_attempt_only(owner: Owner) -> None:
    """The operation itself refuses, independent of other protection against zombies."""
    store, model = owner.database(), Model()
    write(store, model, images(*range(12)))
    job_id = owner.enqueue()
    with armed("jobs.checkpoint.written", "1*raise:EIO"):
        owner.worker().drain()
    (generation,) = owner.plans()
    for attempt in (1, 2):  # the job is pending; no attempt runs
        with pytest.raises(StalePlan):
            owner.manifest.submit([FinishPlan(1, generation, attempt)]).result()
    owner.clock.advance(60)
    assert owner.manifest.jobs.claim_job(job_id, "owner:second") is not None
    with pytest.raises(StalePlan):
        owner.manifest.submit([FinishPlan(1, generation, 1)]).result()
    assert owner.manifest.jobs.recover() == 1
    owner.retry()
    assert owner.job(job_id).result["generation"] == generation
    owner.assert_newest(model)


def test_an_attempt_that_lost_its_lease_stores_no_plan(owner: Owner) -> None:
    store, model = owner.database(), Model()
    write(store, model, images(0))
    select_segments = plan.select_segments

    def lose_lease(ctx: Any, db_id: int, **options: Any) -> Any:
        selection = select_segments(ctx, db_id, **options)
        owner.clock.advance(60)
        owner.manifest.jobs.expire()
        return selection

    job_id = owner.enqueue()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_module, "select_segments", lose_lease)
        assert owner.worker().run(job_id)
    assert not owner.plans()
    owner.retry()
    assert owner.state(job_id) is JobState.SUCCEEDED
    owner.assert_newest(model)


def test_publishing_requires_the_leaves_that_the_plan_was_based_on(owner: Owner) -> None:
    """Only plans change leaves, and a database has one plan at a time; if that is ever violated, the batch must fail
    (P10)."""
    store, model = owner.database(), Model()
    write(store, model, images(*range(12)))
    owner.checkpoint(store)
    write(store, model, images(*range(12)))
    begin_plan, job_id = checkpoint_module._begin, owner.enqueue()

    def begin(ctx: Any, job: Job, *args: Any) -> Any:
        checkpoint_plan = begin_plan(ctx, job, *args)
        assert checkpoint_plan is not None
        (leaf,) = checkpoint_plan.leaves
        return replace(checkpoint_plan, leaves={leaf: LeafRef(1, 999)})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_module, "_begin", begin)
        owner.worker().run(job_id)
    assert StalePlan.__name__ in owner.job(job_id).record.error
    owner.retry()
    assert owner.state(job_id) is JobState.SUCCEEDED
    owner.assert_newest(model)


# ── concurrent work ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_snapshots_and_forks_made_during_a_checkpoint_keep_their_versions(owner: Owner) -> None:
    store, model = owner.database(), Model()
    write(store, model, images(*range(20)))
    owner.engine.snapshot("shop", "early")
    early = model.newest
    write(store, model, images(3, 9))
    versions: dict[str, Any] = {}

    def change_meanwhile(point: str) -> None:
        if point in versions:
            return
        write(store, model, images(1, 17))
        owner.engine.snapshot("shop", point)
        versions[point] = model.newest
        fork = owner.engine.fork("shop", f"of-{point}")
        with owner.engine.open(fork).open_snapshot() as reader:
            assert_reads(reader, model.newest)
        if point.endswith("stored"):
            owner.manifest.snapshots.drop("shop", "early")
            owner.manifest.drop_db(fork).result()

    names = ("begun", "encoded", "stored", "written")
    assert_reads(owner.engine.open_view("shop", "early"), early)
    job_id = owner.enqueue()
    with (
        armed("jobs.checkpoint.begun", change_meanwhile),
        armed("jobs.checkpoint.encoded", change_meanwhile),
        armed("jobs.checkpoint.stored", change_meanwhile),
        armed("jobs.checkpoint.written", change_meanwhile),
    ):
        owner.worker().run(job_id)
    assert owner.state(job_id) is JobState.SUCCEEDED, owner.job(job_id).record.error
    assert len(versions) == len(names)
    for _ in range(2):
        for name, version in versions.items():
            assert_reads(owner.engine.open_view("shop", name), version)
        for name in ("begun", "encoded", "written"):
            with owner.database(f"of-jobs.checkpoint.{name}").open_snapshot() as reader:
                assert_reads(reader, versions[f"jobs.checkpoint.{name}"])
        owner.checkpoint(store)
        owner.checkpoint(owner.database("of-jobs.checkpoint.begun"))
        owner.settle()
    owner.assert_newest(model)


def test_a_second_checkpoint_at_the_same_time_is_refused(owner: Owner) -> None:
    """A second job is refused, and only one of several workers claims the first."""
    store, model = owner.database(), Model()
    write(store, model, images(*range(40)))
    job_id = owner.enqueue()
    with pytest.raises(JobAlreadyPending):
        owner.enqueue()
    claimed: list[bool] = []
    threads = [threading.Thread(target=lambda: claimed.append(owner.worker().run(job_id))) for _ in range(4)]
    with armed("jobs.checkpoint.stored", "sleep:5"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(claimed) == [False, False, False, True]
    assert owner.job(job_id).record.attempt == 1
    owner.settle()
    owner.assert_newest(model)


def test_slots_are_written_by_several_threads(tmp_path: Path) -> None:
    settings = MaintenanceSettings(delete_grace_seconds=GRACE_SECONDS, workers=4)
    owner = Owner(tmp_path, maintenance=settings)
    store, model = owner.database(), Model()
    write(store, model, images(*range(80)))
    job_id, names = owner.enqueue(), set[str]()

    def slow(_: str) -> None:
        names.add(threading.current_thread().name)
        time.sleep(0.01)

    with armed("jobs.checkpoint.encoded", slow):
        owner.worker().run(job_id)
    assert len(names) == 4
    assert owner.job(job_id).result["slots"] == 10
    owner.assert_newest(model)
    owner.settle()
    owner.stop()


@pytest.mark.parametrize("point", ["begun", "stored", "written"])
def test_a_database_that_is_dropped_meanwhile_leaves_nothing_behind(owner: Owner, point: str) -> None:
    store, model = owner.database(), Model()
    write(store, model, images(*range(20)))
    job_id = owner.enqueue()
    with armed(f"jobs.checkpoint.{point}", lambda _: _drop(owner)):
        owner.worker().run(job_id)
    assert owner.state(job_id) is JobState.FAILED_PERMANENT
    owner.engine.tick(store)
    owner.settle()
    assert owner.objects() == {}
    with owner.manifest.read() as txn:
        assert txn.database(1) is None


def _drop(owner: Owner) -> None:
    with owner.manifest.read() as txn:
        record = txn.database(1)
    if record is not None and not record.dropped_at_ms:
        owner.manifest.drop_db(1, snapshots=True).result()


def test_a_checkpoint_that_is_stopped_starts_no_more_slots(owner: Owner) -> None:
    store, model = owner.database(), Model()
    write(store, model, images(*range(0, 80, PAGES_PER_CHUNK)))
    job_id, worker = owner.enqueue(), owner.worker()
    written: list[str] = []

    def stop(point: str) -> None:
        written.append(point)
        if len(written) == 2:
            worker.stop()
            time.sleep(0.05)

    with armed("jobs.checkpoint.stored", stop):
        worker.run(job_id)
    job = owner.job(job_id)
    assert (job.state, job.record.failures) == (JobState.PENDING, 0), "it was put back"
    assert len(written) <= 4, "fewer than the ten that were planned"
    owner.retry()
    assert owner.state(job_id) is JobState.SUCCEEDED
    owner.assert_newest(model)
