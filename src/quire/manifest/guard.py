"""Guards: a caller's handle on a batch until it is durable.

Terms
  batch     operations that commit together or not at all
  receipt   the outcome of a committed batch: its sequence in the feed and the generations of the components it touched
  wakeup    an eventfd at which one thread sleeps

A guard resolves only after the transaction that contains its batch is durable. No caller's code runs on the writer
thread, and waiting on it raises `WrongThread`.

Guards are light by design (M3): a guard that no thread waits for has no lock and no event. The first thread that waits
for a guard leaves its own wakeup with it, which the writer wakes. All other waiters (further threads, threads without
a wakeup, asyncio, waits for a generation) share the writer's notifier, which notifies them once per commit.

A wait may end with an exception at any point (a timeout, a signal handler's): it leaves no trace in notifier and guard.
A waiter first leaves its mark and then checks the condition; the writer first acts and then looks for marks. So no
lock is needed.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from quire.core.errors import QuireError, TimedOut, WrongThread
from quire.core.waiting import SLEEP_SECONDS_MAX, Waiters
from quire.manifest.ops.base import Component, Op

if TYPE_CHECKING:
    import asyncio

Generations = tuple[tuple[int, int], ...]
"""(component, generation) pairs. The garbage collector stops tracking tuples of numbers after one pass."""


COUNTER_BYTES = 8
"""Size of a read from an eventfd."""


def _pairs(touched: tuple[int, ...], reached: int | tuple[int, ...]) -> Generations:
    return tuple(zip(touched, (reached,) if isinstance(reached, int) else reached))


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """The outcome of a committed batch."""

    sequence: int
    """Its position in the change feed; 0 if it had only local operations."""
    committed_at_ms: int
    touched: tuple[int, ...] = ()
    """The components that the batch touched. `reached` has the generation of each, or just the number if there is one."""
    reached: int | tuple[int, ...] = ()
    repeated: bool = False
    """Whether the idempotency key had been used before: this is the first answer, and nothing was applied again."""
    result: bytes = b""

    @property
    def generations(self) -> dict[Component, int]:
        """The generation that each touched component has reached."""
        return {Component(component): generation for component, generation in _pairs(self.touched, self.reached)}


class ThreadWakeup:
    """Wakes the one thread that sleeps at it. Any thread may wake it.

    Not a lock: a thread woken by `lock.release()` finds the GIL still held by its waker and goes to sleep a second
    time; a thread that sleeps in `read` of an eventfd wakes while the waker is itself in a system call. Measured on two
    cores, a round trip between two idle threads takes 70 µs with locks and 6 µs with eventfds; an awaited commit gets
    3 % quicker. All other waits use the rings of `core/waiting.py`.

    Calls of `wake` are counted, not queued: sleepers check their condition after every wake-up, and may wake for nothing.
    The descriptor stays open while the object is referenced, so a late `wake` never hits a reused descriptor.
    """

    __slots__ = ("_fd",)

    def __init__(self) -> None:
        self._fd = -1  # for `__del__`, if `eventfd` fails
        self._fd = os.eventfd(0, os.EFD_CLOEXEC)

    def wake(self) -> None:
        """Wake the sleeper, now or when it next goes to sleep."""
        os.eventfd_write(self._fd, 1)

    def sleep(self, timeout: float | None = None) -> bool:
        """Sleep until `wake` is called; return False if the timeout ended first."""
        if timeout is not None:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            if not poll.poll(min(max(timeout, 0), SLEEP_SECONDS_MAX) * 1000):
                return False
        os.read(self._fd, COUNTER_BYTES)  # not `eventfd_read`, which a handled signal would end
        return True

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class _ThreadLocals(threading.local):
    wakeup: ThreadWakeup | None = None
    """The thread's wakeup; `None` before its first wait and while it waits."""


_THREADS = _ThreadLocals()


def take_wakeup() -> ThreadWakeup | None:
    """Take the wakeup of the calling thread until `return_wakeup`; `None` if the process has no descriptor left.

    Meanwhile, a signal handler that waits in this thread gets another one: at the same one it would consume the wake-up
    of the wait that it interrupted, which would then never end.
    """
    wakeup, _THREADS.wakeup = _THREADS.wakeup, None
    if wakeup is None:
        try:
            wakeup = ThreadWakeup()
        except OSError:
            return None
    return wakeup


