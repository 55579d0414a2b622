"""Random sequences of all operations on page databases, compared with a dict of versions.

Writers, readers at every version, named snapshots, forks, time travel, sealing, publication, checkpoints, merges,
truncation, clean reopening and power loss. Every read of a live version must always return exactly what the model has.
"""

from __future__ import annotations

import pickle
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from quire.core.errors import LeaseExpired, SnapshotGone
from quire.manifest.records import JobKind
from quire.pages.pagestore import PageStore
from quire.pages.snapshot import Snapshot
from quire.pages.view import SnapshotView
from quire.testing.crashdisk import CrashDisk, drop_all, keep_all
from quire.testing.manifest import assert_clean
from tests.pages.engine_harness import GRACE_SECONDS, Model, Pages, Version, assert_reads, image, small_segments

LEASE = 30.0
DATABASES_MAX = 4
PAGE_NUMBERS = st.integers(0, 27)


@dataclass
class ExpectedReader:
    """A reader and the version that it must see."""

    snapshot: Snapshot
    version: Version
    renews: bool
    """Whether it renews itself."""


@dataclass(frozen=True)
class ExpectedSnapshot:
    """A snapshot and the version that it must show."""

    db: str
    name: str
    version: Version


class PageMachine(RuleBasedStateMachine):
    """The operations and the model; see the module's docstring."""

    databases = Bundle("databases")
    readers = Bundle("readers")
    named = Bundle("named")

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        small_segments(self.patch)
        self.base = Path(tempfile.mkdtemp(prefix="quire-machine-"))
        self.disk = CrashDisk(str(self.base / "disk0"))
        self.pages = Pages(
            self.base, disk=self.disk, root=self.disk.path("store"), objects_url=self.disk.path("objects")
        )
        self.models: dict[str, Model] = {}
        self.acknowledged: dict[str, int] = {}
        self.live: list[ExpectedReader] = []
        self.names = 0

    def store(self, db: str) -> PageStore:
        return self.pages.engine.open(db)

    def fresh_name(self) -> str:
        self.names += 1
        return f"n{self.names}"

    @initialize(target=databases)
    def begin(self) -> str:
        self.pages.database("first")
        self.models["first"] = Model()
        self.acknowledged["first"] = 0
        return "first"

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    @rule(
        db=databases,
        numbers=st.lists(PAGE_NUMBERS, min_size=1, max_size=9, unique=True),
        truncate=st.one_of(st.none(), st.none(), st.none(), st.integers(1, 24)),
        wait=st.booleans(),
        regrow=st.booleans(),
    )
    def write(self, db: str, numbers: list[int], truncate: int | None, wait: bool, regrow: bool) -> None:
        with self.store(db).begin() as txn:
            if truncate is not None:
                txn.truncate(truncate)
            writes = {page: image() for page in numbers}
            for page, data in writes.items():
                txn.write_page(page, data)
                assert txn.read_page(page) == data
            if regrow and truncate is not None:
                txn.truncate(max(txn.size_pages, 20))
            size, guard = txn.size_pages, txn.commit()
        self.models[db].commit(guard.lsn, size, writes, cut_to=truncate)
        if wait:
            guard.result()
            self.acknowledged[db] = guard.lsn

    @rule(db=databases, size=st.integers(1, 30))
    def resize(self, db: str, size: int) -> None:
        with self.store(db).begin() as txn:
            txn.truncate(size)
            guard = txn.commit()
        guard.result()
        if guard.lsn != self.models[db].newest.lsn:
            self.models[db].commit(guard.lsn, size, {}, cut_to=size)
        self.acknowledged[db] = guard.lsn

    @rule(db=databases, page=PAGE_NUMBERS)
    def rollback(self, db: str, page: int) -> None:
        txn = self.store(db).begin()
        newest = self.models[db].newest
        if page < newest.size:
            assert txn.read_page(page) == newest.page(page), "a transaction reads the versions committed before it"
        txn.write_page(page, image())
        txn.rollback()

    # ── readers ───────────────────────────────────────────────────────────────────────────────────────────────────────
    @rule(target=readers, db=databases, renews=st.booleans())
    def open_reader(self, db: str, renews: bool) -> ExpectedReader:
        snapshot = self.store(db).open_snapshot(tags={"db": db})
        if renews:
            snapshot.__enter__()
        reader = ExpectedReader(snapshot, self.models[db].at(snapshot.lsn), renews)
        assert reader.version.lsn == snapshot.lsn
        self.live.append(reader)
        return reader

    @rule(reader=readers)
    def read(self, reader: ExpectedReader) -> None:
        if reader not in self.live:
            return
        if reader.snapshot.is_open:
            assert_reads(reader.snapshot, reader.version)
        else:
            assert not reader.renews
            with pytest.raises(LeaseExpired):
                reader.snapshot.read_page(0)

    @rule(reader=consumes(readers))
    def close_reader(self, reader: ExpectedReader) -> None:
        if reader in self.live:
            self.live.remove(reader)
            reader.snapshot.close()

    @rule(db=databases, back=st.integers(0, 12))
    def look_back(self, db: str, back: int) -> None:
        store, versions = self.store(db), self.models[db].versions
        version = versions[max(len(versions) - 1 - back, 0)]
        if not 0 < version.lsn <= store.durable_version()[0]:
            return
        try:
            reader = store.open_snapshot(at=version.lsn)
        except SnapshotGone:
            return
        with reader:
            assert reader.lsn == version.lsn
            assert_reads(reader, version)

    # ── time and upkeep ───────────────────────────────────────────────────────────────────────────────────────────────
    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0, LEASE + 1, GRACE_SECONDS + 1]))
    def tick(self, seconds: float) -> None:
        self.pages.clock.advance(seconds)
        for store in self.pages.engine.stores():
            self.pages.engine.tick(store)

    @rule(db=databases)
    def seal(self, db: str) -> None:
        self.store(db).wal.seal()

    @rule(db=databases)
    def publish(self, db: str) -> None:
        self.store(db).wal.publish()

    @rule(db=databases)
    def sync(self, db: str) -> None:
        self.store(db).wal.sync()
        self.acknowledged[db] = self.models[db].newest.lsn

    @rule(db=databases)
    def checkpoint(self, db: str) -> None:
        self.pages.run(JobKind.CHECKPOINT, self.store(db).db_id)
        self.acknowledged[db] = self.models[db].newest.lsn  # a checkpoint flushes

    @rule(db=databases)
    def merge(self, db: str) -> None:
        self.pages.run(JobKind.MERGE, self.store(db).db_id)

    # ── snapshots and forks ───────────────────────────────────────────────────────────────────────────────────────────
    @rule(target=named, db=databases)
    def snapshot(self, db: str) -> ExpectedSnapshot:
        name = self.fresh_name()
        info = self.pages.engine.snapshot(db, name)
        version = self.models[db].newest
        assert info.anchor_lsn == version.lsn
        self.acknowledged[db] = version.lsn
        return ExpectedSnapshot(db, name, version)

    @rule(snapshot_info=named, pickled=st.booleans())
    def read_snapshot(self, snapshot_info: ExpectedSnapshot, pickled: bool) -> None:
        if not pickled:
            assert_reads(self.pages.engine.open_view(snapshot_info.db, snapshot_info.name), snapshot_info.version)
            return
        view: SnapshotView = pickle.loads(pickle.dumps(self.pages.engine.view(snapshot_info.db, snapshot_info.name)))
        assert_reads(view.open(self.pages.engine.sources), snapshot_info.version)

    @rule(snapshot_info=consumes(named))
    def drop_snapshot(self, snapshot_info: ExpectedSnapshot) -> None:
        self.pages.manifest.snapshots.drop(snapshot_info.db, snapshot_info.name)

    @precondition(lambda self: len(self.models) < DATABASES_MAX)
    @rule(target=databases, db=databases)
    def fork(self, db: str) -> str:
        name = self.fresh_name()
        self.pages.engine.fork(db, name)
        self.acknowledged[db] = self.models[db].newest.lsn
        return self._add_fork(name, self.models[db].copy(self.models[db].newest.lsn))

    @precondition(lambda self: len(self.models) < DATABASES_MAX)
    @rule(target=databases, snapshot_info=named)
    def fork_snapshot(self, snapshot_info: ExpectedSnapshot) -> str:
        name = self.fresh_name()
        self.pages.engine.fork(snapshot_info.db, name, at=snapshot_info.name)
        return self._add_fork(name, Model(versions=[snapshot_info.version]))

    def _add_fork(self, name: str, model: Model) -> str:
        # A fork does not have the versions before its fork point, except those in its own segments.
        self.models[name] = model
        self.acknowledged[name] = model.newest.lsn
        with self.store(name).open_snapshot() as reader:
            assert_reads(reader, model.newest)
        return name

    # ── restarts and crashes ──────────────────────────────────────────────────────────────────────────────────────────
    def _forget_readers(self) -> None:
        self.live = []

    @rule()
    def reopen(self) -> None:
        self._forget_readers()
        self.pages.reopen()
        for db, model in self.models.items():
            self.acknowledged[db] = model.newest.lsn

    @rule(seed=st.one_of(st.sampled_from([0, 1]), st.integers(2, 2**32)))
    def crash(self, seed: int) -> None:
        self._forget_readers()
        choose = {0: keep_all, 1: drop_all}.get(seed) or random.Random(seed).choice
        target = str(self.base / self.fresh_name())
        crashed = self.disk.crash(target, choose)
        self.pages.die()
        shutil.rmtree(self.disk.root)
        self.disk = crashed
        self.pages.disk, self.pages.root, self.pages.objects_url = (
            crashed,
            crashed.path("store"),
            crashed.path("objects"),
        )
        self.pages.start()
        for db, model in self.models.items():
            lsn, _ = self.store(db).durable_version()
            assert lsn >= self.acknowledged[db], "an acknowledged commit is lost"
            assert model.at(lsn).lsn == lsn, "the recovered version was never written"
            model.forget_after(lsn)
            self.acknowledged[db] = lsn
            with self.store(db).open_snapshot() as reader:
                assert_reads(reader, model.newest)

    @invariant()
    def readers_are_protected(self) -> None:
        """The floor is never above a live reader."""
        for reader in self.live:
            if reader.snapshot.is_open:
                store = self.store(reader.snapshot.tags["db"])
                assert store.readers.given_floor <= reader.snapshot.lsn

    def teardown(self) -> None:
        try:
            for reader in self.live:
                if reader.snapshot.is_open:
                    assert_reads(reader.snapshot, reader.version)
            assert_clean(self.pages.manifest)
            self.pages.reopen()
            for db, model in self.models.items():
                with self.store(db).open_snapshot() as snapshot:
                    assert_reads(snapshot, model.newest)
        finally:
            self.pages.die()
            shutil.rmtree(self.base, ignore_errors=True)
            self.patch.undo()


TestPageMachine = PageMachine.TestCase
TestPageMachine.settings = settings(suppress_health_check=list(HealthCheck))
