"""What a stream takes on disk is what it uses: sealed files keep no zeros (N2)."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.core.settings import ManifestLogSettings, StreamSettings
from quire.durable.failpoints import armed
from quire.durable.names import Tier
from quire.stream.files import LogFiles
from quire.stream.mlog_format import COPY_BYTES
from quire.stream.mlog_recovery import mark_uploaded
from quire.stream.mlog_verify import verify
from tests.stream.streams import StreamWorld

KIB = 1 << 10


def given(folder: Path) -> int:
    """What the file system has given, as `du` says."""
    return sum(each.stat().st_blocks * 512 for each in folder.rglob("*") if each.is_file())


def world_of(tmp_path: Path) -> StreamWorld:
    """With the settings that people have."""
    return StreamWorld(tmp_path, settings=StreamSettings(), log_settings=ManifestLogSettings())


def test_a_trickling_stream_takes_little(tmp_path: Path) -> None:
    """24 segments of one record, each with a chunk of the log: 256 KiB of zeros each were 12 MiB."""
    world = world_of(tmp_path)
    for _ in range(24):
        world.fill(1, records=1)
        world.stream.ledger.log.rotate()
    world.check()
    world.stream.close()
    assert given(tmp_path / "streams") < 600 * KIB
    world.stream = world.open()
    assert len(world.payloads()) == 24
    world.check()
    world.close()


def test_a_sealed_segment_keeps_only_its_used_bytes(tmp_path: Path) -> None:
    world = world_of(tmp_path)
    world.fill(2, records=100)
    for segment in world.segments():
        path = Path(world.files.segment(Tier.HOT, segment.segment_id))
        assert path.stat().st_size == segment.durable_bytes
    world.check()
    world.close()


def test_what_was_sealed_and_not_trimmed_is_trimmed_when_the_stream_is_opened(tmp_path: Path) -> None:
    """By a process that was killed, or by an older quire."""
    world = world_of(tmp_path)
    payloads = world.fill(1, records=100)
    (segment,) = world.segments()
    path = Path(world.files.segment(Tier.HOT, 1))
    world.stream.close()
    with path.open("r+b") as file:
        file.truncate(256 * KIB)
    world.stream = world.open()
    assert path.stat().st_size == segment.durable_bytes
    assert world.payloads() == payloads
    world.close()


def test_a_sealed_chunk_of_the_log_keeps_only_its_used_bytes(tmp_path: Path) -> None:
    world = world_of(tmp_path)
    world.fill(1)
    log = world.stream.ledger.log
    log.rotate()
    files = LogFiles(world.disk, world.stream_root, world.stream_id)
    assert Path(files.chunk(0)).stat().st_size < 4 * KIB
    world.fill(1)
    assert Path(files.chunk(1)).stat().st_size == 16 * KIB, "what is written begins small, too"
    world.check()
    world.close()


@pytest.mark.parametrize("point", ["stream.mlog.shrinking", "stream.mlog.sealed"])
def test_a_crash_while_a_chunk_is_cut_loses_nothing(tmp_path: Path, point: str) -> None:
    world = world_of(tmp_path)
    payloads = world.fill(2)
    with armed(point, "raise:EIO"), pytest.raises(OSError, match="failpoint"):
        world.stream.ledger.log.rotate()
    world.crash()
    assert world.payloads() == payloads
    world.check()
    world.close()


def test_a_chunk_that_an_older_quire_sealed_is_cut_when_it_is_uploaded(tmp_path: Path) -> None:
    world = world_of(tmp_path)
    world.fill(1)
    world.stream.ledger.log.rotate()
    files = LogFiles(world.disk, world.stream_root, world.stream_id)
    path = Path(files.chunk(0))
    raw = path.read_bytes()
    path.write_bytes(raw[:-COPY_BYTES] + bytes(256 * KIB - len(raw)) + raw[-COPY_BYTES:])
    assert list(verify(files)) == []
    mark_uploaded(files, 0)
    assert path.stat().st_size == len(raw)
    assert list(verify(files)) == []
    world.close()


def test_a_log_grows_as_it_is_written(tmp_path: Path) -> None:
    world = world_of(tmp_path)
    payloads = world.fill(300, records=1, size=10)
    files = LogFiles(world.disk, world.stream_root, world.stream_id)
    assert Path(files.chunk(0)).stat().st_size > 16 * KIB
    world.reopen()
    payloads += world.fill(100, records=1, size=10)
    assert world.payloads() == payloads
    world.check()
    world.close()
