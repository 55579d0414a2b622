"""Lists of databases: pages, filters and orders that do not read everything (docs/scale.md)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.core.errors import InvalidInput
from quire.manifest.reads import ReadTxn
from quire.service.values import DatabaseFilter
from quire.store.info import live_databases


@pytest.fixture
def store(tmp_path: Path) -> Iterator[quire.Store]:
    with quire.open(tmp_path / "store") as store:
        store.create_many([f"free-{number}" for number in range(5)], tags={"plan": "free"})
        store.create_many([f"paid-{number}" for number in range(3)], tags={"plan": "paid", "vip": ""})
        store.create_many(["clicks"], "stream")
        yield store


def names(store: quire.Store, **wanted: object) -> list[str]:
    return [info.name for info in store.databases(**wanted)]  # type: ignore[arg-type]


def test_filters_by_prefix_kind_and_tag(store: quire.Store) -> None:
    assert names(store, prefix="paid-") == ["paid-0", "paid-1", "paid-2"]
    assert names(store, kind="stream") == ["clicks"]
    assert names(store, tag="plan=paid") == names(store, tag="vip") == ["paid-0", "paid-1", "paid-2"]
    assert names(store, prefix="free", tag="plan=paid") == []
    assert len(names(store)) == 9


def test_pages_follow_each_other(store: quire.Store) -> None:
    pages, after = [], ""
    while page := names(store, limit=4, after=after):
        pages.append(page)
        after = page[-1]
    assert [len(page) for page in pages] == [4, 4, 1]
    assert [name for page in pages for name in page] == sorted(names(store))
    assert names(store, prefix="paid-", after="paid-0", limit=1) == ["paid-1"]


def test_the_newest_change_comes_first(store: quire.Store) -> None:
    with store.sqlite("free-3") as connection:
        connection.execute("CREATE TABLE t(x)")
    store.rename("free-1", "renamed")
    assert names(store, sort="written", limit=2) == ["renamed", "free-3"]
    assert sorted(names(store, sort="written")) == sorted(names(store)), "databases without a change come last"


def test_appends_count_before_their_segment_is_sealed(store: quire.Store) -> None:
    store.create_many(["orders"], "stream")
    for name in ("clicks", "orders", "clicks"):
        time.sleep(0.002)  # times are milliseconds
        store.stream(name).append(b"one").result()
        assert names(store, sort="written", limit=1) == [name]
    time.sleep(0.002)
    store.rename("free-1", "renamed")
    assert names(store, sort="written", limit=3) == ["renamed", "clicks", "orders"]
    assert names(store, sort="written", kind="stream") == ["clicks", "orders"]


def test_the_last_writes_of_streams_and_key_value_sets_are_known_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "reopened"
    with quire.open(path) as store:
        store.create_many(["clicks", "orders"], "stream")
        store.create_many(["cart", "users"], "kv")
        for name in ("cart", "users"):
            store.kv(name).put(b"a", b"1")
        for name in ("clicks", "orders"):
            store.stream(name).append(b"one").result()
        time.sleep(0.002)  # times are milliseconds
        store.create_many(["later"])
        store.kvs.close_database("cart")
        store.streams.close_stream("clicks")
        assert names(store, sort="written", limit=2) == ["clicks", "cart"]
    with quire.open(path) as store:
        assert set(names(store, sort="written", limit=4)) == {"clicks", "cart", "orders", "users"}
        store.kv("cart").get(b"a")
        store.kvs.close_database("cart")
        before = names(store, sort="written")
        store.kv("users").put(b"a", b"2")
        store.kvs.record_ends()  # as maintenance does every minute
        assert names(store, sort="written") == ["users", *(name for name in before if name != "users")]


def test_an_append_that_is_older_than_the_feed_changes_no_order(store: quire.Store) -> None:
    with store.manifest.read() as txn:
        newest = [info.name for info in live_databases(txn, DatabaseFilter(sort="written"))]
        appended = {store.database("clicks").db_id: 1}
        assert [
            info.name for info in live_databases(txn, DatabaseFilter(sort="written"), lambda: appended)
        ] == newest, "an append before the record of the feed that names the stream changes nothing"


def test_the_largest_comes_first(store: quire.Store) -> None:
    with store.sqlite("free-3") as connection:
        connection.execute("CREATE TABLE t AS SELECT randomblob(50000) x")
    store.pages.flush(store.database("free-3").db_id)
    assert names(store, sort="size", limit=1) == ["free-3"]


def test_a_page_reads_no_more_than_it_shows(store: quire.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    scanned_ids: list[int] = []
    real = ReadTxn.database

    def database(txn: ReadTxn, db_id: int) -> object:
        scanned_ids.append(db_id)
        return real(txn, db_id)

    monkeypatch.setattr(ReadTxn, "database", database)
    assert len(names(store, limit=2)) == 2
    assert len(scanned_ids) == 2


def test_an_unknown_order_is_refused(store: quire.Store) -> None:
    with pytest.raises(InvalidInput, match="order"):
        store.databases(sort="colour")
    with pytest.raises(InvalidInput, match="after a name"):
        store.databases(sort="size", after="free-0")
