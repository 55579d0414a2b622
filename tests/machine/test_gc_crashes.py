"""The collector and everything around it, killed by SIGKILL at any step: the next owner finds nothing lost.

`gc_child.py` is the owner. After each of its runs: the invariants hold, databases that the last step did not change are as they
were, the collector finishes; the only bytes without a row are those that the last step was about to record. At the end,
when everything was dropped, nothing else remains.
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
from tests.fork_server import ForkServer
from tests.machine import invariants
from tests.machine.gc_child import POINTS, OwnerRun, StepFinished, StepStarted, WriteStarted
from tests.machine.model import Location, StoreModel


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    """The process that forks all owners."""
    with ForkServer("tests.machine.gc_child:main", warm_up="tests.machine.gc_child:warm_up") as fork_server:
        yield fork_server


class OwnerSequence:
    """One store and its successive owners."""

    def __init__(self, fork_server: ForkServer) -> None:
        self.fork_server = fork_server
        self.directory = tempfile.mkdtemp()
        self.path = os.path.join(self.directory, "store")
        self.number = 0
        self.kills = 0

    def run_owner(self, seed: int, *, steps: int, point: str = "", passes: int = 0, after: int | None = None) -> None:
        """Run one owner until it reaches a failpoint, until it has sent `after` messages, or to its end; then verify
        the store."""
        self.number += 1
        run = OwnerRun(self.path, self.number, seed, steps, point, passes)
        child = self.fork_server.spawn()
        child.channel.send(pickle.dumps(run))
        facts: dict[int, Any] = {}
        step, unrecorded = StepStarted("opening", 0), set[Location]()
        received = 0
        while (message := child.channel.receive()) is not None:
            match pickle.loads(message):
                case StepStarted() as event:
                    step, unrecorded = event, set()
                case WriteStarted(location):
                    unrecorded.add(location)
                case StepFinished(current):
                    facts, step, unrecorded = current, StepStarted("nothing", 0), set()
            received += 1
            if received == after:
                child.kill()
        status = child.wait()
        child.channel.close()
        assert status in (0, -9), self.fork_server.errors()
        self.kills += status == -9
        self.verify_store(run, facts, step, unrecorded)

    def verify_store(self, run: OwnerRun, facts: dict[int, Any], step: StepStarted, unrecorded: set[Location]) -> None:
        """Verify what the next owner finds."""
        model = StoreModel(run.path, now_ms=run.begins_ms + 10**8)
        try:
            model.load()
            current = model.facts()
            for db_id, before in facts.items():
                if db_id != step.db_id:
                    assert current.get(db_id) == before, (
                        f"database {db_id} has changed, although the last step was {step}"
                    )
            unknown = self.sweep(model)
            assert unknown <= unrecorded, f"{step} did not write these bytes without a row: {unknown - unrecorded}"
            invariants.verify(model)
            invariants.settle(model)
            invariants.verify(model)
            assert model.facts() == current, "the collector changed a database or a snapshot"
        finally:
            model.store.close()

    def sweep(self, model: StoreModel) -> set[Location]:
        """Find bytes without a row, as a crash between writing and publishing leaves them, and delete them as the sweep
        job would."""
        expected = {location for key in model.artifacts for location in model.locations(key)}
        unknown = {location for location, _ in invariants.bytes_of(model)} - expected
        for url, name in unknown:
            if url:
                open_store(url).delete(name)
            else:
                os.remove(os.path.join(model.path, name))
        return unknown

    def drop_everything(self) -> None:
        model = StoreModel(self.path, now_ms=OwnerRun(self.path, self.number + 1, 0, 0).begins_ms)
        try:
            model.load()
            invariants.drop_everything(model)
            # An owner that is killed after registering a namespace leaves one that nothing uses.
            invariants.verify_nothing_remains(model, except_tables=frozenset({"remote_namespace"}))
        finally:
            model.store.close()


@pytest.fixture
def owners(fork_server: ForkServer) -> Iterator[OwnerSequence]:
    owners = OwnerSequence(fork_server)
    yield owners
    shutil.rmtree(owners.directory)


def test_a_collector_killed_at_each_of_its_steps_loses_and_leaks_nothing(owners: OwnerSequence) -> None:
    owners.run_owner(1, steps=40)
    for seed, point in enumerate(POINTS, 2):
        owners.run_owner(seed, steps=60, point=point, passes=seed % 3)
    assert owners.kills >= len(POINTS) - 2
    owners.drop_everything()


def test_an_owner_killed_at_any_moment_loses_and_leaks_nothing(owners: OwnerSequence) -> None:
    rng = Random(3)
    for seed in range(5):
        owners.run_owner(seed, steps=60, after=rng.randint(5, 90))
    assert owners.kills == 5
    owners.drop_everything()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(20))
def test_a_store_survives_many_killed_owners(owners: OwnerSequence, seed: int) -> None:
    rng = Random(seed)
    for _ in range(25):
        point = rng.choice(("", *POINTS))
        after = None if point else rng.randint(1, 200)
        owners.run_owner(rng.randint(0, 2**20), steps=100, point=point, passes=rng.randint(0, 40), after=after)
    assert owners.kills > 10
    owners.drop_everything()
