"""The operations by which LMDB follows the manifest and the logs of a key-value database (S1).

Rules
  1. The database's own log is the truth: this follows it, may be repeated, and is folded again when the database is opened.
  2. A table that comes and is there already gets the row it is given; one that goes and is not there is fine.
"""

from quire.core.errors import WrongKind
from quire.manifest import tables as t
from quire.manifest.ops.base import Component, Op
from quire.manifest.overlay import Overlay
from quire.manifest.records import DbKind, LsmEndsRecord, LsmTableRecord, UInt


class FoldLsm(Op, frozen=True, tag=83):
    """Tables of a key-value database come and go."""

    component = int(Component.CHUNK)
    db_id: UInt
    added: list[tuple[UInt, LsmTableRecord]]
    removed: list[UInt] = []

    def apply(self, tables: Overlay, at_ms: int) -> None:
        _require_lsm(tables, self.db_id)
        for sst_id in self.removed:
            tables.lsm_catalog.delete(t.LSM_CATALOG.key.pack(self.db_id, sst_id))
        for sst_id, row in self.added:
            tables.lsm_catalog.put(t.LSM_CATALOG.key.pack(self.db_id, sst_id), row)


class RecordLsmEnds(Op, frozen=True, tag=130):
    """Remember how far the logs of a key-value database are durable."""

    logged = False
    db_id: UInt
    ends: LsmEndsRecord

    def apply(self, tables: Overlay, at_ms: int) -> None:
        _require_lsm(tables, self.db_id)
        tables.lsm_ends.put(t.LSM_ENDS.key.pack(self.db_id), self.ends)


def _require_lsm(tables: Overlay, db_id: int) -> None:
    record = tables.writable(db_id, even="read_only")
    if record.kind is not DbKind.LSM:
        raise WrongKind("not a key-value database", db_id=db_id, kind=record.kind.name.lower())
