"""The columns of `quire.rows`: their schema, and changed rows as Arrow batches.

A row begins with columns that say what changed and where; the table's columns follow, as they are after the change, or before
it if the row was deleted.

Importable on executors. Raises `InvalidInput` for values that do not fit their columns, and for tables with reserved names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from quire.core.errors import InvalidInput
from quire.spark.sources.sqlite_tables import DATABASE_FIELD
from quire.spark.sources.views import LocatedVersion
from quire.sqlite.arrow_rows import column
from quire.sqlite.row_changes import RowChange
from quire.sqlite.row_reads import STEP_ROWS

FIELDS = [
    DATABASE_FIELD,
    StructField("_table", StringType(), nullable=False),
    StructField("_op", StringType(), nullable=False),
    StructField("_key", StringType()),
    StructField("_epoch", LongType(), nullable=False),
    StructField("_committed_at", TimestampType(), nullable=False),
]
"""The first fields of every row."""
BEFORE = "_before"

RESERVED = {*(field.name for field in FIELDS), BEFORE}
"""Names that columns of the table cannot have."""


def rows_schema(table: StructType, *, with_before: bool) -> StructType:
    """Return the schema of changes of a table with these columns."""
    if taken := [name for name in table.names if name in RESERVED]:
        raise InvalidInput(
            "the table has columns with names that this source reserves",
            hint="exclude them with `columns`",
            columns=taken,
        )
    before = [StructField(BEFORE, table)] if with_before else []
    return StructType([*FIELDS, *table.fields, *before])


class RowForm:
    """Converts changed rows to Arrow batches."""

    def __init__(
        self, table: str, columns: Sequence[str], version: LocatedVersion, schema: pa.Schema, *, null_misfits: bool
    ) -> None:
        self._schema = schema
        self._null_misfits = null_misfits
        self._places = {name: place for place, name in enumerate(columns)}
        self._constant = {
            "_database": version.database,
            "_table": table,
            "_epoch": version.view.lsn,
            "_committed_at": version.view.time_ms * 1_000,
        }

    def notice(self, op: str, text: str) -> pa.RecordBatch:
        """Return a batch with one row that is not a change."""
        return self._batch([RowChange(op, text, None, None)])

    def batches(self, changes: Iterator[RowChange]) -> Iterator[pa.RecordBatch]:
        """Yield the rows in small batches."""
        while taken := list(islice(changes, STEP_ROWS)):
            yield self._batch(taken)

    def _batch(self, taken: list[RowChange]) -> pa.RecordBatch:
        nothing = (None,) * len(self._places)
        ops, keys, old, new = zip(*taken)
        after = list(zip(*((new_row or old_row or nothing) for old_row, new_row in zip(old, new))))
        columns = []
        for field in self._schema:
            if field.name in self._constant:
                values = pa.scalar(
                    self._constant[field.name], pa.int64() if pa.types.is_timestamp(field.type) else None
                )
                columns.append(pa.repeat(values, len(taken)).cast(field.type))
            elif field.name == "_op":
                columns.append(pa.array(ops, field.type))
            elif field.name == "_key":
                columns.append(pa.array(map(key_text, keys), field.type))
            elif field.name == BEFORE:
                columns.append(self._before(old, field.type))
            else:
                columns.append(self._column(after, field))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _column(self, values: list[tuple[Any, ...]], field: pa.Field) -> pa.Array:
        chosen = values[self._places[field.name]]
        return column(chosen, field.type, field.name, null_misfits=self._null_misfits)

    def _before(self, rows: Sequence[tuple[Any, ...] | None], kind: pa.StructType) -> pa.Array:
        nothing = (None,) * len(self._places)
        values = list(zip(*(row or nothing for row in rows)))
        children = [self._column(values, field) for field in kind]
        mask = pa.array([row is None for row in rows])
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)


def key_text(key: Any) -> str | None:
    """Return a key as text: a rowid as it is, otherwise a JSON array; a BLOB in it is an object with its hexadecimal digits.

    >>> key_text(7), key_text(("a", 1.5, b"z"))
    ('7', '["a",1.5,{"blob":"7a"}]')
    >>> key_text((float("-inf"),))
    '[-9e999]'
    """
    if isinstance(key, tuple):
        return f"[{','.join(map(_json_value, key))}]"
    return str(key) if key is not None else None


def _json_value(value: Any) -> str:
    if isinstance(value, bytes):
        value = {"blob": value.hex()}
    if isinstance(value, float) and math.isinf(value):
        return "9e999" if value > 0 else "-9e999"  # JSON has no infinity; parsers and SQLite read this as one
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
