"""Retention of many databases in one run: each has its own job, which completes together with its drops or not at
all."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.core.errors import InvalidInput
from quire.durable.failpoints import armed
from quire.jobs import retention
from quire.jobs.handler import Completed
from quire.jobs.retention import PLANS_MAX, apply_many
from quire.manifest import tables as t
from quire.manifest.jobqueue import Job, JobQueue
from quire.manifest.ops.jobs import CompleteJob
from quire.manifest.ops.snapshots import DropSnapshot
from quire.manifest.records import JobKind, JobState, RetentionRecord
from quire.manifest.store import ManifestStore
from tests.jobs.job_store import JobStore, drop, is_renewed, request_retention
from tests.jobs.retention_child import KEPT_SNAPSHOTS, SNAPSHOTS, fill

DROPPED = SNAPSHOTS - KEPT_SNAPSHOTS


def snapshot_count(job_store: JobStore, db_id: int) -> int:
    """The number of snapshots of a database."""
    return len(job_store.manifest.snapshots.of(db_id))


def run(job_store: JobStore, db_ids: list[int], **options: Any) -> dict[int, Job]:
    """Apply retention to all of them in one run; returns db_id → job."""
    return {job.db_id: job for job in apply_many(job_store.manifest, db_ids, **options)}


def states(jobs: dict[int, Job]) -> set[JobState]:
    return {job.state for job in jobs.values()}


def at_hit(number: int, action: Callable[[], object]) -> Callable[[str], None]:
    """A failpoint action that runs only at the given hit, counted from 1."""
    hits = Counter[str]()

    def count_hits(point: str) -> None:
        hits[point] += 1
        if hits[point] == number:
            action()

    return count_hits


def interrupt() -> None:
    raise KeyboardInterrupt


def assert_dropped_once(job_store: JobStore) -> None:
    """Each snapshot was dropped at most once, in the batch that completed its database's job."""
    dropped, completed = Counter[tuple[int, int]](), Counter[int]()
    with job_store.manifest.read() as txn:
        for change in txn.changes():
            drops = [op for op in change.operations if type(op) is DropSnapshot]
            completions = [op for op in change.operations if type(op) is CompleteJob and op.state is JobState.SUCCEEDED]
            dropped.update((op.db_id, op.snapshot_id) for op in drops)
            completed.update(op.job_id for op in completions)
            if drops:
                assert len(completions) == 1, "drops without the completion of their job"
                assert len({op.db_id for op in drops}) == 1, "two databases in one batch"
    assert set(dropped.values()) <= {1}, "dropped twice"
    assert set(completed.values()) <= {1}, "completed twice"


# ── success ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_all_policies_are_applied(tmp_path: Path) -> None:
    with quire.open(str(tmp_path / "store")) as store:
        for name in ("a", "b", "c", "free"):
            store.create(name, "pages")
            for number in range(4):
                store.snapshot(name, f"s{number}")
        for name in ("a", "b"):
            store.manifest.retention.set(name, RetentionRecord(keep_last=1, keep_named=False))
        store.manifest.retention.set("c", RetentionRecord(keep_last=3, keep_named=False))
        progress: list[tuple[int, int]] = []
        jobs = store.heavy.retention_all(progress=lambda *step: progress.append(step))
        assert [(job.state, job.result["dropped"]) for job in jobs] == [
            (JobState.SUCCEEDED, 3),
            (JobState.SUCCEEDED, 3),
            (JobState.SUCCEEDED, 1),
        ]
        assert (progress[0], progress[-1]) == ((0, 3), (3, 3))
        assert progress == sorted(progress)
        assert [job.result["dropped"] for job in store.heavy.retention_all(["a", "c"])] == [0, 0]
        with store.manifest.read() as txn:
            counts = [len(list(txn.scan(t.SNAPSHOT_INDEX, txn.database_id(name)))) for name in ("a", "b", "c", "free")]
        assert counts == [1, 1, 3, 4], "without a policy nothing is dropped"


def test_hundreds_of_databases_share_their_commits(local_store: JobStore) -> None:
    db_ids = fill(local_store, 240, chunks=False)
    before = local_store.manifest.writer.stats.commits
    with armed("manifest.commit.durable", "sleep:20"):  # a slow disk: batches that arrive meanwhile share one commit
        jobs = run(local_store, db_ids)
    commits = local_store.manifest.writer.stats.commits - before
    assert {job.result["dropped"] for job in jobs.values()} == {DROPPED}
    assert list(jobs) == db_ids
    assert {snapshot_count(local_store, db_id) for db_id in db_ids} == {KEPT_SNAPSHOTS}
    assert commits < 80, "one by one, each database would need three commits and one for its deletions"
    assert_dropped_once(local_store)


