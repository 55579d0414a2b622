"""The data sources quire brings to Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSource


def sources(*, pushdown: bool) -> list[type[DataSource]]:
    """Every source; with `pushdown` those that take filters (K5: a session that has it switched off refuses them)."""
    from quire.spark.sources.changes import ChangesSource
    from quire.spark.sources.diff import DiffSource
    from quire.spark.sources.kv import FilteredKvSource, KvSource
    from quire.spark.sources.manifest_log import FilteredManifestLogSource, ManifestLogSource
    from quire.spark.sources.pages import FilteredPagesSource, PagesSource
    from quire.spark.sources.sqlite import FilteredSqliteSource, SqliteSource
    from quire.spark.sources.stream import FilteredStreamSource, StreamSource
    from quire.spark.sources.table import FilteredTableSource, TableSource

    if pushdown:
        records: list[type[DataSource]] = [FilteredStreamSource, FilteredManifestLogSource, FilteredKvSource]
        return [FilteredTableSource, ChangesSource, FilteredPagesSource, FilteredSqliteSource, DiffSource, *records]
    plain: list[type[DataSource]] = [StreamSource, ManifestLogSource, KvSource]
    return [TableSource, ChangesSource, PagesSource, SqliteSource, DiffSource, *plain]
