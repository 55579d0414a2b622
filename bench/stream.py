"""The manifest log of a stream against loops that do only what is necessary. The records of a stream: `stream_records.py`.

How the opponents are made fair: the bare writer packs the same payloads, computes the same checksums and copies the same bytes
into a mapped file. The bare reader unpacks every header, checks every payload, and keeps the newest record of each type per
segment in dicts, which is what our index holds, without the table of transitions. Its first form also unpacks payloads. It is
the fair one, because a reader of raw bytes would have to unpack them later. Its second form unpacks headers only. Both
contenders get the same records, neither syncs where appending is measured, and they alternate.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import struct
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from awscrt.checksums import crc64nvme

import quire
from bench.report import Report, alternate, rate, seconds
from quire.core.clock import SystemClock
from quire.durable.files import Disk, OsDisk, OsFile
from quire.stream import mlog_records as r
from quire.stream.files import LogFiles
from quire.stream.mlog_format import CHUNK_BYTES, RECORD, RECORD_BYTES, ChunkFacts, encode_record, new_header
from quire.stream.mlog_index import ManifestIndex
from quire.stream.mlog_reader import Chunk, LogPosition, load_chunk
from quire.stream.mlog_recovery import recover
from quire.stream.mlog_snapshot import write_snapshot
from quire.stream.mlog_writer import ManifestLogWriter

SETTINGS = quire.ManifestLogSettings(chunk_bytes=1 << 20)
LIVE = 1_000
"""Segments that are alive at any time of the history."""
TAIL_SEGMENTS = 1_000
"""Segments whose records follow the snapshot."""
WHEN_MS = 1_700_000_000_000


LAYOUTS = {
    kind: struct.Struct(layout).unpack
    for kind, layout in {0: "<QI4x", 1: "<QQ", 2: "<I4x", 3: "<QI4x", 10: "<Q", 11: "<Q", 13: "<Q"}.items()
}
"""Payloads of fixed size, which the bare reader unpacks; it keeps the others as bytes."""


class Unsynced(OsFile):
    """A file whose `sync` does nothing."""

    def sync(self) -> None:
        pass


class NoSync(OsDisk):
    """A disk without syncs, to measure appending alone."""

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> OsFile:
        file = super().open(path, create=create, exclusive=exclusive, write=write)
        with file:
            return Unsynced(os.dup(file.fileno()), path)

    def sync_dir(self, path: str) -> None:
        pass


def _life(segment: int) -> list[tuple[r.Payload, int]]:
    """Return the nine records of a segment in a stream with all tiers."""
    key = f"00000001/{segment:08x}/wal:00000000"
    return [
        (r.SegmentOpened(segment << 24, 1), segment),
        (r.SealSegment(1 << 24, segment * 7919), segment),
        (r.CompressionStarted(segment & 0xFFFF), segment),
        (r.CompressionDone(1 << 22, 3), segment),
        (r.UploadStarted(key), segment),
        (r.UploadDone(key, f"{segment:032x}"), segment),
        (r.LocalEvicted(1 << 24), segment),
        (r.HydrationStarted(2), segment),
        (r.HydrationDone(1 << 24), segment),
    ]


def _history(count: int) -> list[tuple[r.Payload, int]]:
    records: list[tuple[r.Payload, int]] = []
    segment = 1
    while len(records) < count:
        records += _life(segment)
        segment += 1
    return records[:count]


def _files(directory: Path, name: str, disk: Disk | None = None) -> LogFiles:
    root = directory / name
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    return LogFiles(disk or OsDisk(), str(root), 1)


def append(report: Report, directory: Path, quick: bool) -> None:
    """Append typed records, against packing, checksumming and copying them into a mapped file."""
    records = _history(20_000 if quick else 100_000)

    def ours() -> float:
        files = _files(directory, "append", NoSync())
        writer = ManifestLogWriter.open(files, clock=SystemClock(), settings=SETTINGS)

        def work() -> None:
            add = writer.append
            for number, (value, segment) in enumerate(records):
                add(value, segment)
                if number % 64 == 0 and writer.needs_rotation():
                    writer.rotate()

        spent = seconds(work)
        writer.abandon()
        return len(records) / spent

    def bare() -> float:
        path = directory / "bare"
        path.write_bytes(bytes(1 << 20))
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 1 << 20) as mapped:

            def work() -> None:
                pack, at, now = RECORD.pack, CHUNK_BYTES, time.time_ns
                for value, segment in records:
                    payload = value.encode()
                    size = len(payload)
                    if at + RECORD_BYTES + size > 1 << 20:
                        at = CHUNK_BYTES
                    end = at + RECORD_BYTES + size
                    mapped[at + RECORD_BYTES : end] = payload
                    mapped[at : at + RECORD_BYTES] = pack(
                        value.TYPE, 0, size, segment, 0, now() // 1_000_000, crc64nvme(payload)
                    )
                    at = end

            return len(records) / seconds(work)

    mine, loop = alternate(1 if quick else 5, ours, bare)
    report.figure("mlog_append_per_second", mine)
    report.ratio("mlog_append_vs_bare_loop", mine / loop, 0.5, "higher", f"{rate(mine)} of {rate(loop)}")


def replaying(report: Report, directory: Path, quick: bool) -> None:
    """Check and fold a history, against unpacking, checksumming and keeping the newest record of each type per segment."""
    del directory
    records = _history(30_000 if quick else 200_000)
    objects = _chunks(records)

    def ours() -> float:
        index = ManifestIndex()

        def work() -> None:
            for number, data in enumerate(objects):
                index.fold_chunk(load_chunk(data, chunk_index=number))

        spent = seconds(work)
        assert (index.records, index.rejected) == (len(records), 0)
        return len(records) / spent

    ours()  # loads numpy
    mine, loop, heads = alternate(
        1 if quick else 5, ours, partial(_bare, objects, LAYOUTS), partial(_bare, objects, {})
    )
    report.figure("mlog_replay_per_second", mine)
    report.ratio("mlog_replay_vs_bare_loop", mine / loop, 0.6, "higher", f"{rate(mine)} of {rate(loop)}")
    detail = f"{rate(mine)} of {rate(heads)}, which leaves payloads as bytes"
    report.ratio("mlog_replay_vs_headers_only", mine / heads, 0.6, "higher", detail)


def _bare(objects: list[bytes], layouts: Mapping[int, Callable[[bytes], object]]) -> float:
    """Return records per second of a loop that unpacks and checks each record, and keeps the newest. Payloads with a layout in
    `layouts` are unpacked, too."""
    newest: dict[int, dict[int, object]] = {}
    records = 0

    def work() -> None:
        nonlocal records
        unpack = RECORD.unpack_from
        for data in objects:
            at, end = CHUNK_BYTES, new_end(data)
            while at < end:
                kind, _, size, segment, _, _, checksum = unpack(data, at)
                start = at + RECORD_BYTES
                at = start + size
                payload = data[start:at]
                if crc64nvme(payload) != checksum:
                    raise AssertionError("a payload fails its checksum")
                known = newest.get(segment)
                if known is None:
                    known = newest[segment] = {}
                known[kind] = layouts[kind](payload) if kind in layouts else payload
                records += 1

    spent = seconds(work)
    return records / spent


def new_end(data: bytes) -> int:
    """Return `committed_len` of a chunk's header."""
    return int.from_bytes(data[40:48], "little")


