"""Whose turn it is to write to a database: one of the connections of this process.

SQLite asks for its locks without waiting; who is refused sleeps (`busy_timeout`) for 1, 2, 5, … 100 ms and asks again, with a
new snapshot. Here such a sleep ends when the turn is given back, which is before the transaction is synced (P7): the next one
is made during that sync, and shares the one after it with others. Nobody is handed the turn: whoever runs already and asks
first has it, so that the turn is never idle while a thread wakes up.

Rules
  1. One holder at a time. It gives the turn back when its transaction is appended, before that is synced (P7).
  2. Who gives it back wakes the one that has slept longest, which then competes for it with everybody else.
  3. SQLite counts a busy timeout in the sleeps it has asked for. So who was woken and refused all the same, some times in a
     row, sleeps as long as it is told from then on: its timeout would be over too soon.
  4. A wake-up that meets nobody who wants the turn any more is lost: the others sleep on, 0.1 s at most.

Threads: any. Time is the machine's: what waits here is a thread, not a promise to the user.
"""

from __future__ import annotations

import threading
import time

from quire.core.waiting import Waiters

EARLY_MAX = 8
"""How often a sleep may end early for one lock (rule 3). None lasts longer than 0.1 s, so a timeout is never 0.8 s short."""

FIRST_SECONDS = 0.001
"""SQLite's first sleep for a lock; the next ones are longer."""


class Turn:
    """See the rules above."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: object = None
        self._waiters = Waiters()

    def take(self, who: object) -> bool:
        """Whether it is the turn of `who`, who holds it from now on if so."""
        if self._holder is who:
            return True
        if not self._lock.acquire(blocking=False):
            return False
        self._holder = who
        return True

    def give(self, who: object) -> None:
        """Give the turn back, and wake somebody; somebody else's stays."""
        if self._holder is who:
            self._holder = None
            self._lock.release()
            self._waiters.wake_first()

    def wait(self, seconds: float) -> bool:
        """Sleep until the turn is given back, or so many seconds; whether it was."""
        return self._waiters.sleep_unless(lambda: not self.is_taken, seconds)

    @property
    def is_taken(self) -> bool:
        """Whether somebody writes."""
        return self._lock.locked()


class Sleeper:
    """How one connection waits for its turn: rule 3."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._early = 0

    def sleep(self, seconds: float) -> None:
        """As long as SQLite says, or until the turn is given back."""
        if seconds <= FIRST_SECONDS:
            self._early = 0
        if self._early < EARLY_MAX:
            self._early += self._turn.wait(seconds)
        else:
            time.sleep(seconds)
