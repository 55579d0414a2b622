"""Idempotency keys of the latest writes to one log, with their positions, so that a repeated call is not written twice.

The key is part of the written record (`stream/segment.py`, `lsm/wal.py`), so after a crash the log itself identifies the calls
that it contains.

Threads: guarded by the lock of the log that owns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from quire.core.errors import InvalidInput
from quire.core.limits import IDEMPOTENCY_KEY_BYTES

KEPT_MAX = 65_536
"""Keys kept in memory: a client that lost a response retries within seconds."""
CARRIED_MAX = 1_024
"""Keys carried over into the next log when a log ends. After a crash only unanswered calls are repeated, and an owner has far
fewer of them in progress at once."""


class RecentKeys:
    """A bounded map from keys to positions, oldest key first.

    >>> keys = RecentKeys([(1, 10)])
    >>> keys.add(2, 20)
    >>> keys.get(1), keys.get(3), list(keys.newest())
    (10, None, [(1, 10), (2, 20)])
    """

    __slots__ = ("_positions",)

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        self._positions = dict(pairs)

    def __bool__(self) -> bool:
        return bool(self._positions)

    def get(self, key: int) -> int | None:
        """Return the position at which the call with this key was written, or `None`."""
        return self._positions.get(key)

    def add(self, key: int, position: int) -> None:
        """Record that a call is written at a position, and drop the oldest key beyond `KEPT_MAX`."""
        self._positions[key] = position
        if len(self._positions) > KEPT_MAX:
            del self._positions[next(iter(self._positions))]

    def discard(self, key: int) -> None:
        """Remove the key of a call whose write failed."""
        self._positions.pop(key, None)

    def newest(self) -> Iterator[tuple[int, int]]:
        """Iterate over the newest `CARRIED_MAX` pairs, which the next log must contain as well."""
        return islice(self._positions.items(), max(len(self._positions) - CARRIED_MAX, 0), None)


def call_number(key: bytes) -> int:
    """Return the number that is written for a key: its first 8 bytes, little-endian; 0 means no key.

    >>> call_number(b""), call_number(bytes(16)), call_number(b"\\x02" + bytes(15))
    (0, 1, 2)
    """
    if key and len(key) != IDEMPOTENCY_KEY_BYTES:
        raise InvalidInput("an idempotency key must be 16 bytes", bytes=len(key))
    return (int.from_bytes(key[:8], "little") or 1) if key else 0
