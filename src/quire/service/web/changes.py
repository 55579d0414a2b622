"""Changes of the store in the short form of the dashboard: what was done, and to which database.

Rules
  1. Bounded: a batch may have 65,536 operations with lists in them; only the first few are shown, each truncated.
  2. No transaction is open while a client reads.

Threads: the caller's; pure functions of a read transaction.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

from quire.core.json_values import plain
from quire.core.timeline import step_back
from quire.manifest.change import CHANGE_LOG, ChangeRecord
from quire.manifest.op_effects import TOUCHES
from quire.manifest.reads import ReadTxn

OPERATIONS_MAX = 12
ITEMS_MAX = 8
TEXT_MAX = 120
CHANGES_MAX = 200
"""The most changes in one answer."""


def recent(txn: ReadTxn, limit: int, *, before: int = 0) -> list[dict[str, Any]]:
    """Return the newest changes (below sequence `before`, if given), newest first."""
    limit = max(1, min(limit, CHANGES_MAX))
    oldest, head = txn.feed_bounds()
    newest = min(head, before - 1) if before else head
    return list(reversed(between(txn, max(oldest, step_back(txn.gaps(), newest, limit) + 1), newest)))


def between(txn: ReadTxn, first: int, last: int) -> list[dict[str, Any]]:
    """Return the changes of a range of sequences, oldest first."""
    if last < first:
        return []
    rows = islice(txn.scan(CHANGE_LOG, start=(first,)), last - first + 1)
    concerned = [(record, _concerned(record)) for _, record in rows if record.sequence <= last]
    names = txn.database_names(db_id for _, db_ids in concerned for db_id in db_ids)
    return [_summary(record, [names.get(db_id) or f"#{db_id}" for db_id in db_ids]) for record, db_ids in concerned]


def _concerned(record: ChangeRecord) -> list[int]:
    """Return the first databases that a change touches."""
    concerned: dict[int, None] = {}
    for op in record.operations[:256]:
        if (touches := TOUCHES.get(type(op))) is not None:
            concerned.update(dict.fromkeys(db_id for db_id in touches.databases(op) if db_id))
    return list(islice(concerned, ITEMS_MAX))


def _summary(record: ChangeRecord, databases: list[str]) -> dict[str, Any]:
    """Return the summary of one change (rule 1)."""
    kinds = Counter(type(op).__name__ for op in record.operations)
    return {
        "sequence": record.sequence,
        "committed_at_ms": record.committed_at_ms,
        "operations": len(record.operations),
        "kinds": dict(kinds),
        "databases": databases,
        "details": [cut(plain(op)) for op in record.operations[:OPERATIONS_MAX]],
        "trace_id": record.trace_id,
    }


def cut(value: Any) -> Any:
    """Truncate a plain value to a line or two.

    >>> cut({"pages": list(range(100)), "op": "x"})
    {'pages': [0, 1, 2, 3, 4, 5, 6, 7, '… 92 more'], 'op': 'x'}
    """
    if isinstance(value, dict):
        return {name: cut(item) for name, item in islice(value.items(), 24)}
    if isinstance(value, list):
        short = [cut(item) for item in value[:ITEMS_MAX]]
        return short if len(value) <= ITEMS_MAX else [*short, f"… {len(value) - ITEMS_MAX:,} more"]
    if isinstance(value, str) and len(value) > TEXT_MAX:
        return value[: TEXT_MAX - 1] + "…"
    return value
