"""The sixteen record types of the manifest log as values, and the encoding of their payloads.

A payload is the value's struct in natural alignment, then its text or bytes, then zeros up to a multiple of 8; it is never
empty. Only canonical bytes decode: exact length, zeros as padding, UTF-8. A record of an unknown type is preserved as bytes,
never dropped.

Importable on executors. Threads: any (pure functions and frozen values). Format: docs/formats/manifest-log.md.
Raises: `OutOfRange` for a value that does not fit its field, `InvalidInput`; `ManifestIntegrityError` for invalid bytes.

    >>> SegmentOpened(base_offset=4096, epoch=3).encode().hex()
    '00100000000000000300000000000000'
    >>> decode(RecordType.SEGMENT_OPENED, bytes.fromhex("00100000000000000300000000000000"))
    SegmentOpened(base_offset=4096, epoch=3)
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import ClassVar, Self, TypeAlias

import msgspec
from msgspec.structs import astuple

from quire.core.errors import InvalidInput, OutOfRange
from quire.core.ids import U16_MAX
from quire.stream.mlog_format import ALIGNMENT, damaged

PAYLOAD_BYTES_MAX = 256 << 10
"""A key and an etag of 64 KiB each fit; a larger record would need a chunk to itself."""


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
    """`schema_id` of quire's own custom events: moves that the sixteen types do not cover."""

    WARM_EVICTED = 1
    """The tier 1 copy of a segment was removed."""
    SEGMENT_RETIRED = 2
    """Retention removed a segment from all tiers; its id is never reused."""
    NEEDS_REPAIR = 3
    """The object that is the only copy of a segment is missing."""
    REPAIRED = 4
    """The object exists again."""


_U64_U64 = struct.Struct("<QQ")
_U64_U32 = struct.Struct("<QI4x")
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I4x")
_MARKER = struct.Struct("<QQQ")
_KEY = struct.Struct("<H")
_KEY_ETAG = struct.Struct("<HH")
_KEY_REASON = struct.Struct("<H2xI")
_SCHEMA_BLOB = struct.Struct("<IH")


class KnownPayload(msgspec.Struct, frozen=True):
    """A record of a known type. `LAYOUT` packs its fields, unless it has text or bytes."""

    TYPE: ClassVar[RecordType]
    LAYOUT: ClassVar[struct.Struct]

    def encode(self) -> bytes:
        return self.LAYOUT.pack(*astuple(self))

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        return cls(*cls.LAYOUT.unpack(payload))


class _Keyed(KnownPayload, frozen=True):
    LAYOUT: ClassVar[struct.Struct] = _KEY
    key: str

    def encode(self) -> bytes:
        key = self.key.encode()
        return _padded(_KEY.pack(len(key)) + key)

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        return cls(_text(payload, 2, _KEY.unpack_from(payload)[0]))


class SegmentOpened(KnownPayload, frozen=True):
    """Tier 0 starts a new segment."""

    TYPE: ClassVar[RecordType] = RecordType.SEGMENT_OPENED
    LAYOUT: ClassVar[struct.Struct] = _U64_U32
    base_offset: int
    epoch: int


class SealSegment(KnownPayload, frozen=True):
    """The segment is sealed in tier 0."""

    TYPE: ClassVar[RecordType] = RecordType.SEAL_SEGMENT
    LAYOUT: ClassVar[struct.Struct] = _U64_U64
    durable_bytes: int
    segment_crc64: int


class CompressionStarted(KnownPayload, frozen=True):
    """The compression of the segment to tier 1 was admitted."""

    TYPE: ClassVar[RecordType] = RecordType.COMPRESSION_STARTED
    LAYOUT: ClassVar[struct.Struct] = _U32
    job_id: int


class CompressionDone(KnownPayload, frozen=True):
    """Compression finished; the warm artifact is durable."""

    TYPE: ClassVar[RecordType] = RecordType.COMPRESSION_DONE
    LAYOUT: ClassVar[struct.Struct] = _U64_U32
    compressed_bytes: int
    dictionary_id: int


class CompressionFailed(KnownPayload, frozen=True):
    """Background compression failed."""

    TYPE: ClassVar[RecordType] = RecordType.COMPRESSION_FAILED
    LAYOUT: ClassVar[struct.Struct] = _U32
    reason_code: int


class UploadStarted(_Keyed, frozen=True):
    """The upload of the segment to tier 2 started."""

    TYPE: ClassVar[RecordType] = RecordType.UPLOAD_STARTED


class UploadDone(KnownPayload, frozen=True):
    """The upload finished, under this key and with this etag."""

    TYPE: ClassVar[RecordType] = RecordType.UPLOAD_DONE
    LAYOUT: ClassVar[struct.Struct] = _KEY_ETAG
    key: str
    etag: str

    def encode(self) -> bytes:
        key, etag = self.key.encode(), self.etag.encode()
        return _padded(_KEY_ETAG.pack(len(key), len(etag)) + key + etag)

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        size, etag = _KEY_ETAG.unpack_from(payload)
        return cls(_text(payload, 4, size), _text(payload, 4 + size, etag))


class UploadFailed(KnownPayload, frozen=True):
    """The upload failed; the key distinguishes a retry from another upload."""

    TYPE: ClassVar[RecordType] = RecordType.UPLOAD_FAILED
    LAYOUT: ClassVar[struct.Struct] = _KEY_REASON
    key: str
    reason_code: int

    def encode(self) -> bytes:
        key = self.key.encode()
        return _padded(_KEY_REASON.pack(len(key), self.reason_code) + key)

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        size, reason = _KEY_REASON.unpack_from(payload)
        return cls(_text(payload, 8, size), reason)


