"""A cache of responses that live for a moment, so that a hundred open pages cost as much as one.

Rules
  1. A value is kept for `KEPT_SECONDS`, or for ten times as long as it took to compute, whichever is more: computing values
     takes at most about a tenth of one core, however large the store.
  2. If several callers want a value at once, one computes it and the others wait for it.
  3. A change is visible at once: `forget` drops everything, values that are being computed included.

Threads: any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quire.core.clock import Clock

T = TypeVar("T")

KEPT_SECONDS = 0.25
COST_FACTOR = 10.0
KEYS_MAX = 256


@dataclass(slots=True)
class _CachedValue:
    lock: threading.Lock = field(default_factory=threading.Lock)
    # guarded by `lock`
    value: Any = None
    until: float = -1.0
    epoch: int = -1


class Cached:
    """Cached values by key."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[object, _CachedValue] = {}
        self._epoch = 0

    def get(self, key: object, make: Callable[[], T]) -> T:
        """Return the value of a key; compute it if there is none that is fresh."""
        with self._lock:
            if key not in self._entries and len(self._entries) >= KEYS_MAX:
                self._entries.clear()
            entry, epoch = self._entries.setdefault(key, _CachedValue()), self._epoch
        with entry.lock:
            began = self._clock.monotonic()
            if entry.epoch != epoch or began >= entry.until:
                entry.value = make()
                ended = self._clock.monotonic()
                entry.until = ended + max(KEPT_SECONDS, COST_FACTOR * (ended - began))
                entry.epoch = epoch  # the one before `make`: a `forget` meanwhile makes the value stale (rule 3)
            value: T = entry.value
            return value

    def forget(self) -> None:
        """Drop everything, values that are being computed included, so that a change is visible at once (rule 3)."""
        with self._lock:
            self._epoch += 1
