"""Operations for sealed segments and checkpoints without an engine, for tests and benchmarks of the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.core.ids import ArtifactKind
from quire.manifest import tables as t
from quire.manifest.guard import ManifestGuard
from quire.manifest.ops.artifacts import PutChunk, PutDelta
from quire.manifest.ops.base import Op
from quire.manifest.ops.jobs import EnqueueJob
from quire.manifest.ops.slots import SetSlots
from quire.manifest.ops.wal import AdvanceCheckpoint, AppendWalChunk
from quire.manifest.reads import ReadTxn
from quire.manifest.records import ChunkRecord, DeltaRecord, JobKind, JobRecord, LeafRef, Residency, WalFormat
from quire.manifest.slots import Chain, Leaf, Link, pack_leaf, place
from quire.manifest.store import ManifestStore


@dataclass(frozen=True, slots=True, kw_only=True)
class WalChunkUpdate:
    """A sealed WAL artifact: the argument of `append_wal_chunk`."""

    segment_id: int
    first_lsn: int
    last_lsn: int
    used_bytes: int
    generation: int = 0
    frame_count: int = 0
    size_pages: int = 0
    format: WalFormat = WalFormat.PAGER
    residency: Residency = Residency.LOCAL
    crc64: int = 0
    upload: bool = False
    """Also enqueue an upload job for it in the same batch."""

    def op(self, db_id: int, shard: int) -> Op:
        """The operation that records it."""
        return AppendWalChunk(
            db_id,
            shard,
            self.segment_id,
            self.generation,
            self.first_lsn,
            self.last_lsn,
            self.used_bytes,
            self.frame_count,
            self.size_pages,
            self.format,
            self.residency,
            self.crc64,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FullChunk:
    """A checkpoint rewrote a slot: this base chunk replaces its chain."""

    slot: int
    record: ChunkRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaChunk:
    """A checkpoint overlays a slot: this delta is added to its chain."""

    slot: int
    delta_id: int
    record: DeltaRecord


ChunkMutation = FullChunk | DeltaChunk


def checkpoint_ops(
    txn: ReadTxn, db_id: int, generation: int, mutations: Sequence[ChunkMutation], covered_lsn: int
) -> list[Op]:
    """The batch of a checkpoint, planned on the state that `txn` shows."""
    ops: list[Op] = []
    leaves: dict[int, Leaf] = {}
    for mutation in mutations:
        leaf, offset = place(mutation.slot)
        chain: Chain
        if isinstance(mutation, FullChunk):
            ops.append(PutChunk(db_id, mutation.slot, generation, mutation.record))
            chain = (Link(ArtifactKind.BASE, db_id, generation, covered_lsn),)
        else:
            previous = txn.chain(db_id, mutation.slot)
            base = previous[0].origin_db_id if previous else db_id
            ops.append(PutDelta(db_id, mutation.slot, generation, mutation.delta_id, base, mutation.record))
            chain = (*previous, Link(ArtifactKind.DELTA, db_id, generation, covered_lsn, mutation.delta_id))
        leaves.setdefault(leaf, {})[offset] = chain
    for leaf, changes in leaves.items():
        live_leaf = txn.get(t.LIVE_LEAF, db_id, leaf) or LeafRef(0, 0)
        ops.append(SetSlots(db_id, leaf, generation, live_leaf.origin_db_id, live_leaf.generation, pack_leaf(changes)))
    ops.append(AdvanceCheckpoint(db_id, generation, covered_lsn))
    return ops


def append_wal_chunk(manifest: ManifestStore, db_id: int, update: WalChunkUpdate) -> ManifestGuard:
    """Record a sealed WAL artifact under its generation, raise the marks, and enqueue an upload if requested."""
    ops: list[Op] = [update.op(db_id, 0)]
    if update.upload:
        artifact = (db_id, ArtifactKind.WAL, update.segment_id, 0, 0)
        job = JobRecord(JobKind.UPLOAD, db_id, manifest.clock.now_ms(), artifact=artifact)
        ops.append(EnqueueJob(manifest.reserve_job_id(), job))
    return manifest.submit(ops)


def checkpoint_apply(
    manifest: ManifestStore, db_id: int, generation: int, mutations: Sequence[ChunkMutation], *, covered_lsn: int
) -> ManifestGuard:
    """Publish a checkpoint in one batch: catalog rows, slots, references, the mark of the WAL.

    `generation` comes from `reserve_generation`. The batch fails with `StalePlan` if the slots have changed in the meantime.
    """
    with manifest.read() as txn:
        ops = checkpoint_ops(txn, db_id, generation, mutations, covered_lsn)
        replaced = {link.origin_db_id for mutation in mutations for link in txn.chain(db_id, mutation.slot)}
        replaced |= {leaf.origin_db_id for _, leaf in txn.scan(t.LIVE_LEAF, db_id)}
    return manifest.submit([*ops, *manifest.jobs.deletions(replaced)])
