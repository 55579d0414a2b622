"""One job for each of many databases, worked on in one run: what is the same whatever the jobs do (K1).

A database fails alone: its job fails as it would by itself, and is no longer held. A job that was taken away is noticed when
something is committed for it (P10). A run that is interrupted puts its jobs back, unfailed.

Threads: one caller; leases are renewed by a thread of their own, and a run may let jobs go in several.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from quire.core.errors import IllegalTransition, QuireError, StoreClosed, StoreUnusable, UnknownJob
from quire.core.events import emit
from quire.jobs.handler import HOPELESS, commit_each
from quire.jobs.leases import LeasedJob, LeaseKeeper
from quire.manifest.jobqueue import LEASE_SECONDS, Job, worker_name
from quire.manifest.ops.base import Counter, Op
from quire.manifest.ops.jobs import EnsureJob, RequeueJob, StartJob
from quire.manifest.records import JobKind, JobState
from quire.manifest.store import ManifestStore

FAILURES = 16
"""Jobs that fail at once: each waits for its commit, so they share it."""

_runs = itertools.count(1)


H = TypeVar("H", bound=LeasedJob)
T = TypeVar("T")


class BatchRun(Generic[H]):
    """One run over the jobs of many databases.

    `held` (db_id → job) is changed by the caller's thread and, in some runs, by a few of its own, each of which takes out its
    own entry; the keeper of leases only reads it.
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
        """`payload` is what a new job of a database is asked to do."""
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
        """The outstanding job of each database, made if there was none."""
        jobs, job_ids = self._manifest.jobs, []

        def batch(db_id: int) -> list[Op]:
            record = jobs.record(self._kind, db_id, self._payload(db_id))
            return [EnsureJob(self._manifest.allocate(Counter.JOB), record)]

        for db_id, error in self.commit((db_id, batch(db_id)) for db_id in dict.fromkeys(db_ids)):
            if error is None:
                job_ids.append(jobs.outstanding(db_id, self._kind))
            else:
                emit("warning", "job.cannot_enqueue", db_id=db_id, kind=self._kind.name, error=str(error))
        return job_ids

    def claim(self, job_ids: Sequence[int]) -> list[int]:
        """Take those that nobody works on; which."""
        expires, taken = self.leases.expires_at_ms(), []
        batches = ((job_id, [StartJob(job_id, self._holder, expires)]) for job_id in job_ids if job_id)
        for job_id, error in self.commit(batches):
            if error is None:
                job = self._manifest.jobs.get(job_id)
                self.held[job.db_id] = leased = self._hold(job)
                leased.holder = self._holder
                taken.append(job_id)
        return taken

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Renew all leases from one thread while the run lasts; put jobs back if it is interrupted."""
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
        """Put the jobs we hold back, unfailed. Leases say which those are: what was under way may have been
        committed."""
        self.held.clear()
        try:
            self._manifest.reserve_job_id()  # a commit of its own: whatever was submitted before it is decided by then
            running = self._manifest.jobs.jobs(JobState.IN_FLIGHT)
            ours = [job for job in running if job.lease is not None and job.lease.worker == self._holder]
            batches = ((job, [RequeueJob(job.job_id, job.record.attempt, 0, deferred=True)]) for job in ours)
            for job, error in self.commit(batches):
                if error is not None and not isinstance(error, (IllegalTransition, UnknownJob)):
                    emit("warning", "job.cannot_put_back", job_id=job.job_id, kind=self._kind.name, error=str(error))
        except (
            QuireError
        ) as error:  # what has interrupted us is what the caller must hear; leases run out by themselves
            emit("warning", "job.cannot_put_back", kind=self._kind.name, error=str(error))

    # ── letting go ────────────────────────────────────────────────────────────────────────────────────────────────────
    @contextmanager
    def alone(self, held: H) -> Iterator[None]:
        """Contain a failure: it ends this database's job and no other."""
        try:
            yield
        except (StoreClosed, StoreUnusable):
            raise
        except QuireError as error:
            self.fail(held, error)

    def fail(self, held: H, error: QuireError) -> None:
        """End this attempt of a job: it is tried again, unless that is hopeless."""
        emit("warning", "job.attempt_failed", job_id=held.job.job_id, kind=self._kind.name, error=str(error))
        text, permanent = f"{type(error).__name__}: {error}", isinstance(error, HOPELESS)
        self.let_go(held, lambda job: self._manifest.jobs.fail(job, text, permanent=permanent))

    def fail_all(self, failures: Sequence[tuple[H, QuireError]]) -> None:
        """End these attempts, some at once."""
        if failures:
            with ThreadPoolExecutor(FAILURES, thread_name_prefix="quire-failures") as pool:
                for _ in pool.map(lambda failure: self.fail(*failure), failures):
                    pass

    def let_go(self, held: H, how: Callable[[Job], object]) -> None:
        """Hold a job no more; `how` says what becomes of it."""
        if self.held.pop(held.db_id, None) is not None:
            try:
                how(held.job)
            except (IllegalTransition, UnknownJob):
                pass  # it was cancelled, or taken from us

    def commit(self, batches: Iterable[tuple[T, Sequence[Op]]]) -> Iterator[tuple[T, QuireError | None]]:
        """Commit batches, many under way at once: ten thousand databases share the manifest's group commits."""
        return commit_each(self._manifest, batches)
