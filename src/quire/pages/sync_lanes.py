"""Who syncs, and who waits for whom: up to two syncs at a time, each for everyone who had written when it began (P7).

A *flight* is a sync on its way: the version that it makes durable, and the segments that it syncs. There is no thread in
between: who has written what no flight covers begins the next flight itself, at once, if a *lane* is free. It has the
interpreter at that moment; a sleeper to whom the sync were handed would first have to wake up, while the disk is idle. With
every lane taken it sleeps, and the next flight serves all who have written by then: so there are groups as soon as there are
more writers than lanes.

Flights are settled in the order in which they began. One that is through before its predecessor waits for it: if the
predecessor fails, nobody knows what is on disk, and none of the two is settled. A flight that ends without being through is a
doubt: it has taken segments from the dirty ones, and nobody else would sync them. That is so for an interrupt between boarding
and the sync as for a failed sync.

Nobody is forgotten. Whether to sleep is decided under the lock under which flights are settled. Whoever settles one wakes
those that are served and, for a free lane, one of those that no flight covers. Who fails or is interrupted, while it leads or
sleeps, does the same before it goes: the one that it wakes leads, or fails in its turn.

Threads: any. Raises what the sync raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from quire.core.waiting import Ring
from quire.pages.page_source import Mark
from quire.pages.publication import Segment

LANES = 2
"""Two keep the disk busy while those that were served make their next transactions. With four each commit had a sync of its
own, and none was faster."""

_NOTHING = Mark(0, 0)


class Flight:
    """A sync on its way, or the wish for one: then it only has a ring."""

    __slots__ = ("is_doomed", "is_through", "lane", "mark", "ring", "segments")

    is_doomed: bool
    """One before it has failed."""
    is_through: bool
    lane: int
    mark: Mark
    segments: list[Segment]
    ring: Ring
    """Of a sleeper."""


class SyncLanes:
    """Waits for lsns to become durable.

    `begin` says what a flight covers (its `mark` and `segments`; the second argument is the flight before it), `sync` makes
    that durable, `settle` takes note, `doubt` hears of a flight that did not get through.
    """

    __slots__ = ("_begin", "_doubt", "_flying", "_lock", "_settle", "_sleepers", "_sync", "durable_lsn")

    def __init__(
        self,
        durable_lsn: int,
        *,
        begin: Callable[[Flight, Flight | None], None],
        sync: Callable[[Flight], None],
        settle: Callable[[Flight], None],
        doubt: Callable[[BaseException], None],
    ) -> None:
        # constant after construction
        self._begin = begin
        self._sync = sync
        self._settle = settle
        self._doubt = doubt
        # guarded by _lock; `durable_lsn` is read by all
        self._lock = threading.Lock()
        self._flying: list[Flight] = []
        """In the order in which they began; settled from the front."""
        self._sleepers: dict[Flight, int] = {}
        """Sleeper → the lsn it waits for."""
        self.durable_lsn = durable_lsn

    def until(self, lsn: int) -> None:
        """Return when everything up to an lsn is durable; raise what the sync for it raised."""
        flight: Flight | None = None
        try:  # around the whole way: who was woken to lead and is interrupted before it does would leave the others asleep
            while self.durable_lsn < lsn:
                flight, leads = Flight(), False
                with self._lock:
                    flying = self._flying
                    before = flying[-1] if flying else None
                    if before is None or (len(flying) < LANES and lsn > before.mark.lsn):
                        leads = True
                        flight.is_through = flight.is_doomed = False
                        flight.lane = 0 if before is None else 1 - before.lane
                        flight.mark, flight.segments = _NOTHING, []
                        flying.append(flight)  # before it takes anything
                        self._begin(flight, before)
                    elif self.durable_lsn < lsn:
                        self._go_to_sleep(flight, lsn)
                    else:
                        return
                if leads:
                    self._sync(flight)
                    flight.is_through = True
                    with self._lock:
                        if len(flying) > 1 or self._sleepers or flight.is_doomed:
                            self._land()
                        else:  # the same for who is alone
                            self._settle(flight)
                            self.durable_lsn = flight.mark.lsn
                            flying.clear()
                else:
                    flight.ring.sleep()
                    self._sleepers.pop(
                        flight, None
                    )  # itself: interrupted before this line, it is still woken by others
        except BaseException as error:
            self._leave(flight, error)
            raise

    def drain(self) -> None:
        """Return when no flight is on its way. The caller has seen to it that syncs that begin from now on touch no file."""
        while True:
            waiter = Flight()
            try:
                with self._lock:
                    if not self._flying:
                        return
                    self._go_to_sleep(waiter, 0)
                waiter.ring.sleep()
            finally:
                self._sleepers.pop(waiter, None)

    def wake(self) -> None:
        """Let every sleeper look again."""
        with self._lock:
            for sleeper in [*self._sleepers]:
                sleeper.ring.wake()

    def forked(self) -> None:
        """In the child of a fork() nobody holds the lock, and nobody sleeps or syncs."""
        self._lock = threading.Lock()
        self._flying, self._sleepers = [], {}

    # ── under the lock ────────────────────────────────────────────────────────────────────────────────────────────────
    def _go_to_sleep(self, sleeper: Flight, lsn: int) -> None:
        sleeper.ring = Ring()
        self._sleepers[sleeper] = lsn

    def _land(self) -> None:
        """Settle the flights that are through, and wake those it concerns."""
        flying = self._flying
        while flying and flying[0].is_through:
            if not flying[0].is_doomed:
                self._settle(flying[0])
                self.durable_lsn = flying[0].mark.lsn
            flying.pop(0)
        if not self._sleepers:
            return
        durable, has_lane = self.durable_lsn, len(flying) < LANES
        covered = flying[-1].mark.lsn if flying else durable
        for sleeper, lsn in [*self._sleepers.items()]:
            if lsn <= durable:
                sleeper.ring.wake()
            elif has_lane and lsn > covered:
                has_lane = False
                sleeper.ring.wake()

    # ── the end of one that fails ─────────────────────────────────────────────────────────────────────────────────────
    def _leave(self, flight: Flight | None, error: BaseException) -> None:
        """A flight has failed, or a thread is interrupted while it leads or sleeps."""
        with self._lock:
            if flight is not None:
                self._sleepers.pop(flight, None)
                if flight in self._flying and not flight.is_through:
                    self._doubt(error)
                    for later in self._flying[self._flying.index(flight) + 1 :]:
                        later.is_doomed = True
                    self._flying.remove(flight)
            self._land()
