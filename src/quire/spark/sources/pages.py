"""`quire.pages`: the bodies of the pages of a version, as they were at a snapshot or are now.

    spark.read.format("quire.pages").option("store", path).option("database", "shop").option("snapshot", "monday").load()

Terms
  row   `database`, `page` (from 0), `data`: every page of the version, those that were never written as zeros

Rules
  1. Tasks are runs of slots: a chunk is read by one task, from its object, without the owner.
  2. `start` and `end`, exclusive, are the pages that are read.

Options: `start`, `end`, and `database` or `databases`, `snapshot`, `keep_seconds`, `upload`, `partitions` (`views.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from quire.core.errors import InvalidInput
from quire.core.limits import MIB
from quire.pages.view import SnapshotView
from quire.spark.sources import views
from quire.spark.sources.leases import kept
from quire.spark.sources.options import Options
from quire.spark.sources.shapes import arrow_schema, default_partitions
from quire.spark.sources.views import Asked, Piece, Version, dealt, opened

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = StructType(
    [
        StructField("database", StringType(), nullable=False),
        StructField("page", LongType(), nullable=False),
        StructField("data", BinaryType(), nullable=False),
    ]
)

BATCH_BYTES = 4 * MIB
PAGES_MAX = 1 << 32

Run = tuple[int, int]
"""[start, stop) of pages."""


class PagesSource(DataSource):
    """See the rules above."""

    @classmethod
    def name(cls) -> str:
        return "quire.pages"

    def schema(self) -> StructType:
        return SCHEMA

    def reader(self, schema: StructType) -> PagesReader:
        return PagesReader(_options(self.options), schema)


class PagesPartition(InputPartition):
    """Runs of pages that one task reads."""

    def __init__(self, pieces: list[Piece[Run]]) -> None:
        super().__init__(pieces)


class PagesReader(DataSourceReader):
    """Plans where the query is planned, reads on executors."""

    def __init__(self, options: Options, schema: StructType) -> None:
        if schema.simpleString() != SCHEMA.simpleString():
            raise InvalidInput("the schema of quire.pages is fixed", hint="leave .schema(…) out")
        self.access = options.access()
        self.asked = Asked(options)
        self._wanted = options.number("partitions", default_partitions(), least=1)
        self._first = options.number("start", 0)
        self._stop = options.number("end", PAGES_MAX)

    def partitions(self) -> Sequence[InputPartition]:
        """Runs of slots: each chunk is read by one task, without the owner (rule 1)."""
        with self.access.connect() as client:
            versions = self.asked.versions(client, self.asked.names(client))
        pieces = [piece for version in versions for piece in _pieces(version, self._first, self._stop)]
        return [PagesPartition(heap) for heap in dealt(pieces, max(self._wanted, len(pieces) // 64))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The pages of a task."""
        pieces: list[Piece[Run]] = partition.value or []
        with kept(self.access, pieces[0].version.lease_id if pieces else 0, self.asked.keep_seconds):
            for piece in pieces:
                yield from _read(piece)


def _read(piece: Piece[Run]) -> Iterator[pa.RecordBatch]:
    with opened(piece.version) as reader:
        rows: list[tuple[int, bytes]] = []
        for page, image in reader.scan(*piece.part):
            rows.append((page, image))
            if len(rows) * piece.version.view.page_size >= BATCH_BYTES:
                yield _batch(piece.version.database, rows)
                rows = []
        if rows:
            yield _batch(piece.version.database, rows)


def _pieces(version: Version, first: int, stop: int) -> Iterator[Piece[Run]]:
    view: SnapshotView = version.view
    for start in range(0, view.size_pages, view.pages_per_chunk):
        run = max(start, first), min(start + view.pages_per_chunk, view.size_pages, stop)
        if run[0] < run[1]:
            yield Piece(version, run, (run[1] - run[0]) * view.page_size)


def _batch(database: str, rows: list[tuple[int, bytes]]) -> pa.RecordBatch:
    import pyarrow as pa

    pages, images = zip(*rows)
    columns = [
        pa.array([database] * len(rows), pa.string()),
        pa.array(pages, pa.int64()),
        pa.array(images, pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=arrow_schema(SCHEMA))


def _options(given: Any) -> Options:
    return Options(given, source="quire.pages", known=(*views.OPTIONS, "start", "end"))
