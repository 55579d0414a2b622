"""Executors and drivers that are really killed: nothing is lost, nothing is doubled, and no object is left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quire.manifest.records import JobKind, JobState
from tests.jobs.checkpoint_child import RETRY_SECONDS, Owner
from tests.pages.world import Version, assert_reads
from tests.rules.tree import SRC
from tests.spark.faults_child import DATABASES, content

CLUSTER = "local-cluster[2,1,1024]"
SECONDS = 560
"""Five JVMs are started on the way, on two cores perhaps."""


def drive(base: Path, master: str, failpoints: str = "", *more: str, driver: str = "") -> tuple[int, list[str]]:
    """Run a driver to its end; its exit code, and what it said."""
    environment = {**os.environ, "PYTHONPATH": f"{SRC}:{SRC.parent}", "QUIRE_FAILPOINTS": driver}
    if not driver:
        del environment["QUIRE_FAILPOINTS"]
    command = [sys.executable, "-m", "tests.spark.faults_child", str(base), master, failpoints, *more]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment, cwd=SRC.parent
    )
    said = ended.stdout.splitlines()
    assert ended.returncode in (0, -signal.SIGKILL), ended.stderr[-4000:]
    return ended.returncode, said


def assert_whole(base: Path) -> None:
    """Every page is there, and after what is due was done there is no object that no row speaks of."""
    owner = Owner(base)
    owner.manifest.jobs.recover()
    owner.clock.advance(2_000)
    for _ in range(2):
        for db in range(DATABASES):
            with owner.database(f"db-{db}").open_snapshot() as reader:
                assert reader.size_pages == content(db).newest.size
                expected = content(db).newest
                assert reader.read_pages(range(expected.size)) == dict(expected.pages)
        owner.clock.advance(RETRY_SECONDS)
        owner.settle()
    jobs = [job for job in owner.manifest.jobs.jobs() if job.kind is JobKind.CHECKPOINT]
    assert len(jobs) == DATABASES, "one job for each database, whatever happened on the way"
    assert {job.state for job in jobs} == {JobState.SUCCEEDED}
    assert all(owner.chain(0, db_id) for db_id in range(1, DATABASES + 1))
    owner.stop()


@pytest.mark.slow
def test_an_executor_that_is_killed_and_tasks_that_run_twice(tmp_path: Path) -> None:
    """Spark starts another executor and gives it the tasks again, and copies of slow ones to whoever is free."""
    code, said = drive(tmp_path, CLUSTER, "jobs.checkpoint.stored=sleep:300", "kill-executor")
    assert code == 0
    assert said == ["killed", "ran" + " SUCCEEDED" * DATABASES]
    assert_whole(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["planned", "written", "published"])
def test_a_driver_that_is_killed_before_or_after_its_batch(tmp_path: Path, point: str) -> None:
    code, said = drive(tmp_path, "local[2]", driver=f"jobs.checkpoint.{point}=kill")
    assert code == -signal.SIGKILL
    assert not said
    code, said = drive(tmp_path, "local[2]")
    assert code == 0
    if point != "published":
        assert said == ["ran" + " SUCCEEDED" * DATABASES]
    assert_published_once(tmp_path)


def assert_published_once(base: Path) -> None:
    owner = Owner(base)
    owner.manifest.jobs.recover()
    owner.clock.advance(2_000)
    for db in range(DATABASES):
        with owner.database(f"db-{db}").open_snapshot() as reader:
            assert_reads(reader, content_at(reader.lsn, db))
        assert [kind for kind, _ in owner.chain(0, db + 1)] == ["BASE"]
    owner.settle()
    owner.stop()


def content_at(lsn: int, db: int) -> Version:
    """What a database holds, with the lsn that the store gave it."""
    return replace(content(db).newest, lsn=lsn)


@pytest.mark.slow
def test_an_object_store_that_loses_answers(tmp_path: Path) -> None:
    """The object is there and the answer is lost: Spark runs the task again, and it adopts what is there.

    Each worker process fails at its tenth object and ends with that; a task has fewer, so there is always one that ends.
    """
    points = "jobs.checkpoint.stored=9*off->1*raise:EIO"
    code, said = drive(tmp_path, CLUSTER, points)
    assert code == 0
    assert said == ["ran" + " SUCCEEDED" * DATABASES]
    assert_published_once(tmp_path)
