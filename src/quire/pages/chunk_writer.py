"""Writes a chunk from pages in ascending order, and returns the metadata for its catalog row.

Each page is added once, alone or with others, in any mixture: the object is the same, byte for byte. Memory is one frame, and
9 bytes per page for the footer. The sink gets every byte once, in order; if it raises, what it has accepted is unknown, and the
object must be discarded.

Threads: one at a time; importable on executors (no lmdb). Format page: `docs/formats/chunk.md`. Raises `InvalidInput` and
`OutOfRange` (nothing was written, and the writer stays usable), and what the sink raises.

    >>> from quire.core.ids import ArtifactKey, ArtifactKind
    >>> key = ArtifactKey(origin_db_id=1, kind=ArtifactKind.BASE, id=0, generation=1)
    >>> identity = ChunkIdentity(key=key, plan_digest=bytes(32), covered_lsn=9, page_size=4096, pages_per_chunk=16384)
    >>> parts = []
    >>> writer = ChunkWriter(parts.append, identity)
    >>> writer.add_scattered(range(100), bytes(100 * 4096))
    >>> writer.add(200, b"q" * 4096)
    >>> info = writer.finish()
    >>> info.page_count, info.frame_count, info.size_bytes == len(b"".join(parts))
    (101, 7, True)
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

from pyroaring import BitMap

from quire.core.errors import InvalidInput, OutOfRange
from quire.durable.checksums import Bytes, crc64
from quire.manifest.records import Compression
from quire.pages.chunk_format import (
    FRAME,
    LEVEL,
    PAGES_PER_FRAME,
    ChunkIdentity,
    compressor,
    encode_footer,
    encode_header,
    encode_trailer,
    frames_of,
    pack_frame,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Images: TypeAlias = Bytes | npt.NDArray[np.uint8]

Sink = Callable[[bytes], object]
"""Receives the object's bytes, in order: a file's `write`, a list's `append`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkInfo:
    """The metadata of a chunk for its catalog row; small and picklable, so that an executor can send it to the driver."""

    identity: ChunkIdentity
    compression: Compression
    size_bytes: int
    sha256: bytes
    """SHA-256 of the whole object."""
    page_count: int
    bitmap: bytes
    """The present pages in the portable roaring format: `dirty_pages` of a delta's row."""
    bitmap_hash: int
    """crc64 of `bitmap`."""

    @property
    def frame_count(self) -> int:
        return frames_of(self.page_count)

    @property
    def plain_bytes(self) -> int:
        """The uncompressed size of the pages."""
        return self.page_count * self.identity.page_size


