"""Real processes with mode="r" while the owner writes, checkpoints, truncates and recycles; both are killed."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import quire
from quire.testing.manifest import assert_clean
from tests.fork_server import Child, ForkServer
from tests.pages.reading import SETTINGS


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("tests.pages.reading:run", warm_up="tests.pages.reading:warm_up") as fork_server:
        yield fork_server


class OwnerAndReaders:
    """A store, its owner process and its reader processes."""

    def __init__(self, path: Path, fork_server: ForkServer, rng: random.Random) -> None:
        self.path = path
        self.fork_server = fork_server
        self.rng = rng
        self.checked = self.written = self.recycled = self.gone = 0

    def spawn(self, role: str, *, lenient: bool = False, failpoints: str = "") -> Child:
        child = self.fork_server.spawn()
        task = {
            "role": role,
            "path": str(self.path),
            "seed": self.rng.getrandbits(60),
            "lenient": lenient,
            "failpoints": failpoints,
        }
        child.channel.send(json.dumps(task).encode())
        return child

    def owner(self, role: str = "owner") -> Child:
        child = self.spawn(role)
        self.receive(child, 1)  # the first message: the store exists
        return child

    def receive(self, child: Child, messages: int) -> None:
        """Receive this many messages of a child, each of which must be good."""
        for _ in range(messages):
            message = child.channel.receive()
            assert message is not None, f"it ended unexpectedly: {self.fork_server.errors()}"
            kind, value = message.decode().split(" ", 1)
            if kind == "ok":
                self.checked += int(value)
            elif kind == "at":
                self.written = int(value)
            elif kind == "gone":
                self.gone += int(value)
            elif kind == "recycled":
                self.recycled += int(value)
            else:
                raise AssertionError(f"a reader saw {value}\n{self.fork_server.errors()}")

    def run(self, rounds: int) -> None:
        """One owner and two readers at a time; each may be killed and replaced after a round."""
        with ExitStack() as stack:
            owner = stack.enter_context(self.owner())
            readers = [stack.enter_context(self.spawn("reader")) for _ in range(2)]
            for _ in range(rounds):
                self.receive(owner, self.rng.randint(5, 30))
                for reader in readers:
                    self.receive(reader, self.rng.randint(1, 8))
                dice = self.rng.random()
                if dice < 0.25:
                    owner.kill()
                    for reader in readers:  # the store has no owner, and is read as before
                        self.receive(reader, 2)
                    owner = stack.enter_context(self.owner())
                elif dice < 0.6:
                    readers.pop(self.rng.randrange(len(readers))).kill()
                    readers.append(stack.enter_context(self.spawn("reader")))

    def assert_released(self) -> None:
        """After all processes are dead, nothing holds the floor."""
        with quire.open(self.path, settings=SETTINGS) as store:
            shop = store.pages.open("shop")
            assert store.pages.floor(shop.db_id) == shop.wal.durable.lsn
            assert [name for name in os.listdir(self.path / "readers") if name.endswith(".lease")] == []
            assert store.checkpoint("shop").state.name == "SUCCEEDED"
            store.worker.drain()
            assert_clean(store.manifest)


def test_readers_of_other_processes_see_one_version_whatever_the_owner_does(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    store_processes = OwnerAndReaders(tmp_path / "store", fork_server, random.Random(11))
    store_processes.run(7)
    store_processes.assert_released()
    assert store_processes.checked > 500
    assert store_processes.written > 30
    assert store_processes.recycled > 3, "no segment was recycled: the test tests nothing"


def test_an_owner_that_ignores_leases_can_remove_versions_but_never_cause_wrong_reads(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    """P8: whatever happens to a lease, a reader sees its version or gets an error."""
    store_processes = OwnerAndReaders(tmp_path / "store", fork_server, random.Random(7))
    with store_processes.owner("careless") as owner, store_processes.spawn("reader", lenient=True) as reader:
        while not (store_processes.gone >= 2 and store_processes.recycled > 5):
            store_processes.receive(owner, 20)
            store_processes.receive(reader, 5)
    assert store_processes.checked
    store_processes.assert_released()


@pytest.mark.parametrize("point", ["pages.lease.written", "pages.lease.taken", "pages.published.leased"])
def test_a_reader_killed_while_opening_leaves_no_lease(tmp_path: Path, fork_server: ForkServer, point: str) -> None:
    store_processes = OwnerAndReaders(tmp_path / "store", fork_server, random.Random(5))
    with store_processes.owner() as owner:
        store_processes.receive(owner, 10)
        for _ in range(3):
            with store_processes.spawn("reader", failpoints=f"{point}=kill") as reader:
                assert reader.wait() == -9, fork_server.errors()
        store_processes.receive(owner, 60)
    store_processes.assert_released()
    assert os.listdir(store_processes.path / "readers") == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_long_readers_of_other_processes(tmp_path: Path, fork_server: ForkServer, seed: int) -> None:
    store_processes = OwnerAndReaders(tmp_path / "store", fork_server, random.Random(seed))
    store_processes.run(80)
    store_processes.assert_released()
    assert store_processes.checked > 5_000


def test_a_killed_reader_holds_nothing_after_the_next_check(tmp_path: Path, fork_server: ForkServer) -> None:
    store_processes = OwnerAndReaders(tmp_path / "store", fork_server, random.Random(3))
    with store_processes.owner():
        pass
    with quire.open(store_processes.path, settings=SETTINGS) as store:
        shop = store.pages.open("shop")
        reader = store_processes.spawn("reader")
        while not store.pages._files.look():
            time.sleep(0.01)
        held = store.pages._files.look()[0]
        assert held.pid == reader.pid
        with shop.begin() as txn:
            txn.write_page(txn.size_pages, bytes(512))  # a page that page 0 lists as zeros
        assert store.pages.floor(shop.db_id) <= shop.wal.durable.lsn
        assert reader.kill() == -9, fork_server.errors()
        assert store.pages.floor(shop.db_id) == shop.wal.durable.lsn
        assert store.pages._files.look() == []
        reader.close()
