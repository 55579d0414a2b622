"""`df.write.format("quire.kv")`: rows become tables of a key-value database, on executors, and enter it in one step.

    df.select("key", "value").write.format("quire.kv").mode("append").options(store=path, database="cart").save()

Terms
  load   one job's tables; its number is drawn when the job is planned, and names it from then on

Rules
  1. Columns `key` and `value`, bytes or text; a null value deletes its key. Rows may come in any order and in any partitions:
     a task sorts what it gets. Range-partitioned, sorted rows (`kv_load.bulk_load`) give tables that need no compaction.
  2. All of a load has one lsn, from when its first task began: older than what is written after that, newer than what was
     there. A key that comes twice is refused, for none of the two would be the newer one.
  3. Tasks write tables beside those of the database, under ids that its manifest gave to this task alone. Spark names the
     tables of the attempts that count, the owner takes exactly those with one event; the files of all others go.
  4. The database remembers the load: a commit whose answer was lost is asked for again, and answered.
  5. Executors must see the directory of the store.

Save mode: `append`. Options: `database`, `create` (the default is `true`: make the database if there is none).
Raises `InvalidInput`, `OutOfRange`, and what a client raises.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, StringType, StructType

from quire.core.errors import InvalidInput
from quire.durable.files import OsDisk
from quire.lsm.bulk import BulkWriter, LoadTarget
from quire.lsm.sst_writer import TableOptions
from quire.service.tickets import KV_IDS, Shelf, TakeIds
from quire.spark.sources.options import Options

if TYPE_CHECKING:
    import pyarrow as pa

    from quire.service.channel import Channel

COLUMNS = ("key", "value")
IDS_AT_ONCE = 4
"""Asked for together: a call costs the owner a sync, an id costs nothing."""


@dataclass
class TablesMessage(WriterCommitMessage):
    """What a task tells the driver: the tables that its attempt has written."""

    ids: tuple[int, ...]
    rows: int


class KvWriter(DataSourceArrowWriter):
    """See the rules above."""

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise InvalidInput(
                "a key-value database is written with mode('append')", hint="drop it first, or load into another one"
            )
        self.access = options.access()
        self.database = options.need("database")
        self.create = options.one_of("create", ("true", "false")) == "true"
        self.places = _places(schema)
        self.load = secrets.randbits(62) | 1

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TablesMessage:
        """Write a task's rows as tables (rules 1 and 3)."""
        channel = self.access.channel()
        try:
            shelves = _Shelves(channel, TakeIds(self.load, self.database, IDS_AT_ONCE, self.create))
            writer: BulkWriter | None = None
            key, value = self.places
            for batch in iterator:
                if writer is None:
                    writer = BulkWriter(OsDisk(), shelves.place(), shelves.take)
                writer.add(batch.column(key), batch.column(value))
            return TablesMessage(tuple(writer.finish()), writer.rows) if writer is not None else TablesMessage((), 0)
        finally:
            channel.close()

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Have the owner take everything (rules 3 and 4)."""
        ids = [sst_id for each in messages if isinstance(each, TablesMessage) for sst_id in each.ids]
        with self.access.connect() as client:
            client.publish_tables(self.load, self.database, ids, create=self.create)

    def abort(self, _: list[WriterCommitMessage | None]) -> None:
        """Have the owner remove the tables that the tasks wrote (rule 3)."""
        with self.access.connect() as client:
            client.drop_tables(self.load)


class _Shelves:
    """Ids of a task, asked for as they are needed."""

    def __init__(self, channel: Channel, request: TakeIds) -> None:
        self._channel = channel
        self._request = request
        self._shelf: Shelf | None = None
        self._left: list[int] = []

    def place(self) -> LoadTarget:
        """Where and how to write."""
        shelf = self._ask(IDS_AT_ONCE)
        if not os.path.isdir(os.path.join(shelf.directory, "sst")):
            raise InvalidInput(
                "this executor does not see the database's directory",
                hint="a load needs a disk that the owner and the executors share",
                path=shelf.directory,
            )
        options = TableOptions(
            block_bytes=shelf.block_bytes,
            compression=shelf.compression,
            bloom_bits_per_key=shelf.bloom_bits_per_key,
        )
        return LoadTarget(directory=shelf.directory, lsn=shelf.lsn, table_bytes=shelf.table_bytes, options=options)

    def take(self, count: int) -> Sequence[int]:
        """So many ids."""
        if len(self._left) < count:
            self._ask(max(IDS_AT_ONCE, count - len(self._left)))
        taken, self._left = self._left[:count], self._left[count:]
        return taken

    def _ask(self, count: int) -> Shelf:
        asked = TakeIds(self._request.load, self._request.database, count, self._request.create)
        shelf: Shelf = self._channel.ask(KV_IDS, asked)
        if self._shelf is not None and shelf.lsn != self._shelf.lsn:
            raise InvalidInput("the owner has restarted, and knows nothing of this load", hint="run the job again")
        self._shelf = shelf
        self._left += shelf.ids
        return shelf


def _places(schema: StructType) -> tuple[int, int]:
    """Where in a batch `key` and `value` are."""
    if sorted(schema.names) != sorted(COLUMNS):
        hint = 'df.select(col("…").alias("key"), col("…").alias("value"))'
        raise InvalidInput("a key-value database takes the columns `key` and `value`", hint=hint, given=schema.names)
    for field in schema.fields:
        if not isinstance(field.dataType, BinaryType | StringType):
            raise InvalidInput(
                f"keys and values are binary or string, not {field.dataType.simpleString()}",
                hint="cast the column, or to_json(…)",
                column=field.name,
            )
    return schema.names.index("key"), schema.names.index("value")