def _chunks(records: list[tuple[r.Payload, int]], size: int = 256 << 10) -> list[bytes]:
    """Return a history as objects of chunks."""
    objects: list[bytes] = []
    body, count, base = bytearray(), 0, 0

    def end() -> None:
        nonlocal body, count, base
        objects.append(_chunk(bytes(body), count, len(objects), base))
        body, base, count = bytearray(), base + count, 0

    for value, segment in records:
        body += encode_record(value.TYPE, segment, r.encode(value), timestamp_ms=WHEN_MS)
        count += 1
        if len(body) > size:
            end()
    if count:
        end()
    return objects


def commit(report: Report, directory: Path, quick: bool) -> None:
    """Commit one record to a chunk that is nearly empty, and to one that is nearly full: both should cost the same."""
    rounds = 200 if quick else 1_000
    files = _files(directory, "commit")
    with ManifestLogWriter.open(files, clock=SystemClock(), settings=SETTINGS) as writer:
        record = r.SegmentOpened(1, 1)

        def commits() -> float:
            spent = []
            for _ in range(rounds):
                writer.append(record, 1)
                began = time.perf_counter()
                writer.commit()
                spent.append(time.perf_counter() - began)
            return statistics.median(spent)

        empty = commits()
        while writer.position.offset < (1 << 20) - 200 * rounds - (64 << 10):
            writer.append(record, 1)
        writer.commit()
        full = commits()
    report.figure("mlog_commit_seconds", empty)
    detail = f"{full * 1e6:.0f} µs in a full chunk, {empty * 1e6:.0f} µs in an empty one"
    report.ratio("mlog_commit_full_vs_empty", full / empty, 1.5, "lower", detail)


