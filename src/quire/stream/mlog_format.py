"""The format of a stream's manifest log: record header, chunk header, and the commit copy at the end of a chunk.

A record is a header of 40 bytes and a payload, whose length is a multiple of 8 and never 0. A chunk is a header of 64 bytes
and records without gaps; the bytes [0, committed_len) were synced when its header was last written. `chunk_crc64` also covers
record headers, which `payload_crc64` does not. The *commit copy* repeats the chunk's header, with a count of the records, the
identity of store and stream, and its own checksum, in the last 128 bytes of a chunk's file or object: the chunk header has no
checksum and is overwritten in place. The copy is synced with the payload before the header is overwritten, and the header is
synced before the copy is overwritten, so at any moment one of the two is intact.

Little-endian, natural alignment. Importable on executors.
Threads: any (pure functions). Format: docs/formats/manifest-log.md.
Raises: `ManifestIntegrityError` with chunk, segment and offset; `FormatTooNew`."""

from __future__ import annotations

import struct
from typing import NamedTuple
from uuid import UUID

from quire.core.errors import FormatTooNew, ManifestIntegrityError, QuireError
from quire.durable.checksums import Bytes, crc64

MAGIC = 0x414F46324D4C4F47
"""AOF2MLOG as a number; its bytes are in reverse order on disk."""
VERSION = 1
SEALED, UPLOADED = 1, 2
KNOWN_FLAGS = SEALED | UPLOADED

RECORD = struct.Struct("<HHIQQQQ")
"""record_type, flags, payload_len, segment_id, logical_offset, timestamp_ms, payload_crc64"""
CHUNK = struct.Struct("<QIIQQQQQQ")
"""magic, version, header_len, chunk_index, base_record, tail_offset, committed_len, chunk_crc64, flags"""
COPY = struct.Struct("<64sQQ16sQ16sQ")
"""chunk header, record_count, snapshot_id, store_id, stream_id, reserved (0), crc64 of the 120 bytes before it"""

RECORD_BYTES = 40
CHUNK_BYTES = 64
COPY_BYTES = 128
COPY_CHECKED_BYTES = 120
ALIGNMENT = 8
GROWTH_BYTES = 64 << 10
CHUNK_FILE_BYTES_MIN = 16 << 10
CHUNK_FILE_BYTES_MAX = 1 << 20
NO_SEGMENT = 0
"""The segment id of records about the log itself."""

if RECORD.size != RECORD_BYTES or CHUNK.size != CHUNK_BYTES or COPY.size != COPY_BYTES:
    raise AssertionError("the manifest log's structs disagree with its literal sizes")
if COPY_BYTES != COPY_CHECKED_BYTES + 8 or CHUNK_BYTES % ALIGNMENT or RECORD_BYTES % ALIGNMENT:
    raise AssertionError("the manifest log's sizes contradict each other")

LOG_FIELDS = {"chunk": "chunk_index", "segment": "segment_id", "offset": "chunk_offset"}
"""Names in events for the fields of an error, so that event logs use one name for each field."""
HINT = "the stream stays closed: `quire manifest verify` shows the damage, `quire stream repair` what can be rebuilt"


class ChunkHeader(NamedTuple):
    """The first 64 bytes of a chunk."""

    magic: int
    version: int
    header_len: int
    chunk_index: int
    base_record: int
    tail_offset: int
    committed_len: int
    chunk_crc64: int
    flags: int

    @property
    def sealed(self) -> bool:
        return bool(self.flags & SEALED)

    @property
    def uploaded(self) -> bool:
        return bool(self.flags & UPLOADED)

    def encode(self) -> bytes:
        return CHUNK.pack(*self)


def new_header(
    *, chunk_index: int, base_record: int, committed_len: int = CHUNK_BYTES, chunk_crc64: int = 0, flags: int = 0
) -> ChunkHeader:
    """Return a header as this version writes it. Only committed records are written, so the tail is `committed_len`."""
    return ChunkHeader(
        MAGIC, VERSION, CHUNK_BYTES, chunk_index, base_record, committed_len, committed_len, chunk_crc64, flags
    )


class Identity(NamedTuple):
    """The store and stream that a chunk belongs to."""

    store_id: bytes
    """The UUID's 16 bytes; zeros if unknown."""
    stream_id: int

    def fits(self, other: Identity) -> bool:
        """Return whether both may belong to one log."""
        if NO_IDENTITY in (self, other):
            return True
        return self.stream_id == other.stream_id and (
            self.store_id == other.store_id or NO_STORE in (self.store_id, other.store_id)
        )


NO_STORE = bytes(16)
NO_IDENTITY = Identity(NO_STORE, 0)


def identity_of(store_id: str, stream_id: int) -> Identity:
    """Return the identity of a stream's log. `store_id` is the UUID as text, empty if unknown."""
    return Identity(UUID(store_id).bytes if store_id else NO_STORE, stream_id)


