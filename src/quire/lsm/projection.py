"""What LMDB knows of a key-value database's tables: folded from its manifest by idempotent operations, and compared (S1).

Rules
  1. Log first, LMDB second: rows follow after an event is durable and its tables are open. What LMDB missed is folded with the
     next change, or when the database is opened: what is submitted is the difference, and of what is equal there is none.
  2. LMDB decides nothing about the database. A fold that fails is reported, and keeps nobody from writing.
  3. `differences` compares the two: `verify` does (V7).

Threads: any; folds of one database one after another. Raises nothing, except `differences` what reading LMDB raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from quire.core.errors import QuireError
from quire.core.events import emit
from quire.manifest import tables as t
from quire.manifest.lsm_records import LsmTableRecord
from quire.manifest.ops.lsm import FoldLsm
from quire.manifest.store import ManifestStore

if TYPE_CHECKING:
    from quire.lsm.sst_reader import Table

KEY_BYTES = 256
"""Of the ends of a table's range; keys may have 64 KiB."""


class Projection:
    """The rows of one database."""

    def __init__(self, manifest: ManifestStore, db_id: int) -> None:
        self._manifest = manifest
        self._db_id = db_id
        self._lock = threading.Lock()
        self._known: dict[int, LsmTableRecord] | None = None
        """The rows, as far as we know; `None` if they must be read first."""

    def fold(self, tables: Callable[[], Iterable[Table]]) -> None:
        """Bring the rows up to what `tables` says by then (rules 1 and 2)."""
        with self._lock:
            try:
                known = self._known if self._known is not None else self.rows()
                self._known = None
                wanted = {table.meta.sst_id: record_of(table) for table in tables()}
                added = [(sst_id, row) for sst_id, row in wanted.items() if known.get(sst_id) != row]
                removed = sorted(known.keys() - wanted.keys())
                if added or removed:
                    self._manifest.submit([FoldLsm(self._db_id, added, removed)]).result()
                self._known = wanted
            except QuireError as error:
                emit("warning", "lsm.projection_failed", db_id=self._db_id, error=str(error))

    def rows(self) -> dict[int, LsmTableRecord]:
        """What LMDB has."""
        with self._manifest.read() as txn:
            return {key[1]: row for key, row in txn.scan(t.LSM_CATALOG, self._db_id)}

    def differences(self, tables: Iterable[Table]) -> Iterator[str]:
        """What LMDB says otherwise than the tables (rule 3)."""
        rows, wanted = self.rows(), {table.meta.sst_id: record_of(table) for table in tables}
        for sst_id in sorted(rows.keys() | wanted.keys()):
            if sst_id not in rows:
                yield f"the store's manifest has no row for table {sst_id}"
            elif sst_id not in wanted:
                yield f"the store's manifest has a row for table {sst_id}, which is not live"
            elif rows[sst_id] != wanted[sst_id]:
                yield f"the store's manifest describes table {sst_id} otherwise than its file"


def record_of(table: Table) -> LsmTableRecord:
    """A table's row."""
    meta = table.meta
    return LsmTableRecord(
        meta.level,
        meta.rows,
        meta.tombstones,
        table.size_bytes,
        meta.lsn_min,
        meta.lsn_max,
        meta.key_min[:KEY_BYTES],
        meta.key_max[:KEY_BYTES],
    )
