"""Writing one slot's new chunk or delta: reads frames and, for a rewrite, the old chain; writes one object.

Rules
  1. A task says everything; no manifest is asked. Its object's name follows from it, and only it: a repeated task, or two at
     once, write the same artifact, and the second adopts what the first put (P11).
  2. Page bodies are read once and written once (K2): frames in the order of their segments, a chain in the order of its pages.
  3. Memory is one chunk's compressed bytes plus the frames of one slot.

Safe to run on an executor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge as merge_sorted
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import ArtifactKey
from quire.durable.failpoints import hit
from quire.jobs.places import OpenStore
from quire.manifest.records import Compression
from quire.pages.chunk_adopt import adopts
from quire.pages.chunk_chain import merge
from quire.pages.chunk_format import ChunkIdentity
from quire.pages.chunk_writer import ChunkInfo, ChunkWriter
from quire.pages.sources import ChunkPlace, Sources

FRAMES_AT_ONCE = 1_024
"""Frames of a slot that are read before they are compressed: 4 MiB of 4 KiB pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTask:
    """What becomes of one slot."""

    key: ArtifactKey
    """The artifact to write: a base (the slot is rewritten) or a delta."""
    url: str
    """Of the object store it goes to."""
    object_key: str
    page_size: int
    pages_per_chunk: int
    pages_below: int
    """The database's size in this slot: pages from here on do not exist any more (P15)."""
    covered_lsn: int
    digest: bytes
    chain: tuple[ChunkPlace, ...]
    """What a rewrite starts from; empty for a delta."""
    frames: NDArray[np.void]
    """`ROW_DTYPE`, the newest version of each changed page of the slot, by page."""
    base_generation: int = 0
    lsn_start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotResult:
    """The artifact that was written, as its catalog row needs it."""

    key: ArtifactKey
    size_bytes: int
    sha256: bytes
    page_count: int
    bitmap: bytes
    bitmap_hash: int


def write_slot(task: SlotTask, *, sources: Sources, open_store: OpenStore) -> SlotResult:
    """Write the slot's new object; durable on return."""
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
    writer = ChunkWriter(parts.append, identity, compression=Compression.ZSTD)
    for offset, image in _pages(task, sources):
        writer.add(offset, image)
    info = writer.finish()
    hit("jobs.checkpoint.encoded")
    body = b"".join(parts)
    put = open_store(task.url).put(
        task.object_key, body, create_only=True, identity=adopts(identity), sha256=info.sha256
    )
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
    )


def _pages(task: SlotTask, sources: Sources) -> Iterator[tuple[int, bytes | memoryview]]:
    """(offset, image) in rising order: changed pages over what the chain holds."""
    changed = _frames(task, sources)
    if not task.chain:
        return changed
    fresh = {int(page) % task.pages_per_chunk for page in task.frames["page"].tolist()}
    kept = (
        (offset, image)
        for offset, image in merge([sources.chunk(place) for place in task.chain], pages_below=task.pages_below)
        if offset not in fresh
    )
    return merge_sorted(changed, kept, key=itemgetter(0))


def _frames(task: SlotTask, sources: Sources) -> Iterator[tuple[int, bytes | memoryview]]:
    frames = task.frames
    for start in range(0, len(frames), FRAMES_AT_ONCE):
        part = frames[start : start + FRAMES_AT_ONCE]
        images: dict[int, bytes | memoryview] = {}
        for origin, segment in {(int(o), int(s)) for o, s in zip(part["origin_db_id"], part["segment_id"])}:
            of_segment = part[(part["origin_db_id"] == origin) & (part["segment_id"] == segment)]
            bodies = sources.frames(origin, segment, of_segment["frame_no"].tolist())
            images.update(zip(of_segment["page"].tolist(), bodies))
        for page in part["page"].tolist():
            yield page % task.pages_per_chunk, images[page]


def _adopted(task: SlotTask, open_store: OpenStore, size_bytes: int) -> ChunkInfo:
    """What is there already, written by an earlier run of this very plan; its row describes those bytes, not ours."""
    from quire.pages.chunk_verify import describe

    store = open_store(task.url)
    return describe(lambda offset, length: store.get_range(task.object_key, offset, length), size_bytes)
