"""What was changed and is not in the bucket yet: one queue for the whole store, in the order in which it happened (A5).

Terms
  event     see format.py; its place in the queue is its ordinal, counted from 1 since the store was opened
  slot      a place that is taken before it is known what belongs there: a commit of the manifest

Whoever changes a file hands the change over before it tells anybody of it. So every beginning of the queue is a state that a
killed process could have left, and recovery knows those: a cut is simply where the archiver stopped taking.

A commit takes its slot before it begins, and fills it once it is durable: readers of the manifest see the commit before its
thread goes on, and what they do because of it must come later in the queue. The archiver waits at a slot that is not filled.

Threads: any. Handing over takes a lock for the time of one append.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from quire.archive.format import OBJECT_BYTES, AnyEvent, BaseEvent


class PendingArtifact(msgspec.Struct, frozen=True, gc=False):
    """A file that is complete and not uploaded yet; it becomes an `ArtifactEvent` when a cut takes it."""

    path: str
    """In the store."""
    kept: str
    """A name that it keeps until it is uploaded."""
    identity: tuple[int, int, int]
    """(inode, size, time of change)"""

    def size_bytes(self) -> int:
        return 256


class PendingBase(msgspec.Struct, frozen=True, gc=False):
    """A base whose parts are in the bucket. It counts, unless the chain was broken since it began."""

    base: BaseEvent
    breaks: int
    """How often the chain had been broken when it began."""

    def size_bytes(self) -> int:
        return self.base.size_bytes()


Entry = AnyEvent | PendingArtifact | PendingBase


class Slot:
    """A place in the queue whose event is not known yet. Fill it or cancel it; the archiver waits here until then."""

    __slots__ = ("_queue", "event", "is_queued", "is_settled", "size_bytes")

    def __init__(self, queue: EventQueue) -> None:
        self._queue = queue
        self.event: Entry | None = None
        self.is_queued = self.is_settled = False
        self.size_bytes = 0

    def fill(self, event: AnyEvent) -> None:
        """This is what belongs here."""
        self.event = event
        self._queue.settled(self, event.size_bytes())

    def cancel(self) -> None:
        """Nothing belongs here."""
        self._queue.settled(self, 0)


FULL_SECONDS = 1.0
"""How long a change waits for a full queue to shrink; then memory is exceeded rather than the store stopped."""


def _nobody() -> None:
    """Nobody takes from the queue."""


class EventQueue:
    """Events in order, taken by one archiver. What waits here is bounded by what the archiver encodes, not by the bucket."""

    def __init__(
        self,
        *,
        crowded_bytes: int = 1 << 62,
        full_bytes: int = 1 << 62,
        crowded: Callable[[], None] = _nobody,
        is_open: bool = True,
    ) -> None:
        """`crowded` is called when more than `crowded_bytes` wait; beyond `full_bytes` whoever changes files waits for room."""
        # constant after construction
        self.crowded_bytes = crowded_bytes
        self._full_bytes = full_bytes
        self._crowded = crowded
        # guarded by _lock
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._events: deque[Entry | Slot] = deque()
        self._front: deque[Entry | Slot] = deque()
        """What the archiver took over in one step and has not taken yet: changes are not held up while it counts."""
        self._bytes = 0
        self._end = 0
        self.since: float | None = None
        """About when the oldest event that waits here was handed over; `None` if none waits."""
        self.is_open = is_open
        """Whether it takes events; may be read by anyone *after* a change was made, to save the making of its event."""

    def open(self) -> None:
        """Take events from now on."""
        with self._lock:
            self.is_open = True

    def append(self, event: Entry) -> None:
        """Hand over what was just done."""
        size = event.size_bytes()
        with self._lock:
            if not self.is_open:
                return
            if self.since is None:
                self.since = time.monotonic()
            self._events.append(event)
            self._end += 1
            before = self._bytes
            self._bytes = before + size
        if before + size > self.crowded_bytes:
            self._make_room(before)

    def _make_room(self, before: int) -> None:
        if before <= self.crowded_bytes or self._bytes > self._full_bytes:
            self._crowded()
        with self._room:
            while self._bytes > self._full_bytes and self.is_open:
                if not self._room.wait(FULL_SECONDS):
                    return

    def reserve(self) -> Slot:
        """Take a place for what is about to be done."""
        slot = Slot(self)
        with self._lock:
            if self.is_open:
                if self.since is None:
                    self.since = time.monotonic()
                self._events.append(slot)
                self._end += 1
                slot.is_queued = True
        return slot

    def settled(self, slot: Slot, size_bytes: int) -> None:
        """For `Slot`."""
        with self._lock:
            slot.size_bytes = size_bytes
            slot.is_settled = True
            if slot.is_queued and self.is_open:
                self._bytes += size_bytes

    @property
    def end(self) -> int:
        """The ordinal of the last event: what was done before this moment has none above it."""
        return self._end

    @property
    def size_bytes(self) -> int:
        """What waits here."""
        return self._bytes

    def take(self, size_bytes: int) -> tuple[list[Entry], int]:
        """Events from the front up to about `size_bytes`, and the ordinal of the last one; for one thread."""
        events: list[Entry] = []
        taken, is_blocked = 0, False
        while taken < size_bytes and not is_blocked and self._has_front():
            taken, is_blocked = self._take_front(events, taken, size_bytes)
        with self._lock:
            self._bytes -= taken
            waiting = len(self._front) + len(self._events)
            self.since = time.monotonic() if waiting else None
            self._room.notify_all()
            return events, self._end - waiting

    def _has_front(self) -> bool:
        with self._lock:
            if not self._front:
                self._front, self._events = self._events, self._front
            return bool(self._front)

    def _take_front(self, events: list[Entry], taken: int, size_bytes: int) -> tuple[int, bool]:
        """(bytes taken, whether a commit in front is not settled)"""
        front = self._front
        while front and taken < size_bytes:
            first = front[0]
            if isinstance(first, Slot):
                if not first.is_settled:
                    return taken, True
                taken += first.size_bytes
                if first.event is not None:
                    events.append(first.event)
            else:
                taken += first.size_bytes()
                events.append(first)
            front.popleft()
        return taken, False

    def drop(self) -> list[Entry]:
        """Forget what waits, because the chain is broken and a base will follow; what is forgotten. Not while another thread
        takes."""
        with self._lock:
            dropped: list[Entry] = []
            kept: deque[Entry | Slot] = deque()
            for event in (*self._front, *self._events):
                if not isinstance(event, Slot):
                    dropped.append(event)
                elif not event.is_settled:
                    kept.append(event)
            self._front, self._events, self._bytes = deque(), kept, 0
            self.since = time.monotonic() if kept else None
            self._room.notify_all()
            return dropped

    def close(self) -> None:
        """Take nothing more."""
        with self._lock:
            self.is_open = False
            self._events.clear()
            self._front = deque()
            self._bytes = 0
            self.since = None
            self._room.notify_all()


def bounded_queue(memory_bytes: int, crowded: Callable[[], None]) -> EventQueue:
    """A queue that asks for a cut when an object is full, or half of the memory, and never takes much more than the memory."""
    return EventQueue(crowded_bytes=min(OBJECT_BYTES, memory_bytes // 2), full_bytes=memory_bytes, crowded=crowded)
