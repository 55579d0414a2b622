"""The task that writes one slot's new chunk or delta: reads frames and, for a rewrite, the old chain; writes one object.

Terms
  part     the newest frame of each page that one segment has for one slot
  window   as many pages of a slot, in ascending order, as fit `WINDOW_BYTES`: their offsets, and one buffer with their images

A task is self-contained; it does not read the manifest. The name of its object follows from the task alone: repeated or
concurrent runs of a task write the same artifact, and the second adopts the object that the first put (P11). Therefore a slot
is written only from all of its parts: with a part missing, an older version of a page would get a name that the next attempt
trusts.

Page bodies are read once and written once (K2), a window at a time, copied by numpy; Python computes only the checksum of each
page. Every frame is verified with its segment's salt, pages of chunks as `ChunkReader` does it. Memory is one chunk's
compressed bytes (twice while it is assembled: at most 128 MiB), one window and one run of frames (both stay in the processor's
cache), and for a rewrite one open reader per chunk of the chain. Rows take 8 bytes for each page of a part: a slot that was
written in a thousand segments takes 32 MiB.

Safe to run on an executor. Raises `Corruption`, `ChecksumMismatch`, and what reading raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap

from quire.core.errors import InternalError
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.limits import MIB
from quire.durable.checksums import crc64, crc64_rows
from quire.durable.failpoints import hit
from quire.jobs.locations import OpenStore
from quire.jobs.runner import Key, Tools
from quire.manifest.records import Compression
from quire.pages.chunk_copy import PageRows, copy_pages, packed
from quire.pages.chunk_format import ChunkIdentity
from quire.pages.chunk_reader import ChunkReader, check_chain, same_artifact
from quire.pages.chunk_verify import describe
from quire.pages.chunk_writer import ChunkInfo, ChunkWriter
from quire.pages.segment import FRAME_CHECKED_BYTES, FRAME_HEAD_BYTES, ZERO
from quire.pages.segment_file import SegmentFile
from quire.pages.segment_scan import HEAD_DTYPE, page_map, sealed_entries
from quire.pages.sources import ChunkPlace, SegmentPlace, Sources


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTask:
    """The artifact to write for one slot, and its inputs."""

    key: ArtifactKey
    """The artifact to write: a base (the slot is rewritten) or a delta."""
    url: str
    """URL of the object store to write to."""
    object_key: str
    namespace_id: int
    page_size: int
    pages_per_chunk: int
    pages_below: int
    """Number of pages of this slot that the database has: pages from here on no longer exist (P15)."""
    covered_lsn: int
    digest: bytes
    chain: tuple[ChunkPlace, ...]
    """The chain that a rewrite starts from; empty for a delta."""
    dirty: int = 0
    parts: int = 0
    """`dirty` pages of the slot changed, in `parts` segments."""
    base_generation: int = 0
    lsn_start: int = 0
    compression: Compression = Compression.ZSTD

    @property
    def weight_bytes(self) -> int:
        """Approximate number of bytes to read: the pages that changed, and the chunks that a rewrite starts from."""
        return self.dirty * self.page_size + sum(place.size_bytes for place in self.chain)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotResult:
    """The artifact that was written, with the values for its catalog row."""

    key: ArtifactKey
    size_bytes: int
    sha256: bytes
    page_count: int
    bitmap: bytes
    bitmap_hash: int
    fresh: bytes = b""
    """Bitmap of a base's pages that came from segments; empty if there are none."""


def join_slot(key: Key, task: SlotTask | None, parts: list[SegmentPart], tools: Tools) -> SlotResult:
    """Write the object of a slot from all of its parts; durable on return."""
    assert task is not None, "slots are written by a plan"
    frames = newest_frames(parts, task.covered_lsn)
    if (len(frames), len(parts)) != (task.dirty, task.parts):  # an older version of a page would get a trusted name
        counts = {"pages": len(frames), "parts": len(parts), "planned": (task.dirty, task.parts)}
        raise InternalError("the changes of a slot differ from its plan", hint="run the job again", slot=key, **counts)
    places = {(part.place.origin_db_id, part.place.segment_id): part.place for part in parts}
    return write_slot(task, frames, places, sources=tools.sources, open_store=tools.open_store)


