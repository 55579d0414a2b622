"""Groups rows that must be processed together into waves of bounded memory for a runner, and combines progress over the waves.

Terms
  block   some thousands of rows of numbers, as a transaction of the manifest returned them
  piece   a number that identifies rows that must be processed together
  wave    the input of one call of a runner: all rows of some pieces

Rows of one piece may occur anywhere, and every read returns the same rows (one transaction). They are read once to count them
by piece, and kept if all of them fit into one wave. Otherwise rows are read again for each wave, and only its own are kept:
memory holds the rows of one wave (or of one piece, if that is larger), one block, and 16 bytes for each piece.

Threads: the thread of the transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.jobs.handler import Progress
from quire.jobs.runner import Tick

PIECES_AT_ONCE = 1 << 17
"""Counts of pieces that are collected before they are summed."""

B = TypeVar("B")
"""A frozen dataclass with an attribute `rows`, an array with one row per line."""

Numbers = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Waves(Generic[B]):
    """Rows, cut into waves. Iteration yields the blocks of each wave, and is possible once."""

    rows: int
    count: int
    """Number of waves; at least one, which may be empty."""
    waves: Iterator[list[B]]

    def __iter__(self) -> Iterator[list[B]]:
        return self.waves


def cut(read: Callable[[], Iterator[B]], piece_of: Callable[[Numbers], Numbers], wave_rows: int) -> Waves[B]:
    """Cut the rows that `read` yields into waves of about `wave_rows`; `piece_of` returns the piece of each row of a block."""
    held: list[B] = []
    counted, rows = _Pieces(), 0
    for block in read():
        numbers = _rows(block)
        rows += len(numbers)
        counted.add(piece_of(numbers))
        if rows <= wave_rows:
            held.append(block)
        else:
            held.clear()
    if rows <= wave_rows:
        return Waves(rows, 1, iter([held]))
    borders = counted.borders(wave_rows)
    return Waves(rows, len(borders), (list(_within(read(), piece_of, *border)) for border in borders))


def _rows(block: Any) -> Numbers:
    rows: Numbers = block.rows
    return rows


def _within(
    blocks: Iterator[B], piece_of: Callable[[Numbers], Numbers], low: np.uint64, high: np.uint64
) -> Iterator[B]:
    """Yield the rows of the pieces from `low` to `high`, inclusive."""
    for block in blocks:
        pieces = piece_of(_rows(block))
        wanted = (pieces >= low) & (pieces <= high)
        if wanted.all():
            yield block
        elif wanted.any():
            yield replace(block, rows=_rows(block)[wanted])  # type: ignore[type-var]  # see B


class _Pieces:
    """Counts the rows of each piece."""

    def __init__(self) -> None:
        self._pieces: list[Numbers] = []
        self._counts: list[NDArray[np.int64]] = []
        self._held, self._limit = 0, PIECES_AT_ONCE

    def add(self, pieces: Numbers) -> None:
        """Count one row for each element of `pieces`."""
        distinct, counts = np.unique(pieces, return_counts=True)
        self._pieces.append(distinct)
        self._counts.append(counts.astype(np.int64))
        self._held += len(distinct)
        if self._held > self._limit:
            self._held = len(self._added()[0])
            self._limit = self._held + max(self._held, PIECES_AT_ONCE)

    def _added(self) -> tuple[Numbers, NDArray[np.int64]]:
        distinct, places = np.unique(np.concatenate(self._pieces), return_inverse=True)
        counts = np.zeros(len(distinct), np.int64)
        np.add.at(counts, places.reshape(-1), np.concatenate(self._counts))
        self._pieces, self._counts = [distinct], [counts]
        return distinct, counts

    def borders(self, rows: int) -> list[tuple[np.uint64, np.uint64]]:
        """Return (first piece, last piece) of waves that have at most `rows` rows or a single piece."""
        pieces, counts = self._added()
        borders, start, held = list[tuple[np.uint64, np.uint64]](), 0, 0
        for place, count in enumerate(counts.tolist()):
            if held and held + count > rows:
                borders.append((pieces[start], pieces[place - 1]))
                start, held = place, 0
            held += count
        return [*borders, (pieces[start], pieces[-1])]


def part(progress: Progress, start: int, stop: int, total: int) -> Tick:
    """Return a tick that reports the progress of one runner call as the part from `start` to `stop` of `total`.

    >>> part(lambda done, total: print(done, "of", total), 10, 20, 40)(1, 2)
    15 of 40
    """
    reached = start

    def tick(done: int, of: int) -> None:
        nonlocal reached
        if of:
            reached = max(reached, start + (stop - start) * min(done, of) // of)
        progress(reached, total)

    return tick


class MonotonicProgress:
    """Progress that begins at 0, never goes back and ends at its total, whatever the steps of a job report.

    >>> report = MonotonicProgress(lambda done, total: print(done, "of", total))
    >>> report(1, 2)
    0 of 2
    1 of 2
    >>> report(0, 0)
    1 of 2
    >>> report(0, 3)
    1 of 3
    >>> report.over()
    3 of 3
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._done = self._total = 0

    def __call__(self, done: int, total: int) -> None:
        """Report the progress of a step; total 0 if unknown."""
        if not self._total and total and done:
            self._progress(0, total)
        self._total = max(self._total, total)
        self._done = max(self._done, min(done, self._total))
        self._progress(self._done, self._total)

    def over(self) -> None:
        """Report that everything is done."""
        if not self._total:
            self(0, 1)
        self(self._total, self._total)
