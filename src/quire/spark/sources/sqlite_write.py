"""Writes rows into a SQLite table: those of a job, or of a streaming query.

    df.write.format("quire.sqlite").mode("append").options(store=path, database="shop", table="orders").save()
    stream.writeStream.format("quire.sqlite").options(store=path, database="shop", table="orders", key="id")...

- All rows of a job or a batch enter the table in one SQLite transaction of the owner (`writers.py`, `sqlite/bulk_insert.py`).
- The same transaction records this: a load in `quire_loads`, so that a commit whose answer was lost is repeated and gets the
  recorded answer; the last batch of a query in `quire_sinks`, so that a batch which Spark repeats is not written again.
- Columns are matched by name. Types of a new table follow the DataFrame's; dates, times and decimals are text, booleans 0 and
  1.
- With `key` (columns, separated by commas) a row replaces the one with the same key; the table needs a unique index on them,
  and a new table gets them as its primary key. With `delete`, a boolean column that is not stored, rows in which it is true are
  deleted.
- With `fork_of` (and `fork_at`, a snapshot) the database is created as a fork when rows are committed, if it does not exist.

Options: `database`, `table`, `key`, `delete`, `fork_of`, `fork_at`; `create`: `table` (the default: create the table if it
does not exist), `database` (and the database), or `false`; `exists`, for a table: `append` (the default), `error` or
`ignore`.
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
"""The declared type in a new table for each Spark type."""


class SqliteTarget(PartTarget):
    """A SQLite table as the target of a load."""

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
            raise InvalidInput(
                "deleting rows needs their key", hint='add .option("key", "id")', delete=self.how["delete"]
            )

    def take(self, client: Client, load: int, parts: list[str], batch: BatchId | None) -> None:
        if self.fork_of:
            try:
                client.database(self.database)
            except UnknownDatabase:
                client.fork(self.fork_of, self.database, at=self.fork_at or None)
        once: dict[str, Any] = {"query": batch.query, "batch": batch.batch} if batch is not None else {}
        try:
            client.load_rows(load, self.database, self.table, parts, columns=self.columns, **self.how, **once)
        except UnknownDatabase as error:
            raise UnknownDatabase(
                "no database has this name",
                hint='the option create="database" creates it; `quire ls` lists the databases',
                name=self.database,
            ) from error


def flag_of(options: Options, schema: StructType) -> str:
    """Return the column that the option `delete` names, which marks rows to delete."""
    for name in (names := options.columns_of("delete", schema)):
        if not isinstance(schema[name].dataType, BooleanType):
            hint = f"df.withColumn({name!r}, expr(\"_op = 'delete'\"))"
            raise InvalidInput("the column that marks deleted rows must be boolean", hint=hint, column=name)
    if len(names) > 1:
        raise InvalidInput("only one column can mark deleted rows", given=names)
    return names[0] if names else ""


def _declared(name: str, kind: DataType) -> str:
    declared = next((text for spark_type, text in DECLARED.items() if isinstance(kind, spark_type)), "")
    if not declared:
        raise InvalidInput(
            f"SQLite cannot store {kind.simpleString()}", hint="convert it to text with to_json(…)", column=name
        )
    return declared
