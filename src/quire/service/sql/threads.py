"""Threads that run SQL for an event loop, and the loop's side of waiting for a lock.

Handing a call over to another thread costs more than a short statement: both threads need the interpreter's lock, and each
wakes the other. So jobs are handed over in groups. Those of one round of the loop wake one thread, which runs them one after
the other; the loop is called when none is left. A long job delays those after it only a little: a *tick* of the loop settles
finished jobs and wakes another thread for the rest (decision 077).

Terms
  job      a call that runs in one of the threads; the loop awaits it
  share    the jobs of one database, and how many threads may run them at a time
  queue    the waiters for the write lock of one database, the longest waiting first

Rules
  1. A thread never waits for a lock: a job that needs one leaves the thread, and returns when the lock may be free (W1).
  2. A job that has begun is awaited even if its caller is cancelled: its connection may not be used before it ends.
  3. One database never has all threads (`service.sql_database_threads`): some SQL cannot be interrupted (`instr` on megabytes),
     and a client that sends it delays only users of the same database.
  4. The threads are not threads of quire's in the sense of `core/barrier.py`: they acknowledge commits, and wait for the
     archive where a call must.
  5. While a job waits for a thread, a tick is scheduled: within `TICK_SECONDS` it settles finished jobs, and wakes another
     thread unless the working ones make progress with short jobs, where one more would only compete for the interpreter.

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
"""Pauses between two attempts to get a lock that a connection in the owner's process holds: its release is not signalled."""
TICK_SECONDS = 0.002
DEFERRED_JOBS_MAX = 32
"""Jobs up to which no thread is woken while each round of the loop brings more: the last answer waits for all of them."""
SHORT_JOBS = 8
"""If this many jobs were begun in a tick, they are short, and take mostly the interpreter's time."""
LONG_SECONDS = 0.001
"""A job that has run for this long may take any time: the next job gets another thread at once."""


