"""`quire.table`: the rows of any table of the manifest.

    spark.read.format("quire.table").option("store", path).option("table", "chunk_catalog").load()

Terms
  table      one of docs/formats/manifest.md; its columns are the key's fields, then the record's
  window     the keys that are read: all, or those that the pushed filters leave

Rules
  1. A table is read in batches, each of its own moment (M4): rows committed meanwhile are seen if their keys lie ahead.
  2. The window is cut at keys of the table's own; a table of few rows is one partition.
  3. Filters on the first fields of the key narrow the window; Spark applies all of them again, so that what is read may be
     more than was asked for, never less. Other filters are Spark's alone.

Options: `table`; `columns` (with commas: the API prunes none by itself, K5), `partitions` at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from quire.core.errors import InvalidInput
from quire.manifest import tables as t
from quire.manifest.arrow import schema as arrow_schema_of
from quire.manifest.change import CHANGE_LOG
from quire.spark.access import Access
from quire.spark.sources.options import Options
from quire.spark.sources.shapes import arrow_schema, default_partitions, fitted, spark_schema

if TYPE_CHECKING:
    import pyarrow as pa

OPTIONS = ("table", "columns", "partitions")
_WIDTHS = {"u8": 8, "u16": 16, "u32": 32, "u64": 64}

assert CHANGE_LOG.name in t.TABLES, "importing change.py declares the change log"


class TableSource(DataSource):
    """See the rules above; this one takes no filters (K5)."""

    @classmethod
    def name(cls) -> str:
        return "quire.table"

    def schema(self) -> StructType:
        options = _options(self.options)
        return spark_schema(_shape(_table(options), options.names("columns")))

    def reader(self, schema: StructType) -> TableReader:
        return TableReader(_options(self.options), schema)


class FilteredTableSource(TableSource):
    """The same, where filters may be pushed."""

    def reader(self, schema: StructType) -> TableReader:
        return FilteredTableReader(_options(self.options), schema)


@dataclass(frozen=True, slots=True)
class Window:
    """The keys to read: those that begin with `prefix`, in [start, stop)."""

    prefix: tuple[Any, ...] = ()
    start: tuple[Any, ...] | None = None
    stop: tuple[Any, ...] | None = None


class TablePartition(InputPartition):
    """A part of a window."""

    def __init__(self, window: Window) -> None:
        super().__init__(window)


class TableReader(DataSourceReader):
    """Plans where the query is planned, reads on executors."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self.access: Access = options.access()
        self.table = _table(options).name
        self.schema = schema
        self.window = Window()
        self._wanted = options.number("partitions", default_partitions(), least=1)

    def partitions(self) -> Sequence[InputPartition]:
        """Rule 2."""
        window = self.window
        with self.access.connect() as client:
            cuts = client.table_cuts(
                self.table, self._wanted, prefix=window.prefix, start=window.start, stop=window.stop
            )
        bounds = [window.start, *cuts, window.stop]
        return [TablePartition(Window(window.prefix, *pair)) for pair in pairwise(bounds)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a part."""
        from quire.service.tickets import TableTicket

        window: Window = partition.value
        wanted = arrow_schema(self.schema)
        ticket = TableTicket(self.table, window.prefix, window.start, window.stop, tuple(wanted.names))
        channel = self.access.channel()
        try:
            for batch in channel.stream(ticket):
                yield fitted(batch, wanted)
        finally:
            channel.close()


class FilteredTableReader(TableReader):
    """Rule 3."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark gives the name
        """Narrow the window; every filter stays Spark's too."""
        self.window = window_of(t.TABLES[self.table], filters)
        return filters


def window_of(table: t.Table[Any], filters: Iterable[Filter]) -> Window:
    """The keys that can pass these filters.

    >>> window_of(t.TABLES["wal_catalog"], [EqualTo(("db_id",), 7), GreaterThan(("segment_id",), 3)])
    Window(prefix=(7,), start=(7, 4), stop=None)
    """
    columns = arrow_schema_of(table).names[: len(table.key.fields)]
    of_column: dict[str, list[Filter]] = {name: [] for name in columns}
    for each in filters:
        attribute: tuple[str, ...] = getattr(each, "attribute", ())
        if len(attribute) == 1 and attribute[0] in of_column:
            of_column[attribute[0]].append(each)
    prefix: list[Any] = []
    for column, (_, kind) in zip(columns, table.key.fields):
        equal = [each.value for each in of_column[column] if isinstance(each, EqualTo) and _fits(each.value, kind)]
        if not equal:
            break
        prefix.append(equal[0])
    if len(prefix) == len(columns):
        return Window(tuple(prefix))
    rest = table.key.fields[len(prefix) :]
    if any(kind not in _WIDTHS for _, kind in rest):
        return Window(tuple(prefix))
    low, high = _bounds(of_column[columns[len(prefix)]], rest[0][1])
    zeros = (0,) * (len(rest) - 1)
    return Window(
        tuple(prefix),
        None if low is None else (*prefix, low, *zeros),
        None if high is None else (*prefix, high, *zeros),
    )


def _bounds(filters: Iterable[Filter], kind: str) -> tuple[int | None, int | None]:
    """[low, high) of a number, `None` where nothing is said."""
    low: int | None = None
    high: int | None = None
    for each in filters:
        value: Any = getattr(each, "value", None)
        if not _fits(value, kind):
            continue
        if isinstance(each, GreaterThan | GreaterThanOrEqual):
            least = value + isinstance(each, GreaterThan)
            low = least if low is None else max(low, least)
        elif isinstance(each, LessThan | LessThanOrEqual):
            most = value + isinstance(each, LessThanOrEqual)
            high = most if high is None else min(high, most)
    return (low if _fits(low, kind) else None), (high if _fits(high, kind) else None)


def _fits(value: Any, kind: str) -> bool:
    """Whether a filter's value can be a part of a key."""
    if kind in _WIDTHS:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << _WIDTHS[kind]
    return isinstance(value, str) and bool(value) if kind == "text" else isinstance(value, bytes) and bool(value)


def _options(given: Any) -> Options:
    return Options(given, source="quire.table", known=OPTIONS)


def _table(options: Options) -> t.Table[Any]:
    name = options.need("table")
    if name not in t.TABLES:
        raise InvalidInput("the manifest has no such table", hint=f"tables: {', '.join(t.TABLES)}", table=name)
    return t.TABLES[name]


def _shape(table: t.Table[Any], columns: list[str]) -> pa.Schema:
    import pyarrow as pa

    whole = arrow_schema_of(table)
    if unknown := [name for name in columns if name not in whole.names]:
        raise InvalidInput(
            "the table has no such column", hint=f"columns: {', '.join(whole.names)}", columns=unknown[:5]
        )
    return pa.schema([whole.field(name) for name in columns]) if columns else whole
