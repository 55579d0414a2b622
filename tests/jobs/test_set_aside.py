"""A reader that stays: named where it holds a checkpoint back, set aside when half of the WAL budget is used."""

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
from tests.pages.world import SETTINGS, Model, Version, assert_reads, image, segment_bytes, small_segments, write

FRAMES = 6


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    small_segments(monkeypatch, FRAMES)
    # Eight segments are the budget: four of them are half of it.
    settings = with_fields(SETTINGS)
    force_setattr(settings, "wal_bytes_max", 8 * segment_bytes(FRAMES))  # as a setting it is at least 16 MiB
    made = Owner(tmp_path, settings=settings)
    yield made
    made.stop()


def checkpoint(owner: Owner) -> Any:
    """A checkpoint of what is sealed, and what follows from it; its result."""
    job_id = owner.manifest.jobs.enqueue(JobKind.CHECKPOINT, 1, None)
    owner.worker().drain()
    return owner.manifest.jobs.get(job_id).result


def fill(owner: Owner, model: Model, segments: int) -> None:
    for _ in range(segments):
        write(owner.database(), model, {page: image() for page in range(FRAMES)})


def kept(owner: Owner) -> list[int]:
    with owner.manifest.read() as txn:
        return [snapshot_id for snapshot_id, _ in reader_snapshots(txn, 1)]


def waiting(owner: Owner) -> int:
    with owner.manifest.read() as txn:
        return sum(row.state < WalState.CHECKPOINTED for _, row in txn.scan(t.WAL_CATALOG, 1))


def test_below_half_of_the_budget_a_checkpoint_waits_and_names_the_reader(owner: Owner) -> None:
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
        assert kept(owner) == []
    assert checkpoint(owner)["slots"] > 0


def test_at_half_of_the_budget_readers_are_set_aside_and_the_checkpoint_goes_on(owner: Owner) -> None:
    store, model = owner.database(), Model()
    fill(owner, model, 1)
    version = model.newest
    with store.open_snapshot() as reader:
        for _ in range(3):  # three times the budget, which used to end in QuotaExceeded
            fill(owner, model, 7)
            assert checkpoint(owner)["slots"] > 0
        assert waiting(owner) == 0
        assert len(kept(owner)) == 1, "one snapshot is enough for a reader"
        assert_reads(reader, version)
    Upkeep(owner.context(), owner.worker()).run_once()
    assert kept(owner) == [], "nobody reads it any more"
    assert_clean(owner.manifest)


@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_reader_in_another_process_is_set_aside_too(owner: Owner, from_the_start: bool) -> None:
    """Its lease is a file: the next owner knows from the snapshot's row that it holds nothing."""
    model = Model()
    fill(owner, model, 1)
    owner.engine.flush(1)
    version = model.newest
    reader = owner.engine.open_published("shop", tags={"who": "report"})
    if from_the_start:
        assert_reads(reader, version)
    fill(owner, model, 7)
    assert checkpoint(owner)["slots"] > 0
    assert waiting(owner) == 0
    assert_reads(reader, version)
    assert [lease.set_aside for lease in owner.engine.readers(1)] == [True]
    fill(owner, model, 2)
    assert "readers" not in checkpoint(owner), "it holds nothing any more"
    assert_reads(reader, version)
    reader.close()


def test_what_is_read_is_extended_until_its_reader_ends(owner: Owner) -> None:
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
    assert kept(owner) == []


def test_a_crash_after_the_snapshot_leaves_a_reader_that_reads_on(owner: Owner) -> None:
    model = Model()
    fill(owner, model, 1)
    owner.engine.flush(1)
    version = model.newest
    reader = owner.engine.open_published("shop")
    fill(owner, model, 7)
    with armed("jobs.checkpoint.set_aside", "raise:EIO"):
        owner.manifest.jobs.enqueue(JobKind.CHECKPOINT, 1, None)
        owner.worker().drain()
    assert len(kept(owner)) == 1
    assert_reads(reader, version)
    owner.retry()
    assert waiting(owner) == 0
    assert len(kept(owner)) == 1, "the next attempt makes no second one"
    assert_reads(reader, version)
    reader.close()


def test_without_the_snapshot_the_reader_is_told_and_reads_nothing_wrong(owner: Owner) -> None:
    store, model = owner.database(), Model()
    fill(owner, model, 1)
    reader = store.open_snapshot()
    fill(owner, model, 7)
    checkpoint(owner)
    (snapshot_id,) = kept(owner)
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
