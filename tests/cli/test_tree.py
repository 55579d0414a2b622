"""tree: who came from whom, for people and for programs."""

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
def family(shop: Path) -> Path:
    """Forks of snapshots, of what is now, and of forks; one in the middle is dropped."""
    with quire.open(shop) as store:
        store.fork("shop", "then", at="monday")
        store.fork("then", "grandchild")
        store.fork("shop", "copy")
        store.snapshot("shop")
        store.fork("shop", "gone")
        store.drop("then")
        store.drop("gone")
    return shop


def drawn(text: str) -> list[str]:
    return TIME.sub("WHEN", text).splitlines()


def test_forks_stand_below_what_they_were_made_of(run: Run, family: Path) -> None:
    assert drawn(run("tree").out) == [
        "shop  pages",
        "├── @monday  WHEN, by=ann",
        "│   └── then  id 3, dropped, forked WHEN",
        "│       └── grandchild  pages, forked WHEN",
        "├── #2  WHEN",
        "└── copy  pages, forked WHEN",
        "clicks  stream",
    ], "a dropped database is there only for its forks"


def test_snapshots_that_nobody_has_made_say_what_they_are_for(run: Run, shop: Path) -> None:
    with quire.open(shop) as store:
        store.snapshot("shop", tags={"by": "lend"})
        store.snapshot("shop", tags={"time-travel": "1", "why": "test"})
    assert drawn(run("tree").out)[1:4] == [
        "├── @monday  WHEN, by=ann",
        "├── #2  WHEN, held by a query (Spark or another reader)",
        "└── #3  WHEN, for time travel, why=test",
    ]
    assert [each["tags"] for each in run("tree", "--json").data[0]["snapshots"]][1] == {"by": "lend"}
    told = run("tree", "--sizes").out
    assert "held by a query" in told
    assert "by=lend" not in told


def test_a_fork_of_a_snapshot_that_is_gone(run: Run, family: Path) -> None:
    run("snapshot", "drop", "shop", "monday", "--now", "--yes")
    assert "├── then  id 3, dropped, forked WHEN from snapshot #1, dropped" in drawn(run("tree").out)


def test_programs_get_it_nested(run: Run, family: Path) -> None:
    shop, clicks = run("tree", "--json").data
    assert (shop["name"], shop["kind"], shop["status"], shop["parent_db_id"]) == ("shop", "pages", "active", 0)
    assert [each["name"] for each in shop["snapshots"]] == ["monday", ""]
    assert [(each["name"], each["status"], each["parent_snapshot"]) for each in shop["forks"]] == [
        ("then", "tombstoned", "monday"),
        ("copy", "active", ""),
        ("gone", "tombstoned", ""),
    ]
    assert [each["name"] for each in shop["forks"][0]["forks"]] == ["grandchild"]
    assert (clicks["forks"], clicks["snapshots"]) == ([], [])
    assert "share" not in shop


def test_a_parent_of_which_nothing_is_left(run: Run, path: Path) -> None:
    with quire.open(path) as store:
        store.fork("shop", "copy")
        store.drop("shop")
    assert drawn(run("tree").out)[:2] == ["shop  id 1, dropped", "└── copy  pages, forked WHEN"]
    assert run("gc", "--now", "--yes").code == 0
    assert drawn(run("tree").out) == ["clicks  stream", "#1  dropped", "└── copy  pages, forked WHEN"]
    _, gone = run("tree", "--json").data
    assert (gone["db_id"], gone["name"], gone["kind"], gone["status"]) == (1, "", None, "gone")
    assert [each["name"] for each in gone["forks"]] == ["copy"]


def test_sizes_are_what_dropping_would_free(run: Run, family: Path) -> None:
    shop, _ = run("tree", "--sizes", "--json").data
    assert shop["share"]["artifacts"] >= 0
    assert shop["snapshots"][0]["share"] == run("snapshot", "show", "shop", "monday", "--json").data["share"]
    assert " exclusive" in run("tree", "--sizes").out


def test_many_snapshots_are_cut_short_for_people(run: Run, family: Path) -> None:
    with quire.open(family) as store:
        for number in range(20):
            store.snapshot("shop", f"s{number}")
    lines = drawn(run("tree").out)
    assert lines[1] == "├── … 16 older snapshots  use `--all` to show"
    assert lines[2].startswith("├── @monday"), "it has forks"
    assert sum("@s" in line for line in lines) == SNAPSHOTS_SHOWN
    assert len(drawn(run("tree", "--all").out)) == 27
    assert len(run("tree", "--json").data[0]["snapshots"]) == 22


def test_an_empty_store(run: Run, tmp_path: Path) -> None:
    quire.open(tmp_path / "empty").close()
    assert "quire create NAME" in run("tree", at=tmp_path / "empty").out
    assert run("tree", "--json", at=tmp_path / "empty").data == []
    assert run("tree", at=tmp_path / "nothing").code == 3


def test_a_tree_fits_a_terminal_and_has_no_colours_elsewhere(run: Run, family: Path) -> None:
    run("snapshot", "create", "shop", "long", "--tag", "why=" + "words " * 30)
    lines = on_a_terminal("tree", "--sizes", "--store", str(family))
    assert max(map(width_of, lines)) <= 80
    assert "\x1b" not in "".join(lines), "NO_COLOR"
    assert "\x1b" not in run("tree").out
    assert max(map(len, run("tree").out.splitlines())) > 150, "where there is no terminal lines stay whole"


def test_forks_of_forks_may_be_many_deep(run: Run, shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_terminal_without_unicode(family: Path) -> None:
    shown = quire_program("tree", "--store", str(family), env={"PYTHONIOENCODING": "ascii"}).stdout
    assert "+-- @monday" in shown
