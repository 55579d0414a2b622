"""The log put together: snapshots and tail, upload with a store that fails, retention, reconciliation."""

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
from tests.stream.logs import SMALL, all_chunks, files_at, opened, same_state
from tests.stream.tiers import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def test_live_and_rebuilt_state_are_equal(world: World) -> None:
    world.tell(300)
    live = world.log.index
    world.reopen()
    assert same_state(world.log.index, live)
    assert same_state(recover(world.files, world.clock).index, live)
    with pytest.raises(StoreLocked):
        world.open()


def test_an_illegal_record_is_refused_and_leaves_no_trace(world: World) -> None:
    world.log.append(opened(1), 1)
    with pytest.raises(IllegalTransition):
        world.log.append(r.LocalEvicted(1), 1)
    world.log.commit()
    assert recover(world.files, world.clock).index.records == 1


def test_snapshot_replay(world: World) -> None:
    """Matrix (docs/design/seeds.md, manifest log): a snapshot, more chunks, and replay starts at the marker's offset."""
    world.tell(40)
    snapshot_id = world.log.snapshot()
    world.chunks(3)
    world.tell(7)
    recovered = recover(world.files, world.clock)
    assert recovered.snapshot_id == snapshot_id == 1
    assert recovered.replayed == 1 + 15 + 7  # the marker and what came after
    assert same_state(recovered.index, world.log.index)
    assert world.log.index.snapshot_id == 1
    chunk = all_chunks(world.files)[0]
    marker = [view for view in chunk.records() if view.record_type == r.RecordType.SNAPSHOT_MARKER]
    assert marker[0].value() == r.SnapshotMarker(0, marker[0].offset, 1)


@pytest.mark.parametrize("point", ["stream.mlog.snapshot.writing", "stream.mlog.snapshot.written"])
def test_a_snapshot_is_of_committed_records_and_its_marker_comes_after_it(world: World, point: str) -> None:
    """Death just before and just after the snapshot's file is durable: no marker yet, and no record that is not committed."""
    world.tell(10)
    for value, segment_id in world.story.many(5):
        world.log.append(value, segment_id)

    def die(_point: str) -> None:
        raise PowerCut

    live = copy.deepcopy(world.log.index)
    with armed(point, die), pytest.raises(PowerCut):
        world.log.snapshot()
    world.log.abandon()
    assert world.files.snapshots() == ([] if point.endswith("writing") else [1])
    kinds = [view.record_type for chunk in all_chunks(world.files) for view in chunk.records()]
    assert r.RecordType.SNAPSHOT_MARKER not in kinds
    recovered = recover(world.files, world.clock)
    assert same_state(recovered.index, live), "what a snapshot was to hold was committed first"
    world.log = world.open()
    assert world.log.snapshot() == (1 if point.endswith("writing") else 2)


def test_outstanding_work_survives_without_being_issued_again(world: World) -> None:
    told: list[tuple[r.Payload, int]] = [
        (opened(0), 1),
        (r.SealSegment(9, 9), 1),
        (r.UploadStarted("k/1"), 1),
        (opened(1), 2),
        (r.SealSegment(9, 9), 2),
        (r.UploadStarted("k/2"), 2),
        (r.UploadDone("k/2", "e"), 2),
        (r.Tier2DeleteQueued("k/2"), 2),
    ]
    world.log.append_all(told)
    world.log.snapshot()
    before = world.log.index.outstanding()
    world.reopen()
    assert world.log.index.outstanding() == before
    assert before.uploads == {1: "k/1"}
    assert before.deletes == {"k/2": 2}
    with pytest.raises(IllegalTransition):
        world.log.append(r.UploadStarted("k/1"), 1)
    world.log.append_all([(r.UploadDone("k/1", "x"), 1), (r.Tier2Deleted("k/2"), 2)])
    after = world.reopen().index.outstanding()
    assert not after.uploads
    assert not after.deletes


