"""`quire.sqlite`: the rows of a table of one or of thousands of SQLite databases, as of any snapshot.

    (spark.read.format("quire.sqlite").option("store", path).option("database", "shop")
        .option("table", "orders").option("snapshot", "monday").load())

Terms
  piece   a table of one database, or a range of its rowids: what one task reads in one go

Rules
  1. Executors read chunks with SQLite's own code over a read-only file system (`quire.sqlite.files`): the owner is asked when
     the query is planned, and not again.
  2. Large tables are cut by the upper pages of their trees (`sqlite_ranges.py`); databases below `PIECE_BYTES` are one piece.
  3. With `databases` rows begin with `_database`, the name of theirs.
  4. `where` is a condition for SQLite, checked when the query is planned and again in each database (`sqlite/where_clause.py`).
     Filters of Spark's stay Spark's: a reader that takes them answers later queries with them
     (docs/decisions/013-no-filter-pushdown.md).
  5. Columns of whole numbers and texts are put together by SQLite (`sqlite_columns.py`), others row by row (`sqlite_rows.py`).

Options: `table`, `columns` (with commas), `where`, `misfits` (`error` or `null`), `absent` (`error` or `skip`: databases
without the table), and those of `views.py`. For writing: `sqlite_writer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from quire.core.errors import InvalidInput, NotFound
from quire.core.limits import MIB
from quire.spark.sources import views
from quire.spark.sources.leases import kept
from quire.spark.sources.options import Options
from quire.spark.sources.shapes import arrow_schema, default_partitions
from quire.spark.sources.sqlite_columns import ColumnQuery, windows
from quire.spark.sources.sqlite_ranges import LEAST, MOST, rowid_ranges
from quire.spark.sources.sqlite_rows import batches, gathered
from quire.spark.sources.sqlite_tables import DATABASE, Table, find_table, quoted, table_schema
from quire.spark.sources.views import Asked, Piece, ReadAhead, Version, dealt, opened
from quire.sqlite.where_clause import bracketed, check_condition

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import DataSourceWriter

    from quire.service.client import Client
    from quire.sqlite.connect import Connection

OPTIONS = (*views.OPTIONS, "table", "columns", "where", "misfits", "absent")
WRITING = ("database", "table", "fork_of", "fork_at", "create")

PIECE_BYTES = 16 * MIB
"""Of a database that is not cut."""

Rowids = tuple[int, int]
EVERYTHING: Rowids = (LEAST, MOST)


class SqliteSource(DataSource):
    """See the rules above."""

    @classmethod
    def name(cls) -> str:
        return "quire.sqlite"

    def schema(self) -> StructType:
        options = _options(self.options)
        asked = Asked(options)
        with options.access().connect() as client:
            table = _described(client, asked, options)
        return table_schema(table, options.names("columns"), with_database=asked.is_many)

    def reader(self, schema: StructType) -> SqliteReader:
        return SqliteReader(_options(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from quire.spark.sources.sqlite_writer import SqliteWriter

        options = Options(self.options, source="writing to quire.sqlite", known=WRITING)
        return SqliteWriter(options, schema, overwrite=overwrite)


class SqlitePartition(InputPartition):
    """Pieces that one task reads."""

    def __init__(self, pieces: list[Piece[Rowids]]) -> None:
        super().__init__(pieces)


@dataclass(frozen=True, slots=True)
class Query:
    """What executors need to know beside their pieces."""

    table: str
    where: str
    null_misfits: bool
    skip_absent: bool


class SqliteReader(DataSourceReader):
    """Plans where the query is planned, reads on executors."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self.access = options.access()
        self.asked = Asked(options)
        self.query = Query(
            options.need("table"),
            options.text("where"),
            options.one_of("misfits", ("error", "null")) == "null",
            options.one_of("absent", ("error", "skip")) == "skip",
        )
        self.schema = schema
        self._wanted = options.number("partitions", default_partitions(), least=1)

    def partitions(self) -> Sequence[InputPartition]:
        """Pieces of tables, large ones cut by the upper pages of their trees (rules 2 and 3)."""
        with self.access.connect() as client:
            versions = self.asked.versions(client, self.asked.names(client))
        if self.query.where:
            self._check(versions)
        total = sum(version.size_bytes for version in versions)
        pieces = [piece for version in versions for piece in self._pieces(version, max(total // self._wanted, 1))]
        return [SqlitePartition(heap) for heap in dealt(pieces, self._wanted)]

    def _check(self, versions: list[Version]) -> None:
        """Rule 4, in the first database that has the table: before a task runs, also where a schema was given."""
        for version in versions:
            with opened(version) as source, connected(source) as connection:
                if (table := self._find(connection, version)) is not None:
                    check_condition(connection, table.name, self.query.where, database=version.database)
                    return

    def _find(self, connection: Connection, version: Version) -> Table | None:
        """The table in a database; `None` where it is absent and that is to be passed over."""
        try:
            return find_table(connection, self.query.table, version.database)
        except NotFound:
            if self.query.skip_absent:
                return None
            raise

    def _pieces(self, version: Version, share: int) -> Iterator[Piece[Rowids]]:
        """A database as pieces of about a share of everything."""
        size = version.size_bytes
        if size <= PIECE_BYTES:
            yield Piece(version, EVERYTHING, size)
            return
        with opened(version) as source, connected(source) as connection:
            if (table := self._find(connection, version)) is None:
                return
            ranges = [EVERYTHING]
            if table.rowid and table.root:
                ranges = rowid_ranges(source.read_page, table.root, max(2, -(-2 * size // share)))
        for each in ranges:
            yield Piece(version, each, size // len(ranges))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a task's pieces."""
        wanted = arrow_schema(self.schema)
        pieces: list[Piece[Rowids]] = partition.value or []
        with kept(self.access, pieces[0].version.lease_id if pieces else 0, self.asked.keep_seconds):
            for piece in pieces:
                with opened(piece.version) as source, connected(ReadAhead(source)) as connection:
                    if (table := self._find(connection, piece.version)) is not None:
                        yield from gathered(self._rows(connection, table, piece, wanted))

    def _rows(
        self, connection: Connection, table: Table, piece: Piece[Rowids], wanted: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        """Read a piece: whole numbers and texts as columns put together by SQLite, the rest row by row (rule 5)."""

        def as_rows(rowids: Rowids) -> Iterator[pa.RecordBatch]:
            sql, values = self._sql(table, piece.version.database, rowids)
            return batches(iter(connection.execute(sql, values)), wanted, null_misfits=self.query.null_misfits)

        if self.query.where:  # databases of one pattern may have different columns
            check_condition(connection, table.name, self.query.where, database=piece.version.database)
            return as_rows(piece.part)
        by_column = ColumnQuery(table, wanted, piece.version.database if self.asked.is_many else "")
        if by_column.is_allowed:
            return windows(connection, by_column, piece.part, as_rows)
        return as_rows(piece.part)

    def _sql(self, table: Table, database: str, rowids: Rowids) -> tuple[str, list[Any]]:
        shown, values = _selected(table, self.schema, database, self.asked.is_many)
        conditions = [bracketed(self.query.where)] if self.query.where else []
        if rowids != EVERYTHING:
            conditions.append(f"{table.rowid} BETWEEN ? AND ?")
            values += rowids
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        return f"SELECT {', '.join(shown)} FROM main.{quoted(table.name)}{where}", values


def _selected(table: Table, schema: StructType, database: str, is_many: bool) -> tuple[list[str], list[Any]]:
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
            hint = f"columns: {', '.join(each.name for each in table.columns)}"
            raise InvalidInput("the table has no such column", hint=hint, column=name, database=database)
        shown.append(quoted(column.name))
    return shown, values


@contextmanager
def connected(source: Any) -> Iterator[Connection]:
    """SQLite over a version."""
    from quire.sqlite.files import open_reader

    connection = open_reader(source)
    try:
        yield connection
    finally:
        connection.close()


def _described(client: Client, asked: Asked, options: Options) -> Table:
    """The table whose columns the query has: of the first database, or of the first one that has it."""
    skip, (first, *others) = options.text("absent") == "skip", asked.names(client)
    name, where = options.need("table"), options.text("where")
    try:
        return find_in(client, asked, first, name, where)
    except NotFound as error:
        if not skip or type(error) is not NotFound or not others:  # an unknown snapshot is something else
            raise
    for database in others[:-1]:
        with suppress(NotFound):
            return find_in(client, asked, database, name, where)
    return find_in(client, asked, others[-1], name, where)


def find_in(client: Client, asked: Asked, database: str, name: str, where: str = "") -> Table:
    """A table of a database, at the version that is asked for or as it is now; then nothing is lent for it."""

    def found(connection: Connection) -> Table:
        table = find_table(connection, name, database)
        if where:
            check_condition(connection, table.name, where, database=database)
        return table

    if asked.snapshot:
        with opened(asked.version(client, database)) as source, connected(source) as connection:
            return found(connection)
    with client.reader(database) as lease, connected(lease) as connection:
        return found(connection)


def _options(given: Any) -> Options:
    return Options(given, source="quire.sqlite", known=OPTIONS)
