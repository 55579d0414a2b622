"""The objects of an archive: events, the header in front of them, and their names. Layout: docs/formats/archive.md.

Terms
  event    one change of the store's directory or of its manifest, as it was made: bytes written to a file, a new name, the rows
           of one commit. Files are known by their inode: names change, and a replay must not mistake one file for another
  log      objects of events, numbered from 0 in each owner epoch without a gap; each carries the digest of the one before it
  base     everything a store had, as events, in parts; it counts from the log object on that names it (`BaseEvent`)
  seal     a log object without events: the owner that would write this number next was deposed

Every event says what is there afterwards, not what was there before, so that applying one again does no harm. A base is read
while the store goes on; the log from the object on that was due when the base began puts right whatever changed meanwhile.

What comes from a bucket is bounded by its header before it is decompressed, and believed only if its digests agree.

Pure functions, any thread. Raises `Corruption`, `FormatTooNew`, `InvalidName`.
"""

from __future__ import annotations

import hashlib
import re
import struct
from enum import IntEnum
from typing import Any

import msgspec
import zstandard

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
"""An object is closed when its events have this many bytes; one event may go beyond it."""
RAW_BYTES_MAX = 1024 * MIB
"""More than any object of ours decompresses to: one commit of 65,536 operations is a tenth of it."""
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
    """The values below are these, in a fixed order; new fields are added at the end, new events get new tags."""

    def size_bytes(self) -> int:
        """What it takes in an object, nearly."""
        return 64


class CreateEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=1):
    """A new, empty file has this name."""

    file: int
    path: str


class WriteEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=2):
    """These bytes are at this offset."""

    file: int
    offset: int
    data: bytes

    def size_bytes(self) -> int:
        return 64 + len(self.data)


class ZeroEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=3):
    """`length` zero bytes are at this offset."""

    file: int
    offset: int
    length: int


class TruncateEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=4):
    """The file has this size; what is new of it reads as zeros."""

    file: int
    size: int


class ReserveEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=5):
    """The file has at least this size."""

    file: int
    size: int


class RenameEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=6):
    """The file has `path` as a name and no longer `former`. Whatever had that name has lost it."""

    file: int
    former: str
    path: str


class LinkEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=7):
    """The file has one name more."""

    file: int
    path: str


class RemoveEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=8):
    """The file has lost this name; without a name it is gone."""

    file: int
    path: str


class ArtifactEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=9):
    """A file that never changes has this name; its bytes are an object of their own."""

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
    """A base is complete: its parts by name, size and digest, and the log object its replay begins with."""

    first_log: int
    parts: tuple[tuple[str, int, bytes], ...]

    def size_bytes(self) -> int:
        return 64 + 160 * len(self.parts)


class DirectoryEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=12):
    """There is a directory of this name."""

    path: str


class StandbyEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=13):
    """The owner is alive, and knows that these standbys follow it."""

    standbys: tuple[str, ...]


class BreakEvent(LogEvent, frozen=True, array_like=True, gc=False, tag=14):
    """Changes before this object may be missing from the log: whoever follows it begins again with the next base."""


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
    """A place in the archive: a log object of an owner epoch."""

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What stands before the events of an object."""

    kind: Kind
    position: Position
    """Of a log object its own; of a part of a base the log object its replay begins with."""
    parent: Position
    """The log object before it; of an epoch's first one the last object of the owner before, (0, 0) if there was none."""
    parent_digest: bytes = NO_DIGEST
    """SHA-256 of that whole object."""
    at_ms: int
    """The owner's clock when the last event was taken."""
    restorable: int = NONE
    """The newest object of this epoch, this one included, after which the store can be restored: a chain that was broken has
    to wait for its next base."""
    base: int = NONE
    """The object that names the base which that restore begins with."""
    successor: int = 0
    """Of a seal: the owner epoch that wrote it."""
    raw_bytes: int = 0
    body_bytes: int = 0
    body_digest: bytes = NO_DIGEST


