"""The file layer: atomic replacement and preallocation under every crash and every fault, and typed errors."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import DiskFull, StorageFault
from quire.durable.files import Disk, OsDisk, preallocate, read_all, write_atomic, write_new
from quire.testing.crashdisk import CrashDisk, every_chooser
from quire.testing.faults import Fault, FaultyDisk, PowerCut, each_fault

OLD, NEW = b"old" * 200, b"the new contents" * 50


def disk_with_old(root: str) -> CrashDisk:
    os.makedirs(root)
    (Path(root) / "config").write_bytes(OLD)
    return CrashDisk(root)


def crash_disk_of(disk: FaultyDisk) -> CrashDisk:
    assert isinstance(disk.inner, CrashDisk)
    return disk.inner


def test_write_atomic_leaves_the_old_or_the_new_content_after_every_power_loss(tmp_path: Path) -> None:
    """The power fails before each step, and each unsynced sector, size and name is kept, dropped or garbled."""
    count = itertools.count()
    outcomes = set()
    for disk in each_fault(lambda: disk_with_old(str(tmp_path / f"disk{next(count)}")), Fault.POWER_CUT):
        inner = crash_disk_of(disk)
        try:
            write_atomic(disk, inner.path("config"), NEW)
            acknowledged = True
        except PowerCut:
            acknowledged = False
        for choose in every_chooser():
            crashed = inner.crash(str(tmp_path / f"after{next(count)}"), choose)
            content = read_all(crashed, crashed.path("config"))
            assert content == NEW if acknowledged else content in (OLD, NEW)
            assert set(crashed.names(crashed.root)) <= {"config", "config.tmp"}
            outcomes.add((acknowledged, content))
    assert outcomes == {(False, OLD), (False, NEW), (True, NEW)}, "every outcome should occur"


@pytest.mark.parametrize("fault", [Fault.ENOSPC, Fault.EIO, Fault.SHORT_WRITE, Fault.LOST_ANSWER])
def test_write_atomic_fails_with_a_typed_error_and_can_be_repeated(tmp_path: Path, fault: Fault) -> None:
    expected = DiskFull if fault in (Fault.ENOSPC, Fault.SHORT_WRITE) else StorageFault
    count = itertools.count()
    for disk in each_fault(lambda: disk_with_old(str(tmp_path / f"disk{next(count)}")), fault):
        inner = crash_disk_of(disk)
        path = inner.path("config")
        try:
            write_atomic(disk, path, NEW)
            assert not disk.fired
        except expected:
            assert read_all(inner, path) in (OLD, NEW)
        write_atomic(inner, path, NEW)
        assert read_all(inner, path) == NEW


@pytest.mark.parametrize("fault", [Fault.ENOSPC, Fault.EIO, Fault.SHORT_WRITE])
def test_preallocate_creates_a_complete_file_or_none(tmp_path: Path, fault: Fault) -> None:
    count = itertools.count()
    for disk in each_fault(lambda: CrashDisk(str(tmp_path / f"disk{next(count)}")), fault):
        inner = crash_disk_of(disk)
        path = inner.path("segment")
        try:
            preallocate(disk, path, 3000).close()
            assert not disk.fired
        except StorageFault:
            assert not inner.exists(path)
            preallocate(inner, path, 3000).close()
        crashed = inner.crash(str(tmp_path / f"after{next(count)}"), random.Random(1).choice)
        assert read_all(crashed, crashed.path("segment")) == bytes(3000)


def test_preallocate_reports_the_first_fault_even_if_cleaning_up_fails_too(tmp_path: Path) -> None:
    class DiskThatCannotRemove(OsDisk):
        def remove(self, path: str) -> None:
            raise StorageFault("input/output error while removing", path=path)

    disk = FaultyDisk(DiskThatCannotRemove(), Fault.ENOSPC, fail_at=1, operation="allocate")
    with pytest.raises(DiskFull):
        preallocate(disk, str(tmp_path / "segment"), 3000)


def test_write_new_does_not_overwrite(tmp_path: Path) -> None:
    disk, path = OsDisk(), str(tmp_path / "a")
    write_new(disk, path, b"one")
    with pytest.raises(FileExistsError):
        write_new(disk, path, b"two")
    write_new(disk, path, b"2", overwrite=True)
    assert read_all(disk, path) == b"2"


def test_make_dirs_is_durable_step_by_step(tmp_path: Path) -> None:
    disk = CrashDisk(str(tmp_path / "disk"))
    disk.make_dirs(disk.path("a", "b", "c"))
    for number, choose in enumerate(every_chooser()):
        crashed = disk.crash(str(tmp_path / f"after{number}"), choose)
        assert os.path.isdir(crashed.path("a", "b", "c"))


@given(data=st.binary(max_size=3000), offset=st.integers(0, 3000))
def test_every_disk_reads_what_it_wrote(data: bytes, offset: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = str(tmp_path_factory.mktemp("disk"))
    disks: list[Disk] = [OsDisk(), CrashDisk(root), FaultyDisk(OsDisk())]
    for number, disk in enumerate(disks):
        _check_file(disk, os.path.join(root, str(number)), data, offset)


def _check_file(disk: Disk, path: str, data: bytes, offset: int) -> None:
    with pytest.raises(FileNotFoundError):
        disk.open(path)
    file = disk.open(path, exclusive=True)
    file.write_at(memoryview(data), offset)
    assert file.size() == disk.size(path) == (offset + len(data) if data else 0)
    assert file.read_at(len(data) + 10, offset) == data
    file.truncate(offset)
    file.allocate(offset + 7)
    assert file.read_at(100, offset) == bytes(7)
    file.sync()
    file.close()
    file.close()
    disk.link(path, path + "-too")
    disk.remove(path)
    disk.rename(path + "-too", path)
    assert read_all(disk, path) == bytes(offset + 7) if not data else len(read_all(disk, path)) == offset + 7
    with pytest.raises(FileNotFoundError):
        disk.remove(path + "-too")
    disk.sync_dir(os.path.dirname(path))
    assert os.path.basename(path) in disk.names(os.path.dirname(path))
