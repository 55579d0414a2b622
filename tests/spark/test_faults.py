"""Executors and drivers are really killed: nothing is lost or duplicated, and no object is left over."""

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
from tests.pages.engine_harness import Version, assert_reads
from tests.rules.tree import SRC
from tests.spark.faults_child import DATABASES, content

CLUSTER = "local-cluster[2,1,1024]"
SECONDS = 560
"""Five JVMs are started, possibly on two cores."""


def drive(base: Path, master: str, failpoints: str = "", *more: str, driver: str = "") -> tuple[int, list[str]]:
    """Run a driver to its end. Returns its exit code and its output."""
    environment = {**os.environ, "PYTHONPATH": f"{SRC}:{SRC.parent}", "QUIRE_FAILPOINTS": driver}
    if not driver:
        del environment["QUIRE_FAILPOINTS"]
    command = [sys.executable, "-m", "tests.spark.faults_child", str(base), master, failpoints, *more]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment, cwd=SRC.parent
    )
    lines = result.stdout.splitlines()
    assert result.returncode in (0, -signal.SIGKILL), result.stderr[-4000:]
    return result.returncode, lines


def assert_complete(base: Path) -> None:
    """Assert that every page is there, and that after maintenance there is no object without a row."""
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
    assert len(jobs) == DATABASES, "one job per database, whatever happened"
    assert {job.state for job in jobs} == {JobState.SUCCEEDED}
    assert all(owner.chain(0, db_id) for db_id in range(1, DATABASES + 1))
    owner.stop()


@pytest.mark.slow
def test_a_killed_executor_and_repeated_tasks_lose_nothing(tmp_path: Path) -> None:
    """Spark starts another executor and repeats the tasks, and runs copies of slow ones elsewhere."""
    code, lines = drive(tmp_path, CLUSTER, "jobs.checkpoint.stored=sleep:300", "kill-executor")
    assert code == 0
    assert lines == ["killed", "ran" + " SUCCEEDED" * DATABASES]
    assert_complete(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["planned", "written", "published"])
def test_a_driver_killed_before_or_after_its_batch_loses_nothing(tmp_path: Path, point: str) -> None:
    code, lines = drive(tmp_path, "local[2]", driver=f"jobs.checkpoint.{point}=kill")
    assert code == -signal.SIGKILL
    assert not lines
    code, lines = drive(tmp_path, "local[2]")
    assert code == 0
    if point != "published":
        assert lines == ["ran" + " SUCCEEDED" * DATABASES]
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
    """The content of a database, with the lsn that the store assigned."""
    return replace(content(db).newest, lsn=lsn)


@pytest.mark.slow
def test_an_object_store_that_loses_responses(tmp_path: Path) -> None:
    """The object is stored but the response is lost: Spark repeats the task, which adopts the existing object.

    Each worker process fails at its tenth object and ends; a task has fewer, so one of them always succeeds.
    """
    points = "jobs.checkpoint.stored=9*off->1*raise:EIO"
    code, lines = drive(tmp_path, CLUSTER, points)
    assert code == 0
    assert lines == ["ran" + " SUCCEEDED" * DATABASES]
    assert_published_once(tmp_path)
