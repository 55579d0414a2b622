"""Databases are selected by the names that they have, and errors name them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import StructType

from quire.core.errors import InvalidInput, UnknownSnapshot
from quire.service.tickets import QUERY_KEYS
from quire.spark.sources.base import Options, QuireSource
from quire.spark.sources.kv import KvSource
from quire.spark.sources.rows import RowsSource
from quire.spark.sources.sqlite import SqliteSource
from quire.spark.sources.stream import StreamSource
from quire.spark.sources.views import DatabaseSelection
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.spark.served_store import open_served


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_served(tmp_path / "store", ManualClock(now_ms=1_750_000_000_000)) as store:
        for name in ("a[1]", "a1", "a*"):
            with closing(store.sqlite(name, create=True)) as connection:
                connection.execute("CREATE TABLE t(id INTEGER PRIMARY KEY, v INT)")
                connection.execute("INSERT INTO t VALUES (1, 1)")
        yield store


def read(source: type[QuireSource], store: Store, **options: str) -> list[dict[str, Any]]:
    """The rows that a source reads, without Spark."""
    given = source({"store": store.path, **options})
    schema = given.schema()
    assert isinstance(schema, StructType)
    reader = given.reader(schema)
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"database": "a[1]"}, ["a[1]"]),
        ({"database": "a*"}, ["a*"]),
        ({"databases": "a[1]"}, ["a1", "a[1]"]),
        ({"databases": "a[[]1]"}, ["a[1]"]),
        ({"databases": "a[*]"}, ["a*"]),
    ],
)
def test_a_name_that_reads_as_a_pattern_selects_its_database(
    store: Store, given: dict[str, str], names: list[str]
) -> None:
    options = Options({"store": store.path, **given}, source="a test", known=("database", "databases", "tags"))
    selection = DatabaseSelection(options)
    with options.access().connect() as client:
        assert sorted(selection.names(client)) == names
        assert sorted(database.name for database in selection.matching(client)) == names, "as streaming queries select"


def test_one_database_and_several_are_refused_together(store: Store) -> None:
    with pytest.raises(InvalidInput, match="`database` and `databases` cannot be used together"):
        read(SqliteSource, store, database="a1", databases="a*", table="t")
    with pytest.raises(InvalidInput, match="`stream` is for one stream; add its name to `databases`"):
        read(StreamSource, store, stream="s", databases="s*")


def test_a_missing_snapshot_names_the_database(store: Store) -> None:
    store.create("cart", "lsm")
    for source, given in (
        (SqliteSource, {"databases": "a1", "table": "t", "snapshot": "monday"}),
        (RowsSource, {"databases": "a1", "table": "t", "from": "monday"}),
        (KvSource, {"databases": "cart", "snapshot": "monday"}),
    ):
        with pytest.raises(UnknownSnapshot, match=rf"database='{given['databases']}', snapshot='monday'"):
            read(source, store, **given)


def test_a_value_that_does_not_fit_names_database_and_a_type_that_takes_it(store: Store) -> None:
    with closing(store.sqlite("a1")) as connection:
        connection.execute("UPDATE t SET v = x'00ff'")
    for source in (SqliteSource, RowsSource):
        with pytest.raises(InvalidInput, match=r"database='a1'.*binary with types=`v` binary"):
            read(source, store, databases="a*", table="t", types="v bigint")


def test_records_of_streaming_queries_are_no_rows_of_a_set(store: Store) -> None:
    cart = store.kv("cart", create=True)
    cart.write({b"": b"0", b"\0a": b"1", QUERY_KEYS + b"q": b"7", b"\0z": b"2", b"k": b"3"})
    keys = [b"", b"\0a", b"\0z", b"k"]
    assert [row["key"] for row in read(KvSource, store, database="cart")] == keys
    assert len(read(KvSource, store, database="cart", columns="value")) == 4
    assert read(KvSource, store, database="cart", low="hex:0071756972652f", high="hex:00717569726530") == []


def test_a_view_of_a_dropped_table_is_reported_with_its_name(store: Store) -> None:
    with closing(store.sqlite("a1")) as connection:
        connection.execute("CREATE VIEW broken AS SELECT * FROM missing")
    with pytest.raises(InvalidInput, match=r"the view cannot be read.*table='broken', database='a1'"):
        read(SqliteSource, store, database="a1", table="broken")
