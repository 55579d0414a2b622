"""Group commit: one thread writes and syncs what many threads have appended, and wakes them.

The leader writes and syncs for itself and for everyone who had appended by then; a sleeper waits for that sync or for the
next one, each with a ring of its own. With nobody else about, a sync is a call: no thread in between. The baton is the duty
to wake the next sleeper that has been served. A round is what was appended between two refusals: a full disk ends a round,
and what is pending then is refused.

No wake-up is lost. A sleeper registers before its last check, and a leader looks for sleepers after it has released its lock:
either it sees the sleeper, or the sleeper sees that nobody leads. A sleeper that leaves without having been woken says so
first and then checks its ring; whoever hands it the baton rings first and then checks: one of the two continues.

Why this is not `pages/sync_lanes.py`: there everybody has written, and a leader only syncs. Here it also encodes and writes
for all of them, so that each needs the interpreter for a moment only, and waking them is the larger part of the work.

Threads: any. Single steps of a deque are atomic; there is no lock but the leader's. Raises what the sync raises."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from quire.core.errors import QuireError
from quire.core.waiting import Ring

MORE_GROUPS = 2
"""What a leader waits longer than it must, in syncs: no more than those who come while it leads."""

LOOK_SECONDS = 1.0
"""A sleeper looks this often by itself: a signal handler that raises in the thread with the baton may have dropped it."""


class _Sleeper:
    """A thread that waits."""

    __slots__ = ("is_gone", "ring", "upto")

    def __init__(self, upto: int) -> None:
        self.upto = upto
        self.ring = Ring()
        self.is_gone = False


class AppendRound:
    """What was appended between two refusals; whoever appended has it, and learns from it whether it was refused."""

    __slots__ = ("refused_from", "why")

    def __init__(self) -> None:
        # set once, before an id that was refused is given out again
        self.refused_from: int = _NEVER
        """The first id that was refused: this one and all behind it are not written, and never will be."""
        self.why: QuireError | None = None

    def error(self) -> QuireError:
        """Why it was refused; a new one each time, because raising changes an exception."""
        assert self.why is not None
        return type(self.why)(self.why.what, hint=self.why.hint, **self.why.where)


_NEVER = 1 << 65
"""No id is as high."""
_KEPT = AppendRound()
"""Of who appends where nothing is refused."""


class Durable(Protocol):
    """What is waited for."""

    durable: int
    """The id behind the last durable record."""


class GroupCommit:
    """Waits for ids to become durable; `sync` writes and syncs what is pending when it is called, and may raise."""

    __slots__ = ("_leader", "_log", "_served", "_sync", "_waiting")

    def __init__(self, log: Durable, sync: Callable[[], None]) -> None:
        # constant after construction
        self._log = log
        self._sync = sync
        # guarded by themselves
        self._leader = threading.Lock()
        self._waiting: deque[_Sleeper] = deque()
        self._served: deque[_Sleeper] = deque()

    def until(self, upto: int, turn: AppendRound = _KEPT) -> None:
        """Return when everything below an id is durable, or raise why it was refused.

        Refused ids are reused, so a durable mark above an id proves nothing to a refused caller: the round does, and is checked
        before the mark and after it.
        """
        while turn.refused_from >= upto:
            if self._log.durable >= upto:
                if turn.refused_from >= upto:
                    return
            elif self._leader.acquire(False):
                self._lead(upto)
            else:
                self._sleep(upto)
        raise turn.error()

    def wake(self) -> None:
        """Let every sleeper look again."""
        for _ in range(len(self._waiting)):
            self._hand_over()

    def forked(self) -> None:
        """In the child of a fork() nobody holds the lock, and nobody sleeps."""
        self._leader = threading.Lock()
        self._waiting, self._served = deque(), deque()

    def _lead(self, upto: int) -> None:
        """REQUIRES the leader's lock, and gives it back."""
        try:
            if self._log.durable < upto:
                self._sync()
            if self._waiting:
                self._stay()
        finally:
            self._leader.release()
            if self._waiting:
                self._hand_over()  # the first of them leads, if nobody else does by then

    def _stay(self) -> None:
        """Serve further groups after a sync. The disk then goes on at once, while those that were served wake up; a new leader
        would first have to get the interpreter, for which all of them wait too."""
        for _ in range(MORE_GROUPS):
            self._look_after()
            if not self._waiting:
                return
            try:
                self._sync()
            except Exception:  # our own records are durable: the others find out for themselves
                return
        self._look_after()

    def _look_after(self) -> None:
        """Begin to wake those who are served. REQUIRES the leader's lock."""
        durable, waiting = self._log.durable, self._waiting
        try:
            for _ in range(len(waiting)):
                sleeper = waiting.popleft()
                (self._served if sleeper.upto <= durable else waiting).append(sleeper)
        except IndexError:
            pass  # the leader before woke one meanwhile
        if self._served:
            self._pass_on()

    def _hand_over(self) -> None:
        """Wake a sleeper that has not been served."""
        try:
            self._served.appendleft(self._waiting.popleft())
        except IndexError:
            return
        self._pass_on()

    def _pass_on(self) -> None:
        """Wake the next sleeper only; it wakes the one behind it. Woken at once, all but one of them would find the interpreter
        taken and go to sleep again (measured: twice as many context switches)."""
        try:
            while True:
                sleeper = self._served.popleft()
                sleeper.ring.wake()
                if not sleeper.is_gone:
                    return
        except IndexError:
            pass

    def _sleep(self, upto: int) -> None:
        sleeper = _Sleeper(upto)
        self._waiting.append(sleeper)
        woken = False
        try:
            while not woken and self._log.durable < upto and self._leader.locked():
                woken = sleeper.ring.sleep(LOOK_SECONDS)
        finally:
            if not woken:
                sleeper.is_gone = True
                woken = sleeper.ring.sleep(0)
            if woken and self._served:
                self._pass_on()
