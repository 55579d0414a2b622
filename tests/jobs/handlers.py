"""Handlers and workers shared by the tests of the worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from quire.jobs.context import JobContext
from quire.jobs.handler import Completed, Handler, Outcome, Progress
from quire.jobs.worker import Worker
from quire.manifest.jobqueue import ATTEMPTS, LEASE_SECONDS, Job
from quire.manifest.records import JobKind, JobState
from tests.jobs.job_store import JobStore

KIND = JobKind.SWEEP


def worker_with(
    job_store: JobStore, handler: Handler, *, threads: int = 1, lease_seconds: float = LEASE_SECONDS
) -> Worker:
    return Worker(job_store.ctx, {KIND: handler}, threads=threads, lease_seconds=lease_seconds)


def complete_at_once(_ctx: JobContext, _job: Job, _progress: Progress) -> Outcome:
    """A handler that does nothing."""
    return Completed()


@contextmanager
def running(worker: Worker) -> Iterator[Worker]:
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


def enqueue(job_store: JobStore, *, max_attempts: int = ATTEMPTS) -> int:
    return job_store.manifest.jobs.enqueue(KIND, max_attempts=max_attempts)


def state(job_store: JobStore, job_id: int) -> JobState:
    return job_store.job(job_id).state


class BlockingHandler:
    """A handler that reports progress in steps until `end` is set."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.end = threading.Event()
        self.steps = 0
        self.interrupted = threading.Event()

    def __call__(self, ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        self.begun.set()
        while not self.end.is_set():
            self.steps += 1
            try:
                progress(self.steps, 1_000)
            except Exception:
                self.interrupted.set()
                raise
            time.sleep(0.002)
        return Completed({"steps": self.steps})
