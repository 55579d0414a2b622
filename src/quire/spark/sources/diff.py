"""`quire.diff`: what changed between two snapshots of a database, as pages or as rows of a table.

    options = {"store": path, "database": "shop", "from": "monday", "to": "tuesday"}
    spark.read.format("quire.diff").options(**options).load()                             # pages
    spark.read.format("quire.diff").options(**options).option("table", "orders").load()   # rows

Terms
  from, to   the earlier and the later version; without `to` it is what is newest
  page row   `page`, `before`, `after`: bodies, NULL where a version has no such page
  table row  `_change` (`insert`, `delete`, `update_before`, `update_after`), `_rowid`, then the table's columns; an update is
             two rows

Rules
  1. Pages that both versions read from the same place are the same, and are not read. Others are compared byte by byte: a page
     that was written again as it was is no difference.
  2. Rows are matched by rowid, in tables WITHOUT ROWID by primary key (`_rowid` is NULL then, and one task does it all, in
     memory). Two rows are the same if SQLite stores the same values.
  3. A column that only one version has counts as NULL in the other. The columns are those of the later version.

Options: `database`, `from`, `to`, `table`, `columns`, `misfits`, `keep_seconds`, `upload`, `partitions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

from quire.core.limits import MIB
from quire.spark.sources.leases import kept
from quire.spark.sources.options import Options
from quire.spark.sources.row_diff import ROW_FIELDS, changed_rows
from quire.spark.sources.shapes import arrow_schema, default_partitions
from quire.spark.sources.sqlite import EVERYTHING, Rowids, connected, find_in
from quire.spark.sources.sqlite_ranges import rowid_ranges
from quire.spark.sources.sqlite_rows import batches, gathered
from quire.spark.sources.sqlite_tables import Table, find_table, table_schema
from quire.spark.sources.view_diff import changed_pages
from quire.spark.sources.views import Asked, ReadAhead, Version, opened

if TYPE_CHECKING:
    import pyarrow as pa

OPTIONS = ("database", "from", "to", "table", "columns", "misfits", "keep_seconds", "upload", "partitions")

PAGES = StructType(
    [
        StructField("page", LongType(), nullable=False),
        StructField("before", BinaryType()),
        StructField("after", BinaryType()),
    ]
)

BATCH_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class Part:
    """A run of pages, or a range of rowids, of both versions."""

    before: Version
    after: Version
    run: tuple[int, int]


class DiffPartition(InputPartition):
    """What one task compares."""

    def __init__(self, part: Part) -> None:
        super().__init__(part)


class DiffSource(DataSource):
    """See the rules above."""

    @classmethod
    def name(cls) -> str:
        return "quire.diff"

    def schema(self) -> StructType:
        options = _options(self.options)
        table = options.text("table")
        if not table:
            return PAGES
        asked = Asked(options, snapshot=options.text("to"))
        with options.access().connect() as client:
            found = find_in(client, asked, asked.one, table)
        shape = table_schema(found, options.names("columns"), with_database=False)
        return StructType([*ROW_FIELDS, *shape.fields])

    def reader(self, schema: StructType) -> DiffReader:
        return DiffReader(_options(self.options), schema)


class DiffReader(DataSourceReader):
    """Plans where the query is planned, compares on executors."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self.access = options.access()
        self.asked = Asked(options)
        self.earlier, self.later = options.need("from"), options.text("to")
        self.table = options.text("table")
        self.null_misfits = options.one_of("misfits", ("error", "null")) == "null"
        self.schema = schema
        self._wanted = options.number("partitions", default_partitions(), least=1)

    def partitions(self) -> Sequence[InputPartition]:
        """Runs of pages as long as chunks, or ranges of rowids of the later version."""
        with self.access.connect() as client:
            (name,) = self.asked.names(client)
            before = self.asked.version(client, name, self.earlier)
            after = self.asked.version(client, name, self.later)
        runs = self._ranges(after) if self.table else _runs(before, after)
        return [DiffPartition(Part(before, after, run)) for run in runs]

    def _ranges(self, version: Version) -> list[Rowids]:
        with opened(version) as source, connected(source) as connection:
            table: Table = find_table(connection, self.table, version.database)
            if not table.rowid or not table.root:
                return [EVERYTHING]
            return rowid_ranges(source.read_page, table.root, self._wanted)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """What differs in a part."""
        part: Part | None = partition.value
        if part is None:  # Spark makes one partition of none
            return
        wanted = arrow_schema(self.schema)
        keep = kept(self.access, part.after.lease_id, self.asked.keep_seconds)
        with keep, opened(part.before) as before, opened(part.after) as after:
            if not self.table:
                yield from _page_batches(changed_pages(before, after, *part.run), wanted)
                return
            with connected(ReadAhead(before)) as first, connected(ReadAhead(after)) as second:
                rows = changed_rows(first, second, self.table, part.run, self.schema, part.after.database)
                yield from gathered(batches(rows, wanted, null_misfits=self.null_misfits))


def _runs(before: Version, after: Version) -> list[tuple[int, int]]:
    size = max(before.view.size_pages, after.view.size_pages)
    step = after.view.pages_per_chunk
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def _page_batches(
    rows: Iterator[tuple[int, bytes | None, bytes | None]], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    taken: list[tuple[int, bytes | None, bytes | None]] = []
    size = 0

    def batch() -> pa.RecordBatch:
        columns = [pa.array(values, field.type) for values, field in zip(zip(*taken), schema)]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    for row in rows:
        taken.append(row)
        size += len(row[1] or b"") + len(row[2] or b"")
        if size >= BATCH_BYTES:
            yield batch()
            taken, size = [], 0
    if taken:
        yield batch()


def _options(given: Any) -> Options:
    return Options(given, source="quire.diff", known=OPTIONS)
