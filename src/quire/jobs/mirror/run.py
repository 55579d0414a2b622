"""The task that writes a mirror's files: rows of SQLite tables, and of files that are rewritten, become Parquet files (L3).

Terms
  source   rows of one database: read from a version of it, or copied from a file that already contains them
  unit     sources that become one file, in the order of their databases' names; a large unit becomes several files
  column   a column of the target: a name and one of `TYPES`

Each task assigns a database's columns to the target's by the same rule (`assigned`), without coordination: the target's column
of that name, if its type takes the values (`fits`); otherwise the column `NAME_TYPE`, or `NAME_TYPE_2` and so on if the
database's table has a column of that name itself. Either is new if the target does not have it. Two columns of a table never
share one of the target. If databases want a new column with different types, the driver detects it and runs the tasks again
with the widest type.

The declared type decides, so that a column's type does not change with its values; without a declared type, a sample of values
decides (`sqlite/column_types.py`). A column with neither a type nor a value is omitted.

A file's name has a random part: a task that runs twice writes two files, and the driver commits the files in the result that it
receives. The other files are garbage in the target, as are those of a killed run.

Safe to run on an executor. Raises `InvalidInput` for a value that does not have its column's type.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, count
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from quire.core.errors import InvalidInput, NotFound
from quire.core.limits import MIB
from quire.durable.failpoints import hit
from quire.jobs.runner import Tools
from quire.objects.api import ObjectStore
from quire.objects.open import open_store
from quire.pages.view import SnapshotView, ViewReader
from quire.sqlite.arrow_rows import ColumnQuery, coalesced, table_batches
from quire.sqlite.column_types import SampledColumn, sampled
from quire.sqlite.read_ahead import ReadAhead
from quire.sqlite.row_reads import naming
from quire.sqlite.tables import DATABASE, SqliteTable, connected, declared_type, find_table
from quire.sqlite.where_clause import quoted

if TYPE_CHECKING:
    from quire.sqlite.connect import Connection

TYPES: dict[str, pa.DataType] = {
    "bigint": pa.int64(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
}
NAMES = {kind: name for name, kind in TYPES.items()}

GROUP_BYTES = 8 * MIB
"""Bytes of Arrow data in one row group."""
FILE_BYTES_MAX = 64 * MIB
"""Approximate size at which a file ends; files are built in memory."""
KEPT_FILES = 4
"""Files of the target that a task keeps in memory to copy from."""

MISFIT_HINT = "change the value, or give the mirror the option misfits=null"

Column = tuple[str, str]
"""(name, one of `TYPES`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The rows of one database."""

    db_id: int
    database: str
    view: SnapshotView | None = None
    """The version to read; `None` if the rows are copied from `files`."""
    files: tuple[str, ...] = ()
    """Files of the target to copy the rows from."""
    weight_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorTask:
    """Files to write."""

    location: str
    """URL of the target's directory."""
    prefix: str
    """Prefix of the names of its files."""
    table: str
    columns: tuple[Column, ...]
    """The current columns of the target."""
    units: tuple[tuple[Source, ...], ...]
    null_misfits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file that no commit names yet."""

    path: str
    """Path below the target's directory."""
    size_bytes: int
    rows: int
    databases: tuple[tuple[int, int], ...]
    """(database, number of rows) for the databases in it."""
    stats: str
    """Statistics for Delta: numbers of rows and NULLs, least and greatest values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The result of a task."""

    files: tuple[WrittenFile, ...]
    columns: tuple[Column, ...]
    """The target's columns, and the new ones that the files need."""
    wanted: tuple[Column, ...]
    """Columns of databases, with their own types, whose names the target did not have."""
    new_types: tuple[tuple[str, str, str], ...] = ()
    """(database, column, column of the target) where a type required a further column of the target."""


def write_files(task: MirrorTask, tools: Tools) -> Written:
    """Write the files of a task, durable on return."""
    with closing(open_store(task.location)) as store:
        writer = _Writer(task, tools, store)
        for unit in task.units:
            for source in unit:
                writer.add(source)
            writer.end_file()
        return Written(
            files=tuple(writer.files),
            columns=tuple(writer.columns.values()),
            wanted=tuple(writer.wanted),
            new_types=tuple(writer.new_types),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFile:
    """A file of the target that another program wrote."""

    location: str
    path: str


def databases_in(task: ForeignFile, _: Tools) -> list[str]:
    """Return the databases whose rows a file contains."""
    with closing(open_store(task.location)) as store:
        table = pq.read_table(pa.BufferReader(store.get(task.path)), columns=[DATABASE])
    names: list[str] = table[DATABASE].unique().to_pylist()
    return names


def fits(kind: str, column: str) -> bool:
    """Return whether a column of type `column` takes all values of type `kind`. `string` takes numbers as their exact text;
    `double` takes integers that it represents exactly, which is checked for each value.

    >>> fits("bigint", "double"), fits("double", "bigint"), fits("bigint", "string")
    (True, False, True)
    """
    return kind == column or (kind, column) in {
        ("bigint", "double"),
        ("bigint", "string"),
        ("double", "string"),
        ("boolean", "bigint"),
    }


def assigned(own: Sequence[Column], columns: Mapping[str, Column]) -> list[Column]:
    """Return the target's column for each column of a table, each a different one; `columns` are the target's, by lower-case
    name.

    >>> columns = {"price": ("price", "bigint")}
    >>> assigned([("Price", "bigint"), ("note", "string")], columns)
    [('price', 'bigint'), ('note', 'string')]
    >>> assigned([("Price", "double")], columns)
    [('price_double', 'double')]
    >>> assigned([("price", "double"), ("price_double", "double")], columns)
    [('price_double_2', 'double'), ('price_double', 'double')]
    """
    targets: dict[str, Column] = {}
    taken = set[str]()
    for name, kind in own:
        target = columns.get(name.lower(), (name, kind))
        # For SQLite `É` and `é` are two columns, for readers of the target they may be one.
        if fits(kind, target[1]) and name.lower() not in taken:
            targets[name] = target
            taken.add(name.lower())
    # The name of a column is not given to another one of its table, even if its own values do not fit there.
    taken |= {name.lower() for name, _ in own}
    for name, kind in own:
        if name not in targets:
            known_name, _ = columns.get(name.lower(), (name, kind))
            targets[name] = target = _further_column(known_name, kind, columns, taken)
            taken.add(target[0].lower())
    return [targets[name] for name, _ in own]


def _further_column(name: str, kind: str, columns: Mapping[str, Column], taken: Set[str]) -> Column:
    """Return the first of `NAME_TYPE`, `NAME_TYPE_2` … that is not taken and accepts the type."""
    names = chain([f"{name}_{kind}"], (f"{name}_{kind}_{number}" for number in count(2)))
    candidates = (columns.get(candidate.lower(), (candidate, kind)) for candidate in names)
    return next(column for column in candidates if column[0].lower() not in taken and fits(kind, column[1]))


def arrow_schema(columns: Iterable[Column]) -> pa.Schema:
    """Return the schema of a file: the database's name, and the columns."""
    return pa.schema([(DATABASE, pa.string()), *((name, TYPES[kind]) for name, kind in columns)])


def column_kinds(connection: Connection, table: SqliteTable, reader: ViewReader) -> list[Column]:
    """Return the columns of a table with their types, except those that have neither a type nor a value."""
    if all(declared_type(column.declared) is not None for column in table.columns):
        return [(column.name, NAMES[declared_type(column.declared)]) for column in table.columns]
    kinds: list[Column] = []
    for column in sampled(connection, table, reader):
        declared = declared_type(column.declared)
        if declared is None and not column.seen:
            name = quoted(column.name)
            sql = f"SELECT typeof({name}) FROM main.{quoted(table.name)} WHERE {name} IS NOT NULL LIMIT 1"
            if (seen := connection.execute(sql).fetchone()) is None:
                continue
            column = SampledColumn(column.name, "", frozenset(seen))
        kinds.append((column.name, NAMES[declared or column.type]))
    return kinds


class _Writer:
    """Writes the files of one task."""

    def __init__(self, task: MirrorTask, tools: Tools, store: ObjectStore) -> None:
        self._task, self._tools, self._store = task, tools, store
        self.columns: dict[str, Column] = {name.lower(): (name, kind) for name, kind in task.columns}
        self.files: list[WrittenFile] = []
        self.new_types: list[tuple[str, str, str]] = []
        self.wanted: dict[Column, None] = {}
        self._known = frozenset(self.columns)
        self._schema = arrow_schema(self.columns.values())
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._sink: pa.BufferOutputStream | None = None
        self._parquet: pq.ParquetWriter | None = None
        self._rows: dict[int, int] = {}
        self._read: OrderedDict[str, pa.Table] = OrderedDict()

    def add(self, source: Source) -> None:
        """Append the rows of a source."""
        batches = self._copied(source) if source.view is None else self._from_sqlite(source, source.view)
        for batch in batches:
            if batch.num_rows:
                # Before the write, which may end the file and record these counts for it.
                self._rows[source.db_id] = self._rows.get(source.db_id, 0) + batch.num_rows
                self._write(batch)

    # ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _from_sqlite(self, source: Source, view: SnapshotView) -> Iterator[pa.RecordBatch]:
        if not view.size_pages:
            return  # nothing was ever written
        with view.open(self._tools.sources) as reader, connected(pages := ReadAhead(reader)) as connection:
            try:
                table = find_table(connection, self._task.table, source.database)
            except NotFound:
                return
            places = self._places(connection, table, reader, source.database)
            wanted = pa.schema(
                [(DATABASE, pa.string()), *((own, _read_as(kind, column[1])) for own, kind, column in places)]
            )
            query = ColumnQuery(table, wanted, source.database)
            misfits = self._task.null_misfits
            rows = table_batches(connection, query, pages=pages, in_order=True, null_misfits=misfits)
            names = {column[0]: own for own, _, column in places}
            try:
                with naming(table.name, source.database):
                    for batch in coalesced(rows):
                        yield self._conform(batch, names)
            except InvalidInput as error:
                hint = MISFIT_HINT if "column" in error.where else error.hint
                raise InvalidInput(error.what, hint=hint, **error.where) from error

    def _places(
        self, connection: Connection, table: SqliteTable, reader: ViewReader, database: str
    ) -> list[tuple[str, str, Column]]:
        """Return (column of the table, its type, column of the target), and add new columns to the target's."""
        own = column_kinds(connection, table, reader)
        if any(name.lower() == DATABASE for name, _ in own):
            hint = "rename the column: the mirror uses it for the database's name"
            raise InvalidInput(f"the table has a column {DATABASE}", hint=hint, database=database, table=table.name)
        targets = assigned(own, self.columns)
        for (name, kind), target in zip(own, targets, strict=True):
            if name.lower() not in self._known:
                self.wanted[name, kind] = None
            if target[0].lower() not in self.columns:
                self._end_group_of_columns(target)
                if target[0] != name:
                    self.new_types.append((database, name, target[0]))
        return [(name, kind, target) for (name, kind), target in zip(own, targets, strict=True)]

    def _end_group_of_columns(self, column: Column) -> None:
        """End the file, because a file has one schema, and add a column to the schema of the next one."""
        self.end_file()
        self.columns[column[0].lower()] = column
        self._schema = arrow_schema(self.columns.values())

    def _copied(self, source: Source) -> Iterator[pa.RecordBatch]:
        for path in source.files:
            if path not in self._read:
                data = pa.py_buffer(self._store.get(path))
                self._read[path] = pq.read_table(pa.BufferReader(data), partitioning=None)
                if len(self._read) > KEPT_FILES:
                    self._read.popitem(last=False)
            table = self._read[path]
            rows = table.filter(pc.equal(table[DATABASE], source.database))
            names = {name: name for name in table.schema.names}
            for batch in rows.to_batches():
                yield self._conform(batch, names)

    def _conform(self, batch: pa.RecordBatch, names: dict[str, str]) -> pa.RecordBatch:
        """Return a batch with the target's columns; `names` maps a target's column to the batch's."""
        arrays = []
        for field in self._schema:
            own = DATABASE if field.name == DATABASE else names.get(field.name)
            if own is None:
                arrays.append(pa.nulls(batch.num_rows, field.type))
                continue
            array = batch.column(batch.schema.get_field_index(own))
            if array.type != field.type:
                try:
                    array = array.cast(field.type)
                except pa.ArrowInvalid as error:
                    raise InvalidInput(f"a value does not fit the target's column: {error}", column=own) from error
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    # ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _write(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes >= GROUP_BYTES:
            self._end_group()
            assert self._sink is not None, "the group has begun a file"
            if self._sink.tell() >= FILE_BYTES_MAX:
                self.end_file()

    def _end_group(self) -> None:
        if not self._waiting:
            return
        if self._parquet is None:
            self._sink = pa.BufferOutputStream()
            self._parquet = pq.ParquetWriter(self._sink, self._schema, compression="zstd")
        self._parquet.write_table(pa.Table.from_batches(self._waiting, self._schema), row_group_size=1 << 30)
        self._waiting, self._waiting_bytes = [], 0

    def end_file(self) -> None:
        """Put the file, if it has rows."""
        self._end_group()
        if self._parquet is None or self._sink is None:
            return
        self._parquet.close()
        data = self._sink.getvalue()
        path = f"{self._task.prefix}-{len(self.files):04d}-{secrets.token_hex(8)}.parquet"
        self._store.put(path, data.to_pybytes(), create_only=True)
        hit("jobs.mirror.file_written")
        self.files.append(
            WrittenFile(
                path=path,
                size_bytes=data.size,
                rows=sum(self._rows.values()),
                databases=tuple(self._rows.items()),
                stats=_stats(pq.read_metadata(pa.BufferReader(data))),
            )
        )
        self._rows, self._sink, self._parquet = {}, None, None


def _read_as(kind: str, column: str) -> pa.DataType:
    """Return the type in which a column is read: the target's, except that integers stay integers, so that a value that would
    be rounded is noticed."""
    return TYPES["bigint"] if (kind, column) == ("bigint", "double") else TYPES[column]


def _stats(metadata: Any) -> str:
    """Return statistics in the form of Delta's log. Only database names and integers have minimum and maximum: texts may be
    long, and NaN has no order."""
    nulls: dict[str, int] = {}
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    for index, name in enumerate(metadata.schema.to_arrow_schema().names):
        chunks = [group.column(index).statistics for group in groups]
        if any(chunk is None or not chunk.has_null_count for chunk in chunks):
            continue
        nulls[name] = sum(chunk.null_count for chunk in chunks)
        bounded = [chunk for chunk in chunks if chunk.has_min_max]
        is_ordered = name == DATABASE or metadata.schema.column(index).physical_type == "INT64"
        if is_ordered and bounded and len(bounded) == sum(chunk.num_values > 0 for chunk in chunks):
            least[name] = min(chunk.min for chunk in bounded)
            greatest[name] = max(chunk.max for chunk in bounded)
    facts = {"numRecords": metadata.num_rows, "minValues": least, "maxValues": greatest, "nullCount": nulls}
    return msgspec.json.encode(facts).decode()
