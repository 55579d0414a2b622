"""Blocking things in an event loop: the one shim, so that no API is written twice.

    async with aclosing(iterate(store.manifest.feed.follow("my-app"))) as changes:
        async for change in changes:
            ...

Everything of the iterator (its `next`, its `close`) runs in one thread of its own, one call after another: a generator never
meets two threads, and a transaction opened in it stays with its thread. `next` is called when the loop asks for an item,
never ahead of it. The thread is a daemon and does not belong to the loop's executor: an iterator that never returns holds up
neither the end of the loop nor that of the process.

However the loop ends (its end, `break`, an error, cancellation) the iterator is closed. If it is not busy, leaving waits for
that, and an error of `close` is raised. If it is blocked in `next`, cancellation does not wait: the iterator is closed as
soon as that `next` returns, and what it returned is dropped. A feed's `follow` has not acknowledged it: it comes again.

Use `contextlib.aclosing`: a bare `async for` that is left early is closed only when the garbage collector comes by.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncGenerator, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

_END: Final = object()


async def iterate(source: Iterable[T]) -> AsyncGenerator[T, None]:
    """The items of a blocking iterable, without blocking the event loop.

    >>> async def total() -> int:
    ...     return sum([item async for item in iterate(range(4))])
    >>> asyncio.run(total())
    6
    """
    worker = _Worker(iter(source), asyncio.get_running_loop())
    try:
        while (item := await worker.next()) is not _END:
            yield item
    finally:
        await worker.close()


class _Worker(Generic[T]):
    """The thread of one iterator. Everything but `_run` and what it calls belongs to the event loop."""

    def __init__(self, iterator: Iterator[T], loop: asyncio.AbstractEventLoop) -> None:
        self._iterator = iterator
        self._loop = loop
        self._busy = False
        self._requests: SimpleQueue[tuple[asyncio.Future[Any], bool]] = SimpleQueue()
        """(who waits for the answer, whether it is for the last time)."""
        self._context = contextvars.copy_context()
        threading.Thread(target=self._run, name="quire-aio", daemon=True).start()

    async def next(self) -> Any:
        """The next item, or `_END`."""
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._busy = True
        self._requests.put((answer, False))
        try:
            return await answer
        finally:
            self._busy = answer.cancelled()  # whoever gave up does not know when the thread will be done

    async def close(self) -> None:
        """Have the iterator closed, and wait for it unless it is blocked."""
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._requests.put((answer, True))
        if not self._busy:
            await answer

    def _run(self) -> None:
        last = False
        while not last:
            answer, last = self._requests.get()
            try:
                item = self._context.run(self._close if last else self._next)
            except BaseException as error:  # whatever it is, the waiter must hear of it
                self._tell(answer, None, error)
            else:
                self._tell(answer, item, None)

    def _next(self) -> Any:
        return next(self._iterator, _END)

    def _close(self) -> None:
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()

    def _tell(self, answer: asyncio.Future[Any], item: Any, error: BaseException | None) -> None:
        def settle() -> None:
            if answer.done():  # cancelled meanwhile
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(item)

        try:
            self._loop.call_soon_threadsafe(settle)
        except RuntimeError:
            pass  # the loop has been closed: nobody waits any more
