"""The disk starts writing a commit before its sync: only if a thread waits for the commit, and never in place of the
sync."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.core.errors import DiskFull, StorageFault, StoreUnusable
from quire.durable import files
from quire.durable.files import OsDisk, OsFile, begin_write_back, preallocate
from quire.pages import segment_file
from quire.pages.pagestore import PageStore
from quire.pages.segment import FRAME_HEAD_BYTES
from quire.pages.transaction import PageGuard
from quire.testing.crashdisk import CrashDisk, drop_all
from tests.pages.engine_harness import PAGE, Model, Pages, assert_reads, image, opened, write

STRIDE = FRAME_HEAD_BYTES + PAGE


class RecordedSteps:
    """The calls that a commit makes on its segment, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[str, int]] = []
        original_write, original_begin, original_sync = OsFile.write_at, OsFile.begin_write_back, OsFile.sync

        def write_at(file: OsFile, data: bytes, offset: int) -> None:
            original_write(file, data, offset)
            self._note(file, "write", len(data), offset)

        def begin(file: OsFile, size: int, offset: int) -> None:
            original_begin(file, size, offset)
            self._note(file, "begin", size, offset)

        def sync(file: OsFile) -> None:
            original_sync(file)
            self._note(file, "sync", 0, 0)

        monkeypatch.setattr(OsFile, "write_at", write_at)
        monkeypatch.setattr(OsFile, "begin_write_back", begin)
        monkeypatch.setattr(OsFile, "sync", sync)
        self.offset = 0

    def _note(self, file: OsFile, step: str, size: int, offset: int) -> None:
        if file.path.endswith(".seg"):
            if step == "write":
                self.offset = offset
            assert step != "begin" or offset == self.offset, "write-back begins with what was just written"
            self.steps.append((step, size))

    def take(self) -> list[tuple[str, int]]:
        steps, self.steps = self.steps, []
        return steps


def commit(store: PageStore, *numbers: int) -> PageGuard:
    with store.begin() as txn:
        for number in numbers:
            txn.write_page(number, image())
        return txn.commit()


def test_write_back_begins_for_a_commit_that_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as pages:
        store = pages.database()
        commit(store, 0).result()
        steps = RecordedSteps(monkeypatch)
        for numbers in ((0,), (0, 1, 2)):
            size = STRIDE * len(numbers)
            commit(store, *numbers).result()
            assert steps.take() == [("write", size), ("begin", size), ("sync", 0)]


def test_no_write_back_after_a_commit_that_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as pages:
        store = pages.database()
        commit(store, 0)
        steps = RecordedSteps(monkeypatch)
        commit(store, 0)
        commit(store, 1).result()
        assert steps.take() == [("write", STRIDE), ("write", STRIDE), ("sync", 0)]
        commit(store, 0).result()
        assert ("begin", STRIDE) in steps.take()


def test_no_write_back_for_a_large_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_file, "SLICE_BYTES", 2 * STRIDE)
    with opened(tmp_path) as pages:
        store = pages.database()
        commit(store, 0).result()
        steps = RecordedSteps(monkeypatch)
        commit(store, 0, 1, 2).result()
        assert [step for step, _ in steps.take()] == ["write", "write", "sync"]


def test_no_write_back_after_a_commit_of_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as pages, ThreadPoolExecutor(1) as other:
        store = pages.database()
        commit(store, 0).result()
        steps = RecordedSteps(monkeypatch)
        other.submit(lambda: commit(store, 0).result()).result()
        commit(store, 0).result()
        assert ("begin", STRIDE) not in steps.take(), "writers in alternating threads"
        commit(store, 0).result()
        assert ("begin", STRIDE) in steps.take()


@pytest.mark.parametrize("number", sorted(files.ADVICE_ERRNOS))
def test_an_ignored_write_back_call_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(files, "_write_back_call", lambda: lambda *_: number)
    with opened(tmp_path) as pages:
        store, model = pages.database(), Model()
        write(store, model, {0: image()})
        write(store, model, {0: image(), 1: image()})
        with store.open_snapshot() as reader:
            assert_reads(reader, model.newest)


def test_without_system_support_there_is_no_write_back_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_write_back_call", lambda: None)
    with opened(tmp_path) as pages:
        commit(pages.database(), 0).result()


@pytest.mark.parametrize(("number", "expected"), [(errno.ENOSPC, DiskFull), (errno.EIO, StorageFault)])
def test_a_failed_write_back_makes_the_database_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception]
) -> None:
    pages, model = Pages(tmp_path), Model()
    store = pages.database()
    write(store, model, {0: image()})
    with monkeypatch.context() as patched:
        patched.setattr(files, "_write_back_call", lambda: lambda *_: number)
        with pytest.raises(StoreUnusable) as caught:
            commit(store, 0)
        assert isinstance(caught.value.__cause__, expected)
    with pytest.raises(StoreUnusable):
        store.begin()
    assert store.wal.durable.lsn == model.newest.lsn, "nothing was reported as durable"
    store = pages.database()  # reopened: the frame may or may not be on disk, and a kill leaves it there
    assert store.wal.durable.lsn >= model.newest.lsn
    commit(store, 0).result()
    pages.stop()


def test_the_write_back_call(tmp_path: Path) -> None:
    file = preallocate(OsDisk(), str(tmp_path / "file"), 8192)
    file.write_at(b"abc", 4000)
    begin_write_back(file, 3, 4000)
    assert file.read_at(3, 4000) == b"abc"
    descriptor = file.fileno()
    file.close()
    assert isinstance(file, OsFile)
    with pytest.raises(StorageFault) as caught:
        file.begin_write_back(3, 4000)
    assert caught.value.where["errno"] == errno.errorcode[errno.EBADF]
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(descriptor)


def test_only_a_sync_makes_a_commit_durable(tmp_path: Path) -> None:
    """A disk without this call loses everything unsynced; one with it promises no more."""
    disk = CrashDisk(str(tmp_path / "disk"))
    pages, model = Pages(tmp_path, disk=disk, root=disk.root), Model()
    store = pages.database()
    write(store, model, {0: image()})
    commit(store, 0)
    after = disk.crash(str(tmp_path / "after"), drop_all)
    pages.crash(after, after.root)
    with pages.database().open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()
