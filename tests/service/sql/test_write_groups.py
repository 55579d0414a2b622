"""Writer lanes: when a one-shot write is answered, and what the answers of one group have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.core.errors import Unavailable
from quire.service.sql import protocol as p
from quire.service.sql.pool import SqlConnection, SqlTarget
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


def test_a_write_that_finds_no_connection_fails_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: the first pipeline of a group leaves a temporary table, so its connection is closed; opening the next one fails.
    The whole group got the error, although the first pipeline had committed."""

    async def play() -> None:
        service = SqlService(store)
        take, opened = service.pool.take_unsynced, 0

        def second_fails(target: SqlTarget) -> SqlConnection:
            nonlocal opened
            opened += 1
            if opened == 2:
                raise Unavailable("no reader slot is free")
            return take(target)

        monkeypatch.setattr(service.pool, "take_unsynced", second_fails)
        texts = ["insert into t values (1)", "create temp table x(a)"]
        steps = [p.BatchStep(p.WireStatement(sql=text)) for text in texts]
        answers = await asyncio.gather(
            service.one_shot(SHOP, [p.BatchRequest(p.WireBatch(steps)), p.CloseRequest()]),
            service.one_shot(SHOP, one_shot("insert into t values (2)")),
            service.one_shot(SHOP, one_shot("insert into t values (3)")),
            return_exceptions=True,
        )
        assert [type(answer) for answer in answers] == [bytes, Unavailable, bytes]
        await service.close()

    asyncio.run(play())
    with closing(store.sqlite("shop")) as connection:
        assert list(connection.execute("select a from t")) == [(1,), (3,)]
