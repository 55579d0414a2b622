"""The faulty disk fails exactly the call it was told to, as a real disk would."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.core.errors import DiskFull, StorageFault
from quire.durable.files import OsDisk, read_all, write_new
from quire.testing.faults import Fault, FaultyDisk, PowerCut, each_fault


def test_without_a_fault_it_only_counts(tmp_path: Path) -> None:
    disk, path = FaultyDisk(OsDisk()), str(tmp_path / "a")
    write_new(disk, path, b"abc")
    assert read_all(disk, path) == b"abc"
    assert [operation for operation, _ in disk.calls] == ["open", "truncate", "write", "sync", "open", "size", "read"]
    assert not disk.fired


def test_each_call_fails_once_and_the_last_pass_is_clean(tmp_path: Path) -> None:
    failed: list[str] = []
    for disk in each_fault(OsDisk, Fault.EIO):
        path = str(tmp_path / str(len(failed)))
        try:
            write_new(disk, path, b"abc")
        except StorageFault:
            failed.append(disk.calls[-1][0])
    assert failed == ["open", "truncate", "write", "sync"]


def test_a_fault_can_be_aimed_at_an_operation_and_a_path(tmp_path: Path) -> None:
    disk = FaultyDisk(OsDisk(), Fault.ENOSPC, fail_at=2, operation="write", path="*.log")
    for name in ("a.log", "a.txt", "b.txt"):
        write_new(disk, str(tmp_path / name), b"abc")
    with pytest.raises(DiskFull) as caught:
        write_new(disk, str(tmp_path / "b.log"), b"abc")
    assert caught.value.where["errno"] == "ENOSPC"
    write_new(disk, str(tmp_path / "c.log"), b"abc")


def test_a_short_write_writes_half(tmp_path: Path) -> None:
    disk, path = FaultyDisk(OsDisk(), Fault.SHORT_WRITE, fail_at=1, operation="write"), str(tmp_path / "a")
    with pytest.raises(DiskFull):
        write_new(disk, path, b"abcdef")
    assert read_all(OsDisk(), path) == b"abc"


def test_a_lost_answer_did_the_work(tmp_path: Path) -> None:
    disk, path = FaultyDisk(OsDisk(), Fault.LOST_ANSWER, fail_at=1, operation="write"), str(tmp_path / "a")
    with pytest.raises(StorageFault):
        write_new(disk, path, b"abcdef")
    assert read_all(OsDisk(), path) == b"abcdef"


def test_after_a_power_cut_nothing_happens_any_more(tmp_path: Path) -> None:
    disk, path = FaultyDisk(OsDisk(), Fault.POWER_CUT, fail_at=1, operation="write"), str(tmp_path / "a")
    with pytest.raises(PowerCut):
        write_new(disk, path, b"abcdef")
    with pytest.raises(PowerCut):
        disk.remove(path)
    assert read_all(OsDisk(), path) == b""
