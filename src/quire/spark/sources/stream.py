"""`quire.stream`: the records of a stream, from whatever tier they are in; a range at once, or as they arrive.

    spark.read.format("quire.stream").option("store", path).option("stream", "clicks").load()
    spark.readStream.format("quire.stream").option("store", path).option("stream", "clicks").option("consumer", "etl").load()

A record is `id`, `timestamp` (when it became durable), `payload`.

- A range is read completely or not at all: records that are no longer retained, or are retired during the read, raise
  `CursorLost`. Without `end` it ends with what is durable when the query is planned.
- Tasks have about the same number of bytes, and begin with a segment where segments are small enough.
- Executors that see the store's directory read its files; others read ranges of objects (`stream/remote_read.py`).
- A streaming query's offset is {"store": id, "stream": id, "record": n}: everything below n has been read. It begins at the
  position of its consumer; a consumer that does not exist is registered at `start`. Nothing from a consumer's position on is
  retired while it holds.

Writing, by a job or a streaming query: one column `payload`. The owner appends the records of a job, or of a batch, in one
append that is durable as a whole, and appends a batch once (`writers.py`, `Stream.append_batch`). Options: `stream`, `create`
(the default is `true`: create the stream if it does not exist).

Options of reading: `stream`, or for a range `databases` and `tags`, as for other sources (records then begin with
`_database`, the name of the stream; `start` and `end` cannot be used with them); `columns`; `partitions` at most; `upload` of
records that are in no object yet: `auto` (by executors that need it), `true` (before the query runs), `false`. For a range:
`start` (default: the first record kept), `end`, exclusive, `since` (a time, or milliseconds since 1970: records that became
durable before it are left out, whole segments of them without being read). For a streaming query: `consumer`; `start` for a
new consumer: `oldest` (the default), `latest`, or the id of the first record wanted; `max_records` in a batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import BinaryType, StringType, StructType

from quire.core.clock import SystemClock
from quire.core.errors import CursorLost, InvalidInput, OutOfRange
from quire.core.limits import MIB
from quire.core.time_parsing import parse_moment
from quire.core.timeline import Gaps, skip_gap
from quire.jobs.locations import StorePool
from quire.objects.open import open_store
from quire.objects.options import StoreOptions
from quire.service.tickets import (
    LOAD_RECORDS,
    STREAM_ACK,
    STREAM_POSITION,
    STREAM_REGISTER,
    STREAM_SHARE,
    STREAM_WAIT,
    AckRecords,
    LoadRecords,
    OfConsumer,
    OfStream,
    RegisterConsumer,
    WaitForRecord,
)
from quire.spark.access import disk_at, object_options
from quire.spark.sources.base import (
    SINK_OPTIONS,
    WAIT_SECONDS,
    Offset,
    Options,
    QueryReader,
    QuireSource,
    SourceReader,
    default_partitions,
    fitted,
    spark_schema,
)
from quire.spark.sources.sqlite_tables import DATABASE_FIELD
from quire.spark.sources.views import DatabaseSelection, balanced_groups
from quire.spark.sources.writers import BatchId, PartTarget, PartWriter, SinkWriter
from quire.sqlite.tables import DATABASE
from quire.stream.arrow_batches import SCHEMA
from quire.stream.files import StreamFiles
from quire.stream.gaps import begin_at, of_positions
from quire.stream.remote_read import SharedReader, SharedSegment, SharedStream

if TYPE_CHECKING:
    from quire.service.channel import Channel
    from quire.service.client import Client
    from quire.spark.access import OwnerAddress

WRITING = ("stream", "create")

PART_BYTES_MIN = MIB
"""Fewer bytes are not worth a separate task."""
UPLOAD_SECONDS = 3_600.0
"""Seconds that the owner may take to upload records."""


@dataclass(frozen=True, slots=True)
class RecordRange:
    """Records with start ≤ id < stop: the range of one task."""

    start: int
    stop: int
    share: SharedStream
    """The segments they are in."""
    options: StoreOptions | None = field(default=None, repr=False)
    """How their object store is reached."""
    stream: str = ""

    @property
    def size_bytes(self) -> int:
        """Size of its segments."""
        return sum(segment.stored_bytes for segment in self.share.segments)


class Records:
    """The records of one stream: located where a query is planned, read on executors. Small, picklable."""

    def __init__(self, options: Options, schema: StructType) -> None:
        options.need_schema(schema, shape(options))
        self.access = options.access()
        self.stream = "" if is_many(options) else options.need("stream")
        self.upload = options.one_of("upload", ("auto", "true", "false"))
        self.partitions_max = options.number("partitions", default_partitions(), least=1)
        self.since_ms = 0
        """The option `since` of a range; streaming queries begin at the position of their consumer."""
        self._options: dict[str, StoreOptions] | None = None
        """How object stores are reached, once resolved where a query is planned."""

    def share(self, channel: Channel, start: int | None, stop: int | None, *, upload: bool = False) -> SharedStream:
        """Return where records are; no more segments than fit in one answer."""
        request = OfStream(self.stream, start, stop, upload)
        limits: dict[str, Any] = {"timeout": UPLOAD_SECONDS, "attempt_seconds": UPLOAD_SECONDS} if upload else {}
        share: SharedStream = channel.ask(STREAM_SHARE, request, **limits)
        return share

    def parts(self, channel: Channel, start: int | None, stop: int | None) -> list[RecordRange]:
        """Return the parts of a range."""
        upload = self.upload == "true"
        shared = self.share(channel, start, stop, upload=upload)
        first = shared.first_record if start is None else start
        last = shared.end_record if stop is None else min(stop, shared.end_record)
        segments = list(shared.segments)
        while segments and segments[-1].end_record < last:
            more = self.share(channel, segments[-1].end_record, last, upload=upload).segments
            if not more:
                break  # the rest is being sealed: its reader locates it again
            segments += more
        while segments and 0 < segments[0].sealed_ms < self.since_ms:  # all of its records are older
            first = max(first, segments.pop(0).end_record)
        if self._options is None:
            from quire.service.messages import Nothing  # needs lmdb, which executors do not have

            self._options = object_options(channel.call("hello", Nothing()))
        options = self._options.get(shared.objects_url)
        parts = split(shared, segments, first, last, self.partitions_max)
        return [replace(part, options=options, stream=self.stream) for part in parts]

    def of(self, stream: str) -> Records:
        """Return the same for another stream."""
        records = copy(self)
        records.stream = stream
        return records

    def batches(self, part: RecordRange, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the records of a part."""
        share = part.share
        stores = StorePool(lambda url: open_store(url, options=part.options))
        with closing(self.access.channel()) as channel, closing(stores):
            reader = SharedReader(
                StreamFiles(disk_at(share.root), share.root, share.stream_id),
                partial(stores, share.objects_url),
                share.stream_id,
                partial(self._locate, channel, share.stream_id),
                uploads=self.upload != "false",
                gaps=share.gaps,
            )
            for batch in reader.batches(share.segments, part.start, part.stop):
                yield fitted(_since(batch, self.since_ms), schema)

    def _locate(self, channel: Channel, stream_id: int, start: int, stop: int, upload: bool) -> SharedStream:
        share = self.share(channel, start, stop, upload=upload)
        if share.stream_id != stream_id:
            raise CursorLost(
                "the stream was dropped and created again",
                hint="start again with a new checkpoint location",
                stream=self.stream,
            )
        return share


