"""Power loss at any time: acknowledged commits survive, others are complete or absent.

The disk is a `CrashDisk`: at the crash every unsynced sector is kept, dropped or garbled independently. The time is any
call of the disk (power is lost just before it) or any failpoint, also during recovery.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from quire.durable.failpoints import armed
from quire.pages.pagestore import PageStore
from quire.testing.crashdisk import Chooser, CrashDisk, drop_all, keep_all
from quire.testing.faults import Fault, FaultyDisk, PowerCut
from quire.testing.manifest import assert_clean
from tests.pages.engine_harness import Model, Pages, Version, assert_reads, image, next_version, small_segments


@dataclass(frozen=True)
class Step:
    """One operation on a database."""

    kind: str
    pages: tuple[int, ...] = ()
    truncate: int | None = None


COMMITS = st.builds(
    Step,
    st.sampled_from(["commit", "commit", "commit", "lazy"]),
    st.lists(st.integers(0, 14), min_size=1, max_size=12, unique=True).map(tuple),
    st.one_of(st.none(), st.none(), st.integers(1, 8)),
)
STEPS = st.lists(
    st.one_of(
        COMMITS, COMMITS, COMMITS, st.sampled_from([Step(k) for k in ("seal", "publish", "tick", "reopen", "snapshot")])
    ),
    min_size=1,
    max_size=14,
)


class CrashingDatabase:
    """A database that is written to, loses power, and is checked."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        small_segments(monkeypatch)
        self.base = base
        self.model = Model()
        self.acknowledged = 0
        self.crashes = 0
        self.snapshots = 0
        self.crash_disk = CrashDisk(str(base / "disk0"))
        self.power = FaultyDisk(self.crash_disk, Fault.POWER_CUT)
        self.pages = Pages(base, disk=self.power, root=self.crash_disk.path("store"), objects_url="memory://none")

    def cut_after(self, calls: int) -> None:
        """Power is lost just before the given further call of the disk."""
        self.power._fail_at = len(self.power.calls) + calls

    @contextmanager
    def cut_at_point(self, hits: int) -> Iterator[None]:
        """Power is lost at the n-th failpoint of the engine from now on."""
        remaining = [hits]

        def count(name: str) -> None:
            remaining[0] -= name.startswith("pages.")
            if remaining[0] <= 0 and name.startswith("pages."):
                self.power.fired = True
                raise PowerCut(name, "")

        with armed("*", count):
            yield

    def do(self, steps: list[Step]) -> None:
        store = self.pages.database()
        for step in steps:
            if step.kind in ("commit", "lazy"):
                self._commit(store, step, wait=step.kind == "commit")
            elif step.kind == "seal":
                store.wal.seal()
            elif step.kind == "publish":
                store.wal.publish()
            elif step.kind == "tick":
                self.pages.clock.advance(2.0)
                self.pages.engine.tick(store)
            elif step.kind == "snapshot":
                self.snapshots += 1
                self.pages.engine.snapshot("shop", f"number-{self.snapshots}")
                self.acknowledged = self.model.newest.lsn
            else:
                self.pages.engine.close_database("shop")
                self.acknowledged = self.model.newest.lsn
                store = self.pages.database()

    def _commit(self, store: PageStore, step: Step, *, wait: bool) -> None:
        with store.begin() as txn:
            if step.truncate is not None:
                txn.truncate(step.truncate)
            writes = {page: image() for page in step.pages}
            for page, data in writes.items():
                txn.write_page(page, data)
            size = txn.size_pages
            # Added before the commit: a crash during it may keep it. The next check removes it if it did not survive.
            version = self.model.commit(next_version(store, txn), size, writes, cut_to=step.truncate)
            guard = txn.commit()
        assert guard.lsn == version.lsn
        if wait:
            guard.result()
            self.acknowledged = max(self.acknowledged, guard.lsn)

    def lose_power(self, choose: Chooser) -> None:
        """Power loss: start again on one possible content of the disk."""
        self.crashes += 1
        target = str(self.base / f"disk{self.crashes}")
        crashed = self.crash_disk.crash(target, choose)
        self.pages.die()
        shutil.rmtree(self.crash_disk.root)
        self.crash_disk = crashed
        self.power = self.pages.disk = FaultyDisk(crashed, Fault.POWER_CUT)
        self.pages.root = crashed.path("store")
        self.pages.start()

    def assert_recovered(self) -> Version:
        """The database has one of the versions, and none older than the last acknowledged one."""
        store = self.pages.database()
        lsn, _ = store.durable_version()
        assert lsn >= self.acknowledged, f"acknowledged up to {self.acknowledged}, recovered {lsn}"
        version = self.model.at(lsn)
        assert version.lsn == lsn, "the recovered version was never written"
        with store.open_snapshot() as reader:
            assert_reads(reader, version)
        self.model.forget_after(lsn)
        self.acknowledged = lsn
        assert_clean(self.pages.manifest)
        return version

    def remove(self) -> None:
        self.pages.die()
        shutil.rmtree(self.base, ignore_errors=True)


