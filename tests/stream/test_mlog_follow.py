"""Bundles, followers and modes: the log as seen from tier 2."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.core.errors import ManifestIntegrityError, StalePlan
from quire.stream import mlog_records as r
from quire.stream.mlog_bundle import BundleTask, plan, publish, run
from quire.stream.mlog_follower import LogFollower, ToHydrate
from quire.stream.mlog_index import ManifestIndex, replay
from quire.stream.mlog_modes import SegmentFacts, catch_up, compare, facts_of
from quire.stream.mlog_reader import load_chunk
from quire.stream.mlog_recovery import objects_apart, recover
from tests.stream.logs import append_all, files_at, opened, same_state
from tests.stream.random_history import RandomHistory
from tests.stream.tiers import LogHarness

WEEK = 7 * 86_400.0
LATER = 4_000_000_000_000
"""A wall time weeks after any object of these tests was created."""


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[LogHarness]:
    harness = LogHarness(tmp_path)
    yield harness
    harness.close()


def follower(harness: LogHarness, name: str = "mirror") -> LogFollower:
    return LogFollower(harness.objects, files_at(harness.root / name), clock=harness.clock)


def sealed_and_uploaded(harness: LogHarness) -> None:
    harness.log.rotate()
    harness.clock.advance(60)
    harness.log.tick()


# ── bundles ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_bundle_holds_the_records_of_its_chunks(harness: LogHarness) -> None:
    harness.chunks(10)
    harness.log.tick()
    assert plan(harness.objects, now_ms=0, period_seconds=WEEK) == []
    tasks = plan(harness.objects, now_ms=LATER, period_seconds=WEEK)
    assert tasks == [BundleTask(stream_id=7, first=0, last=9)]
    before = [chunk for index in range(10) if (chunk := harness.objects.get_chunk(index)) is not None]
    task = pickle.loads(pickle.dumps(tasks[0]))
    result = run(task, harness.store)
    assert run(task, harness.store) == result
    bundle = harness.objects.get_bundle(0, 9)
    assert bundle is not None
    assert [view.raw for view in bundle.records()] == [view.raw for chunk in before for view in chunk.records()]
    assert same_state(replay(ManifestIndex(), [bundle]), replay(ManifestIndex(), before))
    first = bundle.data[64:128]
    assert int.from_bytes(first[:2], "little") == r.RecordType.SNAPSHOT_MARKER


def test_chunks_that_a_bundle_supersedes_are_deleted_by_records(harness: LogHarness) -> None:
    harness.chunks(10)
    harness.log.tick()
    (task,) = plan(harness.objects, now_ms=LATER, period_seconds=WEEK)
    keys = publish(harness.log, run(task, harness.store))
    assert keys == [f"manifest/7/{index}.mlog" for index in range(10)]
    assert harness.reopen().index.outstanding().deletes == dict.fromkeys(sorted(keys), 0)
    harness.clock.advance(60)
    assert sorted(harness.log.tick().deleted) == sorted(keys)
    assert harness.objects.listing().chunks == {}
    assert list(harness.objects.listing().bundles) == [(0, 9)]
    assert harness.log.index.rejected == 0
    assert objects_apart(harness.files, harness.objects) == {}
    live = harness.log.index
    for snapshot_id in harness.files.snapshots():
        Path(harness.files.snapshot(snapshot_id)).write_bytes(b"")
    assert same_state(recover(harness.files, harness.clock, harness.objects.fetch).index, live), (
        "rebuilt from bundles alone"
    )


def test_only_chunks_before_the_newest_snapshot_are_bundled(harness: LogHarness) -> None:
    harness.settings = harness.settings.__class__(chunk_bytes=16 << 10, record_bytes_max=1024, snapshot_chunks=1000)
    harness.reopen()
    harness.chunks(4)
    harness.log.tick()
    assert plan(harness.objects, now_ms=LATER, period_seconds=WEEK) == []
    harness.log.snapshot()
    harness.chunks(4)
    harness.log.tick()
    assert plan(harness.objects, now_ms=LATER, period_seconds=WEEK) == [BundleTask(stream_id=7, first=0, last=3)]


def dated(harness: LogHarness, days: dict[int, int]) -> None:
    """Set the modification time of the objects of chunks to these days."""
    for index, day in days.items():
        path = harness.root / "objects" / harness.objects.chunk_key(index)
        os.utime(path, (day * 86_400 + 60, day * 86_400 + 60))


def test_a_bundle_holds_one_week_and_begins_with_the_snapshot_before_it(harness: LogHarness) -> None:
    """Weeks are counted from 1970 by the object store's clock; the current week is not bundled."""
    harness.chunks(6)
    snapshot_id = harness.log.snapshot()
    harness.chunks(6)
    harness.log.snapshot()
    harness.log.rotate()
    harness.log.upload()
    dated(harness, {index: 70 + index for index in range(13)})  # days 70 to 76 are a week
    tasks = plan(harness.objects, now_ms=83 * 86_400_000, period_seconds=WEEK)
    assert [(task.first, task.last) for task in tasks] == [(0, 6)], "12 begins the current week"
    tasks = plan(harness.objects, now_ms=84 * 86_400_000, period_seconds=WEEK)
    assert [(task.first, task.last) for task in tasks] == [(0, 6), (7, 11)]
    for task, expected_id in zip(tasks, (0, snapshot_id)):
        run(task, harness.store)
        data = harness.store.get(harness.objects.bundle_key(task.first, task.last))
        bundle = load_chunk(data, chunk_index=task.first)
        first = next(bundle.records())
        assert first.value() == r.SnapshotMarker(task.first, 64, expected_id)
        assert len(bundle.offsets) == 1 + sum(
            len(chunk.offsets)
            for index in range(task.first, task.last + 1)
            if (chunk := harness.objects.get_chunk(index)) is not None
        )


