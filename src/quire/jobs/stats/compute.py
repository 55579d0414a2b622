"""Where the bytes are: what each database and snapshot holds alone and shares, how well it compresses, in which tier it lies.

Terms
  holds       the artifacts that a database, as it is now, or a snapshot is made of: chunks of its leaves, segments of its WAL
  exclusive   of a database: what neither another database nor a snapshot of another holds; what dropping it with its snapshots
              would free. Of a snapshot: what nothing else holds, its own database included: what dropping it alone would free
  churn       bytes of artifacts that were made within the last day

Pure reading of one transaction; one pass over catalogs and leaves, 8 bytes a holder in memory.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec

from quire.core.ids import ArtifactKey, ArtifactKind
from quire.jobs.verify.whole import artifacts
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbStatus, WalState
from quire.manifest.slots import artifacts as artifacts_of_leaf
from quire.manifest.slots import unpack_leaf

DAY_MS = 86_400_000


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What one database, or one snapshot, takes."""

    db_id: int
    database: str
    snapshot: str = ""
    """Empty: the database as it is now, with its snapshots."""
    artifacts: int = 0
    size_bytes: int = 0
    exclusive_bytes: int = 0
    shared_bytes: int = 0
    plain_bytes: int = 0
    """Of its chunks, before compression."""
    chunk_bytes: int = 0
    wal_bytes: int = 0
    churn_bytes: int = 0
    tiers: dict[str, int] = {}
    """Residency → bytes."""

    @property
    def compression(self) -> float:
        """How many bytes of pages one byte of chunks holds; 0 if there are no chunks."""
        return self.plain_bytes / self.chunk_bytes if self.chunk_bytes else 0.0


Holder = tuple[int, int]
"""(database, snapshot); snapshot 0 is the database as it is now."""


def usage(txn: ReadTxn, now_ms: int) -> list[Usage]:
    """Every live database, each followed by its snapshots."""
    holders = _holders(txn)
    by_holder: dict[Holder, list[ArtifactKey]] = defaultdict(list)
    for key, held_by in holders.items():
        for holder in held_by:
            by_holder[holder].append(key)
    rows = {key: row for key, row in artifacts(txn) if key in holders}
    found = []
    for db_id, record in txn.databases():
        if record.status is DbStatus.TOMBSTONED:
            continue
        snapshots = [(key[1], row) for key, row in txn.scan(t.SNAPSHOT_INDEX, db_id)]
        mine = {(db_id, 0), *((db_id, number) for number, _ in snapshots)}
        keys = sorted({key for holder in mine for key in by_holder.get(holder, ())})
        shape: dict[str, Any] = {"db_id": db_id, "database": record.name, "page_size": record.page_size}
        found.append(_usage(keys, rows, holders, mine, now_ms, **shape))
        for number, row in snapshots:
            own = {(db_id, number)}
            held = sorted(by_holder.get((db_id, number), []))
            found.append(_usage(held, rows, holders, own, now_ms, snapshot=row.name or f"#{number}", **shape))
    return found


def _usage(
    keys: list[ArtifactKey],
    rows: dict[ArtifactKey, Any],
    holders: dict[ArtifactKey, set[Holder]],
    mine: set[Holder],
    now_ms: int,
    *,
    page_size: int,
    **who: Any,
) -> Usage:
    sums: Counter[str] = Counter()
    tiers: Counter[str] = Counter()
    for key in keys:
        row = rows.get(key)
        if row is None:
            continue
        size = row.used_bytes if key.kind is ArtifactKind.WAL else row.size_bytes
        sums["artifacts"] += 1
        sums["size_bytes"] += size
        sums["exclusive_bytes" if holders[key] <= mine else "shared_bytes"] += size
        sums["wal_bytes" if key.kind is ArtifactKind.WAL else "chunk_bytes"] += size
        if key.kind is not ArtifactKind.WAL:
            sums["plain_bytes"] += row.page_count * page_size
        if row.created_at_ms > now_ms - DAY_MS:
            sums["churn_bytes"] += size
        tiers[row.residency.name.lower()] += size
    figures: dict[str, Any] = {**who, **sums}
    return Usage(tiers=dict(tiers), **figures)


def _holders(txn: ReadTxn) -> dict[ArtifactKey, set[Holder]]:
    """Artifact → who holds it."""
    of_leaf: dict[tuple[int, int, int], set[Holder]] = defaultdict(set)
    found: dict[ArtifactKey, set[Holder]] = defaultdict(set)
    for (db_id, leaf), row in txn.scan(t.LIVE_LEAF):
        of_leaf[row.origin_db_id, leaf, row.generation].add((db_id, 0))
    for (db_id, snapshot_id), snapshot in txn.scan(t.SNAPSHOT_INDEX):
        for leaf, origin, generation in snapshot.leaves:
            of_leaf[origin, leaf, generation].add((db_id, snapshot_id))
        for pin in snapshot.pins:
            found[ArtifactKey(pin.origin_db_id, ArtifactKind.WAL, pin.segment_id, 0)].add((db_id, snapshot_id))
    for (origin, leaf, generation), held_by in of_leaf.items():
        for key in _of_leaf(txn, origin, leaf, generation):
            found[key] |= held_by
    for (db_id, segment_id), segment in txn.scan(t.WAL_CATALOG):
        if segment.state < WalState.CHECKPOINTED:
            found[ArtifactKey(segment.origin_db_id, ArtifactKind.WAL, segment_id, 0)].add((db_id, 0))
    return found


def _of_leaf(txn: ReadTxn, origin: int, leaf: int, generation: int) -> Iterator[ArtifactKey]:
    row = txn.get(t.SLOT_LEAF, origin, leaf, generation)
    if row is not None:
        yield from artifacts_of_leaf(unpack_leaf(row.entries), leaf)
