"""The sixteen kinds of records of the manifest log, as values, and their payloads as bytes.

Terms
  payload   the value's struct in natural alignment, then its text or bytes, then zeros up to a multiple of 8
  unknown   a record type that this version has no name for: it is carried along as bytes, never dropped

Rules
  1. `decode(type, value.encode()) == value`, and only canonical bytes decode: exact length, zeros as padding, UTF-8.
  2. A payload is never empty, so no record is.
  3. A `CustomEvent` of one of the schemas below 1024 is quire's own; above they are the users'.

Pure functions and frozen values, any thread; importable on executors. Format page: `docs/formats/manifest-log.md`.
Raises `OutOfRange` for a value that does not fit its field, `InvalidInput`; `ManifestIntegrityError` for bytes.

    >>> SegmentOpened(base_offset=4096, epoch=3).encode().hex()
    '00100000000000000300000000000000'
    >>> decode(RecordType.SEGMENT_OPENED, bytes.fromhex("00100000000000000300000000000000"))
    SegmentOpened(base_offset=4096, epoch=3)
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import ClassVar, TypeAlias

import msgspec

from quire.core.errors import InvalidInput, OutOfRange
from quire.core.ids import U16_MAX
from quire.stream.mlog_format import ALIGNMENT, damaged

PAYLOAD_BYTES_MAX = 256 << 10
"""A key and an etag of 64 KiB each fit; a record above this would need a chunk of its own."""


class RecordType(IntEnum):
    """`record_type`, as numbered by the format."""

    SEGMENT_OPENED = 0
    SEAL_SEGMENT = 1
    COMPRESSION_STARTED = 2
    COMPRESSION_DONE = 3
    COMPRESSION_FAILED = 4
    UPLOAD_STARTED = 5
    UPLOAD_DONE = 6
    UPLOAD_FAILED = 7
    TIER2_DELETE_QUEUED = 8
    TIER2_DELETED = 9
    HYDRATION_STARTED = 10
    HYDRATION_DONE = 11
    HYDRATION_FAILED = 12
    LOCAL_EVICTED = 13
    SNAPSHOT_MARKER = 14
    CUSTOM_EVENT = 15


class Schema(IntEnum):
    """`schema_id` of quire's own custom events: moves for which the sixteen types have no word."""

    WARM_EVICTED = 1
    """The tier 1 copy of a segment is gone."""
    SEGMENT_RETIRED = 2
    """Retention let a segment go, on all tiers; its id never comes back."""
    NEEDS_REPAIR = 3
    """The only copy of a segment, its object, is gone."""
    REPAIRED = 4
    """It is there again."""


_U64_U64 = struct.Struct("<QQ")
_U64_U32 = struct.Struct("<QI4x")
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I4x")
_MARKER = struct.Struct("<QQQ")
_KEY = struct.Struct("<H")
_KEY_ETAG = struct.Struct("<HH")
_KEY_REASON = struct.Struct("<H2xI")
_SCHEMA_BLOB = struct.Struct("<IH")


class SegmentOpened(msgspec.Struct, frozen=True):
    """Tier 0 starts a new segment."""

    TYPE: ClassVar[RecordType] = RecordType.SEGMENT_OPENED
    base_offset: int
    epoch: int

    def encode(self) -> bytes:
        return _U64_U32.pack(self.base_offset, self.epoch)


class SealSegment(msgspec.Struct, frozen=True):
    """The segment is sealed in tier 0."""

    TYPE: ClassVar[RecordType] = RecordType.SEAL_SEGMENT
    durable_bytes: int
    segment_crc64: int

    def encode(self) -> bytes:
        return _U64_U64.pack(self.durable_bytes, self.segment_crc64)


class CompressionStarted(msgspec.Struct, frozen=True):
    """Tier 1 compression admitted."""

    TYPE: ClassVar[RecordType] = RecordType.COMPRESSION_STARTED
    job_id: int

    def encode(self) -> bytes:
        return _U32.pack(self.job_id)


class CompressionDone(msgspec.Struct, frozen=True):
    """Compression finished, the warm artifact is durable."""

    TYPE: ClassVar[RecordType] = RecordType.COMPRESSION_DONE
    compressed_bytes: int
    dictionary_id: int

    def encode(self) -> bytes:
        return _U64_U32.pack(self.compressed_bytes, self.dictionary_id)


class CompressionFailed(msgspec.Struct, frozen=True):
    """Background compression failed."""

    TYPE: ClassVar[RecordType] = RecordType.COMPRESSION_FAILED
    reason_code: int

    def encode(self) -> bytes:
        return _U32.pack(self.reason_code)


