"""Types of SQLite columns on Spark: the declared type, unless a sample of the values contradicts it.

Most tests plan and read in this process, as Spark does in its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import DataType

import quire
from quire.core.errors import InvalidInput, NotFound, UnknownSnapshot
from quire.spark.access import options_of
from quire.spark.sources.pages import PagesSource
from quire.spark.sources.sqlite import SqliteSource
from quire.spark.sources.sqlite_tables import parsed_types
from quire.store.store import Store
from tests.spark.served_store import QUIET, serve_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with quire.open(tmp_path / "store", settings=QUIET) as store:
        options_of(store)
        yield store


def fill(store: Store, database: str, table: str, *rows: tuple[Any, ...]) -> None:
    with closing(store.sqlite(database, create=True)) as connection, connection:
        connection.execute(f"CREATE TABLE {table}")
        if rows:
            name = table.partition("(")[0]
            connection.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(rows[0]))})", rows)


def source(store: Store, kind: Any = SqliteSource, **options: Any) -> Any:
    return kind({"store": store.path, "table": "t", **{name: str(value) for name, value in options.items()}})


def types(store: Store, **options: Any) -> dict[str, str]:
    return {field.name: field.dataType.simpleString() for field in source(store, **options).schema().fields}


def rows(store: Store, **options: Any) -> list[tuple[Any, ...]]:
    sqlite_source = source(store, **options)
    reader = sqlite_source.reader(sqlite_source.schema())
    return [
        tuple(row.values()) for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()
    ]


def test_columns_without_a_type_get_that_of_their_values(store: Store) -> None:
    fill(
        store,
        "shop",
        "t(i, r, n, s, d, m, b, x, e)",
        (1, 2.5, 1, "a", "1002", 1, b"b", "text", None),
        (2, 3.0, 0.5, "b", "007", "one", b"", b"\xff", None),
    )
    assert types(store, database="shop") == {
        "i": "bigint", "r": "double", "n": "double", "s": "string", "d": "string", "m": "string",
        "b": "binary", "x": "binary", "e": "string",
    }  # fmt: skip
    assert rows(store, database="shop") == [
        (1, 2.5, 1.0, "a", "1002", "1", b"b", b"text", None),
        (2, 3.0, 0.5, "b", "007", "one", b"", b"\xff", None),
    ]


def test_values_take_precedence_over_a_declaration(store: Store) -> None:
    fill(
        store, "shop", "t(i INTEGER, r REAL, s TEXT, f BOOL, d DATE, m MONEY)",
        (1, 1.5, "a", 1, "2024-02-29", 5), ("one", "?", b"\x00", "yes", 1_700_000_000, 2.5),
    )  # fmt: skip
    assert types(store, database="shop") == {
        "i": "string", "r": "string", "s": "binary", "f": "string", "d": "string", "m": "double",
    }  # fmt: skip
    fill(store, "plain", "t(i INTEGER, r REAL, s TEXT, f BOOL, d DATE)", (1, 2, "a", 1, 7))
    assert types(store, database="plain") == {
        "i": "bigint", "r": "double", "s": "string", "f": "boolean", "d": "string",
    }  # fmt: skip


def test_all_parts_of_a_large_table_are_sampled(store: Store) -> None:
    fill(store, "shop", "t(a)", *((n if n < 9_000 else n / 2,) for n in range(10_000)))
    assert types(store, database="shop") == {"a": "double"}


def test_types_can_be_given_and_misfits_follow_one_rule(store: Store) -> None:
    fill(store, "shop", "t(price, day, note)", ("1.50", "2024-02-29", "x"), ("2", "2024-03-01", 7))
    assert types(store, database="shop", types="price decimal(10,2), DAY date") == {
        "price": "decimal(10,2)", "day": "date", "note": "string",
    }  # fmt: skip
    assert [str(row[0]) for row in rows(store, database="shop", types="price decimal(10,2)")] == ["1.50", "2.00"]
    with pytest.raises(InvalidInput, match=r"column='note'.*value=\"'x'\""):
        rows(store, database="shop", types="note bigint")
    assert [row[2] for row in rows(store, database="shop", types="note bigint", misfits="null")] == [None, 7]
    with pytest.raises(InvalidInput, match="no such column"):
        types(store, database="shop", types="pirce double")


@pytest.mark.parametrize(
    "text", ["price", "price money", "price double qty int", "price decimal(4)", "price bigint(1,2)"]
)
def test_unparsable_types_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="must list columns and their types"):
        parsed_types(text)


def test_types_are_parsed(store: Store) -> None:
    read: dict[str, DataType] = parsed_types(" a int , `b c` decimal( 5 , 2 ),d STRING ")
    assert {name: kind.simpleString() for name, kind in read.items()} == {
        "a": "int", "b c": "decimal(5,2)", "d": "string",
    }  # fmt: skip


def test_columns_of_all_databases_are_merged_on_request(store: Store) -> None:
    fill(store, "d1", "t(a INTEGER, b TEXT)", (1, "x"))
    fill(store, "d2", "t(B TEXT, c, a REAL)", ("y", 5, 2.5))
    fill(store, "d3", "other(z)")
    assert types(store, databases="d1,d2") == {"_database": "string", "a": "bigint", "b": "string"}
    with pytest.raises(NotFound, match="no such table"):
        types(store, databases="*", merge_schema="true")
    merged = {"databases": "*", "merge_schema": "true", "absent": "skip"}
    assert types(store, **merged) == {"_database": "string", "a": "double", "b": "string", "c": "bigint"}
    assert sorted(rows(store, **merged)) == [("d1", 1.0, "x", None), ("d2", 2.5, "y", 5)]


def test_each_database_has_its_own_snapshot_and_a_missing_one_is_an_error_or_skipped(store: Store) -> None:
    for number in range(3):
        fill(store, f"d{number}", "t(a)", (number,))
        if number:
            store.snapshot(f"d{number}", "nightly")
        with closing(store.sqlite(f"d{number}")) as connection:
            connection.execute("INSERT INTO t VALUES (99)")
    with pytest.raises(UnknownSnapshot, match="nightly"):
        types(store, databases="d*", snapshot="nightly")
    source_options = {"databases": "d*", "snapshot": "nightly", "absent": "skip"}
    assert sorted(rows(store, **source_options)) == [("d1", 1), ("d2", 2)]
    pages_source = PagesSource({"store": store.path, **source_options})
    reader = pages_source.reader(pages_source.schema())
    assert len(list(reader.partitions())) > 0
    with pytest.raises(UnknownSnapshot, match="nightly"):
        PagesSource({"store": store.path, **source_options, "absent": "error"}).reader(
            pages_source.schema()
        ).partitions()


def test_prices_without_types_are_summed_in_ansi_mode(spark: SparkSession, tmp_path: Path) -> None:
    with serve_store(spark, tmp_path / "store") as owner:
        owner.run(
            "tpch",
            "CREATE TABLE lineitem(orderkey, quantity, price, discount, returnflag, shipdate)",
            "INSERT INTO lineitem VALUES (?, ?, ?, ?, ?, ?)",
            rows=[(n, n % 50, 900.0 + n, (n % 10) / 100, "ANR"[n % 3], f"199{n % 8}-01-01") for n in range(1_000)],
        )
        spark.conf.set("spark.sql.ansi.enabled", "true")
        frame = owner.read("quire.sqlite", database="tpch", table="lineitem")
        (row,) = frame.selectExpr("sum(price * (1 - discount))", "sum(quantity)").collect()
        ((expected, quantity),) = owner.query("tpch", "SELECT sum(price * (1 - discount)), sum(quantity) FROM lineitem")
        assert row[0] == pytest.approx(expected)
        assert row[1] == quantity
