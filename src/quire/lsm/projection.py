"""What the store's manifest (LMDB) knows of a key-value database: rows of its tables, ends of its logs, jobs of its
compactions.

The database's own log comes first, LMDB second (S1): rows follow after an event is durable and its tables are open. What LMDB
missed is folded with the next change or at the next open: what is submitted is the difference. A fold that fails keeps nobody
from writing, but no file goes before one has succeeded.

Threads: any; folds of one database one after another. Raises nothing, except `differences` what reading LMDB raises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from quire.core.errors import IllegalTransition, QuireError, UnknownJob
from quire.core.events import emit
from quire.manifest import tables as t
from quire.manifest.jobqueue import Job, worker_name
from quire.manifest.ops.base import Counter, Op
from quire.manifest.ops.databases import FoldLsm, RecordLsmEnds
from quire.manifest.ops.jobs import EnqueueJob, StartJob
from quire.manifest.records import JobKind, LsmEndsRecord, LsmTableRecord
from quire.manifest.store import ManifestStore

if TYPE_CHECKING:
    from quire.lsm.compaction import MergeJob
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
        """Bring the rows up to what `tables` says by then, and record the ends; whether LMDB has them now."""
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
        """Record how far the logs are durable, and nothing else; a failure is reported."""
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
        """What LMDB says otherwise than the tables."""
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


LEASE_MS = 30 * 24 * 3_600 * 1_000
"""Of a compaction's job."""


class CompactionJobs:
    """The compactions of one database as jobs of the store, so that `quire jobs` shows them. Raises nothing.

    The lease outlives every compaction: while this process lives the work goes on, and when it dies the next owner finds the
    row pending at once. Whoever takes it then merges what is due by then. A row that could not be written or completed keeps
    no compaction from being done: the database's own log is the truth (S1). Called with the compaction lock held.
    """

    def __init__(self, manifest: ManifestStore, db_id: int) -> None:
        self._manifest = manifest
        self._db_id = db_id
        self._worker = worker_name("lsm")
        self._job_id = 0
        """The row of the compaction that is under way, or failed; 0 for none."""

    def begin(self, job: MergeJob) -> None:
        """Make the row of a compaction and take it, in one batch: no other worker gets it."""
        if self._job_id:
            return
        size = sum(table.size_bytes for table in job.inputs)
        payload = {"level": job.level, "inputs": len(job.inputs), "size_bytes": size}
        try:
            record = self._manifest.jobs.record(JobKind.COMPACTION, self._db_id, payload)
            job_id = self._manifest.allocate(Counter.JOB)
            expires = self._manifest.clock.now_ms() + LEASE_MS
            self._manifest.submit([EnqueueJob(job_id, record), StartJob(job_id, self._worker, expires)]).result()
            self._job_id = job_id
        except QuireError as error:
            self._complain(error)

    def done(self, result: dict[str, Any]) -> None:
        """Complete the row: the compaction is published."""
        self._end(lambda job: self._manifest.jobs.complete(job, result))

    def close(self) -> None:
        """Leave what failed to the next worker."""
        self._end(lambda job: self._manifest.jobs.defer(job, 0))

    def _end(self, step: Callable[[Job], object]) -> None:
        job_id, self._job_id = self._job_id, 0
        if job_id:
            try:
                step(self._manifest.jobs.get(job_id))
            except (IllegalTransition, UnknownJob):
                pass  # it was cancelled meanwhile: too late
            except QuireError as error:
                self._complain(error)

    def _complain(self, error: QuireError) -> None:
        emit("warning", "lsm.job_row_failed", db_id=self._db_id, error=str(error))