class UploadStarted(msgspec.Struct, frozen=True):
    """The upload of the segment to tier 2 began."""

    TYPE: ClassVar[RecordType] = RecordType.UPLOAD_STARTED
    key: str

    def encode(self) -> bytes:
        key = self.key.encode()
        return _padded(_KEY.pack(len(key)) + key)


class UploadDone(msgspec.Struct, frozen=True):
    """The upload ended: under which key, and with which etag."""

    TYPE: ClassVar[RecordType] = RecordType.UPLOAD_DONE
    key: str
    etag: str

    def encode(self) -> bytes:
        key, etag = self.key.encode(), self.etag.encode()
        return _padded(_KEY_ETAG.pack(len(key), len(etag)) + key + etag)


class UploadFailed(msgspec.Struct, frozen=True):
    """The upload failed; the key lets a retry be told from another upload."""

    TYPE: ClassVar[RecordType] = RecordType.UPLOAD_FAILED
    key: str
    reason_code: int

    def encode(self) -> bytes:
        key = self.key.encode()
        return _padded(_KEY_REASON.pack(len(key), self.reason_code) + key)


class Tier2DeleteQueued(msgspec.Struct, frozen=True):
    """The object is to be deleted."""

    TYPE: ClassVar[RecordType] = RecordType.TIER2_DELETE_QUEUED
    key: str

    def encode(self) -> bytes:
        key = self.key.encode()
        return _padded(_KEY.pack(len(key)) + key)


class Tier2Deleted(msgspec.Struct, frozen=True):
    """The object is deleted; caches may let it go."""

    TYPE: ClassVar[RecordType] = RecordType.TIER2_DELETED
    key: str

    def encode(self) -> bytes:
        key = self.key.encode()
        return _padded(_KEY.pack(len(key)) + key)


class HydrationStarted(msgspec.Struct, frozen=True):
    """A copy in tier 0 was asked for, from tier 1 or 2."""

    TYPE: ClassVar[RecordType] = RecordType.HYDRATION_STARTED
    source_tier: int

    def encode(self) -> bytes:
        return _U64.pack(self.source_tier)


class HydrationDone(msgspec.Struct, frozen=True):
    """The segment is in tier 0 again."""

    TYPE: ClassVar[RecordType] = RecordType.HYDRATION_DONE
    resident_bytes: int

    def encode(self) -> bytes:
        return _U64.pack(self.resident_bytes)


class HydrationFailed(msgspec.Struct, frozen=True):
    """Hydration failed; it is tried again later."""

    TYPE: ClassVar[RecordType] = RecordType.HYDRATION_FAILED
    reason_code: int

    def encode(self) -> bytes:
        return _U32.pack(self.reason_code)


class LocalEvicted(msgspec.Struct, frozen=True):
    """The tier 0 copy is gone."""

    TYPE: ClassVar[RecordType] = RecordType.LOCAL_EVICTED
    reclaimed_bytes: int

    def encode(self) -> bytes:
        return _U64.pack(self.reclaimed_bytes)


class SnapshotMarker(msgspec.Struct, frozen=True):
    """Snapshot `snapshot_id` is durable and holds everything before (chunk_index, chunk_offset)."""

    TYPE: ClassVar[RecordType] = RecordType.SNAPSHOT_MARKER
    chunk_index: int
    chunk_offset: int
    snapshot_id: int

    def encode(self) -> bytes:
        return _MARKER.pack(self.chunk_index, self.chunk_offset, self.snapshot_id)


class CustomEvent(msgspec.Struct, frozen=True):
    """Anything else (rule 3)."""

    TYPE: ClassVar[RecordType] = RecordType.CUSTOM_EVENT
    schema_id: int
    blob: bytes = b""

    def encode(self) -> bytes:
        return _padded(_SCHEMA_BLOB.pack(self.schema_id, len(self.blob)) + self.blob)


class UnknownRecord(msgspec.Struct, frozen=True):
    """A record of a type that a later version defined."""

    record_type: int
    payload: bytes

    @property
    def TYPE(self) -> int:  # noqa: N802 - stands where its siblings have a constant
        return self.record_type

    def encode(self) -> bytes:
        return self.payload


KnownPayload: TypeAlias = (
    SegmentOpened
    | SealSegment
    | CompressionStarted
    | CompressionDone
    | CompressionFailed
    | UploadStarted
    | UploadDone
    | UploadFailed
    | Tier2DeleteQueued
    | Tier2Deleted
    | HydrationStarted
    | HydrationDone
    | HydrationFailed
    | LocalEvicted
    | SnapshotMarker
    | CustomEvent
)
Payload: TypeAlias = KnownPayload | UnknownRecord

