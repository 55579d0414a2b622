"""Thread pools for the background work of many databases: a task runs when requested, and never twice at the same time.

A store has a few pools, each with a bound on its threads, instead of threads for every open database. A thread is started when
work is due and none is free, and ends after `LINGER_SECONDS` without work: an idle store has no such threads.

    >>> ran = threading.Event()
    >>> background = Background("example", threads_max=1)
    >>> task = background.task(ran.set)
    >>> task.ask()
    >>> ran.wait(10), background.stop()
    (True, None)

`thread_pool` is for a generator that runs calls in threads while it is read.

Threads: any. `Task.stop` waits for a run in progress, unless it is called by that run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count
from threading import get_ident

from quire.core.clock import SystemClock
from quire.core.events import emit

LINGER_SECONDS = 5.0
"""How long a thread without work waits before it ends."""

Run = Callable[[], "float | None"]
"""A task's work. Returns the seconds until it runs again; `None` to run only when requested."""


class Task:
    """Work that is run on request. Created by `Background.task`."""

    __slots__ = ("_background", "due", "is_stopped", "run", "runner")

    def __init__(self, background: Background, run: Run) -> None:
        # constant after construction
        self._background = background
        self.run = run
        # guarded by the background's lock
        self.due: float | None = None
        """The monotonic time of the next run; `None` if none is requested."""
        self.runner = 0
        """The ident of the thread that runs it; 0 if it is not running."""
        self.is_stopped = False

    def ask(self, seconds: float = 0.0) -> None:
        """Request a run in `seconds`, unless an earlier one is already requested."""
        self._background.ask(self, seconds)

    def stop(self) -> None:
        """Prevent further runs, and wait for one in progress in another thread."""
        self._background.forget(self)

    @property
    def is_idle(self) -> bool:
        """Whether it is neither running nor scheduled to run."""
        return not self.runner and self.due is None


class Background:
    """A pool of threads, and the queue of tasks for them."""

    def __init__(self, name: str, *, threads_max: int) -> None:
        # constant after construction
        self._name = name
        self._threads_max = threads_max
        self._clock = SystemClock()  # not the store's clock: threads sleep in real time
        self._numbers = count()
        # guarded by _changed
        self._make_conditions()
        self._queue: list[tuple[float, int, Task]] = []
        """(due, number, task), ordered by due time; an entry whose time differs from its task's `due` is stale and skipped."""
        self._threads: set[threading.Thread] = set()
        self._waiting = 0
        """Number of threads that wait for work."""
        self._is_stopped = False

    def _make_conditions(self) -> None:
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        """Notified when there is work for a waiting thread."""
        # Not the same condition: `notify` wakes one waiter, which must be a thread of the pool and not one in `forget`.
        self._ended = threading.Condition(lock)
        """Notified when a run has ended."""

    def task(self, run: Run) -> Task:
        """Create a task that runs when requested."""
        return Task(self, run)

    def ask(self, task: Task, seconds: float) -> None:
        """Request a run of a task in `seconds`, unless an earlier one is already requested."""
        with self._changed:
            self._enter(task, self._clock.monotonic() + seconds)

    def _enter(self, task: Task, due: float) -> None:
        """Queue a task to run at `due`, unless it is due earlier. REQUIRES the lock."""
        if self._is_stopped or task.is_stopped or (task.due is not None and task.due <= due):
            return
        task.due = due
        if task.runner:
            return  # the running thread queues it again when the run ends
        heappush(self._queue, (due, next(self._numbers), task))
        self._wake_or_start_thread()

    def _wake_or_start_thread(self) -> None:
        """Wake a waiting thread, or start one, to take the next task. REQUIRES the lock."""
        if self._waiting:
            self._changed.notify()
        elif len(self._threads) < self._threads_max:
            thread = threading.Thread(target=self._serve, name=f"quire-{self._name}", daemon=True)
            self._threads.add(thread)
            thread.start()

    def forget(self, task: Task) -> None:
        """Prevent further runs of a task, and wait for one in progress in another thread."""
        with self._changed:
            task.is_stopped, task.due = True, None
            while task.runner and task.runner != get_ident():
                self._ended.wait()

    def stop(self) -> None:
        """Start no more runs, and wait for those in progress."""
        with self._changed:
            self._is_stopped = True
            self._queue.clear()
            self._changed.notify_all()
            threads = list(self._threads)
        # Without the lock, which the threads need to end.
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def forked(self) -> None:
        """Stop in the child of a fork(), where the threads do not exist."""
        self._make_conditions()
        self._is_stopped = True
        self._threads = set()

    # ── worker threads ────────────────────────────────────────────────────────────────────────────────────────────────
    def _serve(self) -> None:
        with self._changed:
            while (task := self._next()) is not None:
                task.due, task.runner = None, get_ident()
                self._changed.release()
                try:
                    again = self._run(task)
                finally:
                    self._changed.acquire()
                # `runner` is cleared before `_enter`, which leaves a running task to its thread.
                asked, task.due, task.runner = task.due, None, 0
                for due in (asked, again):
                    if due is not None:
                        self._enter(task, due)
                self._ended.notify_all()
            self._threads.discard(threading.current_thread())

    def _run(self, task: Task) -> float | None:
        """Run a task; return the time of its next run, or `None`."""
        try:
            seconds = task.run()
        except Exception as error:  # tasks report their own errors; an unexpected one must not end the thread silently
            emit("error", "background.task_failed", pool=self._name, error=error)
            return None
        return None if seconds is None else self._clock.monotonic() + seconds

    def _next(self) -> Task | None:
        """Wait until a task is due and return it; `None` after `LINGER_SECONDS` without one. REQUIRES the lock."""
        linger_until = self._clock.monotonic() + LINGER_SECONDS
        while not self._is_stopped:
            while self._queue and self._queue[0][0] != self._queue[0][2].due:
                heappop(self._queue)
            now = self._clock.monotonic()
            if self._queue and self._queue[0][0] <= now:
                task = heappop(self._queue)[2]
                if self._queue and self._queue[0][0] <= now:
                    self._wake_or_start_thread()
                return task
            if not self._queue and now >= linger_until:
                return None
            until = self._queue[0][0] if self._queue else linger_until
            self._waiting += 1
            try:
                self._changed.wait(until - now)
            finally:
                self._waiting -= 1
        return None


# ── generators ────────────────────────────────────────────────────────────────────────────────────────────────────────
@contextmanager
def thread_pool(threads_max: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """Return an executor for the `with` block of a generator. Its end waits for running calls, except when the generator is
    abandoned: queued calls are then cancelled, and running ones end by themselves.

    An abandoned generator may be closed by the garbage collector in a thread that is just starting and holds the lock of
    Python's list of threads. Joining a thread takes the same lock, so waiting there would never end."""
    pool = ThreadPoolExecutor(threads_max, thread_name_prefix=name)
    wait = True
    try:
        yield pool
    except GeneratorExit:
        wait = False
        raise
    finally:
        pool.shutdown(wait=wait, cancel_futures=True)
