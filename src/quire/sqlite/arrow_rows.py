"""Reads rows of a SQLite table as Arrow batches: columns from the leaves of its tree, columns from SQLite, or row by row.

Terms
  misfit   a value that is not of its column's type: SQLite stores any value in any column
  window   a range of rowids whose rows SQLite aggregates in one step: for each column one text, the JSON array of its values

- A misfit is an error that names the column and the value, or `NULL` if the option `misfits` requests it: never a guess. For
  `string` every number is read as its shortest exact text (`number_text`), for `double` every whole number as the nearest
  double, and for `binary` every text as its stored bytes and every number as its text. `boolean` takes 0 and 1 only. `date` and
  `timestamp` (of a schema the user gives) are read from ISO text, `timestamp` also from seconds since 1970; `decimal` from text
  and numbers. A text that is not UTF-8 is a misfit for every type except `binary`.
- Leaves (`leaf_columns.py`) are preferred: without a condition, where the C part is built, for columns whose records hold the
  values that SQLite would return.
- Otherwise windows are used, for tables with rowids whose requested columns are `bigint` with integer affinity or `string` with
  text affinity: their JSON is exactly what is stored. Not for columns that are computed when they are read: the result of a
  JSON function would be taken as JSON instead of as text, and every expression that removes this mark changes some values.
  With a condition SQLite returns rows: an index may be better than a walk through the table.
- A window that is not plain (a misfit, a BLOB, a text that is not UTF-8) is read again row by row, which names the misfit.
- Windows follow each other without a gap, and widen or narrow so that their texts have about `WINDOW_BYTES`. If a text would
  exceed `TEXT_BYTES_MAX`, SQLite refuses the window before building it, and it is split into smaller ones.

Rows through apsw take about 350 ns each before Arrow sees any of them. A window takes less than that including the Arrow
columns, and leaves take a third of it (docs/decisions/075-columns-from-leaves.md).

Importable on executors. Raises `InvalidInput` for misfits, and for tables that need functions of their application.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from struct import error as StructError  # noqa: N812 - it is a class
from struct import pack
from types import NoneType
from typing import TYPE_CHECKING, Any

import apsw
import msgspec
import numpy as np
import pyarrow as pa

from quire.core.errors import InvalidInput
from quire.core.limits import MIB
from quire.sqlite.leaf_columns import AsRows, LeafDecoder, LeafPages, leaf_batches
from quire.sqlite.row_reads import STEP_ROWS, InvalidText, naming, read_rows
from quire.sqlite.tables import DATABASE, SqliteTable, affinity
from quire.sqlite.trees import EVERYTHING, Rowids
from quire.sqlite.where_clause import quoted

if TYPE_CHECKING:
    from quire.sqlite.connect import Connection

BATCH_BYTES = 4 * MIB

_CODES = {pa.int64(): "q", pa.float64(): "d"}
"""Numbers are packed by `struct`, which takes a tenth of Arrow's time and refuses NULLs and misfits."""

_FLAGS = frozenset({0, 1, None})

_WRONG = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, ValueError, TypeError)


def row_batches(rows: Iterator[tuple[Any, ...]], schema: pa.Schema, *, null_misfits: bool) -> Iterator[pa.RecordBatch]:
    """Yield rows in small batches; their values are in the order of the schema."""
    while taken := list(islice(rows, STEP_ROWS)):
        columns = [
            column(values, field.type, field.name, null_misfits=null_misfits)
            for values, field in zip(zip(*taken), schema)
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def coalesced(small: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Merge small batches into larger ones, since the consumer has a cost per batch."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in small:
        waiting.append(batch)
        size += batch.nbytes
        if size >= BATCH_BYTES:
            yield _joined(waiting)
            waiting, size = [], 0
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def column(values: tuple[Any, ...], kind: pa.DataType, name: str, *, null_misfits: bool) -> pa.Array:
    """Return values from SQLite as a column; converted together if all are of its type, otherwise one by one."""
    try:
        if (code := _CODES.get(kind)) is not None:
            return numbers(code, values)
        if pa.types.is_string(kind):
            return texts(values)
    except (StructError, TypeError, ValueError):
        pass  # NULLs, misfits, or an odd text
    try:
        # Without this check Arrow accepts bytes as text and truncates floats.
        if set(map(type, values)) <= _plain(kind):
            return _whole(values, kind)
    except _WRONG:
        pass  # one value does not fit; the loop below finds it
    return pa.array([_one(value, kind, name, null_misfits) for value in values], kind)


def numbers(code: str, values: Sequence[Any]) -> pa.Array:
    """Return a column of int64 ("q") or float64 ("d") values. Raises `struct.error` if a value is of another type."""
    kind = pa.int64() if code == "q" else pa.float64()
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(pack(f"{len(values)}{code}", *values))])


