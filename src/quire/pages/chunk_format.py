"""The bytes of a chunk object: a header, frames of 16 pages, a footer that locates everything, and a trailer.

  chunk     an immutable object with pages of one slot: a *base* has all existing pages, a *delta* those that changed
  offset    a page's position in its slot, 0 to pages_per_chunk - 1; in a `FramePlace` or a footer, a position in bytes
  present   a page is present if this chunk has it; the bitmap lists the offsets of present pages
  rank      how many present pages precede a page: page 7 of {2, 5, 7} has rank 2, and is page r % 16 of frame r // 16
  frame     16 consecutive present pages, by rank; the last frame may have fewer. Compressed, and read, independently
  plain     the pages of a frame, uncompressed and concatenated; *stored* is the form in the object
  identity  artifact key, plan digest, lsns, page size. Two runs of one plan may compress differently and still produce the
            same artifact (P11), so objects are compared by identity, never by bytes

Little-endian, no padding, no gap. Every byte is covered by a crc64, and each plain page has its own. The footer begins with a
copy of the header, so one read at the end of the object returns all metadata. No number is used before it was checked against
the limits of a chunk: damage causes an error, not an allocation of gigabytes. A `ChunkFooter` exists only if its parts are
consistent; it is immutable, picklable, small (9 bytes per page), and valid while the object exists.

Threads: any (each has its own zstd context); pure functions, importable on executors (no lmdb). Format page:
`docs/formats/chunk.md`. Raises `Corruption`, `ChecksumMismatch` (both name the object and the part) and `FormatTooNew` for bad
bytes, `InvalidInput` and `OutOfRange` for bad arguments, and what reading raises.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import zstandard
from pyroaring import FrozenBitMap

from quire.core.errors import ChecksumMismatch, Corruption, FormatTooNew, InvalidInput, OutOfRange
from quire.core.ids import ArtifactKey, ArtifactKind, some_u32, u16, u32, u64
from quire.core.limits import CHUNK_BYTES, KIB, PAGE_SIZE_MAX, PAGE_SIZE_MIN
from quire.durable.checksums import Bytes, crc64
from quire.durable.names import object_key
from quire.manifest.records import Compression

MAGIC = b"QCHUNK01"
END_MAGIC = b"QCHUNKND"
VERSION = 1

HEADER = struct.Struct("<8sHBBIIIIIHHIQQ32sQ")
"""magic, version, kind, compression, page_size, pages_per_chunk, origin_db_id, chunk_id, generation, delta_id, reserved (0),
base_generation, lsn_start, covered_lsn, plan_digest, crc64 of the 88 bytes before it"""
FOOTER = struct.Struct("<96sIIII")
"""copy of the header, page_count, frame_count, bitmap_bytes, reserved (0); then bitmap, frame entries, page checksums"""
FRAME = struct.Struct("<IIQ")
"""offset of the stored frame in the object, its length, its crc64"""
PAGE_CRC = struct.Struct("<Q")
"""crc64 of one plain page"""
TRAILER = struct.Struct("<QIHHQQ8s")
"""offset of the footer, its length, version, reserved (0), crc64 of the footer, crc64 of the 24 bytes before, magic"""

HEADER_BYTES = 96
FOOTER_HEAD_BYTES = 112
FRAME_ENTRY_BYTES = 16
PAGE_CRC_BYTES = 8
TRAILER_BYTES = 40
HEADER_SIGNED_BYTES = 88
TRAILER_SIGNED_BYTES = 24
PLAN_DIGEST_BYTES = 32

PAGES_PER_FRAME = 16
"""Enough for zstd to exploit similarities between pages; few enough to read and decompress for a single page."""
LEVEL = 3
"""The zstd level. Not part of the format: readers do not depend on it."""
FRAME_BYTES_MAX = PAGES_PER_FRAME * PAGE_SIZE_MAX
PAGES_MAX = CHUNK_BYTES // PAGE_SIZE_MIN
BITMAP_BYTES_MAX = 16_416
"""Two containers of 65,536 offsets at 8 KiB each, and their heads: the bound for 131,072 bits in the smallest portable form."""
FOOTER_BYTES_MAX = (
    FOOTER_HEAD_BYTES + BITMAP_BYTES_MAX + PAGES_MAX // PAGES_PER_FRAME * FRAME_ENTRY_BYTES + PAGES_MAX * PAGE_CRC_BYTES
)
OBJECT_BYTES_MIN = HEADER_BYTES + FOOTER_HEAD_BYTES + TRAILER_BYTES
OBJECT_BYTES_MAX = HEADER_BYTES + CHUNK_BYTES + FOOTER_BYTES_MAX + TRAILER_BYTES
TAIL_BYTES = 160 * KIB
"""How much a reader fetches first, from the end: the whole footer of any chunk with pages of 4 KiB or more."""

if (HEADER.size, FOOTER.size, FRAME.size, PAGE_CRC.size, TRAILER.size) != (
    HEADER_BYTES,
    FOOTER_HEAD_BYTES,
    FRAME_ENTRY_BYTES,
    PAGE_CRC_BYTES,
    TRAILER_BYTES,
):
    raise AssertionError("the chunk's structs disagree with their literal sizes")
if HEADER_SIGNED_BYTES != HEADER_BYTES - 8 or TRAILER_BYTES - 8 - len(END_MAGIC) != TRAILER_SIGNED_BYTES:
    raise AssertionError("a checksum of the chunk does not stand where it is looked for")
_PAGES_OF_4_KIB = CHUNK_BYTES // (4 * KIB)
_TABLES_OF_4_KIB = _PAGES_OF_4_KIB // PAGES_PER_FRAME * FRAME_ENTRY_BYTES + _PAGES_OF_4_KIB * PAGE_CRC_BYTES
if FOOTER_HEAD_BYTES + BITMAP_BYTES_MAX // 2 + _TABLES_OF_4_KIB + TRAILER_BYTES > TAIL_BYTES:
    raise AssertionError("the footer of a full chunk of 4 KiB pages must fit the first read")
if OBJECT_BYTES_MAX >= 1 << 32:
    raise AssertionError("positions in a chunk must fit 32 bits")

HINT = "`quire verify` shows what is affected; restore the object from a copy of the store"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkIdentity:
    """The identity of a chunk, independent of its compressed bytes."""

    key: ArtifactKey
    plan_digest: bytes
    """SHA-256 of the plan that produced it (P10)."""
    covered_lsn: int
    """The lsn up to which a chain that ends with this chunk contains everything (P8)."""
    page_size: int
    pages_per_chunk: int
    lsn_start: int = 0
    """The first lsn it absorbed; 0 if unknown."""
    base_generation: int = 0
    """For a delta, the base it was written over. Not checked, because a merge may replace that base later."""

    @property
    def name(self) -> str:
        """The object's key, below its namespace's prefix."""
        return object_key(self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class FramePlace:
    """The location of a frame, and its expected length and checksum."""

    number: int
    offset: int
    """Position in the object, in bytes."""
    length: int
    crc64: int
    plain_bytes: int


def full_chunk_pages(page_size: int) -> int:
    """Return `pages_per_chunk` of a database with pages of this size.

    >>> full_chunk_pages(4096)
    16384
    """
    return CHUNK_BYTES // page_size


def check_identity(identity: ChunkIdentity) -> None:
    """Raise if no chunk can have this identity."""
    key, page_size = identity.key, identity.page_size
    if key.kind not in (ArtifactKind.BASE, ArtifactKind.DELTA):
        raise InvalidInput("a chunk must be a base or a delta", key=key)
    if key.kind is ArtifactKind.BASE and (key.delta_id or identity.base_generation):
        raise InvalidInput("only a delta has a delta_id and a base", key=key, base_generation=identity.base_generation)
    some_u32("origin_db_id", key.origin_db_id)
    for name, value in (("chunk_id", key.id), ("generation", key.generation)):
        u32(name, value)
    u32("base_generation", identity.base_generation)
    u16("delta_id", key.delta_id)
    if u64("lsn_start", identity.lsn_start) > u64("covered_lsn", identity.covered_lsn):
        raise OutOfRange("a chunk ends before it starts", start=identity.lsn_start, covered=identity.covered_lsn)
    if not PAGE_SIZE_MIN <= page_size <= PAGE_SIZE_MAX or page_size & (page_size - 1):
        raise OutOfRange("a page must be a power of two from 512 to 65,536 bytes", page_size=page_size)
    if not 1 <= identity.pages_per_chunk <= full_chunk_pages(page_size):
        raise OutOfRange("a chunk may cover at most 64 MiB", pages=identity.pages_per_chunk, page_size=page_size)
    if len(identity.plan_digest) != PLAN_DIGEST_BYTES:
        raise InvalidInput("a plan's digest must be 32 bytes", size=len(identity.plan_digest))


# ── header and trailer ────────────────────────────────────────────────────────────────────────────────────────────────
def encode_header(identity: ChunkIdentity, compression: Compression) -> bytes:
    """Return the 96 bytes at the start of a chunk and of its footer."""
    check_identity(identity)
    key = identity.key
    signed = HEADER.pack(
        MAGIC,
        VERSION,
        key.kind,
        compression,
        identity.page_size,
        identity.pages_per_chunk,
        key.origin_db_id,
        key.id,
        key.generation,
        key.delta_id,
        0,
        identity.base_generation,
        identity.lsn_start,
        identity.covered_lsn,
        identity.plan_digest,
        0,
    )[:HEADER_SIGNED_BYTES]
    return signed + PAGE_CRC.pack(crc64(signed))


def decode_header(data: Bytes, name: str) -> tuple[ChunkIdentity, Compression]:
    """Return the identity and compression in a header, or in its copy in the footer."""
    if len(data) != HEADER_BYTES or bytes(data[: len(MAGIC)]) != MAGIC:
        raise damaged("the object does not start like a chunk", name, part="header")
    fields = HEADER.unpack(data)
    if crc64(memoryview(data)[:HEADER_SIGNED_BYTES]) != fields[-1]:
        raise mismatch("the header of the chunk fails its checksum", name, part="header")
    (
        _,
        version,
        kind,
        compression,
        page_size,
        pages,
        origin,
        slot,
        generation,
        delta,
        _,
        base,
        start,
        covered,
        digest,
        _,
    ) = fields
    check_version(version, name)
    try:
        identity = ChunkIdentity(
            key=ArtifactKey(origin, ArtifactKind(kind), slot, generation, delta),
            plan_digest=digest,
            covered_lsn=covered,
            page_size=page_size,
            pages_per_chunk=pages,
            lsn_start=start,
            base_generation=base,
        )
        check_identity(identity)
        return identity, Compression(compression)
    except (ValueError, InvalidInput) as error:
        raise damaged("the header describes an impossible chunk", name, part="header", cause=str(error)) from error


def encode_trailer(footer_offset: int, footer: Bytes) -> bytes:
    """Return the last 40 bytes of a chunk."""
    signed = TRAILER.pack(footer_offset, len(footer), VERSION, 0, crc64(footer), 0, END_MAGIC)[:TRAILER_SIGNED_BYTES]
    return signed + PAGE_CRC.pack(crc64(signed)) + END_MAGIC


def decode_trailer(data: Bytes, size_bytes: int, name: str) -> tuple[int, int, int]:
    """Return (offset of the footer, its length, its crc64) of an object of this size."""
    if len(data) != TRAILER_BYTES or bytes(data[-len(END_MAGIC) :]) != END_MAGIC:
        what = "the object does not end like a chunk: it is truncated, or something else"
        raise damaged(what, name, part="trailer", size_bytes=size_bytes)
    offset, length, version, _, footer_crc, own_crc, _ = TRAILER.unpack(data)
    if crc64(memoryview(data)[:TRAILER_SIGNED_BYTES]) != own_crc:
        raise mismatch("the trailer of the chunk fails its checksum", name, part="trailer", size_bytes=size_bytes)
    check_version(version, name)
    # The lengths are bounded before they are used: they decide how much is read next.
    fits = offset >= HEADER_BYTES and FOOTER_HEAD_BYTES <= length <= FOOTER_BYTES_MAX
    if not fits or offset + length + TRAILER_BYTES != size_bytes:
        what = "the trailer points to an impossible footer"
        raise damaged(what, name, part="trailer", footer_offset=offset, footer_bytes=length, size_bytes=size_bytes)
    return offset, length, footer_crc


# ── frames ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class _Contexts(threading.local):
    """One zstd context per thread: a context is not thread-safe, and creating one costs more than unpacking a small frame."""

    def __init__(self) -> None:
        # A frame's window is never larger than the frame: a larger claim is damage, and would allocate that much memory.
        self.unpack = zstandard.ZstdDecompressor(max_window_size=FRAME_BYTES_MAX)


_contexts = _Contexts()


def compressor(level: int = LEVEL) -> zstandard.ZstdCompressor:
    """Return a compressor for a writer's frames; not thread-safe."""
    return zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=False)


