"""`quire.stream`: the records of a stream, from whatever tier they are in; a range at once, or as they arrive.

    spark.read.format("quire.stream").option("store", path).option("stream", "clicks").load()
    spark.readStream.format("quire.stream").option("store", path).option("stream", "clicks").option("consumer", "etl").load()

A record is `id`, `timestamp` (when it became durable), `payload`.

- A range is read completely or not at all: records that are no longer retained, or are retired during the read, raise
  `CursorLost`. Without `end` it ends with what is durable when the query is planned (`stream_records.py`).
- A streaming query's offset is {"store": id, "stream": id, "record": n}: everything below n has been read. It begins at the
  position of its consumer; a consumer that does not exist is registered at `start`. Nothing from a consumer's position on is
  retired while it holds. A query over a pattern has a consumer of the same name in every stream (`stream_pattern.py`).

Writing, by a job or a streaming query: one column `payload`. The owner appends the records of a job, or of a batch, in one
append that is durable as a whole, and appends a batch once (`writers.py`, `Stream.append_batch`). Options: `stream`, `create`
(the default is `true`: create the stream if it does not exist).

Options of reading: `stream`, or `databases` and `tags`, as for other sources (records then begin with `_database`, the name of
the stream, and `start` and `end` take no record ids); `columns`; `partitions` at most; `upload` of records that are in no
object yet: `auto` (by executors that need it), `true` (before the query runs), `false`. For a range: `start` (default: the
first record kept), `end`, exclusive, `since` (a time, or milliseconds since 1970: records that became durable before it are
left out, whole segments of them without being read). For a streaming query: `consumer`; `start` for a new consumer: `oldest`
(the default), `latest`, or the id of the first record wanted; `max_records` in a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import chain
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import BinaryType, StringType, StructType

from quire.core.clock import SystemClock
from quire.core.errors import InvalidInput, OutOfRange
from quire.core.time_parsing import parse_moment
from quire.core.timeline import Gaps, skip_gap
from quire.service.tickets import (
    LOAD_RECORDS,
    STREAM_ACK,
    STREAM_POSITION,
    STREAM_REGISTER,
    STREAM_WAIT,
    AckRecords,
    LoadRecords,
    OfConsumer,
    RegisterConsumer,
    WaitForRecord,
)
from quire.spark.sources.base import (
    SINK_OPTIONS,
    WAIT_SECONDS,
    HeldQueryReader,
    Offset,
    Options,
    QueryReader,
    QuireSource,
    SourceReader,
)
from quire.spark.sources.stream_pattern import StreamsQueryReader
from quire.spark.sources.stream_records import RecordRange, Records, is_many, refuse_range, select_streams, shape
from quire.spark.sources.views import balanced_groups
from quire.spark.sources.writers import BatchId, PartTarget, PartWriter, SinkWriter
from quire.stream.gaps import begin_at, of_positions
from quire.stream.remote_read import SharedStream

if TYPE_CHECKING:
    from quire.service.channel import Channel
    from quire.service.client import Client
    from quire.spark.access import OwnerAddress

WRITING = ("stream", "create")


def moment_ms(text: str) -> int:
    """Parse a time as `core/time_parsing.py` does, or milliseconds since 1970; return milliseconds, 0 if the text is empty.

    >>> moment_ms("2024-02-29T12:00:00+01:00") == moment_ms("2024-02-29 11:00") == moment_ms("1709204400000")
    True
    """
    if text.isdecimal():
        return int(text)
    return parse_moment(text, "since", now_ms=SystemClock().now_ms()) if text else 0


class RecordsReader(SourceReader):
    """Reads a range of records."""

    def __init__(self, options: Options, schema: StructType) -> None:
        options.refuse(("consumer", "max_records"), "streaming queries", "use start and end, or readStream")
        super().__init__(options, schema)
        self.records = Records(options, schema)
        self.records.since_ms = moment_ms(options.text("since"))
        self._start = options.number("start", 0)
        self._end = options.number("end", 0)
        self._streams = select_streams(options) if is_many(options) else None
        if self._streams is not None:
            options.refuse(("start", "end"), "one stream", "of several, `since` leaves out older records")

    def plan(self) -> list[list[RecordRange]]:
        with closing(self.access.channel()) as channel:
            if self._streams is None:  # one range per task, so that rows are in the order of records
                return [[part] for part in self._parts(channel, self.records.stream)]
            with self.access.connect() as client:
                names = self._streams.names(client)
            return balanced_groups([part for name in names for part in self._parts(channel, name)], self.partitions_max)

    def _parts(self, channel: Channel, name: str) -> list[RecordRange]:
        """Return the parts of a stream."""
        records = self.records.of(name)
        # A range without segments: only where the stream begins and ends.
        shared = records.share(channel, self._start or None, 1)
        start, stop = self._start or shared.first_record, self._end or shared.end_record
        begin_at(shared.gaps, stop)  # raises if the end lies in lost records
        if stop > shared.end_record:
            raise OutOfRange("the stream has not reached this record yet", end=stop, next=shared.end_record)
        return records.parts(channel, start, stop) if start < stop else []

    def batches(self, part: list[RecordRange], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        if self._streams is not None:
            return self.records.named_batches(part, schema)
        return chain.from_iterable(self.records.batches(records, schema) for records in part)


class RecordsQueryReader(QueryReader):
    """A streaming query of one stream, whose progress is the position of a consumer."""

    HOLDER = "consumer"
    POSITION = "record"

    def __init__(self, options: Options, schema: StructType) -> None:
        refuse_range(options)
        super().__init__(options, schema, options.number("max_records", 0))
        self.records = Records(options, schema)
        self._start: int | str = options.text("start", "oldest").lower()
        if self._start not in ("oldest", "latest"):
            self._start = options.number("start", 0, least=1)
        self._identity: dict[str, Any] = {}

    def connect(self) -> Channel:
        return self.access.channel()

    def identity(self) -> dict[str, Any]:
        if not self._identity:
            self.end()
        return self._identity

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark gives these names
        """Return the position of the consumer."""
        request = RegisterConsumer(self.records.stream, self.holder, self._start)
        return self.offset(self.owner.ask(STREAM_REGISTER, request))

    def end(self) -> int:
        """Return the position after the last durable record."""
        return self._read_extent().end_record

    def _read_extent(self) -> SharedStream:
        """Return where the stream begins and ends."""
        share = self.records.share(self.owner, None, 1)
        self._identity = {"store": share.store_id, "stream": share.stream_id}
        return share

    def end_beyond(self, position: int) -> int:
        end = int(self.owner.ask(STREAM_WAIT, WaitForRecord(self.records.stream, position, WAIT_SECONDS)))
        if end <= position:
            # An idle query commits nothing: without a heartbeat its consumer would lose its hold.
            self._acknowledge(0)
        return end

    def gaps(self) -> Gaps:
        return of_positions(self._read_extent().gaps)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        gaps = self._read_extent().gaps
        # Both ends: a batch that was planned before a takeover may end with records that are lost.
        first, stop = begin_at(gaps, self.position(start)), begin_at(gaps, self.position(end))
        if first >= stop:
            return []
        with self.holder_required():
            request = OfConsumer(self.records.stream, self.holder)
            # Before the parts are located: what the consumer holds is kept until then.
            position = int(self.owner.ask(STREAM_POSITION, request))
        self.need_unacknowledged(first, skip_gap(gaps, position))
        return [InputPartition(part) for part in self.records.parts(self.owner, first, stop)]

    def batches(self, part: RecordRange, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        return self.records.batches(part, schema)

    def commit(self, end: Offset) -> None:
        """Acknowledge: Spark has processed everything below `end`."""
        self._acknowledge(self.position(end))

    def _acknowledge(self, position: int) -> None:
        with self.holder_required():
            self.owner.ask(STREAM_ACK, AckRecords(self.records.stream, self.holder, position))


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class StreamTarget(PartTarget):
    """Records that are appended in one step: those of a job, or of a query's batch."""

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise InvalidInput("a stream can only be appended to", hint="use append mode, or a table of quire.sqlite")
        if schema.names != ["payload"] or not isinstance(schema[0].dataType, BinaryType | StringType):
            hint = 'df.selectExpr("to_json(struct(*)) AS payload")'
            raise InvalidInput(
                "a stream needs one column `payload`, binary or string", hint=hint, given=schema.simpleString()
            )
        self.stream = options.need("stream")
        self.create = options.one_of("create", ("true", "false")) == "true"

    def take(self, client: Client, load: int, parts: list[str], batch: BatchId | None) -> None:
        query, number = (batch.query, batch.batch) if batch is not None else ("", 0)
        request = LoadRecords(load, self.stream, tuple(parts), query, number, self.create)
        client.take_parts(LOAD_RECORDS, request)


class StreamSource(QuireSource):
    """The data source `quire.stream`."""

    NAME = "quire.stream"
    KNOWN = (
        *("stream", "databases", "tags", "columns", "upload", "partitions"),
        *("start", "end", "since", "consumer", "max_records"),
    )
    READER = RecordsReader

    def schema(self) -> StructType:
        return shape(self.parse(self.options))

    def streamReader(self, schema: StructType) -> HeldQueryReader:  # noqa: N802 - Spark gives the name
        options = self.parse(self.options)
        return (StreamsQueryReader if is_many(options) else RecordsQueryReader)(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> PartWriter:
        return PartWriter(*self._target(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> SinkWriter:  # noqa: N802 - Spark gives the name
        return SinkWriter(*self._target(schema, overwrite))

    def _target(self, schema: StructType, overwrite: bool) -> tuple[OwnerAddress, StreamTarget]:
        options = Options(self.options, source="writing to quire.stream", known=(*WRITING, *SINK_OPTIONS))
        return options.access(), StreamTarget(options, schema, overwrite=overwrite)