def texts(values: Sequence[Any]) -> pa.Array:
    """Return a column of texts. Raises `TypeError` if a value is no text, `ValueError` for a NUL or a text that is not
    UTF-8."""
    return split_at_nuls("\0".join(values).encode(), len(values))


def split_at_nuls(data: bytes, count: int) -> pa.Array:
    """Split `data` at its NULs into a column of `count` texts, in a third of the time that Arrow takes for Python values."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 0)
    if len(ends) != count - 1:
        raise ValueError("a text that contains NUL")
    offsets = np.zeros(count + 1, np.int32)
    offsets[1:count] = ends - np.arange(count - 1)
    offsets[count] = len(data) - count + 1
    return pa.Array.from_buffers(
        pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data.replace(b"\0", b""))]
    )


@cache
def _plain(kind: pa.DataType) -> frozenset[type]:
    """Return the Python types of values that need no conversion to this type."""
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return frozenset({int, NoneType})
    if pa.types.is_floating(kind):
        return frozenset({float, NoneType})
    return frozenset({bytes if pa.types.is_binary(kind) else str, NoneType})


def _whole(values: tuple[Any, ...], kind: pa.DataType) -> pa.Array:
    if pa.types.is_boolean(kind):
        if not _FLAGS.issuperset(values):
            raise ValueError("only 0 and 1 are booleans")
        return pa.array(values, pa.int64()).cast(kind)
    if pa.types.is_timestamp(kind):
        return pa.array(values, pa.string()).cast(pa.timestamp("us")).cast(kind)  # without a zone it is UTC
    if pa.types.is_temporal(kind) or pa.types.is_decimal(kind):
        return pa.array(values, pa.string()).cast(kind)
    return pa.array(values, kind)


def _one(value: Any, kind: pa.DataType, name: str, null_misfits: bool) -> Any:
    try:
        return _fitted(value, kind)
    except _WRONG as error:
        if null_misfits:
            return None
        wide = "binary" if isinstance(value, bytes) else "string"
        raise InvalidInput(
            f"a value is not a valid {kind}: {error}",
            hint=f"read such values as NULL with misfits=null, or the whole column as {wide} with types=`{name}` {wide}",
            column=name,
            value=repr(value)[:60],
        ) from error


def _fitted(value: Any, kind: pa.DataType) -> Any:
    """Convert one value to what Arrow accepts for this type."""
    if value is None:
        return None
    if pa.types.is_string(kind) and isinstance(value, int | float):
        return number_text(value)
    if pa.types.is_floating(kind) and isinstance(value, int):
        return float(value)
    if pa.types.is_binary(kind) and not isinstance(value, bytes):
        return (value if isinstance(value, str) else number_text(value)).encode()
    if pa.types.is_timestamp(kind) and isinstance(value, int | float):
        return pa.scalar(round(value * 1_000_000), pa.int64()).cast(kind).as_py()
    if pa.types.is_timestamp(kind) and isinstance(value, str):
        with suppress(pa.ArrowInvalid):  # with a zone
            return pa.scalar(value).cast(kind).as_py()
    if pa.types.is_decimal(kind) and isinstance(value, int | float):
        value = number_text(value)
    if isinstance(value, InvalidText):
        if pa.types.is_binary(kind):
            return value
        raise ValueError("it is a text that is not valid in the encoding of its database")
    if type(value) not in _plain(kind):
        raise ValueError(f"it is {type(value).__name__}")
    return _whole((value,), kind)[0].as_py()


def number_text(value: float) -> str:
    """Return a number as the shortest text that has exactly its value. SQLite's own text of a real is rounded to 15 digits.

    >>> number_text(5), number_text(1.0), number_text(0.1 + 0.2), number_text(1e20), number_text(-9e999)
    ('5', '1.0', '0.30000000000000004', '1e+20', '-inf')
    """
    return repr(value)


# ── tables ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def table_batches(
    connection: Connection,
    query: ColumnQuery,
    rowids: Rowids = EVERYTHING,
    *,
    pages: LeafPages,
    where: str = "",
    in_order: bool = False,
    null_misfits: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a table in a range of rowids, in small batches; in key order if `in_order`.

    `where` is a condition that was checked; `pages` are the pages that the connection reads.
    """

    def as_rows(some: Rowids) -> Iterator[pa.RecordBatch]:
        rows = read_rows(connection, *_select(query, some, where, in_order))
        return row_batches(rows, query.schema, null_misfits=null_misfits)

    with naming(query.table.name, query.table.database):
        if where:
            yield from as_rows(rowids)
        elif (decoder := LeafDecoder.of(pages, query.table, query.decoded)) is not None:
            yield from leaf_batches(pages, query.table.root, decoder, rowids, query.batch_of_leaves, as_rows)
        else:
            yield from windows(connection, query, rowids, as_rows) if query.is_allowed else as_rows(rowids)


