"""Every call of the disk fails once, in every way: its database is unusable or untouched, others continue (M12)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.core.errors import DiskFull, LeaseExpired, QuireError, StorageFault, StoreUnusable
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk
from quire.pages.pagestore import PageStore
from quire.pages.segment_file import SegmentFile
from quire.testing.faults import Fault, FaultyDisk, each_fault
from quire.testing.manifest import assert_clean
from tests.pages.engine_harness import Model, Pages, assert_reads, image, small_segments, write

WAL_OF_FIRST = "*/pages/00000001/*"


def _run_workload(store: PageStore, model: Model, pages: Pages) -> None:
    """Commits within a segment, across segments, sealing, publishing."""
    write(store, model, {0: image(), 1: image()})
    write(store, model, {page: image() for page in range(10)})
    store.wal.seal()
    store.wal.publish()
    write(store, model, {3: image()}, truncate=5)
    pages.clock.advance(2.0)
    pages.engine.tick(store)
    write(store, model, {page: image() for page in range(14)})


def _attempt(store: PageStore, model: Model, pages: Pages) -> QuireError | None:
    """Run the workload; a commit that fails may or may not have happened, and the model keeps both possibilities."""
    try:
        _run_workload(store, model, pages)
    except QuireError as error:
        return error
    return None


@pytest.mark.parametrize(
    "fault",
    [
        Fault.EIO,
        pytest.param(Fault.ENOSPC, marks=pytest.mark.slow),
        Fault.SHORT_WRITE,
        pytest.param(Fault.LOST_ANSWER, marks=pytest.mark.slow),
    ],
)
def test_any_fault_leaves_its_database_unusable_or_untouched_and_the_other_unaffected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    small_segments(monkeypatch)
    for number, disk in enumerate(each_fault(OsDisk, fault, path=WAL_OF_FIRST)):
        base = tmp_path / str(number)
        base.mkdir()
        pages = Pages(base, disk=disk)
        other_model, model = Model(), Model()
        try:
            faulted = pages.database("first")
        except StorageFault:
            assert disk.fired
            faulted = pages.database("first")
        other = pages.database("second")
        error = _attempt(faulted, model, pages)
        assert (error is not None) <= disk.fired
        disk._fail_at = 0  # the disk works from here on
        acknowledged = model.newest
        if faulted.wal.failure is None:
            # A clean refusal: the next commit succeeds.
            assert error is None or isinstance(error, StorageFault), error
            write(faulted, model, {1: image("after")})
            acknowledged = model.newest
        else:
            with pytest.raises(StoreUnusable):
                faulted.begin()
            with faulted.open_snapshot() as reader:
                assert_reads(reader, model.at(reader.lsn))
        _run_workload(other, other_model, pages)
        with other.open_snapshot() as reader:
            assert_reads(reader, other_model.newest)
        again = pages.engine.open("first")
        assert (again is faulted) == (faulted.wal.failure is None)
        with again.open_snapshot() as reader:
            # Acknowledged commits are there; the failed commit is there completely or not at all.
            if reader.lsn == acknowledged.lsn:
                assert_reads(reader, acknowledged)
            else:
                assert reader.lsn > acknowledged.lsn
        durable_lsn = again.durable_version()[0]
        model.versions = [version for version in model.versions if version.lsn <= durable_lsn]
        with again.begin() as txn:
            txn.write_page(0, image("mended"))
        with again.open_snapshot() as reader:
            assert reader.read_page(0) == image("mended")
        pages.stop()


def test_a_full_disk_while_a_segment_is_created_is_disk_full_and_damages_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M12: nothing is poisoned, nothing is left behind, and a large transaction is refused as a whole."""
    small_segments(monkeypatch)
    disk = FaultyDisk(OsDisk(), Fault.ENOSPC, operation="allocate")
    pages, model = Pages(tmp_path, disk=disk), Model()
    store = pages.database()
    write(store, model, {0: image()})
    for nth in range(1, 4):  # of the several segments that the transaction needs
        disk._fail_at = len(disk.calls) + nth
        with pytest.raises(DiskFull):
            write(store, Model(), {page: image() for page in range(30)})
        assert store.wal.failure is None
        files = list((Path(pages.root) / "pages/00000001/wal").iterdir())
        assert len(files) == 1, "files of segments that were not needed are removed"
        with store.open_snapshot() as reader:
            assert_reads(reader, model.newest)
    write(store, model, {page: image() for page in range(30)})
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.reopen()
    with pages.database().open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()