def _chooser(seed: int) -> Chooser:
    return {0: keep_all, 1: drop_all}.get(seed) or random.Random(seed).choice


@contextmanager
def _crashing_database() -> Iterator[CrashingDatabase]:
    patch = pytest.MonkeyPatch()
    database = CrashingDatabase(Path(tempfile.mkdtemp(prefix="quire-crash-")), patch)
    try:
        yield database
    finally:
        database.remove()
        patch.undo()


def _crash_in_recovery(database: CrashingDatabase, later: list[tuple[int, int]]) -> None:
    for calls, seed in later:
        database.cut_after(calls)
        try:
            database.pages.database()
        except PowerCut:
            event("crash in recovery")
        database.lose_power(_chooser(seed))


MOMENTS = st.one_of(st.integers(1, 25), st.integers(1, 250))
SEEDS = st.one_of(st.sampled_from([0, 1]), st.integers(2, 2**32))
LATER = st.lists(st.tuples(st.integers(1, 30), SEEDS), max_size=2)


@given(STEPS, MOMENTS, SEEDS, LATER)
def test_every_acknowledged_commit_survives_and_the_rest_is_whole_or_absent(
    steps: list[Step], cut: int, seed: int, later: list[tuple[int, int]]
) -> None:
    """Power is lost before any call of the disk, also during recovery, and repeatedly."""
    with _crashing_database() as database:
        database.pages.database()
        database.cut_after(cut)
        try:
            database.do(steps)
            event("no crash within")
        except PowerCut:
            event("crash within")
        database.lose_power(_chooser(seed))
        _crash_in_recovery(database, later)
        database.assert_recovered()
        database.pages.reopen()
        database.assert_recovered()


@given(STEPS, st.integers(1, 40), SEEDS, STEPS)
def test_a_crash_between_disk_and_manifest_loses_nothing(
    steps: list[Step], hits: int, seed: int, after: list[Step]
) -> None:
    """Power is lost at any failpoint: between a file and its row, a sync and its mark, a batch and what follows it."""
    with _crashing_database() as database:
        database.pages.database()
        with database.cut_at_point(hits):
            try:
                database.do(steps)
            except PowerCut as cut:
                event(f"at {cut.args[0]}")
        database.lose_power(_chooser(seed))
        database.assert_recovered()
        database.do(after)
        database.lose_power(_chooser(seed // 7))
        database.assert_recovered()


@given(STEPS, SEEDS, st.integers(1, 12), SEEDS)
def test_a_crash_at_any_step_of_recovery_is_recovered_from(steps: list[Step], seed: int, hits: int, again: int) -> None:
    with _crashing_database() as database:
        database.do(steps)
        database.lose_power(_chooser(seed))
        with database.cut_at_point(hits):
            try:
                database.pages.database()
            except PowerCut as cut:
                event(f"at {cut.args[0]}")
        database.lose_power(_chooser(again))
        database.assert_recovered()
