"""Hazard: an import into a database that exists replaces its content unasked."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import quire
from tests.cli.conftest import Run


def file_with(path: Path, *values: str) -> str:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE item(name)")
        connection.executemany("INSERT INTO item VALUES (?)", [(value,) for value in values])
        connection.commit()
    return str(path)


def items(run: Run) -> str:
    return run("sqlite", "shell", "shop", "SELECT group_concat(name) FROM item").out.strip()


def test_an_existing_database_is_replaced_only_on_request(run: Run, path: Path, tmp_path: Path) -> None:
    first, second = file_with(tmp_path / "shop.db", "mine"), file_with(tmp_path / "other.db", "theirs")
    assert run("sqlite", "import", first).code == 0, "an empty database has nothing to lose"
    refused = run("sqlite", "import", second, "shop")
    assert (refused.code, items(run)) == (4, "mine")
    assert "--replace" in refused.err
    replaced = run("sqlite", "import", second, "shop", "--replace")
    assert (replaced.code, items(run)) == (0, "theirs")
    assert "quire rollback shop --to '#1'" in replaced.out
    assert run("rollback", "shop", "--to", "#1").code == 0
    assert items(run) == "mine"


def test_an_import_that_changes_nothing_leaves_no_snapshot(run: Run, path: Path, tmp_path: Path) -> None:
    file = file_with(tmp_path / "shop.db", "mine")
    run("sqlite", "import", file)
    assert run("sqlite", "import", file, "--replace", "--json").data["snapshot_id"] == 0
    with quire.open(path) as store:
        assert store.database("shop").snapshots == 0
