"""Lease files: their bytes, their holders, and when the owner removes them."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import threading
import time
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import Corruption, FormatTooNew, InvalidInput, NotWritable, QuireError
from quire.core.limits import MIB
from quire.durable.checksums import crc64
from quire.durable.files import OsDisk, OsFile
from quire.durable.names import LeaseFile
from quire.pages.leasefiles import (
    CRC_BYTES,
    HEAD,
    MAGIC,
    STAMP,
    STAMP_BYTES,
    FileLease,
    LeaseFiles,
    LeaseRecord,
    decode,
    renewed_ms,
)
from quire.pages.readers import LEASE_SECONDS
from quire.testing.clock import ManualClock
from tests.hostile import FALSE_LENGTHS, memory_limit, numbers

DISK = OsDisk()
PAGE = Path(__file__).parents[2] / "docs" / "formats" / "lease.md"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def files(tmp_path: Path, clock: ManualClock) -> LeaseFiles:
    return LeaseFiles(str(tmp_path), DISK, clock)


def take(root: Path, clock: ManualClock, db_id: int = 1, lsn: int = 7, **tags: str) -> FileLease:
    return FileLease.take(DISK, clock, str(root), db_id=db_id, lsn=lsn, tags=tags)


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root / "readers"))


records = st.builds(
    LeaseRecord,
    reader=st.uuids(),
    db_id=st.integers(1, 2**32 - 1),
    lsn=st.integers(0, 2**64 - 1),
    pid=st.integers(0, 2**32 - 1),
    opened_ms=st.integers(0, 2**64 - 1),
    tags=st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=4),
)


# ── bytes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
@given(records, st.integers(0, 2**63))
def test_what_is_encoded_is_decoded(record: LeaseRecord, ms: int) -> None:
    data = record.encode(ms)
    assert decode(record.reader, data) == record
    assert renewed_ms(record, data[48:64]) == ms


@given(records, st.data())
def test_a_changed_byte_is_detected_anywhere(record: LeaseRecord, data: st.DataObject) -> None:
    body = bytearray(record.encode(5))
    offset = data.draw(st.integers(0, len(body) - 1))
    body[offset] ^= data.draw(st.integers(1, 255))
    if 48 <= offset < 64:
        assert decode(record.reader, bytes(body)) == record, "the stamp may be partly written"
        assert renewed_ms(record, bytes(body[48:64])) == 0
    else:
        with pytest.raises((Corruption, FormatTooNew)):
            decode(record.reader, bytes(body))


@given(records, st.data())
def test_a_truncated_or_copied_lease_is_refused(record: LeaseRecord, data: st.DataObject) -> None:
    body = record.encode(5)
    with pytest.raises(Corruption):
        decode(record.reader, body[: data.draw(st.integers(0, len(body) - 1))])
    with pytest.raises(Corruption):
        decode(uuid.uuid4(), body)


@given(
    fields=st.tuples(numbers(16), numbers(16), numbers(32), numbers(64), numbers(64), numbers(32)),
    length=st.none() | numbers(32),
    tags=st.sampled_from(FALSE_LENGTHS) | st.binary(max_size=60),
)
def test_a_signed_lease_is_refused_or_read_within_bounds(
    fields: tuple[int, ...], length: int | None, tags: bytes
) -> None:
    """Valid checksums prove nothing about the numbers."""
    reader = uuid.UUID(int=5)
    head = HEAD.pack(MAGIC, *fields, len(tags) if length is None else length, 0)[:-CRC_BYTES]
    crc = crc64(tags, crc64(head, crc64(reader.bytes)))
    data = head + crc.to_bytes(CRC_BYTES, "little") + bytes(STAMP_BYTES) + tags
    with memory_limit(16 * MIB):
        try:
            decode(reader, data)
        except QuireError:
            pass


def test_the_page_describes_these_bytes() -> None:
    text = PAGE.read_text("utf-8")
    fields = [int(size) for size in re.findall(r"^\| \w+ \| \d+ \| (\d+) \|", text, re.MULTILINE)]
    assert sum(fields) == HEAD.size + STAMP.size == 64
    record = LeaseRecord(
        reader=uuid.UUID("00010203-0405-0607-0809-0a0b0c0d0e0f"),
        db_id=7,
        lsn=1000,
        pid=4242,
        opened_ms=1_750_000_000_000,
        tags={"who": "report"},
    )
    shown = bytes.fromhex("".join(re.findall(r"^[0-9a-f]{4}  ((?:[0-9a-f]{2} ?)+)$", text, re.MULTILINE)))
    assert shown == record.encode(1_750_000_005_000)


def test_tags_that_are_too_long_are_refused(tmp_path: Path, clock: ManualClock) -> None:
    with pytest.raises(InvalidInput, match="too long"):
        take(tmp_path, clock, note="x" * 5000)
    assert names(tmp_path) == []


# ── holding ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_lease_is_seen_while_it_is_held_and_leaves_nothing(
    tmp_path: Path, clock: ManualClock, files: LeaseFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    lease = take(tmp_path, clock, who="me")
    assert files.look() == [lease.record]
    assert files.of(1) == [lease.record]
    assert files.of(2) == []
    assert lease.record.pid == os.getpid()
    lease.close()
    lease.close()
    assert not lease.is_held
    assert not lease.beat()
    assert files.look() == []
    assert names(tmp_path) == []
    assert capsys.readouterr().err == "", "a clean end logs no warning"


def test_without_a_directory_there_are_no_leases(tmp_path: Path, clock: ManualClock) -> None:
    assert LeaseFiles(str(tmp_path / "nowhere"), DISK, clock).look() == []


def test_a_lease_that_is_garbage_collected_is_released(tmp_path: Path, clock: ManualClock, files: LeaseFiles) -> None:
    lease = take(tmp_path, clock)
    del lease
    assert files.look() == []


def test_a_lease_whose_process_ended_is_removed_at_once(
    tmp_path: Path, clock: ManualClock, files: LeaseFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    lease = take(tmp_path, clock, who="gone")
    lease._forget()  # as the kernel does when the process ends
    assert names(tmp_path) != []
    assert files.look() == []
    assert names(tmp_path) == []
    log = capsys.readouterr().err
    assert "reader.heartbeat_lost" in log
    assert "its process has ended" in log
    assert "gone" in log


def test_a_silent_lease_is_removed_after_its_duration_by_the_owners_clock(
    tmp_path: Path, clock: ManualClock, files: LeaseFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    silent, alive = take(tmp_path, clock, lsn=1), take(tmp_path, clock, lsn=2)
    clock.advance(1_000)
    assert len(files.look()) == 2, "the owner does not know their age yet"
    clock.jump(-500_000)
    clock.advance(LEASE_SECONDS - 1)
    assert alive.beat()
    assert len(files.look()) == 2
    clock.advance(1)
    assert files.look() == [alive.record]
    assert "it was silent" in capsys.readouterr().err
    assert not silent.is_held
    assert not silent.beat()
    assert alive.is_held


def test_a_lease_whose_file_was_moved_is_not_held(tmp_path: Path, clock: ManualClock) -> None:
    """The owner checks names; a file that was moved holds nothing, and its reader must notice."""
    lease = FileLease.take(OsDisk(), clock, str(tmp_path), db_id=7, lsn=40, tags={})
    assert lease.beat()
    os.rename(lease.path, lease.path + ".moved")
    assert not lease.is_held
    assert not lease.beat()
    lease.close()


def test_a_lease_that_is_closed_during_a_heartbeat_is_closed_after_it(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: the heartbeat used the file that the holder had just closed. Its thread ended with an `AttributeError`, and all
    leases of the process expired 30 seconds later."""
    lease, stat = take(tmp_path, clock), os.stat
    closing = threading.Thread(target=lease.close)

    def close_meanwhile(path: str) -> os.stat_result:
        if not closing.ident:
            closing.start()
            closing.join(0.2)
        return stat(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", close_meanwhile)
        lease.beat()
    closing.join()
    assert not lease.beat()
    assert not lease.was_lost
    assert names(tmp_path) == []


def test_a_stamp_changes_even_if_the_clock_stands_still_or_goes_back(tmp_path: Path, clock: ManualClock) -> None:
    lease = take(tmp_path, clock)
    stamps = {Path(lease.path).read_bytes()[48:64]}
    for step in (0, -10, -10, 0):
        clock.jump(step)
        lease.beat()
        stamps.add(Path(lease.path).read_bytes()[48:64])
    assert len(stamps) == 5


def test_an_unreadable_held_lease_holds_everything_until_it_is_silent(
    tmp_path: Path, clock: ManualClock, files: LeaseFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "readers").mkdir()
    path = tmp_path / LeaseFile(reader=uuid.uuid4()).path
    path.write_bytes(b"from a newer quire")
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for db_id in (1, 99):
            assert [lease.lsn for lease in files.of(db_id)] == [0]
        assert capsys.readouterr().err.count("reader.lease_unreadable") == 1, "logged once"
        clock.advance(LEASE_SECONDS)
        assert files.look() == []
    assert names(tmp_path) == []


def test_foreign_files_are_kept_and_unfinished_ones_of_ended_processes_removed(
    tmp_path: Path, clock: ManualClock, files: LeaseFiles
) -> None:
    lease = take(tmp_path, clock)
    (tmp_path / "readers" / "README").write_text("mine")
    dead = tmp_path / "readers" / f"{uuid.uuid4()}.lease.tmp"
    dead.write_bytes(b"")
    making = tmp_path / "readers" / f"{uuid.uuid4()}.lease.tmp"
    making.write_bytes(b"")
    with making.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert files.look() == [lease.record]
        assert making.exists()
        assert not dead.exists()
    assert (tmp_path / "readers" / "README").exists()


def test_a_lease_that_the_owner_sweeps_too_early_is_taken_again(
    tmp_path: Path, clock: ManualClock, files: LeaseFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the creation of the file and its lock, the owner considers it abandoned."""
    flock, swept = fcntl.flock, list[int]()

    def sweep_then_lock(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and not swept:
            swept.append(fd)
            files.look()
        flock(fd, operation)

    monkeypatch.setattr("fcntl.flock", sweep_then_lock)
    lease = take(tmp_path, clock)
    assert swept
    assert files.look() == [lease.record]
    assert names(tmp_path) == [f"{lease.record.reader}.lease"]


class _Denied(OsDisk):
    """A store in whose `readers/` this process may not write."""

    def open(self, path: str, **_: bool) -> OsFile:
        raise NotWritable("no permission while opening", path=path)


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path, clock: ManualClock) -> None:
    with pytest.raises(NotWritable):
        FileLease.take(_Denied(), clock, str(tmp_path), db_id=1, lsn=1, tags={})
    assert names(tmp_path) == []


# ── processes ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_forked_child_neither_keeps_nor_ends_its_parents_lease(
    tmp_path: Path, clock: ManualClock, files: LeaseFiles, capfd: pytest.CaptureFixture[str]
) -> None:
    lease = take(tmp_path, clock)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        closed = not lease.is_held
        lease.close()
        os.write(writing, b"x")
        time.sleep(300 if closed else 0)
        os._exit(0 if closed else 1)
    try:
        assert os.read(reading, 1) == b"x", "the child has closed the lease"
        assert files.look() == [lease.record], "closing it in the child has no effect"
        lease._forget()  # the parent dies, the child survives
        assert files.look() == []
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child was alive all the time"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
