"""The engine compared with a dictionary that has a history: writes, loads, snapshots, flushes, compactions, reopening,
power loss.
"""

from __future__ import annotations

import shutil
import tempfile
from random import Random

import pyarrow as pa
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from quire.lsm.bulk import BulkWriter, LoadTarget, begin_load, published
from quire.lsm.kv import Kv
from quire.lsm.reading import KvSnapshot
from quire.lsm.table_options import TableOptions
from quire.testing.crashdisk import Chooser, CrashDisk, drop_all, keep_all
from tests.lsm.kv_helpers import TINY, Model, assert_range, assert_same, assert_sound

KEYS = st.one_of(st.sampled_from([b"", b"a", b"b", b"ab", b"\xff"]), st.integers(0, 12).map(lambda n: b"k%02d" % n))
VALUES = st.one_of(st.none(), st.binary(max_size=40), st.integers(0, 99).map(lambda n: b"v%d" % n * 20))
BATCHES = st.dictionaries(KEYS, VALUES, min_size=1, max_size=12)


class KvMachine(RuleBasedStateMachine):
    """Synced acknowledged writes survive everything; snapshots do not change."""

    snapshots: Bundle[KvSnapshot] = Bundle("snapshots")

    def __init__(self) -> None:
        super().__init__()
        self.base = tempfile.mkdtemp()
        self.crashes = 0
        self.disk = CrashDisk(f"{self.base}/disk0")
        self.model = Model()
        self.synced = 0
        self.kv: Kv | None = None
        self.held: dict[KvSnapshot, dict[bytes, bytes]] = {}
        """The open snapshots and their expected content."""

    @initialize()
    def begin(self) -> None:
        self.kv = self.open()

    def open(self) -> Kv:
        return Kv.open(self.disk, f"{self.disk.root}/db", TINY, background=False)

    @property
    def db(self) -> Kv:
        assert self.kv is not None
        return self.kv

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    @rule(batch=BATCHES, sync=st.booleans())
    def write(self, batch: dict[bytes, bytes | None], sync: bool) -> None:
        lsn = self.db.write(batch, sync=sync)
        self.model.write(lsn, batch)
        if sync:
            self.synced = lsn

    @rule(rows=BATCHES, parts=st.integers(1, 3))
    def load(self, rows: dict[bytes, bytes | None], parts: int) -> None:
        """A bulk load by `parts` tasks, each with some of the rows in any order, and one more attempt that is never
        published.
        """
        number = self.db.last_lsn + 1
        with begin_load(self.db) as load:
            target = LoadTarget(directory=self.db.home.path, lsn=load.lsn, table_bytes=200, options=TableOptions())
            attempts: list[list[int]] = []
            for part in [0, *range(parts)]:
                mine = [key for at, key in enumerate(rows) if at % parts == part]
                writer = BulkWriter(self.disk, target, load.allocate, buffer_bytes=100)
                writer.add(pa.array(mine, pa.binary()), pa.array([rows[key] for key in mine], pa.binary()))
                attempts.append(writer.finish())
            assert load.publish([sst_id for ids in attempts[1:] for sst_id in ids], number=number) == len(rows)
        self.model.write(load.lsn, rows)
        self.synced = load.lsn
        assert published(self.db, number) == len(rows)

    @rule()
    def flush(self) -> None:
        self.db.flush()
        self.synced = self.db.last_lsn

    @rule()
    def compact_due(self) -> None:
        self.db.upkeep.compact_due()

    @rule()
    def compact(self) -> None:
        self.db.compact()
        self.synced = self.db.last_lsn

    @rule()
    def checkpoint(self) -> None:
        self.db.manifest.checkpoint()

    # ── snapshots ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @rule(target=snapshots)
    def snapshot(self) -> KvSnapshot:
        self.held[snapshot := self.db.snapshot()] = self.model.now
        return snapshot

    @rule(snapshot=consumes(snapshots))
    def close_snapshot(self, snapshot: KvSnapshot) -> None:
        snapshot.close()
        self.held.pop(snapshot, None)

    # ── ends ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    @rule()
    def reopen(self) -> None:
        self.db.close()
        self.held.clear()
        self.synced = max(self.model.at)
        self.kv = self.open()

    @rule(outcome=st.one_of(st.sampled_from([drop_all, keep_all]), st.integers(0, 2**32)))
    def crash(self, outcome: Chooser | int) -> None:
        """Power loss: unsynced sectors are kept, dropped or garbled, by a seed (there are too many to draw each)."""
        self.crashes += 1
        choose: Chooser = Random(outcome).choice if isinstance(outcome, int) else outcome
        after = self.disk.crash(f"{self.base}/disk{self.crashes}", choose)
        self.db.abandon()
        self.held.clear()
        self.disk = after
        self.kv = self.open()
        pairs = dict(self.kv.scan())
        allowed = [lsn for lsn in self.model.at if lsn >= self.synced and self.model.at[lsn] == pairs]
        assert allowed, "this state was never acknowledged"
        if outcome is keep_all:
            assert max(self.model.at) in allowed, "the death of a process loses no write"
        # Among lsns with equal states, those above the last lsn are lost, and are assigned again.
        survived = max(lsn for lsn in allowed if lsn <= self.kv.last_lsn)
        self.model.at = {lsn: state for lsn, state in self.model.at.items() if lsn <= survived}
        self.model.now = self.model.at[survived]
        if self.kv.last_lsn > survived:  # higher lsns may have been reserved
            self.model.at[self.kv.last_lsn] = self.model.now
        self.synced = max(self.model.at)

    # ── always ────────────────────────────────────────────────────────────────────────────────────────────────────────
    @rule(low=KEYS, high=st.one_of(st.none(), KEYS))
    def read_range(self, low: bytes, high: bytes | None) -> None:
        assert_range(self.db, self.model.now, low, high)

    @invariant()
    def same(self) -> None:
        if self.kv is not None:
            assert_same(self.kv, self.model.now, (b"a", b"k00", b"nothing"))
            for snapshot, was in list(self.held.items())[-3:]:
                assert_same(snapshot, was, (b"a", b"k00"))

    def teardown(self) -> None:
        if self.kv is not None:
            assert_sound(self.kv)
            self.kv.close()
        shutil.rmtree(self.base)


TestKvMachine = KvMachine.TestCase


def test_an_lsn_that_is_reassigned_after_a_crash_is_the_newest_state() -> None:
    """Deleting missing keys gives equal states: only the last lsn shows which of them a crash has lost."""
    machine = KvMachine()
    machine.begin()
    for _ in range(2):
        machine.write({b"": None}, sync=False)
    machine.crash(drop_all)
    machine.load({b"": b""}, parts=1)
    machine.crash(keep_all)
    machine.teardown()
