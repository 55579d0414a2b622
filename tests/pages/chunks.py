"""Helpers for tests of chunks: identities, objects that count their reads, pages, and damage with valid checksums."""

from __future__ import annotations

import random
from collections.abc import Iterable

from hypothesis import strategies as st

from quire.core.errors import OutOfRange
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.checksums import crc64
from quire.manifest.records import Compression
from quire.pages.chunk_format import (
    PAGE_CRC,
    TRAILER,
    TRAILER_BYTES,
    TRAILER_SIGNED_BYTES,
    ChunkIdentity,
    FramePlace,
    encode_trailer,
    full_chunk_pages,
)
from quire.pages.chunk_reader import ChunkReader
from quire.pages.chunk_writer import ChunkInfo, ChunkWriter

Pages = dict[int, bytes]


def identity(
    page_size: int = 512,
    pages_per_chunk: int | None = None,
    *,
    delta_id: int | None = None,
    covered_lsn: int = 100,
    generation: int = 1,
    plan_digest: bytes = bytes(32),
) -> ChunkIdentity:
    """A base, or with a `delta_id` a delta, of slot 2 of database 7."""
    kind = ArtifactKind.BASE if delta_id is None else ArtifactKind.DELTA
    return ChunkIdentity(
        key=ArtifactKey(origin_db_id=7, kind=kind, id=2, generation=generation, delta_id=delta_id or 0),
        plan_digest=plan_digest,
        covered_lsn=covered_lsn,
        page_size=page_size,
        pages_per_chunk=pages_per_chunk or full_chunk_pages(page_size),
        base_generation=0 if delta_id is None else 1,
    )


class Blob:
    """An object in memory that counts its reads, and can return wrong bytes for the first few."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reads: list[tuple[int, int]] = []
        self.garbled_reads = 0

    def __len__(self) -> int:
        return len(self.data)

    def read(self, offset: int, length: int) -> bytes:
        self.reads.append((offset, length))
        if offset + length > len(self.data):
            raise OutOfRange("the object ends before the range does", offset=offset, length=length)
        content = self.data[offset : offset + length]
        if self.garbled_reads:
            self.garbled_reads -= 1
            return content[:-1] + bytes([content[-1] ^ 1])
        return content

    def reader(self) -> ChunkReader:
        return ChunkReader(self.read, len(self.data), name="demo")


def write_chunk(
    pages: Pages, chunk_identity: ChunkIdentity, compression: Compression = Compression.ZSTD, level: int = 3
) -> tuple[bytes, ChunkInfo]:
    """An object with these pages."""
    parts: list[bytes] = []
    writer = ChunkWriter(parts.append, chunk_identity, compression=compression, level=level)
    for offset in sorted(pages):
        writer.add(offset, pages[offset])
    info = writer.finish()
    return b"".join(parts), info


def image(page_size: int, flavour: int) -> bytes:
    """A page: empty, of one byte, random, or words; the same page for the same number."""
    kind, seed = flavour % 4, flavour // 4
    if kind == 0:
        return bytes(page_size)
    if kind == 1:
        return bytes([seed % 256]) * page_size
    noise = random.Random(seed)
    if kind == 2:
        return noise.randbytes(page_size)
    words = b" ".join(noise.choices([b"quire", b"chunk", b"page", b"slot", b"delta"], k=page_size))
    return words[:page_size]


def some_pages(page_size: int, offsets: Iterable[int], seed: int = 0) -> Pages:
    noise = random.Random(seed)
    return {offset: image(page_size, noise.randrange(4000)) for offset in offsets}


def compact_pages(page_size: int, offsets: Iterable[int]) -> Pages:
    """Pages that compress well, so that tests can try every byte of their object."""
    return {offset: image(page_size, (1 if offset % 3 else 3) + 4 * (offset % 5)) for offset in offsets}


@st.composite
def page_sets(draw: st.DrawFn, page_sizes: tuple[int, ...] = (512, 1024, 4096)) -> tuple[int, int, Pages]:
    """Draws (page size, pages per chunk, pages)."""
    page_size = draw(st.sampled_from(page_sizes))
    limit = draw(st.sampled_from([1, 15, 16, 17, 40, full_chunk_pages(page_size)]))
    offsets = st.sets(st.integers(0, min(limit, 60) - 1) | st.integers(0, limit - 1), max_size=50)
    return page_size, limit, {offset: image(page_size, draw(st.integers(0, 40))) for offset in draw(offsets)}


# ── damage with valid checksums ───────────────────────────────────────────────────────────────────────────────────────
def footer_of(data: bytes) -> bytes:
    offset, length, *_ = TRAILER.unpack(data[-TRAILER_BYTES:])
    return data[offset : offset + length]


def with_footer(data: bytes, footer: bytes) -> bytes:
    """The object with another footer and a matching checksum."""
    offset, *_ = TRAILER.unpack(data[-TRAILER_BYTES:])
    return data[:offset] + footer + encode_trailer(offset, footer)


def with_trailer(data: bytes, **changes: int) -> bytes:
    """The object with another trailer and a matching checksum."""
    names = ["offset", "length", "version", "reserved", "footer_crc", "crc"]
    values = dict(zip(names, TRAILER.unpack(data[-TRAILER_BYTES:]), strict=False)) | changes
    signed = TRAILER.pack(*values.values(), b"")[:TRAILER_SIGNED_BYTES]
    return data[:-TRAILER_BYTES] + signed + PAGE_CRC.pack(crc64(signed)) + data[-8:]


def frame_location(stored: bytes, plain_bytes: int) -> FramePlace:
    return FramePlace(number=3, offset=96, length=len(stored), crc64=crc64(stored), plain_bytes=plain_bytes)
