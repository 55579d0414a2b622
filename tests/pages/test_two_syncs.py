"""Two syncs of one database at a time: each through its own handle, and none proves what it has not synced."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from pathlib import Path

import pytest

from quire.core.errors import StorageFault, StoreClosed, StoreUnusable
from quire.durable.files import OsDisk, OsFile
from quire.pages import segment_file
from quire.pages.publication import Segment
from quire.pages.segment_file import SegmentFile
from quire.pages.sync_lanes import Flight
from quire.pages.transaction import PageGuard
from quire.testing.crashdisk import CrashDisk, CrashFile, drop_all
from quire.testing.faults import Fault, FaultyDisk, PowerCut
from tests.pages.engine_harness import PAGE, Model, Pages, assert_reads, eventually, image, small_segments, write


class HeldFile(OsFile):
    """A file whose syncs wait for the test, if it holds them."""

    __slots__ = ("_disk",)

    def __init__(self, fd: int, path: str, disk: HeldDisk) -> None:
        super().__init__(fd, path)
        self._disk = disk

    def sync(self) -> None:
        disk = self._disk
        if disk.is_holding and self.path.endswith(".seg"):
            disk.running.append(self)
            gate = threading.Event()
            disk.gates.append(gate)
            eventually(lambda: gate.is_set() or disk.gate.is_set())
            if disk.fails:
                raise StorageFault("the disk is gone")
        super().sync()


class HeldDisk(OsDisk):
    __slots__ = ("fails", "gate", "gates", "is_holding", "running")

    def __init__(self) -> None:
        self.is_holding = self.fails = False
        self.gate = threading.Event()
        """Releases all syncs; `gates` release one each."""
        self.gates: list[threading.Event] = []
        self.running: list[HeldFile] = []

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> HeldFile:
        file = super().open(path, create=create, exclusive=exclusive, write=write)
        return HeldFile(file.fileno(), path, self)

    def hold(self) -> None:
        self.is_holding = True


class WaitedCommit:
    """A commit, and a thread that waits for it."""

    def __init__(self, guard: PageGuard) -> None:
        self.guard = guard
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.guard.result()
        except BaseException as error:
            self.error = error

    def join(self) -> BaseException | None:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.error


def commit(pages: Pages, page: int, data: bytes) -> PageGuard:
    with pages.database().begin() as txn:
        txn.write_page(page, data)
        return txn.commit()


def two_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use two handles for small segments too, because tests have small ones."""
    monkeypatch.setattr(segment_file, "TWO_HANDLES_BYTES", 0)


def test_two_syncs_at_a_time_have_two_handles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_handles(monkeypatch)
    disk, model = HeldDisk(), Model()
    pages = Pages(tmp_path, disk=disk)
    store = pages.database()
    write(store, model, {0: image()})
    disk.hold()
    waiting = []
    for number in range(2):
        guard = commit(pages, number, data := image())
        model.commit(guard.lsn, guard.size_pages, {number: data})
        waiting.append(WaitedCommit(guard))
        eventually(lambda number=number: len(disk.running) == number + 1)  # type: ignore[misc]
    first, second = disk.running
    assert first.fileno() != second.fileno(), "Linux reports a failed write-back once per handle"
    assert first.path == second.path
    disk.gate.set()
    assert [commit_wait.join() for commit_wait in waiting] == [None, None]
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()


def test_syncs_of_a_small_segment_are_serialized_and_share_failures(tmp_path: Path) -> None:
    disk = HeldDisk()
    pages = Pages(tmp_path, disk=disk)
    store = pages.database()
    write(store, Model(), {0: image()})
    disk.hold()
    first = WaitedCommit(commit(pages, 0, image()))
    eventually(lambda: len(disk.running) == 1)
    second = WaitedCommit(commit(pages, 1, image()))
    eventually(lambda: len(store.wal._lanes._flying) == 2)
    assert len(disk.running) == 1, "one sync per handle"
    disk.fails = True
    disk.gate.set()
    assert isinstance(first.join(), StoreUnusable)
    assert isinstance(second.join(), StoreUnusable)
    assert len(disk.running) == 1, "the second does not sync a handle that has already reported its error"
    disk.is_holding = False
    pages.stop(check=False)


