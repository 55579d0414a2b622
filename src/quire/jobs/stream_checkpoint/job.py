"""The checkpoint job of a stream: publishes its sealed segments, which already have their final form, as chunks.

The job plans on the manifest alone, the projection of the stream's log, and publishes rows and slots in the transaction that
ends it. Slot and chunk id are the id of the segment, which is never reused. No byte is written, and nothing is read except to
check that a copy exists: threads do that, whatever the runner. For the ownership of the bytes see
docs/decisions/009-stream-chunks.md.

A published segment moves from SEALED to INDEXED in the same batch. The batch therefore fails as a whole if retention has ended
a segment in the meantime (`IllegalTransition`), or if a leaf is not the planned one (`StalePlan`). The segment moves no
further, and the WAL mark does not move: snapshots continue to pin segments, which is what retention checks.

A crash before that batch leaves nothing, or a reserved generation that is never used.

A chunk's row borrows the segment's bytes: its `suffix` names the segment's object, its residency is fixed and its size is 0.
Only `wal_catalog` states where the bytes are (M6); nothing moves, verifies, counts or deletes bytes through a borrowed row.
One copy of a segment is enough: the file as it was written, the compressed file, or the object. A segment without a copy is
reported and not published: it may have moved between two checks.

    >>> from quire.manifest.verification import shares_bytes
    >>> shares_bytes(ArtifactKey(7, ArtifactKind.BASE, 3, 1), row_of(7, 3, first_lsn=1, last_lsn=9, at_ms=0))
    True
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from quire.core.errors import ObjectNotFound
from quire.core.events import emit
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.durable.names import StreamSegmentFile, Tier, object_key
from quire.jobs.context import JobContext
from quire.jobs.handler import Completed, Outcome, Progress, options
from quire.jobs.locations import OpenStore
from quire.manifest import tables as t
from quire.manifest.jobqueue import Job
from quire.manifest.ops.artifacts import PutChunk
from quire.manifest.ops.base import Counter, Op
from quire.manifest.ops.jobs import EnsureJob
from quire.manifest.ops.slots import SetSlots
from quire.manifest.ops.wal import MoveWalState
from quire.manifest.reads import ReadTxn
from quire.manifest.records import (
    ChunkRecord,
    Compression,
    JobKind,
    LeafRef,
    Residency,
    WalFormat,
    WalRecord,
    WalState,
)
from quire.manifest.slots import Leaf, Link, pack_leaf, place


def stream_checkpoint_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Publish the sealed segments of a stream that are not chunks yet."""
    options(job, runner="", sealed_only=False)
    manifest = ctx.manifest
    with manifest.read() as txn:
        plan = plan_stream(txn, job.db_id)
        wanted = copies_of(ctx, txn, plan)
    progress(0, len(wanted))
    hit("jobs.stream_checkpoint.planned")
    if not wanted:
        return Completed({"chunks": 0, "bytes": 0, "missing": 0})
    seen = with_copies(wanted, disk=ctx.disk, open_store=ctx.open_store)
    progress(len(seen), len(wanted))
    generation = manifest.reserve_generation(job.db_id)
    hit("jobs.stream_checkpoint.reserved")
    with manifest.read() as txn:
        ops = publish_ops(txn, plan, seen, generation)
    missing = [segment.segment_id for segment in wanted if segment.segment_id not in seen]
    for segment_id in missing:
        emit("error", "stream.checkpoint_copy_missing", stream=job.db_id, segment_id=segment_id)
    after: tuple[Op, ...] = ()
    if plan.more:
        record = manifest.jobs.record(JobKind.CHECKPOINT, job.db_id, None)
        after = (EnsureJob(manifest.allocate(Counter.JOB), record),)
    size = sum(row.used_bytes for segment_id, row in plan.segments if segment_id in seen)
    emit("info", "stream.checkpointed", stream=job.db_id, chunks=len(seen), bytes=size, generation=generation)
    return Completed({"chunks": len(seen), "bytes": size, "missing": len(missing)}, ops=tuple(ops), after=after)


# ── planning ──────────────────────────────────────────────────────────────────────────────────────────────────────────
SEGMENTS_MAX = 4_096
"""Segments that one job publishes: its batch has as many rows."""


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """The segments that a checkpoint of a stream publishes."""

    stream_id: int
    segments: tuple[tuple[int, WalRecord], ...]
    more: bool
    """Whether the stream has more segments than one job publishes."""

    @property
    def size_bytes(self) -> int:
        return sum(row.used_bytes for _, row in self.segments)


