"""The worker: leases, heartbeats, progress, interruption, stopping, and errors of handlers."""

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
from tests.jobs.handlers import KIND, BlockingHandler, complete_at_once, enqueue, running, state, worker_with
from tests.jobs.job_store import JobStore
from tests.manifest.helpers import eventually


# ── outcomes ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_job_succeeds_with_its_result_and_its_effects(local_store: JobStore) -> None:
    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        progress(1, 2)
        return Completed({"n": job.payload}, ops=(RecordMetric(5, 5, [1.0]),))

    job_id = local_store.manifest.jobs.enqueue(KIND, payload=3)
    assert worker_with(local_store, work).drain() == 1
    assert (state(local_store, job_id), local_store.job(job_id).result) == (JobState.SUCCEEDED, {"n": 3})
    assert local_store.job(job_id).lease is None


def test_a_deferred_job_waits_without_a_failure(local_store: JobStore) -> None:
    due = local_store.clock.now_ms() + 5_000
    job_id = enqueue(local_store)

    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        return Deferred(due) if ctx.clock.now_ms() < due else Completed()

    worker = worker_with(local_store, work)
    assert worker.drain() == 1
    assert (state(local_store, job_id), local_store.job(job_id).record.failures) == (JobState.PENDING, 0)
    assert worker.drain() == 0
    local_store.clock.advance(5)
    assert worker.drain() == 1
    assert state(local_store, job_id) is JobState.SUCCEEDED


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
def test_an_error_of_a_handler_ends_its_attempt_never_the_worker(
    local_store: JobStore, error: Exception, expected: JobState
) -> None:
    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        raise error

    failing_id, other_id = enqueue(local_store), local_store.manifest.jobs.enqueue(JobKind.BUNDLE)
    worker = Worker(local_store.ctx, {KIND: work, JobKind.BUNDLE: complete_at_once})
    assert worker.drain() == 2
    job = local_store.job(failing_id)
    assert (job.state, job.record.failures) == (expected, 1)
    assert type(error).__name__ in job.record.error
    assert state(local_store, other_id) is JobState.SUCCEEDED


def test_a_job_without_a_limit_is_always_retried(local_store: JobStore) -> None:
    """A delete job that failed permanently would be enqueued again in every maintenance round."""

    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        raise InvalidInput("hopeless")

    job_id = enqueue(local_store, max_attempts=0)
    worker = worker_with(local_store, work)
    for failures in range(1, 8):
        worker.drain()
        assert (state(local_store, job_id), local_store.job(job_id).record.failures) == (JobState.PENDING, failures)
        local_store.clock.advance(400)


def test_work_that_arrived_meanwhile_is_done_in_the_same_attempt(local_store: JobStore) -> None:
    db_id = local_store.database()
    local_store.manifest.snapshots.publish(db_id, "held")
    calls = []

    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        calls.append(job.record.attempt)
        if len(calls) == 3:
            local_store.manifest.snapshots.drop(db_id, "held")
        return Completed(ops=(DropDb(db_id),))

    job_id = enqueue(local_store)
    worker_with(local_store, work).drain()
    assert calls == [1, 1, 1]
    assert state(local_store, job_id) is JobState.SUCCEEDED


def test_endless_work_fails_the_attempt_instead_of_looping(local_store: JobStore) -> None:
    """A job whose completion is refused repeatedly must not keep a core and the manifest's writer busy forever."""
    db_id = local_store.database()
    local_store.manifest.snapshots.publish(db_id, "held")

    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        return Completed(ops=(DropDb(db_id),))

    job_id = enqueue(local_store)
    worker_with(local_store, work).drain()
    job = local_store.job(job_id)
    assert (job.state, job.record.failures) == (JobState.PENDING, 1)
    assert StillReferenced.__name__ in job.record.error


def test_a_call_runs_the_job_of_a_dead_worker_when_its_lease_expires(local_store: JobStore) -> None:
    """Hazard: only maintenance ended expired leases; while it was off, the call waited for ever."""
    job_id = enqueue(local_store)
    assert local_store.manifest.jobs.claim_job(job_id, "a machine that is gone", lease_seconds=30) is not None
    worker = worker_with(local_store, complete_at_once)
    call = threading.Thread(target=worker.run_or_wait, args=(job_id,), daemon=True)
    call.start()
    call.join(0.3)
    assert state(local_store, job_id) is JobState.IN_FLIGHT, "the lease still counts"
    local_store.clock.advance(31)
    call.join(60)
    assert not call.is_alive()
    assert state(local_store, job_id) is JobState.SUCCEEDED


def test_ctrl_c_in_a_drain_puts_the_job_back(local_store: JobStore) -> None:
    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        raise KeyboardInterrupt

    job_id = enqueue(local_store)
    with pytest.raises(KeyboardInterrupt):
        worker_with(local_store, work).drain()
    assert (state(local_store, job_id), local_store.job(job_id).record.failures) == (JobState.PENDING, 0)


# ── stopping ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_stopping_puts_jobs_back_unfailed_and_leaves_nothing_leased(local_store: JobStore) -> None:
    blocking, ids = BlockingHandler(), [enqueue(local_store) for _ in range(3)]
    worker = worker_with(local_store, blocking, threads=2)
    with running(worker):
        assert blocking.begun.wait(60)
        assert eventually(lambda: sum(state(local_store, job_id) is JobState.IN_FLIGHT for job_id in ids) == 2)
    for job_id in ids:
        job = local_store.job(job_id)
        assert (job.state, job.record.failures, job.lease) == (JobState.PENDING, 0, None)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("quire-worker")]
    blocking.end.set()
    with running(worker):  # it can be started again
        assert eventually(lambda: all(state(local_store, job_id) is JobState.SUCCEEDED for job_id in ids))


