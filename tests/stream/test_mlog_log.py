"""The manifest log as a whole: snapshots and tail, upload to a failing store, retention, reconciliation."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.core.errors import AlreadyExists, IllegalTransition, ManifestIntegrityError, ObjectNotFound, StoreLocked
from quire.durable.failpoints import armed
from quire.stream import mlog_records as r
from quire.stream.metrics import StreamCollector
from quire.stream.mlog_log import ManifestLog
from quire.stream.mlog_recovery import local_facts, objects_apart, reconcile, recover, restore_chunk
from quire.stream.mlog_verify import verify
from quire.testing.clock import ManualClock
from quire.testing.faults import PowerCut
from tests.stream.logs import SMALL, all_chunks, append_all, files_at, opened, same_state
from tests.stream.tiers import LogHarness


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[LogHarness]:
    harness = LogHarness(tmp_path)
    yield harness
    harness.close()


def test_live_and_rebuilt_state_are_equal(harness: LogHarness) -> None:
    harness.append_records(300)
    live = harness.log.index
    harness.reopen()
    assert same_state(harness.log.index, live)
    assert same_state(recover(harness.files, harness.clock).index, live)
    with pytest.raises(StoreLocked):
        harness.open()


def test_an_illegal_record_is_refused_and_leaves_no_trace(harness: LogHarness) -> None:
    harness.log.append(opened(1), 1)
    with pytest.raises(IllegalTransition):
        harness.log.append(r.LocalEvicted(1), 1)
    harness.log.commit()
    assert recover(harness.files, harness.clock).index.records == 1


def test_snapshot_replay(harness: LogHarness) -> None:
    """Matrix (docs/design/seeds.md, manifest log): a snapshot, more chunks, and replay starts at the marker's offset."""
    harness.append_records(40)
    snapshot_id = harness.log.snapshot()
    harness.chunks(3)
    harness.append_records(7)
    recovered = recover(harness.files, harness.clock)
    assert recovered.snapshot_id == snapshot_id == 1
    assert recovered.replayed == 1 + 15 + 7  # the marker, and the records after it
    assert same_state(recovered.index, harness.log.index)
    assert harness.log.index.snapshot_id == 1
    chunk = all_chunks(harness.files)[0]
    marker = [view for view in chunk.records() if view.record_type == r.RecordType.SNAPSHOT_MARKER]
    assert marker[0].value() == r.SnapshotMarker(0, marker[0].offset, 1)


@pytest.mark.parametrize("point", ["stream.mlog.snapshot.writing", "stream.mlog.snapshot.written"])
def test_a_snapshot_has_only_committed_records_and_its_marker_is_written_after_it(
    harness: LogHarness, point: str
) -> None:
    """A crash just before and just after the snapshot's file becomes durable: there is no marker yet, and the snapshot
    contains only committed records.
    """
    harness.append_records(10)
    for value, segment_id in harness.history.many(5):
        harness.log.append(value, segment_id)

    def die(_point: str) -> None:
        raise PowerCut

    live = copy.deepcopy(harness.log.index)
    with armed(point, die), pytest.raises(PowerCut):
        harness.log.snapshot()
    harness.log.abandon()
    assert harness.files.snapshots() == ([] if point.endswith("writing") else [1])
    kinds = [view.record_type for chunk in all_chunks(harness.files) for view in chunk.records()]
    assert r.RecordType.SNAPSHOT_MARKER not in kinds
    recovered = recover(harness.files, harness.clock)
    assert same_state(recovered.index, live), "the records of a snapshot are committed before it is written"
    harness.log = harness.open()
    assert harness.log.snapshot() == (1 if point.endswith("writing") else 2)


def test_outstanding_work_survives_without_being_issued_again(harness: LogHarness) -> None:
    records: list[tuple[r.Payload, int]] = [
        (opened(0), 1),
        (r.SealSegment(9, 9), 1),
        (r.UploadStarted("k/1"), 1),
        (opened(1), 2),
        (r.SealSegment(9, 9), 2),
        (r.UploadStarted("k/2"), 2),
        (r.UploadDone("k/2", "e"), 2),
        (r.Tier2DeleteQueued("k/2"), 2),
    ]
    append_all(harness.log, records)
    harness.log.snapshot()
    before = harness.log.index.outstanding()
    harness.reopen()
    assert harness.log.index.outstanding() == before
    assert before.uploads == {1: "k/1"}
    assert before.deletes == {"k/2": 2}
    with pytest.raises(IllegalTransition):
        harness.log.append(r.UploadStarted("k/1"), 1)
    append_all(harness.log, [(r.UploadDone("k/1", "x"), 1), (r.Tier2Deleted("k/2"), 2)])
    after = harness.reopen().index.outstanding()
    assert not after.uploads
    assert not after.deletes