def return_wakeup(wakeup: ThreadWakeup | None) -> None:
    """Keep a wakeup for the next wait of the calling thread."""
    _THREADS.wakeup = wakeup


def _reset_after_fork() -> None:
    """Give the child of a fork() its own wakeups: a shared counter would swallow those of the parent."""
    global _THREADS
    _THREADS = _ThreadLocals()


os.register_at_fork(after_in_child=_reset_after_fork)


class CommitNotifier:
    """Wakes all waiters of a writer after a commit, threads and event loops alike."""

    def __init__(self) -> None:
        self._joining = threading.Lock()
        self._threads = Waiters()
        self._loops: dict[asyncio.Future[None], tuple[Callable[[], bool], asyncio.AbstractEventLoop]] = {}
        self.thread: threading.Thread | None = None
        """The thread that notifies; it must not wait."""
        self.failure: QuireError | None = None
        """Set when there will be no more commits: the writer has stopped."""

    def notify(self) -> None:
        """Wake all waiters to check their conditions."""
        if self._threads:
            self._threads.wake()
        if self._loops:
            self._notify_loops()

    def _notify_loops(self) -> None:
        ready: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        # A copy, made in one step of C: event loops add and remove entries meanwhile.
        for future, (happened, loop) in self._loops.copy().items():
            if happened():
                self._loops.pop(future, None)
                ready.setdefault(loop, []).append(future)
        for loop, futures in ready.items():
            try:
                loop.call_soon_threadsafe(_set_all, futures)
            except RuntimeError:
                pass  # the loop has been closed: nothing waits there any more

    def abandon(self, failure: QuireError) -> None:
        """Reset in the child of a fork(): there will be no commit, and the thread that held the lock may not exist."""
        self._joining = threading.Lock()
        self._threads = Waiters()
        self._loops = {}
        self.failure = failure

    def join(self, guard: ManifestGuard, wakeup: ThreadWakeup) -> bool:
        """Have the writer wake this thread when the guard is done; return False if another thread came first."""
        with self._joining:
            if guard.waiter is not None:
                return False
            guard.waiter = wakeup
            return True

    def wait(self, happened: Callable[[], bool], timeout: float | None, what: str) -> None:
        """Block until `happened()`; raises `TimedOut`, which names `what`."""
        self.refuse_writer()
        if not self._threads.sleep_until(happened, timeout):
            raise TimedOut(f"timed out waiting for {what}", hint="it may still be committed", seconds=timeout)

    def refuse_writer(self) -> None:
        """Raise `WrongThread` on the writer thread, which would wait for itself."""
        if threading.current_thread() is self.thread:
            raise WrongThread("the manifest's writer thread cannot wait for itself", hint="wait in another thread")

    async def wait_async(self, happened: Callable[[], bool]) -> None:
        """Suspend until `happened()`."""
        import asyncio  # takes 40 ms, which programs without an event loop need not pay

        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        try:
            # Before the check: a commit after the check finds the entry and wakes the loop.
            self._loops[future] = (happened, loop)
            if not happened():
                await future
        finally:
            self._loops.pop(future, None)


