"""The writer: committed records are read back across any number of chunks and restarts, and a commit costs only what is
new.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import DiskFull, InvalidConfig, OutOfRange, StoreClosed, StoreLocked, StoreUnusable
from quire.core.settings import ManifestLogSettings
from quire.durable import checksums
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk
from quire.stream import mlog_records as r
from quire.stream import mlog_writer
from quire.stream.mlog_format import CHUNK_BYTES, COPY_BYTES, GROWTH_BYTES
from quire.stream.mlog_reader import LogPosition, ManifestLogReader
from quire.stream.mlog_verify import verify
from quire.testing.clock import ManualClock
from quire.testing.faults import Fault, FaultyDisk
from tests.stream.logs import ONE_OF_EACH, SMALL, VALUES, all_chunks, all_values, files_at, open_writer, opened


def test_committed_records_are_read_back(tmp_path: Path) -> None:
    files = files_at(tmp_path)
    with open_writer(files) as writer:
        for number, value in enumerate(ONE_OF_EACH, 1):
            writer.append(value, number, logical_offset=number * 10)
        assert writer.commit() == writer.position
    (chunk,) = all_chunks(files)
    views = list(chunk.records())
    assert [view.value() for view in views] == ONE_OF_EACH
    assert [view.segment_id for view in views] == list(range(1, 17))
    assert [view.logical_offset for view in views] == [number * 10 for number in range(1, 17)]
    assert chunk.snapshot_id == 8


def test_a_chunk_is_temporary_until_its_first_commit_and_never_sparse(tmp_path: Path) -> None:
    files = files_at(tmp_path)
    with open_writer(files) as writer:
        assert os.listdir(files.directory) == ["writer.lock"]
        writer.append(opened(1), 1)
        assert sorted(os.listdir(files.directory)) == ["0.mlog.tmp", "writer.lock"]
        assert files.chunks() == []
        assert all_values(files) == []
        writer.commit()
        assert sorted(os.listdir(files.directory)) == ["0.mlog", "writer.lock"]
        status = os.stat(files.chunk(0))
        assert status.st_size == SMALL.chunk_bytes
        assert status.st_blocks * 512 >= status.st_size
        assert stat.S_ISREG(status.st_mode)


@pytest.mark.parametrize("point", ["stream.mlog.copied", "stream.mlog.synced", "stream.mlog.header"])
def test_an_interrupted_seal_is_finished_before_the_next_chunk(tmp_path: Path, point: str) -> None:
    """The copy was sealed but the header was not, and this was reported as damage as soon as another chunk followed."""
    files = files_at(tmp_path)
    writer = open_writer(files)
    writer.append(opened(1), 1)
    writer.commit()
    with armed(point, "raise:EIO"), pytest.raises((OSError, StoreUnusable)):
        writer.rotate()
    writer.abandon()
    with open_writer(files) as writer:
        assert writer.position == LogPosition(1, CHUNK_BYTES)
        writer.append(opened(2), 2)
    assert files.chunks() == [0, 1]
    assert list(verify(files)) == []
    assert all_values(files) == [opened(1), opened(2)]


def test_rotation_boundaries_leave_no_gap(tmp_path: Path) -> None:
    """Matrix: records of varying sizes across many rotations; ordinals and checksums continue without gaps."""
    files, clock = files_at(tmp_path), ManualClock()
    values: list[r.Payload] = []
    with open_writer(files, clock) as writer:
        for number in range(600):
            value = r.UploadStarted("k" * (number * 37 % 900))
            values.append(value)
            writer.append(value, number + 1)
            if number % 5 == 0:
                writer.commit()
            if writer.needs_rotation():
                writer.rotate()
    chunks = all_chunks(files)
    assert len(chunks) > 10
    assert all(chunk.header.sealed for chunk in chunks[:-1])
    ordinals = [chunk.header.base_record + i for chunk in chunks for i in range(len(chunk.offsets))]
    assert ordinals == list(range(600))
    assert [view.value() for chunk in chunks for view in chunk.records()] == values
    for chunk in chunks:
        body = chunk.data[CHUNK_BYTES : chunk.header.committed_len]
        assert checksums.crc64(body) == chunk.header.chunk_crc64


@given(
    groups=st.lists(st.tuples(st.lists(VALUES, max_size=6), st.sampled_from(["commit", "rotate", "reopen", "lose"])))
)
def test_any_sequence_of_commits_rotations_and_restarts(
    tmp_path_factory: pytest.TempPathFactory, groups: list[tuple[list[r.Payload], str]]
) -> None:
    files, clock = files_at(tmp_path_factory.mktemp("log")), ManualClock()
    writer = open_writer(files, clock)
    appended: list[r.Payload] = []
    for values, step in groups:
        for value in values:
            writer.append(value, 1)
        if step == "commit":
            writer.commit()
        elif step == "rotate":
            writer.rotate()
        elif step == "reopen":
            writer.close()
            writer = open_writer(files, clock)
        else:
            writer.abandon()
            writer = open_writer(files, clock)
        appended += [] if step == "lose" else values
        assert writer.next_record == len(appended)
        assert all_values(files) == appended
    writer.close()


def test_a_restart_continues_in_the_last_chunk(tmp_path: Path) -> None:
    files = files_at(tmp_path)
    for number in range(5):
        with open_writer(files) as writer:
            writer.append(opened(number), 1)
    assert files.chunks() == [0]
    assert all_values(files) == [opened(number) for number in range(5)]


def test_the_timer_rotates_only_after_records_about_data(tmp_path: Path) -> None:
    files, clock = files_at(tmp_path), ManualClock()
    with open_writer(files, clock) as writer:
        writer.append(r.SnapshotMarker(0, 64, 1))
        writer.append(r.Tier2DeleteQueued("manifest/7/0.mlog"))
        writer.commit()
        clock.advance(10)
        assert not writer.needs_rotation()
        writer.append(opened(1), 1)
        writer.commit()
        assert not writer.needs_rotation()
        clock.advance(0.26)
        assert writer.needs_rotation()
        assert writer.rotate() == 0
        assert writer.rotate() is None
        assert not writer.needs_rotation()
        assert writer.position == LogPosition(1, CHUNK_BYTES)


def test_a_large_record_makes_its_chunk_grow_in_steps(tmp_path: Path) -> None:
    files = files_at(tmp_path)
    large = r.UploadDone("k" * 60_000, "e" * 60_000)
    with open_writer(files) as writer:
        writer.append(opened(1), 1)
        writer.commit()
        writer.append(large, 1)
        assert writer.file_bytes == SMALL.chunk_bytes + 2 * GROWTH_BYTES
        assert writer.needs_rotation()
        writer.append(opened(2), 1)
    assert os.path.getsize(files.chunk(1)) == SMALL.chunk_bytes + 2 * GROWTH_BYTES
    assert all_values(files) == [opened(1), large, opened(2)]


def test_a_record_that_does_not_fit_seals_the_chunk(tmp_path: Path) -> None:
    """The chunk grew to its limit and then refused the record: the caller had to rotate."""
    files = files_at(tmp_path)
    large = r.UploadDone("k" * 65_000, "e" * 65_000)
    with open_writer(files) as writer:
        writer.append(opened(1), 1)
        for _ in range(9):
            writer.append(large, 1)
        assert writer.position.chunk_index == 9, "one large record per chunk"
    assert all_values(files) == [opened(1), *[large] * 9]


def test_a_commit_checksums_only_new_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []

    def counting_crc(data: bytes | bytearray | memoryview, value: int = 0, /) -> int:
        checked.append(len(data))
        return checksums.crc64(data, value)

    monkeypatch.setattr(mlog_writer, "crc64", counting_crc)
    with open_writer(files_at(tmp_path)) as writer:
        for number in range(100):
            writer.append(opened(number), 1)
            checked.clear()
            writer.commit()
            assert checked == [56]


def test_timestamps_never_decrease_although_the_clock_does(tmp_path: Path) -> None:
    files, clock = files_at(tmp_path), ManualClock()
    seconds = [5, -3600, 1, -10, 7200]
    for jump in seconds:
        with open_writer(files, clock) as writer:
            clock.jump(jump)
            writer.append(opened(1), 1)
    stamps = [view.timestamp_ms for chunk in all_chunks(files) for view in chunk.records()]
    assert stamps == sorted(stamps)
    assert len(stamps) == 5


def test_a_second_writer_on_a_log_is_refused(tmp_path: Path) -> None:
    files = files_at(tmp_path)
    with open_writer(files) as writer:
        with pytest.raises(StoreLocked):
            open_writer(files)
        writer.append(opened(1), 1)
    with open_writer(files) as writer:
        writer.append(opened(2), 1)
    assert all_values(files) == [opened(1), opened(2)]


def test_a_closed_writer_refuses(tmp_path: Path) -> None:
    writer = open_writer(files_at(tmp_path))
    writer.append(opened(1), 1)
    writer.close()
    writer.close()
    for step in (lambda: writer.append(opened(1), 1), writer.commit, writer.rotate):
        with pytest.raises(StoreClosed):
            step()


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.LOST_ANSWER])
def test_a_doubtful_commit_stops_the_writer(tmp_path: Path, fault: Fault) -> None:
    disk = FaultyDisk(OsDisk(), fault, fail_at=4, operation="sync")  # two syncs create the chunk, two commit
    files = files_at(tmp_path, disk)
    writer = open_writer(files)
    writer.append(opened(1), 1)
    writer.commit()
    writer.append(opened(2), 1)
    with pytest.raises(StoreUnusable):
        writer.commit()
    for step in (lambda: writer.append(opened(3), 1), writer.commit, writer.rotate):
        with pytest.raises(StoreUnusable):
            step()
    with pytest.raises(StoreUnusable):
        writer.close()
    writer.close()
    with open_writer(files_at(tmp_path)) as again:
        assert all_values(files)[:1] == [opened(1)]
        again.append(opened(4), 1)


@pytest.mark.parametrize("fail_at", [1, 2])
def test_a_full_disk_while_growing_breaks_nothing(tmp_path: Path, fail_at: int) -> None:
    disk = FaultyDisk(OsDisk(), Fault.ENOSPC, fail_at=fail_at, operation="allocate")
    files = files_at(tmp_path, disk)
    large = r.UploadStarted("k" * 30_000)
    with open_writer(files) as writer:
        for value in (opened(1), large):
            try:
                writer.append(value, 1)
            except DiskFull:
                writer.append(value, 1)
        assert disk.fired
    assert all_values(files_at(tmp_path)) == [opened(1), large]


def test_fields_that_do_not_fit_are_refused_and_leave_no_trace(tmp_path: Path) -> None:
    files = files_at(tmp_path)
    with open_writer(files) as writer:
        with pytest.raises(OutOfRange):
            writer.append(opened(1), 2**64)
        for payload in (b"", b"123"):
            with pytest.raises(OutOfRange):
                writer.append(r.UnknownRecord(99, payload), 1)
        writer.append(r.UnknownRecord(4711, b"12345678"), 1)
    assert all_values(files) == [r.UnknownRecord(4711, b"12345678")]


def test_a_cursor_reads_in_bounded_steps_and_follows_the_writer(tmp_path: Path) -> None:
    files = files_at(tmp_path)
    with open_writer(files) as writer:
        cursor = ManifestLogReader(files).cursor()
        assert cursor.read(10) == []
        for number in range(700):
            writer.append(opened(number), 1)
            if writer.needs_rotation():
                writer.rotate()
        writer.commit()
        values: list[r.Payload] = []
        while step := cursor.read(33):
            assert len(step) <= 33
            values += [view.value() for view in step]
        assert values == [opened(number) for number in range(700)]
        writer.rotate()
        assert cursor.read(5) == []
        writer.append(opened(1000), 1)
        writer.commit()
        assert [view.value() for view in cursor.read(5)] == [opened(1000)]


def test_views_of_records_copy_nothing(tmp_path: Path) -> None:
    files = files_at(tmp_path)
    with open_writer(files) as writer:
        for number, value in enumerate(ONE_OF_EACH, 1):
            writer.append(value, number)
    (chunk,) = all_chunks(files)
    for view in chunk.records():
        assert view.payload.obj is chunk.data
        assert view.payload.readonly
        assert bytes(view.payload) == r.encode(view.value())


def test_a_marker_that_did_not_fit_is_not_recorded(tmp_path: Path) -> None:
    disk = FaultyDisk(OsDisk(), Fault.ENOSPC, fail_at=1, operation="allocate")
    with open_writer(files_at(tmp_path, disk)) as writer:
        for marker in (r.SnapshotMarker(0, 64, 9), r.SnapshotMarker(0, 64, 2**64)):
            with pytest.raises((DiskFull, OutOfRange)):
                writer.append(marker)
        assert writer.snapshot_id == 0
        writer.append(r.SnapshotMarker(0, 64, 3))
        assert writer.snapshot_id == 3
    assert all_chunks(files_at(tmp_path))[0].snapshot_id == 3


def test_the_defaults_are_those_of_the_design_document() -> None:
    settings = ManifestLogSettings()
    assert (settings.mode, settings.chunk_bytes) == ("on", 256 << 10)
    assert (settings.rotation_seconds, settings.sealed_kept) == (0.25, 2)
    assert settings.bundle_seconds == 7 * 86_400
    assert GROWTH_BYTES == 64 << 10


@pytest.mark.parametrize("seconds", [0.05, 0.25, 3.0])
def test_the_timer_follows_the_settings(tmp_path: Path, seconds: float) -> None:
    clock, settings = ManualClock(), ManifestLogSettings(rotation_seconds=seconds)
    with open_writer(files_at(tmp_path), clock, settings) as writer:
        writer.append(opened(1), 1)
        writer.commit()
        clock.advance(seconds * 0.9)
        assert not writer.needs_rotation()
        writer.append(opened(2), 1)
        writer.commit()  # the timer counts from the last commit
        clock.advance(seconds * 0.9)
        assert not writer.needs_rotation()
        clock.advance(seconds * 0.2)
        assert writer.needs_rotation()


def test_a_chunk_of_the_smallest_size_has_room() -> None:
    assert SMALL.chunk_bytes - COPY_BYTES > SMALL.record_bytes_max
    assert ManifestLogSettings().chunk_bytes == 256 << 10


@pytest.mark.parametrize(
    "setting",
    [
        {"chunk_bytes": 8 << 10},
        {"chunk_bytes": 2 << 20},
        {"chunk_bytes": (16 << 10) + 4},
        {"record_bytes_max": 10},
        {"record_bytes_max": 200 << 10},
        {"rotation_seconds": 0},
        {"snapshot_chunks": 0},
        {"snapshots_kept": 0},
        {"sealed_kept": -1},
        {"bundle_seconds": 0},
    ],
)
def test_invalid_settings_are_refused_by_name(setting: dict[str, int]) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(setting))):
        ManifestLogSettings(**setting)  # type: ignore[arg-type]
