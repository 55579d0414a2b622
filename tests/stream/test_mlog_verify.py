"""Every rule of a manifest log: a sound one keeps it, and the checker sees it broken."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.core.errors import ManifestIntegrityError
from quire.core.settings import ManifestLogSettings
from quire.stream import mlog_records as r
from quire.stream.mlog_bundle import plan, publish, run
from quire.stream.mlog_format import CHUNK_BYTES, COPY_BYTES, SEALED, UPLOADED
from quire.stream.mlog_verify import inspect, verify
from quire.stream.mlog_writer import ManifestLogWriter
from tests.stream.logs import SMALL, opened
from tests.stream.tiers import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def rules(world: World, *, tier2: bool = True, **options: bool) -> list[str]:
    found = verify(world.files, world.objects if tier2 else None, settings=world.settings, **options)  # type: ignore[arg-type]
    return [problem.rule for problem in found if not problem.leak]


def test_a_log_in_use_keeps_all_rules(world: World) -> None:
    for _ in range(6):
        world.chunks(3)
        world.tell(4)
        world.clock.advance(60)
        world.log.tick()
        assert rules(world) == []
    rows = list(inspect(world.files, world.objects))
    ordinals = [row.ordinal for row in rows]
    assert ordinals == list(range(ordinals[0], ordinals[0] + len(rows)))
    assert {row.tier2 for row in rows if row.record != "UploadDone"} == {"same", "here"}


def test_what_is_no_longer_on_disk_is_shown_from_tier_2_and_bundles(world: World) -> None:
    world.chunks(10)
    world.log.tick()
    assert world.files.chunks()[0] > 6
    told = world.log.index.records
    for bundled in (False, True):
        if bundled:
            (task,) = plan(world.objects, now_ms=4_000_000_000_000, period_seconds=7 * 86_400.0)
            publish(world.log, run(task, world.store))
            world.clock.advance(60)
            world.log.tick()
            assert min(world.objects.listing().bundles) == (0, 9)
        rows = list(inspect(world.files, world.objects, start_chunk=0))
        assert [row.ordinal for row in rows[:told]] == list(range(told))
        assert rows[0].tier2 == "there"
        assert not any(row.diverges for row in rows if row.record != "UploadDone"), "the story's objects are not there"
    with pytest.raises(ManifestIntegrityError, match="missing"):
        list(inspect(world.files, start_chunk=0))


def test_an_object_of_a_segment_that_is_missing_is_shown_at_its_record(world: World) -> None:
    def uploaded(segment: int, key: str) -> list[tuple[r.Payload, int]]:
        told: list[r.Payload] = [opened(segment), r.SealSegment(1, 1), r.UploadStarted(key), r.UploadDone(key, "e")]
        return [(value, segment) for value in told]

    for segment, key in ((1, "k/1"), (2, "k/2"), (3, "k/3")):
        world.store.put(key, b"data")
        world.log.append_all(uploaded(segment, key))
    world.log.append_all([(r.Tier2DeleteQueued("k/3"), 3), (r.Tier2Deleted("k/3"), 3)])
    for key in ("k/2", "k/3"):
        world.store.delete(key)
    apart = [(row.record, row.segment_id, row.tier2) for row in inspect(world.files, world.objects) if row.diverges]
    assert apart == [("UploadDone", 2, "the segment's object is missing")], "3 was deleted by records"
    flip(world.files.chunk(0), 100)
    with pytest.raises(ManifestIntegrityError):
        list(inspect(world.files, world.objects))
    flip(world.files.chunk(0), 100)


def flip(path: str, place: int) -> None:
    data = bytearray(Path(path).read_bytes())
    data[place] ^= 1
    Path(path).write_bytes(data)


def test_each_broken_rule_is_seen(world: World) -> None:
    world.chunks(3)
    world.log.snapshot()
    world.chunks(2)
    world.log.upload()
    assert rules(world) == []
    flip(world.files.chunk(4), 80)
    assert rules(world) == ["L1"]
    flip(world.files.chunk(4), 80)
    moved = Path(world.files.chunk(2)).rename(world.root / "aside")
    assert "L2" in rules(world, tier2=False)
    moved.rename(world.files.chunk(2))
    flip(world.files.snapshot(1), 20)
    assert rules(world) == ["L3"]
    flip(world.files.snapshot(1), 20)
    world.store.delete(world.objects.chunk_key(1))
    assert rules(world) == ["L5"]
    world.store.put(world.objects.chunk_key(1), world.store.get(world.objects.chunk_key(2)))
    assert set(rules(world)) == {"L5"}


def test_what_retention_must_keep_and_what_it_must_not(world: World) -> None:
    """L6: chunks since the newest snapshot are on disk, whatever tier 2 has; older ones are not for ever."""
    world.settings = ManifestLogSettings(
        chunk_bytes=16 << 10, record_bytes_max=1024, snapshot_chunks=1_000, sealed_kept=1_000
    )
    world.reopen()
    world.tell(5)
    world.log.snapshot()
    world.chunks(6)
    world.log.upload()
    aside = Path(world.files.chunk(0)).rename(world.root / "aside")
    found = list(verify(world.files, world.objects, settings=world.settings))
    assert [(each.rule, each.where, each.leak) for each in found] == [("L6", {"chunk": 0}, False)]
    assert rules(world, tier2=False) == ["L3"], "without tier 2 there is no state at all"
    aside.rename(world.files.chunk(0))
    world.log.snapshot()
    few = ManifestLogSettings(chunk_bytes=16 << 10, record_bytes_max=1024, snapshot_chunks=3, sealed_kept=2)
    found = [each for each in verify(world.files, world.objects, settings=few) if each.rule == "L6"]
    assert [(each.where, each.leak) for each in found] == [({"count": 4}, True)], "six, without the newest two"
    world.settings = few
    world.reopen().tick()
    assert list(verify(world.files, world.objects, settings=few)) == []


def test_an_object_that_rotted_is_seen_by_reading_it(world: World) -> None:
    world.chunks(2)
    world.log.upload()
    data = bytearray(world.store.get(world.objects.chunk_key(0)))
    data[80] ^= 1
    world.store.put(world.objects.chunk_key(0), bytes(data))
    assert rules(world) == ["L5"]
    assert rules(world, deep=False) == []


def test_records_that_were_not_allowed_are_seen(world: World) -> None:
    world.log.close()
    with ManifestLogWriter.open(world.files, clock=world.clock, settings=SMALL) as writer:
        writer.append(opened(1), 1)
        writer.append(r.LocalEvicted(1), 1)
        writer.append(r.UploadStarted("k"), 5)
    problems = list(verify(world.files))
    assert [problem.rule for problem in problems] == ["L4", "L4"]
    assert problems[0].where["ordinal"] == 1
    assert problems[1].where == {"segment": 5, "count": 1}
    world.log = world.open()


def test_segments_without_a_copy_are_seen(world: World) -> None:
    told: list[tuple[r.Payload, int]] = [
        (opened(1), 1),
        (r.SealSegment(1, 1), 1),
        (r.UploadStarted("k"), 1),
        (r.UploadDone("k", "e"), 1),
        (r.LocalEvicted(1), 1),
    ]
    world.log.append_all(told)
    assert list(verify(world.files, object_exists=lambda _key: True)) == []
    (problem,) = verify(world.files, object_exists=lambda _key: False)
    assert (problem.rule, problem.where) == ("L7", {"segment": 1, "key": "k"})


# ── what readers make do without is told all the same ─────────────────────────────────────────────────────────────────
FIRST_BYTES = 128
"""The header, and what comes behind it."""


def with_each_byte_changed(path: Path, last: int, change: int = 0xFF) -> Iterator[int]:
    """The file with one byte changed, for each of the first ones and the last ones; whole again at the end."""
    whole = path.read_bytes()
    for place in (*range(FIRST_BYTES), *range(len(whole) - last, len(whole))):
        changed = bytearray(whole)
        changed[place] ^= change
        path.write_bytes(changed)
        yield place
    path.write_bytes(whole)


@pytest.mark.parametrize("change", [0xFF, 0x01])
def test_a_changed_byte_of_an_object_is_told_wherever_it_is(world: World, change: int) -> None:
    """Of a header that the commit copy stands for too: readers do not notice."""
    world.chunks(2)
    world.log.upload()
    path = world.root / "objects" / world.objects.chunk_key(0)
    for place in with_each_byte_changed(path, COPY_BYTES, change):
        assert set(rules(world)) == {"L5"}, place
    assert rules(world) == []


def test_a_changed_byte_of_a_bundle_is_told_wherever_it_is(world: World) -> None:
    world.chunks(10)
    world.log.tick()
    (task,) = plan(world.objects, now_ms=4_000_000_000_000, period_seconds=7 * 86_400.0)
    publish(world.log, run(task, world.store))
    (span,) = world.objects.listing().bundles
    path = world.root / "objects" / world.objects.bundle_key(*span)
    for place in with_each_byte_changed(path, COPY_BYTES):
        assert "L5" in rules(world), place
    assert rules(world) == []


@pytest.mark.parametrize("change", [0xFF, 0x01])
def test_a_changed_byte_of_a_sealed_chunk_is_told_wherever_it_is(world: World, change: int) -> None:
    world.chunks(2)
    world.log.upload()
    world.tell(3)
    for place in with_each_byte_changed(Path(world.files.chunk(0)), COPY_BYTES, change):
        assert set(rules(world, tier2=False)) == {"L1"}, place
    assert rules(world) == []


def test_what_a_crash_leaves_of_a_header_is_no_damage(world: World) -> None:
    """At each of its steps: the copy is newer than the header, or one of them is torn."""
    world.chunks(1)
    world.tell(2)
    path = Path(world.files.chunk(1))
    before = path.read_bytes()
    world.tell(2)
    after = path.read_bytes()
    world.log.upload()
    for left, told in (
        (before[:CHUNK_BYTES] + after[CHUNK_BYTES:], []),
        (after[: CHUNK_BYTES // 2] + before[CHUNK_BYTES // 2 : CHUNK_BYTES] + after[CHUNK_BYTES:], []),
        (bytes([before[0] ^ 255]) + after[1:], []),
        (before[:-COPY_BYTES] + after[-COPY_BYTES : -COPY_BYTES // 2] + before[-COPY_BYTES // 2 :], []),
        (
            after[:-COPY_BYTES] + before[-COPY_BYTES:],
            ["L1"],
        ),  # no crash: the copy is synced before the header is written
    ):
        path.write_bytes(left)
        assert rules(world, tier2=False) == told
    path.write_bytes(after)
    marked = Path(world.files.chunk(0))
    data = bytearray(marked.read_bytes())
    assert data[56] == SEALED | UPLOADED
    data[56] = SEALED
    marked.write_bytes(data)
    assert rules(world) == [], "its copy says that it is uploaded"


def test_a_newest_chunk_that_is_missing_is_seen(world: World) -> None:
    """Tier 2 has it, and nothing on disk says that there was one."""
    world.chunks(3)
    world.log.tick()
    world.log.close()
    assert list(verify(world.files, world.objects, settings=world.settings)) == []
    newest = world.files.chunks()[-1]
    os.remove(world.files.chunk(newest))
    found = list(verify(world.files, world.objects, settings=world.settings))
    assert ("L2", {"chunk": newest}) in [(each.rule, each.where) for each in found]
