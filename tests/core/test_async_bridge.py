"""Blocking iterators in an event loop: one item at a time, in one thread, always closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing, suppress

import pytest

from quire.core.async_bridge import iterate


class Source:
    """A blocking iterator that records its use and can be made to wait."""

    def __init__(self, items: int = 1_000, hold_at: int = -1) -> None:
        self.yielded = 0
        self.closed = threading.Event()
        self.holding = threading.Event()
        self.release = threading.Event()
        self.threads: set[int] = set()
        self._items = items
        self._hold_at = hold_at

    def __iter__(self) -> Iterator[int]:
        try:
            for number in range(self._items):
                self.threads.add(threading.get_ident())
                if number == self._hold_at:
                    self.holding.set()
                    assert self.release.wait(30)
                self.yielded += 1
                yield number
        finally:
            self.threads.add(threading.get_ident())
            self.closed.set()


def test_every_item_is_yielded_in_order_in_one_thread_outside_the_loop() -> None:
    source = Source(50)

    async def work() -> list[int]:
        return [item async for item in iterate(source)]

    assert asyncio.run(work()) == list(range(50))
    assert source.closed.is_set()
    assert len(source.threads) == 1
    assert threading.get_ident() not in source.threads


def test_no_item_is_requested_ahead_of_the_loop() -> None:
    source = Source()

    async def work() -> None:
        async with aclosing(iterate(source)) as items:
            async for item in items:
                await asyncio.sleep(0.002)
                assert source.yielded == item + 1
                if item == 5:
                    break

    asyncio.run(work())
    assert source.yielded == 6


def test_the_loop_continues_while_the_iterator_blocks() -> None:
    source = Source(hold_at=0)

    async def work() -> int:
        async with aclosing(iterate(source)) as items:
            first = asyncio.ensure_future(anext(items))
            while not source.holding.is_set():
                await asyncio.sleep(0)
            source.release.set()
            return await first

    assert asyncio.run(work()) == 0


def test_leaving_early_waits_until_the_iterator_is_closed() -> None:
    source = Source()

    async def work() -> None:
        async with aclosing(iterate(source)) as items:
            async for _ in items:
                break
        assert source.closed.is_set()

    asyncio.run(work())


def test_a_body_that_raises_closes_the_iterator() -> None:
    source = Source()

    async def work() -> None:
        async with aclosing(iterate(source)) as items:
            async for _ in items:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(work())
    assert source.closed.is_set()


def test_cancelling_does_not_wait_for_a_blocked_iterator_which_is_closed_when_it_returns() -> None:
    source = Source(hold_at=3)
    received: list[int] = []

    async def follow() -> None:
        async with aclosing(iterate(source)) as items:
            async for item in items:
                received.append(item)

    async def work() -> None:
        task = asyncio.ensure_future(follow())
        while not source.holding.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert not source.closed.is_set()

    asyncio.run(work())  # ends, although the iterator is still blocked
    source.release.set()
    assert source.closed.wait(30)
    assert received == [0, 1, 2], "the item of the last call was dropped"
    assert len(source.threads) == 1


def test_an_error_of_the_iterator_reaches_the_loop() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise LookupError("no more")

    async def work() -> None:
        async with aclosing(iterate(failing())) as items:
            assert await anext(items) == 1
            with pytest.raises(LookupError, match="no more"):
                await anext(items)

    asyncio.run(work())


def test_an_error_of_closing_reaches_the_loop() -> None:
    def failing_to_close() -> Iterator[int]:
        try:
            yield 1
        finally:
            raise LookupError("cannot close")

    async def work() -> None:
        async with aclosing(iterate(failing_to_close())) as items:
            await anext(items)

    with pytest.raises(LookupError, match="cannot close"):
        asyncio.run(work())


def test_an_iterator_without_close_is_accepted() -> None:
    async def work() -> list[str]:
        return [item async for item in iterate("abc")]

    assert asyncio.run(work()) == ["a", "b", "c"]


def test_no_thread_is_left_behind() -> None:
    before = threading.active_count()

    async def work() -> None:
        for _ in range(20):
            async with aclosing(iterate(Source())) as items:
                await anext(items)

    asyncio.run(work())
    for thread in threading.enumerate():
        if thread.name == "quire-aio":
            thread.join(30)
    assert threading.active_count() <= before
