"""`quire.stream` and `quire.manifest_log`: records on all tiers, in batches and as a stream; and the log of segments."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows

import quire
from quire.core.errors import CursorLost, InvalidInput, OutOfRange, StalePlan, UnknownDatabase
from quire.core.settings import MaintenanceSettings, ManifestLogSettings, StoreSettings, StreamSettings
from quire.spark.access import options_of
from quire.spark.sources import manifest_log, stream, stream_records
from quire.spark.sources.base import Options
from quire.stream.remote_read import SharedSegment, SharedStream
from quire.stream.state import Retention
from quire.stream.stream import Stream
from tests.manifest.helpers import eventually
from tests.spark.served_store import ServedStore, rows_of, run_available

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = StoreSettings(
    maintenance=MaintenanceSettings(enabled=False),
    stream=StreamSettings(segment_bytes=16 << 10, record_bytes_max=8 << 10),
    manifest_log=ManifestLogSettings(chunk_bytes=16 << 10, record_bytes_max=1024),
)
RECORDS, PER_SEGMENT = 250, 50


@contextmanager
def stream_on_all_tiers(path: Path) -> Iterator[Stream]:
    """A served store with a stream: a segment of each kind of residency, the last one open."""
    with quire.open(path, settings=SETTINGS) as store:
        options_of(store)
        clicks = store.stream("clicks", create=True)
        for start in range(0, RECORDS, PER_SEGMENT):
            clicks.append([payload(number) for number in range(start + 1, start + PER_SEGMENT + 1)]).result()
            if start + PER_SEGMENT < RECORDS:
                clicks.seal()
        clicks.compress(2)  # segment 1: hot · 2: hot and warm · 3: warm · 4: only an object · 5: open
        clicks.compress(3)
        clicks.evict(3)
        clicks.upload(4)
        clicks.evict(4, warm=True)
        yield clicks
        assert store.manifest.check() == []


def payload(number: int) -> bytes:
    return b"%d " % number + bytes(number % 200)


@pytest.fixture(scope="module")
def shared_stream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Stream]]:
    path = tmp_path_factory.mktemp("records") / "store"
    with stream_on_all_tiers(path) as clicks:
        yield path, clicks


def parsed_options(path: Path, **options: Any) -> Options:
    all_options = {"store": str(path), "stream": "clicks", **{name: str(value) for name, value in options.items()}}
    return Options(all_options, source="quire.stream", known=stream.StreamSource.KNOWN)


def reader(path: Path, **options: Any) -> stream.RecordsReader:
    parsed = parsed_options(path, **options)
    return stream.RecordsReader(parsed, stream_records.shape(parsed))


def read(source: Any, partitions: Any) -> list[tuple[Any, ...]]:
    """The rows that executors would read from these partitions, in order."""
    return [tuple(row.values()) for part in partitions for batch in source.read(part) for row in batch.to_pylist()]


# ── a range ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_spark_reads_every_tier_and_the_open_segment(spark: SparkSession, shared_stream: tuple[Path, Stream]) -> None:
    path, clicks = shared_stream
    frame = ServedStore(clicks, spark, {"store": str(path)}).read("quire.stream", stream="clicks")  # type: ignore[arg-type]
    assert frame.schema.simpleString() == "struct<id:bigint,timestamp:timestamp,payload:binary>"
    rows = rows_of(frame, "id")
    assert [(number, bytes(body)) for number, _, body in rows] == [(n, payload(n)) for n in range(1, RECORDS + 1)]
    stamps = {record.id: record.timestamp_ms for record in clicks.read()}
    assert [int(moment.timestamp() * 1000) for _, moment, _ in rows] == [stamps[row[0]] for row in rows]
    assert frame.filter("id >= 100 and id < 110").count() == 10
    moment = datetime.fromtimestamp(stamps[RECORDS] / 1000, UTC).isoformat()
    assert frame.filter(f"timestamp >= timestamp'{moment}'").count() >= PER_SEGMENT


def test_a_range_has_the_requested_records(shared_stream: tuple[Path, Stream]) -> None:
    path, _ = shared_stream
    for start, end in ((1, 2), (40, 61), (130, 200), (199, RECORDS + 1), (7, 7)):
        some = reader(path, start=start, end=end, columns="id,payload")
        assert read(some, some.partitions()) == [(n, payload(n)) for n in range(start, end)]
    for invalid, error in (({"end": RECORDS + 2}, OutOfRange), ({"start": RECORDS + 2}, OutOfRange)):
        with pytest.raises(error):
            reader(path, **invalid).partitions()
    for options in ({"columns": "key"}, {"consumer": "me"}, {"upload": "perhaps"}, {"start": "first"}, {"strat": 1}):
        with pytest.raises(InvalidInput):
            reader(path, **options)
    with pytest.raises(UnknownDatabase):
        stream.RecordsReader(
            parsed_options(path, stream="taps"), stream_records.shape(parsed_options(path))
        ).partitions()


def test_parts_are_of_about_the_same_size_and_complete(
    shared_stream: tuple[Path, Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = shared_stream
    monkeypatch.setattr(stream_records, "PART_BYTES_MIN", 1)
    for count in (1, 3, 5, 17):
        some = reader(path, partitions=count, columns="id")
        parts = some.partitions()
        ranges = [range_ for part in parts for range_ in part.value]
        assert [range_.start for range_ in ranges[1:]] == [range_.stop for range_ in ranges[:-1]]
        assert len(ranges) == len(parts), "each task has one range of a single stream"
        assert read(some, parts) == [(n,) for n in range(1, RECORDS + 1)]
        assert count // 2 < len(parts) <= count
    shared = SharedStream("", 1, "", "", 1, 1001, ())
    only_segment = SharedSegment(1, 1, 1001, 10_000, 0, 1)
    cut = [(part.start, part.stop) for part in stream_records.split(shared, [only_segment], 1, 1001, 5)]
    assert cut == [(1, 201), (201, 401), (401, 601), (601, 801), (801, 1001)]


def test_records_since_a_time_are_exactly_those(shared_stream: tuple[Path, Stream]) -> None:
    """Whole segments are skipped by the time of their seal, the rest record by record, also where no column has the
    time.
    """
    path, clicks = shared_stream
    stamps = {record.id: record.timestamp_ms for record in clicks.read()}
    for since in sorted({*stamps.values(), min(stamps.values()) - 1, max(stamps.values()) + 1}):
        some = reader(path, columns="id", since=since)
        assert read(some, some.partitions()) == [(n,) for n, stamp in stamps.items() if stamp >= since]
    moment = datetime.fromtimestamp(stamps[120] / 1000, UTC)
    for text in (moment.isoformat(), moment.replace(tzinfo=None).isoformat()):
        some = reader(path, columns="id", since=text, end=150)
        assert read(some, some.partitions()) == [(n,) for n in range(1, 150) if stamps[n] >= stamps[120]]
    some = reader(path, columns="id", since="yesterday")
    assert read(some, some.partitions()) == [(n,) for n in stamps]
    for invalid in ("tomorrow", "-5", "12:00"):
        with pytest.raises(InvalidInput, match="`since` takes a time"):
            reader(path, since=invalid)


def test_segments_that_moved_after_planning_are_found(tmp_path: Path) -> None:
    """Hot files become objects between planning and reading; the open segment is sealed, and grows."""
    with stream_on_all_tiers(tmp_path / "store") as clicks:
        some = reader(tmp_path / "store", columns="id,payload")
        parts = some.partitions()
        clicks.append([b"later"] * 10).result()
        clicks.seal()
        clicks.upload()
        clicks.evict(warm=True)
        assert clicks.info().hot_segments == clicks.info().warm_segments == 0
        assert read(some, parts) == [(n, payload(n)) for n in range(1, RECORDS + 1)]
        clicks.hydrate()
        assert read(some, parts) == [(n, payload(n)) for n in range(1, RECORDS + 1)]


def without_directory(parts: Any) -> list[InputPartition]:
    """The same partitions on a machine without access to the store's directory."""

    def hide_directory(part: stream_records.RecordRange) -> stream_records.RecordRange:
        return replace(part, share=msgspec.structs.replace(part.share, root="/nowhere"))

    return [InputPartition([hide_directory(range_) for range_ in part.value]) for part in parts]


