"""A worker: takes jobs from the queue and runs their handlers in threads.

Terms
  slot      one thread of the worker; it works on one job at a time
  heart     the thread that renews the leases of what the slots are working on
  holder    the name a lease carries: the worker's, and a number that no other claim of this process has

Rules
  1. A job that is running is leased; the heart renews at a third of the lease, or when progress has moved, at most once a
     second (M10: not every sign of life is a commit).
  2. A lost lease (the job was cancelled, or given to somebody else, another slot of this worker included) interrupts the
     handler at its next step; what it has done so far stands, because every step may be repeated.
  3. Stopping interrupts handlers at their next step and puts their jobs back, unfailed; nothing is left leased. The heart beats
     until the last handler has ended.
  4. Whatever a handler raises ends its attempt, never the worker. A job without a limit of attempts is never given up.

Threads: `start`, `stop`, `drain` from any thread.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from quire.core.errors import (
    IllegalTransition,
    InvalidInput,
    QuireError,
    StillReferenced,
    StoreClosed,
    StoreUnusable,
    UnknownJob,
)
from quire.core.events import emit
from quire.core.tracing import span
from quire.durable.failpoints import hit
from quire.jobs.context import JobContext
from quire.jobs.handler import HOPELESS, Done, Handler, Interrupted
from quire.manifest.jobqueue import LEASE_SECONDS, Job, worker_name
from quire.manifest.records import JobKind

POLL_SECONDS = 1.0
"""How often an idle worker looks for jobs that nobody told it of: those enqueued elsewhere, and those whose time has come."""

PROGRESS_SECONDS = 1.0
"""Progress is written at most this often."""

COMPLETIONS_MAX = 16
"""How often in one attempt a job that is about to succeed may find that more work has come in."""

_claims = itertools.count(1)


@dataclass(slots=True, eq=False)
class _Running:
    """A job in the hands of a slot. `done`, `total` by the slot, the rest by the heart."""

    job: Job
    holder: str
    stopping: threading.Event
    done: int = 0
    total: int = 0
    lost: bool = False
    renewed_at: float = field(default_factory=time.monotonic)
    written: tuple[int, int] = (0, 0)

    def progress(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        if self.lost or self.stopping.is_set():
            raise Interrupted


class Worker:
    """Runs jobs of one store."""

    def __init__(
        self,
        ctx: JobContext,
        handlers: Mapping[JobKind, Handler],
        *,
        name: str = "",
        threads: int = 1,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        if threads < 0 or lease_seconds <= 0:
            raise InvalidInput("a worker has some threads and leases some time", threads=threads, lease=lease_seconds)
        # constant after construction
        self._ctx = ctx
        self._handlers = dict(handlers)
        self.name = name or worker_name("worker")
        self._slots = threads
        self._lease_seconds = lease_seconds
        # guarded by _lock
        self._lock = threading.Lock()
        self._running: set[_Running] = set()
        self._stopping = threading.Event()
        """Of the present life; the next one has its own, so that a slot stuck in an earlier life stays stopped."""
        self._threads: list[threading.Thread] = []
        self._heart: _Heart | None = None

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    def start(self) -> None:
        """Work in the background from now on."""
        with self._lock:
            if self._heart is not None:
                return
            self._stopping = _unset(self._stopping)
            self._heart = _Heart(self)
            self._threads = [
                threading.Thread(
                    target=self._serve, args=(self._stopping,), name=f"quire-worker-slot-{number}", daemon=True
                )
                for number in range(self._slots)
            ]
        self._heart.start()
        for thread in self._threads:
            thread.start()

    def stop(self, timeout: float = 30.0) -> None:
        """Interrupt handlers at their next step, put their jobs back, and end (rule 3). Also ends a `drain`."""
        with self._lock:
            self._stopping.set()
            threads, heart = self._threads, self._heart
            self._threads, self._heart = [], None
        self._ctx.manifest.jobs.news.set()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))
        stuck = [thread.name for thread in threads if thread.is_alive()]
        if stuck:
            emit("warning", "worker.slow_stop", threads=stuck, hint="their leases run out by themselves")
        if heart is not None:
            heart.stop()

    def drain(self) -> int:
        """Run jobs in this thread until none is due; how many were taken."""
        taken = 0
        with self._alive() as stopping:
            while not stopping.is_set() and self._take_one(stopping):
                taken += 1
        return taken

    def run(self, job_id: int) -> bool:
        """Run one job in this thread, unless somebody else has it; whether it was run."""
        holder = f"{self.name}:{next(_claims)}"
        job = self._ctx.manifest.jobs.claim_job(job_id, holder, lease_seconds=self._lease_seconds)
        if job is None:
            return False
        with self._alive() as stopping:
            self._hold(job, holder, stopping)
        return True

    @contextmanager
    def _alive(self) -> Iterator[threading.Event]:
        """A heart for the time of a call from outside, if the worker was not started; gives what says when to stop."""
        with self._lock:
            stopping = self._stopping = _unset(self._stopping)
            heart = _Heart(self) if self._heart is None else None
        if heart is not None:
            heart.start()
        try:
            yield stopping
        finally:
            if heart is not None:
                heart.stop()

    # ── the slots ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _serve(self, stopping: threading.Event) -> None:
        news = self._ctx.manifest.jobs.news
        while not stopping.is_set():
            try:
                if not self._take_one(stopping):
                    news.wait(POLL_SECONDS)
                    news.clear()
            except (StoreClosed, StoreUnusable):
                return
            except Exception as error:  # a slot that dies in silence would be worse than any of its jobs (rule 4)
                emit("warning", "worker.cannot_take", error=f"{type(error).__name__}: {error}")
                stopping.wait(POLL_SECONDS)

    def _take_one(self, stopping: threading.Event) -> bool:
        holder = f"{self.name}:{next(_claims)}"
        job = self._ctx.manifest.jobs.claim(holder, self._handlers.keys(), lease_seconds=self._lease_seconds)
        if job is None:
            return False
        self._hold(job, holder, stopping)
        return True

    def _hold(self, job: Job, holder: str, stopping: threading.Event) -> None:
        """Work on a job that is leased to us, under the heart's eye."""
        if job.lease is None or job.lease.worker != holder:
            return  # it was taken from us before we could look at it
        running = _Running(job, holder, stopping)
        with self._lock:
            self._running.add(running)
        try:
            self._work(running)
        finally:
            with self._lock:
                self._running.discard(running)

    def _work(self, running: _Running) -> None:
        job = running.job
        try:
            hit("jobs.worker.claimed")
            with span("Job.run", job_id=job.job_id, kind=job.kind.name.lower(), db_id=job.db_id):
                self._attempt(running)
        except Interrupted:
            if not running.lost:
                self._put_back(job)
        except (KeyboardInterrupt, SystemExit):  # somebody ends a `drain`: the job has not failed
            self._put_back(job)
            raise
        except (StoreClosed, StoreUnusable):
            raise
        except Exception as error:
            self._fail(job, error)

    def _attempt(self, running: _Running) -> None:
        jobs, job = self._ctx.manifest.jobs, running.job
        for tries_left in reversed(range(COMPLETIONS_MAX)):
            outcome = self._handlers[job.kind](self._ctx, job, running.progress)
            hit("jobs.worker.worked")
            if not isinstance(outcome, Done):
                jobs.defer(job, outcome.until_ms)
                return
            try:
                jobs.complete(job, outcome.result, ops=outcome.ops, after=outcome.after)
                hit("jobs.worker.completed")
                outcome.log()
                return
            except StillReferenced:
                # More of the same work has come in since the handler looked (M8): it is this job's too.
                if not tries_left:
                    raise

    def _put_back(self, job: Job) -> None:
        try:
            self._ctx.manifest.jobs.defer(job, 0)
        except (IllegalTransition, UnknownJob):
            pass  # it was cancelled meanwhile

    def _fail(self, job: Job, error: Exception) -> None:
        emit("warning", "job.attempt_failed", job_id=job.job_id, kind=job.kind.name, error=str(error))
        permanent = isinstance(error, HOPELESS) and job.record.max_attempts > 0
        try:
            self._ctx.manifest.jobs.fail(job, f"{type(error).__name__}: {error}", permanent=permanent)
        except (IllegalTransition, UnknownJob):
            pass  # its lease ran out, or it was cancelled: somebody else has decided

    # ── the heart ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def beat_seconds(self) -> float:
        """How often the heart looks."""
        return min(self._lease_seconds / 6, PROGRESS_SECONDS)

    def beat(self) -> None:
        """Renew what must be renewed (rule 1)."""
        with self._lock:
            running = list(self._running)
        for each in running:
            now, reached = time.monotonic(), (each.done, each.total)
            waited = now - each.renewed_at
            if each.lost or not (
                waited >= self._lease_seconds / 3 or (waited >= PROGRESS_SECONDS and reached != each.written)
            ):
                continue
            try:
                self._ctx.manifest.jobs.renew(
                    each.job, each.holder, done=reached[0], total=reached[1], lease_seconds=self._lease_seconds
                )
                each.renewed_at, each.written = now, reached
            except (IllegalTransition, UnknownJob):
                each.lost = True
                emit("warning", "job.lease_taken", job_id=each.job.job_id, worker=each.holder)
            except QuireError as error:
                emit("warning", "worker.cannot_renew", job_id=each.job.job_id, error=str(error))


def _unset(stopping: threading.Event) -> threading.Event:
    return threading.Event() if stopping.is_set() else stopping


class _Heart:
    """Beats until it is stopped."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-worker-heart", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._worker.beat_seconds):
            try:
                self._worker.beat()
            except Exception as error:  # without a heart every lease would be lost
                emit("error", "worker.beat_failed", error=f"{type(error).__name__}: {error}")
