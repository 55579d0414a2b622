"""Retention over many databases, in one run: each has a job of its own, which ends with its drops or not at all."""

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
from tests.jobs.retention_child import KEPT, MADE, fill
from tests.jobs.world import World, drop, is_renewed, request_retention

DROPPED = MADE - KEPT


def left(world: World, db_id: int) -> int:
    """How many snapshots a database has."""
    return len(world.manifest.snapshots.of(db_id))


def run(world: World, db_ids: list[int], **more: Any) -> dict[int, Job]:
    """All of them, in one run; db_id → its job."""
    return {job.db_id: job for job in apply_many(world.manifest, db_ids, **more)}


def states(jobs: dict[int, Job]) -> set[JobState]:
    return {job.state for job in jobs.values()}


def at_hit(number: int, action: Callable[[], object]) -> Callable[[str], None]:
    """For a failpoint: do something the so-manieth time only, from 1 on."""
    hits = Counter[str]()

    def look(point: str) -> None:
        hits[point] += 1
        if hits[point] == number:
            action()

    return look


def interrupt() -> None:
    raise KeyboardInterrupt


def assert_once(world: World) -> None:
    """Each snapshot was dropped at most once, in the batch that ended its database's job."""
    dropped, ended = Counter[tuple[int, int]](), Counter[int]()
    with world.manifest.read() as txn:
        for change in txn.changes():
            drops = [op for op in change.operations if type(op) is DropSnapshot]
            ends = [op for op in change.operations if type(op) is CompleteJob and op.state is JobState.SUCCEEDED]
            dropped.update((op.db_id, op.snapshot_id) for op in drops)
            ended.update(op.job_id for op in ends)
            if drops:
                assert len(ends) == 1, "drops without the end of their job"
                assert len({op.db_id for op in drops}) == 1, "two databases in one batch"
    assert set(dropped.values()) <= {1}, "dropped twice"
    assert set(ended.values()) <= {1}, "ended twice"


# ── all goes well ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_all_policies_are_applied(tmp_path: Path) -> None:
    with quire.open(str(tmp_path / "store")) as store:
        for name in ("a", "b", "c", "free"):
            store.create(name, "pages")
            for number in range(4):
                store.snapshot(name, f"s{number}")
        for name in ("a", "b"):
            store.manifest.retention.set(name, RetentionRecord(keep_last=1, keep_named=False))
        store.manifest.retention.set("c", RetentionRecord(keep_last=3, keep_named=False))
        heard: list[tuple[int, int]] = []
        jobs = store.heavy.retention_all(progress=lambda *each: heard.append(each))
        assert [(job.state, job.result["dropped"]) for job in jobs] == [
            (JobState.SUCCEEDED, 3),
            (JobState.SUCCEEDED, 3),
            (JobState.SUCCEEDED, 1),
        ]
        assert (heard[0], heard[-1]) == ((0, 3), (3, 3))
        assert heard == sorted(heard)
        assert [job.result["dropped"] for job in store.heavy.retention_all(["a", "c"])] == [0, 0]
        with store.manifest.read() as txn:
            kept = [len(list(txn.scan(t.SNAPSHOT_INDEX, txn.database_id(name)))) for name in ("a", "b", "c", "free")]
        assert kept == [1, 1, 3, 4], "without a policy nothing goes"


def test_hundreds_of_databases_share_their_commits(local: World) -> None:
    db_ids = fill(local, 240, chunks=False)
    before = local.manifest.writer.stats.commits
    with armed("manifest.commit.durable", "sleep:20"):  # a slow disk: what comes meanwhile is one commit
        jobs = run(local, db_ids)
    commits = local.manifest.writer.stats.commits - before
    assert {job.result["dropped"] for job in jobs.values()} == {DROPPED}
    assert list(jobs) == db_ids
    assert {left(local, db_id) for db_id in db_ids} == {KEPT}
    assert commits < 80, "three for each database, and one for its deletions, if they went one by one"
    assert_once(local)


