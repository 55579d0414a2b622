"""Arithmetic on numbers with gaps: where the range after a takeover begins, and distances that skip the gap before it (A10).

Terms
  number   a number that consumers keep outside the store: a change sequence, the id of a stream's record
  gap      (last, first): `last` is the highest number before a takeover, `first` the lowest after it; this store never assigns
           a number in between, but the previous owner may have assigned some of them to changes that were lost
  gaps     all gaps of one sequence of numbers, in order

A position means "everything up to this number was read". A position inside a gap was reached in changes that are lost. It is
refused, because the changes that follow it in this store differ from those that followed it in the lost history. `last` itself
is a valid position, and continues with `first`.

    >>> gaps = (Gap(7, 100),)
    >>> distance(gaps, 5, 102), step(gaps, 5, 3), step_back(gaps, 101, 3), list(pieces(gaps, 6, 101))
    (5, 100, 6, [(6, 7), (100, 101)])
    >>> gap_at(gaps, 7), gap_at(gaps, 8), skip_gap(gaps, 8), skip_gap(gaps, 7)
    (None, Gap(last=7, first=100), 100, 7)

Pure functions, any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

RANGE_BITS = 40
"""A range begins at a multiple of 2^40. Up to owner epoch 8,191 its numbers are below 2^53, so they are exact in JSON."""


class Gap(NamedTuple):
    """The numbers between the last one of a previous owner and the first one of its successor."""

    last: int
    first: int


Gaps: TypeAlias = Sequence[Gap]


def range_start(owner_epoch: int, last: int) -> int:
    """Return the first number of an owner epoch's range, above the last number assigned before it.

    >>> range_start(2, 7) == 2 << 40, range_start(2, 5 << 40) == 6 << 40
    (True, True)
    """
    return max(owner_epoch << RANGE_BITS, ((last >> RANGE_BITS) + 1) << RANGE_BITS)


def restored_start(last: int, chance: int) -> int:
    """Return the number at which the changes of a restored directory begin. It has no owner epoch, so they begin in the upper
    half of the restored range, or in the next range if that half is in use, at an offset that another restore does not share.
    `chance` is a random number below 2^38.

    >>> restored_start(7, 5) == (1 << 39) + 5, restored_start(1 << 39, 5) == (1 << 40) + 5
    (True, True)
    """
    begin = (last >> RANGE_BITS << RANGE_BITS) + (1 << RANGE_BITS - 1)
    return (begin if last < begin else range_start(0, last)) + chance


def gap_at(gaps: Gaps, position: int) -> Gap | None:
    """Return the gap that contains a position; `None` if the position is valid in this store."""
    return next((gap for gap in gaps if gap.last < position < gap.first), None)


def gap_of_start(gaps: Gaps, start: int) -> Gap | None:
    """Return the gap that contains the number to start from; `None` for the number after a range's last, where its readers
    continue."""
    return gap_at(gaps, start - 1) if all(start != gap.first for gap in gaps) else None


def skip_gap(gaps: Gaps, start: int) -> int:
    """Return the number at which a read from `start` begins: the number after a range's last means the first of the next range.

    A range in which no number was assigned leaves two gaps without a number between them.
    """
    for gap in gaps:
        if start == gap.last + 1:
            start = gap.first
    return start


def distance(gaps: Gaps, after: int, upto: int) -> int:
    """Return how many numbers n exist with `after` < n <= `upto`; 0 if `upto` is not above `after`."""
    count = upto - after
    for gap in gaps:
        count -= max(min(gap.first - 1, upto) - max(gap.last, after), 0)
    return max(count, 0)


def following(gaps: Gaps, number: int) -> int:
    """Return the number after this one."""
    return next((gap.first for gap in gaps if gap.last <= number < gap.first), number + 1)


def preceding(gaps: Gaps, number: int) -> int:
    """Return the number before this one."""
    return next((gap.last for gap in gaps if gap.last < number <= gap.first), number - 1)


def step(gaps: Gaps, position: int, count: int) -> int:
    """Return the position `count` numbers after `position`."""
    reached = position + count
    for gap in gaps:  # in order: each gap that is crossed moves the target, perhaps across the next gap
        if max(gap.last, position) < reached and position < gap.first - 1:
            reached += gap.first - 1 - max(gap.last, position)
    return reached


def step_back(gaps: Gaps, position: int, count: int) -> int:
    """Return the position `count` numbers before `position`; never below 0."""
    reached = position - count
    for gap in reversed(gaps):
        if gap.last < position and reached < gap.first:
            reached -= min(gap.first - 1, position) - gap.last
    return max(reached, 0)


def pieces(gaps: Gaps, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the numbers of [first, last] as (first, last) pairs of pieces without a gap."""
    for gap in gaps:
        if first <= gap.last < last:
            yield first, gap.last
        if gap.last < last and first < gap.first:
            first = gap.first
    if first <= last:
        yield first, last
