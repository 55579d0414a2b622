"""Disk faults and power loss at every call: no acknowledged write is lost, and no refused one is there."""

from __future__ import annotations

import tempfile
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import DiskFull, QuireError, StorageFault, StoreUnusable
from quire.durable.failpoints import armed, hits, recording
from quire.durable.files import OsDisk
from quire.lsm.kv import Kv
from quire.testing.crashdisk import CrashDisk, drop_all, keep_all
from quire.testing.faults import Fault, FaultyDisk, PowerCut
from tests.lsm.kv_helpers import TINY, Model, assert_same, assert_sound, open_kv, with_batch


class KvWorkload:
    """A workload on a database: the acknowledged state, and the state of a write that was only attempted."""

    def __init__(self) -> None:
        self.model = Model()
        self.attempted: dict[bytes, bytes] | None = None

    def run(self, kv: Kv, seed: int, steps: int) -> None:
        rng = Random(seed)
        for step in range(steps):
            batch = {
                b"k%02d" % rng.randrange(30): rng.choice([None, rng.randbytes(60), rng.randbytes(200)])
                for _ in range(4)
            }
            self.attempted = with_batch(self.model.now, batch)
            lsn = kv.write(batch)
            self.attempted = None
            self.model.write(lsn, batch)
            if step % 5 == 4:
                kv.flush()
            if step % 7 == 6:
                kv.upkeep.compact_due()
            if step % 11 == 10:
                kv.compact()
                kv.manifest.checkpoint()

    def check(self, kv: Kv) -> None:
        self.check_content(kv)
        assert_sound(kv)

    def check_content(self, kv: Kv) -> None:
        pairs = dict(kv.scan())
        assert pairs in [state for state in (self.model.now, self.attempted) if state is not None]
        assert_same(kv, pairs, (b"k00", b"k29"))
        self.model.now, self.attempted = pairs, None


