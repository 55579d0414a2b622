"""`quire.changes`: the change feed, a range of sequences at once or as a stream.

    spark.read.format("quire.changes").option("store", path).option("first", 1).load()
    spark.readStream.format("quire.changes").option("store", path).option("cursor", "warehouse").load()

Terms
  change   one committed batch: `sequence`, `committed_at`, `kinds` (names of its operations), `operations` (a JSON array, as
           docs/feed.md describes it), `generations` (component → generation), `trace_id`

Rules
  1. A range is read whole or not at all: who asks for changes that are no longer kept, or are trimmed while they are read,
     hears `CursorLost`. A live cursor keeps them; a range without one is kept by nobody.
  2. The owner sends records as they are on its disk; executors decode them.

Options of a range: `first` (default: the oldest kept), `last` (default: the head), both inclusive; `partitions`; `columns` with
commas: the JSON of operations takes half of the time, and is not made for who does not ask for it. Those of a stream:
`changes_stream.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import (
    ArrayType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from quire.core.errors import CursorLost, InvalidInput, OutOfRange
from quire.manifest.change import CHANGE_LOG
from quire.spark.access import Access
from quire.spark.sources.change_rows import change_batches
from quire.spark.sources.options import Options
from quire.spark.sources.shapes import arrow_schema, default_partitions

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = StructType(
    [
        StructField("sequence", LongType(), nullable=False),
        StructField("committed_at", TimestampType(), nullable=False),
        StructField("kinds", ArrayType(StringType(), containsNull=False), nullable=False),
        StructField("operations", StringType(), nullable=False),
        StructField("generations", MapType(StringType(), LongType(), valueContainsNull=False), nullable=False),
        StructField("trace_id", StringType(), nullable=False),
    ]
)

OPTIONS = ("first", "last", "cursor", "start", "database", "snapshot", "max_changes", "partitions", "columns")

PARTITION_CHANGES_MIN = 1_000
"""Fewer changes are not worth a task of their own."""


@dataclass(frozen=True, slots=True)
class Span:
    """Changes with first ≤ sequence ≤ last."""

    first: int
    last: int


class ChangesPartition(InputPartition):
    """A part of a range."""

    def __init__(self, span: Span) -> None:
        super().__init__(span)


class ChangesSource(DataSource):
    """See the rules above."""

    @classmethod
    def name(cls) -> str:
        return "quire.changes"

    def schema(self) -> StructType:
        return schema_of(_options(self.options))

    def reader(self, schema: StructType) -> ChangesReader:
        return ChangesReader(_options(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark gives the name
        from quire.spark.sources.changes_stream import ChangesStreamReader

        return ChangesStreamReader(_options(self.options), schema)


class ChangesReader(DataSourceReader):
    """A range of sequences."""

    def __init__(self, options: Options, schema: StructType) -> None:
        same_schema(schema, options)
        for name in ("cursor", "start", "max_changes"):
            if options.text(name):
                raise InvalidInput(f"`{name}` is for streams", hint="use first and last, or readStream")
        self.access = options.access()
        self.schema = schema
        self._first = options.number("first", 0)
        self._last = options.number("last", 0)
        self._wanted = options.number("partitions", default_partitions(), least=1)

    def partitions(self) -> Sequence[InputPartition]:
        """Rule 1, as far as it can be known before."""
        with self.access.connect() as client:
            info = client.info()
        oldest, head = info.oldest_change, info.newest_change
        first, last = self._first or oldest, self._last or head
        if first < oldest:
            raise gone(first, oldest)
        if last > head:
            raise OutOfRange("the feed has not come this far", last=last, head_sequence=head)
        return split(Span(first, last), self._wanted)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The changes of a part."""
        return read_span(self.access, partition.value, self.schema)


def split(span: Span, parts: int) -> list[InputPartition]:
    """A range in at most so many parts of about the same size; none if it is empty."""
    count = span.last - span.first + 1
    if count <= 0:
        return []
    step = max(-(-count // parts), PARTITION_CHANGES_MIN)
    firsts = range(span.first, span.last + 1, step)
    return [ChangesPartition(Span(first, min(first + step - 1, span.last))) for first in firsts]


def read_span(access: Access, span: Span | None, schema: StructType) -> Iterator[pa.RecordBatch]:
    """The changes of a range, all of them (rule 1), with the columns of a schema."""
    from quire.service.tickets import TableTicket

    if span is None:  # Spark makes one partition of none
        return
    ticket = TableTicket(CHANGE_LOG.name, (), (span.first,), (span.last + 1,), raw=True)
    wanted, following = arrow_schema(schema), span.first
    channel = access.channel()
    try:
        for batch in channel.stream(ticket):
            for part in change_batches(batch.column("value").to_pylist(), wanted, following):
                following += part.num_rows
                yield part
    finally:
        channel.close()
    if following != span.last + 1:
        raise gone(following, span.last + 1)


def gone(first: int, oldest: int) -> CursorLost:
    """What a reader hears that comes too late (rule 1)."""
    return CursorLost(
        f"the changes from {first:,} on are no longer kept",
        hint="begin again from a snapshot, with a cursor that keeps what you have not read",
        oldest_sequence=oldest,
    )


def schema_of(options: Options) -> StructType:
    """All columns, or those that are asked for."""
    columns = options.names("columns") or SCHEMA.names
    if unknown := [name for name in columns if name not in SCHEMA.names]:
        raise InvalidInput(
            "changes have no such column", hint=f"columns: {', '.join(SCHEMA.names)}", columns=unknown[:5]
        )
    return StructType([SCHEMA[name] for name in columns])


def same_schema(schema: StructType, options: Options) -> None:
    """Refuse any schema but ours."""
    if schema.simpleString() != schema_of(options).simpleString():
        raise InvalidInput("the schema of quire.changes is fixed", hint="leave .schema(…) out")


def _options(given: Any) -> Options:
    return Options(given, source="quire.changes", known=OPTIONS)
