"""Processes that write through SQLite are killed: what was acknowledged is there, nothing is half there, nothing is corrupt."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

import quire
from quire.testing.manifest import assert_clean
from tests.nursery import Nursery
from tests.sqlite.killed import SETTINGS

WRITERS = 3
POINTS = ("pages.segment.frames", "pages.segment.sync", "pages.wal.synced", "pages.wal.publishing", "pages.wal.sealed")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("tests.sqlite.killed:run", warm_up="tests.sqlite.killed:warm_up") as made:
        yield made


class Lives:
    """One store and the processes that die on it, one after another."""

    def __init__(self, root: Path, nursery: Nursery) -> None:
        self.root = root
        self.nursery = nursery
        self.acknowledged = dict.fromkeys(range(WRITERS), 0)
        self.transactions = 0

    def live(self, seed: int, kill_after: float, failpoints: str = "", *, least: int = 0) -> None:
        """A process writes until it is killed: so many seconds after the store is open and `least` are acknowledged."""
        already = sum(self.acknowledged.values())
        told = {"root": str(self.root), "seed": seed, "writers": WRITERS, "failpoints": failpoints}
        with self.nursery.spawn() as child:
            child.line.send(json.dumps(told).encode())
            deadline = None
            while (message := child.line.receive()) is not None:
                words = message.decode().split()
                assert words[0] != "died", message
                if words[0] != "open":
                    writer, number = int(words[1]), int(words[2])
                    assert number == self.acknowledged[writer] + 1, f"writer {writer}: {number} was acknowledged before"
                    self.acknowledged[writer] = number
                if deadline is None and sum(self.acknowledged.values()) - already >= least:
                    deadline = time.monotonic() + kill_after
                if deadline is not None and time.monotonic() >= deadline:
                    child.kill()
            status = child.wait()
        assert status == -signal.SIGKILL, self.nursery.errors()

    def look(self) -> None:
        """Every promise, after a death."""
        with quire.open(self.root, settings=SETTINGS) as store:
            assert_clean(store.manifest)
            connection = store.sqlite("shop", create=True)
            assert connection.pragma("integrity_check") == "ok"
            if connection.execute("select count(*) from sqlite_schema").get:
                self._whole(connection)
            else:
                assert not any(self.acknowledged.values())
            connection.close()

    def _whole(self, connection: apsw.Connection) -> None:
        logged = {
            writer: rest
            for writer, *rest in connection.execute(
                "select writer, count(*), max(number), sum(size), sum(length(data)) from log group by writer"
            )
        }
        state = {writer: rest for writer, *rest in connection.execute("select writer, numbers, bytes from state")}
        for writer, (numbers, size) in state.items():
            expected = [numbers, numbers, size, size]
            assert logged.get(writer, [0, 0, 0, 0]) == expected, f"writer {writer}: half a transaction"
        for writer, number in self.acknowledged.items():
            found = state[writer][0] if writer in state else 0
            assert isinstance(found, int)
            assert found >= number, f"writer {writer}: {number} was acknowledged, {found} is there"
            self.transactions += found - number
            self.acknowledged[writer] = found


@pytest.fixture
def lives(tmp_path: Path, nursery: Nursery) -> Lives:
    return Lives(tmp_path / "store", nursery)


def test_killed_at_any_moment(lives: Lives) -> None:
    rng = random.Random(1)
    for seed in range(4):
        lives.live(seed, rng.random() * 0.5, least=6)
        lives.look()


@pytest.mark.parametrize("point", POINTS[:3])
def test_killed_at_a_step_of_the_commit(lives: Lives, point: str) -> None:
    for seed, hits in enumerate((2, 30)):
        lives.live(seed, 30, f"{point}={hits}*off->kill")
        lives.look()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_long_killed_again_and_again(lives: Lives, seed: int) -> None:
    rng = random.Random(seed)
    for life in range(12):
        failpoints = f"{rng.choice(POINTS)}={rng.randint(0, 300)}*off->kill" if rng.random() < 0.5 else ""
        lives.live(seed * 100 + life, rng.random() * 3, failpoints)
        lives.look()
