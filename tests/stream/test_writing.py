"""How a group gets onto the disk: encoded once, into memory that is used again, and written and synced by one call."""

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
from tests.stream.streams import StreamWorld

WIDE = StreamSettings(segment_bytes=4 << 20)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[StreamWorld]:
    made = StreamWorld(tmp_path, settings=WIDE)
    yield made
    made.check()
    made.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[OsFile]:
    made = preallocate(OsDisk(), str(tmp_path / "file"), 4096)
    assert isinstance(made, OsFile)
    yield made
    made.close()


class Calls:
    """The system's calls that write and sync, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        for name in ("pwrite", "pwritev", "fdatasync", "fsync"):
            monkeypatch.setattr(os, name, self._noted(name, getattr(os, name)))

    def _noted(self, name: str, call: Any) -> Any:
        def noted(*given: Any) -> Any:
            self.seen.append(name)
            return call(*given)

        return noted


# ── one call ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("column", [False, True])
def test_a_group_is_one_system_call(world: StreamWorld, monkeypatch: pytest.MonkeyPatch, column: bool) -> None:
    world.stream.append(b"first").result()
    calls = Calls(monkeypatch)
    payloads = [b"%d" % number for number in range(100)]
    if column:
        world.stream.append(pa.array(payloads)).result()
    else:
        guards = [world.stream.append(each) for each in payloads]
        guards[-1].result()
    assert calls.seen == ["pwritev"]
    assert world.payloads(2) == payloads


def test_what_was_written_before_is_synced_too(world: StreamWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one call makes its own bytes durable, and no others: a group of several writes ends with a sync of the file."""
    world.stream.append(b"first").result()
    world.stream.append(b"second")
    with world.stream.hot.paused():
        world.stream.hot._write_out()
    calls = Calls(monkeypatch)
    world.stream.append(b"third").result()
    assert calls.seen == ["pwrite", "fdatasync"]
    calls.seen.clear()
    world.stream.append(pa.array([b"4"]))
    world.stream.append(pa.array([b"5"])).result()
    assert calls.seen == ["pwrite", "pwrite", "fdatasync"]


def test_what_was_written_before_survives_power_loss(tmp_path: Path) -> None:
    disk = CrashDisk(str(tmp_path / "disk"))
    world = StreamWorld(tmp_path, settings=WIDE, disk=disk, stream_root=disk.root)
    world.stream.append(b"first").result()
    world.stream.append(b"second")
    with world.stream.hot.paused():
        world.stream.hot._write_out()
    world.stream.append(b"third").result()
    after = disk.crash(str(tmp_path / "after"), drop_all)
    world.stream.abandon()
    world.disk, world.stream_root = after, after.root
    world.stream = world.open()
    assert world.payloads() == [b"first", b"second", b"third"]
    world.close()


def test_a_short_write_is_finished_and_synced(file: OsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    true = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, offset, flags: true(fd, [parts[0][:3]], offset, flags))
    calls = Calls(monkeypatch)
    write_synced(file, b"abcdefgh", 100)
    assert file.read_at(8, 100) == b"abcdefgh"
    assert calls.seen == ["pwritev", "pwrite", "fdatasync"]


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_where_the_system_has_no_such_call_there_are_two(
    file: OsFile, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", refuse)
    calls = Calls(monkeypatch)
    write_synced(file, b"abc", 0)
    assert file.read_at(3, 0) == b"abc"
    assert calls.seen == ["pwritev", "pwrite", "fdatasync"]


@pytest.mark.parametrize(("number", "expected"), [(errno.ENOSPC, StoreUnusable), (errno.EIO, StorageFault)])
def test_a_failed_call_leaves_the_stream_in_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception]
) -> None:
    """A full disk, too: `DiskFull` would say that the record is not there, and nobody knows that."""
    world = StreamWorld(tmp_path, settings=WIDE)
    world.stream.append(b"a").result()

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse)
        guard = world.stream.append(b"b")
        with pytest.raises(expected):
            guard.result()
    assert not guard.done
    with pytest.raises(StoreUnusable, match="reopen the stream"):
        world.stream.append(b"c")
    world.crash()
    assert world.payloads() == [b"a"]
    world.close()


# ── encoding ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_memory_that_is_used_again_keeps_nothing_of_its_past(world: StreamWorld) -> None:
    """Groups of all sizes behind each other, over the limit up to which memory is kept too; and what is on disk is whole."""
    draw, expected = random.Random(7), []
    for size in (300_000, 1, 70, 1_200_000, 3, 63, 64, 65, 200_000, 5):
        payload = draw.randbytes(size)
        world.stream.append([payload, b"x"] if size < 1_000_000 else pa.array([payload[:400_000]] * 3)).result()
        expected += [payload, b"x"] if size < 1_000_000 else [payload[:400_000]] * 3
    assert len(world.stream.hot._kept) <= hot.BUFFER_BYTES_MAX
    assert world.payloads() == expected
    live = world.stream.hot.segment
    assert live is not None
    raw = Path(world.files.segment(Tier.HOT, live.segment_id)).read_bytes()[: live.offset]
    found = scan(raw)
    assert (found.cut, found.end_record) == (len(raw), len(expected) + 1)
    assert crc64(raw) == live.crc
    for block in found.blocks:
        end = block.offset + segment.BLOCK_HEAD_BYTES + block.body_bytes
        assert not any(raw[end : block.end]), "padding is zeros"


@pytest.mark.parametrize("join_bytes", [0, segment.JOIN_BYTES])
@pytest.mark.parametrize("joins", [True, False])
def test_the_checksum_of_the_segment_goes_on_over_a_block(
    joins: bool, join_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a library that can join checksums, and with one that cannot; of short blocks and of long ones."""
    assert crc64_joined(crc64(b"a"), crc64(b"bc"), 2) == crc64(b"abc")
    monkeypatch.setattr(segment, "JOIN_BYTES", join_bytes)
    if not joins:
        monkeypatch.setattr(segment, "crc64_joined", lambda *_: None)
    column = pa.array([b"skipped", b"a", b"bc" * 99, b"d" * 5000])[1:]
    for body in (body_of([b"one", b"", b"three"]), body_of([b"long" * 2000]), body_of_arrow(column)):
        place = NextBlock(128, 7, 1_700_000_000_000, 7)
        out = memoryview(bytearray(b"\xff" * (body.block_bytes + 64)))
        found = encode_into(out, 99, place, body, is_commit=True, running=crc64(b"before"))
        block = encode_block(99, place, body, is_commit=True)
        assert out[: body.block_bytes] == block
        assert bytes(out[body.block_bytes :]) == b"\xff" * 64, "nothing behind it is touched"
        assert found == crc64(b"before" + block)


def test_a_column_that_is_changed_meanwhile_damages_nothing(world: StreamWorld) -> None:
    """Records may be old or new: what is on disk fits its checksums, because they are taken of the copy."""
    raw = bytearray(b"a" * 50_000)
    offsets = pa.py_buffer(bytes(4) + (50_000).to_bytes(4, "little"))
    column = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, pa.py_buffer(raw)])
    guard = world.stream.append(column)
    raw[:] = b"b" * 50_000
    guard.result()
    assert world.payloads() == [b"b" * 50_000]
