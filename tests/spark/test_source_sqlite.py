"""`quire.sqlite`: rows of SQLite tables at any snapshot, equal to those of SQLite itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest
from pyspark.sql.types import StructType

from quire.core.errors import InvalidInput
from quire.spark.sources import sqlite
from quire.spark.sources.sqlite import SqliteReader, SqliteSource
from quire.sqlite.where_clause import bracketed
from tests.spark.served_store import ServedStore, rows_of, serve_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDERS = (
    "CREATE TABLE orders(id INTEGER PRIMARY KEY, who TEXT COLLATE NOCASE, price REAL, note, paid BOOLEAN, body BLOB)"
)
FILL = "INSERT INTO orders VALUES (?, ?, ?, ?, ?, ?)"


def orders(count: int) -> list[tuple[object, ...]]:
    """Every third row has a note of digits: half of the notes are numbers, half are texts."""
    notes = [None if n % 3 else n if n % 2 else str(n) for n in range(count)]
    return [(n, f"{'wW'[n % 2]}{n % 7}", n / 4, note, n % 2, bytes([n % 256])) for n, note in enumerate(notes)]


@pytest.fixture(scope="module")
def owner(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    with serve_store(spark, tmp_path_factory.mktemp("sqlite") / "store") as owner:
        owner.run("shop", ORDERS, FILL, rows=orders(3_000))
        owner.store.checkpoint("shop")
        owner.run("shop", "UPDATE orders SET price = -1 WHERE id = 7")
        owner.store.snapshot("shop", "monday")
        owner.run(
            "shop", "DELETE FROM orders WHERE id < 1000", "CREATE VIEW cheap AS SELECT id FROM orders WHERE price < 300"
        )
        owner.run(
            "shop", 'CREATE TABLE "odd ""name"("a b" INT, rowid TEXT)', 'INSERT INTO "odd ""name" VALUES (1, \'x\')'
        )
        owner.run(
            "shop",
            "CREATE TABLE pairs(a INT, b TEXT, PRIMARY KEY(a, b)) WITHOUT ROWID",
            "INSERT INTO pairs VALUES (1, 'x')",
        )
        owner.run("shop", "CREATE TABLE mixed(n INTEGER, d DATE, t TIMESTAMP, m DECIMAL(8,2), twice AS (n * 2))")
        owner.run("shop", "INSERT INTO mixed VALUES (1, '2024-02-29', '2024-02-29 12:30:00', '10.25'), (2, NULL, 0, 3)")
        owner.run(
            "shop",
            "CREATE TABLE wrong(n INTEGER, s TEXT)",
            "INSERT INTO wrong VALUES (1, 'a'), ('many', x'00'), (2.5, NULL)",
        )
        for name in ("east", "west"):
            owner.run(f"{name}.shop", "CREATE TABLE t(a INT)", f"INSERT INTO t VALUES ({len(name)}), (NULL)")
        owner.run("empty.shop", "CREATE TABLE other(a)")
        yield owner


def test_rows_equal_those_of_sqlite(owner: ServedStore) -> None:
    frame = owner.read("quire.sqlite", database="shop", table="orders")
    assert frame.schema.simpleString() == (
        "struct<id:bigint,who:string,price:double,note:string,paid:boolean,body:binary>"
    )
    local = owner.query("shop", "SELECT id, who, price, CAST(note AS TEXT), paid, body FROM orders")
    assert rows_of(frame, "id") == [(*row[:4], bool(row[4]), row[5]) for row in local]


def test_a_snapshot_by_name_and_by_id_does_not_change(owner: ServedStore) -> None:
    """Partly in a chunk, partly in the log."""
    snapshot = next(snapshot for snapshot in owner.store.manifest.snapshots.of("shop") if snapshot.name == "monday")
    for at in ("monday", snapshot.snapshot_id):
        frame = owner.read("quire.sqlite", database="shop", table="orders", snapshot=at)
        assert frame.selectExpr("count(*)", "sum(id)", "min(price)").first() == (3_000, sum(range(3_000)), -1.0)


def test_a_query_without_a_snapshot_leaves_none(owner: ServedStore) -> None:
    """The version that a query reads is kept by a lease, which is not visible as a snapshot."""
    owner.read("quire.sqlite", database="shop", table="pairs").collect()
    before = [owner.store.feed.head(), owner.store.manifest.snapshots.of("shop")]
    owner.read("quire.sqlite", database="shop", table="pairs", keep_seconds=60).collect()
    assert before == [owner.store.feed.head(), owner.store.manifest.snapshots.of("shop")]


def test_a_frame_stays_at_the_version_of_its_first_query(owner: ServedStore) -> None:
    """Spark plans a source once per `load()`: later queries on the frame have the same partitions."""
    owner.run("moving", "CREATE TABLE t(a)", "INSERT INTO t VALUES (1)")
    frame = owner.read("quire.sqlite", database="moving", table="t")
    assert frame.count() == 1
    owner.run("moving", "INSERT INTO t VALUES (2)")
    assert [frame.count(), frame.where("a = '2'").count(), len(frame.collect())] == [1, 0, 1]
    assert owner.read("quire.sqlite", database="moving", table="t").count() == 2


@pytest.mark.parametrize("condition", ["id < 50 and price > 1", "who = 'w3'", "note is null or id = 12 -- both"])
def test_a_condition_is_evaluated_by_sqlite(owner: ServedStore, condition: str) -> None:
    rows = owner.read("quire.sqlite", database="shop", table="orders", columns="id", where=condition, snapshot="monday")
    with closing(owner.store.sqlite("shop", at="monday")) as monday:
        local = [
            tuple(row) for row in monday.execute(f"SELECT id FROM orders WHERE {bracketed(condition)} ORDER BY id")
        ]
    assert rows_of(rows, "id") == local
    assert local


def test_pieces_of_a_large_table_have_the_rows_of_a_condition_once(
    owner: ServedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An `or` in the condition must not override the range of rowids of a piece."""
    monkeypatch.setattr(sqlite, "PIECE_BYTES", 8_192)
    source_options = {**owner.options, "database": "shop", "table": "orders", "snapshot": "monday", "partitions": "3"}
    options = sqlite.SqliteSource.parse({**source_options, "columns": "id", "where": "id < 5 or id > 2990"})
    source = SqliteSource({**source_options, "columns": "id", "where": "id < 5 or id > 2990"})
    reader = SqliteReader(options, source.schema())
    parts = reader.partitions()
    assert len(parts) == 3
    ids_read = [id_ for part in parts for batch in reader.read(part) for id_ in batch.column("id").to_pylist()]
    assert sorted(ids_read) == [*range(5), *range(2_991, 3_000)]


