"""Recovery: what is kept, what is discarded, what is refused, and how to read the rest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.core.errors import Corruption, ReadOnly
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk
from quire.manifest import tables as t
from quire.manifest.ops.wal import AppendWalChunk
from quire.manifest.records import WalState
from quire.pages.segment_file import SegmentFile
from tests.pages.engine_harness import Model, Pages, assert_reads, image, small_segments, write
from tests.pages.test_wal import index, rows


@pytest.fixture
def small_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pages:
    small_segments(monkeypatch, frames=6)
    return Pages(tmp_path)


def _path(pages: Pages, segment_id: int) -> str:
    return os.path.join(pages.root, f"pages/00000001/wal/{segment_id:08x}.seg")


def _overwrite(pages: Pages, segment_id: int, frame: int, offset_in_frame: int = 200, data: bytes = b"damage") -> None:
    """Damage a frame's page."""
    with SegmentFile.open(OsDisk(), _path(pages, segment_id)) as file:
        offset = file.header.geometry.frame_offset(frame)
    with OsDisk().open(_path(pages, segment_id)) as raw:
        raw.write_at(data, offset + offset_in_frame)


def test_a_database_is_unchanged_after_a_kill(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    for number in range(9):
        write(store, model, {number: image(), 0: image()})
    pages.crash()
    assert index(pages) == []
    store = pages.database()
    assert {row.state for row in rows(pages).values()} == {WalState.INDEXED}
    assert len(index(pages)) == 17
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()


def test_an_unfinished_transaction_is_discarded_and_nothing_is_appended_after_it(small_pages: Pages) -> None:
    """P4: frames behind the cut would become valid again at the second crash."""
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {0: image()})
    with store.begin() as txn:
        txn.write_page(1, image())
        store.wal.append({1: image()}, 2, 1)
    _overwrite(pages, 1, 1)
    pages.crash()
    store = pages.database()
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    row = rows(pages)[1]
    assert (row.frame_count, row.last_lsn) == (1, 1)
    write(store, model, {0: image()})
    assert rows(pages)[2].state is WalState.OPEN
    pages.crash()
    with pages.database().open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()


def test_segments_after_a_cut_segment_are_discarded(small_pages: Pages) -> None:
    """They do not reappear when recovery itself is interrupted."""
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {0: image()})
    for _ in range(3):  # unsynced: they may be lost in any order
        with store.begin() as txn:
            for page in range(4):
                txn.write_page(page, image())
            txn.commit()
    assert sorted(rows(pages)) == [1, 2, 3]
    _overwrite(pages, 1, 2)  # the first of them is torn, the later ones are intact

    class ProcessDied(BaseException):
        pass

    def die(_: str) -> None:
        raise ProcessDied

    for point in ("pages.recovery.published", "pages.recovery.sealing", "pages.recovery.sealed"):
        pages.crash()
        with armed(point, die), pytest.raises(ProcessDied):
            pages.database()
    pages.crash()
    store = pages.database()
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    assert {number: row.state for number, row in rows(pages).items()} == {
        1: WalState.INDEXED,
        2: WalState.TRUNCATED,
        3: WalState.TRUNCATED,
    }
    pages.stop()


def test_a_transaction_that_continues_in_the_next_segment_is_complete_or_absent(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {0: image()})
    with store.begin() as txn:
        writes = {page: image() for page in range(10)}
        for page, data in writes.items():
            txn.write_page(page, data)
        guard = txn.commit()
    store.wal.sync()
    model.commit(guard.lsn, 10, writes)
    pages.crash()
    with pages.database().open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()


