"""The manifest under disk faults and power loss: failed operations do not reappear, acknowledged ones are not lost."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import (
    QuireError,
    StorageFault,
    StoreUnusable,
)
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk
from quire.lsm.manifest import Manifest
from quire.lsm.manifest_data import (
    AddFrozenWal,
    AllocateSstId,
    Compaction,
    ErrorKind,
    ManifestData,
    ManifestEvent,
    SetActiveWal,
    UpdateLsn,
    Version,
    kind_of,
)
from quire.lsm.projection import KvProjection
from quire.lsm.witnesses import StoreFacts, end_row
from quire.manifest.records import LsmEndsRecord
from quire.testing.crashdisk import CrashDisk, drop_all, keep_all
from quire.testing.faults import Fault, FaultyDisk, PowerCut, each_fault
from tests.lsm.manifests import entry, fill, home_in, read_back

STEPS = ("begun", "built", "written", "synced", "renamed", "named", "truncated")
"""The failpoints between the steps of a checkpoint; its first three steps are one computation in memory."""


# ── faults ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("fault", [Fault.ENOSPC, Fault.EIO, Fault.SHORT_WRITE, Fault.LOST_ANSWER])
def test_a_failed_append_never_reappears(tmp_path: Path, fault: Fault) -> None:
    """RocksDB 6316: the record of a failed append came back after a restart. Every write and every sync of the log
    fails once; an operation that raised is not there afterwards, in memory or on disk, and the manifest can be used
    again.
    """
    home = home_in(tmp_path)
    for operation in ("write", "sync"):
        with Manifest.open(OsDisk(), home) as manifest:
            before = manifest.state()
        faulty = FaultyDisk(OsDisk(), fault, fail_at=1, operation=operation, path="*000000.log")
        disk = FaultyDisk(OsDisk(), fault)
        manifest = Manifest.open(disk, home)
        with armed_log(disk, faulty), pytest.raises(StorageFault) as caught:
            manifest.update_lsn(before.last_lsn + 100)
        assert kind_of(caught.value) is ErrorKind.WAL
        assert manifest.state() == before
        manifest.abandon()
        assert read_back(home) == before
        with Manifest.open(OsDisk(), home) as manifest:
            manifest.update_lsn(before.last_lsn + 1)
        assert read_back(home).last_lsn == before.last_lsn + 1


class armed_log:  # noqa: N801 - reads as a statement
    """Makes the next matching call of an open disk fail."""

    def __init__(self, disk: FaultyDisk, like: FaultyDisk) -> None:
        self._disk, self._like = disk, like

    def __enter__(self) -> None:
        self._disk._operation, self._disk._path = self._like._operation, self._like._path
        self._disk.calls.clear()
        self._disk._fail_at = 1

    def __exit__(self, *_: object) -> None:
        self._disk._fail_at = 0


@pytest.mark.parametrize("fault", [Fault.ENOSPC, Fault.EIO, Fault.SHORT_WRITE, Fault.LOST_ANSWER])
def test_whatever_call_fails_the_state_is_one_that_was_acknowledged(tmp_path: Path, fault: Fault) -> None:
    rounds = iter(range(10_000))
    for disk in each_fault(OsDisk, fault):
        home = home_in(tmp_path / str(next(rounds)))
        acknowledged, attempted = ManifestData(), ManifestData()
        try:
            manifest = Manifest.open(disk, home)
            for lsn in range(1, 4):
                attempted = replace(acknowledged, version=lsn, last_lsn=lsn)
                manifest.update_lsn(lsn)
                acknowledged = attempted
                if lsn == 2:
                    manifest.checkpoint()
            manifest.close()
        except QuireError:
            assert disk.fired
        state = read_back(home)
        assert state in (acknowledged, attempted)


def test_when_abandoning_the_log_fails_too_operations_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = home_in(tmp_path)
    disk = FaultyDisk(OsDisk(), Fault.EIO)
    manifest = Manifest.open(disk, home)
    manifest.update_lsn(1)
    monkeypatch.setattr(disk, "run", refuse_writes)
    with pytest.raises(StoreUnusable) as caught:
        manifest.update_lsn(2)
    assert kind_of(caught.value) is ErrorKind.WAL
    with pytest.raises(StoreUnusable):
        manifest.allocate_sst_id()
    assert manifest.state().last_lsn == 1
    manifest.close()
    assert read_back(home).last_lsn in (1, 2)


def test_a_log_that_was_never_recorded_is_not_abandoned_for_another(tmp_path: Path) -> None:
    """An open knows the recorded log and the one after it; a third one was mistaken for that of another database."""
    home = home_in(tmp_path)
    manifest = Manifest.open(OsDisk(), home, StoreFacts(projection=cast(KvProjection, object())))
    manifest.update_lsn(1)
    for lsn in (1, 2):
        manifest.mark_recorded(manifest.log_salt)
        end, snapshot = manifest.durable_end()
        with armed("lsm.manifest.appended", "raise:EIO"), pytest.raises(StorageFault):
            manifest.update_lsn(lsn + 10)
        assert not manifest.is_log_recorded
    with armed("lsm.manifest.appended", "raise:EIO"), pytest.raises(StoreUnusable) as caught:
        manifest.update_lsn(20)
    assert kind_of(caught.value) is ErrorKind.WAL
    manifest.abandon()
    ends = LsmEndsRecord(end_row(0, end), snapshot, 1, ())
    with Manifest.open(OsDisk(), home, StoreFacts(ends=ends)) as manifest:
        assert manifest.state().last_lsn in (1, 20)


def refuse_writes(operation: str, path: str, step: Callable[[], object], half: object = None) -> object:
    if operation in ("write", "sync", "truncate"):
        raise StorageFault("no", path=path)
    return step()


def test_a_checkpoint_that_cannot_write_changes_nothing(tmp_path: Path) -> None:
    home = home_in(tmp_path)
    disk = FaultyDisk(OsDisk(), Fault.ENOSPC)
    with Manifest.open(disk, home) as manifest:
        fill(manifest)
        with (
            armed_log(disk, FaultyDisk(OsDisk(), operation="write", path="*.tmp")),
            pytest.raises(StorageFault) as caught,
        ):
            manifest.checkpoint()
        assert kind_of(caught.value) is ErrorKind.IO
        manifest.update_lsn(60)
        known = manifest.state()
    assert read_back(home) == known


@pytest.mark.parametrize("point", ["lsm.manifest.appended", "lsm.manifest.synced"])
def test_an_interrupted_change_makes_the_manifest_unusable(tmp_path: Path, point: str) -> None:
    """Hazard: the event was durable and not in memory, so the next checkpoint dropped it."""

    def interrupt(_name: str) -> None:
        raise KeyboardInterrupt

    home = home_in(tmp_path)
    with Manifest.open(OsDisk(), home) as manifest:
        fill(manifest)
        lsn = manifest.state().last_lsn + 1
        with armed(point, interrupt), pytest.raises(KeyboardInterrupt):
            manifest.update_lsn(lsn)
        with pytest.raises(StoreUnusable):
            manifest.checkpoint()
    assert read_back(home).last_lsn == lsn


# ── crashes ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("times", [1, 2])
def test_power_loss_between_any_two_steps_of_a_checkpoint_loses_nothing(tmp_path: Path, step: str, times: int) -> None:
    for number, choose in enumerate((keep_all, drop_all)):
        disk = CrashDisk(str(tmp_path / f"disk{number}"))
        home = home_in(disk.root)
        manifest = Manifest.open(disk, home)
        fill(manifest)
        for round_ in range(times):
            known = manifest.state()
            if round_ == times - 1:
                with armed(f"lsm.checkpoint.{step}", cut_power), pytest.raises(PowerCut):
                    manifest.checkpoint()
            else:
                manifest.checkpoint()
                manifest.update_lsn(known.last_lsn + 1)
        crashed = disk.crash(str(tmp_path / f"after{number}"), choose)
        manifest.abandon()
        assert read_back(home_in(crashed.root), crashed) == known
        assert not crashed.exists(home_in(crashed.root).manifest_snapshot + ".tmp")
        with Manifest.open(crashed, home_in(crashed.root)) as again:
            again.update_lsn(1000)
        assert read_back(home_in(crashed.root), crashed).last_lsn == 1000


def cut_power(_name: str) -> None:
    raise PowerCut


OPERATIONS: list[Callable[[Manifest], object]] = [
    lambda m: m.update_lsn(m.state().last_lsn + 1),
    lambda m: m.allocate_sst_id(),
    lambda m: m.rotate_wal(m.state().active_wal, m.state().active_wal + 1, m.state().last_lsn + 1),
    lambda m: m.compaction([entry(m.allocate_sst_id())], list(m.state().tables)[:2]),
    lambda m: m.checkpoint(),
]


@given(st.lists(st.integers(0, len(OPERATIONS) - 1), min_size=1, max_size=8), st.integers(1, 60), st.randoms())
def test_power_loss_at_any_call_gives_a_state_that_was_acknowledged_or_attempted(
    operations: list[int], fail_at: int, rng: object
) -> None:
    from random import Random

    assert isinstance(rng, Random)
    with tempfile.TemporaryDirectory() as directory:
        inner = CrashDisk(f"{directory}/disk")
        disk = FaultyDisk(inner, Fault.POWER_CUT, fail_at=fail_at)
        allowed = [ManifestData()]
        manifest = None
        try:
            manifest = Manifest.open(disk, home_in(inner.root))
            for number in operations:
                before = manifest.state()
                model = before.copy()
                allowed = [before, *outcomes(model, number)]
                OPERATIONS[number](manifest)
                allowed = [manifest.state()]
        except PowerCut:
            pass
        if manifest is not None:
            try:
                manifest.abandon()
            except PowerCut:
                pass
        crashed = inner.crash(f"{directory}/after", rng.choice)
        assert read_back(home_in(crashed.root), crashed) in allowed


def outcomes(model: ManifestData, number: int) -> list[ManifestData]:
    """The possible states after an interrupted operation: after each of its events."""
    lsn, wal, next_id = model.last_lsn, model.active_wal, model.next_sst_id
    first, second = Version(model.version + 1), Version(model.version + 2)
    choices: list[list[ManifestEvent]] = [
        [first, UpdateLsn(lsn + 1)],
        [first, AllocateSstId(next_id)],
        [first, AddFrozenWal(wal), SetActiveWal(wal + 1), UpdateLsn(lsn + 1)],
        [first, AllocateSstId(next_id), second, Compaction((entry(next_id),), tuple(list(model.tables)[:2]))],
        [],
    ]
    states = list[ManifestData]()
    for event in choices[number]:
        model.apply(event)
        states.append(model.copy())
    return states
