"""Maintenance rounds: what is due is done once, and a failure of one database does not affect the others."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from quire.core.errors import DatabaseTombstoned
from quire.core.settings import MaintenanceSettings
from quire.jobs import maintenance
from quire.jobs.maintenance import Round, Upkeep
from quire.manifest import tables as t
from quire.manifest.jobqueue import LEASE_SECONDS
from quire.manifest.ops.local import RecordMetric
from quire.manifest.records import JobKind, JobState, RetentionRecord
from tests.jobs.job_store import JobStore
from tests.manifest.helpers import eventually


def test_a_round_with_nothing_to_do_does_nothing(local_store: JobStore) -> None:
    assert local_store.upkeep.run_once() == Round()
    with local_store.manifest.read() as txn:
        head = txn.feed_bounds()[1]
    for _ in range(5):
        local_store.clock.advance(100)
        local_store.upkeep.run_once()
    with local_store.manifest.read() as txn:
        assert txn.feed_bounds()[1] == head, "an idle store commits nothing"


def test_scheduled_snapshots_are_made_once_per_bucket(local_store: JobStore) -> None:
    db_id = local_store.database()
    local_store.manifest.retention.set(db_id, RetentionRecord(schedules=["hourly", "daily"]))
    assert local_store.upkeep.round().snapshots == 2
    assert local_store.upkeep.round().snapshots == 0
    local_store.manifest.snapshots.drop(db_id, local_store.manifest.snapshots.of(db_id)[0].name)
    assert local_store.upkeep.round().snapshots == 0, "a dropped snapshot is not created again"
    local_store.clock.advance(3600)
    assert local_store.upkeep.round().snapshots == 1
    assert Upkeep(local_store.ctx, local_store.worker).round().snapshots == 0, "nor does the next owner create it"


def test_a_schedule_that_fails_for_one_database_continues_for_the_others(local_store: JobStore) -> None:
    bad, good = local_store.database("bad"), local_store.database("good")
    for db_id in (bad, good):
        local_store.manifest.retention.set(db_id, RetentionRecord(schedules=["hourly"]))

    def publish(db_id: int, name: str, tags: dict[str, str]) -> None:
        if db_id == bad:
            raise DatabaseTombstoned("as if")
        local_store.manifest.snapshots.publish(db_id, name, tags=tags)

    upkeep = Upkeep(local_store.ctx, local_store.worker, publish)
    assert upkeep.round().snapshots == 1
    assert len(local_store.manifest.snapshots.of(good)) == 1
    upkeep.round()
    assert Upkeep(local_store.ctx, local_store.worker).round().snapshots == 1, "it is created as soon as possible"


def test_retention_that_fails_for_one_database_continues_for_the_others(
    local_store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [local_store.database(name) for name in ("empty-it", "troubled", "fine")]
    for db_id in ids:
        for _ in range(3):
            local_store.manifest.snapshots.publish(db_id)
    local_store.clock.advance(100)
    local_store.manifest.retention.set(ids[0], RetentionRecord(keep_seconds=1))
    for db_id in ids[1:]:
        local_store.manifest.retention.set(db_id, RetentionRecord(keep_last=1))
    plan = local_store.manifest.retention.plan

    def plan_and_drop(db_id: int) -> object:
        retention_plan = plan(db_id)
        if db_id == ids[1]:
            local_store.manifest.snapshots.drop(db_id, retention_plan.dropped[0].snapshot_id)
        return retention_plan

    monkeypatch.setattr(local_store.manifest.retention, "plan", plan_and_drop)
    assert local_store.upkeep.round(everything=True).dropped == 2
    assert [len(local_store.manifest.snapshots.of(db_id)) for db_id in ids] == [3, 2, 1]


def test_expired_leases_are_revoked(local_store: JobStore) -> None:
    job_id = local_store.manifest.jobs.enqueue(JobKind.SWEEP)
    assert local_store.manifest.jobs.claim("far-away") is not None
    assert local_store.upkeep.round().leases_lost == 0
    local_store.clock.advance(LEASE_SECONDS)
    assert local_store.upkeep.round().leases_lost == 1
    assert local_store.job(job_id).state is JobState.PENDING


def test_old_jobs_and_recorded_answers_are_forgotten(local_store: JobStore) -> None:
    local_store.manifest.jobs.enqueue(JobKind.VERIFY, 0)
    local_store.manifest.submit([RecordMetric(1, 1, [1.0])], key=b"k" * 16).result()
    local_store.worker.drain()
    local_store.clock.advance(8 * 86_400)
    round_result = local_store.upkeep.run_once()
    assert (round_result.jobs_forgotten, round_result.answers_forgotten) == (1, 1)
    assert local_store.manifest.jobs.jobs() == []


def test_each_round_looks_at_a_share_of_the_recorded_answers_until_all_expired_ones_are_gone(
    local_store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: a round removed a fixed number of answers, so that a higher rate of keyed batches let them grow without bound."""
    monkeypatch.setattr(maintenance, "ANSWERS_PER_STEP", 2)
    for n in range(200):
        guard = local_store.manifest.submit([RecordMetric(1, 1, [1.0])], key=bytes([n]) * 16)
    guard.result()
    local_store.clock.advance(86_400)
    local_store.manifest.submit([RecordMetric(1, 1, [1.0])], key=b"\xff" * 16).result()
    forgotten = []
    # At most twice around: the first walk begins anywhere.
    for _ in range(2 * maintenance.ANSWER_WALK_ROUNDS + 1):
        local_store.clock.advance(maintenance.SLOW_SECONDS)
        forgotten.append(local_store.upkeep.round().answers_forgotten)
    assert sum(forgotten) == 200
    assert max(forgotten) <= 4, "each round looks at a part of them"
    with local_store.manifest.read() as txn:
        assert txn.count(t.IDEMPOTENCY) == 1


