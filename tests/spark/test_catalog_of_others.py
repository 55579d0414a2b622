"""Registering a database leaves alone what it did not create in Spark's catalog, and gives odd names to Spark in a form that
its catalog takes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quire.core.errors import AlreadyExists, InvalidInput
from quire.spark.catalog import register, spark_names
from tests.spark.served_store import ServedStore, rows_of, serve_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def owner(spark: SparkSession, tmp_path: Path) -> Iterator[ServedStore]:
    """A store with the databases `shop` and `shop_1`, and Spark's schemas as they were before, at the end."""
    schemas = {row.namespace for row in spark.sql("SHOW SCHEMAS").collect()}
    with serve_store(spark, tmp_path / "store") as owner:
        owner.run(
            "shop", "CREATE TABLE orders(id INTEGER PRIMARY KEY, who TEXT)", "INSERT INTO orders VALUES (1, 'ada')"
        )
        owner.run("shop_1", "CREATE TABLE orders(id INTEGER PRIMARY KEY)", "INSERT INTO orders VALUES (7)")
        try:
            yield owner
        finally:
            for schema in {row.namespace for row in spark.sql("SHOW SCHEMAS").collect()} - schemas:
                spark.sql(f"DROP SCHEMA `{schema}` CASCADE")


def schemas_of(owner: ServedStore) -> set[str]:
    """The schemas in Spark's catalog."""
    return {row.namespace for row in owner.spark.sql("SHOW SCHEMAS").collect()}


@pytest.mark.slow
def test_a_schema_of_somebody_else_is_refused_and_keeps_its_tables(owner: ServedStore, tmp_path: Path) -> None:
    owner.spark.sql(f"CREATE SCHEMA shop LOCATION 'file:{tmp_path}/shop'")
    owner.spark.sql("CREATE TABLE shop.kept USING parquet AS SELECT 42 AS x")
    with pytest.raises(AlreadyExists, match=r"quire did not create it.*name="):
        register(owner.store, "shop")
    assert rows_of(owner.spark.sql("SELECT x FROM shop.kept")) == [(42,)]
    with register(owner.store, "shop", name="shop_quire") as shop:
        assert rows_of(shop.sql("SELECT who FROM shop_quire.orders")) == [("ada",)]
    assert os.listdir(tmp_path / "shop" / "kept")


@pytest.mark.slow
def test_queries_of_one_database_leave_the_schemas_of_others(owner: ServedStore) -> None:
    with register(owner.store, "shop") as shop, register(owner.store, "shop_1"):
        assert rows_of(shop.sql("SELECT who FROM shop.orders")) == [("ada",)]
        with pytest.raises(Exception, match="UNRESOLVED_COLUMN"):
            shop.sql("SELECT nothing FROM shop.orders")
        assert rows_of(shop.sql("SELECT id FROM shop.orders")) == [(1,)]
        assert rows_of(owner.spark.sql("SELECT id FROM shop_1.orders")) == [(7,)]
    assert not {schema for schema in schemas_of(owner) if schema.startswith(("shop", "quire_"))}


@pytest.mark.slow
def test_tables_that_others_create_in_a_registered_schema_stay(owner: ServedStore) -> None:
    shop = register(owner.store, "shop")
    owner.spark.sql("CREATE TABLE shop.kept USING parquet AS SELECT 42 AS x")
    again = register(owner.store, "shop", at="")
    shop.drop()
    assert rows_of(owner.spark.sql("SELECT id FROM shop.orders")) == [(1,)], "these views are of the later registration"
    again.drop()
    assert rows_of(owner.spark.sql("SELECT x FROM shop.kept")) == [(42,)]
    assert [row.tableName for row in owner.spark.sql("SHOW TABLES IN shop").collect() if not row.isTemporary] == [
        "kept"
    ]


@pytest.mark.slow
def test_odd_names_of_tables_and_databases(owner: ServedStore) -> None:
    owner.run(
        "tenant-1",
        'CREATE TABLE "my table"(id INTEGER PRIMARY KEY, "select" INT, "a.b" TEXT, "c`d" TEXT)',
        "CREATE TABLE orders__source(id)",
        "CREATE VIEW broken AS SELECT * FROM missing",
        'CREATE TABLE nameless("" TEXT)',
        "CREATE TABLE orders(id)",
        "INSERT INTO \"my table\" VALUES (1, 2, 'x', 'y')",
    )
    with pytest.raises(InvalidInput, match='name="tenant_1"'):
        register(owner.store, "tenant-1")
    with register(owner.store, "tenant-1", name="tenant_1") as tenant:
        assert tenant.tables == ["my_table", "orders", "orders__source"]
        assert sorted(tenant.skipped) == ["broken", "nameless"]
        assert rows_of(tenant.sql("SELECT `a.b`, `c``d` FROM tenant_1.my_table")) == [("x", "y")]


def test_a_plain_name_wins_over_one_that_becomes_the_same() -> None:
    assert spark_names(["a b", "a-b", "A_B", ""]) == {"a_b_2": "a b", "a_b_3": "a-b", "A_B": "A_B", "_": ""}
