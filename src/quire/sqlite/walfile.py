"""Reads the write-ahead log that SQLite keeps next to a database, `FILE-wal`: docs/formats/sqlite-wal.md has the bytes.

A frame is good if its salts are the header's, its page is not 0 and its checksum follows from the previous frame. The first
frame that is not good ends the log, as it does for SQLite: it is a torn tail or left over from before a restart of the log,
not damage. Frames that no commit follows are not part of the database. Frames and pages are numbered from 1, as in SQLite.

Pure functions and values over bytes that a `ReadAt` returns. Threads: any. The reader of a live database's file must hold a
read transaction on it, so that the log is not restarted in the meantime.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.limits import PAGE_SIZE_MAX, PAGE_SIZE_MIN

HEADER = struct.Struct(">IIII8sII")
HEADER_BYTES = 32
FRAME_HEAD = struct.Struct(">II8sII")
FRAME_HEAD_BYTES = 24
assert HEADER.size == HEADER_BYTES
assert FRAME_HEAD.size == FRAME_HEAD_BYTES

MAGIC = 0x377F0682
"""The lowest bit is the byte order of the checksums: words are little-endian (0) or big-endian (1)."""
VERSION = 3_007_000
BLOCK_BYTES = 4 << 20
"""Bytes that are read at a time; at least one frame."""

_HEAD_WORDS = FRAME_HEAD_BYTES // 4
_SUMMED_HEAD_WORDS = 2
"""Only page and size of a frame's header are summed."""
_MOD = 1 << 32

ReadAt = Callable[[int, int], bytes]
"""(size, offset) → the bytes there; fewer at the end of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WalHeader:
    """The first 32 bytes, verified."""

    big_endian: bool
    page_size: int
    sequence: int
    salts: bytes
    checksum: tuple[int, int]

    @property
    def frame_bytes(self) -> int:
        """Bytes of a frame with its header."""
        return FRAME_HEAD_BYTES + self.page_size

    def offset(self, frame: int) -> int:
        """Return the offset of a frame."""
        return HEADER_BYTES + (frame - 1) * self.frame_bytes

    @property
    def start(self) -> VerifiedFrame:
        """The position before the first frame."""
        return VerifiedFrame(0, self.checksum)


@dataclass(frozen=True, slots=True)
class VerifiedFrame:
    """The position after a verified frame (0: after the header), with the checksum up to there."""

    frame: int
    checksum: tuple[int, int]


@dataclass(frozen=True, slots=True)
class FrameBlock:
    """Consecutive good frames. `sizes` are 0 except for commits."""

    first: int
    pages: NDArray[np.uint32]
    sizes: NDArray[np.uint32]
    checksums: NDArray[np.uint32]
    _rows: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.pages)

    def image(self, index: int) -> bytes:
        """Return the page of a frame."""
        return self._rows[index, FRAME_HEAD_BYTES:].tobytes()

    def place(self, index: int) -> VerifiedFrame:
        """Return the position after a frame."""
        return VerifiedFrame(self.first + index, (int(self.checksums[index, 0]), int(self.checksums[index, 1])))


def parse_header(data: bytes) -> WalHeader | str:
    """Return the header, or what is wrong with it: SQLite ignores such a file."""
    if len(data) < HEADER_BYTES:
        return "it is empty" if not data else "it is shorter than its header"
    magic, version, page_size, sequence, salts, *checksum = HEADER.unpack_from(data)
    if magic & ~1 != MAGIC:
        return "it does not start like a write-ahead log"
    if version != VERSION:
        return f"its format has version {version}, not {VERSION}"
    if not PAGE_SIZE_MIN <= page_size <= PAGE_SIZE_MAX or page_size & (page_size - 1):
        return f"its page size is {page_size}"
    big_endian = bool(magic & 1)
    if checksum_of(data[: HEADER_BYTES - 8], big_endian=big_endian) != tuple(checksum):
        return "the checksum of its header is wrong"
    return WalHeader(
        big_endian=big_endian,
        page_size=page_size,
        sequence=sequence,
        salts=salts,
        checksum=(checksum[0], checksum[1]),
    )


def checksum_of(data: bytes, *, big_endian: bool, start: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Return SQLite's checksum of a multiple of 8 bytes, word by word: for headers, and to test the fast version.

    >>> checksum_of(bytes([1, 0, 0, 0, 2, 0, 0, 0]), big_endian=False)
    (1, 3)
    """
    first, second = start
    words = struct.unpack(f"{'>' if big_endian else '<'}{len(data) // 4}I", data)
    for even, odd in zip(words[::2], words[1::2]):
        first = (first + even + second) % _MOD
        second = (second + odd + first) % _MOD
    return first, second


