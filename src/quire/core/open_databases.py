"""The databases of an engine that are open in this process, and which of them can be closed because nobody uses them.

Terms
  core      the open database: files, logs, memory. The engine has it, and what works in the background
  handle    what the engine's callers are given: another object with the same state. The engine has only a weak reference to it,
            so it is there exactly as long as somebody outside of the engine can still use the database

Rules
  1. A database is in use while its handle exists. What must keep it open, such as an iterator, refers to the handle.
  2. There is one handle of a core at a time: callers may compare them.
  3. Closing is the engine's, which may refuse for reasons of its own; this module only says who is to be closed first.

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

Threads: the engine's lock guards it, except for the end of a handle, which is noted by whoever lets go of the last one.
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
        """When the last handle was given, or went."""
        self.handle: weakref.ref[T] | None = None

    @property
    def is_held(self) -> bool:
        return self.handle is not None and self.handle() is not None


class OpenSet(Generic[T]):
    """Open databases by their ids."""

    def __init__(self, *, open_max: int, idle_seconds: float, clock: Clock) -> None:
        # constant after construction
        self._open_max = open_max
        self._idle_seconds = idle_seconds
        self._clock = clock
        # guarded by the engine's lock
        self._entries: dict[int, _Entry[T]] = {}
        self._next: deque[tuple[float, int]] = deque()
        """What was not held when it was last looked at all, longest unused first: looking at all for each database that is
        opened would cost more than opening it. What is used from then on is used later than all of these."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._entries))

    def add(self, number: int, core: T) -> T:
        """A database was opened, or opened anew; its handle."""
        self._entries[number] = _Entry(core, self._clock.monotonic())
        handle = self.get(number)
        assert handle is not None, "it was just entered"
        return handle

    def get(self, number: int) -> T | None:
        """The handle of an open database, which is in use from now on."""
        entry = self._entries.get(number)
        if entry is None:
            return None
        entry.used_at = self._clock.monotonic()
        handle = entry.handle() if entry.handle is not None else None
        if handle is None:
            handle = object.__new__(type(entry.core))
            handle.__dict__ = entry.core.__dict__
            entry.handle = weakref.ref(handle, _noting(entry, self._clock))
        return handle

    def peek(self, number: int) -> T | None:
        """The core of an open database, which is no use of it."""
        entry = self._entries.get(number)
        return entry.core if entry is not None else None

    def pop(self, number: int) -> T | None:
        """Forget a database; its core."""
        entry = self._entries.pop(number, None)
        return entry.core if entry is not None else None

    def cores(self) -> list[T]:
        """All of them."""
        return [entry.core for entry in list(self._entries.values())]

    def is_held(self, number: int) -> bool:
        """Whether somebody outside of the engine can use a database."""
        entry = self._entries.get(number)
        return entry is not None and entry.is_held

    def surplus(self) -> list[int]:
        """Databases beyond `open_max` that nobody holds, those longest unused first."""
        over = len(self._entries) - self._open_max
        surplus: list[int] = []
        if over > 0 and not self._take(surplus, over):
            self._next = deque(self._unheld())
            self._take(surplus, over)
        return surplus

    def _take(self, surplus: list[int], count: int) -> bool:
        """Go on with those that come next until there are so many that nobody has used meanwhile; whether there were."""
        while self._next and len(surplus) < count:
            used_at, number = self._next.popleft()
            entry = self._entries.get(number)
            if entry is not None and entry.used_at == used_at and not entry.is_held and number not in surplus:
                surplus.append(number)
        return len(surplus) >= count

    def idle(self) -> list[int]:
        """Databases that nobody has held for `idle_seconds`, and those beyond `open_max`; longest unused first."""
        before = self._clock.monotonic() - self._idle_seconds
        unheld, over = self._unheld(), len(self._entries) - self._open_max
        return [number for place, (used_at, number) in enumerate(unheld) if place < over or used_at <= before]

    def _unheld(self) -> list[tuple[float, int]]:
        """(when it was last used, number) of those that nobody holds."""
        return sorted((entry.used_at, number) for number, entry in self._entries.items() if not entry.is_held)


def _noting(entry: _Entry[T], clock: Clock) -> Callable[[weakref.ref[T]], None]:
    """What notes when a handle went. It must not keep the entry: a database that was closed meanwhile is gone."""
    kept = weakref.ref(entry)

    def note(_: weakref.ref[T]) -> None:
        if (entry := kept()) is not None:
            entry.used_at = clock.monotonic()

    return note
