"""Removes old positions of libSQL's replicas, so that a database has few of them (`service/replicas/positions.py`).

A position is kept for `KEPT_MS` after a replica last used it, and a database keeps at most `POSITIONS_MAX`: the newest. The
numbers of removed positions are never assigned again (`DropReplicaPositions`).

Threads: any. Blocks for commits of the manifest.
"""

from __future__ import annotations

from quire.manifest import tables as t
from quire.manifest.ops.local import DropReplicaPositions
from quire.manifest.store import ManifestStore

KEPT_MS = 8 * 24 * 3600 * 1000
POSITIONS_MAX = 1 << 18
DROPPED_AT_ONCE = 4_096


def prune_positions(manifest: ManifestStore) -> None:
    """Remove positions of all databases that are too old, or too many."""
    with manifest.read() as txn:
        db_ids = list(txn.owners(t.REPLICA_POSITIONS))
    for db_id in db_ids:
        old = _old_positions(manifest, db_id)
        for start in range(0, len(old), DROPPED_AT_ONCE):
            manifest.submit([DropReplicaPositions(db_id, old[start : start + DROPPED_AT_ONCE])]).result()


def _old_positions(manifest: ManifestStore, db_id: int) -> list[tuple[int, int]]:
    oldest_ms = manifest.clock.now_ms() - KEPT_MS
    with manifest.read() as txn:
        rows = sorted(
            (row.at_ms, generation, frame)
            for (_, generation, frame), row in txn.scan(t.REPLICA_POSITIONS, db_id)
            if not (frame == 0 and row.used_below)  # this row only says which numbers were assigned
        )
    many = len(rows) - POSITIONS_MAX
    return [
        (generation, frame)
        for number, (at_ms, generation, frame) in enumerate(rows)
        if number < many or at_ms < oldest_ms
    ]
