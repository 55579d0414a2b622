"""Checkpoints and merges on Spark: the same objects as with threads, one run for many databases, nothing lost or
duplicated.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from quire.durable.failpoints import armed
from quire.jobs.checkpoint.many import run_many
from quire.manifest.records import JobKind, JobState
from quire.objects.api import list_objects
from quire.objects.open import open_store
from tests.jobs.checkpoint_child import KINDS, RETRY_SECONDS, Owner, Scene, images
from tests.jobs.test_checkpoint_many import assert_all, drop, fill, run, states
from tests.pages.engine_harness import Model, write
from tests.spark.spark_owner import SparkOwner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def owner(spark: SparkSession, tmp_path: Path) -> Iterator[SparkOwner]:
    owner = SparkOwner(tmp_path, spark=spark)
    yield owner
    owner.stop()


def _bodies(owner: Owner) -> dict[str, bytes]:
    store = open_store(owner.objects_url)
    return {info.key: store.get(info.key) for info in list_objects(store)}


@pytest.mark.parametrize("kind", KINDS)
def test_spark_writes_the_objects_that_threads_write(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    """Byte for byte, so that one runner can resume where the other was interrupted."""
    (tmp_path / "threads").mkdir()
    scene = Scene.make(tmp_path / "threads", kind)
    shutil.copytree(tmp_path / "threads", tmp_path / "spark")
    bodies = []
    for name in ("threads", "spark"):
        plain = scene.open(tmp_path / name)
        plain.stop()
        owner = SparkOwner(tmp_path / name, clock=plain.clock, maintenance=plain.maintenance, spark=spark)
        owner.objects_url = str(tmp_path / name / "objects")
        owner.database()
        worker = owner.worker() if name == "spark" else Owner.worker(owner)
        worker.run(scene.job_id)
        assert owner.state(scene.job_id) is JobState.SUCCEEDED, owner.job(scene.job_id).record.error
        bodies.append(_bodies(owner))
        scene.assert_readable(owner)
        owner.settle()
        scene.assert_readable(owner)
        owner.stop()
    assert bodies[0] == bodies[1]


def test_many_databases_are_one_run_and_a_dropped_one_fails_alone(owner: SparkOwner) -> None:
    models = fill(owner, 40)
    dropped_id = 7
    with armed("jobs.checkpoint.planned", lambda _: drop(owner, dropped_id)):
        jobs = run(owner, runners=owner.runners)
    assert jobs[dropped_id].state is JobState.FAILED_PERMANENT
    assert states({db_id: job for db_id, job in jobs.items() if db_id != dropped_id}) == {JobState.SUCCEEDED}
    del models[dropped_id]
    assert_all(owner, models)
    owner.engine.close_database(dropped_id)
    Owner.settle(owner)
    assert_all(owner, models)


def test_an_attempt_that_fails_before_its_batch_is_resumed(owner: SparkOwner) -> None:
    """A driver that dies between the last object and the manifest's batch: existing objects are adopted, not written
    again.
    """
    store, model = owner.database(), Model()
    write(store, model, images(*range(40)))
    job_id = owner.enqueue()
    with armed("jobs.checkpoint.written", "1*raise:EIO"):
        owner.worker().run(job_id)
    assert owner.state(job_id) is JobState.PENDING
    before, (generation,) = owner.objects(), owner.plans()
    assert len(before) == 5
    owner.clock.advance(RETRY_SECONDS)
    owner.worker().run(job_id)
    assert owner.state(job_id) is JobState.SUCCEEDED
    assert owner.job(job_id).result["generation"] == generation
    assert owner.objects() == before
    owner.assert_newest(model)


def test_a_damaged_segment_is_reported_as_such(owner: SparkOwner) -> None:
    """Not as a failure of Spark."""
    models = fill(owner, 3)
    owner.engine.flush(2)
    owner.engine.close_database(2)
    (path,) = Path(owner.root, "pages", "00000002", "wal").glob("*.seg")
    data = bytearray(path.read_bytes())
    data[70] ^= 1
    path.write_bytes(data)
    jobs = run(owner, runners=owner.runners)
    assert jobs[2].state is JobState.FAILED_PERMANENT
    assert "Corruption: a sealed segment's index entry" in jobs[2].record.error
    del models[2]
    assert_all(owner, models)


def test_snapshots_and_forks_can_be_created_and_dropped_meanwhile(owner: SparkOwner) -> None:
    store, model = owner.database(), Model()
    write(store, model, images(*range(20)))
    owner.engine.snapshot("shop", "early")
    early = model.newest
    write(store, model, images(3, 9))

    def create_and_drop(_: str) -> None:
        write(store, model, images(1, 17))
        owner.engine.fork("shop", "fork")
        owner.manifest.snapshots.drop("shop", "early")
        owner.engine.snapshot("shop", "late")

    with armed("jobs.checkpoint.planned", create_and_drop):
        jobs = {
            job.db_id: job for job in run_many(replace(owner.context(), runners=owner.runners), JobKind.CHECKPOINT, [1])
        }
    assert jobs[1].state is JobState.SUCCEEDED
    assert early.lsn < jobs[1].result["covered_lsn"] < model.newest.lsn
    assert_all(owner, {1: model, 2: model})
    assert states(run(owner, runners=owner.runners)) == {JobState.SUCCEEDED}
    assert_all(owner, {1: model, 2: model})
    Owner.settle(owner)


def test_two_checkpoints_of_one_database_at_once(owner: SparkOwner) -> None:
    """The second one finds the job taken, and a merge waits for the plan: one of them publishes, once."""
    models = fill(owner, 2)
    results: list[Any] = []

    def again(_: str) -> None:
        if not results:
            results.append(None)  # the run started here reaches this failpoint, too
            results.append(run_many(owner.context(), JobKind.CHECKPOINT, [1, 2]))
            merge = owner.enqueue(JobKind.MERGE)
            owner.worker(JobKind.MERGE, JobKind.CHECKPOINT).drain()
            results.append(owner.state(merge))

    with armed("jobs.checkpoint.planned", again):
        jobs = run(owner, runners=owner.runners)
    assert results[1:] == [[], JobState.PENDING], "no other run gets the databases"
    assert states(jobs) == {JobState.SUCCEEDED}
    assert [kind for kind, _ in owner.chain(0)] == ["BASE"]
    assert_all(owner, models)
    Owner.settle(owner)
    assert_all(owner, models)


def test_an_object_store_that_fails_for_a_while(owner: SparkOwner) -> None:
    """Every put fails; the jobs are pending with the error, and the next run resumes the same plans."""
    models = fill(owner, 3)
    blocked = Path(owner.objects_url, ".tmp")
    blocked.parent.mkdir(exist_ok=True)
    blocked.symlink_to("/sys")  # where no file can be created
    jobs = run(owner, runners=owner.runners)
    assert states(jobs) == {JobState.PENDING}
    assert all(job.record.error for job in jobs.values())
    plans = [owner.plans(db_id) for db_id in jobs]
    assert all(plans)
    blocked.unlink()
    blocked.mkdir()
    owner.clock.advance(RETRY_SECONDS)
    jobs = run(owner, runners=owner.runners)
    assert states(jobs) == {JobState.SUCCEEDED}
    assert [[job.result["generation"]] for job in jobs.values()] == [list(plan) for plan in plans]
    assert_all(owner, models)
    Owner.settle(owner)


def test_a_store_that_replaces_another_is_handled(spark: SparkSession, tmp_path: Path) -> None:
    """Python workers outlive stores: one that cached a directory would write into a directory that no longer exists."""
    for _ in range(2):
        (tmp_path / "here").mkdir()
        owner = SparkOwner(tmp_path / "here", spark=spark)
        models = fill(owner, 3)
        assert states(run(owner, runners=owner.runners)) == {JobState.SUCCEEDED}
        assert_all(owner, models)
        owner.stop()
        shutil.rmtree(tmp_path / "here")