def test_artifacts_of_dropped_snapshots_are_deleted_afterwards(local_store: JobStore) -> None:
    db_ids = fill(local_store, 6)
    run(local_store, db_ids)
    local_store.settle()
    local_store.assert_settled()
    assert len(local_store.artifacts()) == 6 * KEPT_SNAPSHOTS
    assert_dropped_once(local_store)


# ── one fails alone ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_each_database_fails_alone(local_store: JobStore) -> None:
    db_ids = fill(local_store, 12)
    emptied_id, dropped_id, invalid_id = db_ids[1], db_ids[4], db_ids[7]
    local_store.clock.advance(3600)
    local_store.manifest.retention.set(emptied_id, RetentionRecord(keep_seconds=1))
    local_store.manifest.jobs.enqueue(JobKind.RETENTION, invalid_id, {"only": ["monday"]})
    with armed("jobs.retention.claimed", lambda _: drop(local_store, dropped_id)):
        jobs = run(local_store, [*db_ids, 4_711])
    assert jobs.keys() == set(db_ids), "an unknown database gets no job"
    failed = {db_id: jobs.pop(db_id) for db_id in (emptied_id, dropped_id, invalid_id)}
    assert states(failed) == {JobState.FAILED_PERMANENT}
    errors = [job.record.error.partition(":")[0] for job in failed.values()]
    assert errors == ["WouldDropEverything", "DatabaseTombstoned", "InvalidInput"]
    assert states(jobs) == {JobState.SUCCEEDED}
    assert [snapshot_count(local_store, db_id) for db_id in (emptied_id, invalid_id)] == [SNAPSHOTS, SNAPSHOTS]
    assert {snapshot_count(local_store, db_id) for db_id in jobs} == {KEPT_SNAPSHOTS}
    assert_dropped_once_except(local_store, dropped_id)
    local_store.settle()
    local_store.assert_settled()


def assert_dropped_once_except(job_store: JobStore, dropped_id: int) -> None:
    """Like `assert_dropped_once`, except for this database, whose snapshots were dropped with it."""
    with job_store.manifest.read() as txn:
        drops = Counter(
            (op.db_id, op.snapshot_id)
            for change in txn.changes()
            for op in change.operations
            if type(op) is DropSnapshot and op.db_id != dropped_id
        )
    assert set(drops.values()) == {1}


def test_a_database_dropped_between_its_plan_and_its_batch_fails_alone(local_store: JobStore) -> None:
    db_ids = fill(local_store, 4)
    with armed("jobs.retention.planned", at_hit(2, lambda: drop(local_store, db_ids[1]))):
        jobs = run(local_store, db_ids)
    assert "DatabaseTombstoned" in jobs.pop(db_ids[1]).record.error
    assert states(jobs) == {JobState.SUCCEEDED}
    local_store.settle()


def test_hundreds_of_failing_jobs_share_their_commits_too(local_store: JobStore) -> None:
    db_ids = fill(local_store, 96, chunks=False)
    local_store.clock.advance(3600)
    for db_id in db_ids:
        local_store.manifest.retention.set(db_id, RetentionRecord(keep_seconds=1))
    before = local_store.manifest.writer.stats.commits
    with armed("manifest.commit.durable", "sleep:20"):
        jobs = run(local_store, db_ids)
    assert states(jobs) == {JobState.FAILED_PERMANENT}
    assert local_store.manifest.writer.stats.commits - before < 60
    assert states(run(local_store, db_ids, force=True)) == {JobState.SUCCEEDED}
    assert {snapshot_count(local_store, db_id) for db_id in db_ids} == {0}


# ── concurrent changes of snapshots ───────────────────────────────────────────────────────────────────────────────────
def test_a_snapshot_dropped_meanwhile_causes_a_new_plan(local_store: JobStore) -> None:
    db_ids = fill(local_store, 3)
    with armed("jobs.retention.planned", at_hit(2, lambda: local_store.manifest.snapshots.drop(db_ids[1], 1))):
        jobs = run(local_store, db_ids)
    assert [job.result["dropped"] for job in jobs.values()] == [DROPPED, DROPPED - 1, DROPPED]
    assert {snapshot_count(local_store, db_id) for db_id in db_ids} == {KEPT_SNAPSHOTS}


def test_a_snapshot_undropped_meanwhile_causes_a_new_plan(local_store: JobStore) -> None:
    db_ids, snapshots = fill(local_store, 3), local_store.manifest.snapshots
    kept = snapshots.publish(db_ids[1], "release").snapshot_id
    snapshots.soft_drop(db_ids[1], "release", until_ms=local_store.clock.now_ms() + 1000)
    local_store.clock.advance(1)
    with armed("jobs.retention.planned", at_hit(2, lambda: snapshots.undrop(db_ids[1], "release"))):
        jobs = run(local_store, db_ids)
    assert states(jobs) == {JobState.SUCCEEDED}
    assert snapshots.get(db_ids[1], "release").snapshot_id == kept


