"""Damaged manifest rows that control deletion: nothing is deleted because of them, and the damage is reported.

Bits are flipped in LMDB, bypassing the manifest, as a failing disk would.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quire.core.errors import ManifestDamaged
from quire.manifest import tables as t
from quire.manifest.records import JobKind, RetentionRecord
from quire.manifest.store import ManifestStore
from tests.jobs.job_store import JobStore
from tests.manifest.test_rows import flips


def first_row(manifest: ManifestStore, table: t.Table[Any], *prefix: Any) -> tuple[bytes, bytes]:
    with manifest.read() as txn:
        return next(iter(txn.raw_scan(table, *prefix)))


def overwrite(manifest: ManifestStore, table: t.Table[Any], key: bytes, raw: bytes) -> None:
    with manifest.env.begin_write() as txn:
        txn.put(key, raw, db=manifest.env.handles[table.name])


@contextmanager
def damaged(manifest: ManifestStore, table: t.Table[Any], key: bytes, raw: bytes) -> Iterator[None]:
    """The row has different bytes within the block, and its own afterwards."""
    with manifest.read() as txn:
        before = dict(txn.raw_scan(table))[key]
    overwrite(manifest, table, key, raw)
    try:
        yield
    finally:
        overwrite(manifest, table, key, before)


@pytest.fixture
def db_with_six(local_store: JobStore) -> int:
    """A database of six snapshots with a policy that keeps them all."""
    db_id = local_store.database()
    for number in range(6):
        local_store.chunks(db_id, number)
        local_store.manifest.snapshots.publish(db_id)
        local_store.clock.advance(10)
    local_store.manifest.retention.set(db_id, RetentionRecord(keep_last=6))
    return db_id


def test_no_flipped_bit_of_a_retention_policy_drops_a_snapshot(local_store: JobStore, db_with_six: int) -> None:
    """One flipped bit turned keep_last=6 into 2, and upkeep dropped 4 of 6 snapshots."""
    key, raw = first_row(local_store.manifest, t.RETENTION)
    files = local_store.files()
    for damaged_row in flips(raw):
        with damaged(local_store.manifest, t.RETENTION, key, damaged_row):
            local_store.upkeep.round(everything=True)
            with pytest.raises(ManifestDamaged, match="retention"):
                local_store.manifest.retention.plan(db_with_six)
            job = local_store.manifest.jobs.enqueue(JobKind.RETENTION, db_with_six)
            local_store.worker.drain()
            assert "table='retention'" in local_store.job(job).record.error
        assert len(local_store.manifest.snapshots.of(db_with_six)) == 6
    assert local_store.files() == files


def test_a_damaged_policy_is_reported_and_affects_no_other_database(
    local_store: JobStore, db_with_six: int, capsys: pytest.CaptureFixture[str]
) -> None:
    other = local_store.database("other")
    for _ in range(3):
        local_store.manifest.snapshots.publish(other)
    local_store.manifest.retention.set(other, RetentionRecord(keep_last=1))
    key, raw = first_row(local_store.manifest, t.RETENTION, db_with_six)
    with damaged(local_store.manifest, t.RETENTION, key, raw[:-1] + bytes([raw[-1] ^ 1])):
        assert local_store.upkeep.round(everything=True).dropped == 2
        assert [str(problem) for problem in local_store.manifest.check() if problem.rule == "K1" and problem.contained]
    assert len(local_store.manifest.snapshots.of(other)) == 1
    assert len(local_store.manifest.snapshots.of(db_with_six)) == 6
    log = capsys.readouterr().err
    assert f"retention.failed db_id={db_with_six}" in log
    assert "retention.damaged" in log


@pytest.mark.parametrize("table", [t.SNAPSHOT_INDEX, t.GC_REFCOUNTS, t.GC_ZERO, t.CHUNK_CATALOG, t.SLOT_LEAF, t.DB])
def test_no_flipped_bit_in_the_collectors_rows_deletes_a_held_artifact(
    local_store: JobStore, db_with_six: int, table: t.Table[Any]
) -> None:
    """An artifact is at zero and its grace has passed: with a damaged row of it or beside it, nothing else is
    deleted."""
    unreferenced = local_store.chunks(db_with_six, 7)[0]
    local_store.chunks(db_with_six, 7)
    held_paths = {key: local_store.location(key).local for key in local_store.artifacts()}
    assert unreferenced not in held_paths
    if table is t.SNAPSHOT_INDEX:
        # Expiry: a snapshot that never expires must not expire, whatever bit is flipped.
        local_store.manifest.retention.set(db_with_six, None)
    rows = [first_row(local_store.manifest, table)]
    for key, raw in rows:
        for damaged_row in flips(raw)[::3]:
            with damaged(local_store.manifest, table, key, damaged_row):
                local_store.upkeep.run_once()
            assert len(local_store.manifest.snapshots.of(db_with_six)) == 6
            assert local_store.files() >= {path.removeprefix(local_store.root + "/") for path in held_paths.values()}
    local_store.settle()
    assert local_store.files() == {path.removeprefix(local_store.root + "/") for path in held_paths.values()}


def test_a_damaged_row_at_zero_keeps_its_artifact_and_the_others_are_deleted(
    local_store: JobStore, db_with_six: int
) -> None:
    unreferenced = [local_store.chunks(db_with_six, slot)[0] for slot in (7, 8)]
    paths = [local_store.location(key).local for key in unreferenced]
    for slot in (7, 8):
        local_store.chunks(db_with_six, slot)
    local_store.clock.advance(3600)
    with local_store.manifest.read() as txn:
        zero_rows = [row for row in txn.raw_scan(t.GC_ZERO, db_with_six) if row[0][4] != 4]
    key, raw = zero_rows[0]
    with damaged(local_store.manifest, t.GC_ZERO, key, raw[:6] + bytes([raw[6] ^ 64]) + raw[7:]):
        local_store.upkeep.run_once()
        remaining = [path for path in paths if path.removeprefix(local_store.root + "/") in local_store.files()]
        assert len(remaining) == 1, "the damaged row keeps one, the other is deleted"
        jobs = [job for job in local_store.manifest.jobs.jobs() if job.kind is JobKind.DELETE]
        assert any("gc_zero" in job.record.error for job in jobs)
    local_store.settle()
    assert not [path for path in paths if path.removeprefix(local_store.root + "/") in local_store.files()]


def test_a_flipped_cursor_does_not_trim_the_feed_under_others(local_store: JobStore) -> None:
    """A flipped bit that moved a position far ahead caused everything before it to be trimmed."""
    feed = local_store.manifest.feed
    slow, fast = feed.register(name="slow"), feed.register(name="fast")
    for _ in range(20):
        local_store.database(f"db-{_}")
    key, raw = first_row(local_store.manifest, t.CHANGE_CURSORS, slow.cursor_id)
    head = feed.cursor("fast").head_sequence
    for position, damaged_row in enumerate(flips(raw)):
        with damaged(local_store.manifest, t.CHANGE_CURSORS, key, damaged_row):
            feed.acknowledge("fast", min(1 + position, head))
            local_store.upkeep.round(everything=True)
        with local_store.manifest.read() as txn:
            assert txn.feed_bounds()[0] == 1
    assert feed.cursor("slow").acked_sequence == 0
    assert fast.cursor_id != slow.cursor_id