def pack_frame(plain: memoryview, packer: zstandard.ZstdCompressor | None) -> bytes:
    """Return the stored form of a frame: compressed, or plain if compression does not make it smaller."""
    if packer is not None:
        packed = packer.compress(plain)
        if len(packed) < len(plain):
            return packed
    return bytes(plain)


def unpack_frame(stored: Bytes, place: FramePlace, name: str, **where: Any) -> Bytes:
    """Return the plain pages of a frame, concatenated; the caller verifies their page checksums.

    `where` is added to errors: which pages the frame was read for.
    """
    where |= {"frame": place.number, "offset": place.offset, "length": place.length}
    if len(stored) != place.length or crc64(stored) != place.crc64:
        raise mismatch("a frame fails its checksum", name, **where)
    # A frame that compression did not make smaller is stored plain, so the length alone distinguishes the two forms.
    if place.length == place.plain_bytes:
        return stored
    try:
        # Checked before decompressing: zstd would allocate whatever size the frame claims.
        claimed = zstandard.frame_content_size(stored)
        if claimed == place.plain_bytes:
            plain = _contexts.unpack.decompress(stored, max_output_size=place.plain_bytes, allow_extra_data=False)
            if len(plain) == place.plain_bytes:
                return plain
        cause = f"it claims {claimed} bytes"
    except zstandard.ZstdError as error:
        cause = str(error)
    raise damaged("a frame does not decompress to its pages", name, **where, plain_bytes=place.plain_bytes, cause=cause)


