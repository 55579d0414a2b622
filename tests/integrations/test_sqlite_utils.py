"""sqlite-utils with the plugin: its commands and its library, on databases of a store."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import sqlite_utils
from click.testing import CliRunner, Result
from sqlite_utils.cli import cli

import quire
from quire.integrations import sqlite_utils as plugin
from quire.sqlite import dbapi

if "quire" not in cli.commands:  # as its entry point does
    plugin.register_commands(cli)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, catch_exceptions=False)


def test_commands_accept_databases_and_snapshots(shop: Path, tmp_path: Path) -> None:
    url = f"quire:///{shop}/shop"
    assert run("quire", str(shop)).output.split() == [url, f"{url}?at=monday"]
    assert json.loads(run("tables", url, "--counts").output) == [{"table": "orders", "count": 2}]
    assert [row["item"] for row in json.loads(run("rows", f"{url}?at=monday", "orders").output)] == ["tea"]
    (tmp_path / "more.json").write_text('[{"item": "rum", "price": 3.5}]')
    assert run("insert", url, "orders", str(tmp_path / "more.json"), "--alter").exit_code == 0
    assert run("enable-fts", url, "orders", "item").exit_code == 0
    assert [row["price"] for row in json.loads(run("search", url, "orders", "rum").output)] == [3.5]
    assert json.loads(run("query", url, "select count(*) as n from orders").output) == [{"n": 3}]
    assert "price" not in run("schema", f"{url}?at=monday").output
    refused = run("insert", f"{url}?at=monday", "orders", str(tmp_path / "more.json"))
    assert refused.exit_code == 1


def test_errors_are_explained(shop: Path, tmp_path: Path) -> None:
    assert "no such snapshot" in run("tables", f"quire:///{shop}/shop?at=tuesday").output.lower()
    assert "no store found" in run("quire", str(tmp_path)).output
    assert run("tables", str(tmp_path / "nosuch.db")).exit_code == 2


def test_file_paths_keep_their_meaning(tmp_path: Path) -> None:
    path = str(tmp_path / "plain.db")
    assert run("create-database", path).exit_code == 0
    assert run("tables", path).output == "[]\n"


def test_the_library_accepts_a_connection(shop: Path) -> None:
    with quire.open(shop) as store:
        connection: Any = dbapi.connect(shop / "shop")
        database = sqlite_utils.Database(connection)
        orders = database.table("orders")
        orders.insert_all([{"id": 3, "item": "rum"}, {"id": 4, "item": "gin"}])
        orders.upsert({"id": 4, "item": "ale"}, pk="id")
        orders.enable_fts(["item"])
        assert [row["item"] for row in orders.search("ale")] == ["ale"]
        orders.transform(rename={"item": "thing"})
        assert [column.name for column in orders.columns] == ["id", "thing"]
        database.close()
        assert store.sqlite("shop", at="monday").execute("select item from orders").fetchall() == [("tea",)]


def test_the_plugin_alone_imports_nothing() -> None:
    code = (
        "import sys; import quire.integrations.sqlite_utils\n"
        "print({'quire.store', 'quire.sqlite.dbapi', 'apsw', 'lmdb'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    assert result.stdout == "set()\n"
