"""The write-ahead log: what is appended, synced, published and sealed, and in which order."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from quire.core.errors import InvalidInput, OutOfRange, StorageFault, StoreClosed, StoreUnusable
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk
from quire.manifest import tables as t
from quire.manifest.records import WalRecord, WalState
from quire.pages.wal import LSN_BLOCK
from quire.testing.faults import Fault, FaultyDisk
from tests.pages.engine_harness import PAGE, Model, Pages, assert_reads, image, small_segments, write


def rows(pages: Pages, db_id: int = 1) -> dict[int, WalRecord]:
    with pages.manifest.read() as txn:
        return {key[1]: row for key, row in txn.scan(t.WAL_CATALOG, db_id)}


def index(pages: Pages, db_id: int = 1) -> list[tuple[int, int]]:
    """(page, lsn) of every row of the page index."""
    with pages.manifest.read() as txn:
        return [(key[1], key[2]) for key, _ in txn.scan(t.PAGE_VERSION_INDEX, db_id)]


def test_a_segment_goes_from_open_to_indexed_and_its_row_describes_its_contents(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image(), 1: image()})
    assert rows(pages)[1].state is WalState.OPEN
    assert index(pages) == []
    assert store.wal.publish() == 2
    assert index(pages) == [(0, 1), (1, 2)]
    assert rows(pages)[1].state is WalState.OPEN, "partial publication moves only the mark (P6)"
    store.wal.seal()
    store.wal.publish()
    row = rows(pages)[1]
    assert (row.state, row.first_lsn, row.last_lsn, row.frame_count, row.size_pages) == (WalState.INDEXED, 1, 2, 2, 2)


def test_only_durable_frames_are_published(pages: Pages) -> None:
    """Nothing with an lsn enters the manifest before that lsn is synced (P5)."""
    store = pages.database()
    with store.begin() as txn:
        txn.write_page(0, image())
        guard = txn.commit()
    assert store.wal.publish() == 0
    store.wal.seal()
    store.wal.publish()
    assert rows(pages)[1].state is WalState.OPEN
    with pages.manifest.read() as txn_:
        wal = txn_.wal_state(1)
    assert wal is not None
    assert (wal.indexed_upto_lsn, wal.last_applied_lsn) == (0, 0)
    guard.result()
    store.wal.publish()
    assert rows(pages)[1].state is WalState.INDEXED


def test_a_sync_does_not_continue_for_later_writes(pages: Pages) -> None:
    """P7: a sync used to repeat while others wrote, and waiters of the first one were not woken."""
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    wal, syncs = store.wal, list[int]()

    def append_meanwhile(_: str) -> None:
        syncs.append(wal.written.lsn)
        if len(syncs) < 5:
            wal.append({0: image()}, 1, 1)

    first = wal.append({0: image()}, 1, 1)
    with armed("pages.segment.sync", append_meanwhile):
        wal.sync(first.lsn)
    assert syncs == [first.lsn]
    assert (wal.durable.lsn, wal.written.lsn) == (first.lsn, first.lsn + 1)
    wal.sync()
    assert wal.durable.lsn == first.lsn + 1


def test_publication_is_requested_once_until_it_begins(pages: Pages) -> None:
    store, model, requests = pages.database(), Model(), list[int]()
    write(store, model, {0: image()})
    wal = store.wal
    wal._notify, wal._notify_bytes, wal._publish_requested = (lambda: requests.append(wal.written.lsn)), 1, False
    for _ in range(3):
        write(store, model, {0: image()})
    assert len(requests) == 1
    wal.publish()
    write(store, model, {0: image()})
    assert len(requests) == 2


def test_readers_see_durable_versions_and_writers_see_written_ones(pages: Pages) -> None:
    """Readers open at the durable version (P7), or at the written one on request (Q2)."""
    store, model = pages.database(), Model()
    write(store, model, {0: image("old")})
    txn = store.begin()
    txn.write_page(0, image("new"))
    guard = txn.commit()
    with store.open_snapshot() as durable, store.open_snapshot(written=True) as written, store.begin() as writer:
        assert durable.read_page(0) == image("old")
        assert written.read_page(0) == writer.read_page(0) == image("new")
        writer.rollback()
    guard.result()
    with store.open_snapshot() as durable:
        assert durable.read_page(0) == image("new")


def test_a_transaction_across_segments_is_published_and_sealed_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_segments(monkeypatch, frames=3)
    pages, model = Pages(tmp_path), Model()
    store = pages.database()
    write(store, model, {page: image() for page in range(8)})
    store.wal.publish()
    states = {number: row.state for number, row in rows(pages).items()}
    assert states == {1: WalState.INDEXED, 2: WalState.INDEXED, 3: WalState.OPEN}
    assert [(row.first_lsn, row.last_lsn) for row in rows(pages).values()][:2] == [(1, 3), (4, 6)]
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()


@pytest.mark.parametrize("reopen", [False, True])
def test_a_segment_that_ends_within_a_transaction_has_a_size_that_loses_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reopen: bool
) -> None:
    """A checkpoint drops what is beyond a segment's size. If that were 0, the size before a growing transaction, or the
    size of a later version, pages would be lost (P15)."""
    small_segments(monkeypatch, frames=3)
    pages, model = Pages(tmp_path), Model()
    store = pages.database()
    write(store, model, {0: image(), 1: image()})  # segment 1: frames 0, 1
    write(store, model, {page: image() for page in range(9)})  # grows: frame 2 of segment 1, all of 2 and 3, and 4
    write(store, model, {0: image()}, truncate=2)
    write(store, model, {page: image() for page in range(6)})
    if reopen:
        pages.crash()
        store = pages.database()
    else:
        store.wal.seal()
        store.wal.publish()
    sizes = [row.size_pages for row in rows(pages).values()]
    lasts = [row.last_lsn for row in rows(pages).values()]
    for size, last in zip(sizes, lasts):
        version = model.at(last)
        later_versions = [later for later in model.versions if later.lsn > last]
        ends_within = version.lsn != last
        assert size == (max(version.size, later_versions[0].size) if ends_within else version.size)
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()


def test_lsns_are_reserved_before_they_are_used_and_never_used_twice(pages: Pages) -> None:
    store, model = pages.database(), Model()
    first = write(store, model, {0: image()}).lsn
    with pages.manifest.read() as txn:
        wal = txn.wal_state(1)
    assert wal is not None
    assert wal.lsn_reserved >= first
    pages.crash()
    second = write(pages.database(), model, {0: image()}).lsn
    assert second > wal.lsn_reserved >= first + LSN_BLOCK


def test_every_version_between_two_publications_can_be_read(pages: Pages) -> None:
    store, model = pages.database(), Model()
    readers = []
    for number in range(20):
        write(store, model, {0: image(), number: image()})
        readers.append(store.open_snapshot())
        if number % 6 == 0:
            store.wal.publish()
    for reader in readers:
        assert_reads(reader, model.at(reader.lsn))
        reader.close()


def test_a_page_that_is_published_leaves_memory(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {page: image() for page in range(50)})
    assert len(store.wal.unpublished) == 50
    assert store.wal.unpublished_bytes == 50 * (PAGE + 64)
    store.wal.publish()
    assert store.wal.unpublished == {}
    assert store.wal.unpublished_bytes == 0


def test_begin_publishes_when_too_much_is_unpublished(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: the index is at most two segments behind, even if no thread waits for commits and no ticker runs."""
    monkeypatch.setattr("quire.pages.pagestore.UNPUBLISHED_MAX", 20 * (PAGE + 64))
    store = pages.database()
    for _ in range(30):
        with store.begin() as txn:
            for page in range(5):
                txn.write_page(page, image())
            txn.commit()
        assert store.wal.unpublished_bytes <= 25 * (PAGE + 64)


