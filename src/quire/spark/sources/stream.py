"""`quire.stream`: the records of a stream, from whatever tier they are in; a range at once or as they come.

    spark.read.format("quire.stream").option("store", path).option("stream", "clicks").load()
    spark.readStream.format("quire.stream").option("store", path).option("stream", "clicks").option("consumer", "etl").load()

Terms
  record   `id`, `timestamp` (when it became durable), `payload`
  part     consecutive records, and the segments they are in: what one task reads

Rules
  1. A range is read whole or not at all: who asks for records that are no longer retained, or go while they are read, hears
     `CursorLost`. Without `end` it ends with what is durable when the query is planned.
  2. Parts are about the same size by their bytes, and begin with a segment where segments are small enough.
  3. Executors that see the store's directory read its files; others read ranges of objects, and what is in none yet they have
     uploaded first (`upload`: `auto`; `true`: before the query runs; `false`: never). See `stream/remote_read.py`.
  4. With `since` (a time, or milliseconds since 1970) records that became durable before it are left out, whole segments of
     them without being read.

Options: `stream`; `columns` (with commas), `upload`, `partitions` at most. Of a range: `start` (default: the first record
kept), `end`, exclusive, `since`. Those of a streaming query: `stream_queries.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from quire.core.errors import CursorLost, InvalidInput, OutOfRange
from quire.core.limits import MIB
from quire.durable.files import OsDisk
from quire.objects.api import ObjectStore
from quire.objects.open import open_store
from quire.objects.options import StoreOptions
from quire.spark.access import Access, object_options
from quire.spark.sources.options import Options
from quire.spark.sources.shapes import arrow_schema, default_partitions, fitted, spark_schema
from quire.stream.arrow_batches import SCHEMA
from quire.stream.files import StreamFiles
from quire.stream.remote_read import SharedReader, SharedSegment, SharedStream

if TYPE_CHECKING:
    import pyarrow as pa

    from quire.service.channel import Channel

OPTIONS = ("stream", "columns", "upload", "partitions", "start", "end", "since", "consumer", "max_records")

PART_BYTES_MIN = MIB
"""Fewer bytes are not worth a task of their own."""
UPLOAD_SECONDS = 3_600.0
"""How long the owner may take to have records uploaded."""


@dataclass(frozen=True, slots=True)
class Part:
    """Records with start ≤ id < stop."""

    start: int
    stop: int
    share: SharedStream
    """The segments they are in."""
    options: StoreOptions | None = field(default=None, repr=False)
    """How their object store is reached."""


class StreamPartition(InputPartition):
    """What one task reads."""

    def __init__(self, part: Part) -> None:
        super().__init__(part)


class StreamSource(DataSource):
    """See the rules above."""

    @classmethod
    def name(cls) -> str:
        return "quire.stream"

    def schema(self) -> StructType:
        return shape(_options(self.options))

    def reader(self, schema: StructType) -> StreamReader:
        return StreamReader(_options(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark gives the name
        from quire.spark.sources.stream_queries import StreamQueryReader

        return StreamQueryReader(_options(self.options), schema)


class Records:
    """The records of one stream: found where a query is planned, read on executors. Small, picklable."""

    def __init__(self, options: Options, schema: StructType) -> None:
        if schema.simpleString() != shape(options).simpleString():
            raise InvalidInput("the schema of quire.stream is fixed", hint="leave .schema(…) out, use `columns`")
        self.access: Access = options.access()
        self.stream = options.need("stream")
        self.schema = schema
        self.upload = options.one_of("upload", ("auto", "true", "false"))
        self.wanted = options.number("partitions", default_partitions(), least=1)
        self.since_ms = 0
        """The option `since` (rule 4); streaming queries have none, they begin where their consumer stands."""
        self._options: dict[str, StoreOptions] | None = None
        """How object stores are reached, when they were asked for where a query is planned."""

    def share(self, channel: Channel, start: int | None, stop: int | None, *, upload: bool = False) -> SharedStream:
        """Where records are; no more segments than one answer has room for."""
        from quire.service.tickets import STREAM_SHARE, OfStream

        request = OfStream(self.stream, start, stop, upload)
        how = {"timeout": UPLOAD_SECONDS, "attempt_seconds": UPLOAD_SECONDS} if upload else {}
        found: SharedStream = channel.ask(STREAM_SHARE, request, **how)
        return found

    def parts(self, channel: Channel, start: int | None, stop: int | None) -> list[Part]:
        """The parts of a range (rules 1 and 2)."""
        upload = self.upload == "true"
        whole = self.share(channel, start, stop, upload=upload)
        first = whole.first_record if start is None else start
        last = whole.end_record if stop is None else min(stop, whole.end_record)
        segments = list(whole.segments)
        while segments and segments[-1].end_record < last:
            more = self.share(channel, segments[-1].end_record, last, upload=upload).segments
            if not more:
                break  # the rest is being sealed: whoever reads it asks again
            segments += more
        while segments and 0 < segments[0].sealed_ms < self.since_ms:  # rule 4: nothing in it is as young as that
            first = max(first, segments.pop(0).end_record)
        if self._options is None:
            from quire.service.messages import Nothing

            self._options = object_options(channel.call("hello", Nothing()))
        options = self._options.get(whole.objects_url)
        return [replace(part, options=options) for part in split(whole, segments, first, last, self.wanted)]

    def read(self, part: Part | None) -> Iterator[pa.RecordBatch]:
        """The records of a part."""
        if part is None:  # Spark makes one partition of none
            return
        share, wanted = part.share, arrow_schema(self.schema)
        channel, stores = self.access.channel(), list[ObjectStore]()
        try:
            reader = SharedReader(
                StreamFiles(OsDisk(), share.root, share.stream_id),
                partial(_opened, stores, share.objects_url, part.options),
                share.stream_id,
                partial(self._locate, channel, share.stream_id),
                uploads=self.upload != "false",
            )
            for batch in reader.batches(share.segments, part.start, part.stop):
                yield fitted(_since(batch, self.since_ms), wanted)
        finally:
            channel.close()
            for store in stores:
                store.close()

    def _locate(self, channel: Channel, stream_id: int, start: int, stop: int, upload: bool) -> SharedStream:
        found = self.share(channel, start, stop, upload=upload)
        if found.stream_id != stream_id:
            raise CursorLost("the stream was dropped, and made anew", hint="begin again", stream=self.stream)
        return found


class StreamReader(DataSourceReader):
    """A range of records."""

    def __init__(self, options: Options, schema: StructType) -> None:
        for name in ("consumer", "max_records"):
            if options.text(name):
                raise InvalidInput(f"`{name}` is for streaming queries", hint="use start and end, or readStream")
        self.records = Records(options, schema)
        self._start = options.number("start", 0)
        self._end = options.number("end", 0)
        self.records.since_ms = moment_ms(options.text("since"))

    def partitions(self) -> Sequence[InputPartition]:
        """Rule 1, as far as it can be known before."""
        records = self.records
        channel = records.access.channel()
        try:
            whole = records.share(channel, self._start or None, 1)  # of no segments: only where it begins and ends
            start, stop = self._start or whole.first_record, self._end or whole.end_record
            if stop > whole.end_record:
                raise OutOfRange("the stream has not come this far", end=stop, next=whole.end_record)
            if start >= stop:
                return []
            return [StreamPartition(part) for part in records.parts(channel, start, stop)]
        finally:
            channel.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of a part."""
        return self.records.read(partition.value)


