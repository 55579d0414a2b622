"""The audit of an archive on executors finds what threads find, and its differences are a DataFrame."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire.store.heavy import audit_bucket
from tests.jobs.test_archive_audit import Bucket

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_executors_find_what_threads_find(spark: SparkSession, tmp_path: Path) -> None:
    bucket = Bucket(tmp_path)
    assert bucket.audit(runner="spark").is_sound
    altered, gone = bucket.one("/file/"), bucket.one("/base:")
    data = bytearray(altered.read_bytes())
    data[-1] ^= 1
    altered.write_bytes(data)
    gone.unlink()
    (gone.parent / "base:000000ff").write_bytes(b"nobody's")
    now_ms = bucket.now_ms()
    there, here = (audit_bucket(bucket.url, now_ms=now_ms, runner=runner) for runner in ("spark", "threads"))
    assert (there.runner, here.runner) == ("spark", "threads")
    assert sorted(row["state"] for row in there.problems) == ["ALTERED", "MISSING"]
    assert (there.problems, there.orphans) == (here.problems, here.orphans)
    frame = spark.createDataFrame(there.table())
    assert {row.state for row in frame.collect()} == {"ALTERED", "MISSING", "ORPHANED"}