def test_an_append_that_fails_halfway_makes_the_database_unusable_and_is_never_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_segments(monkeypatch, frames=3)
    disk = FaultyDisk(OsDisk(), Fault.EIO, operation="write")
    pages, model = Pages(tmp_path, disk=disk), Model()
    store = pages.database()
    write(store, model, {0: image()})
    with store.begin() as txn:
        for page in range(8):
            txn.write_page(page, image())
        with armed("pages.segment.frames", "1*off->raise:EIO"), pytest.raises(StoreUnusable):
            txn.commit()
    with pytest.raises(StoreUnusable):
        store.begin()
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    again = pages.database()
    with again.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    write(again, model, {page: image() for page in range(8)})
    with again.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()


def test_readers_of_a_reopened_database_are_still_protected_and_continue(tmp_path: Path) -> None:
    disk = FaultyDisk(OsDisk(), Fault.EIO, operation="sync", path="*/pages/*")
    pages, model = Pages(tmp_path, disk=disk), Model()
    store = pages.database()
    write(store, model, {0: image(), 1: image()})
    reader = store.open_snapshot().__enter__()
    with store.begin() as txn:
        txn.write_page(0, image())
        guard = txn.commit()
    disk._fail_at = len(disk.calls) + 1
    with pytest.raises(StoreUnusable):
        guard.result()
    again = pages.database()
    assert again is not store
    assert again.readers.floor(10**9) <= reader.lsn
    write(again, model, {0: image(), 1: image()})
    pages.checkpoint(again)
    assert_reads(reader, model.at(reader.lsn))
    reader.close()
    pages.stop()


def test_growing_without_writing_makes_zeros_and_is_bounded(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    """P15: each page that is created is a frame, so growing by millions at once is refused before anything happens."""
    store, model = pages.database(), Model()
    write(store, model, {0: image(), 4: image()})
    with store.open_snapshot() as reader:
        assert reader.read_page(2) == bytes(PAGE)
        assert_reads(reader, model.newest)
    for grow in (2**32 - 2, 10_000_000):
        with pytest.raises(OutOfRange, match="too many pages"), store.begin() as txn:
            txn.write_page(grow, image())
        with pytest.raises(OutOfRange, match="too many pages"), store.begin() as txn:
            txn.truncate(grow)
    assert store.wal.failure is None
    write(store, model, {}, truncate=1000)
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)


