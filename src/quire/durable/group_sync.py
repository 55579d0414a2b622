"""Who syncs, and who waits for whom: one sync at a time, each for everyone who had written when it began.

Terms
  leader   the thread that syncs, for itself and for others
  lsn      any number that rises with what is written: an lsn of a WAL, the id of a record
  heir     the one that leads next: it waits for the leader's lock, so that the disk is idle for one wake-up and no longer
  sleeper  everyone else: the sync that is under way or the next one serves it

Rules
  1. There is no thread in between: with nobody else about, a sync is a call.
  2. Who is served does not wait for the next sync, and who is not is left asleep if there is an heir: waking every thread, most
     of them only to go to sleep again, costs context switches.
  3. Nobody is forgotten. Whoever gives the leader's lock back looks through the sleepers afterwards: it wakes those that are
     served, and all of them if there is no heir. A sleeper enters its name before it looks a last time, so either it sees
     that nobody leads, or the one that leads sees it.
  4. Who has led does not go on before its heir has begun to sync. Both need the interpreter at that moment, and whoever runs
     keeps it until it blocks: the disk would be idle while the former leader makes its next transaction (0.1 ms of 0.5).

Threads: any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

PATIENCE_SECONDS = 0.002
"""How long rule 4 is kept at most: nothing but speed depends on it."""


class GroupSync:
    """Waits for lsns to become durable; `sync` makes durable what is written when it is called, and may raise."""

    __slots__ = ("_begun", "_covers", "_durable_lsn", "_heir", "_leader", "_sleepers", "_sync", "_written_lsn")

    def __init__(
        self, sync: Callable[[], None], *, written_lsn: Callable[[], int], durable_lsn: Callable[[], int]
    ) -> None:
        # constant after construction
        self._sync = sync
        self._written_lsn = written_lsn
        self._durable_lsn = durable_lsn
        # guarded by themselves
        self._leader = threading.Lock()
        self._heir = threading.Lock()
        self._sleepers: dict[SimpleQueue[None], int] = {}
        """Ring → the lsn its sleeper waits for. Single steps of a dict are atomic."""
        # written by the heir
        self._begun: threading.Lock | None = None
        """Held until the heir begins to sync; `None` if it has begun, or there is none."""
        # written by the leader; who reads an old value only takes the longer way
        self._covers = 0
        """The lsn that the sync under way makes durable."""

    def until(self, lsn: int) -> None:
        """Return when everything up to an lsn is durable; raise what the sync for it raised."""
        while self._durable_lsn() < lsn:
            if self._begun is None and self._leader.acquire(False):  # with an heir about, it is the heir's turn
                self._lead(lsn)
            elif lsn > self._covers and self._heir.acquire(False):
                self._inherit(lsn)
            else:
                self._sleep(lsn)

    @property
    def lock(self) -> threading.Lock:
        """The leader's lock: while it is held nobody syncs. Call `wake` after giving it back."""
        return self._leader

    def wake(self) -> None:
        """Let every sleeper look again."""
        for ring in [*self._sleepers]:
            ring.put(None)

    def forked(self) -> None:
        """In the child of a fork() nobody holds the locks."""
        self._leader, self._heir, self._begun = threading.Lock(), threading.Lock(), None
        self._sleepers = {}

    def _lead(self, lsn: int, inherited: threading.Lock | None = None) -> None:
        """Sync, unless it is done already. REQUIRES the leader's lock, and gives it back; `inherited` is an heir's `_begun`."""
        try:
            is_due = self._durable_lsn() < lsn
            if is_due:
                self._covers = self._written_lsn()
            if inherited is not None:
                own, inherited = inherited, None
                self._begin(own)
            if is_due:
                self._sync()
        finally:
            if inherited is not None:
                self._begin(inherited)
            begun = self._begun
            self._leader.release()
            if begun is not None:
                begun.acquire(timeout=PATIENCE_SECONDS)  # rule 4
            if self._sleepers:
                self._look_after()

    def _begin(self, begun: threading.Lock) -> None:
        """The heir leads now. It knows by then whom it serves: one of those would be an heir with nothing to do."""
        self._begun = None
        self._heir.release()
        begun.release()

    def _look_after(self) -> None:
        """Rule 3."""
        if not self._heir.locked():
            self.wake()
            return
        durable = self._durable_lsn()
        for ring, lsn in [*self._sleepers.items()]:
            if lsn <= durable:
                ring.put(None)

    def _inherit(self, lsn: int) -> None:
        """Wait for the leader's lock, then lead. REQUIRES the heir's lock, and gives it back."""
        begun = threading.Lock()
        begun.acquire()
        self._begun = begun  # held by then: the leader must find it so
        try:
            self._leader.acquire()
        except BaseException:  # a signal's: whoever relied on this heir looks for another
            self._begin(begun)
            self.wake()
            raise
        self._lead(lsn, begun)

    def _sleep(self, lsn: int) -> None:
        ring: SimpleQueue[None] = SimpleQueue()
        self._sleepers[ring] = lsn
        try:
            if self._durable_lsn() < lsn and (self._leader.locked() or self._heir.locked()):
                ring.get()
        finally:
            del self._sleepers[ring]
