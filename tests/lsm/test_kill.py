"""Real processes, killed at every failpoint and at any moment: acknowledged writes survive, synced or not.

The machine stays up, so everything that reached the kernel survives. Unlike in other tests, the background threads run.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fork_server import Child, ForkServer
from tests.lsm.killed import batch
from tests.lsm.kv_helpers import assert_same, assert_sound, open_kv, with_batch
from tests.lsm.test_kv_faults import POINTS

RECOVERY_POINTS = ("lsm.recovery.manifest", "lsm.recovery.tables", "lsm.recovery.settled")


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("tests.lsm.killed:run", warm_up="tests.lsm.killed:warm_up") as fork_server:
        yield fork_server


class KilledRuns:
    """One database, and the processes that are killed while they write to it, one after another."""

    def __init__(self, base: Path, fork_server: ForkServer) -> None:
        self.base = base
        self.fork_server = fork_server
        self.state: dict[bytes, bytes] = {}
        self.next = 0
        self.deaths = 0

    def run_process(self, *, failpoints: str = "", kill_after: float | None = None, count: int = 150) -> None:
        """Run a process until it is killed or has written `count` batches; then check the database."""
        options = {
            "path": f"{self.base}/lsm/00000001",
            "failpoints": failpoints,
            "first": self.next,
            "count": count,
        }
        with self.fork_server.spawn() as child:
            child.channel.send(json.dumps(options).encode())
            attempted, acknowledged = self._receive(child, kill_after)
            status = child.wait()
        assert status in (0, -signal.SIGKILL), self.fork_server.errors()
        self.deaths += status != 0
        self._check(attempted, acknowledged)

    def _receive(self, child: Child, kill_after: float | None) -> tuple[int, int]:
        attempted = acknowledged = self.next - 1
        deadline = None
        while (message := child.channel.receive()) is not None:
            word, number = message.split()
            if word == b"open" and kill_after is not None:
                deadline = time.monotonic() + kill_after
            elif word == b"try":
                attempted = int(number)
            elif word == b"ack":
                acknowledged = int(number)
            if deadline is not None and time.monotonic() >= deadline:
                child.kill()
                deadline = None
        return attempted, acknowledged

    def _check(self, attempted: int, acknowledged: int) -> None:
        for number in range(self.next, acknowledged + 1):
            self.state = with_batch(self.state, batch(number))
        with open_kv(self.base) as kv:
            pairs = dict(kv.scan())
            if pairs != self.state:
                assert attempted == acknowledged + 1, "an acknowledged write is lost"
                self.state = with_batch(self.state, batch(attempted))
                acknowledged = attempted
            assert_same(kv, self.state, (b"k000", b"k199"))
            assert_sound(kv)
        self.next = acknowledged + 1


@pytest.fixture
def runs(tmp_path: Path, fork_server: ForkServer) -> KilledRuns:
    return KilledRuns(tmp_path, fork_server)


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_failpoint_nothing_acknowledged_is_lost(runs: KilledRuns, point: str) -> None:
    """Two processes on the same database are killed; the second one later, and on the files that the first one left."""
    for skip in (0, 3):
        runs.run_process(failpoints=f"{point}={skip}*off->kill")
    assert runs.deaths >= 1


@pytest.mark.parametrize("point", RECOVERY_POINTS)
def test_a_recovery_that_was_killed_is_finished_by_the_next_one(runs: KilledRuns, point: str) -> None:
    runs.run_process(failpoints="lsm.flush.recorded=2*off->kill")
    runs.run_process(failpoints=f"{point}=kill")
    runs.run_process(count=5)
    assert runs.deaths == 2


def test_killed_at_any_moment_nothing_acknowledged_is_lost(runs: KilledRuns) -> None:
    rng = random.Random(5)
    for _ in range(4):
        runs.run_process(kill_after=rng.random() * 0.5, count=100_000)
    assert runs.deaths == 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_long_killed_again_and_again(runs: KilledRuns, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        failpoints = f"{rng.choice(POINTS + RECOVERY_POINTS)}={rng.randint(0, 40)}*off->kill"
        delay = rng.choice(
            ["", ";lsm.flush.written=sleep:5", ";lsm.compaction.written=sleep:5", ";lsm.wal.appended=sleep:1"]
        )
        runs.run_process(failpoints=failpoints + delay, kill_after=rng.random() * 2, count=2_000)
