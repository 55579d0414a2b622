"""Columns of quire as Spark has them: types, batches, and how many partitions there are to be.

Rules
  1. Spark has no unsigned numbers: up to 16 bits become `int`, 32 and 64 bits `bigint`. Hashes above 2**63 appear as negative
     numbers with the same bits, as Java prints them.
  2. A batch has exactly the schema that Spark expects: names, order, types.

Importable on executors.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_SIGNED = {pa.uint8(): pa.int32(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(), pa.uint64(): pa.int64()}


def default_partitions() -> int:
    """How many partitions a source makes unless told: two for each core here, so that one slow one is no disaster."""
    return 2 * (os.cpu_count() or 1)


def spark_schema(schema: pa.Schema) -> StructType:
    """The Spark schema of an Arrow schema (rule 1)."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(pa.schema([pa.field(each.name, _SIGNED.get(each.type, each.type)) for each in schema]))


def arrow_schema(schema: StructType) -> pa.Schema:
    """What Spark expects a batch of this schema to have."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


def fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A batch with the columns that Spark expects (rule 2)."""
    columns = [_column(batch.column(field.name), field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _column(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type == kind:
        return column
    if column.type == pa.uint64() and kind == pa.int64():
        return column.view(kind)  # the same bits: rule 1
    return column.cast(kind)
