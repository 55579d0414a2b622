"""Every source answers every question on one DataFrame as it answers it alone, whatever was asked of it before.

A reader that took Spark's filters kept them, so `count()` gave 1000, a filter 4, and `count()` again 4. What Spark
keeps of a source between queries must not change what it answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import eq, gt
from typing import TYPE_CHECKING, Any

import pandas as pd  # type: ignore[import-untyped]
import pytest
from pyspark.sql import functions as sf

from tests.spark.sourced import Owned, owned

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MANY = 1_000
COLUMNS_ASKED = 4
"""Each question is a job of Spark's: some tenths of a second."""

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
"""And with their options."""

SOURCES = ONCE | MORE
EVERY = [*ONCE, *(pytest.param(what, marks=pytest.mark.slow) for what in MORE)]

Question = tuple[str, Callable[["DataFrame"], Any], Callable[[pd.DataFrame], Any]]


@pytest.fixture(scope="module")
def owner(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owned]:
    with owned(spark, tmp_path_factory.mktemp("questions") / "store") as made:
        for name in ("shop", "east", "west"):
            made.run(
                name,
                "CREATE TABLE orders(id INTEGER PRIMARY KEY, who TEXT, price REAL, body BLOB)",
                "INSERT INTO orders VALUES (?, ?, ?, ?)",
                rows=[(n, f"w{n % 7}", n / 4, bytes([n % 9] * 40)) for n in range(MANY)],
            )
        made.store.checkpoint("shop")
        made.store.snapshot("shop", "monday")
        made.run("shop", "DELETE FROM orders WHERE id % 5 = 0", "UPDATE orders SET price = -1 WHERE id % 11 = 3")
        cart = made.store.kv("cart", create=True)
        cart.write({b"key-%03d" % n: b"%d" % (n % 4) for n in range(200)})
        clicks = made.store.stream("clicks", create=True)
        for start in range(0, 90, 30):
            clicks.append([b"%d" % (n % 6) for n in range(start, start + 30)]).result()
            clicks.seal()
        yield made


def plain(value: Any) -> Any:
    """A value that can be compared and counted: bytes of Spark's are bytearrays."""
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


def compared(name: str, sign: str, value: Any) -> Question:
    """How many rows compare so with a value, as Spark and as pandas count them."""
    compare = eq if sign == "=" else gt
    return (
        f"{name} {sign}",
        lambda df: df.where(compare(sf.col(name), literal(value))).count(),
        lambda pdf: sum(cell is not None and bool(compare(cell, value)) for cell in pdf[name]),
    )


def questions(frame: DataFrame, truth: pd.DataFrame) -> list[Question]:
    """Everything, and two filters that have nothing in common."""
    names = [name for name in scalars(frame) if truth[name].notna().any()]
    name = max(names, key=lambda each: truth[each].nunique())
    values = sorted(truth[name].dropna().unique())
    return [
        ("count", lambda df: df.count(), len),
        compared(name, "=", values[0]),
        compared(name, ">", values[len(values) // 2]),
    ]


def every_pair(count: int) -> list[int]:
    """A row of numbers in which each one follows each one, itself included: a de Bruijn sequence of pairs.

    >>> every_pair(2)
    [0, 0, 1, 1, 0]
    """
    found = [0]
    left = {(one, two) for one in range(count) for two in range(count)}
    while left:
        here = found[-1]
        step = next((two for two in (*range(1, count), 0) if (here, two) in left and two != here), None)
        chosen = here if (here, here) in left else step
        assert chosen is not None, "greedy steps, zero last, never run out"
        left.discard((here, chosen))
        found.append(chosen)
    return found


@pytest.mark.parametrize("what", EVERY)
def test_each_question_has_one_answer_in_every_order(owner: Owned, what: str) -> None:
    source, options = SOURCES[what]
    truth = as_pandas(owner.read(source, **options))
    assert len(truth) > 1, "there is something to ask about"
    frame = owner.read(source, **options)
    asked = questions(frame, truth)
    expected = {name: of_pandas(truth) for name, _, of_pandas in asked}
    assert 0 < expected[asked[1][0]] < len(truth) or len(truth) == expected[asked[1][0]] == 1
    for step, number in enumerate(every_pair(len(asked))):
        name, of_spark, _ = asked[number]
        assert of_spark(frame) == expected[name], f"{name}, as question {step}"
    for column in reversed(scalars(frame)[:COLUMNS_ASKED]):  # keys come first, so they are asked about last
        value = next((cell for cell in truth[column] if cell is not None and cell == cell), None)
        if value is not None:
            name, of_spark, of_pandas = compared(column, "=", value)
            assert of_spark(frame) == of_pandas(truth), name
    name = asked[1][0].split()[0]
    found = sorted((plain(row[0]) for row in frame.select(name).collect()), key=repr)
    assert found == [row[0] for row in rows(truth, [name])], "a projection, after all of them"


def told(frame: DataFrame, columns: list[str]) -> list[tuple[Any, ...]]:
    return sorted((tuple(map(plain, row)) for row in frame.select(*columns).collect()), key=repr)


def rows(truth: pd.DataFrame, columns: list[str]) -> list[tuple[Any, ...]]:
    cells = truth[columns].astype(object).where(truth[columns].notna(), None)
    return sorted((tuple(row) for row in cells.itertuples(index=False, name=None)), key=repr)


@pytest.mark.parametrize("what", EVERY)
def test_a_frame_may_be_joined_and_united_with_itself_cut_and_cached(owner: Owned, what: str) -> None:
    source, options = SOURCES[what]
    truth = as_pandas(owner.read(source, **options))
    frame = owner.read(source, **options)
    names = [name for name in scalars(frame) if truth[name].notna().any()]
    name = max(names, key=lambda each: truth[each].nunique())
    values = sorted(truth[name].dropna().unique())
    middle, last = values[len(values) // 2], values[-1]
    above = truth[name].map(lambda value: value is not None and value > middle)
    few, end = frame.where(sf.col(name) > literal(middle)), frame.where(sf.col(name) == literal(last))

    united = few.union(end).union(frame)
    assert told(united, names) == rows(pd.concat([truth[above], truth[truth[name] == last], truth]), names)
    joined = few.alias("a").join(frame.alias("b"), sf.col(f"a.{name}") == sf.col(f"b.{name}"))
    assert joined.count() == len(truth[above].merge(truth, on=name))
    assert frame.limit(1).count() == 1
    assert frame.count() == len(truth), "a limit is not kept either"

    kept = frame.cache()
    try:
        assert kept.where(sf.col(name) == literal(last)).count() == int((truth[name] == last).sum())
        assert told(kept, names) == rows(truth, names)
    finally:
        kept.unpersist()
    assert frame.count() == len(truth)
