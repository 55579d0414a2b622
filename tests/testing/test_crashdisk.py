"""The crash disk: synced writes survive every crash; unsynced ones are kept, lost, zeroed or garbled."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidInput
from quire.durable.files import read_all, write_new
from quire.testing.crashdisk import SECTOR_BYTES, CrashDisk, drop_all, every_chooser, keep_all


@pytest.fixture
def disk(tmp_path: Path) -> CrashDisk:
    return CrashDisk(str(tmp_path / "disk"))


def trees(disk: CrashDisk, tmp_path: Path) -> Iterator[dict[str, bytes]]:
    """The result of every possible crash: path relative to the root → contents."""
    for number, choose in enumerate(every_chooser()):
        crashed = disk.crash(str(tmp_path / f"after{number}"), choose)
        yield {
            os.path.relpath(os.path.join(folder, name), crashed.root): read_all(crashed, os.path.join(folder, name))
            for folder, _, files in os.walk(crashed.root)
            for name in files
        }


def test_synced_bytes_without_a_synced_name_may_vanish_but_not_change(disk: CrashDisk, tmp_path: Path) -> None:
    write_new(disk, disk.path("a"), b"abc")
    assert list(trees(disk, tmp_path)) == [{"a": b"abc"}, {}]


def test_a_synced_name_with_unsynced_bytes_is_kept_lost_zeroed_or_garbled(disk: CrashDisk, tmp_path: Path) -> None:
    file = disk.open(disk.path("a"), create=True)
    disk.sync_dir(disk.root)
    file.write_at(b"abc", 0)
    contents = [tree["a"] for tree in trees(disk, tmp_path)]
    assert {b"abc", b"", b"\0\0\0"} < set(contents)
    assert len(set(contents)) == 4
    file.close()


def test_each_sector_of_a_write_is_kept_or_lost_independently(disk: CrashDisk, tmp_path: Path) -> None:
    write_new(disk, disk.path("a"), b"-" * SECTOR_BYTES * 2)
    disk.sync_dir(disk.root)
    file = disk.open(disk.path("a"))
    file.write_at(b"+" * SECTOR_BYTES, SECTOR_BYTES // 2)
    half = SECTOR_BYTES // 2
    contents = {tree["a"] for tree in trees(disk, tmp_path)}
    assert len(contents) == 9
    assert b"-" * half + b"+" * half + b"-" * SECTOR_BYTES in contents
    assert b"-" * SECTOR_BYTES + b"+" * half + b"-" * half in contents
    assert all(content[:half] == b"-" * half == content[-half:] for content in contents)
    file.close()


def test_a_rename_happens_or_does_not(disk: CrashDisk, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_new(disk, disk.path(name), name.encode())
    disk.sync_dir(disk.root)
    disk.rename(disk.path("a"), disk.path("b"))
    assert list(trees(disk, tmp_path)) == [{"b": b"a"}, {"a": b"a", "b": b"b"}]
    disk.sync_dir(disk.root)
    assert list(trees(disk, tmp_path / "synced")) == [{"b": b"a"}]


def test_a_directory_that_takes_the_name_of_one_that_was_moved_away_is_durable_after_a_sync(
    disk: CrashDisk, tmp_path: Path
) -> None:
    """Hazard: the removal of the old name waited for the new one, and then removed the directory that had taken its place."""
    for name in ("old", "new", "aside"):
        disk.make_dirs(disk.path(name))
    write_new(disk, disk.path("new", "a"), b"abc")
    disk.sync_dir(disk.path("new"))
    disk.rename(disk.path("old"), disk.path("aside", "old"))
    disk.rename(disk.path("new"), disk.path("old"))
    disk.sync_dir(disk.root)
    disk.remove_dir(disk.path("aside", "old"))
    disk.sync_dir(disk.path("aside"))
    assert list(trees(disk, tmp_path)) == [{"old/a": b"abc"}]


def test_a_rename_between_directories_never_loses_the_file(disk: CrashDisk, tmp_path: Path) -> None:
    disk.make_dirs(disk.path("x"))
    disk.make_dirs(disk.path("y"))
    write_new(disk, disk.path("x", "a"), b"1")
    disk.sync_dir(disk.path("x"))
    disk.rename(disk.path("x", "a"), disk.path("y", "a"))
    both = [{"y/a": b"1"}, {"x/a": b"1", "y/a": b"1"}, {"x/a": b"1"}]
    assert list(trees(disk, tmp_path)) == both
    disk.sync_dir(disk.path("x"))
    assert list(trees(disk, tmp_path / "source")) == both
    disk.sync_dir(disk.path("y"))
    assert list(trees(disk, tmp_path / "target")) == both[:2]
    disk.sync_dir(disk.path("x"))
    assert list(trees(disk, tmp_path / "done")) == both[:1]


def test_a_removed_file_may_reappear_until_the_directory_is_synced(disk: CrashDisk, tmp_path: Path) -> None:
    write_new(disk, disk.path("a"), b"1")
    disk.sync_dir(disk.root)
    disk.remove(disk.path("a"))
    assert list(trees(disk, tmp_path)) == [{}, {"a": b"1"}]
    disk.sync_dir(disk.root)
    assert list(trees(disk, tmp_path / "synced")) == [{}]


def test_two_names_that_a_file_had_before_remain_one_file(disk: CrashDisk, tmp_path: Path) -> None:
    """Hazard: a crash left the old bytes under one of the names."""
    write_new(disk, disk.path("a"), b"1")
    disk.link(disk.path("a"), disk.path("b"))
    later = CrashDisk(disk.root)
    with later.open(later.path("a")) as file:
        file.write_at(b"2", 0)
        file.sync()
    crashed = later.crash(str(tmp_path / "after"), drop_all)
    assert read_all(crashed, crashed.path("b")) == b"2"
    assert os.path.samefile(crashed.path("a"), crashed.path("b"))


def test_two_names_of_a_file_remain_one_file(disk: CrashDisk, tmp_path: Path) -> None:
    write_new(disk, disk.path("a"), b"1")
    disk.link(disk.path("a"), disk.path("b"))
    disk.rename(disk.path("a"), disk.path("b"))  # does nothing, as POSIX specifies
    with pytest.raises(FileExistsError):
        disk.link(disk.path("a"), disk.path("b"))
    disk.sync_dir(disk.root)
    crashed = disk.crash(str(tmp_path / "after"), drop_all)
    assert os.path.samefile(crashed.path("a"), crashed.path("b"))


def test_truncation_and_growth_are_pending_until_synced(disk: CrashDisk, tmp_path: Path) -> None:
    write_new(disk, disk.path("a"), b"12345")
    disk.sync_dir(disk.root)
    file = disk.open(disk.path("a"))
    file.truncate(2)
    file.allocate(4)
    assert {tree["a"] for tree in trees(disk, tmp_path)} == {b"12\0\0", b"12", b"12345"}
    file.sync()
    assert [tree["a"] for tree in trees(disk, tmp_path / "synced")] == [b"12\0\0"]
    file.close()


def test_bytes_written_through_a_mapping_are_pending_until_synced(disk: CrashDisk, tmp_path: Path) -> None:
    write_new(disk, disk.path("a"), bytes(2 * SECTOR_BYTES))
    disk.sync_dir(disk.root)
    file = disk.open(disk.path("a"))
    with mmap.mmap(file.fileno(), 0) as mapping:
        mapping[600:603] = b"abc"
        assert read_all(disk.crash(str(tmp_path / "keep"), keep_all), str(tmp_path / "keep" / "a"))[600:603] == b"abc"
        assert read_all(disk.crash(str(tmp_path / "drop"), drop_all), str(tmp_path / "drop" / "a"))[600:603] == bytes(3)
        file.sync()
    assert read_all(disk.crash(str(tmp_path / "sync"), drop_all), str(tmp_path / "sync" / "a"))[600:603] == b"abc"
    file.close()


def test_paths_outside_the_disk_are_rejected(disk: CrashDisk, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        disk.open(str(tmp_path / "elsewhere"), create=True)
    with pytest.raises(FileNotFoundError):
        disk.open(disk.path("no", "such"), create=True)
    with pytest.raises(FileNotFoundError):
        disk.sync_dir(disk.path("none"))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "truncate", "sync", "rename", "remove", "sync_dir"]),
        st.sampled_from("abc"),
        st.integers(0, 1500),
    ),
    max_size=20,
)


@given(steps=STEPS, seed=st.integers(0, 2**32))
def test_a_crash_that_keeps_everything_or_follows_a_sync_of_everything_equals_the_live_disk(
    steps: list[tuple[str, str, int]], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.mktemp("crash")
    disk = CrashDisk(str(base / "disk"))
    for number, (step, name, amount) in enumerate(steps):
        path = disk.path(name)
        if step == "sync_dir":
            disk.sync_dir(disk.root)
        elif step == "write" or disk.exists(path):
            _step(disk, step, path, amount, bytes([number + 1]))
    live = {name: read_all(disk, disk.path(name)) for name in disk.names(disk.root)}
    crashed = disk.crash(str(base / "kept"), keep_all)
    assert {name: read_all(crashed, crashed.path(name)) for name in crashed.names(crashed.root)} == live
    for name in live:
        with disk.open(disk.path(name)) as file:
            file.sync()
    disk.sync_dir(disk.root)
    synced = disk.crash(str(base / "synced"), random.Random(seed).choice)
    assert {name: read_all(synced, synced.path(name)) for name in synced.names(synced.root)} == live


def _step(disk: CrashDisk, step: str, path: str, amount: int, fill: bytes) -> None:
    if step == "rename":
        disk.rename(path, disk.path("abc"[amount % 3]))
    elif step == "remove":
        disk.remove(path)
    else:
        with disk.open(path, create=True) as file:
            if step == "write":
                file.write_at(fill * (amount // 2), amount)
            elif step == "truncate":
                file.truncate(amount)
            else:
                file.sync()
