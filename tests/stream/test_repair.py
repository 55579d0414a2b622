"""A stream whose manifest log is damaged or behind is rebuilt from what remains, and losses are reported."""

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
from tests.stream.streams import StreamHarness, record
from tests.stream.test_witnesses import LOSSES, log_of, lose_all, lose_newest, on_disk


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[StreamHarness]:
    harness = StreamHarness(tmp_path)
    yield harness
    harness.manifest.close()
    harness.objects.close()


def repair(harness: StreamHarness, *, apply: bool = True) -> StreamSurvey:
    projection = StreamProjection(harness.manifest, harness.files)
    objects = LogObjects(harness.objects, harness.stream_id, projection.prefixes(), projection.store_id())
    repair_run = Repair(harness.files, projection, objects, StreamClock(harness.clock), harness.log_settings)
    survey = repair_run.survey()
    if apply:
        repair_run.apply(survey)
        harness.stream = harness.open()
    return survey


def hot(harness: StreamHarness) -> None:
    """Leave the sealed segments as they are."""


def warm(harness: StreamHarness) -> None:
    harness.stream.compress()
    harness.stream.evict()


def remote(harness: StreamHarness) -> None:
    for segment in harness.segments():
        harness.stream.tiers.upload(segment.segment_id)
    harness.stream.compress()
    harness.stream.evict(warm=True)


@pytest.mark.parametrize("lose", LOSSES)
@pytest.mark.parametrize("tier", [hot, warm, remote])
def test_nothing_of_a_stream_is_lost_with_its_log(
    harness: StreamHarness, lose: Callable[[StreamHarness], None], tier: Callable[[StreamHarness], None]
) -> None:
    payloads = harness.fill(3)
    tier(harness)
    harness.stream.close()
    lose(harness)
    with pytest.raises(Corruption):
        harness.open()
    survey = repair(harness)
    assert survey.lost == []
    assert survey.records == (1, len(payloads) + 1)
    assert harness.payloads() == payloads
    harness.check()
    assert harness.stream.append(b"on").result() == len(payloads) + 1
    harness.reopen()
    harness.check()
    harness.stream.close()


@pytest.mark.parametrize("lose", LOSSES)
def test_records_of_the_segment_that_was_open_are_saved(
    harness: StreamHarness, lose: Callable[[StreamHarness], None]
) -> None:
    payloads = harness.fill(2)
    more = [record(number) for number in range(7)]
    harness.stream.append(more).result()
    harness.stream.abandon()
    lose(harness)
    assert repair(harness).lost == []
    assert harness.payloads() == payloads + more
    harness.check()
    harness.stream.close()


def test_a_damaged_chunk_is_quarantined_and_replaced(harness: StreamHarness) -> None:
    payloads = harness.fill(2)
    harness.stream.ledger.log.rotate()
    payloads += harness.fill(2)
    harness.stream.close()
    path = Path(log_of(harness).chunk(0))
    raw = bytearray(path.read_bytes())
    raw[100] ^= 1
    path.write_bytes(raw)
    with pytest.raises(Corruption, match="checksum"):
        harness.open()
    survey = repair(harness)
    assert survey.lost == []
    assert harness.payloads() == payloads
    quarantined = {entry.path for entry in quarantine.entries(harness.disk, harness.stream_root)}
    assert quarantined == {f"streams/{harness.stream_id}/manifest/{number}.mlog" for number in (0, 1)}
    harness.check()
    harness.stream.close()


def test_a_damaged_chunk_that_was_uploaded_is_restored(harness: StreamHarness) -> None:
    payloads = harness.fill(2)
    harness.stream.upload()
    payloads += harness.fill(1)
    harness.stream.close()
    Path(log_of(harness).chunk(0)).write_bytes(b"")
    survey = repair(harness)
    assert survey.to_fetch == [0]
    assert survey.lost == []
    assert harness.payloads() == payloads
    harness.check()
    harness.stream.close()


def test_losses_are_reported_and_the_rest_is_readable(harness: StreamHarness) -> None:
    payloads = harness.fill(3)
    harness.stream.close()
    lose_all(harness)
    os.remove(harness.files.segment(Tier.HOT, 2))
    survey = repair(harness)
    assert survey.lost == ["records 21 to 40: segment 2 has no sound copy"]
    assert harness.payloads(stop=21) == payloads[:20]
    assert harness.payloads(41) == payloads[40:]
    with pytest.raises(Corruption):
        harness.payloads()
    harness.stream.abandon()


def test_an_open_segment_whose_file_is_missing_is_reported_as_lost(harness: StreamHarness) -> None:
    payloads = harness.fill(1)
    harness.stream.append(b"gone").result()
    harness.stream.abandon()
    os.remove(harness.files.segment(Tier.HOT, 2))
    with pytest.raises(Corruption, match="the open segment is missing"):
        harness.open()
    assert repair(harness).lost == ["records from 21 on: segment 2 was being written, and its file is missing"]
    assert harness.payloads() == payloads
    harness.check()
    harness.stream.close()


