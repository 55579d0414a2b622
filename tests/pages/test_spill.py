"""The pages of a transaction: in memory, then in a nameless scratch file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import ChecksumMismatch, DiskFull
from quire.durable.files import OsDisk
from quire.pages.spill import PageBuffer
from quire.testing.faults import Fault, FaultyDisk
from tests.pages.world import PAGE, image


def _buffer(root: Path, pages: int = 4) -> PageBuffer:
    return PageBuffer(OsDisk(), str(root), PAGE, pages * PAGE)


@given(ops=st.lists(st.one_of(st.tuples(st.integers(0, 9), st.integers(0, 5)), st.integers(1, 9)), max_size=60))
def test_a_buffer_behaves_like_a_dict_however_often_it_spills(
    tmp_path_factory: pytest.TempPathFactory, ops: list[tuple[int, int] | int]
) -> None:
    buffer, model = _buffer(tmp_path_factory.mktemp("spill")), dict[int, bytes]()
    for op in ops:
        if isinstance(op, int):
            buffer.drop_from(op)
            model = {page: data for page, data in model.items() if page < op}
        else:
            buffer.put(op[0], image(op))
            model[op[0]] = image(op)
    assert sorted(buffer) == sorted(model)
    assert len(buffer) == len(model)
    assert buffer.load(sorted(model)) == [model[page] for page in sorted(model)]
    assert all(buffer.get(page) == model.get(page) and (page in buffer) == (page in model) for page in range(10))
    buffer.clear()
    assert not len(buffer)


def test_the_scratch_file_has_no_name_and_goes_with_the_transaction(tmp_path: Path) -> None:
    buffer, before = _buffer(tmp_path), len(os.listdir("/proc/self/fd"))
    for page in range(40):
        buffer.put(page, image(page))
    assert list((tmp_path / "scratch").iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before + 1
    buffer.clear()
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_is_bounded_by_the_limit(tmp_path: Path) -> None:
    buffer = _buffer(tmp_path)
    for page in range(1000):
        buffer.put(page, image(page))
        assert len(buffer._images) <= 4
    assert [buffer.get(page) for page in (0, 500, 999)] == [image(0), image(500), image(999)]


def test_bytes_that_come_back_altered_are_not_committed(tmp_path: Path) -> None:
    buffer = _buffer(tmp_path)
    for page in range(5):
        buffer.put(page, image(page))
    assert buffer._file is not None
    buffer._file.write_at(b"x", PAGE + 7)
    assert buffer.get(0) == image(0)
    with pytest.raises(ChecksumMismatch):
        buffer.get(1)
    buffer.clear()


def test_a_full_disk_leaves_what_was_put_before_readable(tmp_path: Path) -> None:
    disk = FaultyDisk(OsDisk(), Fault.ENOSPC, fail_at=1, operation="write")
    buffer = PageBuffer(disk, str(tmp_path), PAGE, 2 * PAGE)
    buffer.put(0, image(0))
    buffer.put(1, image(1))
    with pytest.raises(DiskFull):
        buffer.put(2, image(2))
    assert [buffer.get(page) for page in range(3)] == [image(0), image(1), image(2)]
    buffer.clear()
