"""Packs of SQL functions: in this process, and in the owner for a connection through its server."""

from __future__ import annotations

from pathlib import Path

import pytest

import quire
from quire.sqlite import dbapi, function_packs


def define(connection: dbapi.Connection) -> None:
    connection.create_function("twice", 1, lambda value: value * 2, deterministic=True)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`numbers` is installed; `broken` needs a missing package."""

    class Broken:
        def load(self) -> None:
            raise ImportError("nosuch")

    class Numbers:
        def load(self) -> function_packs.Pack:
            return define

    def find_entry_points(*, group: str, name: str) -> list[Broken | Numbers]:
        assert group == "quire.sql_functions"
        installed: dict[str, list[Broken | Numbers]] = {"broken": [Broken()], "numbers": [Numbers()]}
        return installed.get(name, [])

    monkeypatch.setattr(function_packs, "entry_points", find_entry_points)
    function_packs._pack.cache_clear()


def test_a_url_names_packs(tmp_path: Path) -> None:
    connection = dbapi.connect(f"quire:///{tmp_path}/store/shop?functions=numbers")
    assert connection.execute("select twice(21)").fetchone() == (42,)
    connection.close()
    for name in ("nosuch", "broken"):
        with pytest.raises(dbapi.OperationalError, match="no such functions"):
            dbapi.connect(f"quire:///{tmp_path}/store/shop?functions=numbers,{name}")


def test_the_owner_defines_its_installed_packs(tmp_path: Path) -> None:
    with quire.open(tmp_path / "store") as store, store.serve(), quire.connect(tmp_path / "store") as client:
        store.sqlite("shop", create=True).close()
        connection = dbapi.Connection(client.sqlite_driver("shop", functions=("nosuch", "numbers")))
        assert connection.execute("select twice(21)").fetchone() == (42,)
        connection.close()
        plain = client.sqlite("shop")
        with pytest.raises(dbapi.OperationalError, match="no such function: twice"):
            plain.execute("select twice(21)")
        plain.close()