def recovery(report: Report, directory: Path, quick: bool) -> None:
    """Open a log after histories of 0.1, 1 and 10 million records, with snapshots and tails of the same size."""
    sizes = (10_000, 50_000, 200_000) if quick else (100_000, 1_000_000, 10_000_000)
    logs = [_files(directory, f"recovery-{records}") for records in sizes]
    for records, files in zip(sizes, logs, strict=True):
        end = _with_history(files, records)
        index = recover(files, SystemClock()).index
        assert (index.records, index.rejected, len(index)) == (end, 0, LIVE + TAIL_SEGMENTS)
        del index
    # All logs are written before the first is timed: minutes of folding change the state of the heap and of the processor.
    spent = alternate(9, *(partial(seconds, partial(recover, files, SystemClock())) for files in logs))
    for records, files, duration in zip(sizes, logs, spent, strict=True):
        report.figure(f"mlog_recovery_seconds_{records}", duration)
        shutil.rmtree(files.root)
    report.figure("mlog_recovery_seconds", spent[-1])
    durations = zip(sizes, spent, strict=True)
    detail = ", ".join(f"{duration * 1e3:.1f} ms after {records:,}" for records, duration in durations)
    report.ratio("mlog_recovery_long_vs_short", spent[-1] / spent[0], 1.5, "lower", detail)


def _with_history(files: LogFiles, records: int) -> int:
    """Write a log whose state is the fold of about `records` records, with a snapshot at their end, and a tail after it. Return
    the number of records.

    Each segment has nine records, and is retired by three more after a thousand later segments. The records are created as
    bytes, many at a time: they differ only in their segment, which suffices for a long history.
    """
    index = ManifestIndex()
    os.makedirs(files.directory)
    key = "00000001/00000000/wal:00000000"
    life = [encode_record(value.TYPE, 0, r.encode(value), timestamp_ms=WHEN_MS) for value, _ in _life(0)]
    gone: list[r.Payload] = [r.Tier2DeleteQueued(key), r.Tier2Deleted(key), r.CustomEvent(r.Schema.SEGMENT_RETIRED)]
    life += [encode_record(value.TYPE, 0, r.encode(value), timestamp_ms=WHEN_MS) for value in gone]
    row = b"".join(life)
    places = np.cumsum([0, *map(len, life[:-1])]) // 8 + 1  # of the segment numbers in a row, in words of 8 bytes
    per_chunk = (256 << 10) // len(row)
    segment = chunk_index = 0
    while index.records < records:
        ids = np.arange(segment + 1, segment + 1 + per_chunk, dtype=np.uint64)
        rows = np.frombuffer(row * per_chunk, "<u8").reshape(per_chunk, -1).copy()
        rows[:, places[:9]] = ids[:, None]
        rows[:, places[9:]] = ids[:, None] - np.uint64(LIVE)
        old = ids > LIVE
        body = rows[old].tobytes() if old.all() else _beginning(rows, old, int(places[9]) - 1)
        count = len(ids) * 9 + int(old.sum()) * 3
        index.fold_chunk(load_chunk(_chunk(body, count, chunk_index, index.records), chunk_index=chunk_index))
        segment, chunk_index = segment + per_chunk, chunk_index + 1
    assert (index.rejected, len(index)) == (0, LIVE)
    write_snapshot(files, 1, LogPosition(chunk_index, CHUNK_BYTES), index)
    tail = [record for number in range(TAIL_SEGMENTS) for record in _life(segment + 1 + number)]
    for data in _numbered(_chunks(tail), chunk_index, index.records):
        Path(files.chunk(chunk_index)).write_bytes(data)
        chunk_index += 1
    return index.records + len(tail)


def _beginning(rows: Any, old: Any, living: int) -> bytes:
    """Return the bytes of rows, the first of which retire no segment yet."""
    return b"".join(row.tobytes() if is_old else row[:living].tobytes() for row, is_old in zip(rows, old, strict=True))


def _chunk(body: bytes, count: int, chunk_index: int, base_record: int) -> bytes:
    """Return the object of a sealed chunk with these records."""
    header = new_header(
        chunk_index=chunk_index,
        base_record=base_record,
        committed_len=CHUNK_BYTES + len(body),
        chunk_crc64=crc64nvme(body),
        flags=1,
    )
    return header.encode() + body + ChunkFacts(header, count, 0).encode()


def _numbered(objects: list[bytes], first: int, base: int) -> list[bytes]:
    """Return the same chunks with the numbers that they have later in a log."""
    moved = []
    for number, data in enumerate(objects):
        chunk: Chunk = load_chunk(data, chunk_index=number)
        body = data[CHUNK_BYTES : chunk.header.committed_len]
        moved.append(_chunk(body, len(chunk.offsets), first + number, base + chunk.header.base_record))
    return moved


PARTS = (append, replaying, commit, recovery)
