"""Idempotency keys of the last writes to one log, and where each was written: a call that is repeated is not written again.

The key is part of what is written (`stream/segment.py`, `lsm/wal.py`), so that after a crash the log itself says what was done.

Threads: the lock of whoever has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from quire.core.errors import InvalidInput
from quire.core.limits import IDEMPOTENCY_KEY_BYTES

KEPT_MAX = 65_536
"""In memory: a client that has lost an answer asks again within seconds."""
CARRIED_MAX = 1_024
"""Into what is written next, when the log that has them ends. Only calls that were not answered are repeated after a crash, and
an owner works on far fewer at once."""


class RecentKeys:
    """Keys, oldest first.

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
        """Where the call with this key was written, if it was."""
        return self._positions.get(key)

    def add(self, key: int, position: int) -> None:
        """A call is written at a position."""
        self._positions[key] = position
        if len(self._positions) > KEPT_MAX:
            del self._positions[next(iter(self._positions))]

    def discard(self, key: int) -> None:
        """It was not written after all."""
        self._positions.pop(key, None)

    def newest(self) -> Iterator[tuple[int, int]]:
        """Those that the next log must know, too."""
        return islice(self._positions.items(), max(len(self._positions) - CARRIED_MAX, 0), None)


def call_number(key: bytes) -> int:
    """A key as the number that is written: its first 8 bytes; 0 stands for none.

    >>> call_number(b""), call_number(bytes(16)), call_number(b"\\x02" + bytes(15))
    (0, 1, 2)
    """
    if key and len(key) != IDEMPOTENCY_KEY_BYTES:
        raise InvalidInput("an idempotency key has 16 bytes", bytes=len(key))
    return (int.from_bytes(key[:8], "little") or 1) if key else 0
