"""A bounded pool of open files: descriptors are closed and reopened, written data stays, and no failed sync is lost."""

from __future__ import annotations

import errno
import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import StorageFault, TooManyOpenFiles
from quire.durable import open_files
from quire.durable.files import Disk, DiskLayer, File, FileLayer, OsDisk, preallocate, translate, write_synced
from quire.durable.open_files import OpenFiles, open_to_read
from quire.testing.faults import Fault, FaultyDisk


def _descriptors(folder: Path) -> int:
    """How many descriptors this process has on files in a directory."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith(str(folder))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return count


class _CountingDisk(DiskLayer):
    """Counts the files that are opened."""

    opened = 0

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> File:
        self.opened += 1
        return self._inner.open(path, create=create, exclusive=exclusive, write=write)


def _pool(limit: int = 4) -> OpenFiles:
    return OpenFiles(OsDisk(), limit, ticking=False)


def test_an_unused_file_has_no_descriptor_and_is_reopened_when_used(tmp_path: Path) -> None:
    """Hazard: every database that was written kept a file open."""
    pool = _pool()
    file = pool.open(str(tmp_path / "a"), create=True)
    file.write_at(b"one", 0)
    file.sync()
    assert pool.close_idle() == 0, "it was used since the last call"
    assert pool.close_idle() == 1
    assert _descriptors(tmp_path) == 0
    file.write_at(b"two", 3)
    assert file.read_at(6, 0) == b"onetwo"
    assert file.size() == 6
    assert _descriptors(tmp_path) == 1
    file.close()
    assert _descriptors(tmp_path) == 0


def test_a_file_with_unsynced_writes_stays_open(tmp_path: Path) -> None:
    """Its next sync must get the error of a failed write-back, which a handle opened later would not get."""
    pool = _pool()
    file = pool.open(str(tmp_path / "a"), create=True)
    file.write_at(b"one", 0)
    assert [pool.close_idle() for _ in range(3)] == [0, 0, 0]
    file.sync()
    pool.close_idle()
    assert pool.close_idle() == 1
    file.close()


def test_the_number_of_open_files_is_limited(tmp_path: Path) -> None:
    pool = _pool(limit=4)
    files = [pool.open(str(tmp_path / str(number)), create=True) for number in range(20)]
    for number, file in enumerate(files):
        write_synced(file, bytes([number]) * 8, 0)
        assert _descriptors(tmp_path) <= 4
    assert [file.read_at(1, 7)[0] for file in files] == list(range(20))
    for file in files:
        file.close()
    assert len(pool) == 0
    assert _descriptors(tmp_path) == 0


def test_cycling_through_slightly_more_files_than_the_limit_seldom_reopens_them(tmp_path: Path) -> None:
    """If the file opened longest ago were closed, each use would close the file that is used next."""
    disk = _CountingDisk(OsDisk())
    pool = OpenFiles(disk, 200, ticking=False)
    files = [pool.open(str(tmp_path / str(number)), create=True) for number in range(210)]
    for _ in range(3):
        before = disk.opened
        for file in files:
            file.write_at(b"x", 0)
    assert disk.opened - before < 105  # about 18
    for file in files:
        file.close()


def test_beyond_the_limit_dirty_files_are_synced_and_closed(tmp_path: Path) -> None:
    pool = _pool(limit=4)
    files = [pool.open(str(tmp_path / str(number)), create=True) for number in range(12)]
    for number, file in enumerate(files):
        file.write_at(bytes([number]), 0)
    assert _descriptors(tmp_path) <= 4
    for file in files:
        file.sync()
    assert [file.read_at(1, 0)[0] for file in files] == list(range(12))


def test_a_sync_that_failed_on_behalf_of_a_writer_is_reported_to_it(tmp_path: Path) -> None:
    disk = FaultyDisk(OsDisk(), Fault.EIO, fail_at=1, operation="sync", path="*first")
    pool = OpenFiles(disk, 4, ticking=False)
    first = pool.open(str(tmp_path / "first"), create=True)
    first.write_at(b"x", 0)
    others: list[File] = []
    while not disk.fired:  # the pool closes a random file
        others.append(pool.open(str(tmp_path / str(len(others))), create=True))
        others[-1].write_at(b"x", 0)
        assert len(others) < 1_000
    for _ in range(2):
        with pytest.raises(StorageFault):
            first.sync()
        with pytest.raises(StorageFault):
            write_synced(first, b"y", 1)
    for file in (first, *others):
        file.close()


class _FileFailingOnce(FileLayer):
    """A file whose first sync fails and whose later syncs succeed, as on Linux. `meanwhile` is called during the
    first."""

    def __init__(self, inner: File) -> None:
        super().__init__(inner)
        self.syncs = 0
        self.meanwhile: Callable[[], None] = lambda: None

    def sync(self) -> None:
        self.syncs += 1
        if self.syncs == 1:
            self.meanwhile()
            raise StorageFault("syncing failed: EIO", path=self.path)


class _DiskWithFailingFile(DiskLayer):
    """A disk that opens `first` as such a file."""

    failing_file: _FileFailingOnce

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> File:
        file = self._inner.open(path, create=create, exclusive=exclusive, write=write)
        if not path.endswith("first"):
            return file
        self.failing_file = _FileFailingOnce(file)
        return self.failing_file


def test_a_sync_that_is_concurrent_with_the_pools_own_reports_its_failure(tmp_path: Path) -> None:
    """Hazard: the pool's sync took the error, and the writer's concurrent sync of the same handle succeeded."""
    disk = _DiskWithFailingFile(OsDisk())
    pool = OpenFiles(disk, 1, ticking=False)
    first = pool.open(str(tmp_path / "first"), create=True)
    first.write_at(b"x", 0)
    outcomes: list[str] = []

    def sync() -> None:
        try:
            first.sync()
            outcomes.append("succeeded")
        except StorageFault:
            outcomes.append("failed")

    writer = threading.Thread(target=sync)

    def meanwhile() -> None:
        writer.start()
        writer.join(0.5)  # long enough for it to succeed, or to wait for this sync

    disk.failing_file.meanwhile = meanwhile
    other = pool.open(str(tmp_path / "other"), create=True)
    writer.join(60)
    assert outcomes == ["failed"]
    for file in (first, other):
        file.close()


def test_handles_of_one_file_are_closed_and_reopened_together(tmp_path: Path) -> None:
    """There are two handles so that each of two syncs gets the error: a handle that is opened after a write would
    not."""
    pool = _pool()
    first = pool.open(str(tmp_path / "a"), create=True)
    second = pool.open(str(tmp_path / "a"))
    pool.close_idle()
    assert pool.close_idle() == 1
    assert _descriptors(tmp_path) == 0
    first.write_at(b"x", 0)
    assert _descriptors(tmp_path) == 2
    second.sync()
    first.close()
    assert _descriptors(tmp_path) == 1
    second.close()


def test_another_file_at_the_path_is_detected(tmp_path: Path) -> None:
    pool = _pool()
    file = pool.open(str(tmp_path / "a"), create=True)
    write_synced(file, b"mine", 0)
    pool.close_idle()
    pool.close_idle()
    (tmp_path / "b").write_bytes(b"theirs")
    os.replace(tmp_path / "b", tmp_path / "a")
    with pytest.raises(StorageFault, match="replaced"):
        file.write_at(b"x", 0)
    assert (tmp_path / "a").read_bytes() == b"theirs"


def test_handles_follow_a_renamed_file(tmp_path: Path) -> None:
    pool = _pool()
    file = preallocate(pool, str(tmp_path / "spare"), 64)
    pool.close_idle()
    pool.close_idle()
    pool.rename(str(tmp_path / "spare"), str(tmp_path / "segment"))
    file.write_at(b"x", 0)
    assert file.path == str(tmp_path / "segment")
    assert (tmp_path / "segment").read_bytes()[:1] == b"x"
    file.close()


def test_a_file_whose_descriptor_is_used_stays_open(tmp_path: Path) -> None:
    """A lock or a memory map depends on it."""
    pool = _pool()
    file = pool.open(str(tmp_path / "a"), create=True)
    descriptor = file.fileno()
    assert [pool.close_idle() for _ in range(3)] == [0, 0, 0]
    assert file.fileno() == descriptor
    file.close()


def test_files_to_read_are_pooled_only_on_request(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"table")
    pool = _pool()
    pooled, plain = open_to_read(pool, str(tmp_path / "a")), pool.open(str(tmp_path / "a"), write=False)
    pool.close_idle()
    assert pool.close_idle() == 1
    assert _descriptors(tmp_path) == 1
    assert pooled.read_at(5, 0) == plain.read_at(5, 0) == b"table"
    with pytest.raises(StorageFault):
        pooled.write_at(b"x", 0)
    pooled.close()
    plain.close()


def test_many_threads_use_files_that_are_closed_and_reopened(tmp_path: Path) -> None:
    """Hazard: a descriptor that is closed while in use may belong to another file by then."""
    pool = _pool(limit=4)
    files = [pool.open(str(tmp_path / str(number)), create=True) for number in range(8)]
    stopping, mismatches = threading.Event(), []

    def close_continuously() -> None:
        while not stopping.is_set():
            pool.close_idle()

    def work(number: int) -> None:
        rng = random.Random(number)
        for count in range(300):
            file = files[number]
            write_synced(file, f"{number}:{count:4}".encode(), 0)
            if rng.random() < 0.5:
                file.sync()
            if file.read_at(6, 0) != f"{number}:{count:4}".encode():
                mismatches.append((number, count))

    closer = threading.Thread(target=close_continuously)
    closer.start()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stopping.set()
    closer.join()
    assert mismatches == []
    for number, file in enumerate(files):
        assert file.read_at(6, 0) == f"{number}: 299".encode()
        file.close()


class _SlowToOpen(DiskLayer):
    """A disk on which opening one file waits until the test permits it."""

    def __init__(self, inner: Disk, path: str) -> None:
        super().__init__(inner)
        self._path = path
        self.is_opening, self.may_open = threading.Event(), threading.Event()
        self.may_open.set()

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> File:
        if path == self._path and not self.may_open.is_set():
            self.is_opening.set()
            assert self.may_open.wait(20)
        return self._inner.open(path, create=create, exclusive=exclusive, write=write)


def test_reopening_a_file_does_not_block_others(tmp_path: Path) -> None:
    """Hazard: with more files in use than the limit, each use opens one; threads waited for each other's opens."""
    slow = str(tmp_path / "slow")
    disk = _SlowToOpen(OsDisk(), slow)
    pool = OpenFiles(disk, 4, ticking=False)
    first, second = pool.open(slow, create=True), pool.open(str(tmp_path / "other"), create=True)
    pool.close_idle()
    assert pool.close_idle() == 2
    disk.may_open.clear()
    writer = threading.Thread(target=first.write_at, args=(b"slow", 0))
    writer.start()
    assert disk.is_opening.wait(20)
    other = threading.Thread(target=second.write_at, args=(b"other", 0))
    other.start()
    other.join(10)
    was_blocked = other.is_alive()
    disk.may_open.set()
    writer.join()
    other.join()
    assert not was_blocked
    assert (first.read_at(4, 0), second.read_at(5, 0)) == (b"slow", b"other")
    first.close()
    second.close()


