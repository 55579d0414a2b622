"""Primitives for threads that wait for each other: a `Ring` wakes one thread, `Waiters` any number that share a condition.

Both are built on `SimpleQueue`, which is implemented in C: `put` is atomic with respect to signal handlers and other threads,
takes no lock of ours and never blocks. Waking is therefore allowed in finalisers, under any lock, and in a child process that
inherited the object; and an exception that a signal handler raises in a sleeping thread leaves no state behind.
`threading.Condition` guarantees neither: Python code releases and reacquires its lock, and an exception in between leaves the
lock held for ever.

Commits wait here, or at the eventfd of an awaited commit (`manifest/guard.py`). Background and service threads, in which no
signal handler runs, also use `threading.Condition` and `threading.Event`; decision 036 has the rule and the measurements.

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
"""The longest single sleep: a longer one overflows the system's timers."""


class Ring:
    """Wakes one thread. A `wake` that comes before the thread sleeps ends that sleep at once."""

    __slots__ = ("_calls", "wake")

    def __init__(self) -> None:
        self._calls: SimpleQueue[None] = SimpleQueue()
        # Not a method: a signal handler could raise on entry to it, after the caller has recorded that it woke the thread.
        self.wake: Callable[[], None] = partial(self._calls.put, None)
        """End the current sleep of the waiting thread, or its next one."""

    def sleep(self, timeout: float | None = None) -> bool:
        """Sleep until `wake` is called; return False if the timeout ended first."""
        try:
            self._calls.get(timeout=timeout)
        except Empty:
            return False
        return True


class Waiters:
    """Threads that sleep until a condition holds, each with its own ring, in the order in which they began to wait."""

    __slots__ = ("_rings",)

    def __init__(self) -> None:
        self._rings: dict[Ring, None] = {}

    def __len__(self) -> int:
        return len(self._rings)

    def wake(self) -> None:
        """Wake every waiter, which checks its condition again."""
        for ring in [*self._rings]:
            ring.wake()

    def wake_first(self) -> None:
        """Wake the thread that has waited longest, and remove it from the waiters."""
        for ring in [*self._rings][:1]:
            if self._rings.pop(ring, self) is None:  # otherwise another thread has removed it first
                ring.wake()

    def sleep_unless(self, happened: Callable[[], bool], timeout: float) -> bool:
        """Sleep once, unless `happened()` already holds; return False if the timeout ended before a wake-up."""
        ring = Ring()
        try:
            self._rings[ring] = None  # before the check, so that an event after the check wakes this thread
            return happened() or ring.sleep(timeout)
        finally:
            self._rings.pop(ring, None)

    def sleep_until(self, happened: Callable[[], bool], timeout: float | None) -> bool:
        """Sleep until `happened()`, which is checked at each wake-up; return False if the timeout ended first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        ring = Ring()
        try:
            self._rings[ring] = None  # before the first check, so that an event after the check wakes this thread
            while not happened():
                rest = SLEEP_SECONDS_MAX if deadline is None else deadline - time.monotonic()
                if rest <= 0:
                    return False
                ring.sleep(min(rest, SLEEP_SECONDS_MAX))
            return True
        finally:
            self._rings.pop(ring, None)


def in_thread(call: Callable[[], T]) -> Generator[Any, None, T]:
    """Run a blocking call in a thread and await its result: the return value for an object's `__await__`."""
    import asyncio  # 40 ms that a program without an event loop need not pay

    return (yield from asyncio.to_thread(call).__await__())
