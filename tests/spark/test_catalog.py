"""`quire.spark.register`: tables by name in Spark's SQL, at any version; and queries that read only the columns they
need.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from quire.core.errors import NotFound
from quire.spark.catalog import RegisteredDatabase, register
from tests.spark.served_store import ServedStore, rows_of, serve_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture
def owner(spark: SparkSession, tmp_path: Path) -> Iterator[ServedStore]:
    with serve_store(spark, tmp_path / "it's") as owner:
        owner.run(
            "shop",
            'CREATE TABLE orders(id INTEGER PRIMARY KEY, who TEXT, price REAL, "odd, name" TEXT)',
            "CREATE TABLE lines(order_id INTEGER, item TEXT)",
            "CREATE TABLE quire_loads(load INTEGER PRIMARY KEY, rows INTEGER, at_ms INTEGER)",
            "INSERT INTO lines VALUES (1, 'shop.orders'), (1, 'b'), (2, 'c')",
            "INSERT INTO orders VALUES (1, 'ada', 9.5, 'x'), (2, 'bob', 3, 'y')",
        )
        owner.store.snapshot("shop", "monday")
        owner.run("shop", "CREATE TABLE later(a)", "DELETE FROM orders WHERE id = 2")
        yield owner


@pytest.mark.slow
def test_tables_have_names_and_versions(owner: ServedStore) -> None:
    with register(owner.store, "shop", at="monday") as shop, register(owner.store, "shop", name="now") as now:
        assert (shop.tables, now.tables) == (["lines", "orders"], ["later", "lines", "orders"])
        assert rows_of(owner.spark.sql("SELECT who FROM shop.orders ORDER BY id")) == [("ada",), ("bob",)]
        assert rows_of(owner.spark.sql("SELECT who FROM now.orders")) == [("ada",)]
        owner.run("shop", "INSERT INTO orders VALUES (3, 'eve', 1, '')")
        assert rows_of(owner.spark.sql("SELECT who FROM now.orders ORDER BY id")) == [("ada",), ("eve",)]
        joined = "shop.orders JOIN `shop`.lines ON id = order_id AND item <> 'shop.orders'"
        narrow = shop.sql(f"SELECT orders.who, count(*) AS n FROM {joined} GROUP BY 1")
        assert rows_of(narrow, "who") == [("ada", 1), ("bob", 1)]
        assert columns_of(narrow) == [["id", "who"], ["order_id", "item"]]
        planned_schemas = list(shop._made)
        assert rows_of(shop.sql(f"SELECT orders.who, count(*) AS n FROM {joined} GROUP BY 1"), "who") == [
            ("ada", 1),
            ("bob", 1),
        ]
        assert shop._made == planned_schemas, "a repeated query is not planned again"
        assert rows_of(shop.sql("SELECT max(`odd, name`) FROM shop.orders -- shop.lines")) == [("y",)]
        assert rows_of(now.sql("SELECT count(*) FROM now.orders")) == [(2,)]
        owner.run("shop", "INSERT INTO orders VALUES (4, 'fay', 1, '')")
        assert rows_of(now.sql("SELECT count(*) FROM now.orders")) == [(3,)], "the newest version, each time"
    assert "shop" not in {row.namespace for row in owner.spark.sql("SHOW SCHEMAS").collect()}


def columns_of(frame: DataFrame) -> list[list[str]]:
    """The columns that a query reads of each of its tables."""
    with redirect_stdout(io.StringIO()) as plan:
        frame.explain("extended")
    optimized = plan.getvalue().partition("== Optimized Logical Plan ==")[2].partition("== Physical Plan ==")[0]
    return [re.findall(r"(\w+)#", columns) for columns in re.findall(r"RelationV2\[(.*?)\]", optimized)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "query",
    [
        "SELECT b FROM (SELECT * FROM nums.x WHERE a = 1 UNION ALL SELECT * FROM nums.y WHERE r = 30) ORDER BY b",
        "SELECT a FROM (SELECT a, b FROM nums.x)",
        "SELECT DISTINCT x.a FROM nums.x LEFT JOIN nums.y ON x.b = y.q",
        "SELECT a FROM nums.x UNION ALL SELECT q FROM nums.y WHERE 1 = 0",
        "SELECT x.c FROM nums.x WHERE EXISTS (SELECT * FROM nums.y WHERE y.p = 10 * x.a)",
    ],
)
def test_a_query_for_its_columns_has_the_rows_of_the_plain_query(owner: ServedStore, query: str) -> None:
    """Hazard: the tables of a planned query had only the columns that Spark reads. `SELECT *` then had other columns in other
    places, so a UNION paired the wrong ones, and names of columns and tables that Spark leaves out were unknown."""
    owner.run(
        "nums",
        "CREATE TABLE x(a INTEGER, b INTEGER, c INTEGER)",
        "CREATE TABLE y(p INTEGER, q INTEGER, r INTEGER)",
        "INSERT INTO x VALUES (1, 2, 3)",
        "INSERT INTO y VALUES (10, 20, 30)",
    )
    with register(owner.store, "nums") as nums:
        assert rows_of(nums.sql(query)) == rows_of(owner.spark.sql(query)) != []


@pytest.mark.slow
def test_a_statement_is_executed_once_and_prints_nothing(
    owner: ServedStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: finding the columns of a statement executed it, over empty tables. It replaced standard output for all threads,
    and two of them at once lost it for good."""
    before = sys.stdout
    planned_with = list[object]()
    spark_sql = type(owner.spark).sql

    def recorded(spark: SparkSession, query: str) -> DataFrame:
        planned_with.append(sys.stdout)
        return spark_sql(spark, query)

    with register(owner.store, "shop", at="monday") as shop:
        monkeypatch.setattr(type(owner.spark), "sql", recorded)
        shop.sql("CREATE TEMPORARY VIEW buyers AS SELECT who FROM shop.orders WHERE price > 5")
        assert rows_of(owner.spark.table("buyers")) == [("ada",)]
        owner.spark.catalog.dropTempView("buyers")
    assert planned_with
    assert all(output is before for output in planned_with)
    assert capsys.readouterr().out == ""


