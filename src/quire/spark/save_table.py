"""Saves a DataFrame as a table of a SQLite database, with all of Spark's save modes.

    quire.spark.save(frame, store, "shop", "orders")                        # refused if the table exists
    quire.spark.save(frame, store, "shop", "orders", mode="append", key="id")

Spark passes only `append` and `overwrite` to a data source in Python; for the other modes, and for its own default, it
reports that the source does not support them. Here they become the option `exists`, which the owner checks in the transaction
that writes.

Threads: any. Raises Spark's errors, with quire's inside them; `InvalidInput`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.core.errors import InvalidInput
from quire.spark.access import StoreLike, options_of
from quire.spark.active_session import job_description
from quire.spark.sessions import attach

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MODES = {
    "error": ("append", "error"),
    "errorifexists": ("append", "error"),
    "default": ("append", "error"),
    "ignore": ("append", "ignore"),
    "append": ("append", "append"),
    "overwrite": ("overwrite", "append"),
}
"""Spark's save modes → the mode that is passed to a source in Python, and the action if the table exists."""


def save(
    frame: DataFrame,
    store: StoreLike,
    database: str,
    table: str,
    *,
    mode: str = "errorifexists",
    create: bool = True,
    **options: str,
) -> None:
    """Write a DataFrame to a table, in one transaction.

    `store`: one that this process owns, the path or address of one that is served, or the options of a source. `mode`:
    Spark's `errorifexists`, `ignore`, `append` or `overwrite`. `create`: create the database or table if it does not exist.
    `options`: other options of writing, such as `key`.
    """
    if mode.lower() not in MODES:
        raise InvalidInput(f"Spark's save modes are {', '.join(MODES)}", mode=mode)
    spark_mode, exists = MODES[mode.lower()]
    attach(frame.sparkSession)
    given = {"database": database, "table": table, "exists": exists, "create": "database" if create else "false"}
    writer = frame.write.format("quire.sqlite").mode(spark_mode).options(**options_of(store), **{**given, **options})
    with job_description(frame.sparkSession, f"quire save: {database}, table {table}"):
        writer.save()
