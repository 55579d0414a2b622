"""Retention of many databases, killed at each step and commit: each database has lost all due snapshots or none, and
once."""

from __future__ import annotations

import errno
import itertools
import pickle
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.core.errors import StoreUnusable
from quire.durable.failpoints import armed
from quire.jobs.retention import apply_many
from quire.manifest.jobqueue import Job
from quire.manifest.records import JobKind, JobState
from quire.testing.clock import ManualClock
from tests.fork_server import ForkServer
from tests.jobs.job_store import JobStore
from tests.jobs.retention_child import BEGIN_MS, KEPT_SNAPSHOTS, SNAPSHOTS, ChildTask, fill
from tests.jobs.test_retention_all import assert_dropped_once, snapshot_count

COUNT = 10
RETRY_MS = 400_000
"""Longer than any backoff."""

KILLED = (
    "jobs.retention.claimed=kill",
    "jobs.retention.planned=kill",
    "jobs.retention.planned=6*off->kill",
    "jobs.retention.published=kill",
    "jobs.retention.published=9*off->kill",
    "manifest.commit.applied=2*off->kill",
    "manifest.commit.flushed=2*off->kill",
    "manifest.commit.durable=2*off->kill",
    "manifest.commit.durable=kill",
)


class Scene:
    """A store in which nothing has been dropped, copied for every crash."""

    def __init__(self, directory: Path, fork_server: ForkServer) -> None:
        self._directory = directory
        self._fork_server = fork_server
        self._numbers = itertools.count()
        self._base = directory / "base"
        self._base.mkdir()
        job_store = JobStore(str(self._base), f"{self._base}/objects", clock=ManualClock(BEGIN_MS))
        self.db_ids = fill(job_store, COUNT)
        job_store.close()

    def kill_at(self, *failpoints: str) -> None:
        """One process after another, each killed at its failpoint; then one that is not killed."""
        root = self._copy()
        for number, failpoint in enumerate(failpoints):
            assert self._run_child(root, BEGIN_MS + number * RETRY_MS, failpoint) == -signal.SIGKILL, (
                self._fork_server.errors()
            )
            self._assert_after_kill(root)
        self._finish(root, BEGIN_MS + len(failpoints) * RETRY_MS)

    def kill_at_every_step(self) -> int:
        """Kill a process at the first step, the second, …, until one survives; returns the number of kills."""
        for number in itertools.count():
            root = self._copy()
            status = self._run_child(root, BEGIN_MS, f"*={number}*off->kill")
            self._assert_after_kill(root)
            self._finish(root, BEGIN_MS + RETRY_MS)
            if status == 0:
                return number
            assert status == -signal.SIGKILL, self._fork_server.errors()
        raise AssertionError("unreachable")

    def record(self) -> dict[str, int]:
        """The failpoints of a run without a kill, and how often each is hit."""
        root = self._copy()
        with self._fork_server.spawn() as child:
            child.channel.send(pickle.dumps(ChildTask(root, BEGIN_MS, "", self.db_ids)))
            response = child.channel.receive()
            assert child.wait() == 0, self._fork_server.errors()
        assert response is not None
        hits_by_point: dict[str, int] = pickle.loads(response)
        return hits_by_point

    def _run_child(self, root: str, now_ms: int, failpoints: str) -> int:
        with self._fork_server.spawn() as child:
            child.channel.send(pickle.dumps(ChildTask(root, now_ms, failpoints, self.db_ids)))
            child.channel.receive()
            return child.wait()

    def _copy(self) -> str:
        target = str(self._directory / f"run-{next(self._numbers)}")
        shutil.copytree(self._base, target)
        return target

    def _assert_after_kill(self, root: str) -> None:
        """What a kill leaves, before recovery."""
        job_store = JobStore(root, f"{root}/objects", clock=ManualClock(BEGIN_MS))
        try:
            job_store.assert_sound()
            completed = {job.db_id for job in self._jobs(job_store) if job.state is JobState.SUCCEEDED}
            counts = {db_id: snapshot_count(job_store, db_id) for db_id in self.db_ids}
            assert counts == {db_id: KEPT_SNAPSHOTS if db_id in completed else SNAPSHOTS for db_id in self.db_ids}, (
                "a database with only some drops"
            )
            assert_dropped_once(job_store)
        finally:
            job_store.close()

    def _finish(self, root: str, now_ms: int) -> None:
        """The next owner does what remains, and nothing else."""
        job_store = JobStore(root, f"{root}/objects", clock=ManualClock(now_ms))
        try:
            job_store.manifest.jobs.recover()
            job_store.clock.advance(RETRY_MS / 1000)
            assert {job.state for job in apply_many(job_store.manifest, self.db_ids)} == {JobState.SUCCEEDED}
            assert {snapshot_count(job_store, db_id) for db_id in self.db_ids} == {KEPT_SNAPSHOTS}
            assert {job.state for job in self._jobs(job_store)} == {JobState.SUCCEEDED}
            assert_dropped_once(job_store)
            job_store.settle()
            job_store.assert_settled()
            assert len(job_store.artifacts()) == COUNT * KEPT_SNAPSHOTS
        finally:
            job_store.close()
        shutil.rmtree(root)

    def _jobs(self, job_store: JobStore) -> list[Job]:
        return [job for job in job_store.manifest.jobs.jobs() if job.kind is JobKind.RETENTION]


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("tests.jobs.retention_child:run_child") as fork_server:
        yield fork_server


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Scene:
    return Scene(tmp_path_factory.mktemp("scene"), fork_server)


