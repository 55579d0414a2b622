"""Entries are written when their frames are published: after the sync, before the batch (docs/decisions/008)."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from quire.core.errors import Corruption, StorageFault, StoreUnusable
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk
from quire.manifest import tables as t
from quire.manifest.ops.wal import AppendWalChunk
from quire.manifest.records import WalState
from quire.pages import publication
from quire.pages.segment import ENTRY_BYTES, HEADER_BYTES
from quire.pages.segment_file import IndexWriter, SegmentFile
from quire.pages.segment_scan import entries_of, parse_heads, sealed_entries
from quire.testing.crashdisk import CrashDisk, drop_all
from quire.testing.faults import Fault, FaultyDisk
from tests.pages.engine_harness import Model, Pages, assert_reads, image, small_segments, write


def _path(root: str, segment_id: int) -> str:
    return os.path.join(root, f"pages/00000001/wal/{segment_id:08x}.seg")


def _pages_of(root: str, segment_id: int, count: int) -> list[int]:
    """The pages of a segment's first entries, each of which is checked."""
    with SegmentFile.open(OsDisk(), _path(root, segment_id)) as file:
        entries = sealed_entries(file.header, file.read_index(count), count, path=file.path)
    return list(entries["page"].tolist())


def _region(root: str, segment_id: int) -> bytes:
    with SegmentFile.open(OsDisk(), _path(root, segment_id)) as file:
        return file.read_index()


def test_a_commit_is_one_write_and_one_sync(tmp_path: Path) -> None:
    """Only one range of the file is then dirty; a second one makes a sync a third slower."""
    disk = FaultyDisk(OsDisk())
    pages, model = Pages(tmp_path, disk=disk), Model()
    store = pages.database()
    write(store, model, {0: image()})
    for written in ({0: image()}, {page: image() for page in range(16)}):
        disk.calls.clear()
        write(store, model, written)
        assert [operation for operation, _ in disk.calls] == ["write", "sync"]
    assert not any(_region(pages.root, 1))
    pages.stop()


def test_publication_writes_the_entries_of_what_it_publishes_and_no_others(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image(), 3: image()})
    store.wal.publish()
    assert _pages_of(pages.root, 1, 4) == [0, 1, 2, 3], "including the pages that became zeros (P15)"
    indexed = store.wal.durable.lsn
    with store.begin() as txn:
        txn.write_page(1, image())
        txn.commit()
    store.wal.publish()
    assert not any(_region(pages.root, 1)[indexed * ENTRY_BYTES :]), "no entry before the frame is durable"
    store.wal.sync()
    store.wal.publish()
    assert _pages_of(pages.root, 1, indexed + 1)[-1] == 1


