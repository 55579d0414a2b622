"""Whole columns of a SQLite table, put together by SQLite itself: no row is ever a value of Python's.

Terms
  window   a range of rowids whose rows SQLite gathers in one step: for each column one text, the JSON array of its values

Rules
  1. Only for tables with rowids, whose wanted columns are `bigint` with integer affinity or `string` with text affinity: their
     JSON says exactly what is stored, and a number or text in the wrong place does not decode as the other. Where SQLite is
     told filters it is asked for rows: an index may answer better than a walk through windows.
  2. A window that is not plain (a misfit, a BLOB, a text that is no UTF-8) is read again row by row, by `sqlite_rows.py`, which
     says what is wrong, or makes it NULL.
  3. Windows follow each other without a gap, and become wider or narrower so that their texts have about `WINDOW_BYTES`. One
     whose text would pass `TEXT_BYTES_MAX` is refused by SQLite before it is made, and is taken in smaller ones.

Rows through apsw take about 350 ns each before Arrow has seen one of them; this takes less than that for columns in Arrow.
Importable on executors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from struct import error as StructError  # noqa: N812 - it is a class
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from quire.core.limits import MIB
from quire.spark.sources.sqlite_rows import cut, numbers
from quire.spark.sources.sqlite_tables import DATABASE, Table, affinity, quoted

if TYPE_CHECKING:
    from quire.sqlite.connect import Connection

WINDOW_BYTES = 256 * 1024
"""Of a window's texts: with four times as much they no longer fit the processor's cache."""
TEXT_BYTES_MAX = 8 * MIB
FIRST_ROWIDS = 1_024

LENGTH, TOO_BIG = 0, 18
"""SQLite's numbers for its limit of a value's length, and for passing it."""

Rowids = tuple[int, int]
AsRows = Callable[[Rowids], Iterator[pa.RecordBatch]]

_KINDS = {pa.int64(): "integer", pa.string(): "text"}
_whole_numbers = msgspec.json.Decoder(list[int]).decode
_WITH_NULLS: dict[pa.DataType, msgspec.json.Decoder[Any]] = {
    pa.int64(): msgspec.json.Decoder(list[int | None]),
    pa.string(): msgspec.json.Decoder(list[str | None]),
}


class _Odd(Exception):
    """A window that is not plain (rule 2)."""


@dataclass(frozen=True, slots=True)
class ColumnQuery:
    """What is asked of a table, where rule 1 allows it."""

    table: Table
    schema: pa.Schema
    database: str = ""
    """What the column that names the database says; empty if there is none."""

    @property
    def is_allowed(self) -> bool:
        """Whether the table has rowids and its wanted columns come through JSON unchanged (rule 1)."""
        columns = [(field, self.table.column(field.name)) for field in self.stored]
        is_plain = all(column and _KINDS.get(field.type) == affinity(column.declared) for field, column in columns)
        return bool(self.table.rowid and self.table.root and columns) and is_plain

    @property
    def stored(self) -> list[pa.Field]:
        """The columns that the table has."""
        return [field for field in self.schema if not (self.database and field.name == DATABASE)]

    def sql(self) -> str:
        """(rows, a text for each column) of a window."""
        shown = [f"json_group_array({quoted(field.name)})" for field in self.stored]
        return f"SELECT {', '.join(['count(*)', *shown])} {self._where()}"

    def sql_first(self) -> str:
        """The first rowid of a range."""
        return f"SELECT min({self.table.rowid}) {self._where()}"

    def _where(self) -> str:
        return f"FROM main.{quoted(self.table.name)} NOT INDEXED WHERE {self.table.rowid} BETWEEN ? AND ?"

    def batch(self, rows: int, found: tuple[str, ...]) -> pa.RecordBatch:
        """The columns of a window."""
        made = {
            field.name: _column(text.encode(), field.type, rows) for field, text in zip(self.stored, found, strict=True)
        }
        columns = [
            made[field.name] if field.name in made else pa.array([self.database], pa.string()).take([0] * rows)
            for field in self.schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def windows(connection: Connection, query: ColumnQuery, rowids: Rowids, as_rows: AsRows) -> Iterator[pa.RecordBatch]:
    """The rows of a range of rowids, in small batches."""
    usual = connection.limit(LENGTH, TEXT_BYTES_MAX)
    sql, (first, last), width = query.sql(), rowids, FIRST_ROWIDS
    is_row = False  # whether `first` is likely to be one
    while first <= last:
        if not is_row:
            found = connection.execute(query.sql_first(), (first, last)).get
            if found is None:
                break
            first, is_row = found, True
        stop = min(first + width - 1, last)
        try:
            rows, *texts_found = next(connection.execute(sql, (first, stop)))
            made = query.batch(rows, tuple(texts_found)) if rows else None
        except Exception as error:  # SQLite's own, and those of JSON that is not what it should be
            if getattr(error, "result", 0) == TOO_BIG and width > FIRST_ROWIDS:
                width = max(width // 16, FIRST_ROWIDS)
                continue
            connection.limit(LENGTH, usual)
            yield from as_rows((first, stop))  # if the fault is not in the window, it is met again there
            connection.limit(LENGTH, TEXT_BYTES_MAX)
            first = stop + 1
            continue
        if made is not None:
            yield made
        first, is_row, size = stop + 1, rows > 0, sum(map(len, texts_found))
        if size < WINDOW_BYTES // 2:
            width *= 2
        elif size > 2 * WINDOW_BYTES:
            width = max(width // 2, 1)


def _column(text: bytes, kind: pa.DataType, rows: int) -> pa.Array:
    try:
        return numbers("q", _whole_numbers(text)) if kind == pa.int64() else _texts(text, rows)
    except (msgspec.MsgspecError, StructError, ValueError):
        pass  # NULLs, escapes, or something that is not plain
    try:
        return pa.array(_WITH_NULLS[kind].decode(text), kind)
    except (msgspec.MsgspecError, pa.ArrowException, OverflowError, ValueError) as error:
        raise _Odd from error


def _texts(text: bytes, rows: int) -> pa.Array:
    """The texts of a JSON array. Without an escape in it `","` is nowhere but between two of them, which are cut there."""
    if b"\\" in text or not (text.startswith(b'["') and text.endswith(b'"]')):
        raise ValueError("not plain")
    return cut(text[2:-2].replace(b'","', b"\0"), rows)
