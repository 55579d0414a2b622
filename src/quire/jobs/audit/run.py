"""The task of the audit job: groups references, counts and versions by artifact or page, and compares them.

Terms
  code      an artifact as two numbers, as `manifest/holders.py` makes them: (origin << 24 | kind << 16 | delta, id << 32 |
            generation)
  sort      the kind of a row: "held" (how often some rows refer to an artifact), "stored" (a reference count), "row" (a catalog
            row), "version" and "head" (of a page)

Blocks are split by database and by pieces of its ids or pages, so that many tasks compare a large database, and no task holds
more than one piece. Only differences leave the executor. Safe to run on an executor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import ArtifactKind
from quire.jobs.runner import Key, Tools

PIECE_BITS = 14
"""A piece has 2^14 pages of one database."""

ID_BITS = 10
"""A piece has 2^10 artifact ids of one database. Each id may have as many generations as the database has snapshots."""

Pair = tuple[int, int]
Numbers = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows of one sort."""

    sort: str
    rows: Numbers
    """(code, code, count); for pages (db_id, page, lsn, segment)."""
    db_id: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """A stored value that differs from the computed one."""

    rule: str
    subject: tuple[int, ...]
    """A code, or (db_id, page)."""
    have: tuple[int, ...]
    want: tuple[int, ...]


def piece_of(rows: Numbers) -> Numbers:
    """Return the piece of each reference as one number, ordered by database and id."""
    pieces: Numbers = rows[:, 0] >> np.uint64(24) << np.uint64(32) | rows[:, 1] >> np.uint64(32 + ID_BITS)
    return pieces


def split_block(block: RowBlock, _tools: Tools) -> Iterator[tuple[Key, tuple[str, NDArray[np.uint64]]]]:
    """Cut a block by database and piece of ids or pages, so that no task holds more than one piece."""
    rows = block.rows
    if not len(rows):
        return
    if block.sort in ("version", "head"):
        owners, pieces, kind = rows[:, 0], rows[:, 1] >> np.uint64(PIECE_BITS), 0
    else:
        owners, pieces, kind = rows[:, 0] >> np.uint64(24), rows[:, 1] >> np.uint64(32 + ID_BITS), 1
    keys = np.stack([owners, pieces * np.uint64(2) + np.uint64(kind)], axis=1)
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    keys, rows = keys[order], rows[order]
    starts = [0, *(np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1)) + 1).tolist(), len(rows)]
    for start, stop in pairwise(starts):
        owner, piece = keys[start].tolist()
        yield (owner, piece), (block.sort, rows[start:stop])


def join_blocks(
    _key: Key, _task: None, parts: list[tuple[str, NDArray[np.uint64]]], _tools: Tools
) -> tuple[Difference, ...]:
    """Compare the rows of one key."""
    by_sort: dict[str, list[NDArray[np.uint64]]] = {}
    for sort, rows in parts:
        by_sort.setdefault(sort, []).append(rows)
    joined = {sort: np.concatenate(arrays) for sort, arrays in by_sort.items()}
    if joined.keys() & {"version", "head"}:
        return tuple(_heads(joined))
    return tuple(_counts(joined))


def _counts(joined: dict[str, Numbers]) -> Iterator[Difference]:
    """Check R1: a count is the number of holders; S2: a held artifact has a row; R4: an artifact with a row is or was held."""
    held, stored, rows = (_by_code(joined.get(sort, np.zeros((0, 3), np.uint64))) for sort in ("held", "stored", "row"))
    if np.array_equal(held, stored[stored[:, 2] > 0]) and np.array_equal(rows[:, :2], stored[:, :2]):
        return
    yield from _differences_by_code(
        *({(a, b): count for a, b, count in counts.tolist()} for counts in (held, stored, rows))
    )


def _differences_by_code(held: dict[Pair, int], stored: dict[Pair, int], rows: dict[Pair, int]) -> Iterator[Difference]:
    """Check the same rules code by code, after the arrays turned out to differ."""
    for code in sorted(held.keys() | {code for code, count in stored.items() if count}):
        if held.get(code, 0) != stored.get(code, 0):
            yield Difference("R1", code, (stored.get(code, 0),), (held.get(code, 0),))
    for code in sorted(held.keys() - rows.keys()):
        yield Difference("S2", code, (0,), (1,))
    for code in sorted(rows.keys() - held.keys() - stored.keys()):
        if code[0] >> 16 & 0xFF != ArtifactKind.NAMESPACE:  # a namespace may not have an artifact yet
            yield Difference("R4", code, (1,), (0,))


def _by_code(rows: Numbers) -> Numbers:
    """Return the sum of each code's counts, ordered by code."""
    if not len(rows):
        return rows
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    starts = np.flatnonzero(np.concatenate(([True], (rows[1:, :2] != rows[:-1, :2]).any(axis=1))))
    return np.column_stack([rows[starts, :2], np.add.reduceat(rows[:, 2], starts)])


def _heads(joined: dict[str, NDArray[np.uint64]]) -> Iterator[Difference]:
    """Check P1: a page's head is its newest version."""
    newest = _by_page(joined.get("version", np.zeros((0, 4), np.uint64)))
    heads = _by_page(joined.get("head", np.zeros((0, 4), np.uint64)))
    if np.array_equal(newest, heads):
        return
    wanted = {(db_id, page): (lsn, segment) for db_id, page, lsn, segment in newest.tolist()}
    stored = {(db_id, page): (lsn, segment) for db_id, page, lsn, segment in heads.tolist()}
    for subject in sorted(wanted.keys() | stored.keys()):
        if wanted.get(subject) != stored.get(subject):
            yield Difference("P1", subject, stored.get(subject, ()), wanted.get(subject, ()))


def _by_page(rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the newest row of each page, ordered by page."""
    rows = rows[np.lexsort((rows[:, 3], rows[:, 2], rows[:, 1], rows[:, 0]))]
    last = np.ones(len(rows), np.bool_)
    last[:-1] = (rows[1:, :2] != rows[:-1, :2]).any(axis=1)
    return rows[last]
