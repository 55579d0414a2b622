"""Real processes, killed at every step of commit, rotation, upload, eviction and snapshot: committed records survive."""

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
from tests.fork_server import ForkServer
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
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("tests.stream.mlog_killed:run", warm_up="tests.stream.mlog_killed:warm_up") as fork_server:
        yield fork_server


class KilledRuns:
    """One log, and the processes that are killed while they write to it, one after another."""

    def __init__(self, base: Path, fork_server: ForkServer) -> None:
        self.base = base
        self.fork_server = fork_server
        self.acknowledged: set[int] = set()
        self.deaths = 0

    def run_process(self, failpoints: str = "", *, rounds: int = 60, kill_after: float | None = None) -> None:
        options = {"base": str(self.base), "failpoints": failpoints, "rounds": rounds}
        with self.fork_server.spawn() as child:
            child.channel.send(json.dumps(options).encode())
            deadline = None
            while (message := child.channel.receive()) is not None:
                words = message.decode().split()
                if words[0] == "ack":
                    self.acknowledged.add(int(words[1]))
                elif words[0] == "open" and kill_after is not None:
                    deadline = time.monotonic() + kill_after
                if deadline is not None and time.monotonic() >= deadline:
                    child.kill()
                    deadline = None
            status = child.wait()
        assert status in (0, -signal.SIGKILL), self.fork_server.errors()
        self.deaths += status != 0

    def check(self, scratch: Path) -> None:
        """Check every guarantee after a kill."""
        files = files_of(self.base)
        objects = LogObjects(open_store(str(self.base / "objects")), 7)
        try:
            recovered = recover(files, SystemClock(), objects.fetch)
            index = recovered.index
            assert self.acknowledged <= index.entries.keys(), "a committed record is lost"
            assert [info.segment_id for info in index.segments()] == list(range(1, index.opened_max + 1))
            for info in index.segments():
                if info.segment_id in self.acknowledged:
                    assert info.tiers == {0, 2}
            assert index.rejected == 0
            assert [problem for problem in verify(files, objects, settings=SETTINGS) if not problem.leak] == []
            copy = scratch / "copy"
            shutil.copytree(self.base / "store", copy / "store")
            for snapshot_id in (bare := files_of(copy)).snapshots():
                Path(bare.snapshot(snapshot_id)).unlink()
            if bare.chunks():
                full_index = recover(bare, SystemClock(), objects.fetch).index
                assert same_state(full_index, index), (
                    "the full history and the snapshot with its tail give different states"
                )
            shutil.rmtree(copy)
        finally:
            objects.store.close()


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_failpoint_nothing_committed_is_lost(tmp_path: Path, fork_server: ForkServer, point: str) -> None:
    """Processes on the same log are killed one after another, each time later; each one starts with what the previous
    one left.
    """
    runs = KilledRuns(tmp_path, fork_server)
    for hits in (0, 2, 7):
        runs.run_process(f"{point}={hits}*off->kill")
        runs.check(tmp_path)
    assert runs.deaths == 3


def test_killed_at_any_moment_nothing_committed_is_lost(tmp_path: Path, fork_server: ForkServer) -> None:
    runs, rng = KilledRuns(tmp_path, fork_server), random.Random(5)
    for _ in range(4):
        runs.run_process(rounds=10_000, kill_after=rng.random() * 0.4)
        runs.check(tmp_path)
    assert runs.deaths == 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_long_killed_again_and_again(tmp_path: Path, fork_server: ForkServer, seed: int) -> None:
    runs, rng = KilledRuns(tmp_path, fork_server), random.Random(seed)
    for _ in range(8):
        runs.run_process(
            f"{rng.choice(POINTS)}={rng.randint(0, 60)}*off->kill", rounds=400, kill_after=rng.random() * 3
        )
        runs.check(tmp_path)
