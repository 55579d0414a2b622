"""Which artifacts a verification looks at, and in which order.

Terms
  of a database   what it made, and what it or one of its snapshots needs, whoever made that: a fork is verified with what it
                  shares

Rules
  1. Oldest verification first; those never verified before all others.
  2. A verification is over when everything that was there when it was asked for has been looked at since: so it may be
     interrupted anywhere and goes on where it was, and what it has seen is in the rows alone.
  3. Left alone are artifacts that are to be deleted (their bytes may be gone) and segments that are still written.
     Chunks of streams have no bytes of their own; their segments have another form on each tier (`jobs/stream_verify`).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire.core.errors import UnknownDatabase
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.names import object_key
from quire.jobs.context import JobContext, artifact_row
from quire.jobs.locations import Place
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import VerifyState, WalRecord, WalState
from quire.manifest.slots import artifacts, unpack_leaf
from quire.manifest.verification import borrows

PLANNED_MAX = 65_536
"""Artifacts planned for one attempt: 4 TiB of full chunks. More are found by the next one."""

LISTED_MAX = 100
"""Damaged artifacts that a job's result names; the rows tell of all."""


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """What is left to be looked at."""

    keys: tuple[ArtifactKey, ...]
    """The next ones, in order."""
    seen: int
    """How many have been looked at since it was asked for."""
    left: int
    """How many have not; `keys` are all of them, or the first."""


def plan_verification(txn: ReadTxn, db_id: int, asked_at_ms: int) -> VerifyPlan:
    """What a database's verification, asked for at this moment, has still to look at."""
    seen, left = 0, []
    for key, row in _of_database(txn, db_id):
        if row.verified_at_ms >= asked_at_ms:
            seen += 1
        elif is_meant(txn, key, row, asked_at_ms):
            left.append((row.verified_at_ms, key))
    return VerifyPlan(tuple(key for _, key in heapq.nsmallest(PLANNED_MAX, left)), seen, len(left))


def place_to_verify(ctx: JobContext, txn: ReadTxn, key: ArtifactKey) -> Place | None:
    """Where the bytes of an artifact should be now; `None` if it is (about to be) gone."""
    row = artifact_row(txn, key)
    if row is None or borrows(key, row) or _is_doomed(txn, key):
        return None
    return ctx.place_of(txn, key, row)


def summary(txn: ReadTxn, db_id: int, asked_at_ms: int) -> dict[str, Any]:
    """What a verification that is over has found: counts, and the names of damaged artifacts."""
    counts: Counter[VerifyState] = Counter()
    damaged: list[str] = []
    for key, row in _of_database(txn, db_id):
        if row.verified_at_ms >= asked_at_ms and not _is_doomed(txn, key):
            counts[row.verify_state] += 1
            if row.verify_state in (VerifyState.MISSING, VerifyState.ALTERED) and len(damaged) < LISTED_MAX:
                damaged.append(f"{object_key(key)} {row.verify_state.name}")
    states = (VerifyState.VERIFIED, VerifyState.MISSING, VerifyState.ALTERED)
    return {**{state.name.lower(): counts[state] for state in states}, "damaged": damaged}


def _of_database(txn: ReadTxn, db_id: int) -> Iterator[tuple[ArtifactKey, Any]]:
    """(key, row) of every artifact of a database that has a row."""
    if txn.database(db_id) is None:
        raise UnknownDatabase("no database has this id", hint="`quire ls` lists the databases", db_id=db_id)
    for (origin, slot, generation), chunk in txn.scan(t.CHUNK_CATALOG, db_id):
        yield ArtifactKey(origin, ArtifactKind.BASE, slot, generation), chunk
    for (origin, slot, generation, number), delta in txn.scan(t.CHUNK_DELTA_INDEX, db_id):
        yield ArtifactKey(origin, ArtifactKind.DELTA, slot, generation, number), delta
    foreign: set[ArtifactKey] = set()
    for (_, segment_id), segment in txn.scan(t.WAL_CATALOG, db_id):
        if segment.origin_db_id == db_id:
            yield ArtifactKey(db_id, ArtifactKind.WAL, segment_id, 0), segment
        else:
            foreign.add(ArtifactKey(segment.origin_db_id, ArtifactKind.WAL, segment_id, 0))
    foreign.update(key for key in _needed(txn, db_id) if key.origin_db_id != db_id)
    for key in sorted(foreign):
        if (row := artifact_row(txn, key)) is not None:
            yield key, row


def _needed(txn: ReadTxn, db_id: int) -> Iterator[ArtifactKey]:
    """The artifacts that a database, as it is and in its snapshots, is made of."""
    leaves = {(row.origin_db_id, leaf, row.generation) for (_, leaf), row in txn.scan(t.LIVE_LEAF, db_id)}
    for _, snapshot in txn.scan(t.SNAPSHOT_INDEX, db_id):
        leaves.update((origin, leaf, generation) for leaf, origin, generation in snapshot.leaves)
        for pin in snapshot.pins:
            yield ArtifactKey(pin.origin_db_id, ArtifactKind.WAL, pin.segment_id, 0)
    for origin, number, generation in sorted(leaves):
        row = txn.get(t.SLOT_LEAF, origin, number, generation)
        if row is not None:
            yield from artifacts(unpack_leaf(row.entries), number)


def bitmap_of(txn: ReadTxn, key: ArtifactKey) -> int:
    """The hash of a chunk's page bitmap, by its row; 0 if it is no chunk, or none was recorded."""
    return int(getattr(artifact_row(txn, key), "bitmap_hash", 0))


def is_meant(txn: ReadTxn, key: ArtifactKey, row: Any, asked_at_ms: int) -> bool:
    """Whether an artifact was there when it was asked for, has bytes of its own, and is neither doomed nor being written."""
    if isinstance(row, WalRecord):
        return row.state is not WalState.OPEN and row.sealed_at_ms <= asked_at_ms and not _is_doomed(txn, key)
    return bool(row.created_at_ms <= asked_at_ms) and not borrows(key, row) and not _is_doomed(txn, key)


def _is_doomed(txn: ReadTxn, key: ArtifactKey) -> bool:
    counts = txn.refcount(key)
    return counts is not None and not (counts.in_use or counts.pending_upload)
