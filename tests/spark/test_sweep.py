"""Sweeps, audits and stats on Spark: executors join listings with names, and group counts; threads find the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from quire.core.ids import ArtifactKind
from quire.jobs.audit import job as audit_module
from quire.jobs.audit.job import audit_job
from quire.jobs.runner import Runners
from quire.jobs.stats.job import stats_job
from quire.jobs.sweep import job as sweep_module
from quire.jobs.sweep.job import sweep_job
from quire.jobs.worker import Worker
from quire.manifest import tables as t
from quire.manifest.records import JobKind, JobState
from tests.jobs.checkpoint_child import Owner, images
from tests.jobs.test_sweep import BURNED, orphan, put
from tests.pages.engine_harness import Model, write
from tests.spark.spark_owner import SparkOwner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def owner(spark: SparkSession, tmp_path: Path) -> Iterator[SparkOwner]:
    owner = SparkOwner(tmp_path, spark=spark)
    store, model = owner.database(), Model()
    write(store, model, images(*range(40)))
    owner.enqueue()
    Owner.worker(owner).drain()
    assert owner.manifest.reserve_generation(1) == BURNED
    owner.engine.snapshot("shop", "early")
    owner.engine.fork("shop", "fork")
    yield owner
    owner.stop()


def run(owner: SparkOwner, kind: JobKind, handler: Any, runners: Runners, **payload: Any) -> dict[str, Any]:
    job_id = owner.manifest.jobs.enqueue(kind, 0, payload or None)
    Worker(replace(owner.context(), runners=runners), {kind: handler}).drain()
    job = owner.job(job_id)
    assert job.state is JobState.SUCCEEDED, job.record.error
    result: dict[str, Any] = job.result
    return result


def test_orphans_and_missing_objects_are_found_by_an_outer_join(
    owner: SparkOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "RANGE_NAMES", 2)  # several tasks, several partitions
    strays = {put(owner, orphan(slot)) for slot in (0, 7, 900)} | {put(owner, orphan(3, db_id=700))}
    victim = sorted(owner.objects().keys() - strays)[1]
    os.rename(os.path.join(owner.objects_url, victim), owner.base / "kept")
    old = -10 * 365 * 86_400.0  # the test's clock is fixed in the past
    result = run(owner, JobKind.SWEEP, sweep_job, owner.runners, grace_seconds=old, delete=True)
    assert {row["object"] for row in result["orphans"]} == strays
    assert (result["orphaned"], result["deleted"], result["objects"], result["more"]) == (4, 4, 8, False)
    assert [row["object"] for row in result["missing"]] == [victim]
    os.rename(owner.base / "kept", os.path.join(owner.objects_url, victim))
    assert not strays & owner.objects().keys()


def test_an_audit_on_executors_finds_damage(owner: SparkOwner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A count, a catalog row and a head at once. An owner refuses to open such a manifest, so the damage is done while
    it is open.
    """
    store = owner.database("blog")
    write(store, Model(), images(3, 4))
    owner.engine.flush(store.db_id)
    removed: dict[tuple[str, bytes], bytes] = {}
    victims: tuple[tuple[t.Table[Any], tuple[int, ...]], ...] = (
        (t.GC_REFCOUNTS, (1, ArtifactKind.BASE, 1, 1, 0)), (t.CHUNK_CATALOG, (1, 2, 1)),
        (t.PAGE_VERSION_HEAD, (store.db_id, 4)),
    )  # fmt: skip
    env = owner.manifest.env
    with closing_with_commit(env.begin_write()) as txn:
        for table, key in victims:
            raw = table.key.pack(*key)
            removed[table.name, raw] = txn.pop(raw, db=env.handles[table.name])
    monkeypatch.setattr(audit_module, "REFERENCE_ROWS", 4)  # several waves
    on_spark, on_threads = (run(owner, JobKind.AUDIT, audit_job, runners) for runners in (owner.runners, Runners()))
    assert sorted(row["state"] for row in on_spark["found"]) == ["P1", "R1", "R1", "S2"]
    miscounted = {row["artifact"] for row in on_spark["found"] if row["state"] == "R1"}
    assert ["NAMESPACE" in name for name in sorted(miscounted)] == [False, True], (
        "the row referred to its namespace, too"
    )
    assert sorted(map(str, on_spark["found"])) == sorted(map(str, on_threads["found"]))
    assert on_spark["rows"] == on_threads["rows"]
    with closing_with_commit(env.begin_write()) as txn:
        for (name, raw), value in removed.items():
            txn.put(raw, value, db=env.handles[name])


@contextmanager
def closing_with_commit(txn: Any) -> Iterator[Any]:
    yield txn
    txn.commit()


def test_threads_and_executors_give_the_same_totals(owner: SparkOwner) -> None:
    for kind, handler in ((JobKind.STATS, stats_job), (JobKind.AUDIT, audit_job)):
        on_spark = run(owner, kind, handler, owner.runners)
        on_threads = run(owner, kind, handler, Runners())
        assert (on_spark.pop("runner"), on_threads.pop("runner")) == ("spark", "threads")
        assert on_spark == on_threads
        assert on_threads["rows"] > 10
    assert on_threads["differences"] == 0
