"""Snapshots of a `ManifestIndex`: one checksummed file that replaces everything before a position of the log.

Equal indexes have equal bytes. A snapshot is written under a temporary name, synced, renamed, and its directory synced; then
the `SnapshotMarker` record is appended, at `position`. A snapshot without a marker is as valid as one with it. A snapshot that
fails its checksum is skipped: its predecessor and a longer part of the log give the same state.

Importable on executors. Threads: any (functions without state). Format: docs/formats/manifest-log.md.
Raises: `ManifestIntegrityError` for bytes that are not a snapshot, and what the disk raises."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import msgspec

from quire.core.errors import ManifestIntegrityError
from quire.durable.checksums import crc64
from quire.durable.failpoints import hit
from quire.durable.files import read_all, write_atomic
from quire.stream.files import LogFiles
from quire.stream.mlog_format import RECORD, RECORD_BYTES
from quire.stream.mlog_index import SLOTS, Entry, ManifestIndex
from quire.stream.mlog_reader import LogPosition
from quire.stream.mlog_records import RecordType, key_of
from quire.stream.mlog_states import STATES, code_of, state_of

MAGIC = 0x414F46324D534E50
"""AOF2MSNP, as a number."""
VERSION = 1
HEADER = struct.Struct("<QIIQQQQQQQQIIIIQQ")
"""magic, version, header_len, snapshot_id, chunk_index, chunk_offset, records, opened_max, last_ms, marker_id,
rejected, counts of entries, waiting records, own deletes, tallies, uploaded_upto, size of the file"""
ENTRY = struct.Struct("<QBBBBBBH")
"""segment_id, life, warm, remote, hot, hydration, whether it needs repair, bits of the record types that follow"""
TALLY = struct.Struct("<QQ")
"""record type, or 65536 + the schema of a custom event; count"""
CHECKSUM_BYTES = 8
HEADER_BYTES = 112
ENTRY_BYTES = 16
CUSTOM = 1 << 16

if HEADER.size != HEADER_BYTES or ENTRY.size != ENTRY_BYTES:
    raise AssertionError("the snapshot's structs disagree with their literal sizes")


class LogSnapshot(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A decoded snapshot."""

    snapshot_id: int
    position: LogPosition
    index: ManifestIndex
    uploaded_upto: int
    """Chunks below this index were uploaded when the snapshot was taken."""


def encode_snapshot(snapshot_id: int, position: LogPosition, index: ManifestIndex, uploaded_upto: int = 0) -> bytes:
    """Return the bytes of a snapshot file."""
    parts = [*_entries(index)]
    waiting = [raw for segment in sorted(index.waiting) for raw in index.waiting[segment]]
    deletes = [index.own_deletes[key] for key in sorted(index.own_deletes)]
    tallies = [
        *sorted(index.unknown.items()),
        *((CUSTOM + entry, count) for entry, count in sorted(index.customs.items())),
    ]
    parts += [*waiting, *deletes, *(TALLY.pack(*tally) for tally in tallies)]
    body = b"".join(parts)
    head = HEADER.pack(
        MAGIC,
        VERSION,
        HEADER_BYTES,
        snapshot_id,
        *position,
        index.records,
        index.opened_max,
        index.last_ms,
        index.snapshot_id,
        index.rejected,
        len(index.entries),
        len(waiting),
        len(deletes),
        len(tallies),
        uploaded_upto,
        HEADER_BYTES + len(body) + CHECKSUM_BYTES,
    )
    return head + body + crc64(body, crc64(head)).to_bytes(CHECKSUM_BYTES, "little")