def blocks(read_at: ReadAt, header: WalHeader, after: VerifiedFrame, upto: int | None = None) -> Iterator[FrameBlock]:
    """Yield the good frames after a position, at most up to frame `upto`, a few MiB at a time."""
    frames_max = max(BLOCK_BYTES // header.frame_bytes, 1)
    place = after
    while upto is None or place.frame < upto:
        wanted = frames_max if upto is None else min(frames_max, upto - place.frame)
        data = read_at(wanted * header.frame_bytes, header.offset(place.frame + 1))
        block = verified(data, header, place)
        if not len(block):
            return
        yield block
        if len(block) < wanted:
            return
        place = block.place(len(block) - 1)


def verified(data: bytes, header: WalHeader, after: VerifiedFrame) -> FrameBlock:
    """Return the good frames at the beginning of `data`, which follows position `after`."""
    frames_read = len(data) // header.frame_bytes
    rows = np.frombuffer(data, np.uint8, frames_read * header.frame_bytes).reshape(frames_read, header.frame_bytes)
    heads = rows.view(">u4")[:, :_HEAD_WORDS]
    stored = heads[:, 4:6].astype(np.uint32)
    before = np.empty_like(stored)
    before[:1] = after.checksum
    # Each frame is checked against the stored checksum of the one before it. If that one is wrong, it fails itself, and
    # the log ends there.
    before[1:] = stored[:-1]
    good = (_sums(rows, header, before) == stored).all(axis=1)
    good &= (heads[:, 2:4] == np.frombuffer(header.salts, ">u4")).all(axis=1)
    good &= heads[:, 0] != 0
    count = frames_read if good.all() else int(np.argmin(good))
    fields = heads[:count].astype(np.uint32)
    return FrameBlock(after.frame + 1, fields[:, 0], fields[:, 1], stored[:count], rows[:count])


def _sums(rows: NDArray[np.uint8], header: WalHeader, before: NDArray[np.uint32]) -> NDArray[Any]:
    """Return the checksum of each frame, given that of the frame before it.

    Checksums are linear in the bytes, so those of a block of frames are one matrix product, without a loop over words and
    without a copy of the pages.
    """
    weights, step = _weights(header.page_size)
    words = rows.view(">u4").astype(np.uint32) if header.big_endian else rows.view("<u4")
    carried = np.einsum("ij,kj->ik", before, step)
    return np.asarray(np.einsum("ij,kj->ik", words, weights) + carried, np.uint32)


@lru_cache(maxsize=8)
def _weights(page_size: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return what each word of a frame adds to its checksum, and what the previous checksum becomes; all modulo 2**32.

    One step of the checksum takes (s, t) and the words x, y to (s + t + x, s + 2 t + x + y): a matrix of Fibonacci numbers.
    """
    words = _HEAD_WORDS + page_size // 4
    weights = np.zeros((2, words), np.uint32)
    summed = [*range(_SUMMED_HEAD_WORDS), *range(_HEAD_WORDS, words)]
    a, b, c, d = 1, 0, 0, 1
    for even, odd in zip(summed[-2::-2], summed[::-2]):
        weights[:, even] = (a + b) % _MOD, (c + d) % _MOD
        weights[:, odd] = b, d
        a, b, c, d = (a + b) % _MOD, (a + 2 * b) % _MOD, (c + d) % _MOD, (c + 2 * d) % _MOD
    return weights, np.array([[a, b], [c, d]], np.uint32)


@dataclass(frozen=True, slots=True)
class WalMap:
    """The newest image of each page up to the last commit: page → frame."""

    header: WalHeader
    frames: dict[int, int]
    size_pages: int
    """Size of the database at the last commit, in pages; 0 if there is no commit."""
    end: VerifiedFrame
    """The position after the last commit."""


def newest_pages(read_at: ReadAt, header: WalHeader, upto: int | None = None) -> WalMap:
    """Return which frames hold the database as of the last commit, at or before frame `upto` if given."""
    frames: dict[int, int] = {}
    waiting: dict[int, int] = {}
    size_pages, end = 0, header.start
    for block in blocks(read_at, header, header.start, upto):
        commits = np.flatnonzero(block.sizes)
        cut = int(commits[-1]) + 1 if len(commits) else 0
        numbers = range(block.first, block.first + len(block))
        pages = block.pages.tolist()
        if cut:
            frames.update(waiting)
            frames.update(zip(pages[:cut], numbers[:cut]))
            waiting.clear()
            size_pages, end = int(block.sizes[cut - 1]), block.place(cut - 1)
        waiting.update(zip(pages[cut:], numbers[cut:]))
    # Pages beyond the size were cut off by a later commit of the log.
    kept = {page: frame for page, frame in frames.items() if page <= size_pages}
    return WalMap(header, kept, size_pages, end)
