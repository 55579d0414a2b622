"""`quire.manifest_log`: the records of streams' manifest logs, from disk and from tier 2.

    spark.read.format("quire.manifest_log").option("store", path).option("stream", "clicks").load()

Terms
  record   one row: `stream`, `stream_id`, `chunk`, `offset` (in its chunk or bundle), `ordinal`, `type`, `segment_id`,
           `logical_offset`, `timestamp`, `fields` (a JSON object, as the format page names them), `tier` (`disk` or `object`),
           `last_chunk` (another than `chunk` in a bundle, whose records are not told apart by chunk)
  piece    a chunk or a bundle: what is read at once

Rules
  1. Every record comes once: a bundle stands for the chunks in it, a chunk on disk for its object.
  2. `tier` `disk` reads what is in the store's directory, seen from here; `object` what is in tier 2; `auto` both.
  3. What is not sound is an error, not fewer rows; what a live writer has not committed is not there.
     A stream in a namespace has its objects there, and object stores are reached as quire.toml says, if that is seen from here.
  4. A chunk that goes from the disk while it is read is looked for in tier 2; one that has gone into a bundle is `StalePlan`.

Options: `stream` (names and patterns with commas; default: all), `tier`, `columns` (with commas), `partitions` at most.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from quire.core.errors import InvalidInput, StalePlan, UnknownDatabase
from quire.durable.files import OsDisk
from quire.objects.api import ObjectStore
from quire.objects.open import open_store
from quire.objects.options import StoreOptions
from quire.spark.access import Access, object_options
from quire.spark.sources.manifest_log_rows import log_batches
from quire.spark.sources.options import Options
from quire.spark.sources.shapes import arrow_schema, default_partitions
from quire.stream.files import LogFiles, StreamFiles
from quire.stream.mlog_reader import Chunk, ManifestLogReader
from quire.stream.mlog_tier2 import EpochBegin, LogObjects
from quire.stream.state import begins_of

if TYPE_CHECKING:
    import pyarrow as pa

OPTIONS = ("stream", "tier", "columns", "partitions")
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
"""Fewer chunks are not worth a task of their own: each has 256 KiB."""


@dataclass(frozen=True, slots=True)
class LogPlace:
    """Where in tier 2 a log is: of the store itself, or of the namespace that its stream is in."""

    url: str
    prefixes: tuple[str, ...]
    begins: tuple[EpochBegin, ...] = ()
    options: StoreOptions | None = field(default=None, repr=False)
    """How the object store is reached."""

    def objects(self, store: ObjectStore, stream_id: int) -> LogObjects:
        return LogObjects(store, stream_id, self.prefixes, begins=self.begins)


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
class Pieces:
    """What one task reads."""

    root: str
    pieces: tuple[LogPiece, ...]


class LogPartition(InputPartition):
    """A part of the logs."""

    def __init__(self, pieces: Pieces) -> None:
        super().__init__(pieces)


class ManifestLogSource(DataSource):
    """See the rules above."""

    @classmethod
    def name(cls) -> str:
        return "quire.manifest_log"

    def schema(self) -> StructType:
        return _shape(_options(self.options))

    def reader(self, schema: StructType) -> ManifestLogTable:
        return ManifestLogTable(_options(self.options), schema)


class ManifestLogTable(DataSourceReader):
    """Plans where the query is planned, reads on executors."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self.access: Access = options.access()
        self.schema = schema
        self.patterns = options.names("stream")
        self.tier = options.one_of("tier", ("auto", "disk", "object"))
        self._wanted = options.number("partitions", default_partitions(), least=1)

    def partitions(self) -> Sequence[InputPartition]:
        """Pieces of all logs, dealt out in order."""
        with self.access.connect() as client:
            known = {each.name: each for each in client.databases() if each.kind.name == "STREAM"}
            root, server = client.path, client.server
        options = object_options(server)
        places = {place.name: (place.url, place.prefixes) for place in server.namespaces}
        pieces: list[LogPiece] = []
        with closing(_Stores()) as stores:
            for name in self._named(known):
                stream = known[name]
                url, prefixes = places.get(stream.namespace, (server.objects_url, server.object_prefixes))
                begins = begins_of(StreamFiles(OsDisk(), root, stream.db_id))
                place = LogPlace(url, prefixes, begins, options.get(url))
                store = stores.open(place) if self.tier != "disk" else None
                pieces += found_pieces(name, stream.db_id, root, store, place, disk=self.tier != "object")
        step = max(-(-len(pieces) // self._wanted), PIECES_MIN)
        parts = [tuple(pieces[start : start + step]) for start in range(0, len(pieces), step)]
        return [LogPartition(Pieces(root, part)) for part in parts]

    def _named(self, known: Collection[str]) -> list[str]:
        plain = [each for each in self.patterns if not any(sign in each for sign in "*?[")]
        if missing := [name for name in plain if name not in known]:
            raise UnknownDatabase("no stream has this name", hint="`quire ls` lists them", names=missing[:5])
        patterns = self.patterns or ["*"]
        return [name for name in sorted(known) if any(fnmatchcase(name, pattern) for pattern in patterns)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of some pieces."""
        if partition.value is None:  # Spark makes one partition of none
            return
        given: Pieces = partition.value
        wanted = arrow_schema(self.schema)
        with closing(_Stores()) as stores:
            for piece in given.pieces:
                chunk, tier = self._load(piece, given, stores)
                yield from log_batches(piece.stream, piece.stream_id, chunk, tier, wanted)

    def _load(self, piece: LogPiece, given: Pieces, stores: _Stores) -> tuple[Chunk, str]:
        """A piece, checked (rules 3 and 4)."""
        files = LogFiles(OsDisk(), given.root, piece.stream_id)
        if piece.on_disk and (self.tier == "disk" or os.path.exists(files.chunk(piece.first))):
            fetch = None if self.tier == "disk" else stores.log(piece).get_chunk
            return ManifestLogReader(files, fetch).chunk(piece.first), "disk"
        objects = stores.log(piece)
        is_bundle = piece.first != piece.last
        chunk = objects.get_bundle(piece.first, piece.last) if is_bundle else objects.get_chunk(piece.first)
        if chunk is None:
            raise StalePlan(
                "a chunk has gone since the query was planned, into a bundle, say",
                hint="run the query again",
                stream=piece.stream,
                chunk=piece.first,
            )
        return chunk, "object"


class _Stores:
    """Object stores, each opened when the first object of it is wanted."""

    def __init__(self) -> None:
        self._stores: dict[str, ObjectStore] = {}

    def open(self, place: LogPlace) -> ObjectStore:
        if place.url not in self._stores:
            self._stores[place.url] = open_store(place.url, options=place.options)
        return self._stores[place.url]

    def log(self, piece: LogPiece) -> LogObjects:
        return piece.place.objects(self.open(piece.place), piece.stream_id)

    def close(self) -> None:
        for store in self._stores.values():
            store.close()


def found_pieces(
    name: str, stream_id: int, root: str, store: ObjectStore | None, place: LogPlace, *, disk: bool
) -> list[LogPiece]:
    """The pieces of a log in order, each record once (rule 1)."""
    local = set(LogFiles(OsDisk(), root, stream_id).chunks()) if disk else set()
    if store is None:
        return [LogPiece(name, stream_id, index, index, True, place) for index in sorted(local)]
    listing = place.objects(store, stream_id).listing()
    spans: list[tuple[int, int]] = []
    for first, last in sorted(listing.bundles):
        if not spans or first > spans[-1][1]:
            spans.append((first, last))
    covered = {index for first, last in spans for index in range(first, last + 1)}
    found = [LogPiece(name, stream_id, first, last, False, place) for first, last in spans]
    found += [
        LogPiece(name, stream_id, index, index, index in local, place)
        for index in (local | listing.chunks.keys()) - covered
    ]
    return sorted(found, key=lambda piece: piece.first)


def _shape(options: Options) -> StructType:
    names = options.names("columns") or SCHEMA.names
    if unknown := [name for name in names if name not in SCHEMA.names]:
        hint = f"columns: {', '.join(SCHEMA.names)}"
        raise InvalidInput("a log record has no such column", hint=hint, columns=unknown[:5])
    return StructType([SCHEMA[name] for name in names])


def _options(given: Any) -> Options:
    return Options(given, source="quire.manifest_log", known=OPTIONS)
