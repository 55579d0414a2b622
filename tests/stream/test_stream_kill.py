"""Real processes, killed at every step of rotation, compression, upload, eviction, hydration, retention and snapshot.

After each kill the same stream is opened again: all records that were acknowledged and not retired are there, once and
in order,
on whatever tier; the state rebuilt from the log equals the live one; no rule of stream, log or manifest is broken.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.core.clock import SystemClock
from quire.stream.mlog_recovery import recover
from quire.stream.mlog_verify import verify
from quire.stream.verify import problems
from tests.fork_server import ForkServer
from tests.stream.logs import same_state
from tests.stream.stream_killed import SETTINGS, open_at

POINTS = (
    "stream.hot.header",
    "stream.hot.renamed",
    "stream.hot.rolled",
    "stream.hot.written",
    "stream.hot.synced",
    "stream.hot.prepared",
    "stream.hot.recycled",
    "stream.compress.started",
    "stream.compress.written",
    "stream.compress.done",
    "stream.upload.started",
    "stream.upload.sent",
    "stream.upload.done",
    "stream.evict.told",
    "stream.evict.removed",
    "stream.hydrate.started",
    "stream.hydrate.written",
    "stream.hydrate.done",
    "stream.retire.queued",
    "stream.retire.deleted",
    "stream.retire.told",
    "stream.recovery.sealed",
    "stream.recovery.swept",
    "stream.mlog.copied",
    "stream.mlog.header",
    "stream.mlog.sealed",
    "stream.mlog.uploaded",
    "stream.mlog.snapshot.written",
    "stream.mlog.snapshot.marked",
    "stream.mlog.evicted",
)


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("tests.stream.stream_killed:run", warm_up="tests.stream.stream_killed:warm_up") as fork_server:
        yield fork_server


class KilledRuns:
    """One stream, and the processes that are killed while they use it, one after another."""

    def __init__(self, base: Path, fork_server: ForkServer) -> None:
        self.base = base
        self.fork_server = fork_server
        self.acknowledged = 1
        self.low = 1
        self.deaths = 0

    def run_process(
        self, failpoints: str = "", *, rounds: int = 60, kill_after: float | None = None, seed: int = 1
    ) -> None:
        options = {"base": str(self.base), "failpoints": failpoints, "rounds": rounds, "seed": seed}
        with self.fork_server.spawn() as child:
            child.channel.send(json.dumps(options).encode())
            deadline = None
            while (message := child.channel.receive()) is not None:
                word, *rest = message.decode().split()
                if word == "ack":
                    self.acknowledged = int(rest[0])
                elif word == "low":
                    self.low = int(rest[0])
                elif word == "open" and kill_after is not None:
                    deadline = time.monotonic() + kill_after
                if deadline is not None and time.monotonic() >= deadline:
                    child.kill()
                    deadline = None
            status = child.wait()
        assert status in (0, -signal.SIGKILL), self.fork_server.errors()
        self.deaths += status != 0

    def check(self) -> None:
        """Check every guarantee after a kill."""
        with open_at(self.base) as store:
            stream = store.stream("clicks", create=True)
            first, end = stream.first_record, stream.end_record
            assert end >= self.acknowledged, "an acknowledged record is lost"
            assert first >= self.low, "a retired record reappeared"
            count = 0
            for number, record in enumerate(stream.read(), first):
                assert record.id == number
                assert record.payload.startswith(f"{number}:".encode())
                count += 1
            assert count == end - first
            assert [problem for problem in problems(stream) if not problem.leak] == []
            assert store.manifest.check() == []
            log = stream.ledger.log
            objects = log.objects
            assert objects is not None
            assert same_state(recover(log.files, SystemClock(), objects.fetch).index, log.index)
            assert [
                problem for problem in verify(log.files, objects, settings=SETTINGS.manifest_log) if not problem.leak
            ] == []
            assert stream.compare() == []


def kill_at(runs: KilledRuns, point: str, hits: int, seed: int) -> None:
    """Kill a process at a failpoint. The failpoints of recovery need something to recover."""
    if point.startswith("stream.recovery"):
        runs.run_process("stream.hot.synced=3*off->kill", seed=seed)
    before = runs.deaths
    runs.run_process(f"{point}={hits}*off->kill", rounds=200, seed=seed)
    assert runs.deaths == before + 1, f"{point} was not reached"
    runs.check()


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_failpoint_every_guarantee_holds(tmp_path: Path, fork_server: ForkServer, point: str) -> None:
    runs = KilledRuns(tmp_path, fork_server)
    runs.run_process(rounds=6, seed=9)
    kill_at(runs, point, 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("point", [name for name in POINTS if "recovery" not in name and "prepared" not in name])
def test_long_killed_at_a_failpoint_later_and_later(tmp_path: Path, fork_server: ForkServer, point: str) -> None:
    """Processes on the same stream are killed one after another; each one starts with what the previous one left."""
    runs = KilledRuns(tmp_path, fork_server)
    for number, hits in enumerate((1, 3, 6)):
        kill_at(runs, point, hits, number)


def test_killed_at_any_moment_every_guarantee_holds(tmp_path: Path, fork_server: ForkServer) -> None:
    runs, rng = KilledRuns(tmp_path, fork_server), random.Random(5)
    for number in range(5):
        runs.run_process(rounds=100_000, kill_after=rng.random() * 0.5, seed=number)
        runs.check()
    assert runs.deaths == 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_long_killed_again_and_again(tmp_path: Path, fork_server: ForkServer, seed: int) -> None:
    runs, rng = KilledRuns(tmp_path, fork_server), random.Random(seed)
    for number in range(8):
        point = f"{rng.choice(POINTS)}={rng.randint(0, 40)}*off->kill"
        runs.run_process(point, rounds=400, kill_after=rng.random() * 3, seed=seed * 100 + number)
        runs.check()
