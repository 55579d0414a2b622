"""The gate of an environment: tracks the users of LMDB's map, and grants exclusive access to it.

Terms
  visitor     a user of the map: a read transaction, a copy, a query of LMDB's figures
  ticket      a visitor's entry in the gate; removed by `leave`, or when the visitor is freed
  exclusive   no visitor is inside and none can enter: for `set_mapsize` and `close`, which are fatal to a live transaction

Entering and leaving take no lock: a lock could be held when a thread forks or a signal arrives. A visitor first adds
its ticket and then checks whether a thread wants exclusive access; that thread first sets the flag and then looks for
tickets. Whatever the order, one of them sees the other. (Each step is one operation under the GIL.) One thread at a
time has exclusive access. It holds the turnstile lock, on which new visitors wait.

Threads: any thread. Raises `TimedOut`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from quire.core.errors import TimedOut
from quire.core.waiting import Waiters

LOOK_SECONDS = 0.05
"""Interval at which `exclusive` looks for visitors that were freed without `leave`, in seconds."""


class Visitor(Protocol):
    """A user of the map."""

    def abandon(self) -> None:
        """End in the child of a fork(), without touching the parent's state."""


class Ticket(weakref.ref[Visitor]):
    """A visitor's entry in the gate."""

    __slots__ = ("is_reported", "since", "thread")

    since: float
    thread: threading.Thread
    is_reported: bool


class MapGate:
    """Tracks visitors; `exclusive` waits until there are none, and keeps new ones out for the duration of a call."""

    def __init__(self) -> None:
        self._inside: set[Ticket] = set()
        self._forget = self._inside.discard  # implemented in C: no signal handler can raise inside it
        self._exclusive_lock = threading.Lock()
        self._leaving = Waiters()
        self._exclusive_wanted = False
        """Whether a thread has or wants exclusive access."""

    def enter(self, visitor: Visitor) -> Ticket:
        """Enter, waiting while a thread has or wants exclusive access."""
        ticket = Ticket(visitor, self._forget)
        ticket.thread = threading.current_thread()
        ticket.since = time.monotonic()
        ticket.is_reported = False
        self._inside.add(ticket)
        if self._exclusive_wanted:
            self._wait_for_exclusive(ticket)
        return ticket

    def _wait_for_exclusive(self, ticket: Ticket) -> None:
        # A thread that has another ticket does not wait: `exclusive` would be waiting for that ticket.
        while self._exclusive_wanted and not self._has_other_ticket(but=ticket):
            self.leave(ticket)
            with self._exclusive_lock:
                pass
            self._inside.add(ticket)

    def _has_other_ticket(self, but: Ticket) -> bool:
        me = threading.current_thread()
        return any(ticket.thread is me and ticket is not but for ticket in [*self._inside])

    def leave(self, ticket: Ticket) -> None:
        """Leave. Idempotent."""
        self._inside.discard(ticket)
        if self._exclusive_wanted:
            self._leaving.wake()

    def exclusive(self, timeout: float, call: Callable[[], None]) -> None:
        """Make a call while no visitor is inside. `TimedOut` names the threads that did not leave."""
        with self._exclusive_lock:
            try:
                # Inside the `try`: a flag that a signal handler's exception left set would keep out every later reader.
                self._exclusive_wanted = True
                self._wait_for_others(time.monotonic() + timeout)
                call()
            finally:
                self._exclusive_wanted = False

    def _wait_for_others(self, deadline: float) -> None:
        me = threading.current_thread()
        while stayed := [*self._inside]:
            rest = deadline - time.monotonic()
            # This thread's own visitors cannot leave while it waits here.
            if rest <= 0 or all(ticket.thread is me for ticket in stayed):
                raise TimedOut(
                    "open read transactions keep the manifest's map from growing",
                    hint="end them; `quire doctor` shows how many reader slots are in use",
                    readers=sorted({ticket.thread.name for ticket in stayed}),
                )
            self._leaving.sleep_until(lambda: not self._inside, min(rest, LOOK_SECONDS))

    def unreported(self, seconds: float) -> list[tuple[float, str]]:
        """Return (age, thread) of visitors that have been inside for longer than `seconds`; each is reported once."""
        now = time.monotonic()
        long_reads = []
        for ticket in [*self._inside]:
            if now - ticket.since > seconds and not ticket.is_reported:
                ticket.is_reported = True
                long_reads.append((now - ticket.since, ticket.thread.name))
        return long_reads

    def visitors(self) -> list[Visitor]:
        """Return the visitors inside."""
        return [visitor for ticket in [*self._inside] if (visitor := ticket()) is not None]
