"""How many segments were in which state, over time. The manifest has only the present, so samples of it are kept here.

Rules
  1. Bounded: the last `SAMPLES` of at most `DATABASES` databases, in memory; a new owner starts with none.
  2. A sample reads the catalog rows of these databases, however many others there are.

Threads: one calls `sample`; any may call `of`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping

SAMPLES = 360
DATABASES = 256

Sample = tuple[int, dict[str, int]]
"""(ms, number of segments by state)."""


class History:
    """The samples of each database."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: dict[int, deque[Sample]] = {}

    def sample(self, at_ms: int, segments: Mapping[int, Mapping[str, int]]) -> None:
        """Add a sample; databases that are not in `segments` are forgotten."""
        with self._lock:
            for gone in self._samples.keys() - segments.keys():
                del self._samples[gone]
            for db_id, counts in segments.items():
                if db_id in self._samples or len(self._samples) < DATABASES:
                    self._samples.setdefault(db_id, deque(maxlen=SAMPLES)).append((at_ms, dict(counts)))

    def of(self, db_id: int) -> list[Sample]:
        """Return the samples of a database, oldest first."""
        with self._lock:
            return list(self._samples.get(db_id, ()))
