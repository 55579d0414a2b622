"""The threads that run SQL: how jobs are queued, and how databases share the threads."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from functools import partial
from pathlib import Path

import pytest

import quire
from quire.core.errors import Unavailable
from quire.service.sql import service as service_module
from quire.service.sql import threads as threads_module
from quire.service.sql.pool import SqlTarget
from quire.service.sql.service import SqlService
from quire.service.sql.session import SqlSession, Work
from quire.service.sql.threads import SqlThreads, ThreadShare
from tests.service.sql.hrana_client import settings


@pytest.mark.parametrize("limits", [{"sql_threads": 3, "sql_database_threads": 2}, {"sql_threads": 3}])
def test_one_database_never_has_all_threads(path: Path, limits: dict[str, int]) -> None:
    """Statements that nothing interrupts: two more than there are threads."""
    release, started = threading.Event(), threading.Semaphore(0)

    def select(session: SqlSession) -> Work[int]:
        return (yield from session.execute("select 1")).row_count

    def blocked(session: SqlSession) -> Work[int]:
        started.release()
        release.wait(60)
        return (yield from select(session))

    async def play(store: quire.Store) -> None:
        service = SqlService(store)
        slow = [asyncio.create_task(service.in_session(SqlTarget("greedy"), blocked)) for _ in range(5)]
        for _ in range(2):
            await asyncio.to_thread(started.acquire)
        assert await asyncio.wait_for(service.in_session(SqlTarget("other"), select), 60) == 1
        assert not any(task.done() for task in slow)
        release.set()
        assert await asyncio.gather(*slow) == [1] * 5
        await service.close()

    with quire.open(path, settings=settings(**limits)) as store:
        for name in ("greedy", "other"):
            store.sqlite(name, create=True).close()
        asyncio.run(play(store))


def test_jobs_of_one_round_share_a_thread_and_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hand-over to a thread costs more than a short statement."""
    calls = 0
    # On a loaded machine these jobs can take longer than a tick, which would wake a second thread.
    monkeypatch.setattr(threads_module, "TICK_SECONDS", 60.0)
    monkeypatch.setattr(threads_module, "LONG_SECONDS", 60.0)

    async def play() -> None:
        nonlocal calls
        threads, loop = SqlThreads(8), asyncio.get_running_loop()
        await threads.call(int)  # its first thread has started
        threadsafe = loop.call_soon_threadsafe

        def counting(*args: object) -> object:
            nonlocal calls
            calls += 1
            return threadsafe(*args)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = counting  # type: ignore[assignment]
        names = await asyncio.gather(*[threads.call(lambda: threading.current_thread().name) for _ in range(32)])
        assert set(names) == {"sql-worker-0"}
        assert calls <= 2
        threads.close()

    asyncio.run(play())


