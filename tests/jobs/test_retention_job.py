"""The retention job: applies a database's policy on request."""

from __future__ import annotations

import pytest

from quire.core.errors import JobAlreadyPending, UnknownDatabase
from quire.manifest.records import WINDOW_TAG, JobKind, RetentionRecord
from tests.jobs.job_store import JobStore, drop, request_retention


def snapshots(local_store: JobStore, db_id: int) -> list[str]:
    return [snapshot.name or f"#{snapshot.snapshot_id}" for snapshot in local_store.manifest.snapshots.of(db_id)]


def with_snapshots(local_store: JobStore, count: int = 4) -> int:
    db_id = local_store.database()
    for number in range(count):
        local_store.chunks(db_id, 1)
        local_store.manifest.snapshots.publish(db_id, tags={"n": str(number)})
        local_store.clock.advance(60)
    return db_id


def test_snapshots_that_no_rule_keeps_are_dropped_and_their_bytes_deleted(local_store: JobStore) -> None:
    db_id = with_snapshots(local_store)
    local_store.manifest.retention.set(db_id, RetentionRecord(keep_last=2))
    result = local_store.succeed(request_retention(local_store.manifest, "shop"))
    assert result == {"dropped": 2, "kept": 2, "snapshots": ["#1", "#2"]}
    assert snapshots(local_store, db_id) == ["#3", "#4"]
    local_store.settle()
    assert len(local_store.artifacts()) == 2
    local_store.assert_settled()
    assert local_store.succeed(request_retention(local_store.manifest, "shop"))["dropped"] == 0


def test_without_a_policy_nothing_is_dropped(local_store: JobStore) -> None:
    db_id = with_snapshots(local_store)
    assert local_store.succeed(request_retention(local_store.manifest, db_id)) == {
        "dropped": 0,
        "kept": 4,
        "snapshots": [],
    }


def test_the_last_snapshots_are_dropped_only_with_force(local_store: JobStore) -> None:
    db_id = with_snapshots(local_store)
    local_store.clock.advance(3600)
    local_store.manifest.retention.set(db_id, RetentionRecord(keep_seconds=1))
    assert "WouldDropEverything" in local_store.fail(request_retention(local_store.manifest, db_id))
    assert len(snapshots(local_store, db_id)) == 4
    assert local_store.succeed(request_retention(local_store.manifest, db_id, force=True))["dropped"] == 4


def test_expired_snapshots_are_dropped_without_force_even_if_only_window_snapshots_remain(
    local_store: JobStore,
) -> None:
    """A snapshot kept for time travel expires by its own time, and does not require confirmation."""
    db_id, now = local_store.database(), local_store.clock.now_ms()
    publish = local_store.manifest.snapshots.publish
    publish(db_id, expires_at_ms=now + 1_000)
    publish(db_id, tags={WINDOW_TAG: ""}, expires_at_ms=now + 3_600_000)
    local_store.manifest.retention.set(db_id, RetentionRecord(keep_last=1))
    local_store.clock.advance(60)
    plan = local_store.manifest.retention.plan(db_id)
    assert (plan.drops_everything, plan.needs_force) == (True, False)
    assert local_store.succeed(request_retention(local_store.manifest, db_id)) == {
        "dropped": 1,
        "kept": 1,
        "snapshots": ["#1"],
    }


def test_a_job_for_a_database_that_was_dropped_fails(local_store: JobStore) -> None:
    db_id = with_snapshots(local_store)
    job_id = request_retention(local_store.manifest, db_id)
    drop(local_store, db_id)
    assert "DatabaseTombstoned" in local_store.fail(job_id)
    local_store.settle()


def test_bad_requests_are_refused(local_store: JobStore) -> None:
    db_id = local_store.database()
    with pytest.raises(UnknownDatabase):
        request_retention(local_store.manifest, 99)
    assert "payload" in local_store.fail(local_store.manifest.jobs.enqueue(JobKind.RETENTION, db_id, {"forced": True}))
    first = request_retention(local_store.manifest, db_id)
    with pytest.raises(JobAlreadyPending, match=str(first)):
        request_retention(local_store.manifest, db_id)
    local_store.manifest.drop_db(db_id).result()
    local_store.settle()
