"""How a group is written: encoded once, into reused memory, and written and synced by one system call."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from quire.core.errors import StorageFault, StoreUnusable
from quire.core.settings import StreamSettings
from quire.durable.checksums import crc64, crc64_joined
from quire.durable.files import OsDisk, OsFile, preallocate, write_synced
from quire.durable.names import Tier
from quire.stream import hot, segment
from quire.stream.segment import NextBlock, body_of, body_of_arrow, encode_into, scan
from quire.testing.crashdisk import CrashDisk, drop_all
from tests.stream.blocks import encode_block
from tests.stream.streams import StreamHarness

WIDE = StreamSettings(segment_bytes=4 << 20)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[StreamHarness]:
    harness = StreamHarness(tmp_path, settings=WIDE)
    yield harness
    harness.check()
    harness.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[OsFile]:
    file = preallocate(OsDisk(), str(tmp_path / "file"), 4096)
    assert isinstance(file, OsFile)
    yield file
    file.close()


class Calls:
    """Records the system calls that write and sync, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        for name in ("pwrite", "pwritev", "fdatasync", "fsync"):
            monkeypatch.setattr(os, name, self._recording(name, getattr(os, name)))

    def _recording(self, name: str, call: Any) -> Any:
        def recording(*arguments: Any) -> Any:
            self.names.append(name)
            return call(*arguments)

        return recording


# ── one call ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("column", [False, True])
def test_a_group_is_one_system_call(harness: StreamHarness, monkeypatch: pytest.MonkeyPatch, column: bool) -> None:
    harness.stream.append(b"first").result()
    calls = Calls(monkeypatch)
    payloads = [b"%d" % number for number in range(100)]
    if column:
        harness.stream.append(pa.array(payloads)).result()
    else:
        guards = [harness.stream.append(payload) for payload in payloads]
        guards[-1].result()
    assert calls.names == ["pwritev"]
    assert harness.payloads(2) == payloads