def test_entries_are_on_disk_when_their_batch_is_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Power is lost between the two: although nothing unsynced survives, the entries are on disk."""
    small_segments(monkeypatch)
    disk = CrashDisk(str(tmp_path / "disk"))
    pages, model = Pages(tmp_path, disk=disk, root=disk.path("store")), Model()
    store = pages.database()
    write(store, model, {page: image() for page in range(10)})
    crashed_roots: list[str] = []

    def crash(_: str) -> None:
        crashed_roots.append(disk.crash(str(tmp_path / f"after{len(crashed_roots)}"), drop_all).path("store"))

    with armed("pages.wal.publishing", crash):
        store.wal.publish()
    assert _pages_of(crashed_roots[0], 1, 6) == [0, 1, 2, 3, 4, 5]
    assert _pages_of(crashed_roots[0], 2, 4) == [6, 7, 8, 9]
    pages.stop()


def test_recovery_writes_the_entries_of_what_it_publishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_segments(monkeypatch)
    disk = CrashDisk(str(tmp_path / "disk"))
    pages, model = Pages(tmp_path, disk=disk, root=disk.path("store")), Model()
    store = pages.database()
    write(store, model, {page: image() for page in range(4)})
    store.wal.publish()
    write(store, model, {page: image() for page in range(9)})
    crashed_roots: list[str] = []

    def crash(_: str) -> None:
        crashed_roots.append(disk.crash(str(tmp_path / f"after{len(crashed_roots)}"), drop_all).path("store"))

    pages.die()
    pages.start()
    with armed("pages.recovery.published", crash):
        store = pages.database()
    assert crashed_roots, "nothing was published"
    for root in (pages.root, crashed_roots[0]):
        assert _pages_of(root, 1, 6) == [0, 1, 2, 3, 0, 1]
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()


def test_entries_without_their_batch_are_not_trusted(pages: Pages) -> None:
    """Entries were written, the batch was not committed, and the frames turn out to be torn: the commit never
    happened."""
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    version = model.newest
    with store.begin() as txn:
        txn.write_page(0, image())
        txn.commit()
    with SegmentFile.open(OsDisk(), _path(pages.root, 1)) as file:
        heads = b"".join([file.read_raw(number, 1)[:64] for number in range(2)])
        with IndexWriter(OsDisk(), file.path, file.header) as index:
            index.write(0, entries_of(file.header, parse_heads(heads)).tobytes())
        offset = file.header.geometry.frame_offset(1)
    with OsDisk().open(_path(pages.root, 1)) as raw:
        raw.write_at(b"torn", offset + 100)
    pages.crash()
    with pages.database().open_snapshot() as reader:
        assert_reads(reader, version)


@pytest.mark.parametrize("operation", ["write", "sync"])
@pytest.mark.parametrize("fault", [Fault.EIO, Fault.LOST_ANSWER])
def test_entries_that_cannot_be_written_make_the_database_unusable(
    tmp_path: Path, operation: str, fault: Fault
) -> None:
    """M12: the state of the disk is unknown. Durable versions can be read, also after the next open."""
    disk = FaultyDisk(OsDisk(), fault, operation=operation, path="*/pages/00000001/*")
    pages, model = Pages(tmp_path, disk=disk), Model()
    store = pages.database()
    write(store, model, {0: image()})
    earlier = model.newest
    write(store, model, {0: image(), 1: image()})
    disk._fail_at = len(disk.calls) + 1
    with pytest.raises(StorageFault):
        store.wal.publish()
    with pytest.raises(StoreUnusable):
        store.begin()
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    with pytest.raises(StoreUnusable):  # an incomplete region must not answer
        store.open_snapshot(at=earlier.lsn)
    store = pages.database()
    with store.open_snapshot(at=earlier.lsn) as reader:
        assert_reads(reader, earlier)
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()


def test_a_region_that_cannot_be_opened_has_no_other_effect(tmp_path: Path) -> None:
    disk = FaultyDisk(OsDisk(), Fault.EIO, operation="open", path="*/pages/00000001/wal/*")
    pages, model = Pages(tmp_path, disk=disk), Model()
    store = pages.database()
    write(store, model, {0: image()})
    disk._fail_at = len(disk.calls) + 1
    with pytest.raises(StorageFault):
        store.wal.publish()
    write(store, model, {0: image()})
    assert store.wal.publish() == 2
    pages.stop()


def test_a_segment_missing_at_publication_is_reported(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    os.rename(_path(pages.root, 1), _path(pages.root, 1) + ".away")
    with pytest.raises(Corruption) as caught:
        store.wal.publish()
    assert caught.value.where["segment_id"] == 1
    os.rename(_path(pages.root, 1) + ".away", _path(pages.root, 1))
    assert store.wal.publish() == 1


def test_earlier_versions_that_are_not_published_yet_are_found(pages: Pages) -> None:
    """They are searched in the region, which has no entries for them until they are published."""
    store, model = pages.database(), Model()
    for _ in range(5):
        write(store, model, {0: image()})
    assert not any(_region(pages.root, 1))
    with store.open_snapshot(at=model.versions[2].lsn) as reader:
        assert_reads(reader, model.versions[2])


def _damage_entry(pages: Pages, frame: int) -> None:
    with OsDisk().open(_path(pages.root, 1)) as raw:
        raw.write_at(b"damage", HEADER_BYTES + ENTRY_BYTES * frame + 3)


def test_a_damaged_entry_of_a_published_frame_is_corruption(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image(), 1: image()})
    store.wal.publish()
    _damage_entry(pages, 1)
    pages.crash()
    with pytest.raises(Corruption) as caught:
        pages.database()
    assert (caught.value.where["segment_id"], caught.value.where["frame"]) == (1, 1)


def test_a_damaged_entry_of_an_unpublished_frame_is_rewritten(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image(), 1: image()})
    store.wal.publish()
    write(store, model, {0: image()})
    _damage_entry(pages, 2)
    pages.crash()
    with pages.database().open_snapshot() as reader:
        assert_reads(reader, model.newest)
    assert _pages_of(pages.root, 1, 3) == [0, 1, 0]


def test_databases_that_are_published_in_one_tick_share_commits(pages: Pages) -> None:
    """Each database waited for its own commit: with a thousand active ones a round took many seconds."""
    stores = [pages.database(f"db-{number}") for number in range(20)]
    for store in stores:
        write(store, Model(), {0: image()})
    started = threading.Event()
    groups: list[int] = []
    writer = pages.manifest.writer
    commit = writer._commit

    def count_groups(group: list[Any]) -> None:
        groups.append(len(group))
        if not started.is_set():
            started.set()
            time.sleep(0.2)  # so that the others queue behind the first, as behind a disk sync
        commit(group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "_commit", count_groups)
        pages.clock.advance(10.0)
        pages.engine.tick_all()
    assert all(not store.wal.unpublished_bytes for store in stores)
    assert sum(groups) == 20
    assert len(groups) < 20


@contextmanager
def _interrupt_at_line(number: int) -> Iterator[list[str]]:
    """Raise `KeyboardInterrupt` at the `number`th line that publication executes; yield the lines that were executed."""
    lines: list[str] = []

    def trace(frame: FrameType, event: str, _: object) -> Any:
        # A write of entries whose outcome is unknown ends the WAL (M12): not what is tested here.
        if frame.f_code.co_filename != publication.__file__ or frame.f_code.co_name == "_index":
            return None
        # The line of a `with` is also traced before its exit, where Python handles no signals.
        if event == "line" and not getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            lines.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
            if len(lines) == number:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def test_publication_completes_after_an_interrupt_at_any_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: after Ctrl-C while a seal was awaited, every later call tried to seal the segment again and was refused: nothing
    was sealed any more, checkpoints found nothing, and the WAL budget filled up. Pieces that were being counted were counted
    twice, or were in no batch any more."""
    small_segments(monkeypatch)
    pages, model = Pages(tmp_path), Model()
    store = pages.database()
    for number in itertools.count(1):
        write(store, model, {0: image()})
        write(store, model, {page: image() for page in range(8)})
        with _interrupt_at_line(number) as lines, suppress(KeyboardInterrupt):
            pages.engine.flush(store.db_id)
        pages.engine.flush(store.db_id)
        assert store.wal.is_quiescent, lines[-1]
        with pages.manifest.read() as txn:
            assert all(row.state >= WalState.INDEXED for _, row in txn.scan(t.WAL_CATALOG, store.db_id)), lines[-1]
        with store.open_snapshot() as reader:
            assert_reads(reader, model.newest)
        if len(lines) < number:
            break
    assert number > 50
    pages.checkpoint(store)
    with pages.manifest.read() as txn:
        wal = txn.wal_state(store.db_id)
    assert wal is not None
    assert wal.checkpointed_lsn == model.newest.lsn
    pages.stop()


def test_a_seal_that_an_interrupted_call_has_queued_is_not_refused_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: the batch of the interrupted call commits after the next call has looked at the row."""
    pages, model = Pages(tmp_path), Model()
    store = pages.database()
    write(store, model, {0: image()})
    submit, queued = pages.manifest.submit, list[Any]()

    def submit_late(ops: Any) -> Any:
        if any(isinstance(op, AppendWalChunk) for op in ops):
            if not queued:
                queued.append(ops)
                raise KeyboardInterrupt
            submit(queued[0])
        return submit(ops)

    with monkeypatch.context() as patch:
        patch.setattr(pages.manifest, "submit", submit_late)
        with pytest.raises(KeyboardInterrupt):
            pages.engine.flush(store.db_id)
        pages.engine.flush(store.db_id)
    assert store.wal.is_quiescent
    pages.stop()
