"""A long-running reader: it is reported when it blocks a checkpoint, and set aside when half of the WAL budget is
used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import force_setattr
from msgspec.structs import replace as with_fields

from quire.core.errors import SnapshotGone
from quire.durable.failpoints import armed
from quire.jobs.checkpoint.plan import ASIDE_MS
from quire.jobs.maintenance import Upkeep
from quire.manifest import tables as t
from quire.manifest.records import JobKind, WalState
from quire.pages.readers import HOST
from quire.pages.view_build import reader_snapshots
from quire.testing.manifest import assert_clean
from tests.jobs.checkpoint_child import Owner
from tests.pages.engine_harness import (
    SETTINGS,
    Model,
    Version,
    assert_reads,
    image,
    segment_bytes,
    small_segments,
    write,
)

FRAMES = 6


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    small_segments(monkeypatch, FRAMES)
    # The budget is eight segments; half of it is four.
    settings = with_fields(SETTINGS)
    force_setattr(settings, "wal_bytes_max", 8 * segment_bytes(FRAMES))  # the setting itself is at least 16 MiB
    owner = Owner(tmp_path, settings=settings)
    yield owner
    owner.stop()


def checkpoint(owner: Owner) -> Any:
    """Checkpoint the sealed segments and run the jobs that follow; returns its result."""
    job_id = owner.manifest.jobs.enqueue(JobKind.CHECKPOINT, 1, None)
    owner.worker().drain()
    return owner.manifest.jobs.get(job_id).result


def fill(owner: Owner, model: Model, segments: int) -> None:
    for _ in range(segments):
        write(owner.database(), model, {page: image() for page in range(FRAMES)})


def snapshots_for_readers(owner: Owner) -> list[int]:
    with owner.manifest.read() as txn:
        return [snapshot_id for snapshot_id, _ in reader_snapshots(txn, 1)]


def unabsorbed_segments(owner: Owner) -> int:
    with owner.manifest.read() as txn:
        return sum(row.state < WalState.CHECKPOINTED for _, row in txn.scan(t.WAL_CATALOG, 1))


def test_below_half_of_the_budget_a_checkpoint_waits_and_reports_the_reader(owner: Owner) -> None:
    model = Model()
    fill(owner, model, 1)
    owner.engine.flush(1)
    with owner.database().open_snapshot(tags={"who": "report"}):
        fill(owner, model, 1)
        checkpoint(owner)
        result = checkpoint(owner)
        assert (result["slots"], result["waiting_segments"]) == (0, 1)
        (reader,) = result["readers"]
        assert (reader["host"], reader["tags"], reader["set_aside"]) == (HOST, {"who": "report"}, False)
        assert reader["pid"] > 0
        assert reader["since_ms"] > 0
        assert snapshots_for_readers(owner) == []
    assert checkpoint(owner)["slots"] > 0


def test_at_half_of_the_budget_readers_are_set_aside_and_the_checkpoint_continues(owner: Owner) -> None:
    store, model = owner.database(), Model()
    fill(owner, model, 1)
    version = model.newest
    with store.open_snapshot() as reader:
        for _ in range(3):  # three times the budget, which used to end in QuotaExceeded
            fill(owner, model, 7)
            assert checkpoint(owner)["slots"] > 0
        assert unabsorbed_segments(owner) == 0
        assert len(snapshots_for_readers(owner)) == 1, "a reader needs only one snapshot"
        assert_reads(reader, version)
    Upkeep(owner.context(), owner.worker()).run_once()
    assert snapshots_for_readers(owner) == [], "it has no reader any more"
    assert_clean(owner.manifest)


@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_reader_in_another_process_is_set_aside_too(owner: Owner, from_the_start: bool) -> None:
    """Its lease is a file: the next owner learns from the snapshot's row that the reader holds no WAL."""
    model = Model()
    fill(owner, model, 1)
    owner.engine.flush(1)
    version = model.newest
    reader = owner.engine.open_published("shop", tags={"who": "report"})
    if from_the_start:
        assert_reads(reader, version)
    fill(owner, model, 7)
    assert checkpoint(owner)["slots"] > 0
    assert unabsorbed_segments(owner) == 0
    assert_reads(reader, version)
    assert [lease.set_aside for lease in owner.engine.readers(1)] == [True]
    fill(owner, model, 2)
    assert "readers" not in checkpoint(owner), "the reader holds no WAL any more"
    assert_reads(reader, version)
    reader.close()


def test_the_snapshot_of_a_reader_is_extended_until_the_reader_ends(owner: Owner) -> None:
    model = Model()
    fill(owner, model, 1)
    owner.engine.flush(1)
    version = model.newest
    reader = owner.engine.open_published("shop")
    fill(owner, model, 7)
    checkpoint(owner)
    upkeep = Upkeep(owner.context(), owner.worker())
    for _ in range(4):
        owner.clock.advance(ASIDE_MS / 1000 - 60)
        reader.renew()
        upkeep.run_once()
    assert_reads(reader, version)
    reader.close()
    upkeep.run_once()
    assert snapshots_for_readers(owner) == []


def test_after_a_crash_following_the_snapshot_the_reader_continues(owner: Owner) -> None:
    model = Model()
    fill(owner, model, 1)
    owner.engine.flush(1)
    version = model.newest
    reader = owner.engine.open_published("shop")
    fill(owner, model, 7)
    with armed("jobs.checkpoint.set_aside", "raise:EIO"):
        owner.manifest.jobs.enqueue(JobKind.CHECKPOINT, 1, None)
        owner.worker().drain()
    assert len(snapshots_for_readers(owner)) == 1
    assert_reads(reader, version)
    owner.retry()
    assert unabsorbed_segments(owner) == 0
    assert len(snapshots_for_readers(owner)) == 1, "the next attempt creates no second snapshot"
    assert_reads(reader, version)
    reader.close()


def test_without_the_snapshot_the_reader_gets_an_error_and_no_wrong_pages(owner: Owner) -> None:
    store, model = owner.database(), Model()
    fill(owner, model, 1)
    reader = store.open_snapshot()
    fill(owner, model, 7)
    checkpoint(owner)
    (snapshot_id,) = snapshots_for_readers(owner)
    owner.manifest.snapshots.drop(1, snapshot_id)
    with pytest.raises(SnapshotGone):
        reader.read_page(0)
    reader.close()


def test_leases_that_hold_a_version_for_a_commit_are_never_set_aside(owner: Owner) -> None:
    store, model = owner.database(), Model()
    fill(owner, model, 1)
    hold = store.open_snapshot(ttl_seconds=None)
    before: Version = model.newest
    fill(owner, model, 7)
    checkpoint(owner)
    assert owner.engine.floor(1) == before.lsn
    hold.close()
