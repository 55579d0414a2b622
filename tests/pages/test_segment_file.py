"""The segment as a file: durable before it is named, verified when read, and every failure is reported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from quire.core.errors import (
    AlreadyExists,
    ChecksumMismatch,
    Corruption,
    DiskFull,
    InvalidInput,
    OutOfRange,
    QuireError,
    ReadOnly,
    StorageFault,
    StoreUnusable,
)
from quire.durable.files import Disk, OsDisk, OsFile
from quire.pages.segment import HEADER_BYTES, PageWrite
from quire.pages.segment_file import IndexWriter, SegmentFile
from quire.pages.segment_scan import entries_of, parse_heads, recover_segment
from quire.testing.crashdisk import CrashDisk, drop_all
from quire.testing.faults import Fault, FaultyDisk, PowerCut, each_fault

PAGE = b"\x07" * 512
FILE_BYTES = 32 << 10


def create(disk: Disk, path: str, *, page_size: int = 512, file_bytes: int = FILE_BYTES) -> SegmentFile:
    return SegmentFile.create(
        disk, path, db_id=7, segment_id=3, first_lsn=100, page_size=page_size, file_bytes=file_bytes, created_at_ms=5
    )


def name(folder: Path | str) -> str:
    return os.path.join(folder, "00000003.seg")


def pages(*fills: int | None, page_size: int = 512) -> list[PageWrite]:
    return [(number, None if fill is None else bytes([fill]) * page_size, 0, 0) for number, fill in enumerate(fills)]


def damage(path: str, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


# ── creation ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_new_segment_is_a_header_and_zeros(tmp_path: Path) -> None:
    with create(OsDisk(), name(tmp_path)) as segment:
        data = Path(segment.path).read_bytes()
        assert len(data) == FILE_BYTES
        assert data[:HEADER_BYTES] == segment.header.encode()
        assert not any(data[HEADER_BYTES:])
        assert (segment.used, segment.room, segment.last_lsn) == (0, segment.header.geometry.capacity, 99)
    with SegmentFile.open(OsDisk(), name(tmp_path), db_id=7, segment_id=3) as again:
        assert again.header == segment.header


def test_header_and_name_are_durable_before_the_first_frame(tmp_path: Path) -> None:
    disk = CrashDisk(str(tmp_path / "live"))
    create(disk, name(disk.root)).close()
    after = disk.crash(str(tmp_path / "after"), drop_all)
    with SegmentFile.open(after, name(after.root), db_id=7, segment_id=3) as segment:
        assert recover_segment(segment).cut == 0


def test_an_existing_file_is_not_touched(tmp_path: Path) -> None:
    Path(name(tmp_path)).write_bytes(b"precious")
    with pytest.raises(AlreadyExists):
        create(OsDisk(), name(tmp_path))
    assert Path(name(tmp_path)).read_bytes() == b"precious"


@pytest.mark.parametrize("fault", [Fault.ENOSPC, Fault.EIO, Fault.SHORT_WRITE])
def test_a_segment_that_cannot_be_created_leaves_nothing(tmp_path: Path, fault: Fault) -> None:
    expected = StorageFault if fault is Fault.EIO else DiskFull
    for number, disk in enumerate(each_fault(OsDisk, fault)):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            create(disk, name(folder)).close()
        except expected:
            assert list(folder.iterdir()) == []
        else:
            assert not disk.fired


def test_every_segment_has_its_own_salt(tmp_path: Path) -> None:
    salts = set()
    for number in range(5):
        with create(OsDisk(), str(tmp_path / str(number))) as segment:
            salts.add(segment.header.salt)
    assert len(salts) == 5


# ── writing and reading ───────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("page_size", [512, 4096, 16384, 65536])
def test_what_was_appended_is_read(tmp_path: Path, page_size: int) -> None:
    with create(OsDisk(), name(tmp_path), page_size=page_size, file_bytes=1 << 20) as segment:
        first = segment.append(pages(1, None, 3, page_size=page_size), db_size=3, commit_ms=8)
        assert (len(first), segment.used, segment.last_lsn) == (3 * 64, 3, 102)
        assert segment.sync() == segment.last_lsn == 102
        second = segment.append([(1, b"\x09" * page_size, 101, 3)], db_size=3, durable_upto_lsn=102, commit_ms=9)
        assert (len(second), segment.last_lsn, segment.used) == (64, 103, 4)
        assert not any(segment.read_index()), "only publication writes entries"
        entries = entries_of(segment.header, parse_heads(first + second)).tobytes()
        with IndexWriter(OsDisk(), segment.path, segment.header) as index:
            index.write(0, entries)
        assert segment.read_index(4) == entries
        for reader in (segment, SegmentFile.open(OsDisk(), name(tmp_path))):
            fills = [reader.read_frame(number, page=page) for number, page in enumerate([0, 1, 2, 1])]
            assert fills == [bytes([fill]) * page_size for fill in (1, 0, 3, 9)]
            assert (head := reader.read_head(3)).durable_upto_lsn == 102
            assert (head.prev_lsn, head.prev_segment, head.commit_ms) == (101, 3, 9)
        reader.close()


def test_a_large_transaction_is_written_in_slices_and_reads_as_one(tmp_path: Path) -> None:
    with create(OsDisk(), name(tmp_path), page_size=65536, file_bytes=4 << 20) as segment:
        fills = [*range(1, 40), None, *range(40, 60)]
        heads = segment.append(pages(*fills, page_size=65536), db_size=60, durable_upto_lsn=9, commit_ms=4)
        assert (len(heads), segment.used) == (60 * 64, 60)
        segment.append(pages(7, page_size=65536), db_size=60)
        scan = recover_segment(segment)
        assert scan.commits["frame_no"].tolist() == [59, 60]
        assert [segment.read_frame(number)[0] for number in range(60)] == [fill or 0 for fill in fills]
        assert scan.entries.tobytes()[: 60 * 48] == entries_of(segment.header, parse_heads(heads)).tobytes()


def test_a_full_segment_takes_no_more_frames_and_the_rest_goes_to_the_next(tmp_path: Path) -> None:
    with create(OsDisk(), name(tmp_path)) as segment:
        writes = pages(*(number % 200 for number in range(segment.room + 2)))
        with pytest.raises(OutOfRange):
            segment.append(writes, db_size=99)
        room = segment.room
        segment.append(writes[:room], db_size=0)
        assert (segment.used, segment.room) == (room, 0)
        with pytest.raises(OutOfRange):
            segment.append(writes[room:], db_size=99)
        scan = recover_segment(segment)
        assert (scan.cut, scan.good) == (0, room)
        with SegmentFile.create(
            OsDisk(),
            str(tmp_path / "next"),
            db_id=7,
            segment_id=4,
            first_lsn=segment.last_lsn + 1,
            page_size=512,
            file_bytes=FILE_BYTES,
        ) as next_segment:
            next_segment.append(writes[room:], db_size=99)
            assert recover_segment(next_segment).entries["lsn"].tolist() == [100 + room, 101 + room]


def test_positions_outside_the_segment_are_refused(tmp_path: Path) -> None:
    with create(OsDisk(), name(tmp_path)) as segment:
        capacity = segment.header.geometry.capacity
        for number in (-1, capacity):
            with pytest.raises(OutOfRange):
                segment.read_frame(number)
            with pytest.raises(OutOfRange):
                segment.read_raw(number, 1)
        for count in (-1, capacity + 1):
            with pytest.raises(OutOfRange):
                segment.read_index(count)


def test_a_damaged_frame_is_reported(tmp_path: Path) -> None:
    with create(OsDisk(), name(tmp_path)) as segment:
        segment.append(pages(1, 2, 3), db_size=3)
        offset = segment.header.geometry.frame_offset(1)
        damage(segment.path, offset + 100)
        assert segment.read_frame(0)
        with pytest.raises(ChecksumMismatch) as caught:
            segment.read_frame(1, page=1)
        where = caught.value.where
        assert (where["path"], where["segment_id"], where["frame"], where["offset"]) == (segment.path, 3, 1, offset)
        assert "quire verify" in caught.value.hint


def test_a_frame_that_was_never_written_or_is_another_page_is_refused(tmp_path: Path) -> None:
    with create(OsDisk(), name(tmp_path)) as segment:
        segment.append(pages(1, 2), db_size=2)
        with pytest.raises(ChecksumMismatch):
            segment.read_frame(2)
        with pytest.raises(ChecksumMismatch) as caught:
            segment.read_frame(1, page=0)
        assert (caught.value.where["page"], caught.value.where["found_page"]) == (0, 1)


def test_a_trimmed_copy_can_be_read_and_a_shorter_one_is_an_error(tmp_path: Path) -> None:
    with create(OsDisk(), name(tmp_path)) as segment:
        segment.append(pages(1, 2), db_size=2)
        used = recover_segment(segment).used_bytes
        index_end = segment.header.geometry.frames_offset
    os.truncate(name(tmp_path), used)
    with SegmentFile.open(OsDisk(), name(tmp_path)) as copy:
        assert copy.read_frame(1) == b"\x02" * 512
        assert recover_segment(copy).cut == 2
    os.truncate(name(tmp_path), used - 1)
    with SegmentFile.open(OsDisk(), name(tmp_path)) as copy, pytest.raises(ChecksumMismatch):
        copy.read_frame(1)
    os.truncate(name(tmp_path), index_end - 1)
    with pytest.raises(Corruption):
        SegmentFile.open(OsDisk(), name(tmp_path))
    os.truncate(name(tmp_path), 10)
    with pytest.raises(Corruption):
        SegmentFile.open(OsDisk(), name(tmp_path))


def test_a_reopened_segment_is_never_appended_to(tmp_path: Path) -> None:
    create(OsDisk(), name(tmp_path)).close()
    with SegmentFile.open(OsDisk(), name(tmp_path)) as segment:
        assert segment.room == 0
        with pytest.raises(ReadOnly):
            segment.append(pages(1), db_size=1)
        with pytest.raises(ReadOnly):
            segment.sync()


def test_refused_input_changes_nothing(tmp_path: Path) -> None:
    with create(OsDisk(), name(tmp_path), page_size=65536, file_bytes=4 << 20) as segment:
        before = Path(segment.path).read_bytes()
        invalid: list[Sequence[PageWrite]] = [
            [],
            [(0, b"short", 0, 0)],
            [(-1, None, 0, 0)],
            [*pages(*range(40), page_size=65536), (0, b"short", 0, 0)],
        ]
        for writes in invalid:
            with pytest.raises(InvalidInput):
                segment.append(writes, db_size=1)
        assert Path(segment.path).read_bytes() == before
        segment.append(pages(1, page_size=65536), db_size=1)
        assert segment.used == 1


# ── recycling ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def recycle(disk: Disk, folder: str | Path, *, db_id: int = 7, first_lsn: int = 500) -> SegmentFile:
    path = os.path.join(folder, "00000009.seg")
    return SegmentFile.recycle(disk, name(folder), path, db_id=db_id, segment_id=9, first_lsn=first_lsn)


@pytest.mark.parametrize("page_size", [512, 8192])
def test_a_recycled_file_keeps_its_size_and_nothing_else(tmp_path: Path, page_size: int) -> None:
    with create(OsDisk(), name(tmp_path), page_size=page_size) as previous:
        previous.append(pages(1, 2, 3, page_size=page_size), db_size=3)
    with recycle(OsDisk(), tmp_path) as segment:
        assert segment.path.endswith("00000009.seg")
        assert os.listdir(tmp_path) == ["00000009.seg"]
        assert os.path.getsize(segment.path) == FILE_BYTES
        assert segment.header.geometry == previous.header.geometry
        assert segment.header.salt != previous.header.salt
        assert (segment.header.segment_id, segment.header.first_lsn, segment.used) == (9, 500, 0)
        assert recover_segment(segment).cut == 0
        with pytest.raises(ChecksumMismatch):
            segment.read_frame(0)
        segment.append([(5, None, 0, 0)], db_size=6)
        scan = recover_segment(segment)
        assert (scan.cut, scan.cut_frames) == (1, 0)
        assert segment.read_frame(0) == bytes(page_size), "a zero frame must not show the previous page"


def test_a_reader_of_the_previous_segment_sees_no_page_of_the_new_one(tmp_path: Path) -> None:
    with create(OsDisk(), name(tmp_path)) as previous:
        previous.append(pages(1, 2, 3), db_size=3)
        with recycle(OsDisk(), tmp_path) as segment:
            segment.append(pages(7, 8), db_size=2)
            for number in (0, 1):
                with pytest.raises(ChecksumMismatch):
                    previous.read_frame(number)


def test_only_a_complete_file_of_the_same_database_is_recycled(tmp_path: Path) -> None:
    create(OsDisk(), name(tmp_path)).close()
    before = Path(name(tmp_path)).read_bytes()
    with pytest.raises(InvalidInput):
        recycle(OsDisk(), tmp_path, db_id=8)
    with pytest.raises(InvalidInput):
        recycle(OsDisk(), tmp_path, first_lsn=100)
    assert Path(name(tmp_path)).read_bytes() == before
    os.truncate(name(tmp_path), FILE_BYTES // 2)
    with pytest.raises(InvalidInput):
        recycle(OsDisk(), tmp_path)
    (tmp_path / "00000009.seg").write_bytes(b"precious")
    with pytest.raises(AlreadyExists):
        recycle(OsDisk(), tmp_path)
    (tmp_path / "00000009.seg").unlink()
    damage(name(tmp_path), 20)
    with pytest.raises(Corruption):
        recycle(OsDisk(), tmp_path)


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.LOST_ANSWER])
def test_a_recycling_that_fails_raises_and_loses_no_other_file(tmp_path: Path, fault: Fault) -> None:
    folders = iter(tmp_path / str(number) for number in range(100))

    def prepared() -> Disk:
        folder = next(folders)
        folder.mkdir()
        create(OsDisk(), name(folder)).close()
        return OsDisk()

    for number, disk in enumerate(each_fault(prepared, fault)):
        try:
            recycle(disk, tmp_path / str(number)).close()
        except QuireError:
            assert disk.fired
        assert len(os.listdir(tmp_path / str(number))) == 1


# ── doubtful writes ───────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("fault", [Fault.ENOSPC, Fault.EIO, Fault.SHORT_WRITE, Fault.LOST_ANSWER])
@pytest.mark.parametrize(("operation", "fail_at"), [("write", 1), ("sync", 1)])
def test_after_a_doubtful_append_or_sync_nothing_more_is_accepted(
    tmp_path: Path, fault: Fault, operation: str, fail_at: int
) -> None:
    created = create(OsDisk(), name(tmp_path))
    disk = FaultyDisk(OsDisk(), fault, fail_at=fail_at, operation=operation)
    segment = SegmentFile(disk.open(name(tmp_path)), created.header, writable=True)
    if operation == "sync":
        segment.append(pages(1), db_size=1)
    with pytest.raises(StoreUnusable) as first:
        segment.sync() if operation == "sync" else segment.append(pages(1), db_size=1)
    assert isinstance(first.value.__cause__, StorageFault)
    assert first.value.where["segment_id"] == 3
    for later_call in (lambda: segment.append(pages(1), db_size=1), lambda: segment.sync()):
        with pytest.raises(StoreUnusable):
            later_call()
    segment.close()
    created.close()


def test_a_slice_that_fails_leaves_no_transaction(tmp_path: Path) -> None:
    created = create(OsDisk(), name(tmp_path), page_size=65536, file_bytes=4 << 20)
    disk = FaultyDisk(OsDisk(), Fault.EIO, fail_at=2, operation="write")
    with SegmentFile(disk.open(name(tmp_path)), created.header, writable=True) as segment:
        with pytest.raises(StoreUnusable):
            segment.append(pages(*range(40), page_size=65536), db_size=40)
        assert segment.used == 0
    with created:
        scan = recover_segment(created)
        assert (scan.cut, scan.good) == (0, 15), "a slice without its commit"


def test_power_loss_is_not_turned_into_an_error(tmp_path: Path) -> None:
    created = create(OsDisk(), name(tmp_path))
    disk = FaultyDisk(OsDisk(), Fault.POWER_CUT, fail_at=1, operation="write")
    with created, SegmentFile(disk.open(name(tmp_path)), created.header, writable=True) as segment:
        with pytest.raises(PowerCut):
            segment.append(pages(1), db_size=1)
        with pytest.raises(StoreUnusable):
            segment.append(pages(1), db_size=1)


def test_entries_are_durable_when_they_are_written(tmp_path: Path) -> None:
    """Rule 2 of publication.py: a commit of `indexed_upto_lsn` may rely on the region."""
    disk = CrashDisk(str(tmp_path / "live"))
    with create(disk, name(disk.root)) as segment:
        heads = segment.append(pages(1, 2), db_size=2)
        segment.sync()
        entries = entries_of(segment.header, parse_heads(heads)).tobytes()
        with IndexWriter(disk, segment.path, segment.header) as index:
            index.write(0, entries)
    after = disk.crash(str(tmp_path / "after"), drop_all)
    with SegmentFile.open(after, name(after.root)) as segment:
        assert segment.read_index(2) == entries
        assert recover_segment(segment, indexed_upto_lsn=101).cut == 2


def test_entries_are_only_written_into_the_region(tmp_path: Path) -> None:
    with create(OsDisk(), name(tmp_path)) as segment:
        before = Path(segment.path).read_bytes()
        capacity = segment.header.geometry.capacity
        with IndexWriter(OsDisk(), segment.path, segment.header) as index:
            for first, count in ((-1, 1), (capacity, 1), (capacity - 1, 2)):
                with pytest.raises(OutOfRange):
                    index.write(first, bytes(48 * count))
        assert Path(segment.path).read_bytes() == before


def test_recovery_syncs_before_it_concludes(tmp_path: Path) -> None:
    """Frames of a killed process are readable but not on disk; a later crash must not lose what recovery publishes."""
    disk = CrashDisk(str(tmp_path / "live"))
    create(disk, name(disk.root)).append(pages(1, 2), db_size=2)
    with SegmentFile.open(disk, name(disk.root)) as segment:
        assert recover_segment(segment).cut == 2
    after = disk.crash(str(tmp_path / "after"), drop_all)
    with SegmentFile.open(after, name(after.root)) as segment:
        assert recover_segment(segment).cut == 2


def test_files_are_closed_when_opening_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(name(tmp_path)).write_bytes(b"no segment" * 20)
    closed: list[str] = []
    close = OsFile.close

    def record_close(file: OsFile) -> None:
        closed.append(file.path)
        close(file)

    monkeypatch.setattr(OsFile, "close", record_close)
    with pytest.raises(Corruption):
        SegmentFile.open(OsDisk(), name(tmp_path))
    assert closed == [name(tmp_path)]


def test_writing_and_reading_frames_imports_no_numpy() -> None:
    code = "import sys; import quire.pages.segment_file; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