def test_a_damaged_snapshot_falls_back_to_the_one_before(world: World) -> None:
    world.tell(30)
    world.log.snapshot()
    world.chunks(2)
    world.log.snapshot()
    world.tell(5)
    live = world.log.index
    path = Path(world.files.snapshot(2))
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)
    before = world.log.figures().manifest_crc_error_count
    recovered = recover(world.files, world.clock)
    assert world.log.figures().manifest_crc_error_count == before + 1
    assert (recovered.snapshot_id, recovered.damaged_snapshots) == (1, 1)
    assert same_state(recovered.index, live)
    Path(world.files.snapshot(1)).write_bytes(b"")
    recovered = recover(world.files, world.clock)
    assert (recovered.snapshot_id, recovered.damaged_snapshots) == (0, 2)
    assert same_state(recovered.index, live)


def test_a_fallback_takes_chunks_that_are_no_longer_here_from_tier_2(world: World) -> None:
    world.chunks(3)
    world.log.snapshot()
    world.chunks(6)
    world.log.snapshot()
    world.chunks(3)
    world.log.tick()
    assert world.files.chunks()[0] > 3
    live = world.log.index
    Path(world.files.snapshot(2)).write_bytes(b"gone")
    assert same_state(recover(world.files, world.clock, world.objects.fetch).index, live)
    with pytest.raises(ManifestIntegrityError, match="missing"):
        recover(world.files, world.clock)


def test_a_log_that_ends_before_its_snapshot_is_damaged(world: World) -> None:
    world.tell(20)
    world.log.snapshot()
    world.log.close()
    Path(world.files.chunk(0)).unlink()
    with pytest.raises(ManifestIntegrityError, match="before its newest snapshot"):
        world.open()


