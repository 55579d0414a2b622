"""Operations that repair what `check` found: the only operations that set a row to a given value.

Only `check` and `repair` propose them, each for a row that was recomputed from the rows that own the truth, found in
the change log, or given up because its content is unknown. A corrected count is logged like any change, so replicas are
corrected too; derived rows are local and are not.
"""

from typing import Any

from quire.core.errors import InvalidInput
from quire.manifest import tables as t
from quire.manifest.ops.base import Component, Op
from quire.manifest.overlay import Overlay, TableView
from quire.manifest.records import IndexRecord, Record, RefcountRecord, UInt


class CorrectRefcount(Op, frozen=True, tag=61):
    """Set an artifact's counts to those of its holders; two zeros doom it, `remove` deletes a row without an owner."""

    component = int(Component.REFCOUNT)
    key: bytes
    in_use: UInt
    pending_upload: UInt
    remove: bool = False

    def apply(self, tables: Overlay, at_ms: int) -> None:
        if self.remove:
            tables.gc_refcounts.delete(self.key)
            tables.gc_zero.delete(self.key)
            return
        doomed = not self.in_use and not self.pending_upload
        record = RefcountRecord(self.in_use, self.pending_upload, at_ms if doomed else 0)
        _put(tables.gc_refcounts, self.key, record)
        if doomed:
            _put(tables.gc_zero, self.key, IndexRecord(at_ms))
        else:
            tables.gc_zero.delete(self.key)


class CorrectIndex(Op, frozen=True, tag=62):
    """Set a row of a derived index, or delete it if there is no value."""

    logged = False
    table: str
    key: bytes
    value: UInt | None

    def apply(self, tables: Overlay, at_ms: int) -> None:
        view = tables.views.get(self.table)
        if view is None or view.table.policy is not t.Policy.DERIVED:
            raise InvalidInput("not a derived table", table=self.table)
        if self.value is None:
            view.delete(self.key)
        else:
            _put(view, self.key, IndexRecord(self.value))


RESTORED = tuple(
    table
    for table in t.TABLES.values()
    if table.policy is t.Policy.LOGGED and table is not t.GENERATION_WATERMARKS  # which only the writer sets
)
"""Tables whose rows `RestoreRow` sets."""
RESTORED_LOCAL = (t.CHANGE_CURSORS, t.SNAPSHOT_READERS, t.METRICS, t.IDEMPOTENCY, t.REPLICA_POSITIONS)
"""Tables whose rows `RestoreLocalRow` sets."""


class RestoreRow(Op, frozen=True, tag=140):
    """Restore a damaged row of a logged table, given without its checksum; delete it if `row` is None."""

    component = int(Component.DATABASE)
    table: str
    key: bytes
    row: bytes | None

    def apply(self, tables: Overlay, at_ms: int) -> None:
        _restore(tables, RESTORED, self.table, self.key, self.row)


class RestoreLocalRow(Op, frozen=True, tag=141):
    """Restore a damaged row of a local table, which is not in the feed."""

    logged = False
    table: str
    key: bytes
    row: bytes | None

    def apply(self, tables: Overlay, at_ms: int) -> None:
        _restore(tables, RESTORED_LOCAL, self.table, self.key, self.row)


def _put(view: TableView[Any], key: bytes, record: Record) -> None:
    """Put a row whose key can be unpacked; any other would stop every scan of the table. Repair may still delete one."""
    layout = view.table.key
    layout.pack(*layout.unpack(key))
    view.put(key, record)


def _restore(tables: Overlay, allowed: tuple[t.Table[Any], ...], name: str, key: bytes, row: bytes | None) -> None:
    view = tables.views.get(name)
    if view is None or view.table not in allowed:
        raise InvalidInput("rows of this table cannot be restored", table=name)
    if row is None:
        view.delete(key)
    else:
        _put(view, key, view.table.codec.decode(row))
    tables.active_ids.clear()  # the row may be that of a database
