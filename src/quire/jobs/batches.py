"""One job for each of many databases, worked on in one run: what is the same whatever the jobs do (K1).

Terms
  held     a job that this run has claimed, with what is known of it so far; the run ends when it holds none

Rules
  1. A database fails alone: its job fails as it would by itself, and is held no more. One that was dropped meanwhile is such.
  2. Commits are pipelined, so ten thousand databases share the manifest's group commits.
  3. All leases are renewed together, by one thread, as long as the run lasts. A job that was taken away is noticed when
     something is to be committed for it: that fails, and the job is somebody else's (P10).
  4. A run that is interrupted puts its jobs back, unfailed, those included that it was just claiming.

Threads: one caller; the heart has a thread of its own, and a run may let jobs go in several.
Raises what interrupts the caller.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from quire.core.errors import IllegalTransition, QuireError, StoreClosed, StoreUnusable, UnknownJob
from quire.core.events import emit
from quire.jobs.handler import HOPELESS
from quire.manifest.guard import ManifestGuard
from quire.manifest.jobqueue import LEASE_SECONDS, Job, worker_name
from quire.manifest.ops.base import Counter, Op
from quire.manifest.ops.jobs import EnsureJob, RenewJobLease, RequeueJob, StartJob
from quire.manifest.records import JobKind, JobState
from quire.manifest.store import ManifestStore

PIPELINE = 1_024
"""Batches that are under way at once."""

FAILURES = 16
"""Jobs that fail at once: each waits for its commit, so they share it."""

_runs = itertools.count(1)


@dataclass(slots=True, eq=False)
class HeldJob:
    """A job of a run."""

    job: Job

    @property
    def db_id(self) -> int:
        return self.job.db_id


H = TypeVar("H", bound=HeldJob)
T = TypeVar("T")


class Together(Generic[H]):
    """One run. `held` (db_id → job) is changed by the caller's thread, and where a run has some by a few of its own (each takes
    out its own entry, which is one step of a dict's); the heart only reads it."""

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
        self._lease_seconds = lease_seconds
        self._holder = f"{worker_name('many')}:{next(_runs)}"
        self._over = threading.Event()
        self.held: dict[int, H] = {}

    # ── holding jobs ──────────────────────────────────────────────────────────────────────────────────────────────────
    def enqueue(self, db_ids: Iterable[int]) -> list[int]:
        """The outstanding job of each database, made if there was none."""
        jobs, found = self._manifest.jobs, []

        def batch(db_id: int) -> list[Op]:
            record = jobs.record(self._kind, db_id, self._payload(db_id))
            return [EnsureJob(self._manifest.allocate(Counter.JOB), record)]

        for db_id, error in self.commit((db_id, batch(db_id)) for db_id in dict.fromkeys(db_ids)):
            if error is None:
                found.append(jobs.outstanding(db_id, self._kind))
            else:
                emit("warning", "job.cannot_enqueue", db_id=db_id, kind=self._kind.name, error=str(error))
        return found

    def claim(self, job_ids: Sequence[int]) -> list[int]:
        """Take those that nobody works on; which."""
        expires, taken = self.expires(), []
        batches = ((job_id, [StartJob(job_id, self._holder, expires)]) for job_id in job_ids if job_id)
        for job_id, error in self.commit(batches):
            if error is None:
                job = self._manifest.jobs.get(job_id)
                self.held[job.db_id] = self._hold(job)
                taken.append(job_id)
        return taken

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Renew all leases from one thread while the run lasts; put jobs back if it is interrupted (rules 3 and 4)."""
        heart = threading.Thread(target=self._beat, name="quire-many-heart", daemon=True)
        heart.start()
        try:
            yield
        except (StoreClosed, StoreUnusable):
            raise
        except BaseException:
            self._put_back()
            raise
        finally:
            self._over.set()
            heart.join()
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

    def _beat(self) -> None:
        while not self._over.wait(self._lease_seconds / 3):
            batches = ((each, [self.renewal(each)]) for each in list(self.held.values()))
            try:
                for each, error in self.commit(batches):
                    if isinstance(error, (IllegalTransition, UnknownJob)) and each.db_id in self.held:
                        emit("warning", "job.lease_taken", job_id=each.job.job_id, worker=self._holder)
            except QuireError as error:  # the next beat tries again
                emit("warning", "worker.cannot_renew", worker=self._holder, error=str(error))

    def renewal(self, held: H) -> RenewJobLease:
        """The operation that renews a job's lease, and fails its batch if the job is no longer ours."""
        return RenewJobLease(held.job.job_id, self._holder, self.expires(), 0, 0)

    def expires(self) -> int:
        """When a lease ends that is taken now."""
        return self._manifest.clock.now_ms() + int(self._lease_seconds * 1000)

    # ── letting go ────────────────────────────────────────────────────────────────────────────────────────────────────
    @contextmanager
    def alone(self, held: H) -> Iterator[None]:
        """Contain a failure: it ends this database's job and no other (rule 1)."""
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
                for _ in pool.map(lambda each: self.fail(*each), failures):
                    pass

    def let_go(self, held: H, how: Callable[[Job], object]) -> None:
        """Hold a job no more; `how` says what becomes of it."""
        if self.held.pop(held.db_id, None) is not None:
            try:
                how(held.job)
            except (IllegalTransition, UnknownJob):
                pass  # it was cancelled, or taken from us

    # ── committing ────────────────────────────────────────────────────────────────────────────────────────────────────
    def commit(self, batches: Iterable[tuple[T, Sequence[Op]]]) -> Iterator[tuple[T, QuireError | None]]:
        """Submit batches as they come, many under way at once; what became of each, in their order."""
        under_way: deque[tuple[T, ManifestGuard | QuireError]] = deque()
        for each, batch in batches:
            under_way.append((each, self._submit(batch)))
            while under_way and (len(under_way) >= PIPELINE or _is_decided(under_way[0][1])):
                yield _outcome(*under_way.popleft())
        while under_way:
            yield _outcome(*under_way.popleft())

    def _submit(self, batch: Sequence[Op]) -> ManifestGuard | QuireError:
        try:
            return self._manifest.submit(list(batch))
        except (StoreClosed, StoreUnusable):
            raise
        except QuireError as error:  # it is too large, say
            return error


def _is_decided(guard: ManifestGuard | QuireError) -> bool:
    return isinstance(guard, QuireError) or guard.done


def _outcome(each: T, guard: ManifestGuard | QuireError) -> tuple[T, QuireError | None]:
    if isinstance(guard, QuireError):
        return each, guard
    try:
        guard.result()
        return each, None
    except (StoreClosed, StoreUnusable):
        raise
    except QuireError as error:
        return each, error
