"""How threads wait for each other: a ring wakes one thread, waiters are any number of threads that wait for one condition.

Both are built on `SimpleQueue`, which is C throughout: `put` is a single step for signal handlers and other threads, takes no
lock of ours and never blocks. So waking is allowed in finalisers, under any lock, and in a child that inherited the object,
and an exception that a signal handler raises in a sleeper leaves nothing behind. `threading.Condition` guarantees neither: its
lock is released and taken again by Python code, and an exception in between leaves it held for ever.

The one other way to wait is the doorbell of an awaited commit (`manifest/guard.py`); decision 036 has the measurements.

Threads: any.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

SLEEP_SECONDS_MAX = 1_000_000.0
"""The longest single sleep: longer ones overflow the system's timers."""


class Ring:
    """Wakes one thread. A ring that is rung before the thread sleeps ends that sleep at once."""

    __slots__ = ("_calls", "wake")

    def __init__(self) -> None:
        self._calls: SimpleQueue[None] = SimpleQueue()
        # No method: a signal handler could raise when Python enters one, after the caller has noted that it woke somebody.
        self.wake: Callable[[], None] = partial(self._calls.put, None)
        """End the sleep of the thread that waits here, or its next one."""

    def sleep(self, timeout: float | None = None) -> bool:
        """Sleep until somebody wakes this thread; False if the timeout ended first."""
        try:
            self._calls.get(timeout=timeout)
        except Empty:
            return False
        return True


class Waiters:
    """Threads that sleep until something has happened, each at a ring of its own, the longest waiting first."""

    __slots__ = ("_rings",)

    def __init__(self) -> None:
        self._rings: dict[Ring, None] = {}

    def __len__(self) -> int:
        return len(self._rings)

    def wake(self) -> None:
        """Let every waiter check its condition again."""
        for ring in [*self._rings]:
            ring.wake()

    def wake_first(self) -> None:
        """Wake the thread that has waited longest, which waits here no longer."""
        for ring in [*self._rings][:1]:
            if self._rings.pop(ring, self) is None:  # else another thread took it off first
                ring.wake()

    def sleep_unless(self, happened: Callable[[], bool], timeout: float) -> bool:
        """Sleep once, unless it has happened; False if the timeout ended before anyone woke this thread."""
        ring = Ring()
        try:
            self._rings[ring] = None  # before the check: what happens after it rings
            return happened() or ring.sleep(timeout)
        finally:
            self._rings.pop(ring, None)

    def sleep_until(self, happened: Callable[[], bool], timeout: float | None) -> bool:
        """Sleep until `happened()`, which is checked at each wake-up; False if the timeout ended first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        ring = Ring()
        try:
            self._rings[ring] = None  # before the first check: what happens after it rings
            while not happened():
                rest = SLEEP_SECONDS_MAX if deadline is None else deadline - time.monotonic()
                if rest <= 0:
                    return False
                ring.sleep(min(rest, SLEEP_SECONDS_MAX))
            return True
        finally:
            self._rings.pop(ring, None)


def in_thread(call: Callable[[], T]) -> Generator[Any, None, T]:
    """What `__await__` of something returns that only a blocking call can wait for: its answer, awaited in a thread."""
    import asyncio  # 40 ms that a program without an event loop need not pay

    return (yield from asyncio.to_thread(call).__await__())
