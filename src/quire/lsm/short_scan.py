"""Short scans: reads the first rows of a scan as Python rows, in microseconds, where the calls into Arrow alone cost more.

Terms
  sorted run  a memtable, a table of level 0, or a deeper level
  window      the next few rows of each sorted run, from the scan's current position
  edge        how far a run's window reaches: the run has no row between its window and its edge

Up to the nearest edge, the windows contain all versions of all keys. They are merged in a dictionary, the highest lsn wins,
and the next window begins at that edge.

The first `SHORT_ROWS` rows of a scan of pairs come from windows; the remaining rows, and scans of batches, come from Arrow
(`merge.py`). Both return the same rows.

Threads: any. Raises the errors of reading blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from quire.lsm.block_cache import VersionedValue

Pair = tuple[bytes, bytes]
_key_of = itemgetter(0)

FIRST_ROWS = 32
"""Rows of each run in the first window. Each further window has four times as many, up to:"""
SHORT_ROWS = 512


class RowWindows:
    """The rows of one window of each run, merged into the pairs that a read sees."""

    __slots__ = ("_windows",)

    def __init__(self) -> None:
        self._windows: list[tuple[Sequence[bytes], Sequence[int], Sequence[bytes | None], int, bool]] = []

    def add(
        self,
        keys: Sequence[bytes],
        lsns: Sequence[int],
        values: Sequence[bytes | None],
        lsn_max: int,
        is_plain: bool,
    ) -> None:
        """Add sorted rows. No lsn is above `lsn_max`. A plain window has no two rows with the same key, and no tombstone."""
        self._windows.append((keys, lsns, values, lsn_max, is_plain))

    def pairs(self, lsn: int, hidden: frozenset[int], edge: bytes | None, *, reverse: bool) -> list[Pair]:
        """Return the pairs that a read at an lsn sees on this side of the edge, in ascending or descending order."""
        windows = self._windows
        if len(windows) == 1 and windows[0][4] and windows[0][3] <= lsn and not hidden:
            # The common case: nothing to merge and nothing to hide. A plain window has no `None` among its values.
            pairs = cast(list[Pair], list(zip(windows[0][0], windows[0][2])))
        else:
            pairs = self._merged(lsn, hidden)
        if edge is not None and len(windows) > 1:  # a single window ends at its own edge
            cut = bisect_left(pairs, edge, key=_key_of)
            pairs = pairs[cut:] if reverse else pairs[:cut]
        if reverse:
            pairs.reverse()
        return pairs

    def _merged(self, at: int, hidden: frozenset[int]) -> list[Pair]:
        newest: dict[bytes, VersionedValue] = {}
        for keys, lsns, values, _, _ in self._windows:
            for key, lsn, value in zip(keys, lsns, values):
                if lsn <= at and lsn not in hidden:
                    version = newest.get(key)
                    if version is None or version[0] < lsn:
                        newest[key] = lsn, value
        return [(key, value) for key in sorted(newest) if (value := newest[key][1]) is not None]


class SortedRun(Protocol):
    """A source of rows sorted by key."""

    def window(self, windows: RowWindows, low: bytes, high: bytes | None, rows: int) -> bytes | None:
        """Add about `rows` rows with keys in [low, high), beginning with the first. Return the edge: all other rows of the
        range are at or above it. `None` if there are no other rows."""

    def window_before(self, windows: RowWindows, low: bytes, high: bytes | None, rows: int) -> bytes | None:
        """Add about `rows` rows with keys in [low, high), ending with the last. Return the edge: all other rows of the range
        are below it. `None` if there are no other rows."""


def short_window(
    runs: Sequence[SortedRun],
    low: bytes,
    high: bytes | None,
    lsn: int,
    hidden: frozenset[int],
    *,
    rows: int,
    reverse: bool,
) -> tuple[list[Pair], bytes | None]:
    """Return the pairs that a read at an lsn sees in the next window of [low, high), in ascending or descending order, and
    where the window after it begins (in reverse: ends); `None` if there is none."""
    windows = RowWindows()
    edge = (_nearest_before if reverse else _nearest)(runs, windows, low, high, rows)
    return windows.pairs(lsn, hidden, edge, reverse=reverse), edge


def _nearest(runs: Sequence[SortedRun], windows: RowWindows, low: bytes, high: bytes | None, rows: int) -> bytes | None:
    """Add the window of each run. Return the lowest edge."""
    nearest: bytes | None = None
    for run in runs:
        edge = run.window(windows, low, high, rows)
        if edge is not None and (nearest is None or edge < nearest):
            nearest = edge
    return nearest


def _nearest_before(
    runs: Sequence[SortedRun], windows: RowWindows, low: bytes, high: bytes | None, rows: int
) -> bytes | None:
    """Add the last window of each run. Return the highest edge."""
    nearest: bytes | None = None
    for run in runs:
        edge = run.window_before(windows, low, high, rows)
        if edge is not None and (nearest is None or edge > nearest):
            nearest = edge
    return nearest


def span(keys: Sequence[bytes], low: bytes, high: bytes | None, rows: int) -> tuple[int, int, bool]:
    """Return (start, end, whether more follow): the first `rows` positions of [low, high) in sorted keys. All rows of a key
    are in or out."""
    start = bisect_left(keys, low) if low else 0
    stop = len(keys) if high is None else bisect_left(keys, high, start)
    end = start + rows
    if end >= stop:
        return start, stop, False
    while end < stop and keys[end] == keys[end - 1]:
        end += 1
    return start, end, end < stop


def span_before(keys: Sequence[bytes], low: bytes, high: bytes | None, rows: int) -> tuple[int, int, bool]:
    """Return (start, end, whether more precede): the last `rows` positions of [low, high) in sorted keys."""
    end = len(keys) if high is None else bisect_left(keys, high)
    floor = bisect_left(keys, low, 0, end) if low else 0
    start = end - rows
    if start <= floor:
        return floor, end, False
    while start > floor and keys[start - 1] == keys[start]:
        start -= 1
    return start, end, start > floor
