"""Random batches, valid and not, against a small model: after every step the rules hold, at the end the feed replays.

The stories come from `tests.manifest.batches.BatchMaker`. The model knows the database of each name, the acknowledged
sequences, and all ids that were ever returned.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.core.errors import AlreadyExists, InternalError, NameTaken, StoreUnusable
from quire.manifest import tables as t
from quire.manifest.guard import Receipt
from quire.manifest.ops.base import Op
from quire.manifest.ops.databases import DropDb, RegisterDb, RenameDb, SoftDropDb, UndropDb, hidden_name
from quire.manifest.ops.local import RecordMetric
from quire.manifest.ops.snapshots import ForkDb
from quire.manifest.records import DbKind
from quire.manifest.store import ManifestStore
from quire.testing.clock import ManualClock
from quire.testing.manifest import assert_clean, assert_replays, difference, dump
from tests.manifest.batches import BatchMaker, hold_feed, outcome

RANDOMS = st.randoms(use_true_random=False)
STORIES = sorted(BatchMaker(Random(0)).stories)


class ManifestMachine(RuleBasedStateMachine):
    """Drives one manifest through its public interface only: submit, typed methods, close and open."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp()
        self.path = os.path.join(self.directory, "manifest.lmdb")
        # Time stands still: what is due must not depend on how fast a history is repeated.
        self.clock = ManualClock()
        self.manifest = ManifestStore.open(self.path, clock=self.clock)
        hold_feed(self.manifest)
        self.names: dict[str, int] = {}
        self.former_names: dict[int, str] = {}
        self.acknowledged: list[int] = []
        self.returned_ids: set[int] = set()
        self.receipts: dict[bytes, Receipt] = {}

    # ── the model ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def apply_to_model(self, ops: list[Op], receipt: Receipt) -> None:
        if receipt.sequence:
            self.acknowledged.append(receipt.sequence)
        for op in ops:
            match op:
                case RegisterDb(db_id=db_id, record=record):
                    self.names[record.name] = db_id
                case ForkDb(db_id=db_id, name=name):
                    self.names[name] = db_id
                case RenameDb(db_id=db_id, name=name):
                    self.remove_name(db_id)
                    self.names[name] = db_id
                case SoftDropDb(db_id=db_id):
                    self.former_names[db_id] = next(name for name, holder in self.names.items() if holder == db_id)
                    self.remove_name(db_id)
                    self.names[hidden_name(db_id)] = db_id
                case UndropDb(db_id=db_id, name=name):
                    self.remove_name(db_id)
                    self.names[name or self.former_names[db_id]] = db_id
                case DropDb(db_id=db_id):
                    self.remove_name(db_id)

    def remove_name(self, db_id: int) -> None:
        self.names = {name: holder for name, holder in self.names.items() if holder != db_id}

    # ── steps ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    @initialize()
    def some_databases(self) -> None:
        for name in ("ash", "birch"):
            db_id = self.manifest.register_db(name, DbKind.PAGES)
            self.names[name] = db_id
            self.returned_ids.add(db_id)
            self.acknowledged.append(len(self.acknowledged) + 1)

    @rule(rng=RANDOMS, story=st.sampled_from(STORIES), more=st.integers(0, 2))
    def one_batch(self, rng: Random, story: str, more: int) -> None:
        maker = BatchMaker(rng)
        with self.manifest.read() as txn:
            ops = maker.story(txn, story)
        if more:
            ops = ops + maker.batch(self.manifest, more)
        ops = ops or [RecordMetric(1, 1, [1.0])]
        before = dump(self.manifest)
        result = outcome(self.manifest.submit(ops))
        if isinstance(result, Receipt):
            self.apply_to_model(ops, result)
        else:
            assert not isinstance(result, (StoreUnusable, InternalError)), result
            changed = difference(before, dump(self.manifest))
            assert not changed, f"a batch rejected with {result} changed rows: {changed}"

    @rule(rng=RANDOMS, count=st.integers(2, 8))
    def a_group(self, rng: Random, count: int) -> None:
        """Batches planned on the same state and submitted together, of which some invalidate others."""
        maker = BatchMaker(rng)
        batches = [maker.batch(self.manifest, rng.randint(1, 2)) for _ in range(count)]
        guards = [self.manifest.submit(ops) for ops in batches]
        sequences = []
        for ops, guard in zip(batches, guards):
            result = outcome(guard)
            if isinstance(result, Receipt):
                self.apply_to_model(ops, result)
                sequences += [result.sequence] if result.sequence else []
            else:
                assert not isinstance(result, (StoreUnusable, InternalError)), result
        assert sequences == sorted(set(sequences)), "the feed has the order of submission"

    @rule(name=st.sampled_from(BatchMaker.NAMES))
    def register(self, name: str) -> None:
        while True:
            try:
                db_id = self.manifest.register_db(name, DbKind.PAGES)
                break
            except AlreadyExists:
                continue  # a random batch has used this id; the next one is free
            except NameTaken:
                assert name in self.names
                return
        assert name not in self.names
        assert db_id not in self.returned_ids, "an id was returned twice"
        self.returned_ids.add(db_id)
        self.names[name] = db_id
        self.acknowledged.append(self.manifest.writer.head)

    @rule(rng=RANDOMS, key=st.sampled_from([bytes([n]) * 16 for n in range(3)]))
    def with_a_key(self, rng: Random, key: bytes) -> None:
        """A key that was used returns its first receipt and nothing is applied; a rejected batch does not use its
        key."""
        ops = BatchMaker(rng).batch(self.manifest)
        before = dump(self.manifest)
        result = outcome(self.manifest.submit(ops, key=key))
        if key in self.receipts:
            first = self.receipts[key]
            assert isinstance(result, Receipt)
            assert (result.repeated, result.sequence, result.generations) == (True, first.sequence, first.generations)
            assert not difference(before, dump(self.manifest))
        elif isinstance(result, Receipt):
            self.receipts[key] = result
            self.apply_to_model(ops, result)

    @rule()
    def reopen(self) -> None:
        before = dump(self.manifest)
        self.manifest.close()
        self.manifest = ManifestStore.open(self.path, clock=self.clock)
        assert not difference(before, dump(self.manifest)), "closing and opening changed rows"

    # ── invariants ────────────────────────────────────────────────────────────────────────────────────────────────────
    @invariant()
    def rules_hold(self) -> None:
        assert_clean(self.manifest, leaks=True)

    @invariant()
    def names_are_those_of_the_model(self) -> None:
        with self.manifest.read() as txn:
            assert {key[0]: row.value for key, row in txn.scan(t.DB_NAMES)} == self.names

    def teardown(self) -> None:
        try:
            with self.manifest.read() as txn:
                assert [change.sequence for change in txn.changes()] == self.acknowledged
            assert_replays(self.manifest)
        finally:
            self.manifest.close()
            shutil.rmtree(self.directory)


TestManifestMachine = ManifestMachine.TestCase
