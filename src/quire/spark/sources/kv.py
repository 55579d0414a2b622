"""`quire.kv`: the keys and values of a key-value database, as of now or of any snapshot; and loads into one.

    (spark.read.format("quire.kv").option("store", path).option("database", "cart")
        .option("snapshot", "monday").option("prefix", "user/").load())
    df.select("key", "value").write.format("quire.kv").mode("append").options(store=path, database="cart").save()

Executors must see the directory of the store.

Reading: a DataFrame reads one version: the requested snapshot, or the newest version when its first query is planned, which
is kept until `keep_seconds` after the last read. A task reads a range of keys, merged from all tables that have keys in it.
Ranges are cut at the tables' blocks, so each has about the same number of bytes, and no key is in two of them.

Writing: rows become tables, on executors, and enter the database in one step.

- Columns `key` and `value`, bytes or text; a null value deletes its key. Rows may come in any order: a task sorts its
  rows. Range-partitioned rows (`kv_load.bulk_load`) give tables that need no compaction.
- A whole load has one lsn, from when its first task began: older than later writes, newer than what was there.
  A key that occurs twice is refused: neither would be the newer one.
- Tasks write tables next to those of the database, under ids that its manifest gave to this task alone. Spark names the tables
  of the attempts that count; the owner takes exactly those with one event, and removes the files of all others.
- The database records the load: a commit whose answer was lost is repeated, and gets the recorded answer.

Streaming queries: each batch is sent to the owner (`writers.py`) and written as one batch of the set, together with its
number, under a separate key (`service/loads.py`), which this source does not return; a batch that Spark repeats is not
written again. Rows are applied in the order in which they arrive; with the option `delete`, a boolean column, rows in which it
is true delete their keys. Complete mode replaces the set. Executors need not see the store's directory.

Options of reading: `database`, or `databases` and `tags` (`views.py`; rows then begin with `_database`); `snapshot`, `absent`
(`error` or `skip`: databases without the snapshot), `keep_seconds`, `prefix`, or `low` and `high` (UTF-8, or `hex:…` for
bytes), `keys` and `values` (`binary` or `string`), `columns`, `partitions`. Options of writing, with save mode `append`:
`database`, `create` (the default is `true`: create the database if it does not exist).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from quire.core.errors import InvalidInput, UnknownSnapshot
from quire.core.limits import MIB
from quire.durable.files import OsDisk
from quire.durable.names import LsmHome
from quire.lsm.bulk import BulkWriter, LoadTarget
from quire.lsm.merge import parts, scan_parts
from quire.lsm.sst_reader import SSTable
from quire.lsm.table_options import TableOptions
from quire.lsm.view import LSN_MAX
from quire.manifest.keys import prefix_end
from quire.service.tickets import KV_IDS, LOAD_PAIRS, QUERY_KEYS, LoadPairs, TableDestination, TakeIds
from quire.spark.access import disk_at
from quire.spark.sources.base import KEEP_SECONDS, SINK_OPTIONS, Options, QuireSource, SourceReader
from quire.spark.sources.error_messages import ReadableErrors
from quire.spark.sources.sqlite_tables import DATABASE_FIELD
from quire.spark.sources.sqlite_write import flag_of
from quire.spark.sources.views import DatabaseSelection, balanced_groups
from quire.spark.sources.writers import BatchId, PartTarget, SinkWriter
from quire.sqlite.tables import DATABASE

if TYPE_CHECKING:
    from quire.lsm.engine import KvVersion
    from quire.service.channel import Channel
    from quire.service.client import Client

COLUMNS = ("key", "value")
WRITING = ("database", "create")

PIECE_BYTES = 4 * MIB
"""Ranges below this size are not cut: a task costs more."""

IDS_AT_ONCE = 4
"""Ids that are requested together: a call costs the owner a sync, an id costs nothing."""

KINDS = {"binary": BinaryType(), "string": StringType()}


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Keys in [low, high); `None` for no upper bound."""

    low: bytes = b""
    high: bytes | None = None

    @property
    def is_empty(self) -> bool:
        return self.high is not None and self.low >= self.high


