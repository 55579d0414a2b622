"""The encoding of a key-value database's manifest: events in its log, the whole state in its snapshot.

Little-endian, no padding; decoding consumes every byte or raises. An event is one record of a framed log
(`durable/log_format.py`), which provides its checksum and its position. A log's kind states whether a snapshot precedes it
(`lsm1`) or nothing does (`lsm0`), so that a missing snapshot is detected; a snapshot names the salt of the log that it covers.

Threads: pure functions; any. Format page: `docs/formats/lsm-manifest.md`.
Raises `Corruption`, `FormatTooNew`, `OutOfRange` (kind Encoding) and `SnapshotChecksumMismatch`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NoReturn

import msgspec

from quire.core.errors import Corruption, FormatTooNew, OutOfRange, SnapshotChecksumMismatch
from quire.core.ids import U64_MAX
from quire.durable.checksums import crc32
from quire.lsm.manifest_data import (
    AddFrozenWal,
    AddSst,
    AllocateSstId,
    Compaction,
    ErrorKind,
    ManifestData,
    ManifestEvent,
    ManifestSstEntry,
    RemoveFrozenWal,
    RemoveSst,
    SetActiveWal,
    UpdateLsn,
    Version,
    of_kind,
)
from quire.lsm.witnesses import REPAIR

LOG_FIRST = b"lsm0"
"""The kind of a log without a preceding snapshot."""
LOG_NEXT = b"lsm1"
"""The kind of a log that continues a snapshot."""

SNAPSHOT_MAGIC = b"QUIRELSM"
SNAPSHOT_VERSION = 1

ONE = struct.Struct("<BQ")
"""tag, the event's number"""
ENTRY = struct.Struct("<QH")
"""id, bytes of the path that follows"""
COUNTS = struct.Struct("<BII")
"""tag, entries added, ids removed"""
SNAPSHOT = struct.Struct("<8sHHIQQQ")
"""magic, version of the format, reserved (0), checksum, version of the manifest, snapshot_lsn, salt of the covered log"""
DATA = struct.Struct("<QQQQII")
"""version, last_lsn, active_wal, next_sst_id, frozen WALs, tables; then the WALs' numbers and the entries"""
NUMBER = struct.Struct("<Q")
ADD = struct.Struct("<BQH")
"""tag of an added table and its entry, before the path"""

ONE_BYTES = 9
ENTRY_BYTES = 10
ADD_BYTES = 11
COUNTS_BYTES = 9
SNAPSHOT_BYTES = 40
DATA_BYTES = 40
CHECKSUM_OFFSET = 12
PATH_BYTES_MAX = 0xFFFF

if (ONE.size, ENTRY.size, COUNTS.size, ADD.size) != (ONE_BYTES, ENTRY_BYTES, COUNTS_BYTES, ADD_BYTES):
    raise AssertionError("the manifest's event structs disagree with their literal sizes")
if SNAPSHOT.size != SNAPSHOT_BYTES or DATA.size != DATA_BYTES or struct.calcsize("<8sHH") != CHECKSUM_OFFSET:
    raise AssertionError("the manifest's snapshot structs disagree with their literal sizes")

TAGS: dict[type, int] = {
    Version: 1,
    SetActiveWal: 2,
    AddFrozenWal: 3,
    RemoveFrozenWal: 4,
    AddSst: 5,
    RemoveSst: 6,
    UpdateLsn: 7,
    AllocateSstId: 8,
    Compaction: 9,
}
"""Never changed; a new event gets a new number."""


# ── events ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def encode_event(event: ManifestEvent) -> bytes:
    """Encode an event as a record.

    >>> encode_event(SetActiveWal(7)).hex()
    '020700000000000000'
    """
    tag = TAGS[type(event)]
    with of_kind(ErrorKind.ENCODING):
        match event:
            case AddSst(entry):
                return bytes((tag,)) + _encode_entry(entry)
            case Compaction(added, removed):
                parts = [COUNTS.pack(tag, len(added), len(removed)), *map(_encode_entry, added)]
                return b"".join((*parts, *(NUMBER.pack(_u64(number)) for number in removed)))
            case Version(number) | SetActiveWal(number) | AddFrozenWal(number) | RemoveFrozenWal(number):
                return ONE.pack(tag, _u64(number))
            case RemoveSst(number) | UpdateLsn(number) | AllocateSstId(number):
                return ONE.pack(tag, _u64(number))


def decode_event(record: bytes, path: str = "", offset: int = 0) -> ManifestEvent:
    """Decode a record. `path` and `offset` are used in error messages."""
    decoder = _DECODERS.get(record[0]) if record else None
    if decoder is None:
        _unknown(record, path, offset)
    try:
        return decoder(record)
    except (struct.error, UnicodeDecodeError, IndexError, ValueError) as error:
        raise Corruption(
            "a manifest event cannot be decoded",
            hint=REPAIR,
            path=path,
            offset=offset,
            cause=str(error),
            kind=ErrorKind.ENCODING.value,
        ) from error


