"""Hazard: the space of key-value sets and streams is reported as nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import quire
from tests.cli.conftest import Run

VALUE = bytes(range(256)) * 40


@pytest.fixture
def mixed(path: Path) -> Path:
    """A store with a key-value set, a fork of it, a stream and a page database, each larger than the next."""
    with quire.open(path) as store:
        cart = store.kv("cart", create=True)
        for number in range(200):
            cart.put(b"%d" % number, VALUE)
        cart.flush()
        store.snapshot("cart", "monday")
        clicks = store.stream("clicks")
        for _ in range(100):
            appended = clicks.append(VALUE)
        appended.result()
        with store.sqlite("shop") as database:
            database.execute("CREATE TABLE t(x)")
            database.execute("INSERT INTO t VALUES (zeroblob(300000))")
    return path


def test_stats_have_the_tables_of_key_value_sets(run: Run, mixed: Path) -> None:
    rows = {row["database"]: row for row in run("stats", "--json").data}
    assert rows["cart"]["size_bytes"] == rows["cart"]["exclusive_bytes"] == rows["cart"]["table_bytes"] > 0
    assert rows["cart"]["size_bytes"] == run("why", "cart", "--json").data["size_bytes"]
    assert rows["cart"]["tiers"] == {"local": rows["cart"]["size_bytes"]}
    assert rows["clicks"]["size_bytes"] > 100 * len(VALUE)
    paged = {row["database"]: row for row in run("stats", "--limit", "2", "--json").data}
    assert paged["cart"] == rows["cart"]


def test_a_table_that_a_fork_has_too_is_shared(run: Run, mixed: Path) -> None:
    with quire.open(mixed) as store:
        store.fork("cart", "copy")
        store.kv("copy").get(b"1")
    rows = {row["database"]: row for row in run("stats", "--json").data}
    for name in ("cart", "copy"):
        assert (rows[name]["exclusive_bytes"], rows[name]["shared_bytes"]) == (0, rows[name]["size_bytes"])


def test_a_tree_with_sizes_has_the_tables_of_key_value_sets(run: Run, mixed: Path) -> None:
    cart = next(node for node in run("tree", "--sizes", "--json").data if node["name"] == "cart")
    assert cart["share"]["size_bytes"] > 0
    assert cart["share"]["tables"] == 1
    assert "share" not in cart["snapshots"][0]


def test_a_list_by_size_has_the_order_of_stats_by_size(run: Run, mixed: Path) -> None:
    with quire.open(mixed) as store:
        store.create("zip", "pages")
        with store.sqlite("zip") as database:
            database.execute("CREATE TABLE t(x)")
            database.execute("INSERT INTO t VALUES (zeroblob(3000000))")
        store.heavy.checkpoint_all(["zip"])
    by_stats = [row["database"] for row in run("stats", "--sort", "size", "--json").data]
    assert [row["name"] for row in run("ls", "--sort", "size", "--json").data] == by_stats
    assert by_stats[0] != "zip", "it has the most pages, and they compress well"
