"""A stream occupies only the space that it uses: sealed files keep no preallocated zeros (N2)."""

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
from tests.stream.streams import StreamHarness

KIB = 1 << 10


def allocated_bytes(folder: Path) -> int:
    """The bytes that the file system has allocated, as `du` reports them."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def default_harness(tmp_path: Path) -> StreamHarness:
    """A stream with the default settings."""
    return StreamHarness(tmp_path, settings=StreamSettings(), log_settings=ManifestLogSettings())


def test_a_stream_with_few_records_takes_little_space(tmp_path: Path) -> None:
    """24 segments of one record, each with a chunk of the log: with 256 KiB of zeros each, they took 12 MiB."""
    harness = default_harness(tmp_path)
    for _ in range(24):
        harness.fill(1, records=1)
        harness.stream.ledger.log.rotate()
    harness.check()
    harness.stream.close()
    assert allocated_bytes(tmp_path / "streams") < 600 * KIB
    harness.stream = harness.open()
    assert len(harness.payloads()) == 24
    harness.check()
    harness.close()


def test_a_sealed_segment_keeps_only_its_used_bytes(tmp_path: Path) -> None:
    harness = default_harness(tmp_path)
    harness.fill(2, records=100)
    for segment in harness.segments():
        path = Path(harness.files.segment(Tier.HOT, segment.segment_id))
        assert path.stat().st_size == segment.durable_bytes
    harness.check()
    harness.close()


def test_untrimmed_sealed_segments_are_trimmed_when_the_stream_is_opened(tmp_path: Path) -> None:
    """Left by a process that was killed, or by an older version."""
    harness = default_harness(tmp_path)
    payloads = harness.fill(1, records=100)
    (segment,) = harness.segments()
    path = Path(harness.files.segment(Tier.HOT, 1))
    harness.stream.close()
    with path.open("r+b") as file:
        file.truncate(256 * KIB)
    harness.stream = harness.open()
    assert path.stat().st_size == segment.durable_bytes
    assert harness.payloads() == payloads
    harness.close()


def test_a_sealed_chunk_of_the_log_keeps_only_its_used_bytes(tmp_path: Path) -> None:
    harness = default_harness(tmp_path)
    harness.fill(1)
    log = harness.stream.ledger.log
    log.rotate()
    files = LogFiles(harness.disk, harness.stream_root, harness.stream_id)
    assert Path(files.chunk(0)).stat().st_size < 4 * KIB
    harness.fill(1)
    assert Path(files.chunk(1)).stat().st_size == 16 * KIB, "a new chunk begins small, too"
    harness.check()
    harness.close()


@pytest.mark.parametrize("point", ["stream.mlog.shrinking", "stream.mlog.sealed"])
def test_a_crash_while_a_chunk_is_trimmed_loses_nothing(tmp_path: Path, point: str) -> None:
    harness = default_harness(tmp_path)
    payloads = harness.fill(2)
    with armed(point, "raise:EIO"), pytest.raises(OSError, match="failpoint"):
        harness.stream.ledger.log.rotate()
    harness.crash()
    assert harness.payloads() == payloads
    harness.check()
    harness.close()


def test_a_chunk_sealed_by_an_older_version_is_trimmed_when_it_is_uploaded(tmp_path: Path) -> None:
    harness = default_harness(tmp_path)
    harness.fill(1)
    harness.stream.ledger.log.rotate()
    files = LogFiles(harness.disk, harness.stream_root, harness.stream_id)
    path = Path(files.chunk(0))
    raw = path.read_bytes()
    path.write_bytes(raw[:-COPY_BYTES] + bytes(256 * KIB - len(raw)) + raw[-COPY_BYTES:])
    assert list(verify(files)) == []
    mark_uploaded(files, 0)
    assert path.stat().st_size == len(raw)
    assert list(verify(files)) == []
    harness.close()


def test_a_log_grows_as_it_is_written(tmp_path: Path) -> None:
    harness = default_harness(tmp_path)
    payloads = harness.fill(300, records=1, size=10)
    files = LogFiles(harness.disk, harness.stream_root, harness.stream_id)
    assert Path(files.chunk(0)).stat().st_size > 16 * KIB
    harness.reopen()
    payloads += harness.fill(100, records=1, size=10)
    assert harness.payloads() == payloads
    harness.check()
    harness.close()
