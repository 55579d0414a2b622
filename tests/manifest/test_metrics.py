"""Rolling metrics: observed by operations in their own transactions, and exported."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import quire
from quire.core.errors import AlreadyExists
from quire.manifest import tables as t
from quire.manifest.metrics import ManifestCollector, MetricKind, bucket_of, rolling
from quire.manifest.ops.databases import DropDb, RemoveDb
from quire.manifest.ops.local import RecordMetric
from quire.manifest.ops.snapshots import DropSnapshot, PublishSnapshot
from quire.manifest.ops.wal import AdvanceCheckpoint, AppendWalChunk
from quire.manifest.records import JobKind, JobState, MetricRecord, SnapshotKind
from quire.manifest.store import ManifestStore
from tests.manifest.helpers import assert_rejected, commit, register


def metric(manifest: ManifestStore, kind: MetricKind, scope: int = 1) -> MetricRecord | None:
    with manifest.read() as txn:
        return txn.get(t.METRICS, scope, kind)


def last(manifest: ManifestStore, kind: MetricKind) -> float:
    record = metric(manifest, kind)
    assert record is not None
    return record.last


def snapshot(number: int, name: str = "") -> PublishSnapshot:
    return PublishSnapshot(1, number, SnapshotKind.NAMED, name or f"s{number}")


def test_snapshots_are_counted_as_they_are_created_and_dropped(manifest: ManifestStore) -> None:
    commit(manifest, register(1))
    commit(manifest, snapshot(1), snapshot(2))
    commit(manifest, snapshot(3))
    assert last(manifest, MetricKind.SNAPSHOTS) == 3
    commit(manifest, DropSnapshot(1, 2))
    assert last(manifest, MetricKind.SNAPSHOTS) == 2
    counted = [metric(manifest, kind) for kind in (MetricKind.SNAPSHOTS_CREATED, MetricKind.SNAPSHOTS_DROPPED)]
    assert [record.count for record in counted if record is not None] == [3, 1]
    row = metric(manifest, MetricKind.SNAPSHOTS)
    assert row is not None
    assert (row.count, row.min, row.max, row.sum) == (4, 1, 3, 8)
    assert row.buckets[bucket_of(2)] == 3  # 2, 3 and 2
    assert row.updated_at_ms > 0


def test_existing_snapshots_of_an_older_store_are_counted_with_the_next_one(manifest: ManifestStore) -> None:
    commit(manifest, register(1), snapshot(1), snapshot(2))
    with manifest.env.begin_write() as txn:
        txn.drop(manifest.env.handles["metrics"], delete=False)
    path = manifest.env.path
    manifest.close()
    with ManifestStore.open(path) as reopened:
        commit(reopened, snapshot(3))
        assert last(reopened, MetricKind.SNAPSHOTS) == 3


def test_a_batch_that_fails_observes_nothing(manifest: ManifestStore) -> None:
    commit(manifest, register(1), snapshot(1))
    assert_rejected(manifest, AlreadyExists, snapshot(2), snapshot(2, "again"))
    assert last(manifest, MetricKind.SNAPSHOTS) == 1


def test_a_checkpoint_records_its_lag(manifest: ManifestStore) -> None:
    commit(manifest, register(1), AppendWalChunk(1, 0, 1, 1, 1, 500, 4096))
    commit(manifest, AdvanceCheckpoint(1, 1, 400))
    assert last(manifest, MetricKind.WAL_LAG) == 500
    commit(manifest, AdvanceCheckpoint(1, 2, 500))
    assert last(manifest, MetricKind.WAL_LAG) == 100


def test_no_change_fails_because_of_a_damaged_metric(manifest: ManifestStore) -> None:
    commit(manifest, register(1), snapshot(1))
    path, key = manifest.env.path, t.METRICS.key.pack(1, MetricKind.SNAPSHOTS)
    with manifest.env.begin_write() as txn:
        txn.put(key, b"\x01\x80garbage", db=manifest.env.handles["metrics"])
    manifest.close()
    with ManifestStore.open(path) as reopened:
        with reopened.read() as txn:
            assert MetricKind.SNAPSHOTS not in {metric.kind for metric in rolling(txn)}
        commit(reopened, snapshot(2))
        assert last(reopened, MetricKind.SNAPSHOTS) == 2


def test_metrics_of_a_database_are_removed_with_its_tombstone(manifest: ManifestStore) -> None:
    commit(manifest, register(1), register(2, "b"), RecordMetric(1, MetricKind.WAL_LAG, [5.0]))
    commit(manifest, RecordMetric(2, MetricKind.WAL_LAG, [5.0]), DropDb(1), RemoveDb(1))
    assert metric(manifest, MetricKind.WAL_LAG) is None
    assert metric(manifest, MetricKind.WAL_LAG, 2) is not None


def test_rows_of_older_versions_are_read(manifest: ManifestStore) -> None:
    """Rows of older versions end with the buckets."""
    old = t.METRICS.codec.head + msgspec.msgpack.encode([3.0, 2, 1.0, 2.0, [0] * 64])
    with manifest.env.begin_write() as txn:
        txn.put(t.METRICS.key.pack(0, 300), old, db=manifest.env.handles["metrics"])
    with manifest.read() as txn:
        (row,) = rolling(txn)
    assert (row.metric, row.mean, row.record.last, row.record.updated_at_ms) == ("300", 1.5, 0.0, 0)


def test_the_collector_exports_histograms_and_last_values(manifest: ManifestStore) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    commit(manifest, register(1, "shop"), snapshot(1), snapshot(2), snapshot(3))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ManifestCollector(manifest))
    lines = generate_latest(registry).decode().splitlines()
    for line in (
        'quire_rolling_snapshots_bucket{db="1",le="2.0",name="shop"} 1.0',
        'quire_rolling_snapshots_bucket{db="1",le="4.0",name="shop"} 3.0',
        'quire_rolling_snapshots_bucket{db="1",le="+Inf",name="shop"} 3.0',
        'quire_rolling_snapshots_sum{db="1",name="shop"} 6.0',
        'quire_rolling_snapshots_last{db="1",name="shop"} 3.0',
    ):
        assert line in lines


def test_a_checkpoint_of_a_store_records_its_latency_and_lag(tmp_path: Path) -> None:
    with quire.open(tmp_path / "s") as store:
        store.create("shop", "pages")
        db = store.sqlite("shop")
        db.execute("create table t (x)")
        db.close()
        store.checkpoint("shop")
        jobs = [job for job in store.manifest.jobs.jobs(JobState.SUCCEEDED) if job.record.kind is JobKind.CHECKPOINT]
        assert len(jobs) == 1
        with store.manifest.read() as txn:
            counts = {metric.metric: metric.record.count for metric in rolling(txn)}
    assert counts["checkpoint_ms"] == counts["wal_lag"] == 1


@pytest.mark.parametrize("value", [0, 0.5, 1, 3, 2.0**80])
def test_every_value_has_a_bucket(value: float) -> None:
    assert 0 <= bucket_of(value) < 64
