"""tree: the lineage of databases, as text and JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import quire
from quire.cli import tree as command
from quire.cli.output import width_of
from quire.cli.tree import SNAPSHOTS_SHOWN
from tests.cli.conftest import Run, on_a_terminal, quire_program

TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ")


@pytest.fixture
def store_with_forks(shop: Path) -> Path:
    """Forks of snapshots, of the current version, and of forks; one in the middle is dropped."""
    with quire.open(shop) as store:
        store.fork("shop", "then", at="monday")
        store.fork("then", "grandchild")
        store.fork("shop", "copy")
        store.snapshot("shop")
        store.fork("shop", "gone")
        store.drop("then")
        store.drop("gone")
    return shop


def lines_of_tree(text: str) -> list[str]:
    return TIME.sub("WHEN", text).splitlines()


def test_forks_are_shown_below_their_parent(run: Run, store_with_forks: Path) -> None:
    assert lines_of_tree(run("tree").out) == [
        "shop  pages",
        "├── @monday  WHEN, by=ann",
        "│   └── then  id 3, dropped, forked WHEN",
        "│       └── grandchild  pages, forked WHEN",
        "├── #2  WHEN",
        "└── copy  pages, forked WHEN",
        "clicks  stream",
    ], "a dropped database is shown only because of its forks"


def test_a_dropped_database_that_can_be_brought_back(run: Run, store_with_forks: Path) -> None:
    """It had its hidden name, /dropped/7, and was listed like a live one."""
    run("drop", "grandchild", "--yes")
    run("drop", "clicks", "--yes")
    run("fork", "copy", "below")
    run("drop", "copy", "--yes")
    assert lines_of_tree(run("tree").out) == [
        "shop  pages",
        "├── @monday  WHEN, by=ann",
        "├── #2  WHEN",
        "└── copy  id 5, dropped, forked WHEN",
        "    └── below  pages, forked WHEN",
    ]
    roots = {root["name"]: root for root in run("tree", "--json").data}
    assert roots["clicks"]["status"] == "tombstoned"


def test_snapshots_created_by_the_system_show_their_purpose(run: Run, shop: Path) -> None:
    with quire.open(shop) as store:
        store.snapshot("shop", tags={"by": "lend"})
        store.snapshot("shop", tags={"time-travel": "1", "why": "test"})
    assert lines_of_tree(run("tree").out)[1:4] == [
        "├── @monday  WHEN, by=ann",
        "├── #2  WHEN, held by a query (Spark or another reader)",
        "└── #3  WHEN, for time travel, why=test",
    ]
    assert [snapshot["tags"] for snapshot in run("tree", "--json").data[0]["snapshots"]][1] == {"by": "lend"}
    output = run("tree", "--sizes").out
    assert "held by a query" in output
    assert "by=lend" not in output


def test_a_fork_of_a_dropped_snapshot(run: Run, store_with_forks: Path) -> None:
    run("snapshot", "drop", "shop", "monday", "--now", "--yes")
    assert "├── then  id 3, dropped, forked WHEN from a snapshot since dropped (#1)" in lines_of_tree(run("tree").out)


def test_json_is_nested(run: Run, store_with_forks: Path) -> None:
    shop, clicks = run("tree", "--json").data
    assert (shop["name"], shop["kind"], shop["status"], shop["parent_db_id"]) == ("shop", "pages", "active", 0)
    assert [snapshot["name"] for snapshot in shop["snapshots"]] == ["monday", ""]
    assert [(fork["name"], fork["status"], fork["parent_snapshot"]) for fork in shop["forks"]] == [
        ("then", "tombstoned", "monday"),
        ("copy", "active", ""),
        ("gone", "tombstoned", ""),
    ]
    assert [fork["name"] for fork in shop["forks"][0]["forks"]] == ["grandchild"]
    assert (clicks["forks"], clicks["snapshots"]) == ([], [])
    assert "share" not in shop


def test_a_parent_that_was_removed_completely(run: Run, path: Path) -> None:
    with quire.open(path) as store:
        store.fork("shop", "copy")
        store.drop("shop")
    assert lines_of_tree(run("tree").out)[:2] == ["shop  id 1, dropped", "└── copy  pages, forked WHEN"]
    assert run("gc", "--now", "--yes").code == 0
    assert lines_of_tree(run("tree").out) == ["clicks  stream", "#1  dropped", "└── copy  pages, forked WHEN"]
    _, tombstoned = run("tree", "--json").data
    assert (tombstoned["db_id"], tombstoned["name"], tombstoned["kind"], tombstoned["status"]) == (1, "", None, "gone")
    assert [fork["name"] for fork in tombstoned["forks"]] == ["copy"]


def test_sizes_are_what_dropping_would_free(run: Run, store_with_forks: Path) -> None:
    shop, _ = run("tree", "--sizes", "--json").data
    assert shop["share"]["artifacts"] >= 0
    assert shop["snapshots"][0]["share"] == run("snapshot", "show", "shop", "monday", "--json").data["share"]
    assert " exclusive" in run("tree", "--sizes").out


def test_many_snapshots_are_truncated_in_text(run: Run, store_with_forks: Path) -> None:
    with quire.open(store_with_forks) as store:
        for number in range(20):
            store.snapshot("shop", f"s{number}")
    lines = lines_of_tree(run("tree").out)
    assert lines[1] == "├── … 16 older snapshots  use `--all` to show"
    assert lines[2].startswith("├── @monday"), "it is shown because it has forks"
    assert sum("@s" in line for line in lines) == SNAPSHOTS_SHOWN
    assert len(lines_of_tree(run("tree", "--all").out)) == 27
    assert len(run("tree", "--json").data[0]["snapshots"]) == 22


def test_an_empty_store(run: Run, tmp_path: Path) -> None:
    quire.open(tmp_path / "empty").close()
    assert "quire create NAME" in run("tree", at=tmp_path / "empty").out
    assert run("tree", "--json", at=tmp_path / "empty").data == []
    assert run("tree", at=tmp_path / "nothing").code == 3


def test_a_tree_fits_a_terminal_and_has_no_colours_without_one(run: Run, store_with_forks: Path) -> None:
    run("snapshot", "create", "shop", "long", "--tag", "why=" + "words " * 30)
    lines = on_a_terminal("tree", "--sizes", "--store", str(store_with_forks))
    assert max(map(width_of, lines)) <= 80
    assert "\x1b" not in "".join(lines), "NO_COLOR"
    assert "\x1b" not in run("tree").out
    assert max(map(len, run("tree").out.splitlines())) > 150, "without a terminal lines are not wrapped"


def test_forks_can_be_nested_deeply(run: Run, shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with quire.open(shop) as store:
        before = "shop"
        for number in range(60):
            store.fork(before, before := f"f{number}")
    lines = on_a_terminal("tree", "--store", str(shop))
    assert sum("f59" in line for line in lines) == 1
    assert json.loads(quire_program("tree", "--json", "--store", str(shop)).stdout)
    monkeypatch.setattr(command, "DEPTH_MAX", 50)
    refused = run("tree", "--json")
    assert (refused.code, "`quire ls --json` names every parent" in refused.err) == (2, True)


def test_a_terminal_without_unicode(store_with_forks: Path) -> None:
    shown = quire_program("tree", "--store", str(store_with_forks), env={"PYTHONIOENCODING": "ascii"}).stdout
    assert "+-- @monday" in shown