def write_slot(
    task: SlotTask,
    frames: NDArray[np.void],
    places: Mapping[tuple[int, int], SegmentPlace],
    *,
    sources: Sources,
    open_store: OpenStore,
) -> SlotResult:
    """Write the slot's new object from these frames (`FRAME_DTYPE`, by page), which override its chain."""
    identity = ChunkIdentity(
        key=task.key,
        plan_digest=task.digest,
        covered_lsn=task.covered_lsn,
        page_size=task.page_size,
        pages_per_chunk=task.pages_per_chunk,
        lsn_start=task.lsn_start,
        base_generation=task.base_generation,
    )
    parts: list[bytes] = []
    writer = ChunkWriter(parts.append, identity, compression=task.compression)
    chain = [sources.chunk(place) for place in task.chain]
    shape = {"page_size": task.page_size, "pages_per_chunk": task.pages_per_chunk, "pages_below": task.pages_below}
    for offsets, images in windows(frames, places, chain, sources, **shape):
        writer.add_scattered(packed(offsets), images)
    info = writer.finish()
    hit("jobs.checkpoint.encoded")
    body = b"".join(parts)
    parts.clear()  # free the second copy before the slow put
    # No sha256 is passed to `put`: the writer has hashed these very bytes, and every part has its own checksum.
    put = open_store(task.url).put(task.object_key, body, create_only=True, identity=same_artifact(identity))
    hit("jobs.checkpoint.stored")
    if put.adopted:
        info = _adopted(task, open_store, put.size_bytes)
    return SlotResult(
        key=task.key,
        size_bytes=info.size_bytes,
        sha256=info.sha256,
        page_count=info.page_count,
        bitmap=info.bitmap,
        bitmap_hash=info.bitmap_hash,
        fresh=_fresh(task, frames),
    )


def _fresh(task: SlotTask, frames: NDArray[np.void]) -> bytes:
    """Return the bitmap of a base's fresh pages, for its history; empty for a delta, which has its own bitmap."""
    if task.key.kind is not ArtifactKind.BASE or not len(frames):
        return b""
    pages = BitMap(packed(frames["page"] % np.uint32(task.pages_per_chunk)))
    pages.run_optimize()
    return pages.serialize()


def _adopted(task: SlotTask, open_store: OpenStore, size_bytes: int) -> ChunkInfo:
    """Describe the existing object, written by an earlier run of the same plan: the row must describe its bytes, not ours."""
    store = open_store(task.url)
    return describe(lambda offset, length: store.get_range(task.object_key, offset, length), size_bytes)


# ── chunk bodies ──────────────────────────────────────────────────────────────────────────────────────────────────────
WINDOW_BYTES = 4 * MIB
RUN_BYTES = 4 * MIB
"""Bytes of neighbouring frames that are read at a time."""

Places = Mapping[tuple[int, int], SegmentPlace]
"""(origin database, segment) → where the segment is."""
Window = tuple[NDArray[np.uint32], PageRows]