def test_a_dropped_database_that_nothing_holds_is_found(local_store: JobStore) -> None:
    """Its delete job was cancelled."""
    db_id = local_store.database()
    local_store.manifest.drop_db(db_id).result()
    local_store.manifest.jobs.cancel(local_store.manifest.jobs.outstanding(db_id, JobKind.DELETE))
    assert local_store.upkeep.run_once().delete_jobs == 1
    with local_store.manifest.read() as txn:
        assert txn.database(db_id) is None


def test_upkeep_runs_in_the_background_and_stops(local_store: JobStore) -> None:
    local_store.ctx = replace(local_store.ctx, settings=MaintenanceSettings(interval_seconds=0.01))
    upkeep = Upkeep(local_store.ctx, local_store.worker_of())
    upkeep.start()
    upkeep.start()
    job_id = local_store.manifest.jobs.enqueue(JobKind.VERIFY, 0)
    assert eventually(lambda: local_store.job(job_id).state is JobState.SUCCEEDED)
    upkeep.stop()
    upkeep.stop()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("quire-upkeep", "quire-worker"))]
    upkeep.start()
    later = local_store.manifest.jobs.enqueue(JobKind.VERIFY, 0)
    assert eventually(lambda: local_store.job(later).state is JobState.SUCCEEDED)
    upkeep.stop()


def test_the_loop_survives_whatever_a_round_raises(local_store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    local_store.ctx = replace(local_store.ctx, settings=MaintenanceSettings(interval_seconds=0.005))
    upkeep = Upkeep(local_store.ctx, local_store.worker_of())
    rounds: list[float] = []

    def failing_round(**_: object) -> Round:
        rounds.append(time.monotonic())
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(upkeep, "round", failing_round)
    upkeep.start()
    assert eventually(lambda: len(rounds) > 3)
    upkeep.stop()


def test_a_step_that_fails_unexpectedly_keeps_no_other_from_running(
    local_store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: an error that is not quire's ended the round. If every round met it, leases did not expire, nothing was deleted
    or trimmed any more, and the worker was never started."""
    local_store.ctx = replace(local_store.ctx, settings=MaintenanceSettings(interval_seconds=0.005))
    upkeep = Upkeep(local_store.ctx, local_store.worker_of())

    def fail(_done: Round, _everything: bool) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(upkeep, "_schedules", fail)
    job_id = local_store.manifest.jobs.enqueue(JobKind.VERIFY, 0)
    assert local_store.manifest.jobs.claim_job(job_id, "a worker that is gone") is not None
    local_store.clock.advance(LEASE_SECONDS + 1)
    with pytest.raises(ZeroDivisionError):
        upkeep.round(everything=True)
    assert local_store.job(job_id).state is JobState.PENDING
    local_store.clock.advance(LEASE_SECONDS)
    upkeep.start()
    assert eventually(lambda: local_store.job(job_id).state is JobState.SUCCEEDED)
    upkeep.stop()
