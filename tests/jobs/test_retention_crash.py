"""Retention of many databases, killed at each of its steps and commits: of each database all goes, or nothing, and once."""

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
from tests.jobs.retention_child import BEGIN_MS, KEPT, MADE, Life, fill
from tests.jobs.test_retention_all import assert_once, left
from tests.jobs.world import World
from tests.nursery import Nursery

COUNT = 10
RETRY_MS = 400_000
"""Beyond any backoff."""

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
    """A store in which nothing has been dropped, copied for every death."""

    def __init__(self, directory: Path, nursery: Nursery) -> None:
        self._directory = directory
        self._nursery = nursery
        self._numbers = itertools.count()
        self._base = directory / "base"
        self._base.mkdir()
        world = World(str(self._base), f"{self._base}/objects", clock=ManualClock(BEGIN_MS))
        self.db_ids = fill(world, COUNT)
        world.close()

    def die(self, *failpoints: str) -> None:
        """One life after another, each killed at its failpoint; then one that is not."""
        root = self._copy()
        for number, each in enumerate(failpoints):
            assert self._live(root, BEGIN_MS + number * RETRY_MS, each) == -signal.SIGKILL, self._nursery.errors()
            self._look(root)
        self._finish(root, BEGIN_MS + len(failpoints) * RETRY_MS)

    def die_everywhere(self) -> int:
        """Killed at the first step, at the second, …, until a life comes to its end; how many deaths that were."""
        for number in itertools.count():
            root = self._copy()
            status = self._live(root, BEGIN_MS, f"*={number}*off->kill")
            self._look(root)
            self._finish(root, BEGIN_MS + RETRY_MS)
            if status == 0:
                return number
            assert status == -signal.SIGKILL, self._nursery.errors()
        raise AssertionError("unreachable")

    def record(self) -> dict[str, int]:
        """The failpoints of a whole life, and how often each is hit."""
        root = self._copy()
        with self._nursery.spawn() as child:
            child.line.send(pickle.dumps(Life(root, BEGIN_MS, "", self.db_ids)))
            answer = child.line.receive()
            assert child.wait() == 0, self._nursery.errors()
        assert answer is not None
        found: dict[str, int] = pickle.loads(answer)
        return found

    def _live(self, root: str, now_ms: int, failpoints: str) -> int:
        with self._nursery.spawn() as child:
            child.line.send(pickle.dumps(Life(root, now_ms, failpoints, self.db_ids)))
            child.line.receive()
            return child.wait()

    def _copy(self) -> str:
        target = str(self._directory / f"life-{next(self._numbers)}")
        shutil.copytree(self._base, target)
        return target

    def _look(self, root: str) -> None:
        """What a death leaves, before anybody does anything about it."""
        world = World(root, f"{root}/objects", clock=ManualClock(BEGIN_MS))
        try:
            world.assert_sound()
            ended = {job.db_id for job in self._jobs(world) if job.state is JobState.SUCCEEDED}
            kept = {db_id: left(world, db_id) for db_id in self.db_ids}
            assert kept == {db_id: KEPT if db_id in ended else MADE for db_id in self.db_ids}, "half of a database"
            assert_once(world)
        finally:
            world.close()

    def _finish(self, root: str, now_ms: int) -> None:
        """The next owner does what is left, and no more."""
        world = World(root, f"{root}/objects", clock=ManualClock(now_ms))
        try:
            world.manifest.jobs.recover()
            world.clock.advance(RETRY_MS / 1000)
            assert {job.state for job in apply_many(world.manifest, self.db_ids)} == {JobState.SUCCEEDED}
            assert {left(world, db_id) for db_id in self.db_ids} == {KEPT}
            assert {job.state for job in self._jobs(world)} == {JobState.SUCCEEDED}
            assert_once(world)
            world.settle()
            world.assert_settled()
            assert len(world.artifacts()) == COUNT * KEPT
        finally:
            world.close()
        shutil.rmtree(root)

    def _jobs(self, world: World) -> list[Job]:
        return [job for job in world.manifest.jobs.jobs() if job.kind is JobKind.RETENTION]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("tests.jobs.retention_child:live") as made:
        yield made


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Scene:
    return Scene(tmp_path_factory.mktemp("scene"), nursery)


def test_every_step_is_hit(scene: Scene) -> None:
    """A step that no life comes to would never be died at."""
    found = {point: hits for point, hits in scene.record().items() if point.startswith("jobs.")}
    assert found == {"jobs.retention.claimed": 1, "jobs.retention.planned": COUNT, "jobs.retention.published": COUNT}


@pytest.mark.parametrize("failpoint", KILLED)
def test_killed_at_a_step_each_database_has_lost_all_or_nothing(scene: Scene, failpoint: str) -> None:
    scene.die(failpoint)


def test_killed_again_and_again(scene: Scene) -> None:
    scene.die(
        "jobs.retention.planned=3*off->kill", "jobs.retention.published=2*off->kill", "jobs.retention.claimed=kill"
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_long_killed_at_every_hit_of_every_step(scene: Scene) -> None:
    """Commits of the manifest included, on both sides of being durable."""
    assert scene.die_everywhere() > 2 * COUNT


def test_a_commit_that_fails_leaves_the_jobs_to_the_next_owner(tmp_path: Path) -> None:
    """Doubt stops writes: nothing can be put back, so the leases say who was at it."""
    world = World(str(tmp_path), str(tmp_path / "objects"), clock=ManualClock(BEGIN_MS))
    db_ids, failing = fill(world, 4), threading.Event()

    def fail(_: str) -> None:
        if failing.is_set():
            raise OSError(errno.EIO, "the disk")

    with (
        armed("manifest.commit.flushed", fail),
        armed("jobs.retention.claimed", lambda _: failing.set()),
        pytest.raises(StoreUnusable),
    ):
        apply_many(world.manifest, db_ids)
    world.close()
    world = World(str(tmp_path), str(tmp_path / "objects"), clock=ManualClock(BEGIN_MS + RETRY_MS))
    try:
        assert world.manifest.jobs.recover() == 4
        world.clock.advance(RETRY_MS / 1000)
        assert {left(world, db_id) for db_id in db_ids} == {MADE}
        assert {job.state for job in apply_many(world.manifest, db_ids)} == {JobState.SUCCEEDED}
        assert_once(world)
    finally:
        world.close()
