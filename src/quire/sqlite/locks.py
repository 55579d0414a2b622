"""Whose turn it is to write to a database: one of the connections of this process.

SQLite asks for its locks without waiting; who is refused sleeps (`busy_timeout`) for 1, 2, 5, … 100 ms and asks again, with a
new snapshot. That suits a log with group commit better than a queue does: where syncs are fast, one connection after the other
runs for a while without a change of threads per transaction; where they are slow, sleepers wake during a sync, append, and are
part of the next one. Only the long sleeps are too long: they end soon after the turn was given back.

Rules
  1. One holder at a time. It gives the turn back when its transaction is appended, before that is synced (P7).
  2. Who waits looks every `LOOK_SECONDS` whether the turn is free, and then competes for it with everybody else.

Threads: any. Time is the machine's: what waits here is a thread, not a promise to the user.
"""

from __future__ import annotations

import threading
import time

LOOK_SECONDS = 0.005


class Turn:
    """See the rules above."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: object = None

    def take(self, who: object) -> bool:
        """Whether it is the turn of `who`, who holds it from now on if so."""
        if self._holder is who:
            return True
        if not self._lock.acquire(blocking=False):
            return False
        self._holder = who
        return True

    def give(self, who: object) -> None:
        """Give the turn back; somebody else's stays."""
        if self._holder is who:
            self._holder = None
            self._lock.release()

    def wait(self, seconds: float) -> None:
        """Return when the turn seems to be free, or after so many seconds, and not before `LOOK_SECONDS` if it is that many."""
        left = seconds
        while left > 0:
            time.sleep(min(left, LOOK_SECONDS))
            left -= LOOK_SECONDS
            if not self.is_taken:
                return

    @property
    def is_taken(self) -> bool:
        """Whether somebody writes."""
        return self._lock.locked()
