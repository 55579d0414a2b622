"""The bandwidth limit of cold scans."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.pages.sources import Throttle
from quire.testing.clock import ManualClock


@given(st.integers(1, 10_000), st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 3)), max_size=40))
def test_the_rate_and_one_second_of_burst_are_not_exceeded(rate: int, reads: list[tuple[int, int]]) -> None:
    clock = ManualClock()
    throttle = Throttle(rate, clock, clock.advance)
    started, passed = clock.monotonic(), 0
    for size, pause in reads:
        throttle.take(size)
        # What just passed was paid for, up to the burst.
        passed += size
        assert passed <= rate * (clock.monotonic() - started + 1) + 1
        clock.advance(pause)


def test_without_a_rate_there_is_no_wait() -> None:
    clock = ManualClock()
    throttle = Throttle(0, clock, clock.advance)
    throttle.take(1 << 40)
    assert clock.monotonic() == 0.0
    assert throttle.waited_seconds == 0.0


def test_a_pause_accumulates_at_most_one_second() -> None:
    clock = ManualClock()
    throttle = Throttle(100, clock, clock.advance)
    clock.advance(1000)
    throttle.take(100)
    before = clock.monotonic()
    throttle.take(100)
    assert clock.monotonic() == before + 1.0