# ── errors ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def check_version(version: int, name: str) -> None:
    """Raise `FormatTooNew` for a chunk of a newer quire, whose bytes may have another meaning."""
    if version > VERSION:
        what = "the chunk was written by a newer quire"
        raise FormatTooNew(what, hint="upgrade quire", object=name, version=version, known=VERSION)
    if version < 1:
        raise damaged("the chunk has no version", name, version=version)


def damaged(what: str, name: str, **where: Any) -> Corruption:
    """Return a `Corruption` of the object `name` at `where`."""
    return Corruption(what, hint=HINT, object=name, **where)


def mismatch(what: str, name: str, **where: Any) -> ChecksumMismatch:
    """Return a `ChecksumMismatch` of the object `name` at `where`."""
    return ChecksumMismatch(what, hint=HINT, object=name, **where)


T = TypeVar("T")

ReadRange = Callable[[int, int], bytes]
"""(offset, length) → exactly those bytes of the object, e.g. `functools.partial(store.get_range, key)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFooter:
    """The metadata of a chunk; created only by `decode_footer` and `load_footer`."""

    identity: ChunkIdentity
    compression: Compression
    size_bytes: int
    """Size of the whole object."""
    offset: int
    """Where the footer begins and the last frame ends, in bytes."""
    page_count: int
    frame_count: int
    pages: FrozenBitMap
    """The offsets of the present pages."""
    header: bytes = field(repr=False)
    """The copy of the object's header."""
    bitmap: bytes = field(repr=False)
    """The offsets in the portable roaring format, as in a delta's catalog row."""
    frame_table: bytes = field(repr=False)
    page_crcs: bytes = field(repr=False)

    def rank(self, offset: int) -> int | None:
        """Return the rank of a page; `None` if the chunk does not have it."""
        if not 0 <= offset < self.identity.pages_per_chunk:
            raise OutOfRange(
                "a chunk has no such page offset", value=offset, pages_per_chunk=self.identity.pages_per_chunk
            )
        return self.pages.rank(offset) - 1 if offset in self.pages else None

    def frame(self, number: int) -> FramePlace:
        """Return the location of a frame."""
        offset, length, crc = FRAME.unpack_from(self.frame_table, number * FRAME_ENTRY_BYTES)
        plain_bytes = plain_frame_bytes(number, self.page_count, self.identity.page_size)
        return FramePlace(number=number, offset=offset, length=length, crc64=crc, plain_bytes=plain_bytes)

    def page_crc(self, rank: int) -> int:
        """Return the crc64 of the plain page of this rank."""
        crc: int = PAGE_CRC.unpack_from(self.page_crcs, rank * PAGE_CRC_BYTES)[0]
        return crc

    def page_crcs_in(self, place: FramePlace) -> tuple[int, ...]:
        """Return the crc64 of each page of a frame."""
        count = place.plain_bytes // self.identity.page_size
        return struct.unpack_from(f"<{count}Q", self.page_crcs, place.number * PAGES_PER_FRAME * PAGE_CRC_BYTES)

    def offsets_in(self, frame: int) -> list[int]:
        """Return the offsets of a frame's pages, in order."""
        return list(self.pages[frame * PAGES_PER_FRAME : (frame + 1) * PAGES_PER_FRAME])


