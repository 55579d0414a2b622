"""The integration test matrix of the manifest-log document, and the faults that streams must survive: one test per row.

Here each row of the matrix runs on a whole stream, with its log, its objects and its recovery. The other tests check the
same in one module, or kill real processes in the middle of it.

| row | here | and also |
|---|---|---|
| Rotation boundaries | test_rotation_boundaries | test_mlog_writer: test_rotation_boundaries_leave_no_gap |
| Crash on commit | test_crash_on_commit | test_mlog_kill: test_killed_at_a_failpoint_nothing_committed_is_lost |
| Tier 2 retry | test_tier_2_retry | test_mlog_log: test_a_segments_upload_fails_and_is_retried_under_its_key |
| Snapshot replay | test_snapshot_replay | test_mlog_log: test_snapshot_replay |
| Follower catch-up | test_follower_catch_up | test_mlog_follow: test_a_follower_catches_up_over_missing_chunks |
| bit flips, chunk file | | test_mlog_damage: test_every_damaged_byte_of_a_chunk_file_is_detected_or_harmless |
| bit flips, chunk object | | test_mlog_damage: test_every_flipped_bit_of_a_chunk_object_is_detected_or_harmless |
| bit flips, snapshot | | test_mlog_damage: test_every_flipped_bit_of_a_snapshot_is_detected |
| bit flips, segment | | test_segment: test_every_flipped_bit_of_synced_bytes_is_detected |
| bit flips, compressed segment | | test_warm: test_every_flipped_bit_is_detected |
| upload failing for a while | test_tier_2_retry | test_mlog_log: test_tier_2_retry |
| killed while rotating, uploading, … | | test_stream_kill: test_killed_at_a_failpoint_every_guarantee_holds |
| killed at random, against a model | | test_kill_machine: test_killed_at_random_against_a_model |
| power lost at random, against a model | | test_stream_machine: TestStreams |
| power lost at every step of the log | | test_mlog_crash: test_power_loss_at_every_step_of_a_workload |
| two writers on one stream | | test_hot: test_a_second_writer_is_refused |
| clock going backwards | | test_hot: test_timestamps_never_decrease |
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from quire.core.errors import ObjectStoreUnavailable
from quire.durable.checksums import crc64
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk
from quire.stream import mlog_records as r
from quire.stream.files import LogFiles
from quire.stream.mlog_follower import LogFollower
from quire.stream.mlog_format import CHUNK_BYTES
from quire.stream.mlog_reader import ManifestLogReader, RecordView
from quire.stream.mlog_recovery import reconcile, recover
from quire.stream.mlog_states import Hydration, Remote
from tests.stream.logs import same_state
from tests.stream.streams import LOG, SMALL, StreamHarness, record

ROW = re.compile(r"^\|[^|]*\|([^|]*)\|([^|]*)\|$")


class Died(BaseException):
    """Stands for SIGKILL in this process."""


def die(_point: str) -> None:
    raise Died


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[StreamHarness]:
    log = msgspec.structs.replace(LOG, snapshot_chunks=1_000, snapshots_kept=1_000)
    harness = StreamHarness(tmp_path, settings=msgspec.structs.replace(SMALL, warm_bytes=1 << 20), log_settings=log)
    yield harness
    harness.objects.down = False
    harness.check()
    harness.close()


def views(harness: StreamHarness) -> list[RecordView]:
    """Every record of the stream's log that is on disk."""
    return [view for chunk in ManifestLogReader(harness.stream.ledger.log.files).chunks() for view in chunk.records()]


def rebuilt_equals_live(harness: StreamHarness) -> None:
    log = harness.stream.ledger.log
    assert log.objects is not None
    assert same_state(recover(log.files, harness.clock, log.objects.fetch).index, log.index)


def test_the_table_names_tests_that_exist() -> None:
    rows = [match for line in (__doc__ or "").splitlines() if (match := ROW.match(line)) is not None]
    assert len(rows) == 19, "header, separator and 17 rows"
    for row in rows[2:]:
        local_test, other_test = row[1].strip(), row[2].strip()
        assert local_test or other_test
        if local_test:
            assert callable(globals()[local_test])
        if other_test:
            module, name = other_test.split(": ")
            assert hasattr(importlib.import_module(f"tests.stream.{module}"), name), other_test


# ── the document's matrix ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_rotation_boundaries(harness: StreamHarness) -> None:
    """Records of many sizes in many chunks: checksums are right, ordinals have no gap, and a restart continues them."""
    log = harness.stream.ledger.log
    for number in range(360):
        log.append(r.CustomEvent(5_000, bytes(number * 37 % 900)))
        if number % 10 == 9:
            log.commit()
        if number % 100 == 99:
            harness.reopen()
            log = harness.stream.ledger.log
    harness.fill(3)
    log.commit()
    chunks = list(ManifestLogReader(log.files).chunks())
    assert len(chunks) > 10
    for chunk in chunks:
        assert crc64(chunk.data[CHUNK_BYTES : chunk.header.committed_len]) == chunk.header.chunk_crc64
    ordinals = [chunk.header.base_record + i for chunk in chunks for i in range(len(chunk.offsets))]
    assert ordinals == list(range(log.index.records))
    sizes = [len(view.value().blob) for view in views(harness) if view.segment_id == 0]  # type: ignore[union-attr]
    assert sizes == [number * 37 % 900 for number in range(360)]
    rebuilt_equals_live(harness)


