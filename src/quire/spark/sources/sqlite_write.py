"""Rows into a SQLite table: of a job, or of a streaming query.

    df.write.format("quire.sqlite").mode("append").options(store=path, database="shop", table="orders").save()
    stream.writeStream.format("quire.sqlite").options(store=path, database="shop", table="orders", key="id")...

- All rows of a job or a batch enter the table in one SQLite transaction of the owner's (`writers.py`, `sqlite/bulk_insert.py`).
- The same transaction remembers it: a load in `quire_loads`, so that a commit whose answer was lost is asked for again and
  answered; the last batch of a query in `quire_sinks`, so that a batch which Spark repeats is not written again.
- Columns are matched by name. Types of a new table follow the DataFrame's; dates, times and decimals are text, booleans 0 and
  1.
- With `key` (columns, separated by commas) a row replaces the one with the same key; the table needs a unique index on them,
  and a new one gets them as its primary key. With `delete`, a boolean column that is not stored, rows in which it is true are
  deleted.
- With `fork_of` (and `fork_at`, a snapshot) the database is made as a fork when rows are committed, if it does not exist.

Options: `database`, `table`, `key`, `delete`, `fork_of`, `fork_at`; `create`: `table` (the default: make a table that is not
there), `database` (and the database), or `false`; `exists`, of a table: `append` (the default), `error` or `ignore`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from quire.core.errors import InvalidInput, UnknownDatabase
from quire.spark.sources.writers import BatchId, PartTarget

if TYPE_CHECKING:
    from quire.service.client import Client
    from quire.spark.sources.base import Options

WRITING = ("database", "table", "fork_of", "fork_at", "create", "exists", "key", "delete")

CREATE = {"true": "table", "table": "table", "database": "database", "false": ""}

DECLARED: dict[type[DataType], str] = {
    ByteType: "INTEGER",
    ShortType: "INTEGER",
    IntegerType: "INTEGER",
    LongType: "INTEGER",
    BooleanType: "BOOLEAN",
    FloatType: "REAL",
    DoubleType: "REAL",
    StringType: "TEXT",
    BinaryType: "BLOB",
    DateType: "DATE",
    TimestampType: "TIMESTAMP",
    TimestampNTZType: "TIMESTAMP",
    DecimalType: "TEXT",
}
"""What a new table declares for a type of Spark's."""


class SqliteTarget(PartTarget):
    """See above."""

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        self.database = options.need("database")
        self.table = options.need("table")
        self.fork_of, self.fork_at = options.text("fork_of"), options.text("fork_at")
        self.columns = [(field.name, _declared(field.name, field.dataType)) for field in schema.fields]
        create = CREATE[options.one_of("create", tuple(CREATE))]
        exists = options.one_of("exists", ("append", "error", "ignore"))
        self.how: dict[str, Any] = {
            "overwrite": overwrite,
            "create": bool(create),
            "create_database": create == "database",
            "exists": "" if exists == "append" else exists,
            "keys": tuple(options.columns_of("key", schema)),
            "delete": flag_of(options, schema),
        }
        if self.how["delete"] and not self.how["keys"]:
            raise InvalidInput("rows are deleted by their key", hint='.option("key", "id")', delete=self.how["delete"])

    def take(self, client: Client, load: int, parts: list[str], batch: BatchId | None) -> None:
        if self.fork_of:
            try:
                client.database(self.database)
            except UnknownDatabase:
                client.fork(self.fork_of, self.database, at=self.fork_at or None)
        once: dict[str, Any] = {"query": batch.query, "batch": batch.batch} if batch is not None else {}
        client.load_rows(load, self.database, self.table, parts, columns=self.columns, **self.how, **once)


def flag_of(options: Options, schema: StructType) -> str:
    """The column that the option `delete` names; it says whether a row is to be deleted."""
    for name in (names := options.columns_of("delete", schema)):
        if not isinstance(schema[name].dataType, BooleanType):
            hint = f"df.withColumn({name!r}, expr(\"_op = 'delete'\"))"
            raise InvalidInput("the column that says what is deleted is boolean", hint=hint, column=name)
    if len(names) > 1:
        raise InvalidInput("one column says what is deleted", given=names)
    return names[0] if names else ""


def _declared(name: str, kind: DataType) -> str:
    declared = next((text for spark_type, text in DECLARED.items() if isinstance(kind, spark_type)), "")
    if not declared:
        raise InvalidInput(
            f"SQLite has no place for {kind.simpleString()}", hint="to_json(…) makes it text", column=name
        )
    return declared
