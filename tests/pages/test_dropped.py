"""A database that is dropped while it is open: closing the store afterwards is not an error."""

from __future__ import annotations

from pathlib import Path

import quire


def test_a_store_closes_after_a_database_with_unpublished_pages_was_dropped(tmp_path: Path) -> None:
    with quire.open(tmp_path) as store:
        store.create("shop", "pages")
        database = store.pages.open("shop")
        with database.begin() as txn:
            txn.write_page(0, b"a" * database.page_size)
        assert database.wal.unpublished_bytes
        store.drop("shop")
    with quire.open(tmp_path) as store:
        assert store.databases() == []
        assert store.manifest.check() == []
