"""Bundles, followers, modes: the log seen from tier 2, and how much it is believed."""

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
from tests.stream.logs import files_at, opened, same_state
from tests.stream.stories import Story
from tests.stream.tiers import World

WEEK = 7 * 86_400.0
LATER = 4_000_000_000_000
"""Wall time weeks after any object of these tests was made."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def follower(world: World, name: str = "mirror") -> LogFollower:
    return LogFollower(world.objects, files_at(world.root / name), clock=world.clock)


def sealed_and_uploaded(world: World) -> None:
    world.log.rotate()
    world.clock.advance(60)
    world.log.tick()


# ── bundles ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_bundle_holds_the_records_of_its_chunks(world: World) -> None:
    world.chunks(10)
    world.log.tick()
    assert plan(world.objects, now_ms=0, period_seconds=WEEK) == []
    tasks = plan(world.objects, now_ms=LATER, period_seconds=WEEK)
    assert tasks == [BundleTask(stream_id=7, first=0, last=9)]
    before = [chunk for index in range(10) if (chunk := world.objects.get_chunk(index)) is not None]
    task = pickle.loads(pickle.dumps(tasks[0]))
    result = run(task, world.store)
    assert run(task, world.store) == result
    bundle = world.objects.get_bundle(0, 9)
    assert bundle is not None
    assert [view.raw for view in bundle.records()] == [view.raw for chunk in before for view in chunk.records()]
    assert same_state(replay(ManifestIndex(), [bundle]), replay(ManifestIndex(), before))
    first = bundle.data[64:128]
    assert int.from_bytes(first[:2], "little") == r.RecordType.SNAPSHOT_MARKER


def test_what_a_bundle_supersedes_is_retired_by_records(world: World) -> None:
    world.chunks(10)
    world.log.tick()
    (task,) = plan(world.objects, now_ms=LATER, period_seconds=WEEK)
    keys = publish(world.log, run(task, world.store))
    assert keys == [f"manifest/7/{index}.mlog" for index in range(10)]
    assert world.reopen().index.outstanding().deletes == dict.fromkeys(sorted(keys), 0)
    world.clock.advance(60)
    assert sorted(world.log.tick().deleted) == sorted(keys)
    assert world.objects.listing().chunks == {}
    assert list(world.objects.listing().bundles) == [(0, 9)]
    assert world.log.index.rejected == 0
    assert objects_apart(world.files, world.objects) == {}
    live = world.log.index
    for snapshot_id in world.files.snapshots():
        Path(world.files.snapshot(snapshot_id)).write_bytes(b"")
    assert same_state(recover(world.files, world.clock, world.objects.fetch).index, live), "from bundles alone"


def test_only_chunks_before_the_newest_snapshot_are_bundled(world: World) -> None:
    world.settings = world.settings.__class__(chunk_bytes=16 << 10, record_bytes_max=1024, snapshot_chunks=1000)
    world.reopen()
    world.chunks(4)
    world.log.tick()
    assert plan(world.objects, now_ms=LATER, period_seconds=WEEK) == []
    world.log.snapshot()
    world.chunks(4)
    world.log.tick()
    assert plan(world.objects, now_ms=LATER, period_seconds=WEEK) == [BundleTask(stream_id=7, first=0, last=3)]


def dated(world: World, days: dict[int, int]) -> None:
    """Have the objects of chunks be as old as these days say."""
    for index, day in days.items():
        path = world.root / "objects" / world.objects.chunk_key(index)
        os.utime(path, (day * 86_400 + 60, day * 86_400 + 60))


def test_a_bundle_holds_one_week_and_begins_with_the_snapshot_before_it(world: World) -> None:
    """Weeks are those of the object store's clock, counted from 1970; the one that is running is left alone."""
    world.chunks(6)
    snapshot_id = world.log.snapshot()
    world.chunks(6)
    world.log.snapshot()
    world.log.rotate()
    world.log.upload()
    dated(world, {index: 70 + index for index in range(13)})  # days 70 to 76 are a week
    tasks = plan(world.objects, now_ms=83 * 86_400_000, period_seconds=WEEK)
    assert [(task.first, task.last) for task in tasks] == [(0, 6)], "12 begins the running week"
    tasks = plan(world.objects, now_ms=84 * 86_400_000, period_seconds=WEEK)
    assert [(task.first, task.last) for task in tasks] == [(0, 6), (7, 11)]
    for task, wanted in zip(tasks, (0, snapshot_id)):
        run(task, world.store)
        data = world.store.get(world.objects.bundle_key(task.first, task.last))
        whole = load_chunk(data, chunk_index=task.first)
        first = next(whole.records())
        assert first.value() == r.SnapshotMarker(task.first, 64, wanted)
        assert len(whole.offsets) == 1 + sum(
            len(chunk.offsets)
            for index in range(task.first, task.last + 1)
            if (chunk := world.objects.get_chunk(index)) is not None
        )