class ThreadShare:
    """The jobs of one database (rule 3)."""

    __slots__ = ("held", "running", "threads_max")

    def __init__(self, threads_max: int) -> None:
        # constant after construction
        self.threads_max = threads_max
        # guarded by the lock of the threads
        self.running = 0
        self.held: deque[_Job] = deque()
        """Jobs that a thread took up when the database already had its share of threads."""


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
    """A bounded number of threads, started on demand."""

    def __init__(self, count_max: int) -> None:
        # constant after construction
        self._loop = asyncio.get_running_loop()
        self._count_max = count_max
        self._wakes: SimpleQueue[None] = SimpleQueue()
        """One item for each idle thread that shall look for jobs."""
        # used in the event loop only
        self._will_wake = False
        self._jobs_at_deferral = 0
        """The number of jobs when a wake-up was last put off."""
        self._is_urgent = False
        """Whether a job with `waits` has been added."""
        # guarded by _lock
        self._lock = threading.Lock()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._working = 0
        """Threads that are awake, except those whose jobs only wait."""
        self._begun = 0
        """Jobs begun since the last tick."""
        self._begun_at = 0.0
        # shared: single operations of a deque are atomic
        self._jobs: deque[_Job] = deque()
        self._done: deque[_Job] = deque()
        self._settle_scheduled = False
        self._tick_scheduled = False

    async def call(self, function: Callable[[], T], share: ThreadShare | None = None, *, waits: bool = False) -> T:
        """Run a function in a thread (rule 2), within its database's share of them. `waits`: it waits for the disk, and leaves
        the interpreter to others."""
        if self._closed:
            raise Unavailable("the server is closing", hint="connect again")
        job = _Job(function, self._loop.create_future(), share, waits)
        # A wait for the disk goes first: the answers of a whole group depend on it, and it leaves the interpreter to
        # others (decision 077).
        if waits:
            self._jobs.appendleft(job)
            self._is_urgent = True
        else:
            self._jobs.append(job)
        if not self._will_wake:  # after the other requests of this round, so that their jobs are included
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
        if not self._is_urgent and self._jobs_at_deferral < len(self._jobs) < DEFERRED_JOBS_MAX and not self._working:
            self._jobs_at_deferral = len(self._jobs)  # the last round added jobs, and the next one may
            self._loop.call_soon(self._wake)
            return
        is_urgent, self._will_wake, self._is_urgent, self._jobs_at_deferral = self._is_urgent, False, False, 0
        with self._lock:
            if is_urgent or not self._working or time.perf_counter() - self._begun_at > LONG_SECONDS:
                self._wake_thread()
        self._set_tick()

    def _set_tick(self) -> None:
        if not self._tick_scheduled and self._jobs:
            self._tick_scheduled = True
            self._loop.call_later(TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        """Settle finished jobs, and wake another thread for those that wait (rule 5)."""
        self._tick_scheduled = False  # cleared first: a job that ends from here on schedules a call of the loop
        self._settle()
        with self._lock:
            begun, self._begun = self._begun, 0
            if begun < SHORT_JOBS:
                for _ in range(1 if begun else min(len(self._jobs), self._count_max)):
                    self._wake_thread()
        self._set_tick()

    def _settle(self) -> None:
        self._settle_scheduled = False  # cleared first: a job that ends from here on schedules it again
        done = self._done
        while done:
            job = done.popleft()
            job.is_done = True
            if not job.future.done():
                job.future.set_result(None)

    def close(self) -> None:
        """Accept no more jobs; the threads end when the waiting ones are done."""
        with self._lock:
            self._closed = True
            self._wake_thread()  # jobs may wait although no thread has been started
            # Each of them counts itself out when it finds no job.
            self._working += self._idle
            for _ in range(self._idle):
                self._wakes.put(None)
            self._idle = 0

    # ── any thread, with the lock ─────────────────────────────────────────────────────────────────────────────────────
    def _wake_thread(self) -> None:
        """Have one more thread look for jobs, if there are any and a thread is available."""
        if not self._jobs:
            return
        if self._idle:
            self._idle -= 1
            self._wakes.put(None)
        elif len(self._threads) < self._count_max:
            thread = threading.Thread(target=self._work, name=f"sql-worker-{len(self._threads)}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system is out of threads: another thread, or the next tick, takes the job
                return
            self._threads.append(thread)
        else:
            return
        self._working += 1

    def _next(self, last: _Job | None) -> _Job | None:
        """Return the next job of a thread that has run `last`; `None`: the thread is now idle."""
        with self._lock:
            if last is not None:
                # A thread that only waited was not counted; it works again from here on.
                self._working += last.waits
                if last.share is not None:
                    last.share.running -= 1
                    if last.share.held:
                        self._jobs.appendleft(last.share.held.popleft())
            while self._jobs:
                job = self._jobs.popleft()
                if (share := job.share) is not None:
                    if share.running >= share.threads_max:
                        # Not back into the queue, where this loop would find it again. The thread that ends a job of
                        # the share brings it back.
                        share.held.append(job)
                        continue
                    share.running += 1
                self._begun += 1
                if job.waits:
                    self._working -= 1
                    if not self._working:
                        self._wake_thread()  # to take its place
                else:
                    self._begun_at = time.perf_counter()
                return job
            # `close` has woken every thread that was idle. One that counted itself as idle after that would never be
            # woken.
            self._idle += not self._closed
            self._working -= 1
            return None

    # ── its own threads ───────────────────────────────────────────────────────────────────────────────────────────────
    def _work(self) -> None:
        self._run_jobs()
        while not self._closed:
            self._wakes.get()
            self._run_jobs()
        self._run_jobs()  # jobs that were added before the close

    def _run_jobs(self) -> None:
        """Run jobs until there are none."""
        job = self._next(None)
        while job is not None:
            try:
                job.value = job.call()
            except BaseException as error:
                job.error = error
            self._done.append(job)
            job = self._next(job)
            # One call of the loop settles all jobs that are done by then.
            if not self._settle_scheduled and (job is None or not self._tick_scheduled):
                self._settle_scheduled = True
                self._loop.call_soon_threadsafe(self._settle)


class LockQueue:
    """The waiters for a database's write lock, from this event loop; and the database's share of the threads."""

    __slots__ = ("__weakref__", "_waiting", "share")

    def __init__(self, threads_max: int) -> None:
        """At most `threads_max` of the threads work for this database at a time (rule 3)."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.share = ThreadShare(threads_max)

    def __len__(self) -> int:
        return len(self._waiting)

    def wake(self) -> None:
        """Wake the longest waiter: the lock may be free."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    async def wait(self, seconds: float) -> None:
        """Wait until the lock may be free, for at most `seconds`."""
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
    """One wait for a lock: growing pauses, up to a deadline."""

    __slots__ = ("_deadline", "_pause", "_queue")

    def __init__(self, queue: LockQueue, deadline: float) -> None:
        self._queue = queue
        self._deadline = deadline
        self._pause = FIRST_PAUSE_SECONDS

    async def pause(self) -> bool:
        """Wait until the next attempt; return False if the deadline has passed."""
        remaining = self._deadline - asyncio.get_running_loop().time()
        if remaining <= 0:
            return False
        await self._queue.wait(min(self._pause, remaining))
        self._pause = min(self._pause * 2, PAUSE_SECONDS_MAX)
        return True


async def drive(threads: SqlThreads, work: Work[T], queue: LockQueue, wait_seconds: float) -> T:
    """Run a `Work` to its end, waiting for locks without a thread."""
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
    """Resume a work; return whether it is done, and its result or what it yields."""
    try:
        return False, next(work)
    except StopIteration as stop:
        return True, stop.value


def give_up(work: Generator[Any, None, T]) -> tuple[bool, Any]:
    """Resume a work with `LockTimeout`, because it waited too long for its lock; return the same as `advance`."""
    try:
        return False, work.throw(LockTimeout())
    except StopIteration as stop:
        return True, stop.value
