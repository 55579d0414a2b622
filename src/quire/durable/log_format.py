"""The bytes of a framed append log: one file header, then frames whose checksums form a chain.

Little-endian, no padding, no alignment. The header has a salt, new in each life of a file; a kind of four bytes, the type of
log; and from version 2 on the identity of the file: store, database, number. The *link* is the checksum at the end of the
header and of every frame. The *tag*, the low half of the salt, is in every frame: a scan jumps from candidate to candidate.
`synced` in each frame is the number of leading bytes of the file known to be durable when the frame was written; a *mark* is a
frame without payload that carries nothing else.

A frame at `offset` is *valid* if its tag is the log's, its length fits, header size ≤ `synced` ≤ `offset`, and its link equals
the crc64 of its head and payload seeded with **the eight bytes just before it**. So validity can be tested at any offset, yet a
frame is valid only directly after the frame that it was written after.

Threads: any; pure functions without I/O. Format page: `docs/formats/framed-log.md`. Raises `Corruption` for a bad header,
`FormatTooNew`, `WrongKind`; `OutOfRange` for a payload that is too large.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import msgspec

from quire.core.errors import Corruption, FormatTooNew, InvalidInput, OutOfRange, WrongKind
from quire.durable.checksums import Bytes, crc64

MAGIC = b"QUIRELOG"
VERSION = 2
NAMELESS_VERSION = 1
"""The version of headers without identity: logs written before identities existed, and logs that belong to no store."""

HEADER = struct.Struct("<8sHH4sQQ")
"""magic, version, reserved (0), kind, salt, link (crc64 of the 24 bytes before it): the same in every version, so that older
readers can raise `FormatTooNew`"""
NAME = struct.Struct("<16sIIQQ")
"""In version 2, after the header: store, database, reserved (0), number, link (crc64 of the 32 bytes before it, seeded with
the header's)"""
HEAD = struct.Struct("<IIQ")
"""length of the payload, tag, synced"""
LINK = struct.Struct("<Q")
"""crc64 of head and payload, seeded with the preceding link"""

HEADER_BYTES = 32
NAME_BYTES = 40
NAMED_HEADER_BYTES = 72
STORE_BYTES = 16
HEAD_BYTES = 16
LINK_BYTES = 8
OVERHEAD_BYTES = 24
"""Bytes of a frame in addition to its payload."""
TAG_OFFSET = 4
"""The offset of the tag within a frame."""
KIND_BYTES = 4
PAYLOAD_BYTES_MAX = 64 << 20
"""One frame is built and checked in memory; callers must split larger changes."""

if (HEADER.size, NAME.size, HEADER_BYTES + NAME_BYTES) != (HEADER_BYTES, NAME_BYTES, NAMED_HEADER_BYTES):
    raise AssertionError("the framed log's headers disagree with their literal sizes")
if HEAD.size != HEAD_BYTES or LINK.size != LINK_BYTES:
    raise AssertionError("the framed log's structs disagree with its literal sizes")
if OVERHEAD_BYTES != HEAD_BYTES + LINK_BYTES or PAYLOAD_BYTES_MAX >= 1 << 32:
    raise AssertionError("the framed log's limits contradict each other")


class LogIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The file that a log is stored in. The salt identifies one life of that file."""

    store: bytes
    """The store's id, 16 bytes; zeros for a database that belongs to no store."""
    database: int
    number: int
    """The number of the file within the database; its meaning is up to the user of the log."""


class LogHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The decoded header of a log."""

    kind: bytes
    salt: int
    link: int
    identity: LogIdentity | None = None
    """`None` for a header of version 1."""

    @property
    def tag(self) -> int:
        """The low half of the salt, repeated in every frame."""
        return self.salt & 0xFFFFFFFF

    @property
    def size(self) -> int:
        """Where the first frame starts."""
        return HEADER_BYTES if self.identity is None else NAMED_HEADER_BYTES


def encode_header(kind: bytes, salt: int, identity: LogIdentity | None = None) -> bytes:
    """Return the header of a log as bytes.

    >>> (
    ...     len(encode_header(b"demo", 7)),
    ...     len(encode_header(b"demo", 7, LogIdentity(store=bytes(16), database=1, number=2))),
    ... )
    (32, 72)
    """
    if len(kind) != KIND_BYTES:
        raise InvalidInput("the kind of a log must be four bytes", kind=kind)
    version = NAMELESS_VERSION if identity is None else VERSION
    body = HEADER.pack(MAGIC, version, 0, kind, salt, 0)[:-LINK_BYTES]
    link = crc64(body)
    header = body + LINK.pack(link)
    if identity is None:
        return header
    if len(identity.store) != STORE_BYTES:
        raise InvalidInput("a store's id must be 16 bytes", store=identity.store)
    name = NAME.pack(identity.store, identity.database, 0, identity.number, 0)[:-LINK_BYTES]
    return header + name + LINK.pack(crc64(name, link))


def decode_header(data: Bytes, path: str, kind: bytes | None = None) -> LogHeader:
    """Return the header of the log in `data`; `kind` is the expected kind, `None` for any (dump tools)."""
    if len(data) < HEADER_BYTES:
        raise _no_header("the file is too short to be a log", path, len(data))
    magic, version, _, stored_kind, salt, link = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise _no_header("the file does not start like a log", path, len(data))
    # Before the version: a damaged version must not look like a newer format.
    if crc64(memoryview(data)[: HEADER_BYTES - LINK_BYTES]) != link:
        raise _no_header("the log's header fails its checksum", path, len(data))
    if version > VERSION:
        raise FormatTooNew(
            "the log was written by a newer quire", hint="upgrade quire", path=path, version=version, known=VERSION
        )
    if kind is not None and stored_kind != kind:
        raise WrongKind(
            "this is a log of another kind", hint="check the path", path=path, kind=stored_kind, expected=kind
        )
    if version < VERSION:
        return LogHeader(kind=stored_kind, salt=salt, link=link)
    if len(data) < NAMED_HEADER_BYTES:
        raise _no_header("the file is too short to be a log", path, len(data))
    store, database, _, number, last = NAME.unpack_from(data, HEADER_BYTES)
    if crc64(memoryview(data)[HEADER_BYTES : NAMED_HEADER_BYTES - LINK_BYTES], link) != last:
        raise _no_header("the log's header fails its checksum", path, len(data))
    identity = LogIdentity(store=store, database=database, number=number)
    return LogHeader(kind=stored_kind, salt=salt, link=last, identity=identity)


def encode_frames(payloads: Iterable[Bytes], *, tag: int, link: int, synced: int) -> tuple[bytes, int]:
    """Return the bytes of consecutive frames, the first seeded with `link`, and the link of the last frame."""
    parts: list[Bytes] = []
    for payload in payloads:
        length = len(payload)
        # Length 0 is taken: it makes a frame a mark.
        if not 0 < length <= PAYLOAD_BYTES_MAX:
            raise OutOfRange(
                "a log record must have at least 1 byte and at most the limit", size=length, max=PAYLOAD_BYTES_MAX
            )
        head = HEAD.pack(length, tag, synced)
        link = crc64(payload, crc64(head, link))
        parts += (head, payload, LINK.pack(link))
    return b"".join(parts), link


def encode_mark(*, tag: int, link: int, synced: int) -> tuple[bytes, int]:
    """Return a mark, a frame that carries only `synced`, and its link."""
    head = HEAD.pack(0, tag, synced)
    link = crc64(head, link)
    return head + LINK.pack(link), link


def _no_header(what: str, path: str, size: int) -> Corruption:
    # A log is created by rename with its header synced, so a crash never leaves a bad header.
    hint = "`quire kv repair` shows what can be recovered"
    return Corruption(what, hint=hint, path=path, offset=0, bytes_lost=size)
