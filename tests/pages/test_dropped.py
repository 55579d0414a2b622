"""A database that is dropped while it is open: closing the store after it is no failure."""

from __future__ import annotations

from pathlib import Path

import quire


def test_a_store_closes_after_a_database_with_unpublished_pages_was_dropped(tmp_path: Path) -> None:
    with quire.open(tmp_path) as store:
        store.create("shop", "pages")
        opened = store.pages.open("shop")
        with opened.begin() as txn:
            txn.write_page(0, b"a" * opened.page_size)
        assert opened.wal.unpublished_bytes
        store.drop("shop")
    with quire.open(tmp_path) as store:
        assert store.databases() == []
        assert store.manifest.check() == []
