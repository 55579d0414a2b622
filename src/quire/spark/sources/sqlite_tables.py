"""A SQLite table as Spark sees it: the schema of its columns, with the types of `sqlite/column_types.py`.

The option `types` overrides them, and a schema that the user gives overrides everything.

Importable on executors. Raises `InvalidInput` for an unknown column or type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from quire.core.errors import InvalidInput
from quire.sqlite.column_types import SampledColumn
from quire.sqlite.tables import DATABASE

DATABASE_FIELD = StructField(DATABASE, StringType(), nullable=False)

SPARK_TYPES: dict[pa.DataType, DataType] = {
    pa.int64(): LongType(),
    pa.float64(): DoubleType(),
    pa.string(): StringType(),
    pa.binary(): BinaryType(),
    pa.bool_(): BooleanType(),
}

_NAMED: dict[str, DataType] = {
    "bigint": LongType(),
    "long": LongType(),
    "int": IntegerType(),
    "integer": IntegerType(),
    "double": DoubleType(),
    "float": FloatType(),
    "string": StringType(),
    "binary": BinaryType(),
    "boolean": BooleanType(),
    "date": DateType(),
    "timestamp": TimestampType(),
}
_TYPES = re.compile(r"\s*(?:`([^`]+)`|([^\s,]+))\s+(\w+)\s*(?:\(\s*(\d+)\s*,\s*(\d+)\s*\))?\s*(?:,|$)")


def table_schema(columns: list[SampledColumn], chosen: list[str], types: Mapping[str, DataType]) -> StructType:
    """Return the schema of the chosen columns, or of all; `types` override declared and sampled types."""
    by_name = {column.name.lower(): column for column in columns}
    if unknown := [name for name in (*chosen, *types) if name.lower() not in by_name and name != DATABASE]:
        hint = f"columns: {', '.join(column.name for column in columns)}"
        raise InvalidInput("the table has no such column", hint=hint, columns=unknown[:5])
    given = {name.lower(): kind for name, kind in types.items()}
    names = [name.lower() for name in chosen if name != DATABASE] or list(by_name)
    return StructType(
        [StructField(by_name[name].name, given.get(name) or SPARK_TYPES[by_name[name].type]) for name in names]
    )


def parsed_types(text: str) -> dict[str, DataType]:
    """Parse the option `types`: names and types, separated by commas.

    >>> parsed_types("price decimal(10,2), `odd name` bigint")
    {'price': DecimalType(10,2), 'odd name': LongType()}
    """
    types: dict[str, DataType] = {}
    at = 0
    while text[at:].strip():
        match = _TYPES.match(text, at)
        kind = match and (DecimalType(int(match[4]), int(match[5])) if match[4] else _NAMED.get(match[3].lower()))
        if not match or kind is None or (match[4] and match[3].lower() != "decimal"):
            hint = f"like `price double, day date`; types: {', '.join(_NAMED)}, decimal(p,s)"
            raise InvalidInput(
                "the option `types` must list columns and their types", hint=hint, given=text[at : at + 40]
            )
        types[match[1] or match[2]] = kind
        at = match.end()
    return types
