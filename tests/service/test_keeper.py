"""The command line while another process owns the store (K8): commands change it through the owner's socket."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.cli import main
from quire.core.json_values import plain
from quire.store.store import Store
from tests.cli.conftest import CommandResult, quire_program
from tests.service.owners import served


@pytest.fixture
def owner_store(path: Path) -> Iterator[Store]:
    with served(path) as (store, _):
        yield store


def run(path: Path, *arguments: str, code: int = 0) -> CommandResult:
    """Run a command in this process: the lock does not depend on which process the owner is."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        exit_code = main.run([*arguments, "--store", str(path)])
    result = CommandResult(exit_code, out.getvalue(), err.getvalue())
    assert (result.code, result.err if not code else "") == (code, "")
    return result


def test_commands_change_a_store_with_a_live_owner(path: Path, owner_store: Store) -> None:
    created = quire_program("create", "shop", "--kind", "pages", "--store", str(path))  # once from another process
    assert (created.returncode, created.stdout) == (0, "created shop, a page database with id 1\n")
    opened = owner_store.pages.open("shop")
    with opened.begin() as transaction:
        transaction.write_page(0, b"a" * opened.page_size)
    snapshot = run(path, "snapshot", "create", "shop", "monday", "--tag", "by=ann")
    assert "created snapshot monday (id 1) of shop" in snapshot.out
    assert owner_store.manifest.snapshots.get("shop", "monday").tags == {"by": "ann"}
    run(path, "fork", "shop", "copy", "--at", "monday")
    run(path, "fork", "shop", "newest")
    run(path, "rename", "newest", "latest")
    assert [database.name for database in owner_store.databases()] == ["copy", "latest", "shop"]
    assert "dropped copy" in run(path, "drop", "copy", "--yes").out
    run(path, "drop", "nothing", "--yes", code=3)
    assert "a database with this name already exists" in run(path, "create", "shop", code=4).err


def test_the_json_is_the_same_with_and_without_an_owner(path: Path, tmp_path: Path) -> None:
    def outputs(store_path: Path) -> list[Any]:
        answers = [
            json.loads(run(store_path, *command, "--json").out)
            for command in (["create", "shop"], ["rename", "shop", "bazaar"], ["drop", "bazaar", "--now", "--yes"])
        ]
        for row in answers:
            row.get("dropped", row).pop("created_at_ms")
        return answers

    unserved = tmp_path / "alone"
    quire.open(unserved).close()
    with served(path) as (store, _):
        assert outputs(path) == outputs(unserved)
        assert plain(store.databases()) == []


def test_an_owner_that_does_not_listen_is_reported(path: Path) -> None:
    with quire.open(path):
        assert "another owner has this open" in run(path, "create", "shop", code=5).err