def split(
    shared: SharedStream, segments: Sequence[SharedSegment], start: int, stop: int, parts: int
) -> list[RecordRange]:
    """Return a range in at most `parts` parts of about the same size; none if it is empty."""
    if start >= stop:
        return []
    inside = [cut for cut in _cuts(segments, parts) if start < cut < stop]
    ranges = []
    for begin, end in zip([start, *inside], [*inside, stop]):
        within = tuple(segment for segment in segments if segment.base_record < end and segment.end_record > begin)
        ranges.append(RecordRange(begin, end, msgspec.structs.replace(shared, segments=within)))
    return ranges


def _cuts(segments: Sequence[SharedSegment], parts: int) -> list[int]:
    """Return the ids that cut segments into parts: the nearest borders, or ids within segments larger than a part."""
    ends = list(accumulate(segment.stored_bytes for segment in segments))
    count = max(min(ends[-1] // PART_BYTES_MIN, parts), 1) if ends else 1
    cuts = set()
    for number in range(1, count):
        at = ends[-1] * number // count
        place = bisect_right(ends, at)
        segment = segments[place]
        share = (at - (ends[place] - segment.stored_bytes)) / segment.stored_bytes
        if segment.stored_bytes * count <= ends[-1]:
            share = round(share)
        cuts.add(segment.base_record + round(share * (segment.end_record - segment.base_record)))
    return sorted(cuts)


def is_many(options: Options) -> bool:
    """Return whether records of several streams are requested."""
    return bool(options.text("databases") or options.text("tags"))


def shape(options: Options) -> StructType:
    """Return the schema of the requested columns."""
    names = options.columns(SCHEMA.names, of="a record")
    schema = spark_schema(pa.schema([SCHEMA.field(name) for name in names]))
    return StructType([DATABASE_FIELD, *schema.fields]) if is_many(options) else schema


def _since(batch: pa.RecordBatch, since_ms: int) -> pa.RecordBatch:
    """Return the records of a batch that became durable at `since_ms` or later."""
    if not since_ms:
        return batch
    kind = batch.schema.field("timestamp").type
    return batch.filter(pc.greater_equal(batch.column("timestamp"), pa.scalar(since_ms, pa.int64()).cast(kind)))


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
        self._streams = DatabaseSelection(options, "STREAM", "stream") if is_many(options) else None
        if self._streams is not None:
            options.refuse(
                ("stream",), "one stream", "add its name to `databases`, or leave out `databases` and `tags`"
            )
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
        stored = pa.schema([field for field in schema if field.name != DATABASE])
        for records in part:
            for batch in self.records.of(records.stream).batches(records, stored):
                if self._streams is None:
                    yield batch
                    continue
                names = pa.repeat(pa.scalar(records.stream, pa.string()), batch.num_rows)
                yield pa.RecordBatch.from_arrays([names, *batch.columns], schema=schema)


class RecordsQueryReader(QueryReader):
    """A streaming query whose progress is the position of a consumer."""

    HOLDER = "consumer"
    POSITION = "record"

    def __init__(self, options: Options, schema: StructType) -> None:
        options.refuse(("end",), "ranges", "a streaming query has none; read instead of readStream")
        options.refuse(("databases", "tags"), "ranges", "a streaming query reads one stream")
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
        return self._look().end_record

    def _look(self) -> SharedStream:
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
        return of_positions(self._look().gaps)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        gaps = self._look().gaps
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

    def streamReader(self, schema: StructType) -> RecordsQueryReader:  # noqa: N802 - Spark gives the name
        return RecordsQueryReader(self.parse(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> PartWriter:
        return PartWriter(*self._target(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> SinkWriter:  # noqa: N802 - Spark gives the name
        return SinkWriter(*self._target(schema, overwrite))

    def _target(self, schema: StructType, overwrite: bool) -> tuple[OwnerAddress, StreamTarget]:
        options = Options(self.options, source="writing to quire.stream", known=(*WRITING, *SINK_OPTIONS))
        return options.access(), StreamTarget(options, schema, overwrite=overwrite)
