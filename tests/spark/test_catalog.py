"""`quire.spark.register`: tables by name in Spark's SQL, at any version; and queries that read only the columns they
need.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from quire.core.errors import NotFound
from quire.spark.catalog import RegisteredDatabase, register
from tests.spark.served_store import ServedStore, rows_of, serve_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
        assert columns_of(shop) == {"orders": ["id", "who"], "lines": ["order_id", "item"]}
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


def columns_of(shop: RegisteredDatabase) -> dict[str, list[str]]:
    """The columns of the tables for which the last query was planned."""
    spark, schema = shop._spark, shop._made[-1]
    tables = [row.tableName for row in spark.sql(f"SHOW TABLES IN {schema}").collect() if not row.isTemporary]
    return {table: spark.table(f"{schema}.{table}").columns for table in tables}


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