class Tier2DeleteQueued(_Keyed, frozen=True):
    """The object is to be deleted."""

    TYPE: ClassVar[RecordType] = RecordType.TIER2_DELETE_QUEUED


class Tier2Deleted(_Keyed, frozen=True):
    """The object is deleted; caches may drop it."""

    TYPE: ClassVar[RecordType] = RecordType.TIER2_DELETED


class HydrationStarted(KnownPayload, frozen=True):
    """A copy in tier 0 was requested, from tier 1 or 2."""

    TYPE: ClassVar[RecordType] = RecordType.HYDRATION_STARTED
    LAYOUT: ClassVar[struct.Struct] = _U64
    source_tier: int


class HydrationDone(KnownPayload, frozen=True):
    """The segment is in tier 0 again."""

    TYPE: ClassVar[RecordType] = RecordType.HYDRATION_DONE
    LAYOUT: ClassVar[struct.Struct] = _U64
    resident_bytes: int


class HydrationFailed(KnownPayload, frozen=True):
    """Hydration failed; it is retried later."""

    TYPE: ClassVar[RecordType] = RecordType.HYDRATION_FAILED
    LAYOUT: ClassVar[struct.Struct] = _U32
    reason_code: int


class LocalEvicted(KnownPayload, frozen=True):
    """The tier 0 copy was removed."""

    TYPE: ClassVar[RecordType] = RecordType.LOCAL_EVICTED
    LAYOUT: ClassVar[struct.Struct] = _U64
    reclaimed_bytes: int


class SnapshotMarker(KnownPayload, frozen=True):
    """Snapshot `snapshot_id` is durable and contains everything before (chunk_index, chunk_offset)."""

    TYPE: ClassVar[RecordType] = RecordType.SNAPSHOT_MARKER
    LAYOUT: ClassVar[struct.Struct] = _MARKER
    chunk_index: int
    chunk_offset: int
    snapshot_id: int


class CustomEvent(KnownPayload, frozen=True):
    """Any other event; schemas below 1024 are quire's own."""

    TYPE: ClassVar[RecordType] = RecordType.CUSTOM_EVENT
    LAYOUT: ClassVar[struct.Struct] = _SCHEMA_BLOB
    schema_id: int
    blob: bytes = b""

    def encode(self) -> bytes:
        return _padded(_SCHEMA_BLOB.pack(self.schema_id, len(self.blob)) + self.blob)

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        schema, size = _SCHEMA_BLOB.unpack_from(payload)
        if len(payload) < 6 + size:
            raise IndexError
        return cls(schema, payload[6 : 6 + size])


class UnknownRecord(msgspec.Struct, frozen=True):
    """A record of a type that a later version defined."""

    record_type: int
    payload: bytes

    @property
    def TYPE(self) -> int:  # noqa: N802 - a constant in its sibling classes
        return self.record_type

    def encode(self) -> bytes:
        return self.payload


Payload: TypeAlias = KnownPayload | UnknownRecord

_KNOWN: dict[int, type[KnownPayload]] = {
    known.TYPE: known
    for known in (
        SegmentOpened, SealSegment, CompressionStarted, CompressionDone, CompressionFailed, UploadStarted, UploadDone,
        UploadFailed, Tier2DeleteQueued, Tier2Deleted, HydrationStarted, HydrationDone, HydrationFailed, LocalEvicted,
        SnapshotMarker, CustomEvent,
    )
}  # fmt: skip
_KEY_AT: dict[int, int] = {RecordType.UPLOAD_DONE: 4, RecordType.UPLOAD_FAILED: 8}


def encode(value: Payload) -> bytes:
    """Return the checked payload of a value."""
    try:
        payload = value.encode()
    except struct.error as error:
        raise OutOfRange(f"a field of the record does not fit: {error}", record=value) from None
    check_payload(value.TYPE, payload)
    return payload


def check_payload(record_type: int, payload: bytes) -> None:
    """Refuse empty, unaligned or oversized payloads."""
    if not payload or len(payload) % ALIGNMENT or len(payload) > PAYLOAD_BYTES_MAX:
        raise OutOfRange(
            f"a payload has a multiple of {ALIGNMENT} bytes, at least one and at most {PAYLOAD_BYTES_MAX}",
            hint="empty records are not allowed",
            size=len(payload),
        )
    if not 0 <= record_type <= U16_MAX:
        raise OutOfRange("record_type does not fit an unsigned 16-bit field", value=record_type)


def decode(record_type: int, payload: bytes, *, chunk: int = 0, segment: int = 0, offset: int = 0) -> Payload:
    """Decode a payload; `chunk`, `segment` and `offset` are for error messages."""
    if record_type > RecordType.CUSTOM_EVENT:
        return UnknownRecord(record_type, payload)
    try:
        value = _KNOWN[record_type].decode(payload)
        if value.encode() == payload:  # canonical bytes only: no data may hide in the padding
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
    """Return the bytes of the object key in the payload of an upload or delete record."""
    start = _KEY_AT.get(record_type, 2)
    return payload[start : start + int.from_bytes(payload[:2], "little")]


def _text(payload: bytes, start: int, size: int) -> str:
    if len(payload) < start + size:
        raise IndexError
    return payload[start : start + size].decode()


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)