def _set_all(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


class ManifestGuard(msgspec.Struct, gc=False, eq=False):
    """A submitted batch. `guard.result()` blocks, `await guard` suspends, until it is durable or has failed.

    Not tracked by the garbage collector: a pipeline holds a million of these, and they form no cycles.
    """

    ops: tuple[Op, ...]
    key: bytes | None
    notifier: CommitNotifier
    done: bool = False
    error: QuireError | None = None
    sequence: int = 0
    committed_at_ms: int = 0
    touched: tuple[int, ...] = ()
    """The components that the batch touched. `reached` has the generation of each, or just the number if there is one.
    Two fields instead of pairs, because a pipeline of single operations holds a million guards."""
    reached: int | tuple[int, ...] = ()
    repeated: bool = False
    result_bytes: bytes = b""
    """The answer that is stored with the key, if this batch is the first to use it."""
    stored_result: bytes = b""
    """The answer of the batch that used the key first, if `repeated`."""
    waiter: ThreadWakeup | None = None
    trace_id: str = ""
    """The trace of the submitter, for the change record."""

    def result(self, timeout: float | None = None) -> Receipt:
        """Return the receipt once the batch is durable. Raises the batch's own error, `StoreUnusable`, or `TimedOut`."""
        if not self.done:
            self._wait(timeout)
        if self.error is not None:
            raise self.error.with_traceback(None)
        result = self.stored_result if self.repeated else self.result_bytes
        return Receipt(self.sequence, self.committed_at_ms, self.touched, self.reached, self.repeated, result)

    @property
    def generations(self) -> Generations:
        """(component, generation) for each component that the batch touched."""
        return _pairs(self.touched, self.reached)

    @generations.setter
    def generations(self, updates: Generations) -> None:
        self.touched = tuple([component for component, _ in updates])
        self.reached = updates[0][1] if len(updates) == 1 else tuple([generation for _, generation in updates])

    def _wait(self, timeout: float | None) -> None:
        notifier = self.notifier
        notifier.refuse_writer()
        if notifier.failure is not None and not self.done:
            raise notifier.failure.with_traceback(None)
        wakeup = take_wakeup()
        try:
            if wakeup is not None and notifier.join(self, wakeup):
                self._sleep(wakeup, timeout)
            else:
                notifier.wait(self.is_done, timeout, "a manifest commit")
        finally:
            if self.waiter is wakeup:
                self.waiter = None
            return_wakeup(wakeup)

    def _sleep(self, wakeup: ThreadWakeup, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.done:
            rest = None if deadline is None else deadline - time.monotonic()
            # A longer sleep was cut short by `ThreadWakeup.sleep`; its end is not the caller's timeout.
            if not wakeup.sleep(rest) and not self.done and rest is not None and rest <= SLEEP_SECONDS_MAX:
                raise TimedOut(
                    "timed out waiting for a manifest commit", hint="it may still be committed", seconds=timeout
                )

    def is_done(self) -> bool:
        """Return whether the batch is durable or has failed."""
        return self.done

    def __await__(self) -> Generator[Any, None, Receipt]:
        if not self.done:
            yield from self.notifier.wait_async(self.is_done).__await__()
        return self.result(0)


class GenerationWait:
    """A wait until a component has reached a generation; blocking or awaitable, like a guard."""

    __slots__ = ("_check", "_notifier", "_what")

    def __init__(self, notifier: CommitNotifier, check: Callable[[], int | None], what: str) -> None:
        self._notifier = notifier
        self._check = check
        self._what = what

    def result(self, timeout: float | None = None) -> int:
        """Wait for the generation and return the one reached."""
        if (reached := self._check()) is None:
            self._notifier.wait(self._happened, timeout, self._what)
            reached = self._check()
        if reached is None:
            assert self._notifier.failure is not None, "the notifier woke this thread too early"
            raise self._notifier.failure.with_traceback(None)
        return reached

    def _happened(self) -> bool:
        return self._check() is not None or self._notifier.failure is not None

    def __await__(self) -> Generator[Any, None, int]:
        if self._check() is None:
            yield from self._notifier.wait_async(self._happened).__await__()
        return self.result(0)


# ── keyed calls ───────────────────────────────────────────────────────────────────────────────────────────────────────
class KeyedCall(msgspec.Struct, eq=False):
    """A call that must take effect once: its idempotency key goes into the batch that makes its change (M11).

    The server of calls (`quire.service`) sets the key for its thread; methods of a store build their batches as usual.
    """

    key: bytes
    effects: tuple[type[Op], ...]
    """Types of operations, one of which is in the batch that makes the change."""
    answer: Callable[[Any], bytes]
    """Returns the answer that is stored with the key, given that operation."""
    guard: ManifestGuard | None = None
    """The guard of that batch, once it is submitted."""

    def effect_in(self, batch: Sequence[Op]) -> Op | None:
        """Return the operation of a batch by which the call takes effect; `None` if the batch has none."""
        return next((op for op in batch if isinstance(op, self.effects)), None)


class _Current(threading.local):
    call: KeyedCall | None = None


current = _Current()
"""The keyed call that this thread is executing."""


@contextmanager
def keyed(call: KeyedCall) -> Iterator[KeyedCall]:
    """Submit for a keyed call in this thread until the end of the block."""
    current.call = call
    try:
        yield call
    finally:
        current.call = None
