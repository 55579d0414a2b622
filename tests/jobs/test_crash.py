"""An owner is killed at every step of every job; the next owner finds nothing lost, and completes each job exactly
once.

The store has enqueued uploads, evictions and hydrations, a dropped database, a fork that still needs a part of it, and
snapshots that a policy drops.
"""

from __future__ import annotations

import itertools
import os
import pickle
import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.core.ids import ArtifactKey
from quire.jobs.residency import request_evict, request_hydrate, request_upload
from quire.manifest.ops.jobs import CompleteJob
from quire.manifest.records import AuditAction, JobState, Residency, RetentionRecord
from quire.testing.clock import ManualClock
from tests.fork_server import ForkServer
from tests.jobs.crash_child import ChildTask
from tests.jobs.job_store import ARCHIVED, BOTH, EVICTED, LOCAL, JobStore, request_retention, request_verify

MOVES = (AuditAction.UPLOADED, AuditAction.EVICTED, AuditAction.HYDRATED)


class Scene:
    """A store in which all jobs are enqueued and none has run; it is copied for every crash."""

    def __init__(self, directory: Path, fork_server: ForkServer) -> None:
        self._directory = directory
        self._fork_server = fork_server
        self._numbers = itertools.count()
        base = directory / "base"
        base.mkdir()
        self.base = str(base)
        job_store = self._open(self.base)
        self.goals: dict[ArtifactKey, Residency] = {}
        self.jobs = self._enqueue_jobs(job_store)
        self.bodies, self.now_ms = job_store.bodies, job_store.clock.now_ms()
        job_store.close()

    def _open(self, root: str, now_ms: int = 1_750_000_000_000) -> JobStore:
        return JobStore(root, root + "/objects", clock=ManualClock(now_ms))

    def _enqueue_jobs(self, job_store: JobStore) -> list[int]:
        manifest = job_store.manifest
        live_db = job_store.database("home")
        local = job_store.chunks(live_db, 1, 2, 3)
        segment = job_store.segment(live_db, file_bytes=300)
        (archived,) = job_store.chunks(live_db, 4, residency=ARCHIVED)
        (both, evicted) = job_store.chunks(live_db, 5, 6)
        dropped_db = job_store.database("gone")
        dropped_chunks = [*job_store.chunks(dropped_db, 1, 2), *job_store.chunks(dropped_db, 3, residency=ARCHIVED)]
        for key in (both, evicted, *dropped_chunks[:2]):
            job_store.succeed(request_upload(manifest, key))
        for key in (evicted, dropped_chunks[1]):
            job_store.succeed(request_evict(manifest, key))
        manifest.snapshots.fork(dropped_db, "heir")
        replaced = job_store.chunks(dropped_db, 1, 2)
        for _ in range(3):
            manifest.snapshots.publish(live_db)
            job_store.clock.advance(60)
        manifest.retention.set(live_db, RetentionRecord(keep_last=1))
        jobs = [
            request_upload(manifest, local[0]),
            request_upload(manifest, local[1]),
            request_evict(manifest, local[1]),
            request_upload(manifest, segment),
            request_evict(manifest, both),
            request_hydrate(manifest, evicted),
            request_hydrate(manifest, archived),
            request_retention(manifest, live_db),
            request_verify(manifest),
        ]
        manifest.drop_db(dropped_db).result()
        self.goals = {
            local[0]: BOTH,
            local[1]: EVICTED,
            local[2]: LOCAL,
            segment: BOTH,
            both: EVICTED,
            evicted: BOTH,
            archived: BOTH,
            dropped_chunks[0]: BOTH,
            dropped_chunks[1]: EVICTED,
            dropped_chunks[2]: ARCHIVED,
        }
        assert not set(replaced) & self.goals.keys()
        return jobs

    def record(self) -> dict[str, int]:
        """The failpoints of a run without a crash, and how often each is hit."""
        root = self._copy()
        response, status = self._run_child(ChildTask(root, self.now_ms, "", self.bodies))
        assert status == 0, self._fork_server.errors()
        assert response is not None
        self._finish(root, self.now_ms + 3_600_000)
        hits_by_point: dict[str, int] = pickle.loads(response)
        return hits_by_point

    def kill_at(self, *failpoints: str) -> None:
        """One process after another, each killed at its failpoint; then one that is not killed."""
        root, now_ms = self._copy(), self.now_ms
        for failpoint in failpoints:
            _, status = self._run_child(ChildTask(root, now_ms, failpoint, self.bodies))
            assert status == -signal.SIGKILL, f"{failpoint}: {self._fork_server.errors()}"
            now_ms += 60_000
        self._finish(root, now_ms)

    def _run_child(self, task: ChildTask) -> tuple[bytes | None, int]:
        """The message that a child sends at its end, and its exit status."""
        child = self._fork_server.spawn()
        child.channel.send(pickle.dumps(task))
        response = child.channel.receive()
        child.channel.close()
        return response, child.wait()

    def _copy(self) -> str:
        target = str(self._directory / f"run-{next(self._numbers)}")
        shutil.copytree(self.base, target)
        return target

    def _finish(self, root: str, now_ms: int) -> None:
        job_store = self._open(root, now_ms)
        try:
            job_store.bodies.update(self.bodies)
            job_store.manifest.jobs.recover()
            job_store.assert_sound()
            job_store.settle()
            # staging files are removed by the owner's sweep
            shutil.rmtree(os.path.join(root, "objects", ".tmp"), ignore_errors=True)
            self._assert_finished(job_store)
            job_store.assert_replays()
        finally:
            job_store.close()
        shutil.rmtree(root)

    def _assert_finished(self, job_store: JobStore) -> None:
        job_store.assert_settled()
        assert {key: location.residency for key, location in job_store.artifacts().items()} == self.goals
        for job_id in self.jobs:
            assert job_store.job(job_id).state is JobState.SUCCEEDED, job_store.job(job_id).record.error
        with job_store.manifest.read() as txn:
            ends = Counter(op.job_id for change in txn.changes() for op in change.operations if type(op) is CompleteJob)
            assert [record.name for _, record in txn.databases()] == ["home", "gone", "heir"]
        assert max(ends.values()) == 1, "a job ended twice"
        moves = Counter((entry.subject, entry.action) for entry in job_store.manifest.audit() if entry.action in MOVES)
        for move, count in moves.items():
            assert count == 1, f"{move} happened twice"


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("tests.jobs.crash_child:run_child") as fork_server:
        yield fork_server


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Scene:
    return Scene(tmp_path_factory.mktemp("scene"), fork_server)