def test_a_query_is_planned_for_its_columns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark is not needed for this: its queries are recorded."""
    queries: list[str] = []

    class RecordingSql:
        catalog = Mock(databaseExists=lambda _: False)

        def sql(self, query: str) -> str:
            queries.append(query)
            return query

    spark: Any = RecordingSql()
    shop: Any
    columns = StructType([StructField("id", LongType()), StructField("who", StringType())])
    shop = RegisteredDatabase(spark, "shop", {"store": "/data"}, {"orders": columns})
    monkeypatch.setattr(shop, "_needed", lambda query, _: {"orders": [1] if "who" in query else [0]})
    first, before = shop.sql("SELECT who FROM shop.orders"), len(queries)
    assert shop.sql("SELECT who FROM shop.orders") == first == f"SELECT who FROM `{shop._made[-1]}`.orders"
    assert queries[before:] == [first], "no schema is created again"
    assert shop.sql("SELECT id FROM shop.orders") == f"SELECT id FROM `{shop._made[-1]}`.orders" != first
    assert shop.sql("SELECT 1") == "SELECT 1"
    drops = {f"DROP SCHEMA IF EXISTS `{schema}` CASCADE" for schema in shop._made}
    shop.drop()
    assert len(drops) == 3, "one for the tables, one for each query"
    assert drops <= set(queries)


@pytest.mark.slow
def test_a_database_without_tables_is_refused(owner: ServedStore) -> None:
    owner.run("empty", "CREATE TABLE quire_loads(load)")
    with pytest.raises(NotFound, match="no tables"):
        register(owner.store, "empty")


def test_the_schema_of_a_query_is_replaced_except_in_literals_and_comments() -> None:
    shop = object.__new__(RegisteredDatabase)
    shop.name, shop.schemas = "shop", {"orders": StructType(), "order items": StructType()}
    query = "SELECT 'shop.x', shop.orders.id, a.shop.b -- shop.z\n FROM Shop . orders, `shop`.lines /* shop.q */"
    expected = "SELECT 'shop.x', `new`.orders.id, a.shop.b -- shop.z\n FROM `new` . orders, `new`.lines /* shop.q */"
    assert shop._moved(query, "new") == expected
    assert shop._named("FROM shop.orders") == ["orders"]
    assert shop._named("FROM shop.`order items`") == ["order items"]
