"""Every rule of a manifest log: a sound one keeps it, and the checker sees it broken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.stream import mlog_records as r
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
    assert {row.tier2 for row in rows} == {"same", "here"}


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
