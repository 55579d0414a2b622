"""A checkpoint or merge that fails or is killed at any of its steps: the stored plan is run again, to its end (P10,
P11)."""

from __future__ import annotations

import itertools
import pickle
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.failpoints import armed, hits, recording
from quire.manifest.records import JobState
from tests.fork_server import ForkServer
from tests.jobs.checkpoint_child import KINDS, RETRY_SECONDS, ChildTask, Owner, Scene
from tests.jobs.job_store import epoch_name

STEPS = (
    "jobs.worker.claimed",
    "jobs.checkpoint.begun",
    "jobs.checkpoint.planned",
    "jobs.checkpoint.encoded",
    "jobs.checkpoint.stored",
    "jobs.checkpoint.written",
    "jobs.worker.worked",
    "jobs.worker.completed",
)
KEEPING = "jobs.checkpoint.kept"
WAYS = ("raise", "kill")
SAMPLE = {
    ("full", "jobs.checkpoint.begun", "kill", 0),
    ("full", "jobs.checkpoint.stored", "kill", 1),
    ("full", "jobs.checkpoint.encoded", "raise", 1),
    ("delta", "jobs.checkpoint.written", "kill", 0),
    ("delta", "jobs.checkpoint.stored", "raise", 0),
    ("delta", "jobs.checkpoint.planned", "raise", 0),
    ("merge", "jobs.checkpoint.stored", "kill", 0),
    ("merge", "jobs.worker.worked", "raise", 0),
    ("merge", "jobs.worker.completed", "kill", 0),
    ("window", "jobs.checkpoint.kept", "kill", 0),
    ("window", "jobs.checkpoint.written", "raise", 0),
}
PRODUCT = [
    (kind, step, way, skip)
    for kind, step, way in itertools.product(KINDS, (*STEPS, KEEPING), WAYS)
    if kind == "window" or step != KEEPING
    for skip in ((0, 1) if step in ("jobs.checkpoint.encoded", "jobs.checkpoint.stored") else (0,))
]


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("tests.jobs.checkpoint_child:run_child") as fork_server:
        yield fork_server


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Scene]]:
    """A store of each kind, which tests copy."""
    stores_by_kind = {}
    for kind in KINDS:
        base = tmp_path_factory.mktemp(kind)
        stores_by_kind[kind] = (base, Scene.make(base, kind))
    return stores_by_kind


def _copy(scenes: dict[str, tuple[Path, Scene]], kind: str, target: Path) -> Scene:
    base, scene = scenes[kind]
    shutil.copytree(base, target, dirs_exist_ok=True)
    return scene


def _kill_owner(fork_server: ForkServer, base: Path, scene: Scene, failpoints: str, later_seconds: float = 0.0) -> None:
    with fork_server.spawn() as child:
        child.channel.send(pickle.dumps(ChildTask(str(base), scene, failpoints, later_seconds)))
        assert child.channel.receive() is None
        assert child.wait() == -signal.SIGKILL, fork_server.errors()


def _finish(base: Path, scene: Scene, later_seconds: float) -> None:
    """The next owner: nothing is lost, the stored plan is the one that is published, and no objects are left over."""
    owner = scene.open(base, later_seconds)
    scene.assert_readable(owner)
    plans, objects_before, job = owner.plans(), owner.objects(), owner.job(scene.job_id)
    assert len(plans) <= (job.state is not JobState.SUCCEEDED), "a job that has ended has no plan"
    owner.clock.advance(RETRY_SECONDS)
    owner.worker().drain()
    job = owner.job(scene.job_id)
    assert job.state is JobState.SUCCEEDED, job.record.error
    scene.assert_readable(owner)
    for generation, record in plans.items():
        assert job.result["generation"] == generation, "the stored plan was run"
        for slot, delta_id, is_delta in record.artifacts:
            kind = ArtifactKind.DELTA if is_delta else ArtifactKind.BASE
            name = epoch_name(owner.manifest, ArtifactKey(1, kind, slot, generation, delta_id))
            if name in objects_before:
                assert owner.objects()[name] == objects_before[name], "existing objects are adopted, not written again"
    owner.settle()
    scene.assert_readable(owner)
    _assert_outcome(owner, scene.kind, job.result["generation"])
    owner.stop()