def test_a_plan_whose_chunks_are_gone_is_stale(world: World) -> None:
    world.chunks(6)
    world.log.tick()
    (task,) = plan(world.objects, now_ms=LATER, period_seconds=WEEK)
    world.store.delete(world.objects.chunk_key(3))
    with pytest.raises(StalePlan):
        run(task, world.store)


# ── followers ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_follower_keeps_up(world: World) -> None:
    mirror = follower(world)
    for _ in range(6):
        world.tell(40)
        sealed_and_uploaded(world)
        polled = mirror.poll()
        assert polled.waiting_for is None
        assert polled.records > 0
        assert same_state(mirror.index, world.log.index) or mirror.index.records < world.log.index.records
    world.log.rotate()
    world.log.upload()
    mirror.poll()
    assert same_state(mirror.index, world.log.index)
    again = follower(world)
    assert same_state(again.index, mirror.index)
    assert again.poll().records == 0


def test_a_follower_catches_up_over_missing_chunks(world: World) -> None:
    """Manifest-log document, matrix: intermediate objects are dropped; snapshots and bundles carry the follower over."""
    mirror = follower(world)
    world.chunks(2)
    world.log.tick()
    mirror.poll()
    world.chunks(10)
    world.log.tick()
    world.log.rotate()
    world.log.upload()
    for index in range(3, 8):
        world.store.delete(world.objects.chunk_key(index))
    polled = mirror.poll()
    assert polled.jumped_to is not None
    assert same_state(mirror.index, world.log.index)
    assert same_state(follower(world).index, world.log.index)


def test_a_follower_without_a_way_over_waits_and_says_so(world: World) -> None:
    world.settings = world.settings.__class__(chunk_bytes=16 << 10, record_bytes_max=1024, snapshot_chunks=1000)
    world.reopen()
    world.chunks(6)
    world.log.tick()
    missing = world.store.get(world.objects.chunk_key(2))
    world.store.delete(world.objects.chunk_key(2))
    mirror = follower(world)
    assert mirror.poll().waiting_for == 2
    assert mirror.poll().waiting_for == 2
    world.store.put(world.objects.chunk_key(2), missing)
    assert mirror.poll().chunks == 4
    assert same_state(mirror.index, world.log.index)


def test_a_follower_never_goes_back_to_an_older_snapshot(world: World) -> None:
    """The only snapshot is of before what the follower has seen: it waits at the gap instead."""
    world.settings = world.settings.__class__(chunk_bytes=16 << 10, record_bytes_max=1024, snapshot_chunks=1000)
    world.reopen()
    world.tell(5)
    world.log.snapshot()
    world.chunks(3)
    world.log.tick()
    mirror = follower(world)
    mirror.poll()
    seen = mirror.index.records
    assert seen == world.log.index.records
    world.chunks(3)
    world.log.tick()
    world.store.delete(world.objects.chunk_key(mirror.next_chunk))
    polled = mirror.poll()
    assert (polled.jumped_to, polled.waiting_for, mirror.index.records) == (None, mirror.next_chunk, seen)