class ChunkFacts(NamedTuple):
    """The facts about a verified chunk; `encode` returns its commit copy."""

    header: ChunkHeader
    record_count: int
    snapshot_id: int
    """The id in the newest `SnapshotMarker` of the log up to the end of this chunk; 0 for none."""
    identity: Identity = NO_IDENTITY

    @property
    def next_record(self) -> int:
        """The ordinal of the first record after this chunk."""
        return self.header.base_record + self.record_count

    def encode(self) -> bytes:
        fields = (self.header.encode(), self.record_count, self.snapshot_id, *self.identity, bytes(16), 0)
        body = COPY.pack(*fields)[:COPY_CHECKED_BYTES]
        return body + crc64(body).to_bytes(8, "little")


def decode_chunk_header(data: Bytes) -> ChunkHeader:
    """Decode a chunk header without checking it."""
    return ChunkHeader._make(CHUNK.unpack_from(data))


def decode_copy(data: Bytes) -> ChunkFacts | None:
    """Decode the commit copy in the last 128 bytes of `data`; `None` if its checksum is wrong."""
    if len(data) < CHUNK_BYTES + COPY_BYTES:
        return None
    tail = memoryview(data)[-COPY_BYTES:]
    header, count, snapshot_id, store_id, stream_id, _, checksum = COPY.unpack(tail)
    if crc64(tail[:COPY_CHECKED_BYTES]) != checksum:
        return None
    return ChunkFacts(decode_chunk_header(header), count, snapshot_id, Identity(store_id, stream_id))


def settle(
    data: Bytes, *, chunk_index: int, path: str, owner: Identity = NO_IDENTITY
) -> tuple[ChunkHeader, ChunkFacts | None]:
    """Return the valid header, and the commit copy if it describes the same bytes. `owner` is the expected identity.

    `data` is the whole file or object. The committed bytes have been compared with `chunk_crc64` when this returns.
    """
    if len(data) < CHUNK_BYTES:
        raise damaged("the file is too short for a chunk", chunk=chunk_index, offset=0, path=path, size=len(data))
    header = decode_chunk_header(data)
    what = unsound(header, data, chunk_index)
    copy = decode_copy(data)
    if copy is not None:
        check_owner(copy.identity, owner, chunk=chunk_index, path=path)
    if copy is not None and unsound(copy.header, data, chunk_index) is None:
        if what is not None or copy.header.committed_len == header.committed_len:
            return copy.header, copy
        # An interrupted commit, or one in progress: it has not been acknowledged.
        return header, None
    if what is None:
        return header, None
    if header.magic == MAGIC and header.version > VERSION:
        raise FormatTooNew(
            "the manifest log was written by a newer quire", hint="upgrade quire", path=path, version=header.version
        )
    raise damaged(what, chunk=chunk_index, offset=0, path=path)


def check_owner(identity: Identity, owner: Identity, *, chunk: int, path: str) -> None:
    """Refuse a chunk of another log."""
    if not identity.fits(owner):
        whose = "stream" if identity.stream_id != owner.stream_id else "store"
        raise damaged(
            f"the chunk belongs to another {whose}",
            chunk=chunk,
            offset=0,
            path=path,
            store_id=str(UUID(bytes=identity.store_id)),
            stream_id=identity.stream_id,
        )


def unsound(header: ChunkHeader, data: Bytes, chunk_index: int) -> str | None:
    """Return what is wrong with a chunk header, given the bytes that it describes; `None` if nothing is."""
    if header.magic != MAGIC:
        return "the file does not start like a manifest-log chunk"
    if header.version != VERSION or header.header_len != CHUNK_BYTES:
        return "the chunk's header has an unknown version or length"
    if header.chunk_index != chunk_index:
        return "the chunk's header index does not match its file name"
    if header.flags & ~KNOWN_FLAGS or header.flags == UPLOADED:
        return "the chunk's header has unknown flags"
    if not CHUNK_BYTES < header.committed_len <= len(data) or header.committed_len % ALIGNMENT:
        return "the chunk's committed length is impossible"
    if header.tail_offset < header.committed_len or (header.sealed and header.tail_offset != header.committed_len):
        return "the chunk's tail is not behind what was committed"
    if crc64(memoryview(data)[CHUNK_BYTES : header.committed_len]) != header.chunk_crc64:
        return "the chunk fails its checksum"
    return None


def encode_record(
    record_type: int, segment_id: int, payload: bytes, *, logical_offset: int = 0, timestamp_ms: int = 0
) -> bytes:
    """Return a complete record. The caller has checked the payload (`mlog_records.check_payload`)."""
    head = RECORD.pack(record_type, 0, len(payload), segment_id, logical_offset, timestamp_ms, crc64(payload))
    return head + payload


def log_fields(error: QuireError) -> dict[str, object]:
    """Return the location of an error as fields of an event."""
    return {LOG_FIELDS.get(name, name): value for name, value in error.where.items()}


def damaged(
    what: str, *, chunk: int, offset: int, segment: int | None = None, hint: str = HINT, **where: object
) -> ManifestIntegrityError:
    """Return the error of a damaged log, with the chunk, the segment of the record if known, and the offset."""
    return ManifestIntegrityError(what, hint=hint, chunk=chunk, segment=segment, offset=offset, **where)
