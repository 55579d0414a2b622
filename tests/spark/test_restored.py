"""Spark and a store restored from its bucket: streaming queries with checkpoints of the former owner, and jobs whose
input is still in the bucket.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows

import quire
from quire.core.errors import CursorLost
from quire.core.settings import ArchiveSettings, LsmSettings, MaintenanceSettings, StoreSettings, StreamSettings
from quire.manifest.namespaces import Parent
from quire.manifest.records import JobState
from quire.spark import options_of
from quire.spark.sources import stream, stream_records
from quire.spark.sources.base import Options
from tests.archive.archived_store import contents, settings
from tests.objects.conftest import CREDENTIALS, fresh_url, s3_options, s3_server
from tests.spark.served_store import run_available

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["s3_server"]  # a fixture

FIRST = 2 << 40


def drain(
    spark: SparkSession, source: str, column: str, base: Path, *, sink: str = "parquet", **options: str
) -> list[int]:
    """Run a query on the available data, with its checkpoint below `base`. Returns the content of its sink, if that is
    files.
    """
    frame = spark.readStream.format(source).options(**options).load()
    writer = frame.select(column).writeStream.format(sink).option("path", str(base / "out"))
    run_available(writer.option("checkpointLocation", str(base / "checkpoint")))
    if sink == "noop":
        return []
    return [row[0] for row in spark.read.parquet(str(base / "out")).orderBy(column).collect()]


class Reader:
    """The reader of a streaming query, as in Spark's process."""

    def __init__(self, store: quire.Store, **options: str) -> None:
        all_options = {**options_of(store), "stream": "events", "consumer": "etl", **options}
        parsed = Options(all_options, source="quire.stream", known=stream.StreamSource.KNOWN)
        self.reader = stream.RecordsQueryReader(parsed, stream_records.shape(parsed))

    def __enter__(self) -> stream.RecordsQueryReader:
        return self.reader

    def __exit__(self, *_: object) -> None:
        self.reader.stop()


def test_batches_of_records_cross_a_takeover_and_offsets_of_lost_records_are_refused(tmp_path: Path) -> None:
    quiet = StoreSettings(maintenance=MaintenanceSettings(enabled=False))
    with quire.open(tmp_path / "store", settings=quiet) as store:
        store.stream("events", create=True).append([b"kept"] * 7).result()
        store.streams.close_stream("events")
        store.manifest.begin_owner_epoch(parent=Parent())
        first = store.feed.head()
        store.stream("events").append([b"new"] * 4).result()
        with Reader(store) as reader:
            offset = start = reader.initialOffset()
            ends = []
            while offset["record"] < first + 4:
                offset = reader.latestOffset(offset, ReadMaxRows(4))
                ends.append(offset["record"])
            assert ends == [5, first + 1, first + 4], "four records each, none from the gap"
            assert reader.latestOffset({**start, "record": 8}, ReadMinRows(5))["record"] == 8
            parts = reader.partitions(start, offset)
            rows = [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
            assert [row["id"] for row in rows] == [*range(1, 8), *range(first, first + 4)]
            assert len(reader.partitions({**start, "record": 8}, offset)) == 1
            reader.commit({**start, "record": 8})
            reader.partitions(
                {**start, "record": 8}, offset
            )  # the consumer is after the gap now, which is the same position
            for position in (9, first - 1):
                lost = {**start, "record": position}
                for refused in (
                    lambda lost=lost: reader.latestOffset(lost, ReadAllAvailable()),
                    lambda lost=lost: reader.partitions(lost, offset),
                    lambda lost=lost: reader.partitions(start, lost),
                    lambda lost=lost: reader.commit(lost),
                ):
                    with pytest.raises(CursorLost, match="were lost when the store was taken over"):
                        refused()


@pytest.mark.slow
def test_a_query_continues_across_a_takeover_and_a_checkpoint_of_lost_records_is_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    def records(store: quire.Store, base: Path, sink: str = "parquet") -> list[int]:
        source_options = {**options_of(store), "stream": "events", "consumer": "etl"}
        return drain(spark, "quire.stream", "id", base, sink=sink, **source_options)

    def sequences(store: quire.Store) -> list[int]:
        source_options = {**options_of(store), "cursor": "etl"}
        return drain(spark, "quire.changes", "sequence", tmp_path / "sequences", sink="noop", **source_options)

    bucket = tmp_path / "bucket"
    with quire.open(tmp_path / "former", settings=settings(bucket)) as former_store:
        former_store.feed.register(name="etl")  # otherwise the cursor itself would be lost
        events = former_store.stream("events", create=True)
        events.append([b"kept %d" % number for number in range(7)]).result()
        assert records(former_store, tmp_path / "records") == list(range(1, 8))
        # Without the sink, because its log cannot be copied.
        shutil.copytree(tmp_path / "records" / "checkpoint", tmp_path / "lost" / "checkpoint")
        assert former_store.archive is not None
        former_store.archive.wait(30)
        quire.restore(str(bucket), tmp_path / "successor")
        events.append([b"lost %d" % number for number in range(4)]).result()
        former_store.create("lost", "lsm")
        records(former_store, tmp_path / "lost", "noop")
        sequences(former_store)
        former_store.archive.wait(30)
    with quire.open(tmp_path / "successor", takeover=True, discard=True, settings=settings(bucket)) as store:
        store.stream("events").append([b"new", b"newer"]).result()
        with pytest.raises(Exception, match="were lost when the store was taken over"):
            records(store, tmp_path / "lost", "noop")
        with pytest.raises(Exception, match="were lost when the store was taken over"):
            sequences(store)
        assert records(store, tmp_path / "records") == [*range(1, 8), FIRST, FIRST + 1]


def test_jobs_on_executors_read_objects_that_are_only_in_the_bucket_of_a_restored_store(
    spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """With the S3 protocol: merging and verifying tables and segments that are not in the restored directory."""
    assert spark
    endpoint, url = "http://{}:{}".format(*request.getfixturevalue("s3_server")), fresh_url()
    credentials = ", ".join(f'{name} = "{value}"' for name, value in CREDENTIALS.items())
    lines = [
        "[objects]",
        f'endpoint = "{endpoint}"',
        "allow_http = true",
        'region = "us-east-1"',
        f"credentials = {{ {credentials} }}",
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
