"""The feed in an event loop: changes are awaited and followed without blocking."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing, suppress

import pytest

from quire.core.async_bridge import iterate
from quire.core.errors import StoreClosed, TimedOut
from quire.manifest.store import ManifestStore
from tests.manifest.helpers import chunk, commit, eventually, finish, python, register


def test_awaiting_an_existing_change_and_a_later_one(manifest: ManifestStore) -> None:
    async def work() -> tuple[int, int]:
        commit(manifest, register(1))
        first = await manifest.feed.wait_async(0, 0)
        waiter = asyncio.ensure_future(manifest.feed.wait_async(first))
        await asyncio.sleep(0)
        await manifest.submit([chunk(1)])
        return first, await waiter

    assert asyncio.run(work()) == (1, 2)


def test_a_wait_ends_with_its_timeout(manifest: ManifestStore) -> None:
    for timeout in (0, 0.01):
        with pytest.raises(TimedOut, match="waiting for a change"):
            asyncio.run(manifest.feed.wait_async(0, timeout))


def test_a_wait_ends_with_the_store(path: str) -> None:
    manifest = ManifestStore.open(path)

    async def work() -> None:
        waiter = asyncio.ensure_future(manifest.feed.wait_async(0))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(manifest.close)
        with pytest.raises(StoreClosed):
            await waiter

    asyncio.run(work())


def test_a_read_only_process_awaits_in_a_thread_and_can_be_cancelled(manifest: ManifestStore) -> None:
    commit(manifest, register(1))
    code = """
        import asyncio, sys
        from quire.core.errors import TimedOut
        from quire.manifest.store import ManifestStore

        async def work(feed):
            print(await feed.wait_async(0, 0), flush=True)
            try:
                await feed.wait_async(1, 0.01)
            except TimedOut:
                print("timed out", flush=True)
            cancelled = asyncio.ensure_future(feed.wait_async(1000))
            await asyncio.sleep(0.01)
            cancelled.cancel()
            print(await feed.wait_async(1, 30))

        with ManifestStore.open(sys.argv[1], mode="r") as manifest:
            asyncio.run(work(manifest.feed))  # would not end if the cancelled wait continued
    """
    with python(code, manifest.env.path) as child:
        assert child.stdout is not None
        assert [child.stdout.readline() for _ in range(2)] == ["1\n", "timed out\n"]
        commit(manifest, chunk(1))
        assert finish(child) == "2\n"


def test_following_in_an_event_loop_acknowledges_finished_changes(manifest: ManifestStore) -> None:
    commit(manifest, register(1))
    commit(manifest, *[chunk(n) for n in range(3)])

    async def work() -> list[int]:
        sequences = []
        async with aclosing(iterate(manifest.feed.follow("app", limit=1))) as changes:
            async for change in changes:
                sequences.append(change.sequence)
                if change.sequence == 4:
                    break
                if change.sequence >= 2:
                    await manifest.submit([chunk(change.sequence + 100)])
        return sequences

    assert asyncio.run(work()) == [1, 2, 3, 4]
    assert manifest.feed.cursor("app").acked_sequence == 3, "the body of the loop had not finished the fourth"


def test_a_cancelled_follower_ends_its_thread_and_loses_nothing(manifest: ManifestStore) -> None:
    commit(manifest, register(1))
    sequences: list[int] = []

    async def follow() -> None:
        async with aclosing(iterate(manifest.feed.follow("app"))) as changes:
            async for change in changes:
                sequences.append(change.sequence)

    async def work() -> None:
        task = asyncio.ensure_future(follow())
        while not sequences:
            await asyncio.sleep(0.001)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(work())  # ends, although the thread of `follow` waits for a change
    commit(manifest, chunk(1))  # wakes the thread, which finds that its iterator is closed
    assert eventually(lambda: not any(thread.name == "quire-aio" for thread in threading.enumerate()))
    assert [change.sequence for change in manifest.feed.follow("app", timeout=0)] == [2]
