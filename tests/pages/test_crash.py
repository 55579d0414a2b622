"""Power loss at any moment of a page database's life: what was acknowledged is there, what was not is whole or absent.

The disk below is a `CrashDisk`: at the crash every unsynced sector is kept, dropped or garbled on its own. The moment is any
call of the disk (the power goes off just before it) or any failpoint, in recovery too.
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
from tests.pages.world import Model, Pages, Version, assert_reads, image, next_version, small_segments


@dataclass(frozen=True)
class Step:
    """One thing that happens to a database."""

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


class Life:
    """A database that lives, dies and is looked at."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        small_segments(monkeypatch)
        self.base = base
        self.model = Model()
        self.acknowledged = 0
        self.lives = 0
        self.snapshots = 0
        self.crash_disk = CrashDisk(str(base / "disk0"))
        self.power = FaultyDisk(self.crash_disk, Fault.POWER_CUT)
        self.pages = Pages(base, disk=self.power, root=self.crash_disk.path("store"), objects_url="memory://none")

    def cut_after(self, calls: int) -> None:
        """The power goes off just before so many more calls of the disk."""
        self.power._fail_at = len(self.power.calls) + calls

    @contextmanager
    def cut_at_point(self, hits: int) -> Iterator[None]:
        """The power goes off at the n-th failpoint of the engine from now on."""
        left = [hits]

        def count(name: str) -> None:
            left[0] -= name.startswith("pages.")
            if left[0] <= 0 and name.startswith("pages."):
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
            # Told before: a crash in the commit may keep it. It is corrected by what the next life finds.
            version = self.model.commit(next_version(store, txn), size, writes, cut_to=step.truncate)
            guard = txn.commit()
        assert guard.lsn == version.lsn
        if wait:
            guard.result()
            self.acknowledged = max(self.acknowledged, guard.lsn)

    def die(self, choose: Chooser) -> None:
        """Power loss: start again on what one possible disk holds."""
        self.lives += 1
        target = str(self.base / f"disk{self.lives}")
        crashed = self.crash_disk.crash(target, choose)
        self.pages.die()
        shutil.rmtree(self.crash_disk.root)
        self.crash_disk = crashed
        self.power = self.pages.disk = FaultyDisk(crashed, Fault.POWER_CUT)
        self.pages.root = crashed.path("store")
        self.pages.start()

    def look(self) -> Version:
        """What there is must be one of the versions, not older than the last that was acknowledged."""
        store = self.pages.database()
        lsn, _ = store.durable_version()
        assert lsn >= self.acknowledged, f"acknowledged up to {self.acknowledged}, found {lsn}"
        version = self.model.at(lsn)
        assert version.lsn == lsn, "there is no such version"
        with store.open_snapshot() as reader:
            assert_reads(reader, version)
        self.model.forget_after(lsn)
        self.acknowledged = lsn
        assert_clean(self.pages.manifest)
        return version

    def end(self) -> None:
        self.pages.die()
        shutil.rmtree(self.base, ignore_errors=True)


def _chooser(seed: int) -> Chooser:
    return {0: keep_all, 1: drop_all}.get(seed) or random.Random(seed).choice


@contextmanager
def _life() -> Iterator[Life]:
    patch = pytest.MonkeyPatch()
    life = Life(Path(tempfile.mkdtemp(prefix="quire-crash-")), patch)
    try:
        yield life
    finally:
        life.end()
        patch.undo()


def _die_in_recovery(life: Life, later: list[tuple[int, int]]) -> None:
    for calls, seed in later:
        life.cut_after(calls)
        try:
            life.pages.database()
        except PowerCut:
            event("crash in recovery")
        life.die(_chooser(seed))


MOMENTS = st.one_of(st.integers(1, 25), st.integers(1, 250))
SEEDS = st.one_of(st.sampled_from([0, 1]), st.integers(2, 2**32))
LATER = st.lists(st.tuples(st.integers(1, 30), SEEDS), max_size=2)


@given(STEPS, MOMENTS, SEEDS, LATER)
def test_every_acknowledged_commit_survives_and_the_rest_is_whole_or_absent(
    steps: list[Step], cut: int, seed: int, later: list[tuple[int, int]]
) -> None:
    """The power goes off before any call of the disk, in recovery too, and again and again."""
    with _life() as life:
        life.pages.database()
        life.cut_after(cut)
        try:
            life.do(steps)
            event("no crash within")
        except PowerCut:
            event("crash within")
        life.die(_chooser(seed))
        _die_in_recovery(life, later)
        life.look()
        life.pages.reopen()
        life.look()


@given(STEPS, st.integers(1, 40), SEEDS, STEPS)
def test_a_crash_between_disk_and_manifest_loses_nothing(
    steps: list[Step], hits: int, seed: int, after: list[Step]
) -> None:
    """The power goes off at any failpoint: between a file and its row, a sync and its mark, a batch and what follows it."""
    with _life() as life:
        life.pages.database()
        with life.cut_at_point(hits):
            try:
                life.do(steps)
            except PowerCut as cut:
                event(f"at {cut.args[0]}")
        life.die(_chooser(seed))
        life.look()
        life.do(after)
        life.die(_chooser(seed // 7))
        life.look()


@given(STEPS, SEEDS, st.integers(1, 12), SEEDS)
def test_a_crash_at_any_step_of_recovery_is_recovered_from(steps: list[Step], seed: int, hits: int, again: int) -> None:
    with _life() as life:
        life.do(steps)
        life.die(_chooser(seed))
        with life.cut_at_point(hits):
            try:
                life.pages.database()
            except PowerCut as cut:
                event(f"at {cut.args[0]}")
        life.die(_chooser(again))
        life.look()
