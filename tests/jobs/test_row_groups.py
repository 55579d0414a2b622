"""Rows in waves: none is lost or duplicated, the rows of a piece stay together, and memory is bounded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire.jobs import row_groups
from quire.jobs.row_groups import MonotonicProgress, cut, part


@dataclass(frozen=True)
class RowBlock:
    """A block of rows."""

    rows: NDArray[np.uint64]


def piece_of(rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return rows[:, 0]


@given(
    st.lists(st.lists(st.integers(0, 12), max_size=9), max_size=12),
    st.integers(1, 30),
    st.integers(1, 8),
)
def test_every_row_is_in_one_wave_with_all_of_its_piece(
    blocks: list[list[int]], wave_rows: int, pieces_at_once: int
) -> None:
    numbered, number = list[RowBlock](), 0
    for block in blocks:
        rows = np.array([(piece, number + offset) for offset, piece in enumerate(block)], np.uint64).reshape(-1, 2)
        numbered.append(RowBlock(rows))
        number += len(block)
    readings = 0

    def read() -> Iterator[RowBlock]:
        nonlocal readings
        readings += 1
        yield from numbered

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_groups, "PIECES_AT_ONCE", pieces_at_once)
        waves = cut(read, piece_of, wave_rows)
        wave_rows_read = [
            np.concatenate([np.zeros((0, 2), np.uint64), *(block.rows for block in wave)]) for wave in waves
        ]
    assert (waves.rows, waves.count) == (number, len(wave_rows_read))
    assert sorted(np.concatenate(wave_rows_read)[:, 1].tolist()) == list(range(number))
    pieces = [set(wave[:, 0].tolist()) for wave in wave_rows_read]
    assert sum(map(len, pieces)) == len(set().union(*pieces)), "a piece is split across waves"
    assert readings == (1 if number <= wave_rows else 1 + len(wave_rows_read))
    for wave, wave_pieces in zip(wave_rows_read, pieces):
        assert len(wave) <= wave_rows or len(wave_pieces) == 1
    if number > wave_rows:
        assert all(map(len, wave_rows_read)), "a wave is empty"


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=20))
def test_progress_is_monotonic_for_any_reports(reports: list[tuple[int, int]]) -> None:
    progress: list[tuple[int, int]] = []
    monotonic = MonotonicProgress(lambda done, total: progress.append((done, total)))
    for done, total in reports:
        monotonic(done, total)
    monotonic.over()
    assert progress == sorted(progress)
    assert progress[0][0] == 0
    assert all(0 <= done <= total for done, total in progress)
    assert progress[-1][0] == progress[-1][1] > 0


def test_a_part_reports_within_its_range() -> None:
    progress: list[tuple[int, int]] = []
    tick = part(lambda done, total: progress.append((done, total)), 30, 50, 90)
    for done, total in ((0, 0), (1, 2), (0, 3), (9, 3)):
        tick(done, total)
    assert progress == [(30, 90), (40, 90), (40, 90), (50, 90)]
