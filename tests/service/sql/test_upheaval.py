"""What happens to open transactions of clients when their database is dropped, checkpointed or rolled back."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.durable.files import OsDisk
from quire.store.store import Store
from quire.testing.faults import Fault, FaultyDisk
from tests.service.sql.world import CLOSE, SqlAsker, execute, plain_rows, settings

READ = "select a from t"


@pytest.fixture
def shop(served: tuple[Store, SqlAsker]) -> SqlAsker:
    store, asker = served
    with closing(store.sqlite("shop", create=True)) as connection:
        connection.execute("create table t(a); insert into t values (1)")
    return SqlAsker(asker.address, prefix="/db/shop")


def rows(result: dict[str, Any]) -> list[tuple[Any, ...]]:
    return plain_rows(result["response"]["result"]["rows"])


def test_a_transaction_of_a_dropped_database_is_not_committed_to_the_next_one_of_its_name(
    shop: SqlAsker, store: Store
) -> None:
    shop.pipeline(execute("begin immediate"), execute("insert into t values (2)"))
    store.drop("shop")
    with closing(store.sqlite("shop", create=True)) as connection:
        connection.execute("create table t(a)")
        commit, _ = shop.pipeline(execute("commit"), CLOSE)
        assert "the database was dropped" in commit["error"]["message"]
        assert list(connection.execute(READ)) == []
        assert rows(shop.once(READ)) == []


def test_a_checkpoint_leaves_open_transactions_as_they_are(shop: SqlAsker, store: Store) -> None:
    reader = SqlAsker(shop.address, prefix="/db/shop")
    assert rows(reader.pipeline(execute("begin"), execute(READ))[1]) == [(1,)]
    shop.pipeline(execute("begin immediate"), execute("insert into t values (2)"))
    store.checkpoint("shop")
    assert shop.pipeline(execute("commit"))[0]["type"] == "ok"
    assert rows(reader.pipeline(execute(READ))[0]) == [(1,)]
    assert rows(reader.pipeline(execute("commit"), execute(READ))[1]) == [(1,), (2,)]


def test_after_a_rollback_an_open_transaction_reads_on_and_cannot_write(shop: SqlAsker, store: Store) -> None:
    store.snapshot("shop", "monday")
    shop.once("insert into t values (2)")
    reader = SqlAsker(shop.address, prefix="/db/shop")
    reader.pipeline(execute("begin"), execute(READ))
    store.rollback("shop", to="monday")
    read, write = reader.pipeline(execute(READ), execute("insert into t values (3)"))
    assert rows(read) == [(1,), (2,)]
    assert write["error"]["extended_code"] == "SQLITE_BUSY_SNAPSHOT"
    reader.pipeline(execute("rollback"), execute("insert into t values (4)"))
    assert shop.rows(READ) == [(1,), (4,)]


@pytest.mark.parametrize("fault", [Fault.ENOSPC, Fault.SHORT_WRITE])
def test_a_full_disk_is_told_and_leaves_nothing_of_the_transaction(path: Path, fault: Fault) -> None:
    """Each write to the log fails once: of one-shots, which share a connection and a sync, and of a stream's transaction."""
    disk = FaultyDisk(OsDisk(), fault, operation="none")
    with quire.open(path, settings=settings(), disk=disk) as store, store.serve_http("127.0.0.1:0") as server:
        asker = SqlAsker(server.address)
        asker.once("create table t(a)")
        rows, refused = 0, 0
        insert = execute("insert into t values (1)")
        for requests in ([insert], [execute("begin"), insert, execute("commit")]):
            for fail_at in range(1, 6):
                store.pages.open("default").wal.seal()  # so that a new segment is needed
                disk.arm(fault, fail_at=fail_at, path="*.seg*")
                answers = asker.pipeline(*requests, CLOSE)
                disk.arm(fault, fail_at=0)
                codes = [answer["error"]["code"] for answer in answers if answer["type"] == "error"]
                ((there,),) = asker.rows("select count(*) from t")
                if not codes:
                    assert there == rows + 1
                elif "SQLITE_FULL" in codes:
                    assert there == rows
                    refused += 1
                assert there in (rows, rows + 1)
                rows = there
        assert refused > 1, "nothing was refused, and this shows nothing"
        assert asker.once("insert into t values (1)")["type"] == "ok"
    with quire.open(path) as store, closing(store.sqlite("default")) as connection:
        assert list(connection.execute("select count(*) from t")) == [(rows + 1,)]


def test_a_database_whose_log_failed_is_opened_anew_by_the_next_request(path: Path) -> None:
    disk = FaultyDisk(OsDisk(), Fault.EIO, operation="none")
    with quire.open(path, settings=settings(), disk=disk) as store, store.serve_http("127.0.0.1:0") as server:
        asker = SqlAsker(server.address)
        assert asker.once("create table t(a)")["type"] == "ok"
        held = [SqlAsker(server.address) for _ in range(3)]
        for stream in held:
            stream.run("select count(*) from t")
        for stream in held:
            stream.pipeline(CLOSE)  # three connections wait to be used again
        disk.arm(Fault.EIO, fail_at=1, operation="sync", path="*.seg*")
        told = asker.post("/v2/pipeline", {"requests": [execute("insert into t values (1)"), CLOSE]})
        assert (told.status, told.json["error"]) == (503, "StoreUnusable")
        disk.arm(Fault.EIO, fail_at=0)
        assert asker.rows("select count(*) from t") in ([(0,)], [(1,)])  # nobody knows, but for recovery
        assert asker.once("insert into t values (2)")["type"] == "ok"
