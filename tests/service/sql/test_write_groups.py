"""Writer lanes: when a one-shot write is answered, and what the answers of one group have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.service.sql import protocol as p
from quire.service.sql.pool import SqlTarget
from quire.service.sql.service import SqlService
from quire.store.store import Store
from tests.service.sql.hrana_client import settings
from tests.syncs import HeldSyncs

SHOP = SqlTarget("shop")
INSERT = "insert into t values (1) on conflict do nothing"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with quire.open(path, settings=settings()) as store:
        with closing(store.sqlite("shop", create=True)) as connection:
            connection.execute("create table t(a unique)")
        yield store


def one_shot(*sql: str) -> list[p.StreamRequest]:
    return [*(p.ExecuteRequest(p.WireStatement(sql=text)) for text in sql), p.CloseRequest()]


@pytest.mark.parametrize(("first", "key"), [("one-shot", "once"), ("one-shot", ""), ("connection", "")])
def test_a_write_that_finds_itself_done_is_answered_when_that_is_durable(store: Store, first: str, key: str) -> None:
    """Hazard: a repeat runs while the first attempt waits for the disk. It writes nothing, so it had nothing to wait for, and
    acknowledged a change that a crash could still lose."""

    def insert() -> None:
        with closing(store.sqlite("shop")) as connection:
            connection.execute(INSERT)

    async def play() -> None:
        service = SqlService(store)
        with HeldSyncs(store.pages.open("shop").wal) as syncs:
            attempt: asyncio.Task[Any]
            if first == "connection":
                attempt = asyncio.create_task(asyncio.to_thread(insert))
            else:
                attempt = asyncio.create_task(service.one_shot(SHOP, one_shot(INSERT), key=key))
            await asyncio.to_thread(syncs.wait_for_one)
            repeat = asyncio.create_task(service.one_shot(SHOP, one_shot(INSERT), key=key))
            waits = asyncio.create_task(asyncio.to_thread(syncs.wait_for_one))
            await asyncio.wait([repeat, waits], return_when=asyncio.FIRST_COMPLETED)
            assert not repeat.done()
        await asyncio.gather(attempt, repeat, waits)
        await service.close()

    asyncio.run(play())