def test_a_sync_that_fails_for_a_group_fails_all_of_it_and_stops_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M12: every member gets the error, nothing more is accepted, and durable commits are there after reopening."""
    two_handles(monkeypatch)
    disk, model = HeldDisk(), Model()
    pages = Pages(tmp_path, disk=disk)
    store, other = pages.database(), pages.database("other")
    durable_version = write(store, model, {0: image(), 1: image()})
    disk.hold()
    waiting = [WaitedCommit(commit(pages, 0, image()))]
    eventually(lambda: len(disk.running) == 1)
    waiting.append(WaitedCommit(commit(pages, 1, image())))
    eventually(lambda: len(disk.running) == 2)
    waiting += [WaitedCommit(commit(pages, 0, image())) for _ in range(4)]
    eventually(lambda: len(store.wal._lanes._sleepers) == 4)
    disk.fails = True
    disk.gate.set()
    assert all(isinstance(commit_wait.join(), StoreUnusable) for commit_wait in waiting)
    assert len(disk.running) == 2, "nothing is synced after a failure"
    assert store.wal.durable.lsn == durable_version.lsn
    with pytest.raises(StoreUnusable):
        store.begin()
    disk.is_holding = False
    write(other, Model(), {0: image()})
    with store.open_snapshot() as reader:
        assert_reads(reader, durable_version)
    again = pages.database()
    assert again is not store
    assert again.durable_version()[0] >= durable_version.lsn
    pages.stop()


def test_a_sync_takes_the_segments_of_the_running_one(pages: Pages) -> None:
    """Rule 7 of the WAL. A transaction that is written just before a sync takes its segment, but after that sync read
    the written lsn, does not mark the segment dirty again: only the running sync covers it, and that may still fail."""
    store = pages.database()
    write(store, Model(), {0: image()})
    wal = store.wal

    class Dirty(deque[Segment]):
        def popleft(self) -> Segment:
            wal._dirty = deque(self)
            late_commits.append(commit(pages, 1, image()))  # its segment is already dirty
            return super().popleft()

    late_commits: list[PageGuard] = []
    first_commit = commit(pages, 0, image())
    segment = wal._segment
    first, second = Flight(), Flight()
    wal._dirty = Dirty(wal._dirty)
    wal._begin_sync(first, None)
    assert (first.mark.lsn, first.segments) == (first_commit.lsn, [segment])
    wal._dirty.clear()  # the first sync has taken them
    wal._begin_sync(second, first)
    assert (second.mark.lsn, second.segments) == (late_commits[0].lsn, [segment]), (
        "it would be durable without its own sync"
    )
    assert segment is not None
    segment.is_dirty = True
    wal._dirty.append(segment)
    late_commits[0].result()


def test_a_late_sync_of_a_retired_segment_does_nothing(tmp_path: Path) -> None:
    """The segment is full, published and closed while a second sync, which took it over from the first, is about to
    start."""
    disk = HeldDisk()
    segment = SegmentFile.create(
        disk, str(tmp_path / "x.seg"), db_id=1, segment_id=1, first_lsn=1, page_size=PAGE, file_bytes=2 << 20
    )
    segment.append([(0, image(), 0, 0)], db_size=1)
    disk.hold()
    syncing = threading.Thread(target=segment.sync, args=(1,), daemon=True)
    syncing.start()
    eventually(lambda: len(disk.running) == 1)
    retiring = threading.Thread(target=segment.retire, daemon=True)
    retiring.start()
    eventually(lambda: segment._is_retired)
    assert disk.running[0].fileno() >= 0, "it is not closed during a sync"
    disk.gate.set()
    retiring.join(30)
    syncing.join(30)
    assert disk.running[0].fileno() < 0
    assert [segment.sync(0), segment.sync(1)] == [1, 1]
    assert len(disk.running) == 1


def test_a_segment_that_is_published_and_closed_meanwhile_does_not_fail_a_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_handles(monkeypatch)
    disk = HeldDisk()
    pages = Pages(tmp_path, disk=disk)
    store = pages.database()
    write(store, Model(), {0: image()})
    disk.hold()
    first = WaitedCommit(commit(pages, 0, image()))
    eventually(lambda: len(disk.running) == 1)
    store.wal.seal()
    disk.is_holding = False
    guard = commit(pages, 1, image())  # creates the next segment
    disk.hold()
    second = WaitedCommit(guard)
    eventually(lambda: len(disk.running) == 2)
    disk.gates[0].set()
    assert first.join() is None
    disk.is_holding = False  # for the syncs of publication
    store.wal.publish()
    assert not store.wal.has_ended(), "the first segment is closed"
    assert disk.running[0].fileno() < 0
    disk.gate.set()
    assert second.join() is None, "it had taken the first segment too"
    assert store.wal.failure is None
    pages.stop()


def test_a_database_is_closed_after_its_running_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their handles must not be closed, and their numbers reused for other files, while they run."""
    two_handles(monkeypatch)
    disk = HeldDisk()
    pages = Pages(tmp_path, disk=disk)
    store = pages.database()
    write(store, Model(), {0: image()})
    disk.hold()
    waiting = [WaitedCommit(commit(pages, 0, image()))]
    eventually(lambda: len(disk.running) == 1)
    waiting.append(WaitedCommit(commit(pages, 1, image())))
    eventually(lambda: len(disk.running) == 2)
    closing = threading.Thread(target=store.wal.abandon, args=(StoreClosed("closed"),), daemon=True)
    closing.start()
    eventually(lambda: len(store.wal._lanes._sleepers) >= 1)
    assert [file.fileno() >= 0 for file in disk.running] == [True, True]
    disk.gate.set()
    closing.join(30)
    assert not closing.is_alive()
    assert {type(commit_wait.join()) for commit_wait in waiting} <= {type(None), StoreClosed}
    assert [file.fileno() for file in disk.running] == [-1, -1]
    disk.is_holding = False
    pages.stop()