@given(st.integers(0, 1_000), st.integers(1, 400), st.integers(0, 2**32))
def test_power_loss_at_any_call_loses_nothing_acknowledged(seed: int, fail_at: int, outcome: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        inner = CrashDisk(f"{directory}/disk")
        workload, kv = KvWorkload(), None
        try:
            kv = open_kv(inner.root, FaultyDisk(inner, Fault.POWER_CUT, fail_at=fail_at))
            workload.run(kv, seed, 14)
        except PowerCut:
            pass
        crashed = inner.crash(f"{directory}/after", Random(outcome).choice)
        if kv is not None:
            abandon(kv)
        with open_kv(crashed.root, crashed) as again:
            workload.check(again)
            workload.run(again, seed + 1, 6)
            workload.check(again)


def abandon(kv: Kv) -> None:
    """Release the files of a database whose disk has no power."""
    try:
        kv.abandon()
    except PowerCut:
        pass


POINTS = (
    "lsm.wal.appended",
    "lsm.wal.synced",
    "lsm.freeze.created",
    "lsm.freeze.synced",
    "lsm.freeze.rotated",
    "lsm.flush.begun",
    "lsm.flush.written",
    "lsm.flush.recorded",
    "lsm.flush.folded",
    "lsm.flush.done",
    "lsm.sst.built",
    "lsm.sst.written",
    "lsm.sst.synced",
    "lsm.sst.named",
    "lsm.compaction.begun",
    "lsm.compaction.output",
    "lsm.compaction.written",
    "lsm.compaction.recorded",
    "lsm.compaction.removed",
    "lsm.manifest.appended",
    "lsm.manifest.synced",
    "lsm.checkpoint.begun",
    "lsm.checkpoint.built",
    "lsm.checkpoint.written",
    "lsm.checkpoint.synced",
    "lsm.checkpoint.renamed",
    "lsm.checkpoint.named",
    "lsm.checkpoint.truncated",
)


def test_every_failpoint_is_listed_and_hit(tmp_path: Path) -> None:
    with recording(), open_kv(tmp_path) as kv:
        KvWorkload().run(kv, 1, 24)
        points_hit = {point for point in hits() if point.startswith("lsm.") and not point.startswith("lsm.recovery")}
    assert points_hit == set(POINTS)


@pytest.mark.parametrize("point", POINTS)
def test_power_loss_at_a_failpoint_loses_nothing_acknowledged(tmp_path: Path, point: str) -> None:
    def cut(_name: str) -> None:
        raise PowerCut

    for number, choose in enumerate((keep_all, drop_all)):
        for skip in (0, 2):
            disk = CrashDisk(f"{tmp_path}/disk{number}{skip}")
            workload, kv = KvWorkload(), open_kv(disk.root, disk)
            calls = iter(range(10_000))

            def cut_after_skip(name: str, calls: object = calls, skip: int = skip) -> None:
                if next(calls) == skip:  # type: ignore[call-overload]
                    cut(name)

            with armed(point, cut_after_skip):
                try:
                    workload.run(kv, 5, 24)
                except PowerCut:
                    pass
            crashed = disk.crash(f"{tmp_path}/after{number}{skip}", choose)
            kv.abandon()
            with open_kv(crashed.root, crashed) as again:
                workload.check(again)


@pytest.mark.parametrize("point", POINTS)
def test_a_database_that_was_interrupted_is_whole_or_refuses_writes(tmp_path: Path, point: str) -> None:
    """Hazard: what an interrupted thread had written to a log was not in memory, and later changes were based on that."""

    def interrupt_after_skip(_name: str) -> None:
        if next(calls) == skip:
            raise KeyboardInterrupt

    for skip in (0, 2):
        calls = count()
        disk = CrashDisk(f"{tmp_path}/disk{skip}")  # a real directory without real syncs, which is faster
        workload, kv = KvWorkload(), open_kv(disk.root, disk)
        with armed(point, interrupt_after_skip), pytest.raises(KeyboardInterrupt):
            workload.run(kv, 5, 24)
        if kv.failure is None and kv.manifest.failure is None:
            workload.check_content(kv)  # a file that was never named stays until the next open
            workload.run(kv, 6, 24)
        else:
            with pytest.raises(StoreUnusable):
                kv.begin_load()
        kv.abandon()
        with open_kv(disk.root, disk) as again:
            workload.check(again)


def test_a_batch_whose_insertion_is_interrupted_is_not_half_visible(tmp_path: Path) -> None:
    """Hazard: half of a batch was visible; a flush made that permanent."""

    class InterruptedDict(dict[bytes, Any]):
        def __setitem__(self, key: bytes, entry: object) -> None:
            if key == b"cyd":
                raise KeyboardInterrupt
            super().__setitem__(key, entry)

    batch = {b"ann": b"1", b"bob": b"2", b"cyd": b"3", b"dan": b"4"}
    kv = open_kv(tmp_path)
    kv.put(b"eve", b"5")
    with kv.snapshot():  # keys are inserted one by one while a snapshot is open
        kv.view.memtable.entries = InterruptedDict()
        with pytest.raises(KeyboardInterrupt):
            kv.write(batch)
    for use in (kv.flush, kv.sync):
        with pytest.raises(StoreUnusable):
            use()
    kv.abandon()
    with open_kv(tmp_path) as kv:
        assert_same(kv, {**batch, b"eve": b"5"})


# ── faults ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("fault", [Fault.EIO, Fault.ENOSPC, Fault.SHORT_WRITE, Fault.LOST_ANSWER])
@given(seed=st.integers(0, 1000), fail_at=st.integers(1, 300))
def test_whatever_call_fails_nothing_acknowledged_is_lost(fault: Fault, seed: int, fail_at: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        inner = CrashDisk(directory)  # a real directory without real syncs, which is faster
        disk = FaultyDisk(inner, fault, fail_at=fail_at)
        workload, kv = KvWorkload(), None
        try:
            kv = open_kv(directory, disk)
            workload.run(kv, seed, 14)
        except QuireError:
            assert disk.fired
        if kv is not None:
            assert_readable(kv, workload)
            kv.abandon()
        with open_kv(directory, inner) as again:
            workload.check(again)


def assert_readable(kv: Kv, workload: KvWorkload) -> None:
    """Assert that a database that refuses writes can still be read."""
    pairs = dict(kv.scan())
    assert pairs in [state for state in (workload.model.now, workload.attempted) if state is not None]


def test_a_failed_sync_stops_writes_until_reopening(tmp_path: Path) -> None:
    disk = FaultyDisk(OsDisk(), Fault.EIO, operation="sync", path="*/wal/*.log")
    kv = open_kv(tmp_path, disk)
    kv.put(b"a", b"1")
    disk._fail_at = len(disk.calls) + 1
    with pytest.raises(StoreUnusable):
        kv.put(b"b", b"2")
    with pytest.raises(StoreUnusable):
        kv.put(b"c", b"3")
    for use in (kv.flush, kv.sync):
        with pytest.raises(StoreUnusable):
            use()
    assert kv.get(b"a") == b"1"
    kv.close()
    with open_kv(tmp_path) as kv:
        assert kv.get(b"a") == b"1"
        assert kv.get(b"c") is None
        kv.put(b"d", b"4")


def test_a_full_disk_stops_a_flush_and_breaks_nothing(tmp_path: Path) -> None:
    disk = FaultyDisk(OsDisk(), Fault.ENOSPC, operation="write", path="*.sst*")
    with open_kv(tmp_path, disk) as kv:
        kv.put(b"a", b"1")
        disk._fail_at = 1
        with pytest.raises(DiskFull):
            kv.flush()
        assert kv.get(b"a") == b"1"
        kv.put(b"b", b"2")
        kv.flush()
        assert dict(kv.scan()) == {b"a": b"1", b"b": b"2"}
        assert_sound(kv)


class FullDisk(FaultyDisk):
    """Has no space for tables while it is full. After a single failure the background would succeed before a writer notices."""

    is_full = True

    def fails(self, operation: str, path: str) -> Fault | None:
        return self.fault if self.is_full and operation == "write" and ".sst" in path else None


def test_writers_fail_when_the_background_has_no_space(tmp_path: Path) -> None:
    import msgspec

    settings = msgspec.structs.replace(TINY, frozen_max=1, stall_seconds=20)
    disk = FullDisk(OsDisk(), Fault.ENOSPC)
    with open_kv(tmp_path, disk, settings, background=True) as kv:
        with pytest.raises(StorageFault):  # noqa: PT012 - whichever of them meets it
            for n in range(100):
                kv.put(b"%d" % n, bytes(400), sync=False)
        disk.is_full = False
        written = kv.last_lsn
        kv.flush()  # space is available again
        kv.put(b"more", b"")
        assert len(list(kv.scan())) == written + 1


@pytest.mark.parametrize("fault", [Fault.ENOSPC, Fault.SHORT_WRITE])
def test_a_write_that_was_refused_for_space_is_not_written_later(tmp_path: Path, fault: Fault) -> None:
    """`DiskFull` means not done, also after the next write and after reopening; a retry causes no duplicate."""
    refused, number = 0, 0
    disk = FaultyDisk(OsDisk(), fault, operation="none")
    while disk.fired or not number:
        number += 1
        base = tmp_path / str(number)
        disk = FaultyDisk(OsDisk(), fault)
        kv = open_kv(base, disk)
        kv.put(b"before", bytes(2_500))  # the next write starts a new log and memtable
        disk._fail_at = len(disk.calls) + number
        outcome = _write_once(kv)
        disk._fail_at = 0
        if outcome is DiskFull:
            refused += 1
            assert kv.get(b"x") is None
            kv.put(b"after", bytes(2_500))
            kv.put(b"later", b"")  # once more, with a new log
            assert kv.get(b"x") is None
        kv.abandon()
        with open_kv(base) as again:
            if outcome is DiskFull:
                assert [key for key, _ in again.scan()] == [b"after", b"before", b"later"]
            elif outcome is None:
                assert again.get(b"x") == b"1"
            assert_sound(again)
    assert refused > 1, "no write was refused: the test proves nothing"


def _write_once(kv: Kv) -> type[QuireError] | None:
    """Write one key, and return the outcome."""
    try:
        kv.put(b"x", b"1")
    except DiskFull:
        return DiskFull
    except StoreUnusable:
        return StoreUnusable
    return None
