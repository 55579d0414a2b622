"""The one batch that makes a checkpoint or merge true: catalog rows, slots, references, segments, the mark of the WAL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.core.errors import StalePlan
from quire.core.ids import ArtifactKind
from quire.jobs.checkpoint.plan import CheckpointPlan
from quire.jobs.checkpoint.run import SlotResult, SlotTask
from quire.manifest.ops.artifacts import PutChunk, PutDelta, RecordUploads
from quire.manifest.ops.base import Op
from quire.manifest.ops.plans import FinishPlan
from quire.manifest.ops.slots import SetSlots
from quire.manifest.ops.wal import AdvanceCheckpoint
from quire.manifest.reads import ReadTxn
from quire.manifest.records import ChunkRecord, DeltaRecord, Residency
from quire.manifest.slots import Chain, Leaf, Link, pack_leaf, place


def publish_ops(
    txn: ReadTxn, plan: CheckpointPlan, results: Sequence[SlotResult], attempt: int, now_ms: int
) -> tuple[list[Op], set[int]]:
    """The batch, planned on what `txn` shows, and the databases whose artifacts it lets go.

    It fails as a whole (`StalePlan`) if the job's attempt is over, or a leaf is not the one the plan saw.
    """
    ops: list[Op] = []
    leaves: dict[int, Leaf] = {}
    origins = {plan.db_id}
    for task, result in zip(plan.tasks, results, strict=True):
        leaf, offset = place(task.key.id)
        before = txn.chain(plan.db_id, task.key.id)
        origins.update(link.origin_db_id for link in before)
        ops.append(_row(task, result, before, now_ms))
        leaves.setdefault(leaf, {})[offset] = chain_after(task, before)
    cleared: dict[int, bytearray] = {}
    for slot in plan.cleared:
        leaf, offset = place(slot)
        cleared.setdefault(leaf, bytearray()).append(offset)
        leaves.setdefault(leaf, {})
        origins.update(link.origin_db_id for link in txn.chain(plan.db_id, slot))
    for leaf, changes in sorted(leaves.items()):
        held = plan.leaves[leaf]
        origins.add(held.origin_db_id or plan.db_id)
        gone = bytes(cleared.get(leaf, b""))
        ops.append(
            SetSlots(plan.db_id, leaf, plan.generation, held.origin_db_id, held.generation, pack_leaf(changes), gone)
        )
    if plan.tasks:
        written = [(int(task.key.kind), task.key.id, task.key.generation, task.key.delta_id) for task in plan.tasks]
        ops.append(RecordUploads(plan.db_id, written))
    if plan.segments:
        ops.append(AdvanceCheckpoint(plan.db_id, plan.generation, plan.covered_lsn))
    ops.append(FinishPlan(plan.db_id, plan.generation, attempt))
    return ops, origins


def _row(task: SlotTask, result: SlotResult, before: Chain, now_ms: int) -> Op:
    key, remote, size = task.key, Residency.REMOTE_ARCHIVED, result.size_bytes
    common: dict[str, Any] = {
        "lsn_start": task.lsn_start,
        "lsn_end": task.covered_lsn,
        "page_count": result.page_count,
        "sha256": result.sha256,
        "bitmap_hash": result.bitmap_hash,
        "plan_digest": task.digest,
        "compression": task.compression,
        "uploaded_at_ms": now_ms,
        "namespace_id": task.namespace_id,
    }
    if key.kind is ArtifactKind.BASE:
        return PutChunk(key.origin_db_id, key.id, key.generation, ChunkRecord(remote, size, now_ms, **common))
    if not before or before[0].generation != task.base_generation:
        raise StalePlan("the base that a delta was made for is gone", hint="plan again", artifact=key)
    base = before[0]
    record = DeltaRecord(base.generation, remote, size, now_ms, dirty_pages=result.bitmap, **common)
    return PutDelta(key.origin_db_id, key.id, key.generation, key.delta_id, base.origin_db_id, record)


def chain_after(task: SlotTask, before: Chain) -> Chain:
    """The chain of a slot once its task is published."""
    key = task.key
    link = Link(key.kind, key.origin_db_id, key.generation, task.covered_lsn, key.delta_id)
    return (link,) if key.kind is ArtifactKind.BASE else (*before, link)
