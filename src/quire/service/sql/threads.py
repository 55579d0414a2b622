"""Threads that run SQL for an event loop, and the loop's side of waiting for a lock.

A hand-over between threads costs more than a short statement: both need the interpreter's lock, and each of them wakes the
other. So jobs are handed over in groups. Those of one round of the loop wake one thread, which runs them one after the other;
the loop is called when none is left. A job that takes long costs those behind it little: a *tick* of the loop settles what is
done and wakes another thread for the rest (decision 077).

Terms
  job      a call that runs in one of the threads; the loop awaits it
  share    the jobs of one database, and how many threads may run them at a time
  queue    who waits for the write lock of one database, the longest waiting first

Rules
  1. A thread only works: what must wait for a lock leaves it, and comes back when the lock may be free (W1).
  2. A job that was begun is waited for, even if whoever asked is cancelled: nobody may touch its connection before.
  3. One database never has all threads (`service.sql_database_threads`): some SQL cannot be interrupted (`instr` on megabytes),
     and whoever sends it keeps only users of the same database waiting.
  4. The threads are no threads of quire's in the sense of `core/barrier.py`: they acknowledge commits, and wait for the
     archive where a call must.
  5. While a job waits for a thread, a tick is set: within `TICK_SECONDS` it settles what is done, and wakes another thread
     unless those that work get on with short jobs, where one more would only compete for the interpreter.

Threads: `SqlThreads` belongs to one event loop; `close` is called in it.
"""

from __future__ import annotations

import asyncio
import threading
import time
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
TICK_SECONDS = 0.002
GATHERED_MAX = 32
"""Jobs for which no thread is woken while each round of the loop brings more: who is answered last waits for all of them."""
SHORT_JOBS = 8
"""Jobs that were begun in a tick: so many are short, and most of their time is the interpreter's."""
LONG_SECONDS = 0.001
"""A job that has run for so long may go on for any time: who comes behind it gets another thread at once."""


class ThreadShare:
    """The jobs of one database (rule 3)."""

    __slots__ = ("held", "running", "threads_max")

    def __init__(self, threads_max: int) -> None:
        # constant after construction
        self.threads_max = threads_max
        # guarded by the lock of the threads
        self.running = 0
        self.held: deque[_Job] = deque()
        """Those that came to a thread when the database had its share of them."""


class _Job:
    __slots__ = ("call", "error", "future", "is_done", "share", "value", "waits")

    def __init__(
        self, call: Callable[[], Any], future: asyncio.Future[Any], share: ThreadShare | None, waits: bool
    ) -> None:
        self.call = call
        self.future = future
        self.share = share
        self.waits = waits
        self.value: Any = None
        self.error: BaseException | None = None
        self.is_done = False


