"""The only access to time. Components take a `Clock`; tests pass a `ManualClock` from `quire.testing`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for timestamps that are stored, monotonic time for durations and waits."""

    def now_ms(self) -> int:
        """Return milliseconds since the Unix epoch. May jump; never compared across machines (M8)."""

    def monotonic(self) -> float:
        """Return seconds since some fixed moment; never goes backwards."""


class SystemClock:
    """The machine's own clocks."""

    __slots__ = ()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()


def moment(at_ms: int) -> str:
    """Format milliseconds since the Unix epoch as a UTC time for display.

    >>> moment(1_794_850_000_000), moment(0)
    ('2026-11-16 17:26:40Z', 'never')
    """
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(at_ms / 1000)) if at_ms else "never"
