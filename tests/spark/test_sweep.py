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
from tests.pages.world import Model, write
from tests.spark.world import SparkOwner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def owner(spark: SparkSession, tmp_path: Path) -> Iterator[SparkOwner]:
    made = SparkOwner(tmp_path, spark=spark)
    store, model = made.database(), Model()
    write(store, model, images(*range(40)))
    made.ask()
    Owner.worker(made).drain()
    assert made.manifest.reserve_generation(1) == BURNED
    made.engine.snapshot("shop", "early")
    made.engine.fork("shop", "fork")
    yield made
    made.stop()


def run(owner: SparkOwner, kind: JobKind, handler: Any, runners: Runners, **payload: Any) -> dict[str, Any]:
    job_id = owner.manifest.jobs.enqueue(kind, 0, payload or None)
    Worker(replace(owner.context(), runners=runners), {kind: handler}).drain()
    job = owner.job(job_id)
    assert job.state is JobState.SUCCEEDED, job.record.error
    result: dict[str, Any] = job.result
    return result


def test_orphans_and_missing_objects_are_what_an_outer_join_leaves(
    owner: SparkOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "RANGE_NAMES", 2)  # several tasks, several partitions
    strays = {put(owner, orphan(slot)) for slot in (0, 7, 900)} | {put(owner, orphan(3, db_id=700))}
    victim = sorted(owner.objects().keys() - strays)[1]
    os.rename(os.path.join(owner.objects_url, victim), owner.base / "kept")
    old = -10 * 365 * 86_400.0  # the test's clock stands still in the past
    found = run(owner, JobKind.SWEEP, sweep_job, owner.runners, grace_seconds=old, delete=True)
    assert {each["object"] for each in found["orphans"]} == strays
    assert (found["orphaned"], found["deleted"], found["objects"], found["more"]) == (4, 4, 8, False)
    assert [each["object"] for each in found["missing"]] == [victim]
    os.rename(owner.base / "kept", os.path.join(owner.objects_url, victim))
    assert not strays & owner.objects().keys()


def test_an_audit_on_executors_finds_what_was_damaged(owner: SparkOwner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A count, a catalog row and a head at once; an owner does not open such a manifest, so it happens to one that is open."""
    store = owner.database("blog")
    write(store, Model(), images(3, 4))
    owner.engine.flush(store.db_id)
    taken: dict[tuple[str, bytes], bytes] = {}
    victims: tuple[tuple[t.Table[Any], tuple[int, ...]], ...] = (
        (t.GC_REFCOUNTS, (1, ArtifactKind.BASE, 1, 1, 0)), (t.CHUNK_CATALOG, (1, 2, 1)),
        (t.PAGE_VERSION_HEAD, (store.db_id, 4)),
    )  # fmt: skip
    env = owner.manifest.env
    with closing_with_commit(env.begin_write()) as txn:
        for table, key in victims:
            raw = table.key.pack(*key)
            taken[table.name, raw] = txn.pop(raw, db=env.handles[table.name])
    monkeypatch.setattr(audit_module, "REFERENCE_ROWS", 4)  # several waves
    theirs, ours = (run(owner, JobKind.AUDIT, audit_job, runners) for runners in (owner.runners, Runners()))
    assert sorted(each["state"] for each in theirs["found"]) == ["P1", "R1", "R1", "S2"]
    counted = {each["artifact"] for each in theirs["found"] if each["state"] == "R1"}
    assert ["NAMESPACE" in name for name in sorted(counted)] == [False, True], "the row held its namespace, too"
    assert sorted(map(str, theirs["found"])) == sorted(map(str, ours["found"]))
    assert theirs["rows"] == ours["rows"]
    with closing_with_commit(env.begin_write()) as txn:
        for (name, raw), value in taken.items():
            txn.put(raw, value, db=env.handles[name])


@contextmanager
def closing_with_commit(txn: Any) -> Iterator[Any]:
    yield txn
    txn.commit()


def test_threads_and_executors_add_up_the_same(owner: SparkOwner) -> None:
    for kind, handler in ((JobKind.STATS, stats_job), (JobKind.AUDIT, audit_job)):
        theirs = run(owner, kind, handler, owner.runners)
        ours = run(owner, kind, handler, Runners())
        assert (theirs.pop("runner"), ours.pop("runner")) == ("spark", "threads")
        assert theirs == ours
        assert ours["rows"] > 10
    assert ours["differences"] == 0
