"""Determines the types of a SQLite table's columns from their declarations and a sample of the stored values.

SQLite treats a declared type as advice and stores any value in any column. So rows are sampled in all parts of the table:

- The declared type is used if the sample does not contradict it: …INT… is `int64`; …CHAR…, …CLOB…, …TEXT…, …DATE… and …TIME…
  are `string`; …BLOB… is `binary`; …REAL…, …FLOA…, …DOUB…, NUMERIC and DECIMAL are `double`; …BOOL… is `bool`, which takes 0
  and 1.
- Otherwise, and for columns without a declared type or with any other, it is the narrowest type that takes all values of the
  sample: `int64`, `double` (whole numbers are exact up to 2**53), `string` (numbers as text), `binary` (texts as
  stored). A column without values is `string`.

A value outside the sample that does not fit is a misfit (`arrow_rows.py`).

Executor-safe. Only reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from quire.sqlite.row_reads import naming
from quire.sqlite.tables import SqliteTable, declared_type
from quire.sqlite.trees import PageArray, by_number, rowid_ranges
from quire.sqlite.where_clause import quoted

if TYPE_CHECKING:
    import apsw

SAMPLE_RANGES, SAMPLE_ROWS = 16, 64
"""How many parts of a table are sampled, and how many rows of each."""

FLAG = "flag"
"""The type of the integers 0 and 1; all other values have the types that SQLite's `typeof` returns."""

_TAKEN: dict[pa.DataType, frozenset[str]] = {
    pa.int64(): frozenset({FLAG, "integer"}),
    pa.bool_(): frozenset({FLAG}),
    pa.float64(): frozenset({FLAG, "integer", "real"}),
    pa.string(): frozenset({FLAG, "integer", "real", "text"}),
    pa.binary(): frozenset({FLAG, "integer", "real", "text", "blob"}),
}
"""The types of values that each Arrow type takes, narrowest first. Only a column that is declared as a boolean becomes one:
`int64` is found before."""


@dataclass(frozen=True, slots=True)
class SampledColumn:
    """A column, its declared type, and the types of some of its values.

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


def sampled(
    connection: apsw.Connection, table: SqliteTable, pages: PageArray, chosen: Collection[str] = ()
) -> list[SampledColumn]:
    """Return the columns of a table. Reads some rows in each part of it; only the chosen columns, if any are."""
    if not table.columns:
        return []
    wanted = {name.lower() for name in chosen} or {column.name.lower() for column in table.columns}
    with naming(table.name, table.database):
        rows = _sampled_types(connection, table, pages, wanted)
    seen = [frozenset(kinds) - {"null"} for kinds in zip(*rows)] or [frozenset[str]()] * len(table.columns)
    return [SampledColumn(column.name, column.declared, kinds) for column, kinds in zip(table.columns, seen)]


def _sampled_types(
    connection: apsw.Connection, table: SqliteTable, pages: PageArray, wanted: Collection[str]
) -> list[tuple[str, ...]]:
    """Return the types of the values of some rows; "null" for columns that are not wanted, which may not be readable."""
    kinds = ", ".join(_type(column.name) if column.name.lower() in wanted else "'null'" for column in table.columns)
    sql = f"SELECT {kinds} FROM main.{quoted(table.name)}"
    if not (table.rowid and table.root):
        return list(connection.execute(f"{sql} LIMIT {SAMPLE_RANGES * SAMPLE_ROWS}"))
    within = f"{sql} WHERE {table.rowid} BETWEEN ? AND ? LIMIT {SAMPLE_ROWS}"
    ranges = rowid_ranges(by_number(pages), table.root, SAMPLE_RANGES)
    return [row for rowids in ranges for row in connection.execute(within, rowids)]


def _type(name: str) -> str:
    column = quoted(name)
    # A sum is compared without the column's collation, which may not exist here.
    return f"iif(typeof({column}) = 'integer' AND {column} + 0 IN (0, 1), '{FLAG}', typeof({column}))"


def union_columns(tables: Iterable[list[SampledColumn]]) -> list[SampledColumn]:
    """Return the columns of tables of several databases, in order of first appearance."""
    columns: dict[str, SampledColumn] = {}
    for table in tables:
        for column in table:
            earlier = columns.get(column.name.lower())
            columns[column.name.lower()] = earlier.with_values_of(column) if earlier is not None else column
    return list(columns.values())
