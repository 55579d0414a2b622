"""Computes which artifacts only a snapshot or a live database holds, and which are therefore deleted with it.

Pure functions of a read transaction.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator

import msgspec

from quire.core.ids import ArtifactKey, ArtifactKind
from quire.manifest import tables as t
from quire.manifest.kv_tables import Identity, own_tables, table_bytes
from quire.manifest.ops.refs import artifact_bytes
from quire.manifest.reads import ReadTxn
from quire.manifest.records import WalState
from quire.manifest.slots import artifacts, unpack_leaf
from quire.manifest.verification import shares_bytes


class ExclusiveShare(msgspec.Struct, frozen=True, kw_only=True):
    """Artifacts without any other holder: they are deleted when their holder is dropped."""

    chunks: int = 0
    deltas: int = 0
    wal_segments: int = 0
    size_bytes: int = 0
    tables: int = 0
    """Live tables of a key-value set."""

    @property
    def artifacts(self) -> int:
        return self.chunks + self.deltas + self.wal_segments + self.tables


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


def live_share(txn: ReadTxn, db_id: int, holders: Tally[Identity]) -> ExclusiveShare:
    """Return what only the live state of a database holds, without its snapshots. `holders` is `table_holders` of the store.

    The snapshots of a key-value set have no rows for their tables, so its live tables count whether or not one keeps them.
    """
    live = (leaf_key(row.origin_db_id, key[1], row.generation) for key, row in txn.scan(t.LIVE_LEAF, db_id))
    wal = (
        segment_key(row.origin_db_id, key[1])
        for key, row in txn.scan(t.WAL_CATALOG, db_id)
        if row.state is not WalState.TRUNCATED
    )
    share, own = _share(txn, Tally(live), Tally(wal)), own_tables(txn, db_id, holders)
    return msgspec.structs.replace(share, size_bytes=share.size_bytes + sum(own), tables=len(own)) if own else share


def own_bytes(txn: ReadTxn, db_id: int) -> int:
    """Return the bytes of all artifacts that a database has created, whatever holds them now."""
    size = sum(row.size_bytes for _, row in txn.scan(t.CHUNK_CATALOG, db_id))
    size += sum(row.size_bytes for _, row in txn.scan(t.CHUNK_DELTA_INDEX, db_id))
    size += sum(row.used_bytes for _, row in txn.scan(t.WAL_CATALOG, db_id) if row.origin_db_id == db_id)
    return size + table_bytes(txn, db_id)


def held_bytes(txn: ReadTxn, db_id: int) -> int:
    """Return the bytes of everything that a database and its snapshots consist of, shared or not: `size` of `quire stats`."""
    leaves = {leaf_key(row.origin_db_id, key[1], row.generation) for key, row in txn.scan(t.LIVE_LEAF, db_id)}
    segments = {
        segment_key(row.origin_db_id, key[1])
        for key, row in txn.scan(t.WAL_CATALOG, db_id)
        if row.state < WalState.CHECKPOINTED
    }
    for _, snapshot in txn.scan(t.SNAPSHOT_INDEX, db_id):
        leaves.update(leaf_key(origin, leaf, generation) for leaf, origin, generation in snapshot.leaves)
        segments.update(segment_key(pin.origin_db_id, pin.segment_id) for pin in snapshot.pins)
    rows = ((key, txn.artifact(key)) for key in {*chunks_of(txn, leaves), *segments})
    held = sum(artifact_bytes(row) for key, row in rows if row is not None and not shares_bytes(key, row))
    return held + table_bytes(txn, db_id)


def chunks_of(txn: ReadTxn, leaves: Iterable[ArtifactKey]) -> Iterator[ArtifactKey]:
    """Yield the chunks and deltas that leaves name."""
    for leaf in leaves:
        row = txn.get(t.SLOT_LEAF, leaf.origin_db_id, leaf.id, leaf.generation)
        if row is not None:
            yield from artifacts(unpack_leaf(row.entries), leaf.id)


def exclusive(txn: ReadTxn, leaves: Tally[ArtifactKey], segments: Tally[ArtifactKey]) -> list[ArtifactKey]:
    """Return the artifacts that are deleted with these references. A leaf at zero releases all artifacts of its chains (M7)."""
    return [*_gone(txn, Tally(chunks_of(txn, _gone(txn, leaves)))), *_gone(txn, segments)]


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