def unpublished(txn: ReadTxn, stream_id: int) -> list[tuple[int, WalRecord]]:
    """Return (segment, row) of sealed segments without a chunk, oldest first."""
    return [
        (segment_id, row)
        for (_, segment_id), row in txn.scan(t.WAL_CATALOG, stream_id)
        if row.state is WalState.SEALED and row.format is WalFormat.APPEND_ONLY
    ]


def plan_stream(txn: ReadTxn, stream_id: int) -> StreamPlan:
    """Plan the next segments to publish."""
    segments = unpublished(txn, stream_id)
    return StreamPlan(stream_id, tuple(segments[:SEGMENTS_MAX]), len(segments) > SEGMENTS_MAX)


def copies_of(ctx: JobContext, txn: ReadTxn, plan: StreamPlan) -> list[SegmentCopies]:
    """Return where copies of each planned segment may be."""
    segments = []
    for segment_id, row in plan.segments:
        key = ArtifactKey(plan.stream_id, ArtifactKind.WAL, segment_id, 0)
        where = ctx.place_of(txn, key, row)
        warm = StreamSegmentFile(stream_id=plan.stream_id, tier=Tier.WARM, segment_id=segment_id).path
        segments.append(
            SegmentCopies(
                segment_id=segment_id,
                hot=where.local,
                warm=os.path.join(ctx.root, warm),
                url=where.url,
                object_key=where.object_key if where.has_remote else "",
                used_bytes=row.used_bytes,
            )
        )
    return segments


# ── checking copies ─────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCopies:
    """The locations where copies of a segment may be."""

    segment_id: int
    hot: str
    warm: str
    url: str
    object_key: str
    """Empty if there is no object."""
    used_bytes: int


def with_copies(segments: Iterable[SegmentCopies], *, disk: Disk, open_store: OpenStore) -> set[int]:
    """Return the ids of the segments that have a copy."""
    present = {segment.segment_id for segment in segments if _has_copy(segment, disk, open_store)}
    hit("jobs.stream_checkpoint.seen")
    return present


def _has_copy(segment: SegmentCopies, disk: Disk, open_store: OpenStore) -> bool:
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


# ── publishing ────────────────────────────────────────────────────────────────────────────────────────────────────────
def publish_ops(txn: ReadTxn, plan: StreamPlan, seen: set[int], generation: int) -> list[Op]:
    """Return the batch, based on the state in `txn`. A row has the seal time of its segment, so a repeat makes the same row."""
    ops: list[Op] = []
    leaves: dict[int, Leaf] = {}
    for segment_id, row in plan.segments:
        if segment_id not in seen:
            continue
        lsns = {"first_lsn": row.first_lsn, "last_lsn": row.last_lsn}
        chunk = row_of(plan.stream_id, segment_id, at_ms=row.sealed_at_ms, **lsns)
        ops.append(MoveWalState(plan.stream_id, segment_id, WalState.INDEXED))
        ops.append(PutChunk(plan.stream_id, segment_id, generation, chunk))
        leaf, offset = place(segment_id)
        leaves.setdefault(leaf, {})[offset] = (Link(ArtifactKind.BASE, plan.stream_id, generation, row.last_lsn),)
    for leaf, changes in sorted(leaves.items()):
        held = txn.get(t.LIVE_LEAF, plan.stream_id, leaf) or LeafRef(0, 0)
        before = (held.origin_db_id, held.generation)
        ops.append(SetSlots(plan.stream_id, leaf, generation, *before, pack_leaf(changes)))
    return ops


def row_of(stream_id: int, segment_id: int, *, first_lsn: int, last_lsn: int, at_ms: int) -> ChunkRecord:
    """Return the row of a segment's chunk, which depends on nothing but the arguments."""
    return ChunkRecord(
        Residency.LOCAL,
        0,
        at_ms,
        lsn_start=first_lsn,
        lsn_end=last_lsn,
        compression=Compression.NONE,
        suffix=object_key(ArtifactKey(stream_id, ArtifactKind.WAL, segment_id, 0)),
    )