def windows(
    frames: NDArray[np.void],
    places: Places,
    chain: Sequence[ChunkReader],
    sources: Sources,
    *,
    page_size: int,
    pages_per_chunk: int,
    pages_below: int,
) -> Iterator[Window]:
    """Yield the pages of a slot in ascending order; those of `frames` (`FRAME_DTYPE`, by page) override those of the chain.

    Pages of the chain from `pages_below` on are omitted: a database that has shrunk no longer has them (P15).
    """
    fresh = (frames["page"] % np.uint32(pages_per_chunk)).astype(np.uint32)
    owned = _owned(chain, fresh, pages_below)
    offsets = np.concatenate([fresh, *(pages for _, pages in owned)])
    offsets.sort()
    step = max(WINDOW_BYTES // page_size, 1)
    room = np.empty((min(step, len(offsets)), page_size), np.uint8)
    for start in range(0, len(offsets), step):
        here = offsets[start : start + step]
        images = room[: len(here)]
        first, last = np.searchsorted(fresh, [here[0], here[-1] + np.uint32(1)])
        _copy_frames(frames[first:last], np.searchsorted(here, fresh[first:last]), images, places, sources)
        for chunk, pages in owned:
            first, last = np.searchsorted(pages, [here[0], here[-1] + np.uint32(1)])
            copy_pages(chunk, pages[first:last], np.searchsorted(here, pages[first:last]), images)
        yield here, images


def _owned(
    chain: Sequence[ChunkReader], fresh: NDArray[np.uint32], pages_below: int
) -> list[tuple[ChunkReader, NDArray[np.uint32]]]:
    """Return (chunk, the pages of which it has the newest version) for chunks that have any."""
    if not chain:
        return []
    check_chain(chain)
    taken = BitMap(packed(fresh))
    taken.add_range(pages_below, chain[0].identity.pages_per_chunk)
    owned = []
    # Newest part first: a page is copied from the newest part that has it, and `taken` hides it in older ones.
    for chunk in reversed(chain):
        pages = BitMap(chunk.pages) - taken
        if pages:
            owned.append((chunk, np.array(pages.to_array(), np.uint32)))
            taken |= pages
    return owned


def _copy_frames(
    frames: NDArray[np.void], rows: NDArray[np.intp], images: PageRows, places: Places, sources: Sources
) -> None:
    """Copy the page of each frame into its row."""
    keys = (frames["origin_db_id"].astype(np.uint64) << np.uint64(32)) | frames["segment_id"]
    for key in np.unique(keys).tolist():
        origin, segment_id = key >> 32, key & 0xFFFFFFFF
        # Opened by its place: an executor may not see the file.
        segment = sources.segment(origin, segment_id, places[origin, segment_id])
        of_segment = np.flatnonzero(keys == np.uint64(key))
        order = of_segment[np.argsort(frames["frame_no"][of_segment], kind="stable")]
        numbers = frames["frame_no"][order].astype(np.int64)
        for start, stop in _runs(numbers, max(RUN_BYTES // segment.header.geometry.stride, 1)):
            _copy_run(segment, int(numbers[start]), rows[order[start:stop]], images)


def _runs(numbers: NDArray[np.int64], longest: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of runs of consecutive numbers, at most `longest` long.

    >>> list(_runs(np.array([3, 4, 5, 9, 10]), 2))
    [(0, 2), (2, 3), (3, 5)]
    """
    breaks = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
    for start, stop in pairwise(breaks):
        for first in range(start, stop, longest):
            yield first, min(first + longest, stop)


def _copy_run(segment: SegmentFile, first: int, rows: NDArray[np.intp], images: PageRows) -> None:
    """Read and verify neighbouring frames, and copy their pages into their rows."""
    header, count = segment.header, len(rows)
    stride, data = header.geometry.stride, segment.read_raw(first, count)
    if len(data) == count * stride:
        heads = np.ndarray((count,), HEAD_DTYPE, data, strides=(stride,))
        numbers = np.arange(first, first + count, dtype=np.uint64)
        checked = np.ndarray((count, FRAME_CHECKED_BYTES), np.uint8, data, strides=(stride, 1))
        seeds = crc64_rows(checked, np.uint64(header.crc64) ^ numbers).tolist()
        view, is_zero = memoryview(data), (heads["flags"] & np.uint32(ZERO)) != 0
        bodies = range(FRAME_HEAD_BYTES, len(data), stride)
        size = stride - FRAME_HEAD_BYTES
        if is_zero.any():
            checksums = [seed if zero else crc64(view[at : at + size], seed)
                     for at, seed, zero in zip(bodies, seeds, is_zero.tolist())]  # fmt: skip
        else:
            checksums = [crc64(view[at : at + size], seed) for at, seed in zip(bodies, seeds)]
        lsns = numbers + np.uint64(header.first_lsn)
        if heads["crc64"].tolist() == checksums and np.array_equal(heads["lsn"], lsns):
            images[rows] = np.ndarray((count, size), np.uint8, data, FRAME_HEAD_BYTES, strides=(stride, 1))
            images[rows[is_zero]] = 0
            return
    # Frame by frame: this locates the damage, and succeeds if only the first read was bad.
    for number, row in enumerate(rows.tolist(), first):
        images[row] = np.frombuffer(segment.read_frame(number), np.uint8)


# ── reading segments ──────────────────────────────────────────────────────────────────────────────────────────────────
PART_DTYPE = np.dtype([("page", "<u4"), ("frame_no", "<u4")])
FRAME_DTYPE = np.dtype(
    [("page", "<u4"), ("frame_no", "<u4"), ("lsn", "<u8"), ("segment_id", "<u4"), ("origin_db_id", "<u4")]
)
"""A version of a page, with the location of its frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInput:
    """A segment that the checkpoint of a database absorbs."""

    db_id: int
    place: SegmentPlace
    last_lsn: int
    """Last lsn of the segment in this database: a fork may have inherited only a part of the segment."""
    covered_lsn: int
    size_pages: int
    """Size of the database at `covered_lsn`: pages from there on no longer exist (P15)."""
    pages_per_chunk: int


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """The part of one segment for one slot."""

    place: SegmentPlace
    first_lsn: int
    rows: NDArray[np.void]
    """Rows of `PART_DTYPE`, by page."""


@dataclass(frozen=True, slots=True)
class Dirty:
    """How many pages of one slot changed, in how many segments."""

    pages: int
    parts: int


def split_rows(given: SegmentInput, tools: Tools) -> Iterator[tuple[Key, SegmentPart]]:
    """Yield the parts of a segment, slot by slot."""
    for slot, newest, first_lsn in _by_slot(given, tools):
        rows = np.zeros(len(newest), PART_DTYPE)
        rows["page"], rows["frame_no"] = newest["page"], newest["lsn"] - np.uint64(first_lsn)
        yield (given.db_id, slot), SegmentPart(given.place, first_lsn, rows)


def split_pages(given: SegmentInput, tools: Tools) -> Iterator[tuple[Key, bytes]]:
    """Yield the pages of each slot that a segment has, as bitmaps: all that counting needs."""
    for slot, newest, _ in _by_slot(given, tools):
        yield (given.db_id, slot), BitMap(packed(newest["page"] % np.uint32(given.pages_per_chunk))).serialize()


def join_pages(_key: Key, _task: None, bitmaps: list[bytes], _tools: Tools) -> Dirty:
    """Count the distinct pages of a slot."""
    return Dirty(len(BitMap.union(*(BitMap.deserialize(bitmap) for bitmap in bitmaps))), len(bitmaps))


def newest_frames(parts: list[SegmentPart], covered_lsn: int) -> NDArray[np.void]:
    """Return the newest version of each page of a slot, by page."""
    frames = np.zeros(sum(len(part.rows) for part in parts), FRAME_DTYPE)
    start = 0
    for part in parts:
        into = frames[start : start + len(part.rows)]
        into["page"], into["frame_no"] = part.rows["page"], part.rows["frame_no"]
        into["lsn"] = part.rows["frame_no"].astype(np.uint64) + np.uint64(part.first_lsn)
        into["segment_id"], into["origin_db_id"] = part.place.segment_id, part.place.origin_db_id
        start += len(part.rows)
    return page_map(frames, covered_lsn)


def _by_slot(given: SegmentInput, tools: Tools) -> Iterator[tuple[int, NDArray[np.void], int]]:
    """Yield (slot, its newest entries by page, the segment's first lsn)."""
    place = given.place
    file = tools.sources.segment(place.origin_db_id, place.segment_id, place)
    count = given.last_lsn - file.header.first_lsn + 1
    entries = sealed_entries(file.header, file.read_index(count), count, path=file.path)
    newest = page_map(entries, given.covered_lsn)
    # Pages that a later commit of this plan has cut off: their slots are cleared, or end before them (P15).
    newest = newest[newest["page"] < np.uint32(given.size_pages)]
    slots = newest["page"] // np.uint32(given.pages_per_chunk)
    starts = [0, *(np.flatnonzero(np.diff(slots)) + 1).tolist()] if len(slots) else []
    for start, end in pairwise([*starts, len(newest)]):
        yield int(slots[start]), newest[start:end], file.header.first_lsn
