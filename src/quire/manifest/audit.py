"""Reading the audit: what happened to which database, and when.

The rows are written by operations, in the transaction that did it (`Overlay.write_notes`), so the audit can neither miss an
event nor tell of one that was rolled back. It is kept for `maintenance.audit_seconds`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quire.manifest import tables as t
from quire.manifest.ops.base import Component
from quire.manifest.reads import ReadTxn
from quire.manifest.records import AuditAction


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One thing that happened."""

    db_id: int
    at_ms: int
    sequence: int
    """The change record that did it."""
    action: AuditAction
    component: Component
    generation: int
    """What the component had reached by it."""
    subject: str
    number: int
    size_bytes: int


def audit_of(txn: ReadTxn, db_id: int, *, since_ms: int = 0, until_ms: int | None = None) -> Iterator[AuditEntry]:
    """What happened to one database in [since, until), oldest first."""
    for key, row in txn.scan(t.AUDIT, start=(db_id, since_ms, 0, 0)):
        owner, at_ms, sequence, _ = key
        if owner != db_id or (until_ms is not None and at_ms >= until_ms):
            return
        yield AuditEntry(
            owner,
            at_ms,
            sequence,
            row.action,
            Component(row.component),
            row.generation,
            row.subject,
            row.number,
            row.size_bytes,
        )
