"""Real processes, killed at every step of commit, rotation, upload, eviction and snapshot: what was committed is there."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.core.clock import SystemClock
from quire.objects.open import open_store
from quire.stream.mlog_recovery import recover
from quire.stream.mlog_tier2 import LogObjects
from quire.stream.mlog_verify import verify
from tests.nursery import Nursery
from tests.stream.logs import same_state
from tests.stream.mlog_killed import SETTINGS, files_of

POINTS = (
    "stream.mlog.created",
    "stream.mlog.grown",
    "stream.mlog.copied",
    "stream.mlog.synced",
    "stream.mlog.header",
    "stream.mlog.renamed",
    "stream.mlog.committed",
    "stream.mlog.shrinking",
    "stream.mlog.sealed",
    "stream.mlog.uploaded",
    "stream.mlog.evicted",
    "stream.mlog.own_deleted",
    "stream.mlog.snapshot.writing",
    "stream.mlog.snapshot.written",
    "stream.mlog.snapshot.marked",
)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("tests.stream.mlog_killed:run", warm_up="tests.stream.mlog_killed:warm_up") as made:
        yield made


class Lives:
    """One log and the processes that die on it, one after another."""

    def __init__(self, base: Path, nursery: Nursery) -> None:
        self.base = base
        self.nursery = nursery
        self.acknowledged: set[int] = set()
        self.deaths = 0

    def live(self, failpoints: str = "", *, rounds: int = 60, kill_after: float | None = None) -> None:
        told = {"base": str(self.base), "failpoints": failpoints, "rounds": rounds}
        with self.nursery.spawn() as child:
            child.line.send(json.dumps(told).encode())
            deadline = None
            while (message := child.line.receive()) is not None:
                words = message.decode().split()
                if words[0] == "ack":
                    self.acknowledged.add(int(words[1]))
                elif words[0] == "open" and kill_after is not None:
                    deadline = time.monotonic() + kill_after
                if deadline is not None and time.monotonic() >= deadline:
                    child.kill()
                    deadline = None
            status = child.wait()
        assert status in (0, -signal.SIGKILL), self.nursery.errors()
        self.deaths += status != 0

    def look(self, scratch: Path) -> None:
        """Every promise, after a death."""
        files = files_of(self.base)
        objects = LogObjects(open_store(str(self.base / "objects")), 7)
        try:
            recovered = recover(files, SystemClock(), objects.fetch)
            index = recovered.index
            assert self.acknowledged <= index.entries.keys(), "something committed is gone"
            assert [info.segment_id for info in index.segments()] == list(range(1, index.opened_max + 1))
            for info in index.segments():
                if info.segment_id in self.acknowledged:
                    assert info.tiers == {0, 2}
            assert index.rejected == 0
            assert [each for each in verify(files, objects, settings=SETTINGS) if not each.leak] == []
            copy = scratch / "copy"
            shutil.copytree(self.base / "store", copy / "store")
            for snapshot_id in (bare := files_of(copy)).snapshots():
                Path(bare.snapshot(snapshot_id)).unlink()
            if bare.chunks():
                whole = recover(bare, SystemClock(), objects.fetch).index
                assert same_state(whole, index), "the whole history says something else than snapshot and tail"
            shutil.rmtree(copy)
        finally:
            objects.store.close()


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_failpoint_everything_committed_is_there(tmp_path: Path, nursery: Nursery, point: str) -> None:
    """The same log dies again and again, each time later; every life begins on what the last one left."""
    lives = Lives(tmp_path, nursery)
    for hits in (0, 2, 7):
        lives.live(f"{point}={hits}*off->kill")
        lives.look(tmp_path)
    assert lives.deaths == 3


def test_killed_at_any_moment_everything_committed_is_there(tmp_path: Path, nursery: Nursery) -> None:
    lives, rng = Lives(tmp_path, nursery), random.Random(5)
    for _ in range(4):
        lives.live(rounds=10_000, kill_after=rng.random() * 0.4)
        lives.look(tmp_path)
    assert lives.deaths == 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_long_killed_again_and_again(tmp_path: Path, nursery: Nursery, seed: int) -> None:
    lives, rng = Lives(tmp_path, nursery), random.Random(seed)
    for _ in range(8):
        lives.live(f"{rng.choice(POINTS)}={rng.randint(0, 60)}*off->kill", rounds=400, kill_after=rng.random() * 3)
        lives.look(tmp_path)
