"""`quire.manifest_log`: the records of streams' manifest logs, from disk and from tier 2.

    spark.read.format("quire.manifest_log").option("store", path).option("stream", "clicks").load()

A record is one row: `stream`, `stream_id`, `chunk`, `offset` (in its chunk or bundle), `ordinal`, `type`, `segment_id`,
`logical_offset`, `timestamp`, `fields` (a JSON object, named as on the format page; bytes are hexadecimal), `tier` (`disk` or
`object`), `last_chunk` (differs from `chunk` in a bundle, whose records do not name the chunk they are from).

- Every record occurs once: a bundle takes the place of its chunks, a chunk on disk that of its object.
- Damage is an error, not fewer rows. Records that a live writer has not committed are not included.
- A chunk that is removed from the disk during the read is read from tier 2; one that is now in a bundle raises `StalePlan`.

Options: `stream` (names and patterns, separated by commas; default: all), `columns`, `partitions` at most, `tier`: `disk`
reads what is in the store's directory, seen from here; `object` what is in tier 2; `auto` both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from quire.core.errors import StalePlan
from quire.durable.files import OsDisk
from quire.jobs.locations import OpenStore, StorePool
from quire.objects.open import open_store
from quire.objects.options import StoreOptions
from quire.spark.access import object_options
from quire.spark.sources.base import Options, QuireSource, SourceReader
from quire.spark.sources.views import matching
from quire.stream.files import LogFiles, StreamFiles
from quire.stream.mlog_reader import Chunk, ManifestLogReader, RecordView
from quire.stream.mlog_records import UnknownRecord
from quire.stream.mlog_tier2 import EpochBegin, LogObjects
from quire.stream.state import begins_of

SCHEMA = StructType(
    [
        StructField("stream", StringType(), nullable=False),
        StructField("stream_id", LongType(), nullable=False),
        StructField("chunk", LongType(), nullable=False),
        StructField("offset", LongType(), nullable=False),
        StructField("ordinal", LongType(), nullable=False),
        StructField("type", StringType(), nullable=False),
        StructField("segment_id", LongType(), nullable=False),
        StructField("logical_offset", LongType(), nullable=False),
        StructField("timestamp", TimestampType(), nullable=False),
        StructField("fields", StringType(), nullable=False),
        StructField("tier", StringType(), nullable=False),
        StructField("last_chunk", LongType(), nullable=False),
    ]
)

PIECES_MIN = 8
"""Fewer chunks are not worth a separate task: each has 256 KiB."""

BATCH_ROWS = 8_192


@dataclass(frozen=True, slots=True)
class LogPlace:
    """Where a log is in tier 2: in the store's own object store, or in the namespace of its stream."""

    url: str
    prefixes: tuple[str, ...]
    begins: tuple[EpochBegin, ...] = ()
    options: StoreOptions | None = field(default=None, repr=False)
    """How the object store is reached."""

    def objects(self, stores: OpenStore, stream_id: int) -> LogObjects:
        return LogObjects(stores(self.url), stream_id, self.prefixes, begins=self.begins)


@dataclass(frozen=True, slots=True)
class LogPiece:
    """A chunk or a bundle of one log."""

    stream: str
    stream_id: int
    first: int
    last: int
    on_disk: bool
    place: LogPlace


@dataclass(frozen=True, slots=True)
class LogPieces:
    """The pieces that one task reads."""

    root: str
    pieces: tuple[LogPiece, ...]


