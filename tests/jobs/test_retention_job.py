"""The retention job: a database's policy, applied because somebody asked."""

from __future__ import annotations

import pytest

from quire.core.errors import JobAlreadyPending, UnknownDatabase
from quire.manifest.records import WINDOW_TAG, JobKind, RetentionRecord
from tests.jobs.world import World, drop, request_retention


def snapshots(local: World, db_id: int) -> list[str]:
    return [each.name or f"#{each.snapshot_id}" for each in local.manifest.snapshots.of(db_id)]


def with_snapshots(local: World, count: int = 4) -> int:
    db_id = local.database()
    for number in range(count):
        local.chunks(db_id, 1)
        local.manifest.snapshots.publish(db_id, tags={"n": str(number)})
        local.clock.advance(60)
    return db_id


def test_what_no_rule_keeps_is_dropped_and_its_bytes_go(local: World) -> None:
    db_id = with_snapshots(local)
    local.manifest.retention.set(db_id, RetentionRecord(keep_last=2))
    result = local.done(request_retention(local.manifest, "shop"))
    assert result == {"dropped": 2, "kept": 2, "snapshots": ["#1", "#2"]}
    assert snapshots(local, db_id) == ["#3", "#4"]
    local.settle()
    assert len(local.artifacts()) == 2
    local.assert_settled()
    assert local.done(request_retention(local.manifest, "shop"))["dropped"] == 0


def test_without_a_policy_nothing_is_dropped(local: World) -> None:
    db_id = with_snapshots(local)
    assert local.done(request_retention(local.manifest, db_id)) == {"dropped": 0, "kept": 4, "snapshots": []}


def test_the_last_snapshots_go_only_if_that_is_meant(local: World) -> None:
    db_id = with_snapshots(local)
    local.clock.advance(3600)
    local.manifest.retention.set(db_id, RetentionRecord(keep_seconds=1))
    assert "WouldDropEverything" in local.failed(request_retention(local.manifest, db_id))
    assert len(snapshots(local, db_id)) == 4
    assert local.done(request_retention(local.manifest, db_id, force=True))["dropped"] == 4


def test_what_has_expired_goes_without_force_though_only_a_window_is_left(local: World) -> None:
    """What a checkpoint keeps for time travel goes by its own time, and is no reason to ask."""
    db_id, now = local.database(), local.clock.now_ms()
    publish = local.manifest.snapshots.publish
    publish(db_id, expires_at_ms=now + 1_000)
    publish(db_id, tags={WINDOW_TAG: ""}, expires_at_ms=now + 3_600_000)
    local.manifest.retention.set(db_id, RetentionRecord(keep_last=1))
    local.clock.advance(60)
    plan = local.manifest.retention.plan(db_id)
    assert (plan.drops_everything, plan.needs_force) == (True, False)
    assert local.done(request_retention(local.manifest, db_id)) == {"dropped": 1, "kept": 1, "snapshots": ["#1"]}


def test_a_job_for_a_database_that_was_dropped_fails(local: World) -> None:
    db_id = with_snapshots(local)
    job_id = request_retention(local.manifest, db_id)
    drop(local, db_id)
    assert "DatabaseTombstoned" in local.failed(job_id)
    local.settle()


def test_bad_requests_are_refused(local: World) -> None:
    db_id = local.database()
    with pytest.raises(UnknownDatabase):
        request_retention(local.manifest, 99)
    assert "payload" in local.failed(local.manifest.jobs.enqueue(JobKind.RETENTION, db_id, {"forced": True}))
    first = request_retention(local.manifest, db_id)
    with pytest.raises(JobAlreadyPending, match=str(first)):
        request_retention(local.manifest, db_id)
    local.manifest.drop_db(db_id).result()
    local.settle()
