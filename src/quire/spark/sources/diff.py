"""`quire.diff`: what changed between two snapshots of a database, as pages or as rows of a table.

    options = {"store": path, "database": "shop", "from": "monday", "to": "tuesday"}
    spark.read.format("quire.diff").options(**options).load()                             # pages
    spark.read.format("quire.diff").options(**options).option("table", "orders").load()   # rows

A page row is `page`, `before`, `after`: bodies, NULL where a version has no such page. A table row is `_change` (`insert`,
`delete`, `update_before`, `update_after`), `_rowid`, then the table's columns; an update is two rows.

- Pages that both versions read from the same place are the same, and are not read: places are immutable (M6). Others are
  compared byte by byte: a page that was written again as it was is no difference.
- Rows are looked for where pages of the table differ (`sqlite/row_changes.py`), and matched by rowid; in tables WITHOUT ROWID
  by primary key (`_rowid` is NULL then, and one task does it all, in memory). Two rows are the same if SQLite stores the same
  values: 1 and 1.0 differ.
- A column that only one version has counts as NULL in the other. The columns are those of the later version.

Options: `database`, `from`, `to` (the newest version without it), `table`, `columns`, `misfits`, `keep_seconds`, `upload`,
`partitions`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from quire.core.errors import InvalidInput, NotFound
from quire.core.limits import MIB
from quire.pages.framemap import FrameMap, Regions
from quire.pages.snapshot import SCAN_PAGES
from quire.pages.view import LINK_DTYPE, ViewReader
from quire.spark.sources.base import Options, QuireSource, SourceReader
from quire.spark.sources.sqlite import find_in
from quire.spark.sources.sqlite_tables import table_schema
from quire.spark.sources.views import DatabaseVersion, VersionRequest, opened
from quire.sqlite.arrow_rows import gathered, row_batches
from quire.sqlite.read_ahead import ReadAhead
from quire.sqlite.row_changes import Version, changed_rowids
from quire.sqlite.tables import SqliteTable, connected, find_table, quoted
from quire.sqlite.trees import EVERYTHING, Rowids, by_number, rowid_ranges

if TYPE_CHECKING:
    from quire.sqlite.connect import Connection

PAGES = StructType(
    [
        StructField("page", LongType(), nullable=False),
        StructField("before", BinaryType()),
        StructField("after", BinaryType()),
    ]
)
ROW_FIELDS = [StructField("_change", StringType(), nullable=False), StructField("_rowid", LongType())]

BATCH_BYTES = 4 * MIB

ChangedPage = tuple[int, bytes | None, bytes | None]
Row = tuple[Any, ...]
KeyedRow = tuple[Any, Row]

_END: KeyedRow = (None, ())


@dataclass(frozen=True, slots=True)
class DiffPart:
    """Runs of pages, or ranges of rowids, of both versions."""

    before: DatabaseVersion
    after: DatabaseVersion
    runs: list[tuple[int, int]]


class DiffReader(SourceReader):
    """Runs of pages as long as chunks, or ranges of the rowids that may differ."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        self.request = VersionRequest(options)
        self.keep_seconds = self.request.keep_seconds
        self.earlier, self.later = options.need("from"), options.text("to")
        self.table = options.text("table")
        self.null_misfits = options.one_of("misfits", ("error", "null")) == "null"

    def plan(self) -> list[DiffPart]:
        with self.access.connect() as client:
            (name,) = self.request.names(client)
            before = self.request.version(client, name, self.earlier)
            after = self.request.version(client, name, self.later)
        parts = self._ranges(before, after) if self.table else [[run] for run in _runs(before, after)]
        return [DiffPart(before, after, runs) for runs in parts]

    def lease_of(self, part: DiffPart) -> int:
        return part.after.lease_id

    def _ranges(self, before: DatabaseVersion, after: DatabaseVersion) -> list[list[Rowids]]:
        """What each task compares."""
        with opened(before) as old, opened(after) as new, connected(old) as first, connected(new) as second:
            table = find_table(second, self.table, after.database)
            ranges = [EVERYTHING]
            if table.root and (former := _find(first, self.table, before.database)) is not None and former.root:
                has_rowids = bool(table.rowid and former.rowid)
                roots, changed = (former.root, table.root), _differing(old, new)
                versions = Version(old, first), Version(new, second)
                ranges = changed_rowids(*versions, table.name, roots, changed, has_rowids=has_rowids)
            if ranges == [EVERYTHING] and table.rowid and table.root:
                ranges = rowid_ranges(by_number(new), table.root, self.partitions_max)
        return [ranges[start :: self.partitions_max] for start in range(min(self.partitions_max, len(ranges)))]

    def batches(self, part: DiffPart, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        with opened(part.before) as before, opened(part.after) as after:
            if not self.table:
                yield from _page_batches(changed_pages(before, after, *part.runs[0]), schema)
                return
            with connected(ReadAhead(before)) as first, connected(ReadAhead(after)) as second:
                rows = changed_rows(first, second, self.table, part.runs, self.schema, part.after.database)
                yield from gathered(row_batches(rows, schema, null_misfits=self.null_misfits))


class DiffSource(QuireSource):
    """See above."""

    NAME = "quire.diff"
    KNOWN = ("database", "from", "to", "table", "columns", "misfits", "keep_seconds", "upload", "partitions")
    READER = DiffReader

    def schema(self) -> StructType:
        options = self.parse(self.options)
        name = options.text("table")
        if not name:
            return PAGES
        request = VersionRequest(options, snapshot=options.text("to"))
        with options.access().connect() as client:
            table = find_in(client, request, request.one, name)
        return StructType([*ROW_FIELDS, *table_schema(table, options.names("columns"), with_database=False).fields])


# ── pages ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _runs(before: DatabaseVersion, after: DatabaseVersion) -> list[tuple[int, int]]:
    size = max(before.view.size_pages, after.view.size_pages)
    step = after.view.pages_per_chunk
    return [(start, min(start + step, size)) for start in range(0, size, step)]


class PagePlaces:
    """Where a view reads the pages in [start, stop) from: a frame of a pinned WAL segment, or the chain of a slot."""

    def __init__(self, reader: ViewReader, start: int, stop: int) -> None:
        view = reader.view
        self._view = view
        self._map = FrameMap.of(Regions(reader.sources), view.pins, view.lsn)
        links = np.frombuffer(view.links, LINK_DTYPE)
        slots = np.ascontiguousarray(links["slot"])
        self._chains: dict[int, tuple[int, Hashable]] = {}
        for slot in range(start // view.pages_per_chunk, (stop - 1) // view.pages_per_chunk + 1):
            chain = links[np.searchsorted(slots, slot, "left") : np.searchsorted(slots, slot, "right")]
            if not len(chain):
                continue
            objects = tuple((*row.tolist()[:6], *view.spaces[row["space"]], view.names[row["name"]]) for row in chain)
            self._chains[slot] = int(chain["covered_lsn"][-1]), objects

    def of(self, page: int) -> Hashable:
        """The place of a page; `None` for a page that never was written."""
        covered, objects = self._chains.get(page // self._view.pages_per_chunk, (0, None))
        frame = self._map.find(page)
        return frame if frame is not None and frame[0] > covered else objects


def changed_pages(before: ViewReader, after: ViewReader, start: int, stop: int) -> Iterator[ChangedPage]:
    """(page, before, after) of the pages in [start, stop) that differ; `None` where a version has no such page."""
    places = PagePlaces(before, start, stop), PagePlaces(after, start, stop)
    sizes = before.size_pages, after.size_pages
    same_slots = before.view.pages_per_chunk == after.view.pages_per_chunk
    for first in range(start, stop, SCAN_PAGES):
        doubtful = [
            page
            for page in range(first, min(first + SCAN_PAGES, stop))
            if page >= min(sizes) or not same_slots or places[0].of(page) != places[1].of(page)
        ]
        images = [
            reader.read_pages([page for page in doubtful if page < size], cold=True)
            for reader, size in zip((before, after), sizes)
        ]
        for page in doubtful:
            pair = images[0].get(page), images[1].get(page)
            if pair[0] != pair[1]:
                yield page, *pair


def _differing(before: ViewReader, after: ViewReader) -> set[int]:
    """The pages that differ, by SQLite's numbers."""
    size = max(before.size_pages, after.size_pages)
    return {page + 1 for page, _, _ in changed_pages(before, after, 0, size)}


def _page_batches(rows: Iterator[ChangedPage], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    taken: list[ChangedPage] = []
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


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def changed_rows(
    first: Connection, second: Connection, name: str, ranges: list[Rowids], schema: StructType, database: str
) -> Iterator[Row]:
    """(change, rowid, values …) of the rows that differ."""
    columns = schema.names[len(ROW_FIELDS) :]
    later, earlier = find_table(second, name, database), _find(first, name, database)
    if later.rowid and (earlier is None or earlier.rowid):
        for rowids in ranges:
            before = iter(()) if earlier is None else _by_rowid(first, earlier, columns, rowids)
            yield from merged(before, _by_rowid(second, later, columns, rowids))
        return
    if not later.key or (earlier is not None and earlier.key != later.key):
        raise InvalidInput(
            "rows without rowid are compared by a primary key, and the two have none in common", table=name
        )
    before_rows = {} if earlier is None else dict(_by_key(first, earlier, columns))
    yield from looked_up(before_rows, _by_key(second, later, columns))


def _find(connection: Connection, name: str, database: str) -> SqliteTable | None:
    """The table, if this version has it."""
    try:
        return find_table(connection, name, database)
    except NotFound:
        return None


def merged(before: Iterator[KeyedRow], after: Iterator[KeyedRow]) -> Iterator[Row]:
    """Differences of a table with rowids: both versions are walked side by side, and nothing is kept.

    >>> list(merged(iter([(1, ("a",)), (2, ("b",))]), iter([(2, ("c",)), (3, ("d",))])))
    [('delete', 1, 'a'), ('update_before', 2, 'b'), ('update_after', 2, 'c'), ('insert', 3, 'd')]
    """
    old, new = next(before, _END), next(after, _END)
    while old is not _END or new is not _END:
        if new is _END or (old is not _END and old[0] < new[0]):
            yield "delete", old[0], *old[1]
            old = next(before, _END)
        elif old is _END or new[0] < old[0]:
            yield "insert", new[0], *new[1]
            new = next(after, _END)
        else:
            if not _same(old[1], new[1]):
                yield "update_before", old[0], *old[1]
                yield "update_after", new[0], *new[1]
            old, new = next(before, _END), next(after, _END)


def looked_up(before: dict[Any, Row], after: Iterator[KeyedRow]) -> Iterator[Row]:
    """Differences of a table without rowids, matched by primary key through a dictionary."""
    for key, row in after:
        old = before.pop(key, None)
        if old is None:
            yield "insert", None, *row
        elif not _same(old, row):
            yield "update_before", None, *old
            yield "update_after", None, *row
    for old in before.values():
        yield "delete", None, *old


def _same(one: Row, other: Row) -> bool:
    """Whether type and value of every column are the same: 1 and 1.0 are not."""
    return one == other and all(type(a) is type(b) for a, b in zip(one, other))


def _by_rowid(
    connection: Connection, table: SqliteTable, columns: list[str], rowids: tuple[int, int]
) -> Iterator[KeyedRow]:
    sql = (
        f"SELECT {table.rowid}, {_selected(table, columns)} FROM main.{quoted(table.name)} "
        f"WHERE {table.rowid} BETWEEN ? AND ? ORDER BY {table.rowid}"
    )
    for rowid, *row in connection.execute(sql, rowids):
        yield rowid, tuple(row)


def _by_key(connection: Connection, table: SqliteTable, columns: list[str]) -> Iterator[KeyedRow]:
    key = ", ".join(quoted(name) for name in table.key)
    for row in connection.execute(f"SELECT {key}, {_selected(table, columns)} FROM main.{quoted(table.name)}"):
        yield tuple((type(value), value) for value in row[: len(table.key)]), row[len(table.key) :]


def _selected(table: SqliteTable, columns: list[str]) -> str:
    """The columns, NULL for those that this version does not have."""
    stored = [table.column(name) for name in columns]
    return ", ".join(quoted(column.name) if column is not None else "NULL" for column in stored)
