"""Each call of the disk and of the object store fails once: the job is retried and succeeds in the end, and nothing is
lost."""

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
from tests.jobs.job_store import BOTH, EVICTED, LOCAL, JobStore, request_verify

MOVES: dict[str, tuple[Residency, Residency | None]] = {
    "upload": (LOCAL, BOTH),
    "evict": (BOTH, EVICTED),
    "hydrate": (EVICTED, BOTH),
    "verify": (BOTH, BOTH),
    "delete": (BOTH, None),
    "delete-evicted": (EVICTED, None),
}
"""What is done to an artifact: its residency before and after (`None`: deleted)."""

SOME_MOVES = [
    pytest.param(move, marks=pytest.mark.slow) if move in ("verify", "delete-evicted") else move for move in MOVES
]


def enqueue_move(job_store: JobStore, move: str, key: ArtifactKey) -> None:
    if move.startswith("delete"):
        job_store.manifest.drop_db(key.origin_db_id).result()
        job_store.worker.drain()
        job_store.clock.advance(120)
        return
    requests: dict[str, Callable[..., int]] = {
        "upload": request_upload,
        "evict": request_evict,
        "hydrate": request_hydrate,
        "verify": lambda manifest, _: request_verify(manifest),
    }
    requests[move](job_store.manifest, key)


def assert_reached(job_store: JobStore, key: ArtifactKey, move: str) -> None:
    """Every job has succeeded, and the artifact has its final residency."""
    unsuccessful = [job for job in job_store.manifest.jobs.jobs() if job.state is not JobState.SUCCEEDED]
    assert not unsuccessful, unsuccessful
    goal, row = MOVES[move][1], job_store.row(key)
    assert (row.residency if row is not None else None) is goal
    if move == "verify":
        assert row.verify_state is VerifyState.VERIFIED
    job_store.assert_settled()