def test_executors_without_the_directory_read_objects(tmp_path: Path) -> None:
    with stream_on_all_tiers(tmp_path / "store") as clicks:
        never = reader(tmp_path / "store", columns="id", upload="false")
        with pytest.raises(InvalidInput, match="not uploaded yet"):
            read(never, without_directory(never.partitions()))
        some = reader(tmp_path / "store", columns="id", start=60, end=80)
        assert read(some, without_directory(some.partitions())) == [(n,) for n in range(60, 80)]
        assert [segment.segment_id for segment in clicks.ledger.view if segment.is_remote] == [2, 4], (
            "only the requested ones"
        )
        assert not clicks.ledger.view.segments[-1].is_sealed
        before = reader(tmp_path / "store", columns="id", upload="true")
        parts = before.partitions()
        assert all(segment.is_remote for segment in clicks.ledger.view), "uploaded before anything is read"
        assert read(before, without_directory(parts)) == [(n,) for n in range(1, RECORDS + 1)]


def test_records_that_retention_removed_are_an_error(tmp_path: Path) -> None:
    with stream_on_all_tiers(tmp_path / "store") as clicks:
        some = reader(tmp_path / "store")
        parts = some.partitions()
        clicks.retain(Retention(bytes=1))
        assert clicks.retire() == 4
        with pytest.raises(CursorLost):
            read(some, parts)
        with pytest.raises(CursorLost):
            reader(tmp_path / "store", start=1).partitions()
        again = reader(tmp_path / "store", columns="id")
        assert read(again, again.partitions()) == [(n,) for n in range(201, RECORDS + 1)]