def test_a_follower_reads_bundles(world: World) -> None:
    world.chunks(10)
    world.log.tick()
    (task,) = plan(world.objects, now_ms=LATER, period_seconds=WEEK)
    publish(world.log, run(task, world.store))
    world.log.tick()
    for snapshot_id in world.objects.listing().snapshots:
        world.store.delete(world.objects.snapshot_key(snapshot_id))
    world.log.rotate()
    world.log.upload()
    for snapshot_id in world.objects.listing().snapshots:
        world.store.delete(world.objects.snapshot_key(snapshot_id))
    mirror = follower(world)
    assert mirror.poll().jumped_to is None
    assert same_state(mirror.index, world.log.index)
    assert same_state(follower(world).index, world.log.index)


def uploaded(segment: int) -> list[tuple[r.Payload, int]]:
    key = f"k/{segment}"
    return [
        (opened(segment), segment),
        (r.SealSegment(1, 1), segment),
        (r.UploadStarted(key), segment),
        (r.UploadDone(key, "e"), segment),
    ]


def test_hydrations_are_scheduled_once_and_not_for_what_is_deleted(world: World) -> None:
    mirror = follower(world)
    world.log.append_all([*uploaded(1), *uploaded(2)])
    world.log.append_all([(r.Tier2DeleteQueued("k/1"), 1), (r.Tier2Deleted("k/1"), 1)])
    sealed_and_uploaded(world)
    assert mirror.poll().hydrations == [ToHydrate(segment_id=2, key="k/2")]
    assert mirror.poll().hydrations == []
    world.log.snapshot()
    world.log.append_all(uploaded(3))
    sealed_and_uploaded(world)
    assert mirror.poll().hydrations == [ToHydrate(segment_id=3, key="k/3")]
    again = LogFollower(world.objects, files_at(world.root / "mirror"), clock=world.clock, scheduled=[2, 3])
    assert again.poll().hydrations == []
    fresh = follower(world, "another")
    assert [each.segment_id for each in fresh.poll().hydrations] == [2, 3]


def test_a_follower_does_not_believe_a_damaged_object(world: World) -> None:
    world.chunks(3)
    world.log.tick()
    key = world.objects.chunk_key(1)
    data = bytearray(world.store.get(key))
    data[100] ^= 1
    world.store.put(key, bytes(data))
    mirror = follower(world)
    with pytest.raises(ManifestIntegrityError):
        mirror.poll()
    assert mirror.next_chunk == 1


def test_a_mirror_stays_small(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.stream.mlog_follower.MIRROR_CHUNKS", 3)
    mirror = follower(world)
    for _ in range(5):
        world.chunks(3)
        world.clock.advance(60)
        world.log.tick()
        mirror.poll()
        assert len(files_at(world.root / "mirror").chunks()) <= 3
    assert same_state(follower(world).index, mirror.index)


# ── modes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def projection_of(index: ManifestIndex) -> dict[int, SegmentFacts]:
    return {info.segment_id: facts_of(info) for info in index.segments()}


@pytest.mark.parametrize("seed", range(8))
def test_a_log_that_was_off_is_brought_up_by_records(world: World, seed: int) -> None:
    story = Story(seed)
    for value, segment in story.many(40):
        world.log.append(value, segment)
    story.many(60)  # happens while the log is off
    wanted = projection_of(story.index)
    for value, segment in catch_up(world.log.index, wanted):
        world.log.append(value, segment)
    assert world.log.index.rejected == 0

    def tiers(facts: SegmentFacts | None) -> tuple[bool, ...] | None:
        if facts is None:
            return None
        return facts.sealed, facts.hot, facts.warm_bytes is not None, facts.key is not None

    for apart in compare(world.log.index, wanted):  # the etag of a second upload, say
        assert tiers(apart.log) == tiers(apart.projection)
