"""Computes which artifacts only a snapshot or a live database holds, and which are therefore deleted with it.

Pure functions of a read transaction.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable

import msgspec

from quire.core.ids import ArtifactKey, ArtifactKind
from quire.manifest import tables as t
from quire.manifest.ops.refs import artifact_bytes
from quire.manifest.reads import ReadTxn
from quire.manifest.records import WalState
from quire.manifest.slots import artifacts, unpack_leaf


class ExclusiveShare(msgspec.Struct, frozen=True, kw_only=True):
    """Artifacts without any other holder: they are deleted when their holder is dropped."""

    chunks: int = 0
    deltas: int = 0
    wal_segments: int = 0
    size_bytes: int = 0

    @property
    def artifacts(self) -> int:
        return self.chunks + self.deltas + self.wal_segments


def snapshots_share(txn: ReadTxn, db_id: int, snapshot_ids: Iterable[int]) -> ExclusiveShare:
    """Return what only these snapshots of a database, taken together, hold."""
    leaves: Tally[ArtifactKey] = Tally()
    segments: Tally[ArtifactKey] = Tally()
    for snapshot_id in snapshot_ids:
        record = txn.snapshot(db_id, snapshot_id)
        if record is not None:
            leaves.update(leaf_key(origin, leaf, generation) for leaf, origin, generation in record.leaves)
            segments.update(segment_key(pin.origin_db_id, pin.segment_id) for pin in record.pins)
    return _share(txn, leaves, segments)


def live_share(txn: ReadTxn, db_id: int) -> ExclusiveShare:
    """Return what only the live state of a database holds, without its snapshots."""
    live = (leaf_key(row.origin_db_id, key[1], row.generation) for key, row in txn.scan(t.LIVE_LEAF, db_id))
    wal = (
        segment_key(row.origin_db_id, key[1])
        for key, row in txn.scan(t.WAL_CATALOG, db_id)
        if row.state is not WalState.TRUNCATED
    )
    return _share(txn, Tally(live), Tally(wal))


def own_bytes(txn: ReadTxn, db_id: int) -> int:
    """Return the bytes of all artifacts that a database has created, whatever holds them now."""
    size = sum(row.size_bytes for _, row in txn.scan(t.CHUNK_CATALOG, db_id))
    size += sum(row.size_bytes for _, row in txn.scan(t.CHUNK_DELTA_INDEX, db_id))
    size += sum(row.used_bytes for _, row in txn.scan(t.WAL_CATALOG, db_id) if row.origin_db_id == db_id)
    return size + sum(row.size_bytes for _, row in txn.scan(t.LSM_CATALOG, db_id))


def exclusive(txn: ReadTxn, leaves: Tally[ArtifactKey], segments: Tally[ArtifactKey]) -> list[ArtifactKey]:
    """Return the artifacts that are deleted with these references. A leaf at zero releases all artifacts of its chains (M7)."""
    named: Tally[ArtifactKey] = Tally()
    for leaf in _gone(txn, leaves):
        row = txn.get(t.SLOT_LEAF, leaf.origin_db_id, leaf.id, leaf.generation)
        if row is not None:
            named.update(artifacts(unpack_leaf(row.entries), leaf.id))
    return [*_gone(txn, named), *_gone(txn, segments)]


def _share(txn: ReadTxn, leaves: Tally[ArtifactKey], segments: Tally[ArtifactKey]) -> ExclusiveShare:
    gone = exclusive(txn, leaves, segments)
    kinds = Tally(key.kind for key in gone)
    return ExclusiveShare(
        chunks=kinds[ArtifactKind.BASE],
        deltas=kinds[ArtifactKind.DELTA],
        wal_segments=kinds[ArtifactKind.WAL],
        size_bytes=sum(artifact_bytes(txn.artifact(key)) for key in gone),
    )


def _gone(txn: ReadTxn, references: Tally[ArtifactKey]) -> list[ArtifactKey]:
    counts = ((key, count, txn.refcount(key)) for key, count in references.items())
    return [key for key, count, row in counts if row is not None and row.in_use <= count]


def leaf_key(origin_db_id: int, number: int, generation: int) -> ArtifactKey:
    """Return the key under which references to a leaf are counted."""
    return ArtifactKey(origin_db_id, ArtifactKind.LEAF, number, generation)


def segment_key(origin_db_id: int, segment_id: int) -> ArtifactKey:
    """Return the key under which references to a WAL segment are counted."""
    return ArtifactKey(origin_db_id, ArtifactKind.WAL, segment_id, 0)
