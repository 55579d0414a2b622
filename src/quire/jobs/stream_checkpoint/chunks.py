"""Chunks that borrow their bytes: what a stream's checkpoint publishes (docs/decisions/009-stream-chunks.md).

Terms
  borrowed   a base chunk whose row names a segment's object (`suffix` has the variant `wal`): its bytes are the segment's

Rules
  1. Where the bytes are is said once, in the segment's row in `wal_catalog` (M6); a borrowed row has a fixed residency that
     nobody acts on, and a size of 0: whoever adds up chunks and segments counts the bytes once.
  2. Nobody moves, verifies, counts or deletes bytes by a borrowed row: the stream does, by its own log (S1).

Pure; safe to import on an executor.

    >>> from quire.manifest.verification import borrows
    >>> borrows(ArtifactKey(7, ArtifactKind.BASE, 3, 1), row_of(7, 3, first_lsn=1, last_lsn=9, at_ms=0))
    True
"""

from __future__ import annotations

from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.names import object_key
from quire.manifest.records import ChunkRecord, Compression, Residency


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
