"""Chunks of streams under everything that happens to a stream, in random order: rows, slots and bytes stay one story."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import quire
from quire.core.errors import QuireError
from quire.core.ids import ArtifactKind
from quire.durable.failpoints import armed
from quire.manifest import tables as t
from quire.manifest.records import WalState
from quire.stream.state import Retention
from tests.jobs.stream_world import SETTINGS, check, fill

CRASHES = (
    "stream.retire.queued",
    "stream.retire.deleted",
    "stream.retire.told",
    "stream.upload.sent",
    "stream.evict.told",
    "jobs.stream_checkpoint.planned",
    "jobs.stream_checkpoint.reserved",
)


class Died(BaseException):
    """The process ends here."""


class Life:
    """A store with one stream, and what should be in it."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.chance = random.Random(seed)
        self.store = quire.open(path, settings=SETTINGS)
        self.stream = self.store.stream("clicks", create=True)
        self.snapshots: list[str] = []

    def step(self) -> None:
        steps = [self.fill, self.fill, self.publish, self.upload, self.evict, self.retire, self.keep, self.drop]
        self.chance.choice([*steps, self.collect, self.reopen])()

    def dying(self) -> None:
        """A step that may not come to its end; the stream is recovered."""

        def die(name: str) -> None:
            raise Died(name)

        try:
            with armed(self.chance.choice(CRASHES), die):
                self.chance.choice([self.publish, self.upload, self.evict, self.retire])()
        except Died:
            self.reopen(crashed=True)

    def fill(self) -> None:
        fill(self.stream, self.chance.randint(1, 3), records=self.chance.randint(1, 30))

    def publish(self) -> None:
        self.store.checkpoint("clicks")

    def upload(self) -> None:
        for each in self.chance.sample(self._moving(), min(2, len(self._moving()))):
            self.stream.upload(each)

    def evict(self) -> None:
        self.stream.evict(*self._moving(), warm=self.chance.random() < 0.5)

    def _moving(self) -> list[int]:
        return [each.segment_id for each in self.stream.ledger.view.sealed if not each.is_being_removed]

    def retire(self) -> None:
        sealed = self.stream.ledger.view.sealed
        kept = sealed[self.chance.randint(0, len(sealed)) :] if sealed else []
        self.stream.retain(Retention(bytes=max(sum(each.durable_bytes for each in kept), 1)))
        self.stream.retire()

    def keep(self) -> None:
        self.snapshots.append(f"snapshot {len(self.snapshots)} {self.chance.random()}")
        self.store.snapshot("clicks", self.snapshots[-1])

    def drop(self) -> None:
        if self.snapshots:
            name = self.snapshots.pop(self.chance.randrange(len(self.snapshots)))
            self.store.manifest.snapshots.drop("clicks", name)

    def collect(self) -> None:
        self.store.maintain()

    def reopen(self, *, crashed: bool = False) -> None:
        if crashed:
            self.stream.abandon()
            self.stream = self.store.stream("clicks")
            return
        self.store.close()
        self.store = quire.open(self.path, settings=SETTINGS)
        self.stream = self.store.stream("clicks")

    def check(self) -> None:
        """What is published is sealed and there; what is retired has no slot; every record kept is read."""
        check(self.store)
        with self.store.manifest.read() as txn:
            rows = {key[1]: row.state for key, row in txn.scan(t.WAL_CATALOG)}
            ever = range(1, self.stream.ledger.index.opened_max + 1)
            slots = {each for each in ever if txn.chain(self.stream.stream_id, each)}
        there = {each.segment_id for each in self.stream.ledger.view.sealed}
        assert {each for each, state in rows.items() if state is WalState.INDEXED} == slots
        assert slots <= there
        ids = [each.id for each in self.stream.read()]
        assert ids == list(range(self.stream.first_record, self.stream.end_record))

    def end(self) -> None:
        """Drop everything: nothing is left of it."""
        for name in self.snapshots:
            self.store.manifest.snapshots.drop("clicks", name)
        self.store.drop("clicks")
        for _ in range(3):
            self.store.maintain()
        with self.store.manifest.read() as txn:
            assert (txn.count(t.CHUNK_CATALOG), txn.count(t.WAL_CATALOG)) == (0, 0)
            counts = {key[1:3]: row.in_use for key, row in txn.scan(t.GC_REFCOUNTS)}
        (space,) = counts  # of the store itself: it stays while it is empty
        assert (space[0], counts[space]) == (ArtifactKind.NAMESPACE, 1)
        left = [each for each in Path(self.path, "objects").rglob("*") if each.is_file()]
        assert [each for each in left if "manifest" not in each.parts] == []


def live(path: Path, seed: int, steps: int) -> None:
    life = Life(path, seed)
    try:
        for number in range(steps):
            life.dying() if number % 4 == 3 else life.step()
            if number % 3 == 0:
                life.check()
        life.check()
        life.end()
    except QuireError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    finally:
        life.store.close()


@pytest.mark.parametrize("seed", [101, 108])
def test_chunks_and_segments_stay_one_story(tmp_path: Path, seed: int) -> None:
    live(tmp_path / "store", seed, 30)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 212))
def test_chunks_and_segments_stay_one_story_for_long(tmp_path: Path, seed: int) -> None:
    live(tmp_path / "store", seed, 60)