def _assert_outcome(owner: Owner, kind: str, generation: int) -> None:
    if kind == "full":
        assert [owner.chain(slot) for slot in range(3)] == [[("BASE", generation)]] * 3
    elif kind in ("delta", "window"):
        assert [owner.chain(slot)[-1] for slot in range(2)] == [("DELTA", generation)] * 2
    else:
        assert [owner.chain(slot) for slot in range(2)] == [[("BASE", generation)]] * 2
    if kind != "merge":
        assert owner.chain(3) == [], "beyond the end (P15)"


def _interrupt(
    scenes: dict[str, tuple[Path, Scene]],
    fork_server: ForkServer,
    base: Path,
    kind: str,
    step: str,
    way: str,
    skip: int,
) -> None:
    scene = _copy(scenes, kind, base)
    if way == "kill":
        _kill_owner(fork_server, base, scene, f"{step}={skip}*off->kill")
        _finish(base, scene, RETRY_SECONDS)
        return
    owner = scene.open(base)
    owner.database()
    with armed(step, f"{skip}*off->1*raise:EIO"):
        owner.worker().run(scene.job_id)
    owner.stop()
    _finish(base, scene, 0.0)


@pytest.mark.parametrize(("kind", "step", "way", "skip"), sorted(SAMPLE))
def test_interrupted_at_a_step_the_stored_plan_is_run_to_its_end(
    scenes: dict[str, tuple[Path, Scene]],
    fork_server: ForkServer,
    tmp_path: Path,
    kind: str,
    step: str,
    way: str,
    skip: int,
) -> None:
    _interrupt(scenes, fork_server, tmp_path, kind, step, way, skip)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "step", "way", "skip"), [case for case in PRODUCT if case not in SAMPLE])
def test_long_interrupted_at_every_step_in_every_way(
    scenes: dict[str, tuple[Path, Scene]],
    fork_server: ForkServer,
    tmp_path: Path,
    kind: str,
    step: str,
    way: str,
    skip: int,
) -> None:
    _interrupt(scenes, fork_server, tmp_path, kind, step, way, skip)


@pytest.mark.parametrize("kind", KINDS)
def test_the_crash_tests_cover_every_step_of_a_job(
    scenes: dict[str, tuple[Path, Scene]], tmp_path: Path, kind: str
) -> None:
    scene = _copy(scenes, kind, tmp_path)
    owner = scene.open(tmp_path)
    owner.database()
    with recording():
        assert owner.worker().run(scene.job_id)
        steps = {name for name in hits() if name.startswith("jobs.")}
    assert steps == ({*STEPS, KEEPING} if kind == "window" else set(STEPS))
    owner.stop()


def test_a_job_killed_twice_still_runs_the_same_plan(
    scenes: dict[str, tuple[Path, Scene]], fork_server: ForkServer, tmp_path: Path
) -> None:
    scene = _copy(scenes, "full", tmp_path)
    _kill_owner(fork_server, tmp_path, scene, "jobs.checkpoint.stored=kill")
    _kill_owner(fork_server, tmp_path, scene, "jobs.checkpoint.written=kill", RETRY_SECONDS)
    _finish(tmp_path, scene, 2 * RETRY_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_long_killed_at_any_commit_or_step(
    scenes: dict[str, tuple[Path, Scene]], fork_server: ForkServer, tmp_path: Path, seed: int
) -> None:
    """Kills at commits of the manifest and syncs of the WAL too, three times in a row."""
    rng = random.Random(seed)
    scene = _copy(scenes, rng.choice(KINDS), tmp_path)
    for attempt in range(3):
        with fork_server.spawn() as child:
            task = ChildTask(str(tmp_path), scene, f"*={rng.randint(0, 60)}*off->kill", attempt * RETRY_SECONDS)
            child.channel.send(pickle.dumps(task))
            assert child.channel.receive() is None
            assert child.wait() in (0, -signal.SIGKILL), fork_server.errors()
    _finish(tmp_path, scene, 4 * RETRY_SECONDS)
