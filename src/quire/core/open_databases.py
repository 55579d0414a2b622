"""The set of an engine's databases that are open in this process, and which of them are unused and can be closed.

Terms
  core      the open database: files, logs, memory. The engine and its background tasks refer to it
  handle    the object that the engine's callers get: another object with the same state. The engine has only a weak reference
            to it, so it exists exactly while code outside the engine can still use the database

Rules
  1. A database is in use while its handle exists. An object that must keep it open, such as an iterator, refers to the handle.
  2. A core has one handle at a time: callers may compare handles.
  3. The engine does the closing, and may refuse; this module only determines the order in which databases are closed.

    >>> from quire.core.clock import SystemClock
    >>> class Core:
    ...     pass
    >>> core = Core()
    >>> opened = OpenSet(open_max=1, idle_seconds=60.0, clock=SystemClock())
    >>> core.name = "shop"
    >>> handle = opened.add(7, core)
    >>> handle.name, handle is opened.get(7), opened.surplus()
    ('shop', True, [])
    >>> _ = opened.add(8, Core())
    >>> del handle
    >>> opened.surplus()
    [7]

Threads: guarded by the engine's lock, except that the end of a handle is recorded by the thread that drops its last reference.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from quire.core.clock import Clock

T = TypeVar("T")


class _Entry(Generic[T]):
    __slots__ = ("__weakref__", "core", "handle", "used_at")

    def __init__(self, core: T, used_at: float) -> None:
        self.core = core
        self.used_at = used_at
        """When a handle was last given out, or ended."""
        self.handle: weakref.ref[T] | None = None

    @property
    def is_held(self) -> bool:
        return self.handle is not None and self.handle() is not None


class OpenSet(Generic[T]):
    """Open databases by id."""

    def __init__(self, *, open_max: int, idle_seconds: float, clock: Clock) -> None:
        # constant after construction
        self._open_max = open_max
        self._idle_seconds = idle_seconds
        self._clock = clock
        # guarded by the engine's lock
        self._entries: dict[int, _Entry[T]] = {}
        self._next: deque[tuple[float, int]] = deque()
        """(used_at, id) of the databases that were not held at the last full scan, longest unused first. A full scan at every
        open would cost more than the open itself. Databases used since the scan have a later `used_at` than all of these."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._entries))

    def add(self, number: int, core: T) -> T:
        """Enter a database that was opened or reopened, and return its handle."""
        self._entries[number] = _Entry(core, self._clock.monotonic())
        handle = self.get(number)
        assert handle is not None, "it was just entered"
        return handle

    def get(self, number: int) -> T | None:
        """Return the handle of an open database, which counts as used from now on; `None` if it is not open."""
        entry = self._entries.get(number)
        if entry is None:
            return None
        entry.used_at = self._clock.monotonic()
        handle = entry.handle() if entry.handle is not None else None
        if handle is None:
            handle = object.__new__(type(entry.core))
            handle.__dict__ = entry.core.__dict__
            entry.handle = weakref.ref(handle, _end_callback(entry, self._clock))
        return handle

    def peek(self, number: int) -> T | None:
        """Return the core of an open database without counting as a use; `None` if it is not open."""
        entry = self._entries.get(number)
        return entry.core if entry is not None else None

    def pop(self, number: int) -> T | None:
        """Remove a database and return its core."""
        entry = self._entries.pop(number, None)
        return entry.core if entry is not None else None

    def cores(self) -> list[T]:
        """Return the cores of all open databases."""
        return [entry.core for entry in list(self._entries.values())]

    def is_held(self, number: int) -> bool:
        """Return whether code outside the engine holds a handle of the database."""
        entry = self._entries.get(number)
        return entry is not None and entry.is_held

    def surplus(self) -> list[int]:
        """Return as many unheld databases as are open beyond `open_max`, longest unused first."""
        over = len(self._entries) - self._open_max
        surplus: list[int] = []
        if over > 0 and not self._take(surplus, over):
            self._next = deque(self._unheld())
            self._take(surplus, over)
        return surplus

    def _take(self, surplus: list[int], count: int) -> bool:
        """Move up to `count` databases that are still unused from `_next` to `surplus`; return whether there were enough."""
        while self._next and len(surplus) < count:
            used_at, number = self._next.popleft()
            entry = self._entries.get(number)
            if entry is not None and entry.used_at == used_at and not entry.is_held and number not in surplus:
                surplus.append(number)
        return len(surplus) >= count

    def idle(self) -> list[int]:
        """Return databases that were not held for `idle_seconds`, and those beyond `open_max`; longest unused first."""
        before = self._clock.monotonic() - self._idle_seconds
        unheld, over = self._unheld(), len(self._entries) - self._open_max
        return [number for place, (used_at, number) in enumerate(unheld) if place < over or used_at <= before]

    def _unheld(self) -> list[tuple[float, int]]:
        """Return (time of last use, id) of the databases without a handle, longest unused first."""
        return sorted((entry.used_at, number) for number, entry in self._entries.items() if not entry.is_held)


def _end_callback(entry: _Entry[T], clock: Clock) -> Callable[[weakref.ref[T]], None]:
    """Return a callback that records when a handle ended. It refers to the entry weakly, so that a database closed in the
    meantime can be freed."""
    kept = weakref.ref(entry)

    def record_end(_: weakref.ref[T]) -> None:
        if (entry := kept()) is not None:
            entry.used_at = clock.monotonic()

    return record_end