def test_what_they_held_goes_afterwards(local: World) -> None:
    db_ids = fill(local, 6)
    run(local, db_ids)
    local.settle()
    local.assert_settled()
    assert len(local.artifacts()) == 6 * KEPT
    assert_once(local)


# ── one fails alone ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_each_fails_alone(local: World) -> None:
    db_ids = fill(local, 12)
    bare, gone, odd = db_ids[1], db_ids[4], db_ids[7]
    local.clock.advance(3600)
    local.manifest.retention.set(bare, RetentionRecord(keep_seconds=1))
    local.manifest.jobs.enqueue(JobKind.RETENTION, odd, {"only": ["monday"]})
    with armed("jobs.retention.claimed", lambda _: drop(local, gone)):
        jobs = run(local, [*db_ids, 4_711])
    assert jobs.keys() == set(db_ids), "there is no job for what does not exist"
    bad = {db_id: jobs.pop(db_id) for db_id in (bare, gone, odd)}
    assert states(bad) == {JobState.FAILED_PERMANENT}
    errors = [job.record.error.partition(":")[0] for job in bad.values()]
    assert errors == ["WouldDropEverything", "DatabaseTombstoned", "InvalidInput"]
    assert states(jobs) == {JobState.SUCCEEDED}
    assert [left(local, db_id) for db_id in (bare, odd)] == [MADE, MADE]
    assert {left(local, db_id) for db_id in jobs} == {KEPT}
    assert_once_but_for(local, gone)
    local.settle()
    local.assert_settled()


def assert_once_but_for(world: World, gone: int) -> None:
    """As `assert_once`; the snapshots of this database went with it."""
    with world.manifest.read() as txn:
        drops = Counter(
            (op.db_id, op.snapshot_id)
            for change in txn.changes()
            for op in change.operations
            if type(op) is DropSnapshot and op.db_id != gone
        )
    assert set(drops.values()) == {1}


def test_a_database_that_goes_between_its_plan_and_its_batch_fails_alone(local: World) -> None:
    db_ids = fill(local, 4)
    with armed("jobs.retention.planned", at_hit(2, lambda: drop(local, db_ids[1]))):
        jobs = run(local, db_ids)
    assert "DatabaseTombstoned" in jobs.pop(db_ids[1]).record.error
    assert states(jobs) == {JobState.SUCCEEDED}
    local.settle()


def test_hundreds_that_fail_share_their_commits_too(local: World) -> None:
    db_ids = fill(local, 96, chunks=False)
    local.clock.advance(3600)
    for db_id in db_ids:
        local.manifest.retention.set(db_id, RetentionRecord(keep_seconds=1))
    before = local.manifest.writer.stats.commits
    with armed("manifest.commit.durable", "sleep:20"):
        jobs = run(local, db_ids)
    assert states(jobs) == {JobState.FAILED_PERMANENT}
    assert local.manifest.writer.stats.commits - before < 60
    assert states(run(local, db_ids, force=True)) == {JobState.SUCCEEDED}
    assert {left(local, db_id) for db_id in db_ids} == {0}


# ── others at the same snapshots ──────────────────────────────────────────────────────────────────────────────────────
def test_what_somebody_drops_meanwhile_is_planned_again(local: World) -> None:
    db_ids = fill(local, 3)
    with armed("jobs.retention.planned", at_hit(2, lambda: local.manifest.snapshots.drop(db_ids[1], 1))):
        jobs = run(local, db_ids)
    assert [job.result["dropped"] for job in jobs.values()] == [DROPPED, DROPPED - 1, DROPPED]
    assert {left(local, db_id) for db_id in db_ids} == {KEPT}


