"""The footer of a chunk: which pages it has, where they are, what they must be. Fetched once, then kept.

Terms: see `quire.pages.chunk_format`.

Rules
  1. A `ChunkFooter` exists only if everything in it agrees: counts, bitmap, frames without gap or overlap, lengths that
     a frame of its pages can have. Whoever has one need not check a place again.
  2. It is a value: immutable, picklable, small (9 bytes per page), good to cache for as long as the object exists.
  3. It is found with one read of the object's last 160 KiB; a larger footer (pages below 4 KiB) takes a second read.
  4. What fails a check is read once more before it is called damage: it may have been garbled on the way, and a false
     alarm about stored data is expensive.

Any thread; importable on executors (no lmdb). Format page: `docs/formats/chunk.md`.
Raises `Corruption`, `ChecksumMismatch` (both name the object and the part), `FormatTooNew`, and what reading raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from pyroaring import FrozenBitMap

from quire.core.errors import Corruption, OutOfRange
from quire.core.ids import ArtifactKey
from quire.durable.checksums import crc64
from quire.manifest.records import Compression
from quire.pages.chunk_format import (
    BITMAP_BYTES_MAX,
    FOOTER,
    FOOTER_HEAD_BYTES,
    FRAME,
    FRAME_ENTRY_BYTES,
    HEADER_BYTES,
    OBJECT_BYTES_MAX,
    OBJECT_BYTES_MIN,
    PAGE_CRC,
    PAGE_CRC_BYTES,
    PAGES_PER_FRAME,
    TAIL_BYTES,
    TRAILER_BYTES,
    ChunkIdentity,
    FramePlace,
    damaged,
    decode_header,
    decode_trailer,
    mismatch,
)

T = TypeVar("T")

ReadRange = Callable[[int, int], bytes]
"""(offset, length) → exactly those bytes of the object, e.g. `functools.partial(store.get_range, key)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFooter:
    """What a chunk says about itself; made by `decode_footer` or `load_footer` only."""

    identity: ChunkIdentity
    compression: Compression
    size_bytes: int
    """Of the whole object."""
    offset: int
    """Where the footer begins, in bytes, and the last frame ends."""
    page_count: int
    frame_count: int
    pages: FrozenBitMap
    """The offsets of the present pages."""
    header: bytes = field(repr=False)
    """The copy of the object's first bytes."""
    bitmap: bytes = field(repr=False)
    """The offsets in the portable roaring format: what a delta's catalog row keeps."""
    frame_table: bytes = field(repr=False)
    page_crcs: bytes = field(repr=False)

    def rank(self, offset: int) -> int | None:
        """The rank of a page; `None` if the chunk does not have it."""
        if not 0 <= offset < self.identity.pages_per_chunk:
            raise OutOfRange(
                "a chunk has no such page offset", value=offset, pages_per_chunk=self.identity.pages_per_chunk
            )
        return self.pages.rank(offset) - 1 if offset in self.pages else None

    def frame(self, number: int) -> FramePlace:
        """Where a frame is."""
        offset, length, crc = FRAME.unpack_from(self.frame_table, number * FRAME_ENTRY_BYTES)
        plain_bytes = plain_frame_bytes(number, self.page_count, self.identity.page_size)
        return FramePlace(number=number, offset=offset, length=length, crc64=crc, plain_bytes=plain_bytes)

    def page_crc(self, rank: int) -> int:
        """The crc64 of the plain page of this rank."""
        crc: int = PAGE_CRC.unpack_from(self.page_crcs, rank * PAGE_CRC_BYTES)[0]
        return crc

    def offsets_in(self, frame: int) -> list[int]:
        """The offsets of a frame's pages, in their order."""
        return list(self.pages[frame * PAGES_PER_FRAME : (frame + 1) * PAGES_PER_FRAME])


def plain_frame_bytes(number: int, page_count: int, page_size: int) -> int:
    """The plain size of a frame: 16 pages, or in the last one what is left."""
    return min(PAGES_PER_FRAME, page_count - number * PAGES_PER_FRAME) * page_size


def frames_of(page_count: int) -> int:
    """How many frames hold so many pages."""
    return -(-page_count // PAGES_PER_FRAME)


def encode_footer(header: bytes, page_count: int, bitmap: bytes, frame_table: bytes, page_crcs: bytes) -> bytes:
    """The bytes between the last frame and the trailer."""
    frame_count = frames_of(page_count)
    assert len(frame_table) == frame_count * FRAME_ENTRY_BYTES, "every frame has its entry"
    assert len(page_crcs) == page_count * PAGE_CRC_BYTES, "every page has its checksum"
    assert len(bitmap) <= BITMAP_BYTES_MAX, "a chunk's bitmap is in its smallest form"
    return FOOTER.pack(header, page_count, frame_count, len(bitmap), 0) + bitmap + frame_table + page_crcs


def decode_footer(data: bytes, *, offset: int, size_bytes: int, name: str) -> ChunkFooter:
    """The footer in `data`, which stands at `offset` of an object; its own checksum has been compared already."""
    header, page_count, frame_count, bitmap_bytes, _ = FOOTER.unpack_from(data)
    identity, compression = decode_header(header, name)
    where = {"part": "footer", "offset": offset}
    if page_count > identity.pages_per_chunk or frame_count != frames_of(page_count):
        what = "the footer counts pages or frames that the chunk cannot have"
        raise damaged(what, name, **where, pages=page_count, frames=frame_count)
    table_at = FOOTER_HEAD_BYTES + bitmap_bytes
    crcs_at = table_at + frame_count * FRAME_ENTRY_BYTES
    if bitmap_bytes > BITMAP_BYTES_MAX or crcs_at + page_count * PAGE_CRC_BYTES != len(data):
        raise damaged("the parts of the footer are not as long as it is", name, **where, bitmap_bytes=bitmap_bytes)
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
    # Not compared with what `serialize` gives: another version of roaring may prefer other containers for the same pages.
    if len(pages) != page_count or (page_count and pages.max() >= pages_per_chunk):
        raise damaged("the bitmap does not fit the chunk", name, part="bitmap", pages=len(pages), expected=page_count)
    return pages


def _check_frames(footer: ChunkFooter, name: str) -> None:
    """Rule 1: frames follow each other from the header to the footer, none longer than its pages."""
    end = HEADER_BYTES
    page_size, count = footer.identity.page_size, footer.page_count
    packs = footer.compression is not Compression.NONE
    for number, (offset, length, _) in enumerate(FRAME.iter_unpack(footer.frame_table)):
        plain = plain_frame_bytes(number, count, page_size)
        if offset != end or not 0 < length <= plain or (length < plain and not packs):
            what = "a frame is not where or as long as it can be"
            raise damaged(what, name, frame=number, offset=offset, length=length, plain_bytes=plain, expected=end)
        end += length
    if end != footer.offset:
        raise damaged("the frames do not end where the footer begins", name, offset=end, footer_offset=footer.offset)


# ── fetching ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Tail:
    """The bytes before the footer that came with it: all frames of a small chunk, and then it needs no other read."""

    offset: int
    data: bytes = field(repr=False)


def load_footer(
    read_range: ReadRange, size_bytes: int, *, name: str, expect: ArtifactKey | None = None
) -> tuple[ChunkFooter, Tail]:
    """Fetch and check the footer of an object of this size (rules 3 and 4); `expect` is the artifact it should be."""
    if not OBJECT_BYTES_MIN <= size_bytes <= OBJECT_BYTES_MAX:
        raise damaged("no chunk has this size: it was cut short, or is something else", name, size_bytes=size_bytes)
    footer, tail = believed(lambda: _load(read_range, size_bytes, name))
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
    """Refuse an object that is another artifact than its name or its row says."""
    if expect is not None and identity.key != expect:
        raise damaged("the object is another artifact", name, part="identity", found=identity.key, expected=expect)


def read_exactly(read_range: ReadRange, offset: int, length: int, name: str) -> bytes:
    """These bytes; an object that ends before them has been cut short."""
    try:
        data = read_range(offset, length)
    except OutOfRange as error:
        raise damaged("the object ends early", name, offset=offset, length=length, cause=str(error)) from error
    if len(data) != length:
        raise damaged("the object ends early", name, offset=offset, length=length, found=len(data))
    return data


def believed(step: Callable[[], T]) -> T:
    """What `step` reads and checks, at the second try if the first finds damage (rule 4)."""
    try:
        return step()
    except Corruption:
        return step()
