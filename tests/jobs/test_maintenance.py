"""The owner's rounds: what is due is done once, and trouble with one database is not everybody's."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from quire.core.errors import DatabaseTombstoned
from quire.core.settings import MaintenanceSettings
from quire.jobs.maintenance import Round, Upkeep
from quire.manifest.jobqueue import LEASE_SECONDS
from quire.manifest.ops.local import RecordMetric
from quire.manifest.records import JobKind, JobState, RetentionRecord
from tests.jobs.world import World
from tests.manifest.helpers import eventually


def test_a_round_with_nothing_to_do_does_nothing(local: World) -> None:
    assert local.upkeep.run_once() == Round()
    with local.manifest.read() as txn:
        head = txn.feed_bounds()[1]
    for _ in range(5):
        local.clock.advance(100)
        local.upkeep.run_once()
    with local.manifest.read() as txn:
        assert txn.feed_bounds()[1] == head, "an idle store commits nothing"


def test_scheduled_snapshots_are_made_once_per_bucket(local: World) -> None:
    db_id = local.database()
    local.manifest.retention.set(db_id, RetentionRecord(schedules=["hourly", "daily"]))
    assert local.upkeep.round().snapshots == 2
    assert local.upkeep.round().snapshots == 0
    local.manifest.snapshots.drop(db_id, local.manifest.snapshots.of(db_id)[0].name)
    assert local.upkeep.round().snapshots == 0, "what was dropped again is not made twice"
    local.clock.advance(3600)
    assert local.upkeep.round().snapshots == 1
    assert Upkeep(local.ctx, local.worker).round().snapshots == 0, "nor by the next owner"


def test_a_schedule_that_fails_for_one_database_goes_on_for_the_others(local: World) -> None:
    bad, good = local.database("bad"), local.database("good")
    for db_id in (bad, good):
        local.manifest.retention.set(db_id, RetentionRecord(schedules=["hourly"]))

    def make(db_id: int, name: str, tags: dict[str, str]) -> None:
        if db_id == bad:
            raise DatabaseTombstoned("as if")
        local.manifest.snapshots.publish(db_id, name, tags=tags)

    upkeep = Upkeep(local.ctx, local.worker, make)
    assert upkeep.round().snapshots == 1
    assert len(local.manifest.snapshots.of(good)) == 1
    upkeep.round()
    assert Upkeep(local.ctx, local.worker).round().snapshots == 1, "it is made as soon as it can be"


def test_retention_that_fails_for_one_database_goes_on_for_the_others(
    local: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [local.database(name) for name in ("empty-it", "troubled", "fine")]
    for db_id in ids:
        for _ in range(3):
            local.manifest.snapshots.publish(db_id)
    local.clock.advance(100)
    local.manifest.retention.set(ids[0], RetentionRecord(keep_seconds=1))
    for db_id in ids[1:]:
        local.manifest.retention.set(db_id, RetentionRecord(keep_last=1))
    plan = local.manifest.retention.plan

    def overtaken(db_id: int) -> object:
        found = plan(db_id)
        if db_id == ids[1]:
            local.manifest.snapshots.drop(db_id, found.dropped[0].snapshot_id)
        return found

    monkeypatch.setattr(local.manifest.retention, "plan", overtaken)
    assert local.upkeep.round(everything=True).dropped == 2
    assert [len(local.manifest.snapshots.of(db_id)) for db_id in ids] == [3, 2, 1]


def test_leases_that_ran_out_are_taken_back(local: World) -> None:
    job_id = local.manifest.jobs.enqueue(JobKind.SWEEP)
    assert local.manifest.jobs.claim("far-away") is not None
    assert local.upkeep.round().leases_lost == 0
    local.clock.advance(LEASE_SECONDS)
    assert local.upkeep.round().leases_lost == 1
    assert local.job(job_id).state is JobState.PENDING


def test_old_jobs_and_answers_are_forgotten(local: World) -> None:
    local.manifest.jobs.enqueue(JobKind.VERIFY, 0)
    local.manifest.submit([RecordMetric(1, 1, [1.0])], key=b"k" * 16).result()
    local.worker.drain()
    local.clock.advance(8 * 86_400)
    done = local.upkeep.run_once()
    assert (done.jobs_forgotten, done.answers_forgotten) == (1, 1)
    assert local.manifest.jobs.jobs() == []


def test_a_dropped_database_that_nothing_holds_is_found(local: World) -> None:
    """Its delete job was cancelled."""
    db_id = local.database()
    local.manifest.drop_db(db_id).result()
    local.manifest.jobs.cancel(local.manifest.jobs.outstanding(db_id, JobKind.DELETE))
    assert local.upkeep.run_once().delete_jobs == 1
    with local.manifest.read() as txn:
        assert txn.database(db_id) is None


def test_it_runs_in_the_background_and_stops(local: World) -> None:
    local.ctx = replace(local.ctx, settings=MaintenanceSettings(interval_seconds=0.01))
    upkeep = Upkeep(local.ctx, local.worker_of())
    upkeep.start()
    upkeep.start()
    job_id = local.manifest.jobs.enqueue(JobKind.VERIFY, 0)
    assert eventually(lambda: local.job(job_id).state is JobState.SUCCEEDED)
    upkeep.stop()
    upkeep.stop()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("quire-upkeep", "quire-worker"))]
    upkeep.start()
    later = local.manifest.jobs.enqueue(JobKind.VERIFY, 0)
    assert eventually(lambda: local.job(later).state is JobState.SUCCEEDED)
    upkeep.stop()


def test_the_loop_survives_whatever_a_round_raises(local: World, monkeypatch: pytest.MonkeyPatch) -> None:
    local.ctx = replace(local.ctx, settings=MaintenanceSettings(interval_seconds=0.005))
    upkeep = Upkeep(local.ctx, local.worker_of())
    rounds: list[float] = []

    def troubled(**_: object) -> Round:
        rounds.append(time.monotonic())
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(upkeep, "round", troubled)
    upkeep.start()
    assert eventually(lambda: len(rounds) > 3)
    upkeep.stop()