def test_a_damaged_copy_is_skipped_and_a_damaged_last_copy_is_an_error(tmp_path: Path) -> None:
    from quire.core.errors import Corruption
    from quire.durable.names import Tier

    with stream_on_all_tiers(tmp_path / "store") as clicks:
        for segment in (1, 2):
            hot = Path(clicks.files.segment(Tier.HOT, segment))
            raw = bytearray(hot.read_bytes())
            raw[1_000] ^= 1
            hot.write_bytes(raw)
        some = reader(tmp_path / "store", columns="id", start=51, end=101)
        assert read(some, some.partitions()) == [(n,) for n in range(51, 101)]
        some = reader(tmp_path / "store", columns="id", start=1, end=51)
        with pytest.raises(Corruption):
            read(some, some.partitions())


# ── as it comes ───────────────────────────────────────────────────────────────────────────────────────────────────────
@contextmanager
def query(path: Path, **options: Any) -> Iterator[stream.RecordsQueryReader]:
    """The reader as in Spark's process."""
    parsed = parsed_options(path, **options)
    reader_ = stream.RecordsQueryReader(parsed, stream_records.shape(parsed))
    try:
        yield reader_
    finally:
        reader_.stop()


def test_offsets_are_records_and_a_commit_moves_the_consumer(tmp_path: Path) -> None:
    with stream_on_all_tiers(tmp_path / "store") as clicks:
        with query(tmp_path / "store", consumer="etl", columns="id") as reader_:
            start = reader_.initialOffset()
            assert start["record"] == 1
            assert reader_.latestOffset(start, ReadMaxRows(30))["record"] == 31
            assert reader_.latestOffset(start, ReadMinRows(9_999)) == start
            end = reader_.latestOffset(start, ReadAllAvailable())
            assert end["record"] == RECORDS + 1 == reader_.reportLatestOffset()["record"]
            assert read(reader_, reader_.partitions(start, end)) == [(n,) for n in range(1, RECORDS + 1)]
            assert reader_.partitions(end, end) == []
            assert clicks.position("etl") == 1, "not before Spark commits"
            reader_.commit({**end, "record": 101})
            reader_.commit({**end, "record": 60})
            assert clicks.position("etl") == 101
            assert reader_.latestOffset(end, ReadAllAvailable()) == end, "nothing new, so the same offset"
            reader_.prepareForTriggerAvailableNow()
            clicks.append(b"more").result()
            assert reader_.latestOffset(end, ReadAllAvailable()) == end
        with query(tmp_path / "store", consumer="etl", start="latest") as reader_:
            assert reader_.initialOffset()["record"] == 101, "a consumer's position takes precedence over `start`"
            with pytest.raises(CursorLost, match="older checkpoint"):
                reader_.partitions(start, end)
        for start_option, record in (("latest", RECORDS + 2), ("77", 77)):
            with query(tmp_path / "store", consumer=f"at {start_option}", start=start_option) as reader_:
                assert reader_.initialOffset()["record"] == record


