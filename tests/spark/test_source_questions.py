"""Every query on a DataFrame of a source has the same result in any order of queries.

A reader that accepted Spark's filters kept them, so `count()` gave 1000, a filter 4, and `count()` again 4. The state
that Spark
keeps of a source between queries must not change results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import eq, gt
from typing import TYPE_CHECKING, Any

import pandas as pd  # type: ignore[import-untyped]
import pytest
from pyspark.sql import functions as sf

from tests.spark.served_store import ServedStore, serve_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MANY = 1_000
COLUMNS_QUERIED = 4
"""Each query is a Spark job: some tenths of a second."""

ONCE: dict[str, tuple[str, dict[str, Any]]] = {
    "sqlite": ("quire.sqlite", {"database": "shop", "table": "orders"}),
    "pages": ("quire.pages", {"database": "shop", "snapshot": "monday"}),
    "rows": ("quire.rows", {"database": "shop", "from_": "monday", "table": "orders"}),
    "diff": ("quire.diff", {"database": "shop", "from_": "monday"}),
    "kv": ("quire.kv", {"database": "cart", "keys": "string"}),
    "stream": ("quire.stream", {"stream": "clicks"}),
    "manifest_log": ("quire.manifest_log", {"stream": "clicks"}),
    "changes": ("quire.changes", {"first": 2, "last": 20}),
    "table": ("quire.table", {"table": "wal_catalog"}),
}
"""Each source once."""

MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "sqlite, where": ("quire.sqlite", {"database": "shop", "table": "orders", "where": "id % 3 = 0 AND who <> 'w1'"}),
    "sqlite, snapshot": ("quire.sqlite", {"database": "shop", "table": "orders", "snapshot": "monday"}),
    "sqlite, many": ("quire.sqlite", {"databases": "shop,east,west", "table": "orders", "columns": "id,who"}),
    "pages, range": ("quire.pages", {"databases": "*", "start": 1, "end": 4}),
    "rows, many": ("quire.rows", {"databases": "*", "table": "orders", "columns": "id,who"}),
    "kv, prefix": ("quire.kv", {"database": "cart", "prefix": "key-00"}),
    "stream, range": ("quire.stream", {"stream": "clicks", "start": 20, "end": 70, "since": 1}),
    "table, key": ("quire.table", {"table": "wal_catalog", "key": "1"}),
}
"""The same sources with their options."""

SOURCES = ONCE | MORE
EVERY = [*ONCE, *(pytest.param(what, marks=pytest.mark.slow) for what in MORE)]

FrameQuery = tuple[str, Callable[["DataFrame"], Any], Callable[[pd.DataFrame], Any]]


@pytest.fixture(scope="module")
def owner(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    with serve_store(spark, tmp_path_factory.mktemp("questions") / "store") as owner:
        for name in ("shop", "east", "west"):
            owner.run(
                name,
                "CREATE TABLE orders(id INTEGER PRIMARY KEY, who TEXT, price REAL, body BLOB)",
                "INSERT INTO orders VALUES (?, ?, ?, ?)",
                rows=[(n, f"w{n % 7}", n / 4, bytes([n % 9] * 40)) for n in range(MANY)],
            )
        owner.store.checkpoint("shop")
        owner.store.snapshot("shop", "monday")
        owner.run("shop", "DELETE FROM orders WHERE id % 5 = 0", "UPDATE orders SET price = -1 WHERE id % 11 = 3")
        cart = owner.store.kv("cart", create=True)
        cart.write({b"key-%03d" % n: b"%d" % (n % 4) for n in range(200)})
        clicks = owner.store.stream("clicks", create=True)
        for start in range(0, 90, 30):
            clicks.append([b"%d" % (n % 6) for n in range(start, start + 30)]).result()
            clicks.seal()
        yield owner


def plain(value: Any) -> Any:
    """A value that can be compared and counted: Spark returns bytes as bytearrays."""
    return bytes(value) if isinstance(value, bytearray) else value


def as_pandas(frame: DataFrame) -> pd.DataFrame:
    return pd.DataFrame(frame.toPandas()).map(plain)


def scalars(frame: DataFrame) -> list[str]:
    """Columns that a filter can compare with a value."""
    return [
        field.name
        for field in frame.schema
        if field.dataType.typeName() in ("long", "integer", "string", "double", "binary")
    ]


def literal(value: Any) -> Any:
    return sf.lit(bytearray(value) if isinstance(value, bytes) else value.item() if hasattr(value, "item") else value)


def compared(name: str, sign: str, value: Any) -> FrameQuery:
    """The number of rows for which a comparison holds, in Spark and in pandas."""
    compare = eq if sign == "=" else gt
    return (
        f"{name} {sign}",
        lambda df: df.where(compare(sf.col(name), literal(value))).count(),
        lambda pdf: sum(cell is not None and bool(compare(cell, value)) for cell in pdf[name]),
    )


def frame_queries(frame: DataFrame, expected_rows: pd.DataFrame) -> list[FrameQuery]:
    """A count of all rows, and two disjoint filters."""
    names = [name for name in scalars(frame) if expected_rows[name].notna().any()]
    name = max(names, key=lambda column_: expected_rows[column_].nunique())
    values = sorted(expected_rows[name].dropna().unique())
    return [
        ("count", lambda df: df.count(), len),
        compared(name, "=", values[0]),
        compared(name, ">", values[len(values) // 2]),
    ]


def every_pair(count: int) -> list[int]:
    """A sequence of numbers in which each number follows each number, itself included: a de Bruijn sequence of pairs.

    >>> every_pair(2)
    [0, 0, 1, 1, 0]
    """
    sequence = [0]
    pairs = {(first, second) for first in range(count) for second in range(count)}
    while pairs:
        current = sequence[-1]
        step = next(
            (
                following
                for following in (*range(1, count), 0)
                if (current, following) in pairs and following != current
            ),
            None,
        )
        next_number = current if (current, current) in pairs else step
        assert next_number is not None, "greedy steps, with zero last, never run out"
        pairs.discard((current, next_number))
        sequence.append(next_number)
    return sequence


@pytest.mark.parametrize("source_name", EVERY)
def test_each_query_has_one_result_in_every_order(owner: ServedStore, source_name: str) -> None:
    source, options = SOURCES[source_name]
    expected_rows = as_pandas(owner.read(source, **options))
    assert len(expected_rows) > 1, "the source has several rows"
    frame = owner.read(source, **options)
    queries = frame_queries(frame, expected_rows)
    expected = {name: of_pandas(expected_rows) for name, _, of_pandas in queries}
    assert 0 < expected[queries[1][0]] < len(expected_rows) or len(expected_rows) == expected[queries[1][0]] == 1
    for step, number in enumerate(every_pair(len(queries))):
        name, of_spark, _ = queries[number]
        assert of_spark(frame) == expected[name], f"{name}, as query {step}"
    for column in reversed(scalars(frame)[:COLUMNS_QUERIED]):  # keys come first, so they are queried last
        value = next((cell for cell in expected_rows[column] if cell is not None and cell == cell), None)
        if value is not None:
            name, of_spark, of_pandas = compared(column, "=", value)
            assert of_spark(frame) == of_pandas(expected_rows), name
    name = queries[1][0].split()[0]
    values = sorted((plain(row[0]) for row in frame.select(name).collect()), key=repr)
    assert values == [row[0] for row in rows(expected_rows, [name])], "a projection, after all filters"


def frame_rows(frame: DataFrame, columns: list[str]) -> list[tuple[Any, ...]]:
    return sorted((tuple(map(plain, row)) for row in frame.select(*columns).collect()), key=repr)


def rows(expected_rows: pd.DataFrame, columns: list[str]) -> list[tuple[Any, ...]]:
    cells = expected_rows[columns].astype(object).where(expected_rows[columns].notna(), None)
    return sorted((tuple(row) for row in cells.itertuples(index=False, name=None)), key=repr)


@pytest.mark.parametrize("source_name", EVERY)
def test_a_frame_can_be_joined_with_itself_united_limited_and_cached(owner: ServedStore, source_name: str) -> None:
    source, options = SOURCES[source_name]
    expected_rows = as_pandas(owner.read(source, **options))
    frame = owner.read(source, **options)
    names = [name for name in scalars(frame) if expected_rows[name].notna().any()]
    name = max(names, key=lambda column_: expected_rows[column_].nunique())
    values = sorted(expected_rows[name].dropna().unique())
    middle, last = values[len(values) // 2], values[-1]
    above = expected_rows[name].map(lambda value: value is not None and value > middle)
    few, end = frame.where(sf.col(name) > literal(middle)), frame.where(sf.col(name) == literal(last))

    united = few.union(end).union(frame)
    assert frame_rows(united, names) == rows(
        pd.concat([expected_rows[above], expected_rows[expected_rows[name] == last], expected_rows]), names
    )
    joined = few.alias("a").join(frame.alias("b"), sf.col(f"a.{name}") == sf.col(f"b.{name}"))
    assert joined.count() == len(expected_rows[above].merge(expected_rows, on=name))
    assert frame.limit(1).count() == 1
    assert frame.count() == len(expected_rows), "a limit is not kept either"

    cached = frame.cache()
    try:
        assert cached.where(sf.col(name) == literal(last)).count() == int((expected_rows[name] == last).sum())
        assert frame_rows(cached, names) == rows(expected_rows, names)
    finally:
        cached.unpersist()
    assert frame.count() == len(expected_rows)
