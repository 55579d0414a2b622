"""The worker: leases, heartbeats, progress, interruption, stopping, and whatever handlers may raise."""

from __future__ import annotations

import threading

import pytest

from quire.core.errors import (
    AlreadyExists,
    ChecksumMismatch,
    DatabaseTombstoned,
    IllegalTransition,
    InternalError,
    InvalidInput,
    ObjectStoreUnavailable,
    StalePlan,
    StillReferenced,
    UnknownArtifact,
)
from quire.jobs import worker as worker_module
from quire.jobs.context import JobContext
from quire.jobs.handler import Completed, Deferred, Outcome, Progress, options
from quire.jobs.worker import Worker
from quire.manifest.jobqueue import Job
from quire.manifest.ops.databases import DropDb
from quire.manifest.ops.local import RecordMetric
from quire.manifest.records import JobKind, JobState
from tests.jobs.handlers import KIND, Slow, at_once, enqueue, started, state, worker_with
from tests.jobs.world import World
from tests.manifest.helpers import eventually


# ── outcomes ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_job_succeeds_with_its_result_and_its_effects(local: World) -> None:
    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        progress(1, 2)
        return Completed({"n": job.payload}, ops=(RecordMetric(5, 5, [1.0]),))

    job_id = local.manifest.jobs.enqueue(KIND, payload=3)
    assert worker_with(local, work).drain() == 1
    assert (state(local, job_id), local.job(job_id).result) == (JobState.SUCCEEDED, {"n": 3})
    assert local.job(job_id).lease is None


def test_what_is_too_early_waits_without_having_failed(local: World) -> None:
    due = local.clock.now_ms() + 5_000
    job_id = enqueue(local)

    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        return Deferred(due) if ctx.clock.now_ms() < due else Completed()

    worker = worker_with(local, work)
    assert worker.drain() == 1
    assert (state(local, job_id), local.job(job_id).record.failures) == (JobState.PENDING, 0)
    assert worker.drain() == 0
    local.clock.advance(5)
    assert worker.drain() == 1
    assert state(local, job_id) is JobState.SUCCEEDED


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidInput("x"), JobState.FAILED_PERMANENT),
        (UnknownArtifact("x"), JobState.FAILED_PERMANENT),
        (ChecksumMismatch("x"), JobState.FAILED_PERMANENT),
        (DatabaseTombstoned("x"), JobState.FAILED_PERMANENT),
        (AlreadyExists("x"), JobState.PENDING),
        (IllegalTransition("x"), JobState.PENDING),
        (ObjectStoreUnavailable("x"), JobState.PENDING),
        (StalePlan("x"), JobState.PENDING),
        (OSError(5, "x"), JobState.PENDING),
        (ZeroDivisionError("x"), JobState.PENDING),
        (InternalError("x"), JobState.PENDING),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_handler_raises_ends_its_attempt_never_the_worker(
    local: World, error: Exception, expected: JobState
) -> None:
    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        raise error

    bad, good = enqueue(local), local.manifest.jobs.enqueue(JobKind.BUNDLE)
    worker = Worker(local.ctx, {KIND: work, JobKind.BUNDLE: at_once})
    assert worker.drain() == 2
    job = local.job(bad)
    failed = expected in (JobState.PENDING, JobState.FAILED_PERMANENT)
    assert (job.state, job.record.failures) == (expected, int(failed))
    assert type(error).__name__ in job.record.error
    assert state(local, good) is JobState.SUCCEEDED


def test_a_job_without_a_limit_is_never_given_up(local: World) -> None:
    """A delete job that failed for good would be enqueued anew in every round of upkeep, for ever."""

    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        raise InvalidInput("hopeless")

    job_id = enqueue(local, max_attempts=0)
    worker = worker_with(local, work)
    for failures in range(1, 8):
        worker.drain()
        assert (state(local, job_id), local.job(job_id).record.failures) == (JobState.PENDING, failures)
        local.clock.advance(400)


def test_more_work_that_came_in_is_done_in_the_same_attempt(local: World) -> None:
    db_id = local.database()
    local.manifest.snapshots.publish(db_id, "held")
    calls = []

    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        calls.append(job.record.attempt)
        if len(calls) == 3:
            local.manifest.snapshots.drop(db_id, "held")
        return Completed(ops=(DropDb(db_id),))

    job_id = enqueue(local)
    worker_with(local, work).drain()
    assert calls == [1, 1, 1]
    assert state(local, job_id) is JobState.SUCCEEDED


def test_work_that_never_ends_fails_the_attempt_instead_of_spinning(local: World) -> None:
    """A job whose completion is refused again and again must not keep a core and the manifest's writer busy for ever."""
    db_id = local.database()
    local.manifest.snapshots.publish(db_id, "held")

    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        return Completed(ops=(DropDb(db_id),))

    job_id = enqueue(local)
    worker_with(local, work).drain()
    job = local.job(job_id)
    assert (job.state, job.record.failures) == (JobState.PENDING, 1)
    assert StillReferenced.__name__ in job.record.error


def test_ctrl_c_in_a_drain_puts_the_job_back(local: World) -> None:
    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        raise KeyboardInterrupt

    job_id = enqueue(local)
    with pytest.raises(KeyboardInterrupt):
        worker_with(local, work).drain()
    assert (state(local, job_id), local.job(job_id).record.failures) == (JobState.PENDING, 0)