def _select(
    query: ColumnQuery, rowids: Rowids, where: str, in_order: bool
) -> tuple[list[str], str, Rowids | tuple[()]]:
    """Return (expressions, the rest of the statement, its values)."""
    table, shown = query.table, list[str]()
    for name in query.schema.names:
        if query.database and name == DATABASE:
            shown.append(apsw.format_sql_value(query.database))
            continue
        column = table.column(name)
        if column is None and query.null_missing:
            shown.append("NULL")
            continue
        if column is None:
            hint = f"columns: {', '.join(column.name for column in table.columns)}"
            raise InvalidInput("the table has no such column", hint=hint, column=name)
        shown.append(quoted(column.name))
    conditions = [where] if where else []
    if rowids != EVERYTHING:
        conditions.append(f"{table.rowid} BETWEEN ? AND ?")
    key = [table.rowid] if table.rowid else [quoted(name) for name in table.key]
    condition = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    order = f" ORDER BY {', '.join(key)}" if in_order and key else ""
    return shown, f"FROM main.{quoted(table.name)}{condition}{order}", rowids if rowids != EVERYTHING else ()


# ── windows ───────────────────────────────────────────────────────────────────────────────────────────────────────────
WINDOW_BYTES = 256 * 1024
"""Bytes of a window's texts: with four times as much they no longer fit the processor's cache."""
TEXT_BYTES_MAX = 8 * MIB
FIRST_ROWIDS = 1_024

LENGTH, TOO_BIG = 0, 18
"""SQLite's limit id for the length of a value, and its error code for exceeding it."""

_KINDS = {pa.int64(): "integer", pa.string(): "text"}
_whole_numbers = msgspec.json.Decoder(list[int]).decode
_WITH_NULLS: dict[pa.DataType, msgspec.json.Decoder[Any]] = {
    pa.int64(): msgspec.json.Decoder(list[int | None]),
    pa.string(): msgspec.json.Decoder(list[str | None]),
}


class _Odd(Exception):
    """A window that is not plain."""


