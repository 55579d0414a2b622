"""The operation that bounds the audit. Its rows are written by the ops that do something worth remembering.

Rules
  1. A batch's notes become rows in its own transaction, with its sequence and the generations it reached.
  2. Rows go only by age, database by database, a bounded number at a time.
"""

from itertools import islice

from quire.manifest import tables as t
from quire.manifest.ops.base import Component, Op
from quire.manifest.overlay import Overlay
from quire.manifest.records import UInt

PRUNE_ROWS = 4096
"""Rows one operation removes at most: a commit of a few milliseconds."""


class PruneAudit(Op, frozen=True, tag=63):
    """Forget what happened to a database before a moment; the oldest `limit` rows of it."""

    component = int(Component.DATABASE)
    db_id: UInt
    before_ms: UInt
    limit: UInt = PRUNE_ROWS

    def apply(self, tables: Overlay, at_ms: int) -> None:
        end = t.AUDIT.key.prefix(self.db_id, self.before_ms)
        rows = tables.audit.scan(t.AUDIT.key.prefix(self.db_id))
        for key, _ in list(islice(rows, self.limit)):
            if key >= end:
                return
            tables.audit.delete(key)