def test_a_lost_position_is_an_error_not_a_gap(tmp_path: Path) -> None:
    with stream_on_all_tiers(tmp_path / "store") as clicks:
        with pytest.raises(InvalidInput, match="consumer"), query(tmp_path / "store"):
            pass
        with query(tmp_path / "store", consumer="etl") as reader_:
            start = reader_.initialOffset()
            end = reader_.latestOffset(start, ReadAllAvailable())
            with pytest.raises(InvalidInput, match="another stream"):
                reader_.partitions({**start, "stream": 99}, end)
            clicks.retain(Retention(bytes=1))
            assert clicks.retire() == 0, "the consumer holds unread records"
            clicks.retain(Retention(bytes=1, hold_seconds=1e-9))
            while not (retired := clicks.retire()):
                time.sleep(0.001)  # the reader's poll has renewed the hold in this millisecond
            assert retired == 4, "a consumer that is silent for too long holds nothing"
            with pytest.raises(CursorLost):
                reader_.partitions(start, end)
            clicks.drop_consumer("etl")
            with pytest.raises(CursorLost, match="dropped"):
                reader_.commit(end)
        with query(tmp_path / "store", consumer="new", start="5") as late, pytest.raises(CursorLost):
            late.initialOffset()


@pytest.mark.slow
def test_a_restarted_query_loses_and_duplicates_nothing(spark: SparkSession, tmp_path: Path) -> None:
    with stream_on_all_tiers(tmp_path / "store") as clicks:
        options = {"store": str(tmp_path / "store"), "stream": "clicks", "consumer": "etl", "max_records": "60"}
        for run in range(3):
            frame = spark.readStream.format("quire.stream").options(**options).load()
            writer = frame.writeStream.format("parquet").option("path", str(tmp_path / "out"))
            run_available(writer.option("checkpointLocation", str(tmp_path / "at")))
            clicks.append([payload(n) for n in range(clicks.end_record, clicks.end_record + 70)]).result()
            clicks.upload()
            clicks.evict(warm=run == 1)
            clicks.retain(Retention(consumed=True))
            clicks.retire()
        rows = rows_of(spark.read.parquet(str(tmp_path / "out")), "id")
        assert [(row[0], bytes(row[2])) for row in rows] == [(n, payload(n)) for n in range(1, RECORDS + 141)]
        assert clicks.first_record > PER_SEGMENT, "records that were read and committed can be retired"


HOLD_SECONDS = 10.0