def test_a_plan_whose_chunks_are_gone_is_stale(harness: LogHarness) -> None:
    harness.chunks(6)
    harness.log.tick()
    (task,) = plan(harness.objects, now_ms=LATER, period_seconds=WEEK)
    harness.store.delete(harness.objects.chunk_key(3))
    with pytest.raises(StalePlan):
        run(task, harness.store)


# ── followers ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_follower_keeps_up(harness: LogHarness) -> None:
    mirror = follower(harness)
    for _ in range(6):
        harness.append_records(40)
        sealed_and_uploaded(harness)
        polled = mirror.poll()
        assert polled.waiting_for is None
        assert polled.records > 0
        assert same_state(mirror.index, harness.log.index) or mirror.index.records < harness.log.index.records
    harness.log.rotate()
    harness.log.upload()
    mirror.poll()
    assert same_state(mirror.index, harness.log.index)
    again = follower(harness)
    assert same_state(again.index, mirror.index)
    assert again.poll().records == 0


def test_a_follower_catches_up_over_missing_chunks(harness: LogHarness) -> None:
    """Manifest-log document, matrix: intermediate objects are missing; the follower skips them with a snapshot or
    bundle.
    """
    mirror = follower(harness)
    harness.chunks(2)
    harness.log.tick()
    mirror.poll()
    harness.chunks(10)
    harness.log.tick()
    harness.log.rotate()
    harness.log.upload()
    for index in range(3, 8):
        harness.store.delete(harness.objects.chunk_key(index))
    polled = mirror.poll()
    assert polled.waiting_for is None, "a snapshot crosses the gap"
    assert same_state(mirror.index, harness.log.index)
    assert same_state(follower(harness).index, harness.log.index)


def test_a_follower_waits_at_a_gap_that_nothing_covers_and_reports_it(harness: LogHarness) -> None:
    harness.settings = harness.settings.__class__(chunk_bytes=16 << 10, record_bytes_max=1024, snapshot_chunks=1000)
    harness.reopen()
    harness.chunks(6)
    harness.log.tick()
    missing = harness.store.get(harness.objects.chunk_key(2))
    harness.store.delete(harness.objects.chunk_key(2))
    mirror = follower(harness)
    assert mirror.poll().waiting_for == 2
    assert mirror.poll().waiting_for == 2
    harness.store.put(harness.objects.chunk_key(2), missing)
    assert mirror.poll().chunks == 4
    assert same_state(mirror.index, harness.log.index)


def test_a_follower_never_goes_back_to_an_older_snapshot(harness: LogHarness) -> None:
    """The only snapshot is older than the follower's state: the follower waits at the gap instead."""
    harness.settings = harness.settings.__class__(chunk_bytes=16 << 10, record_bytes_max=1024, snapshot_chunks=1000)
    harness.reopen()
    harness.append_records(5)
    harness.log.snapshot()
    harness.chunks(3)
    harness.log.tick()
    mirror = follower(harness)
    mirror.poll()
    record_count = mirror.index.records
    assert record_count == harness.log.index.records
    harness.chunks(3)
    harness.log.tick()
    harness.store.delete(harness.objects.chunk_key(mirror.next_chunk))
    polled = mirror.poll()
    assert (polled.waiting_for, mirror.index.records) == (mirror.next_chunk, record_count)


