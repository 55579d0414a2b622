"""Numbers after a takeover: where a new range begins, and distances that leave the gap before it out (A10).

Terms
  number   what consumers keep outside of the store: a change sequence, the id of a stream's record
  gap      (last, first): `last` is the highest number before a takeover, `first` the lowest one after it; none in between is
           ever given in this store, but the owner before may have given some of them to changes that were lost
  gaps     all gaps of one sequence of numbers, in order

A position says "everything up to this number was read". One inside a gap was reached in changes that are lost: it is refused,
because what follows it here is not what followed it there. `last` itself is no such position, and continues with `first`.

    >>> gaps = (Gap(7, 100),)
    >>> distance(gaps, 5, 102), step(gaps, 5, 3), step_back(gaps, 101, 3), list(pieces(gaps, 6, 101))
    (5, 100, 6, [(6, 7), (100, 101)])
    >>> lost(gaps, 7), lost(gaps, 8), settled(gaps, 8), settled(gaps, 7)
    (None, Gap(last=7, first=100), 100, 7)

Pure functions, any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

RANGE_BITS = 40
"""A range begins at a multiple of 2^40. Up to owner epoch 8,191 its numbers are below 2^53, and exact in JSON."""


class Gap(NamedTuple):
    """Numbers between the last one of a former owner and the first one of its successor."""

    last: int
    first: int


Gaps: TypeAlias = Sequence[Gap]


def range_start(owner_epoch: int, last: int) -> int:
    """The first number of an owner epoch's range, above the last number that was given before.

    >>> range_start(2, 7) == 2 << 40, range_start(2, 5 << 40) == 6 << 40
    (True, True)
    """
    return max(owner_epoch << RANGE_BITS, ((last >> RANGE_BITS) + 1) << RANGE_BITS)


def restored_start(last: int, chance: int) -> int:
    """Where the changes of a restored directory begin, which has no owner epoch: in the upper half of the range that was
    restored, at a place that another restore does not share. `chance` is a random number below 2^38.

    >>> restored_start(7, 5) == (1 << 39) + 5
    True
    """
    begin = (last >> RANGE_BITS << RANGE_BITS) + (1 << RANGE_BITS - 1)
    return begin + chance if last < begin else range_start(0, last)


def lost(gaps: Gaps, position: int) -> Gap | None:
    """The gap that a position is inside of; `None` if it is a position of this store."""
    return next((gap for gap in gaps if gap.last < position < gap.first), None)


def lost_start(gaps: Gaps, start: int) -> Gap | None:
    """The same for a number to begin with: that behind the last of a range is where its readers go on."""
    return lost(gaps, start - 1) if all(start != gap.first for gap in gaps) else None


def settled(gaps: Gaps, start: int) -> int:
    """The number that reading from `start` on begins with: the one behind the last of a range is the first of the next.

    A range in which no number was given leaves two gaps without a number between them.
    """
    for gap in gaps:
        if start == gap.last + 1:
            start = gap.first
    return start


def distance(gaps: Gaps, after: int, upto: int) -> int:
    """How many numbers n with `after` < n <= `upto` there are; 0 if `upto` is not above `after`."""
    count = upto - after
    for gap in gaps:
        count -= max(min(gap.first - 1, upto) - max(gap.last, after), 0)
    return max(count, 0)


def following(gaps: Gaps, number: int) -> int:
    """The number behind this one."""
    return next((gap.first for gap in gaps if gap.last <= number < gap.first), number + 1)


def preceding(gaps: Gaps, number: int) -> int:
    """The number before this one."""
    return next((gap.last for gap in gaps if gap.last < number <= gap.first), number - 1)


def step(gaps: Gaps, position: int, count: int) -> int:
    """The position `count` numbers further on."""
    reached = position + count
    for gap in gaps:  # in order: each gap that is crossed moves the goal, perhaps across the next one
        if max(gap.last, position) < reached and position < gap.first - 1:
            reached += gap.first - 1 - max(gap.last, position)
    return reached


def step_back(gaps: Gaps, position: int, count: int) -> int:
    """The position `count` numbers before; never below 0."""
    reached = position - count
    for gap in reversed(gaps):
        if gap.last < position and reached < gap.first:
            reached -= min(gap.first - 1, position) - gap.last
    return max(reached, 0)


def pieces(gaps: Gaps, first: int, last: int) -> Iterator[tuple[int, int]]:
    """The numbers of [first, last] as (first, last) of pieces without a gap."""
    for gap in gaps:
        if first <= gap.last < last:
            yield first, gap.last
        if gap.last < last and first < gap.first:
            first = gap.first
    if first <= last:
        yield first, last
