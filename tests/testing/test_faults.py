"""The faulty disk and object store fail exactly the requested call, as real ones would."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.core.errors import DiskFull, ObjectNotFound, ObjectStoreUnavailable, StorageFault
from quire.durable.files import OsDisk, read_all, write_new
from quire.objects.api import Range, list_objects
from quire.testing.faults import Fault, FaultyDisk, FaultyStore, ObjectFault, ObjectFaults, PowerCut, each_fault


def test_without_a_fault_the_disk_only_records_calls(tmp_path: Path) -> None:
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


def test_a_fault_can_be_limited_to_an_operation_and_a_path(tmp_path: Path) -> None:
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


def test_a_write_whose_response_is_lost_was_carried_out(tmp_path: Path) -> None:
    disk, path = FaultyDisk(OsDisk(), Fault.LOST_ANSWER, fail_at=1, operation="write"), str(tmp_path / "a")
    with pytest.raises(StorageFault):
        write_new(disk, path, b"abcdef")
    assert read_all(OsDisk(), path) == b"abcdef"


def test_after_a_power_cut_every_call_fails(tmp_path: Path) -> None:
    disk, path = FaultyDisk(OsDisk(), Fault.POWER_CUT, fail_at=1, operation="write"), str(tmp_path / "a")
    with pytest.raises(PowerCut):
        write_new(disk, path, b"abcdef")
    with pytest.raises(PowerCut):
        disk.remove(path)
    assert read_all(OsDisk(), path) == b""


def test_a_lost_write_is_acknowledged_and_a_misdirected_one_is_one_sector_off(tmp_path: Path) -> None:
    lost_path, misdirected_path = str(tmp_path / "lost"), str(tmp_path / "astray")
    write_new(FaultyDisk(OsDisk(), Fault.LOST_WRITE, fail_at=1, operation="write"), lost_path, b"abc")
    write_new(FaultyDisk(OsDisk(), Fault.MISDIRECTED_WRITE, fail_at=1, operation="write"), misdirected_path, b"abc")
    assert read_all(OsDisk(), lost_path) == b""
    assert read_all(OsDisk(), misdirected_path) == bytes(512) + b"abc"


def failing_store(path: Path, fault: ObjectFault) -> FaultyStore:
    """A store with one object. The next call to which the fault applies fails."""
    faults = ObjectFaults(fault)
    store = FaultyStore(faults, str(path))
    store.put("a/b", b"abcd")
    faults.fail_in(1)
    return store


def test_a_call_that_gets_no_response_was_not_executed_or_fully_executed(tmp_path: Path) -> None:
    for fault, keys in ((ObjectFault.UNAVAILABLE, ["a/b"]), (ObjectFault.LOST_ANSWER, ["a/b", "a/c"])):
        store = failing_store(tmp_path / fault.name, fault)
        with pytest.raises(ObjectStoreUnavailable):
            store.put("a/c", b"x")
        assert [info.key for info in list_objects(store)] == keys
        store.put("a/c", b"x")


def test_a_stale_list_lacks_new_objects_and_has_deleted_ones(tmp_path: Path) -> None:
    faults = ObjectFaults(ObjectFault.STALE_LIST)
    before, store = FaultyStore(faults, str(tmp_path)), FaultyStore(faults, str(tmp_path))
    for key in ("a/old", *(f"b/{number}" for number in range(8))):
        before.put(key, b"x")
    store.delete("a/old")
    faults.fail_in(1)
    assert [info.key for info in list_objects(store)] == ["a/old"]
    assert [info.key for info in list_objects(store)] == [f"b/{number}" for number in range(8)]


def test_a_stale_read_misses_a_new_object_and_a_short_read_returns_half(tmp_path: Path) -> None:
    stale = failing_store(tmp_path / "stale", ObjectFault.STALE_READ)
    with pytest.raises(ObjectNotFound):
        stale.head("a/b")
    assert stale.get("a/b") == b"abcd"
    short = failing_store(tmp_path / "short", ObjectFault.SHORT_READ)
    assert short.get_ranges("a/b", [Range(offset=0, length=4), Range(offset=2, length=2)]) == [b"ab", b"c"]
    assert short.get_range("a/b", 0, 4) == b"abcd"