def decode_snapshot(data: bytes, *, snapshot_id: int, path: str = "") -> LogSnapshot:
    """Verify and decode a snapshot."""
    what = _unsound(data, snapshot_id)
    if what is not None:
        raise _bad(what, snapshot_id, path)
    (*_, chunk_index, chunk_offset, records, opened_max, last_ms, marker_id, rejected) = HEADER.unpack_from(data)[:11]
    entries, waiting, deletes, tallies, uploaded_upto, _ = HEADER.unpack_from(data)[11:]
    index = ManifestIndex(
        records=records, opened_max=opened_max, last_ms=last_ms, snapshot_id=marker_id, rejected=rejected,
        snapshot_ms=last_ms,  # of the last record before the snapshot; folding its marker, the next one, corrects it
    )  # fmt: skip
    try:
        at = _read_entries(data, entries, index)
        for _ in range(waiting):
            raw, at = _record(data, at)
            index.waiting.setdefault(RECORD.unpack_from(raw)[3], []).append(raw)
        for _ in range(deletes):
            raw, at = _record(data, at)
            index.own_deletes[key_of(RecordType.TIER2_DELETE_QUEUED, raw[RECORD_BYTES:]).decode(errors="replace")] = raw
        for _ in range(tallies):
            number, count = TALLY.unpack_from(data, at)
            at += TALLY.size
            if number < CUSTOM:
                index.unknown[number] = count
            else:
                index.customs[number - CUSTOM] = count
    except (struct.error, ValueError) as error:
        raise _bad(f"the snapshot's body is malformed: {error}", snapshot_id, path) from None
    if at != len(data) - CHECKSUM_BYTES:
        raise _bad("the snapshot's length differs from the sum of its parts", snapshot_id, path)
    return LogSnapshot(
        snapshot_id=snapshot_id,
        position=LogPosition(chunk_index, chunk_offset),
        index=index,
        uploaded_upto=uploaded_upto,
    )


def write_snapshot(
    files: LogFiles, snapshot_id: int, position: LogPosition, index: ManifestIndex, uploaded_upto: int = 0
) -> None:
    """Write a snapshot next to the chunks, atomically. The caller appends the marker."""
    data = encode_snapshot(snapshot_id, position, index, uploaded_upto)
    hit("stream.mlog.snapshot.writing")
    write_atomic(files.disk, files.snapshot(snapshot_id), data)
    hit("stream.mlog.snapshot.written")


def read_snapshot(files: LogFiles, snapshot_id: int) -> LogSnapshot:
    """Read and verify one snapshot file."""
    path = files.snapshot(snapshot_id)
    return decode_snapshot(read_all(files.disk, path), snapshot_id=snapshot_id, path=path)


def newest_snapshots(files: LogFiles) -> Iterable[LogSnapshot | ManifestIntegrityError]:
    """Yield the local snapshots, newest first; for a damaged one, its error."""
    for snapshot_id in files.snapshots():
        try:
            yield read_snapshot(files, snapshot_id)
        except ManifestIntegrityError as error:
            yield error


def _entries(index: ManifestIndex) -> Iterable[bytes]:
    for segment in sorted(index.entries):
        code, *records = index.entries[segment]
        bits = sum(1 << kind for kind, raw in enumerate(records) if raw is not None)
        yield ENTRY.pack(segment, *STATES[code], segment in index.needs_repair, bits)
        yield from (raw for raw in records if raw is not None)


def _read_entries(data: bytes, count: int, index: ManifestIndex) -> int:
    at = HEADER_BYTES
    for _ in range(count):
        segment, life, warm, remote, hot, hydration, needs_repair, bits = ENTRY.unpack_from(data, at)
        at += ENTRY_BYTES
        state = state_of({"life": life, "warm": warm, "remote": remote, "hot": hot, "hydration": hydration})
        entry: Entry = [code_of(state)]
        for kind in range(SLOTS):
            raw = None
            if bits >> kind & 1:
                raw, at = _record(data, at)
            entry.append(raw)
        index.entries[segment] = entry
        if needs_repair:
            index.needs_repair.add(segment)
    return at


def _record(data: bytes, at: int) -> tuple[bytes, int]:
    end = at + RECORD_BYTES + RECORD.unpack_from(data, at)[2]
    if end > len(data):
        raise ValueError("a record extends past the end")
    return data[at:end], end


def _unsound(data: bytes, snapshot_id: int) -> str | None:
    if len(data) < HEADER_BYTES + CHECKSUM_BYTES:
        return "the file is too short for a snapshot"
    if crc64(memoryview(data)[:-CHECKSUM_BYTES]) != int.from_bytes(data[-CHECKSUM_BYTES:], "little"):
        return "the snapshot fails its checksum"
    magic, version, header_len, actual = HEADER.unpack_from(data)[:4]
    if magic != MAGIC or version != VERSION or header_len != HEADER_BYTES:
        return "this is not a manifest-log snapshot of a known version"
    if actual != snapshot_id:
        return "the snapshot's id does not match its name"
    if HEADER.unpack_from(data)[-1] != len(data):
        return "the snapshot's size differs from its header"
    return None


def _bad(what: str, snapshot_id: int, path: str) -> ManifestIntegrityError:
    return ManifestIntegrityError(
        what,
        hint="use the previous snapshot; with more of the log it gives the same state",
        chunk=None,
        segment=None,
        offset=0,
        snapshot=snapshot_id,
        path=path,
    )
