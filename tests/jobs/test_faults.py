"""Each call of the disk and of the object store fails once: the job is tried again and is right in the end, nothing is lost."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from quire.core.errors import ObjectStoreUnavailable
from quire.core.ids import ArtifactKey
from quire.durable.files import Disk, OsDisk
from quire.jobs.residency import request_evict, request_hydrate, request_upload
from quire.manifest.records import JobState, Residency, VerifyState
from quire.objects.api import ObjectStore
from quire.objects.open import open_store
from quire.testing.crashdisk import Chooser, CrashDisk, drop_all, keep_all
from quire.testing.faults import Fault, FaultyDisk, PowerCut
from tests.jobs.world import BOTH, EVICTED, LOCAL, World, request_verify

MOVES: dict[str, tuple[Residency, Residency | None]] = {
    "upload": (LOCAL, BOTH),
    "evict": (BOTH, EVICTED),
    "hydrate": (EVICTED, BOTH),
    "verify": (BOTH, BOTH),
    "delete": (BOTH, None),
    "delete-evicted": (EVICTED, None),
}
"""What is done to an artifact: where it is before, and after (`None`: gone)."""

SOME_MOVES = [
    pytest.param(move, marks=pytest.mark.slow) if move in ("verify", "delete-evicted") else move for move in MOVES
]


def ask(world: World, move: str, key: ArtifactKey) -> None:
    if move.startswith("delete"):
        world.manifest.drop_db(key.origin_db_id).result()
        world.worker.drain()
        world.clock.advance(120)
        return
    requests: dict[str, Callable[..., int]] = {
        "upload": request_upload,
        "evict": request_evict,
        "hydrate": request_hydrate,
        "verify": lambda manifest, _: request_verify(manifest),
    }
    requests[move](world.manifest, key)


def assert_reached(world: World, key: ArtifactKey, move: str) -> None:
    """Everything has ended well, and the artifact is where it should be."""
    ended = [job for job in world.manifest.jobs.jobs() if job.state is not JobState.SUCCEEDED]
    assert not ended, ended
    goal, row = MOVES[move][1], world.row(key)
    assert (row.residency if row is not None else None) is goal
    if move == "verify":
        assert row.verify_state is VerifyState.VERIFIED
    world.assert_settled()


class Switch:
    """A disk behind which another one can be put."""

    def __init__(self) -> None:
        self.inner: Disk = OsDisk()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class FlakyStore:
    """An object store of which one call fails: before it does anything, or after it has done everything."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.fail_at = 0
        self.calls = 0
        self.after = False

    def opened(self, _: str) -> ObjectStore:
        return cast(ObjectStore, self)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if not callable(found) or name == "close":
            return found

        def call(*args: Any, **more: Any) -> Any:
            self.calls += 1
            fails = self.calls == self.fail_at
            if fails and not self.after:
                raise ObjectStoreUnavailable("no connection", call=name)
            answer = found(*args, **more)
            if fails:
                raise ObjectStoreUnavailable("the answer was lost", call=name)
            return answer

        return call


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("move", SOME_MOVES)
def test_an_object_store_that_fails_at_every_call(tmp_path: Path, move: str, after: bool) -> None:
    for fail_at in itertools.count(1):
        # A store for each call: to verify means to read all of it, and would take more calls each time.
        root = tmp_path / str(fail_at)
        root.mkdir()
        flaky = FlakyStore(open_store(str(root / "objects")))
        world = World(str(root), str(root / "objects"), opener=flaky.opened)
        key = world.artifact(MOVES[move][0])
        ask(world, move, key)
        flaky.calls, flaky.fail_at, flaky.after = 0, fail_at, after
        world.worker.drain()
        world.assert_sound()
        fired = flaky.calls >= fail_at
        assert fired == bool(world.manifest.jobs.jobs(JobState.PENDING)), "a failed call is a failed attempt"
        world.settle()
        assert_reached(world, key, move)
        world.close()
        if not fired:
            break
    assert fail_at > 1, "no call failed: the test tested nothing"


