"""The results of a run over many databases: sums and the first failures in memory, the jobs themselves in a spool.

Threads: one adds; any may read when the run is over.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator

import msgspec

from quire.durable.spool import Spool
from quire.manifest.jobqueue import Job
from quire.manifest.records import JobState

FAILURES_MAX = 100
"""Failures that are listed by database; the others are only counted."""
SUMMED = ("slots", "pages", "bytes", "segments", "dropped", "kept")
"""Fields of a job's result that add up over databases."""


class JobFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A database whose job did not succeed."""

    db_id: int
    job_id: int
    error: str


class JobResults:
    """The jobs of a run as they ended, in the order of their databases: `len()` counts them, iteration reads them one by one.

    Memory does not grow with the number of databases.
    """

    def __init__(self) -> None:
        self._jobs = Spool(Job)
        self.states: Tally[JobState] = Tally()
        """State → number of jobs. A pending job was postponed, or failed and will be retried."""
        self.sums: Tally[str] = Tally()
        """Sums over the jobs that succeeded, of those fields of `SUMMED` that their results have."""
        self.changed = 0
        """Jobs that wrote a slot or dropped a snapshot."""
        self.failed = 0
        """Jobs whose last attempt failed, or that were cancelled."""
        self.retried = 0
        """Jobs whose attempt failed and that are pending again."""
        self.failures: list[JobFailure] = []
        """The first `FAILURES_MAX` that failed."""
        self.skipped = 0
        """Databases without a job of this run: another worker holds it, or the database was dropped meanwhile."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def add(self, jobs: Iterable[Job]) -> None:
        """Add jobs as they ended."""
        for job in jobs:
            self._jobs.append(job)
            self.states[job.state] += 1
            if job.state is JobState.SUCCEEDED:
                self._add_result(job.result or {})
            elif job.record.error or job.state is JobState.CANCELLED:
                self._add_failure(job)

    def _add_result(self, result: dict[str, object]) -> None:
        numbers = {name: value for name in SUMMED if isinstance(value := result.get(name), int)}
        self.sums.update(numbers)
        self.changed += bool(numbers.get("slots") or numbers.get("dropped"))

    def _add_failure(self, job: Job) -> None:
        self.failed += 1
        self.retried += job.state is JobState.PENDING
        if len(self.failures) < FAILURES_MAX:
            error = job.record.error or "it was cancelled"
            self.failures.append(JobFailure(db_id=job.db_id, job_id=job.job_id, error=error))