def test_an_invalid_condition_is_refused_before_the_query_runs(owner: ServedStore) -> None:
    """At `load()`, or, with a given schema, when the query is planned: not in a task."""
    source_options = {
        **owner.options,
        "database": "shop",
        "table": "orders",
        "where": "1) union select 1 from pairs where (1",
    }
    with pytest.raises(Exception, match="not a condition on this table"):
        owner.spark.read.format("quire.sqlite").options(**source_options).load()
    reader = SqliteReader(
        sqlite.SqliteSource.parse({**source_options, "where": "prcie > 5"}), StructType().add("id", "long")
    )
    with pytest.raises(InvalidInput, match="no such column: prcie"):
        reader.partitions()
    many = owner.read("quire.sqlite", databases="*.shop", table="t", absent="skip", where="a is not null")
    assert rows_of(many, "_database") == [("east.shop", 4), ("west.shop", 4)]


def test_a_large_table_is_divided_by_its_tree(owner: ServedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: Spark plans in another one, which does not have the smaller pieces."""
    monkeypatch.setattr(sqlite, "PIECE_BYTES", 8_192)
    source_options = {**owner.options, "database": "shop", "table": "orders", "snapshot": "monday", "partitions": "3"}
    source = sqlite.SqliteSource(source_options)
    reader = source.reader(source.schema())
    parts = reader.partitions()
    assert len(parts) == 3
    assert sum(len(part.value) for part in parts) >= 3
    ids_read = [id_ for part in parts for batch in reader.read(part) for id_ in batch.column("id").to_pylist()]
    assert sorted(ids_read) == list(range(3_000)), "each row once"


@pytest.mark.parametrize(
    "condition",
    [
        "id = 1500", "id > 2990", "id >= 2990 and id < 2995", "id in (1, 1001, 2002)", "price < 260.5",
        "who = 'W3'", "who > 'a'", "who >= 'W6' and who < 'w'", "who <> 'w3'", "who like 'W%'", "who like '%6%'",
        "note is null", "note is not null", "note = '1200'", "note > '12'", "not (id > 2000)", "paid", "who in ('w1', 'w2')",
        "body = x'05'", "id = 1500 or price < 251",
    ],
)  # fmt: skip
def test_filters_have_sparks_semantics(owner: ServedStore, condition: str) -> None:
    """Including a column with a collation and columns with several types."""
    frame = owner.read("quire.sqlite", database="shop", table="orders")
    local = owner.spark.createDataFrame(_plain(owner), frame.schema)
    assert rows_of(frame.filter(condition), "id") == rows_of(local.filter(condition), "id")


_kept: list[tuple[object, ...]] = []


def _plain(owner: ServedStore) -> list[tuple[object, ...]]:
    if not _kept:
        rows = owner.query("shop", "SELECT id, who, price, CAST(note AS TEXT), paid, body FROM orders")
        _kept.extend((*row[:4], bool(row[4]), row[5]) for row in rows)
    return _kept


def test_columns_are_selected_and_renamed_tables_found_as_in_sqlite(owner: ServedStore) -> None:
    frame = owner.read("quire.sqlite", database="shop", table="ORDERS", columns="price,ID", snapshot="monday")
    assert frame.columns == ["price", "id"]
    assert rows_of(frame.filter("id = 7")) == [(-1.0, 7)]


def test_tables_of_all_kinds_are_read(owner: ServedStore) -> None:
    """Unusual names, a column named rowid, no rowid at all, a view, computed columns."""
    read = owner.read
    assert rows_of(read("quire.sqlite", database="shop", table='odd "name')) == [(1, "x")]
    assert rows_of(read("quire.sqlite", database="shop", table="pairs")) == [(1, "x")]
    assert read("quire.sqlite", database="shop", table="cheap").count() == 200
    assert rows_of(read("quire.sqlite", database="shop", table="mixed", columns="twice"), "twice") == [(2,), (4,)]


def test_a_schema_given_by_the_user_takes_precedence(owner: ServedStore) -> None:
    frame = (
        owner.spark.read.format("quire.sqlite")
        .options(**owner.options, database="shop", table="mixed")
        .schema("n string, d date, t timestamp, m decimal(8,2)")
        .load()
    )
    rows = rows_of(frame, "n")
    assert rows[0] == ("1", date(2024, 2, 29), datetime(2024, 2, 29, 12, 30), Decimal("10.25"))
    assert rows[1] == ("2", None, datetime(1970, 1, 1), Decimal("3.00"))


def test_values_of_another_type_are_an_error_or_null_as_requested(owner: ServedStore) -> None:
    """Without given types, columns get a type that fits all their values."""
    inferred = owner.read("quire.sqlite", database="shop", table="wrong")
    assert rows_of(inferred, "n") == [("1", b"a"), ("2.5", None), ("many", b"\0")]
    source_options = {"database": "shop", "table": "wrong", "types": "n bigint, s string"}
    with pytest.raises(Exception, match=r"a value is not a valid int64.*many"):
        owner.read("quire.sqlite", **source_options).collect()
    lenient = owner.read("quire.sqlite", **source_options, misfits="null")
    assert sorted(rows_of(lenient), key=str) == [(1, "a"), (None, None), (None, None)]
    assert lenient.filter("n is null").count() == 2, "a converted NULL is found as NULL"
    assert lenient.filter("n > 0").count() == 1


def test_many_databases_at_once_with_their_names(owner: ServedStore) -> None:
    frame = owner.read("quire.sqlite", databases="*.shop", table="t", absent="skip")
    assert frame.columns == ["_database", "a"]
    assert rows_of(frame.filter("a is not null"), "_database") == [("east.shop", 4), ("west.shop", 4)]
    only = owner.read("quire.sqlite", databases="east.shop, west.shop", table="t").filter("_database = 'west.shop'")
    assert rows_of(only, "a") == [("west.shop", None), ("west.shop", 4)]
    with pytest.raises(Exception, match="the database has no such table"):
        owner.read("quire.sqlite", databases="*.shop", table="t").collect()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"table": "t"}, "no database was given"),
        ({"database": "shop", "databases": "*", "table": "t"}, "cannot be used together"),
        ({"database": "shop"}, "needs the option `table`"),
        ({"database": "nope", "table": "t"}, "UnknownDatabase"),
        ({"databases": "nope,east.shop", "table": "t"}, "UnknownDatabase"),
        ({"databases": "x*", "table": "t"}, "no page database matches"),
        ({"database": "shop", "table": "nope"}, "the database has no such table.*it has: orders"),
        ({"database": "shop", "table": "orders", "snapshot": "nope"}, "UnknownSnapshot"),
        ({"database": "shop", "table": "orders", "columns": "nope"}, "the table has no such column"),
        ({"database": "shop", "table": "orders", "misfits": "maybe"}, "one of error, null"),
        ({"database": "shop", "table": "orders", "fork_of": "x"}, "has no such option"),
    ],
)
def test_invalid_options_are_refused_with_a_reason(owner: ServedStore, options: dict[str, str], message: str) -> None:
    with pytest.raises(Exception, match=message):
        owner.read("quire.sqlite", **options).collect()
