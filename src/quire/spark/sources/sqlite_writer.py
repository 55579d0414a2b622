"""`df.write.format("quire.sqlite")`: rows into a table of a database, all of a job in one SQLite transaction of the owner's.

    df.write.format("quire.sqlite").mode("append").options(store=path, database="shop", table="orders").save()

Terms
  load   one job's rows; its number is drawn when the job is planned, and names it from then on
  part   what one attempt of one task has sent: a file beside the owner's store, until the load ends

Rules
  1. Tasks stream to the owner; nothing they do is seen before the job commits. Then the owner inserts the parts that Spark
     names in one transaction: parts of failed, killed and repeated attempts are not among them.
  2. The owner remembers a load in the very transaction (table `quire_loads`): a commit whose answer was lost is asked for
     again, and answered.
  3. A job that fails is aborted: its parts go. What a killed driver leaves, the owner removes when it next starts.
  4. Columns are matched by name. `create` (the default is `true`) makes a table that is not there; its types follow the
     DataFrame's. Dates, times and decimals are written as text, booleans as 0 and 1.
  5. With `fork_of` (and `fork_at`, a snapshot) the database is made as a fork when the job commits, if it is not there.

Save modes: `append` and `overwrite` (the table's rows are deleted in the same transaction).
Options: `database`, `table`, `create`, `fork_of`, `fork_at`. Raises `InvalidInput`, and what a client raises.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
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
from quire.core.limits import MIB
from quire.spark.sources.options import Options

if TYPE_CHECKING:
    import pyarrow as pa

    from quire.service.channel import Channel

BODY_BYTES = 4 * MIB
"""Rows are sent in calls of about this size."""

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


@dataclass
class PartMessage(WriterCommitMessage):
    """What a task tells the driver: the part that its attempt has sent."""

    part: str
    rows: int


class SqliteWriter(DataSourceArrowWriter):
    """See the rules above."""

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        self.access = options.access()
        self.database = options.need("database")
        self.table = options.need("table")
        self.create = options.one_of("create", ("true", "false")) == "true"
        self.fork_of, self.fork_at = options.text("fork_of"), options.text("fork_at")
        self.overwrite = overwrite
        self.columns = [(field.name, _declared(field.name, field.dataType)) for field in schema.fields]
        self.load = secrets.randbits(62)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartMessage:
        """Send a task's rows (rule 1)."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None, "Spark calls this in a task"
        part = f"{context.partitionId()}-{context.taskAttemptId()}"
        channel = self.access.channel()
        try:
            return PartMessage(part, _send(channel, self.load, part, iterator))
        finally:
            channel.close()

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Have the owner insert everything (rules 1 and 2)."""
        parts = tuple(each.part for each in messages if isinstance(each, PartMessage) and each.rows)
        with self.access.connect() as client:
            if self.fork_of:
                try:
                    client.database(self.database)
                except UnknownDatabase:
                    client.fork(self.fork_of, self.database, at=self.fork_at or None)
            client.load_rows(
                self.load,
                self.database,
                self.table,
                parts,
                columns=self.columns,
                overwrite=self.overwrite,
                create=self.create,
            )

    def abort(self, _: list[WriterCommitMessage | None]) -> None:
        """Remove the parts of a job that failed (rule 3)."""
        with self.access.connect() as client:
            client.drop_load(self.load)


class _Sender:
    """A file that the owner keeps: bytes go out in calls of `BODY_BYTES`."""

    closed = False

    def __init__(self, channel: Channel, load: int, part: str) -> None:
        self._channel, self._load, self._part = channel, load, part
        self._waiting = bytearray()
        self._sent = 0

    def write(self, data: bytes) -> int:
        self._waiting += data
        while len(self._waiting) >= BODY_BYTES:
            self._send(BODY_BYTES)
        return len(data)

    def flush(self) -> None:
        if self._waiting:
            self._send(len(self._waiting))

    def _send(self, size: int) -> None:
        from quire.service.tickets import LOAD_PUT, PutPart

        body = bytes(self._waiting[:size])
        self._channel.ask(LOAD_PUT, PutPart(self._load, self._part, self._sent, body))
        self._sent += size
        del self._waiting[:size]


def _send(channel: Channel, load: int, part: str, batches: Iterator[pa.RecordBatch]) -> int:
    """Send batches as an Arrow stream; how many rows there were."""
    import pyarrow as pa

    rows, sender = 0, _Sender(channel, load, part)
    writer: pa.ipc.RecordBatchStreamWriter | None = None
    for batch in batches:
        writer = writer or pa.ipc.new_stream(sender, batch.schema)
        writer.write_batch(batch)
        rows += batch.num_rows
    if writer is not None:
        writer.close()
        sender.flush()
    return rows


def _declared(name: str, kind: DataType) -> str:
    found = next((text for each, text in DECLARED.items() if isinstance(kind, each)), "")
    if not found:
        raise InvalidInput(
            f"SQLite has no place for {kind.simpleString()}", hint="to_json(…) makes it text", column=name
        )
    return found
