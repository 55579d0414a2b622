"""Real processes with mode="r" while the owner writes, checkpoints, truncates and recycles under them; both are killed."""

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
from tests.nursery import Child, Nursery
from tests.pages.reading import SETTINGS


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("tests.pages.reading:run", warm_up="tests.pages.reading:warm_up") as made:
        yield made


class Town:
    """A store, its owner and its readers."""

    def __init__(self, path: Path, nursery: Nursery, rng: random.Random) -> None:
        self.path = path
        self.nursery = nursery
        self.rng = rng
        self.checked = self.written = self.recycled = self.gone = 0

    def spawn(self, role: str, *, lenient: bool = False, failpoints: str = "") -> Child:
        child = self.nursery.spawn()
        told = {
            "role": role,
            "path": str(self.path),
            "seed": self.rng.getrandbits(60),
            "lenient": lenient,
            "failpoints": failpoints,
        }
        child.line.send(json.dumps(told).encode())
        return child

    def owner(self, role: str = "owner") -> Child:
        child = self.spawn(role)
        self.hear(child, 1)  # its first word: the store is there
        return child

    def hear(self, child: Child, messages: int) -> None:
        """So many messages of a child, each of which must be good."""
        for _ in range(messages):
            message = child.line.receive()
            assert message is not None, f"it ended by itself: {self.nursery.errors()}"
            word, rest = message.decode().split(" ", 1)
            if word == "ok":
                self.checked += int(rest)
            elif word == "at":
                self.written = int(rest)
            elif word == "gone":
                self.gone += int(rest)
            elif word == "recycled":
                self.recycled += int(rest)
            else:
                raise AssertionError(f"a reader saw {rest}\n{self.nursery.errors()}")

    def live(self, rounds: int) -> None:
        """One owner and some readers at a time, each of which may be killed and replaced after every round."""
        with ExitStack() as stack:
            owner = stack.enter_context(self.owner())
            readers = [stack.enter_context(self.spawn("reader")) for _ in range(2)]
            for _ in range(rounds):
                self.hear(owner, self.rng.randint(5, 30))
                for reader in readers:
                    self.hear(reader, self.rng.randint(1, 8))
                dice = self.rng.random()
                if dice < 0.25:
                    owner.kill()
                    for reader in readers:  # nobody owns the store, and it is read as before
                        self.hear(reader, 2)
                    owner = stack.enter_context(self.owner())
                elif dice < 0.6:
                    readers.pop(self.rng.randrange(len(readers))).kill()
                    readers.append(stack.enter_context(self.spawn("reader")))

    def look(self) -> None:
        """Everybody is dead: nothing holds anything any more."""
        with quire.open(self.path, settings=SETTINGS) as store:
            shop = store.pages.open("shop")
            assert store.pages.floor(shop.db_id) == shop.wal.durable.lsn
            assert [name for name in os.listdir(self.path / "readers") if name.endswith(".lease")] == []
            assert store.checkpoint("shop").state.name == "SUCCEEDED"
            store.worker.drain()
            assert_clean(store.manifest)


def test_readers_of_other_processes_see_one_version_whatever_the_owner_does(tmp_path: Path, nursery: Nursery) -> None:
    town = Town(tmp_path / "store", nursery, random.Random(11))
    town.live(7)
    town.look()
    assert town.checked > 500
    assert town.written > 30
    assert town.recycled > 3, "no segment was recycled under anybody: the test tests nothing"


def test_an_owner_that_ignores_leases_can_take_versions_away_but_never_show_wrong_ones(
    tmp_path: Path, nursery: Nursery
) -> None:
    """P8: whatever becomes of a lease, a reader sees its version or hears that it is gone."""
    town = Town(tmp_path / "store", nursery, random.Random(7))
    with town.owner("careless") as owner, town.spawn("reader", lenient=True) as reader:
        while not (town.gone >= 2 and town.recycled > 5):
            town.hear(owner, 20)
            town.hear(reader, 5)
    assert town.checked
    town.look()


@pytest.mark.parametrize("point", ["pages.lease.written", "pages.lease.taken", "pages.published.leased"])
def test_a_reader_that_is_killed_while_it_opens_leaves_nothing_that_holds(
    tmp_path: Path, nursery: Nursery, point: str
) -> None:
    town = Town(tmp_path / "store", nursery, random.Random(5))
    with town.owner() as owner:
        town.hear(owner, 10)
        for _ in range(3):
            with town.spawn("reader", failpoints=f"{point}=kill") as reader:
                assert reader.wait() == -9, nursery.errors()
        town.hear(owner, 60)
    town.look()
    assert os.listdir(town.path / "readers") == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_long_readers_of_other_processes(tmp_path: Path, nursery: Nursery, seed: int) -> None:
    town = Town(tmp_path / "store", nursery, random.Random(seed))
    town.live(80)
    town.look()
    assert town.checked > 5_000


def test_a_killed_reader_holds_nothing_from_the_next_look_on(tmp_path: Path, nursery: Nursery) -> None:
    town = Town(tmp_path / "store", nursery, random.Random(3))
    with town.owner():
        pass
    with quire.open(town.path, settings=SETTINGS) as store:
        shop = store.pages.open("shop")
        reader = town.spawn("reader")
        while not store.pages._files.look():
            time.sleep(0.01)
        held = store.pages._files.look()[0]
        assert held.pid == reader.pid
        with shop.begin() as txn:
            txn.write_page(txn.size_pages, bytes(512))  # a page that the list in page 0 expects to be zeros
        assert store.pages.floor(shop.db_id) <= shop.wal.durable.lsn
        assert reader.kill() == -9, nursery.errors()
        assert store.pages.floor(shop.db_id) == shop.wal.durable.lsn
        assert store.pages._files.look() == []
        reader.close()
