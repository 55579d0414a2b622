"""An owner is killed at every step of every job; the next one finds nothing lost, and finishes each job exactly once.

The store that it is killed on: uploads, evictions and hydrations that were asked for, a database that was dropped, a fork that
still needs a part of it, and snapshots that a policy drops.
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
from tests.jobs.crash_child import Life
from tests.jobs.world import ARCHIVED, BOTH, EVICTED, LOCAL, World, request_retention, request_verify
from tests.nursery import Nursery

MOVES = (AuditAction.UPLOADED, AuditAction.EVICTED, AuditAction.HYDRATED)


class Scene:
    """A store in which everything has been asked for and nothing has been done, copied for every death."""

    def __init__(self, directory: Path, nursery: Nursery) -> None:
        self._directory = directory
        self._nursery = nursery
        self._numbers = itertools.count()
        base = directory / "base"
        base.mkdir()
        self.base = str(base)
        world = self._open(self.base)
        self.goals: dict[ArtifactKey, Residency] = {}
        self.jobs = self._ask(world)
        self.bodies, self.now_ms = world.bodies, world.clock.now_ms()
        world.close()

    def _open(self, root: str, now_ms: int = 1_750_000_000_000) -> World:
        return World(root, root + "/objects", clock=ManualClock(now_ms))

    def _ask(self, world: World) -> list[int]:
        manifest = world.manifest
        home = world.database("home")
        local = world.chunks(home, 1, 2, 3)
        segment = world.segment(home, file_bytes=300)
        (archived,) = world.chunks(home, 4, residency=ARCHIVED)
        (both, evicted) = world.chunks(home, 5, 6)
        gone = world.database("gone")
        dropped = [*world.chunks(gone, 1, 2), *world.chunks(gone, 3, residency=ARCHIVED)]
        for key in (both, evicted, *dropped[:2]):
            world.done(request_upload(manifest, key))
        for key in (evicted, dropped[1]):
            world.done(request_evict(manifest, key))
        manifest.snapshots.fork(gone, "heir")
        replaced = world.chunks(gone, 1, 2)
        for _ in range(3):
            manifest.snapshots.publish(home)
            world.clock.advance(60)
        manifest.retention.set(home, RetentionRecord(keep_last=1))
        jobs = [
            request_upload(manifest, local[0]),
            request_upload(manifest, local[1]),
            request_evict(manifest, local[1]),
            request_upload(manifest, segment),
            request_evict(manifest, both),
            request_hydrate(manifest, evicted),
            request_hydrate(manifest, archived),
            request_retention(manifest, home),
            request_verify(manifest),
        ]
        manifest.drop_db(gone).result()
        self.goals = {
            local[0]: BOTH,
            local[1]: EVICTED,
            local[2]: LOCAL,
            segment: BOTH,
            both: EVICTED,
            evicted: BOTH,
            archived: BOTH,
            dropped[0]: BOTH,
            dropped[1]: EVICTED,
            dropped[2]: ARCHIVED,
        }
        assert not set(replaced) & self.goals.keys()
        return jobs

    def record(self) -> dict[str, int]:
        """The failpoints of a whole life, and how often each is hit."""
        root = self._copy()
        answer, status = self._live(Life(root, self.now_ms, "", self.bodies))
        assert status == 0, self._nursery.errors()
        assert answer is not None
        self._finish(root, self.now_ms + 3_600_000)
        found: dict[str, int] = pickle.loads(answer)
        return found

    def die(self, *failpoints: str) -> None:
        """One life after another, each killed at its failpoint; then one that is not."""
        root, now_ms = self._copy(), self.now_ms
        for each in failpoints:
            _, status = self._live(Life(root, now_ms, each, self.bodies))
            assert status == -signal.SIGKILL, f"{each}: {self._nursery.errors()}"
            now_ms += 60_000
        self._finish(root, now_ms)

    def _live(self, life: Life) -> tuple[bytes | None, int]:
        """What a child says at its end, and how it ended."""
        child = self._nursery.spawn()
        child.line.send(pickle.dumps(life))
        answer = child.line.receive()
        child.line.close()
        return answer, child.wait()

    def _copy(self) -> str:
        target = str(self._directory / f"life-{next(self._numbers)}")
        shutil.copytree(self.base, target)
        return target

    def _finish(self, root: str, now_ms: int) -> None:
        world = self._open(root, now_ms)
        try:
            world.bodies.update(self.bodies)
            world.manifest.jobs.recover()
            world.assert_sound()
            world.settle()
            shutil.rmtree(os.path.join(root, "objects", ".tmp"), ignore_errors=True)  # staging: the owner's sweep
            self._assert_finished(world)
            world.assert_replays()
        finally:
            world.close()
        shutil.rmtree(root)

    def _assert_finished(self, world: World) -> None:
        world.assert_settled()
        assert {key: place.residency for key, place in world.artifacts().items()} == self.goals
        for job_id in self.jobs:
            assert world.job(job_id).state is JobState.SUCCEEDED, world.job(job_id).record.error
        with world.manifest.read() as txn:
            ends = Counter(op.job_id for change in txn.changes() for op in change.operations if type(op) is CompleteJob)
            assert [record.name for _, record in txn.databases()] == ["home", "gone", "heir"]
        assert max(ends.values()) == 1, "a job ended twice"
        moves = Counter((each.subject, each.action) for each in world.manifest.audit() if each.action in MOVES)
        for move, count in moves.items():
            assert count == 1, f"{move} happened twice"


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("tests.jobs.crash_child:live") as made:
        yield made


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Scene:
    return Scene(tmp_path_factory.mktemp("scene"), nursery)


@pytest.fixture(scope="module")
def points(scene: Scene) -> dict[str, int]:
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


def test_every_step_of_every_job_is_hit(points: dict[str, int]) -> None:
    """A step that no life comes to would never be died at."""
    expected = {f"{job}.{step}" for job, steps in EXPECTED.items() for step in steps}
    assert {point for point in points if point.startswith("jobs.")} == expected


def test_killed_again_and_again_nothing_is_lost_and_every_job_ends_once(scene: Scene) -> None:
    """One store, an owner after another, each a step further. `1*off` lets a job pass that has died often enough."""
    scene.die(
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
def test_long_killed_at_a_step_nothing_is_lost_and_every_job_ends_once(scene: Scene, point: str) -> None:
    scene.die(f"{point}=kill")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_long_killed_at_every_hit_of_every_step(scene: Scene, points: dict[str, int]) -> None:
    """Commits of the manifest included, on both sides of being durable."""
    for number in range(sum(points.values())):
        scene.die(f"*={number}*off->kill")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_long_killed_at_random_steps(scene: Scene, points: dict[str, int]) -> None:
    """Three lives in a row end at random steps: fewer than a job has attempts."""
    names = [point for point in points if point.startswith(("jobs.worker", "manifest"))]
    for seed in range(40):
        rng = random.Random(seed)
        scene.die(*(f"{rng.choice(names)}={rng.randint(0, 3)}*off->kill" for _ in range(3)))
