"""The bytes of a WAL segment: one header, a region of index entries, then frames of one fixed stride.

  frame      one version of one page: a head of 64 bytes and the page. Frame `n` of a segment has the lsn `first_lsn + n`
  entry      48 bytes of the *page index delta* region that repeat a frame's head without its page. Entry `n` is of
             frame `n`, so a reader learns what a segment holds from one small read. It is made from the head when the
             frame is published (`segment_scan.entries_of`), not when it is written (docs/decisions/008)
  capacity   how many frames a segment can hold; it fixes where the frames begin
  commit     the last frame of a transaction: `db_size`, the size in pages from then on, is not 0. Only it says
             `durable_upto_lsn` (what was synced when it was written, below its own lsn) and `commit_ms`
  zero       a frame whose page is all zeros; the place of its body is kept but means nothing and is not read
  seed       of frame `n`: the header's crc64 xor `n`. The checksums of entry `n` and frame `n` start from it

Little-endian, no padding, no alignment. The header's crc64 covers database, segment, salt, first lsn and geometry, so through
the seed each entry and frame is valid only in the very place it was written for: not in the file's next life, which has
another salt, and not elsewhere in this one (P1). lsns start at 1 and rise by one from frame to frame, through transactions and
from each segment to the next one that the same open database writes. So an entry of zeros is never valid. What is left of a
transaction when a segment is full goes on in the next one: the part here then has no commit.

Pure functions and values, any thread, no input or output, no numpy. Format page: `docs/formats/segment.md`. Raises
`Corruption`, `FormatTooNew` for a bad header; `OutOfRange`, `InvalidInput` for what cannot be encoded.
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
"""1: entries were written with their frames; 2: when they are published. One scan reads both."""

HEADER = struct.Struct("<8sHHIIIIIQQQQ")
"""magic, version, reserved (0), page_size, db_id, segment_id, capacity, reserved (0), first_lsn, salt, created_at_ms, crc64"""
ENTRY = struct.Struct("<IIQQIIQQ")
"""page, db_size, lsn, prev_lsn, prev_segment, flags, frame_crc64, entry_crc64 (P2)"""
FRAME = struct.Struct("<IIQQIIQQQQ")
"""page, db_size, lsn, prev_lsn, prev_segment, flags, durable_upto_lsn, commit_ms, reserved (0), crc64"""
HEAD = struct.Struct("<IIQQIIQQQ")
"""The part of a frame's head that its checksum covers: all of it but the checksum."""
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
"""The one flag there is: the page is all zeros and has no body."""

FILE_BYTES_MIN = 256 * KIB
FILE_BYTES_MAX = 16 * MIB
"""A small database's first segment is small; a busy one's are large enough that making one costs little per commit."""
GAP_BYTES = 8 * KIB
"""The body of a zero frame is left out from this page size on; smaller ones are cheaper to write than to skip."""

if (HEADER.size, ENTRY.size, FRAME.size) != (HEADER_BYTES, ENTRY_BYTES, FRAME_HEAD_BYTES):
    raise AssertionError("the segment's structs disagree with their literal sizes")
if HEAD.size != FRAME_CHECKED_BYTES or WORD.size != CRC_BYTES:
    raise AssertionError("the parts of a segment's structs disagree with their literal sizes")
if HEADER_BYTES + ENTRY_BYTES + FRAME_HEAD_BYTES + PAGE_SIZE_MAX > FILE_BYTES_MIN:
    raise AssertionError("the smallest segment must hold a frame of the largest page")

HINT = "`quire verify` shows what is affected; restore the segment from a copy"

PageWrite = tuple[int, Bytes | None, int, int]
"""page, its new image (`None`: all zeros), and where its former version was: prev_lsn, prev_segment (0: none)."""