@dataclass(frozen=True, slots=True)
class KeyRangeTask:
    """The range that a task reads."""

    directory: str
    sst_ids: tuple[int, ...]
    range: KeyRange
    size_bytes: int = 0
    """Approximate size of the range."""
    database: str = ""
    lease_id: int = 0


class KvReader(SourceReader):
    """Reads ranges of keys of one version of each database."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        self.request = kv_request(options)
        self.snapshot = options.text("snapshot")
        self.skip_absent = options.one_of("absent", ("error", "skip")) == "skip"
        self.range = asked_range(options)
        self.keep_seconds = options.number("keep_seconds", KEEP_SECONDS, least=1)

    def plan(self) -> list[list[KeyRangeTask]]:
        if self.range.is_empty:
            return []
        tasks: list[KeyRangeTask] = []
        for name, lease_id, version in self._versions():
            for task in cut(version.directory, version.sst_ids, self.range, self.partitions_max):
                tasks.append(replace(task, database=name, lease_id=lease_id))
        return balanced_groups(tasks, self.partitions_max)

    def lease_of(self, part: list[KeyRangeTask]) -> int:
        return part[0].lease_id

    def _versions(self) -> Iterator[tuple[str, int, KvVersion]]:
        """Yield (database, the lease that keeps its version, 0 if a snapshot does, the version); one lease keeps all."""
        lease_id = 0
        with self.access.connect() as client:
            for name in self.request.names(client):
                if not self.snapshot:
                    lent = client.lend_kv(name, self.keep_seconds, lease_id=lease_id)
                    lease_id = lent.lease_id
                    yield name, lease_id, lent.version
                elif (version := self._of_snapshot(client, name)) is not None:
                    yield name, 0, version

    def _of_snapshot(self, client: Client, name: str) -> KvVersion | None:
        wanted: list[int | str] = [self.snapshot, *([int(self.snapshot)] if self.snapshot.isdecimal() else [])]
        for tries_left, snapshot in zip(reversed(range(len(wanted))), wanted):
            try:
                return client.kv_version(name, snapshot)
            except UnknownSnapshot:
                if not tries_left and not self.skip_absent:
                    raise
        return None

    def batches(self, part: list[KeyRangeTask], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        for task in part:
            with opened(task.directory, task.sst_ids) as tables:
                for batch in scan_parts(tables, task.range.low, task.range.high, LSN_MAX):
                    yield _shaped(_without_records(batch), schema, task.database)


def _without_records(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch without the records of streaming queries, which are no rows of the set's users."""
    if not batch.num_rows or batch.column("key")[0].as_py()[: len(QUERY_KEYS)] > QUERY_KEYS:
        return batch  # keys are in order: none of these follows
    return batch.filter(pc.invert(pc.starts_with(batch.column("key"), QUERY_KEYS)))


def kv_request(options: Options) -> DatabaseSelection:
    """Return which key-value sets are requested."""
    return DatabaseSelection(options, "LSM", "key-value set")


