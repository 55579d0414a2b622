"""The worker: takes jobs from the queue and runs their handlers in threads.

Terms
  slot      one thread of the worker; it works on one job at a time
  holder    the name in a lease: the worker's name, and a number that is unique among the claims of this process

A lost lease (the job was cancelled, or given to another worker or another slot of this one) interrupts the handler at its next
step; the steps already taken stand, because every step can be repeated. Stopping the worker interrupts handlers in the same way
and requeues their jobs without a failure; leases are renewed until the last handler has ended. An exception from a handler ends
its attempt, never the worker. A job without a limit on attempts is retried until it succeeds.

Threads: any.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from quire.core.barrier import changes
from quire.core.errors import (
    IllegalTransition,
    InvalidInput,
    StillReferenced,
    StoreClosed,
    StoreUnusable,
    UnknownJob,
)
from quire.core.events import emit
from quire.core.tracing import span
from quire.durable.failpoints import hit
from quire.jobs.context import JobContext
from quire.jobs.handler import Completed, Handler, Interrupted, Progress, fail_attempt
from quire.jobs.leases import LeasedJob, LeaseKeeper
from quire.jobs.row_groups import MonotonicProgress
from quire.manifest.jobqueue import LEASE_SECONDS, Job, worker_name
from quire.manifest.ops.base import Counter
from quire.manifest.ops.jobs import EnqueueJob, StartJob
from quire.manifest.records import JobKind, JobState

POLL_SECONDS = 1.0
"""How often an idle worker polls for jobs that arrive without a notification: enqueued elsewhere, or deferred and now due."""

LOOK_SECONDS = 0.1
"""Time between two checks of a job that another worker runs."""

COMPLETIONS_MAX = 16
"""How often, in one attempt, a job that is about to complete may find that more work has come in."""

_claims = itertools.count(1)


@dataclass(slots=True, eq=False)
class _Running(LeasedJob):
    """A job that a slot works on."""

    stopping: threading.Event = field(default_factory=threading.Event)
    handler: Handler | None = None
    """A handler to run instead of the registered one."""
    watch: MonotonicProgress | None = None
    """A further callback for progress."""
    error: Exception | None = None
    """The exception that ended the attempt."""

    def progress(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        if self.lost or self.stopping.is_set():
            raise Interrupted
        if self.watch is not None:
            self.watch(done, total)


class Worker:
    """Runs jobs of one store."""

    def __init__(
        self,
        ctx: JobContext,
        handlers: Mapping[JobKind, Handler],
        *,
        threads: int = 1,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        if threads < 0 or lease_seconds <= 0:
            raise InvalidInput(
                "threads must not be negative, and the lease must be longer than 0 s",
                threads=threads,
                lease=lease_seconds,
            )
        # constant after construction
        self._ctx = ctx
        self._handlers = dict(handlers)
        self.name = worker_name("worker")
        self._slots = threads
        self._lease_seconds = lease_seconds
        # guarded by _lock
        self._lock = threading.Lock()
        self._running: set[_Running] = set()
        self._stopping = threading.Event()
        """The stop event since the last start. The next start has a new one, so that a slot stuck before it stays stopped."""
        self._threads: list[threading.Thread] = []
        self._keeper: LeaseKeeper | None = None
        ctx.manifest.cover(self)

    # ── lifecycle ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def start(self) -> None:
        """Start the slots and the renewal of leases, as far as they are not running: a call that could not start a thread can
        be repeated."""
        with self._lock:
            if self._keeper is None:
                self._stopping = _unset(self._stopping)
                keeper = self._new_keeper()
                keeper.start()
                self._keeper = keeper  # after start(), like the slots: `stop` can only join a thread that was started
            for number in range(len(self._threads), self._slots):
                thread = threading.Thread(
                    target=self._serve, args=(self._stopping,), name=f"quire-worker-slot-{number}", daemon=True
                )
                thread.start()
                self._threads.append(thread)

    def stop(self, timeout: float = 30.0) -> None:
        """Interrupt handlers at their next step, requeue their jobs, and end the threads. Also ends a `drain`."""
        with self._lock:
            self._stopping.set()
            threads, keeper = self._threads, self._keeper
            self._threads, self._keeper = [], None
        # Wakes idle slots, which would otherwise notice the end only after `POLL_SECONDS`.
        self._ctx.manifest.jobs.work_available.set()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))
        stuck = [thread.name for thread in threads if thread.is_alive()]
        if stuck:
            emit("warning", "worker.slow_stop", threads=stuck, hint="their leases expire on their own")
        # After the slots: a handler in a long step keeps its lease until it ends, so that no other worker runs the
        # job beside it.
        if keeper is not None:
            keeper.stop()

    def drain(self) -> int:
        """Run jobs in this thread until none is due; return how many were taken."""
        taken = 0
        with self._alive() as stopping:
            while not stopping.is_set() and self._take_one(stopping):
                taken += 1
        return taken

    @changes
    def run(self, job_id: int) -> bool:
        """Run one job in this thread, unless another worker has it; return whether it was run."""
        holder = self._next_holder()
        job = self._ctx.manifest.jobs.claim_job(job_id, holder, lease_seconds=self._lease_seconds)
        if job is None:
            return False
        with self._alive() as stopping:
            self._run_leased(_Running(job, holder, stopping=stopping))
        return True

    @changes
    def run_or_wait(self, job_id: int) -> Job:
        """Run one job in this thread or, if another worker has it, wait for the end of that attempt; return the job."""
        jobs = self._ctx.manifest.jobs
        if not self.run(job_id):
            while jobs.get(job_id).state is JobState.IN_FLIGHT:
                # Not left to maintenance, which may be off: the worker may be dead, and this wait would never end.
                if jobs.expire() and self.run(job_id):
                    break
                time.sleep(LOOK_SECONDS)
        return jobs.get(job_id)

    @changes
    def run_new(
        self,
        kind: JobKind,
        db_id: int = 0,
        payload: Any = None,
        *,
        handler: Handler | None = None,
        watch: Progress | None = None,
        reraise: bool = False,
    ) -> Job:
        """Enqueue a job, run it in this thread, and return it as the attempt left it.

        `handler` replaces the registered handler, and `watch` also receives the progress. With `reraise`, a failed attempt is
        the last one: the job is cancelled, unless another worker has taken it, and its error is raised here.
        """
        manifest, holder = self._ctx.manifest, self._next_holder()
        job_id = manifest.allocate(Counter.JOB)
        expires = manifest.clock.now_ms() + int(self._lease_seconds * 1000)
        # One batch: a slot that took the job in between would not run this call's handler, nor report to its caller.
        new = EnqueueJob(job_id, manifest.jobs.record(kind, db_id, payload))
        manifest.submit([new, StartJob(job_id, holder, expires)]).result()
        job = manifest.jobs.get(job_id)
        with self._alive() as stopping:
            running = _Running(
                job, holder, stopping=stopping, handler=handler, watch=watch and MonotonicProgress(watch)
            )
            self._run_leased(running)
        if reraise and running.error is not None:
            # Another worker that has taken the job meanwhile has begun the next attempt, which goes on.
            with suppress(IllegalTransition, UnknownJob):  # it has already failed permanently, or was cancelled
                if manifest.jobs.get(job_id).record.attempt == job.record.attempt:
                    manifest.jobs.cancel(job_id, f"{type(running.error).__name__}: {running.error}")
            raise running.error
        return manifest.jobs.get(job_id)

    def _next_holder(self) -> str:
        # A name per claim, not per worker: renewals and `commit_step` compare it, so a slot that has lost its job
        # cannot act for another slot of this worker that has the job now.
        return f"{self.name}:{next(_claims)}"

    @contextmanager
    def _alive(self) -> Iterator[threading.Event]:
        """Renew leases during a call from outside, if the worker is not started; yield the event that `stop` sets."""
        with self._lock:
            stopping = self._stopping = _unset(self._stopping)
            keeper = self._new_keeper() if self._keeper is None else None
        if keeper is not None:
            keeper.start()
        try:
            yield stopping
        finally:
            if keeper is not None:
                keeper.stop()

    # ── the slots ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _serve(self, stopping: threading.Event) -> None:
        work_available = self._ctx.manifest.jobs.work_available
        while not stopping.is_set():
            try:
                if not self._take_one(stopping):
                    work_available.wait(POLL_SECONDS)
                    # Cleared before the next look at the queue: a job that arrives from here on either is found by
                    # that look or sets the event again.
                    work_available.clear()
            except (StoreClosed, StoreUnusable):
                return
            except Exception as error:  # a slot that ended silently would be worse than any failure of its jobs
                emit("warning", "worker.cannot_take", error=error)
                stopping.wait(POLL_SECONDS)

    def _take_one(self, stopping: threading.Event) -> bool:
        holder = self._next_holder()
        job = self._ctx.manifest.jobs.claim(holder, self._handlers.keys(), lease_seconds=self._lease_seconds)
        if job is None:
            return False
        self._run_leased(_Running(job, holder, stopping=stopping))
        return True

    def _run_leased(self, running: _Running) -> None:
        """Work on a job while its lease is renewed."""
        lease = running.job.lease
        if lease is None or lease.worker != running.holder:
            return  # the lease was taken away before the job was read
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
            running.error = IllegalTransition(
                "the job was interrupted: it was cancelled or taken by another worker, or this worker was stopped",
                hint=f"`quire jobs show {job.job_id}` shows its state",
                job_id=job.job_id,
            )
            if not running.lost:
                self._put_back(job)
        except (KeyboardInterrupt, SystemExit):  # the user ends a `drain`: the job has not failed
            self._put_back(job)
            raise
        except (StoreClosed, StoreUnusable):
            # Nothing can be recorded about this attempt. The job is requeued when its lease expires, or by the next
            # owner's `recover`.
            raise
        except Exception as error:
            running.error = error
            fail_attempt(self._ctx.manifest, job, error)

    def _attempt(self, running: _Running) -> None:
        jobs, job = self._ctx.manifest.jobs, running.job
        for tries_left in reversed(range(COMPLETIONS_MAX)):
            handler = running.handler or self._handlers[job.kind]
            outcome = handler(self._ctx, job, running.progress)
            if running.watch is not None:
                running.watch.over()
            hit("jobs.worker.worked")
            if not isinstance(outcome, Completed):
                jobs.defer(job, outcome.until_ms)
                return
            try:
                jobs.complete(job, outcome.result, ops=outcome.ops, after=outcome.after)
                hit("jobs.worker.completed")
                outcome.log()
                return
            except StillReferenced:
                # More of the same work has come in since the handler looked (M8): this job does it too.
                if not tries_left:
                    raise

    def _put_back(self, job: Job) -> None:
        try:
            self._ctx.manifest.jobs.defer(job, 0)
        except (IllegalTransition, UnknownJob):
            pass  # it was cancelled in the meantime

    # ── leases ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _new_keeper(self) -> LeaseKeeper:
        return LeaseKeeper(self._ctx.manifest, self._held, self._lease_seconds, label="quire-worker-leases")

    def _held(self) -> list[_Running]:
        with self._lock:
            return list(self._running)


def _unset(stopping: threading.Event) -> threading.Event:
    return threading.Event() if stopping.is_set() else stopping