@pytest.mark.parametrize(
    "fault",
    [
        Fault.EIO,
        pytest.param(Fault.LOST_ANSWER, marks=pytest.mark.slow),
        pytest.param(Fault.ENOSPC, marks=pytest.mark.slow),
        pytest.param(Fault.SHORT_WRITE, marks=pytest.mark.slow),
    ],
    ids=lambda fault: fault.name,
)
@pytest.mark.parametrize("move", SOME_MOVES)
def test_a_disk_that_fails_at_every_call(tmp_path: Path, move: str, fault: Fault) -> None:
    """The disk below the files and below the object store."""
    switch = Switch()
    disk = cast(Disk, switch)
    for fail_at in itertools.count(1):
        # A store for each call: upkeep walks through all its directories, and would make more calls each time.
        root = tmp_path / str(fail_at)
        root.mkdir()
        switch.inner = OsDisk()
        world = World(str(root), str(root / "objects"), disk=disk, opener=lambda url: open_store(url, disk=disk))
        key = world.artifact(MOVES[move][0])
        ask(world, move, key)
        faulty = switch.inner = FaultyDisk(OsDisk(), fault, fail_at=fail_at)
        world.worker.drain()
        world.assert_sound()
        world.settle()
        assert_reached(world, key, move)
        world.close()
        if not faulty.fired:
            break
    assert fail_at > 1, "no call failed: the test tested nothing"


# ── power ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
class Prepared:
    """A store in which one move is asked for, copied for each loss of power. Its manifest is not on the crash disk."""

    def __init__(self, directory: Path, move: str) -> None:
        self.move = move
        self._directory = directory
        self._numbers = itertools.count()
        self._base = directory / "base"
        (self._base / "files").mkdir(parents=True)
        world = self._open(self._base)
        self.key = world.artifact(MOVES[move][0])
        ask(world, move, self.key)
        self.bodies, self.now_ms = world.bodies, world.clock.now_ms()
        world.close()

    def _open(self, directory: Path, **more: Any) -> World:
        files = str(directory / "files")
        return World(files, files + "/objects", manifest_path=str(directory / "manifest.lmdb"), **more)

    def lose_power(self, fail_at: int, *choosers: Chooser) -> bool:
        """Whether power went off at that call; whatever the disk then held, the store must be sound and go on."""
        here = self._copy(self._base)
        crash_disk = CrashDisk(str(here / "files"))
        disk = FaultyDisk(crash_disk, Fault.POWER_CUT, fail_at=fail_at)
        world = self._open(here, disk=disk, opener=lambda url: open_store(url, disk=disk))
        world.clock.jump((self.now_ms - world.clock.now_ms()) / 1000)
        try:
            world.worker.drain()
        except PowerCut:
            pass
        world.close()
        for choose in choosers:
            there = self._directory / f"copy-{next(self._numbers)}"
            there.mkdir()
            for name in ("manifest.lmdb",):
                shutil.copy(here / name, there / name)
            crash_disk.crash(str(there / "files"), choose)
            self._go_on(there)
            shutil.rmtree(there)
        shutil.rmtree(here)
        return disk.fired

    def _go_on(self, directory: Path) -> None:
        world = self._open(directory, bodies=self.bodies)
        world.clock.jump((self.now_ms - world.clock.now_ms()) / 1000 + 1)
        world.manifest.jobs.recover()
        world.assert_sound()
        world.settle()
        shutil.rmtree(os.path.join(world.objects_url, ".tmp"), ignore_errors=True)  # staging: the owner's sweep
        assert_reached(world, self.key, self.move)
        world.close()

    def _copy(self, directory: Path) -> Path:
        target = self._directory / f"copy-{next(self._numbers)}"
        shutil.copytree(directory, target)
        return target


def each_power_cut(prepared: Prepared, choosers: Callable[[int], list[Chooser]]) -> Iterator[int]:
    for fail_at in itertools.count(1):
        if not prepared.lose_power(fail_at, *choosers(fail_at)):
            return
        yield fail_at


@pytest.mark.parametrize("move", SOME_MOVES)
def test_power_that_goes_off_at_every_call(tmp_path: Path, move: str) -> None:
    """Nothing that was not synced survives: a row that promises more than was synced would be found out."""
    assert sum(1 for _ in each_power_cut(Prepared(tmp_path, move), lambda _: [drop_all])) > 2


@pytest.mark.slow
@pytest.mark.parametrize("move", MOVES)
def test_long_power_that_goes_off_with_any_outcome(tmp_path: Path, move: str) -> None:
    def choosers(fail_at: int) -> list[Chooser]:
        return [keep_all, *(random.Random(f"{fail_at}/{seed}").choice for seed in range(8))]

    assert sum(1 for _ in each_power_cut(Prepared(tmp_path, move), choosers)) > 2
