"""Computes the space used by some databases without reading the others: the figures of `quire stats` for one page of a list.

Reference counts determine what a database holds exclusively: an artifact that has no more references than those of the
database and its snapshots. `jobs/stats` computes the same from all holders, and is faster when all databases are wanted.
The two differ for a segment that another database has checkpointed and not yet released: here it counts as shared until then.

Pure functions of a read transaction.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from typing import Any

from quire.core.ids import ArtifactKey, ArtifactKind
from quire.jobs.stats.job import DAY_MS, Usage, with_tables
from quire.manifest import tables as t
from quire.manifest.kv_tables import Identity
from quire.manifest.ops.refs import artifact_bytes
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbRecord, SnapshotRecord, WalState
from quire.manifest.verification import shares_bytes
from quire.store.exclusive_artifacts import chunks_of, exclusive, leaf_key, segment_key

Keys = Tally[ArtifactKey]


def usage_of(txn: ReadTxn, db_id: int, record: DbRecord, now_ms: int, holders: Tally[Identity]) -> Iterator[Usage]:
    """Yield the usage of a database together with its snapshots, then of each snapshot. `holders` is `table_holders`."""
    kept = [(key[1], row) for key, row in txn.scan(t.SNAPSHOT_INDEX, db_id)]
    leaves = Tally(leaf_key(row.origin_db_id, key[1], row.generation) for key, row in txn.scan(t.LIVE_LEAF, db_id))
    segments, needed, absorbed = Keys(), Keys(), Keys()
    for (_, segment_id), row in txn.scan(t.WAL_CATALOG, db_id):
        segment = segment_key(row.origin_db_id, segment_id)
        segments[segment] += row.state is not WalState.TRUNCATED
        needed[segment] += row.state < WalState.CHECKPOINTED
        absorbed[segment] += WalState.CHECKPOINTED <= row.state < WalState.TRUNCATED
    for _, snapshot in kept:
        held_leaves, pins = _held(snapshot)
        leaves, segments, needed = leaves + held_leaves, segments + pins, needed + pins
    young_ms = now_ms - DAY_MS
    common: dict[str, Any] = {"db_id": db_id, "database": record.name}
    yield with_tables(txn, _usage(txn, record, young_ms, leaves, segments, +needed, **common), holders)
    for number, snapshot in kept:
        held_leaves, pins = _held(snapshot)
        name = snapshot.name or f"#{number}"
        # The database's reference to a segment that only waits for truncation does not make the segment shared.
        own = Tally({pin: count + absorbed[pin] for pin, count in pins.items()})
        yield _usage(txn, record, young_ms, held_leaves, own, pins, snapshot=name, **common)


def _held(snapshot: SnapshotRecord) -> tuple[Keys, Keys]:
    leaves = Tally(leaf_key(origin, leaf, generation) for leaf, origin, generation in snapshot.leaves)
    return leaves, Tally(segment_key(pin.origin_db_id, pin.segment_id) for pin in snapshot.pins)


def _usage(
    txn: ReadTxn,
    record: DbRecord,
    young_ms: int,
    leaves: Keys,
    segments: Keys,
    shown: Iterable[ArtifactKey],
    **who: Any,
) -> Usage:
    """Sum up the chunks in `leaves` and the segments `shown`. `leaves` and `segments` are the holder's references."""
    alone = set(exclusive(txn, leaves, segments))
    sums, tiers = Tally[str](), Tally[str]()
    for key in {*chunks_of(txn, leaves), *shown}:
        row = txn.artifact(key)
        if row is None or shares_bytes(key, row):
            continue
        size, is_wal = artifact_bytes(row), key.kind is ArtifactKind.WAL
        sums["artifacts"] += 1
        sums["size_bytes"] += size
        sums["exclusive_bytes" if key in alone else "shared_bytes"] += size
        sums["wal_bytes" if is_wal else "chunk_bytes"] += size
        sums["plain_bytes"] += 0 if is_wal else row.page_count * record.page_size
        sums["churn_bytes"] += size if row.created_at_ms > young_ms else 0
        tiers[row.residency.name.lower()] += size
    figures: dict[str, Any] = dict(sums)
    return Usage(tiers={name: tiers[name] for name in tiers if tiers[name]}, **figures, **who)
