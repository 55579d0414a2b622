"""What a manifest log reports while it works: one event name per kind of event, and metrics, as in the design document."""

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
from tests.stream.streams import StreamHarness
from tests.stream.tiers import LogHarness

Event = MutableMapping[str, Any]
STEP = {"stream", "segment_id", "tier_action", "chunk_index", "chunk_offset"}


@pytest.fixture
def events() -> Iterator[list[Event]]:
    with capture_logs() as events:
        yield events
    structlog.reset_defaults()


def named(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event["event"] == name]


def test_every_step_of_a_segment_is_an_event_with_the_position_of_its_record(
    tmp_path: Path, events: list[Event]
) -> None:
    harness = StreamHarness(tmp_path)
    harness.fill(2)
    harness.stream.upload(1)
    harness.stream.evict(1, warm=True)
    harness.stream.hydrate(1)
    harness.objects.down = True
    with pytest.raises(ObjectStoreUnavailable):
        harness.stream.tiers.upload(2)
    harness.objects.down = False
    steps = named(events, "stream.step")
    assert all(step.keys() >= STEP for step in steps)
    records = {(view.chunk.index, view.offset): view for chunk in chunks(harness) for view in chunk.records()}
    for step in steps:
        view = records[step["chunk_index"], step["chunk_offset"]]
        assert (type(view.value()).__name__, view.segment_id) == (step["tier_action"], step["segment_id"])
    assert len(steps) == len([view for view in records.values() if view.segment_id]), "each record is reported once"
    assert {step["tier_action"] for step in steps} >= {
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
    (failed,) = named(events, "stream.move_failed")
    assert (failed["segment_id"], failed["tier_action"]) == (2, "UploadFailed")
    harness.close()


def chunks(harness: StreamHarness) -> Iterator[Chunk]:
    log = harness.stream.ledger.log
    return ManifestLogReader(log.files, log.objects.fetch if log.objects is not None else None).chunks(0)


def test_changes_of_the_log_itself_are_reported_with_chunk_and_offset(tmp_path: Path, events: list[Event]) -> None:
    harness = LogHarness(tmp_path)
    harness.chunks(4)
    harness.store.down = True
    harness.log.tick()
    harness.store.down = False
    harness.clock.advance(60)
    harness.log.tick()
    assert named(events, "stream.mlog.upload_failed")[0]["tier_action"] == "upload"
    uploaded, evicted = named(events, "stream.mlog.chunk_uploaded"), named(events, "stream.mlog.chunk_evicted")
    assert [event["chunk_index"] for event in uploaded] == [0, 1, 2, 3]
    assert [(event["chunk_index"], event["tier_action"]) for event in evicted] == [(0, "evict"), (1, "evict")]
    assert [event["chunk_offset"] for event in evicted] == [event["chunk_offset"] for event in uploaded[:2]]
    (snapshot,) = named(events, "stream.mlog.snapshot")
    assert (snapshot["chunk_index"], snapshot["chunk_offset"], snapshot["stream"]) == (4, 64, 7)
    harness.close()


def test_damage_is_reported_with_chunk_segment_and_offset(tmp_path: Path, events: list[Event]) -> None:
    harness = LogHarness(tmp_path)
    harness.chunks(2)
    harness.log.snapshot()
    harness.log.close()
    snapshot, chunk = Path(harness.files.snapshot(1)), Path(harness.files.chunk(1))
    snapshot.write_bytes(b"")
    recover(harness.files, harness.clock)
    assert named(events, "stream.mlog.snapshot_damaged")[0]["stream"] == 7
    before = harness.log.figures().manifest_crc_error_count
    chunk.write_bytes(chunk.read_bytes()[:90])
    with pytest.raises(ManifestIntegrityError):
        harness.open()
    (quarantined,) = named(events, "stream.mlog.quarantined")
    assert quarantined.keys() >= {"stream", "what", "chunk_index", "chunk_offset", "segment_id"}
    assert quarantined["chunk_index"] == 1
    figures = harness.log.figures()
    assert figures.manifest_crc_error_count == before + 2, "the snapshot, skipped once more, and the chunk"
    harness.store.close()


def test_objects_that_differ_from_what_was_uploaded_are_reported(tmp_path: Path, events: list[Event]) -> None:
    harness = LogHarness(tmp_path)
    harness.chunks(8)
    harness.log.tick()
    last = harness.files.chunks()[-2]
    harness.store.put(harness.objects.chunk_key(last), harness.store.get(harness.objects.chunk_key(last - 1)))
    reconcile(harness.files, harness.objects, 0)
    (lost,) = named(events, "stream.mlog.needs_repair")
    assert (lost["chunk_index"], lost["stream"]) == (last, 7)
    harness.close()


def test_every_metric_of_the_design_document_is_exported(tmp_path: Path) -> None:
    harness = LogHarness(tmp_path)
    harness.chunks(2)
    harness.store.down = True
    harness.log.tick()
    harness.clock.advance(1)
    harness.log.tick()
    collected = {
        metric.name: metric
        for metric in StreamCollector(tuple, lambda: [harness.log.figures()]).collect()
        if metric.samples
    }
    metric_types = {
        "manifest_chunks_active": "gauge",
        "manifest_replay_seconds": "gauge",
        "manifest_snapshot_age_seconds": "gauge",
        "manifest_shadow_divergence": "gauge",
        "manifest_segments_needing_repair": "gauge",
        "manifest_crc_error_count": "counter",
        "manifest_upload_retries": "counter",
    }
    assert {name: metric.type for name, metric in collected.items()} == {
        f"{prefix}{name}": kind for prefix in ("quire_", "aof2_manifest_log_") for name, kind in metric_types.items()
    }
    values = {name: metric.samples[0].value for name, metric in collected.items()}
    assert values["quire_manifest_upload_retries"] == 1
    assert values["quire_manifest_chunks_active"] == len(harness.files.chunks())
    assert all(metric.samples[0].labels == {"stream": "7"} for metric in collected.values())
    harness.store.down = False
    harness.close()
