"""`quire.table`: the rows of any table of the manifest.

    spark.read.format("quire.table").option("store", path).option("table", "chunk_catalog").load()

Terms
  table      one of docs/formats/manifest.md; its columns are the key's fields, then the record's
  window     the keys that are read: all, or those that begin with `key`

Rules
  1. A table is read in batches, each of its own moment (M4): rows committed meanwhile are seen if their keys lie ahead.
  2. The window is cut at keys of the table's own; a table of few rows is one partition.
  3. `key` has values of the first fields of the key, with commas (`"7"`, `"7,3"`): only rows with these are read. Of a field of
     text or bytes the beginning is enough.

Options: `table`; `key`; `columns` (with commas: the API prunes none by itself, K5), `partitions` at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
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

OPTIONS = ("table", "key", "columns", "partitions")
_WIDTHS = {"u8": 8, "u16": 16, "u32": 32, "u64": 64}

assert CHANGE_LOG.name in t.TABLES, "importing change.py declares the change log"


class TableSource(DataSource):
    """See the rules above."""

    @classmethod
    def name(cls) -> str:
        return "quire.table"

    def schema(self) -> StructType:
        options = _options(self.options)
        return spark_schema(_shape(_table(options), options.names("columns")))

    def reader(self, schema: StructType) -> TableReader:
        return TableReader(_options(self.options), schema)


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
        table = _table(options)
        self.table = table.name
        self.schema = schema
        self.window = Window(prefix_of(table, options.text("key")))
        self._wanted = options.number("partitions", default_partitions(), least=1)

    def partitions(self) -> Sequence[InputPartition]:
        """Windows cut at keys of the table; one partition for few rows (rule 2)."""
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


def prefix_of(table: t.Table[Any], text: str) -> tuple[Any, ...]:
    """The first fields of a key, as the option `key` has them (rule 3).

    >>> prefix_of(t.TABLES["wal_catalog"], "7, 3"), prefix_of(t.TABLES["db_names"], "shop, old")
    ((7, 3), ('shop, old',))
    """
    if not text:
        return ()
    fields = table.key.fields
    parts = text.split(",", len(fields) - 1 if fields[-1][1] not in _WIDTHS else -1)
    if len(parts) > len(fields):
        raise _no_key(table, text)
    return tuple(_part(table, kind, part, text) for (_, kind), part in zip(fields, parts))


def _part(table: t.Table[Any], kind: str, part: str, text: str) -> Any:
    if kind == "text" and part:
        return part
    number = part.strip()
    if kind in _WIDTHS and number.isdecimal() and int(number) < 1 << _WIDTHS[kind]:
        return int(number)
    try:
        if kind == "raw" and part:
            return bytes.fromhex(part)
    except ValueError:
        pass  # said below
    raise _no_key(table, text)


def _no_key(table: t.Table[Any], text: str) -> InvalidInput:
    fields = ", ".join(f"{name} ({kind})" for name, kind in table.key.fields)
    return InvalidInput(
        "the option `key` does not fit the table's key",
        hint=f"fields: {fields}; bytes are hexadecimal",
        table=table.name,
        key=text,
    )


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
