"""The projection of a key-value database in the store's manifest (LMDB): rows of its tables, ends of its logs, jobs of its
compactions.

The database's own log is written first, LMDB second (S1): rows follow after an event is durable and its tables are open. A
fold submits the difference between the tables and the rows, so a change that LMDB has missed is included in the next fold or
made at the next open. A failed fold does not block writers, but no file is removed until one has succeeded.

Threads: any; folds of one database are serialised. `fold`, `record` and `CompactionJobs` report failures and raise nothing;
other methods raise LMDB's errors."""

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
"""The lowest and highest key of a table are cut to this length; keys may have 64 KiB."""


class KvProjection:
    """The rows of one database."""

    def __init__(self, manifest: ManifestStore, db_id: int) -> None:
        self._manifest = manifest
        self._db_id = db_id
        self._lock = threading.Lock()
        self._known: dict[int, LsmTableRecord] | None = None
        """The rows in LMDB after the last fold; `None` if they must be read first."""
        self._recorded: LsmEndsRecord | None = None

    def fold(self, tables: Callable[[], Iterable[SSTable]], ends: Callable[[], LsmEndsRecord]) -> bool:
        """Bring the rows up to date with `tables()`, and record `ends()`. Return whether LMDB has committed both."""
        with self._lock:
            try:
                known = self._known if self._known is not None else self.rows()
                # Unknown until the commit is answered: after a failure the next fold reads the rows again.
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

    def record(self, ends: Callable[[], LsmEndsRecord]) -> None:
        """Record `ends()`, without folding rows. A failure is reported as an event."""
        with self._lock:
            try:
                # Under the lock: a fold in between would record newer ends, and these would replace them.
                reached = ends()
                if reached == self._recorded:
                    return
                ops: list[Op] = [RecordLsmEnds(self._db_id, reached)]
                if reached.last_lsn > (self._recorded.last_lsn if self._recorded is not None else 0):
                    # Ends are not in the feed: this shows it that rows were written.
                    ops.append(FoldLsm(self._db_id, []))
                self._manifest.submit(ops).result()
                self._recorded = reached
            except QuireError as error:
                emit("warning", "lsm.ends_not_recorded", db_id=self._db_id, error=str(error))

    def ends(self) -> LsmEndsRecord | None:
        """Return the ends of the logs as recorded in LMDB."""
        with self._manifest.read() as txn:
            self._recorded = txn.get(t.LSM_ENDS, self._db_id)
            return self._recorded

    def rows(self) -> dict[int, LsmTableRecord]:
        """Return the table rows in LMDB, by id."""
        with self._manifest.read() as txn:
            return {key[1]: row for key, row in txn.scan(t.LSM_CATALOG, self._db_id)}

    def differences(self, tables: Iterable[SSTable]) -> Iterator[str]:
        """Yield a description of each difference between the rows in LMDB and the tables."""
        rows, wanted = self.rows(), {table.meta.sst_id: record_of(table) for table in tables}
        for sst_id in sorted(rows.keys() | wanted.keys()):
            if sst_id not in rows:
                yield f"the store's manifest has no row for table {sst_id}"
            elif sst_id not in wanted:
                yield f"the store's manifest has a row for table {sst_id}, which is not live"
            elif not _is_same(rows[sst_id], wanted[sst_id]):
                yield f"the store's manifest describes table {sst_id} otherwise than its file"


def record_of(table: SSTable) -> LsmTableRecord:
    """Return the row of a table."""
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
    """Return whether a row describes a table. In a row written before checksums existed, the checksum is not compared."""
    return _is_same(row, record_of(table))


def _is_same(row: LsmTableRecord, wanted: LsmTableRecord) -> bool:
    return row == (wanted if row.checksum else msgspec.structs.replace(wanted, checksum=0))


LEASE_MS = 30 * 24 * 3_600 * 1_000
"""Lease of a compaction's job: 30 days, longer than any compaction."""


class CompactionJobs:
    """Records the compactions of one database as jobs of the store, so that `quire jobs` shows them. Raises nothing.

    The lease outlives every compaction: no other worker takes the job while this process lives, and when it dies the next
    owner finds the row pending at once. The worker that takes it merges whatever is due then. A row that could not be written
    or completed does not prevent a compaction: the database's own log is authoritative (S1). Called with the compaction lock
    held.
    """

    def __init__(self, manifest: ManifestStore, db_id: int) -> None:
        self._manifest = manifest
        self._db_id = db_id
        self._worker = worker_name("lsm")
        self._job_id = 0
        """The job of the compaction that is running or has failed; 0 for none."""

    def begin(self, job: MergeJob) -> None:
        """Enqueue and start the job of a compaction in one batch, so that no other worker takes it."""
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
            self._report(error)

    def done(self, result: dict[str, Any]) -> None:
        """Complete the job of a compaction that has been published."""
        self._end(lambda job: self._manifest.jobs.complete(job, result))

    def close(self) -> None:
        """Leave the job of a failed compaction to the next worker."""
        self._end(lambda job: self._manifest.jobs.defer(job, 0))

    def _end(self, step: Callable[[Job], object]) -> None:
        job_id, self._job_id = self._job_id, 0
        if job_id:
            try:
                step(self._manifest.jobs.get(job_id))
            except (IllegalTransition, UnknownJob):
                pass  # it was cancelled meanwhile, too late to have an effect
            except QuireError as error:
                self._report(error)

    def _report(self, error: QuireError) -> None:
        emit("warning", "lsm.job_row_failed", db_id=self._db_id, error=str(error))
