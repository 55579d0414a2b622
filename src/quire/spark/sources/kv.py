"""`quire.kv`: the keys and values of a key-value database, as of now or of any snapshot; and loads into one.

    (spark.read.format("quire.kv").option("store", path).option("database", "cart")
        .option("snapshot", "monday").option("prefix", "user/").load())
    df.select("key", "value").write.format("quire.kv").mode("append").options(store=path, database="cart").save()

Executors must see the directory of the store.

Reading: a DataFrame reads one version, the snapshot that is asked for, or the newest one when its first query is planned,
which is kept until `keep_seconds` after the last read. A task reads a range of keys, merged from all tables that have keys of
it; ranges are cut at the tables' blocks, so that each has about the same number of bytes, and no key is in two of them.

Writing: rows become tables, on executors, and enter the database in one step.

- Columns `key` and `value`, bytes or text; a null value deletes its key. Rows may come in any order: a task sorts what it
  gets. Range-partitioned rows (`kv_load.bulk_load`) give tables that need no compaction.
- All of a load has one lsn, from when its first task began: older than what is written after that, newer than what was there.
  A key that comes twice is refused: neither would be the newer one.
- Tasks write tables beside those of the database, under ids that its manifest gave to this task alone. Spark names the tables
  of the attempts that count, the owner takes exactly those with one event, and removes the files of all others.
- The database remembers the load: a commit whose answer was lost is asked for again, and answered.

Streaming queries: each batch is sent to the owner (`writers.py`) and written as one batch of the set, together with its number,
under a key of its own (`service/loads.py`); a batch that Spark repeats is not written again. Rows are applied in the order in
which they come; with the option `delete`, a boolean column, those in which it is true delete their keys. Complete mode replaces
the set. Executors need not see the store's directory.

Options of reading: `database`, or `databases` and `tags` (`views.py`; rows then begin with `_database`); `snapshot`, `absent`
(`error` or `skip`: databases without the snapshot), `keep_seconds`, `prefix`, or `low` and `high` (UTF-8, or `hex:…` for
bytes), `keys` and `values` (`binary` or `string`), `columns`, `partitions`. Of writing, with save mode `append`: `database`,
`create` (the default is `true`: make the database if there is none).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from quire.core.errors import InvalidInput, UnknownSnapshot
from quire.core.limits import MIB
from quire.durable.files import OsDisk
from quire.durable.names import LsmHome
from quire.lsm.bulk import BulkWriter, LoadTarget
from quire.lsm.compaction import TableOptions
from quire.lsm.merge import parts, scan_parts
from quire.lsm.sst_reader import SSTable
from quire.lsm.view import LSN_MAX, prefix_end
from quire.service.tickets import KV_IDS, LOAD_PAIRS, LoadPairs, Shelf, TakeIds
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
"""Less than this is not cut: a task costs more."""

IDS_AT_ONCE = 4
"""Asked for together: a call costs the owner a sync, an id costs nothing."""

KINDS = {"binary": BinaryType(), "string": StringType()}


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Keys in [low, high); `None` for no end."""

    low: bytes = b""
    high: bytes | None = None

    @property
    def is_empty(self) -> bool:
        return self.high is not None and self.low >= self.high


@dataclass(frozen=True, slots=True)
class KeyRangeTask:
    """What a task reads."""

    directory: str
    sst_ids: tuple[int, ...]
    range: KeyRange
    size_bytes: int = 0
    """About how much that is."""
    database: str = ""
    lease_id: int = 0


class KvReader(SourceReader):
    """Ranges of keys of one version of each database."""

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
        """(database, what keeps its version if no snapshot does, the version); one lease keeps all of them."""
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
                    yield _shaped(batch, schema, task.database)


def kv_request(options: Options) -> DatabaseSelection:
    """Which key-value sets are asked for."""
    return DatabaseSelection(options, "LSM", "key-value set")


def cut(directory: str, sst_ids: Sequence[int], asked: KeyRange, wanted: int) -> Iterator[KeyRangeTask]:
    """A range as about so many tasks."""
    with opened(directory, sst_ids) as tables:
        total = sum(size for table in tables for _, size in table.marks(asked.low, asked.high))
        share = max(PIECE_BYTES, -(-total // wanted))
        for low, high in parts(tables, asked.low, asked.high, first_bytes=share, bytes_max=share):
            ids = [t.meta.sst_id for t in tables if t.meta.key_max >= low and (high is None or t.meta.key_min < high)]
            if ids:
                yield KeyRangeTask(directory, tuple(ids), KeyRange(low, high), min(total, share))


@contextmanager
def opened(directory: str, sst_ids: Sequence[int]) -> Iterator[list[SSTable]]:
    """Tables of a snapshot, for as long as the block lasts."""
    if not os.path.isdir(directory):
        raise InvalidInput(
            "the snapshot's directory is not seen from here, or the snapshot has gone",
            hint="executors share a disk with the owner; `keep_seconds` says how long a version stays that nobody reads",
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
                f"a {field.name} is not UTF-8", hint=f"read it as binary: option {field.name}s", cause=str(error)
            ) from error
    return pa.RecordBatch.from_arrays(columns, schema=wanted)


def asked_range(options: Options) -> KeyRange:
    """What `prefix`, or `low` and `high`, say."""
    prefix, low, high = (options.text(name) for name in ("prefix", "low", "high"))
    if prefix and (low or high):
        raise InvalidInput("a query has a prefix or a range", hint="leave `prefix`, or `low` and `high`, out")
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
    """What a task tells the driver: the tables that its attempt has written."""

    ids: tuple[int, ...]
    rows: int


class KvWriter(ReadableErrors, DataSourceArrowWriter):
    """See above."""

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise InvalidInput(
                "a key-value database is written with mode('append')", hint="drop it first, or load into another one"
            )
        self.access = options.access()
        self.database = options.need("database")
        self.create = options.one_of("create", ("true", "false")) == "true"
        self.load = secrets.randbits(62) | 1
        self.places = _places(schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TablesMessage:
        """Write a task's rows as tables."""
        with closing(self.access.channel()) as channel:
            shelves = _Shelves(channel, TakeIds(self.load, self.database, IDS_AT_ONCE, self.create))
            writer: BulkWriter | None = None
            key, value = self.places
            for batch in iterator:
                if writer is None:
                    writer = BulkWriter(OsDisk(), shelves.place(), shelves.take)
                writer.add(batch.column(key), batch.column(value))
            return TablesMessage(tuple(writer.finish()), writer.rows) if writer is not None else TablesMessage((), 0)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Have the owner take everything."""
        ids = [sst_id for message in messages if isinstance(message, TablesMessage) for sst_id in message.ids]
        with self.access.connect() as client:
            client.publish_tables(self.load, self.database, ids, create=self.create)

    def abort(self, _: list[WriterCommitMessage | None]) -> None:
        """Have the owner remove the tables that the tasks wrote."""
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
        _places(StructType([field for field in schema.fields if field.name != self.delete]))

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


class KvSource(QuireSource):
    """See above."""

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
        known = (*WRITING, "delete", *SINK_OPTIONS)
        options = Options(self.options, source="writing to quire.kv", known=known)
        return SinkWriter(options.access(), KvTarget(options, schema, overwrite=overwrite))

    def writer(self, schema: StructType, overwrite: bool) -> KvWriter:
        return KvWriter(Options(self.options, source="writing to quire.kv", known=WRITING), schema, overwrite=overwrite)
