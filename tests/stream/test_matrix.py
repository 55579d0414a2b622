"""The integration test matrix of the manifest-log document, and the faults that streams must stand, each row a test.

Here each row of the matrix goes through a whole stream, its log, its objects and its recovery; the tests beside it look
at the same thing in one module, or kill real processes in the middle of it.

| row | here | and also |
|---|---|---|
| Rotation boundaries | test_rotation_boundaries | test_mlog_writer: test_rotation_boundaries_leave_no_gap |
| Crash on commit | test_crash_on_commit | test_mlog_kill: test_killed_at_a_failpoint_everything_committed_is_there |
| Tier 2 retry | test_tier_2_retry | test_mlog_log: test_a_segments_upload_fails_and_is_retried_under_its_key |
| Snapshot replay | test_snapshot_replay | test_mlog_log: test_snapshot_replay |
| Follower catch-up | test_follower_catch_up | test_mlog_follow: test_a_follower_catches_up_over_missing_chunks |
| bit flips, chunk file | | test_mlog_damage: test_every_byte_of_a_chunk_file_in_its_log |
| bit flips, chunk object | | test_mlog_damage: test_every_bit_of_a_chunk_object |
| bit flips, snapshot | | test_mlog_damage: test_every_bit_of_a_snapshot |
| bit flips, segment | | test_segment: test_every_flipped_bit_of_what_was_synced_is_found |
| bit flips, compressed segment | | test_warm: test_every_flipped_bit_is_found |
| upload failing for a while | test_tier_2_retry | test_mlog_log: test_tier_2_retry |
| killed while rotating, uploading, … | | test_stream_kill: test_killed_at_a_failpoint_every_promise_is_kept |
| killed at random, against a model | | test_kill_machine: test_killed_at_random_against_a_model |
| power lost at random, against a model | | test_stream_machine: TestStreams |
| power lost at every step of the log | | test_mlog_crash: test_power_off_at_every_step_of_a_life |
| two writers on one stream | | test_hot: test_a_second_writer_is_told_who_has_the_stream |
| clock going backwards | | test_hot: test_timestamps_never_fall |
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
from tests.stream.streams import LOG, SMALL, StreamWorld, record

ROW = re.compile(r"^\|[^|]*\|([^|]*)\|([^|]*)\|$")


class Died(BaseException):
    """Stands for SIGKILL in this process."""


def die(_point: str) -> None:
    raise Died


@pytest.fixture
def world(tmp_path: Path) -> Iterator[StreamWorld]:
    log = msgspec.structs.replace(LOG, snapshot_chunks=1_000, snapshots_kept=1_000)
    made = StreamWorld(tmp_path, settings=msgspec.structs.replace(SMALL, warm_bytes=1 << 20), log_settings=log)
    yield made
    made.objects.down = False
    made.check()
    made.close()


def views(world: StreamWorld) -> list[RecordView]:
    """Every record of the stream's log that is on disk."""
    return [view for chunk in ManifestLogReader(world.stream.ledger.log.files).chunks() for view in chunk.records()]


def rebuilt_equals_live(world: StreamWorld) -> None:
    log = world.stream.ledger.log
    assert log.objects is not None
    assert same_state(recover(log.files, world.clock, log.objects.fetch).index, log.index)


def test_the_table_names_tests_that_exist() -> None:
    rows = [found for line in (__doc__ or "").splitlines() if (found := ROW.match(line)) is not None]
    assert len(rows) == 19, "head, rule and 17 rows"
    for row in rows[2:]:
        here, beside = row[1].strip(), row[2].strip()
        assert here or beside
        if here:
            assert callable(globals()[here])
        if beside:
            module, name = beside.split(": ")
            assert hasattr(importlib.import_module(f"tests.stream.{module}"), name), beside


# ── the document's matrix ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_rotation_boundaries(world: StreamWorld) -> None:
    """Records of many sizes over many chunks: checksums hold, ordinals have no gap, and restarts stitch on."""
    log = world.stream.ledger.log
    for number in range(360):
        log.append(r.CustomEvent(5_000, bytes(number * 37 % 900)))
        if number % 10 == 9:
            log.commit()
        if number % 100 == 99:
            world.reopen()
            log = world.stream.ledger.log
    world.fill(3)
    log.commit()
    chunks = list(ManifestLogReader(log.files).chunks())
    assert len(chunks) > 10
    for chunk in chunks:
        assert crc64(chunk.data[CHUNK_BYTES : chunk.header.committed_len]) == chunk.header.chunk_crc64
    ordinals = [chunk.header.base_record + place for chunk in chunks for place in range(len(chunk.offsets))]
    assert ordinals == list(range(log.index.records))
    sizes = [len(view.value().blob) for view in views(world) if view.segment_id == 0]  # type: ignore[union-attr]
    assert sizes == [number * 37 % 900 for number in range(360)]
    rebuilt_equals_live(world)