@pytest.fixture(scope="module")
def hit_counts(scene: Scene) -> dict[str, int]:
    return scene.record()


EXPECTED = {
    "jobs.worker": ("claimed", "worked", "completed"),
    "jobs.upload": ("announced", "hashed", "sent", "checked"),
    "jobs.evict": ("checked", "published", "removed"),
    "jobs.hydrate": ("begun", "staged", "renamed", "named"),
    "jobs.delete": ("planned", "files_gone", "objects_gone", "published"),
    "jobs.verify": ("looked", "published"),
    "jobs.retention": ("planned",),
}


def test_every_step_of_every_job_is_hit(hit_counts: dict[str, int]) -> None:
    """A step that no run reaches would never be tested with a kill."""
    expected = {f"{job}.{step}" for job, steps in EXPECTED.items() for step in steps}
    assert {point for point in hit_counts if point.startswith("jobs.")} == expected


def test_after_repeated_kills_nothing_is_lost_and_every_job_completes_once(scene: Scene) -> None:
    """One store, one owner after another, each one step further. `1*off` spares a job that has already failed often
    enough."""
    scene.kill_at(
        "jobs.worker.claimed=kill",
        "jobs.upload.announced=kill",
        "jobs.upload.hashed=kill",
        "jobs.upload.sent=kill",
        "jobs.upload.checked=1*off->kill",
        "jobs.worker.worked=1*off->kill",
        "jobs.evict.checked=kill",
        "jobs.evict.published=kill",
        "jobs.evict.removed=kill",
        "jobs.hydrate.begun=kill",
        "jobs.hydrate.staged=kill",
        "jobs.hydrate.renamed=kill",
        "jobs.hydrate.named=1*off->kill",
        "jobs.retention.planned=kill",
        "jobs.verify.looked=2*off->kill",
        "jobs.verify.published=kill",
        "jobs.delete.planned=kill",
        "jobs.delete.files_gone=1*off->kill",
        "jobs.delete.objects_gone=kill",
        "jobs.delete.published=kill",
        "jobs.worker.completed=kill",
    )


@pytest.mark.slow
@pytest.mark.parametrize("point", [f"{job}.{step}" for job, steps in EXPECTED.items() for step in steps])
def test_long_killed_at_a_step_nothing_is_lost_and_every_job_completes_once(scene: Scene, point: str) -> None:
    scene.kill_at(f"{point}=kill")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_long_killed_at_every_hit_of_every_step(scene: Scene, hit_counts: dict[str, int]) -> None:
    """Includes commits of the manifest, before and after they are durable."""
    for number in range(sum(hit_counts.values())):
        scene.kill_at(f"*={number}*off->kill")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_long_killed_at_random_steps(scene: Scene, hit_counts: dict[str, int]) -> None:
    """Three processes in a row die at random steps: fewer than a job has attempts."""
    names = [point for point in hit_counts if point.startswith(("jobs.worker", "manifest"))]
    for seed in range(40):
        rng = random.Random(seed)
        scene.kill_at(*(f"{rng.choice(names)}={rng.randint(0, 3)}*off->kill" for _ in range(3)))
