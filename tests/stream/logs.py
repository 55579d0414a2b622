"""Manifest logs for tests: every kind of record, small settings, and a writer on any disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hypothesis import strategies as st

from quire.core.clock import Clock
from quire.core.settings import ManifestLogSettings
from quire.durable.files import Disk, OsDisk
from quire.stream import mlog_records as r
from quire.stream.files import LogFiles
from quire.stream.mlog_index import ManifestIndex
from quire.stream.mlog_log import ManifestLog
from quire.stream.mlog_reader import Chunk, LogPosition, ManifestLogReader
from quire.stream.mlog_snapshot import encode_snapshot
from quire.stream.mlog_writer import ManifestLogWriter
from quire.testing.clock import ManualClock

STREAM = 7
SMALL = ManifestLogSettings(chunk_bytes=16 << 10, record_bytes_max=1024)

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
KEYS = st.text(st.characters(codec="utf-8"), min_size=0, max_size=40)
BLOBS = st.binary(max_size=60)
VALUES: st.SearchStrategy[r.Payload] = st.one_of(
    st.builds(r.SegmentOpened, U64, U32),
    st.builds(r.SealSegment, U64, U64),
    st.builds(r.CompressionStarted, U32),
    st.builds(r.CompressionDone, U64, U32),
    st.builds(r.CompressionFailed, U32),
    st.builds(r.UploadStarted, KEYS),
    st.builds(r.UploadDone, KEYS, KEYS),
    st.builds(r.UploadFailed, KEYS, U32),
    st.builds(r.Tier2DeleteQueued, KEYS),
    st.builds(r.Tier2Deleted, KEYS),
    st.builds(r.HydrationStarted, U64),
    st.builds(r.HydrationDone, U64),
    st.builds(r.HydrationFailed, U32),
    st.builds(r.LocalEvicted, U64),
    st.builds(r.SnapshotMarker, U64, U64, U64),
    st.builds(r.CustomEvent, U32, BLOBS),
    st.builds(
        r.UnknownRecord,
        st.integers(16, 2**16 - 1),
        st.binary(min_size=1, max_size=8).map(lambda piece: (piece * 8)[: len(piece) * 8]),
    ),
)

ONE_OF_EACH: list[r.Payload] = [
    r.SegmentOpened(base_offset=4096, epoch=3),
    r.SealSegment(durable_bytes=1 << 20, segment_crc64=0x0123456789ABCDEF),
    r.CompressionStarted(job_id=77),
    r.CompressionDone(compressed_bytes=300_000, dictionary_id=5),
    r.CompressionFailed(reason_code=2),
    r.UploadStarted(key="s/1"),
    r.UploadDone(key="s/1", etag="abc"),
    r.UploadFailed(key="s/1", reason_code=9),
    r.Tier2DeleteQueued(key="s/1"),
    r.Tier2Deleted(key="s/1"),
    r.HydrationStarted(source_tier=2),
    r.HydrationDone(resident_bytes=1 << 20),
    r.HydrationFailed(reason_code=4),
    r.LocalEvicted(reclaimed_bytes=1 << 20),
    r.SnapshotMarker(chunk_index=3, chunk_offset=64, snapshot_id=8),
    r.CustomEvent(schema_id=1024, blob=b"hello"),
]


def files_at(root: Path | str, disk: Disk | None = None) -> LogFiles:
    return LogFiles(disk or OsDisk(), str(root), STREAM)


def open_writer(
    files: LogFiles, clock: Clock | None = None, settings: ManifestLogSettings = SMALL
) -> ManifestLogWriter:
    return ManifestLogWriter.open(files, clock=clock or ManualClock(), settings=settings)


def all_chunks(files: LogFiles) -> list[Chunk]:
    return list(ManifestLogReader(files).chunks())


def all_values(files: LogFiles) -> list[r.Payload]:
    return [view.value() for chunk in all_chunks(files) for view in chunk.records()]


def opened(number: int) -> r.SegmentOpened:
    """A record that is distinguishable from others by its number."""
    return r.SegmentOpened(base_offset=number, epoch=number % 7)


def same_state(first: ManifestIndex, second: ManifestIndex) -> bool:
    """Whether the snapshots of two indexes are equal, byte for byte."""
    nowhere = LogPosition(0, 0)
    return encode_snapshot(0, nowhere, first) == encode_snapshot(0, nowhere, second)


def append_all(log: ManifestLog, records: Iterable[tuple[r.Payload, int]]) -> LogPosition:
    """Append several records and commit them together."""
    for value, segment_id in records:
        log.append(value, segment_id)
    return log.commit()