@pytest.mark.slow
def test_an_idle_query_keeps_its_hold_until_it_ends(spark: SparkSession, tmp_path: Path) -> None:
    """Spark commits nothing while there is nothing to read: acknowledging the same position again keeps the consumer
    alive.
    """
    with stream_on_all_tiers(tmp_path / "store") as clicks:
        options = {"store": str(tmp_path / "store"), "stream": "clicks", "consumer": "etl"}
        frame = spark.readStream.format("quire.stream").options(**options).load()
        writer = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "at"))
        running = writer.start()
        try:
            assert eventually(lambda: sum(batch["numInputRows"] for batch in running.recentProgress) == RECORDS, 180)
            clicks.retain(Retention(bytes=1, hold_seconds=HOLD_SECONDS))
            first = clicks.info().consumers["etl"]
            assert first.position == 1, "its only batch is not acknowledged, because none has followed"
            assert eventually(
                lambda: clicks.info().consumers["etl"].acked_ms > first.acked_ms + 1_500 * HOLD_SECONDS, 180
            )
            assert clicks.info().consumers["etl"].position == 1
            assert clicks.retire() == 0, "it is alive, though idle for longer than the hold"
        finally:
            running.stop()
        assert eventually(lambda: clicks.retire() >= 0 and clicks.first_record == 4 * PER_SEGMENT + 1)


# ── the manifest log ──────────────────────────────────────────────────────────────────────────────────────────────────
def logs(path: Path, **options: Any) -> manifest_log.ManifestLogTable:
    parsed = Options(
        {"store": str(path), **options}, source="quire.manifest_log", known=manifest_log.ManifestLogSource.KNOWN
    )
    return manifest_log.ManifestLogTable(parsed, manifest_log.SCHEMA)


def rows(source: Any) -> list[dict[str, Any]]:
    return [row for part in source.partitions() for batch in source.read(part) for row in batch.to_pylist()]


def test_spark_reads_the_log_from_disk_and_objects(spark: SparkSession, shared_stream: tuple[Path, Stream]) -> None:
    path, clicks = shared_stream
    clicks.ledger.log.rotate()
    clicks.ledger.log.upload()
    clicks.append(b"goes into another chunk").result()
    clicks.seal()
    frame = ServedStore(clicks, spark, {"store": str(path)}).read("quire.manifest_log", stream="cl*")  # type: ignore[arg-type]
    rows_read = frame.orderBy("ordinal").collect()
    assert [row.ordinal for row in rows_read] == list(range(clicks.ledger.log.index.records))
    assert {row.stream for row in rows_read} == {"clicks"}
    first = rows_read[0]
    assert (first.chunk, first.offset, first.type, first.segment_id) == (0, 64, "SegmentOpened", 1)
    assert json.loads(first.fields) == {"base_offset": 1, "epoch": 1}
    uploaded = frame.filter("type = 'UploadDone'").collect()
    assert [json.loads(row.fields)["key"] for row in uploaded] == [clicks.ledger.view.get(4).key]  # type: ignore[union-attr]


def test_every_log_record_is_read_once_from_whatever_tier(tmp_path: Path) -> None:
    from quire.stream import mlog_bundle

    with stream_on_all_tiers(tmp_path / "store") as clicks:
        log = clicks.ledger.log
        for _ in range(4):
            clicks.append(b"x").result()
            clicks.seal()
            log.rotate()
        log.upload()
        count = log.index.records
        all_rows = rows(logs(tmp_path / "store"))
        assert [row["ordinal"] for row in all_rows] == list(range(count))
        objects = rows(logs(tmp_path / "store", tier="object"))
        assert [row | {"tier": "disk"} for row in objects] == [
            row for row in all_rows if row["chunk"] < log.committed.chunk_index
        ]
        assert rows(logs(tmp_path / "store", tier="disk")) == [row | {"tier": "disk"} for row in all_rows]
        # A bundle replaces its three chunks, whether or not they still exist.
        assert log.objects is not None
        task = mlog_bundle.BundleTask(stream_id=clicks.stream_id, first=0, last=2, prefix=log.objects.prefixes[0])
        bundle = mlog_bundle.run(task, log.objects.store)
        bundled = rows(logs(tmp_path / "store"))
        assert [(row["ordinal"], row["type"], row["fields"]) for row in bundled] == [
            (row["ordinal"], row["type"], row["fields"]) for row in all_rows
        ]
        assert {(row["chunk"], row["last_chunk"]) for row in bundled[: bundle.record_count]} == {(0, 2)}
        planned = logs(tmp_path / "store", tier="object")
        parts = planned.partitions()
        bucket: Any = log.objects.store
        bucket.delete(log.objects.chunk_key(4))
        with pytest.raises(StalePlan):
            [batch for part in parts for batch in planned.read(part)]