def test_planning_is_not_repeated_forever(local_store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    db_ids, plans = fill(local_store, 2), list[int]()
    original = retention.work_of

    def stale_plan(manifest: ManifestStore, job: Job, **options: Any) -> Completed:
        outcome = original(manifest, job, **options)
        if job.db_id == db_ids[0]:
            plans.append(job.db_id)
            return Completed(outcome.result, (DropSnapshot(job.db_id, 4_711), *outcome.ops))
        return outcome

    monkeypatch.setattr(retention, "work_of", stale_plan)
    jobs = run(local_store, db_ids)
    assert len(plans) == PLANS_MAX
    assert "UnknownSnapshot" in jobs[db_ids[0]].record.error
    assert (snapshot_count(local_store, db_ids[0]), snapshot_count(local_store, db_ids[1])) == (
        SNAPSHOTS,
        KEPT_SNAPSHOTS,
    )


def test_jobs_claimed_by_another_worker_are_left_to_it(local_store: JobStore) -> None:
    db_ids = fill(local_store, 3)
    local_store.manifest.jobs.claim_job(request_retention(local_store.manifest, db_ids[0]), "somebody")
    jobs = run(local_store, db_ids)
    assert jobs.keys() == set(db_ids[1:])
    assert [snapshot_count(local_store, db_id) for db_id in db_ids] == [SNAPSHOTS, KEPT_SNAPSHOTS, KEPT_SNAPSHOTS]


def test_a_job_that_is_cancelled_drops_nothing(local_store: JobStore) -> None:
    db_ids = fill(local_store, 3)

    def cancel() -> None:
        local_store.manifest.jobs.cancel(local_store.manifest.jobs.outstanding(db_ids[1], JobKind.RETENTION))

    with armed("jobs.retention.planned", at_hit(2, cancel)):
        jobs = run(local_store, db_ids)
    assert jobs[db_ids[1]].state is JobState.CANCELLED
    assert [snapshot_count(local_store, db_id) for db_id in db_ids] == [KEPT_SNAPSHOTS, SNAPSHOTS, KEPT_SNAPSHOTS]


def test_a_job_claimed_by_another_worker_drops_nothing_here(local_store: JobStore) -> None:
    db_ids = fill(local_store, 3)
    jobs = local_store.manifest.jobs

    def lose_lease() -> None:
        local_store.clock.advance(100)  # past the lease, before the next heartbeat
        jobs.expire()
        local_store.clock.advance(100)
        assert jobs.claim_job(jobs.outstanding(db_ids[2], JobKind.RETENTION), "somebody") is not None

    with armed("jobs.retention.claimed", lambda _: lose_lease()):
        results = run(local_store, db_ids)
    lease = results[db_ids[2]].lease
    assert lease is not None
    assert lease.worker == "somebody"
    assert {snapshot_count(local_store, db_id) for db_id in db_ids} == {SNAPSHOTS}, "their leases expired too"
    assert states(run(local_store, db_ids[:2])) == {JobState.SUCCEEDED}
    assert_dropped_once(local_store)


def test_leases_are_renewed_while_a_run_lasts(local_store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    db_ids = fill(local_store, 3)
    monkeypatch.setattr(retention, "LEASE_SECONDS", 0.3)
    renewed = threading.Event()

    def wait() -> None:
        if is_renewed(local_store.manifest, local_store.clock):
            renewed.set()

    with armed("jobs.retention.planned", at_hit(1, wait)):
        jobs = run(local_store, db_ids)
    assert renewed.is_set()
    assert states(jobs) == {JobState.SUCCEEDED}


# ── interrupted ───────────────────────────────────────────────────────────────────────────────────────────────────────
def assert_put_back(job_store: JobStore, succeeded: int, pending: int) -> None:
    """No job is claimed, and none has failed."""
    jobs = [job for job in job_store.manifest.jobs.jobs() if job.kind is JobKind.RETENTION]
    assert Counter(job.state for job in jobs) == Counter({JobState.SUCCEEDED: succeeded, JobState.PENDING: pending}), (
        "a job is still claimed"
    )
    assert {(job.record.failures, job.record.error) for job in jobs} == {(0, "")}


def test_an_interrupted_run_puts_its_jobs_back(local_store: JobStore) -> None:
    db_ids = fill(local_store, 20)
    with armed("jobs.retention.planned", at_hit(6, interrupt)), pytest.raises(KeyboardInterrupt):
        run(local_store, db_ids)
    assert_put_back(local_store, 5, 15)
    assert Counter(snapshot_count(local_store, db_id) for db_id in db_ids) == Counter(
        {KEPT_SNAPSHOTS: 5, SNAPSHOTS: 15}
    )
    jobs = run(local_store, db_ids)
    assert states(jobs) == {JobState.SUCCEEDED}
    assert [jobs[db_id].result["dropped"] for db_id in db_ids] == [0] * 5 + [DROPPED] * 15
    assert_dropped_once(local_store)


def test_a_progress_callback_may_interrupt_a_run(local_store: JobStore) -> None:
    db_ids = fill(local_store, 20)

    def stop(done: int, _: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(local_store, db_ids, progress=stop)
    assert not local_store.manifest.jobs.jobs(JobState.IN_FLIGHT)
    assert states(run(local_store, db_ids)) == {JobState.SUCCEEDED}
    assert {snapshot_count(local_store, db_id) for db_id in db_ids} == {KEPT_SNAPSHOTS}
    assert_dropped_once(local_store)


@pytest.mark.parametrize("claimed", [0, 3])
def test_jobs_being_claimed_are_put_back_too(
    local_store: JobStore, monkeypatch: pytest.MonkeyPatch, claimed: int
) -> None:
    db_ids = fill(local_store, 8)
    calls, original = Counter[str](), JobQueue.get

    def get(self: JobQueue, job_id: int) -> Job:
        calls["calls"] += 1
        if calls["calls"] == claimed + 1:
            raise KeyboardInterrupt
        return original(self, job_id)

    with monkeypatch.context() as patch:
        patch.setattr(JobQueue, "get", get)
        with pytest.raises(KeyboardInterrupt):
            run(local_store, db_ids)
    assert_put_back(local_store, 0, 8)
    assert states(run(local_store, db_ids)) == {JobState.SUCCEEDED}


# ── which snapshots are dropped ───────────────────────────────────────────────────────────────────────────────────────
def test_only_the_requested_snapshots_are_dropped(local_store: JobStore) -> None:
    db_ids = fill(local_store, 3)
    first, second, third = db_ids
    jobs = run(local_store, db_ids, only={first: [1, 3], second: {2}})
    assert [job.result["snapshots"] for job in jobs.values()] == [["#1"], ["#2"], ["#1", "#2"]]
    assert [job.payload for job in jobs.values()] == [{"only": [1, 3]}, {"only": [2]}, None]
    assert [[snapshot.snapshot_id for snapshot in local_store.manifest.snapshots.of(db_id)] for db_id in db_ids] == [
        [2, 3, 4],
        [1, 3, 4],
        [3, 4],
    ]
    with pytest.raises(InvalidInput, match="no snapshot to drop"):
        run(local_store, db_ids, only={third: []})


def test_a_single_job_drops_only_the_requested_snapshots(local_store: JobStore) -> None:
    (db_id,) = fill(local_store, 1)
    job_id = local_store.manifest.jobs.enqueue(JobKind.RETENTION, db_id, {"only": [2]})
    assert local_store.succeed(job_id) == {"dropped": 1, "kept": 3, "snapshots": ["#2"]}
    assert_dropped_once(local_store)


def test_a_policy_does_not_drop_the_last_snapshots_without_a_request(local_store: JobStore) -> None:
    """The user confirmed the loss of two; an hour later no rule keeps any snapshot."""
    (db_id,) = fill(local_store, 1)
    local_store.clock.advance(3600)
    local_store.manifest.retention.set(db_id, RetentionRecord(keep_seconds=1))
    assert run(local_store, [db_id], only={db_id: [1, 2]})[db_id].result["dropped"] == 2
    assert "WouldDropEverything" in run(local_store, [db_id], only={db_id: [3, 4]})[db_id].record.error
    assert snapshot_count(local_store, db_id) == 2


def test_force_is_taken_from_the_run_or_from_the_pending_job(local_store: JobStore) -> None:
    db_ids = fill(local_store, 2)
    local_store.clock.advance(3600)
    for db_id, force in zip(db_ids, (False, True)):
        local_store.manifest.retention.set(db_id, RetentionRecord(keep_seconds=1))
        request_retention(local_store.manifest, db_id, force=force)
    assert (
        states(run(local_store, db_ids[:1], force=True)) == states(run(local_store, db_ids[1:])) == {JobState.SUCCEEDED}
    )
    assert [snapshot_count(local_store, db_id) for db_id in db_ids] == [0, 0]


def test_a_job_without_a_limit_on_attempts_is_retried_as_a_worker_would(local_store: JobStore) -> None:
    """A run over many databases failed such a job for good, where a worker tries it again."""
    (db_id,) = fill(local_store, 1)
    local_store.clock.advance(3600)
    local_store.manifest.retention.set(db_id, RetentionRecord(keep_seconds=1))
    local_store.manifest.jobs.enqueue(JobKind.RETENTION, db_id, max_attempts=0)
    failed = run(local_store, [db_id])[db_id]
    assert "WouldDropEverything" in failed.record.error
    assert failed.state is JobState.PENDING
