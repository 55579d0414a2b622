"""Mirrors into Iceberg whose catalog is accessed over REST, where the response to a commit can be lost."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from quire.core.errors import StalePlan, Unavailable
from quire.jobs.mirror.iceberg_target import IcebergTarget
from quire.jobs.mirror.run import WrittenFile
from tests.jobs.iceberg_rest import RestCatalogServer, rest_catalog
from tests.jobs.mirrored_store import MirroredStore, Rows, fill, read_databases, sorted_rows


def read(server: RestCatalogServer) -> Rows:
    return sorted_rows(server.catalog.load_table("shop.orders").scan().to_arrow().to_pylist())


def test_a_table_of_a_rest_catalog_follows_its_databases_although_responses_are_lost(tmp_path: Path) -> None:
    mirror = MirroredStore(tmp_path, "iceberg")
    with rest_catalog(tmp_path) as server, mirror.open() as store:
        fill(store, "tenant-1")
        fill(store, "tenant-2")
        options = {"catalog.type": "rest", "catalog.uri": server.url}
        store.mirrors.create("lake", "tenant-*", "orders", "iceberg:lake.shop.orders", options=options)
        assert store.mirrors.run("lake", runner="threads").full
        assert read(server) == read_databases(store)

        with closing(store.sqlite("tenant-1")) as connection:
            connection.execute("ALTER TABLE orders ADD COLUMN note TEXT")
            connection.execute("UPDATE orders SET note = 'new'")
        fill(store, "tenant-3")
        store.drop("tenant-2")
        assert not store.mirrors.run("lake", runner="threads").full
        assert read(server) == read_databases(store)
        snapshots = len(server.catalog.load_table("shop.orders").snapshots())

        fill(store, "tenant-4")
        server.lose_responses = 1
        with pytest.raises(Unavailable, match="whether the catalog committed is unknown"):
            store.mirrors.run("lake", runner="threads")
        assert server.lose_responses == 0
        assert read(server) == read_databases(store), "the commit took effect although its response was lost"
        store.mirrors.run("lake", runner="threads")
        assert read(server) == read_databases(store)
        assert len(server.catalog.load_table("shop.orders").snapshots()) == snapshots + 1, "the commit is not repeated"
        assert store.mirrors.status("lake").changed == 0
        assert any(request.startswith("POST /v1/namespaces/shop/tables/orders") for request in server.requests)


def test_a_stale_driver_commits_nothing_over_rest(tmp_path: Path) -> None:
    with rest_catalog(tmp_path) as server:
        options = {"catalog.type": "rest", "catalog.uri": server.url}
        first, second = (IcebergTarget("lake.shop.orders", "app", options) for _ in range(2))
        first.create()
        with pytest.raises(StalePlan):
            second.create()
        first.read()
        second.read()
        first.commit(1, list[WrittenFile](), [])
        with pytest.raises(StalePlan, match="another commit came first"):
            second.commit(1, list[WrittenFile](), [])
        state = second.read()
        assert state is not None
        assert state.batch_id == 1
