"""Threads that run SQL: how they are shared between databases."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

import quire
from quire.service.sql.pool import SqlTarget
from quire.service.sql.service import SqlService
from quire.service.sql.session import SqlSession, Work
from tests.service.sql.world import settings


@pytest.mark.parametrize("limits", [{"sql_threads": 3, "sql_database_threads": 2}, {"sql_threads": 3}])
def test_one_database_never_has_all_threads(path: Path, limits: dict[str, int]) -> None:
    """Statements that nothing interrupts: as many as there are threads, and two more."""
    let_go, begun = threading.Event(), threading.Semaphore(0)

    def select(session: SqlSession) -> Work[int]:
        return (yield from session.execute("select 1")).row_count

    def stuck(session: SqlSession) -> Work[int]:
        begun.release()
        let_go.wait(60)
        return (yield from select(session))

    async def play(store: quire.Store) -> None:
        service = SqlService(store)
        slow = [asyncio.create_task(service.in_session(SqlTarget("greedy"), stuck)) for _ in range(5)]
        for _ in range(2):
            await asyncio.to_thread(begun.acquire)
        assert await asyncio.wait_for(service.in_session(SqlTarget("other"), select), 60) == 1
        assert not any(task.done() for task in slow)
        let_go.set()
        assert await asyncio.gather(*slow) == [1] * 5
        await service.close()

    with quire.open(path, settings=settings(**limits)) as store:
        for name in ("greedy", "other"):
            store.sqlite(name, create=True).close()
        asyncio.run(play(store))
