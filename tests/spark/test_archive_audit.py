"""The audit of an archive on executors finds the same as on threads, and its differences are a DataFrame."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire.store.heavy import audit_bucket
from tests.jobs.test_archive_audit import Bucket

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_executors_and_threads_find_the_same_problems(spark: SparkSession, tmp_path: Path) -> None:
    bucket = Bucket(tmp_path)
    assert bucket.audit(runner="spark").is_sound
    altered, missing = bucket.one("/file/"), bucket.one("/base:")
    data = bytearray(altered.read_bytes())
    data[-1] ^= 1
    altered.write_bytes(data)
    missing.unlink()
    (missing.parent / "base:000000ff").write_bytes(b"nobody's")
    now_ms = bucket.now_ms()
    on_spark, on_threads = (audit_bucket(bucket.url, now_ms=now_ms, runner=runner) for runner in ("spark", "threads"))
    assert (on_spark.runner, on_threads.runner) == ("spark", "threads")
    assert sorted(row["state"] for row in on_spark.problems) == ["ALTERED", "MISSING"]
    assert (on_spark.problems, on_spark.orphans) == (on_threads.problems, on_threads.orphans)
    frame = spark.createDataFrame(on_spark.table())
    assert {row.state for row in frame.collect()} == {"ALTERED", "MISSING", "ORPHANED"}
