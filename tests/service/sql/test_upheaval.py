"""Open transactions of clients whose database is dropped, checkpointed or rolled back."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.durable.files import OsDisk
from quire.store.store import Store
from quire.testing.faults import Fault, FaultyDisk
from tests.service.sql.hrana_client import CLOSE, HranaClient, execute, plain_rows, settings

READ = "select a from t"


@pytest.fixture
def shop(served: tuple[Store, HranaClient]) -> HranaClient:
    store, hrana = served
    with closing(store.sqlite("shop", create=True)) as connection:
        connection.execute("create table t(a); insert into t values (1)")
    return HranaClient(hrana.address, prefix="/db/shop")


def rows(result: dict[str, Any]) -> list[tuple[Any, ...]]:
    return plain_rows(result["response"]["result"]["rows"])


def test_a_transaction_of_a_dropped_database_is_not_committed_to_its_successor(shop: HranaClient, store: Store) -> None:
    shop.pipeline(execute("begin immediate"), execute("insert into t values (2)"))
    store.drop("shop")
    with closing(store.sqlite("shop", create=True)) as connection:
        connection.execute("create table t(a)")
        commit, _ = shop.pipeline(execute("commit"), CLOSE)
        assert "the database was dropped" in commit["error"]["message"]
        assert list(connection.execute(READ)) == []
        assert rows(shop.once(READ)) == []


def test_a_checkpoint_does_not_affect_open_transactions(shop: HranaClient, store: Store) -> None:
    reader = HranaClient(shop.address, prefix="/db/shop")
    assert rows(reader.pipeline(execute("begin"), execute(READ))[1]) == [(1,)]
    shop.pipeline(execute("begin immediate"), execute("insert into t values (2)"))
    store.checkpoint("shop")
    assert shop.pipeline(execute("commit"))[0]["type"] == "ok"
    assert rows(reader.pipeline(execute(READ))[0]) == [(1,)]
    assert rows(reader.pipeline(execute("commit"), execute(READ))[1]) == [(1,), (2,)]


def test_after_a_rollback_an_open_transaction_still_reads_and_cannot_write(shop: HranaClient, store: Store) -> None:
    store.snapshot("shop", "monday")
    shop.once("insert into t values (2)")
    reader = HranaClient(shop.address, prefix="/db/shop")
    reader.pipeline(execute("begin"), execute(READ))
    store.rollback("shop", to="monday")
    read, write = reader.pipeline(execute(READ), execute("insert into t values (3)"))
    assert rows(read) == [(1,), (2,)]
    assert write["error"]["extended_code"] == "SQLITE_BUSY_SNAPSHOT"
    reader.pipeline(execute("rollback"), execute("insert into t values (4)"))
    assert shop.rows(READ) == [(1,), (4,)]


@pytest.mark.parametrize("fault", [Fault.ENOSPC, Fault.SHORT_WRITE])
def test_a_full_disk_is_reported_and_the_transaction_leaves_nothing(path: Path, fault: Fault) -> None:
    """Each write to the log fails once: writes of one-shots, which share a connection and a sync, and of a stream's
    transaction."""
    disk = FaultyDisk(OsDisk(), fault, operation="none")
    with quire.open(path, settings=settings(), disk=disk) as store, store.serve_http("127.0.0.1:0") as server:
        hrana = HranaClient(server.address)
        hrana.once("create table t(a)")
        rows, refused = 0, 0
        insert = execute("insert into t values (1)")
        for requests in ([insert], [execute("begin"), insert, execute("commit")]):
            for fail_at in range(1, 6):
                store.pages.open("default").wal.seal()  # a new segment is needed
                disk.arm(fault, fail_at=fail_at, path="*.seg*")
                answers = hrana.pipeline(*requests, CLOSE)
                disk.arm(fault, fail_at=0)
                codes = [answer["error"]["code"] for answer in answers if answer["type"] == "error"]
                ((count,),) = hrana.rows("select count(*) from t")
                if not codes:
                    assert count == rows + 1
                elif "SQLITE_FULL" in codes:
                    assert count == rows
                    refused += 1
                assert count in (rows, rows + 1)
                rows = count
        assert refused > 1, "no write failed, so the test proves nothing"
        assert hrana.once("insert into t values (1)")["type"] == "ok"
    with quire.open(path) as store, closing(store.sqlite("default")) as connection:
        assert list(connection.execute("select count(*) from t")) == [(rows + 1,)]


def test_a_database_whose_log_failed_is_reopened_by_the_next_request(path: Path) -> None:
    disk = FaultyDisk(OsDisk(), Fault.EIO, operation="none")
    with quire.open(path, settings=settings(), disk=disk) as store, store.serve_http("127.0.0.1:0") as server:
        hrana = HranaClient(server.address)
        assert hrana.once("create table t(a)")["type"] == "ok"
        held = [HranaClient(server.address) for _ in range(3)]
        for stream in held:
            stream.run("select count(*) from t")
        for stream in held:
            stream.pipeline(CLOSE)  # three connections wait in the pool
        disk.arm(Fault.EIO, fail_at=1, operation="sync", path="*.seg*")
        response = hrana.post("/v2/pipeline", {"requests": [execute("insert into t values (1)"), CLOSE]})
        assert (response.status, response.json["error"]) == (503, "StoreUnusable")
        disk.arm(Fault.EIO, fail_at=0)
        assert hrana.rows("select count(*) from t") in ([(0,)], [(1,)])  # only recovery can determine what is on disk
        assert hrana.once("insert into t values (2)")["type"] == "ok"
