"""Several stores in one run (docs/scale.md)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import quire
from quire.core.errors import InvalidInput
from quire.manifest.records import JobState
from quire.spark import read_stores, run_stores
from quire.spark.sources import registry

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_rows_of_several_stores_are_one_dataframe_and_jobs_run_for_all(tmp_path: Path, spark: SparkSession) -> None:
    with quire.open(tmp_path / "one") as first, quire.open(tmp_path / "two") as second:
        for store, rows in ((first, 2), (second, 3)):
            with store.sqlite("tenant-1", create=True) as database:
                database.execute("CREATE TABLE t(x)")
                database.executemany("INSERT INTO t VALUES (?)", [(number,) for number in range(rows)])
        frame = read_stores(spark, [first, second], "quire.sqlite", databases="tenant-*", table="t")
        counts = {row["_store"]: row["count"] for row in frame.groupBy("_store").count().collect()}
        assert counts == {first.path: 2, second.path: 3}
        jobs = run_stores([first, second], lambda store: store.heavy.verify(runner="threads"))
        assert [job.state for job in jobs] == [JobState.SUCCEEDED] * 2


SOURCES: dict[str, dict[str, str]] = {
    "quire.sqlite": {"databases": "shop", "table": "t"},
    "quire.rows": {"database": "shop", "table": "t", "from": "before"},
    "quire.diff": {"database": "shop", "from": "before"},
    "quire.pages": {"database": "shop"},
    "quire.kv": {"database": "settings"},
    "quire.stream": {"stream": "clicks"},
    "quire.manifest_log": {"stream": "clicks"},
    "quire.changes": {},
    "quire.table": {"table": "db_names"},
}


def test_every_source_reads_several_stores(tmp_path: Path, spark: SparkSession) -> None:
    """docs/scale.md promises it; new sources are included automatically."""
    assert set(SOURCES) == {source.NAME for source in registry.SOURCES}
    with quire.open(tmp_path / "one") as first, quire.open(tmp_path / "two") as second:
        for store in (first, second):
            with store.sqlite("shop", create=True) as database:
                database.execute("CREATE TABLE t(x)")
                store.snapshot("shop", "before")
                database.execute("INSERT INTO t VALUES (1)")
            store.kv("settings", create=True).put(b"key", b"value")
            store.stream("clicks", create=True).append(b"record").result()
        for source, options in SOURCES.items():
            rows = read_stores(spark, [first, second], source, **options).select("_store").distinct().collect()
            assert {row["_store"] for row in rows} == {first.path, second.path}, source


def test_no_store_is_refused(spark: SparkSession) -> None:
    with pytest.raises(InvalidInput, match="no store"):
        read_stores(spark, [], "quire.sqlite", table="t")
