"""Compactions of a database as jobs of the store: what the background merges is seen by `quire jobs` like all heavy work.

Rules
  1. A row is made and taken in one batch when a compaction begins, and completed when it is published: no other worker gets it.
  2. The lease outlives every compaction: while this process lives the work goes on, and when it dies the next owner finds the
     row pending at once (rule 3 of jobqueue.py). Whoever takes it then merges what is due by then.
  3. A compaction that failed keeps its row for the next try. A row that could not be written or completed keeps no compaction
     from being done: the database's own log is the truth (S1).

Threads: whoever holds the compaction lock. Raises nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.core.errors import IllegalTransition, QuireError, UnknownJob
from quire.core.events import emit
from quire.manifest.jobqueue import worker_name
from quire.manifest.ops.base import Counter
from quire.manifest.ops.jobs import EnqueueJob, StartJob
from quire.manifest.records import JobKind
from quire.manifest.store import ManifestStore

if TYPE_CHECKING:
    from quire.lsm.compaction import MergeJob

LEASE_MS = 30 * 24 * 3_600 * 1_000


class JobRows:
    """The rows of one database."""

    def __init__(self, manifest: ManifestStore, db_id: int) -> None:
        self._manifest = manifest
        self._db_id = db_id
        self._worker = worker_name("lsm")
        self._job_id = 0
        """The row of the compaction that is under way, or failed; 0 for none."""

    def begin(self, job: MergeJob) -> None:
        """Make the row of a compaction and take it, in one batch: no other worker gets it (rule 1)."""
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
        """Complete the row: the compaction is published (rule 1)."""
        job_id, self._job_id = self._job_id, 0
        if job_id:
            try:
                self._manifest.jobs.complete(self._manifest.jobs.get(job_id), result)
            except (IllegalTransition, UnknownJob):
                pass  # it was cancelled meanwhile: too late
            except QuireError as error:
                self._complain(error)

    def close(self) -> None:
        """Leave what failed to the next worker."""
        job_id, self._job_id = self._job_id, 0
        if job_id:
            try:
                self._manifest.jobs.defer(self._manifest.jobs.get(job_id), 0)
            except (IllegalTransition, UnknownJob):
                pass
            except QuireError as error:
                self._complain(error)

    def _complain(self, error: QuireError) -> None:
        emit("warning", "lsm.job_row_failed", db_id=self._db_id, error=str(error))