def test_a_survey_changes_nothing(harness: StreamHarness) -> None:
    harness.fill(3)
    harness.stream.close()
    lose_newest(harness)
    Path(harness.files.segment(Tier.HOT, 3)).write_bytes(b"damaged")
    before, log = on_disk(harness), log_of(harness).chunks()
    survey = repair(harness, apply=False)
    assert survey.steps
    assert on_disk(harness) == before
    assert LogFiles(harness.disk, harness.stream_root, harness.stream_id).chunks() == log
    assert quarantine.entries(harness.disk, harness.stream_root) == []


def test_a_sound_stream_needs_no_repair(harness: StreamHarness) -> None:
    harness.fill(3)
    harness.stream.compress(1)
    harness.stream.upload(2)
    harness.stream.close()
    survey = repair(harness, apply=False)
    assert (survey.steps, survey.lost, survey.notes) == ([], [], [])
    assert survey.records == (1, 61)


# ── objects that nothing knows ────────────────────────────────────────────────────────────────────────────────────────
def manifest_copy(harness: StreamHarness, name: str) -> Path:
    """Copy LMDB in its current state, and open the stream again."""
    harness.stream.close()
    harness.manifest.close()
    copied = Path(shutil.copy(harness.root / "manifest.lmdb", harness.root / name))
    harness.manifest = ManifestStore.open(str(harness.root / "manifest.lmdb"), clock=harness.clock)
    harness.stream = harness.open()
    return copied


def lose_all_but_objects(harness: StreamHarness, older: Path) -> None:
    """Lose the log, locally and in tier 2, and restore LMDB from an older copy: only the segments' objects remain."""
    harness.stream.close()
    harness.manifest.close()
    lose_all(harness)
    for info in list(list_objects(harness.objects)):
        if "/manifest/" in info.key:
            harness.objects.delete(info.key)
    shutil.copy(older, harness.root / "manifest.lmdb")
    harness.manifest = ManifestStore.open(str(harness.root / "manifest.lmdb"), clock=harness.clock)


@pytest.mark.parametrize("before", [0, 1])
def test_segments_that_exist_only_as_objects_are_found_in_the_bucket(harness: StreamHarness, before: int) -> None:
    """Neither the log nor LMDB has them, and there is no local file."""
    payloads = harness.fill(before)
    remote(harness)
    older = manifest_copy(harness, "older")
    payloads += harness.fill(3 - before)
    remote(harness)
    lose_all_but_objects(harness, older)
    survey = repair(harness, apply=False)
    adoptions = [step for step in survey.steps if step.startswith("adopt object ")]
    assert [step.rsplit(": ", 1)[1] for step in adoptions] == [
        f"records {20 * number + 1} to {20 * number + 20}" for number in range(before, 3)
    ]
    assert not log_of(harness).chunks(), "a survey changes nothing"
    assert repair(harness).steps == survey.steps
    assert harness.payloads() == payloads
    harness.check()
    assert harness.stream.append(b"on").result() == len(payloads) + 1
    harness.reopen()
    assert harness.payloads() == [*payloads, b"on"]
    harness.check()
    harness.stream.close()


def test_a_damaged_object_or_one_without_a_store_id_is_reported_and_left_alone(harness: StreamHarness) -> None:
    older = manifest_copy(harness, "older")
    payloads = harness.fill(3)
    remote(harness)
    keys = [segment.key for segment in harness.segments()]
    lose_all_but_objects(harness, older)
    data = harness.objects.get(keys[2])
    harness.objects.delete(keys[2])
    harness.objects.put(keys[2], data[:80] + bytes([data[80] ^ 1]) + data[81:])
    nameless = keys[1].split("/", 3)[3]
    harness.objects.put(nameless, harness.objects.get(keys[1]))
    projection = StreamProjection(harness.manifest, harness.files)
    objects = LogObjects(harness.objects, harness.stream_id, (*projection.prefixes(), ""), projection.store_id())
    repair_run = Repair(harness.files, projection, objects, StreamClock(harness.clock), harness.log_settings)
    notes = repair_run.survey().notes
    assert any(nameless in note and "no store" in note for note in notes)
    later_objects = msgspec.structs.replace(objects, prefixes=("later", *projection.prefixes()))
    after_takeover = Repair(
        harness.files, projection, later_objects, StreamClock(harness.clock), harness.log_settings
    ).survey()
    assert not any(step.startswith("adopt") for step in after_takeover.steps), "a deposed owner may have uploaded them"
    assert all(any(key in note and "earlier owner" in note for note in after_takeover.notes) for key in keys)
    assert any(keys[2] in note and "damaged" in note for note in notes)
    repair(harness)
    assert harness.payloads() == payloads[:40]
    harness.stream.close()


def test_a_retired_segment_is_not_adopted_again(harness: StreamHarness) -> None:
    payloads = harness.fill(3)
    remote(harness)
    first = harness.segments()[0]
    data = harness.objects.get(first.key)
    harness.stream.close()
    harness.stream = harness.open()
    harness.stream.tiers.retire(first.segment_id)
    harness.objects.put(first.key, data)
    assert survey_steps_of_open_stream(harness) == []
    assert harness.payloads() == payloads[20:]
    harness.stream.close()


def survey_steps_of_open_stream(harness: StreamHarness) -> list[str]:
    harness.stream.close()
    survey = repair(harness, apply=False)
    harness.stream = harness.open()
    return survey.steps