_FIXED: dict[int, tuple[struct.Struct, type[KnownPayload]]] = {
    RecordType.SEGMENT_OPENED: (_U64_U32, SegmentOpened),
    RecordType.SEAL_SEGMENT: (_U64_U64, SealSegment),
    RecordType.COMPRESSION_STARTED: (_U32, CompressionStarted),
    RecordType.COMPRESSION_DONE: (_U64_U32, CompressionDone),
    RecordType.COMPRESSION_FAILED: (_U32, CompressionFailed),
    RecordType.HYDRATION_STARTED: (_U64, HydrationStarted),
    RecordType.HYDRATION_DONE: (_U64, HydrationDone),
    RecordType.HYDRATION_FAILED: (_U32, HydrationFailed),
    RecordType.LOCAL_EVICTED: (_U64, LocalEvicted),
    RecordType.SNAPSHOT_MARKER: (_MARKER, SnapshotMarker),
}
_KEYED: dict[int, type[UploadStarted | Tier2DeleteQueued | Tier2Deleted]] = {
    RecordType.UPLOAD_STARTED: UploadStarted,
    RecordType.TIER2_DELETE_QUEUED: Tier2DeleteQueued,
    RecordType.TIER2_DELETED: Tier2Deleted,
}
_KEY_AT: dict[int, int] = {RecordType.UPLOAD_DONE: 4, RecordType.UPLOAD_FAILED: 8}


def encode(value: Payload) -> bytes:
    """The payload of a value, checked."""
    try:
        payload = value.encode()
    except struct.error as error:
        raise OutOfRange(f"a field of the record does not fit: {error}", record=value) from None
    check_payload(value.TYPE, payload)
    return payload


def check_payload(record_type: int, payload: bytes) -> None:
    """Refuse what may not stand in a log: empty, unaligned or outsized payloads."""
    if not payload or len(payload) % ALIGNMENT or len(payload) > PAYLOAD_BYTES_MAX:
        raise OutOfRange(
            f"a payload has a multiple of {ALIGNMENT} bytes, at least one and at most {PAYLOAD_BYTES_MAX}",
            hint="empty records are not allowed",
            size=len(payload),
        )
    if not 0 <= record_type <= U16_MAX:
        raise OutOfRange("record_type does not fit an unsigned 16-bit field", value=record_type)


def decode(record_type: int, payload: bytes, *, chunk: int = 0, segment: int = 0, offset: int = 0) -> Payload:
    """The value of a payload; `chunk`, `segment` and `offset` are for the message."""
    if record_type > RecordType.CUSTOM_EVENT:
        return UnknownRecord(record_type, payload)
    try:
        value = _decode_known(record_type, payload)
        if value.encode() == payload:  # rule 1: nothing hides in the padding
            return value
    except (struct.error, UnicodeDecodeError, IndexError, InvalidInput):
        pass
    raise damaged(
        "a record's payload does not match its type",
        chunk=chunk,
        segment=segment,
        offset=offset,
        record_type=record_type,
    )


def key_of(record_type: int, payload: bytes) -> bytes:
    """The bytes of the object key in the payload of an upload or delete record."""
    start = _KEY_AT.get(record_type, 2)
    return payload[start : start + int.from_bytes(payload[:2], "little")]


def _decode_known(record_type: int, payload: bytes) -> KnownPayload:
    if fixed := _FIXED.get(record_type):
        layout, of = fixed
        return of(*layout.unpack(payload))
    if keyed := _KEYED.get(record_type):
        (size,) = _KEY.unpack_from(payload)
        return keyed(_text(payload, 2, size))
    if record_type == RecordType.UPLOAD_DONE:
        size, etag = _KEY_ETAG.unpack_from(payload)
        return UploadDone(_text(payload, 4, size), _text(payload, 4 + size, etag))
    if record_type == RecordType.UPLOAD_FAILED:
        size, reason = _KEY_REASON.unpack_from(payload)
        return UploadFailed(_text(payload, 8, size), reason)
    schema, size = _SCHEMA_BLOB.unpack_from(payload)
    if len(payload) < 6 + size:
        raise IndexError
    return CustomEvent(schema, payload[6 : 6 + size])


def _text(payload: bytes, start: int, size: int) -> str:
    if len(payload) < start + size:
        raise IndexError
    return payload[start : start + size].decode()


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)
