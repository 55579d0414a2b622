"""Record ids that takeovers of the store have left out of a stream (A10).

A stream begins a new range with its first opening after a takeover: the next record has the first number of the range, unless
its own ids are beyond it. Whoever stood behind the last record goes on with the first one of the range; a position between the
two was reached in records that are lost. Inside a segment ids have no gaps; a range begins with a segment of its own (P4).

Pure functions, any thread. Raises `CursorLost`."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import pairwise
from typing import Protocol

from quire.core.errors import CursorLost
from quire.core.timeline import Gap, Gaps, distance, lost_start, settled, step, step_back


class Extent(Protocol):
    """What a segment holds."""

    @property
    def base_record(self) -> int: ...

    @property
    def end_record(self) -> int: ...


def gaps_between(stored: Gaps, segments: Sequence[Extent], range_starts: Container[int]) -> tuple[Gap, ...]:
    """The gaps that are recorded, and those before a segment that begins one of the store's ranges. Any other hole between
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
    """The gaps of a stream whose records end before `own_end`, after the current range has begun. The same if it began before.

    >>> gaps_with_range((), 8, 100), gaps_with_range((Gap(7, 100),), 8, 100), gaps_with_range((Gap(7, 100),), 8, 200)
    ((Gap(last=7, first=100),), (Gap(last=7, first=100),), (Gap(last=7, first=100), Gap(last=99, first=200)))
    """
    end = settled(gaps, own_end)
    return (*gaps, Gap(end - 1, first_number)) if first_number > end else tuple(gaps)


def begin_at(gaps: Gaps, start: int) -> int:
    """The id that reading from `start` on begins with; raises if `start` was reached in records that are lost."""
    gap = lost_start(gaps, start)
    if gap is not None:
        raise CursorLost(
            f"the records {gap.last + 1:,} to {start - 1:,} were lost when the store was taken over",
            hint=f"undo what came of them, and continue with record {gap.first}; or begin again",
            start=start,
            last_record=gap.last,
            first_record=gap.first,
        )
    return settled(gaps, start)


def count_records(gaps: Gaps, start: int, end: int) -> int:
    """How many records there are from `start` to before `end`.

    >>> count_records((Gap(7, 100),), 6, 102), count_records((Gap(7, 100),), 8, 100)
    (4, 0)
    """
    return distance(gaps, start - 1, end - 1)


def after_records(gaps: Gaps, start: int, count: int) -> int:
    """Where `count` records from `start` on end.

    >>> after_records((Gap(7, 100),), 6, 3)
    101
    """
    return step(gaps, start - 1, count) + 1


def before_records(gaps: Gaps, end: int, count: int) -> int:
    """Where the last `count` records before `end` begin.

    >>> before_records((Gap(7, 100),), 102, 3), before_records((Gap(7, 100),), 100, 3)
    (7, 5)
    """
    return step_back(gaps, end - 1, count) + 1


def of_positions(gaps: Iterable[Gap]) -> tuple[Gap, ...]:
    """The gaps between positions, each of which is the id of the first record that was not read."""
    return tuple([Gap(gap.last + 1, gap.first + 1) for gap in gaps])
