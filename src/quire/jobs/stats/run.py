"""The task of the stats job: joins artifacts with their holders, and sums each holder's share.

Terms
  fact      an artifact's row as numbers: (code, code, bytes, pages, is it of the last day, residency, is it WAL)
  holding   a holder's reference to an artifact: (code, code, database, snapshot); snapshot 0 is the database as it is now
  share     a holder's part of the artifacts of one key: a sum for each of `SUMS`

An artifact is exclusive to a snapshot if it has no other holder, and to a database with its snapshots if no other database
holds it. A task sums rows about 2^10 ids of one database. Safe to run on an executor.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.jobs.runner import Key, Tools
from quire.manifest.records import Residency

TIER = "tier:"
"""Prefix of a residency's name in `SUMS`: bytes with that residency."""

SUMS = (
    "artifacts", "size_bytes", "exclusive_bytes", "shared_bytes", "chunk_bytes", "wal_bytes", "plain_pages", "churn_bytes",
    *(TIER + tier.name.lower() for tier in Residency),
)  # fmt: skip
"""The names of the sums."""

WHOLE = -1
"""In place of a snapshot id: the database with its snapshots."""

Numbers = NDArray[np.uint64]
Sums = NDArray[np.int64]

Shares = Sums
"""Lines of (database, snapshot, sums)."""


def join_shares(_key: Key, _task: None, parts: list[tuple[str, Numbers]], _tools: Tools) -> Shares:
    """Return each holder's share of these artifacts."""
    facts = np.concatenate([np.zeros((0, 7), np.uint64), *(rows for sort, rows in parts if sort == "fact")])
    held = np.concatenate([np.zeros((0, 4), np.uint64), *(rows for sort, rows in parts if sort == "holding")])
    held = held[np.lexsort((held[:, 3], held[:, 2], held[:, 1], held[:, 0]))]
    held = held[_begins(held)]  # a holder with two references counts once
    place = _places(facts[:, :2], held[:, :2])
    held, facts = held[place >= 0], facts[place[place >= 0]]  # nothing is known about artifacts without a row
    by_artifact, by_database = _begins(held[:, :2]), _begins(held[:, :3])
    holders, databases = (_counted(by_artifact, counted) for counted in (np.ones(len(held), np.bool_), by_database))
    snapshots = held[:, 3] > 0
    lines = [
        _lines(held[snapshots, 2], held[snapshots, 3].astype(np.int64), facts[snapshots], holders[snapshots] == 1),
        _lines(held[by_database, 2], WHOLE, facts[by_database], databases[by_database] == 1),
    ]
    return added(np.concatenate(lines))


def added(lines: Shares) -> Shares:
    """Sum the lines of each holder into one."""
    if not len(lines):
        return lines
    lines = lines[np.lexsort((lines[:, 1], lines[:, 0]))]
    starts = np.flatnonzero(_begins(lines[:, :2]))
    sums: Sums = np.add.reduceat(lines, starts, axis=0)
    sums[:, :2] = lines[starts, :2]
    return sums


def _begins(rows: NDArray[np.generic]) -> NDArray[np.bool_]:
    """Return which rows differ from the row before."""
    first = np.ones(len(rows), np.bool_)
    first[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    return first


def _counted(begins: NDArray[np.bool_], counted: NDArray[np.bool_]) -> Sums:
    """Return, for each row, how many rows of its run are counted."""
    runs = np.cumsum(begins) - 1
    counts: Sums = np.bincount(runs[counted], minlength=len(runs))[runs].astype(np.int64)
    return counts


def _places(facts: Numbers, wanted: Numbers) -> NDArray[np.int64]:
    """Return, for each wanted code, the index of its fact, or -1."""
    codes = np.concatenate([facts, wanted])
    order = np.lexsort((codes[:, 1], codes[:, 0]))
    runs = np.empty(len(codes), np.int64)
    runs[order] = np.cumsum(_begins(codes[order])) - 1
    places = np.full(len(codes), -1, np.int64)
    places[runs[: len(facts)]] = np.arange(len(facts))
    return places[runs[len(facts) :]]


def _lines(databases: Numbers, snapshots: NDArray[np.int64] | int, facts: Numbers, alone: NDArray[np.bool_]) -> Shares:
    """Return a line for each holding, with the sums of one artifact."""
    size, pages, young, residency, is_wal = facts[:, 2:].astype(np.int64).T
    lines = np.zeros((len(facts), 2 + len(SUMS)), np.int64)
    lines[:, 0], lines[:, 1] = databases, snapshots
    columns = {
        "artifacts": 1, "size_bytes": size, "exclusive_bytes": size * alone, "shared_bytes": size * ~alone,
        "chunk_bytes": size * (1 - is_wal), "wal_bytes": size * is_wal, "plain_pages": pages, "churn_bytes": size * young,
        **{TIER + tier.name.lower(): size * (residency == tier) for tier in Residency},
    }  # fmt: skip
    for name, column in columns.items():
        lines[:, 2 + SUMS.index(name)] = column
    return lines