def test_commits_continue_through_many_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are filled, published and closed while two syncs run all the time."""
    two_handles(monkeypatch)
    small_segments(monkeypatch, frames=5)
    pages = Pages(tmp_path, ticking=True)
    store = pages.database()
    errors: list[BaseException] = []
    newest: dict[int, tuple[int, bytes]] = {}

    def work(page: int) -> None:
        try:
            for _ in range(40):
                with store.begin() as txn:
                    txn.write_page(page, data := image())
                    guard = txn.commit()
                newest[page] = (guard.result(), data)
                store.wal.publish()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(page,), daemon=True) for page in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []
    pages.reopen()
    with pages.database().open_snapshot() as reader:
        for page, (_, data) in newest.items():
            assert reader.read_page(page) == data
    pages.stop()


@pytest.mark.parametrize("seed", range(6))
def test_acknowledged_commits_survive_power_loss_whichever_sync_covered_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Four writers, segments of a few frames, and a disk that loses everything written after the last sync began."""
    two_handles(monkeypatch)
    small_segments(monkeypatch, frames=7)
    rng, sync = random.Random(seed), CrashFile.sync

    def sync_slowly(file: CrashFile) -> None:
        sync(file)  # first: a sync does not cover what is written while it runs
        time.sleep(rng.random() / 1000)

    monkeypatch.setattr(CrashFile, "sync", sync_slowly)
    live = CrashDisk(str(tmp_path / "live"))
    power = FaultyDisk(live, Fault.POWER_CUT)
    pages = Pages(tmp_path, disk=power, root=live.path("store"), objects_url="memory://none")
    store = pages.database()
    written: dict[int, dict[int, bytes]] = {page: {} for page in range(4)}
    acknowledged = dict.fromkeys(written, 0)
    power._fail_at = len(power.calls) + rng.randrange(60, 260)

    def work(page: int) -> None:
        try:
            while not power.fired:
                with store.begin() as txn:
                    txn.write_page(page, data := image())
                    guard = txn.commit()
                written[page][guard.lsn] = data
                acknowledged[page] = guard.result()
                if page == 0:
                    store.wal.publish()
        except (PowerCut, StoreUnusable):
            pass

    threads = [threading.Thread(target=work, args=(page,), daemon=True) for page in written]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert power.fired
    after = live.crash(str(tmp_path / "after"), drop_all)
    pages.crash(after, after.path("store"))
    with pages.database().open_snapshot() as reader:
        assert reader.lsn >= max(acknowledged.values())
        for page, lsn in acknowledged.items():
            acceptable = [data for written_lsn, data in written[page].items() if written_lsn >= lsn]
            assert not lsn or reader.read_page(page) in acceptable
    pages.stop()
