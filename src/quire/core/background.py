"""Background work of many databases on few threads: each task runs when it has asked to, at most once at a time.

A store has a few of these, each with a bound on its threads, instead of threads of every open database. A thread is made when
there is work and none is free, and ends when there was nothing to do for a while: a store that rests has none of them.

    >>> ran = threading.Event()
    >>> background = Background("example", threads_max=1)
    >>> task = background.task(ran.set)
    >>> task.ask()
    >>> ran.wait(10), background.stop()
    (True, None)

Threads: any. `stop` of a task waits for a run that is under way, unless that run calls it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from threading import get_ident

from quire.core.clock import SystemClock
from quire.core.events import emit

LINGER_SECONDS = 5.0
"""How long a thread without work waits for some."""

Run = Callable[[], "float | None"]
"""A task's work; in how many seconds it wants to run again, `None` for not before it asks."""


class Task:
    """Something that is to be done now and then. Made by `Background.task`."""

    __slots__ = ("_background", "due", "is_stopped", "run", "runner")

    def __init__(self, background: Background, run: Run) -> None:
        # constant after construction
        self._background = background
        self.run = run
        # guarded by the background's lock
        self.due: float | None = None
        """When it is to run next."""
        self.runner = 0
        """The thread that runs it."""
        self.is_stopped = False

    def ask(self, seconds: float = 0.0) -> None:
        """Run it in so many seconds, if it is not to run before."""
        self._background.ask(self, seconds)

    def stop(self) -> None:
        """Have it not run any more."""
        self._background.forget(self)

    @property
    def is_idle(self) -> bool:
        """Whether it neither runs nor is to run now."""
        return not self.runner and self.due is None


class Background:
    """The threads, and the tasks that wait for one."""

    def __init__(self, name: str, *, threads_max: int) -> None:
        # constant after construction
        self._name = name
        self._threads_max = threads_max
        self._clock = SystemClock()  # threads sleep by it
        self._numbers = count()
        # guarded by _changed
        self._changed = threading.Condition()
        self._queue: list[tuple[float, int, Task]] = []
        """By the time they are due; an entry whose time is not its task's any more is passed over."""
        self._threads: set[threading.Thread] = set()
        self._waiting = 0
        """Threads that have nothing to do."""
        self._is_stopped = False

    def task(self, run: Run) -> Task:
        """Something to be run when it asks."""
        return Task(self, run)

    def ask(self, task: Task, seconds: float) -> None:
        """Run a task in so many seconds, if it is not to run before."""
        with self._changed:
            self._enter(task, self._clock.monotonic() + seconds)

    def _enter(self, task: Task, due: float) -> None:
        """REQUIRES the lock."""
        if self._is_stopped or task.is_stopped or (task.due is not None and task.due <= due):
            return
        task.due = due
        if task.runner:
            return  # its thread enters it when the run has ended
        heappush(self._queue, (due, next(self._numbers), task))
        self._summon()

    def _summon(self) -> None:
        """Have a thread look at the queue. REQUIRES the lock."""
        if self._waiting:
            self._changed.notify()
        elif len(self._threads) < self._threads_max:
            thread = threading.Thread(target=self._serve, name=f"quire-{self._name}", daemon=True)
            self._threads.add(thread)
            thread.start()

    def forget(self, task: Task) -> None:
        """Have a task not run any more; waits for a run that is under way in another thread."""
        with self._changed:
            task.is_stopped, task.due = True, None
            while task.runner and task.runner != get_ident():
                self._changed.wait()

    def stop(self) -> None:
        """Run nothing more, and wait for what runs."""
        with self._changed:
            self._is_stopped = True
            self._queue.clear()
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def forked(self) -> None:
        """In the child of a fork(): the threads are the parent's."""
        self._changed = threading.Condition()
        self._is_stopped = True
        self._threads = set()

    # ── a thread ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def _serve(self) -> None:
        with self._changed:
            while (task := self._next()) is not None:
                task.due, task.runner = None, get_ident()
                self._changed.release()
                try:
                    again = self._run(task)
                finally:
                    self._changed.acquire()
                asked, task.due, task.runner = task.due, None, 0
                for due in (asked, again):
                    if due is not None:
                        self._enter(task, due)
                self._changed.notify_all()  # whoever stops the task waits here, too
            self._threads.discard(threading.current_thread())

    def _run(self, task: Task) -> float | None:
        """Run a task; when it wants to run again."""
        try:
            seconds = task.run()
        except Exception as error:  # a task reports its own; a thread that dies in silence would be worse
            emit("error", "background.task_failed", pool=self._name, error=f"{type(error).__name__}: {error}")
            return None
        return None if seconds is None else self._clock.monotonic() + seconds

    def _next(self) -> Task | None:
        """The next task, when its time has come; none if there was nothing for a while. REQUIRES the lock."""
        linger_until = self._clock.monotonic() + LINGER_SECONDS
        while not self._is_stopped:
            while self._queue and self._queue[0][0] != self._queue[0][2].due:
                heappop(self._queue)
            now = self._clock.monotonic()
            if self._queue and self._queue[0][0] <= now:
                task = heappop(self._queue)[2]
                if self._queue and self._queue[0][0] <= now:
                    self._summon()
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
