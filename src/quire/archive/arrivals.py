"""How far the bucket has the changes of a store, and the calls that wait for it in mode `sync` (A9).

Terms
  archived     the ordinal of the queue up to which everything is in the bucket
  restorable   whether a base and an unbroken log lead up to that ordinal: not before a base counts, nor after a break

Each call waits at a ring of its own, and is woken when its ordinal has arrived. Waking every call with every object would make
all of them compete for the interpreter with the next upload, most of them only to sleep again.

Threads: `wait`, `has_waiters` and `wake` by any, the last two on a copy of the waiters; `advance` and `failure` by the
archiver, under its lock. Raises the failure of the archiver.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.core.errors import QuireError
from quire.core.waiting import Ring


class Arrivals:
    """The position of the bucket, and who waits for it."""

    __slots__ = ("_waiters", "archived", "failure", "is_restorable")

    def __init__(self) -> None:
        self._waiters: dict[Ring, int] = {}
        """Calls that wait, with the ordinal that each needs. Entries are added and removed by their own thread."""
        self.archived = 0
        self.is_restorable = False
        self.failure: QuireError | None = None
        """Why nothing more arrives, if so."""

    def wait(self, end: int, timeout: float, registered: Callable[[], None]) -> bool:
        """Block until everything up to an ordinal is archived and restorable. Return False if the timeout ends first.

        `registered` is called when the archiver's threads can see this call.
        """
        deadline = time.monotonic() + timeout
        ring = Ring()
        try:
            self._waiters[ring] = end  # before the first check: an object that arrives after it wakes the ring
            registered()
            while not self._has(end):
                if (left := deadline - time.monotonic()) <= 0:
                    return False
                ring.sleep(left)
            return True
        finally:
            self._waiters.pop(ring, None)

    def _has(self, end: int) -> bool:
        if self.failure is not None:  # first: after a failure the queue is closed, and its end means nothing
            raise self.failure.with_traceback(None)
        return self.archived >= end and self.is_restorable

    def has_waiters(self) -> bool:
        """Return whether a call waits that the objects in the bucket do not let return."""
        archived = self.archived if self.is_restorable else 0
        return any(end > archived for end in [*self._waiters.values()])

    def advance(self, archived: int, *, is_restorable: bool) -> None:
        """Note that the bucket has everything up to an ordinal. `wake` follows."""
        # In this order: a call that sees its ordinal archived must not see an older `is_restorable`.
        self.is_restorable = is_restorable
        self.archived = archived

    def wake(self) -> None:
        """Wake the calls that can return now; all of them after a failure."""
        archived = self.archived if self.is_restorable else 0
        for ring, end in self._waiters.copy().items():
            if end <= archived or self.failure is not None:
                ring.wake()