def test_it_is_not_planned_for_ever(local: World, monkeypatch: pytest.MonkeyPatch) -> None:
    db_ids, plans = fill(local, 2), list[int]()
    real = retention.work_of

    def stale(manifest: ManifestStore, job: Job, **more: Any) -> Completed:
        done = real(manifest, job, **more)
        if job.db_id == db_ids[0]:
            plans.append(job.db_id)
            return Completed(done.result, (DropSnapshot(job.db_id, 4_711), *done.ops))
        return done

    monkeypatch.setattr(retention, "work_of", stale)
    jobs = run(local, db_ids)
    assert len(plans) == PLANS_MAX
    assert "UnknownSnapshot" in jobs[db_ids[0]].record.error
    assert (left(local, db_ids[0]), left(local, db_ids[1])) == (MADE, KEPT)


def test_what_somebody_else_works_on_is_left_to_them(local: World) -> None:
    db_ids = fill(local, 3)
    local.manifest.jobs.claim_job(request_retention(local.manifest, db_ids[0]), "somebody")
    jobs = run(local, db_ids)
    assert jobs.keys() == set(db_ids[1:])
    assert [left(local, db_id) for db_id in db_ids] == [MADE, KEPT, KEPT]


def test_a_job_that_is_cancelled_drops_nothing(local: World) -> None:
    db_ids = fill(local, 3)

    def cancel() -> None:
        local.manifest.jobs.cancel(local.manifest.jobs.outstanding(db_ids[1], JobKind.RETENTION))

    with armed("jobs.retention.planned", at_hit(2, cancel)):
        jobs = run(local, db_ids)
    assert jobs[db_ids[1]].state is JobState.CANCELLED
    assert [left(local, db_id) for db_id in db_ids] == [KEPT, MADE, KEPT]


def test_a_job_that_was_given_to_somebody_else_drops_nothing_here(local: World) -> None:
    db_ids = fill(local, 3)
    jobs = local.manifest.jobs

    def lose() -> None:
        local.clock.advance(100)  # beyond the lease, before the heart has beaten
        jobs.expire()
        local.clock.advance(100)
        assert jobs.claim_job(jobs.outstanding(db_ids[2], JobKind.RETENTION), "somebody") is not None

    with armed("jobs.retention.claimed", lambda _: lose()):
        ended = run(local, db_ids)
    lease = ended[db_ids[2]].lease
    assert lease is not None
    assert lease.worker == "somebody"
    assert {left(local, db_id) for db_id in db_ids} == {MADE}, "their leases ran out, too"
    assert states(run(local, db_ids[:2])) == {JobState.SUCCEEDED}
    assert_once(local)


def test_leases_are_renewed_as_long_as_it_lasts(local: World, monkeypatch: pytest.MonkeyPatch) -> None:
    db_ids = fill(local, 3)
    monkeypatch.setattr(retention, "LEASE_SECONDS", 0.3)
    renewed = threading.Event()

    def wait() -> None:
        if is_renewed(local.manifest, local.clock):
            renewed.set()

    with armed("jobs.retention.planned", at_hit(1, wait)):
        jobs = run(local, db_ids)
    assert renewed.is_set()
    assert states(jobs) == {JobState.SUCCEEDED}


# ── interrupted ───────────────────────────────────────────────────────────────────────────────────────────────────────
def assert_put_back(world: World, succeeded: int, waiting: int) -> None:
    """Nothing is held, nothing has failed."""
    jobs = [job for job in world.manifest.jobs.jobs() if job.kind is JobKind.RETENTION]
    assert Counter(job.state for job in jobs) == Counter({JobState.SUCCEEDED: succeeded, JobState.PENDING: waiting}), (
        "something is still held"
    )
    assert {(job.record.failures, job.record.error) for job in jobs} == {(0, "")}


def test_a_run_that_is_interrupted_puts_its_jobs_back(local: World) -> None:
    db_ids = fill(local, 20)
    with armed("jobs.retention.planned", at_hit(6, interrupt)), pytest.raises(KeyboardInterrupt):
        run(local, db_ids)
    assert_put_back(local, 5, 15)
    assert Counter(left(local, db_id) for db_id in db_ids) == Counter({KEPT: 5, MADE: 15})
    jobs = run(local, db_ids)
    assert states(jobs) == {JobState.SUCCEEDED}
    assert [jobs[db_id].result["dropped"] for db_id in db_ids] == [0] * 5 + [DROPPED] * 15
    assert_once(local)


