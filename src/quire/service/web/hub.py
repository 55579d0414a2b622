"""Live updates: one thread follows the feed and sends events to every open page (Server-Sent Events).

Terms
  round   what the hub found since it last looked: some changes, or only that time has passed (a beat)
  place   the subscription of a page; it has a short queue of rounds

Rules
  1. The store is read once per round, however many pages are subscribed, and not at all while none is.
  2. A round has at most `CHANGES_MAX` changes and the number of those it skipped; rounds are at least `ROUND_SECONDS` apart: a
     store with thousands of commits a second costs no more than a busy page.
  3. A page that does not read is dropped when its queue is full. It reconnects and requests its data again, so nothing is lost.
  4. There are at most `service.http_events_max` places.

Threads: the hub's own thread writes to places; the event loop reads them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from quire.core.errors import Overloaded, QuireError, TimedOut
from quire.core.events import emit
from quire.core.timeline import distance, step_back
from quire.service.web import changes
from quire.service.web.answers import json_bytes
from quire.service.web.dashboard_state import WatchedStore

CHANGES_MAX = 50
ROUND_SECONDS = 0.2
BEAT_SECONDS = 2.0
PIECE_SECONDS = 0.2
"""How long the hub waits before it checks whether it is to stop."""
QUEUE_MAX = 32


class Subscriber:
    """The subscription of one page."""

    def __init__(self, notify: Callable[[], None] = lambda: None) -> None:
        """`notify` is called, in any thread, when there are events to take."""
        self._notify = notify
        self._lock = threading.Lock()
        # guarded by _lock
        self._queue: deque[bytes] = deque()
        self._over = False
        self.dropped = False

    def push(self, event: bytes) -> bool:
        """Queue an event; return False if the queue is full (rule 3)."""
        with self._lock:
            if len(self._queue) >= QUEUE_MAX:
                self.dropped = self._over = True
            else:
                self._queue.append(event)
        self._notify()
        return not self.dropped

    def end(self) -> None:
        """End the subscription."""
        with self._lock:
            self._over = True
        self._notify()

    def take(self) -> bytes | None:
        """Return all queued events, b"" if there are none yet; `None` when the subscription has ended."""
        with self._lock:
            if self._over:
                return None
            events = b"".join(self._queue)
            self._queue.clear()
            return events


class Hub:
    """Sends events to the open pages."""

    def __init__(self, watched: WatchedStore, places_max: int) -> None:
        self._watched = watched
        self._places_max = places_max
        self._wanted = threading.Condition()
        # guarded by _wanted
        self._places: set[Subscriber] = set()
        self._from = 0
        """The head that the first subscriber was given; the thread sends the changes after it."""
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.dropped = 0

    @property
    def now(self) -> int:
        """The number of subscribed pages."""
        return len(self._places)

    def join(self, notify: Callable[[], None] = lambda: None) -> Subscriber:
        """Subscribe one more page (rule 4)."""
        with self._wanted:
            if self._stopping or len(self._places) >= self._places_max:
                raise Overloaded(
                    "the limit for live updates is reached", hint="close a dashboard page", places=self._places_max
                )
            place = Subscriber(notify)
            head = self._watched.manifest.feed.head()
            place.push(event("hello", {"head": head, "at_ms": self._watched.clock.now_ms()}))
            if not self._places:
                self._from = head
            self._places.add(place)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="quire-web-hub", daemon=True)
                self._thread.start()
            self._wanted.notify_all()
            return place

    def leave(self, place: Subscriber) -> None:
        """End the subscription of a page that is gone."""
        with self._wanted:
            self._places.discard(place)

    def close(self) -> None:
        """End all subscriptions and the thread."""
        with self._wanted:
            self._stopping = True
            self._wanted.notify_all()
            thread = self._thread
        self._end_all()
        if thread is not None:
            thread.join(BEAT_SECONDS + 5)

    # ── the hub's thread ──────────────────────────────────────────────────────────────────────────────────────────────
    def _run(self) -> None:
        while self._wait_for_places():
            try:
                self._follow()
            except QuireError as error:  # the store has no reader slot for a moment, say, or it is closed
                emit("info", "web.hub_failed", error=error.what)
                self._end_all()
            except Exception as error:
                emit("error", "web.bug", where="hub", error=error)
                self._end_all()

    def _end_all(self) -> None:
        """End all subscriptions. The pages reconnect and request their data again."""
        with self._wanted:
            for place in self._places:
                place.end()
            self._places.clear()

    def _wait_for_places(self) -> bool:
        with self._wanted:
            self._wanted.wait_for(lambda: self._places or self._stopping)
            return not self._stopping

    def _follow(self) -> None:
        """Send rounds until no page is subscribed (rules 1 and 2)."""
        seen, clock = self._from, self._watched.clock
        told_at = clock.monotonic()
        while self._places and not self._stopping:
            try:
                head = self._watched.manifest.feed.wait(seen, PIECE_SECONDS)
            except TimedOut:
                if clock.monotonic() - told_at >= BEAT_SECONDS:
                    self._broadcast("beat", {"head": seen, "at_ms": clock.now_ms()})
                    told_at = clock.monotonic()
                continue
            self._broadcast("changes", self._round(seen, head))
            seen, told_at = head, clock.monotonic()
            with self._wanted:
                self._wanted.wait_for(lambda: self._stopping, ROUND_SECONDS)

    def _round(self, seen: int, head: int) -> dict[str, Any]:
        with self._watched.manifest.read() as txn:
            gaps = txn.gaps()
            records = changes.between(txn, max(seen, step_back(gaps, head, CHANGES_MAX)) + 1, head)
        return {"head": head, "skipped": distance(gaps, seen, head) - len(records), "changes": records}

    def _broadcast(self, name: str, value: Any) -> None:
        message = event(name, value)
        with self._wanted:
            full = [place for place in self._places if not place.push(message)]
            for place in full:
                self._places.discard(place)
                self.dropped += 1
        for _ in full:
            emit("info", "web.page_dropped", reason="it does not read its updates")


def event(name: str, value: Any) -> bytes:
    """Return an event in the format of Server-Sent Events.

    >>> event("beat", {"head": 7})
    b'event: beat\\ndata: {"head":7}\\n\\n'
    """
    return b"event: %b\ndata: %b\n\n" % (name.encode(), json_bytes(value))