def encode_object(header: Header, events: list[AnyEvent]) -> bytes:
    """The bytes of an object; sizes and digest of the header are filled in here. Compresses outside the interpreter's lock."""
    raw = _encoder.encode(events)
    raw_bytes = len(raw)
    body = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL).compress(raw)
    del raw  # as large as the events; the object below is one more copy
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
    """The header of an object, from its first bytes."""
    fields = data[: HEADER.size]
    if len(data) < HEADER_BYTES or data[:8] != MAGIC:
        raise _damaged(key, "it does not begin as an object of an archive")
    if CHECKSUM.unpack_from(data, HEADER.size)[0] != crc64(fields):
        raise _damaged(key, "the checksum of its header is wrong")
    _, version, kind, epoch, number, parent_epoch, parent_number, *rest = HEADER.unpack(fields)
    parent, at_ms, restorable, base, successor, raw, body, digest = rest
    if version > FORMAT:
        raise FormatTooNew("the archive was written by a newer quire", hint="upgrade quire", key=key, version=version)
    if kind not in Kind._value2member_map_:
        raise _damaged(key, f"there is no kind {kind}")
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
    """Header and events of an object that was read whole."""
    header = decode_header(data, key)
    body = memoryview(data)[HEADER_BYTES:]
    if len(body) != header.body_bytes or hashlib.sha256(body).digest() != header.body_digest:
        raise _damaged(key, "its events are not those that its header vouches for")
    if header.raw_bytes > RAW_BYTES_MAX:
        raise _damaged(key, f"it claims to hold {header.raw_bytes:,} bytes")
    try:
        raw = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(body, max_output_size=header.raw_bytes)
        if len(raw) != header.raw_bytes:
            raise _damaged(key, "it does not decompress to what its header says")
        return header, _decoder.decode(raw)
    except (zstandard.ZstdError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(key, str(error)) from error


def _damaged(key: str, cause: str) -> Corruption:
    return Corruption("an object of the archive is damaged", hint=HELPED_BY, key=key, cause=cause)


# ── names ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
_LOG_KEY = re.compile(r"[0-9a-f-]{36}/archive/([0-9a-f]{8})/log/([0-9a-f]{16})")
_ARCHIVE_KEY = re.compile(
    r"[0-9a-f-]{36}/archive/([0-9a-f]{8})/(?:(log)/([0-9a-f]{16})|(base)/([0-9a-f]{16})/[0-9a-f]{8}|(file)/([0-9a-f]{16})-.+)"
)


def archive_prefix(store_id: str) -> str:
    """Below it is the archive of a store, and nothing else."""
    return f"{store_prefix(store_id)}/archive"


def part_prefix(store_id: str, epoch: int, part: str) -> str:
    """Where an owner epoch has its `log`, `base` or `file` objects."""
    assert part in ("log", "base", "file"), part
    return f"{archive_epoch_prefix(store_id, epoch)}/{part}"


def log_key(store_id: str, position: Position) -> str:
    """The name of a log object."""
    return f"{part_prefix(store_id, position.epoch, 'log')}/{u64('number', position.number):016x}"


def base_key(store_id: str, position: Position, part: int) -> str:
    """The name of a part of the base whose replay begins at `position`."""
    return (
        f"{part_prefix(store_id, position.epoch, 'base')}/{u64('number', position.number):016x}/{u32('part', part):08x}"
    )


def file_key(store_id: str, position: Position, name: str) -> str:
    """The name of a file that never changes; `position` is the log object that was due when it was met."""
    return f"{part_prefix(store_id, position.epoch, 'file')}/{u64('number', position.number):016x}-{name}"


def parse_log_key(key: str) -> Position | None:
    """The position that a name is of; `None` for a foreign one."""
    match = _LOG_KEY.fullmatch(key)
    return None if match is None else Position(int(match[1], 16), int(match[2], 16))


def parse_archive_key(key: str) -> tuple[Position, str] | None:
    """(position, `log`, `base` or `file`) of a name in an archive; `None` for a foreign one."""
    match = _ARCHIVE_KEY.fullmatch(key)
    if match is None:
        return None
    part, number = next((match[at], match[at + 1]) for at in (2, 4, 6) if match[at])
    return Position(int(match[1], 16), int(number, 16)), part
