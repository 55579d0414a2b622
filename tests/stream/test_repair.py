"""A stream whose manifest log is damaged or behind is rebuilt from what is left, and told what is lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from quire.core.errors import Corruption
from quire.durable import quarantine
from quire.durable.names import Tier
from quire.manifest.store import ManifestStore
from quire.objects.api import list_objects
from quire.stream.files import LogFiles, StreamClock
from quire.stream.mlog_tier2 import LogObjects
from quire.stream.projection import StreamProjection
from quire.stream.repair import Repair, StreamSurvey
from tests.stream.streams import StreamWorld, record
from tests.stream.test_witnesses import LOSSES, log_of, lose_all, lose_newest, on_disk


@pytest.fixture
def world(tmp_path: Path) -> Iterator[StreamWorld]:
    made = StreamWorld(tmp_path)
    yield made
    made.manifest.close()
    made.objects.close()


def repair(world: StreamWorld, *, apply: bool = True) -> StreamSurvey:
    projection = StreamProjection(world.manifest, world.files)
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
    with pytest.raises(Corruption, match="the open segment is missing"):
        world.open()
    assert repair(world).lost == ["records from 21 on: segment 2 was being written, and its file is missing"]
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


# ── objects that nothing knows ────────────────────────────────────────────────────────────────────────────────────────
def manifest_copy(world: StreamWorld, name: str) -> Path:
    """A copy of LMDB as it is now; the stream is opened again."""
    world.stream.close()
    world.manifest.close()
    copied = Path(shutil.copy(world.root / "manifest.lmdb", world.root / name))
    world.manifest = ManifestStore.open(str(world.root / "manifest.lmdb"), clock=world.clock)
    world.stream = world.open()
    return copied


def lose_all_but_objects(world: StreamWorld, older: Path) -> None:
    """The log is lost, here and in tier 2, LMDB is restored from an older copy; the objects of segments are what is left."""
    world.stream.close()
    world.manifest.close()
    lose_all(world)
    for info in list(list_objects(world.objects)):
        if "/manifest/" in info.key:
            world.objects.delete(info.key)
    shutil.copy(older, world.root / "manifest.lmdb")
    world.manifest = ManifestStore.open(str(world.root / "manifest.lmdb"), clock=world.clock)


@pytest.mark.parametrize("before", [0, 1])
def test_segments_of_which_only_objects_are_left_are_found_in_the_bucket(world: StreamWorld, before: int) -> None:
    """Neither log nor LMDB knows them, and no file is here."""
    payloads = world.fill(before)
    remote(world)
    older = manifest_copy(world, "older")
    payloads += world.fill(3 - before)
    remote(world)
    lose_all_but_objects(world, older)
    shown = repair(world, apply=False)
    found = [each for each in shown.steps if each.startswith("adopt object ")]
    assert [each.rsplit(": ", 1)[1] for each in found] == [
        f"records {20 * each + 1} to {20 * each + 20}" for each in range(before, 3)
    ]
    assert not log_of(world).chunks(), "a survey changes nothing"
    assert repair(world).steps == shown.steps
    assert world.payloads() == payloads
    world.check()
    assert world.stream.append(b"on").result() == len(payloads) + 1
    world.reopen()
    assert world.payloads() == [*payloads, b"on"]
    world.check()
    world.stream.close()


def test_an_object_that_is_not_sound_or_has_no_store_in_its_name_is_told_and_left(world: StreamWorld) -> None:
    older = manifest_copy(world, "older")
    payloads = world.fill(3)
    remote(world)
    keys = [segment.key for segment in world.segments()]
    lose_all_but_objects(world, older)
    data = world.objects.get(keys[2])
    world.objects.delete(keys[2])
    world.objects.put(keys[2], data[:80] + bytes([data[80] ^ 1]) + data[81:])
    nameless = keys[1].split("/", 3)[3]
    world.objects.put(nameless, world.objects.get(keys[1]))
    projection = StreamProjection(world.manifest, world.files)
    objects = LogObjects(world.objects, world.stream_id, (*projection.prefixes(), ""), projection.store_id())
    mending = Repair(world.files, projection, objects, StreamClock(world.clock), world.log_settings)
    notes = mending.survey().notes
    assert any(nameless in each and "no store" in each for each in notes)
    later = msgspec.structs.replace(objects, prefixes=("later", *projection.prefixes()))
    after_takeover = Repair(world.files, projection, later, StreamClock(world.clock), world.log_settings).survey()
    assert not any(each.startswith("adopt") for each in after_takeover.steps), "a deposed owner may have sent them"
    assert all(any(key in each and "earlier owner" in each for each in after_takeover.notes) for key in keys)
    assert any(keys[2] in each and "damaged" in each for each in notes)
    repair(world)
    assert world.payloads() == payloads[:40]
    world.stream.close()


def test_what_retention_has_let_go_is_not_taken_up_again(world: StreamWorld) -> None:
    payloads = world.fill(3)
    remote(world)
    first = world.segments()[0]
    data = world.objects.get(first.key)
    world.stream.close()
    world.stream = world.open()
    world.stream.tiers.retire(first.segment_id)
    world.objects.put(first.key, data)
    assert repair_of_sound(world) == []
    assert world.payloads() == payloads[20:]
    world.stream.close()


def repair_of_sound(world: StreamWorld) -> list[str]:
    world.stream.close()
    found = repair(world, apply=False)
    world.stream = world.open()
    return found.steps
