"""Batons and timeouts of streams, with a clock that the test controls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from quire.service.sql.pool import SqlTarget
from quire.service.sql.streams import SqlStream, StreamLimits, StreamRefused, StreamRegistry
from quire.sqlite.statements import StatementFailed

SHOP = SqlTarget("shop")


class RegistryHarness:
    """A registry, its clock, and the streams that were closed, rolled back or released."""

    def __init__(self, **limits: float) -> None:
        self.now = 100.0
        self.closed: list[SqlStream] = []
        self.rolled_back: list[SqlStream] = []
        self.released: list[SqlStream] = []
        self.fails: SqlStream | None = None
        self.streams = StreamRegistry(
            StreamLimits(**limits),  # type: ignore[arg-type]  # int and float limits
            close_stream=self._close,
            roll_back=self._roll_back,
            release=self._release,
            clock=lambda: self.now,
        )

    async def _close(self, stream: SqlStream) -> None:
        self.closed.append(stream)

    async def _roll_back(self, stream: SqlStream) -> None:
        if stream is self.fails:
            raise StatementFailed("disk I/O error", "SQLITE_IOERR")
        stream.is_in_transaction = False
        self.rolled_back.append(stream)

    async def _release(self, stream: SqlStream) -> None:
        self.released.append(stream)

    def refused(self, baton: str, target: SqlTarget = SHOP, caller: str = "me") -> str:
        with pytest.raises(StreamRefused) as caught:
            self.streams.resume(baton, target, caller)
        return caught.value.code


def within(test: Callable[[RegistryHarness], Awaitable[None]], **limits: float) -> None:
    async def run() -> None:
        await test(RegistryHarness(**limits))

    asyncio.run(run())


def test_a_baton_is_valid_once_for_its_caller_and_database() -> None:
    async def test(harness: RegistryHarness) -> None:
        stream = harness.streams.open(SHOP, "me")
        baton = harness.streams.baton(stream)
        assert harness.refused(baton, caller="you") == "BATON_INVALID"
        assert harness.refused(baton, SqlTarget("crm")) == "BATON_INVALID"
        assert harness.streams.resume(baton, SHOP, "me") is stream
        assert harness.refused(baton) == "BATON_REUSED"
        following = harness.streams.baton(stream)
        assert following != baton
        assert harness.refused(baton) == "BATON_REUSED"
        assert harness.streams.resume(following, SHOP, "me") is stream

    within(test)


def test_a_forged_or_changed_baton_is_refused() -> None:
    async def test(harness: RegistryHarness) -> None:
        baton = harness.streams.baton(harness.streams.open(SHOP, "me"))
        for number in range(len(baton)):
            other = "A" if baton[number] != "A" else "B"
            changed = baton[:number] + other + baton[number + 1 :]
            assert harness.refused(changed) == "BATON_INVALID"
        for wrong in ("", "x", "§", baton[:-1], baton + "AAAA", baton * 100):
            assert harness.refused(wrong) == "BATON_INVALID"
        assert RegistryHarness().refused(baton) == "BATON_INVALID"  # from another server

    within(test)


def test_an_idle_stream_is_closed_and_its_baton_expires() -> None:
    async def test(harness: RegistryHarness) -> None:
        stream = harness.streams.open(SHOP, "me")
        baton = harness.streams.baton(stream)
        harness.now += 9.9
        await harness.streams.sweep()
        assert not harness.closed
        harness.now += 0.2
        await harness.streams.sweep()
        assert harness.closed == [stream]
        assert harness.refused(baton) == "STREAM_EXPIRED"
        assert len(harness.streams) == 0

    within(test)


def test_an_idle_transaction_has_half_the_timeout() -> None:
    async def test(harness: RegistryHarness) -> None:
        stream = harness.streams.open(SHOP, "me")
        stream.is_in_transaction = True
        harness.now += 5.1
        await harness.streams.sweep()
        assert harness.closed == [stream]
        assert harness.streams.rolled_back == 1

    within(test)


def test_a_stream_that_cannot_be_closed_does_not_keep_others_open(capfd: pytest.CaptureFixture[str]) -> None:
    """Hazard: the error ended the sweep, so later streams kept their transactions and locks."""

    async def test(harness: RegistryHarness) -> None:
        streams = [harness.streams.open(SHOP, "me", is_lasting=True) for _ in range(2)]
        for stream in streams:
            stream.is_in_transaction = True
        harness.fails = streams[0]
        harness.now += 5.1
        await harness.streams.sweep()
        assert harness.rolled_back == [streams[1]]

    within(test)
    assert "service.bug" in capfd.readouterr().err


def test_a_lasting_stream_loses_only_its_transaction() -> None:
    async def test(harness: RegistryHarness) -> None:
        stream = harness.streams.open(SHOP, "me", is_lasting=True)
        stream.is_in_transaction = True
        harness.now += 3_600
        await harness.streams.sweep()
        assert (harness.closed, harness.rolled_back) == ([], [stream])
        await harness.streams.sweep()
        assert (harness.closed, harness.rolled_back) == ([], [stream])

    within(test)


def test_a_waiting_stream_releases_its_pages_once() -> None:
    async def test(harness: RegistryHarness) -> None:
        stream = harness.streams.open(SHOP, "me")
        harness.streams.touch(stream)
        for _ in range(3):
            harness.now += 1.1
            await harness.streams.sweep()
        assert harness.released == [stream]

    within(test)


def test_a_busy_stream_does_not_time_out() -> None:
    async def test(harness: RegistryHarness) -> None:
        stream = harness.streams.open(SHOP, "me")
        async with stream.lock:
            harness.now += 3_600
            await harness.streams.sweep()
        assert not harness.closed

    within(test)


def test_streams_are_limited_in_total_and_per_database() -> None:
    async def test(harness: RegistryHarness) -> None:
        held = [harness.streams.open(SHOP, "me") for _ in range(2)]
        held.append(harness.streams.open(SqlTarget("crm"), "me"))
        for stream in held:
            stream.is_in_transaction = True
        for target in (SHOP, SqlTarget("other")):
            with pytest.raises(StreamRefused) as caught:
                harness.streams.open(target, "me")
            assert caught.value.code == "TOO_MANY_STREAMS"
        await harness.streams.close(held[0])
        harness.streams.open(SHOP, "me")

    within(test, streams_max=3, per_database_max=2)


def test_at_the_limit_a_stream_without_state_is_closed_first() -> None:
    async def test(harness: RegistryHarness) -> None:
        first = harness.streams.open(SHOP, "me")
        first.is_in_transaction = True
        harness.now += 1
        second = harness.streams.open(SHOP, "me")
        harness.now += 1
        harness.streams.open(SHOP, "me")
        await asyncio.sleep(0)
        assert harness.closed == [second]

    within(test, streams_max=9, per_database_max=2)
