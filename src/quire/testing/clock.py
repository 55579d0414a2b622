"""A clock that moves only when a test says so: `advance` moves both times, `jump` only wall time, also backwards.

Threads: any. Raises `OutOfRange` for an advance below zero.

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
    """A `Clock` under the control of a test."""

    def __init__(self, now_ms: int = 1_750_000_000_000) -> None:
        self._lock = threading.Lock()
        self._start_ms = now_ms
        # Microseconds, so that many small steps do not add up to an error.
        self._elapsed_us = 0
        self._jumped_us = 0

    def now_ms(self) -> int:
        with self._lock:
            return self._start_ms + (self._elapsed_us + self._jumped_us) // 1000

    def monotonic(self) -> float:
        with self._lock:
            return self._elapsed_us / 1_000_000

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        if seconds < 0:
            raise OutOfRange("time does not pass backwards", hint="use jump() to set the wall clock", seconds=seconds)
        with self._lock:
            self._elapsed_us += round(seconds * 1_000_000)

    def jump(self, seconds: float) -> None:
        """Set the wall clock forwards or backwards."""
        with self._lock:
            self._jumped_us += round(seconds * 1_000_000)
