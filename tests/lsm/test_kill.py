"""Real processes, killed at every failpoint and at any moment: what they had acknowledged is there, synced or not.

The machine lives on, so everything that reached the kernel survives: here the real background threads take part.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lsm.killed import batch
from tests.lsm.test_kv_faults import POINTS
from tests.lsm.worlds import assert_same, assert_sound, changed, open_kv
from tests.nursery import Child, Nursery

RECOVERY_POINTS = ("lsm.recovery.manifest", "lsm.recovery.tables", "lsm.recovery.settled")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("tests.lsm.killed:run", warm_up="tests.lsm.killed:warm_up") as made:
        yield made


class Lives:
    """One database and the processes that die on it, one after another."""

    def __init__(self, base: Path, nursery: Nursery) -> None:
        self.base = base
        self.nursery = nursery
        self.state: dict[bytes, bytes] = {}
        self.next = 0
        self.deaths = 0

    def live(self, *, failpoints: str = "", kill_after: float | None = None, count: int = 150) -> None:
        """A process writes until it dies, is killed, or has written enough; then look."""
        told = {
            "path": f"{self.base}/lsm/00000001",
            "failpoints": failpoints,
            "first": self.next,
            "count": count,
        }
        with self.nursery.spawn() as child:
            child.line.send(json.dumps(told).encode())
            tried, acknowledged = self._listen(child, kill_after)
            status = child.wait()
        assert status in (0, -signal.SIGKILL), self.nursery.errors()
        self.deaths += status != 0
        self._look(tried, acknowledged)

    def _listen(self, child: Child, kill_after: float | None) -> tuple[int, int]:
        tried = acknowledged = self.next - 1
        deadline = None
        while (message := child.line.receive()) is not None:
            word, number = message.split()
            if word == b"open" and kill_after is not None:
                deadline = time.monotonic() + kill_after
            elif word == b"try":
                tried = int(number)
            elif word == b"ack":
                acknowledged = int(number)
            if deadline is not None and time.monotonic() >= deadline:
                child.kill()
                deadline = None
        return tried, acknowledged

    def _look(self, tried: int, acknowledged: int) -> None:
        for number in range(self.next, acknowledged + 1):
            self.state = changed(self.state, batch(number))
        with open_kv(self.base) as kv:
            found = dict(kv.scan())
            if found != self.state:
                assert tried == acknowledged + 1, "something acknowledged is gone"
                self.state = changed(self.state, batch(tried))
                acknowledged = tried
            assert_same(kv, self.state, (b"k000", b"k199"))
            assert_sound(kv)
        self.next = acknowledged + 1


@pytest.fixture
def lives(tmp_path: Path, nursery: Nursery) -> Lives:
    return Lives(tmp_path, nursery)


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_failpoint_everything_acknowledged_is_there(lives: Lives, point: str) -> None:
    """The same database dies twice, the second time later, on what the first life left."""
    for skip in (0, 3):
        lives.live(failpoints=f"{point}={skip}*off->kill")
    assert lives.deaths >= 1


@pytest.mark.parametrize("point", RECOVERY_POINTS)
def test_killed_in_recovery_the_next_one_finishes_it(lives: Lives, point: str) -> None:
    lives.live(failpoints="lsm.flush.recorded=2*off->kill")
    lives.live(failpoints=f"{point}=kill")
    lives.live(count=5)
    assert lives.deaths == 2


def test_killed_at_any_moment_everything_acknowledged_is_there(lives: Lives) -> None:
    rng = random.Random(5)
    for _ in range(4):
        lives.live(kill_after=rng.random() * 0.5, count=100_000)
    assert lives.deaths == 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_long_killed_again_and_again(lives: Lives, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        failpoints = f"{rng.choice(POINTS + RECOVERY_POINTS)}={rng.randint(0, 40)}*off->kill"
        slowly = rng.choice(
            ["", ";lsm.flush.written=sleep:5", ";lsm.compaction.written=sleep:5", ";lsm.wal.appended=sleep:1"]
        )
        lives.live(failpoints=failpoints + slowly, kill_after=rng.random() * 2, count=2_000)
