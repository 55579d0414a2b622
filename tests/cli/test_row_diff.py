"""snapshot diff --rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import quire
from tests.cli.conftest import Run, quire_program


@pytest.fixture
def prices(path: Path) -> Path:
    with quire.open(path) as store:
        db = store.sqlite("prices", create=True)
        db.execute(
            "create table item(id integer primary key, name text, price); create table gone(a); create table same(a)"
        )
        db.execute("create table keyed(k text primary key, v) without rowid; insert into gone values (7)")
        db.executemany("insert into item values (?, ?, ?)", [(n, f"name {n}", n) for n in range(1, 3001)])
        db.execute("insert into same values (1); insert into keyed values ('a', 1), ('b', 2)")
        store.snapshot("prices", "monday")
        db.execute("update item set price = 1.0 where id = 1; update item set name = null where id = 1500")
        db.execute("delete from item where id = 3000; insert into item values (9000, 'new', x'00ff')")
        db.execute("drop table gone; create table made(b); insert into made values ('x')")
        db.execute("update keyed set v = 3 where k = 'b'")
        db.close()
    return path


def test_rows_between_a_snapshot_and_now(run: Run, prices: Path) -> None:
    data = run("snapshot", "diff", "prices", "monday", "--rows", "--json").data
    tables = {table["table"]: table for table in data["tables"]}
    assert list(tables) == ["gone", "item", "keyed", "made"]
    item = tables["item"]
    assert (item["inserted"], item["updated"], item["deleted"], item["truncated"]) == (1, 2, 1, False)
    assert [(row["key"], row["before"], row["after"]) for row in item["rows"]] == [
        (1, {"id": 1, "name": "name 1", "price": 1}, {"id": 1, "name": "name 1", "price": 1.0}),
        (1500, {"id": 1500, "name": "name 1500", "price": 1500}, {"id": 1500, "name": None, "price": 1500}),
        (3000, {"id": 3000, "name": "name 3000", "price": 3000}, None),
        (9000, None, {"id": 9000, "name": "new", "price": "00ff"}),
    ]
    assert (tables["gone"]["only"], tables["gone"]["deleted"]) == ("before", 1)
    assert (tables["made"]["only"], tables["made"]["inserted"]) == ("after", 1)
    assert tables["keyed"]["updated"] == 1
    back = run("snapshot", "diff", "prices", "now", "monday", "--rows", "--table", "ITEM", "--json").data["tables"]
    assert [(table["inserted"], table["deleted"]) for table in back] == [(1, 1)]


def test_text_is_truncated_and_names_changed_columns(run: Run, prices: Path) -> None:
    out = run("snapshot", "diff", "prices", "monday", "--rows", "--limit", "1").out
    assert "item: 1 inserted, 2 updated, 1 deleted" in out
    assert "price: 1 → 1.0" in out
    assert "name 1500" not in out
    assert "3 more rows: `--limit 0` shows all" in out
    assert "gone: dropped, 1 deleted" in out
    whole = run("snapshot", "diff", "prices", "monday", "--rows", "--limit", "0").out
    assert "name: name 1500 → NULL" in whole
    assert "price=2 bytes" in whole


def test_versions_may_be_times_epochs_and_forks(run: Run, prices: Path) -> None:
    assert "no row differs" in run("snapshot", "diff", "prices", "0s", "--rows").out
    run("fork", "prices", "trial", "--at", "monday")
    fork_diff = run("snapshot", "diff", "prices", "now", "now", "--of", "trial", "--rows", "--json").data
    assert {table["table"] for table in fork_diff["tables"]} == {"gone", "item", "keyed", "made"}
    same = run("snapshot", "diff", "prices", "monday", "now", "--of", "trial", "--rows", "--json").data
    assert same["tables"] == []
    assert run("snapshot", "diff", "prices", "monday", "--rows", "--table", "nothing").code == 3
    assert run("snapshot", "diff", "clicks", "now", "--rows").code == 2


def test_an_altered_table_is_compared_whole(run: Run, prices: Path) -> None:
    with quire.open(prices) as store:
        db = store.sqlite("prices")
        db.execute("alter table same add column b default 5")
        db.close()
    (same,) = run("snapshot", "diff", "prices", "monday", "--table", "same", "--json").data["tables"]
    assert (same["altered"], same["updated"]) == (True, 1)
    assert same["rows"][0]["after"] == {"a": 1, "b": 5}


def test_diff_beside_an_owner_that_does_not_serve(prices: Path) -> None:
    with quire.open(prices):
        result = quire_program("snapshot", "diff", "prices", "monday", "--rows", "--json", "--store", str(prices))
    data = json.loads(result.stdout)
    assert [table["table"] for table in data["tables"]] == ["gone", "item", "keyed", "made"]


def test_names_of_tables_do_not_reach_the_terminal_unescaped(run: Run, path: Path) -> None:
    with quire.open(path) as store, store.sqlite("shop") as db:
        db.execute('create table "a\x1b[2J\nb"(x)')
    run("snapshot", "create", "shop", "empty")
    with quire.open(path) as store, store.sqlite("shop") as db:
        db.execute('insert into "a\x1b[2J\nb" values (1)')
    assert r"a\x1b[2J\nb: 1 inserted" in run("snapshot", "diff", "shop", "empty", "--rows").out