def test_streams_and_tiers_are_selected_by_options(tmp_path: Path) -> None:
    with stream_on_all_tiers(tmp_path / "store") as clicks:
        clicks.ledger.log.rotate()
        clicks.append(b"x").result()
        clicks.seal()
        assert {row["chunk"] for row in rows(logs(tmp_path / "store", stream="cl*"))} == {0, 1, 2}
        assert logs(tmp_path / "store", stream="t*").partitions() == []
        with pytest.raises(UnknownDatabase):
            logs(tmp_path / "store", stream="taps").partitions()
        with pytest.raises(InvalidInput):
            logs(tmp_path / "store", tier="tape")


def test_damage_in_the_log_is_an_error(tmp_path: Path) -> None:
    from quire.core.errors import ManifestIntegrityError

    with stream_on_all_tiers(tmp_path / "store") as clicks:
        files = clicks.ledger.log.files
        path = Path(files.chunk(0))
        shutil.copy(path, tmp_path / "kept")
        raw = bytearray(path.read_bytes())
        raw[100] ^= 1
        path.write_bytes(raw)
        with pytest.raises(ManifestIntegrityError):
            rows(logs(tmp_path / "store"))
        path.write_bytes((tmp_path / "kept").read_bytes())


# ── jobs about streams ────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.slow
def test_bundles_and_verification_of_many_streams_run_on_spark(spark: SparkSession, tmp_path: Path) -> None:
    """The same as with threads: see tests/jobs/test_bundle_job.py and test_stream_verify.py."""
    from quire.manifest.records import JobState
    from quire.stream.mlog_tier2 import LogObjects
    from tests.jobs.test_bundle_job import with_chunks
    from tests.jobs.test_stream_verify import flip

    assert spark is not None
    with quire.open(tmp_path / "store", settings=SETTINGS) as store:
        streams = [store.stream(f"stream {number}", create=True) for number in range(5)]
        for stream_ in streams:
            with_chunks(stream_)
            stream_.upload()
            stream_.evict(1, warm=True)
        job = store.heavy.bundle(runner="spark")
        assert job.record.state is JobState.SUCCEEDED, job.record.error
        assert (job.result["streams"], job.result["bundles"], job.result["failed"]) == (5, 5, [])
        with store.manifest.read() as txn:
            prefixes = txn.object_prefixes()
        for stream_ in streams:
            listing = LogObjects(store.objects, stream_.stream_id, prefixes).listing()
            assert listing.bundles
            assert not [index for index in listing.chunks if listing.bundle_of(index) is not None]
        result = store.heavy.verify(runner="spark").result
        assert (result["missing"], result["altered"], result["logs"]) == (0, 0, [])
        assert result["verified"] == sum(len(stream_.ledger.view.sealed) for stream_ in streams)
        lone = streams[2].ledger.view.get(1)
        assert lone is not None
        flip(tmp_path / "store" / "objects" / lone.key)
        bundle = next(iter(LogObjects(store.objects, streams[3].stream_id, prefixes).listing().bundles.values()))
        flip(tmp_path / "store" / "objects" / bundle.key)
        result = store.heavy.verify(runner="spark").result
        assert result["altered"] == 1
        assert [problem.split(":")[0] for problem in result["logs"]] == [
            f"manifest log of stream {streams[3].stream_id}, L5"
        ]
        assert store.manifest.check() == []
