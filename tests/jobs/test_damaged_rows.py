"""Rows that steer deletion, damaged in the manifest: nothing is deleted by them, and it is said.

Bits are flipped as a disk does it: in LMDB, behind the manifest's back.
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
from tests.jobs.world import World
from tests.manifest.test_rows import flips


def first_row(manifest: ManifestStore, table: t.Table[Any], *prefix: Any) -> tuple[bytes, bytes]:
    with manifest.read() as txn:
        return next(iter(txn.raw_scan(table, *prefix)))


def overwrite(manifest: ManifestStore, table: t.Table[Any], key: bytes, raw: bytes) -> None:
    with manifest.env.begin_write() as txn:
        txn.put(key, raw, db=manifest.env.handles[table.name])


@contextmanager
def damaged(manifest: ManifestStore, table: t.Table[Any], key: bytes, raw: bytes) -> Iterator[None]:
    """The row has other bytes; at the end it has its own again."""
    with manifest.read() as txn:
        before = dict(txn.raw_scan(table))[key]
    overwrite(manifest, table, key, raw)
    try:
        yield
    finally:
        overwrite(manifest, table, key, before)


@pytest.fixture
def six(local: World) -> int:
    """A database of six snapshots with a policy that keeps them all."""
    db_id = local.database()
    for number in range(6):
        local.chunks(db_id, number)
        local.manifest.snapshots.publish(db_id)
        local.clock.advance(10)
    local.manifest.retention.set(db_id, RetentionRecord(keep_last=6))
    return db_id


def test_no_flipped_bit_of_a_retention_policy_drops_a_snapshot(local: World, six: int) -> None:
    """One flipped bit made keep_last=6 a 2 and upkeep dropped 4 of 6 snapshots."""
    key, raw = first_row(local.manifest, t.RETENTION)
    files = local.files()
    for wrong in flips(raw):
        with damaged(local.manifest, t.RETENTION, key, wrong):
            local.upkeep.round(everything=True)
            with pytest.raises(ManifestDamaged, match="retention"):
                local.manifest.retention.plan(six)
            job = local.manifest.jobs.enqueue(JobKind.RETENTION, six)
            local.worker.drain()
            assert "table='retention'" in local.job(job).record.error
        assert len(local.manifest.snapshots.of(six)) == 6
    assert local.files() == files


def test_a_damaged_policy_is_everybodys_news_and_nobody_elses_trouble(
    local: World, six: int, capsys: pytest.CaptureFixture[str]
) -> None:
    other = local.database("other")
    for _ in range(3):
        local.manifest.snapshots.publish(other)
    local.manifest.retention.set(other, RetentionRecord(keep_last=1))
    key, raw = first_row(local.manifest, t.RETENTION, six)
    with damaged(local.manifest, t.RETENTION, key, raw[:-1] + bytes([raw[-1] ^ 1])):
        assert local.upkeep.round(everything=True).dropped == 2
        assert [str(problem) for problem in local.manifest.check() if problem.rule == "K1" and problem.contained]
    assert len(local.manifest.snapshots.of(other)) == 1
    assert len(local.manifest.snapshots.of(six)) == 6
    said = capsys.readouterr().err
    assert f"retention.failed db_id={six}" in said
    assert "retention.damaged" in said


@pytest.mark.parametrize("table", [t.SNAPSHOT_INDEX, t.GC_REFCOUNTS, t.GC_ZERO, t.CHUNK_CATALOG, t.SLOT_LEAF, t.DB])
def test_no_flipped_bit_of_what_the_collector_goes_by_deletes_what_is_held(
    local: World, six: int, table: t.Table[Any]
) -> None:
    """Something is at zero, and its grace is over: with a damaged row beside it, or as it, nothing else goes."""
    goes = local.chunks(six, 7)[0]
    local.chunks(six, 7)
    held = {key: local.place(key).local for key in local.artifacts()}
    assert goes not in held
    if table is t.SNAPSHOT_INDEX:
        # expiry: a snapshot that never expires must not, whatever bit is flipped
        local.manifest.retention.set(six, None)
    rows = [first_row(local.manifest, table)]
    for key, raw in rows:
        for wrong in flips(raw)[::3]:
            with damaged(local.manifest, table, key, wrong):
                local.upkeep.run_once()
            assert len(local.manifest.snapshots.of(six)) == 6
            assert local.files() >= {path.removeprefix(local.root + "/") for path in held.values()}
    local.settle()
    assert local.files() == {path.removeprefix(local.root + "/") for path in held.values()}


def test_a_damaged_row_at_zero_keeps_its_artifact_and_the_others_go(local: World, six: int) -> None:
    goes = [local.chunks(six, slot)[0] for slot in (7, 8)]
    paths = [local.place(key).local for key in goes]
    for slot in (7, 8):
        local.chunks(six, slot)
    local.clock.advance(3600)
    with local.manifest.read() as txn:
        zeros = [row for row in txn.raw_scan(t.GC_ZERO, six) if row[0][4] != 4]
    key, raw = zeros[0]
    with damaged(local.manifest, t.GC_ZERO, key, raw[:6] + bytes([raw[6] ^ 64]) + raw[7:]):
        local.upkeep.run_once()
        remaining = [path for path in paths if path.removeprefix(local.root + "/") in local.files()]
        assert len(remaining) == 1, "one is kept by its damaged row, the other has gone"
        jobs = [job for job in local.manifest.jobs.jobs() if job.kind is JobKind.DELETE]
        assert any("gc_zero" in job.record.error for job in jobs)
    local.settle()
    assert not [path for path in paths if path.removeprefix(local.root + "/") in local.files()]


def test_a_flipped_cursor_does_not_trim_the_feed_under_others(local: World) -> None:
    """The bit that moves a position far ahead let everything before it go."""
    feed = local.manifest.feed
    slow, fast = feed.register(name="slow"), feed.register(name="fast")
    for _ in range(20):
        local.database(f"db-{_}")
    key, raw = first_row(local.manifest, t.CHANGE_CURSORS, slow.cursor_id)
    head = feed.cursor("fast").head_sequence
    for place, wrong in enumerate(flips(raw)):
        with damaged(local.manifest, t.CHANGE_CURSORS, key, wrong):
            feed.acknowledge("fast", min(1 + place, head))
            local.upkeep.round(everything=True)
        with local.manifest.read() as txn:
            assert txn.feed_bounds()[0] == 1
    assert feed.cursor("slow").acked_sequence == 0
    assert fast.cursor_id != slow.cursor_id
