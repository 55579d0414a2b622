"""The bytes of a WAL segment: one header, a region of index entries, then frames of one fixed stride.

  frame      one version of one page: a head of 64 bytes and the page. Frame `n` of a segment has the lsn `first_lsn + n`
  entry      48 bytes of the *page index delta* region that repeat a frame's head without its page. Entry `n` describes
             frame `n`, so a reader gets the contents of a segment in one small read. An entry is built from the head when
             the frame is published (`segment_scan.entries_of`), not when it is written (docs/decisions/008)
  capacity   how many frames a segment can hold; it determines where the frames begin
  commit     the last frame of a transaction: `db_size`, the size in pages from then on, is not 0. Only commits have
             `durable_upto_lsn` (the lsn synced when the frame was written, below its own lsn) and `commit_ms`
  zero       a frame whose page is all zeros; the space of its body is reserved, but undefined and never read
  seed       the header's crc64 xor `n`, for frame `n`. The checksums of entry `n` and frame `n` start from it

Little-endian, no padding, no alignment. The header's crc64 covers database, segment, salt, first lsn and geometry, so through
the seed each entry and frame is valid only in the place it was written for: not in the file's next life, which has another
salt, and not elsewhere in this one (P1). lsns start at 1 and rise by one from frame to frame, across transactions and from each
segment to the next one written by the same open database. So an entry of zeros is never valid. If a segment fills up within a
transaction, the transaction continues in the next one, and its part in the full segment has no commit.

Threads: any; pure functions and values, without I/O or numpy. Format page: `docs/formats/segment.md`. Raises `Corruption`,
`FormatTooNew` for a bad header; `OutOfRange`, `InvalidInput` for values that cannot be encoded.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.core.errors import Corruption, FormatTooNew, InvalidInput, OutOfRange
from quire.core.ids import U64_MAX, some_u32, u64
from quire.core.limits import KIB, MIB, PAGE_SIZE_MAX, PAGE_SIZE_MIN
from quire.durable.checksums import Bytes, crc64

MAGIC = b"QWALSEG1"
VERSION = 2
"""Version 1 wrote entries together with their frames; version 2 writes them at publication. One scan reads both."""

HEADER = struct.Struct("<8sHHIIIIIQQQQ")
"""magic, version, reserved (0), page_size, db_id, segment_id, capacity, reserved (0), first_lsn, salt, created_at_ms, crc64"""
ENTRY = struct.Struct("<IIQQIIQQ")
"""page, db_size, lsn, prev_lsn, prev_segment, flags, frame_crc64, entry_crc64 (P2)"""
FRAME = struct.Struct("<IIQQIIQQQQ")
"""page, db_size, lsn, prev_lsn, prev_segment, flags, durable_upto_lsn, commit_ms, reserved (0), crc64"""
HEAD = struct.Struct("<IIQQIIQQQ")
"""The part of a frame's head that its checksum covers: everything but the checksum itself."""
WORD = struct.Struct("<Q")

HEADER_BYTES = 64
ENTRY_BYTES = 48
FRAME_HEAD_BYTES = 64
CRC_BYTES = 8
HEADER_CHECKED_BYTES = HEADER_BYTES - CRC_BYTES
ENTRY_CHECKED_BYTES = ENTRY_BYTES - CRC_BYTES
FRAME_CHECKED_BYTES = FRAME_HEAD_BYTES - CRC_BYTES
"""A frame's crc64 covers this much of its head and then, unless it is zero, the page."""

ZERO = 1
"""The only flag: the page is all zeros and has no body."""

FILE_BYTES_MIN = 256 * KIB
FILE_BYTES_MAX = 16 * MIB
"""The first segment of a small database is small; those of a busy one are large enough that creating them costs little per
commit."""
GAP_BYTES = 8 * KIB
"""The minimum page size at which the body of a zero frame is not written; smaller bodies are cheaper to write than to skip."""

if (HEADER.size, ENTRY.size, FRAME.size) != (HEADER_BYTES, ENTRY_BYTES, FRAME_HEAD_BYTES):
    raise AssertionError("the segment's structs disagree with their literal sizes")
if HEAD.size != FRAME_CHECKED_BYTES or WORD.size != CRC_BYTES:
    raise AssertionError("the parts of a segment's structs disagree with their literal sizes")
