"""The heavy jobs of a store: over many databases, and their reports."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from quire.core.errors import AlreadyExists, Corruption, InvalidInput
from quire.durable.failpoints import armed
from quire.manifest.guard import ManifestGuard
from quire.manifest.ops.base import Op
from quire.manifest.ops.jobs import EnqueueJob
from quire.manifest.records import JobKind, JobState
from quire.store.store import Store
from tests.manifest.helpers import eventually


def fill(store: Store, *names: str, rows: int = 300) -> None:
    for name in names:
        connection = store.sqlite(name, create=True)
        connection.execute("create table if not exists t(a integer primary key, b)")
        connection.execute(
            "with recursive n(i) as (select 1 union all select i + 1 from n where i < ?) "
            "insert into t(b) select hex(randomblob(50)) from n",
            (rows,),
        )
        connection.close()


def test_all_databases_are_checkpointed_in_one_run(store: Store) -> None:
    fill(store, "a", "b", "c")
    store.create("clicks", "stream")
    jobs = store.heavy.checkpoint_all(runner="threads")
    assert [job.state for job in jobs] == [JobState.SUCCEEDED] * 3
    assert all(job.result["slots"] == 1 for job in jobs)
    fill(store, "a")
    assert [job.result["slots"] for job in store.heavy.checkpoint_all(["a", "b"], runner="threads")] == [1, 0]
    assert store.heavy.merge_all(runner="threads")
    counts = [store.sqlite(name).execute("select count(*) from t").fetchone() for name in "abc"]
    assert counts == [(600,), (300,), (300,)]


def test_a_database_that_cannot_be_opened_fails_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, "a", "b", "c")
    broken, open_database = store.database("b").db_id, store.pages.open
    for info in store.databases():
        store.pages.close_database(info.db_id)

    def fail(db_id: int, *rest: Any, **options: Any) -> Any:
        if db_id == broken:
            raise Corruption("a segment is damaged")
        return open_database(db_id, *rest, **options)

    monkeypatch.setattr("quire.jobs.enqueue.has_open_segment", lambda *_: True)
    monkeypatch.setattr(store.pages, "open", fail)
    results = store.heavy.checkpoint_all(runner="threads")
    assert [failure.db_id for failure in results.failures] == [broken]
    assert "a segment is damaged" in results.failures[0].error
    assert (len(results), results.states[JobState.SUCCEEDED], results.skipped) == (3, 2, 0)


def test_an_unknown_runner_is_refused(store: Store) -> None:
    fill(store, "a")
    job = store.checkpoint("a", runner="cluster")
    assert job.state is JobState.FAILED_PERMANENT
    assert InvalidInput.__name__ in job.record.error


def test_verify_sweep_and_audit(store: Store, tmp_path: Path) -> None:
    fill(store, "a", "b")
    store.heavy.checkpoint_all(runner="threads")
    job = store.heavy.verify(runner="threads")
    assert job.result["verified"] >= 2
    assert store.heavy.audit(runner="threads").num_rows == 0
    victim = next(Path(store.objects_url).rglob("base:*"))
    data = victim.read_bytes()
    victim.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    job = store.heavy.verify(runner="threads")
    assert (job.result["altered"], job.result["missing"]) == (1, 0)
    table = store.heavy.audit(runner="threads")
    assert table.column("state").to_pylist() == ["ALTERED"]
    store.heavy.write_report(str(tmp_path / "report.parquet"), [{"state": "ORPHANED", "artifact": "x"}])
    report = parquet.read_table(tmp_path / "report.parquet")
    assert report.column("state").to_pylist() == ["ALTERED", "ORPHANED"]


def test_a_job_that_a_call_runs_itself_is_not_taken_by_a_worker(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: between a call's new job and its claim, a worker's thread could take the job: `stats` then returned nothing,
    `recount` ended with a `TypeError`, and `verify` returned a job that was still running."""
    fill(store, "a")
    submit = store.manifest.submit

    def submit_and_work(ops: Sequence[Op], **options: Any) -> ManifestGuard:
        guard = submit(ops, **options)
        if any(type(op) is EnqueueJob for op in ops):
            guard.result()
            store.worker.drain()  # as a slot that the new job wakes
        return guard

    monkeypatch.setattr(store.manifest, "submit", submit_and_work)
    assert [usage.database for usage in store.heavy.stats(runner="threads")] == ["a"]
    reports: list[int] = []
    job = store.heavy.verify(runner="threads", progress=lambda done, _total: reports.append(done))
    assert job.state is JobState.SUCCEEDED
    assert reports


def test_a_checkpoint_that_a_worker_has_taken_is_waited_for(store: Store) -> None:
    """Hazard: the call returned the job while it was running, although it promises the finished one."""
    fill(store, "a")
    jobs, go_on = store.manifest.jobs, threading.Event()
    job_id = store.heavy.start(JobKind.CHECKPOINT, store.database("a").db_id, runner="threads")

    def wait(_: str) -> None:
        go_on.wait(60)

    with armed("jobs.worker.claimed", wait):
        slot = threading.Thread(target=store.worker.run, args=(job_id,))
        slot.start()
        eventually(lambda: jobs.get(job_id).state is JobState.IN_FLIGHT)
        threading.Timer(0.3, go_on.set).start()
        job = store.checkpoint("a")
        slot.join()
    assert (job.job_id, job.state) == (job_id, JobState.SUCCEEDED)


def test_a_snapshot_is_restored_to_a_file_that_sqlite_opens(store: Store, tmp_path: Path) -> None:
    fill(store, "a")
    store.snapshot("a", "early")
    fill(store, "a")
    store.checkpoint("a")
    target = tmp_path / "early.db"
    done = store.heavy.restore("a", "early", str(target))
    assert target.stat().st_size == done["bytes"]
    plain = sqlite3.connect(target)
    assert plain.execute("select count(*) from t").fetchone() == (300,)
    assert plain.execute("pragma integrity_check").fetchone() == ("ok",)
    plain.close()
    with pytest.raises(AlreadyExists):
        store.heavy.restore("a", "early", str(target))
    store.snapshot("a", "late")
    store.heavy.restore("a", "late", str(target), replace=True, runner="threads")
    plain = sqlite3.connect(target)
    assert plain.execute("select count(*) from t").fetchone() == (600,)
    plain.close()
    assert not list(tmp_path.glob("*.tmp"))


def test_stats_separate_shared_and_exclusive_bytes(store: Store) -> None:
    fill(store, "a")
    store.checkpoint("a")
    store.snapshot("a", "early")
    store.fork("a", "b")
    usage = {(row.database, row.snapshot): row for row in store.heavy.stats()}
    assert usage.keys() == {("a", ""), ("a", "early"), ("b", "")}
    both = usage["a", ""], usage["b", ""]
    chunk = both[1].chunk_bytes
    assert chunk > 0
    assert both[0].shared_bytes >= chunk
    assert both[1].exclusive_bytes == 0
    assert both[1].shared_bytes >= chunk
    assert both[0].compression > 1
    assert usage["a", "early"].exclusive_bytes == 0
    store.drop("b")
    (only_snapshot, early) = store.heavy.stats()
    assert (only_snapshot.shared_bytes, early.exclusive_bytes) == (0, 0)
    assert only_snapshot.exclusive_bytes == only_snapshot.size_bytes
    fill(store, "a")
    store.checkpoint("a")
    (_, early) = store.heavy.stats()
    assert early.size_bytes > 0
