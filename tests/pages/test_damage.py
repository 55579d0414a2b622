"""Bytes that change on disk after they were synced: the damage is located exactly, limited to its page, and never
returned."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import Corruption
from quire.durable.files import OsDisk
from quire.pages.segment_file import SegmentFile
from tests.pages.engine_harness import PAGE, Model, Pages, Version, assert_reads, image, small_segments, write


@pytest.fixture
def small_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pages:
    small_segments(monkeypatch, frames=6)
    return Pages(tmp_path)


def _flip(pages: Pages, segment_id: int, offset: int) -> None:
    path = os.path.join(pages.root, f"pages/00000001/wal/{segment_id:08x}.seg")
    with OsDisk().open(path) as raw:
        raw.write_at(bytes([raw.read_at(1, offset)[0] ^ 0x40]), offset)


def _frame_offset(pages: Pages, segment_id: int, frame: int) -> int:
    path = os.path.join(pages.root, f"pages/00000001/wal/{segment_id:08x}.seg")
    with SegmentFile.open(OsDisk(), path) as file:
        return file.header.geometry.frame_offset(frame)


def _forget_everything(pages: Pages) -> None:
    pages.engine.cache._turn(10**9)
    pages.engine.cache._turn(10**9)
    pages.engine.sources.close()


@pytest.mark.parametrize("published", [False, True])
def test_a_damaged_frame_is_corruption_of_its_page_and_of_nothing_else(small_pages: Pages, published: bool) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {page: image() for page in range(10)})
    other, other_model = pages.database("other"), Model()
    write(other, other_model, {0: image()})
    if published:
        store.wal.seal()
        store.wal.publish()
    _flip(pages, 1, _frame_offset(pages, 1, 4) + 64 + 100)
    with store.open_snapshot() as reader:
        for page in range(10):
            if page != 4:
                assert reader.read_page(page) == model.newest.page(page)
        for call in (lambda: reader.read_page(4), lambda: reader.read_pages(range(10)), lambda: dict(reader.scan())):
            with pytest.raises(Corruption) as caught:
                call()
            where = caught.value.where
            assert (where["db_id"], where["segment_id"], where["frame"], where["page"]) == (1, 1, 4, 4)
        assert reader.read_pages([0, 9]) == {page: model.newest.page(page) for page in (0, 9)}
    with other.open_snapshot() as reader:
        assert_reads(reader, other_model.newest)
    write(store, model, {4: image()})
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    _flip(pages, 1, _frame_offset(pages, 1, 4) + 64 + 100)
    pages.stop()


def test_a_moved_frame_is_not_accepted(small_pages: Pages) -> None:
    """Each frame's checksum depends on its position: a valid frame elsewhere is not valid."""
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {page: image() for page in range(4)})
    path = os.path.join(pages.root, "pages/00000001/wal/00000001.seg")
    with OsDisk().open(path) as raw:
        frame = raw.read_at(64 + PAGE, _frame_offset(pages, 1, 0))
        raw.write_at(frame, _frame_offset(pages, 1, 2))
    with store.open_snapshot() as reader, pytest.raises(Corruption):
        reader.read_page(2)
    pages.die()


def test_a_frame_is_read_twice_before_it_is_reported_as_damaged(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {0: image()})
    offset = _frame_offset(pages, 1, 0) + 64 + 100
    _flip(pages, 1, offset)
    original, calls = pages.engine.sources.version, list[object]()

    def version(*args: object, **options: object) -> bytes:
        if calls:
            _flip(pages, 1, offset)
        calls.append(args)
        return original(*args, **options)  # type: ignore[arg-type]

    pages.engine.sources.version = version  # type: ignore[method-assign]
    with store.open_snapshot() as reader:
        assert reader.read_page(0) == model.newest.page(0)
    assert len(calls) == 2
    pages.stop()


@given(data=st.data())
def test_whatever_byte_changes_no_reader_gets_a_page_that_was_never_written(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """The rest of the database and every other version is read as before; after a restart the same holds, or opening
    fails."""
    patch = pytest.MonkeyPatch()
    small_segments(patch)
    pages, model = Pages(tmp_path_factory.mktemp("damage")), Model()
    try:
        store = pages.database()
        for number in range(4):
            write(store, model, {page: image() for page in range(number, number + 4)})
            if data.draw(st.booleans()):
                store.wal.publish()
        segment_id = data.draw(st.integers(1, 3))
        path = os.path.join(pages.root, f"pages/00000001/wal/{segment_id:08x}.seg")
        _flip(pages, segment_id, data.draw(st.integers(0, os.path.getsize(path) - 1)))
        _forget_everything(pages)
        with store.open_snapshot() as reader:
            _assert_read_or_corrupt(reader.read_page, model.newest)
        pages.crash()
        with suppress(Corruption):
            store = pages.database()
            lsn = store.durable_version()[0]
            assert model.at(lsn).lsn == lsn
            with store.open_snapshot() as reader:
                _assert_read_or_corrupt(reader.read_page, model.at(lsn))
    finally:
        pages.die()
        patch.undo()


def _assert_read_or_corrupt(read: object, version: Version) -> None:
    for page in range(version.size):
        with suppress(Corruption):
            assert read(page) == version.page(page)  # type: ignore[operator]