def replay(data: ManifestData, records: list[bytes], offsets: list[int], path: str) -> None:
    """Apply the events of a log: `data.apply(decode_event(record))` for each, without building events of the common kinds.

    Entries are built late, for tables that are still live: most tables in a log have been removed again.
    """
    # Locals, because this loop is half the cost of opening a manifest.
    unpack, unpack_add, live = ONE.unpack, ADD.unpack_from, data.tables
    waiting: dict[int, bytes] = {}
    version, last_lsn, next_id = data.version, data.last_lsn, data.next_sst_id
    for at, record in enumerate(records):
        size = len(record)
        if size == ONE_BYTES:
            tag, number = unpack(record)
            if tag == _UPDATE:
                if number > last_lsn:
                    last_lsn = number
                continue
            if tag == _ALLOCATE:
                if number >= next_id:
                    next_id = number + 1
                continue
            if tag == _VERSION:
                version = number
                continue
            if tag == _REMOVE:
                if waiting.pop(number, None) is None:
                    live.pop(number, None)
                continue
        elif size > ADD_BYTES:
            tag, number, length = unpack_add(record)
            # ASCII only: `_settle` decodes the path later, where an error could no longer name the record.
            if tag == _ADD and length == size - ADD_BYTES and record.isascii():
                if number not in live:
                    waiting.setdefault(number, record)
                continue
        _settle(live, waiting)
        data.apply(decode_event(record, path, offsets[at]))
    _settle(live, waiting)
    data.version = version
    data.last_lsn, data.next_sst_id = max(data.last_lsn, last_lsn), max(data.next_sst_id, next_id)
    data.dirty = data.dirty or bool(records)


_ADD, _REMOVE, _UPDATE, _ALLOCATE = TAGS[AddSst], TAGS[RemoveSst], TAGS[UpdateLsn], TAGS[AllocateSstId]
_VERSION = TAGS[Version]


def _settle(live: dict[int, ManifestSstEntry], waiting: dict[int, bytes]) -> None:
    for number, record in waiting.items():
        live[number] = ManifestSstEntry(number, record[ADD_BYTES:].decode())
    waiting.clear()


def _unknown(record: bytes, path: str, offset: int) -> NoReturn:
    # Its checksum is valid, so it is not damage: a newer version wrote it.
    raise FormatTooNew(
        "the manifest has an event of an unknown kind",
        hint="upgrade quire",
        path=path,
        offset=offset,
        tag=record[0] if record else None,
        kind=ErrorKind.ENCODING.value,
    )


def _one(make: Callable[[int], ManifestEvent]) -> Callable[[bytes], ManifestEvent]:
    unpack = ONE.unpack
    return lambda record: make(unpack(record)[1])


def _decode_add(record: bytes) -> ManifestEvent:
    number, size = ENTRY.unpack_from(record, 1)
    path = record[1 + ENTRY_BYTES :]
    if len(path) != size or not size:
        raise ValueError(f"a path of {size} bytes in {len(path)}")
    return AddSst(ManifestSstEntry(number, path.decode()))


def _decode_compaction(record: bytes) -> ManifestEvent:
    _, added_count, removed_count = COUNTS.unpack_from(record)
    at, added = COUNTS_BYTES, list[ManifestSstEntry]()
    if at + ENTRY_BYTES * added_count + 8 * removed_count > len(record):  # before allocating by untrusted counts
        raise ValueError(f"{added_count} tables added and {removed_count} removed in {len(record)} bytes")
    for _ in range(added_count):
        entry, at = _decode_entry(record, at)
        added.append(entry)
    removed = struct.unpack_from(f"<{removed_count}Q", record, at)
    _require_end(record, at + 8 * removed_count)
    return Compaction(tuple(added), removed)


_DECODERS: dict[int, Callable[[bytes], ManifestEvent]] = {
    TAGS[Version]: _one(Version),
    TAGS[SetActiveWal]: _one(SetActiveWal),
    TAGS[AddFrozenWal]: _one(AddFrozenWal),
    TAGS[RemoveFrozenWal]: _one(RemoveFrozenWal),
    TAGS[AddSst]: _decode_add,
    TAGS[RemoveSst]: _one(RemoveSst),
    TAGS[UpdateLsn]: _one(UpdateLsn),
    TAGS[AllocateSstId]: _one(AllocateSstId),
    TAGS[Compaction]: _decode_compaction,
}


def _encode_entry(entry: ManifestSstEntry) -> bytes:
    path = entry.path.encode()
    if not 0 < len(path) <= PATH_BYTES_MAX:
        raise OutOfRange("a table's path is empty or too long", size=len(path), max=PATH_BYTES_MAX)
    return ENTRY.pack(_u64(entry.id), len(path)) + path