def test_a_handle_that_is_closed_while_its_file_is_opened_again_leaves_no_descriptor(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    disk = _SlowToOpen(OsDisk(), path)
    pool = OpenFiles(disk, 4, ticking=False)
    first, second = pool.open(path, create=True), pool.open(path)
    pool.close_idle()
    assert pool.close_idle() == 1
    disk.may_open.clear()
    writer = threading.Thread(target=first.write_at, args=(b"one", 0))
    writer.start()
    assert disk.is_opening.wait(20)
    second.close()
    disk.may_open.set()
    writer.join()
    assert _descriptors(tmp_path) == 1
    first.close()
    assert _descriptors(tmp_path) == 0
    assert len(pool) == 0


# ── no descriptor left ────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_handle_that_a_finalizer_closes_does_not_disturb_the_closing_of_others(tmp_path: Path) -> None:
    """Hazard: the garbage collector runs in the thread that has the lock; the removed entry raised a KeyError, which ended the
    thread that closes unused files."""
    pool = _pool(limit=4)
    files = [pool.open(str(tmp_path / str(number)), create=True) for number in range(4)]
    detach = pool._detach_files

    def collect_and_detach(entry: Any) -> list[File]:
        while len(files) > 1:
            files.pop().close()
        return detach(entry)

    pool._detach_files = collect_and_detach  # type: ignore[method-assign]
    pool.close_idle()
    assert pool.close_idle() <= 1
    for file in files:
        file.close()
    assert len(pool) == 0
    assert _descriptors(tmp_path) == 0


def test_a_failure_of_the_closing_thread_does_not_prevent_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: after any error no thread closed unused files any more."""
    monkeypatch.setattr(open_files, "LOOK_SECONDS", 0.001)
    failed = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: failed.set())
    pool = OpenFiles(OsDisk(), 4)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "close_idle", lambda: 1 // 0)
        file = pool.open(str(tmp_path / "a"), create=True)
        assert failed.wait(60)
    other = pool.open(str(tmp_path / "b"), create=True)
    deadline = time.monotonic() + 60
    while _descriptors(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert _descriptors(tmp_path) == 0
    for opened in (file, other):
        opened.close()
    pool.close()


def test_the_error_of_a_process_without_descriptors_names_its_limit(tmp_path: Path) -> None:
    """Hazard: the hint was to check the disk."""
    error = translate(OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "x", "opening")
    assert isinstance(error, TooManyOpenFiles)
    assert str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) in error.what
    assert "ulimit -n" in error.hint
    assert "disk" not in error.hint
    of_machine = translate(OSError(errno.ENFILE, os.strerror(errno.ENFILE)), "x", "opening")
    assert isinstance(of_machine, TooManyOpenFiles)
    assert "machine" in of_machine.what


def test_disk_locks_and_lmdb_report_missing_descriptors(tmp_path: Path) -> None:
    """The disk, locks and LMDB in a process that has used up its descriptors."""
    program = f"""
import os, resource
import quire
from quire.core.errors import TooManyOpenFiles
from quire.core.settings import ManifestSettings
from quire.durable.files import OsDisk
from quire.durable.locks import FileLock
from quire.manifest.env import ManifestEnv
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
tries = [
    lambda: OsDisk().open({str(tmp_path / "f")!r}, create=True),
    lambda: OsDisk().sync_dir({str(tmp_path)!r}),
    lambda: FileLock.acquire({str(tmp_path / "l")!r}),
    lambda: ManifestEnv({str(tmp_path / "m.lmdb")!r}, ManifestSettings(), write=True),
]
said = 0
for attempt in tries:
    try:
        attempt()
    except TooManyOpenFiles as error:
        said += "limit of this process is 64" in str(error)
os.closerange(min(taken), max(taken) + 1)
print(said)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "4", result.stderr
