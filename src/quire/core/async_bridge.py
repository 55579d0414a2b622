"""Adapter from blocking iterators to event loops, so that no API is written twice.

    async with aclosing(iterate(store.manifest.feed.follow("my-app"))) as changes:
        async for change in changes:
            ...

All calls of the iterator (`next` and `close`) run one after another in a dedicated thread: a generator never runs in two
threads, and a transaction opened in it stays with its thread. `next` is called when the loop requests an item, never ahead of
it. The thread is a daemon and not part of the loop's executor: an iterator that never returns delays neither the end of the
loop nor that of the process.

However the `async for` ends (exhaustion, `break`, an error, cancellation), the iterator is closed. If the iterator is not busy,
the exit waits for `close`, and an error from it is raised. If the iterator is blocked in `next`, cancellation does not wait:
the iterator is closed as soon as that `next` returns, and the returned item is dropped. A feed's `follow` has not acknowledged
that item, and delivers it again.

Use `contextlib.aclosing`: a bare `async for` that exits early is closed only when the generator is garbage-collected.
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
    """Yield the items of a blocking iterable without blocking the event loop.

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
    """The thread of one iterator. Everything except `_run` and its callees runs in the event loop."""

    def __init__(self, iterator: Iterator[T], loop: asyncio.AbstractEventLoop) -> None:
        self._iterator = iterator
        self._loop = loop
        self._busy = False
        self._requests: SimpleQueue[tuple[asyncio.Future[Any], bool]] = SimpleQueue()
        """(future for the result, whether this is the final request: to close)."""
        self._context = contextvars.copy_context()
        threading.Thread(target=self._run, name="quire-aio", daemon=True).start()

    async def next(self) -> Any:
        """Return the next item, or `_END`."""
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._busy = True
        self._requests.put((answer, False))
        try:
            return await answer
        finally:
            self._busy = answer.cancelled()  # after a cancellation, the thread may still be blocked in `next`

    async def close(self) -> None:
        """Request that the iterator be closed, and wait for that unless the iterator is blocked in `next`."""
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
            except BaseException as error:  # every kind of error must reach the waiting coroutine
                self._resolve_future(answer, None, error)
            else:
                self._resolve_future(answer, item, None)

    def _next(self) -> Any:
        return next(self._iterator, _END)

    def _close(self) -> None:
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()

    def _resolve_future(self, answer: asyncio.Future[Any], item: Any, error: BaseException | None) -> None:
        def settle() -> None:
            if answer.done():  # cancelled in the meantime
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(item)

        try:
            self._loop.call_soon_threadsafe(settle)
        except RuntimeError:
            pass  # the loop has been closed: no coroutine waits any more