@pytest.mark.parametrize("point", ["stream.mlog.copied", "stream.mlog.synced"])
def test_crash_on_commit(harness: StreamHarness, point: str) -> None:
    """A crash after the payload and before the header: the tail is trimmed, and repeated records appear once."""
    payloads = harness.fill(1)
    before = len(views(harness))
    with armed(point, die), pytest.raises(Died):
        harness.stream.compress()
    harness.crash()
    assert len(views(harness)) == before, "the uncommitted tail is trimmed"
    assert not harness.segments()[0].is_warm
    assert harness.stream.compress() == 1
    kinds = [view.record_type for view in views(harness)][before:]
    assert kinds == [r.RecordType.COMPRESSION_STARTED, r.RecordType.COMPRESSION_DONE]
    assert harness.payloads() == payloads
    rebuilt_equals_live(harness)


def test_tier_2_retry(harness: StreamHarness) -> None:
    """Uploads fail for a while: UploadFailed, and in a later chunk UploadDone with the same key. In between, the upload
    is outstanding.
    """
    harness.fill(2)
    log = harness.stream.ledger.log
    harness.objects.down = True
    with pytest.raises(ObjectStoreUnavailable):
        harness.stream.tiers.upload(1)
    failed_chunk = log.rotate()
    key = harness.segments()[0].key
    assert log.index.outstanding().uploads == {1: key}
    harness.crash()  # replay queues it again
    assert harness.stream.ledger.index.outstanding().uploads == {1: key}
    for _ in range(5):
        harness.clock.advance(1)
        assert harness.stream.tick().uploaded == 0
    harness.objects.down = False
    harness.clock.advance(600)
    assert harness.stream.tick().uploaded == 2
    upload_views = [view for view in views(harness) if view.segment_id == 1 and 5 <= view.record_type <= 7]
    assert [view.record_type for view in upload_views[:2]] == [r.RecordType.UPLOAD_STARTED, r.RecordType.UPLOAD_FAILED]
    assert upload_views[-1].record_type == r.RecordType.UPLOAD_DONE
    assert failed_chunk is not None
    assert upload_views[-1].chunk.index > failed_chunk
    assert {view.value().key for view in upload_views} == {key}  # type: ignore[union-attr]
    assert sum(view.record_type == r.RecordType.UPLOAD_STARTED for view in upload_views) == 1, "started once"
    assert harness.stream.ledger.index.outstanding().uploads == {}
    rebuilt_equals_live(harness)


def test_snapshot_replay(harness: StreamHarness) -> None:
    """A snapshot, then more chunks: replay begins at the marker, and hydrations that were started are resumed once."""
    payloads = harness.fill(3)
    stream = harness.stream
    stream.upload()
    stream.evict(warm=True)
    with armed("stream.hydrate.started", die), pytest.raises(Died):
        stream.hydrate(2)
    log = stream.ledger.log
    record_count = log.index.records
    snapshot_id = log.snapshot()
    log.rotate()
    payloads += harness.fill(4)
    log.rotate()
    recovered = recover(log.files, harness.clock)
    assert recovered.snapshot_id == snapshot_id
    assert recovered.replayed == log.index.records - record_count
    assert same_state(recovered.index, log.index)
    harness.crash()
    assert harness.stream.ledger.index.outstanding().hydrations == {2: 2}
    assert harness.stream.tick().hydrated == 1
    assert harness.stream.tick().hydrated == 0
    started = [view for view in views(harness) if view.record_type == r.RecordType.HYDRATION_STARTED]
    assert [view.segment_id for view in started] == [2]
    assert harness.segments()[1].state.hydration is Hydration.IDLE
    assert harness.payloads() == payloads


def test_follower_catch_up(harness: StreamHarness, tmp_path: Path) -> None:
    """A follower for which the middle of the log is missing reaches the owner's state, and hydrates what was not
    deleted, once.
    """
    log = harness.stream.ledger.log
    assert log.objects is not None
    mirror = LogFiles(OsDisk(), str(tmp_path / "mirror"), harness.stream_id)
    follower = LogFollower(log.objects, mirror)
    harness.fill(2)
    harness.stream.upload()
    hydrated = [hydration.segment_id for hydration in follower.poll().hydrations]
    assert hydrated == [1, 2]
    first_unseen = follower.next_chunk
    for number in (3, 4, 5):
        harness.fill(1)
        harness.stream.upload(number)
    harness.stream.tiers.retire(1)
    harness.stream.tiers.retire(2)
    harness.stream.tiers.retire(3)
    log.snapshot()
    harness.fill(1)
    harness.stream.upload()
    for index in sorted(log.objects.listing().chunks):
        if first_unseen <= index < log.files.chunks()[-1]:
            harness.objects.delete(log.objects.chunk_key(index))
    polled = follower.poll()
    assert polled.waiting_for is None, "a snapshot crosses the gap"
    assert [hydration.segment_id for hydration in polled.hydrations] == [4, 5, 6], (
        "3 was created and retired in the gap"
    )
    assert same_state(follower.index, log.index)
    assert follower.poll().hydrations == []
    again = LogFollower(log.objects, mirror, scheduled=[4, 5, 6])
    assert (again.poll().hydrations, same_state(again.index, log.index)) == ([], True)
    deleted = [view.value() for view in views(harness) if view.record_type == r.RecordType.TIER2_DELETED]
    assert len(deleted) == 3
    assert all(segment.state.remote is Remote.DONE for segment in harness.segments())
    for index in range(log.files.chunks()[-1]):  # chunks that tier 2 lost are uploaded again from this disk
        assert index in log.objects.listing().chunks or index in reconcile(log.files, log.objects, 0).rebuilt
    assert harness.payloads() == [record(number) for number in range(61, 121)]