def test_earlier_writes_of_the_group_are_synced_too(harness: StreamHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The single call makes only its own bytes durable: a group of several writes ends with a sync of the file."""
    harness.stream.append(b"first").result()
    harness.stream.append(b"second")
    with harness.stream.hot.paused():
        harness.stream.hot._write_out()
    calls = Calls(monkeypatch)
    harness.stream.append(b"third").result()
    assert calls.names == ["pwrite", "fdatasync"]
    calls.names.clear()
    harness.stream.append(pa.array([b"4"]))
    harness.stream.append(pa.array([b"5"])).result()
    assert calls.names == ["pwrite", "pwrite", "fdatasync"]


def test_earlier_writes_of_the_group_survive_power_loss(tmp_path: Path) -> None:
    disk = CrashDisk(str(tmp_path / "disk"))
    harness = StreamHarness(tmp_path, settings=WIDE, disk=disk, stream_root=disk.root)
    harness.stream.append(b"first").result()
    harness.stream.append(b"second")
    with harness.stream.hot.paused():
        harness.stream.hot._write_out()
    harness.stream.append(b"third").result()
    after = disk.crash(str(tmp_path / "after"), drop_all)
    harness.stream.abandon()
    harness.disk, harness.stream_root = after, after.root
    harness.stream = harness.open()
    assert harness.payloads() == [b"first", b"second", b"third"]
    harness.close()


def test_a_short_write_is_finished_and_synced(file: OsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    true = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, offset, flags: true(fd, [parts[0][:3]], offset, flags))
    calls = Calls(monkeypatch)
    write_synced(file, b"abcdefgh", 100)
    assert file.read_at(8, 100) == b"abcdefgh"
    assert calls.names == ["pwritev", "pwrite", "fdatasync"]


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_without_support_for_synced_writes_two_calls_are_made(
    file: OsFile, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", refuse)
    calls = Calls(monkeypatch)
    write_synced(file, b"abc", 0)
    assert file.read_at(3, 0) == b"abc"
    assert calls.names == ["pwritev", "pwrite", "fdatasync"]


@pytest.mark.parametrize(("number", "expected"), [(errno.ENOSPC, StoreUnusable), (errno.EIO, StorageFault)])
def test_a_failed_call_makes_the_stream_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception]
) -> None:
    """Also with a full disk: `DiskFull` would mean that the record is not there, which is unknown."""
    harness = StreamHarness(tmp_path, settings=WIDE)
    harness.stream.append(b"a").result()

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse)
        guard = harness.stream.append(b"b")
        with pytest.raises(expected):
            guard.result()
    assert not guard.done
    with pytest.raises(StoreUnusable, match="reopen the stream"):
        harness.stream.append(b"c")
    harness.crash()
    assert harness.payloads() == [b"a"]
    harness.close()


# ── encoding ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_reused_memory_keeps_no_old_bytes(harness: StreamHarness) -> None:
    """Groups of all sizes in sequence, also above the limit up to which memory is reused; the bytes on disk are valid."""
    rng, expected = random.Random(7), []
    for size in (300_000, 1, 70, 1_200_000, 3, 63, 64, 65, 200_000, 5):
        payload = rng.randbytes(size)
        harness.stream.append([payload, b"x"] if size < 1_000_000 else pa.array([payload[:400_000]] * 3)).result()
        expected += [payload, b"x"] if size < 1_000_000 else [payload[:400_000]] * 3
    assert len(harness.stream.hot._kept) <= hot.BUFFER_BYTES_MAX
    assert harness.payloads() == expected
    open_segment = harness.stream.hot.segment
    assert open_segment is not None
    raw = Path(harness.files.segment(Tier.HOT, open_segment.segment_id)).read_bytes()[: open_segment.offset]
    scanned = scan(raw)
    assert (scanned.cut, scanned.end_record) == (len(raw), len(expected) + 1)
    assert crc64(raw) == open_segment.crc
    for block in scanned.blocks:
        end = block.offset + segment.BLOCK_HEAD_BYTES + block.body_bytes
        assert not any(raw[end : block.end]), "padding is zero"


@pytest.mark.parametrize("join_bytes", [0, segment.JOIN_BYTES])
@pytest.mark.parametrize("joins", [True, False])
def test_the_checksum_of_the_segment_continues_across_a_block(
    joins: bool, join_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a library that can combine checksums and with one that cannot; for short and for long blocks."""
    assert crc64_joined(crc64(b"a"), crc64(b"bc"), 2) == crc64(b"abc")
    monkeypatch.setattr(segment, "JOIN_BYTES", join_bytes)
    if not joins:
        monkeypatch.setattr(segment, "crc64_joined", lambda *_: None)
    column = pa.array([b"skipped", b"a", b"bc" * 99, b"d" * 5000])[1:]
    for body in (body_of([b"one", b"", b"three"]), body_of([b"long" * 2000]), body_of_arrow(column)):
        next_block = NextBlock(128, 7, 1_700_000_000_000, 7)
        out = memoryview(bytearray(b"\xff" * (body.block_bytes + 64)))
        running = encode_into(out, 99, next_block, body, is_commit=True, running=crc64(b"before"))
        block = encode_block(99, next_block, body, is_commit=True)
        assert out[: body.block_bytes] == block
        assert bytes(out[body.block_bytes :]) == b"\xff" * 64, "nothing after the block is touched"
        assert running == crc64(b"before" + block)


def test_a_column_that_is_changed_during_the_append_damages_nothing(harness: StreamHarness) -> None:
    """A record may have its old or its new bytes; the bytes on disk match their checksums, which are computed from the
    copy.
    """
    raw = bytearray(b"a" * 50_000)
    offsets = pa.py_buffer(bytes(4) + (50_000).to_bytes(4, "little"))
    column = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, pa.py_buffer(raw)])
    guard = harness.stream.append(column)
    raw[:] = b"b" * 50_000
    guard.result()
    assert harness.payloads() == [b"b" * 50_000]
