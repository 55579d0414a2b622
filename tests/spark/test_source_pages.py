"""`quire.pages` and `quire.diff`: page bodies, and the differences between two versions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.spark.served_store import ServedStore, rows_of, serve_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def owner(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    with serve_store(spark, tmp_path_factory.mktemp("pages") / "store") as owner:
        rows = [(number, f"{number:0200}") for number in range(2_000)]
        owner.run("shop", "CREATE TABLE t(id INTEGER PRIMARY KEY, a TEXT)", "INSERT INTO t VALUES (?, ?)", rows=rows)
        owner.run(
            "shop",
            "CREATE TABLE p(a INT, b INT, c, PRIMARY KEY(a, b)) WITHOUT ROWID",
            "INSERT INTO p VALUES (1, 1, 'x'), (1, 2, 'y')",
        )
        owner.store.checkpoint("shop")
        owner.store.snapshot("shop", "monday")
        owner.run(
            "shop",
            "UPDATE t SET a = 'new' WHERE id = 1000",
            "DELETE FROM t WHERE id = 3",
            "INSERT INTO t VALUES (5000, 'last')",
        )
        owner.run(
            "shop",
            "UPDATE t SET a = a WHERE id = 500",
            "UPDATE p SET c = 'z' WHERE b = 2",
            "INSERT INTO p VALUES (2, 1, 'w')",
        )
        owner.run("shop", "CREATE TABLE late(a)", "INSERT INTO late VALUES (1)")
        owner.store.snapshot("shop", "tuesday")
        owner.store.checkpoint("shop")
        owner.run("shop", "DELETE FROM t WHERE id = 4")
        yield owner


def pages_of(owner: ServedStore, snapshot: str) -> dict[int, bytes]:
    with owner.store.pages.open_view("shop", snapshot) as reader:
        return dict(reader.scan())


def test_pages_are_those_of_the_snapshot(owner: ServedStore) -> None:
    for snapshot in ("monday", "tuesday"):
        rows = owner.read("quire.pages", database="shop", snapshot=snapshot).collect()
        assert {row.page: bytes(row.data) for row in rows} == pages_of(owner, snapshot)
        assert {row._database for row in rows} == {"shop"}


def test_only_the_requested_pages_are_read(owner: ServedStore) -> None:
    frame = owner.read("quire.pages", database="shop", snapshot="monday")
    assert [row.page for row in frame.filter("page > 3 and page <= 6").orderBy("page").collect()] == [4, 5, 6]
    some = owner.read("quire.pages", database="shop", snapshot="monday", start=2, end=5)
    assert [row.page for row in some.orderBy("page").collect()] == [2, 3, 4]
    assert frame.filter("page = 2").count() == 1
    assert frame.filter("page >= 1000000").count() == 0


def test_the_newest_version_is_read_if_none_is_named(owner: ServedStore) -> None:
    newest = owner.read("quire.pages", databases="sh*").selectExpr("count(*)", "max(page)").first()
    assert newest is not None
    assert newest[0] == newest[1] + 1


def test_the_diff_has_the_pages_that_differ(owner: ServedStore) -> None:
    before, after = pages_of(owner, "monday"), pages_of(owner, "tuesday")
    expected = [
        (page, before.get(page), after.get(page))
        for page in sorted(before.keys() | after.keys())
        if before.get(page) != after.get(page)
    ]
    rows = rows_of(owner.read("quire.diff", database="shop", from_="monday", to="tuesday"), "page")
    assert rows == expected
    assert 0 < len(rows) < len(before), "some, not all"
    assert owner.read("quire.diff", database="shop", from_="monday", to="monday").count() == 0
    back = rows_of(owner.read("quire.diff", database="shop", from_="tuesday", to="monday"), "page")
    assert back == [(page, new, old) for page, old, new in expected]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"database": "shop"}, "needs the option `from`"),
        ({"database": "shop", "from": "nope"}, "UnknownSnapshot"),
    ],
)
def test_invalid_options_are_refused_with_a_reason(owner: ServedStore, options: dict[str, str], message: str) -> None:
    with pytest.raises(Exception, match=message):
        owner.read("quire.diff", **options).collect()
