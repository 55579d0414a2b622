"""A SQLite table as Spark sees it: the schema of its columns, whose types are those of `sqlite/tables.py`.

Importable on executors. Raises `InvalidInput` for a column that the table does not have.
"""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from quire.core.errors import InvalidInput
from quire.sqlite.tables import DATABASE, SqliteTable, arrow_type

SPARK_TYPES: dict[pa.DataType, DataType] = {
    pa.int64(): LongType(),
    pa.float64(): DoubleType(),
    pa.string(): StringType(),
    pa.binary(): BinaryType(),
    pa.bool_(): BooleanType(),
}


def spark_type(declared: str) -> DataType:
    """Spark's type of a declared SQLite type; `string` for what is unknown.

    >>> [spark_type(name).simpleString() for name in ("VARCHAR(20)", "integer", "Decimal(10,2)", "", "boolean", "blob")]
    ['string', 'bigint', 'double', 'string', 'boolean', 'binary']
    """
    return SPARK_TYPES[arrow_type(declared)]


def table_schema(table: SqliteTable, columns: list[str], *, with_database: bool) -> StructType:
    """The schema of these columns, or of all."""
    unknown = [name for name in columns if table.column(name) is None and name != DATABASE]
    if unknown:
        hint = f"columns: {', '.join(column.name for column in table.columns)}"
        raise InvalidInput("the table has no such column", hint=hint, table=table.name, columns=unknown[:5])
    chosen = [column for name in columns if (column := table.column(name))] if columns else list(table.columns)
    fields = [StructField(column.name, spark_type(column.declared)) for column in chosen]
    return StructType([StructField(DATABASE, StringType()), *fields] if with_database else fields)