class ChunkWriter:
    """A chunk being written to `write`; not valid before `finish` returns."""

    def __init__(
        self,
        write: Sink,
        identity: ChunkIdentity,
        *,
        compression: Compression = Compression.ZSTD,
        level: int = LEVEL,
    ) -> None:
        # Constant after construction.
        self._write = write
        self._identity = identity
        self._compression = compression
        self._header = encode_header(identity, compression)
        self._packer = compressor(level) if compression is Compression.ZSTD else None
        # Output.
        self._open = True
        self._end = 0
        self._sha256 = hashlib.sha256()
        self._frames: list[bytes] = []
        self._page_crcs = array("Q")
        # Input.
        self._pages = BitMap()
        self._next = 0
        self._partial = bytearray(PAGES_PER_FRAME * identity.page_size)
        self._filled = 0
        self._emit(self._header)

    def add(self, offset: int, image: Images) -> None:
        """Add the page at `offset`, which must be higher than all offsets before."""
        view, count = self._split(image)
        if count != 1:
            raise InvalidInput("the data is not exactly one page", page=offset, pages=count)
        self._check_offsets(offset, offset)
        self._pages.add(offset)
        self._next = offset + 1
        self._append(view)

    def add_scattered(self, offsets: array[int] | Iterable[int], images: Images) -> None:
        """Add pages at these ascending offsets; `images` has them concatenated. An array of offsets must be of u32 ("I")."""
        view, count = self._split(images)
        try:
            places = offsets if isinstance(offsets, array) else array("I", [int(offset) for offset in offsets])
        except OverflowError as error:
            raise OutOfRange("a page offset is outside every chunk", cause=str(error)) from error
        pages = BitMap(places)
        if len(places) != count:
            raise InvalidInput(
                "the number of offsets differs from the number of images", offsets=len(places), images=count
            )
        if count:
            if pages.to_array() != places:
                raise InvalidInput("pages must be in ascending order, each once", first=places[0], last=places[-1])
            self._check_offsets(places[0], places[-1])
            self._pages |= pages
            self._next = places[-1] + 1
            self._append(view)

    def finish(self) -> ChunkInfo:
        """Write the remaining pages, footer and trailer; the object is complete when this returns."""
        self._check_open()
        if self._filled:
            self._emit_frame(memoryview(self._partial)[: self._filled])
        # Rebuilt: roaring keeps the containers that single adds and ranges happened to create, and the bitmap's hash
        # should depend on the pages alone.
        bitmap = BitMap(self._pages.to_array()).serialize()
        page_count = len(self._page_crcs)
        if sys.byteorder == "big":
            self._page_crcs.byteswap()
        footer = encode_footer(self._header, page_count, bitmap, b"".join(self._frames), self._page_crcs.tobytes())
        trailer = encode_trailer(self._end, footer)
        self._emit(footer)
        self._emit(trailer)
        self._open = False
        return ChunkInfo(
            identity=self._identity,
            compression=self._compression,
            size_bytes=self._end,
            sha256=self._sha256.digest(),
            page_count=page_count,
            bitmap=bitmap,
            bitmap_hash=crc64(bitmap),
        )

    def _append(self, view: memoryview) -> None:
        """Complete the partial frame, pack whole frames without copying them, and start the next with the rest."""
        frame_bytes = len(self._partial)
        at = 0
        if self._filled:
            at = min(frame_bytes - self._filled, len(view))
            self._partial[self._filled : self._filled + at] = view[:at]
            self._filled += at
            if self._filled < frame_bytes:
                return
            self._emit_frame(memoryview(self._partial))
            self._filled = 0
        while len(view) - at >= frame_bytes:
            self._emit_frame(view[at : at + frame_bytes])
            at += frame_bytes
        self._filled = len(view) - at
        self._partial[: self._filled] = view[at:]

    def _emit_frame(self, plain: memoryview) -> None:
        size = self._identity.page_size
        self._page_crcs.extend([crc64(plain[at : at + size]) for at in range(0, len(plain), size)])
        stored = pack_frame(plain, self._packer)
        self._frames.append(FRAME.pack(self._end, len(stored), crc64(stored)))
        self._emit(stored)

    def _emit(self, data: bytes) -> None:
        self._open = False  # stays false if the sink raises, because what it has accepted is unknown
        self._write(data)
        self._sha256.update(data)
        self._end += len(data)
        self._open = True

    def _split(self, images: Images) -> tuple[memoryview, int]:
        self._check_open()
        view = memoryview(cast("Bytes", images))  # before Python 3.12 there is no type for buffers
        size = self._identity.page_size
        count, remainder = divmod(view.nbytes, size)
        if remainder or not view.c_contiguous:
            what = "a buffer of pages must be a sequence of whole pages"
            raise InvalidInput(what, size=view.nbytes, page_size=size, contiguous=view.c_contiguous)
        return (_flat(view) if count else memoryview(b"")), count

    def _check_offsets(self, first: int, last: int) -> None:
        if first < self._next:
            raise InvalidInput("pages must be in ascending order, each once", page=first, next=self._next)
        if last >= self._identity.pages_per_chunk:
            raise OutOfRange("the page is outside the chunk", page=last, pages_per_chunk=self._identity.pages_per_chunk)

    def _check_open(self) -> None:
        if not self._open:
            raise InvalidInput("the chunk is finished, or its sink failed", hint="start a new one")


def _flat(view: memoryview) -> memoryview:
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