class ManifestLogTable(SourceReader):
    """Reads pieces of all logs, dealt to tasks in order."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        self.patterns = options.names("stream") or ["*"]
        self.tier = options.one_of("tier", ("auto", "disk", "object"))

    def plan(self) -> list[LogPieces]:
        with self.access.connect() as client:
            streams = {database.name: database for database in client.databases() if database.kind.name == "STREAM"}
            root, server = client.path, client.server
        options = object_options(server)
        places = {place.name: (place.url, place.prefixes) for place in server.namespaces}
        pieces: list[LogPiece] = []
        with closing(StorePool(lambda url: open_store(url, options=options.get(url)))) as stores:
            for name in matching(self.patterns, sorted(streams), "stream"):
                stream = streams[name]
                url, prefixes = places.get(stream.namespace, (server.objects_url, server.object_prefixes))
                begins = begins_of(StreamFiles(OsDisk(), root, stream.db_id))
                place = LogPlace(url, prefixes, begins, options.get(url))
                pieces += self._pieces(name, stream.db_id, root, stores, place)
        step = max(-(-len(pieces) // self.partitions_max), PIECES_MIN)
        return [LogPieces(root, tuple(pieces[start : start + step])) for start in range(0, len(pieces), step)]

    def _pieces(self, name: str, stream_id: int, root: str, stores: OpenStore, place: LogPlace) -> list[LogPiece]:
        """Return the pieces of a log in order, each record once."""
        local = set(LogFiles(OsDisk(), root, stream_id).chunks()) if self.tier != "object" else set()
        if self.tier == "disk":
            return [LogPiece(name, stream_id, index, index, True, place) for index in sorted(local)]
        listing = place.objects(stores, stream_id).listing()
        spans: list[tuple[int, int]] = []
        for first, last in sorted(listing.bundles):
            if not spans or first > spans[-1][1]:
                spans.append((first, last))
        covered = {index for first, last in spans for index in range(first, last + 1)}
        pieces = [LogPiece(name, stream_id, first, last, False, place) for first, last in spans]
        pieces += [
            LogPiece(name, stream_id, index, index, index in local, place)
            for index in (local | listing.chunks.keys()) - covered
        ]
        return sorted(pieces, key=lambda piece: piece.first)

    def batches(self, part: LogPieces, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        options = {piece.place.url: piece.place.options for piece in part.pieces}
        with closing(StorePool(lambda url: open_store(url, options=options[url]))) as stores:
            for piece in part.pieces:
                chunk, tier = self._load(piece, part.root, stores)
                yield from log_batches(piece.stream, piece.stream_id, chunk, tier, schema)

    def _load(self, piece: LogPiece, root: str, stores: OpenStore) -> tuple[Chunk, str]:
        """Load and check a piece."""
        files = LogFiles(OsDisk(), root, piece.stream_id)
        if piece.on_disk and (self.tier == "disk" or os.path.exists(files.chunk(piece.first))):
            fetch = None if self.tier == "disk" else piece.place.objects(stores, piece.stream_id).get_chunk
            return ManifestLogReader(files, fetch).chunk(piece.first), "disk"
        objects = piece.place.objects(stores, piece.stream_id)
        is_bundle = piece.first != piece.last
        chunk = objects.get_bundle(piece.first, piece.last) if is_bundle else objects.get_chunk(piece.first)
        if chunk is None:
            raise StalePlan(
                "a chunk was removed after the query was planned; it may be in a bundle now",
                hint="run the query again",
                stream=piece.stream,
                chunk=piece.first,
            )
        return chunk, "object"


class ManifestLogSource(QuireSource):
    """The data source `quire.manifest_log`."""

    NAME = "quire.manifest_log"
    KNOWN = ("stream", "tier", "columns", "partitions")
    READER = ManifestLogTable

    def schema(self) -> StructType:
        names = self.parse(self.options).columns(SCHEMA.names, of="a log record")
        return StructType([SCHEMA[name] for name in names])


# ── records as rows ───────────────────────────────────────────────────────────────────────────────────────────────────
def log_batches(stream: str, stream_id: int, chunk: Chunk, tier: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the records of a chunk or bundle, with the columns of `schema`. A bundle's first marker is not a record."""
    ordinal, views = chunk.header.base_record, iter(chunk.records())
    while taken := list(islice(views, BATCH_ROWS)):
        described = [_described(view) for view in taken]
        columns: dict[str, Any] = {
            "stream": [stream] * len(taken),
            "stream_id": [stream_id] * len(taken),
            "chunk": [chunk.index] * len(taken),
            "offset": [view.offset for view in taken],
            "ordinal": range(ordinal, ordinal + len(taken)),
            "type": [name for name, _ in described],
            "segment_id": [view.segment_id for view in taken],
            "logical_offset": [view.logical_offset for view in taken],
            "timestamp": [view.timestamp_ms * 1_000 for view in taken],
            "fields": [fields for _, fields in described],
            "tier": [tier] * len(taken),
            "last_chunk": [chunk.last_index] * len(taken),
        }
        yield pa.RecordBatch.from_arrays([pa.array(columns[field.name], field.type) for field in schema], schema=schema)
        ordinal += len(taken)


def _described(view: RecordView) -> tuple[str, str]:
    """Return (type, fields as JSON) of a record; one of an unknown type keeps its payload."""
    value = view.value()
    if isinstance(value, UnknownRecord):
        return f"unknown {value.record_type}", msgspec.json.encode({"payload": value.payload.hex()}).decode()
    fields = msgspec.structs.asdict(value)
    plain = {name: field.hex() if isinstance(field, bytes) else field for name, field in fields.items()}
    return type(value).__name__, msgspec.json.encode(plain).decode()
