"""Verified reads from a bucket or a disk: corruption is reported only if a second read confirms it.

Bytes may be garbled in transit, and a false alarm about stored data is expensive: it closes a database for repair, or discards
a copy.

Threads: any. Raises what reading raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from quire.core.errors import Corruption
from quire.core.events import emit

T = TypeVar("T")


def checked_read(read: Callable[[], T]) -> T:
    """Return what `read` fetches and verifies. If it raises `Corruption`, call it a second time and let that result stand."""
    try:
        return read()
    except Corruption as error:
        emit("info", "objects.read_again", error=str(error))
        return read()
