"""The scratch file of a large transaction, and the transaction that uses it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.core.errors import ChecksumMismatch, DiskFull
from quire.core.settings import PagesSettings
from quire.durable.files import OsDisk
from quire.pages.transaction import Spill
from quire.testing.faults import Fault, FaultyDisk
from tests.pages.engine_harness import PAGE, Model, Pages, assert_reads, image, write

SPILL_PAGES = 4
SETTINGS = PagesSettings(page_size=PAGE, spill_bytes=SPILL_PAGES * PAGE)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@given(
    ops=st.lists(
        st.one_of(
            st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=4),
            st.tuples(st.sampled_from(["drop", "cut"]), st.integers(0, 9)),
        ),
        max_size=30,
    )
)
def test_a_spill_behaves_like_a_dict(tmp_path_factory: pytest.TempPathFactory, ops: list[object]) -> None:
    spill, model = Spill(OsDisk(), str(tmp_path_factory.mktemp("spill")), PAGE), dict[int, bytes]()
    for op in ops:
        if isinstance(op, list):
            images = {page: image((page, fill)) for page, fill in op}
            spill.take(images)
            model.update(images)
        else:
            assert isinstance(op, tuple)
            action, page = op
            if action == "drop":
                spill.drop(page)
                model.pop(page, None)
            else:
                spill.drop_from(page)
                model = {number: data for number, data in model.items() if number < page}
    assert sorted(spill) == sorted(model)
    assert len(spill) == len(model)
    assert all(spill.get(page) == model.get(page) and (page in spill) == (page in model) for page in range(10))
    spill.close()


def test_the_scratch_file_has_no_name_and_is_removed_with_the_transaction(tmp_path: Path) -> None:
    before = _descriptors()
    spill = Spill(OsDisk(), str(tmp_path), PAGE)
    spill.take({page: image() for page in range(40)})
    assert list((tmp_path / "scratch").iterdir()) == []
    assert _descriptors() == before + 1
    spill.close()
    assert _descriptors() == before


def test_altered_scratch_bytes_are_not_committed(tmp_path: Path) -> None:
    pages, model = Pages(tmp_path, settings=SETTINGS), Model()
    store = pages.database()
    write(store, model, {0: image()})
    txn = store.begin()
    for page in range(SPILL_PAGES + 1):
        txn.write_page(page, image(page))
    assert txn._spill is not None
    txn._spill._file.write_at(b"x", PAGE + 7)
    assert txn.read_page(0) == image(0)
    with pytest.raises(ChecksumMismatch):
        txn.read_page(1)
    with pytest.raises(ChecksumMismatch):
        txn.commit()
    again = pages.database()
    with again.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()


def test_a_full_disk_ends_neither_the_transaction_nor_what_it_has_written(tmp_path: Path) -> None:
    disk = FaultyDisk(OsDisk(), Fault.ENOSPC, operation="write", path="*/scratch/*")
    pages, model = Pages(tmp_path, disk=disk, settings=SETTINGS), Model()
    store = pages.database()
    txn = store.begin()
    writes = {page: image() for page in range(SPILL_PAGES + 1)}
    disk._fail_at = 1
    for page, data in writes.items():
        if page < SPILL_PAGES:
            txn.write_page(page, data)
        else:
            with pytest.raises(DiskFull):
                txn.write_page(page, data)
    assert all(txn.read_page(page) == data for page, data in writes.items())
    guard = txn.commit()
    guard.result()
    model.commit(guard.lsn, len(writes), writes)
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()


@given(
    steps=st.lists(
        st.one_of(st.tuples(st.integers(0, 20), st.integers(0, 3)), st.integers(1, 20)), min_size=1, max_size=40
    )
)
@example(steps=[(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), 1])  # everything that was spilled is truncated again
def test_a_transaction_that_spills_is_like_one_that_does_not(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int] | int]
) -> None:
    pages, model = Pages(tmp_path_factory.mktemp("spill"), settings=SETTINGS), Model()
    store = pages.database()
    write(store, model, {page: image() for page in range(12)})
    pages_now, size, cut = dict[int, bytes](), 12, 12
    with store.begin() as txn:
        for step in steps:
            if isinstance(step, int):
                txn.truncate(step)
                pages_now = {page: data for page, data in pages_now.items() if page < step}
                size, cut = step, min(cut, step)
            else:
                txn.write_page(step[0], image(step))
                pages_now[step[0]] = image(step)
                size = max(size, step[0] + 1)
            assert len(txn._images) <= SPILL_PAGES
        for page in range(size):
            expected = pages_now.get(page) or (model.newest.page(page) if page < cut else bytes(PAGE))
            assert txn.read_page(page) == expected
        guard = txn.commit()
    guard.result()
    if guard.lsn != model.newest.lsn:
        model.commit(guard.lsn, size, pages_now, cut_to=cut)
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()