@dataclass(frozen=True, slots=True)
class ColumnQuery:
    """The columns requested from a table."""

    table: SqliteTable
    schema: pa.Schema
    database: str = ""
    """The value of the column that names the database; empty if there is no such column."""
    null_missing: bool = False
    """Whether a column that the table does not have is read as NULL."""

    @property
    def is_allowed(self) -> bool:
        """Whether windows can be used: the table has rowids, and its requested columns survive JSON unchanged."""
        columns = [(field, self.table.column(field.name)) for field in self.stored]
        is_plain = all(
            column and column.place is not None and _KINDS.get(field.type) == affinity(column.declared)
            for field, column in columns
        )
        return bool(self.table.rowid and self.table.root and columns) and is_plain

    @property
    def stored(self) -> list[pa.Field]:
        """The columns of the table itself: all except the one that names the database."""
        return [field for field in self.schema if not (self.database and field.name == DATABASE)]

    @property
    def decoded(self) -> list[tuple[str, pa.DataType]]:
        """(name, type) of the columns that must be in its records."""
        return [
            (field.name, field.type)
            for field in self.stored
            if not self.null_missing or self.table.column(field.name) is not None
        ]

    def batch_of_leaves(self, rows: int, arrays: list[pa.Array]) -> pa.RecordBatch:
        """Build a batch from decoded columns."""
        decoded = {name: array for (name, _), array in zip(self.decoded, arrays, strict=True)}
        return self._batch(rows, decoded)

    def sql(self) -> str:
        """Return the statement that yields (rows, a text for each column) of a window."""
        shown = [f"json_group_array({quoted(field.name)})" for field in self.stored]
        return f"SELECT {', '.join(['count(*)', *shown])} {self._where()}"

    def sql_first(self) -> str:
        """Return the statement that yields the first rowid of a range."""
        return f"SELECT min({self.table.rowid}) {self._where()}"

    def _where(self) -> str:
        return f"FROM main.{quoted(self.table.name)} NOT INDEXED WHERE {self.table.rowid} BETWEEN ? AND ?"

    def batch(self, rows: int, arrays: tuple[str, ...]) -> pa.RecordBatch:
        """Build a batch from the texts of a window."""
        stored = {
            field.name: _column(text.encode(), field.type, rows)
            for field, text in zip(self.stored, arrays, strict=True)
        }
        return self._batch(rows, stored)

    def _batch(self, rows: int, stored: dict[str, pa.Array]) -> pa.RecordBatch:
        columns = [
            stored[field.name]
            if field.name in stored
            else pa.repeat(
                pa.scalar(self.database if self.database and field.name == DATABASE else None, field.type), rows
            )
            for field in self.schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def windows(connection: Connection, query: ColumnQuery, rowids: Rowids, as_rows: AsRows) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a range of rowids, in small batches."""
    usual = connection.limit(LENGTH, TEXT_BYTES_MAX)
    sql, (first, last), width = query.sql(), rowids, FIRST_ROWIDS
    is_row = False  # whether `first` is likely to be the rowid of a row
    while first <= last:
        if not is_row:
            next_row = connection.execute(query.sql_first(), (first, last)).get
            if next_row is None:
                break
            first, is_row = next_row, True
        stop = min(first + width - 1, last)
        try:
            rows, *arrays = next(connection.execute(sql, (first, stop)))
            batch = query.batch(rows, tuple(arrays)) if rows else None
        except Exception as error:  # SQLite's errors, and those of decoding JSON that is not plain
            if getattr(error, "result", 0) == TOO_BIG and width > FIRST_ROWIDS:
                width = max(width // 16, FIRST_ROWIDS)
                continue
            connection.limit(LENGTH, usual)
            yield from as_rows((first, stop))  # an error that is not the window's is raised again there
            connection.limit(LENGTH, TEXT_BYTES_MAX)
            first = stop + 1
            continue
        if batch is not None:
            yield batch
        first, is_row, size = stop + 1, rows > 0, sum(map(len, arrays))
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
    """Return the texts of a JSON array. If it contains no escape, `","` occurs only between two texts, so it is split there."""
    if b"\\" in text or not (text.startswith(b'["') and text.endswith(b'"]')):
        raise ValueError("not plain")
    return split_at_nuls(text[2:-2].replace(b'","', b"\0"), rows)
