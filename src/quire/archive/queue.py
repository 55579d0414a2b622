"""The queue: changes of the whole store that are not encoded for the bucket yet, in the order in which they were made (A5).

Terms
  event     see format.py; its position in the queue is its ordinal, counted from 1 since the store was opened
  slot      a position that is reserved before its event is known: for a commit of the manifest

A thread that changes a file hands the change over before it reports the change to any other thread. So every prefix of the
queue is a state that a killed process could have left, which recovery can handle; a cut is where the archiver stopped taking.

A commit reserves its slot before it begins, and fills it once it is durable: readers of the manifest may see the commit before
its thread continues, and what they change as a result must come later in the queue. The archiver waits at an unfilled slot.

Threads: any. Handing over holds a lock for the duration of one append.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from quire.archive.format import OBJECT_BYTES, AnyEvent, BaseEvent


class PendingArtifact(msgspec.Struct, frozen=True, gc=False):
    """A file that is complete and not uploaded yet. A cut turns it into an `ArtifactEvent`."""

    path: str
    """Path in the store."""
    kept: str
    """Path of a hard link that exists until the file is uploaded."""
    identity: tuple[int, int, int]
    """(inode, size, time of last change)"""

    def size_bytes(self) -> int:
        return 256


class PendingBase(msgspec.Struct, frozen=True, gc=False):
    """A base whose parts are in the bucket. It counts unless the chain has been broken since it began."""

    base: BaseEvent
    breaks: int
    """How often the chain had been broken when the base began."""
    renames: bool
    """Whether it names other objects than the log does for some files: standbys must not continue past it."""

    def size_bytes(self) -> int:
        return self.base.size_bytes()


Entry = AnyEvent | PendingArtifact | PendingBase


class Slot:
    """A position in the queue whose event is not known yet. The archiver waits at it until it is filled or cancelled."""

    __slots__ = ("_queue", "event", "is_queued", "is_settled", "size_bytes")

    def __init__(self, queue: EventQueue) -> None:
        self._queue = queue
        self.event: Entry | None = None
        self.is_queued = self.is_settled = False
        self.size_bytes = 0

    def fill(self, event: AnyEvent) -> None:
        """Set the event of this slot."""
        # Before `settled`: `take` reads the event without the lock once the slot is settled.
        self.event = event
        self._queue.settled(self, event.size_bytes())

    def cancel(self) -> None:
        """Settle this slot without an event."""
        self._queue.settled(self, 0)


FULL_SECONDS = 1.0
"""How long a change waits for a full queue to shrink. After that it exceeds the memory limit rather than stop the store."""


def _ignore_crowding() -> None:
    """Do nothing: the default for a queue without an archiver."""


class EventQueue:
    """Events in order, taken by one archiver. Its length depends on how fast the archiver encodes, not on the bucket."""

    def __init__(
        self,
        *,
        crowded_bytes: int = 1 << 62,
        full_bytes: int = 1 << 62,
        crowded: Callable[[], None] = _ignore_crowding,
        is_open: bool = True,
    ) -> None:
        """Create a queue. `crowded` is called when more than `crowded_bytes` wait; beyond `full_bytes`, `append` blocks."""
        # constant after construction
        self.crowded_bytes = crowded_bytes
        self._full_bytes = full_bytes
        self._crowded = crowded
        # guarded by _lock
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._events: deque[Entry | Slot] = deque()
        self._front: deque[Entry | Slot] = deque()
        """Events that `take` has moved here in one step, so that it can walk them without blocking `append`."""
        self._bytes = 0
        self._end = 0
        self.since: float | None = None
        """Approximate time at which the oldest waiting event was handed over; `None` if none waits."""
        self.is_open = is_open
        """Whether the queue accepts events. May be read without the lock *after* a change was made, to avoid building its
        event."""

    def open(self) -> None:
        """Accept events from now on."""
        with self._lock:
            self.is_open = True

    def append(self, event: Entry) -> None:
        """Hand over a change that was just made. Dropped if the queue is closed."""
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
            # Without the lock: `crowded` may call `drop`, which takes it.
            self._make_room(before)

    def _make_room(self, before: int) -> None:
        # Up to `full_bytes`, only the append that crosses the limit signals: the signal takes the archiver's lock.
        if before <= self.crowded_bytes or self._bytes > self._full_bytes:
            self._crowded()
        with self._room:
            while self._bytes > self._full_bytes and self.is_open:
                if not self._room.wait(FULL_SECONDS):
                    return

    def reserve(self) -> Slot:
        """Reserve a slot for a change that is about to be made."""
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
        """Mark a slot as settled. Called by `Slot`."""
        with self._lock:
            # In this order: `_take_front` reads both without the lock.
            slot.size_bytes = size_bytes
            slot.is_settled = True
            if slot.is_queued and self.is_open:
                self._bytes += size_bytes

    @property
    def end(self) -> int:
        """The ordinal of the last event. Changes made before this call have no higher one."""
        return self._end

    @property
    def size_bytes(self) -> int:
        """Approximate bytes of the waiting events."""
        return self._bytes

    def take(self, size_bytes: int) -> tuple[list[Entry], int]:
        """Take events from the front, up to about `size_bytes`. Return them and the ordinal of the last one. Called by
        one thread at a time."""
        events: list[Entry] = []
        taken, is_blocked = 0, False
        while taken < size_bytes and not is_blocked and self._has_front():
            taken, is_blocked = self._take_front(events, taken, size_bytes)
        with self._lock:
            self._bytes -= taken
            waiting = len(self._front) + len(self._events)
            self.since = time.monotonic() if waiting else None
            self._room.notify_all()
            # Dropped events count as taken: the base has them, and callers that wait for an ordinal wait for the base
            # too (`Arrivals.is_restorable`).
            return events, self._end - waiting

    def _has_front(self) -> bool:
        with self._lock:
            if not self._front:
                self._front, self._events = self._events, self._front
            return bool(self._front)

    def _take_front(self, events: list[Entry], taken: int, size_bytes: int) -> tuple[int, bool]:
        """Move settled events from the front to `events`. Return (bytes taken, whether an unsettled slot is in front)."""
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
        """Drop the waiting events, because the chain is broken and a base will follow. Return those that were not in slots.

        Unsettled slots stay. Must not run while another thread is in `take`."""
        with self._lock:
            dropped: list[Entry] = []
            kept: deque[Entry | Slot] = deque()
            for event in (*self._front, *self._events):
                if not isinstance(event, Slot):
                    dropped.append(event)
                # The base may read the rows before this commit is visible, so its event is still needed.
                elif not event.is_settled:
                    kept.append(event)
            self._front, self._events, self._bytes = deque(), kept, 0
            self.since = time.monotonic() if kept else None
            self._room.notify_all()
            return dropped

    def close(self) -> None:
        """Drop all events and accept no more."""
        with self._lock:
            self.is_open = False
            self._events.clear()
            self._front = deque()
            self._bytes = 0
            self.since = None
            self._room.notify_all()


def bounded_queue(memory_bytes: int, crowded: Callable[[], None]) -> EventQueue:
    """Return a queue that calls `crowded` at the size of an object or half of `memory_bytes`, and blocks at `memory_bytes`."""
    return EventQueue(crowded_bytes=min(OBJECT_BYTES, memory_bytes // 2), full_bytes=memory_bytes, crowded=crowded)
