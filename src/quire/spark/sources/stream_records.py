"""Records of streams for Spark: located where a query is planned, cut into ranges, read on executors.

- Tasks have about the same number of bytes, and begin with a segment where segments are small enough.
- Executors that see the store's directory read its files; others read ranges of objects (`stream/remote_read.py`).
- Records that are no longer retained, or are retired during the read, raise `CursorLost`.

Importable on executors. Raises `CursorLost`, `InvalidInput`, and a client's errors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from quire.core.errors import CursorLost
from quire.core.limits import MIB
from quire.jobs.locations import StorePool
from quire.objects.open import open_store
from quire.objects.options import StoreOptions
from quire.service.tickets import STREAM_SHARE, OfStream
from quire.spark.access import disk_at, object_options
from quire.spark.sources.base import Options, default_partitions, fitted, spark_schema
from quire.spark.sources.sqlite_tables import DATABASE_FIELD
from quire.spark.sources.views import DatabaseSelection
from quire.sqlite.tables import DATABASE
from quire.stream.arrow_batches import SCHEMA
from quire.stream.files import StreamFiles
from quire.stream.remote_read import SharedReader, SharedSegment, SharedStream

if TYPE_CHECKING:
    from quire.service.channel import Channel

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

    def named_batches(self, parts: Iterable[RecordRange], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the records of parts of several streams, each with the name of its stream."""
        stored = pa.schema([field for field in schema if field.name != DATABASE])
        for part in parts:
            for batch in self.of(part.stream).batches(part, stored):
                names = pa.repeat(pa.scalar(part.stream, pa.string()), batch.num_rows)
                yield pa.RecordBatch.from_arrays([names, *batch.columns], schema=schema)

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


def select_streams(options: Options) -> DatabaseSelection:
    """Return which of the streams are requested."""
    options.refuse(("stream",), "one stream", "add its name to `databases`, or leave out `databases` and `tags`")
    return DatabaseSelection(options, "STREAM", "stream")


def refuse_range(options: Options) -> None:
    """Refuse the options of a range for a streaming query."""
    options.refuse(("end", "since"), "ranges", "a streaming query has none; read instead of readStream")


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
