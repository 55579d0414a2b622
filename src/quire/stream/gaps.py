"""Gaps in a stream's record ids: the ids that takeovers of the store have skipped (A10).

A stream begins a new range when it is first opened after a takeover: the next record has the first number of the range, unless
its own ids are beyond it. A consumer positioned after the last record continues with the first record of the range; a position
between the two was reached by reading records that are lost. Ids have no gaps inside a segment; a range begins with a new
segment (P4).

Threads: any (pure functions). Raises: `CursorLost`, `OutOfRange`."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import pairwise
from typing import Protocol

from quire.core.errors import CursorLost, OutOfRange
from quire.core.timeline import Gap, Gaps, distance, gap_of_start, skip_gap, step, step_back


class Extent(Protocol):
    """The range of records of a segment."""

    @property
    def base_record(self) -> int: ...

    @property
    def end_record(self) -> int: ...


def gaps_between(stored: Gaps, segments: Sequence[Extent], range_starts: Container[int]) -> tuple[Gap, ...]:
    """Return the recorded gaps and those before a segment that begins one of the store's ranges. Any other hole between
    segments is damage.

    >>> from types import SimpleNamespace as Segment
    >>> segments = [Segment(base_record=1, end_record=8), Segment(base_record=100, end_record=102)]
    >>> gaps_between((), segments, {100}), gaps_between((), segments, {200})
    ((Gap(last=7, first=100),), ())
    """
    known = list(stored)
    for segment, following in pairwise(segments):
        end, base = segment.end_record, following.base_record
        if segment.base_record < end < base and base in range_starts and all(gap.first != base for gap in known):
            known = sorted([*known, Gap(end - 1, base)])
    return tuple(known)


def gaps_with_range(gaps: Gaps, own_end: int, first_number: int) -> tuple[Gap, ...]:
    """Return the gaps of a stream whose records end before `own_end`, with the one before the current range. If the range has
    begun already, they are unchanged.

    >>> gaps_with_range((), 8, 100), gaps_with_range((Gap(7, 100),), 8, 100), gaps_with_range((Gap(7, 100),), 8, 200)
    ((Gap(last=7, first=100),), (Gap(last=7, first=100),), (Gap(last=7, first=100), Gap(last=99, first=200)))
    """
    end = skip_gap(gaps, own_end)
    return (*gaps, Gap(end - 1, first_number)) if first_number > end else tuple(gaps)


def begin_at(gaps: Gaps, start: int) -> int:
    """Return the id at which reading from `start` begins; raise `CursorLost` if `start` was reached by reading records that are
    lost."""
    gap = gap_of_start(gaps, start)
    if gap is not None:
        raise CursorLost(
            f"the records {gap.last + 1:,} to {start - 1:,} were lost when the store was taken over",
            hint=f"undo their effects and continue with record {gap.first}, or start again",
            start=start,
            last_record=gap.last,
            first_record=gap.first,
        )
    return skip_gap(gaps, start)


def begin_within(gaps: Gaps, start: int, first: int, end: int) -> int:
    """Return the id at which reading from `start` begins in a stream that retains the records from `first` to before `end`;
    raise `CursorLost` for one that is no longer retained, `OutOfRange` for one that does not exist yet."""
    begin = begin_at(gaps, start)
    if begin < first:
        hint = f"the first one is {first}"
        raise CursorLost("these records are no longer retained", hint=hint, start=begin, first=first)
    if begin > end:
        raise OutOfRange("this record does not exist yet", hint=f"the next one is {end}", start=begin, end=end)
    return begin


def count_records(gaps: Gaps, start: int, end: int) -> int:
    """Return the number of records from `start` to before `end`.

    >>> count_records((Gap(7, 100),), 6, 102), count_records((Gap(7, 100),), 8, 100)
    (4, 0)
    """
    return distance(gaps, start - 1, end - 1)


def after_records(gaps: Gaps, start: int, count: int) -> int:
    """Return the position after `count` records from `start` on.

    >>> after_records((Gap(7, 100),), 6, 3)
    101
    """
    return step(gaps, start - 1, count) + 1


def before_records(gaps: Gaps, end: int, count: int) -> int:
    """Return the position at which the last `count` records before `end` begin.

    >>> before_records((Gap(7, 100),), 102, 3), before_records((Gap(7, 100),), 100, 3)
    (7, 5)
    """
    return step_back(gaps, end - 1, count) + 1


def of_positions(gaps: Iterable[Gap]) -> tuple[Gap, ...]:
    """Convert gaps of record ids to gaps of positions, where a position is the id of the first unread record."""
    return tuple([Gap(gap.last + 1, gap.first + 1) for gap in gaps])
