"""Hazard: an import into a database that exists replaces its content unasked."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.cli import sqlite as sqlite_commands
from quire.core.errors import Corruption
from quire.sqlite.importing import import_file
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


def test_an_import_that_fails_leaves_no_snapshot(run: Run, path: Path, tmp_path: Path) -> None:
    """Each attempt left one, which kept the old pages."""
    run("sqlite", "import", file_with(tmp_path / "a.db", "a"), "fresh")
    before = run("snapshot", "ls", "fresh", "--json").data
    (tmp_path / "bad.db").write_text("this is not a database" * 1000)
    assert run("sqlite", "import", str(tmp_path / "bad.db"), "fresh", "--replace").code == 2
    assert run("snapshot", "ls", "fresh", "--json").data == before


def test_an_import_that_fails_after_it_has_changed_the_database_keeps_the_snapshot(
    run: Run, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("sqlite", "import", file_with(tmp_path / "a.db", "a"), "fresh")

    def fails_late(*arguments: Any, **options: Any) -> None:
        import_file(*arguments, **options)
        raise Corruption("it was read back differently")

    monkeypatch.setattr(sqlite_commands, "import_file", fails_late)
    assert run("sqlite", "import", file_with(tmp_path / "b.db", "b"), "fresh", "--replace").code == 7
    assert [row["tags"] for row in run("snapshot", "ls", "fresh", "--json").data] == [{"before": "import"}]
