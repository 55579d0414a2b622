"""`quire.sqlite`: the rows of a table of one or of thousands of SQLite databases, as of any snapshot.

    (spark.read.format("quire.sqlite").option("store", path).option("database", "shop")
        .option("table", "orders").option("snapshot", "monday").load())

Terms
  piece   a table of one database, or a range of its rowids: what one task reads in one go

Rules
  1. Executors read chunks with SQLite's own code over a read-only file system (`quire.sqlite.reader`): the owner is asked when
     the query is planned, and not again.
  2. Large tables are cut by the upper pages of their trees (`sqlite_ranges.py`); databases below `PIECE_BYTES` are one piece.
  3. With `databases` rows begin with `_database`, the name of theirs; filters on it leave databases out before they are opened.
  4. Filters are told to SQLite as far as both mean the same (`predicates.py`); Spark applies all of them again.
  5. Columns of whole numbers and texts are put together by SQLite (`sqlite_columns.py`), others row by row (`sqlite_rows.py`).

Options: `table`, `columns` (with commas), `misfits` (`error` or `null`), `absent` (`error` or `skip`: databases without the
table), and those of `views.py`. For writing: `sqlite_writer.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, EqualTo, Filter, In, InputPartition
from pyspark.sql.types import StructType

from quire.core.errors import InvalidInput, NotFound
from quire.core.limits import MIB
from quire.spark.sources import views
from quire.spark.sources.options import Options
from quire.spark.sources.predicates import conditions
from quire.spark.sources.shapes import arrow_schema, default_partitions
from quire.spark.sources.sqlite_columns import ColumnQuery, windows
from quire.spark.sources.sqlite_ranges import LEAST, MOST, rowid_ranges
from quire.spark.sources.sqlite_rows import batches, gathered
from quire.spark.sources.sqlite_tables import DATABASE, Table, find_table, quoted, table_schema
from quire.spark.sources.views import Asked, Piece, ReadAhead, Version, dealt, opened

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import DataSourceWriter

    from quire.service.client import Client
    from quire.sqlite.connect import Connection

OPTIONS = (*views.OPTIONS, "table", "columns", "misfits", "absent")
WRITING = ("database", "table", "fork_of", "fork_at", "create")

PIECE_BYTES = 16 * MIB
"""Of a database that is not cut."""

Rowids = tuple[int, int]
EVERYTHING: Rowids = (LEAST, MOST)


class SqliteSource(DataSource):
    """See the rules above; this one takes no filters (K5)."""

    @classmethod
    def name(cls) -> str:
        return "quire.sqlite"

    def schema(self) -> StructType:
        options = _options(self.options)
        asked = Asked(options)
        with options.access().connect() as client:
            table = _described(client, asked, options.need("table"), skip=options.text("absent") == "skip")
        return table_schema(table, options.names("columns"), with_database=asked.is_many)

    def reader(self, schema: StructType) -> SqliteReader:
        return SqliteReader(_options(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from quire.spark.sources.sqlite_writer import SqliteWriter

        options = Options(self.options, source="writing to quire.sqlite", known=WRITING)
        return SqliteWriter(options, schema, overwrite=overwrite)


class FilteredSqliteSource(SqliteSource):
    """The same, where filters may be pushed."""

    def reader(self, schema: StructType) -> SqliteReader:
        return FilteredSqliteReader(_options(self.options), schema)


class SqlitePartition(InputPartition):
    """Pieces that one task reads."""

    def __init__(self, pieces: list[Piece[Rowids]]) -> None:
        super().__init__(pieces)


@dataclass(frozen=True, slots=True)
class Query:
    """What executors need to know beside their pieces."""

    table: str
    null_misfits: bool
    skip_absent: bool


class SqliteReader(DataSourceReader):
    """Plans where the query is planned, reads on executors."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self.access = options.access()
        self.asked = Asked(options)
        self.query = Query(
            options.need("table"),
            options.one_of("misfits", ("error", "null")) == "null",
            options.one_of("absent", ("error", "skip")) == "skip",
        )
        self.schema = schema
        self.filters: list[Filter] = []
        self._wanted = options.number("partitions", default_partitions(), least=1)

    def partitions(self) -> Sequence[InputPartition]:
        """Rules 2 and 3."""
        with self.access.connect() as client:
            names = [name for name in self.asked.names(client) if self._passes(name)]
            versions = self.asked.versions(client, names)
        total = sum(version.size_bytes for version in versions)
        pieces = [piece for version in versions for piece in self._pieces(version, max(total // self._wanted, 1))]
        return [SqlitePartition(heap) for heap in dealt(pieces, self._wanted)]

    def _passes(self, database: str) -> bool:
        """Whether rows of this database can pass the filters on `_database`."""
        for each in self.filters:
            if self.asked.is_many and getattr(each, "attribute", ()) == (DATABASE,):
                if isinstance(each, EqualTo) and each.value != database:
                    return False
                if isinstance(each, In) and database not in each.value:
                    return False
        return True

    def _pieces(self, version: Version, share: int) -> Iterator[Piece[Rowids]]:
        """A database as pieces of about a share of everything."""
        size = version.size_bytes
        if size <= PIECE_BYTES:
            yield Piece(version, EVERYTHING, size)
            return
        with opened(version) as source, connected(source) as connection:
            try:
                table = find_table(connection, self.query.table, version.database)
            except NotFound:
                if self.query.skip_absent:
                    return
                raise
            ranges = [EVERYTHING]
            if table.rowid and table.root:
                ranges = rowid_ranges(source.read_page, table.root, max(2, -(-2 * size // share)))
        for each in ranges:
            yield Piece(version, each, size // len(ranges))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a task's pieces."""
        wanted = arrow_schema(self.schema)
        for piece in partition.value or ():
            with opened(piece.version) as source, connected(ReadAhead(source)) as connection:
                try:
                    table = find_table(connection, self.query.table, piece.version.database)
                except NotFound:
                    if self.query.skip_absent:
                        continue
                    raise
                yield from gathered(self._rows(connection, table, piece, wanted))

    def _rows(
        self, connection: Connection, table: Table, piece: Piece[Rowids], wanted: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        """Rule 5."""

        def as_rows(rowids: Rowids) -> Iterator[pa.RecordBatch]:
            sql, values = self._sql(table, piece.version.database, rowids, told)
            return batches(iter(connection.execute(sql, values)), wanted, null_misfits=self.query.null_misfits)

        told = conditions(self.filters, table, self.schema, null_misfits=self.query.null_misfits)
        by_column = ColumnQuery(table, wanted, piece.version.database if self.asked.is_many else "")
        if by_column.is_allowed and not told[0]:
            return windows(connection, by_column, piece.part, as_rows)
        return as_rows(piece.part)

    def _sql(
        self, table: Table, database: str, rowids: Rowids, conditions_told: tuple[list[str], list[Any]]
    ) -> tuple[str, list[Any]]:
        shown, shown_values = _selected(table, self.schema, database, self.asked.is_many)
        told, values = list(conditions_told[0]), list(conditions_told[1])
        if rowids != EVERYTHING:
            told.append(f"{table.rowid} BETWEEN ? AND ?")
            values += rowids
        where = f" WHERE {' AND '.join(told)}" if told else ""
        return f"SELECT {', '.join(shown)} FROM main.{quoted(table.name)}{where}", shown_values + values


class FilteredSqliteReader(SqliteReader):
    """Rule 4."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark gives the name
        """Remember them for SQLite; every filter stays Spark's too."""
        self.filters = list(filters)
        return filters


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
    from quire.sqlite.reader import open_reader

    connection = open_reader(source)
    try:
        yield connection
    finally:
        connection.close()


def _described(client: Client, asked: Asked, name: str, *, skip: bool) -> Table:
    """The table whose columns the query has: of the first database, or of the first one that has it."""
    first, *others = asked.names(client)
    try:
        return find_in(client, asked, first, name)
    except NotFound as error:
        if not skip or type(error) is not NotFound or not others:  # an unknown snapshot is something else
            raise
    for database in others[:-1]:
        with suppress(NotFound):
            return find_in(client, asked, database, name)
    return find_in(client, asked, others[-1], name)


def find_in(client: Client, asked: Asked, database: str, name: str) -> Table:
    """A table of a database, at the version that is asked for or as it is now; then nothing is lent for it."""
    if asked.snapshot:
        with opened(asked.version(client, database)) as source, connected(source) as connection:
            return find_table(connection, name, database)
    with client.reader(database) as lease, connected(lease) as connection:
        return find_table(connection, name, database)


def _options(given: Any) -> Options:
    return Options(given, source="quire.sqlite", known=OPTIONS)