def _decode_entry(data: bytes, at: int) -> tuple[ManifestSstEntry, int]:
    number, size = ENTRY.unpack_from(data, at)
    at += ENTRY_BYTES
    path = data[at : at + size]
    if len(path) != size or not size:
        raise ValueError(f"a path of {size} bytes does not fit at {at}")
    return ManifestSstEntry(number, path.decode()), at + size


def _require_end(data: bytes, end: int) -> None:
    if end != len(data):
        raise ValueError(f"{len(data) - end} bytes behind the end")


def _u64(number: int) -> int:
    if not 0 <= number <= U64_MAX:
        raise OutOfRange("a number of the manifest does not fit an unsigned 64-bit field", value=number)
    return number


# ── snapshots ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class ManifestSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a MANIFEST file."""

    version: int
    snapshot_lsn: int
    covered_salt: int
    """Salt of the log whose life ended with this snapshot; 0 if there was none."""
    checksum: int
    """CRC32 of the file."""
    manifest_data: ManifestData


def encode_snapshot(data: ManifestData, covered_salt: int) -> bytes:
    """Encode a snapshot file: with a checksum of zero first, which is then replaced by the CRC32 of those bytes."""
    with of_kind(ErrorKind.ENCODING):
        numbers = (data.version, data.last_lsn, data.active_wal, data.next_sst_id, *data.frozen_wals)
        for number in numbers:
            _u64(number)
        head = SNAPSHOT.pack(SNAPSHOT_MAGIC, SNAPSHOT_VERSION, 0, 0, data.version, data.last_lsn, _u64(covered_salt))
        sstables = data.sstables
        body = [
            DATA.pack(*numbers[:4], len(data.frozen_wals), len(sstables)),
            *(NUMBER.pack(number) for number in data.frozen_wals),
            *map(_encode_entry, sstables),
        ]
    zeroed = b"".join((head, *body))
    checksum = crc32(zeroed).to_bytes(4, "little")
    return zeroed[:CHECKSUM_OFFSET] + checksum + zeroed[CHECKSUM_OFFSET + 4 :]


def snapshot_crc32(file: bytes) -> int:
    """Return the checksum in the header of a MANIFEST file."""
    return int.from_bytes(file[CHECKSUM_OFFSET : CHECKSUM_OFFSET + 4], "little")


def decode_snapshot(file: bytes, path: str = "") -> ManifestSnapshot:
    """Decode a MANIFEST file. Raises on any deviation from the encoding."""
    hint = REPAIR
    where = {"path": path, "size": len(file)}
    if len(file) < SNAPSHOT_BYTES + DATA_BYTES or not file.startswith(SNAPSHOT_MAGIC):
        raise SnapshotChecksumMismatch("the file is not a manifest snapshot", hint=hint, **where, kind=_MISMATCH)
    _, fmt, _, checksum, version, snapshot_lsn, salt = SNAPSHOT.unpack_from(file)
    actual = crc32(file[:CHECKSUM_OFFSET] + bytes(4) + file[CHECKSUM_OFFSET + 4 :])
    if actual != checksum:
        text = "the manifest's snapshot fails its checksum"
        raise SnapshotChecksumMismatch(text, hint=hint, **where, expected=checksum, actual=actual, kind=_MISMATCH)
    if fmt > SNAPSHOT_VERSION:
        raise FormatTooNew(
            "the manifest's snapshot was written by a newer quire", hint="upgrade quire", path=path, version=fmt
        )
    try:
        data = _decode_data(file)
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        text = "the manifest's snapshot cannot be decoded"
        raise Corruption(text, hint=hint, **where, cause=str(error), kind=ErrorKind.ENCODING.value) from error
    return ManifestSnapshot(
        version=version, snapshot_lsn=snapshot_lsn, covered_salt=salt, checksum=checksum, manifest_data=data
    )


_MISMATCH = ErrorKind.SNAPSHOT_CHECKSUM_MISMATCH.value


def _decode_data(file: bytes) -> ManifestData:
    version, last_lsn, active_wal, next_sst_id, frozen_count, sst_count = DATA.unpack_from(file, SNAPSHOT_BYTES)
    at = SNAPSHOT_BYTES + DATA_BYTES
    if at + 8 * frozen_count + ENTRY_BYTES * sst_count > len(file):  # before allocating by untrusted counts
        raise ValueError(f"{frozen_count} WALs and {sst_count} tables in {len(file)} bytes")
    frozen = list(struct.unpack_from(f"<{frozen_count}Q", file, at))
    at += 8 * frozen_count
    tables: dict[int, ManifestSstEntry] = {}
    for _ in range(sst_count):
        entry, at = _decode_entry(file, at)
        tables[entry.id] = entry
    _require_end(file, at)
    return ManifestData(
        version=version,
        last_lsn=last_lsn,
        active_wal=active_wal,
        frozen_wals=frozen,
        tables=tables,
        next_sst_id=next_sst_id,
    )
