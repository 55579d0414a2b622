"""A store with a database and a snapshot of it, for tools that show both."""

from __future__ import annotations

from pathlib import Path

import pytest

import quire
from quire.sqlite import dbapi


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """The path of a store without an owner: `shop` has two orders, and had one on `monday`."""
    root = tmp_path / "store"
    with quire.open(root) as store:
        connection = dbapi.connect(root / "shop")
        connection.execute("create table orders(id integer primary key, item text)")
        connection.execute("insert into orders(item) values ('tea')")
        connection.commit()
        store.snapshot("shop", "monday")
        connection.execute("insert into orders(item) values ('milk')")
        connection.commit()
        connection.close()
    return root
