"""A walk over the catalogs, of one database or of all: how much data there is, where it is, and whether it was verified.

Terms
  survey   the figures of a database, or of all: of the artifacts it made, and of the WAL segments it tracks

Rules
  1. For all databases, each catalog is read once, and no figures of a single database are kept; the caller caches the sums for
     a moment (`response_cache.py`).
  2. An artifact counts for the database that made it, once, however many forks share it (M6).

Threads: the caller's; pure functions of a read transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from quire.core.errors import ManifestDamaged
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.names import object_key
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import Residency, VerifyState, WalState

DAMAGED_MAX = 100
"""Damaged artifacts that are listed; all of them are counted."""

UNABSORBED = (WalState.OPEN, WalState.SEALED, WalState.INDEXED, WalState.CHECKPOINT_READY)
_DAMAGED = (VerifyState.MISSING, VerifyState.ALTERED)


@dataclass(slots=True)
class Survey:
    """Figures of one database, or of all. Counters are by the lower-case names of their states."""

    chunks: int = 0
    chunk_bytes: int = 0
    deltas: int = 0
    delta_bytes: int = 0
    segments: Counter[str] = field(default_factory=Counter)
    wal_bytes: int = 0
    """Bytes of segments that the database made and that are not truncated."""
    unabsorbed_bytes: int = 0
    """Bytes of segments that no checkpoint has absorbed."""
    unabsorbed_pages: int = 0
    """Page versions in those segments."""
    tiers: Counter[str] = field(default_factory=Counter)
    tier_bytes: Counter[str] = field(default_factory=Counter)
    verified: Counter[str] = field(default_factory=Counter)
    oldest_verified_ms: int = 0
    """The oldest time of a last verification, over all artifacts; 0 if none was verified."""

    @property
    def size_bytes(self) -> int:
        return self.chunk_bytes + self.delta_bytes + self.wal_bytes

    def add_artifact(self, row: Any, size_bytes: int) -> None:
        """Count an artifact by its residency and verification state."""
        tier = state_name(row.residency)
        self.tiers[tier] += 1
        self.tier_bytes[tier] += size_bytes
        self.verified[state_name(row.verify_state)] += 1
        if row.verified_at_ms and not 0 < self.oldest_verified_ms <= row.verified_at_ms:
            self.oldest_verified_ms = row.verified_at_ms


@dataclass(frozen=True, slots=True)
class Damaged:
    """An artifact that a verification found missing or altered."""

    db_id: int
    object: str
    state: str
    size_bytes: int
    verified_at_ms: int


@dataclass(frozen=True, slots=True)
class StoreSurvey:
    """The survey of all databases, and the damaged artifacts."""

    sums: Survey
    damaged: list[Damaged]
    damaged_count: int


def survey_of(txn: ReadTxn, db_id: int) -> Survey:
    """Return the figures of one database; if it is closed because of damaged rows, as far as they can be read."""
    total = Survey()
    try:
        for _, row, size_bytes in _artifacts(txn, total, db_id):
            total.add_artifact(row, size_bytes)
    except ManifestDamaged:
        if db_id not in txn.refused_databases():
            raise
    return total


def survey(txn: ReadTxn) -> StoreSurvey:
    """Return the figures of all databases together."""
    sums, count = Survey(), 0
    damaged: list[Damaged] = []
    for key, row, size_bytes in _artifacts(txn, sums):
        sums.add_artifact(row, size_bytes)
        if row.verify_state in _DAMAGED:
            count += 1
            if len(damaged) < DAMAGED_MAX:
                state = state_name(row.verify_state)
                damaged.append(Damaged(key.origin_db_id, object_key(key), state, size_bytes, row.verified_at_ms))
    return StoreSurvey(sums, damaged, count)


def _artifacts(txn: ReadTxn, total: Survey, *database: int) -> Iterator[tuple[ArtifactKey, Any, int]]:
    for (origin, slot, generation), chunk in txn.scan(t.CHUNK_CATALOG, *database):
        total.chunks += 1
        total.chunk_bytes += chunk.size_bytes
        yield ArtifactKey(origin, ArtifactKind.BASE, slot, generation), chunk, chunk.size_bytes
    for (origin, slot, generation, delta_id), delta in txn.scan(t.CHUNK_DELTA_INDEX, *database):
        total.deltas += 1
        total.delta_bytes += delta.size_bytes
        yield ArtifactKey(origin, ArtifactKind.DELTA, slot, generation, delta_id), delta, delta.size_bytes
    for (db_id, segment_id), row in txn.scan(t.WAL_CATALOG, *database):
        total.segments[state_name(row.state)] += 1
        if row.state in UNABSORBED:
            total.unabsorbed_bytes += row.used_bytes
            total.unabsorbed_pages += row.frame_count
        if row.origin_db_id == db_id and row.state is not WalState.TRUNCATED:
            total.wal_bytes += row.used_bytes
            if row.state is not WalState.OPEN:  # a segment that is still written is neither moved nor verified
                yield ArtifactKey(db_id, ArtifactKind.WAL, segment_id, 0), row, row.used_bytes


def state_name(state: Residency | VerifyState | WalState) -> str:
    """Return the name of a state as it appears in JSON."""
    return state.name.lower()
