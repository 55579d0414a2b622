"""A limit on bytes per second, for reads that must not be in the way of others.

Rules
  1. Over any stretch of time at most `rate × seconds + burst` bytes pass; the burst is a second's worth.
  2. Whoever asks for more than there is waits until it would be paid back: a single large read passes, the next one waits.
  3. A rate of 0 means no limit.

Threads: any; they share the limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from quire.core.clock import Clock


class Throttle:
    """See the rules above. `sleep` is a seam for tests."""

    def __init__(self, bytes_per_second: int, clock: Clock, sleep: Callable[[float], None] = time.sleep) -> None:
        self.bytes_per_second = bytes_per_second
        self.waited_seconds = 0.0
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._left = float(bytes_per_second)
        self._at = clock.monotonic()

    def take(self, size: int) -> None:
        """Wait until `size` more bytes may be read."""
        rate = self.bytes_per_second
        if not rate:
            return
        with self._lock:
            now = self._clock.monotonic()
            self._left = min(self._left + (now - self._at) * rate, float(rate)) - size
            self._at = now
            wait = -self._left / rate
            if wait > 0:
                self.waited_seconds += wait
        if wait > 0:
            self._sleep(wait)
