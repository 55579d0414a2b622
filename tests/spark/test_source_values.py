"""Values of SQLite in `quire.sqlite` and `quire.rows`: booleans, texts that are not UTF-8, JSON, and types of both versions.

The sources plan and read in this process, as Spark lets them do in its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.core.errors import InvalidInput
from quire.spark.access import options_of
from quire.spark.sources.rows import RowsSource
from quire.spark.sources.sqlite import SqliteSource
from quire.store.store import Store
from tests.spark.served_store import QUIET


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with quire.open(tmp_path / "store", settings=QUIET) as store:
        options_of(store)
        yield store


def run_sql(store: Store, *statements: str) -> None:
    with closing(store.sqlite("shop", create=True)) as connection:
        for sql in statements:
            connection.execute(sql)


def read(store: Store, kind: type[SqliteSource | RowsSource], **options: str) -> list[dict[str, Any]]:
    given = {name.rstrip("_"): value for name, value in options.items()}
    source = kind({"store": str(store.path), "database": "shop", "table": "t", **given})
    reader = source.reader(source.schema())
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


SOURCES = pytest.mark.parametrize("kind", [SqliteSource, RowsSource])


@SOURCES
def test_a_text_that_is_not_utf8_is_an_error_null_or_its_bytes(
    store: Store, kind: type[SqliteSource | RowsSource]
) -> None:
    run_sql(store, "CREATE TABLE t (v TEXT)", "INSERT INTO t VALUES (CAST(x'ff41' AS TEXT)), ('ok')")
    with pytest.raises(InvalidInput, match="not valid in the encoding") as caught:
        read(store, kind)
    assert caught.value.where.items() >= {"column": "v", "table": "t", "database": "shop"}.items()
    assert [row["v"] for row in read(store, kind, misfits="null")] == [None, "ok"]
    assert [row["v"] for row in read(store, kind, types="v binary")] == [b"\xffA", b"ok"]


@SOURCES
def test_computed_json_is_text(store: Store, kind: type[SqliteSource | RowsSource]) -> None:
    run_sql(
        store,
        "CREATE TABLE t (body TEXT, v TEXT AS (body -> '$.name'))",
        """INSERT INTO t VALUES ('{"name": "Ann"}')""",
    )
    assert [row["v"] for row in read(store, kind)] == ['"Ann"']


@SOURCES
def test_a_boolean_column_with_other_numbers_is_read_as_numbers(
    store: Store, kind: type[SqliteSource | RowsSource]
) -> None:
    run_sql(store, "CREATE TABLE t (v BOOLEAN, b BOOLEAN)", "INSERT INTO t VALUES (0, 0), (1, 1), (7, NULL), (-1, 1)")
    rows = read(store, kind)
    assert [row["v"] for row in rows] == [0, 1, 7, -1]
    assert [row["b"] for row in rows] == [False, True, None, True]


@SOURCES
@pytest.mark.parametrize("where", [None, "id > 0"])
def test_another_number_outside_the_sample_is_a_misfit_of_a_boolean(
    store: Store, kind: type[SqliteSource | RowsSource], where: str | None
) -> None:
    options = {"where": where} if where and kind is SqliteSource else {}
    run_sql(
        store,
        "CREATE TABLE t (id INTEGER PRIMARY KEY, v BOOLEAN)",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5000) INSERT INTO t SELECT i, i % 2 FROM n",
        "UPDATE t SET v = 7 WHERE id = 4444",
    )
    with pytest.raises(InvalidInput, match="only 0 and 1 are booleans"):
        read(store, kind, types="v boolean", **options)
    rows = read(store, kind, types="v boolean", misfits="null", **options)
    assert [row["v"] for row in rows] == [None if n == 4444 else n % 2 == 1 for n in range(1, 5001)]


def test_types_take_the_values_of_deleted_rows_and_of_the_row_before(store: Store) -> None:
    run_sql(store, "CREATE TABLE t (id INTEGER PRIMARY KEY, v INTEGER)", "INSERT INTO t VALUES (1, 'one'), (2, x'00')")
    store.snapshot("shop", "monday")
    run_sql(store, "UPDATE t SET v = 5 WHERE id = 1", "DELETE FROM t WHERE id = 2")
    rows = read(store, RowsSource, from_="monday", before="true")
    assert [(row["_op"], row["v"], row["_before"]["v"]) for row in rows] == [
        ("update", b"5", b"one"),
        ("delete", b"\0", b"\0"),
    ]


def test_numbers_as_text_have_exactly_their_values(store: Store) -> None:
    run_sql(store, "CREATE TABLE t (v)", "INSERT INTO t VALUES (5), (1.0), (0.1 + 0.2), (1e20), (-9e999)")
    assert [row["v"] for row in read(store, SqliteSource, types="v string")] == [
        "5", "1.0", "0.30000000000000004", "1e+20", "-inf",
    ]  # fmt: skip


def test_the_hint_of_a_misfit_names_a_type_that_takes_it(store: Store) -> None:
    run_sql(store, "CREATE TABLE t (v)", "INSERT INTO t VALUES (x'00')")
    with pytest.raises(InvalidInput) as caught:
        read(store, SqliteSource, types="v bigint")
    assert "types=`v` binary" in caught.value.hint