def test_recovery_reads_no_more_than_the_tail(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.chunks(30)
    world.log.snapshot()
    world.chunks(2)
    read: list[int] = []
    original = recover.__globals__["ManifestLogReader"].chunk

    def counting(self: object, index: int) -> object:
        read.append(index)
        return original(self, index)

    monkeypatch.setattr("quire.stream.mlog_reader.ManifestLogReader.chunk", counting)
    assert recover(world.files, world.clock).replayed == 1 + 10
    assert read == [30, 31]


# ── tier 2 ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_sealed_chunks_are_uploaded_with_their_facts(world: World) -> None:
    world.tell(20)
    world.log.snapshot()
    world.chunks(3)
    done = world.log.tick()
    assert done.uploaded == [0, 1, 2]
    assert world.store.puts[:3] == ["manifest/7/0.mlog", "manifest/7/1.mlog", "manifest/7/2.mlog"]
    assert "manifest/7/snapshot_1.bin" in world.store.puts
    for index, chunk in enumerate(all_chunks(world.files)):
        facts = world.objects.facts(index)
        assert facts.header.chunk_crc64 == chunk.header.chunk_crc64
        assert facts.header.base_record == chunk.header.base_record
        assert facts.record_count == len(chunk.offsets)
        assert facts.snapshot_id == 1
        assert local_facts(world.files.disk, world.files, index).header.uploaded
        found = world.objects.get_chunk(index)
        assert found is not None
        assert [view.raw for view in found.records()] == [view.raw for view in chunk.records()]
    assert world.log.tick().uploaded == []


def test_the_log_comes_to_rest(world: World) -> None:
    """S3: uploading the log is no news, so an idle log uploads nothing more, whatever the timer says."""
    world.chunks(5)
    ticks = []
    for _ in range(20):
        world.clock.advance(5)
        ticks.append(world.log.tick())
    assert ticks[0].uploaded
    assert all(each.rotated is None and not each.uploaded and each.snapshot_id is None for each in ticks[3:])
    assert len(world.files.chunks()) <= 3


def test_tier_2_retry(world: World) -> None:
    """Matrix: uploads fail for a while; the log keeps everything, tries ever less often, and then is done."""
    world.store.down = True
    world.chunks(2)
    tried = 0
    for _ in range(40):
        world.clock.advance(1)
        done = world.log.tick()
        tried += bool(done.failed)
        assert done.uploaded == []
    assert 4 <= tried <= 10
    assert world.log.figures().manifest_upload_retries == tried - 1, "the first try is none"
    assert len(world.files.chunks()) >= 2
    world.store.down = False
    world.reopen()
    assert world.log.tick().uploaded == [0, 1]


def test_a_segments_upload_fails_and_is_retried_under_its_key(world: World) -> None:
    """Matrix: UploadFailed, then UploadDone in a later chunk with the same key; in between it is work."""
    log = world.log
    log.append_all([(opened(0), 1), (r.SealSegment(1, 1), 1), (r.UploadStarted("k"), 1), (r.UploadFailed("k", 3), 1)])
    log.rotate()
    assert world.reopen().index.outstanding().uploads == {1: "k"}
    with pytest.raises(IllegalTransition):
        world.log.append(r.UploadDone("other", "e"), 1)
    world.log.append_all([(r.UploadDone("k", "e"), 1)])
    info = world.reopen().index.get(1)
    assert info is not None
    assert info.key == "k"
    assert info.tiers == {0, 2}
    assert not world.log.index.outstanding().uploads


def test_a_store_that_fails_at_any_call_costs_nothing(world: World) -> None:
    """Upload, deletion and their records, cut off at the first, second, … call to the object store, and gone on with."""
    fail_after = 0
    while True:
        world.tell(10)
        world.log.snapshot()
        world.chunks(3)
        world.store.fail_after = fail_after
        failed = world.log.tick().failed
        world.store.fail_after = None
        world.clock.advance(60)
        assert world.reopen().tick().failed == ""
        live = world.log.index
        assert same_state(recover(world.files, world.clock, world.objects.fetch).index, live)
        assert live.rejected == 0
        assert live.own_deletes == {}
        assert len(world.objects.listing().snapshots) <= 2
        assert objects_apart(world.files, world.objects) == {}
        if not failed:
            break
        fail_after += 1
    assert fail_after > 4


def test_threads_append_commit_and_tick_together(world: World) -> None:
    def write(first: int) -> None:
        for number in range(40):
            world.log.append(r.CustomEvent(2_000 + first, bytes([number])), 0)
            world.log.commit()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    threads.append(threading.Thread(target=lambda: [world.log.tick() for _ in range(20)]))
    for thread in threads:
        thread.start()
    for _ in range(10):
        world.log.rotate()
        world.log.snapshot()
    for thread in threads:
        thread.join()
    live = world.log.index
    assert sum(live.customs.values()) == 160
    assert same_state(world.reopen().index, live)


def test_an_answer_that_was_lost_is_adopted(world: World) -> None:
    world.chunks(1)
    world.objects.put_chunk(all_chunks(world.files)[0])  # done, but nobody noted it
    assert world.log.tick().uploaded == [0]
    assert local_facts(world.files.disk, world.files, 0).header.uploaded


def test_another_chunk_under_our_name_is_never_overwritten(world: World, tmp_path: Path) -> None:
    other = files_at(tmp_path / "other")
    with ManifestLog.open(other, clock=ManualClock(), settings=SMALL) as log:
        log.append(opened(99), 1)
        log.rotate()
    world.objects.put_chunk(all_chunks(other)[0])
    world.chunks(1)
    with pytest.raises(AlreadyExists):
        world.log.tick()
    assert objects_apart(world.files, world.objects) == {0: "its object belongs to a different chunk"}
    found = reconcile(world.files, world.objects, 0)
    assert found.chunks_needing_repair == {0: "its object belongs to a different chunk"}


def test_local_retention(world: World) -> None:
    """The active chunk, two sealed ones, everything from the newest snapshot on, everything not uploaded."""
    world.store.down = True
    world.chunks(4)
    world.log.tick()
    assert world.files.chunks() == [0, 1, 2, 3, 4]  # 4 has the marker of the snapshot that was due
    world.store.down = False
    world.clock.advance(60)
    assert world.log.tick().removed == [0, 1]
    assert world.files.chunks() == [2, 3, 4]
    world.chunks(2)
    world.log.tick()
    assert world.files.chunks() == [4, 5]
    live = world.log.index
    assert same_state(world.reopen().index, live)


def test_old_snapshots_go_from_disk_and_from_tier_2_by_records(world: World) -> None:
    for _ in range(5):
        world.tell(3)
        world.log.snapshot()
        world.clock.advance(60)
        world.log.tick()
    assert world.files.snapshots() == [5, 4]
    assert sorted(world.objects.listing().snapshots) == [4, 5]
    assert world.log.index.own_deletes == {}
    kinds = [view.value() for chunk in all_chunks(world.files) for view in chunk.records() if view.segment_id == 0]
    assert r.Tier2DeleteQueued("manifest/7/snapshot_1.bin") in kinds
    assert r.Tier2Deleted("manifest/7/snapshot_1.bin") in kinds


def test_reconciliation_uploads_what_is_missing_and_names_what_is_lost(world: World) -> None:
    world.chunks(8)
    world.log.tick()
    here = [index for index in world.files.chunks() if index < 8]
    assert here
    gone = next(index for index in range(8) if index not in here)
    for index in (gone, here[-1]):
        world.store.delete(world.objects.chunk_key(index))
    assert set(objects_apart(world.files, world.objects)) == {gone, here[-1]}
    assert reconcile(world.files, world.objects, 0).rebuilt == [here[-1]]
    assert objects_apart(world.files, world.objects) == {gone: "it is neither on disk nor in tier 2"}
    assert here[-1] in reconcile(world.files, world.objects, 0).present


def test_a_damaged_object_is_found(world: World) -> None:
    world.chunks(2)
    world.log.tick()
    key = world.objects.chunk_key(0)
    data = bytearray(world.store.get(key))
    data[70] ^= 1
    world.store.put(key, bytes(data))
    assert objects_apart(world.files, world.objects) == {}, "its commit copy is sound"
    assert [(problem.rule, problem.where["chunk"]) for problem in verify(world.files, world.objects)] == [("L5", 0)]


@pytest.mark.parametrize("what", ["damaged", "missing"])
def test_a_quarantined_stream_is_mended_from_tier_2(world: World, what: str) -> None:
    world.chunks(3)
    world.log.upload()
    live = world.log.index
    world.log.close()
    path = Path(world.files.chunk(1))
    if what == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:99])
        with pytest.raises(ManifestIntegrityError):
            world.open()
    restore_chunk(world.files, world.objects, 1)
    assert local_facts(world.files.disk, world.files, 1).header.uploaded
    world.log = world.open()
    assert same_state(world.log.index, live)
    with pytest.raises(ObjectNotFound):
        restore_chunk(world.files, world.objects, 77)


def test_figures_have_the_seeds_names(world: World) -> None:
    world.chunks(3)
    world.clock.advance(12)
    named = world.log.figures().named()
    assert named["aof2.manifest_log.manifest_chunks_active"] == 3
    assert named["aof2.manifest_log.manifest_snapshot_age_seconds"] == 0, "there is no snapshot"
    assert {name.rpartition(".")[2] for name in named} >= {
        "manifest_replay_seconds",
        "manifest_crc_error_count",
        "manifest_upload_retries",
        "manifest_shadow_divergence",
    }
    collected = {metric.name for metric in StreamCollector(tuple, lambda: [world.log.figures()]).collect()}
    assert {"quire_manifest_chunks_active", "aof2_manifest_log_manifest_chunks_active"} <= collected


def test_the_age_of_a_snapshot_survives_a_restart(world: World) -> None:
    """It was counted from the opening."""
    world.chunks(1)
    world.log.snapshot()
    world.clock.advance(12)
    assert world.log.figures().manifest_snapshot_age_seconds == 12
    world.reopen()
    world.clock.advance(3)
    assert world.log.figures().manifest_snapshot_age_seconds == 15