def test_every_step_is_hit(scene: Scene) -> None:
    """A step that no run reaches would never be tested with a kill."""
    hits_by_point = {point: hits for point, hits in scene.record().items() if point.startswith("jobs.")}
    assert hits_by_point == {
        "jobs.retention.claimed": 1,
        "jobs.retention.planned": COUNT,
        "jobs.retention.published": COUNT,
    }


@pytest.mark.parametrize("failpoint", KILLED)
def test_killed_at_a_step_each_database_has_lost_all_or_nothing(scene: Scene, failpoint: str) -> None:
    scene.kill_at(failpoint)


def test_repeated_kills(scene: Scene) -> None:
    scene.kill_at(
        "jobs.retention.planned=3*off->kill", "jobs.retention.published=2*off->kill", "jobs.retention.claimed=kill"
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_long_killed_at_every_hit_of_every_step(scene: Scene) -> None:
    """Includes commits of the manifest, before and after they are durable."""
    assert scene.kill_at_every_step() > 2 * COUNT


def test_a_commit_that_fails_leaves_the_jobs_to_the_next_owner(tmp_path: Path) -> None:
    """After a doubtful commit writes stop, so jobs cannot be put back; their leases record which worker had them."""
    job_store = JobStore(str(tmp_path), str(tmp_path / "objects"), clock=ManualClock(BEGIN_MS))
    db_ids, failing = fill(job_store, 4), threading.Event()

    def fail(_: str) -> None:
        if failing.is_set():
            raise OSError(errno.EIO, "the disk")

    with (
        armed("manifest.commit.flushed", fail),
        armed("jobs.retention.claimed", lambda _: failing.set()),
        pytest.raises(StoreUnusable),
    ):
        apply_many(job_store.manifest, db_ids)
    job_store.close()
    job_store = JobStore(str(tmp_path), str(tmp_path / "objects"), clock=ManualClock(BEGIN_MS + RETRY_MS))
    try:
        assert job_store.manifest.jobs.recover() == 4
        job_store.clock.advance(RETRY_MS / 1000)
        assert {snapshot_count(job_store, db_id) for db_id in db_ids} == {SNAPSHOTS}
        assert {job.state for job in apply_many(job_store.manifest, db_ids)} == {JobState.SUCCEEDED}
        assert_dropped_once(job_store)
    finally:
        job_store.close()
