"""Threads that run SQL for an event loop, and the loop's side of waiting for a lock.

Terms
  job      a call that runs in one of the threads; the loop awaits it
  queue    who waits for the write lock of one database, the longest waiting first

Rules
  1. A thread only works: what must wait for a lock leaves it, and comes back when the lock may be free (W1).
  2. A job that was begun is waited for, even if whoever asked is cancelled: nobody may touch its connection before.
  3. One database never has all threads (`service.sql_database_threads`): some SQL cannot be interrupted (`instr` on megabytes),
     and whoever sends it keeps only users of the same database waiting.
  4. The threads are no threads of quire's in the sense of `core/barrier.py`: they acknowledge commits, and wait for the
     archive where a call must.

Threads: `SqlThreads` belongs to one event loop; `close` is called in it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from quire.core.errors import Unavailable
from quire.service.sql.session import LockTimeout, Work

T = TypeVar("T")

FIRST_PAUSE_SECONDS, PAUSE_SECONDS_MAX = 0.001, 0.05
"""Between two attempts to get a lock that a program in the owner holds: nobody tells when that one gives it back."""


class _Job:
    __slots__ = ("call", "error", "future", "is_done", "value")

    def __init__(self, call: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        self.call = call
        self.future = future
        self.value: Any = None
        self.error: BaseException | None = None
        self.is_done = False


class SqlThreads:
    """A bounded number of threads, started when they are needed."""

    def __init__(self, count_max: int) -> None:
        # constant after construction
        self._loop = asyncio.get_running_loop()
        self._count_max = count_max
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        # the loop's
        self._threads: list[threading.Thread] = []
        self._pending = 0
        self._closed = False
        # shared: single steps of a deque are atomic
        self._done: deque[_Job] = deque()
        self._rung = False

    async def call(self, function: Callable[[], T]) -> T:
        """Run something in a thread (rule 2)."""
        if self._closed:
            raise Unavailable("the server is closing", hint="connect again")
        job = _Job(function, self._loop.create_future())
        self._pending += 1
        if self._pending > len(self._threads) and len(self._threads) < self._count_max:
            self._start()
        self._jobs.put(job)
        try:
            await job.future
        except asyncio.CancelledError:
            while not job.is_done:
                job.future = self._loop.create_future()
                try:
                    await job.future
                except asyncio.CancelledError:
                    continue
            raise
        if job.error is not None:
            raise job.error
        value: T = job.value
        return value

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name=f"sql-worker-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.value = job.call()
            except BaseException as error:
                job.error = error
            self._done.append(job)
            if not self._rung:  # one call of the loop settles all that were done by then
                self._rung = True
                self._loop.call_soon_threadsafe(self._settle)
            del job

    def _settle(self) -> None:
        self._rung = False  # before looking: who is done from here on rings again
        done = self._done
        while done:
            job = done.popleft()
            self._pending -= 1
            job.is_done = True
            if not job.future.done():
                job.future.set_result(None)

    def close(self) -> None:
        """Take no more jobs; the threads end behind those that wait."""
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)


class LockQueue:
    """Who waits for the write lock of a database, from this event loop; and its share of the threads."""

    __slots__ = ("__weakref__", "_places", "_waiting")

    def __init__(self, threads_max: int) -> None:
        """Of the threads at most `threads_max` work for this database at a time (rule 3)."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._places = asyncio.Semaphore(threads_max)

    async def call(self, threads: SqlThreads, function: Callable[[], T]) -> T:
        """Run SQL of this database in a thread."""
        async with self._places:
            return await threads.call(function)

    def __len__(self) -> int:
        return len(self._waiting)

    def wake(self) -> None:
        """The lock may be free: let who has waited longest try."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    async def wait(self, seconds: float) -> None:
        """Until it may be free, or so many seconds."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waiter)
        timer = loop.call_later(seconds, _end, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            with suppress(ValueError):  # it was woken
                self._waiting.remove(waiter)


def _end(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class LockWait:
    """One wait for a lock: pauses that get longer, up to a deadline."""

    __slots__ = ("_deadline", "_pause", "_queue")

    def __init__(self, queue: LockQueue, deadline: float) -> None:
        self._queue = queue
        self._deadline = deadline
        self._pause = FIRST_PAUSE_SECONDS

    async def pause(self) -> bool:
        """Wait for the next attempt; False if there is none left."""
        rest = self._deadline - asyncio.get_running_loop().time()
        if rest <= 0:
            return False
        await self._queue.wait(min(self._pause, rest))
        self._pause = min(self._pause * 2, PAUSE_SECONDS_MAX)
        return True


async def drive(threads: SqlThreads, work: Work[T], queue: LockQueue, wait_seconds: float) -> T:
    """Run a work to its end, waiting for locks without a thread."""
    wait: LockWait | None = None
    step: Callable[[Work[T]], tuple[bool, Any]] = advance
    while True:
        is_done, value = await queue.call(threads, partial(step, work))
        if is_done:
            result: T = value
            return result
        wait = wait or LockWait(queue, asyncio.get_running_loop().time() + wait_seconds)
        step = advance if await wait.pause() else give_up


def advance(work: Generator[Any, None, T]) -> tuple[bool, Any]:
    """(whether it is done, its result or what it yields)."""
    try:
        return False, next(work)
    except StopIteration as stop:
        return True, stop.value


def give_up(work: Generator[Any, None, T]) -> tuple[bool, Any]:
    """The same, for a work that waited too long for its lock."""
    try:
        return False, work.throw(LockTimeout())
    except StopIteration as stop:
        return True, stop.value
