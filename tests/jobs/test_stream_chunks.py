"""Chunks of streams under random sequences of operations: rows, slots and bytes stay consistent."""

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
from tests.jobs.small_stream import SETTINGS, check, fill

CRASHES = (
    "stream.retire.queued",
    "stream.retire.deleted",
    "stream.retire.told",
    "stream.upload.sent",
    "stream.evict.told",
    "jobs.stream_checkpoint.planned",
    "jobs.stream_checkpoint.reserved",
)


class ProcessDied(BaseException):
    """The process ends here."""


class RandomStream:
    """A store with one stream, to which random operations are applied."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.rng = random.Random(seed)
        self.store = quire.open(path, settings=SETTINGS)
        self.stream = self.store.stream("clicks", create=True)
        self.snapshots: list[str] = []

    def step(self) -> None:
        steps = [self.fill, self.fill, self.publish, self.upload, self.evict, self.retire, self.snapshot, self.drop]
        self.rng.choice([*steps, self.collect, self.reopen])()

    def crashing_step(self) -> None:
        """A step that may be interrupted by a crash, after which the stream is recovered."""

        def crash(name: str) -> None:
            raise ProcessDied(name)

        try:
            with armed(self.rng.choice(CRASHES), crash):
                self.rng.choice([self.publish, self.upload, self.evict, self.retire])()
        except ProcessDied:
            self.reopen(crashed=True)

    def fill(self) -> None:
        fill(self.stream, self.rng.randint(1, 3), records=self.rng.randint(1, 30))

    def publish(self) -> None:
        self.store.checkpoint("clicks")

    def upload(self) -> None:
        for segment_id in self.rng.sample(self._moving(), min(2, len(self._moving()))):
            self.stream.upload(segment_id)

    def evict(self) -> None:
        self.stream.evict(*self._moving(), warm=self.rng.random() < 0.5)

    def _moving(self) -> list[int]:
        return [segment.segment_id for segment in self.stream.ledger.view.sealed if not segment.is_being_removed]

    def retire(self) -> None:
        sealed = self.stream.ledger.view.sealed
        retained = sealed[self.rng.randint(0, len(sealed)) :] if sealed else []
        self.stream.retain(Retention(bytes=max(sum(segment.durable_bytes for segment in retained), 1)))
        self.stream.retire()

    def snapshot(self) -> None:
        self.snapshots.append(f"snapshot {len(self.snapshots)} {self.rng.random()}")
        self.store.snapshot("clicks", self.snapshots[-1])

    def drop(self) -> None:
        if self.snapshots:
            name = self.snapshots.pop(self.rng.randrange(len(self.snapshots)))
            self.store.manifest.snapshots.drop("clicks", name)

    def collect(self) -> None:
        self.store.maintain()

    def reopen(self, *, crashed: bool = False) -> None:
        if crashed:
            self.stream.abandon()
            self.store.manifest.jobs.recover()  # as at an opening: a dead process has left its lease behind
            self.stream = self.store.stream("clicks")
            return
        self.store.close()
        self.store = quire.open(self.path, settings=SETTINGS)
        self.stream = self.store.stream("clicks")

    def check(self) -> None:
        """Published segments are sealed and exist; retired ones have no slot; every retained record is readable."""
        check(self.store)
        with self.store.manifest.read() as txn:
            rows = {key[1]: row.state for key, row in txn.scan(t.WAL_CATALOG)}
            segment_ids = range(1, self.stream.ledger.index.opened_max + 1)
            slots = {segment_id for segment_id in segment_ids if txn.chain(self.stream.stream_id, segment_id)}
        sealed_ids = {segment.segment_id for segment in self.stream.ledger.view.sealed}
        assert {segment_id for segment_id, state in rows.items() if state is WalState.INDEXED} == slots
        assert slots <= sealed_ids
        ids = [record.id for record in self.stream.read()]
        assert ids == list(range(self.stream.first_record, self.stream.end_record))

    def assert_dropped_completely(self) -> None:
        """Drop everything; no row and no object remains."""
        for name in self.snapshots:
            self.store.manifest.snapshots.drop("clicks", name)
        self.store.drop("clicks")
        for _ in range(3):
            self.store.maintain()
        with self.store.manifest.read() as txn:
            assert (txn.count(t.CHUNK_CATALOG), txn.count(t.WAL_CATALOG)) == (0, 0)
            counts = {key[1:3]: row.in_use for key, row in txn.scan(t.GC_REFCOUNTS)}
        (namespace,) = counts  # the store's own namespace, which stays while it is empty
        assert (namespace[0], counts[namespace]) == (ArtifactKind.NAMESPACE, 1)
        remaining = [path for path in Path(self.path, "objects").rglob("*") if path.is_file()]
        assert [path for path in remaining if "manifest" not in path.parts] == []


def run_random_stream(path: Path, seed: int, steps: int) -> None:
    random_stream = RandomStream(path, seed)
    try:
        for number in range(steps):
            random_stream.crashing_step() if number % 4 == 3 else random_stream.step()
            if number % 3 == 0:
                random_stream.check()
        random_stream.check()
        random_stream.assert_dropped_completely()
    except QuireError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    finally:
        random_stream.store.close()


@pytest.mark.parametrize("seed", [101, 108])
def test_chunks_and_segments_stay_consistent(tmp_path: Path, seed: int) -> None:
    run_random_stream(tmp_path / "store", seed, 30)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 212))
def test_long_chunks_and_segments_stay_consistent(tmp_path: Path, seed: int) -> None:
    run_random_stream(tmp_path / "store", seed, 60)
