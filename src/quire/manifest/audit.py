"""The audit: events in the life of databases, and when they happened.

Operations write the rows in their own transaction, so the audit neither misses an event nor contains one that was
rolled back. It is kept for `maintenance.audit_seconds`.

Keys contain the time and the position in the feed: rows outside the request are neither decoded nor kept.

Threads: pure functions of a read transaction. Raises `ManifestDamaged`.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nlargest

from msgspec.structs import asdict

from quire.core.errors import ManifestDamaged
from quire.manifest import tables as t
from quire.manifest.ops.base import Component
from quire.manifest.reads import ReadTxn
from quire.manifest.records import AuditAction

_AT_MS, _IN_FEED = slice(4, 12), slice(12, None)
"""Positions in the key of the time, and of sequence and ordinal."""
assert t.AUDIT.key.pack(0, 1, 2, 3)[_AT_MS] == (1).to_bytes(8, "big")


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One event in the life of a database."""

    db_id: int
    at_ms: int
    sequence: int
    """The change record that caused it."""
    action: AuditAction
    component: Component
    generation: int
    """The generation that the component reached by it."""
    subject: str
    number: int
    size_bytes: int


def audit_entries(
    txn: ReadTxn, db_id: int | None = None, *, since_ms: int = 0, until_ms: int | None = None, newest: int = 0
) -> list[AuditEntry]:
    """Return the events of a database, or of all, in [since, until), oldest first; with `newest`, only the last so many."""
    since = since_ms.to_bytes(8, "big")
    until = until_ms.to_bytes(8, "big") if until_ms is not None else b"\xff" * 9
    scanned = txn.raw_scan(t.AUDIT) if db_id is None else txn.raw_scan(t.AUDIT, db_id)
    rows = (row for row in scanned if since <= row[0][_AT_MS] < until)
    ordered = nlargest(newest, rows, key=_in_feed)[::-1] if newest else sorted(rows, key=_in_feed)
    return [entry for row in ordered if (entry := _entry(txn, *row)) is not None]


def _in_feed(row: tuple[bytes, bytes]) -> bytes:
    return row[0][_IN_FEED]


def _entry(txn: ReadTxn, key: bytes, raw: bytes) -> AuditEntry | None:
    """Return an entry; `None` if its row is damaged and its database is closed."""
    try:
        row = t.AUDIT.rows.decode(key, raw)
    except ManifestDamaged:
        if not txn.is_refused(t.AUDIT, key):
            raise
        return None
    db_id, at_ms, sequence, _ = t.AUDIT.key.unpack(key)
    return AuditEntry(db_id, at_ms, sequence, **{**asdict(row), "component": Component(row.component)})
