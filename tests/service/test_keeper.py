"""The command line and a live owner (K8): what one process owns, others change through its socket."""

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
from tests.cli.conftest import Ended, quire_program
from tests.service.world import served


@pytest.fixture
def live(path: Path) -> Iterator[Store]:
    with served(path) as (store, _):
        yield store


def run(path: Path, *arguments: str, code: int = 0) -> Ended:
    """A command in this process: the lock does not care whose process the owner is."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        found = main.run([*arguments, "--store", str(path)])
    ended = Ended(found, out.getvalue(), err.getvalue())
    assert (ended.code, ended.err if not code else "") == (code, "")
    return ended


def test_commands_change_a_store_that_a_live_owner_has(path: Path, live: Store) -> None:
    made = quire_program("create", "shop", "--kind", "pages", "--store", str(path))  # and once from another process
    assert (made.returncode, made.stdout) == (0, "created shop, a pages database with id 1\n")
    opened = live.pages.open("shop")
    with opened.begin() as transaction:
        transaction.write_page(0, b"a" * opened.page_size)
    kept = run(path, "snapshot", "create", "shop", "monday", "--tag", "by=ann")
    assert "created snapshot monday (id 1) of shop" in kept.out
    assert live.manifest.snapshots.get("shop", "monday").tags == {"by": "ann"}
    run(path, "fork", "shop", "copy", "--at", "monday")
    run(path, "fork", "shop", "newest")
    run(path, "rename", "newest", "latest")
    assert [each.name for each in live.databases()] == ["copy", "latest", "shop"]
    assert "dropped copy" in run(path, "drop", "copy", "--yes").out
    run(path, "drop", "nothing", "--yes", code=3)
    assert "a database with this name already exists" in run(path, "create", "shop", code=4).err


def test_the_json_is_the_same_with_and_without_an_owner(path: Path, tmp_path: Path) -> None:
    def told(where: Path) -> list[Any]:
        answers = [
            json.loads(run(where, *command, "--json").out)
            for command in (["create", "shop"], ["rename", "shop", "bazaar"], ["drop", "bazaar", "--now", "--yes"])
        ]
        for each in answers:
            each.get("dropped", each).pop("created_at_ms")
        return answers

    alone = tmp_path / "alone"
    quire.open(alone).close()
    with served(path) as (store, _):
        assert told(path) == told(alone)
        assert plain(store.databases()) == []


def test_an_owner_that_does_not_listen_is_told_as_before(path: Path) -> None:
    with quire.open(path):
        assert "another owner has this open" in run(path, "create", "shop", code=5).err
