"""A clock that a test controls: `advance` moves both times, `jump` only the wall clock, also backwards.

Threads: any. Raises `OutOfRange` for a negative advance.

    >>> clock = ManualClock(now_ms=1_000)
    >>> clock.advance(2.5)
    >>> clock.now_ms(), clock.monotonic()
    (3500, 2.5)
    >>> clock.jump(-3.0)
    >>> clock.now_ms(), clock.monotonic()
    (500, 2.5)
"""

from __future__ import annotations

import threading

from quire.core.errors import OutOfRange


class ManualClock:
    """A `Clock` that moves only when a test moves it."""

    def __init__(self, now_ms: int = 1_750_000_000_000) -> None:
        self._lock = threading.Lock()
        self._start_ms = now_ms
        # Integer microseconds, so that rounding errors of many small steps do not accumulate.
        self._elapsed_us = 0
        self._jumped_us = 0

    def now_ms(self) -> int:
        with self._lock:
            return self._start_ms + (self._elapsed_us + self._jumped_us) // 1000

    def monotonic(self) -> float:
        with self._lock:
            return self._elapsed_us / 1_000_000

    def advance(self, seconds: float) -> None:
        """Move both the wall clock and the monotonic clock forwards."""
        if seconds < 0:
            raise OutOfRange("time cannot run backwards", hint="use jump() to set the wall clock", seconds=seconds)
        with self._lock:
            self._elapsed_us += round(seconds * 1_000_000)

    def jump(self, seconds: float) -> None:
        """Move the wall clock forwards or backwards; the monotonic clock does not change."""
        with self._lock:
            self._jumped_us += round(seconds * 1_000_000)
