"""`quire.diff`: the pages that differ between two snapshots of a database.

    options = {"store": path, "database": "shop", "from": "monday", "to": "tuesday"}
    spark.read.format("quire.diff").options(**options).load()

A row is `page`, `before`, `after`: bodies, NULL where a version has no such page; with `databases` it begins with
`_database`. Pages that both versions read from the same place are not read (`pages/view_changes.py`). For rows that differ
see `quire.rows`.

Options: `from`, `to` (default: the newest version), and those of `views.py` except `snapshot`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

from quire.core.limits import MIB
from quire.pages.view_changes import ChangedPage, changed_pages
from quire.spark.sources.base import Options, QuireSource, SourceReader
from quire.spark.sources.sqlite_tables import DATABASE_FIELD
from quire.spark.sources.views import (
    COMPARING,
    LocatedVersion,
    VersionPair,
    VersionReaders,
    VersionRequest,
    balanced_groups,
)

PAGES = StructType(
    [
        StructField("page", LongType(), nullable=False),
        StructField("before", BinaryType()),
        StructField("after", BinaryType()),
    ]
)

BATCH_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class PagesPiece:
    """A run of pages, [start, stop), of both versions."""

    before: LocatedVersion
    after: LocatedVersion
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """Size of its pages."""
        return (self.stop - self.start) * self.after.view.page_size


class DiffReader(SourceReader):
    """Reads runs of pages as long as chunks."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        self.request = VersionRequest(options, snapshot=options.text("to"))
        self.keep_seconds = self.request.keep_seconds
        self.earlier = options.need("from")

    def plan(self) -> list[list[PagesPiece]]:
        with self.access.connect() as client:
            pairs = self.request.pairs(client, self.request.names(client), self.earlier)
        return balanced_groups([piece for pair in pairs for piece in _pieces(pair)], self.partitions_max)

    def lease_of(self, part: list[PagesPiece]) -> int:
        return part[0].after.lease_id

    def batches(self, part: list[PagesPiece], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        with VersionReaders() as readers:
            for piece in part:
                before, after = readers.open(piece.before), readers.open(piece.after)
                pages = changed_pages(before, after, piece.start, piece.stop)
                yield from _page_batches(piece.after.database, pages, schema)


class DiffSource(QuireSource):
    """The data source `quire.diff`."""

    NAME = "quire.diff"
    KNOWN = COMPARING
    READER = DiffReader

    def schema(self) -> StructType:
        request = VersionRequest(self.parse(self.options))
        return StructType([DATABASE_FIELD, *PAGES.fields]) if request.is_many else PAGES


def _pieces(pair: VersionPair) -> Iterator[PagesPiece]:
    if pair.before is None:
        return
    size = max(pair.before.view.size_pages, pair.after.view.size_pages)
    step = pair.after.view.pages_per_chunk
    for start in range(0, size, step):
        yield PagesPiece(pair.before, pair.after, start, min(start + step, size))


def _page_batches(database: str, rows: Iterator[ChangedPage], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    taken: list[ChangedPage] = []
    size = 0

    def batch() -> pa.RecordBatch:
        columns = [[database] * len(taken), *zip(*taken)][len(PAGES) + 1 - len(schema) :]
        return pa.RecordBatch.from_arrays(
            [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)], schema=schema
        )

    for row in rows:
        taken.append(row)
        size += len(row[1] or b"") + len(row[2] or b"")
        if size >= BATCH_BYTES:
            yield batch()
            taken, size = [], 0
    if taken:
        yield batch()
