"""Determines the types of a SQLite table's columns from their declarations and a sample of the stored values.

SQLite treats a declared type as advice and stores any value in any column. So rows are sampled in all parts of the table:

- The declared type is used if the sample does not contradict it: …INT… is `int64`; …CHAR…, …CLOB…, …TEXT…, …DATE… and …TIME…
  are `string`; …BLOB… is `binary`; …REAL…, …FLOA…, …DOUB…, NUMERIC and DECIMAL are `double`; …BOOL… is `bool`.
- Otherwise, and for columns without a declared type or with any other, it is the narrowest type that takes all values of the
  sample: `int64`, `double` (whole numbers are exact up to 2**53), `string` (numbers as SQLite prints them), `binary` (texts as
  UTF-8). A column without values is `string`.

A value outside the sample that does not fit is a misfit (`arrow_rows.py`).

Executor-safe. Only reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from quire.sqlite.tables import SqliteTable, declared_type, quoted
from quire.sqlite.trees import PageArray, by_number, rowid_ranges

if TYPE_CHECKING:
    import apsw

SAMPLE_RANGES, SAMPLE_ROWS = 16, 64
"""How many parts of a table are sampled, and how many rows of each."""

_TAKEN: dict[pa.DataType, frozenset[str]] = {
    pa.int64(): frozenset({"integer"}),
    pa.bool_(): frozenset({"integer"}),
    pa.float64(): frozenset({"integer", "real"}),
    pa.string(): frozenset({"integer", "real", "text"}),
    pa.binary(): frozenset({"integer", "real", "text", "blob"}),
}
"""The SQLite types whose values each Arrow type takes, narrowest first."""


@dataclass(frozen=True, slots=True)
class SampledColumn:
    """A column, its declared type, and the types of some of its values, as SQLite's `typeof` returns them.

    >>> [
    ...     str(SampledColumn("price", "", frozenset(seen)).type)
    ...     for seen in ({"integer"}, {"integer", "real"}, {"real", "text"})
    ... ]
    ['int64', 'double', 'string']
    """

    name: str
    declared: str
    seen: frozenset[str]

    @property
    def type(self) -> pa.DataType:
        """The type that takes its values."""
        declared = declared_type(self.declared)
        if declared is not None and self.seen <= _TAKEN[declared]:
            return declared
        if not self.seen:
            return pa.string()
        return next(kind for kind, taken in _TAKEN.items() if self.seen <= taken)

    def with_values_of(self, other: SampledColumn) -> SampledColumn:
        """Merge the same column of two databases. The declaration is used only if both declare the same type."""
        declared = self.declared if declared_type(self.declared) == declared_type(other.declared) else ""
        return SampledColumn(self.name, declared, self.seen | other.seen)


def sampled(connection: apsw.Connection, table: SqliteTable, pages: PageArray) -> list[SampledColumn]:
    """Return the columns of a table. Reads some rows in each part of it."""
    if not table.columns:
        return []
    kinds = ", ".join(f"typeof({quoted(column.name)})" for column in table.columns)
    sql = f"SELECT {kinds} FROM main.{quoted(table.name)}"
    seen: list[set[str]] = [set() for _ in table.columns]
    if table.rowid and table.root:
        ranges = rowid_ranges(by_number(pages), table.root, SAMPLE_RANGES)
        within = f"{sql} WHERE {table.rowid} BETWEEN ? AND ? LIMIT {SAMPLE_ROWS}"
        rows = [row for rowids in ranges for row in connection.execute(within, rowids)]
    else:
        rows = list(connection.execute(f"{sql} LIMIT {SAMPLE_RANGES * SAMPLE_ROWS}"))
    for row in rows:
        for kinds_seen, kind in zip(seen, row):
            kinds_seen.add(kind)
    return [
        SampledColumn(column.name, column.declared, frozenset(kinds_seen - {"null"}))
        for column, kinds_seen in zip(table.columns, seen)
    ]


def union_columns(tables: Iterable[list[SampledColumn]]) -> list[SampledColumn]:
    """Return the columns of tables of several databases, in order of first appearance."""
    columns: dict[str, SampledColumn] = {}
    for table in tables:
        for column in table:
            earlier = columns.get(column.name.lower())
            columns[column.name.lower()] = earlier.with_values_of(column) if earlier is not None else column
    return list(columns.values())
