"""Jobs over very many databases: in waves, and only for databases with work to do."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.durable import spool
from quire.jobs import job_results
from quire.manifest.jobqueue import Job
from quire.manifest.records import JobKind, JobRecord, JobState, RetentionRecord
from quire.store import heavy


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[quire.Store]:
    monkeypatch.setattr(heavy, "WAVE", 2)
    with quire.open(tmp_path / "store") as store:
        with store.sqlite("template", create=True) as connection:
            connection.execute("CREATE TABLE t(x)")
        store.fork_many("template", [f"tenant-{number}" for number in range(5)])
        for number in range(3):
            with store.sqlite(f"tenant-{number}") as connection:
                connection.execute("INSERT INTO t VALUES (1)")
        yield store


def test_databases_with_their_own_wal_are_checkpointed_in_waves(store: quire.Store) -> None:
    progress: list[tuple[int, int]] = []
    jobs = store.heavy.checkpoint_all(runner="threads", progress=lambda done, total: progress.append((done, total)))
    checkpointed = {store.database(job.db_id).name for job in jobs}
    assert checkpointed == {"template", "tenant-0", "tenant-1", "tenant-2"}, (
        "a fork that was never written has nothing to absorb"
    )
    assert {job.state for job in jobs} == {JobState.SUCCEEDED}
    assert progress == sorted(progress), "progress does not go back from wave to wave"
    assert progress[-1] == (6, 6), "and ends with everything done"
    assert not store.heavy.checkpoint_all(runner="threads")
    (job,) = store.heavy.checkpoint_all(["tenant-4"], runner="threads")
    assert job.result["slots"] == 1


def test_policies_are_applied_in_waves(store: quire.Store) -> None:
    for number in range(5):
        name = f"tenant-{number}"
        store.manifest.retention.set(name, RetentionRecord(keep_last=1))
        store.snapshot(name)
        store.snapshot(name)
    results = store.heavy.retention_all()
    assert (len(results), results.changed, results.failed, results.skipped) == (5, 5, 0, 0)
    assert results.sums == {"dropped": 5, "kept": 5}
    assert [job.result["dropped"] for job in results] == [1] * 5
    assert [len(store.manifest.snapshots.of(f"tenant-{number}")) for number in range(5)] == [1] * 5


def test_failures_are_counted_and_the_first_of_them_listed(store: quire.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_results, "FAILURES_MAX", 2)
    for number in range(5):
        store.manifest.retention.set(f"tenant-{number}", RetentionRecord(keep_last=1))
        store.snapshot(f"tenant-{number}")
        store.manifest.jobs.enqueue(JobKind.RETENTION, store.database(f"tenant-{number}").db_id, {"forced": True})
    results = store.heavy.retention_all()
    assert (len(results), results.failed, results.changed) == (5, 5, 0)
    assert [failure.db_id for failure in results.failures] == [
        store.database(f"tenant-{number}").db_id for number in range(2)
    ]
    assert "does not support this payload" in results.failures[0].error


def test_a_job_that_another_worker_holds_is_counted_as_skipped(store: quire.Store) -> None:
    store.manifest.retention.set("tenant-0", RetentionRecord(keep_last=1))
    job_id = store.manifest.jobs.enqueue(JobKind.RETENTION, store.database("tenant-0").db_id)
    store.manifest.jobs.claim_job(job_id, "remote:far-away")
    results = store.heavy.retention_all()
    assert (len(results), results.skipped) == (0, 1)


def test_the_results_of_a_run_are_those_at_its_end(store: quire.Store) -> None:
    results = store.heavy.checkpoint_all(runner="threads")
    store.manifest.jobs.forget(older_than_seconds=-1)
    assert store.manifest.jobs.jobs(JobState.SUCCEEDED) == []
    assert {job.state for job in results} == {JobState.SUCCEEDED}
    assert [job.db_id for job in results] == [job.db_id for job in results], "they can be read again"


def test_the_memory_of_results_does_not_grow_with_the_number_of_databases() -> None:
    record = JobRecord(
        kind=JobKind.MERGE, db_id=1, created_at_ms=1, state=JobState.SUCCEEDED, result=b"\x81\xa5slots\x01"
    )
    jobs = (Job(number, record) for number in range(40_000))
    tracemalloc.start()
    results = job_results.JobResults()
    results.add(jobs)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (len(results), results.sums["slots"]) == (40_000, 40_000)
    assert held < 2 * spool.MEMORY_BYTES
    assert sum(job.job_id for job in results) == sum(range(40_000))
