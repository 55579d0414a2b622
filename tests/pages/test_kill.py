"""Real processes, killed at every failpoint of the engine and at any moment: what they had acknowledged is there.

The machine lives on, so everything that reached the kernel survives: this finds what the crash disk cannot, because here the
real ticker, the real threads and real SIGKILL take part.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from quire.testing.manifest import assert_clean
from tests.nursery import Child, Nursery
from tests.pages.killed import digest, start
from tests.pages.world import Model, Version, assert_reads, image

POINTS = (
    "pages.segment.created",
    "pages.segment.recycled",
    "pages.segment.frames",
    "pages.segment.sync",
    "pages.wal.made",
    "pages.wal.opened",
    "pages.wal.synced",
    "pages.wal.publishing",
    "pages.wal.published",
    "pages.wal.sealed",
)
RECOVERY_POINTS = ("pages.recovery.published", "pages.recovery.sealing", "pages.recovery.sealed")
DATABASES = 2


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("tests.pages.killed:run", warm_up="tests.pages.killed:warm_up") as made:
        yield made


@dataclass
class Expected:
    """What a database may hold: the versions that were tried, and the last that was acknowledged."""

    model: Model = field(default_factory=Model)
    acknowledged: int = 0
    tried: list[tuple[int, int | None, dict[int, bytes]]] = field(default_factory=list)
    """Commits whose lsn nobody knows yet: (size, cut, pages)."""
    kept: dict[str, int] = field(default_factory=dict)

    def forked(self) -> Expected:
        """What a fork that is about to be made would hold: everything written so far, if it comes to be."""
        return Expected(model=Model(versions=[self.model.newest]), tried=list(self.tried))


class Lives:
    """One store and the processes that die on it, one after another."""

    def __init__(self, base: Path, nursery: Nursery) -> None:
        self.base = base
        self.nursery = nursery
        self.first = [f"db-{number}" for number in range(DATABASES)]
        self.expected = {name: Expected() for name in self.first}
        self.deaths = 0

    def live(self, seed: int, *, failpoints: str = "", kill_after: float | None = None, commits: int = 10_000) -> None:
        """A process writes until it dies, or is killed."""
        told = {
            "base": str(self.base),
            "seed": seed,
            "failpoints": failpoints,
            "databases": DATABASES,
            "commits": commits,
        }
        with self.nursery.spawn() as child:
            child.line.send(json.dumps(told).encode())
            self._listen(child, kill_after)
            status = child.wait()
        assert status in (0, -signal.SIGKILL), self.nursery.errors()
        self.deaths += status != 0

    def _listen(self, child: Child, kill_after: float | None) -> None:
        deadline = None
        while (message := child.line.receive()) is not None:
            words = message.decode().split()
            if words[0] == "open" and kill_after is not None:
                deadline = time.monotonic() + kill_after
            elif words[0] == "try":
                pages = dict(part.split(":") for part in words[4].split(","))
                writes = {int(page): image(int(fill)) for page, fill in pages.items()}
                self.expected[words[1]].tried.append((int(words[2]), int(words[3]) or None, writes))
            elif words[0] == "found":
                self._match(self.expected[words[1]], int(words[2]), words[3])
            elif words[0] == "ack":
                self._acknowledge(words[1], int(words[2]))
            elif words[0] == "kept":
                self._acknowledge(words[1], int(words[3]))
                self.expected[words[1]].kept[words[2]] = int(words[3])
            elif words[0] == "forking":
                self.expected[words[2]] = self.expected[words[1]].forked()
            elif words[0] == "forked":
                self._acknowledge(words[1], int(words[3]))
                self._acknowledge(words[2], int(words[3]))
            if deadline is not None and time.monotonic() >= deadline:
                child.kill()
                deadline = None

    def _acknowledge(self, name: str, lsn: int) -> None:
        expected = self.expected[name]
        expected.acknowledged = lsn
        # Everything tried before it is part of it; only the last one's lsn is known, and only it is needed.
        for size, cut, writes in expected.tried:
            expected.model.commit(lsn, size, writes, cut_to=cut)
        expected.tried.clear()

    def look(self) -> None:
        """Every promise, after a death."""
        manifest, engine = start(self.base)
        try:
            assert_clean(manifest)
            with manifest.read() as txn:
                there = {record.name for _, record in txn.databases()}
            for name, expected in list(self.expected.items()):
                if name not in there:
                    assert not expected.acknowledged
                    if name not in self.first:
                        del self.expected[name]  # a fork that never came to be
                    continue
                store = engine.open(name)
                with store.open_snapshot() as reader:
                    found = Version(reader.lsn, reader.size_pages, dict(reader.scan()))
                    self._match(expected, reader.lsn, digest(found))
                    assert_reads(reader, expected.model.newest)
                for kept, lsn in expected.kept.items():
                    assert_reads(engine.open_view(name, kept), expected.model.at(lsn))
            assert_clean(manifest)
        finally:
            engine.close()
            manifest.close()

    def _match(self, expected: Expected, lsn: int, found: str) -> None:
        """What is there is the last acknowledged version and some of the commits that were tried after it, in order."""
        assert lsn >= expected.acknowledged, "something acknowledged is gone"
        candidates: list[Version] = [expected.model.newest]
        for size, cut, writes in expected.tried:
            candidates.append(expected.model.commit(lsn, size, writes, cut_to=cut))
        for index in reversed(range(len(candidates))):
            version = candidates[index]
            if digest(version) == found:
                break
        else:
            raise AssertionError("what is there is no version that was ever committed")
        survived = len(candidates) - 1 - index
        if survived:
            expected.model.versions = expected.model.versions[:-survived]
        expected.tried.clear()
        expected.acknowledged = lsn


@pytest.fixture
def lives(tmp_path: Path, nursery: Nursery) -> Lives:
    return Lives(tmp_path, nursery)


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_failpoint_everything_acknowledged_is_there(lives: Lives, point: str) -> None:
    """The same store dies again and again, each time later; every life begins on what the last one left."""
    for seed, hits in enumerate((0, 3, 11), 1):
        lives.live(seed, failpoints=f"{point}={hits}*off->kill", commits=400)
        lives.look()
    assert lives.deaths >= (1 if point == "pages.segment.recycled" else 3)


@pytest.mark.parametrize("point", RECOVERY_POINTS)
def test_killed_in_recovery_the_next_one_finishes_it(lives: Lives, point: str) -> None:
    lives.live(1, failpoints="pages.wal.synced=40*off->kill")
    lives.live(2, failpoints=f"{point}=kill")
    lives.look()
    assert lives.deaths == 2


def test_killed_at_any_moment_everything_acknowledged_is_there(lives: Lives) -> None:
    rng = random.Random(5)
    for seed in range(4):
        lives.live(seed, kill_after=rng.random() * 0.6)
        lives.look()
    assert lives.deaths == 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_long_killed_again_and_again(lives: Lives, seed: int) -> None:
    rng = random.Random(seed)
    for life in range(8):
        failpoints = f"{rng.choice(POINTS + RECOVERY_POINTS)}={rng.randint(0, 120)}*off->kill"
        slowly = rng.choice(
            ["", ";pages.wal.synced=sleep:2", ";pages.wal.publishing=sleep:5", ";pages.segment.frames=sleep:1"]
        )
        lives.live(seed * 100 + life, failpoints=failpoints + slowly, kill_after=rng.random() * 3, commits=2_000)
        lives.look()