if HEADER_BYTES + ENTRY_BYTES + FRAME_HEAD_BYTES + PAGE_SIZE_MAX > FILE_BYTES_MIN:
    raise AssertionError("the smallest segment must hold a frame of the largest page")

HINT = "`quire verify` shows what is affected; restore the segment from a copy"

PageWrite = tuple[int, Bytes | None, int, int]
"""page, its new image (`None`: all zeros), and the location of its previous version: prev_lsn, prev_segment (0: none)."""


def next_file_bytes(previous: int = 0, wanted: int = 0) -> int:
    """Return the size of the next segment: the smallest above `previous` bytes that holds `wanted` bytes, up to the largest.

    After a segment that was filled, `previous` is its size, so the next one is twice as large. After one that was not, it is
    the bytes used in it minus one, so the next one would just have held them (`SegmentMaker.ended`).

    >>> next_file_bytes() // 1024, next_file_bytes(256 * 1024) // 1024, next_file_bytes(16 << 20) // 1024
    (256, 512, 16384)
    >>> next_file_bytes(wanted=5_000_000) // 1024, next_file_bytes(256 * 1024 - 1) // 1024
    (8192, 256)
    """
    size = FILE_BYTES_MIN
    while size < FILE_BYTES_MAX and (size <= previous or size < wanted):
        size *= 2
    return size


@dataclass(frozen=True, slots=True)
class Geometry:
    """The layout of a segment of `capacity` frames.

    >>> geometry = Geometry.fitting(page_size=4096, file_bytes=256 * 1024)
    >>> geometry.capacity, geometry.frames_offset, geometry.stride
    (62, 3040, 4160)
    """

    page_size: int
    capacity: int
    stride: int = field(init=False, repr=False, compare=False)
    frames_offset: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_page_size(self.page_size)
        some_u32("capacity", self.capacity)
        object.__setattr__(self, "stride", FRAME_HEAD_BYTES + self.page_size)
        object.__setattr__(self, "frames_offset", HEADER_BYTES + ENTRY_BYTES * self.capacity)

    @classmethod
    def fitting(cls, *, page_size: int, file_bytes: int) -> Geometry:
        """Return the geometry with the most frames that fit into a file of `file_bytes`."""
        _check_page_size(page_size)
        room = (file_bytes - HEADER_BYTES) // (ENTRY_BYTES + FRAME_HEAD_BYTES + page_size)
        if room < 1:
            raise OutOfRange("the file is too small for one frame", file_bytes=file_bytes, page_size=page_size)
        return cls(page_size, room)

    @property
    def file_bytes(self) -> int:
        """The size of a full segment; the file may be slightly larger."""
        return self.frame_offset(self.capacity)

    def entry_offset(self, frame_no: int) -> int:
        return HEADER_BYTES + ENTRY_BYTES * frame_no

    def frame_offset(self, frame_no: int) -> int:
        """Return the offset of a frame. For the number of frames in use, this is the number of bytes in use."""
        return self.frames_offset + self.stride * frame_no


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """The first 64 bytes of a segment; the constructor checks that they can be encoded."""

    geometry: Geometry
    db_id: int
    segment_id: int
    first_lsn: int
    salt: int
    created_at_ms: int = 0
    version: int = VERSION
    crc64: int = field(init=False)
    """Checksum of the preceding bytes; also the basis of the seeds of entries and frames."""

    def __post_init__(self) -> None:
        some_u32("db_id", self.db_id)
        some_u32("segment_id", self.segment_id)
        u64("salt", self.salt)
        u64("created_at_ms", self.created_at_ms)
        if not 1 <= self.first_lsn <= U64_MAX - self.geometry.capacity:
            raise OutOfRange("a segment's lsns must be above 0 and fit 64 bits", first_lsn=self.first_lsn)
        object.__setattr__(self, "crc64", crc64(self._checked()))

    def encode(self) -> bytes:
        """Return the header's 64 bytes."""
        return self._checked() + WORD.pack(self.crc64)

    def lsn(self, frame_no: int) -> int:
        """Return the lsn of a frame."""
        return self.first_lsn + frame_no

    def _checked(self) -> bytes:
        geometry = self.geometry
        names = (self.db_id, self.segment_id, geometry.capacity, 0, self.first_lsn, self.salt, self.created_at_ms, 0)
        return HEADER.pack(MAGIC, self.version, 0, geometry.page_size, *names)[:HEADER_CHECKED_BYTES]


