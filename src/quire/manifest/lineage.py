"""Who was forked from whom, as a tree. Pure, and imports nothing: the quick way in uses it as well.

Rules
  1. Roots first, oldest first; a parent of which no record is left is a root after the others.
  2. No recursion: forks of forks may be many deep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

N = TypeVar("N")


def grow(records: Mapping[int, Any], make: Callable[[int, Any, tuple[N, ...]], N]) -> list[N]:
    """The roots, each made with (database id, record or `None`, its forks); a record has a `parent_db_id`."""
    children: dict[int, list[int]] = {}
    for db_id, record in records.items():
        children.setdefault(record.parent_db_id, []).append(db_id)
    roots = [*children.get(0, ()), *sorted(parent for parent in children if parent and parent not in records)]
    order = list(roots)
    for db_id in order:  # grows while it is walked: parents before their forks
        order += sorted(children.get(db_id, ()))
    nodes: dict[int, N] = {}
    for db_id in reversed(order):
        forks = tuple(nodes[child] for child in sorted(children.get(db_id, ())))
        nodes[db_id] = make(db_id, records.get(db_id), forks)
    return [nodes[db_id] for db_id in roots]
