"""The data sources of quire. None of them accepts Spark's filters: see docs/decisions/013-no-filter-pushdown.md."""

from __future__ import annotations

from quire.spark.sources.base import QuireSource
from quire.spark.sources.changes import ChangesSource
from quire.spark.sources.diff import DiffSource
from quire.spark.sources.kv import KvSource
from quire.spark.sources.manifest_log import ManifestLogSource
from quire.spark.sources.pages import PagesSource
from quire.spark.sources.rows import RowsSource
from quire.spark.sources.sqlite import SqliteSource
from quire.spark.sources.stream import StreamSource
from quire.spark.sources.table import TableSource

SOURCES: tuple[type[QuireSource], ...] = (
    TableSource,
    ChangesSource,
    PagesSource,
    SqliteSource,
    DiffSource,
    RowsSource,
    StreamSource,
    ManifestLogSource,
    KvSource,
)
