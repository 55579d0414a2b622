"""Where the bytes are: what each database and snapshot holds alone and shares, how well it compresses, in which tier it lies.

Terms
  holds       the artifacts that a database, as it is now, or a snapshot is made of: chunks of its leaves, segments of its WAL
  exclusive   of a database: what neither another database nor a snapshot of another holds; what dropping it with its snapshots
              would free. Of a snapshot: what nothing else holds, its own database included: what dropping it alone would free
  churn       bytes of artifacts that were made within the last day

Rows are read in one transaction, as numbers; adding them up (`run.py`) is done by a runner, or here where there is none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.core.ids import ArtifactKey, ArtifactKind
from quire.jobs.runner import Key
from quire.jobs.stats.run import TIER, Holder, Rows, Shares, join_shares, split_rows
from quire.jobs.verify.whole import artifacts
from quire.manifest import tables as t
from quire.manifest.holders import encode
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbStatus, WalState
from quire.manifest.slots import artifacts as artifacts_of_leaf
from quire.manifest.slots import unpack_leaf

DAY_MS = 86_400_000
STEP_ROWS = 8_192

SUMS = ("artifacts", "size_bytes", "exclusive_bytes", "shared_bytes", "chunk_bytes", "wal_bytes", "churn_bytes")
"""Sums that a `Usage` has under the same name."""


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


def usage(txn: ReadTxn, now_ms: int) -> list[Usage]:
    """Every live database, each followed by its snapshots; added up in this process."""
    nothing: Any = None  # what adds up needs no tools
    parts: dict[Key, list[tuple[str, NDArray[np.uint64]]]] = defaultdict(list)
    for block in blocks(txn, now_ms):
        for key, part in split_rows(block, nothing):
            parts[key].append(part)
    return described(txn, total(join_shares(key, None, found, nothing) for key, found in parts.items()))


def total(shares: Iterable[Shares]) -> dict[Holder, Counter[str]]:
    """The sums of all pieces, by holder."""
    found: dict[Holder, Counter[str]] = defaultdict(Counter)
    for each in shares:
        for holder, sums in each.items():
            found[holder].update(sums)
    return found


def described(txn: ReadTxn, sums: Mapping[Holder, Mapping[str, int]]) -> list[Usage]:
    """The sums, with the names of who holds them."""
    found = []
    for db_id, record in txn.databases():
        if record.status is DbStatus.TOMBSTONED:
            continue
        who = {"db_id": db_id, "database": record.name}
        found.append(_usage(sums.get((db_id, -1), {}), record.page_size, **who))
        for (_, number), row in txn.scan(t.SNAPSHOT_INDEX, db_id):
            name = row.name or f"#{number}"
            found.append(_usage(sums.get((db_id, number), {}), record.page_size, snapshot=name, **who))
    return found


def _usage(sums: Mapping[str, int], page_size: int, **who: Any) -> Usage:
    tiers = {name.removeprefix(TIER): size for name, size in sums.items() if name.startswith(TIER) and size}
    named: dict[str, Any] = {name: sums.get(name, 0) for name in SUMS}
    return Usage(tiers=tiers, plain_bytes=sums.get("plain_pages", 0) * page_size, **named, **who)


# ── rows as numbers ───────────────────────────────────────────────────────────────────────────────────────────────────
def blocks(txn: ReadTxn, now_ms: int) -> Iterator[Rows]:
    """Every fact and every holding, a few thousand at a time."""
    for sort, rows in (("fact", _facts(txn, now_ms - DAY_MS)), ("holding", _holdings(txn))):
        while step := list(islice(rows, STEP_ROWS)):
            yield Rows(sort, np.array(step, np.uint64))


def _code(key: ArtifactKey) -> tuple[int, int]:
    first, second = encode(key.origin_db_id, key.kind, key.delta_id, key.id, key.generation)[0].tolist()
    return first, second


def _facts(txn: ReadTxn, young_ms: int) -> Iterator[tuple[int, ...]]:
    for key, row in artifacts(txn):
        is_wal = key.kind is ArtifactKind.WAL
        size, pages = (row.used_bytes, 0) if is_wal else (row.size_bytes, row.page_count)
        yield *_code(key), size, pages, row.created_at_ms > young_ms, row.residency, is_wal


def _holdings(txn: ReadTxn) -> Iterator[tuple[int, int, int, int]]:
    """(code, code, database, snapshot)."""
    of_leaf: dict[tuple[int, int, int], set[Holder]] = defaultdict(set)
    for (db_id, leaf), row in txn.scan(t.LIVE_LEAF):
        of_leaf[row.origin_db_id, leaf, row.generation].add((db_id, 0))
    for (db_id, snapshot_id), snapshot in txn.scan(t.SNAPSHOT_INDEX):
        for leaf, origin, generation in snapshot.leaves:
            of_leaf[origin, leaf, generation].add((db_id, snapshot_id))
        for pin in snapshot.pins:
            key = ArtifactKey(pin.origin_db_id, ArtifactKind.WAL, pin.segment_id, 0)
            yield *_code(key), db_id, snapshot_id
    for (origin, leaf, generation), held_by in of_leaf.items():
        for key in _of_leaf(txn, origin, leaf, generation):
            for holder in held_by:
                yield *_code(key), *holder
    for (db_id, segment_id), segment in txn.scan(t.WAL_CATALOG):
        if segment.state < WalState.CHECKPOINTED:
            yield *_code(ArtifactKey(segment.origin_db_id, ArtifactKind.WAL, segment_id, 0)), db_id, 0


def _of_leaf(txn: ReadTxn, origin: int, leaf: int, generation: int) -> Iterator[ArtifactKey]:
    row = txn.get(t.SLOT_LEAF, origin, leaf, generation)
    if row is not None:
        yield from artifacts_of_leaf(unpack_leaf(row.entries), leaf)
