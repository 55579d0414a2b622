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
  4. A chunk that goes from the disk while it is read is looked for in tier 2; one that has gone into a bundle is `StalePlan`.

Options: `stream` (names and patterns with commas; default: all), `tier`, `columns` (with commas), `partitions` at most.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from quire.core.errors import InvalidInput, StalePlan, UnknownDatabase
from quire.durable.files import OsDisk
from quire.objects.api import ObjectStore
from quire.objects.open import open_store
from quire.spark.access import Access
from quire.spark.sources.manifest_log_rows import log_batches
from quire.spark.sources.options import Options
from quire.spark.sources.shapes import arrow_schema, default_partitions
from quire.stream.files import LogFiles
from quire.stream.mlog_reader import Chunk, ManifestLogReader
from quire.stream.mlog_tier2 import LogObjects

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
class LogPiece:
    """A chunk or a bundle of one log."""

    stream: str
    stream_id: int
    first: int
    last: int
    on_disk: bool


@dataclass(frozen=True, slots=True)
class Pieces:
    """What one task reads."""

    root: str
    objects_url: str
    prefixes: tuple[str, ...]
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
            known = {each.name: each.db_id for each in client.databases() if each.kind.name == "STREAM"}
            root, url, prefixes = client.path, client.objects_url, client.object_prefixes
        wanted = self._named(known)
        store = open_store(url) if self.tier != "disk" else None
        try:
            pieces = [
                piece
                for name in wanted
                for piece in found_pieces(name, known[name], root, store, prefixes, disk=self.tier != "object")
            ]
        finally:
            if store is not None:
                store.close()
        step = max(-(-len(pieces) // self._wanted), PIECES_MIN)
        parts = [tuple(pieces[start : start + step]) for start in range(0, len(pieces), step)]
        return [LogPartition(Pieces(root, url, prefixes, part)) for part in parts]

    def _named(self, known: dict[str, int]) -> list[str]:
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
        stores: list[ObjectStore] = []

        def store() -> ObjectStore:
            if not stores:
                stores.append(open_store(given.objects_url))
            return stores[0]

        wanted = arrow_schema(self.schema)
        try:
            for piece in given.pieces:
                chunk, tier = self._load(piece, given, store)
                yield from log_batches(piece.stream, piece.stream_id, chunk, tier, wanted)
        finally:
            for each in stores:
                each.close()

    def _load(self, piece: LogPiece, given: Pieces, store: Callable[[], ObjectStore]) -> tuple[Chunk, str]:
        """A piece, checked (rules 3 and 4)."""
        files = LogFiles(OsDisk(), given.root, piece.stream_id)
        if piece.on_disk and (self.tier == "disk" or os.path.exists(files.chunk(piece.first))):
            fetch = None if self.tier == "disk" else LogObjects(store(), piece.stream_id, given.prefixes).get_chunk
            return ManifestLogReader(files, fetch).chunk(piece.first), "disk"
        objects = LogObjects(store(), piece.stream_id, given.prefixes)
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


def found_pieces(
    name: str, stream_id: int, root: str, store: ObjectStore | None, prefixes: tuple[str, ...] = ("",), *, disk: bool
) -> list[LogPiece]:
    """The pieces of a log in order, each record once (rule 1)."""
    local = set(LogFiles(OsDisk(), root, stream_id).chunks()) if disk else set()
    if store is None:
        return [LogPiece(name, stream_id, index, index, True) for index in sorted(local)]
    listing = LogObjects(store, stream_id, prefixes).listing()
    spans: list[tuple[int, int]] = []
    for first, last in sorted(listing.bundles):
        if not spans or first > spans[-1][1]:
            spans.append((first, last))
    covered = {index for first, last in spans for index in range(first, last + 1)}
    found = [LogPiece(name, stream_id, first, last, False) for first, last in spans]
    found += [
        LogPiece(name, stream_id, index, index, index in local) for index in (local | listing.chunks.keys()) - covered
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
