"""Memory use of many connections."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

import quire
from quire.core.limits import MIB
from quire.service.sql.pool import SqlTarget
from quire.service.sql.service import SqlService
from tests.service.sql.hrana_client import settings

STREAMS = 500
WHOLE_MIB = 5.5
"""Per connection that has just scanned a table: 4 MiB of pages, and overhead of SQLite and Python."""
IDLE_MIB = 1.0
"""Per connection after two idle seconds."""


@pytest.mark.slow
def test_five_hundred_connections_that_have_scanned_a_table(path: Path) -> None:
    with quire.open(path, settings=settings(sql_database_streams_max=STREAMS, sql_streams_max=STREAMS)) as store:
        connection = store.sqlite("default", create=True)
        connection.execute("create table t(a, b)")
        series = "with recursive n(i) as (select 1 union all select i + 1 from n where i < 100000)"
        connection.execute(f"insert into t {series} select i, printf('%0100d', i) from n")
        connection.close()
        scanned, idle = asyncio.run(scan(store))
    assert scanned / MIB <= STREAMS * WHOLE_MIB, f"{scanned / MIB:.0f} MiB"
    assert idle / MIB <= STREAMS * IDLE_MIB, f"{idle / MIB:.0f} MiB"


async def scan(store: quire.Store) -> tuple[int, int]:
    """(bytes more than before with all connections open, the same after they have waited)."""
    service, process, target = SqlService(store), psutil.Process(), SqlTarget("default")
    before = process.memory_info().rss
    streams = [service.streams.open(target, "me", is_lasting=True) for _ in range(STREAMS)]
    for stream in streams:
        async with stream.lock:
            outcome = await service.run(stream, lambda session: session.execute("select sum(length(b)) from t"))
            assert outcome.row_count == 1
    scanned = process.memory_info().rss - before
    while any(stream.has_pages for stream in streams):
        await asyncio.sleep(0.2)
    for _ in range(50):  # freed memory is returned after the last connection has released its pages
        if (idle := process.memory_info().rss - before) <= STREAMS * IDLE_MIB * MIB:
            break
        await asyncio.sleep(0.1)
    await service.close()
    return scanned, idle
