"""Rows that belong together, brought to a runner as many at a time as memory should hold; and progress over the calls.

Terms
  block   rows of numbers, some thousands, as a transaction of the manifest gave them
  piece   what has to be looked at together, as one number
  wave    what a runner gets in one call: all rows of some pieces

Rows of one piece may come at any place, and each reading gives the same rows (one transaction). They are read once to count
them by piece, and kept as long as all of them are one wave. Of more, rows are read once more for each wave, of which only its
own are kept: in memory are the rows of one wave (or of one piece, if that is larger), one block, and 16 bytes for each piece.

Threads: that of the transaction.
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
"""Counts of pieces that are added up together."""

B = TypeVar("B")
"""A frozen dataclass with `rows`, numbers by lines."""

Numbers = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Waves(Generic[B]):
    """Rows, cut into waves. Iterating gives the blocks of one after the other; once."""

    rows: int
    count: int
    """How many waves there are; at least one, which may be empty."""
    waves: Iterator[list[B]]

    def __iter__(self) -> Iterator[list[B]]:
        return self.waves


def cut(read: Callable[[], Iterator[B]], piece_of: Callable[[Numbers], Numbers], wave_rows: int) -> Waves[B]:
    """The rows that `read` gives, in waves of about `wave_rows`; `piece_of` says the piece of each row of a block."""
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
    """The rows of pieces from `low` to `high`."""
    for block in blocks:
        pieces = piece_of(_rows(block))
        wanted = (pieces >= low) & (pieces <= high)
        if wanted.all():
            yield block
        elif wanted.any():
            yield replace(block, rows=_rows(block)[wanted])  # type: ignore[type-var]  # see B


class _Pieces:
    """How many rows each piece has."""

    def __init__(self) -> None:
        self._pieces: list[Numbers] = []
        self._counts: list[NDArray[np.int64]] = []
        self._held, self._limit = 0, PIECES_AT_ONCE

    def add(self, pieces: Numbers) -> None:
        """One more row of each of these."""
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
        """(first piece, last piece) of waves with at most so many rows, or one piece."""
        pieces, counts = self._added()
        borders, start, held = list[tuple[np.uint64, np.uint64]](), 0, 0
        for place, count in enumerate(counts.tolist()):
            if held and held + count > rows:
                borders.append((pieces[start], pieces[place - 1]))
                start, held = place, 0
            held += count
        return [*borders, (pieces[start], pieces[-1])]


def part(progress: Progress, start: int, stop: int, total: int) -> Tick:
    """How far a call of a runner is, told as the part from `start` to `stop` of everything that is to be done.

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


class Steady:
    """Progress that begins at 0, never goes back and ends at its total, whatever the steps of a job say of themselves.

    >>> told = Steady(lambda done, total: print(done, "of", total))
    >>> told(1, 2)
    0 of 2
    1 of 2
    >>> told(0, 0)
    1 of 2
    >>> told(0, 3)
    1 of 3
    >>> told.over()
    3 of 3
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._done = self._total = 0

    def __call__(self, done: int, total: int) -> None:
        """A step is so far; total 0 if that is not known."""
        if not self._total and total and done:
            self._progress(0, total)
        self._total = max(self._total, total)
        self._done = max(self._done, min(done, self._total))
        self._progress(self._done, self._total)

    def over(self) -> None:
        """Everything is done."""
        if not self._total:
            self(0, 1)
        self(self._total, self._total)
