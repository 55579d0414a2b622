"""Looking whether segments that are to be published have a copy, and the rows of their chunks.

One copy is enough: the file as it was written, the compressed one, or the object. Which bytes it has is verification's
business (`jobs/stream_verify`). A segment without a copy is reported and not published: it may have moved between two looks.

The row of such a chunk borrows the segment's bytes (docs/decisions/009-stream-chunks.md): its `suffix` names the segment's
object, its residency is fixed and its size is 0. Where the bytes are is said once, in `wal_catalog` (M6); nothing moves,
verifies, counts or deletes bytes by a borrowed row.

Safe to run on an executor. Raises what disk and object store raise.

    >>> from quire.manifest.verification import borrows
    >>> borrows(ArtifactKey(7, ArtifactKind.BASE, 3, 1), row_of(7, 3, first_lsn=1, last_lsn=9, at_ms=0))
    True
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quire.core.errors import ObjectNotFound
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.durable.names import object_key
from quire.jobs.locations import OpenStore
from quire.manifest.records import ChunkRecord, Compression, Residency


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentToSee:
    """Where copies of a segment may be."""

    segment_id: int
    hot: str
    warm: str
    url: str
    object_key: str
    """Empty: there is no object."""
    used_bytes: int


def see(segments: Iterable[SegmentToSee], *, disk: Disk, open_store: OpenStore) -> set[int]:
    """Those of which a copy is there."""
    present = {segment.segment_id for segment in segments if _is_there(segment, disk, open_store)}
    hit("jobs.stream_checkpoint.seen")
    return present


def _is_there(segment: SegmentToSee, disk: Disk, open_store: OpenStore) -> bool:
    if _size(disk, segment.hot) >= segment.used_bytes or _size(disk, segment.warm) > 0:
        return True
    if not segment.object_key:
        return False
    try:
        open_store(segment.url).head(segment.object_key)
    except ObjectNotFound:
        return False
    return True


def _size(disk: Disk, path: str) -> int:
    try:
        file = disk.open(path, write=False)
    except FileNotFoundError:
        return 0
    try:
        return file.size()
    finally:
        file.close()


# ── rows of stream chunks ─────────────────────────────────────────────────────────────────────────────────────────────
def row_of(stream_id: int, segment_id: int, *, first_lsn: int, last_lsn: int, at_ms: int) -> ChunkRecord:
    """The row of a segment's chunk. It is the same whenever it is made, but for `at_ms`."""
    return ChunkRecord(
        Residency.LOCAL,
        0,
        at_ms,
        lsn_start=first_lsn,
        lsn_end=last_lsn,
        compression=Compression.NONE,
        suffix=object_key(ArtifactKey(stream_id, ArtifactKind.WAL, segment_id, 0)),
    )
