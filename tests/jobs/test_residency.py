"""Evict and hydrate a whole page database: what moves, what stays local, and that all versions stay readable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import ArtifactGone, ManifestDamaged, QuireError, UnknownDatabase
from quire.core.settings import MaintenanceSettings
from quire.jobs import residency
from quire.jobs.maintenance import Upkeep
from quire.jobs.residency import apply_policy, evict_database, hydrate_database
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import JobKind, JobState, Residency, WalState
from tests.jobs.checkpoint_child import Owner
from tests.pages.engine_harness import GRACE_SECONDS, Model, Version, assert_reads, image, write

EVICTING = MaintenanceSettings(delete_grace_seconds=GRACE_SECONDS, evict_seconds=100.0)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path, maintenance=EVICTING)
    yield owner
    owner.stop()


def snapshot_with_wal(owner: Owner) -> Version:
    """A snapshot of WAL that its database has absorbed, and one segment that is not absorbed; returns the snapshot's
    version."""
    store, model = owner.database(), Model()
    version = write(store, model, {page: image() for page in range(20)})
    owner.engine.snapshot("shop", "kept")
    owner.checkpoint(store)
    write(store, model, {0: image()})
    owner.engine.flush(1)
    return version


def residencies(owner: Owner) -> tuple[list[Residency], list[Residency]]:
    """Residencies of the segment that only the snapshot needs, and of the chunks."""
    with owner.manifest.read() as txn:
        segments = [row.residency for _, row in txn.scan(t.WAL_CATALOG, 1) if row.state is WalState.TRUNCATED]
        return segments, [row.residency for _, row in txn.scan(t.CHUNK_CATALOG, 1)]


def run(owner: Owner, jobs: list[int]) -> int:
    assert all(owner.worker().run(job_id) for job_id in jobs)
    assert {owner.manifest.jobs.get(job_id).state for job_id in jobs} <= {JobState.SUCCEEDED}
    return len(jobs)


def test_segments_that_only_a_snapshot_needs_are_evicted_and_hydrated(owner: Owner) -> None:
    version = snapshot_with_wal(owner)
    assert run(owner, evict_database(owner.manifest, 1)) == 2, "an upload, then an eviction"
    assert residencies(owner)[0] == [Residency.EVICTED]
    assert_reads(owner.engine.open_view("shop", "kept"), version)
    chunks = len(residencies(owner)[1])
    assert run(owner, hydrate_database(owner.manifest, 1)) == 1 + chunks
    assert residencies(owner) == ([Residency.LOCAL_AND_REMOTE], [Residency.LOCAL_AND_REMOTE] * chunks)
    assert_reads(owner.engine.open_view("shop", "kept"), version)
    assert run(owner, evict_database(owner.manifest, 1)) == 1 + chunks
    assert residencies(owner) == ([Residency.EVICTED], [Residency.EVICTED] * chunks)
    assert evict_database(owner.manifest, 1) == [], "nothing is left to do"


def test_the_policy_evicts_old_segments_and_leaves_young_ones_and_the_wal(owner: Owner) -> None:
    version = snapshot_with_wal(owner)
    upkeep = Upkeep(owner.context(), owner.worker())
    upkeep.run_once()
    assert residencies(owner)[0] == [Residency.LOCAL], "it is recent"
    owner.clock.advance(EVICTING.evict_seconds + 1)
    for _ in range(2):
        upkeep.run_once()
    assert residencies(owner)[0] == [Residency.EVICTED]
    with owner.manifest.read() as txn:
        waiting = [row.residency for _, row in txn.scan(t.WAL_CATALOG, 1) if row.state < WalState.CHECKPOINTED]
    assert waiting == [Residency.LOCAL], "segments not yet absorbed stay local"
    assert_reads(owner.engine.open_view("shop", "kept"), version)


def test_the_policy_evicts_hydrated_copies_when_they_are_old_and_not_before(owner: Owner) -> None:
    """The policy evicted a hydrated segment in the next round, and never evicted a hydrated chunk."""
    version = snapshot_with_wal(owner)
    chunks = len(residencies(owner)[1])
    upkeep = Upkeep(owner.context(), owner.worker())
    owner.clock.advance(EVICTING.evict_seconds + 1)
    for _ in range(2):
        upkeep.run_once()
    run(owner, hydrate_database(owner.manifest, 1))
    hydrated = ([Residency.LOCAL_AND_REMOTE], [Residency.LOCAL_AND_REMOTE] * chunks)
    for _ in range(2):
        owner.clock.advance(EVICTING.evict_seconds / 3)
        upkeep.run_once()
        assert residencies(owner) == hydrated, "hydrated copies stay until they are old"
    owner.clock.advance(EVICTING.evict_seconds)
    upkeep.run_once()
    assert residencies(owner) == ([Residency.EVICTED], [Residency.EVICTED] * chunks)
    assert_reads(owner.engine.open_view("shop", "kept"), version)
    jobs = len(list(owner.manifest.jobs.jobs()))
    upkeep.run_once()
    assert len(list(owner.manifest.jobs.jobs())) == jobs, "nothing is left to move"


def test_the_policy_evicts_deltas_too(owner: Owner) -> None:
    store, model = owner.database(), Model()
    write(store, model, {page: image() for page in range(20)})
    owner.checkpoint(store)
    write(store, model, {1: image()})
    owner.engine.flush(1)
    owner.checkpoint(store)
    run(owner, hydrate_database(owner.manifest, 1))

    def deltas() -> list[Residency]:
        with owner.manifest.read() as txn:
            return [row.residency for _, row in txn.scan(t.CHUNK_DELTA_INDEX, 1)]

    assert deltas() == [Residency.LOCAL_AND_REMOTE]
    owner.clock.advance(EVICTING.evict_seconds + 1)
    Upkeep(owner.context(), owner.worker()).run_once()
    assert deltas() == [Residency.EVICTED]
    owner.assert_newest(model)


def test_the_policy_reads_the_queue_once_for_all_databases(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole queue was read for each database with something to evict: a round over many databases was quadratic."""
    for name in ("shop", "second", "third"):
        store = owner.database(name)
        write(store, Model(), {page: image() for page in range(20)})
        owner.engine.snapshot(name, "kept")
        owner.checkpoint(store)
    owner.clock.advance(EVICTING.evict_seconds + 1)
    scans: list[str] = []
    scan = ReadTxn.scan

    def counted(self: ReadTxn, table: t.Table[Any], *prefix: int, **options: Any) -> Any:
        scans.append(table.name)
        return scan(self, table, *prefix, **options)

    monkeypatch.setattr(ReadTxn, "scan", counted)
    assert apply_policy(owner.manifest, [1, 2, 3], owner.clock.now_ms()) == 3, "an upload for each"
    assert scans.count(t.JOB_QUEUE.name) == 1


