"""Running jobs from a command: the end of a job determines that of the command."""

from __future__ import annotations

from pathlib import Path

import pytest

import quire
from quire.cli.command import Cli
from quire.cli.errors import exit_of
from quire.cli.job_progress import JobSession, failure_of
from quire.manifest.jobqueue import Job
from quire.manifest.records import JobKind, JobRecord, JobState


def job(state: JobState, error: str = "") -> Job:
    return Job(7, JobRecord(JobKind.CHECKPOINT, 1, 0, state=state, error=error))


@pytest.mark.parametrize(
    ("state", "error", "code", "message"),
    [
        (JobState.PENDING, "DiskFull: no space (path='/x'); make some", 6, "the work failed: no space (path='/x')"),
        (JobState.FAILED_PERMANENT, "UnknownDatabase: gone", 3, "the work failed: gone"),
        (JobState.FAILED_PERMANENT, "ZeroDivisionError: by zero", 70, "the work failed: by zero"),
        (JobState.FAILED_PERMANENT, "annotations: odd", 70, "the work failed: odd"),
        (JobState.PENDING, "its lease expired", 5, "the work failed: its lease expired"),
        (JobState.CANCELLED, "cancelled", 4, "the work was cancelled"),
    ],
)
def test_a_failed_job_raises_an_error_of_its_group(state: JobState, error: str, code: int, message: str) -> None:
    failure = failure_of(job(state, error), "the work")
    assert failure is not None
    assert (failure.what, exit_of(failure).code) == (message, code)
    assert failure.where == {"job_id": 7}


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.PENDING])
def test_a_job_that_did_not_fail_raises_nothing(state: JobState) -> None:
    assert failure_of(job(state), "the work") is None


def test_only_jobs_run_since_the_start_of_the_session_count(path: Path) -> None:
    with quire.open(path) as store:
        jobs = store.manifest.jobs
        jobs.enqueue(JobKind.RETENTION, 1)
        store.worker.drain()
        jobs.enqueue(JobKind.RETENTION, 1)
        jobs.enqueue(JobKind.EVICT, 1, delay_seconds=3_600)
        session = JobSession(store)
        jobs.enqueue(JobKind.RETENTION, 2)
        assert session.ran() == []
        store.worker.drain()
        assert [job.job_id for job in session.ran()] == [2, 4]


def test_errors_of_the_work_are_raised(path: Path) -> None:
    with quire.open(path) as store, pytest.raises(quire.UnknownDatabase):
        JobSession(store).watch(lambda: store.database("nothing"))


def test_a_command_starts_no_background_work_unless_it_is_a_worker(path: Path) -> None:
    """No background work, unless the command is a worker: then even if the owner has no workers of its own."""
    (path / "quire.toml").write_text("[maintenance]\nworkers = 0\n")
    cli = Cli(str(path))
    with cli.owner() as store:
        assert (store.settings.maintenance.enabled, store.settings.maintenance.workers) == (False, 0)
    with cli.owner(upkeep=True, grace_seconds=0) as store:
        settings = store.settings.maintenance
        assert (settings.enabled, settings.workers, settings.delete_grace_seconds) == (True, 1, 0)
    (path / "quire.toml").write_text("[maintenance]\nenabled = false\n")
    with cli.owner(upkeep=True) as store:
        assert store.settings.maintenance.enabled is False, "the store's settings disable workers"
