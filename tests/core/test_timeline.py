"""Distances over numbers with gaps: each function is compared with a plain list of the existing numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.core.timeline import (
    Gap,
    distance,
    following,
    gap_at,
    gap_of_start,
    pieces,
    preceding,
    range_start,
    step,
    step_back,
)

runs = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=5)


def numbers_of(first: int, lengths: list[tuple[int, int]]) -> tuple[list[int], tuple[Gap, ...]]:
    """Numbers in runs, and the gaps between the runs."""
    numbers: list[int] = []
    gaps: list[Gap] = []
    for length, width in lengths:
        numbers += range(first, first + length)
        first += length + width
        gaps.append(Gap(numbers[-1], first))
    return [*numbers, first], tuple(gaps)


@given(st.integers(1, 5), runs, st.data())
def test_every_function_agrees_with_a_list_of_the_numbers(
    first: int, lengths: list[tuple[int, int]], data: st.DataObject
) -> None:
    numbers, gaps = numbers_of(first, lengths)
    positions = [first - 1, *numbers]
    low = data.draw(st.integers(0, len(positions) - 1))
    high = data.draw(st.integers(low, len(positions) - 1))
    assert distance(gaps, positions[low], positions[high]) == high - low
    assert distance(gaps, positions[high], positions[low]) == 0
    assert step(gaps, positions[low], high - low) == positions[high]
    assert step_back(gaps, positions[high], high - low) == positions[low]
    if low < high:
        assert following(gaps, positions[low]) == positions[low + 1]
        assert preceding(gaps, positions[low + 1]) == positions[low]
        expected = positions[low + 1 : high + 1]
        parts = list(pieces(gaps, expected[0], expected[-1]))
        assert [number for start, end in parts for number in range(start, end + 1)] == expected
    position = data.draw(st.integers(first - 1, numbers[-1]))
    assert (gap_at(gaps, position) is None) == (position in positions)
    begins = {following(gaps, known) for known in positions} | {known + 1 for known in positions}
    assert (gap_of_start(gaps, position + 1) is None) == (position + 1 in begins)


def test_without_takeovers_everything_is_plain_arithmetic() -> None:
    assert (distance((), 3, 10), step((), 3, 4), step_back((), 10, 4), step_back((), 3, 9)) == (7, 7, 6, 0)
    assert list(pieces((), 4, 9)) == [(4, 9)]
    assert list(pieces((), 4, 3)) == []


def test_a_range_begins_above_every_used_number_and_is_exact_in_json() -> None:
    assert range_start(2, 7) == 2 << 40
    assert range_start(2, (2 << 40) + 7) == 3 << 40
    assert range_start(8191, 0) + (1 << 40) <= 2**53