def test_the_policy_passes_over_what_was_deleted_meanwhile(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    """One artifact that was deleted between the plan and its request ended the round for all databases."""
    snapshot_with_wal(owner)
    enqueue = owner.manifest.jobs.enqueue
    requested = []

    def enqueued(kind: JobKind, db_id: int, payload: Any = None, *, artifact: Any) -> int:
        requested.append(artifact)
        if len(requested) == 1:
            raise ArtifactGone("it is being deleted", artifact=artifact)
        return enqueue(kind, db_id, payload, artifact=artifact)

    run(owner, evict_database(owner.manifest, 1))
    run(owner, hydrate_database(owner.manifest, 1))
    owner.clock.advance(1.0)
    monkeypatch.setattr(owner.manifest.jobs, "enqueue", enqueued)
    moves = apply_policy(owner.manifest, [1], owner.clock.now_ms())
    assert len(requested) == moves + 1 > 1, "the others were requested"


def test_the_policy_passes_over_databases_with_damaged_rows(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: all databases of a round are read before anything is requested, so one damaged row kept every database from
    being evicted."""
    for name in ("shop", "second"):
        store = owner.database(name)
        write(store, Model(), {page: image() for page in range(20)})
        owner.engine.snapshot(name, "kept")
        owner.checkpoint(store)
    owner.clock.advance(EVICTING.evict_seconds + 1)
    scan = ReadTxn.scan

    def damaged(self: ReadTxn, table: t.Table[Any], *prefix: int, **options: Any) -> Any:
        if table is t.WAL_CATALOG and prefix == (1,):
            raise ManifestDamaged("a row is damaged")
        return scan(self, table, *prefix, **options)

    events: list[tuple[str, int]] = []
    monkeypatch.setattr(ReadTxn, "scan", damaged)
    monkeypatch.setattr(residency, "emit", lambda _, event, **fields: events.append((event, fields["db_id"])))
    assert apply_policy(owner.manifest, [1, 2], owner.clock.now_ms()) == 1
    assert events == [("upkeep.skipped", 1)]


@pytest.mark.parametrize("error", [UnknownDatabase("it was purged"), ManifestDamaged("it was closed")])
def test_the_policy_passes_over_databases_that_went_away_meanwhile(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, error: QuireError
) -> None:
    snapshot_with_wal(owner)
    owner.clock.advance(EVICTING.evict_seconds + 1)

    def enqueue(*_: Any, **__: Any) -> int:
        raise error

    monkeypatch.setattr(owner.manifest.jobs, "enqueue", enqueue)
    assert apply_policy(owner.manifest, [1], owner.clock.now_ms()) == 0