class SwitchableDisk:
    """A disk that can be replaced while it is in use."""

    def __init__(self) -> None:
        self.inner: Disk = OsDisk()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class FlakyStore:
    """An object store of which one call fails, before or after it takes effect."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.fail_at = 0
        self.calls = 0
        self.fails_after = False

    def opened(self, _: str) -> ObjectStore:
        return cast(ObjectStore, self)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.inner, name)
        if not callable(attribute) or name == "close":
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            fails = self.calls == self.fail_at
            if fails and not self.fails_after:
                raise ObjectStoreUnavailable("no connection", call=name)
            result = attribute(*args, **kwargs)
            if fails:
                raise ObjectStoreUnavailable("the response was lost", call=name)
            return result

        return call


@pytest.mark.parametrize("fails_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("move", SOME_MOVES)
def test_an_object_store_that_fails_at_every_call(tmp_path: Path, move: str, fails_after: bool) -> None:
    for fail_at in itertools.count(1):
        # A store for each call: verification reads the whole store, so the number of calls would grow each time.
        root = tmp_path / str(fail_at)
        root.mkdir()
        flaky = FlakyStore(open_store(str(root / "objects")))
        job_store = JobStore(str(root), str(root / "objects"), opener=flaky.opened)
        key = job_store.artifact(MOVES[move][0])
        enqueue_move(job_store, move, key)
        flaky.calls, flaky.fail_at, flaky.fails_after = 0, fail_at, fails_after
        job_store.worker.drain()
        job_store.assert_sound()
        fired = flaky.calls >= fail_at
        assert fired == bool(job_store.manifest.jobs.jobs(JobState.PENDING)), "a failed call is a failed attempt"
        job_store.settle()
        assert_reached(job_store, key, move)
        job_store.close()
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
    """The disk is below both the files and the object store."""
    switch = SwitchableDisk()
    disk = cast(Disk, switch)
    for fail_at in itertools.count(1):
        # A store for each call: upkeep walks all its directories, so the number of calls would grow each time.
        root = tmp_path / str(fail_at)
        root.mkdir()
        switch.inner = OsDisk()
        job_store = JobStore(str(root), str(root / "objects"), disk=disk, opener=lambda url: open_store(url, disk=disk))
        key = job_store.artifact(MOVES[move][0])
        enqueue_move(job_store, move, key)
        faulty = switch.inner = FaultyDisk(OsDisk(), fault, fail_at=fail_at)
        job_store.worker.drain()
        job_store.assert_sound()
        job_store.settle()
        assert_reached(job_store, key, move)
        job_store.close()
        if not faulty.fired:
            break
    assert fail_at > 1, "no call failed: the test tested nothing"


# ── power loss ────────────────────────────────────────────────────────────────────────────────────────────────────────
class PowerLossScene:
    """A store in which one move is enqueued, copied for each power loss. Its manifest is not on the crash disk."""

    def __init__(self, directory: Path, move: str) -> None:
        self.move = move
        self._directory = directory
        self._numbers = itertools.count()
        self._base = directory / "base"
        (self._base / "files").mkdir(parents=True)
        job_store = self._open(self._base)
        self.key = job_store.artifact(MOVES[move][0])
        enqueue_move(job_store, move, self.key)
        self.bodies, self.now_ms = job_store.bodies, job_store.clock.now_ms()
        job_store.close()

    def _open(self, directory: Path, **options: Any) -> JobStore:
        files = str(directory / "files")
        return JobStore(files, files + "/objects", manifest_path=str(directory / "manifest.lmdb"), **options)

    def lose_power(self, fail_at: int, *choosers: Chooser) -> bool:
        """Whether power was cut at that call. Whatever the disk then held, the store must be sound and complete the
        job."""
        directory = self._copy(self._base)
        crash_disk = CrashDisk(str(directory / "files"))
        disk = FaultyDisk(crash_disk, Fault.POWER_CUT, fail_at=fail_at)
        job_store = self._open(directory, disk=disk, opener=lambda url: open_store(url, disk=disk))
        job_store.clock.jump((self.now_ms - job_store.clock.now_ms()) / 1000)
        try:
            job_store.worker.drain()
        except PowerCut:
            pass
        job_store.close()
        for choose in choosers:
            copy = self._directory / f"copy-{next(self._numbers)}"
            copy.mkdir()
            for name in ("manifest.lmdb",):
                shutil.copy(directory / name, copy / name)
            crash_disk.crash(str(copy / "files"), choose)
            self._recover(copy)
            shutil.rmtree(copy)
        shutil.rmtree(directory)
        return disk.fired

    def _recover(self, directory: Path) -> None:
        job_store = self._open(directory, bodies=self.bodies)
        job_store.clock.jump((self.now_ms - job_store.clock.now_ms()) / 1000 + 1)
        job_store.manifest.jobs.recover()
        job_store.assert_sound()
        job_store.settle()
        # staging files are removed by the owner's sweep
        shutil.rmtree(os.path.join(job_store.objects_url, ".tmp"), ignore_errors=True)
        assert_reached(job_store, self.key, self.move)
        job_store.close()

    def _copy(self, directory: Path) -> Path:
        target = self._directory / f"copy-{next(self._numbers)}"
        shutil.copytree(directory, target)
        return target


def power_cuts(prepared: PowerLossScene, choosers: Callable[[int], list[Chooser]]) -> Iterator[int]:
    for fail_at in itertools.count(1):
        if not prepared.lose_power(fail_at, *choosers(fail_at)):
            return
        yield fail_at


@pytest.mark.parametrize("move", SOME_MOVES)
def test_power_loss_at_every_call(tmp_path: Path, move: str) -> None:
    """Nothing that was not synced survives: a row that promises more than was synced is detected."""
    assert sum(1 for _ in power_cuts(PowerLossScene(tmp_path, move), lambda _: [drop_all])) > 2


@pytest.mark.slow
@pytest.mark.parametrize("move", MOVES)
def test_long_power_loss_with_any_outcome(tmp_path: Path, move: str) -> None:
    def choosers(fail_at: int) -> list[Chooser]:
        return [keep_all, *(random.Random(f"{fail_at}/{seed}").choice for seed in range(8))]

    assert sum(1 for _ in power_cuts(PowerLossScene(tmp_path, move), choosers)) > 2
