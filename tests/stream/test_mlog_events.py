"""What is told about a log while it works: events under one name for each thing, and figures, as the document has them."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from quire.core.errors import ManifestIntegrityError, ObjectStoreUnavailable
from quire.stream.metrics import StreamCollector
from quire.stream.mlog_reader import Chunk, ManifestLogReader
from quire.stream.mlog_recovery import reconcile, recover
from tests.stream.streams import StreamWorld
from tests.stream.tiers import World

Event = MutableMapping[str, Any]
STEP = {"stream", "segment_id", "tier_action", "chunk_index", "chunk_offset"}


@pytest.fixture
def told() -> Iterator[list[Event]]:
    with capture_logs() as events:
        yield events
    structlog.reset_defaults()


def named(told: list[Event], event: str) -> list[Event]:
    return [each for each in told if each["event"] == event]


def test_every_step_of_a_segment_is_an_event_with_the_place_of_its_record(tmp_path: Path, told: list[Event]) -> None:
    world = StreamWorld(tmp_path)
    world.fill(2)
    world.stream.upload(1)
    world.stream.evict(1, warm=True)
    world.stream.hydrate(1)
    world.objects.down = True
    with pytest.raises(ObjectStoreUnavailable):
        world.stream.tiers.upload(2)
    world.objects.down = False
    steps = named(told, "stream.step")
    assert all(each.keys() >= STEP for each in steps)
    records = {(view.chunk.index, view.offset): view for chunk in chunks(world) for view in chunk.records()}
    for each in steps:
        view = records[each["chunk_index"], each["chunk_offset"]]
        assert (type(view.value()).__name__, view.segment_id) == (each["tier_action"], each["segment_id"])
    assert len(steps) == len([view for view in records.values() if view.segment_id]), "each record is told once"
    assert {each["tier_action"] for each in steps} >= {
        "SegmentOpened",
        "SealSegment",
        "CompressionStarted",
        "CompressionDone",
        "UploadStarted",
        "UploadDone",
        "UploadFailed",
        "LocalEvicted",
        "HydrationStarted",
        "HydrationDone",
    }
    (failed,) = named(told, "stream.move_failed")
    assert (failed["segment_id"], failed["tier_action"]) == (2, "UploadFailed")
    world.close()


def chunks(world: StreamWorld) -> Iterator[Chunk]:
    log = world.stream.ledger.log
    return ManifestLogReader(log.files, log.objects.fetch if log.objects is not None else None).chunks(0)


def test_what_happens_to_the_log_itself_is_told_with_chunk_and_offset(tmp_path: Path, told: list[Event]) -> None:
    world = World(tmp_path)
    world.chunks(4)
    world.store.down = True
    world.log.tick()
    world.store.down = False
    world.clock.advance(60)
    world.log.tick()
    assert named(told, "stream.mlog.upload_failed")[0]["tier_action"] == "upload"
    uploaded, evicted = named(told, "stream.mlog.chunk_uploaded"), named(told, "stream.mlog.chunk_evicted")
    assert [each["chunk_index"] for each in uploaded] == [0, 1, 2, 3]
    assert [(each["chunk_index"], each["tier_action"]) for each in evicted] == [(0, "evict"), (1, "evict")]
    assert [each["chunk_offset"] for each in evicted] == [each["chunk_offset"] for each in uploaded[:2]]
    (snapshot,) = named(told, "stream.mlog.snapshot")
    assert (snapshot["chunk_index"], snapshot["chunk_offset"], snapshot["stream"]) == (4, 64, 7)
    world.close()


def test_damage_is_told_with_chunk_segment_and_offset(tmp_path: Path, told: list[Event]) -> None:
    world = World(tmp_path)
    world.chunks(2)
    world.log.snapshot()
    world.log.close()
    snapshot, chunk = Path(world.files.snapshot(1)), Path(world.files.chunk(1))
    snapshot.write_bytes(b"")
    recover(world.files, world.clock)
    assert named(told, "stream.mlog.snapshot_damaged")[0]["stream"] == 7
    before = world.log.figures().manifest_crc_error_count
    chunk.write_bytes(chunk.read_bytes()[:90])
    with pytest.raises(ManifestIntegrityError):
        world.open()
    (quarantined,) = named(told, "stream.mlog.quarantined")
    assert quarantined.keys() >= {"stream", "what", "chunk_index", "chunk_offset", "segment_id"}
    assert quarantined["chunk_index"] == 1
    figures = world.log.figures()
    assert figures.manifest_crc_error_count == before + 2, "the snapshot, passed over once more, and the chunk"
    world.store.close()


def test_objects_that_are_not_what_was_uploaded_are_told(tmp_path: Path, told: list[Event]) -> None:
    world = World(tmp_path)
    world.chunks(8)
    world.log.tick()
    last = world.files.chunks()[-2]
    world.store.put(world.objects.chunk_key(last), world.store.get(world.objects.chunk_key(last - 1)))
    reconcile(world.files, world.objects, 0)
    (lost,) = named(told, "stream.mlog.needs_repair")
    assert (lost["chunk_index"], lost["stream"]) == (last, 7)
    world.close()


def test_every_figure_of_the_seed_is_exported(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.chunks(2)
    world.store.down = True
    world.log.tick()
    world.clock.advance(1)
    world.log.tick()
    collected = {
        each.name: each for each in StreamCollector(tuple, lambda: [world.log.figures()]).collect() if each.samples
    }
    types = {
        "manifest_chunks_active": "gauge",
        "manifest_replay_seconds": "gauge",
        "manifest_snapshot_age_seconds": "gauge",
        "manifest_shadow_divergence": "gauge",
        "manifest_segments_needing_repair": "gauge",
        "manifest_crc_error_count": "counter",
        "manifest_upload_retries": "counter",
    }
    assert {name: each.type for name, each in collected.items()} == {
        f"{prefix}{name}": kind for prefix in ("quire_", "aof2_manifest_log_") for name, kind in types.items()
    }
    values = {name: each.samples[0].value for name, each in collected.items()}
    assert values["quire_manifest_upload_retries"] == 1
    assert values["quire_manifest_chunks_active"] == len(world.files.chunks())
    assert all(each.samples[0].labels == {"stream": "7"} for each in collected.values())
    world.store.down = False
    world.close()
