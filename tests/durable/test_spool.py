"""Rows in a spool: read in order, in memory or from a file, while more are appended."""

from __future__ import annotations

import gc
import os
import resource
import warnings

import msgspec
import pytest

from quire.core.errors import StorageFault
from quire.durable import spool
from quire.durable.spool import ROWS_A_FRAME, Spool


class Row(msgspec.Struct, frozen=True):
    number: int
    text: str


@pytest.mark.parametrize("memory_bytes", [0, 5_000, 1 << 20])
@pytest.mark.parametrize("count", [0, 1, ROWS_A_FRAME - 1, ROWS_A_FRAME, ROWS_A_FRAME + 1, 3_000])
def test_rows_are_read_in_the_order_in_which_they_were_appended(
    monkeypatch: pytest.MonkeyPatch, memory_bytes: int, count: int
) -> None:
    monkeypatch.setattr(spool, "MEMORY_BYTES", memory_bytes)
    rows = [Row(number, "x" * (number % 50)) for number in range(count)]
    kept = Spool(Row)
    kept.extend(iter(rows))
    assert len(kept) == count
    assert list(kept) == list(kept) == rows


def test_two_readers_do_not_disturb_each_other_nor_a_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "MEMORY_BYTES", 1_000)
    kept = Spool(Row)
    kept.extend(Row(number, "") for number in range(2_000))
    first, second = iter(kept), iter(kept)
    assert (next(first).number, next(second).number) == (0, 0)
    for number in range(1, 2_000):
        assert next(first).number == number
        if number % 2:
            assert next(second).number == number // 2 + 1
        kept.append(Row(1_999 + number, ""))
    kept.append(Row(3_999, ""))
    assert next(first, None) is None, "an iterator yields what was there when it began"
    assert [row.number for row in kept] == list(range(4_000))


def test_the_file_of_a_spool_is_closed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "MEMORY_BYTES", 0)
    before = len(os.listdir("/proc/self/fd"))
    kept = Spool(Row)
    kept.extend(Row(number, "") for number in range(1_000))
    assert len(os.listdir("/proc/self/fd")) == before + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del kept
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_full_disk_is_named_and_loses_or_repeats_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: what was written before the error stayed in the file, so later rows were read from the wrong place."""
    monkeypatch.setattr(spool, "MEMORY_BYTES", 1_000)
    rows = [Row(number, "x" * 20) for number in range(4 * ROWS_A_FRAME)]
    kept = Spool(Row)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # stands for a full disk: a write ends in the middle
    try:
        with pytest.raises(StorageFault, match="while writing rows to a temporary file"):
            kept.extend(rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(kept) == rows[: len(kept)]
    kept.extend(rows[len(kept) :])
    assert list(kept) == rows