def decode_header(data: Bytes, path: str, *, db_id: int | None = None, segment_id: int | None = None) -> SegmentHeader:
    """Return the header of the segment that begins with `data`; the ids are those the caller expects, `None` for any."""
    if len(data) < HEADER_BYTES:
        raise _no_header("the file is too short to be a WAL segment", path)
    fields = HEADER.unpack_from(data)
    magic, version, _, page_size, found_db, found_segment, capacity, _, first_lsn, salt, created_at_ms, crc = fields
    if magic != MAGIC:
        raise _no_header("the file does not start like a WAL segment", path)
    # Before the version is looked at: a damaged version number must not read as a newer format.
    if crc64(memoryview(data)[:HEADER_CHECKED_BYTES]) != crc:
        raise _no_header("the segment's header fails its checksum", path)
    if version > VERSION:
        raise FormatTooNew(
            "the WAL segment was written by a newer quire",
            hint="upgrade quire",
            path=path,
            version=version,
            known=VERSION,
        )
    if db_id not in (None, found_db) or segment_id not in (None, found_segment):
        raise _no_header(
            "the file holds a different segment than its name says",
            path,
            db_id=found_db,
            segment_id=found_segment,
            expected=(db_id, segment_id),
        )
    try:
        header = SegmentHeader(
            geometry=Geometry(page_size, capacity),
            db_id=found_db,
            segment_id=found_segment,
            first_lsn=first_lsn,
            salt=salt,
            created_at_ms=created_at_ms,
            version=version,
        )
    except OutOfRange as error:
        raise _no_header("the segment's header contradicts itself", path, cause=str(error)) from error
    # If reserved fields are in use, the constructor computed another checksum, and with it other seeds.
    object.__setattr__(header, "crc64", crc)
    return header


class Encoded(NamedTuple):
    """A transaction, or a part of one, ready to be written: its frames in one or a few pieces, and their heads separately."""

    first_frame: int
    frame_count: int
    last_lsn: int
    heads: bytes
    pieces: list[tuple[int, bytes]]
    """(offset, bytes): one piece, unless there are zero frames of large pages (`GAP_BYTES`)."""


def encode(
    header: SegmentHeader,
    frame_no: int,
    pages: Sequence[PageWrite],
    *,
    db_size: int,
    durable_upto_lsn: int = 0,
    commit_ms: int = 0,
) -> Encoded:
    """Return the bytes of a transaction whose first frame is `frame_no`; `db_size=0` if this is not its last part.

    This is the Python cost of each commit, so everything is in one loop and a page is copied once, into the result.
    """
    geometry, lsn, count = header.geometry, header.first_lsn + frame_no, len(pages)
    if not count or frame_no < 0 or frame_no + count > geometry.capacity:
        raise _does_not_fit(header, frame_no, count)
    assert durable_upto_lsn < lsn, "a frame cannot vouch for itself"
    first_frame, last_lsn = frame_no, lsn + count - 1
    page_size, base = geometry.page_size, header.crc64
    gaps = page_size >= GAP_BYTES
    zeros = b"" if gaps else bytes(page_size)
    heads: list[bytes] = []
    parts: list[Bytes] = []
    pieces: list[tuple[int, bytes]] = []
    offset = geometry.frame_offset(frame_no)
    crc, pack, pack_word = crc64, HEAD.pack, WORD.pack
    size = durable = time = 0
    try:
        for page, image, prev_lsn, prev_segment in pages:
            if lsn == last_lsn and db_size:
                size, durable, time = db_size, durable_upto_lsn, commit_ms
            if image is not None:
                if len(image) != page_size:
                    raise _wrong_page(header, page, len(image))
                head = pack(page, size, lsn, prev_lsn, prev_segment, 0, durable, time, 0)
                head += pack_word(crc(image, crc(head, base ^ frame_no)))
                parts += (head, image)
                frame_no += 1
            else:
                head = pack(page, size, lsn, prev_lsn, prev_segment, ZERO, durable, time, 0)
                head += pack_word(crc(head, base ^ frame_no))
                parts += (head, zeros)
                frame_no += 1
                if gaps:
                    # The body is skipped: the file keeps what it has there, and readers never look at it.
                    pieces.append((offset, b"".join(parts)))
                    parts.clear()
                    offset = geometry.frame_offset(frame_no)
            heads.append(head)
            lsn += 1
    except struct.error as error:
        raise OutOfRange("a field of a frame does not fit", cause=str(error), lsn=lsn) from error
    if parts:
        pieces.append((offset, b"".join(parts)))
    return Encoded(first_frame, count, last_lsn, b"".join(heads), pieces)