def test_a_follower_reads_bundles(harness: LogHarness) -> None:
    harness.chunks(10)
    harness.log.tick()
    (task,) = plan(harness.objects, now_ms=LATER, period_seconds=WEEK)
    publish(harness.log, run(task, harness.store))
    harness.log.tick()
    for snapshot_id in harness.objects.listing().snapshots:
        harness.store.delete(harness.objects.snapshot_key(snapshot_id))
    harness.log.rotate()
    harness.log.upload()
    for snapshot_id in harness.objects.listing().snapshots:
        harness.store.delete(harness.objects.snapshot_key(snapshot_id))
    mirror = follower(harness)
    assert not harness.objects.listing().snapshots
    assert mirror.poll().waiting_for is None, "the bundle replaces the chunks"
    assert same_state(mirror.index, harness.log.index)
    assert same_state(follower(harness).index, harness.log.index)


def uploaded(segment: int) -> list[tuple[r.Payload, int]]:
    key = f"k/{segment}"
    return [
        (opened(segment), segment),
        (r.SealSegment(1, 1), segment),
        (r.UploadStarted(key), segment),
        (r.UploadDone(key, "e"), segment),
    ]


def test_hydrations_are_scheduled_once_and_not_for_deleted_objects(harness: LogHarness) -> None:
    mirror = follower(harness)
    append_all(harness.log, [*uploaded(1), *uploaded(2)])
    append_all(harness.log, [(r.Tier2DeleteQueued("k/1"), 1), (r.Tier2Deleted("k/1"), 1)])
    sealed_and_uploaded(harness)
    assert mirror.poll().hydrations == [ToHydrate(segment_id=2, key="k/2")]
    assert mirror.poll().hydrations == []
    harness.log.snapshot()
    append_all(harness.log, uploaded(3))
    sealed_and_uploaded(harness)
    assert mirror.poll().hydrations == [ToHydrate(segment_id=3, key="k/3")]
    again = LogFollower(harness.objects, files_at(harness.root / "mirror"), clock=harness.clock, scheduled=[2, 3])
    assert again.poll().hydrations == []
    fresh = follower(harness, "another")
    assert [hydration.segment_id for hydration in fresh.poll().hydrations] == [2, 3]


def test_a_follower_rejects_a_damaged_object(harness: LogHarness) -> None:
    harness.chunks(3)
    harness.log.tick()
    key = harness.objects.chunk_key(1)
    data = bytearray(harness.store.get(key))
    data[100] ^= 1
    harness.store.put(key, bytes(data))
    mirror = follower(harness)
    with pytest.raises(ManifestIntegrityError):
        mirror.poll()
    assert mirror.next_chunk == 1


def test_a_mirror_stays_small(harness: LogHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.stream.mlog_follower.MIRROR_CHUNKS", 3)
    mirror = follower(harness)
    for _ in range(5):
        harness.chunks(3)
        harness.clock.advance(60)
        harness.log.tick()
        mirror.poll()
        assert len(files_at(harness.root / "mirror").chunks()) <= 3
    assert same_state(follower(harness).index, mirror.index)


# ── modes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def projection_of(index: ManifestIndex) -> dict[int, SegmentFacts]:
    return {info.segment_id: facts_of(info) for info in index.segments()}


@pytest.mark.parametrize("seed", range(8))
def test_a_log_that_was_off_catches_up_by_records(harness: LogHarness, seed: int) -> None:
    history = RandomHistory(seed)
    for value, segment in history.many(40):
        harness.log.append(value, segment)
    history.many(60)  # these happen while the log is off
    facts_by_id = projection_of(history.index)
    for value, segment in catch_up(harness.log.index, facts_by_id):
        harness.log.append(value, segment)
    assert harness.log.index.rejected == 0

    def tiers(facts: SegmentFacts | None) -> tuple[bool, ...] | None:
        if facts is None:
            return None
        return facts.sealed, facts.hot, facts.warm_bytes is not None, facts.key is not None

    for divergence in compare(harness.log.index, facts_by_id):  # for example the etag of a second upload
        assert tiers(divergence.log) == tiers(divergence.projection)
