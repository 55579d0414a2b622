"""Guards: what a caller holds while its batch is on the way to disk.

Terms
  batch     operations that commit together or not at all
  receipt   what a committed batch led to: its sequence in the feed and the generations of the components it touched
  doorbell  an eventfd at which one thread sleeps

A guard resolves only after the transaction that holds its batch is durable. Nothing of a caller runs on the writer thread, and
waiting on it raises `WrongThread`.

Light by design (M3): a guard nobody waits for has no lock and no event. The first thread that waits for one leaves its own
doorbell with it, and the writer rings that. Everyone else (further threads, threads that get no doorbell, asyncio, or a wait
for a generation) shares one bell, rung once per commit.

A wait may end with an exception at any point (a timeout, a signal handler's): it leaves no trace in bell and guard. A waiter
first leaves its mark and then looks, the writer first acts and then looks for marks: no lock is needed.
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
"""(component, generation) pairs. Tuples of numbers: the garbage collector stops looking at them after one pass."""


COUNTER_BYTES = 8
"""What a read of an eventfd gives."""


def _pairs(touched: tuple[int, ...], reached: int | tuple[int, ...]) -> Generations:
    return tuple(zip(touched, (reached,) if isinstance(reached, int) else reached))


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """The outcome of a committed batch."""

    sequence: int
    """Its place in the change feed; 0 if it had only local operations."""
    committed_at_ms: int
    touched: tuple[int, ...] = ()
    """The components the batch touched; the generation each has reached stands in `reached`, a number if it is one."""
    reached: int | tuple[int, ...] = ()
    repeated: bool = False
    """True if the batch's idempotency key had been used: this is the first answer, nothing was applied again."""
    result: bytes = b""

    @property
    def generations(self) -> dict[Component, int]:
        """The generation each touched component has reached."""
        return {Component(component): generation for component, generation in _pairs(self.touched, self.reached)}


class Doorbell:
    """Wakes the one thread that sleeps at it. Any thread may ring.

    Not a lock: a thread woken by `lock.release()` finds the GIL still held by the one that woke it and goes to sleep a second
    time; one that sleeps in `read` of an eventfd wakes while the waker is itself in a system call. Measured on two cores, one
    round trip between two idle threads takes 70 µs with locks and 6 µs with doorbells; an awaited commit gets 3 % quicker.
    Everything else waits at the rings of `core/waiting.py`.

    Rings are counted, not queued: sleepers check their condition after every wake-up, and may wake for nothing. The descriptor
    lives as long as anyone holds the object, so a late ring never hits a descriptor that was reused.
    """

    __slots__ = ("_fd",)

    def __init__(self) -> None:
        self._fd = -1  # for `__del__`, if there is no descriptor to be had
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
        os.read(self._fd, COUNTER_BYTES)  # not `eventfd_read`, which a signal that somebody handles would end
        return True

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class _OfThisThread(threading.local):
    doorbell: Doorbell | None = None


_THREADS = _OfThisThread()


def thread_doorbell() -> Doorbell | None:
    """The doorbell of the calling thread, made when it is first needed; `None` if the process has no descriptor left for it."""
    if _THREADS.doorbell is None:
        try:
            _THREADS.doorbell = Doorbell()
        except OSError:
            return None
    return _THREADS.doorbell


def _anew() -> None:
    """After fork() the child has doorbells of its own: a shared counter would swallow the parent's rings."""
    global _THREADS
    _THREADS = _OfThisThread()


os.register_at_fork(after_in_child=_anew)


