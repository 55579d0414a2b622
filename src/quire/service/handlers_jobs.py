"""Handlers for remote workers and remote readers: the actions `start`, `jobs.…` and `reader.…`.

Rules
  1. A remote worker must not use a name of the owner's workers: its jobs would be taken back at once when another owner opens
     the store, while it is still running.
  2. A job that a client starts is run here, one at a time, unless a worker claims it first: it does not depend on upkeep.
  3. The page engine keeps the versions that readers of other processes hold (`pages/remote.py`).

Threads: any; one call is one thread.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from quire.core.decoding import UNDECODABLE
from quire.core.errors import InvalidInput, QuireError, UnknownReader
from quire.core.events import emit
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.jobs.enqueue import start
from quire.manifest.jobqueue import OWNER_PREFIX, Job
from quire.manifest.ops.jobs import CompleteJob, EnqueueJob, RequeueJob, StartJob
from quire.manifest.ops.local import PutReader
from quire.manifest.records import JobKind, JobState
from quire.pages.remote import RemoteReader
from quire.service import messages as m
from quire.service.api import CallContext, StoreApi
from quire.service.idempotency import run_once


class JobHandlers:
    """Handlers for the jobs and readers of one store."""

    def __init__(self, store: StoreApi) -> None:
        self._store = store
        self._manifest = store.manifest
        # guarded by _lock
        self._lock = threading.Lock()
        self._runner: ThreadPoolExecutor | None = None
        self._closed = False

    def close(self) -> None:
        """Start no more jobs; a running one is stopped by the worker."""
        with self._lock:
            self._closed = True
            runner, self._runner = self._runner, None
        if runner is not None:
            runner.shutdown(wait=False, cancel_futures=True)

    # ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    def do_start(self, request: m.RunJob, call: CallContext) -> m.Started:
        """Enqueue a checkpoint or merge, and run it here unless a worker claims it first."""
        jobs, store = self._manifest.jobs, self._store
        if request.kind not in (JobKind.CHECKPOINT, JobKind.MERGE):
            raise InvalidInput(
                "only a checkpoint or a merge can be started directly",
                hint="enqueue the job instead",
                kind=request.kind.name,
            )

        def do() -> int:
            return start(store.context, request.kind, store.database(request.name).db_id)

        job_id = run_once(self._manifest, call.key, "start", (EnqueueJob,), _job_id, do, _same)
        record = jobs.get(job_id).record
        with self._lock:
            if not self._closed:  # otherwise it stays in the queue
                if self._runner is None:
                    self._runner = ThreadPoolExecutor(1, thread_name_prefix="quire-service-job")
                self._runner.submit(copy_context().run, self._run, job_id)  # the job belongs to the caller's trace
        return m.Started(job_id, record.attempt + (record.state is JobState.PENDING))

    def _run(self, job_id: int) -> None:
        try:
            self._store.worker.run(job_id)
        except QuireError as error:  # the store closes: the job is still in the queue
            emit("debug", "service.job_stopped", job_id=job_id, error=str(error))

    def do_jobs_list(self, request: m.ListJobs, _: CallContext) -> list[Job]:
        return self._manifest.jobs.jobs(request.state)

    def do_jobs_get(self, request: m.OfJob, _: CallContext) -> Job:
        return self._manifest.jobs.get(request.job_id)

    def do_jobs_outstanding(self, request: m.Outstanding, _: CallContext) -> int:
        return self._manifest.jobs.outstanding(request.db_id, request.kind)

    def do_jobs_enqueue(self, request: m.Enqueue, call: CallContext) -> int:
        artifact = None
        if request.artifact is not None:
            origin, kind, number, generation, delta = request.artifact
            artifact = ArtifactKey(origin, ArtifactKind(kind), number, generation, delta)

        def do() -> int:
            return self._manifest.jobs.enqueue(
                request.kind,
                request.db_id,
                _unpacked(request.payload),
                artifact=artifact,
                max_attempts=request.max_attempts,
                delay_seconds=request.delay_seconds,
                job_id=request.job_id,
            )

        return run_once(self._manifest, call.key, "jobs.enqueue", (EnqueueJob,), _job_id, do, _same)

    def do_jobs_claim(self, request: m.Claim, call: CallContext) -> Job | None:
        jobs, worker = self._manifest.jobs, _remote(request.worker)

        def do() -> Job | None:
            if request.job_id:
                return jobs.claim_job(request.job_id, worker, lease_seconds=request.lease_seconds)
            return jobs.claim(worker, request.kinds, lease_seconds=request.lease_seconds)

        def replay(job_id: int) -> Job | None:
            job = jobs.get(job_id)
            return job if job.lease is not None and job.lease.worker == worker else None

        return run_once(self._manifest, call.key, "jobs.claim", (StartJob,), _job_id, do, replay)

    def do_jobs_renew(self, request: m.RenewJob, _: CallContext) -> None:
        jobs = self._manifest.jobs
        jobs.renew(
            jobs.get(request.job_id),
            _remote(request.worker),
            done=request.done,
            total=request.total,
            lease_seconds=request.lease_seconds,
        )

    def do_jobs_complete(self, request: m.Complete, call: CallContext) -> None:
        def do() -> None:
            result = _unpacked(request.result)
            job = self._attempt(request.job_id, request.attempt)
            self._manifest.jobs.complete(job, result, ops=request.ops, after=request.after)

        run_once(self._manifest, call.key, "jobs.complete", (CompleteJob,), _nothing, do, _nothing)

    def do_jobs_fail(self, request: m.Fail, call: CallContext) -> JobState:
        def do() -> JobState:
            job = self._attempt(request.job_id, request.attempt)
            return self._manifest.jobs.fail(job, request.error, permanent=request.permanent)

        def kept_value_of(op: CompleteJob | RequeueJob) -> int:
            return int(op.state if isinstance(op, CompleteJob) else JobState.PENDING)

        return run_once(self._manifest, call.key, "jobs.fail", (CompleteJob, RequeueJob), kept_value_of, do, JobState)

    def do_jobs_defer(self, request: m.Defer, call: CallContext) -> None:
        def do() -> None:
            self._manifest.jobs.defer(self._attempt(request.job_id, request.attempt), request.until_ms)

        run_once(self._manifest, call.key, "jobs.defer", (RequeueJob,), _nothing, do, _nothing)

    def do_jobs_cancel(self, request: m.OfJob, call: CallContext) -> None:
        cancel = partial(self._manifest.jobs.cancel, request.job_id)
        run_once(self._manifest, call.key, "jobs.cancel", (CompleteJob,), _nothing, cancel, _nothing)

    def do_jobs_retry(self, request: m.OfJob, call: CallContext) -> int:
        retry = partial(self._manifest.jobs.retry, request.job_id)
        return run_once(self._manifest, call.key, "jobs.retry", (EnqueueJob,), _job_id, retry, _same)

    # ── readers ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def do_reader_open(self, request: m.OpenReader, call: CallContext) -> RemoteReader:
        def do() -> RemoteReader:
            return self._store.pages.lease_reader(request.db, request.tags, request.ttl_seconds)

        def kept_value_of(op: PutReader) -> tuple[int, int]:
            return op.db_id, op.reader_id

        def replay(ids: tuple[int, int]) -> RemoteReader:
            return self._store.pages.renew_reader(*ids)

        return run_once(self._manifest, call.key, "reader.open", (PutReader,), kept_value_of, do, replay)

    def do_reader_renew(self, request: m.OfReader, _: CallContext) -> RemoteReader:
        return self._store.pages.renew_reader(request.db_id, request.reader_id)

    def do_reader_read(self, request: m.ReadPages, _: CallContext) -> list[bytes]:
        if len(request.pages) > m.READ_PAGES_MAX:
            raise InvalidInput("too many pages for one call", pages=len(request.pages), max=m.READ_PAGES_MAX)
        snapshot = self._store.pages.read_leased(request.db_id, request.reader_id)
        images = snapshot.read_pages(request.pages)
        return [images[page] for page in request.pages]

    def do_reader_close(self, request: m.OfReader, _: CallContext) -> None:
        with suppress(UnknownReader):  # the answer to an earlier close was lost, say
            self._store.pages.close_reader(request.db_id, request.reader_id)

    def _attempt(self, job_id: int, attempt: int) -> Job:
        """Return the job with the worker's attempt: the manifest refuses an attempt that is not the running one."""
        job = self._manifest.jobs.get(job_id)
        return Job(job_id, replace(job.record, attempt=attempt), job.lease)


# ── values kept with keys ─────────────────────────────────────────────────────────────────────────────────────────────
def _job_id(op: EnqueueJob | StartJob) -> int:
    return op.job_id


def _nothing(_: Any) -> None:
    return None


def _same(job_id: int) -> int:
    return job_id


def _unpacked(packed: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(packed) if packed else None
    except UNDECODABLE as error:
        raise InvalidInput(f"a payload or result is not msgpack: {error}", bytes=len(packed)) from error


def _remote(worker: str) -> str:
    """Return the name of a remote worker; refuse one that could belong to the owner (rule 1)."""
    if not worker or worker.startswith(OWNER_PREFIX):
        raise InvalidInput("a remote worker needs a unique name", hint="use, for example, host and pid", worker=worker)
    return worker
