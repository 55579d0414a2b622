"""A stream whose manifest log is damaged or behind is rebuilt from what is left, and told what is lost (issue 18)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.core.errors import Corruption
from quire.durable import quarantine
from quire.durable.names import Tier
from quire.stream.mlog_files import LogFiles
from quire.stream.mlog_tier2 import LogObjects
from quire.stream.projection import Projection
from quire.stream.repair import Repair, Survey
from tests.stream.streams import StreamWorld, record
from tests.stream.test_witnesses import LOSSES, log_of, lose_all, lose_newest, on_disk


@pytest.fixture
def world(tmp_path: Path) -> Iterator[StreamWorld]:
    made = StreamWorld(tmp_path)
    yield made
    made.manifest.close()
    made.objects.close()


def repair(world: StreamWorld, *, apply: bool = True) -> Survey:
    from quire.stream.files import StreamClock

    projection = Projection(world.manifest, world.files)
    objects = LogObjects(world.objects, world.stream_id, projection.prefixes(), projection.store_id())
    mending = Repair(world.files, projection, objects, StreamClock(world.clock), world.log_settings)
    found = mending.survey()
    if apply:
        mending.apply(found)
        world.stream = world.open()
    return found


def hot(world: StreamWorld) -> None:
    """As they were sealed."""


def warm(world: StreamWorld) -> None:
    world.stream.compress()
    world.stream.evict()


def remote(world: StreamWorld) -> None:
    for segment in world.segments():
        world.stream.tiers.upload(segment.segment_id)
    world.stream.compress()
    world.stream.evict(warm=True)


@pytest.mark.parametrize("lose", LOSSES)
@pytest.mark.parametrize("tier", [hot, warm, remote])
def test_nothing_of_a_stream_is_lost_with_its_log(
    world: StreamWorld, lose: Callable[[StreamWorld], None], tier: Callable[[StreamWorld], None]
) -> None:
    payloads = world.fill(3)
    tier(world)
    world.stream.close()
    lose(world)
    with pytest.raises(Corruption):
        world.open()
    found = repair(world)
    assert found.lost == []
    assert found.records == (1, len(payloads) + 1)
    assert world.payloads() == payloads
    world.check()
    assert world.stream.append(b"on").result() == len(payloads) + 1
    world.reopen()
    world.check()
    world.stream.close()


@pytest.mark.parametrize("lose", LOSSES)
def test_records_of_the_segment_that_was_open_are_saved(
    world: StreamWorld, lose: Callable[[StreamWorld], None]
) -> None:
    payloads = world.fill(2)
    more = [record(number) for number in range(7)]
    world.stream.append(more).result()
    world.stream.abandon()
    lose(world)
    assert repair(world).lost == []
    assert world.payloads() == payloads + more
    world.check()
    world.stream.close()


def test_a_damaged_chunk_goes_to_quarantine_and_its_place_is_taken(world: StreamWorld) -> None:
    payloads = world.fill(2)
    world.stream.ledger.log.rotate()
    payloads += world.fill(2)
    world.stream.close()
    path = Path(log_of(world).chunk(0))
    raw = bytearray(path.read_bytes())
    raw[100] ^= 1
    path.write_bytes(raw)
    with pytest.raises(Corruption, match="checksum"):
        world.open()
    found = repair(world)
    assert found.lost == []
    assert world.payloads() == payloads
    moved = {entry.path for entry in quarantine.entries(world.disk, world.stream_root)}
    assert moved == {f"streams/{world.stream_id}/manifest/{number}.mlog" for number in (0, 1)}
    world.check()
    world.stream.close()


def test_a_damaged_chunk_that_was_uploaded_comes_back(world: StreamWorld) -> None:
    payloads = world.fill(2)
    world.stream.upload()
    payloads += world.fill(1)
    world.stream.close()
    Path(log_of(world).chunk(0)).write_bytes(b"")
    found = repair(world)
    assert found.to_fetch == [0]
    assert found.lost == []
    assert world.payloads() == payloads
    world.check()
    world.stream.close()


def test_what_cannot_be_saved_is_told_and_the_rest_is_read(world: StreamWorld) -> None:
    payloads = world.fill(3)
    world.stream.close()
    lose_all(world)
    os.remove(world.files.segment(Tier.HOT, 2))
    found = repair(world)
    assert found.lost == ["records 21 to 40: segment 2 has no sound copy"]
    assert world.payloads(stop=21) == payloads[:20]
    assert world.payloads(41) == payloads[40:]
    with pytest.raises(Corruption):
        world.payloads()
    world.stream.abandon()


def test_an_open_segment_whose_file_is_gone_is_given_up(world: StreamWorld) -> None:
    payloads = world.fill(1)
    world.stream.append(b"gone").result()
    world.stream.abandon()
    os.remove(world.files.segment(Tier.HOT, 2))
    with pytest.raises(Corruption, match="being written is missing"):
        world.open()
    assert repair(world).lost == ["records from 21 on: segment 2 was being written, and its file is gone"]
    assert world.payloads() == payloads
    world.check()
    world.stream.close()


def test_a_survey_changes_nothing(world: StreamWorld) -> None:
    world.fill(3)
    world.stream.close()
    lose_newest(world)
    Path(world.files.segment(Tier.HOT, 3)).write_bytes(b"damaged")
    before, log = on_disk(world), log_of(world).chunks()
    found = repair(world, apply=False)
    assert found.steps
    assert on_disk(world) == before
    assert LogFiles(world.disk, world.stream_root, world.stream_id).chunks() == log
    assert quarantine.entries(world.disk, world.stream_root) == []


def test_a_sound_stream_needs_no_repair(world: StreamWorld) -> None:
    world.fill(3)
    world.stream.compress(1)
    world.stream.upload(2)
    world.stream.close()
    found = repair(world, apply=False)
    assert (found.steps, found.lost, found.notes) == ([], [], [])
    assert found.records == (1, 61)