def encode_one(
    header: SegmentHeader, frame_no: int, write: PageWrite, db_size: int, durable_upto_lsn: int, commit_ms: int
) -> tuple[bytes, bytes]:
    """Return (head, frame) of a transaction of one page, as `encode` does. REQUIRES an image.

    A separate path because this is the commit whose latency matters: without the loop and lists it takes half the time, and on
    a processor that has just idled during a sync, each saved step counts two or three times.
    """
    page, image, prev_lsn, prev_segment = write
    geometry, lsn = header.geometry, header.first_lsn + frame_no
    assert image is not None, "zeros go through `encode`"
    if not 0 <= frame_no < geometry.capacity:
        raise _does_not_fit(header, frame_no, 1)
    assert durable_upto_lsn < lsn, "a frame cannot vouch for itself"
    if len(image) != geometry.page_size:
        raise _wrong_page(header, page, len(image))
    if not db_size:
        durable_upto_lsn = commit_ms = 0
    try:
        head = HEAD.pack(page, db_size, lsn, prev_lsn, prev_segment, 0, durable_upto_lsn, commit_ms, 0)
    except struct.error as error:
        raise OutOfRange("a field of a frame does not fit", cause=str(error), lsn=lsn) from error
    head += WORD.pack(crc64(image, crc64(head, header.crc64 ^ frame_no)))
    return head, head + image


def check_pages(header: SegmentHeader, frame_no: int, pages: Sequence[PageWrite]) -> None:
    """Raise as `encode` does for a bad number of pages or page size; for callers that encode in several steps."""
    if not pages or frame_no < 0 or frame_no + len(pages) > header.geometry.capacity:
        raise _does_not_fit(header, frame_no, len(pages))
    for page, image, _, _ in pages:
        if image is not None and len(image) != header.geometry.page_size:
            raise _wrong_page(header, page, len(image))


class FrameHead(NamedTuple):
    """A frame's head as stored in the file, verified or not."""

    page: int
    db_size: int
    lsn: int
    prev_lsn: int
    prev_segment: int
    flags: int
    durable_upto_lsn: int
    commit_ms: int
    reserved: int
    crc64: int


def check_frame(header: SegmentHeader, frame_no: int, data: Bytes) -> FrameHead | None:
    """Return the head of the frame in `data` (exactly one stride), or `None` if it is not this segment's frame `frame_no`."""
    if len(data) != header.geometry.stride:
        return None
    view = memoryview(data)
    head = FrameHead._make(FRAME.unpack_from(data))
    checksum = crc64(view[:FRAME_CHECKED_BYTES], header.crc64 ^ frame_no)
    if not head.flags & ZERO:
        checksum = crc64(view[FRAME_HEAD_BYTES:], checksum)
    return head if checksum == head.crc64 and head.lsn == header.first_lsn + frame_no else None


def _check_page_size(size: int) -> None:
    if not PAGE_SIZE_MIN <= size <= PAGE_SIZE_MAX or size & (size - 1):
        raise OutOfRange("a page's size must be a power of two", size=size, min=PAGE_SIZE_MIN, max=PAGE_SIZE_MAX)


def _no_header(what: str, path: str, **where: object) -> Corruption:
    # A header is synced before the manifest names the segment, so a crash never leaves a bad one.
    return Corruption(what, hint=HINT, path=path, offset=0, **where)


def _does_not_fit(header: SegmentHeader, frame_no: int, count: int) -> OutOfRange:
    return OutOfRange(
        "the transaction is empty or does not fit the segment",
        hint="write at least one page; if it is too large, write the rest to the next segment",
        segment_id=header.segment_id,
        frame_no=frame_no,
        frames=count,
        capacity=header.geometry.capacity,
    )


def _wrong_page(header: SegmentHeader, page: int, size: int) -> InvalidInput:
    return InvalidInput("a page image has the wrong size", page=page, size=size, page_size=header.geometry.page_size)
