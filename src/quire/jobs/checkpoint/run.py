"""Writing one slot's new chunk or delta: reads frames and, for a rewrite, the old chain; writes one object.

Terms
  part    what one segment has for one slot: the newest frame in it of each page (`read.py`)

Rules
  1. A task says everything; no manifest is asked. Its object's name follows from it, and only it: a repeated task, or two at
     once, write the same artifact, and the second adopts what the first put (P11).
  2. So a slot is written only from all of its parts: with one of them missing an older version of a page would get a name that
     the next attempt believes in. The plan says how many parts and pages there are.
  3. Page bodies are read once and written once (K2), a window of pages at a time (`bodies.py`).
  4. Memory is one chunk's compressed bytes (twice while it is put together: at most 128 MiB), one window, the rows of the
     slot's changed pages (24 bytes each), and for a rewrite one open reader per chunk of the chain.

Safe to run on an executor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import InternalError
from quire.core.ids import ArtifactKey
from quire.durable.failpoints import hit
from quire.jobs.checkpoint.bodies import windows
from quire.jobs.checkpoint.read import Part, newest_frames, packed
from quire.jobs.locations import OpenStore
from quire.jobs.runner import Key, Tools
from quire.manifest.records import Compression
from quire.pages.chunk_adopt import adopts
from quire.pages.chunk_format import ChunkIdentity
from quire.pages.chunk_writer import ChunkInfo, ChunkWriter
from quire.pages.sources import ChunkPlace, SegmentPlace, Sources


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTask:
    """What becomes of one slot."""

    key: ArtifactKey
    """The artifact to write: a base (the slot is rewritten) or a delta."""
    url: str
    """Of the object store it goes to."""
    object_key: str
    namespace_id: int
    page_size: int
    pages_per_chunk: int
    pages_below: int
    """The database's size in this slot: pages from here on do not exist any more (P15)."""
    covered_lsn: int
    digest: bytes
    chain: tuple[ChunkPlace, ...]
    """What a rewrite starts from; empty for a delta."""
    dirty: int = 0
    parts: int = 0
    """How many pages of the slot changed, in how many segments (rule 2)."""
    base_generation: int = 0
    lsn_start: int = 0
    compression: Compression = Compression.ZSTD


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotResult:
    """The artifact that was written, as its catalog row needs it."""

    key: ArtifactKey
    size_bytes: int
    sha256: bytes
    page_count: int
    bitmap: bytes
    bitmap_hash: int


def join_slot(key: Key, task: SlotTask | None, parts: list[Part], tools: Tools) -> SlotResult:
    """Write the object of a slot from everything that segments have for it; durable on return."""
    assert task is not None, "slots are written by a plan"
    frames = newest_frames(parts, task.covered_lsn)
    if (len(frames), len(parts)) != (task.dirty, task.parts):  # rule 2
        found = {"pages": len(frames), "parts": len(parts), "planned": (task.dirty, task.parts)}
        raise InternalError("a slot has other changes than its plan says", hint="run the job again", slot=key, **found)
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
    """Write the slot's new object from these frames (`FRAME_DTYPE`, by page) over its chain."""
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
    parts.clear()  # rule 4: the second copy goes before the slow part begins
    # Not hashed once more before it is put: the writer has hashed these very bytes, and every part has a checksum of its own.
    put = open_store(task.url).put(task.object_key, body, create_only=True, identity=adopts(identity))
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


def _adopted(task: SlotTask, open_store: OpenStore, size_bytes: int) -> ChunkInfo:
    """What is there already, written by an earlier run of this very plan; its row describes those bytes, not ours."""
    from quire.pages.chunk_verify import describe

    store = open_store(task.url)
    return describe(lambda offset, length: store.get_range(task.object_key, offset, length), size_bytes)
