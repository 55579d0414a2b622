"""The path backend: what a crash, a full disk or another process may and may not do to it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.core.errors import AlreadyExists, DiskFull, InvalidName, ObjectNotFound, QuireError, StorageFault
from quire.durable.files import Disk, OsDisk
from quire.objects import local
from quire.objects.api import TEMPORARY_SEGMENT, list_objects
from quire.objects.local import LocalStore
from quire.testing.clock import ManualClock
from quire.testing.crashdisk import CrashDisk, every_chooser
from quire.testing.faults import Fault, FaultyDisk, PowerCut, each_fault

KEY = "00000001/0000002a/base:00000003"
OLD, NEW = b"old " * 3, b"the new body"


def contents(store: LocalStore) -> dict[str, bytes]:
    return {info.key: store.get(info.key) for info in list_objects(store)}


def staged(root: str | Path) -> list[str]:
    folder = os.path.join(root, TEMPORARY_SEGMENT)
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


Step = Callable[[LocalStore], object]
STEPS: dict[str, tuple[dict[str, bytes], Step, dict[str, bytes]]] = {
    "create": ({}, lambda store: store.put(KEY, NEW, create_only=True), {KEY: NEW}),
    "put into a new directory": ({}, lambda store: store.put(KEY, NEW), {KEY: NEW}),
    "replace": ({KEY: OLD}, lambda store: store.put(KEY, NEW), {KEY: NEW}),
    "delete": ({KEY: OLD}, lambda store: store.delete(KEY), {}),
    "delete of one of two": ({KEY: OLD, KEY + "x": NEW}, lambda store: store.delete(KEY), {KEY + "x": NEW}),
}


# ── crashes ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", STEPS)
def test_a_crash_at_any_call_leaves_the_state_before_or_the_state_after(tmp_path: Path, name: str) -> None:
    """Power is lost before the 1st, 2nd, … call, and every outcome of the pending writes is checked."""
    before, step, after = STEPS[name]
    number = itertools.count()
    for fail_at in itertools.count(1):
        disk = CrashDisk(str(tmp_path / f"live{next(number)}"))
        root = disk.path("objects")
        for key, data in before.items():
            LocalStore(root, disk=disk).put(key, data)
        faulty = FaultyDisk(disk, Fault.POWER_CUT, fail_at=fail_at)
        try:
            step(LocalStore(root, disk=faulty))
        except PowerCut:
            pass
        for choose in every_chooser():
            crashed = disk.crash(str(tmp_path / f"after{next(number)}"), choose)
            store = LocalStore(crashed.path("objects"))
            assert contents(store) in ([before, after] if faulty.fired else [after]), faulty.calls[-1:]
            store.sweep_temporary(older_than_seconds=0)
            assert staged(crashed.path("objects")) == []
        if not faulty.fired:
            return


def test_an_adopted_object_survives_power_loss_although_its_writer_died_before_the_sync(tmp_path: Path) -> None:
    """Rule 3: the first writer linked the name and died; the retry sees it and must not report success before it is
    durable."""
    disk = CrashDisk(str(tmp_path / "live"))
    root = disk.path("objects")
    dying = FaultyDisk(disk, Fault.POWER_CUT, fail_at=1, operation="sync_dir", path="*/0000002a")
    with pytest.raises(PowerCut):
        LocalStore(root, disk=dying).put(KEY, NEW, create_only=True)
    assert LocalStore(root, disk=disk).put(KEY, b"again", create_only=True, identity=lambda _: True).adopted
    for number, choose in enumerate(every_chooser()):
        crashed = disk.crash(str(tmp_path / f"after{number}"), choose)
        assert contents(LocalStore(crashed.path("objects"))) == {KEY: NEW}


class ForgetfulDisk(CrashDisk):
    """Skips the sync of one directory, as if the process had died just before it."""

    forgets = ""

    def sync_dir(self, path: str) -> None:
        if path != self.forgets:
            super().sync_dir(path)


def test_a_directory_that_was_not_synced_is_synced_by_the_next_put(tmp_path: Path) -> None:
    disk = ForgetfulDisk(str(tmp_path / "live"))
    root = disk.path("objects")
    LocalStore(root, disk=disk).put("other", b"1")
    disk.forgets = root
    disk.make_dirs(os.path.join(root, "x"))
    disk.forgets = ""
    LocalStore(root, disk=disk).put("x/y", NEW)
    for number, choose in enumerate(every_chooser()):
        crashed = disk.crash(str(tmp_path / f"after{number}"), choose)
        assert contents(LocalStore(crashed.path("objects")))["x/y"] == NEW


# ── faults ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("fault", [Fault.EIO, Fault.ENOSPC, Fault.SHORT_WRITE, Fault.LOST_ANSWER])
@pytest.mark.parametrize("name", STEPS)
def test_any_failing_call_raises_a_typed_error_and_leaves_no_partial_object(
    tmp_path: Path, name: str, fault: Fault
) -> None:
    before, step, after = STEPS[name]
    number = itertools.count()
    roots: list[str] = []

    def new_disk() -> Disk:
        root = str(tmp_path / f"disk{next(number)}")
        roots.append(root)
        for key, data in before.items():
            LocalStore(root).put(key, data)
        return OsDisk()

    for disk in each_fault(new_disk, fault):
        outcome: QuireError | None = None
        try:
            step(LocalStore(roots[-1], disk=disk))
        except StorageFault as error:
            outcome = error
        clean = LocalStore(roots[-1])
        assert contents(clean) in (before, after), disk.calls[-1:]
        if outcome is None:
            assert contents(clean) == after
        # A retry always succeeds: nothing that failed blocks it.
        try:
            step(clean)
        except AlreadyExists:
            pass
        assert contents(clean) == after


def test_a_full_disk_leaves_no_object_and_no_staging_file(tmp_path: Path) -> None:
    disk = FaultyDisk(OsDisk(), Fault.SHORT_WRITE, fail_at=1, operation="write")
    with pytest.raises(DiskFull):
        LocalStore(str(tmp_path), disk=disk).put(KEY, NEW)
    assert contents(LocalStore(str(tmp_path))) == {}
    assert staged(tmp_path) == []


def test_bytes_whose_sync_failed_never_get_a_name(tmp_path: Path) -> None:
    disk = FaultyDisk(OsDisk(), Fault.LOST_ANSWER, fail_at=1, operation="sync")
    with pytest.raises(StorageFault):
        LocalStore(str(tmp_path), disk=disk).put(KEY, NEW)
    assert not [call for call in disk.calls if call[0] in ("link", "rename")]
    assert contents(LocalStore(str(tmp_path))) == {}


# ── staging ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_sweep_removes_old_staging_files_and_spares_active_writers(tmp_path: Path) -> None:
    clock = ManualClock()
    for fail_at in (1, 2):
        disk = FaultyDisk(OsDisk(), Fault.POWER_CUT, fail_at=1, operation="sync")
        with pytest.raises(PowerCut):
            LocalStore(str(tmp_path), disk=disk, clock=clock).put(KEY, b"%d" % fail_at)
        clock.advance(3000)
    (tmp_path / TEMPORARY_SEGMENT / "no name of ours").write_bytes(b"")
    store = LocalStore(str(tmp_path), clock=clock)
    assert contents(store) == {}
    assert len(staged(tmp_path)) == 3
    assert store.sweep_temporary() == 2  # the one from 6000 s ago and the foreign file
    assert store.sweep_temporary(older_than_seconds=0) == 1
    assert staged(tmp_path) == []
    assert LocalStore(str(tmp_path / "nothing here")).sweep_temporary() == 0


def test_a_staging_file_swept_under_a_live_put_is_an_error_not_a_lost_object(tmp_path: Path) -> None:
    class SweepingDisk(OsDisk):
        def link(self, source: str, target: str) -> None:
            os.unlink(source)
            super().link(source, target)

    with pytest.raises(StorageFault, match="sweep_temporary"):
        LocalStore(str(tmp_path), disk=SweepingDisk()).put(KEY, NEW, create_only=True)


# ── visible effects of the file system are minimal ────────────────────────────────────────────────────────────────────
def test_a_key_that_is_a_directory_or_is_below_an_object_is_refused(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.put("a/b", b"1")
    for create_only in (False, True):
        for key in ("a", "a/b/c", "a/b/c/d"):
            with pytest.raises(InvalidName):
                store.put(key, b"2", create_only=create_only)
    assert contents(store) == {"a/b": b"1"}
    assert staged(tmp_path) == []


def test_directories_that_become_empty_are_removed(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    for key in ("a/b/c", "a/b/d", "e"):
        store.put(key, b"1")
    store.delete("a/b/c")
    assert (tmp_path / "a" / "b").is_dir()
    store.delete_many(["a/b/d", "e"])
    assert sorted(os.listdir(tmp_path)) == [TEMPORARY_SEGMENT]
    store.put("a/b/c", b"2")  # a directory remembered as named is created again
    assert contents(store) == {"a/b/c": b"2"}


def test_concurrent_puts_and_deletes_in_one_directory_succeed(tmp_path: Path) -> None:
    first, second = LocalStore(str(tmp_path)), LocalStore(str(tmp_path))

    def churn(number: int) -> None:
        store = (first, second)[number % 2]
        for i in range(25):
            store.put(f"d/e/{number}", b"%d" % i, create_only=True)
            store.delete(f"d/e/{number}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(churn, range(4)))
    assert contents(first) == {}


def test_a_directory_removed_during_its_creation_is_created_again(tmp_path: Path) -> None:
    """`makedirs` finds it, a delete removes it, and it is no directory any more: no object is in the way."""

    class VanishingDisk(OsDisk):
        rounds = 0

        def make_dirs(self, path: str) -> None:
            if path.endswith("/d") and not self.rounds:
                self.rounds += 1
                raise FileExistsError(path)
            super().make_dirs(path)

    disk = VanishingDisk()
    store = LocalStore(str(tmp_path), disk=disk)
    store.put("d/e", b"1", create_only=True)
    assert (store.get("d/e"), disk.rounds) == (b"1", 1)
    with pytest.raises(InvalidName):
        store.put("d/e/f", b"2")


def test_nothing_is_created_before_the_first_put(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "absent"))
    assert contents(store) == {}
    with pytest.raises(ObjectNotFound):
        store.get(KEY)
    store.delete(KEY)
    assert not (tmp_path / "absent").exists()


def test_foreign_files_without_a_valid_key_are_not_listed(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.put("a", b"1")
    (tmp_path / "line\nbreak").write_bytes(b"")
    (tmp_path / "back\\slash").write_bytes(b"")
    (tmp_path / "empty folder").mkdir()
    assert contents(store) == {"a": b"1"}
    assert store.list_prefixes() == []


def test_a_file_is_copied_in_bounded_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "COPY_STEP_BYTES", 10)
    source = tmp_path / "source"
    source.write_bytes(bytes(range(95)))
    disk = FaultyDisk(OsDisk(), operation="write")
    store = LocalStore(str(tmp_path / "objects"), disk=disk)
    assert store.put_file(KEY, str(source)).size_bytes == 95
    assert len(disk.calls) == 10
    assert store.get(KEY) == source.read_bytes()


def test_the_memory_of_named_directories_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "NAMED_MAX", 4)
    store = LocalStore(str(tmp_path))
    for number in range(10):
        store.put(f"{number}/x", b"1")
    assert len(store._named) <= 4
    assert len(contents(store)) == 10
