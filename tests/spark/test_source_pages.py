"""`quire.pages` and `quire.diff`: bodies of pages, and what changed between two versions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.spark.sourced import Owned, owned, rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def owner(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owned]:
    with owned(spark, tmp_path_factory.mktemp("pages") / "store") as made:
        rows = [(number, f"{number:0200}") for number in range(2_000)]
        made.run("shop", "CREATE TABLE t(id INTEGER PRIMARY KEY, a TEXT)", "INSERT INTO t VALUES (?, ?)", rows=rows)
        made.run(
            "shop",
            "CREATE TABLE p(a INT, b INT, c, PRIMARY KEY(a, b)) WITHOUT ROWID",
            "INSERT INTO p VALUES (1, 1, 'x'), (1, 2, 'y')",
        )
        made.store.checkpoint("shop")
        made.store.snapshot("shop", "monday")
        made.run(
            "shop",
            "UPDATE t SET a = 'new' WHERE id = 1000",
            "DELETE FROM t WHERE id = 3",
            "INSERT INTO t VALUES (5000, 'last')",
        )
        made.run(
            "shop",
            "UPDATE t SET a = a WHERE id = 500",
            "UPDATE p SET c = 'z' WHERE b = 2",
            "INSERT INTO p VALUES (2, 1, 'w')",
        )
        made.run("shop", "CREATE TABLE late(a)", "INSERT INTO late VALUES (1)")
        made.store.snapshot("shop", "tuesday")
        made.store.checkpoint("shop")
        made.run("shop", "DELETE FROM t WHERE id = 4")
        yield made


def pages_of(owner: Owned, snapshot: str) -> dict[int, bytes]:
    with owner.store.pages.open_view("shop", snapshot) as reader:
        return dict(reader.scan())


def test_pages_are_those_of_the_snapshot(owner: Owned) -> None:
    for snapshot in ("monday", "tuesday"):
        found = owner.read("quire.pages", database="shop", snapshot=snapshot).collect()
        assert {row.page: bytes(row.data) for row in found} == pages_of(owner, snapshot)
        assert {row._database for row in found} == {"shop"}


def test_only_the_pages_that_are_asked_for_are_read(owner: Owned) -> None:
    frame = owner.read("quire.pages", database="shop", snapshot="monday")
    assert [row.page for row in frame.filter("page > 3 and page <= 6").orderBy("page").collect()] == [4, 5, 6]
    some = owner.read("quire.pages", database="shop", snapshot="monday", start=2, end=5)
    assert [row.page for row in some.orderBy("page").collect()] == [2, 3, 4]
    assert frame.filter("page = 2").count() == 1
    assert frame.filter("page >= 1000000").count() == 0


def test_the_newest_version_is_read_if_none_is_named(owner: Owned) -> None:
    newest = owner.read("quire.pages", databases="sh*").selectExpr("count(*)", "max(page)").first()
    assert newest is not None
    assert newest[0] == newest[1] + 1


def test_pages_that_differ(owner: Owned) -> None:
    before, after = pages_of(owner, "monday"), pages_of(owner, "tuesday")
    expected = [
        (page, before.get(page), after.get(page))
        for page in sorted(before.keys() | after.keys())
        if before.get(page) != after.get(page)
    ]
    found = rows_of(owner.read("quire.diff", database="shop", from_="monday", to="tuesday"), "page")
    assert found == expected
    assert 0 < len(found) < len(before), "some, not all"
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
def test_what_is_wrong_is_said(owner: Owned, options: dict[str, str], message: str) -> None:
    with pytest.raises(Exception, match=message):
        owner.read("quire.diff", **options).collect()