def split(whole: SharedStream, segments: Sequence[SharedSegment], start: int, stop: int, parts: int) -> list[Part]:
    """A range in at most so many parts of about the same size (rule 2); none if it is empty."""
    if start >= stop:
        return []
    inside = [each for each in _cuts(segments, parts) if start < each < stop]
    found = []
    for begin, end in zip([start, *inside], [*inside, stop]):
        mine = tuple(each for each in segments if each.base_record < end and each.end_record > begin)
        found.append(Part(begin, end, msgspec.structs.replace(whole, segments=mine)))
    return found


def _cuts(segments: Sequence[SharedSegment], parts: int) -> list[int]:
    """Ids that cut segments into parts: the nearest borders of segments, or within those that are larger than a part."""
    ends = list(accumulate(each.stored_bytes for each in segments))
    count = max(min(ends[-1] // PART_BYTES_MIN, parts), 1) if ends else 1
    found = set()
    for number in range(1, count):
        at = ends[-1] * number // count
        place = bisect_right(ends, at)
        segment = segments[place]
        share = (at - (ends[place] - segment.stored_bytes)) / segment.stored_bytes
        if segment.stored_bytes * count <= ends[-1]:
            share = round(share)
        found.add(segment.base_record + round(share * (segment.end_record - segment.base_record)))
    return sorted(found)


def shape(options: Options) -> StructType:
    """The schema, of the columns that are wanted."""
    import pyarrow as pa

    names = options.names("columns") or SCHEMA.names
    if unknown := [name for name in names if name not in SCHEMA.names]:
        raise InvalidInput("a record has no such column", hint=f"columns: {', '.join(SCHEMA.names)}", columns=unknown)
    return spark_schema(pa.schema([SCHEMA.field(name) for name in names]))


def _since(batch: pa.RecordBatch, since_ms: int) -> pa.RecordBatch:
    """The records of a batch that are at least as young as this (rule 4)."""
    if not since_ms:
        return batch
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = batch.schema.field("timestamp").type
    return batch.filter(pc.greater_equal(batch.column("timestamp"), pa.scalar(since_ms, pa.int64()).cast(kind)))


def _opened(stores: list[ObjectStore], url: str, options: StoreOptions | None) -> ObjectStore:
    """The object store, opened when the first object is wanted."""
    if not stores:
        stores.append(open_store(url, options=options))
    return stores[0]


def moment_ms(text: str) -> int:
    """A time in milliseconds, rounded up; without a zone it is UTC. 0 if none is given.

    >>> moment_ms("2024-02-29T12:00:00+01:00") == moment_ms("2024-02-29 11:00") == moment_ms("1709204400000")
    True
    """
    if text.isdecimal():
        return int(text)
    try:
        moment = datetime.fromisoformat(text) if text else datetime.fromtimestamp(0, UTC)
    except ValueError as error:
        hint = "like 2024-02-29T12:00:00Z, or milliseconds since 1970"
        raise InvalidInput("the option `since` is no time", hint=hint, given=text) from error
    zoned = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return -int(-zoned.timestamp() * 1000 // 1)


def _options(given: Any) -> Options:
    return Options(given, source="quire.stream", known=OPTIONS)
