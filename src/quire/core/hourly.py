"""Running totals, and their rates in the last hour. Threads: any; each object has its own lock."""

from __future__ import annotations

import threading
import time
from collections import deque

HOUR_SECONDS = 3_600.0
SAMPLE_SECONDS = 60.0
RATE_SECONDS_MIN = 600.0


class HourlyTotals:
    """Two quantities that are counted together."""

    def __init__(self) -> None:
        # guarded by _lock
        self._lock = threading.Lock()
        self._samples: deque[tuple[float, int, int]] = deque([(time.monotonic(), 0, 0)])
        """(time, totals): at intervals of at least a minute, for the last hour."""
        self._first = self._second = 0

    def _add(self, first: int, second: int) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._samples[-1][0] >= SAMPLE_SECONDS:
                self._samples.append((now, self._first, self._second))
                while len(self._samples) > 1 and now - self._samples[1][0] >= HOUR_SECONDS:
                    self._samples.popleft()
            self._first += first
            self._second += second

    def per_hour(self) -> tuple[float, float]:
        """Return both rates per hour. Less than ten minutes count as ten, so that what happens once at the beginning does not
        inflate them."""
        now = time.monotonic()
        with self._lock:
            recent = [sample for sample in self._samples if now - sample[0] <= HOUR_SECONDS]
            began, first, second = recent[0] if recent else (now - HOUR_SECONDS, self._first, self._second)
            seconds = max(now - began, RATE_SECONDS_MIN)
            return (self._first - first) * HOUR_SECONDS / seconds, (self._second - second) * HOUR_SECONDS / seconds
