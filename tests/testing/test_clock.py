"""The manual clock moves only when a test moves it."""

from __future__ import annotations

import pytest

from quire.core.clock import Clock, SystemClock
from quire.core.errors import OutOfRange
from quire.testing.clock import ManualClock


def test_time_stands_still_until_it_is_advanced() -> None:
    clock: Clock = ManualClock(now_ms=5)
    assert (clock.now_ms(), clock.monotonic()) == (5, 0.0) == (clock.now_ms(), clock.monotonic())


def test_small_steps_add_up() -> None:
    clock = ManualClock(now_ms=0)
    for _ in range(10_000):
        clock.advance(0.001)
    assert (clock.now_ms(), clock.monotonic()) == (10_000, 10.0)


def test_wall_time_jumps_and_monotonic_time_does_not() -> None:
    clock = ManualClock(now_ms=10_000)
    clock.jump(-5)
    assert (clock.now_ms(), clock.monotonic()) == (5_000, 0.0)
    with pytest.raises(OutOfRange):
        clock.advance(-1)


def test_the_system_clock_implements_the_clock_protocol() -> None:
    clock: Clock = SystemClock()
    assert clock.now_ms() > 1_700_000_000_000
    assert clock.monotonic() <= clock.monotonic()
