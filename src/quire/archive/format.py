"""The objects of an archive: events, the header before them, and object names. Layout: docs/formats/archive.md.

Terms
  event    one change of the store's directory or of its manifest, as it was made: bytes written to a file, a new name, the rows
           of one commit. Files are identified by inode: names change, and a replay must not mistake one file for another
  log      objects of events, numbered from 0 in each owner epoch without a gap; each carries the digest of the one before it
  base     everything a store had, as events, in parts; it counts from the log object on that names it (`BaseEvent`)
  seal     a log object without events: the owner that would write this number next was deposed

An event states the result of a change, so applying it twice is harmless. A base is read while the store is in use; the log,
from the object that was due when the base began, corrects whatever changed meanwhile.

The size of an object from a bucket is limited by its header before it is decompressed, and its digests must match.

Threads: pure functions; any. Raises `Corruption`, `FormatTooNew`, `InvalidName`.
"""

from __future__ import annotations

import hashlib
import re
import struct
from enum import IntEnum
from typing import Any

import msgspec
import zstandard

from quire.core.decoding import UNDECODABLE
from quire.core.errors import Corruption, FormatTooNew
from quire.core.ids import u32, u64
from quire.core.limits import MIB
from quire.durable.checksums import crc64
from quire.durable.object_names import archive_epoch_prefix, store_prefix

FORMAT = 1
MAGIC = b"QUIREARC"
HEADER = struct.Struct("<8sHHIQIQ32sQQQIQQ32s")
HEADER_BYTES = 152
CHECKSUM = struct.Struct("<Q")
assert HEADER.size + CHECKSUM.size == HEADER_BYTES, HEADER.size

OBJECT_BYTES = 32 * MIB
"""An object is closed when its events have this many bytes; the last event may exceed it."""
RAW_BYTES_MAX = 1024 * MIB
"""Upper bound of what an object decompresses to: one commit of 65,536 operations is a tenth of it."""
COMPRESSION_LEVEL = 1
NONE = 0xFFFF_FFFF_FFFF_FFFF
"""In a header: no such object."""
NO_DIGEST = bytes(32)
HELPED_BY = "`quire archive audit` names every object that is missing or damaged; restore an earlier moment with --at"


class Kind(IntEnum):
    LOG = 1
    BASE = 2
    SEAL = 3


# ── events ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class LogEvent(msgspec.Struct, frozen=True, array_like=True, tag_field="t", gc=False):
    """The base class of events. New fields are added at the end, new events get new tags."""

    def size_bytes(self) -> int:
        """Return the approximate bytes of the event in an object."""
        return 64


class CreateEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=1):
    """A new, empty file with this name."""

    file: int
    path: str


class WriteEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=2):
    """Bytes at an offset of a file."""

    file: int
    offset: int
    data: bytes

    def size_bytes(self) -> int:
        return 64 + len(self.data)


class ZeroEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=3):
    """`length` zero bytes at an offset of a file."""

    file: int
    offset: int
    length: int


class TruncateEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=4):
    """The file has exactly this size; bytes beyond its former end are zeros."""

    file: int
    size: int


class ReserveEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=5):
    """The file has at least this size."""

    file: int
    size: int


class RenameEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=6):
    """The file has the name `path` and no longer `former`. A file that had the name `path` has lost it."""

    file: int
    former: str
    path: str


class LinkEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=7):
    """The file has an additional name."""

    file: int
    path: str


class RemoveEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=8):
    """The file has lost this name. A file without a name no longer exists."""

    file: int
    path: str


class ArtifactEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=9):
    """An immutable file with this name; its bytes are a separate object."""

    file: int
    path: str
    key: str
    size: int
    sha256: bytes


class CommitEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=10):
    """One transaction of the manifest: (table, rows put, keys deleted) for each table."""

    tables: tuple[tuple[str, list[tuple[bytes, bytes]], list[bytes]], ...]

    def size_bytes(self) -> int:
        rows = sum(len(key) + len(row) + 8 for _, puts, _ in self.tables for key, row in puts)
        return 64 + rows + sum(len(key) + 4 for _, _, deletes in self.tables for key in deletes)


class BaseEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=11):
    """A base is complete: the name, size and digest of its parts, and the log object with which its replay begins."""

    first_log: int
    parts: tuple[tuple[str, int, bytes], ...]

    def size_bytes(self) -> int:
        return 64 + 160 * len(self.parts)


class DirectoryEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=12):
    """A directory with this name exists."""

    path: str


class StandbyEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=13):
    """The heartbeat of earlier versions, which is read and ignored (decision 086)."""

    standbys: tuple[str, ...]


class BreakEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=14):
    """Changes before this object may be missing from the log: a standby must continue from the next base."""


AnyEvent = (
    CreateEvent
    | WriteEvent
    | ZeroEvent
    | TruncateEvent
    | ReserveEvent
    | RenameEvent
    | LinkEvent
    | RemoveEvent
    | ArtifactEvent
    | CommitEvent
    | BaseEvent
    | DirectoryEvent
    | StandbyEvent
    | BreakEvent
)

_encoder = msgspec.msgpack.Encoder()
_decoder: Any = msgspec.msgpack.Decoder(list[AnyEvent])


# ── objects ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class Position(msgspec.Struct, frozen=True, order=True):
    """A position in the archive: a log object of an owner epoch."""

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The header of an object."""

    kind: Kind
    position: Position
    """For a log object, its own; for a part of a base, the log object with which its replay begins."""
    parent: Position
    """The log object before it; for the first of an epoch, the last object of the owner before, or (0, 0) if there was none."""
    parent_digest: bytes = NO_DIGEST
    """SHA-256 of that whole object."""
    at_ms: int
    """The owner's clock when the last event was taken."""
    restorable: int = NONE
    """The newest object of this epoch, up to this one, after which the store can be restored. It does not advance after a break
    of the chain until the next base."""
    base: int = NONE
    """The object that names the base with which that restore begins."""
    successor: int = 0
    """For a seal, the owner epoch that wrote it."""
    raw_bytes: int = 0
    body_bytes: int = 0
    body_digest: bytes = NO_DIGEST