def cut(directory: str, sst_ids: Sequence[int], key_range: KeyRange, wanted: int) -> Iterator[KeyRangeTask]:
    """Yield a range as about `wanted` tasks."""
    with opened(directory, sst_ids) as tables:
        total = sum(size for table in tables for _, size in table.marks(key_range.low, key_range.high))
        share = max(PIECE_BYTES, -(-total // wanted))
        for low, high in parts(tables, key_range.low, key_range.high, first_bytes=share, bytes_max=share):
            ids = [t.meta.sst_id for t in tables if t.meta.key_max >= low and (high is None or t.meta.key_min < high)]
            if ids:
                yield KeyRangeTask(directory, tuple(ids), KeyRange(low, high), min(total, share))


@contextmanager
def opened(directory: str, sst_ids: Sequence[int]) -> Iterator[list[SSTable]]:
    """Open tables of a snapshot for the duration of the block."""
    if not os.path.isdir(directory):
        raise InvalidInput(
            "this executor cannot access the snapshot's directory, or the snapshot has expired",
            hint="mount the owner's disk on the executors; `keep_seconds` sets how long an unread version is kept",
            path=directory,
        )
    home, tables, disk = LsmHome(directory), list[SSTable](), disk_at(directory)
    try:
        for sst_id in sst_ids:
            tables.append(SSTable.open(disk, home.sst(sst_id), sst_id))
        yield tables
    finally:
        for table in tables:
            table.close()


def _shaped(batch: pa.RecordBatch, wanted: pa.Schema, database: str) -> pa.RecordBatch:
    columns = []
    for field in wanted:
        if field.name == DATABASE:
            columns.append(pa.repeat(pa.scalar(database, field.type), batch.num_rows))
            continue
        try:
            columns.append(batch.column(field.name).cast(field.type))
        except pa.ArrowInvalid as error:
            raise InvalidInput(
                f"a {field.name} is not UTF-8",
                hint=f"read it as binary with the option {field.name}s",
                cause=str(error),
            ) from error
    return pa.RecordBatch.from_arrays(columns, schema=wanted)


def asked_range(options: Options) -> KeyRange:
    """Return the range given by `prefix`, or by `low` and `high`."""
    prefix, low, high = (options.text(name) for name in ("prefix", "low", "high"))
    if prefix and (low or high):
        raise InvalidInput("a query takes a prefix or a range, not both", hint="omit `prefix`, or `low` and `high`")
    if prefix:
        begin = _key("prefix", prefix)
        return KeyRange(begin, prefix_end(begin))
    return KeyRange(_key("low", low), _key("high", high) if high else None)


def _key(name: str, text: str) -> bytes:
    if not text.startswith("hex:"):
        return text.encode()
    try:
        return bytes.fromhex(text.removeprefix("hex:"))
    except ValueError as error:
        raise InvalidInput(f"the option `{name}` is not hexadecimal", given=text) from error


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass
class TablesMessage(WriterCommitMessage):
    """A task's message to the driver: the tables that its attempt has written."""

    ids: tuple[int, ...]
    rows: int


class KvWriter(ReadableErrors, DataSourceArrowWriter):
    """Writes the rows of a job as tables, on executors."""

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise InvalidInput(
                "a key-value database can only be written with mode('append')",
                hint="drop it first, or load into another one",
            )
        self.access = options.access()
        self.database = options.need("database")
        self.create = options.one_of("create", ("true", "false")) == "true"
        self.load = secrets.randbits(62) | 1
        self.places = _key_and_value_columns(schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TablesMessage:
        """Write a task's rows as tables."""
        with closing(self.access.channel()) as channel:
            table_ids = _TableIds(channel, TakeIds(self.load, self.database, IDS_AT_ONCE, self.create))
            writer: BulkWriter | None = None
            key, value = self.places
            for batch in iterator:
                if writer is None:
                    writer = BulkWriter(OsDisk(), table_ids.place(), table_ids.take)
                writer.add(batch.column(key), batch.column(value))
            return TablesMessage(tuple(writer.finish()), writer.rows) if writer is not None else TablesMessage((), 0)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Make the owner take all tables."""
        ids = [sst_id for message in messages if isinstance(message, TablesMessage) for sst_id in message.ids]
        with self.access.connect() as client:
            client.publish_tables(self.load, self.database, ids, create=self.create)

    def abort(self, _: list[WriterCommitMessage | None]) -> None:
        """Make the owner remove the tables that the tasks wrote."""
        with self.access.connect() as client:
            client.drop_tables(self.load)


class KvTarget(PartTarget):
    """Batches of a streaming query: each is one batch of the set, which the owner writes with the number of the batch."""

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        self.database = options.need("database")
        self.create = options.one_of("create", ("true", "false")) == "true"
        self.overwrite = overwrite
        self.delete = flag_of(options, schema)
        self.columns = tuple(schema.names)
        _key_and_value_columns(StructType([field for field in schema.fields if field.name != self.delete]))

    def take(self, client: Client, load: int, parts: list[str], batch: BatchId | None) -> None:
        assert batch is not None, "jobs write tables"
        request = LoadPairs(
            load,
            self.database,
            tuple(parts),
            self.columns,
            batch.query,
            batch.batch,
            self.delete,
            self.overwrite,
            self.create,
        )
        client.take_parts(LOAD_PAIRS, request)


class _TableIds:
    """Ids of a task, requested as they are needed."""

    def __init__(self, channel: Channel, request: TakeIds) -> None:
        self._channel = channel
        self._request = request
        self._destination: TableDestination | None = None
        self._unused_ids: list[int] = []

    def place(self) -> LoadTarget:
        """Return where and how to write."""
        destination = self._request_ids(IDS_AT_ONCE)
        if not os.path.isdir(os.path.join(destination.directory, "sst")):
            raise InvalidInput(
                "this executor cannot access the database's directory",
                hint="mount the owner's disk on the executors: a load needs a shared disk",
                path=destination.directory,
            )
        options = TableOptions(
            block_bytes=destination.block_bytes,
            compression=destination.compression,
            bloom_bits_per_key=destination.bloom_bits_per_key,
        )
        return LoadTarget(
            directory=destination.directory, lsn=destination.lsn, table_bytes=destination.table_bytes, options=options
        )

    def take(self, count: int) -> Sequence[int]:
        """Return `count` ids."""
        if len(self._unused_ids) < count:
            self._request_ids(max(IDS_AT_ONCE, count - len(self._unused_ids)))
        taken, self._unused_ids = self._unused_ids[:count], self._unused_ids[count:]
        return taken

    def _request_ids(self, count: int) -> TableDestination:
        request = TakeIds(self._request.load, self._request.database, count, self._request.create)
        destination: TableDestination = self._channel.ask(KV_IDS, request)
        if self._destination is not None and destination.lsn != self._destination.lsn:
            raise InvalidInput("the owner has restarted and no longer has this load", hint="run the job again")
        self._destination = destination
        self._unused_ids += destination.ids
        return destination


def _key_and_value_columns(schema: StructType) -> tuple[int, int]:
    """Return the positions of `key` and `value` in a batch."""
    if sorted(schema.names) != sorted(COLUMNS):
        hint = 'df.select(col("…").alias("key"), col("…").alias("value"))'
        raise InvalidInput("a key-value database takes the columns `key` and `value`", hint=hint, given=schema.names)
    for field in schema.fields:
        if not isinstance(field.dataType, BinaryType | StringType):
            raise InvalidInput(
                f"keys and values must be binary or string, not {field.dataType.simpleString()}",
                hint="cast the column, or use to_json(…)",
                column=field.name,
            )
    return schema.names.index("key"), schema.names.index("value")


class KvSource(QuireSource):
    """The data source `quire.kv`."""

    NAME = "quire.kv"
    KNOWN = (
        *("database", "databases", "tags", "snapshot", "absent", "keep_seconds", "prefix", "low", "high"),
        *("keys", "values", "columns", "partitions"),
    )
    READER = KvReader

    def schema(self) -> StructType:
        options = self.parse(self.options)
        kinds = {name: options.one_of(f"{name}s", ("binary", "string")) for name in COLUMNS}
        chosen = options.columns(COLUMNS, of="a key-value database")
        fields = [StructField(name, KINDS[kinds[name]], nullable=False) for name in chosen]
        return StructType([DATABASE_FIELD, *fields] if kv_request(options).is_many else fields)

    def streamWriter(self, schema: StructType, overwrite: bool) -> SinkWriter:  # noqa: N802 - Spark gives the name
        option_names = (*WRITING, "delete", *SINK_OPTIONS)
        options = Options(self.options, source="writing to quire.kv", known=option_names)
        return SinkWriter(options.access(), KvTarget(options, schema, overwrite=overwrite))

    def writer(self, schema: StructType, overwrite: bool) -> KvWriter:
        return KvWriter(Options(self.options, source="writing to quire.kv", known=WRITING), schema, overwrite=overwrite)
