"""The faulty disk fails exactly the call it was told to, as a real disk would."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.core.errors import DiskFull, ObjectNotFound, ObjectStoreUnavailable, StorageFault
from quire.durable.files import OsDisk, read_all, write_new
from quire.objects.api import Range, list_objects
from quire.testing.faults import Fault, FaultyDisk, FaultyStore, ObjectFault, ObjectFaults, PowerCut, each_fault


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


def test_a_lost_write_is_acknowledged_and_a_misdirected_one_lands_a_sector_behind(tmp_path: Path) -> None:
    lost, astray = str(tmp_path / "lost"), str(tmp_path / "astray")
    write_new(FaultyDisk(OsDisk(), Fault.LOST_WRITE, fail_at=1, operation="write"), lost, b"abc")
    write_new(FaultyDisk(OsDisk(), Fault.MISDIRECTED_WRITE, fail_at=1, operation="write"), astray, b"abc")
    assert read_all(OsDisk(), lost) == b""
    assert read_all(OsDisk(), astray) == bytes(512) + b"abc"


def failing(path: Path, fault: ObjectFault) -> FaultyStore:
    """A store with one object, whose next call that the fault can happen to goes wrong."""
    faults = ObjectFaults(fault)
    store = FaultyStore(faults, str(path))
    store.put("a/b", b"abcd")
    faults.fail_in(1)
    return store


def test_an_object_store_that_does_not_answer_has_done_nothing_or_everything(tmp_path: Path) -> None:
    for fault, keys in ((ObjectFault.UNAVAILABLE, ["a/b"]), (ObjectFault.LOST_ANSWER, ["a/b", "a/c"])):
        store = failing(tmp_path / fault.name, fault)
        with pytest.raises(ObjectStoreUnavailable):
            store.put("a/c", b"x")
        assert [info.key for info in list_objects(store)] == keys
        store.put("a/c", b"x")


def test_a_stale_list_lacks_what_was_put_and_has_what_was_deleted(tmp_path: Path) -> None:
    faults = ObjectFaults(ObjectFault.STALE_LIST)
    before, store = FaultyStore(faults, str(tmp_path)), FaultyStore(faults, str(tmp_path))
    for key in ("a/old", *(f"b/{number}" for number in range(8))):
        before.put(key, b"x")
    store.delete("a/old")
    faults.fail_in(1)
    assert [info.key for info in list_objects(store)] == ["a/old"]
    assert [info.key for info in list_objects(store)] == [f"b/{number}" for number in range(8)]


def test_a_stale_read_does_not_know_a_new_object_and_a_short_one_has_half(tmp_path: Path) -> None:
    stale = failing(tmp_path / "stale", ObjectFault.STALE_READ)
    with pytest.raises(ObjectNotFound):
        stale.head("a/b")
    assert stale.get("a/b") == b"abcd"
    short = failing(tmp_path / "short", ObjectFault.SHORT_READ)
    assert short.get_ranges("a/b", [Range(offset=0, length=4), Range(offset=2, length=2)]) == [b"ab", b"c"]
    assert short.get_range("a/b", 0, 4) == b"abcd"