def next_file_bytes(previous: int = 0, wanted: int = 0) -> int:
    """How large the next segment is: the smallest size above `previous` bytes that holds `wanted` bytes, up to the largest one.

    After a segment that was filled `previous` is its size, so that the next one is twice as large; after one that was not,
    what was used of it less one byte, so that the next one would just have held that (`SegmentMaker.ended`).

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
    """Where things are in a segment of `capacity` frames.

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
        """The geometry with the most frames that fit into a file of `file_bytes`."""
        _check_page_size(page_size)
        room = (file_bytes - HEADER_BYTES) // (ENTRY_BYTES + FRAME_HEAD_BYTES + page_size)
        if room < 1:
            raise OutOfRange("the file is too small for one frame", file_bytes=file_bytes, page_size=page_size)
        return cls(page_size, room)

    @property
    def file_bytes(self) -> int:
        """What a full segment takes; the file may be a little larger."""
        return self.frame_offset(self.capacity)

    def entry_offset(self, frame_no: int) -> int:
        return HEADER_BYTES + ENTRY_BYTES * frame_no

    def frame_offset(self, frame_no: int) -> int:
        """Where a frame starts; of the number of frames in use, how many bytes of the file are in use."""
        return self.frames_offset + self.stride * frame_no


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """What the first 64 bytes of a segment say; making one checks that it can be written."""

    geometry: Geometry
    db_id: int
    segment_id: int
    first_lsn: int
    salt: int
    created_at_ms: int = 0
    version: int = VERSION
    crc64: int = field(init=False)
    """Of the bytes before it; also what the seeds of entries and frames are made of."""

    def __post_init__(self) -> None:
        some_u32("db_id", self.db_id)
        some_u32("segment_id", self.segment_id)
        u64("salt", self.salt)
        u64("created_at_ms", self.created_at_ms)
        if not 1 <= self.first_lsn <= U64_MAX - self.geometry.capacity:
            raise OutOfRange("a segment's lsns are above 0 and fit 64 bits", first_lsn=self.first_lsn)
        object.__setattr__(self, "crc64", crc64(self._checked()))

    def encode(self) -> bytes:
        """The header's 64 bytes."""
        return self._checked() + WORD.pack(self.crc64)

    def lsn(self, frame_no: int) -> int:
        """The lsn of a frame."""
        return self.first_lsn + frame_no

    def _checked(self) -> bytes:
        geometry = self.geometry
        names = (self.db_id, self.segment_id, geometry.capacity, 0, self.first_lsn, self.salt, self.created_at_ms, 0)
        return HEADER.pack(MAGIC, self.version, 0, geometry.page_size, *names)[:HEADER_CHECKED_BYTES]


def decode_header(data: Bytes, path: str, *, db_id: int | None = None, segment_id: int | None = None) -> SegmentHeader:
    """The header of the segment that begins with `data`; the ids are what the caller expects, `None` for any."""
    if len(data) < HEADER_BYTES:
        raise _no_header("the file is too short to be a WAL segment", path)
    fields = HEADER.unpack_from(data)
    magic, version, _, page_size, found_db, found_segment, capacity, _, first_lsn, salt, created_at_ms, crc = fields
    if magic != MAGIC:
        raise _no_header("the file does not start as a WAL segment", path)
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
            "the file holds another segment than its name says",
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
    # A header with reserved fields in use would get another checksum here, and with it other seeds.
    object.__setattr__(header, "crc64", crc)
    return header


class Encoded(NamedTuple):
    """A transaction, or a part of one, ready to be written: its frames in one piece or a few, and their heads once more."""

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
    """The bytes of a transaction whose first frame is `frame_no`; `db_size=0` if this is not its last part.

    This is what each commit costs in Python, so everything is in one loop and a page is copied once, into the result.
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
    """(head, frame) of a transaction of one page, as `encode` has them. REQUIRES an image.

    The commit that somebody waits for: without loop and lists it is made in half the time, and on a processor that
    has just slept through a sync each step saved counts two or three times.
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
    """Refuse what `encode` would refuse for its number or the size of a page; for who encodes in several steps."""
    if not pages or frame_no < 0 or frame_no + len(pages) > header.geometry.capacity:
        raise _does_not_fit(header, frame_no, len(pages))
    for page, image, _, _ in pages:
        if image is not None and len(image) != header.geometry.page_size:
            raise _wrong_page(header, page, len(image))


class FrameHead(NamedTuple):
    """A frame's head as it stands in the file, checked or not."""

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
    """The head of the frame in `data` (one stride, exactly), or `None` if it is not this segment's frame `frame_no`."""
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
        raise OutOfRange("a page's size is a power of two", size=size, min=PAGE_SIZE_MIN, max=PAGE_SIZE_MAX)


def _no_header(what: str, path: str, **where: object) -> Corruption:
    # A header is synced before the manifest names the segment, so a bad one is never the trace of a crash.
    return Corruption(what, hint=HINT, path=path, offset=0, **where)


def _does_not_fit(header: SegmentHeader, frame_no: int, count: int) -> OutOfRange:
    return OutOfRange(
        "the transaction is empty or does not fit the segment",
        hint="a transaction has at least one page; write the part that fits and the rest into the next segment",
        segment_id=header.segment_id,
        frame_no=frame_no,
        frames=count,
        capacity=header.geometry.capacity,
    )


def _wrong_page(header: SegmentHeader, page: int, size: int) -> InvalidInput:
    return InvalidInput("a page image has another size", page=page, size=size, page_size=header.geometry.page_size)