def test_a_damaged_snapshot_falls_back_to_the_one_before(harness: LogHarness) -> None:
    harness.append_records(30)
    harness.log.snapshot()
    harness.chunks(2)
    harness.log.snapshot()
    harness.append_records(5)
    live = harness.log.index
    path = Path(harness.files.snapshot(2))
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)
    before = harness.log.figures().manifest_crc_error_count
    recovered = recover(harness.files, harness.clock)
    assert harness.log.figures().manifest_crc_error_count == before + 1
    assert recovered.snapshot_id == 1
    assert same_state(recovered.index, live)
    Path(harness.files.snapshot(1)).write_bytes(b"")
    recovered = recover(harness.files, harness.clock)
    assert recovered.snapshot_id == 0
    assert harness.log.figures().manifest_crc_error_count == before + 3
    assert same_state(recovered.index, live)


def test_a_fallback_reads_chunks_that_are_not_on_disk_from_tier_2(harness: LogHarness) -> None:
    harness.chunks(3)
    harness.log.snapshot()
    harness.chunks(6)
    harness.log.snapshot()
    harness.chunks(3)
    harness.log.tick()
    assert harness.files.chunks()[0] > 3
    live = harness.log.index
    Path(harness.files.snapshot(2)).write_bytes(b"gone")
    assert same_state(recover(harness.files, harness.clock, harness.objects.fetch).index, live)
    with pytest.raises(ManifestIntegrityError, match="missing"):
        recover(harness.files, harness.clock)


def test_a_log_that_ends_before_its_snapshot_is_damaged(harness: LogHarness) -> None:
    harness.append_records(20)
    harness.log.snapshot()
    harness.log.close()
    Path(harness.files.chunk(0)).unlink()
    with pytest.raises(ManifestIntegrityError, match="before its newest snapshot"):
        harness.open()


