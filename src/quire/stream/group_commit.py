"""Group commit: one thread writes and syncs the records of many threads, and wakes them.

The *leader* writes and syncs for itself and for every thread that had appended by then. A *sleeper* waits for that sync or for
the next one, on its own ring. A single thread syncs with a direct call: no other thread is involved. The *baton* is the duty
to wake the next sleeper that has been served. A *round* is the set of appends between two refusals: a full disk ends a round,
and the records that are pending then are refused.

No wake-up is lost. A sleeper registers before its last check, and a leader checks for sleepers after it has given up the lead:
either the leader sees the sleeper, or the sleeper sees that there is no leader. A sleeper that leaves without having been woken
sets `is_gone` first and then checks its ring; the thread that passes it the baton rings first and then checks `is_gone`: one of
the two passes the baton on.

Why this is not `pages/sync_lanes.py`: there every thread has written its own frames, and a leader only syncs. Here the leader
also encodes and writes for all of them, so that each thread needs the interpreter only briefly, and waking the threads is the
larger part of the work.

Threads: any. Single steps of a deque are atomic; the only lock is held just to take the lead. Raises: what the sync raises."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from quire.core.errors import QuireError
from quire.core.waiting import Ring

EXTRA_GROUPS = 2
"""Further syncs that a leader may run for other threads after its own records are durable: the bound on its delay."""

RECHECK_SECONDS = 1.0
"""A sleeper checks at this interval without being woken: if a signal handler raises in the thread that has the baton, the baton
may be lost."""


class _Sleeper:
    """A waiting thread."""

    __slots__ = ("is_gone", "ring", "upto")

    def __init__(self, upto: int) -> None:
        self.upto = upto
        self.ring = Ring()
        self.is_gone = False


class AppendRound:
    """The appends between two refusals. Each append keeps its round, which shows whether the append was refused."""

    __slots__ = ("refused_from", "why")

    def __init__(self) -> None:
        # set once, before a refused id is assigned again
        self.refused_from: int = _NEVER
        """The first refused id: its record and all later ones of the round are not written, and never will be."""
        self.why: QuireError | None = None

    def error(self) -> QuireError:
        """Return the error of the refusal; a new one each time, because raising modifies an exception."""
        assert self.why is not None
        return type(self.why)(self.why.what, hint=self.why.hint, **self.why.where)


_NEVER = 1 << 65
"""Above every id."""
_NEVER_REFUSED = AppendRound()
"""The round for logs that refuse nothing."""


class Durable(Protocol):
    """The log whose records are waited for."""

    durable: int
    """The id after the last durable record."""


class GroupCommit:
    """Waits for ids to become durable. `sync` writes and syncs all records that are pending at its call, and may raise."""

    __slots__ = ("_leader", "_lock", "_log", "_served", "_sync", "_waiting")

    def __init__(self, log: Durable, sync: Callable[[], None]) -> None:
        # constant after construction
        self._log = log
        self._sync = sync
        # guarded by _lock; the leader itself clears it without
        self._lock = threading.Lock()
        self._leader: object | None = None
        """Identifies the call that leads; `None` if none does."""
        # synchronised by themselves
        self._waiting: deque[_Sleeper] = deque()
        self._served: deque[_Sleeper] = deque()

    def wait_durable(self, upto: int, append_round: AppendRound = _NEVER_REFUSED) -> None:
        """Wait until everything below an id is durable, or raise the error of its refusal.

        Refused ids are reused, so a durable mark above an id proves nothing to a refused caller. The round does; it is checked
        before the mark and after it.
        """
        while append_round.refused_from >= upto:
            if self._log.durable >= upto:
                if append_round.refused_from >= upto:
                    return
            elif not self._lead(upto):
                self._sleep(upto)
        raise append_round.error()

    def wake(self) -> None:
        """Wake every sleeper to check again."""
        for _ in range(len(self._waiting)):
            self._hand_over()

    def forked(self) -> None:
        """Reset in the child of a fork(), where no thread holds the lock and none sleeps."""
        self._lock, self._leader = threading.Lock(), None
        self._waiting, self._served = deque(), deque()

    def _lead(self, upto: int) -> bool:
        """Sync for this thread and the sleepers; return False if another thread leads."""
        me = object()
        try:  # around taking the lead: an interrupt right after it must not leave the others without a leader
            with self._lock:
                if self._leader is not None:
                    return False
                self._leader = me
            if self._log.durable < upto:
                self._sync()
            if self._waiting:
                self._serve_further_groups()
        finally:
            if self._leader is me:
                # Before `_waiting` is looked at: a sleeper that registers later finds no leader, and leads itself.
                self._leader = None
                if self._waiting:
                    self._hand_over()  # the first sleeper leads, unless another thread does by then
        return True

    def _serve_further_groups(self) -> None:
        """Serve further groups after a sync. The disk stays busy while the served threads wake up; a new leader would first
        have to get the interpreter, for which all of them compete."""
        for _ in range(EXTRA_GROUPS):
            self._wake_served()
            if not self._waiting:
                return
            try:
                self._sync()
            except Exception:  # this thread's records are durable: the sleepers get the error from their own sync
                return
        self._wake_served()

    def _wake_served(self) -> None:
        """Begin to wake the sleepers that are served. REQUIRES to be the leader."""
        durable, waiting = self._log.durable, self._waiting
        try:
            for _ in range(len(waiting)):
                sleeper = waiting.popleft()
                (self._served if sleeper.upto <= durable else waiting).append(sleeper)
        except IndexError:
            pass  # the previous leader woke one meanwhile
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
        """Wake the next sleeper only; it wakes the one after it. If all were woken at once, all but one would find the
        interpreter taken and sleep again (measured: twice as many context switches)."""
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
            while not woken and self._log.durable < upto and self._leader is not None:
                woken = sleeper.ring.sleep(RECHECK_SECONDS)
        finally:
            if not woken:
                sleeper.is_gone = True  # before the ring is checked: `_pass_on` rings before it checks `is_gone`
                woken = sleeper.ring.sleep(0)
            if woken and self._served:
                self._pass_on()
