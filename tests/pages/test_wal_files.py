"""Creation of segments: all or nothing, recycled where possible, ids never reused."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import StoreUnusable
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk
from quire.manifest.ops.wal import OpenSegment
from quire.manifest.records import JobKind, WalState
from quire.pages.view import ViewReader
from quire.testing.faults import Fault, FaultyDisk
from tests.pages.engine_harness import (
    GRACE_SECONDS,
    Model,
    Pages,
    assert_reads,
    image,
    segment_bytes,
    small_segments,
    write,
)
from tests.pages.test_wal import rows


def _files(pages: Pages, db_id: int = 1) -> set[str]:
    return set(os.listdir(os.path.join(pages.root, f"pages/{db_id:08x}/wal")))


def _inodes(pages: Pages) -> set[int]:
    folder = Path(pages.root) / "pages/00000001/wal"
    return {path.stat().st_ino for path in folder.iterdir()}


@pytest.fixture
def small_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pages:
    small_segments(monkeypatch, frames=6)
    return Pages(tmp_path)


def test_files_of_truncated_segments_are_recycled(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {page: image() for page in range(12)})
    before = _inodes(pages)
    pages.checkpoint(store)
    assert {row.state for row in rows(pages).values()} == {WalState.TRUNCATED}
    write(store, model, {page: image() for page in range(12)})
    assert store.wal.recycled == 2
    assert _inodes(pages) == before
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.clock.advance(GRACE_SECONDS + 1)
    pages.run(JobKind.CHECKPOINT, store.db_id)  # the delete job finds the names gone, which is a success
    assert 1 not in rows(pages)
    pages.crash()
    with pages.database().open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()


def test_a_file_that_a_snapshot_needs_is_not_recycled(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {page: image() for page in range(12)})
    snapshot_version = model.newest
    pages.engine.snapshot("shop", "kept")
    pages.checkpoint(store)
    write(store, model, {page: image() for page in range(12)})
    assert store.wal.recycled == 0
    assert_reads(pages.engine.open_view("shop", "kept"), snapshot_version)
    pages.manifest.snapshots.drop("shop", "kept")
    write(store, model, {page: image() for page in range(12)})
    assert store.wal.recycled == 2
    pages.stop()


def test_a_reader_of_a_recycled_file_looks_its_page_up_again(small_pages: Pages) -> None:
    """P8: it finds another salt there, and then reads the chunk."""
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {page: image() for page in range(6)})
    segment = pages.engine.sources.segment(store.db_id, 1)  # an open handle on the file of segment 1
    with store.open_snapshot() as reader:
        pages.checkpoint(store)
        write(store, model, {page: image() for page in range(6)})
        assert store.wal.recycled == 1
        assert segment.header.segment_id == 1
        pages.engine.cache._turn(10**9)
        assert_reads(reader, model.at(reader.lsn))
    pages.stop()


@pytest.mark.parametrize("operation", ["open", "rename", "write", "sync", "sync_dir"])
def test_a_file_that_cannot_be_recycled_is_replaced_by_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    small_segments(monkeypatch, frames=6)
    disk = FaultyDisk(OsDisk(), Fault.EIO, operation=operation, path="*/pages/*")
    pages, model = Pages(tmp_path, disk=disk), Model()
    store = pages.database()
    write(store, model, {page: image() for page in range(6)})
    pages.checkpoint(store)
    disk._fail_at = len(disk.calls) + 1
    write(store, model, {page: image() for page in range(6)})
    assert disk.fired
    assert store.wal.failure is None
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()


def test_a_busy_database_has_its_next_file_ready(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {0: image()})
    assert not store.wal.prepare(), "the segment is not half full"
    write(store, model, {page: image() for page in range(4)})
    assert store.wal.prepare()
    assert not store.wal.prepare(), "one spare is enough"
    assert "00000000.seg" in _files(pages)
    write(store, model, {page: image() for page in range(6)})
    assert store.wal.recycled == 1
    assert "00000000.seg" not in _files(pages)
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    assert store.wal.prepare()
    pages.crash()
    assert "00000000.seg" in _files(pages)
    pages.database()
    assert "00000000.seg" not in _files(pages), "a spare of an earlier process is garbage"
    pages.stop()


def test_a_spare_being_prepared_does_not_replace_one_being_recycled(small_pages: Pages) -> None:
    """Found by SIGKILL: the writer renamed the file that the ticker had just put there, and continued without a
    header."""
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {page: image() for page in range(5)})
    assert store.wal.prepare()
    preparers: list[threading.Thread] = []

    def prepare_meanwhile(_: str) -> None:
        preparers.append(threading.Thread(target=lambda: store.wal._maker.prepare(10**9)))
        preparers[-1].start()
        preparers[-1].join(0.2)

    with armed("pages.segment.recycled", prepare_meanwhile):
        write(store, model, {page: image() for page in range(5)})
    for preparer in preparers:
        preparer.join()
    assert preparers
    pages.crash()
    with pages.database().open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()


def test_a_refused_segment_leaves_no_file_and_no_row(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {0: image()})
    with armed("pages.wal.made", "raise:EIO"), pytest.raises(OSError, match="failpoint"):
        write(store, Model(), {page: image() for page in range(20)})
    assert store.wal.failure is None
    assert _files(pages) == {"00000001.seg"}
    write(store, model, {page: image() for page in range(20)})
    pages.stop()


def test_if_a_commit_is_in_doubt_its_ids_are_not_reused_and_its_rows_are_discarded(
    small_pages: Pages,
) -> None:
    """A row that stays open would block every checkpoint; an id that is used twice would give two files one name."""
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {page: image() for page in range(6)})
    submit = pages.manifest.submit

    class Interrupted(BaseException):
        pass

    class InterruptedGuard:
        """A guard whose wait is interrupted although its batch commits."""

        def __init__(self, guard: object) -> None:
            self.guard = guard

        def result(self) -> None:
            self.guard.result()  # type: ignore[attr-defined]
            raise Interrupted

    pages.manifest.submit = lambda ops: InterruptedGuard(submit(ops))  # type: ignore[assignment, return-value]
    with pytest.raises(Interrupted), store.begin() as txn:
        txn.write_page(0, image())
    pages.manifest.submit = submit
    assert store.wal.failure is None
    assert rows(pages)[2].state is WalState.OPEN
    write(store, model, {page: image() for page in range(6)})
    assert rows(pages)[2].state is WalState.TRUNCATED
    assert rows(pages)[3].state is WalState.OPEN
    pages.checkpoint(store)
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.crash()
    with pages.database().open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()


def test_a_commit_whose_frames_cannot_be_written_leaves_no_new_segment(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {0: image()})
    before = _files(pages)
    with pytest.raises(StoreUnusable), armed("pages.segment.frames", "raise:EIO"), store.begin() as txn:
        txn.write_page(0, image())
    assert _files(pages) == before
    pages.die()


def test_an_interrupt_after_new_segments_are_queued_leaves_their_files(
    small_pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: the files were deleted while the batch with their rows was in the queue. It committed, and if the process ended
    then, the database could not be opened any more, not even with `salvage`."""
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {0: image()})
    submit = pages.manifest.submit

    def interrupted(ops: Any) -> Any:
        guard = submit(ops)
        if any(isinstance(op, OpenSegment) for op in ops):
            raise KeyboardInterrupt
        return guard

    with monkeypatch.context() as patch:
        patch.setattr(pages.manifest, "submit", interrupted)
        txn = store.begin()
        for page in range(12):
            txn.write_page(page, image())
        with pytest.raises(KeyboardInterrupt):
            txn.commit()
    pages.crash()
    store = pages.database()
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    write(store, model, {page: image() for page in range(12)})
    pages.stop()


def test_a_file_of_a_version_that_is_lent_during_the_search_is_not_recycled(
    small_pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: leases were read before the rows. If a version was lent and checkpointed in between, the rows showed that its
    file was not needed, and its lease was not known: the file was overwritten under its reader."""
    pages, model, store = small_pages, Model(), small_pages.database()
    version = write(store, model, {page: image() for page in range(12)})
    leases, lent = pages.manifest.leases, list[ViewReader]()
    kept_since = leases.kept_since

    def lend_and_checkpoint(db_id: int) -> tuple[int, int] | None:
        known = kept_since(db_id)
        if not lent:
            _, (view,) = pages.engine.lend(["shop"], 600)
            lent.append(view.open(pages.engine.sources))
            pages.checkpoint(store)
        return known

    monkeypatch.setattr(leases, "kept_since", lend_and_checkpoint)
    assert store.wal._maker._find_recyclable(segment_bytes(6)) is None
    assert {row.state for row in rows(pages).values()} == {WalState.TRUNCATED}
    assert_reads(lent[0], version)
    pages.stop()
