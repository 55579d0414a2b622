"""`quire.sqlite`: the rows of a table of one or of thousands of SQLite databases, as of any snapshot; and rows into a table.

    (spark.read.format("quire.sqlite").option("store", path).option("database", "shop")
        .option("table", "orders").option("snapshot", "monday").load())
    df.write.format("quire.sqlite").mode("append").options(store=path, database="shop", table="orders").save()

Reading: executors read chunks with SQLite's own code over a read-only file system (`quire.sqlite.files`); the owner is
asked when the query is planned, and not again.

- A large table is cut into ranges of rowids (`sqlite/trees.py`); a database below `PIECE_BYTES` is one piece.
- With `databases` rows begin with `_database`, the name of theirs.
- `where` is a condition for SQLite, checked when the query is planned and again in each database (`sqlite/where_clause.py`).
  Filters of Spark's stay Spark's: a reader that takes them answers later queries with them
  (docs/decisions/013-no-filter-pushdown.md).

Writing: all rows of a job enter the table in one SQLite transaction of the owner's.

- Tasks stream to the owner; nothing they do is seen before the job commits. Then the owner inserts the parts that Spark
  names: those of failed, killed and repeated attempts are not among them. A part is what one attempt of one task has sent, a
  file beside the store.
- The owner remembers a load in the very transaction (table `quire_loads`): a commit whose answer was lost is asked for
  again, and answered. A job that fails is aborted, and its parts go; what a killed driver leaves, the owner removes when it
  next starts.
- Columns are matched by name. Types of a new table follow the DataFrame's; dates, times and decimals are text, booleans 0 and
  1.
- With `fork_of` (and `fork_at`, a snapshot) the database is made as a fork when the job commits, if it does not exist.

Options of reading: `table`, `columns`, `where`, `misfits` (`error` or `null`), `absent` (`error` or `skip`: databases without
the table), and those of `views.py`. Of writing, with save modes `append` and `overwrite` (the table's rows are deleted in the
same transaction): `database`, `table`, `create` (the default is `true`: make a table that is not there), `fork_of`,
`fork_at`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
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

from quire.core.errors import InvalidInput, NotFound, UnknownDatabase
from quire.core.limits import MIB
from quire.service.tickets import LOAD_PUT, PutPart
from quire.spark.sources import views
from quire.spark.sources.base import LoadWriter, Options, QuireSource
from quire.spark.sources.sqlite_tables import table_schema
from quire.spark.sources.views import DatabaseVersion, PiecesReader, VersionRequest, ViewPiece, dealt, opened
from quire.sqlite.arrow_rows import ColumnQuery, gathered, row_batches, windows
from quire.sqlite.read_ahead import ReadAhead
from quire.sqlite.tables import DATABASE, SqliteTable, connected, find_table, quoted
from quire.sqlite.trees import EVERYTHING, Rowids, by_number, rowid_ranges
from quire.sqlite.where_clause import bracketed, check_condition

if TYPE_CHECKING:
    from quire.service.channel import Channel
    from quire.service.client import Client
    from quire.sqlite.connect import Connection

WRITING = ("database", "table", "fork_of", "fork_at", "create")

PIECE_BYTES = 16 * MIB
"""Of a database that is not cut."""

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


@dataclass(frozen=True, slots=True)
class TableQuery:
    """What executors need to know beside their pieces."""

    table: str
    where: str
    null_misfits: bool
    skip_absent: bool


class SqliteReader(PiecesReader):
    """Pieces of tables: one for a database, or ranges of rowids."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        self.query = TableQuery(
            options.need("table"),
            options.text("where"),
            options.one_of("misfits", ("error", "null")) == "null",
            options.one_of("absent", ("error", "skip")) == "skip",
        )

    def plan(self) -> list[list[ViewPiece[Rowids]]]:
        with self.access.connect() as client:
            versions = self.request.versions(client, self.request.names(client))
        if self.query.where:
            self._check(versions)
        share = max(sum(version.size_bytes for version in versions) // self.partitions_max, 1)
        return dealt((piece for version in versions for piece in self._pieces(version, share)), self.partitions_max)

    def _check(self, versions: list[DatabaseVersion]) -> None:
        """Check the condition in the first database that has the table: before a task runs, also where a schema was given."""
        for version in versions:
            with opened(version) as source, connected(source) as connection:
                if (table := self._find(connection, version)) is not None:
                    check_condition(connection, table.name, self.query.where, database=version.database)
                    return

    def _find(self, connection: Connection, version: DatabaseVersion) -> SqliteTable | None:
        """The table in a database; `None` where it is absent and that is to be passed over."""
        try:
            return find_table(connection, self.query.table, version.database)
        except NotFound:
            if self.query.skip_absent:
                return None
            raise

    def _pieces(self, version: DatabaseVersion, share: int) -> Iterator[ViewPiece[Rowids]]:
        """A database as pieces of about a share of everything."""
        size = version.size_bytes
        if size <= PIECE_BYTES:
            yield ViewPiece(version, EVERYTHING, size)
            return
        with opened(version) as source, connected(source) as connection:
            if (table := self._find(connection, version)) is None:
                return
            ranges = [EVERYTHING]
            if table.rowid and table.root:
                ranges = rowid_ranges(by_number(source), table.root, max(2, -(-2 * size // share)))
        for rowids in ranges:
            yield ViewPiece(version, rowids, size // len(ranges))

    def batches(self, part: list[ViewPiece[Rowids]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        for piece in part:
            with opened(piece.version) as source, connected(ReadAhead(source)) as connection:
                if (table := self._find(connection, piece.version)) is not None:
                    yield from gathered(self._rows(connection, table, piece, schema))

    def _rows(
        self, connection: Connection, table: SqliteTable, piece: ViewPiece[Rowids], wanted: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        """Read a piece: whole numbers and texts as columns put together by SQLite, the rest row by row."""

        def as_rows(rowids: Rowids) -> Iterator[pa.RecordBatch]:
            sql, values = self._sql(table, piece.version.database, rowids)
            return row_batches(iter(connection.execute(sql, values)), wanted, null_misfits=self.query.null_misfits)

        if self.query.where:  # databases of one pattern may have different columns
            check_condition(connection, table.name, self.query.where, database=piece.version.database)
            return as_rows(piece.part)
        by_column = ColumnQuery(table, wanted, piece.version.database if self.request.is_many else "")
        if by_column.is_allowed:
            return windows(connection, by_column, piece.part, as_rows)
        return as_rows(piece.part)

    def _sql(self, table: SqliteTable, database: str, rowids: Rowids) -> tuple[str, list[Any]]:
        shown, values = _selected(table, self.schema, database, self.request.is_many)
        conditions = [bracketed(self.query.where)] if self.query.where else []
        if rowids != EVERYTHING:
            conditions.append(f"{table.rowid} BETWEEN ? AND ?")
            values += rowids
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        return f"SELECT {', '.join(shown)} FROM main.{quoted(table.name)}{where}", values


def _selected(table: SqliteTable, schema: StructType, database: str, is_many: bool) -> tuple[list[str], list[Any]]:
    """What is selected, in the order of the schema, and the values in it."""
    shown: list[str] = []
    values: list[Any] = []
    for name in schema.names:
        if is_many and name == DATABASE:
            shown.append("?")
            values.append(database)
            continue
        column = table.column(name)
        if column is None:
            hint = f"columns: {', '.join(column.name for column in table.columns)}"
            raise InvalidInput("the table has no such column", hint=hint, column=name, database=database)
        shown.append(quoted(column.name))
    return shown, values


def _described(client: Client, request: VersionRequest, options: Options) -> SqliteTable:
    """The table whose columns the query has: of the first database, or of the first one that has it."""
    skip, (first, *others) = options.text("absent") == "skip", request.names(client)
    name, where = options.need("table"), options.text("where")
    try:
        return find_in(client, request, first, name, where)
    except NotFound as error:
        if not skip or type(error) is not NotFound or not others:  # an unknown snapshot is something else
            raise
    for database in others[:-1]:
        with suppress(NotFound):
            return find_in(client, request, database, name, where)
    return find_in(client, request, others[-1], name, where)


def find_in(client: Client, request: VersionRequest, database: str, name: str, where: str = "") -> SqliteTable:
    """A table of a database, at the version that is asked for or as it is now; then nothing is lent for it."""

    def described(connection: Connection) -> SqliteTable:
        table = find_table(connection, name, database)
        if where:
            check_condition(connection, table.name, where, database=database)
        return table

    if request.snapshot:
        with opened(request.version(client, database)) as source, connected(source) as connection:
            return described(connection)
    with client.reader(database) as lease, connected(lease) as connection:
        return described(connection)


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass
class PartMessage(WriterCommitMessage):
    """What a task tells the driver: the part that its attempt has sent."""

    part: str
    rows: int


class SqliteWriter(LoadWriter):
    """See above."""

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        super().__init__(options)
        self.table = options.need("table")
        self.fork_of, self.fork_at = options.text("fork_of"), options.text("fork_at")
        self.overwrite = overwrite
        self.columns = [(field.name, _declared(field.name, field.dataType)) for field in schema.fields]

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartMessage:
        """Send a task's rows."""
        context = TaskContext.get()
        assert context is not None, "Spark calls this in a task"
        part = f"{context.partitionId()}-{context.taskAttemptId()}"
        with closing(self.access.channel()) as channel:
            return PartMessage(part, _send(channel, self.load, part, iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Have the owner insert everything."""
        parts = tuple(message.part for message in messages if isinstance(message, PartMessage) and message.rows)
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
        """Remove the parts of a job that failed."""
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
        body = bytes(self._waiting[:size])
        self._channel.ask(LOAD_PUT, PutPart(self._load, self._part, self._sent, body))
        self._sent += size
        del self._waiting[:size]


def _send(channel: Channel, load: int, part: str, batches: Iterator[pa.RecordBatch]) -> int:
    """Send batches as an Arrow stream; how many rows there were."""
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
    declared = next((text for spark_type, text in DECLARED.items() if isinstance(kind, spark_type)), "")
    if not declared:
        raise InvalidInput(
            f"SQLite has no place for {kind.simpleString()}", hint="to_json(…) makes it text", column=name
        )
    return declared


class SqliteSource(QuireSource):
    """See above."""

    NAME = "quire.sqlite"
    KNOWN = (*views.OPTIONS, "table", "columns", "where", "misfits", "absent")
    READER = SqliteReader

    def schema(self) -> StructType:
        options = self.parse(self.options)
        request = VersionRequest(options)
        with options.access().connect() as client:
            table = _described(client, request, options)
        return table_schema(table, options.names("columns"), with_database=request.is_many)

    def writer(self, schema: StructType, overwrite: bool) -> SqliteWriter:
        options = Options(self.options, source="writing to quire.sqlite", known=WRITING)
        return SqliteWriter(options, schema, overwrite=overwrite)