@pytest.mark.parametrize("point", ["stream.mlog.copied", "stream.mlog.synced"])
def test_crash_on_commit(world: StreamWorld, point: str) -> None:
    """Death after the payload and before the header: the tail is trimmed, and what is told again is there once."""
    payloads = world.fill(1)
    before = len(views(world))
    with armed(point, die), pytest.raises(Died):
        world.stream.compress()
    world.crash()
    assert len(views(world)) == before, "the uncommitted tail is trimmed"
    assert not world.segments()[0].is_warm
    assert world.stream.compress() == 1
    kinds = [view.record_type for view in views(world)][before:]
    assert kinds == [r.RecordType.COMPRESSION_STARTED, r.RecordType.COMPRESSION_DONE]
    assert world.payloads() == payloads
    rebuilt_equals_live(world)


def test_tier_2_retry(world: StreamWorld) -> None:
    """Uploads fail for a while: UploadFailed, and in a later chunk UploadDone of the same key; in between it is work."""
    world.fill(2)
    log = world.stream.ledger.log
    world.objects.down = True
    with pytest.raises(ObjectStoreUnavailable):
        world.stream.tiers.upload(1)
    failed_in = log.rotate()
    key = world.segments()[0].key
    assert log.index.outstanding().uploads == {1: key}
    world.crash()  # replay queues it again
    assert world.stream.ledger.index.outstanding().uploads == {1: key}
    for _ in range(5):
        world.clock.advance(1)
        assert world.stream.tick().uploaded == 0
    world.objects.down = False
    world.clock.advance(600)
    assert world.stream.tick().uploaded == 2
    about = [view for view in views(world) if view.segment_id == 1 and 5 <= view.record_type <= 7]
    assert [view.record_type for view in about[:2]] == [r.RecordType.UPLOAD_STARTED, r.RecordType.UPLOAD_FAILED]
    assert about[-1].record_type == r.RecordType.UPLOAD_DONE
    assert failed_in is not None
    assert about[-1].chunk.index > failed_in
    assert {view.value().key for view in about} == {key}  # type: ignore[union-attr]
    assert sum(view.record_type == r.RecordType.UPLOAD_STARTED for view in about) == 1, "begun once"
    assert world.stream.ledger.index.outstanding().uploads == {}
    rebuilt_equals_live(world)


def test_snapshot_replay(world: StreamWorld) -> None:
    """A snapshot, more chunks behind it: replay begins at the marker, and hydrations that were begun go on once."""
    payloads = world.fill(3)
    stream = world.stream
    stream.upload()
    stream.evict(warm=True)
    with armed("stream.hydrate.started", die), pytest.raises(Died):
        stream.hydrate(2)
    log = stream.ledger.log
    told = log.index.records
    snapshot_id = log.snapshot()
    log.rotate()
    payloads += world.fill(4)
    log.rotate()
    recovered = recover(log.files, world.clock)
    assert recovered.snapshot_id == snapshot_id
    assert recovered.replayed == log.index.records - told
    assert same_state(recovered.index, log.index)
    world.crash()
    assert world.stream.ledger.index.outstanding().hydrations == {2: 2}
    assert world.stream.tick().hydrated == 1
    assert world.stream.tick().hydrated == 0
    begun = [view for view in views(world) if view.record_type == r.RecordType.HYDRATION_STARTED]
    assert [view.segment_id for view in begun] == [2]
    assert world.segments()[1].state.hydration is Hydration.IDLE
    assert world.payloads() == payloads


def test_follower_catch_up(world: StreamWorld, tmp_path: Path) -> None:
    """A follower that lost the middle of the log: it ends where the owner is, and fetches what was not deleted, once."""
    log = world.stream.ledger.log
    assert log.objects is not None
    mirror = LogFiles(OsDisk(), str(tmp_path / "mirror"), world.stream_id)
    follower = LogFollower(log.objects, mirror)
    world.fill(2)
    world.stream.upload()
    seen = [each.segment_id for each in follower.poll().hydrations]
    assert seen == [1, 2]
    first_unseen = follower.next_chunk
    for number in (3, 4, 5):
        world.fill(1)
        world.stream.upload(number)
    world.stream.tiers.retire(1)
    world.stream.tiers.retire(2)
    world.stream.tiers.retire(3)
    log.snapshot()
    world.fill(1)
    world.stream.upload()
    for index in sorted(log.objects.listing().chunks):
        if first_unseen <= index < log.files.chunks()[-1]:
            world.objects.delete(log.objects.chunk_key(index))
    polled = follower.poll()
    assert polled.jumped_to is not None
    assert [each.segment_id for each in polled.hydrations] == [4, 5, 6], "3 came and went"
    assert same_state(follower.index, log.index)
    assert follower.poll().hydrations == []
    again = LogFollower(log.objects, mirror, scheduled=[4, 5, 6])
    assert (again.poll().hydrations, same_state(again.index, log.index)) == ([], True)
    deleted = [view.value() for view in views(world) if view.record_type == r.RecordType.TIER2_DELETED]
    assert len(deleted) == 3
    assert all(each.state.remote is Remote.DONE for each in world.segments())
    for index in range(log.files.chunks()[-1]):  # what was dropped from tier 2 comes back from this disk
        assert index in log.objects.listing().chunks or index in reconcile(log.files, log.objects, 0).rebuilt
    assert world.payloads() == [record(number) for number in range(61, 121)]
