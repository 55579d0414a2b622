"""Processes that write through SQLite are killed: acknowledged transactions survive, none is there in part, nothing is
corrupt.
"""

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
from tests.fork_server import ForkServer
from tests.sqlite.killed import SETTINGS

WRITERS = 3
POINTS = ("pages.segment.frames", "pages.segment.sync", "pages.wal.synced", "pages.wal.publishing", "pages.wal.sealed")


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("tests.sqlite.killed:run", warm_up="tests.sqlite.killed:warm_up") as fork_server:
        yield fork_server


class KilledRuns:
    """One store, and the processes that are killed while they write to it, one after another."""

    def __init__(self, root: Path, fork_server: ForkServer) -> None:
        self.root = root
        self.fork_server = fork_server
        self.acknowledged = dict.fromkeys(range(WRITERS), 0)
        self.transactions = 0

    def run_process(self, seed: int, kill_after: float, failpoints: str = "", *, least: int = 0) -> None:
        """Run a process that writes until it is killed: `kill_after` seconds after `least` transactions were
        acknowledged.
        """
        acknowledged_before = sum(self.acknowledged.values())
        options = {"root": str(self.root), "seed": seed, "writers": WRITERS, "failpoints": failpoints}
        with self.fork_server.spawn() as child:
            child.channel.send(json.dumps(options).encode())
            deadline = None
            while (message := child.channel.receive()) is not None:
                words = message.decode().split()
                assert words[0] != "died", message
                if words[0] != "open":
                    writer, number = int(words[1]), int(words[2])
                    assert number == self.acknowledged[writer] + 1, f"writer {writer}: {number} was acknowledged before"
                    self.acknowledged[writer] = number
                if deadline is None and sum(self.acknowledged.values()) - acknowledged_before >= least:
                    deadline = time.monotonic() + kill_after
                if deadline is not None and time.monotonic() >= deadline:
                    child.kill()
            status = child.wait()
        assert status == -signal.SIGKILL, self.fork_server.errors()

    def check(self) -> None:
        """Check every guarantee after a kill."""
        with quire.open(self.root, settings=SETTINGS) as store:
            assert_clean(store.manifest)
            connection = store.sqlite("shop", create=True)
            assert connection.pragma("integrity_check") == "ok"
            if connection.execute("select count(*) from sqlite_schema").get:
                self._check_transactions(connection)
            else:
                assert not any(self.acknowledged.values())
            connection.close()

    def _check_transactions(self, connection: apsw.Connection) -> None:
        logged = {
            writer: rest
            for writer, *rest in connection.execute(
                "select writer, count(*), max(number), sum(size), sum(length(data)) from log group by writer"
            )
        }
        state = {writer: rest for writer, *rest in connection.execute("select writer, numbers, bytes from state")}
        for writer, (numbers, size) in state.items():
            expected = [numbers, numbers, size, size]
            assert logged.get(writer, [0, 0, 0, 0]) == expected, f"writer {writer}: a partial transaction"
        for writer, number in self.acknowledged.items():
            committed = state[writer][0] if writer in state else 0
            assert isinstance(committed, int)
            assert committed >= number, f"writer {writer}: {number} was acknowledged, {committed} is there"
            self.transactions += committed - number
            self.acknowledged[writer] = committed


@pytest.fixture
def runs(tmp_path: Path, fork_server: ForkServer) -> KilledRuns:
    return KilledRuns(tmp_path / "store", fork_server)


def test_killed_at_any_moment(runs: KilledRuns) -> None:
    rng = random.Random(1)
    for seed in range(4):
        runs.run_process(seed, rng.random() * 0.5, least=6)
        runs.check()


@pytest.mark.parametrize("point", POINTS[:3])
def test_killed_at_a_step_of_the_commit(runs: KilledRuns, point: str) -> None:
    for seed, hits in enumerate((2, 30)):
        runs.run_process(seed, 30, f"{point}={hits}*off->kill")
        runs.check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_long_killed_again_and_again(runs: KilledRuns, seed: int) -> None:
    rng = random.Random(seed)
    for round_ in range(12):
        failpoints = f"{rng.choice(POINTS)}={rng.randint(0, 300)}*off->kill" if rng.random() < 0.5 else ""
        runs.run_process(seed * 100 + round_, rng.random() * 3, failpoints)
        runs.check()