def test_leases_are_renewed_until_the_last_handler_has_ended(local_store: JobStore) -> None:
    """A handler with a long step keeps its lease while the worker waits for it."""
    begun, resume = threading.Event(), threading.Event()

    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        begun.set()
        assert resume.wait(60)
        progress(1, 1)
        return Completed()

    job_id = enqueue(local_store)
    worker = worker_with(local_store, work, lease_seconds=0.2)
    worker.start()
    assert begun.wait(60)
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    before = local_store.job(job_id).lease
    assert before is not None

    def renewed() -> bool:
        local_store.clock.advance(0.001)
        lease = local_store.job(job_id).lease
        return lease is not None and lease.heartbeat_at_ms > before.heartbeat_at_ms

    assert eventually(renewed)
    resume.set()
    stopping.join()
    assert (state(local_store, job_id), local_store.job(job_id).record.failures) == (JobState.PENDING, 0)


def test_a_handler_that_does_not_stop_is_reported_and_abandoned(
    local_store: JobStore, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, resume = threading.Event(), threading.Event()

    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        begun.set()
        assert resume.wait(60)
        return Completed()

    job_id = enqueue(local_store)
    worker = worker_with(local_store, work)
    worker.start()
    assert begun.wait(60)
    worker.stop(timeout=0.01)
    assert "worker.slow_stop" in capsys.readouterr().err
    resume.set()
    assert eventually(lambda: state(local_store, job_id) is JobState.SUCCEEDED)


def test_stop_ends_a_drain(local_store: JobStore) -> None:
    blocking, job_id = BlockingHandler(), enqueue(local_store)
    worker = worker_with(local_store, blocking)
    draining = threading.Thread(target=worker.drain)
    draining.start()
    assert blocking.begun.wait(60)
    worker.stop()
    draining.join(60)
    assert not draining.is_alive()
    assert state(local_store, job_id) is JobState.PENDING
    blocking.end.set()
    assert worker.drain() == 1, "a stopped worker can be drained again"


# ── threads ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_several_threads_share_the_work(local_store: JobStore) -> None:
    barrier = threading.Barrier(3, timeout=20)
    begun: list[int] = []
    done: list[int] = []

    def work(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        begun.append(job.job_id)
        if len(begun) <= 3:  # no fourth job begins before the first three run at once
            barrier.wait()
        done.append(job.job_id)
        return Completed()

    ids = [enqueue(local_store) for _ in range(9)]
    with running(worker_with(local_store, work, threads=3)):
        assert eventually(lambda: all(state(local_store, job_id) is JobState.SUCCEEDED for job_id in ids))
    assert sorted(done) == ids, "each job runs once"


def test_a_started_worker_is_notified_of_new_jobs(local_store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "POLL_SECONDS", 60.0)
    with running(worker_with(local_store, complete_at_once)):
        for _ in range(3):
            job_id = enqueue(local_store)
            assert eventually(lambda job_id=job_id: state(local_store, job_id) is JobState.SUCCEEDED)  # type: ignore[misc]


def test_a_slot_survives_errors_of_the_queue(local_store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "POLL_SECONDS", 0.01)
    claim, errors = local_store.manifest.jobs.claim, iter([OSError(24, "no descriptor"), InternalError("hm")])

    def failing_claim(*args: object, **options: object) -> Job | None:
        if (error := next(errors, None)) is not None:
            raise error
        return claim(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(local_store.manifest.jobs, "claim", failing_claim)
    job_id = enqueue(local_store)
    with running(worker_with(local_store, complete_at_once)):
        assert eventually(lambda: state(local_store, job_id) is JobState.SUCCEEDED)


def test_a_closed_store_ends_the_slots(local_store: JobStore) -> None:
    worker = worker_with(local_store, complete_at_once)
    worker.start()
    local_store.manifest.close()
    local_store.manifest.jobs.work_available.set()
    assert eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("quire-worker-slot")])
    worker.stop()


def test_bad_arguments_are_refused(local_store: JobStore) -> None:
    with pytest.raises(InvalidInput):
        worker_with(local_store, complete_at_once, threads=-1)
    with pytest.raises(InvalidInput):
        worker_with(local_store, complete_at_once, lease_seconds=0)


# ── payloads ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_payloads_are_mappings_of_known_options(local_store: JobStore) -> None:
    def job_with(payload: object) -> Job:
        return local_store.job(local_store.manifest.jobs.enqueue(KIND, payload=payload))

    assert options(job_with(None), force=False) == {"force": False}
    assert options(job_with({"force": True}), force=False, n=0) == {"force": True, "n": 0}
    refused: list[object] = [[], 1, "force", {"farce": True}, {"force": 1}, {1: True}]
    for payload in refused:
        with pytest.raises(InvalidInput):
            options(job_with(payload), force=False)


@pytest.mark.parametrize("name", ["quire-worker-leases", "quire-worker-slot-0"])
def test_a_worker_whose_threads_could_not_be_started_is_started_by_the_next_call(
    local_store: JobStore, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Hazard: after a failed start the worker counted as running: no job was run any more, and `stop` raised."""
    start, failures = threading.Thread.start, [name]

    def start_later(thread: threading.Thread) -> None:
        if thread.name in failures:
            failures.remove(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    worker, job_id = worker_with(local_store, complete_at_once), enqueue(local_store)
    with pytest.raises(RuntimeError):
        worker.start()
    worker.stop()
    failures.append(name)
    with pytest.raises(RuntimeError):
        worker.start()
    worker.start()
    assert eventually(lambda: state(local_store, job_id) is JobState.SUCCEEDED)
    worker.stop()