def plain_frame_bytes(number: int, page_count: int, page_size: int) -> int:
    """Return the plain size of a frame: 16 pages, or the remaining ones for the last frame."""
    return min(PAGES_PER_FRAME, page_count - number * PAGES_PER_FRAME) * page_size


def frames_of(page_count: int) -> int:
    """Return the number of frames for this many pages."""
    return -(-page_count // PAGES_PER_FRAME)


def encode_footer(header: bytes, page_count: int, bitmap: bytes, frame_table: bytes, page_crcs: bytes) -> bytes:
    """Return the bytes between the last frame and the trailer."""
    frame_count = frames_of(page_count)
    assert len(frame_table) == frame_count * FRAME_ENTRY_BYTES, "every frame has its entry"
    assert len(page_crcs) == page_count * PAGE_CRC_BYTES, "every page has its checksum"
    assert len(bitmap) <= BITMAP_BYTES_MAX, "a chunk's bitmap is in its smallest form"
    return FOOTER.pack(header, page_count, frame_count, len(bitmap), 0) + bitmap + frame_table + page_crcs


def decode_footer(data: bytes, *, offset: int, size_bytes: int, name: str) -> ChunkFooter:
    """Return the footer in `data`, found at `offset` of an object. REQUIRES that its checksum has been verified."""
    header, page_count, frame_count, bitmap_bytes, _ = FOOTER.unpack_from(data)
    identity, compression = decode_header(header, name)
    where = {"part": "footer", "offset": offset}
    if page_count > identity.pages_per_chunk or frame_count != frames_of(page_count):
        what = "the footer counts pages or frames that the chunk cannot have"
        raise damaged(what, name, **where, pages=page_count, frames=frame_count)
    table_at = FOOTER_HEAD_BYTES + bitmap_bytes
    crcs_at = table_at + frame_count * FRAME_ENTRY_BYTES
    if bitmap_bytes > BITMAP_BYTES_MAX or crcs_at + page_count * PAGE_CRC_BYTES != len(data):
        raise damaged("the parts of the footer do not add up to its length", name, **where, bitmap_bytes=bitmap_bytes)
    footer = ChunkFooter(
        identity=identity,
        compression=compression,
        size_bytes=size_bytes,
        offset=offset,
        page_count=page_count,
        frame_count=frame_count,
        pages=_decode_bitmap(data[FOOTER_HEAD_BYTES:table_at], page_count, identity.pages_per_chunk, name),
        header=header,
        bitmap=data[FOOTER_HEAD_BYTES:table_at],
        frame_table=data[table_at:crcs_at],
        page_crcs=data[crcs_at:],
    )
    _check_frames(footer, name)
    return footer


def _decode_bitmap(data: bytes, page_count: int, pages_per_chunk: int, name: str) -> FrozenBitMap:
    try:
        pages = FrozenBitMap.deserialize(data)
    except (ValueError, IndexError) as error:
        raise damaged("the bitmap of the chunk does not decode", name, part="bitmap", cause=str(error)) from error
    # Not compared with the result of `serialize`: another version of roaring may choose other containers for the same pages.
    if len(pages) != page_count or (page_count and pages.max() >= pages_per_chunk):
        raise damaged("the bitmap does not fit the chunk", name, part="bitmap", pages=len(pages), expected=page_count)
    return pages


def _check_frames(footer: ChunkFooter, name: str) -> None:
    """Check that frames are contiguous from the header to the footer, and none is longer than its pages."""
    end = HEADER_BYTES
    page_size, count = footer.identity.page_size, footer.page_count
    packs = footer.compression is not Compression.NONE
    for number, (offset, length, _) in enumerate(FRAME.iter_unpack(footer.frame_table)):
        plain = plain_frame_bytes(number, count, page_size)
        # Without gaps every byte between header and footer belongs to a frame, and so to a checksum.
        if offset != end or not 0 < length <= plain or (length < plain and not packs):
            what = "a frame has an impossible offset or length"
            raise damaged(what, name, frame=number, offset=offset, length=length, plain_bytes=plain, expected=end)
        end += length
    if end != footer.offset:
        raise damaged("the frames do not end where the footer begins", name, offset=end, footer_offset=footer.offset)


# ── fetching ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Tail:
    """The bytes before the footer that were fetched with it. For a small chunk these are all frames, so no other read is
    needed."""

    offset: int
    data: bytes = field(repr=False)


def load_footer(
    read_range: ReadRange, size_bytes: int, *, name: str, expect: ArtifactKey | None = None
) -> tuple[ChunkFooter, Tail]:
    """Fetch and verify the footer of an object of this size; `expect` is the artifact it should be."""
    if not OBJECT_BYTES_MIN <= size_bytes <= OBJECT_BYTES_MAX:
        raise damaged("no chunk has this size: it is truncated, or something else", name, size_bytes=size_bytes)
    footer, tail = read_twice(lambda: _load(read_range, size_bytes, name))
    check_expected(footer.identity, expect, name)
    return footer, tail


def _load(read_range: ReadRange, size_bytes: int, name: str) -> tuple[ChunkFooter, Tail]:
    length = min(TAIL_BYTES, size_bytes)
    begin = size_bytes - length
    tail = read_exactly(read_range, begin, length, name)
    offset, length, crc = decode_trailer(tail[-TRAILER_BYTES:], size_bytes, name)
    if offset >= begin:
        data = tail[offset - begin : -TRAILER_BYTES]
    else:
        data = read_exactly(read_range, offset, begin - offset, name) + tail[:-TRAILER_BYTES]
    if crc64(data) != crc:
        raise mismatch("the footer of the chunk fails its checksum", name, part="footer", offset=offset, length=length)
    footer = decode_footer(data, offset=offset, size_bytes=size_bytes, name=name)
    return footer, Tail(begin, tail[: max(0, offset - begin)])


def check_expected(identity: ChunkIdentity, expect: ArtifactKey | None, name: str) -> None:
    """Raise if an object is not the artifact that its name or row states."""
    if expect is not None and identity.key != expect:
        raise damaged("the object is another artifact", name, part="identity", found=identity.key, expected=expect)


def read_exactly(read_range: ReadRange, offset: int, length: int, name: str) -> bytes:
    """Return exactly these bytes; raise `Corruption` if the object ends before them."""
    try:
        data = read_range(offset, length)
    except OutOfRange as error:
        raise damaged("the object ends early", name, offset=offset, length=length, cause=str(error)) from error
    if len(data) != length:
        raise damaged("the object ends early", name, offset=offset, length=length, found=len(data))
    return data


def read_twice(step: Callable[[], T]) -> T:
    """Return the result of `step`, which reads and verifies; retry once if it finds damage."""
    try:
        return step()
    except Corruption:
        return step()
