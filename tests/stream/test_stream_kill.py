"""Real processes, killed at every step of rotation, compression, upload, eviction, hydration, retention and snapshot.

After each death the same stream is opened again: what was acknowledged and not retired is there, once and in order, on whatever
tier; the state rebuilt from the log equals the live one; no rule of stream, log or manifest is broken.
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
from tests.nursery import Nursery
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
def nursery() -> Iterator[Nursery]:
    with Nursery("tests.stream.stream_killed:run", warm_up="tests.stream.stream_killed:warm_up") as made:
        yield made


class Lives:
    """One stream and the processes that die on it, one after another."""

    def __init__(self, base: Path, nursery: Nursery) -> None:
        self.base = base
        self.nursery = nursery
        self.acknowledged = 1
        self.low = 1
        self.deaths = 0

    def live(self, failpoints: str = "", *, rounds: int = 60, kill_after: float | None = None, seed: int = 1) -> None:
        told = {"base": str(self.base), "failpoints": failpoints, "rounds": rounds, "seed": seed}
        with self.nursery.spawn() as child:
            child.line.send(json.dumps(told).encode())
            deadline = None
            while (message := child.line.receive()) is not None:
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
        assert status in (0, -signal.SIGKILL), self.nursery.errors()
        self.deaths += status != 0

    def look(self) -> None:
        """Every promise, after a death."""
        with open_at(self.base) as store:
            stream = store.stream("clicks", create=True)
            first, end = stream.first_record, stream.end_record
            assert end >= self.acknowledged, "something acknowledged is gone"
            assert first >= self.low, "something retired came back"
            seen = 0
            for number, found in enumerate(stream.read(), first):
                assert found.id == number
                assert found.payload.startswith(f"{number}:".encode())
                seen += 1
            assert seen == end - first
            assert [each for each in problems(stream) if not each.leak] == []
            assert store.manifest.check() == []
            log = stream.ledger.log
            objects = log.objects
            assert objects is not None
            assert same_state(recover(log.files, SystemClock(), objects.fetch).index, log.index)
            assert [each for each in verify(log.files, objects, settings=SETTINGS.manifest_log) if not each.leak] == []
            assert stream.compare() == []


def die_at(lives: Lives, point: str, hits: int, seed: int) -> None:
    """One death at a point; recovery's own points need something to recover."""
    if point.startswith("stream.recovery"):
        lives.live("stream.hot.synced=3*off->kill", seed=seed)
    before = lives.deaths
    lives.live(f"{point}={hits}*off->kill", rounds=200, seed=seed)
    assert lives.deaths == before + 1, f"{point} was not reached"
    lives.look()


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_failpoint_every_promise_is_kept(tmp_path: Path, nursery: Nursery, point: str) -> None:
    lives = Lives(tmp_path, nursery)
    lives.live(rounds=6, seed=9)
    die_at(lives, point, 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("point", [each for each in POINTS if "recovery" not in each and "prepared" not in each])
def test_long_killed_at_a_failpoint_later_and_later(tmp_path: Path, nursery: Nursery, point: str) -> None:
    """The same stream dies again and again; every life begins on what the last one left."""
    lives = Lives(tmp_path, nursery)
    for number, hits in enumerate((1, 3, 6)):
        die_at(lives, point, hits, number)


def test_killed_at_any_moment_every_promise_is_kept(tmp_path: Path, nursery: Nursery) -> None:
    lives, draw = Lives(tmp_path, nursery), random.Random(5)
    for number in range(5):
        lives.live(rounds=100_000, kill_after=draw.random() * 0.5, seed=number)
        lives.look()
    assert lives.deaths == 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_long_killed_again_and_again(tmp_path: Path, nursery: Nursery, seed: int) -> None:
    lives, draw = Lives(tmp_path, nursery), random.Random(seed)
    for number in range(8):
        point = f"{draw.choice(POINTS)}={draw.randint(0, 40)}*off->kill"
        lives.live(point, rounds=400, kill_after=draw.random() * 3, seed=seed * 100 + number)
        lives.look()