# ── stopping ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_stopping_puts_jobs_back_unfailed_and_leaves_nothing_leased(local: World) -> None:
    slow, ids = Slow(), [enqueue(local) for _ in range(3)]
    worker = worker_with(local, slow, threads=2)
    with started(worker):
        assert slow.begun.wait(60)
        assert eventually(lambda: sum(state(local, each) is JobState.IN_FLIGHT for each in ids) == 2)
    for job_id in ids:
        job = local.job(job_id)
        assert (job.state, job.record.failures, job.lease) == (JobState.PENDING, 0, None)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("quire-worker")]
    slow.end.set()
    with started(worker):  # and it can be started again
        assert eventually(lambda: all(state(local, each) is JobState.SUCCEEDED for each in ids))


def test_the_heart_beats_until_the_last_handler_has_ended(local: World) -> None:
    """A handler that takes long to its next step keeps its lease while the worker waits for it."""
    begun, go_on = threading.Event(), threading.Event()

    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        begun.set()
        assert go_on.wait(60)
        progress(1, 1)
        return Completed()

    job_id = enqueue(local)
    worker = worker_with(local, work, lease_seconds=0.2)
    worker.start()
    assert begun.wait(60)
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    before = local.job(job_id).lease
    assert before is not None

    def renewed() -> bool:
        local.clock.advance(0.001)
        lease = local.job(job_id).lease
        return lease is not None and lease.heartbeat_at_ms > before.heartbeat_at_ms

    assert eventually(renewed)
    go_on.set()
    stopping.join()
    assert (state(local, job_id), local.job(job_id).record.failures) == (JobState.PENDING, 0)


def test_a_handler_that_does_not_stop_is_reported_and_left(local: World, capsys: pytest.CaptureFixture[str]) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        begun.set()
        assert go_on.wait(60)
        return Completed()

    job_id = enqueue(local)
    worker = worker_with(local, work)
    worker.start()
    assert begun.wait(60)
    worker.stop(timeout=0.01)
    assert "worker.slow_stop" in capsys.readouterr().err
    go_on.set()
    assert eventually(lambda: state(local, job_id) is JobState.SUCCEEDED)


def test_stop_ends_a_drain(local: World) -> None:
    slow, job_id = Slow(), enqueue(local)
    worker = worker_with(local, slow)
    draining = threading.Thread(target=worker.drain)
    draining.start()
    assert slow.begun.wait(60)
    worker.stop()
    draining.join(60)
    assert not draining.is_alive()
    assert state(local, job_id) is JobState.PENDING
    slow.end.set()
    assert worker.drain() == 1, "it can be drained again"


# ── threads ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_several_threads_share_the_work(local: World) -> None:
    together = threading.Barrier(3, timeout=20)
    begun: list[int] = []
    done: list[int] = []

    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        begun.append(job.job_id)
        if len(begun) <= 3:  # nobody begins a fourth before all of these have met
            together.wait()
        done.append(job.job_id)
        return Completed()

    ids = [enqueue(local) for _ in range(9)]
    with started(worker_with(local, work, threads=3)):
        assert eventually(lambda: all(state(local, each) is JobState.SUCCEEDED for each in ids))
    assert sorted(done) == ids, "each once"


def test_a_started_worker_hears_of_new_jobs(local: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "POLL_SECONDS", 60.0)
    with started(worker_with(local, at_once)):
        for _ in range(3):
            job_id = enqueue(local)
            assert eventually(lambda job_id=job_id: state(local, job_id) is JobState.SUCCEEDED)  # type: ignore[misc]


def test_a_slot_survives_trouble_with_the_queue(local: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "POLL_SECONDS", 0.01)
    claim, troubles = local.manifest.jobs.claim, iter([OSError(24, "no descriptor"), InternalError("hm")])

    def troubled(*args: object, **more: object) -> Job | None:
        if (trouble := next(troubles, None)) is not None:
            raise trouble
        return claim(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(local.manifest.jobs, "claim", troubled)
    job_id = enqueue(local)
    with started(worker_with(local, at_once)):
        assert eventually(lambda: state(local, job_id) is JobState.SUCCEEDED)


def test_a_closed_store_ends_the_slots(local: World) -> None:
    worker = worker_with(local, at_once)
    worker.start()
    local.manifest.close()
    local.manifest.jobs.work_available.set()
    assert eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("quire-worker-slot")])
    worker.stop()


def test_bad_arguments_are_refused(local: World) -> None:
    with pytest.raises(InvalidInput):
        worker_with(local, at_once, threads=-1)
    with pytest.raises(InvalidInput):
        worker_with(local, at_once, lease_seconds=0)


# ── payloads ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_payloads_are_mappings_of_what_the_handler_knows(local: World) -> None:
    def given(payload: object) -> Job:
        return local.job(local.manifest.jobs.enqueue(KIND, payload=payload))

    assert options(given(None), force=False) == {"force": False}
    assert options(given({"force": True}), force=False, n=0) == {"force": True, "n": 0}
    refused: list[object] = [[], 1, "force", {"farce": True}, {"force": 1}, {1: True}]
    for bad in refused:
        with pytest.raises(InvalidInput):
            options(given(bad), force=False)
