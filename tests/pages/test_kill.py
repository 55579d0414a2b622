"""Real processes, killed at every failpoint of the engine and at random times: what they had acknowledged survives.

The machine keeps running, so everything that reached the kernel survives. This finds what the crash disk cannot,
because the real ticker, real threads and real SIGKILL take part.
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
from tests.fork_server import Child, ForkServer
from tests.pages.engine_harness import Model, Version, assert_reads, image
from tests.pages.killed import digest, start

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
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("tests.pages.killed:run", warm_up="tests.pages.killed:warm_up") as fork_server:
        yield fork_server


@dataclass
class Expected:
    """What a database may contain: the versions that were tried, and the last acknowledged one."""

    model: Model = field(default_factory=Model)
    acknowledged: int = 0
    tried: list[tuple[int, int | None, dict[int, bytes]]] = field(default_factory=list)
    """Commits whose lsn is not known yet: (size, cut, pages)."""
    snapshots: dict[str, int] = field(default_factory=dict)

    def forked(self) -> Expected:
        """What a fork that is about to be created would contain, if it is created: everything written so far."""
        return Expected(model=Model(versions=[self.model.newest]), tried=list(self.tried))


class KilledStore:
    """One store and the processes that are killed on it, one after another."""

    def __init__(self, base: Path, fork_server: ForkServer) -> None:
        self.base = base
        self.fork_server = fork_server
        self.first = [f"db-{number}" for number in range(DATABASES)]
        self.expected = {name: Expected() for name in self.first}
        self.kills = 0

    def run_writer(
        self, seed: int, *, failpoints: str = "", kill_after: float | None = None, commits: int = 10_000
    ) -> None:
        """A process writes until it dies or is killed."""
        task = {
            "base": str(self.base),
            "seed": seed,
            "failpoints": failpoints,
            "databases": DATABASES,
            "commits": commits,
        }
        with self.fork_server.spawn() as child:
            child.channel.send(json.dumps(task).encode())
            self._receive(child, kill_after)
            status = child.wait()
        assert status in (0, -signal.SIGKILL), self.fork_server.errors()
        self.kills += status != 0

    def _receive(self, child: Child, kill_after: float | None) -> None:
        deadline = None
        while (message := child.channel.receive()) is not None:
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
                self.expected[words[1]].snapshots[words[2]] = int(words[3])
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
        # It includes everything tried before; only the last lsn is known, and only that one is needed.
        for size, cut, writes in expected.tried:
            expected.model.commit(lsn, size, writes, cut_to=cut)
        expected.tried.clear()

    def assert_survived(self) -> None:
        """Check every promise after a kill."""
        manifest, engine = start(self.base)
        try:
            assert_clean(manifest)
            with manifest.read() as txn:
                existing = {record.name for _, record in txn.databases()}
            for name, expected in list(self.expected.items()):
                if name not in existing:
                    assert not expected.acknowledged
                    if name not in self.first:
                        del self.expected[name]  # the fork was never created
                    continue
                store = engine.open(name)
                with store.open_snapshot() as reader:
                    version = Version(reader.lsn, reader.size_pages, dict(reader.scan()))
                    self._match(expected, reader.lsn, digest(version))
                    assert_reads(reader, expected.model.newest)
                for snapshot, lsn in expected.snapshots.items():
                    assert_reads(engine.open_view(name, snapshot), expected.model.at(lsn))
            assert_clean(manifest)
        finally:
            engine.close()
            manifest.close()

    def _match(self, expected: Expected, lsn: int, content_digest: str) -> None:
        """The contents are the last acknowledged version plus some of the commits tried after it, in order."""
        assert lsn >= expected.acknowledged, "an acknowledged commit is lost"
        candidates: list[Version] = [expected.model.newest]
        for size, cut, writes in expected.tried:
            candidates.append(expected.model.commit(lsn, size, writes, cut_to=cut))
        for index in reversed(range(len(candidates))):
            version = candidates[index]
            if digest(version) == content_digest:
                break
        else:
            raise AssertionError("the contents are no version that was ever committed")
        survived = len(candidates) - 1 - index
        if survived:
            expected.model.versions = expected.model.versions[:-survived]
        expected.tried.clear()
        expected.acknowledged = lsn


@pytest.fixture
def killed_store(tmp_path: Path, fork_server: ForkServer) -> KilledStore:
    return KilledStore(tmp_path, fork_server)


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_failpoint_everything_acknowledged_survives(killed_store: KilledStore, point: str) -> None:
    """The same store dies repeatedly, each time later; every process begins with what the last one left."""
    for seed, hits in enumerate((0, 3, 11), 1):
        killed_store.run_writer(seed, failpoints=f"{point}={hits}*off->kill", commits=400)
        killed_store.assert_survived()
    assert killed_store.kills >= (1 if point == "pages.segment.recycled" else 3)


@pytest.mark.parametrize("point", RECOVERY_POINTS)
def test_killed_in_recovery_the_next_process_finishes_it(killed_store: KilledStore, point: str) -> None:
    killed_store.run_writer(1, failpoints="pages.wal.synced=40*off->kill")
    killed_store.run_writer(2, failpoints=f"{point}=kill")
    killed_store.assert_survived()
    assert killed_store.kills == 2


def test_killed_at_any_moment_everything_acknowledged_survives(killed_store: KilledStore) -> None:
    rng = random.Random(5)
    for seed in range(4):
        killed_store.run_writer(seed, kill_after=rng.random() * 0.6)
        killed_store.assert_survived()
    assert killed_store.kills == 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_long_repeated_kills(killed_store: KilledStore, seed: int) -> None:
    rng = random.Random(seed)
    for attempt in range(8):
        failpoints = f"{rng.choice(POINTS + RECOVERY_POINTS)}={rng.randint(0, 120)}*off->kill"
        delay = rng.choice(
            ["", ";pages.wal.synced=sleep:2", ";pages.wal.publishing=sleep:5", ";pages.segment.frames=sleep:1"]
        )
        killed_store.run_writer(
            seed * 100 + attempt, failpoints=failpoints + delay, kill_after=rng.random() * 3, commits=2_000
        )
        killed_store.assert_survived()