def test_a_failed_sync_is_reported_to_all_waiters_and_its_commits_are_never_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyDisk(OsDisk(), Fault.EIO, operation="sync", path=WAL_OF_FIRST)
    pages, model = Pages(tmp_path, disk=disk), Model()
    store = pages.database()
    write(store, model, {0: image()})
    guards = []
    for _ in range(3):
        txn = store.begin()
        txn.write_page(0, image())
        guards.append(txn.commit())
    disk._fail_at = len(disk.calls) + 1
    for guard in guards:
        with pytest.raises(StoreUnusable):
            guard.result()
        assert not guard.done()
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    assert pages.engine.open("shop") is not store
    pages.stop()


def test_closing_after_a_failure_closes_every_file(tmp_path: Path) -> None:
    disk = FaultyDisk(OsDisk(), Fault.EIO, operation="sync")
    pages = Pages(tmp_path, disk=disk)
    for name in ("one", "two"):
        store = pages.database(name)
        txn = store.begin()
        txn.write_page(0, image())
        txn.commit()
    disk._fail_at = len(disk.calls) + 1
    with pytest.raises(StoreUnusable):
        pages.engine.close()
    assert not pages.engine.stores()
    assert_clean(pages.manifest)
    pages.manifest.close()
    pages.start()
    assert pages.database("two").durable_version()[1] == 1
    pages.stop()


def test_a_publication_of_the_failed_engine_does_not_interfere_with_recovery(tmp_path: Path) -> None:
    """The ticker sealed a segment that recovery of the failed database was about to seal, and the database did not
    open."""
    disk = FaultyDisk(OsDisk(), Fault.EIO, operation="sync", path=WAL_OF_FIRST)
    pages, model = Pages(tmp_path, disk=disk), Model()
    former = pages.database("first")
    write(former, model, {0: image(), 1: image()})
    former.wal.seal()
    write(former, model, {1: image()})
    txn = former.begin()
    txn.write_page(0, image())
    disk._fail_at = len(disk.calls) + 1
    with pytest.raises(StoreUnusable):
        txn.commit().result()
    disk._fail_at = 0
    published: list[int] = []
    with armed("pages.recovery.sealing", lambda _: published.append(former.wal.publish())):
        again = pages.engine.open("first")
    assert set(published) == {0}, "only recovery publishes"
    write(again, model, {1: image("after")})
    pages.stop()


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_reader_of_a_written_version_never_reads_another_one_after_a_failed_sync(
    tmp_path: Path, is_lost: bool
) -> None:
    """Hazard: the frames of a written version were lost when its sync failed, and recovery cut it. Its reader went on with the
    version before: some of its pages were of one version, some of the other."""
    disk = FaultyDisk(OsDisk(), Fault.EIO, operation="sync", path=WAL_OF_FIRST)
    pages, model = Pages(tmp_path, disk=disk), Model()
    store = pages.database("first")
    durable = write(store, model, {0: image(), 1: image()})
    at_durable = store.open_snapshot()
    txn, images = store.begin(), {0: image(), 1: image()}
    for page, data in images.items():
        txn.write_page(page, data)
    guard = txn.commit()
    written = model.commit(guard.lsn, 2, images)
    at_written = store.open_snapshot(written=True)
    assert at_written.read_page(0) == images[0]
    disk._fail_at = len(disk.calls) + 1
    with pytest.raises(StoreUnusable):
        guard.result()
    disk._fail_at = 0
    if is_lost:
        (path,) = Path(pages.root).rglob("*.seg")
        with SegmentFile.open(OsDisk(), str(path)) as file:
            lost_from = file.header.geometry.frame_offset(2)
        os.truncate(path, lost_from)
    pages.engine.open("first")
    assert_reads(at_durable, durable)
    if is_lost:
        for page in range(2):
            with pytest.raises(LeaseExpired):
                at_written.read_page(page)
    else:
        assert_reads(at_written, written)
    pages.stop()
