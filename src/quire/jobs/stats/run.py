"""The adding half of the stats: artifacts and their holders are brought together, and each holder's share is added up.

Terms
  fact      what a row says of an artifact: (code, code, bytes, pages, is it of the last day, residency, is it WAL)
  holding   that somebody holds an artifact: (code, code, database, snapshot); snapshot 0 is the database as it is now
  share     what a holder has of the artifacts of one key: sums by name

Rules
  1. A snapshot has alone what nobody else holds; a database, with its snapshots, what no other database holds.
  2. What comes back is a few sums for each holder.

Safe to run on an executor.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.jobs.runner import Key, Tools
from quire.manifest.records import Residency

PIECE_BITS = 14
"""Ids of one database that are added up together: 2^14."""

TIER = "tier:"
"""Before the name of a residency: what lies there."""

Holder = tuple[int, int]
"""(database, snapshot); the whole of a database, with its snapshots, is (database, -1)."""

Shares = dict[Holder, dict[str, int]]


@dataclass(frozen=True, slots=True)
class Rows:
    """Facts, or holdings."""

    sort: str
    rows: NDArray[np.uint64]
    db_id: int = 0


def split_rows(given: Rows, _tools: Tools) -> Iterator[tuple[Key, tuple[str, NDArray[np.uint64]]]]:
    """By the artifact's origin, and a piece of its ids."""
    rows = given.rows
    keys = np.stack([rows[:, 0] >> np.uint64(24), rows[:, 1] >> np.uint64(32 + PIECE_BITS)], axis=1)
    found, places = np.unique(keys, axis=0, return_inverse=True)
    for number, (owner, piece) in enumerate(found.tolist()):
        yield (owner, piece), (given.sort, rows[places.reshape(-1) == number])


def join_shares(_key: Key, _task: None, parts: list[tuple[str, NDArray[np.uint64]]], _tools: Tools) -> Shares:
    """What each holder has of these artifacts."""
    facts: dict[tuple[int, int], list[int]] = {}
    holders: dict[tuple[int, int], set[Holder]] = defaultdict(set)
    for sort, rows in parts:
        for first, second, *rest in rows.tolist():
            if sort == "fact":
                facts[first, second] = rest
            else:
                holders[first, second].add((rest[0], rest[1]))
    shares: dict[Holder, Counter[str]] = defaultdict(Counter)
    for artifact, held_by in holders.items():
        if artifact not in facts:
            continue
        databases = {db_id for db_id, _ in held_by}
        for holder in held_by:
            if holder[1]:
                _add(shares[holder], facts[artifact], alone=len(held_by) == 1)
        for db_id in databases:
            _add(shares[db_id, -1], facts[artifact], alone=len(databases) == 1)
    return {holder: dict(sums) for holder, sums in shares.items()}


def _add(sums: Counter[str], fact: list[int], *, alone: bool) -> None:
    """Rule 1."""
    size, pages, is_young, residency, is_wal = fact
    sums["artifacts"] += 1
    sums["size_bytes"] += size
    sums["exclusive_bytes" if alone else "shared_bytes"] += size
    sums["wal_bytes" if is_wal else "chunk_bytes"] += size
    sums["plain_pages"] += pages
    sums["churn_bytes"] += size * is_young
    sums[TIER + Residency(residency).name.lower()] += size
