"""`quire.spark.register`: tables by their names in Spark's SQL, at any version; and queries that read the columns they need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from quire.core.errors import NotFound
from quire.spark.catalog import RegisteredDatabase, register
from tests.spark.sourced import Owned, owned, rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def owner(spark: SparkSession, tmp_path: Path) -> Iterator[Owned]:
    with owned(spark, tmp_path / "it's") as made:
        made.run(
            "shop",
            'CREATE TABLE orders(id INTEGER PRIMARY KEY, who TEXT, price REAL, "odd, name" TEXT)',
            "CREATE TABLE lines(order_id INTEGER, item TEXT)",
            "CREATE TABLE quire_loads(load INTEGER PRIMARY KEY, rows INTEGER, at_ms INTEGER)",
            "INSERT INTO lines VALUES (1, 'shop.orders'), (1, 'b'), (2, 'c')",
            "INSERT INTO orders VALUES (1, 'ada', 9.5, 'x'), (2, 'bob', 3, 'y')",
        )
        made.store.snapshot("shop", "monday")
        made.run("shop", "CREATE TABLE later(a)", "DELETE FROM orders WHERE id = 2")
        yield made


@pytest.mark.slow
def test_tables_have_names_and_versions(owner: Owned) -> None:
    with register(owner.store, "shop", at="monday") as shop, register(owner.store, "shop", name="now") as now:
        assert (shop.tables, now.tables) == (["lines", "orders"], ["later", "lines", "orders"])
        assert rows_of(owner.spark.sql("SELECT who FROM shop.orders ORDER BY id")) == [("ada",), ("bob",)]
        assert rows_of(owner.spark.sql("SELECT who FROM now.orders")) == [("ada",)]
        owner.run("shop", "INSERT INTO orders VALUES (3, 'eve', 1, '')")
        assert rows_of(owner.spark.sql("SELECT who FROM now.orders ORDER BY id")) == [("ada",), ("eve",)]
        joined = "shop.orders JOIN `shop`.lines ON id = order_id AND item <> 'shop.orders'"
        narrow = shop.sql(f"SELECT orders.who, count(*) AS n FROM {joined} GROUP BY 1")
        assert rows_of(narrow, "who") == [("ada", 1), ("bob", 1)]
        assert columns_of(shop) == {"orders": ["id", "who"], "lines": ["order_id", "item"]}
        made = list(shop._made)
        assert rows_of(shop.sql(f"SELECT orders.who, count(*) AS n FROM {joined} GROUP BY 1"), "who") == [
            ("ada", 1),
            ("bob", 1),
        ]
        assert shop._made == made, "a query that is asked again is not planned for its columns again"
        assert rows_of(shop.sql("SELECT max(`odd, name`) FROM shop.orders -- shop.lines")) == [("y",)]
        assert rows_of(now.sql("SELECT count(*) FROM now.orders")) == [(2,)]
        owner.run("shop", "INSERT INTO orders VALUES (4, 'fay', 1, '')")
        assert rows_of(now.sql("SELECT count(*) FROM now.orders")) == [(3,)], "of the newest version, each time"
    assert "shop" not in {row.namespace for row in owner.spark.sql("SHOW SCHEMAS").collect()}


def columns_of(shop: RegisteredDatabase) -> dict[str, list[str]]:
    """The columns of the tables that the last query was planned over."""
    spark, schema = shop._spark, shop._made[-1]
    tables = [row.tableName for row in spark.sql(f"SHOW TABLES IN {schema}").collect()]
    return {table: spark.table(f"{schema}.{table}").columns for table in tables if not table.endswith("__source")}


def test_a_query_is_planned_for_its_columns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark is not needed for this: what it is asked is noted."""
    asked: list[str] = []

    class NotedSql:
        def sql(self, query: str) -> str:
            asked.append(query)
            return query

    spark: Any = NotedSql()
    shop: Any
    columns = StructType([StructField("id", LongType()), StructField("who", StringType())])
    shop = RegisteredDatabase(spark, "shop", {"store": "/data"}, {"orders": columns})
    monkeypatch.setattr(shop, "_needed", lambda query, _: {"orders": [1] if "who" in query else [0]})
    first, before = shop.sql("SELECT who FROM shop.orders"), len(asked)
    assert shop.sql("SELECT who FROM shop.orders") == first == "SELECT who FROM `shop_1`.orders"
    assert asked[before:] == [first], "nothing is made for it again"
    assert shop.sql("SELECT id FROM shop.orders") == "SELECT id FROM `shop_2`.orders"
    assert shop.sql("SELECT 1") == "SELECT 1"
    shop.drop()
    assert {"DROP SCHEMA IF EXISTS `shop_1` CASCADE", "DROP SCHEMA IF EXISTS `shop_2` CASCADE"} <= set(asked)


@pytest.mark.slow
def test_a_database_without_tables_is_refused(owner: Owned) -> None:
    owner.run("empty", "CREATE TABLE quire_loads(load)")
    with pytest.raises(NotFound, match="no tables"):
        register(owner.store, "empty")


def test_a_query_is_moved_to_another_schema_but_for_its_texts() -> None:
    shop = object.__new__(RegisteredDatabase)
    shop.name, shop.schemas = "shop", {"orders": StructType(), "order items": StructType()}
    query = "SELECT 'shop.x', shop.orders.id, a.shop.b -- shop.z\n FROM Shop . orders, `shop`.lines /* shop.q */"
    moved = "SELECT 'shop.x', `new`.orders.id, a.shop.b -- shop.z\n FROM `new` . orders, `new`.lines /* shop.q */"
    assert shop._moved(query, "new") == moved
    assert shop._named("FROM shop.orders") == ["orders"]
    assert shop._named("FROM shop.`order items`") == ["order items"]
