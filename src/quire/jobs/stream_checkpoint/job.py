"""The checkpoint job of a stream: its sealed segments become chunks, being already in their final form.

It is planned on the manifest alone, the projection of the stream's log, and publishes rows and slots in one transaction with
its end. Slot and chunk id are the segment's id, which is never used again. No byte is written, and none is read beyond a look
that a copy is there: threads do it, whatever the runner. Who owns the bytes: docs/decisions/009-stream-chunks.md.

A published segment moves from SEALED to INDEXED in the same batch, which so fails as a whole (`IllegalTransition`) if
retention has ended one meanwhile, and (`StalePlan`) if a leaf is not the one that was planned on. It goes no further, and the
mark of the WAL stays: snapshots go on pinning segments, which is what retention asks.

A crash before that leaves nothing, or a reserved generation that nothing has.

A chunk's row borrows the segment's bytes: its `suffix` names the segment's object, its residency is fixed and its size is 0.
Where the bytes are is said once, in `wal_catalog` (M6); nothing moves, verifies, counts or deletes bytes by a borrowed row.
One copy of a segment is enough: the file as it was written, the compressed one, or the object. One without a copy is reported
and not published: it may have moved between two looks.

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
    """Publish the sealed segments of a stream that are no chunks yet."""
    options(job, runner="", sealed_only=False)
    manifest = ctx.manifest
    with manifest.read() as txn:
        plan = plan_stream(txn, job.db_id)
        wanted = to_see(ctx, txn, plan)
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
    segments = unpublished(txn, stream_id)
    return StreamPlan(stream_id, tuple(segments[:SEGMENTS_MAX]), len(segments) > SEGMENTS_MAX)


def to_see(ctx: JobContext, txn: ReadTxn, plan: StreamPlan) -> list[SegmentToSee]:
    """Where a copy of each segment is to be seen."""
    segments = []
    for segment_id, row in plan.segments:
        key = ArtifactKey(plan.stream_id, ArtifactKind.WAL, segment_id, 0)
        where = ctx.place_of(txn, key, row)
        warm = StreamSegmentFile(stream_id=plan.stream_id, tier=Tier.WARM, segment_id=segment_id).path
        segments.append(
            SegmentToSee(
                segment_id=segment_id,
                hot=where.local,
                warm=os.path.join(ctx.root, warm),
                url=where.url,
                object_key=where.object_key if where.has_remote else "",
                used_bytes=row.used_bytes,
            )
        )
    return segments


# ── looking ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
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


def with_copies(segments: Iterable[SegmentToSee], *, disk: Disk, open_store: OpenStore) -> set[int]:
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


# ── publishing ────────────────────────────────────────────────────────────────────────────────────────────────────────
def publish_ops(txn: ReadTxn, plan: StreamPlan, seen: set[int], generation: int) -> list[Op]:
    """The batch, planned on what `txn` shows. The moment of a row is that of its sealing: a repeat makes the same row."""
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
