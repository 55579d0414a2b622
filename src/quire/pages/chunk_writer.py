"""Writes a chunk: pages in rising order in, frames out, and at the end what its catalog row needs.

Pages come each once, one by one or many at a time, in any mixture: the object is the same, byte for byte. Memory is one frame,
and 9 bytes per page for the footer. The sink gets every byte once, in order; if it raises, what it has taken is unknown, and
the object is to be thrown away.

One thread at a time; importable on executors (no lmdb). Format page: `docs/formats/chunk.md`. Raises `InvalidInput` and
`OutOfRange` (nothing was written; go on with a better call), and what the sink raises.

    >>> from quire.core.ids import ArtifactKey, ArtifactKind
    >>> key = ArtifactKey(origin_db_id=1, kind=ArtifactKind.BASE, id=0, generation=1)
    >>> identity = ChunkIdentity(key=key, plan_digest=bytes(32), covered_lsn=9, page_size=4096, pages_per_chunk=16384)
    >>> parts = []
    >>> writer = ChunkWriter(parts.append, identity)
    >>> writer.add_pages(0, bytes(100 * 4096))
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
"""Takes the object's bytes, in order: a file's `write`, a list's `append`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkInfo:
    """What a catalog row says about a chunk; small and picklable, so that an executor can hand it to the driver."""

    identity: ChunkIdentity
    compression: Compression
    size_bytes: int
    sha256: bytes
    """Of the whole object."""
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
        """The pages without compression."""
        return self.page_count * self.identity.page_size


class ChunkWriter:
    """A chunk that is being written to `write`; nothing of it is worth anything before `finish` returned."""

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
        # What has been written.
        self._open = True
        self._end = 0
        self._sha256 = hashlib.sha256()
        self._frames: list[bytes] = []
        self._page_crcs = array("Q")
        # What has come in.
        self._pages = BitMap()
        self._next = 0
        self._partial = bytearray(PAGES_PER_FRAME * identity.page_size)
        self._filled = 0
        self._emit(self._header)

    def add(self, offset: int, image: Images) -> None:
        """The page at `offset`, which is higher than all before."""
        view, count = self._split(image)
        if count != 1:
            raise InvalidInput("this is not one page", page=offset, pages=count)
        self._check_offsets(offset, offset)
        self._pages.add(offset)
        self._next = offset + 1
        self._append(view)

    def add_pages(self, first_offset: int, images: Images) -> None:
        """Pages in a row, from `first_offset`, in one buffer: bytes, or a C-contiguous array of any shape."""
        view, count = self._split(images)
        if count:
            self._check_offsets(first_offset, first_offset + count - 1)
            self._pages.add_range(first_offset, first_offset + count)
            self._next = first_offset + count
            self._append(view)

    def add_scattered(self, offsets: array[int] | Iterable[int], images: Images) -> None:
        """Pages at these rising offsets, one image after the other in one buffer; an array is of u32 ("I")."""
        view, count = self._split(images)
        try:
            places = offsets if isinstance(offsets, array) else array("I", [int(offset) for offset in offsets])
        except OverflowError as error:
            raise OutOfRange("a page offset is not in any chunk", cause=str(error)) from error
        pages = BitMap(places)
        if len(places) != count:
            raise InvalidInput("there are not as many offsets as images", offsets=len(places), images=count)
        if count:
            if pages.to_array() != places:
                raise InvalidInput("pages come in rising order, each once", first=places[0], last=places[-1])
            self._check_offsets(places[0], places[-1])
            self._pages |= pages
            self._next = places[-1] + 1
            self._append(view)

    def finish(self) -> ChunkInfo:
        """Write what is left, footer and trailer; the object is whole when this returns."""
        self._check_open()
        if self._filled:
            self._emit_frame(memoryview(self._partial)[: self._filled])
        # Built anew: roaring keeps the containers that single adds and ranges happened to make, and the bitmap's hash
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
        """Fill the frame that was begun, pack whole frames where they are, begin the next with what is left."""
        whole = len(self._partial)
        at = 0
        if self._filled:
            at = min(whole - self._filled, len(view))
            self._partial[self._filled : self._filled + at] = view[:at]
            self._filled += at
            if self._filled < whole:
                return
            self._emit_frame(memoryview(self._partial))
            self._filled = 0
        while len(view) - at >= whole:
            self._emit_frame(view[at : at + whole])
            at += whole
        self._filled = len(view) - at
        self._partial[: self._filled] = view[at:]

    def _emit_frame(self, plain: memoryview) -> None:
        size = self._identity.page_size
        self._page_crcs.extend([crc64(plain[at : at + size]) for at in range(0, len(plain), size)])
        stored = pack_frame(plain, self._packer)
        self._frames.append(FRAME.pack(self._end, len(stored), crc64(stored)))
        self._emit(stored)

    def _emit(self, data: bytes) -> None:
        self._open = False  # and so it stays if the sink raises: nobody knows what it has taken
        self._write(data)
        self._sha256.update(data)
        self._end += len(data)
        self._open = True

    def _split(self, images: Images) -> tuple[memoryview, int]:
        self._check_open()
        view = memoryview(cast("Bytes", images))  # before Python 3.12 no type says that an array is a buffer
        size = self._identity.page_size
        count, rest = divmod(view.nbytes, size)
        if rest or not view.c_contiguous:
            what = "a buffer of pages is whole pages one behind the other"
            raise InvalidInput(what, size=view.nbytes, page_size=size, contiguous=view.c_contiguous)
        return (_flat(view) if count else memoryview(b"")), count

    def _check_offsets(self, first: int, last: int) -> None:
        if first < self._next:
            raise InvalidInput("pages come in rising order, each once", page=first, next=self._next)
        if last >= self._identity.pages_per_chunk:
            raise OutOfRange("the page is beyond the chunk", page=last, pages_per_chunk=self._identity.pages_per_chunk)

    def _check_open(self) -> None:
        if not self._open:
            raise InvalidInput("the chunk is finished, or its sink failed", hint="begin a new one")


def _flat(view: memoryview) -> memoryview:
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