def test_whoever_is_told_how_far_it_is_may_interrupt_it(local: World) -> None:
    db_ids = fill(local, 20)

    def stop(done: int, _: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(local, db_ids, progress=stop)
    assert not local.manifest.jobs.jobs(JobState.IN_FLIGHT)
    assert states(run(local, db_ids)) == {JobState.SUCCEEDED}
    assert {left(local, db_id) for db_id in db_ids} == {KEPT}
    assert_once(local)


@pytest.mark.parametrize("claimed", [0, 3])
def test_what_was_being_claimed_is_put_back_too(local: World, monkeypatch: pytest.MonkeyPatch, claimed: int) -> None:
    db_ids = fill(local, 8)
    seen, real = Counter[str](), JobQueue.get

    def get(self: JobQueue, job_id: int) -> Job:
        seen["calls"] += 1
        if seen["calls"] == claimed + 1:
            raise KeyboardInterrupt
        return real(self, job_id)

    with monkeypatch.context() as patch:
        patch.setattr(JobQueue, "get", get)
        with pytest.raises(KeyboardInterrupt):
            run(local, db_ids)
    assert_put_back(local, 0, 8)
    assert states(run(local, db_ids)) == {JobState.SUCCEEDED}


# ── what may go ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_only_what_was_asked_for_goes(local: World) -> None:
    db_ids = fill(local, 3)
    first, second, third = db_ids
    jobs = run(local, db_ids, only={first: [1, 3], second: {2}})
    assert [job.result["snapshots"] for job in jobs.values()] == [["#1"], ["#2"], ["#1", "#2"]]
    assert [job.payload for job in jobs.values()] == [{"only": [1, 3]}, {"only": [2]}, None]
    assert [[each.snapshot_id for each in local.manifest.snapshots.of(db_id)] for db_id in db_ids] == [
        [2, 3, 4],
        [1, 3, 4],
        [3, 4],
    ]
    with pytest.raises(InvalidInput, match="no snapshot to drop"):
        run(local, db_ids, only={third: []})


def test_a_job_that_runs_alone_drops_only_what_it_was_asked_for(local: World) -> None:
    (db_id,) = fill(local, 1)
    job_id = local.manifest.jobs.enqueue(JobKind.RETENTION, db_id, {"only": [2]})
    assert local.done(job_id) == {"dropped": 1, "kept": 3, "snapshots": ["#2"]}
    assert_once(local)


def test_the_last_ones_are_safe_from_a_policy_that_was_not_asked_to_take_them(local: World) -> None:
    """Somebody agreed to the loss of two; an hour later no rule keeps any."""
    (db_id,) = fill(local, 1)
    local.clock.advance(3600)
    local.manifest.retention.set(db_id, RetentionRecord(keep_seconds=1))
    assert run(local, [db_id], only={db_id: [1, 2]})[db_id].result["dropped"] == 2
    assert "WouldDropEverything" in run(local, [db_id], only={db_id: [3, 4]})[db_id].record.error
    assert left(local, db_id) == 2


def test_force_is_what_this_run_says_or_the_job_that_waits(local: World) -> None:
    db_ids = fill(local, 2)
    local.clock.advance(3600)
    for db_id, force in zip(db_ids, (False, True)):
        local.manifest.retention.set(db_id, RetentionRecord(keep_seconds=1))
        request_retention(local.manifest, db_id, force=force)
    assert states(run(local, db_ids[:1], force=True)) == states(run(local, db_ids[1:])) == {JobState.SUCCEEDED}
    assert [left(local, db_id) for db_id in db_ids] == [0, 0]
