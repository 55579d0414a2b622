"""Rows in waves: nothing is lost or doubled, what belongs together comes together, and memory is what was promised."""

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
class Some:
    """A block."""

    rows: NDArray[np.uint64]


def piece_of(rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return rows[:, 0]


@given(
    st.lists(st.lists(st.integers(0, 12), max_size=9), max_size=12),
    st.integers(1, 30),
    st.integers(1, 8),
)
def test_every_row_is_in_one_wave_with_all_of_its_piece(blocks: list[list[int]], wave_rows: int, at_once: int) -> None:
    numbered, number = list[Some](), 0
    for block in blocks:
        rows = np.array([(piece, number + place) for place, piece in enumerate(block)], np.uint64).reshape(-1, 2)
        numbered.append(Some(rows))
        number += len(block)
    readings = 0

    def read() -> Iterator[Some]:
        nonlocal readings
        readings += 1
        yield from numbered

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_groups, "PIECES_AT_ONCE", at_once)
        found = cut(read, piece_of, wave_rows)
        seen = [np.concatenate([np.zeros((0, 2), np.uint64), *(each.rows for each in wave)]) for wave in found]
    assert (found.rows, found.count) == (number, len(seen))
    assert sorted(np.concatenate(seen)[:, 1].tolist()) == list(range(number))
    pieces = [set(wave[:, 0].tolist()) for wave in seen]
    assert sum(map(len, pieces)) == len(set().union(*pieces)), "a piece is in one wave"
    assert readings == (1 if number <= wave_rows else 1 + len(seen))
    for wave, of in zip(seen, pieces):
        assert len(wave) <= wave_rows or len(of) == 1
    if number > wave_rows:
        assert all(map(len, seen)), "none is empty"


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=20))
def test_progress_is_steady_whatever_is_told(told: list[tuple[int, int]]) -> None:
    heard: list[tuple[int, int]] = []
    steady = MonotonicProgress(lambda done, total: heard.append((done, total)))
    for done, total in told:
        steady(done, total)
    steady.over()
    assert heard == sorted(heard)
    assert heard[0][0] == 0
    assert all(0 <= done <= total for done, total in heard)
    assert heard[-1][0] == heard[-1][1] > 0


def test_a_part_stays_in_its_part() -> None:
    heard: list[tuple[int, int]] = []
    tick = part(lambda done, total: heard.append((done, total)), 30, 50, 90)
    for done, of in ((0, 0), (1, 2), (0, 3), (9, 3)):
        tick(done, of)
    assert heard == [(30, 90), (40, 90), (40, 90), (50, 90)]
