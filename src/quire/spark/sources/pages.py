"""`quire.pages`: the bodies of the pages of a version, at a snapshot or the newest.

    spark.read.format("quire.pages").option("store", path).option("database", "shop").option("snapshot", "monday").load()

A row is `_database`, `page` (from 0), `data`: every page of the version; pages that were never written are zeros. Tasks are
runs of slots: a chunk is read by one task, from its object, without the owner.

Options: `start` and `end`, exclusive, bound the pages to read; also those of `views.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

from quire.core.limits import MIB
from quire.spark.sources import views
from quire.spark.sources.base import Options, QuireSource
from quire.spark.sources.sqlite_tables import DATABASE_FIELD
from quire.spark.sources.views import (
    LentRange,
    LocatedVersion,
    PiecesReader,
    VersionReaders,
    ViewPiece,
    balanced_groups,
)

SCHEMA = StructType(
    [
        DATABASE_FIELD,
        StructField("page", LongType(), nullable=False),
        StructField("data", BinaryType(), nullable=False),
    ]
)

BATCH_BYTES = 4 * MIB
PAGES_MAX = 1 << 32

SMALL_BYTES = 16 * MIB
"""Size of a database in a range of databases, at most: all its pages are read by one task."""

PageRun = tuple[int, int]
"""[start, stop) of pages."""


class PagesReader(PiecesReader[PageRun]):
    """Reads runs of pages, slot by slot."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        options.need_schema(schema, SCHEMA)
        self._first = options.number("start", 0)
        self._stop = options.number("end", PAGES_MAX)

    def plan(self) -> list[list[ViewPiece[PageRun] | LentRange]]:
        with self.access.connect() as client:
            versions, ranges = self.request.planned(client, SMALL_BYTES)
        pieces = [piece for version in versions for piece in self.pieces(version)]
        return balanced_groups([*pieces, *ranges], max(self.partitions_max, len(pieces) // 64))

    def pieces(self, version: LocatedVersion) -> Iterator[ViewPiece[PageRun]]:
        view = version.view
        for start in range(0, view.size_pages, view.pages_per_chunk):
            run = max(start, self._first), min(start + view.pages_per_chunk, view.size_pages, self._stop)
            if run[0] < run[1]:
                yield ViewPiece(version, run, (run[1] - run[0]) * view.page_size)

    def batches(self, part: list[ViewPiece[PageRun] | LentRange], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        with VersionReaders() as readers:
            for piece in self.listed(part):
                step = max(BATCH_BYTES // piece.version.view.page_size, 1)
                rows: list[tuple[int, bytes]] = []
                for row in readers.open(piece.version).scan(*piece.part):
                    rows.append(row)
                    if len(rows) >= step:
                        yield _batch(piece.version.database, rows, schema)
                        rows = []
                if rows:
                    yield _batch(piece.version.database, rows, schema)


class PagesSource(QuireSource):
    """The data source `quire.pages`."""

    NAME = "quire.pages"
    KNOWN = (*views.OPTIONS, "start", "end")
    READER = PagesReader

    def schema(self) -> StructType:
        return SCHEMA


def _batch(database: str, rows: list[tuple[int, bytes]], schema: pa.Schema) -> pa.RecordBatch:
    pages, images = zip(*rows)
    columns = ([database] * len(rows), pages, images)
    return pa.RecordBatch.from_arrays(
        [pa.array(values, field.type) for values, field in zip(columns, schema)], schema=schema
    )
