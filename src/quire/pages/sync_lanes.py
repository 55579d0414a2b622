"""Group sync of a WAL: up to two syncs at a time, each of which covers everything written when it began (P7).

Terms
  flight   a running sync: the version that it makes durable, and the segments that it syncs
  lane     a place for a running flight; there are two
  leader   the thread that runs a flight
  sleeper  a thread that waits for one

There is no sync thread: a thread with writes that no flight covers starts the next flight itself, at once, if a lane is free.
It has the interpreter lock at that moment; if the sync were handed to a sleeper, the disk would be idle until the sleeper wakes
up. With every lane taken the thread sleeps, and the next flight covers everything written by then: groups form as soon as there
are more writers than lanes.

Flights are settled in the order in which they began. A flight that completes before its predecessor waits for it: if the
predecessor fails, the state on disk is unknown, and neither is settled. A flight that ends without completing has an unknown
outcome, whether its sync failed or an interrupt came between taking the segments and the sync: it has removed segments from the
dirty queue, and no other flight would sync them.

No sleeper is left behind. Whether to sleep is decided under the lock under which flights are settled. A thread that settles a
flight wakes the sleepers that it covers and, for a free lane, one sleeper that no flight covers. A thread that fails or is
interrupted, whether it is leading a sync or waiting for one, does the same before it leaves: the sleeper that it wakes leads a
flight, or fails as well.

Threads: any. Raises what the sync raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from quire.core.waiting import Ring
from quire.pages.page_source import Mark
from quire.pages.publication import Segment

LANES = 2
"""Two keep the disk busy while threads whose transactions are durable prepare the next ones. With four, each commit had its own
sync, and none was faster."""

_NOTHING = Mark(0, 0)


class Flight:
    """A running sync, or a sleeper waiting for one, which has only a ring."""

    __slots__ = ("is_invalidated", "lane", "mark", "ring", "segments", "sync_completed")

    is_invalidated: bool
    """Whether an earlier flight has failed, so that this one must not be settled."""
    sync_completed: bool
    """Whether its sync has completed."""
    lane: int
    mark: Mark
    segments: list[Segment]
    ring: Ring
    """Wakes the sleeper."""


class SyncLanes:
    """Makes lsns durable, with up to two syncs at a time.

    `begin` sets what a flight covers (its `mark` and `segments`; the second argument is the preceding flight), `sync` makes it
    durable, `settle` records that it is durable, and `on_failure` is called when a flight does not complete.
    """

    __slots__ = ("_begin", "_flying", "_lock", "_on_failure", "_settle", "_sleepers", "_sync", "durable_lsn")

    def __init__(
        self,
        durable_lsn: int,
        *,
        begin: Callable[[Flight, Flight | None], None],
        sync: Callable[[Flight], None],
        settle: Callable[[Flight], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        # constant after construction
        self._begin = begin
        self._sync = sync
        self._settle = settle
        self._on_failure = on_failure
        # guarded by _lock; `durable_lsn` is read by all
        self._lock = threading.Lock()
        self._flying: list[Flight] = []
        """In the order in which they began; settled from the front."""
        self._sleepers: dict[Flight, int] = {}
        """Sleeper → the lsn it waits for."""
        self.durable_lsn = durable_lsn

    def wait_durable(self, lsn: int) -> None:
        """Return when everything up to an lsn is durable; raise what the sync for it raised."""
        flight: Flight | None = None
        try:  # around the loop: a thread woken to lead may be interrupted before it does, and must wake another sleeper
            while self.durable_lsn < lsn:
                flight, leads = Flight(), False
                with self._lock:
                    flying = self._flying
                    before = flying[-1] if flying else None
                    # If the newest flight covers this lsn, it is enough to wait for it: another sync would add nothing.
                    if before is None or (len(flying) < LANES and lsn > before.mark.lsn):
                        leads = True
                        flight.sync_completed = flight.is_invalidated = False
                        # Never the lane of the running flight: two syncs through one handle could share one write-back
                        # error, and the second would report lost frames as durable (decision 011).
                        flight.lane = 0 if before is None else 1 - before.lane
                        flight.mark, flight.segments = _NOTHING, []
                        flying.append(flight)  # before it takes segments, so that `_abort_flight` finds it
                        self._begin(flight, before)
                    # Tested again under the lock: if the flight was settled since the loop's test, nothing would wake
                    # this thread.
                    elif self.durable_lsn < lsn:
                        self._go_to_sleep(flight, lsn)
                    else:
                        return
                if leads:
                    self._sync(flight)
                    # Before the lock is taken: after an interrupt here `_abort_flight` settles the flight instead of
                    # failing it.
                    flight.sync_completed = True
                    with self._lock:
                        if len(flying) > 1 or self._sleepers or flight.is_invalidated:
                            self._settle_completed()
                        else:  # what `_settle_completed` does, for a lone flight without sleepers
                            self._settle(flight)
                            self.durable_lsn = flight.mark.lsn
                            flying.clear()
                else:
                    flight.ring.sleep()
                    # Removed by the sleeper itself: until then other threads can still wake it.
                    self._sleepers.pop(flight, None)
        except BaseException as error:
            self._abort_flight(flight, error)
            raise

    def drain(self) -> None:
        """Return when no flight is running. REQUIRES that syncs that begin from now on touch no file."""
        while True:
            waiter = Flight()
            try:
                with self._lock:
                    if not self._flying:
                        return
                    # At lsn 0, every settled flight wakes it.
                    self._go_to_sleep(waiter, 0)
                waiter.ring.sleep()
            finally:
                self._sleepers.pop(waiter, None)

    def wake(self) -> None:
        """Wake every sleeper, so that it checks again."""
        with self._lock:
            for sleeper in [*self._sleepers]:
                sleeper.ring.wake()

    def forked(self) -> None:
        """Reset the state in the child of a fork(), where no thread holds the lock, sleeps or syncs."""
        self._lock = threading.Lock()
        self._flying, self._sleepers = [], {}

    # ── under the lock ────────────────────────────────────────────────────────────────────────────────────────────────
    def _go_to_sleep(self, sleeper: Flight, lsn: int) -> None:
        sleeper.ring = Ring()
        self._sleepers[sleeper] = lsn

    def _settle_completed(self) -> None:
        """Settle the completed flights in order, and wake the sleepers that are covered or can lead."""
        flying = self._flying
        while flying and flying[0].sync_completed:
            if not flying[0].is_invalidated:
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
                # One is enough: its flight covers everything written by then, and its end wakes the next.
                has_lane = False
                sleeper.ring.wake()

    # ── failures ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def _abort_flight(self, flight: Flight | None, error: BaseException) -> None:
        """Clean up after a flight that failed, or a thread that was interrupted while it led or slept."""
        with self._lock:
            if flight is not None:
                self._sleepers.pop(flight, None)
                if flight in self._flying and not flight.sync_completed:
                    # Before any sleeper is woken: the one that leads next must find the database failed.
                    self._on_failure(error)
                    for later in self._flying[self._flying.index(flight) + 1 :]:
                        later.is_invalidated = True
                    self._flying.remove(flight)
            self._settle_completed()
