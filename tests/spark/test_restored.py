"""Spark and a store that came back from its bucket: streaming queries with checkpoints of the former owner, and jobs whose
input is still in the bucket."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import quire
from quire.core.settings import ArchiveSettings, LsmSettings, MaintenanceSettings, StoreSettings, StreamSettings
from quire.manifest.records import JobState
from quire.spark import options_of
from tests.archive.world import contents, settings
from tests.objects.conftest import CREDENTIALS, fresh_url, s3_options, s3_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["s3_server"]  # a fixture

FIRST = 2 << 40


def drain(spark: SparkSession, source: str, column: str, base: Path, **options: str) -> list[int]:
    """Run a query over what is there now, with its checkpoint below `base`; what its sink has then."""
    frame = spark.readStream.format(source).options(**options).load()
    query = (
        frame.select(column)
        .writeStream.format("parquet")
        .option("path", str(base / "out"))
        .option("checkpointLocation", str(base / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return [row[0] for row in spark.read.parquet(str(base / "out")).orderBy(column).collect()]


def test_queries_go_on_across_a_takeover_and_a_checkpoint_of_lost_records_is_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    def records(store: quire.Store, base: Path) -> list[int]:
        given = {**options_of(store), "stream": "events", "consumer": "etl", "max_records": "3"}
        return drain(spark, "quire.stream", "id", base, **given)

    def sequences(store: quire.Store, base: Path) -> list[int]:
        given = {**options_of(store), "cursor": "etl", "max_changes": "20"}
        return drain(spark, "quire.changes", "sequence", base, **given)

    bucket = tmp_path / "bucket"
    with quire.open(tmp_path / "former", settings=settings(bucket)) as former:
        events = former.stream("events", create=True)
        events.append([b"kept %d" % number for number in range(7)]).result()
        assert records(former, tmp_path / "records") == list(range(1, 8))
        sequences(former, tmp_path / "sequences")
        for name in ("records", "sequences"):  # without the sink, whose own log has absolute paths
            shutil.copytree(tmp_path / name / "checkpoint", tmp_path / f"lost-{name}" / "checkpoint")
        assert former.archive is not None
        former.archive.wait(30)
        quire.restore(str(bucket), tmp_path / "successor")
        events.append([b"lost %d" % number for number in range(4)]).result()
        assert records(former, tmp_path / "lost-records") == list(range(8, 12))
        sequences(former, tmp_path / "lost-sequences")
        former.archive.wait(30)
    with quire.open(tmp_path / "successor", takeover=True, discard=True, settings=settings(bucket)) as store:
        for _ in range(2):  # before there is anything new, and after
            with pytest.raises(Exception, match="were lost when the store was taken over"):
                records(store, tmp_path / "lost-records")
            with pytest.raises(Exception, match="were lost when the store was taken over"):
                sequences(store, tmp_path / "lost-sequences")
            store.stream("events").append([b"new", b"newer"]).result()
        expected = [*range(1, 8), *range(FIRST, FIRST + 4)]
        assert records(store, tmp_path / "records") == expected
        seen = sequences(store, tmp_path / "sequences")
        assert seen[-1] > FIRST
        assert len(seen) == len(set(seen))
        batches = list((tmp_path / "records" / "checkpoint" / "offsets").glob("[0-9]*"))
        assert len(batches) <= 6, "no batches of the gap"
        frame = spark.read.format("quire.stream").options(**options_of(store), stream="events")
        assert [row.id for row in frame.option("start", "5").load().orderBy("id").collect()] == expected[4:]
        for option in ("start", "end"):
            with pytest.raises(Exception, match="were lost when the store was taken over"):
                frame.option(option, "10").load().collect()


def test_jobs_on_executors_read_what_a_restored_store_still_has_in_its_bucket(
    spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The S3 protocol: merging and verifying tables and segments that are not in the restored directory."""
    assert spark
    endpoint, url = "http://{}:{}".format(*request.getfixturevalue("s3_server")), fresh_url()
    given = ", ".join(f'{name} = "{value}"' for name, value in CREDENTIALS.items())
    lines = [
        "[objects]",
        f'endpoint = "{endpoint}"',
        "allow_http = true",
        'region = "us-east-1"',
        f"credentials = {{ {given} }}",
    ]
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "quire.toml").write_text("\n".join([f'object_store = "{url}"', *lines]) + "\n")
    small: dict[str, Any] = {
        "maintenance": MaintenanceSettings(enabled=False),
        "lsm": LsmSettings(memtable_bytes=64 << 10, table_bytes=16 << 10, block_bytes=1024),
        "stream": StreamSettings(segment_bytes=8 << 10, sync_seconds=0),
    }
    archived = StoreSettings(archive=ArchiveSettings(mode="async", interval_seconds=0.05), **small)
    with quire.open(tmp_path / "store", settings=archived) as store:
        kv, events = store.kv("pairs", create=True), store.stream("events", create=True)
        for start in range(0, 900, 300):
            kv.write({b"%04d" % number: b"%d" % start * 100 for number in range(start, start + 400)})
            kv.flush()
            events.append([b"record %d" % number for number in range(start, start + 300)]).result()
            events.seal()
        events.compress()
        events.evict()
        expected = contents(store)
    shutil.rmtree(tmp_path / "store")
    restored = quire.restore(url, tmp_path / "again", options=s3_options(endpoint), takeover=True)
    assert restored.remote_files >= 6
    with quire.open(tmp_path / "again", settings=StoreSettings(**small)) as store:
        job = store.heavy.verify(runner="spark")
        assert (job.state, store.heavy.damaged()) == (JobState.SUCCEEDED, [])
        before = {path.name for path in (tmp_path / "again").glob("lsm/*/sst/*.sst")}
        assert not before, "the tables are in the bucket"
        job = store.heavy.compact("pairs", runner="spark")
        assert job.state is JobState.SUCCEEDED
        assert {path.name for path in (tmp_path / "again").glob("lsm/*/sst/*.sst")}
        assert contents(store) == expected
        assert store.manifest.check() == []