class Bell:
    """One bell for all waiters of a writer, for threads and event loops alike."""

    def __init__(self) -> None:
        self._joining = threading.Lock()
        self._threads = Waiters()
        self._loops: dict[asyncio.Future[None], tuple[Callable[[], bool], asyncio.AbstractEventLoop]] = {}
        self.thread: threading.Thread | None = None
        """The thread that rings: it must not wait."""
        self.failure: QuireError | None = None
        """Set when nothing will ever ring again: the writer has died."""

    def ring(self) -> None:
        """Something happened: let everyone look."""
        if self._threads:
            self._threads.wake()
        if self._loops:
            self._ring_loops()

    def _ring_loops(self) -> None:
        ready: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        for future, (happened, loop) in self._loops.copy().items():
            if happened():
                self._loops.pop(future, None)
                ready.setdefault(loop, []).append(future)
        for loop, futures in ready.items():
            try:
                loop.call_soon_threadsafe(_set_all, futures)
            except RuntimeError:
                pass  # the loop has been closed: nobody waits any more

    def abandon(self, failure: QuireError) -> None:
        """Nothing will ever ring again, and whoever held the lock may be gone: in the child of a fork()."""
        self._joining = threading.Lock()
        self._threads = Waiters()
        self._loops = {}
        self.failure = failure

    def join(self, guard: ManifestGuard, doorbell: Doorbell) -> bool:
        """Have the writer ring this doorbell when the guard is done; False if another thread was first."""
        with self._joining:
            if guard.waiter is not None:
                return False
            guard.waiter = doorbell
            return True

    def wait(self, happened: Callable[[], bool], timeout: float | None, what: str) -> None:
        """Block until `happened()`; `TimedOut` names `what`."""
        self.refuse_writer()
        if not self._threads.sleep_until(happened, timeout):
            raise TimedOut(f"timed out waiting for {what}", hint="it may still happen", seconds=timeout)

    def refuse_writer(self) -> None:
        """Raise `WrongThread` on the writer thread: it would wait for itself."""
        if threading.current_thread() is self.thread:
            raise WrongThread("the manifest's writer thread cannot wait for itself", hint="wait in another thread")

    async def wait_async(self, happened: Callable[[], bool]) -> None:
        """Suspend until `happened()`."""
        import asyncio  # 40 ms that a program without an event loop need not pay

        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        try:
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

    A struct outside the garbage collector's sight: a pipeline holds a million of these, and they form no cycles.
    """

    ops: tuple[Op, ...]
    key: bytes | None
    bell: Bell
    done: bool = False
    error: QuireError | None = None
    sequence: int = 0
    committed_at_ms: int = 0
    touched: tuple[int, ...] = ()
    """The components the batch touched, and below the generation each has reached: one number if it is one component. Two
    fields instead of pairs, because a pipeline of single operations holds a million guards."""
    reached: int | tuple[int, ...] = ()
    repeated: bool = False
    result_bytes: bytes = b""
    waiter: Doorbell | None = None
    trace_id: str = ""
    """The trace of whoever submitted it, for the change record."""

    def result(self, timeout: float | None = None) -> Receipt:
        """The receipt, once durable. Raises the batch's own error, `StoreUnusable`, or `TimedOut`."""
        if not self.done:
            self._wait(timeout)
        if self.error is not None:
            raise self.error.with_traceback(None)
        return Receipt(
            self.sequence, self.committed_at_ms, self.touched, self.reached, self.repeated, self.result_bytes
        )

    @property
    def generations(self) -> Generations:
        """(component, generation) for each component the batch touched."""
        return _pairs(self.touched, self.reached)

    @generations.setter
    def generations(self, updates: Generations) -> None:
        self.touched = tuple([component for component, _ in updates])
        self.reached = updates[0][1] if len(updates) == 1 else tuple([generation for _, generation in updates])

    def _wait(self, timeout: float | None) -> None:
        bell = self.bell
        bell.refuse_writer()
        if bell.failure is not None and not self.done:
            raise bell.failure.with_traceback(None)
        doorbell, before = thread_doorbell(), self.waiter
        try:
            if doorbell is not None and bell.join(self, doorbell):
                self._sleep(doorbell, timeout)
            else:
                bell.wait(self.is_done, timeout, "a manifest commit")
        finally:
            # Not if it was ours before: then we are in a signal handler that has interrupted our own wait.
            if before is None and self.waiter is doorbell:
                self.waiter = None

    def _sleep(self, doorbell: Doorbell, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.done:
            rest = None if deadline is None else deadline - time.monotonic()
            if not doorbell.sleep(rest) and not self.done and rest is not None and rest <= SLEEP_SECONDS_MAX:
                raise TimedOut("timed out waiting for a manifest commit", hint="it may still happen", seconds=timeout)

    def is_done(self) -> bool:
        """Whether the batch is durable or has failed."""
        return self.done

    def __await__(self) -> Generator[Any, None, Receipt]:
        if not self.done:
            yield from self.bell.wait_async(self.is_done).__await__()
        return self.result(0)


class GenerationWait:
    """Waits until a component has reached a generation; blocking or awaitable like a guard."""

    __slots__ = ("_bell", "_check", "_what")

    def __init__(self, bell: Bell, check: Callable[[], int | None], what: str) -> None:
        self._bell = bell
        self._check = check
        self._what = what

    def result(self, timeout: float | None = None) -> int:
        """The generation reached."""
        if (reached := self._check()) is None:
            self._bell.wait(self._happened, timeout, self._what)
            reached = self._check()
        if reached is None:
            assert self._bell.failure is not None, "the bell woke us too early"
            raise self._bell.failure.with_traceback(None)
        return reached

    def _happened(self) -> bool:
        return self._check() is not None or self._bell.failure is not None

    def __await__(self) -> Generator[Any, None, int]:
        if self._check() is None:
            yield from self._bell.wait_async(self._happened).__await__()
        return self.result(0)


# ── keyed calls ───────────────────────────────────────────────────────────────────────────────────────────────────────
class KeyedCall(msgspec.Struct, eq=False):
    """A call that is to take effect once: its idempotency key goes into the batch by which it does (M11).

    Whoever answers calls (`quire.service`) says whose key it is; methods of a store build their batches as always.
    """

    key: bytes
    effects: tuple[type[Op], ...]
    """The operations, one of which is in the batch that makes the change."""
    answer: Callable[[Any], bytes]
    """From that operation to what is kept with the key."""
    guard: ManifestGuard | None = None
    """Of that batch, once it was submitted."""

    def effect_in(self, batch: Sequence[Op]) -> Op | None:
        """The operation of a batch by which the call takes effect; `None` if it is not there."""
        return next((op for op in batch if isinstance(op, self.effects)), None)


class _Current(threading.local):
    call: KeyedCall | None = None


current = _Current()
"""The call of this thread."""


@contextmanager
def keyed(call: KeyedCall) -> Iterator[KeyedCall]:
    """Until the end of the block, this thread submits for a call."""
    current.call = call
    try:
        yield call
    finally:
        current.call = None
