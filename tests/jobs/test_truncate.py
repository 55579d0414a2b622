"""Truncation: absorbed rows are removed from the index in steps, segments are released, and their holders can still
read them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.durable.failpoints import armed
from quire.jobs.truncate import job as truncate_module
from quire.manifest import tables as t
from quire.manifest.records import JobKind, JobState, WalState
from quire.store.why import why
from quire.testing.manifest import assert_clean
from tests.jobs.checkpoint_child import RETRY_SECONDS, Owner
from tests.pages.engine_harness import Model, assert_reads, image, small_segments, write


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    small_segments(monkeypatch, frames=6)
    owner = Owner(tmp_path)
    yield owner
    owner.stop()


def _fill(owner: Owner, model: Model, commits: int = 10) -> int:
    """Write and absorb commits in many segments; returns the pending truncate job."""
    store = owner.database()
    for number in range(commits):
        write(store, model, {page: image() for page in (number % 4, 7, 20)})
    owner.manifest.jobs.enqueue(JobKind.CHECKPOINT, 1)
    owner.worker(JobKind.CHECKPOINT).drain()
    job_id = owner.manifest.jobs.outstanding(1, JobKind.TRUNCATE)
    assert job_id
    return job_id


def _rows(owner: Owner) -> list[tuple[int, ...]]:
    with owner.manifest.read() as txn:
        return [key[1:] for key, _ in txn.scan(t.PAGE_VERSION_INDEX, 1)]


def _heads(owner: Owner) -> int:
    with owner.manifest.read() as txn:
        return len(list(txn.scan(t.PAGE_VERSION_HEAD, 1)))


def _states(owner: Owner) -> set[WalState]:
    with owner.manifest.read() as txn:
        return {row.state for _, row in txn.scan(t.WAL_CATALOG, 1)}


def _assert_newest(owner: Owner, model: Model) -> None:
    owner.engine.cache.forget(1)
    with owner.database().open_snapshot() as reader:
        assert_reads(reader, model.newest)


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("scan_rows", [2, 1000])
def test_absorbed_rows_are_removed_in_steps_and_others_are_kept(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, rows: int, scan_rows: int
) -> None:
    """Also if one transaction scans fewer rows than a page has versions."""
    monkeypatch.setattr(truncate_module, "STEP_ROWS", rows)
    monkeypatch.setattr(truncate_module, "SCAN_ROWS_MAX", scan_rows)
    model = Model()
    job_id = _fill(owner, model)
    absorbed = len(_rows(owner))
    later = write(owner.database(), model, {page: image() for page in (0, 7, 7, 21)})
    owner.engine.flush(1)
    owner.worker(JobKind.TRUNCATE).run(job_id)
    assert owner.job(job_id).result["rows"] == absorbed
    assert {page for page, _ in _rows(owner)} == {0, 7, 21}
    assert min(lsn for _, lsn in _rows(owner)) > later.lsn - 3
    assert _heads(owner) == 3
    _assert_newest(owner, model)


def test_segments_are_truncated_a_few_at_a_time(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truncate_module, "STEP_SEGMENTS", 2)
    model, moved = Model(), list[str]()
    job_id = _fill(owner, model)
    with armed("jobs.truncate.moved", moved.append):
        owner.worker(JobKind.TRUNCATE).run(job_id)
    assert len(moved) >= 2
    result = owner.job(job_id).result
    assert result["segments"] > 2 * len(moved)
    assert _states(owner) == {WalState.TRUNCATED}
    owner.settle()
    _assert_newest(owner, model)


@pytest.mark.parametrize("point", ["jobs.truncate.dropped", "jobs.truncate.moved", "jobs.worker.worked"])
def test_a_failed_truncation_continues_where_it_stopped(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setattr(truncate_module, "STEP_ROWS", 5)
    monkeypatch.setattr(truncate_module, "STEP_SEGMENTS", 2)
    model = Model()
    job_id = _fill(owner, model)
    for skip in range(3):
        with armed(point, f"{skip}*off->1*raise:EIO"):
            owner.worker(JobKind.TRUNCATE).drain()
        assert_clean(owner.manifest)
        _assert_newest(owner, model)
        owner.reopen()
        owner.clock.advance(RETRY_SECONDS)
    owner.worker().drain()
    assert owner.job(job_id).state is JobState.SUCCEEDED
    assert _rows(owner) == []
    owner.settle()
    _assert_newest(owner, model)


def test_a_worker_that_lost_the_job_drops_nothing_more(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truncate_module, "STEP_ROWS", 5)
    model = Model()
    job_id = _fill(owner, model)
    remaining: list[int] = []

    def lose_lease(_: str) -> None:
        if not remaining:
            owner.clock.advance(60)
            owner.manifest.jobs.expire()
            remaining.append(len(_rows(owner)))

    with armed("jobs.truncate.dropped", lose_lease):
        owner.worker(JobKind.TRUNCATE).run(job_id)
    assert [len(_rows(owner))] == remaining
    assert remaining[0] > 0
    owner.clock.advance(RETRY_SECONDS)
    owner.worker().drain()
    assert _rows(owner) == []
    _assert_newest(owner, model)


def test_readers_snapshots_and_forks_read_truncated_segments(owner: Owner) -> None:
    store, model = owner.database(), Model()
    write(store, model, {page: image() for page in range(12)})
    owner.engine.snapshot("shop", "kept")
    snapshot_version = model.newest
    branch = owner.engine.fork("shop", "branch")
    reader = store.open_snapshot(ttl_seconds=None)
    reader_version = model.newest
    for _ in range(3):
        write(store, model, {page: image() for page in range(0, 12, 2)})
        owner.checkpoint(store)
        owner.settle()
        owner.engine.cache.forget(1)
        assert_reads(reader, reader_version)
        assert_reads(owner.engine.open_view("shop", "kept"), snapshot_version)
    reader.close()
    owner.checkpoint(store)
    owner.settle()
    assert _rows(owner) == []
    assert_reads(owner.engine.open_view("shop", "kept"), snapshot_version)
    with owner.engine.open(branch).open_snapshot() as forked:
        assert_reads(forked, snapshot_version)
    owner.manifest.snapshots.drop("shop", "kept")
    owner.checkpoint(owner.engine.open(branch))
    owner.settle()
    with owner.manifest.read() as txn:
        assert [row for _, row in txn.scan(t.WAL_CATALOG, 1) if row.state is not WalState.TRUNCATED] == []
    _assert_newest(owner, model)


def test_a_checkpoint_that_ends_during_a_truncation_leaves_no_rows_of_truncated_segments(owner: Owner) -> None:
    """Hazard: the truncation released segments that were absorbed after it had dropped rows, and the checkpoint enqueued no
    truncation of its own: rows named segments that were deleted a minute later."""
    model = Model()
    job_id = _fill(owner, model)
    store, once = owner.database(), [True]

    def checkpoint(_: str) -> None:
        if once:
            once.clear()
            write(store, model, {page: image() for page in (0, 7, 20)})
            owner.manifest.jobs.enqueue(JobKind.CHECKPOINT, 1)
            owner.worker(JobKind.CHECKPOINT).drain()

    with armed("jobs.truncate.dropped", checkpoint):
        owner.worker(JobKind.TRUNCATE).run(job_id)
    assert not once
    assert (_rows(owner), _states(owner) - {WalState.OPEN}) == ([], {WalState.TRUNCATED})
    assert not owner.manifest.jobs.outstanding(1, JobKind.TRUNCATE)
    _assert_newest(owner, model)


def test_truncating_twice_does_nothing_the_second_time(owner: Owner) -> None:
    model = Model()
    _fill(owner, model)
    owner.worker().drain()
    owner.manifest.jobs.enqueue(JobKind.TRUNCATE, 1)
    owner.worker().drain()
    last = [job for job in owner.manifest.jobs.jobs() if job.kind is JobKind.TRUNCATE][-1]
    assert last.result == {"rows": 0, "segments": 0, "bytes": 0}
    _assert_newest(owner, model)


def test_a_segment_records_its_newest_reader_when_planned_and_the_job_that_truncated_it(owner: Owner) -> None:
    model = Model()
    store = owner.database()
    for number in range(6):
        write(store, model, {page: image() for page in (number % 4, 7, 20)})
    owner.engine.flush(1)
    with store.open_snapshot() as reader:
        newest = reader.lsn
        owner.manifest.jobs.enqueue(JobKind.CHECKPOINT, 1)
        owner.worker(JobKind.CHECKPOINT).drain()
        with owner.manifest.read() as txn:
            rows = [row for _, row in txn.scan(t.WAL_CATALOG, 1) if row.state is WalState.CHECKPOINTED]
            state = why(txn, "pages/00000001/wal/00000001.seg").state
    assert rows
    assert {row.newest_reader_lsn for row in rows} == {newest}
    assert f"newest reader at lsn {newest} when its checkpoint was planned" in state
    job_id = owner.manifest.jobs.outstanding(1, JobKind.TRUNCATE)
    owner.worker(JobKind.TRUNCATE).drain()
    with owner.manifest.read() as txn:
        truncated = [row for _, row in txn.scan(t.WAL_CATALOG, 1) if row.state is WalState.TRUNCATED]
        state = why(txn, "pages/00000001/wal/00000001.seg").state
    assert truncated
    assert {row.gc_ticket for row in truncated} == {job_id}
    assert f"truncated by job {job_id}" in state
