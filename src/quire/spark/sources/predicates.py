"""Filters of Spark's as conditions of SQLite's.

Rules
  1. A condition holds for every row for which Spark's filter is true. It may hold for more: Spark applies the filter again.
  2. So only what both mean alike is said to SQLite: numbers in INTEGER and REAL columns, text in TEXT columns, each read as the
     type that was declared. Text is compared by its bytes, as Spark does, whatever collation the column has; its order only in
     a database that stores UTF-8.
  3. `IS NULL` is left to Spark where misfits become NULL.

    >>> from pyspark.sql.datasource import GreaterThan
    >>> from pyspark.sql.types import LongType, StructField, StructType
    >>> from quire.spark.sources.sqlite_tables import Column, Table
    >>> table = Table("t", (Column("n", "INTEGER"),), 2, "rowid", (), True)
    >>> conditions([GreaterThan(("n",), 5)], table, StructType([StructField("n", LongType())]), null_misfits=False)
    (['"n" > ?'], [5])

Pure, importable on executors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringStartsWith,
)
from pyspark.sql.types import ByteType, DataType, DoubleType, IntegerType, LongType, ShortType, StringType, StructType

from quire.spark.sources.sqlite_tables import Table, affinity, quoted

IN_MAX = 500
"""Values of an IN: SQLite takes 32,766, a plan that long helps nobody."""

Condition = tuple[str, list[Any]]

_ORDER = {GreaterThan: ">", GreaterThanOrEqual: ">=", LessThan: "<", LessThanOrEqual: "<="}
_INTEGRAL = (LongType, IntegerType, ShortType, ByteType)


def conditions(
    filters: Iterable[Filter], table: Table, schema: StructType, *, null_misfits: bool
) -> tuple[list[str], list[Any]]:
    """What of these filters SQLite can be told: conditions to be joined by AND, and the values in them."""
    told: list[str] = []
    values: list[Any] = []
    for each in filters:
        condition = _condition(each, table, schema, null_misfits)
        if condition is not None:
            told.append(condition[0])
            values += condition[1]
    return told, values


def _condition(each: Filter, table: Table, schema: StructType, null_misfits: bool) -> Condition | None:
    inner = each.child if isinstance(each, Not) else each
    attribute: tuple[str, ...] = getattr(inner, "attribute", ())
    if len(attribute) != 1 or attribute[0] not in schema.names:
        return None
    column = table.column(attribute[0])
    if column is None:
        return None
    name = quoted(column.name)
    if isinstance(inner, IsNull | IsNotNull):
        is_null = isinstance(inner, IsNull) != isinstance(each, Not)
        return None if is_null and null_misfits else (f"{name} IS {'' if is_null else 'NOT '}NULL", [])
    kind = _comparable(schema[attribute[0]].dataType, affinity(column.declared))
    if kind is None:
        return None
    if kind is str:
        name += " COLLATE BINARY"
    return _compared(inner, name, kind, is_ordered=kind is not str or table.is_utf8, is_negated=isinstance(each, Not))


def _comparable(kind: DataType, stored: str) -> type | None:
    """The Python type whose values mean the same to both (rule 2)."""
    if isinstance(kind, _INTEGRAL) and stored == "integer":
        return int
    if isinstance(kind, DoubleType) and stored == "real":
        return float
    return str if kind == StringType() and stored == "text" else None


def _compared(each: Filter, name: str, kind: type, *, is_ordered: bool, is_negated: bool) -> Condition | None:
    value: Any = getattr(each, "value", None)
    if isinstance(each, In):
        wanted = [one for one in value if one is not None]
        if is_negated or not wanted or len(wanted) > IN_MAX or not all(_is(one, kind) for one in wanted):
            return None
        return f"{name} IN ({', '.join('?' * len(wanted))})", wanted
    if not _is(value, kind):
        return None
    if isinstance(each, EqualTo):
        return f"{name} {'<>' if is_negated else '='} ?", [value]
    if is_negated:
        return None
    if type(each) in _ORDER and is_ordered:
        return f"{name} {_ORDER[type(each)]} ?", [value]
    if isinstance(each, StringStartsWith):
        return f"substr({name}, 1, ?) = ?", [len(value), value]
    return (f"instr({name}, ?) > 0", [value]) if isinstance(each, StringContains) else None


def _is(value: Any, kind: type) -> bool:
    """Whether a value can be said to SQLite as it is."""
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    if kind is float:
        return isinstance(value, float) and value == value  # not NaN: SQLite has none
    return isinstance(value, str) and "\0" not in value
