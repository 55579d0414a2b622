"""The one batch that makes a stream's sealed segments chunks: rows and slots, no bytes.

Rules
  1. A published segment moves from SEALED to INDEXED in the same batch, which so fails as a whole (`IllegalTransition`) if
     retention has ended one meanwhile; and (`StalePlan`) if a leaf is not the one that was planned on.
  2. It goes no further, and the mark of the WAL stays: snapshots go on pinning segments, which is what retention asks
     (docs/decisions/009-stream-chunks.md).
"""

from __future__ import annotations

from quire.core.ids import ArtifactKind
from quire.jobs.stream_checkpoint.chunks import row_of
from quire.jobs.stream_checkpoint.plan import StreamPlan
from quire.manifest import tables as t
from quire.manifest.ops.artifacts import PutChunk
from quire.manifest.ops.base import Op
from quire.manifest.ops.slots import SetSlots
from quire.manifest.ops.wal import MoveWalState
from quire.manifest.reads import ReadTxn
from quire.manifest.records import LeafRef, WalState
from quire.manifest.slots import Leaf, Link, pack_leaf, place


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
