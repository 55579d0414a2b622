"""The data sources quire brings to Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSource


def sources() -> list[type[DataSource]]:
    """Every source. None of them takes Spark's filters: see docs/decisions/013-no-filter-pushdown.md."""
    from quire.spark.sources.changes import ChangesSource
    from quire.spark.sources.diff import DiffSource
    from quire.spark.sources.kv import KvSource
    from quire.spark.sources.manifest_log import ManifestLogSource
    from quire.spark.sources.pages import PagesSource
    from quire.spark.sources.sqlite import SqliteSource
    from quire.spark.sources.stream import StreamSource
    from quire.spark.sources.table import TableSource

    pages: list[type[DataSource]] = [PagesSource, SqliteSource, DiffSource]
    return [TableSource, ChangesSource, *pages, StreamSource, ManifestLogSource, KvSource]
