"""One run over many databases with a job for each: the part that does not depend on the kind of job (K1).

A worker's slot works on one job, and waits for each of its commits. A run holds the jobs of all its databases at once, plans
them together, and commits for thousands of them in the same group commits. Leases and failed attempts are the worker's
(`leases.py`, `fail_attempt`).

A failure is confined to its database: its job fails as it would in a run of its own, and is no longer held. A job that was
taken away is noticed when something is committed for it (P10). An interrupted run requeues its jobs without a failure.

Threads: one caller; a separate thread renews leases, and a run may release jobs from several threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from quire.core.errors import IllegalTransition, QuireError, StoreClosed, StoreUnusable, UnknownJob
from quire.core.events import emit
from quire.jobs.handler import commit_each, fail_attempt
from quire.jobs.leases import LeasedJob, LeaseKeeper
from quire.manifest.jobqueue import LEASE_SECONDS, Job, worker_name
from quire.manifest.ops.base import Counter, Op
from quire.manifest.ops.jobs import EnsureJob, RequeueJob, StartJob
from quire.manifest.records import JobKind, JobState
from quire.manifest.store import ManifestStore

FAILURES = 16
"""Threads that record failures: each waits for its commit, so that concurrent ones share a group commit."""

_runs = itertools.count(1)


H = TypeVar("H", bound=LeasedJob)
T = TypeVar("T")


class BatchRun(Generic[H]):
    """One run over the jobs of many databases.

    `held` (db_id → job) is changed by the caller's thread and, in some runs, by threads of the run, each of which removes only
    its own entry; the lease keeper only reads it.
    """

    def __init__(
        self,
        manifest: ManifestStore,
        kind: JobKind,
        hold: Callable[[Job], H],
        *,
        payload: Callable[[int], Any] = lambda _: None,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        """`payload` returns the payload of a new job for a database."""
        # constant after construction
        self._manifest = manifest
        self._kind = kind
        self._hold = hold
        self._payload = payload
        self._holder = f"{worker_name('many')}:{next(_runs)}"
        self.held: dict[int, H] = {}
        self.leases = LeaseKeeper(manifest, lambda: list(self.held.values()), lease_seconds, label="quire-batch-leases")

    # ── holding jobs ──────────────────────────────────────────────────────────────────────────────────────────────────
    def enqueue(self, db_ids: Iterable[int]) -> list[int]:
        """Return the ids of the databases' outstanding jobs, enqueued where there was none."""
        jobs, job_ids = self._manifest.jobs, []

        def batch(db_id: int) -> list[Op]:
            record = jobs.record(self._kind, db_id, self._payload(db_id))
            return [EnsureJob(self._manifest.allocate(Counter.JOB), record)]

        for db_id, error in self.commit((db_id, batch(db_id)) for db_id in dict.fromkeys(db_ids)):
            if error is None:
                # Not the id that was allocated: an outstanding job keeps its own, and `claim` skips 0, a job that has
                # ended meanwhile.
                job_ids.append(jobs.outstanding(db_id, self._kind))
            else:
                emit("warning", "job.cannot_enqueue", db_id=db_id, kind=self._kind.name, error=str(error))
        return job_ids

    def claim(self, job_ids: Sequence[int]) -> list[int]:
        """Claim the jobs that no worker holds; return their ids."""
        taken: list[int] = []

        def start(job_id: int) -> StartJob:
            # When the batch is submitted: the first of very many leases may expire before the last one is taken.
            return StartJob(job_id, self._holder, self.leases.expires_at_ms())

        for job_id, error in self.commit((job_id, [start(job_id)]) for job_id in job_ids if job_id):
            if error is None:
                job = self._manifest.jobs.get(job_id)
                self.held[job.db_id] = leased = self._hold(job)
                leased.holder = self._holder
                taken.append(job_id)
        return taken

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Renew all leases from one thread during the block; requeue the jobs if it is interrupted."""
        self.leases.start()
        try:
            yield
        except (StoreClosed, StoreUnusable):
            raise
        except BaseException:
            self._put_back()
            raise
        finally:
            self.leases.stop()
        assert not self.held, "every job has ended, or was put back"

    def _put_back(self) -> None:
        """Requeue the jobs of this run without a failure. Their leases identify them, not `held`: a claim in progress may have
        been committed."""
        self.held.clear()
        try:
            self._manifest.reserve_job_id()  # a separate commit: every batch submitted before it is decided when it returns
            running = self._manifest.jobs.jobs(JobState.IN_FLIGHT)
            ours = [job for job in running if job.lease is not None and job.lease.worker == self._holder]
            batches = ((job, [RequeueJob(job.job_id, job.record.attempt, 0, deferred=True)]) for job in ours)
            for job, error in self.commit(batches):
                if error is not None and not isinstance(error, (IllegalTransition, UnknownJob)):
                    emit("warning", "job.cannot_put_back", job_id=job.job_id, kind=self._kind.name, error=str(error))
        except QuireError as error:  # the caller must get the original exception; leases expire without our help
            emit("warning", "job.cannot_put_back", kind=self._kind.name, error=str(error))

    # ── releasing jobs ────────────────────────────────────────────────────────────────────────────────────────────────
    @contextmanager
    def confine_errors(self, held: H) -> Iterator[None]:
        """Confine a `QuireError` in the block to this database: its job fails, and no other."""
        try:
            yield
        except (StoreClosed, StoreUnusable):
            raise
        except QuireError as error:
            self.fail(held, error)

    def fail(self, held: H, error: QuireError) -> None:
        """End this attempt of a job (`fail_attempt`)."""
        if self.held.pop(held.db_id, None) is not None:
            fail_attempt(self._manifest, held.job, error)

    def fail_all(self, failures: Sequence[tuple[H, QuireError]]) -> None:
        """End these attempts, up to `FAILURES` concurrently."""
        if failures:
            with ThreadPoolExecutor(FAILURES, thread_name_prefix="quire-failures") as pool:
                for _ in pool.map(lambda failure: self.fail(*failure), failures):
                    pass

    def release_job(self, held: H, how: Callable[[Job], object]) -> None:
        """Release a job; `how` commits its next state."""
        if self.held.pop(held.db_id, None) is not None:
            try:
                how(held.job)
            except (IllegalTransition, UnknownJob):
                pass  # it was cancelled, or taken by another worker

    def commit(self, batches: Iterable[tuple[T, Sequence[Op]]]) -> Iterator[tuple[T, QuireError | None]]:
        """Commit batches, many concurrently: ten thousand databases share the manifest's group commits."""
        return commit_each(self._manifest, batches)