def test_recovery_reads_no_more_than_the_tail(harness: LogHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.chunks(30)
    harness.log.snapshot()
    harness.chunks(2)
    chunks_read: list[int] = []
    original = recover.__globals__["ManifestLogReader"].chunk

    def recording_chunk(self: object, index: int) -> object:
        chunks_read.append(index)
        return original(self, index)

    monkeypatch.setattr("quire.stream.mlog_reader.ManifestLogReader.chunk", recording_chunk)
    assert recover(harness.files, harness.clock).replayed == 1 + 10
    assert chunks_read == [30, 31]


# ── tier 2 ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_sealed_chunks_are_uploaded_with_their_facts(harness: LogHarness) -> None:
    harness.append_records(20)
    harness.log.snapshot()
    harness.chunks(3)
    result = harness.log.tick()
    assert result.uploaded == [0, 1, 2]
    assert harness.store.puts[:3] == ["manifest/7/0.mlog", "manifest/7/1.mlog", "manifest/7/2.mlog"]
    assert "manifest/7/snapshot_1.bin" in harness.store.puts
    for index, chunk in enumerate(all_chunks(harness.files)):
        facts = harness.objects.facts(index)
        assert facts.header.chunk_crc64 == chunk.header.chunk_crc64
        assert facts.header.base_record == chunk.header.base_record
        assert facts.record_count == len(chunk.offsets)
        assert facts.snapshot_id == 1
        assert local_facts(harness.files.disk, harness.files, index).header.uploaded
        uploaded = harness.objects.get_chunk(index)
        assert uploaded is not None
        assert [view.raw for view in uploaded.records()] == [view.raw for view in chunk.records()]
    assert harness.log.tick().uploaded == []


def test_an_idle_log_uploads_nothing_more(harness: LogHarness) -> None:
    """S3: uploading the log adds no records, so an idle log uploads nothing more, whatever the rotation timer says."""
    harness.chunks(5)
    ticks = []
    for _ in range(20):
        harness.clock.advance(5)
        ticks.append(harness.log.tick())
    assert ticks[0].uploaded
    assert all(tick.rotated is None and not tick.uploaded and tick.snapshot_id is None for tick in ticks[3:])
    assert len(harness.files.chunks()) <= 3


def test_tier_2_retry(harness: LogHarness) -> None:
    """Matrix: uploads fail for a while. The log keeps everything, retries with increasing delays, and finally succeeds."""
    harness.store.down = True
    harness.chunks(2)
    attempts = 0
    for _ in range(40):
        harness.clock.advance(1)
        result = harness.log.tick()
        attempts += bool(result.failed)
        assert result.uploaded == []
    assert 4 <= attempts <= 10
    assert harness.log.figures().manifest_upload_retries == attempts - 1, "the first attempt is not a retry"
    assert len(harness.files.chunks()) >= 2
    harness.store.down = False
    harness.reopen()
    assert harness.log.tick().uploaded == [0, 1]


def test_a_segments_upload_fails_and_is_retried_under_its_key(harness: LogHarness) -> None:
    """Matrix: UploadFailed, then UploadDone in a later chunk with the same key. In between, the upload is outstanding."""
    log = harness.log
    append_all(log, [(opened(0), 1), (r.SealSegment(1, 1), 1), (r.UploadStarted("k"), 1), (r.UploadFailed("k", 3), 1)])
    log.rotate()
    assert harness.reopen().index.outstanding().uploads == {1: "k"}
    with pytest.raises(IllegalTransition):
        harness.log.append(r.UploadDone("other", "e"), 1)
    append_all(harness.log, [(r.UploadDone("k", "e"), 1)])
    info = harness.reopen().index.get(1)
    assert info is not None
    assert info.key == "k"
    assert info.tiers == {0, 2}
    assert not harness.log.index.outstanding().uploads


def test_an_object_store_that_fails_at_any_call_loses_nothing(harness: LogHarness) -> None:
    """Uploads, deletions and their records are interrupted at the first, second, … call to the object store, and then
    resumed.
    """
    fail_after = 0
    while True:
        harness.append_records(10)
        harness.log.snapshot()
        harness.chunks(3)
        harness.store.fail_after = fail_after
        failed = harness.log.tick().failed
        harness.store.fail_after = None
        harness.clock.advance(60)
        assert harness.reopen().tick().failed == ""
        live = harness.log.index
        assert same_state(recover(harness.files, harness.clock, harness.objects.fetch).index, live)
        assert live.rejected == 0
        assert live.own_deletes == {}
        assert len(harness.objects.listing().snapshots) <= 2
        assert objects_apart(harness.files, harness.objects) == {}
        if not failed:
            break
        fail_after += 1
    assert fail_after > 4


def test_threads_append_commit_and_tick_together(harness: LogHarness) -> None:
    def write(first: int) -> None:
        for number in range(40):
            harness.log.append(r.CustomEvent(2_000 + first, bytes([number])), 0)
            harness.log.commit()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    threads.append(threading.Thread(target=lambda: [harness.log.tick() for _ in range(20)]))
    for thread in threads:
        thread.start()
    for _ in range(10):
        harness.log.rotate()
        harness.log.snapshot()
    for thread in threads:
        thread.join()
    live = harness.log.index
    assert sum(live.customs.values()) == 160
    assert same_state(harness.reopen().index, live)


def test_an_upload_whose_response_was_lost_is_adopted(harness: LogHarness) -> None:
    harness.chunks(1)
    harness.objects.put_chunk(all_chunks(harness.files)[0])  # uploaded, but not recorded
    assert harness.log.tick().uploaded == [0]
    assert local_facts(harness.files.disk, harness.files, 0).header.uploaded


def test_another_chunk_under_our_name_is_never_overwritten(harness: LogHarness, tmp_path: Path) -> None:
    other_files = files_at(tmp_path / "other")
    with ManifestLog.open(other_files, clock=ManualClock(), settings=SMALL) as log:
        log.append(opened(99), 1)
        log.rotate()
    harness.objects.put_chunk(all_chunks(other_files)[0])
    harness.chunks(1)
    with pytest.raises(AlreadyExists):
        harness.log.tick()
    assert objects_apart(harness.files, harness.objects) == {0: "its object belongs to a different chunk"}
    report = reconcile(harness.files, harness.objects, 0)
    assert report.chunks_needing_repair == {0: "its object belongs to a different chunk"}


def test_local_retention(harness: LogHarness) -> None:
    """What is kept: the active chunk, two sealed ones, everything since the newest snapshot, and everything not
    uploaded.
    """
    harness.store.down = True
    harness.chunks(4)
    harness.log.tick()
    assert harness.files.chunks() == [0, 1, 2, 3, 4]  # 4 has the marker of the scheduled snapshot
    harness.store.down = False
    harness.clock.advance(60)
    assert harness.log.tick().removed == [0, 1]
    assert harness.files.chunks() == [2, 3, 4]
    harness.chunks(2)
    harness.log.tick()
    assert harness.files.chunks() == [4, 5]
    live = harness.log.index
    assert same_state(harness.reopen().index, live)


def test_old_snapshots_are_deleted_from_disk_and_by_records_from_tier_2(harness: LogHarness) -> None:
    for _ in range(5):
        harness.append_records(3)
        harness.log.snapshot()
        harness.clock.advance(60)
        harness.log.tick()
    assert harness.files.snapshots() == [5, 4]
    assert sorted(harness.objects.listing().snapshots) == [4, 5]
    assert harness.log.index.own_deletes == {}
    kinds = [view.value() for chunk in all_chunks(harness.files) for view in chunk.records() if view.segment_id == 0]
    assert r.Tier2DeleteQueued("manifest/7/snapshot_1.bin") in kinds
    assert r.Tier2Deleted("manifest/7/snapshot_1.bin") in kinds


def test_reconciliation_uploads_what_is_missing_and_reports_what_is_lost(harness: LogHarness) -> None:
    harness.chunks(8)
    harness.log.tick()
    local = [index for index in harness.files.chunks() if index < 8]
    assert local
    remote_only = next(index for index in range(8) if index not in local)
    for index in (remote_only, local[-1]):
        harness.store.delete(harness.objects.chunk_key(index))
    assert set(objects_apart(harness.files, harness.objects)) == {remote_only, local[-1]}
    assert reconcile(harness.files, harness.objects, 0).rebuilt == [local[-1]]
    assert objects_apart(harness.files, harness.objects) == {remote_only: "it is neither on disk nor in tier 2"}
    assert local[-1] in reconcile(harness.files, harness.objects, 0).present


def test_a_damaged_object_is_found(harness: LogHarness) -> None:
    harness.chunks(2)
    harness.log.tick()
    key = harness.objects.chunk_key(0)
    data = bytearray(harness.store.get(key))
    data[70] ^= 1
    harness.store.put(key, bytes(data))
    assert objects_apart(harness.files, harness.objects) == {}, "its commit copy is valid"
    assert [(problem.rule, problem.where["chunk"]) for problem in verify(harness.files, harness.objects)] == [("L5", 0)]


@pytest.mark.parametrize("damage", ["damaged", "missing"])
def test_a_quarantined_stream_is_repaired_from_tier_2(harness: LogHarness, damage: str) -> None:
    harness.chunks(3)
    harness.log.upload()
    live = harness.log.index
    harness.log.close()
    path = Path(harness.files.chunk(1))
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:99])
        with pytest.raises(ManifestIntegrityError):
            harness.open()
    restore_chunk(harness.files, harness.objects, 1)
    assert local_facts(harness.files.disk, harness.files, 1).header.uploaded
    harness.log = harness.open()
    assert same_state(harness.log.index, live)
    with pytest.raises(ObjectNotFound):
        restore_chunk(harness.files, harness.objects, 77)


def test_figures_have_the_names_of_the_design_document(harness: LogHarness) -> None:
    harness.chunks(3)
    harness.clock.advance(12)
    named = harness.log.figures().named()
    assert named["aof2.manifest_log.manifest_chunks_active"] == 3
    assert named["aof2.manifest_log.manifest_snapshot_age_seconds"] == 0, "there is no snapshot"
    assert {name.rpartition(".")[2] for name in named} >= {
        "manifest_replay_seconds",
        "manifest_crc_error_count",
        "manifest_upload_retries",
        "manifest_shadow_divergence",
    }
    collected = {metric.name for metric in StreamCollector(tuple, lambda: [harness.log.figures()]).collect()}
    assert {"quire_manifest_chunks_active", "aof2_manifest_log_manifest_chunks_active"} <= collected


def test_the_age_of_a_snapshot_survives_a_restart(harness: LogHarness) -> None:
    """The age was counted from the last open."""
    harness.chunks(1)
    harness.log.snapshot()
    harness.clock.advance(12)
    assert harness.log.figures().manifest_snapshot_age_seconds == 12
    harness.reopen()
    harness.clock.advance(3)
    assert harness.log.figures().manifest_snapshot_age_seconds == 15
