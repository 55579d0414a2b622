"""The collector and everything around it, killed by SIGKILL at any step; whoever opens the store next finds nothing lost.

`gc_child.py` is the owner. After each of its lives, here: the promises hold, databases that the last step was not about are as
they were, the collector comes to an end; bytes without a row are only those that the last step was about to announce. In the
end, with everything dropped, nothing else is left.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from quire.objects.open import open_store
from tests.machine import promises
from tests.machine.gc_child import POINTS, Doing, Done, Life, Writing
from tests.machine.world import Place, World
from tests.nursery import Nursery


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """One process that forks all owners."""
    with Nursery("tests.machine.gc_child:main", warm_up="tests.machine.gc_child:warm_up") as made:
        yield made


class Lives:
    """One store, and those who own it one after another."""

    def __init__(self, nursery: Nursery) -> None:
        self.nursery = nursery
        self.directory = tempfile.mkdtemp()
        self.path = os.path.join(self.directory, "store")
        self.number = 0
        self.debris: set[Place] = set()
        self.deaths = 0

    def live(self, seed: int, *, steps: int, point: str = "", passes: int = 0, after: int | None = None) -> None:
        """One life: it ends at a point, or after so many messages, or by itself; then everything is looked at."""
        self.number += 1
        life = Life(self.path, self.number, seed, steps, point, passes)
        child = self.nursery.spawn()
        child.line.send(pickle.dumps(life))
        facts: dict[int, Any] = {}
        doing, writing = Doing("opening", 0), set[Place]()
        heard = 0
        while (message := child.line.receive()) is not None:
            match pickle.loads(message):
                case Doing() as told:
                    doing, writing = told, set()
                case Writing(place):
                    writing.add(place)
                case Done(told):
                    facts, doing, writing = told, Doing("nothing", 0), set()
            heard += 1
            if heard == after:
                child.kill()
        status = child.wait()
        child.line.close()
        assert status in (0, -9), self.nursery.errors()
        self.deaths += status == -9
        self.look(life, facts, doing, writing)

    def look(self, life: Life, facts: dict[int, Any], doing: Doing, writing: set[Place]) -> None:
        """What the next owner finds."""
        world = World(life.path, now_ms=life.begins_ms + 10**8)
        try:
            world.learn()
            found = world.facts()
            for db_id, fact in facts.items():
                if db_id != doing.db_id:
                    assert found.get(db_id) == fact, f"database {db_id} has changed, and {doing} was not about it"
            strangers = self.sweep(world)
            assert strangers <= writing, f"bytes without a row that {doing} did not write: {strangers - writing}"
            promises.verify(world)
            promises.settle(world)
            promises.verify(world)
            assert world.facts() == found, "collecting changed what somebody can see"
        finally:
            world.store.close()

    def sweep(self, world: World) -> set[Place]:
        """Bytes without a row, as a crash between writing and publishing leaves them; removed, as the sweep job would."""
        known = {place for key in world.artifacts for place in world.places(key)}
        strangers = {place for place, _ in promises.bytes_of(world)} - known
        for url, name in strangers:
            if url:
                open_store(url).delete(name)
            else:
                os.remove(os.path.join(world.path, name))
        return strangers

    def end(self) -> None:
        world = World(self.path, now_ms=Life(self.path, self.number + 1, 0, 0).begins_ms)
        try:
            world.learn()
            promises.drop_everything(world)
            # A namespace that was registered, and its owner killed before anything used it, is as if nobody used it yet.
            promises.nothing_is_left(world, but=frozenset({"remote_namespace"}))
        finally:
            world.store.close()


@pytest.fixture
def lives(nursery: Nursery) -> Iterator[Lives]:
    made = Lives(nursery)
    yield made
    shutil.rmtree(made.directory)


def test_a_collector_killed_at_each_of_its_steps_loses_and_leaks_nothing(lives: Lives) -> None:
    lives.live(1, steps=40)
    for seed, point in enumerate(POINTS, 2):
        lives.live(seed, steps=60, point=point, passes=seed % 3)
    assert lives.deaths >= len(POINTS) - 2
    lives.end()


def test_an_owner_killed_at_any_moment_loses_and_leaks_nothing(lives: Lives) -> None:
    rng = Random(3)
    for seed in range(5):
        lives.live(seed, steps=60, after=rng.randint(5, 90))
    assert lives.deaths == 5
    lives.end()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(20))
def test_long_lives_and_many_deaths(lives: Lives, seed: int) -> None:
    rng = Random(seed)
    for _ in range(25):
        point = rng.choice(("", *POINTS))
        after = None if point else rng.randint(1, 200)
        lives.live(rng.randint(0, 2**20), steps=100, point=point, passes=rng.randint(0, 40), after=after)
    assert lives.deaths > 10
    lives.end()