@pytest.mark.parametrize("page_size", [512, 1024, 4096, 8192, 16384, 65536])
def test_every_page_size(tmp_path: Path, page_size: int) -> None:
    pages, model = Pages(tmp_path), Model(page_size)
    store = pages.database(page_size=page_size)
    for number in range(4):
        write(store, model, {page: image((number, page), page_size) for page in range(number, number + 9)})
    write(store, model, {20: image("far", page_size)})
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.crash()
    with pages.database().open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()


def test_after_closing_nothing_is_accepted_and_nothing_needs_recovery(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    txn = store.begin()
    txn.write_page(1, image())
    pages.engine.close_database("shop")
    with pytest.raises(StoreClosed):
        txn.commit()
    with pytest.raises(StoreClosed):
        store.begin()
    assert {row.state for row in rows(pages).values()} == {WalState.INDEXED}
    with pages.database().open_snapshot() as reader:
        assert_reads(reader, model.newest)


def test_guards_can_be_awaited(pages: Pages) -> None:
    store = pages.database()

    async def commits() -> list[int]:
        guards = []
        for _ in range(10):
            with store.begin() as txn:
                txn.write_page(0, image())
                guards.append(txn.commit())
        return list(await asyncio.gather(*guards))

    assert asyncio.run(commits()) == list(range(1, 11))
    assert store.wal.durable.lsn == 10


def test_commit_times_never_go_back(pages: Pages) -> None:
    """P14, also across a reopening, whatever the wall clock does."""
    store, model = pages.database(), Model()
    times = []
    for step in (0.0, -3600.0, 10.0):
        pages.clock.jump(step)
        write(store, model, {0: image()})
        times.append(store.wal.durable.commit_ms)
    pages.reopen()
    pages.clock.jump(-7200.0)
    store = pages.database()
    assert store.wal.durable.commit_ms == times[-1]
    write(store, model, {0: image()})
    times.append(store.wal.durable.commit_ms)
    assert times == sorted(times)


def test_after_a_process_fork_the_child_cannot_write_the_parents_wal(pages: Pages) -> None:
    """M12: an append by the child would be written to the parent's segment."""
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    store.wal._append.acquire()  # as if another thread were appending
    child = os.fork()
    if child == 0:
        code = 1
        try:
            store.begin(timeout=1)
        except StoreClosed:
            code = 0
        finally:
            os._exit(code)
    store.wal._append.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    write(store, model, {0: image()})
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)


def test_publication_and_reads_race_without_a_gap(pages: Pages) -> None:
    """P8: a reader that searches memory first and the manifest second misses nothing that moves in between."""
    store, model = pages.database(), Model()
    write(store, model, {page: image() for page in range(8)})
    stop = threading.Event()
    mismatches: list[object] = []

    def read() -> None:
        while not stop.is_set():
            with store.open_snapshot() as reader:
                version = model.at(reader.lsn)
                pages.engine.cache._turn(10**9)  # nothing is served from memory
                for page in range(8):
                    if reader.read_page(page) != version.page(page):
                        mismatches.append((page, reader.lsn))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(150):
        with store.begin() as txn:
            writes = {number % 8: image()}
            txn.write_page(number % 8, writes[number % 8])
            model.commit(store.wal._next_lsn, 8, writes)
            guard = txn.commit()
        guard.result()
        store.wal.publish()
    stop.set()
    for thread in threads:
        thread.join()
    assert not mismatches


def test_bad_pages_are_refused_before_anything_happens(pages: Pages) -> None:
    store = pages.database()
    with store.begin() as txn:
        with pytest.raises(InvalidInput, match="length"):
            txn.write_page(0, b"short")
        for page in (-1, 2**32 - 1, 2**40):
            with pytest.raises(OutOfRange):
                txn.write_page(page, image())
        for size in (0, -5, 2**32):
            with pytest.raises(OutOfRange):
                txn.truncate(size)
        txn.write_page(0, bytearray(image("a")))
        txn.write_page(1, memoryview(image("b")))
    with store.open_snapshot() as reader:
        assert reader.read_pages([0, 1]) == {0: image("a"), 1: image("b")}


def test_the_newest_lsn_stays_negative_if_the_log_fails_during_an_append(pages: Pages) -> None:
    """Hazard: the append overwrote the -1, and readers that look only at this number did not notice that the log had failed."""
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    with armed("pages.segment.frames", lambda _: store.wal._poison(StorageFault("the sync of another thread failed"))):
        store.wal.append({0: image()}, 1, 1)
    assert store.wal.failure is not None
    assert store.wal.newest_lsn[0] == -1
