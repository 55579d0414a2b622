"""`quire.sqlite`: the rows of a table of one or of thousands of SQLite databases, as of any snapshot; and rows into a table.

    (spark.read.format("quire.sqlite").option("store", path).option("database", "shop")
        .option("table", "orders").option("snapshot", "monday").load())
    df.write.format("quire.sqlite").mode("append").options(store=path, database="shop", table="orders").save()

Reading: executors read chunks, decode the leaves of tables (`sqlite/leaf_columns.py`), and use SQLite's own code over a
read-only file system (`quire.sqlite.files`) for everything that is not plain. The owner is called when the query is planned,
and again only by the tasks of a query over very many databases (`views.py`).

- A large table is cut into ranges of rowids (`sqlite/trees.py`); a database below `PIECE_BYTES` is one piece.
- With `databases` rows begin with `_database`, the name of their database.
- `where` is a condition for SQLite, checked when the query is planned and again in each database (`sqlite/where_clause.py`).
  Spark applies its own filters: a reader that takes them answers later queries with them
  (docs/decisions/013-no-filter-pushdown.md).

Writing: `sqlite_write.py`.

Options of reading: `table`, `columns`, `types` and `merge_schema` (`sqlite_tables.py`: the columns of all databases instead
of the first one's; NULL where a database does not have them), `where`, `misfits` (`error` or `null`), `absent` (`error` or
`skip`: databases without the table or the snapshot), and those of `views.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.types import StructType

from quire.core.errors import NotFound
from quire.core.limits import MIB
from quire.spark.sources import views
from quire.spark.sources.base import SINK_OPTIONS, Options, QuireSource
from quire.spark.sources.sqlite_tables import DATABASE_FIELD, parsed_types, table_schema
from quire.spark.sources.sqlite_write import WRITING, SqliteTarget
from quire.spark.sources.views import (
    CALLS_AT_ONCE,
    LentRange,
    LocatedVersion,
    PiecesReader,
    VersionReaders,
    VersionRequest,
    ViewPiece,
    balanced_groups,
    opened,
)
from quire.spark.sources.writers import PartWriter, SinkWriter
from quire.sqlite.arrow_rows import ColumnQuery, coalesced, table_batches
from quire.sqlite.column_types import SampledColumn, sampled, union_columns
from quire.sqlite.read_ahead import ReadAhead
from quire.sqlite.tables import SqliteTable, connected, find_table
from quire.sqlite.trees import EVERYTHING, Rowids, by_number, rowid_ranges
from quire.sqlite.where_clause import bracketed, check_condition

if TYPE_CHECKING:
    from quire.service.client import Client
    from quire.spark.access import OwnerAddress
    from quire.sqlite.connect import Connection

SHAPING = ("table", "columns", "types", "merge_schema", "misfits")
"""Options that define the columns and their types."""

COLUMNS_AT_ONCE = 256
"""Databases whose columns are read before those of others are requested."""

PIECE_BYTES = 16 * MIB
"""Size of a database that is not cut, at most."""


@dataclass(frozen=True, slots=True)
class TableQuery:
    """What executors need in addition to their pieces."""

    table: str
    where: str
    null_misfits: bool
    skip_absent: bool
    null_missing: bool
    """Whether a column that a database does not have is NULL there."""


class SqliteReader(PiecesReader[Rowids]):
    """Reads pieces of tables: one per database, or ranges of rowids."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        self.query = TableQuery(
            options.need("table"),
            options.text("where"),
            options.one_of("misfits", ("error", "null")) == "null",
            options.one_of("absent", ("error", "skip")) == "skip",
            options.flag("merge_schema"),
        )

    def plan(self) -> list[list[ViewPiece[Rowids] | LentRange]]:
        with self.access.connect() as client:
            versions, ranges = self.request.planned(client, PIECE_BYTES)
        if self.query.where:
            self._check(chain(versions, chain.from_iterable(lent.versions(self.access) for lent in ranges)))
        total = sum(version.size_bytes for version in versions) + sum(lent.size_bytes for lent in ranges)
        share = max(total // self.partitions_max, 1)
        pieces = (piece for version in versions for piece in self._cut(version, share))
        return balanced_groups(chain(pieces, ranges), self.partitions_max)

    def _check(self, versions: Iterable[LocatedVersion]) -> None:
        """Check the condition in the first database that has the table: before a task runs, and also if a schema was given."""
        with VersionReaders() as readers:
            for version in versions:
                with connected(readers.open(version)) as connection:
                    if (table := self._find(connection, version)) is not None:
                        check_condition(connection, table.name, self.query.where, database=version.database)
                        return

    def _find(self, connection: Connection, version: LocatedVersion) -> SqliteTable | None:
        """Return the table in a database; `None` if it is absent and may be skipped."""
        try:
            return find_table(connection, self.query.table, version.database)
        except NotFound:
            if self.query.skip_absent:
                return None
            raise

    def _cut(self, version: LocatedVersion, share: int) -> Iterator[ViewPiece[Rowids]]:
        """Yield a database as pieces of about a share of the total."""
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

    def batches(self, part: list[ViewPiece[Rowids] | LentRange], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        return coalesced(self._small(part, schema))

    def _small(self, part: list[ViewPiece[Rowids] | LentRange], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        with VersionReaders() as readers:
            for version, pieces in groupby(self.listed(part), attrgetter("version")):
                with connected(pages := ReadAhead(readers.open(version))) as connection:
                    if (table := self._find(connection, version)) is not None:
                        for piece in pieces:
                            yield from self._rows(connection, pages, table, piece, schema)

    def pieces(self, version: LocatedVersion) -> list[ViewPiece[Rowids]]:
        return [ViewPiece(version, EVERYTHING, version.size_bytes)]

    def _rows(
        self, connection: Connection, pages: ReadAhead, table: SqliteTable, piece: ViewPiece[Rowids], wanted: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        """Read a piece: columns from leaves, and from SQLite what is not plain; with a condition, everything from SQLite."""
        if self.query.where:  # databases of one pattern may have different columns
            check_condition(connection, table.name, self.query.where, database=piece.version.database)
        query = ColumnQuery(
            table, wanted, piece.version.database if self.request.is_many else "", self.query.null_missing
        )
        where = bracketed(self.query.where) if self.query.where else ""
        misfits = self.query.null_misfits
        return table_batches(connection, query, piece.part, pages=pages, where=where, null_misfits=misfits)


def described(client: Client, request: VersionRequest, options: Options) -> StructType:
    """Return the schema of a table in the selected databases."""
    return chosen_schema(columns_of(client, request, options), options)


def chosen_schema(columns: list[SampledColumn], options: Options) -> StructType:
    """Return the schema of the columns that the options choose."""
    return table_schema(columns, options.names("columns"), parsed_types(options.text("types")))


def columns_of(client: Client, request: VersionRequest, options: Options) -> list[SampledColumn]:
    """Return the columns of a table in the selected databases: those of the first one that has it, or of all of them."""
    merge = options.flag("merge_schema")
    missing: NotFound | None = None

    def columns_in(database: str) -> list[SampledColumn] | None:
        nonlocal missing
        try:
            return _columns(client, request, database, options)
        except NotFound as error:
            if request.absent == "error":
                raise
            missing = error
            return None

    with ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="quire-columns") as pool:
        names = request.each_name(client)
        # In waves: a pool would consume all names at once, and keep the columns of each until they are needed.
        waves = iter(lambda: list(islice(names, COLUMNS_AT_ONCE)), [])
        every = chain.from_iterable(pool.map(columns_in, wave) for wave in waves) if merge else map(columns_in, names)
        tables = (columns for columns in every if columns is not None)
        columns = union_columns(tables if merge else islice(tables, 1))
    if missing is not None and not columns:
        raise missing
    return columns


def _columns(client: Client, request: VersionRequest, database: str, options: Options) -> list[SampledColumn]:
    """Return the columns of a table, at the requested version or the newest; for the newest no version is lent."""
    name, where = options.need("table"), options.text("where")

    def read(pages: Any) -> list[SampledColumn]:
        with connected(pages) as connection:
            table = find_table(connection, name, database)
            if where:
                check_condition(connection, table.name, where, database=database)
            return sampled(connection, table, pages, options.names("columns"))

    if request.snapshot:
        with opened(request.version(client, database)) as source:
            return read(source)
    with client.reader(database) as lease:
        return read(lease)


class SqliteSource(QuireSource):
    """The data source `quire.sqlite`."""

    NAME = "quire.sqlite"
    KNOWN = (*views.OPTIONS, *SHAPING, "where")
    READER = SqliteReader

    def schema(self) -> StructType:
        options = self.parse(self.options)
        request = VersionRequest(options)
        with options.access().connect() as client:
            schema = described(client, request, options)
        return StructType([DATABASE_FIELD, *schema.fields]) if request.is_many else schema

    def writer(self, schema: StructType, overwrite: bool) -> PartWriter:
        return PartWriter(*self._target(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> SinkWriter:  # noqa: N802 - Spark gives the name
        return SinkWriter(*self._target(schema, overwrite))

    def _target(self, schema: StructType, overwrite: bool) -> tuple[OwnerAddress, SqliteTarget]:
        options = Options(self.options, source="writing to quire.sqlite", known=(*WRITING, *SINK_OPTIONS))
        return options.access(), SqliteTarget(options, schema, overwrite=overwrite)