@pytest.mark.parametrize("position", [0, 1, 7])
def test_a_slow_job_does_not_block_the_jobs_around_it(position: int) -> None:
    """Neither earlier jobs of its group, whose answers are ready, nor those that wait for its thread."""
    release = threading.Event()

    async def play() -> None:
        threads = SqlThreads(3)
        jobs = [partial(release.wait, 60) if number == position else bool for number in range(16)]
        tasks = [asyncio.create_task(threads.call(job)) for job in jobs]
        done, pending = await asyncio.wait(tasks, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        while len(pending) > 1:
            done, pending = await asyncio.wait(pending, timeout=30, return_when=asyncio.FIRST_COMPLETED)
            assert done, "they wait for the slow job"
        assert not tasks[position].done()
        release.set()
        assert await asyncio.gather(*tasks) == [number == position for number in range(16)]
        threads.close()

    asyncio.run(play())


def test_a_job_that_waits_for_the_disk_gets_its_own_thread_at_once() -> None:
    started, release = threading.Event(), threading.Event()

    def works() -> None:
        started.set()
        release.wait(60)

    async def play() -> None:
        threads = SqlThreads(2)
        worker = asyncio.create_task(threads.call(works))
        while not started.is_set():
            await asyncio.sleep(0)
        assert await asyncio.wait_for(threads.call(lambda: 7, waits=True), 30) == 7
        release.set()
        await worker
        threads.close()

    asyncio.run(play())


@pytest.mark.parametrize("seed", range(6))
def test_every_job_runs_exactly_once(seed: int) -> None:
    """Short, long and waiting jobs, cancelled callers, three databases with a share each, few threads."""
    rng = random.Random(seed)
    runs: list[int] = []
    together: dict[int, int] = {0: 0, 1: 0, 2: 0}
    peaks = dict(together)
    lock = threading.Lock()

    def job(number: int, database: int, seconds: float) -> int:
        with lock:
            runs.append(number)
            together[database] += 1
            peaks[database] = max(peaks[database], together[database])
        time.sleep(seconds)
        with lock:
            together[database] -= 1
        return number

    async def play() -> None:
        threads = SqlThreads(4)
        shares = [ThreadShare(2) for _ in range(3)]
        tasks = []
        for number in range(300):
            database, is_waiting = rng.randrange(3), rng.random() < 0.1
            seconds = rng.choice([0.0] * 12 + [0.0005, 0.003, 0.01])
            share = None if is_waiting else shares[database]
            call = partial(job, number, database if share else 3 + number, seconds)
            if share is None:
                with lock:
                    together[3 + number] = peaks[3 + number] = 0
            tasks.append(asyncio.create_task(threads.call(call, share, waits=is_waiting)))
            if rng.random() < 0.05:
                tasks[-1].cancel()
            if rng.random() < 0.3:
                await asyncio.sleep(rng.choice([0, 0, 0.001, 0.004]))
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        succeeded = [number for number, result in enumerate(results) if result == number]
        assert set(succeeded) <= set(runs)
        assert all(isinstance(result, int | asyncio.CancelledError) for result in results)
        threads.close()
        with pytest.raises(Unavailable):
            await threads.call(int)

    asyncio.run(play())
    assert len(runs) == len(set(runs))
    assert max(peaks[database] for database in range(3)) <= 2


def test_closing_runs_queued_jobs_and_ends_the_threads() -> None:
    ran: list[int] = []

    async def play() -> None:
        threads = SqlThreads(2)
        tasks = [asyncio.create_task(threads.call(partial(ran.append, number))) for number in range(8)]
        await asyncio.sleep(0)  # they are queued; no thread was woken yet
        threads.close()
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
        for thread in threads._threads:
            thread.join(60)
            assert not thread.is_alive()

    asyncio.run(play())
    assert sorted(ran) == [*range(8)]


def test_sweeping_continues_after_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Hazard: the sweeper ended with its first error, and idle transactions were never rolled back again."""
    monkeypatch.setattr(service_module, "SWEEP_SECONDS", 0.001)

    async def play(store: quire.Store) -> None:
        service, swept = SqlService(store), asyncio.Event()
        rounds = iter([True])

        async def sweep() -> None:
            if next(rounds, False):
                raise RuntimeError("unexpected")
            swept.set()

        monkeypatch.setattr(service.streams, "sweep", sweep)
        await asyncio.wait_for(swept.wait(), 60)
        await service.close()

    with quire.open(path, settings=settings()) as store:
        asyncio.run(play(store))
    assert "service.bug" in capfd.readouterr().err


def test_a_name_refers_to_the_database_that_has_it_now(path: Path) -> None:
    """Hazard: names are cached between requests while the manifest does not change."""

    async def play(store: quire.Store) -> None:
        service = SqlService(store)

        def first(session: SqlSession) -> Work[bytes]:
            return (yield from session.execute("select a from t")).row_batches[0]

        async def request(name: str) -> bytes:
            return await service.in_session(SqlTarget(name), first)

        for round_ in range(3):
            with store.sqlite("shop", create=True) as connection:
                connection.execute("create table t(a)")
                connection.execute("insert into t values (?)", (round_,))
            for _ in range(3):
                assert str(round_).encode() in await request("shop")
            store.drop("shop")
            with pytest.raises(quire.UnknownDatabase):
                await request("shop")
        await service.close()

    with quire.open(path, settings=settings()) as store:
        asyncio.run(play(store))
