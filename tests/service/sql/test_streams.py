"""Batons and the time that streams have, with a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from quire.service.sql.pool import SqlTarget
from quire.service.sql.streams import SqlStream, StreamLimits, StreamRefused, StreamRegistry

SHOP = SqlTarget("shop")


class World:
    """A registry, its clock, and what was ended."""

    def __init__(self, **limits: float) -> None:
        self.now = 100.0
        self.closed: list[SqlStream] = []
        self.rolled_back: list[SqlStream] = []
        self.released: list[SqlStream] = []
        self.streams = StreamRegistry(
            StreamLimits(**limits),  # type: ignore[arg-type]  # numbers of both kinds
            close_stream=self._close,
            roll_back=self._roll_back,
            release=self._release,
            clock=lambda: self.now,
        )

    async def _close(self, stream: SqlStream) -> None:
        self.closed.append(stream)

    async def _roll_back(self, stream: SqlStream) -> None:
        stream.is_in_transaction = False
        self.rolled_back.append(stream)

    async def _release(self, stream: SqlStream) -> None:
        self.released.append(stream)

    def refused(self, baton: str, target: SqlTarget = SHOP, caller: str = "me") -> str:
        with pytest.raises(StreamRefused) as caught:
            self.streams.resume(baton, target, caller)
        return caught.value.code


def within(test: Callable[[World], Awaitable[None]], **limits: float) -> None:
    async def run() -> None:
        await test(World(**limits))

    asyncio.run(run())


def test_a_baton_is_used_once_by_its_caller_for_its_database() -> None:
    async def test(world: World) -> None:
        stream = world.streams.open(SHOP, "me")
        baton = world.streams.baton(stream)
        assert world.refused(baton, caller="you") == "BATON_INVALID"
        assert world.refused(baton, SqlTarget("crm")) == "BATON_INVALID"
        assert world.streams.resume(baton, SHOP, "me") is stream
        assert world.refused(baton) == "BATON_REUSED"
        following = world.streams.baton(stream)
        assert following != baton
        assert world.refused(baton) == "BATON_REUSED"
        assert world.streams.resume(following, SHOP, "me") is stream

    within(test)


def test_a_baton_cannot_be_made_up_or_changed() -> None:
    async def test(world: World) -> None:
        baton = world.streams.baton(world.streams.open(SHOP, "me"))
        for number in range(len(baton)):
            other = "A" if baton[number] != "A" else "B"
            changed = baton[:number] + other + baton[number + 1 :]
            assert world.refused(changed) == "BATON_INVALID"
        for wrong in ("", "x", "§", baton[:-1], baton + "AAAA", baton * 100):
            assert world.refused(wrong) == "BATON_INVALID"
        assert World().refused(baton) == "BATON_INVALID"  # of another server

    within(test)


def test_an_idle_stream_is_closed_and_its_baton_has_expired() -> None:
    async def test(world: World) -> None:
        stream = world.streams.open(SHOP, "me")
        baton = world.streams.baton(stream)
        world.now += 9.9
        await world.streams.sweep()
        assert not world.closed
        world.now += 0.2
        await world.streams.sweep()
        assert world.closed == [stream]
        assert world.refused(baton) == "STREAM_EXPIRED"
        assert len(world.streams) == 0

    within(test)


def test_an_idle_transaction_has_half_that_time() -> None:
    async def test(world: World) -> None:
        stream = world.streams.open(SHOP, "me")
        stream.is_in_transaction = True
        world.now += 5.1
        await world.streams.sweep()
        assert world.closed == [stream]
        assert world.streams.rolled_back == 1

    within(test)


def test_a_lasting_stream_only_loses_its_transaction() -> None:
    async def test(world: World) -> None:
        stream = world.streams.open(SHOP, "me", is_lasting=True)
        stream.is_in_transaction = True
        world.now += 3_600
        await world.streams.sweep()
        assert (world.closed, world.rolled_back) == ([], [stream])
        await world.streams.sweep()
        assert (world.closed, world.rolled_back) == ([], [stream])

    within(test)


def test_a_stream_that_waits_gives_its_pages_back_once() -> None:
    async def test(world: World) -> None:
        stream = world.streams.open(SHOP, "me")
        world.streams.touch(stream)
        for _ in range(3):
            world.now += 1.1
            await world.streams.sweep()
        assert world.released == [stream]

    within(test)


def test_a_stream_at_work_is_left_alone() -> None:
    async def test(world: World) -> None:
        stream = world.streams.open(SHOP, "me")
        async with stream.lock:
            world.now += 3_600
            await world.streams.sweep()
        assert not world.closed

    within(test)


def test_streams_are_bounded_in_all_and_for_each_database() -> None:
    async def test(world: World) -> None:
        held = [world.streams.open(SHOP, "me") for _ in range(2)]
        held.append(world.streams.open(SqlTarget("crm"), "me"))
        for stream in held:
            stream.is_in_transaction = True
        for target in (SHOP, SqlTarget("other")):
            with pytest.raises(StreamRefused) as caught:
                world.streams.open(target, "me")
            assert caught.value.code == "TOO_MANY_STREAMS"
        await world.streams.close(held[0])
        world.streams.open(SHOP, "me")

    within(test, streams_max=3, per_database_max=2)


def test_where_there_is_no_room_the_stream_that_keeps_nothing_goes_first() -> None:
    async def test(world: World) -> None:
        first = world.streams.open(SHOP, "me")
        first.is_in_transaction = True
        world.now += 1
        second = world.streams.open(SHOP, "me")
        world.now += 1
        world.streams.open(SHOP, "me")
        await asyncio.sleep(0)
        assert world.closed == [second]

    within(test, streams_max=9, per_database_max=2)
