"""Which segments of a stream a checkpoint publishes: those that are sealed, and have no chunk yet.

Rules
  1. Read from the manifest alone: the projection of the stream's log. What it does not have yet is published by the next one.
  2. A segment that is published, or retired, has left the state SEALED: it is found once, and never again.
  3. Slot and chunk id are the segment's id, which is never used again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.names import StreamSegmentFile, Tier
from quire.jobs.context import JobContext
from quire.jobs.stream_checkpoint.run import SegmentToSee
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import WalFormat, WalRecord, WalState

SEGMENTS_MAX = 4_096
"""Published by one job: its batch has as many rows."""


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """What a checkpoint of a stream publishes."""

    stream_id: int
    segments: tuple[tuple[int, WalRecord], ...]
    more: bool
    """Whether there are more than one job takes."""

    @property
    def size_bytes(self) -> int:
        return sum(row.used_bytes for _, row in self.segments)


def unpublished(txn: ReadTxn, stream_id: int) -> list[tuple[int, WalRecord]]:
    """(segment, row) of sealed segments without a chunk, oldest first."""
    return [
        (segment_id, row)
        for (_, segment_id), row in txn.scan(t.WAL_CATALOG, stream_id)
        if row.state is WalState.SEALED and row.format is WalFormat.APPEND_ONLY
    ]


def plan_stream(txn: ReadTxn, stream_id: int) -> StreamPlan:
    """The next segments to publish."""
    found = unpublished(txn, stream_id)
    return StreamPlan(stream_id, tuple(found[:SEGMENTS_MAX]), len(found) > SEGMENTS_MAX)


def to_see(ctx: JobContext, txn: ReadTxn, plan: StreamPlan) -> list[SegmentToSee]:
    """Where a copy of each segment is to be seen."""
    found = []
    for segment_id, row in plan.segments:
        key = ArtifactKey(plan.stream_id, ArtifactKind.WAL, segment_id, 0)
        where = ctx.place_of(txn, key, row)
        warm = StreamSegmentFile(stream_id=plan.stream_id, tier=Tier.WARM, segment_id=segment_id).path
        found.append(
            SegmentToSee(
                segment_id=segment_id,
                hot=where.local,
                warm=os.path.join(ctx.root, warm),
                url=where.url,
                object_key=where.object_key if where.has_remote else "",
                used_bytes=row.used_bytes,
            )
        )
    return found