def test_damage_to_synced_frames_is_located_corruption_and_spares_other_databases(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    other, other_model = pages.database("other"), Model()
    write(other, other_model, {0: image()})
    for _ in range(3):
        write(store, model, {0: image(), 1: image()})
    _overwrite(pages, 1, 3)  # a later commit proves that it was synced
    pages.crash()
    with pytest.raises(Corruption) as caught:
        pages.database()
    where = caught.value.where
    assert (where["segment_id"], where["frame"], where["page"]) == (1, 3, 1)
    with pages.database("other").open_snapshot() as reader:
        assert_reads(reader, other_model.newest)
    with pytest.raises(Corruption):
        pages.database()
    pages.stop()


def test_the_rest_of_a_damaged_database_can_be_read_without_changing_it(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {0: image(), 1: image()})
    store.wal.publish()
    published = model.newest
    for _ in range(2):
        write(store, model, {0: image()})
    _overwrite(pages, 1, 2)
    pages.crash()
    with pytest.raises(Corruption):
        pages.database()
    before = Path(_path(pages, 1)).read_bytes()
    damaged = pages.engine.open_damaged("shop")
    with damaged.open_snapshot() as reader:
        assert_reads(reader, published)
    with pytest.raises(ReadOnly):
        damaged.begin()
    assert Path(_path(pages, 1)).read_bytes() == before
    pages.stop()


def test_salvage_cuts_the_damage_off_and_reports_the_loss(
    small_pages: Pages, capsys: pytest.CaptureFixture[str]
) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    for _ in range(4):
        write(store, model, {0: image()})
    _overwrite(pages, 1, 2)
    pages.crash()
    with pytest.raises(Corruption):
        pages.database()
    store = pages.engine.open("shop", salvage=True)
    assert "wal.salvaged" in capsys.readouterr().err
    with store.open_snapshot() as reader:
        assert_reads(reader, model.versions[2])
    model.forget_after(model.versions[2].lsn)
    write(store, model, {0: image()})
    pages.crash()
    with pages.database().open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()


def test_a_missing_segment_is_corruption_of_its_database_alone(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {0: image()})
    pages.crash()
    os.rename(_path(pages, 1), _path(pages, 1) + ".away")
    with pytest.raises(Corruption) as caught:
        pages.database()
    assert caught.value.where["segment_id"] == 1
    pages.database("other")
    os.rename(_path(pages, 1) + ".away", _path(pages, 1))
    with pages.database().open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()


def test_files_without_rows_are_garbage(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {0: image()})
    pages.crash()
    Path(_path(pages, 99)).write_bytes(b"of a segment that was never entered")
    Path(_path(pages, 1)).with_name("notes.txt").write_text("of a person")
    pages.database()
    assert sorted(os.listdir(os.path.dirname(_path(pages, 1)))) == ["00000001.seg", "notes.txt"]
    pages.stop()


def test_an_open_segment_without_frames_is_discarded(small_pages: Pages) -> None:
    pages, store = small_pages, small_pages.database()
    store.wal._maker.make(1, 1)[0].close()
    assert rows(pages)[1].state is WalState.OPEN
    pages.crash()
    pages.database()
    assert rows(pages)[1].state is WalState.TRUNCATED
    pages.stop()


def test_a_sealed_segment_that_is_not_indexed_is_indexed(small_pages: Pages) -> None:
    """The page-versions document: the segment's own index region is sufficient."""
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {0: image(), 1: image()})
    write(store, model, {0: image(), 7: image()})
    with SegmentFile.open(OsDisk(), _path(pages, 1)) as file:
        used = file.header.geometry.frame_offset(6)
    with SegmentFile.open(OsDisk(), _path(pages, 2)) as file:
        rest = file.header.geometry.frame_offset(3)
    first_lsn, last = rows(pages)[2].first_lsn, model.newest.lsn
    pages.manifest.submit(
        [
            AppendWalChunk(1, 0, 1, 0, 1, first_lsn - 1, used, 6, 8),
            AppendWalChunk(1, 0, 2, 0, first_lsn, last, rest, last - first_lsn + 1, 8),
        ]
    ).result()
    assert {row.state for row in rows(pages).values()} == {WalState.SEALED}
    pages.crash()
    with pages.database().open_snapshot() as reader:
        assert_reads(reader, model.newest)
    assert {row.state for row in rows(pages).values()} == {WalState.INDEXED}
    pages.stop()


def test_recovery_of_a_large_transaction_publishes_in_steps(
    small_pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.pages.recovery.PUBLISH_ROWS", 4)
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {page: image() for page in range(40)})
    with pages.manifest.read() as txn:
        before = txn.feed_bounds()[1]
    pages.crash()
    with pages.database().open_snapshot() as reader:
        assert_reads(reader, model.newest)
    with pages.manifest.read() as txn:
        assert txn.feed_bounds()[1] - before > 10
        assert txn.count(t.PAGE_VERSION_INDEX) == 40
    pages.stop()
