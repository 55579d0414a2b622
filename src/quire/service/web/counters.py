"""Counters of the HTTP server: requests, and refusals by the name of the limit that was reached.

Threads: any.
"""

from __future__ import annotations

import threading
from collections import Counter

import msgspec

LIMITS = (
    "body_bytes",
    "body_seconds",
    "connections",
    "head_bytes",
    "head_seconds",
    "idle_seconds",
    "requests",
    "send_seconds",
    "tls_handshake",
)
"""Names of the limits of every connection; parts have more."""


class WebFigures(msgspec.Struct, frozen=True):
    """The counters of the HTTP server since it started."""

    calls: int
    failed: int
    refused: int
    busy: int
    """Connections that found no slot."""
    connections_now: int
    pages_now: int
    pages_dropped: int
    limited: dict[str, int] = {}
    """Refusals by the name of the limit that was reached."""


class Limits:
    """Counts refusals by limit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hits: Counter[str] = Counter()

    def hit(self, limit: str) -> None:
        """Count a refusal because of a limit."""
        with self._lock:
            self._hits[limit] += 1

    def counts(self) -> dict[str, int]:
        """Return the refusals by limit."""
        with self._lock:
            return dict(self._hits)


class WebCounts:
    """Requests that were answered."""

    def __init__(self) -> None:
        self.limits = Limits()
        # guarded by _lock
        self._lock = threading.Lock()
        self.calls = 0
        self.failed = 0

    def add(self, *, failed: bool) -> None:
        """Count an answered request."""
        with self._lock:
            self.calls += 1
            self.failed += failed