class SqlThreads:
    """A bounded number of threads, started when they are needed."""

    def __init__(self, count_max: int) -> None:
        # constant after construction
        self._loop = asyncio.get_running_loop()
        self._count_max = count_max
        self._wakes: SimpleQueue[None] = SimpleQueue()
        """One for each idle thread that is to look for jobs."""
        # the loop's
        self._will_wake = False
        self._gathered = 0
        """Jobs that were there when a thread was last going to be woken."""
        self._is_urgent = False
        """Whether a job that waits has come."""
        # guarded by _lock
        self._lock = threading.Lock()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._working = 0
        """Threads that are awake, without those whose jobs only wait."""
        self._begun = 0
        """Jobs since the last tick."""
        self._begun_at = 0.0
        # shared: single steps of a deque are atomic
        self._jobs: deque[_Job] = deque()
        self._done: deque[_Job] = deque()
        self._rung = False
        self._ticks = False

    async def call(self, function: Callable[[], T], share: ThreadShare | None = None, *, waits: bool = False) -> T:
        """Run something in a thread (rule 2), within its database's share of them. `waits`: it waits for the disk, and keeps
        nobody else from working."""
        if self._closed:
            raise Unavailable("the server is closing", hint="connect again")
        job = _Job(function, self._loop.create_future(), share, waits)
        if waits:
            self._jobs.appendleft(job)
            self._is_urgent = True
        else:
            self._jobs.append(job)
        if not self._will_wake:  # behind the other requests of this round, so that their jobs are there as well
            self._will_wake = True
            self._loop.call_soon(self._wake)
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

    # ── the event loop's thread ───────────────────────────────────────────────────────────────────────────────────────
    def _wake(self) -> None:
        if not self._is_urgent and self._gathered < len(self._jobs) < GATHERED_MAX and not self._working:
            self._gathered = len(self._jobs)  # more have come in the last round, and more may come in the next
            self._loop.call_soon(self._wake)
            return
        is_urgent, self._will_wake, self._is_urgent, self._gathered = self._is_urgent, False, False, 0
        with self._lock:
            if is_urgent or not self._working or time.perf_counter() - self._begun_at > LONG_SECONDS:
                self._rouse()
        self._set_tick()

    def _set_tick(self) -> None:
        if not self._ticks and self._jobs:
            self._ticks = True
            self._loop.call_later(TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        """Settle what is done, and wake another thread for what waits (rule 5)."""
        self._ticks = False  # before looking: who is done from here on rings
        self._settle()
        with self._lock:
            begun, self._begun = self._begun, 0
            if begun < SHORT_JOBS:
                for _ in range(1 if begun else min(len(self._jobs), self._count_max)):
                    self._rouse()
        self._set_tick()

    def _settle(self) -> None:
        self._rung = False  # before looking: who is done from here on rings again
        done = self._done
        while done:
            job = done.popleft()
            job.is_done = True
            if not job.future.done():
                job.future.set_result(None)

    def close(self) -> None:
        """Take no more jobs; the threads end when those that wait are done."""
        with self._lock:
            self._closed = True
            self._rouse()  # there may be jobs, and no thread yet
            self._working += self._idle
            for _ in range(self._idle):
                self._wakes.put(None)
            self._idle = 0

    # ── any thread, with the lock ─────────────────────────────────────────────────────────────────────────────────────
    def _rouse(self) -> None:
        """Have one more thread look for jobs, if there is one and something to do."""
        if not self._jobs:
            return
        if self._idle:
            self._idle -= 1
            self._wakes.put(None)
        elif len(self._threads) < self._count_max:
            thread = threading.Thread(target=self._work, name=f"sql-worker-{len(self._threads)}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads: another one, or the next tick, comes to the job
                return
            self._threads.append(thread)
        else:
            return
        self._working += 1

    def _next(self, last: _Job | None) -> _Job | None:
        """The next job of a thread that has run `last`; none: it is idle from now on."""
        with self._lock:
            if last is not None:
                self._working += last.waits
                if last.share is not None:
                    last.share.running -= 1
                    if last.share.held:
                        self._jobs.appendleft(last.share.held.popleft())
            while self._jobs:
                job = self._jobs.popleft()
                if (share := job.share) is not None:
                    if share.running >= share.threads_max:
                        share.held.append(job)
                        continue
                    share.running += 1
                self._begun += 1
                if job.waits:
                    self._working -= 1
                    if not self._working:
                        self._rouse()  # in its place
                else:
                    self._begun_at = time.perf_counter()
                return job
            self._idle += not self._closed
            self._working -= 1
            return None

    # ── its own threads ───────────────────────────────────────────────────────────────────────────────────────────────
    def _work(self) -> None:
        self._work_off()
        while not self._closed:
            self._wakes.get()
            self._work_off()
        self._work_off()  # what came since it last looked, before it was closed

    def _work_off(self) -> None:
        """Run jobs for as long as there are any."""
        job = self._next(None)
        while job is not None:
            try:
                job.value = job.call()
            except BaseException as error:
                job.error = error
            self._done.append(job)
            job = self._next(job)
            if not self._rung and (
                job is None or not self._ticks
            ):  # one call of the loop settles all that were done by then
                self._rung = True
                self._loop.call_soon_threadsafe(self._settle)


class LockQueue:
    """Who waits for the write lock of a database, from this event loop; and its share of the threads."""

    __slots__ = ("__weakref__", "_waiting", "share")

    def __init__(self, threads_max: int) -> None:
        """Of the threads at most `threads_max` work for this database at a time (rule 3)."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.share = ThreadShare(threads_max)

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
        is_done, value = await threads.call(partial(step, work), queue.share)
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
