"""What LMDB knows of a key-value database's tables: folded from its manifest by idempotent operations, and compared (S1).

Rules
  1. Log first, LMDB second: rows follow after an event is durable and its tables are open. What LMDB missed is folded with the
     next change, or when the database is opened: what is submitted is the difference, and of what is equal there is none.
  2. A fold that fails is reported, and keeps nobody from writing; but no file goes before one has succeeded.
  3. With the rows goes how far the logs were durable just before (`LsmEndsRecord`): what an open compares them with
     (witnesses.py).
  4. `differences` compares the two: `verify` does (V7).

Threads: any; folds of one database one after another. Raises nothing, except `differences` what reading LMDB raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from quire.core.errors import QuireError
from quire.core.events import emit
from quire.manifest import tables as t
from quire.manifest.ops.base import Op
from quire.manifest.ops.databases import FoldLsm, RecordLsmEnds
from quire.manifest.records import LsmEndsRecord, LsmTableRecord
from quire.manifest.store import ManifestStore

if TYPE_CHECKING:
    from quire.lsm.sst_reader import SSTable

KEY_BYTES = 256
"""Of the ends of a table's range; keys may have 64 KiB."""


class KvProjection:
    """The rows of one database."""

    def __init__(self, manifest: ManifestStore, db_id: int) -> None:
        self._manifest = manifest
        self._db_id = db_id
        self._lock = threading.Lock()
        self._known: dict[int, LsmTableRecord] | None = None
        """The rows, as far as we know; `None` if they must be read first."""
        self._recorded: LsmEndsRecord | None = None

    def fold(self, tables: Callable[[], Iterable[SSTable]], ends: Callable[[], LsmEndsRecord]) -> bool:
        """Bring the rows up to what `tables` says by then, and record the ends; whether LMDB has them now (rules 1 to 3)."""
        with self._lock:
            try:
                known = self._known if self._known is not None else self.rows()
                self._known = None
                reached = ends()  # before the tables: rows may be ahead of the recorded end, never behind it
                wanted = {table.meta.sst_id: record_of(table) for table in tables()}
                added = [(sst_id, row) for sst_id, row in wanted.items() if known.get(sst_id) != row]
                removed = sorted(known.keys() - wanted.keys())
                ops: list[Op] = [FoldLsm(self._db_id, added, removed)] if added or removed else []
                if reached != self._recorded:
                    ops.append(RecordLsmEnds(self._db_id, reached))
                if ops:
                    self._manifest.submit(ops).result()
                self._known, self._recorded = wanted, reached
            except QuireError as error:
                emit("warning", "lsm.projection_failed", db_id=self._db_id, error=str(error))
                return False
            return True

    def record(self, ends: LsmEndsRecord) -> None:
        """Record how far the logs are durable, and nothing else; a failure is reported (rule 2)."""
        with self._lock:
            if ends == self._recorded:
                return
            try:
                self._manifest.submit([RecordLsmEnds(self._db_id, ends)]).result()
                self._recorded = ends
            except QuireError as error:
                emit("warning", "lsm.ends_not_recorded", db_id=self._db_id, error=str(error))

    def ends(self) -> LsmEndsRecord | None:
        """What LMDB has recorded of the logs."""
        with self._manifest.read() as txn:
            self._recorded = txn.get(t.LSM_ENDS, self._db_id)
            return self._recorded

    def rows(self) -> dict[int, LsmTableRecord]:
        """What LMDB has."""
        with self._manifest.read() as txn:
            return {key[1]: row for key, row in txn.scan(t.LSM_CATALOG, self._db_id)}

    def differences(self, tables: Iterable[SSTable]) -> Iterator[str]:
        """What LMDB says otherwise than the tables (rule 4)."""
        rows, wanted = self.rows(), {table.meta.sst_id: record_of(table) for table in tables}
        for sst_id in sorted(rows.keys() | wanted.keys()):
            if sst_id not in rows:
                yield f"the store's manifest has no row for table {sst_id}"
            elif sst_id not in wanted:
                yield f"the store's manifest has a row for table {sst_id}, which is not live"
            elif not _is_same(rows[sst_id], wanted[sst_id]):
                yield f"the store's manifest describes table {sst_id} otherwise than its file"


def record_of(table: SSTable) -> LsmTableRecord:
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
        table.checksum,
    )


def is_row_of(row: LsmTableRecord, table: SSTable) -> bool:
    """Whether a row describes a table; one that is older than checksums, by everything else."""
    return _is_same(row, record_of(table))


def _is_same(row: LsmTableRecord, wanted: LsmTableRecord) -> bool:
    return row == (wanted if row.checksum else msgspec.structs.replace(wanted, checksum=0))
