"""One call, as a handler sees it: its key, who asks, and whether anybody still waits for the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Asked:
    """See above."""

    key: bytes
    """Of a keyed action; else empty."""
    role: str
    is_over: Callable[[], bool]
    """The client has left, or the server stops: what waits should end."""
