"""The gate of an environment: who is inside LMDB's map, and how to be alone with it.

Terms
  visitor   whoever is inside: a read transaction, a copy, a look at LMDB's figures
  ticket    a visitor's place; it falls free with `leave`, or with the visitor itself
  alone     nobody is inside, nobody gets in: for `set_mapsize` and `close`, which are fatal for a live transaction

Entering and leaving take no lock: a lock could be held when a thread forks or a signal strikes. A visitor first takes its
place and then looks whether somebody wants to be alone; that one first says so and then looks who is inside. Whatever the
order, one of them sees the other. (Each step is one operation under the GIL.) One is alone at a time; the turnstile is the
lock of that one, and where visitors wait meanwhile.

Any thread. Raises `TimedOut`.
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
"""How soon visitors that left by themselves are noticed."""


class Visitor(Protocol):
    """Whoever may be inside."""

    def abandon(self) -> None:
        """In the child of a fork(): be over, without touching what is the parent's."""


class Ticket(weakref.ref[Visitor]):
    """A place inside the gate."""

    __slots__ = ("is_reported", "since", "thread")

    since: float
    thread: threading.Thread
    is_reported: bool


class MapGate:
    """Knows who is inside; `exclusive` waits until nobody is, and keeps everyone out for the length of a call."""

    def __init__(self) -> None:
        self._inside: set[Ticket] = set()
        self._forget = self._inside.discard  # C: unlike a function of ours, no signal handler can raise in it
        self._turnstile = threading.Lock()
        self._leaving = Waiters()
        self._is_wanted = False
        """Whether somebody is alone or wants to be."""

    def enter(self, visitor: Visitor) -> Ticket:
        """Go in, once nobody wants to be alone."""
        ticket = Ticket(visitor, self._forget)
        ticket.thread = threading.current_thread()
        ticket.since = time.monotonic()
        ticket.is_reported = False
        self._inside.add(ticket)
        if self._is_wanted:
            self._step_back(ticket)
        return ticket

    def _step_back(self, ticket: Ticket) -> None:
        while self._is_wanted and not self._is_mine_inside(but=ticket):
            self.leave(ticket)
            with self._turnstile:
                pass
            self._inside.add(ticket)

    def _is_mine_inside(self, but: Ticket) -> bool:
        me = threading.current_thread()
        return any(ticket.thread is me and ticket is not but for ticket in [*self._inside])

    def leave(self, ticket: Ticket) -> None:
        """Go out; once is enough, twice does no harm."""
        self._inside.discard(ticket)
        if self._is_wanted:
            self._leaving.wake()

    def exclusive(self, timeout: float, call: Callable[[], None]) -> None:
        """Make a call while nobody is inside. `TimedOut` names the threads that stayed."""
        with self._turnstile:
            try:
                self._is_wanted = True
                self._wait_for_others(time.monotonic() + timeout)
                call()
            finally:
                self._is_wanted = False

    def _wait_for_others(self, deadline: float) -> None:
        me = threading.current_thread()
        while stayed := [*self._inside]:
            rest = deadline - time.monotonic()
            if rest <= 0 or all(ticket.thread is me for ticket in stayed):
                raise TimedOut(
                    "open read transactions keep the manifest's map from growing",
                    hint="end them; `quire doctor` lists readers",
                    readers=sorted({ticket.thread.name for ticket in stayed}),
                )
            self._leaving.sleep_until(lambda: not self._inside, min(rest, LOOK_SECONDS))

    def unreported(self, seconds: float) -> list[tuple[float, str]]:
        """(age, thread) of visitors that have been inside for longer than `seconds`, each told once."""
        now = time.monotonic()
        long_reads = []
        for ticket in [*self._inside]:
            if now - ticket.since > seconds and not ticket.is_reported:
                ticket.is_reported = True
                long_reads.append((now - ticket.since, ticket.thread.name))
        return long_reads

    def visitors(self) -> list[Visitor]:
        """Who is inside."""
        return [visitor for ticket in [*self._inside] if (visitor := ticket()) is not None]