def encode_object(header: Header, events: list[AnyEvent]) -> bytes:
    """Encode an object, and fill in the sizes and digest of its header. Compression releases the interpreter lock."""
    raw = _encoder.encode(events)
    raw_bytes = len(raw)
    assert raw_bytes <= RAW_BYTES_MAX, "no reader would accept the object"
    body = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL).compress(raw)
    del raw  # as large as the events, and the result below is one more copy
    fields = HEADER.pack(
        MAGIC,
        FORMAT,
        header.kind,
        header.position.epoch,
        header.position.number,
        header.parent.epoch,
        header.parent.number,
        header.parent_digest,
        header.at_ms,
        header.restorable,
        header.base,
        header.successor,
        raw_bytes,
        len(body),
        hashlib.sha256(body).digest(),
    )
    return fields + CHECKSUM.pack(crc64(fields)) + body


def decode_header(data: bytes, key: str) -> Header:
    """Decode the header of an object from its first bytes."""
    fields = data[: HEADER.size]
    if len(data) < HEADER_BYTES or data[:8] != MAGIC:
        raise _damaged(key, "it does not start like an archive object")
    if CHECKSUM.unpack_from(data, HEADER.size)[0] != crc64(fields):
        raise _damaged(key, "the checksum of its header is wrong")
    _, version, kind, epoch, number, parent_epoch, parent_number, *rest = HEADER.unpack(fields)
    parent, at_ms, restorable, base, successor, raw, body, digest = rest
    if version > FORMAT:
        raise FormatTooNew("the archive was written by a newer quire", hint="upgrade quire", key=key, version=version)
    if kind not in Kind._value2member_map_:
        raise _damaged(key, f"unknown kind {kind}")
    return Header(
        kind=Kind(kind),
        position=Position(epoch, number),
        parent=Position(parent_epoch, parent_number),
        parent_digest=parent,
        at_ms=at_ms,
        restorable=restorable,
        base=base,
        successor=successor,
        raw_bytes=raw,
        body_bytes=body,
        body_digest=digest,
    )


def decode_object(data: bytes, key: str) -> tuple[Header, list[AnyEvent]]:
    """Decode a whole object. Return its header and events."""
    header = decode_header(data, key)
    body = memoryview(data)[HEADER_BYTES:]
    if len(body) != header.body_bytes or hashlib.sha256(body).digest() != header.body_digest:
        raise _damaged(key, "its events do not match its header")
    # Before the decompression, which allocates this much.
    if header.raw_bytes > RAW_BYTES_MAX:
        raise _damaged(key, f"it claims to hold {header.raw_bytes:,} bytes")
    try:
        raw = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(body, max_output_size=header.raw_bytes)
        if len(raw) != header.raw_bytes:
            raise _damaged(key, "it does not decompress to what its header says")
        return header, _decoder.decode(raw)
    except (zstandard.ZstdError, *UNDECODABLE) as error:
        raise _damaged(key, str(error)) from error


def _damaged(key: str, cause: str) -> Corruption:
    return Corruption("an object of the archive is damaged", hint=HELPED_BY, key=key, cause=cause)


# ── names ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
_LOG_KEY = re.compile(r"[0-9a-f-]{36}/archive/([0-9a-f]{8})/log/([0-9a-f]{16})")
_ARCHIVE_KEY = re.compile(
    r"[0-9a-f-]{36}/archive/([0-9a-f]{8})/(?:(log)/([0-9a-f]{16})|(base)/([0-9a-f]{16})/[0-9a-f]{8}|(file)/([0-9a-f]{16})-.+)"
)


def archive_prefix(store_id: str) -> str:
    """Return the prefix of the archive of a store, which nothing else uses."""
    return f"{store_prefix(store_id)}/archive"


def part_prefix(store_id: str, epoch: int, part: str) -> str:
    """Return the prefix of an owner epoch's `log`, `base` or `file` objects."""
    assert part in ("log", "base", "file"), part
    return f"{archive_epoch_prefix(store_id, epoch)}/{part}"


def log_key(store_id: str, position: Position) -> str:
    """Return the name of a log object."""
    return f"{part_prefix(store_id, position.epoch, 'log')}/{u64('number', position.number):016x}"


def base_key(store_id: str, position: Position, part: int) -> str:
    """Return the name of a part of the base whose replay begins at `position`."""
    return (
        f"{part_prefix(store_id, position.epoch, 'base')}/{u64('number', position.number):016x}/{u32('part', part):08x}"
    )


def file_key(store_id: str, position: Position, name: str) -> str:
    """Return the name of an immutable file. `position`: the log object that was due when the file was found."""
    return f"{part_prefix(store_id, position.epoch, 'file')}/{u64('number', position.number):016x}-{name}"


def parse_log_key(key: str) -> Position | None:
    """Return the position of a log object's name, or `None` if it is not one."""
    match = _LOG_KEY.fullmatch(key)
    return None if match is None else Position(int(match[1], 16), int(match[2], 16))


def parse_archive_key(key: str) -> tuple[Position, str] | None:
    """Return (position, `log`, `base` or `file`) of a name in an archive, or `None` if it is not one."""
    match = _ARCHIVE_KEY.fullmatch(key)
    if match is None:
        return None
    part, number = next((match[at], match[at + 1]) for at in (2, 4, 6) if match[at])
    return Position(int(match[1], 16), int(number, 16)), part
