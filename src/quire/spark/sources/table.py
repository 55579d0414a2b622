"""`quire.table`: the rows of any table of the manifest.

    spark.read.format("quire.table").option("store", path).option("table", "chunk_catalog").load()

A table is one of docs/formats/manifest.md; its columns are the fields of the key, then those of the record. It is read in
batches, each as of its own moment (M4): rows committed in the meantime are seen if their keys lie ahead.

Options: `table`; `key`: values of the first fields of the key, separated by commas (`"7"`, `"7,3"`), for text or bytes a
prefix is enough; `columns` (Spark does not prune columns, K5); `partitions` at most: cuts are keys of the table, and few rows
are one partition.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from quire.core.errors import InvalidInput
from quire.manifest import tables as t
from quire.manifest.arrow import schema as arrow_schema_of
from quire.manifest.change import CHANGE_LOG
from quire.service.tickets import TableTicket
from quire.spark.sources.base import Options, QuireSource, SourceReader, fitted, spark_schema

_WIDTHS = {"u8": 8, "u16": 16, "u32": 32, "u64": 64}

assert CHANGE_LOG.name in t.TABLES, "importing change.py declares the change log"


@dataclass(frozen=True, slots=True)
class KeyWindow:
    """The keys to read: those that begin with `prefix`, in [start, stop)."""

    prefix: tuple[Any, ...] = ()
    start: tuple[Any, ...] | None = None
    stop: tuple[Any, ...] | None = None


class ManifestTableReader(SourceReader):
    """Reads windows of a table's keys, cut at keys of the table."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        table = _table(options)
        self.table = table.name
        self.prefix = prefix_of(table, options.text("key"))

    def plan(self) -> list[KeyWindow]:
        with self.access.connect() as client:
            cuts = client.table_cuts(self.table, self.partitions_max, prefix=self.prefix)
        return [KeyWindow(self.prefix, *pair) for pair in pairwise([None, *cuts, None])]

    def batches(self, part: KeyWindow, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        ticket = TableTicket(self.table, part.prefix, part.start, part.stop, tuple(schema.names))
        with closing(self.access.channel()) as channel:
            for batch in channel.stream(ticket):
                yield fitted(batch, schema)


class TableSource(QuireSource):
    """The data source `quire.table`."""

    NAME = "quire.table"
    KNOWN = ("table", "key", "columns", "partitions")
    READER = ManifestTableReader

    def schema(self) -> StructType:
        options = self.parse(self.options)
        schema = arrow_schema_of(_table(options))
        return spark_schema(pa.schema([schema.field(name) for name in options.columns(schema.names, of="the table")]))


def prefix_of(table: t.Table[Any], text: str) -> tuple[Any, ...]:
    """Parse the option `key`: the first fields of a key.

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
        pass  # the error below names the fields
    raise _no_key(table, text)


def _no_key(table: t.Table[Any], text: str) -> InvalidInput:
    fields = ", ".join(f"{name} ({kind})" for name, kind in table.key.fields)
    return InvalidInput(
        "the option `key` does not fit the table's key",
        hint=f"fields: {fields}; bytes are hexadecimal",
        table=table.name,
        key=text,
    )


def _table(options: Options) -> t.Table[Any]:
    name = options.need("table")
    if name not in t.TABLES:
        raise InvalidInput("the manifest has no such table", hint=f"tables: {', '.join(t.TABLES)}", table=name)
    return t.TABLES[name]
