"""The durable job queue: work that survives crashes, done by the worker that holds its lease.

Terms
  worker    takes jobs, by name; workers of the owner's own process have its prefix and end with it
  lease     a worker's claim on a job until a given time; renewed while it works
  attempt   one start of a job; it has a number, and only the running attempt can end or requeue the job
  token     16 bytes that make enqueuing safe to repeat: the same token gives the same job

An expired lease is a failed attempt: the job becomes pending again, or has failed permanently; exactly once, because
the requeueing operation names the attempt. A job ends in one transaction with its effects: `complete(job, ops=…)`.

Threads: any. Raises `JobAlreadyPending` (names the job that holds the gate), `UnknownJob`, `IllegalTransition` (the
lease was lost: stop working on it).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from quire.core.barrier import changes
from quire.core.errors import IllegalTransition, InvalidInput, UnknownJob
from quire.core.events import emit
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.manifest import tables as t
from quire.manifest.ops.artifacts import UpdateArtifact
from quire.manifest.ops.base import Counter, Op, ReserveIds
from quire.manifest.ops.jobs import CompleteJob, EnqueueJob, EnsureJob, ForgetJob, RenewJobLease, RequeueJob, StartJob
from quire.manifest.records import (
    EXCLUSIVE_JOBS,
    TERMINAL_JOB_STATES,
    JobKind,
    JobLeaseRecord,
    JobRecord,
    JobState,
)

if TYPE_CHECKING:
    from quire.manifest.guard import ManifestGuard
    from quire.manifest.reads import ReadTxn
    from quire.manifest.store import ManifestStore

LEASE_SECONDS = 30.0
"""How long a worker may go without renewing its lease, in seconds (M10)."""

BACKOFF_SECONDS = 1.0
BACKOFF_SECONDS_MAX = 300.0
"""The wait after a failure doubles from `BACKOFF_SECONDS` up to this."""

RESERVED_MAX = 65_536
"""Maximum number of reserved ids that are remembered."""

ATTEMPTS = 5
"""Number of failures after which a job has failed permanently; 0 for jobs that are retried forever."""

ERROR_CHARS_MAX = 2_000
"""How many characters of an error are stored with its job."""

OWNER_PREFIX = "owner:"
"""Prefix of the names of workers inside the owner's process, by which the next owner recognises that they are gone."""

DUE_JOBS = 16
"""Number of due jobs that a worker reads before it tries to take one."""


class Job(msgspec.Struct, frozen=True):
    """A job, and its lease while a worker holds it."""

    job_id: int
    record: JobRecord
    lease: JobLeaseRecord | None = None

    @property
    def kind(self) -> JobKind:
        return self.record.kind

    @property
    def state(self) -> JobState:
        return self.record.state

    @property
    def db_id(self) -> int:
        return self.record.db_id

    @property
    def payload(self) -> Any:
        """The value that was passed to `enqueue`."""
        return msgspec.msgpack.decode(self.record.payload) if self.record.payload else None

    @property
    def result(self) -> Any:
        """The value that the job returned."""
        return msgspec.msgpack.decode(self.record.result) if self.record.result else None


class JobQueue:
    """The jobs of one manifest: `manifest.jobs`."""

    def __init__(self, manifest: ManifestStore) -> None:
        self._manifest = manifest
        self.work_available = threading.Event()
        """Set when a job was enqueued in this process, so that its workers need not wait for their next poll."""
        self._reserved: dict[int, None] = {}
        """Ids from `reserve` that no job has yet, oldest first; other processes do not have them."""

    # ── enqueuing ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def reserve(self) -> int:
        """Reserve an id for a job that this process will enqueue; no other job ever gets it (M5)."""
        job_id = self._manifest.allocate(Counter.JOB)
        self._manifest.submit([ReserveIds(Counter.JOB, job_id)]).result()
        self._reserved[job_id] = None
        while len(self._reserved) > RESERVED_MAX:
            self._reserved.pop(next(iter(self._reserved)))
        return job_id

    def _take(self, job_id: int) -> int:
        """Return the id for a new job: a reserved id, which is used up, or the next one."""
        if not job_id:
            return self._manifest.allocate(Counter.JOB)
        if job_id not in self._reserved:
            hint = "get one from reserve_job_id(); it can be used once, until the store is closed"
            raise InvalidInput("this job id was not reserved", hint=hint, job_id=job_id)
        del self._reserved[job_id]
        return job_id

    def keep_until(self, artifact: ArtifactKey, until_ms: int) -> ManifestGuard:
        """Keep a chunk's or delta's bytes until this time, even if nothing refers to it; 0 lifts that."""
        if artifact.kind not in (ArtifactKind.BASE, ArtifactKind.DELTA):
            raise InvalidInput("only chunks and deltas can be kept until a time", artifact=artifact)
        where = (artifact.origin_db_id, artifact.kind, artifact.id, artifact.generation, artifact.delta_id)
        return self._manifest.submit([UpdateArtifact(*where, purge_after_ms=until_ms)])

    @changes
    def enqueue(
        self,
        kind: JobKind,
        db_id: int = 0,
        payload: Any = None,
        *,
        artifact: ArtifactKey | None = None,
        token: bytes = b"",
        max_attempts: int = ATTEMPTS,
        delay_seconds: float = 0,
        ops: Iterable[Op] = (),
        job_id: int = 0,
    ) -> int:
        """Enqueue a job, in one batch with `ops`; return its id. With a `token`, repeating the call returns the first
        job's id.

        `job_id` is an id from `reserve`, for work that must know its job before it is enqueued.
        """
        if token and len(token) != 16:
            raise InvalidInput("a job's token must be 16 bytes", hint="use uuid4().bytes", bytes=len(token))
        record = self.record(kind, db_id, payload, artifact=artifact, token=token, max_attempts=max_attempts)
        if delay_seconds:
            record = msgspec.structs.replace(record, not_before_ms=record.created_at_ms + int(delay_seconds * 1000))
        job_id = self._take(job_id)
        batch = [*ops, EnqueueJob(job_id, record)]
        if not token:
            self._manifest.submit(batch).result()
            # After the commit: a worker that is woken earlier finds nothing, and sleeps until its next poll.
            self.work_available.set()
            return job_id
        receipt = self._manifest.submit(batch, key=token, result=job_id.to_bytes(8, "big")).result()
        self.work_available.set()
        return int.from_bytes(receipt.result, "big")

    def record(
        self,
        kind: JobKind,
        db_id: int,
        payload: Any = None,
        *,
        artifact: ArtifactKey | None = None,
        token: bytes = b"",
        max_attempts: int = ATTEMPTS,
    ) -> JobRecord:
        """Return the record of a job to enqueue, for batches that are built elsewhere."""
        held = (
            (artifact.origin_db_id, artifact.kind, artifact.id, artifact.generation, artifact.delta_id)
            if artifact
            else None
        )
        return JobRecord(
            kind,
            db_id,
            self._manifest.clock.now_ms(),
            payload=b"" if payload is None else msgspec.msgpack.encode(payload),
            max_attempts=max_attempts,
            token=token,
            artifact=held,
        )

    def deletions(self, origins: Iterable[int]) -> list[Op]:
        """Return the operations that end every batch that lowers counts: they have artifacts at zero deleted (M8).

        Artifacts are deleted by the job of the database that made them, which need not be the one that released them.
        """
        return [
            EnsureJob(self._manifest.allocate(Counter.JOB), self.record(JobKind.DELETE, origin, max_attempts=0))
            for origin in sorted(set(origins))
        ]

    def ensure_deletions(self, origins: Iterable[int]) -> int:
        """Enqueue the delete jobs that these databases need and do not have; return how many."""
        origins = [origin for origin in origins if not self.outstanding(origin, JobKind.DELETE)]
        if origins:
            self._manifest.submit(self.deletions(origins)).result()
            self.work_available.set()
        return sum(self.outstanding(origin, JobKind.DELETE) > 0 for origin in origins)

    # ── working ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def claim(
        self, worker: str, kinds: Collection[JobKind] | None = None, *, lease_seconds: float = LEASE_SECONDS
    ) -> Job | None:
        """Lease the oldest due job to `worker` and return it; `None` if there is none."""
        while due := self._due(kinds):
            for job in due:
                if (claimed := self.claim_job(job.job_id, worker, lease_seconds=lease_seconds)) is not None:
                    return claimed
                # Another worker's operation was applied first: try the next job.
        return None

    def claim_job(self, job_id: int, worker: str, *, lease_seconds: float = LEASE_SECONDS) -> Job | None:
        """Lease this job to `worker` and return it; `None` if it is not pending."""
        expires = self._manifest.clock.now_ms() + int(lease_seconds * 1000)
        try:
            self._manifest.submit([StartJob(job_id, worker, expires)]).result()
            return self.get(job_id)
        except (IllegalTransition, UnknownJob):
            return None

    def _due(self, kinds: Collection[JobKind] | None) -> list[Job]:
        """Return the oldest due jobs: several, because other workers may take some of them meanwhile."""
        now, due = self._manifest.clock.now_ms(), []
        with self._manifest.read() as txn:
            for (_, job_id), _ in txn.scan(t.JOBS_BY_STATE, JobState.PENDING):
                record = txn.job(job_id)
                if record and record.not_before_ms <= now and (kinds is None or record.kind in kinds):
                    due.append(Job(job_id, record))
                    if len(due) >= DUE_JOBS:
                        break
        return due

    def renew(
        self, job: Job, worker: str, *, done: int = 0, total: int = 0, lease_seconds: float = LEASE_SECONDS
    ) -> None:
        """Renew the lease and record progress. Raises `IllegalTransition` if the worker no longer holds the job."""
        expires = self._manifest.clock.now_ms() + int(lease_seconds * 1000)
        self._manifest.submit([RenewJobLease(job.job_id, worker, expires, done, total)]).result()

    @changes
    def complete(self, job: Job, result: Any = None, *, ops: Iterable[Op] = (), after: Iterable[Op] = ()) -> None:
        """End a successful attempt, in one batch with its effects; `after` are operations that need the gate to be open."""
        packed = b"" if result is None else msgspec.msgpack.encode(result)
        done = CompleteJob(job.job_id, JobState.SUCCEEDED, job.record.attempt, result=packed)
        # `ops` first: publishing a plan requires that the attempt is still running (P10).
        self._manifest.submit([*ops, done, *after]).result()

    @changes
    def fail(self, job: Job, error: str, *, permanent: bool = False) -> JobState:
        """End a failed attempt: the job waits for another one, or has failed permanently. Return its state."""
        record, text = job.record, error[:ERROR_CHARS_MAX]
        failures = record.failures + 1
        if permanent or (record.max_attempts and failures >= record.max_attempts):
            op: Op = CompleteJob(job.job_id, JobState.FAILED_PERMANENT, record.attempt, text)
            self._manifest.submit([op]).result()
            emit("error", "job.failed", job_id=job.job_id, kind=record.kind.name, error=text)
            return JobState.FAILED_PERMANENT
        # The exponent is bounded because delete jobs are retried forever: a thousand failures would overflow a float.
        wait = min(BACKOFF_SECONDS * 2 ** min(failures - 1, 20), BACKOFF_SECONDS_MAX)
        not_before = self._manifest.clock.now_ms() + int(wait * 1000)
        self._manifest.submit([RequeueJob(job.job_id, record.attempt, not_before, text)]).result()
        return JobState.PENDING

    @changes
    def defer(self, job: Job, until_ms: int) -> None:
        """Postpone a job for which it is too early; this is not a failure."""
        self._manifest.submit([RequeueJob(job.job_id, job.record.attempt, until_ms, deferred=True)]).result()

    # ── external control ──────────────────────────────────────────────────────────────────────────────────────────────
    @changes
    def cancel(self, job_id: int, error: str = "cancelled") -> None:
        """End a job that has not ended. Its worker finds out when it renews its lease."""
        self._manifest.submit([CompleteJob(job_id, JobState.CANCELLED, error=error[:ERROR_CHARS_MAX])]).result()

    @changes
    def retry(self, job_id: int) -> int:
        """Enqueue a failed or cancelled job again; return the new job's id. The old job keeps its final state."""
        job = self.get(job_id)
        if job.state not in (JobState.FAILED_PERMANENT, JobState.CANCELLED):
            raise IllegalTransition(
                "only a failed or cancelled job can be retried", job_id=job_id, state=job.state.name
            )
        old = job.record
        record = JobRecord(
            old.kind,
            old.db_id,
            self._manifest.clock.now_ms(),
            payload=old.payload,
            max_attempts=old.max_attempts,
            artifact=old.artifact,
        )
        again = self._manifest.allocate(Counter.JOB)
        self._manifest.submit([EnqueueJob(again, record)]).result()
        self.work_available.set()
        return again

    def expire(self) -> int:
        """Requeue or give up jobs whose lease has expired; return how many."""
        now = self._manifest.clock.now_ms()
        return self._take_back(lambda job: job.lease is None or job.lease.expires_at_ms <= now, "its lease expired")

    def recover(self) -> int:
        """Requeue, after opening, the jobs of workers in the former owner's process; return how many.

        That process is gone, because this one has its lock. Remote workers get one full lease to report (M10).
        """
        taken = self._take_back(
            lambda job: job.lease is None or job.lease.worker.startswith(OWNER_PREFIX), "its worker's process ended"
        )
        horizon = self._manifest.clock.now_ms() + int(LEASE_SECONDS * 1000)
        for job in self.jobs(JobState.IN_FLIGHT):
            if job.lease is not None and job.lease.expires_at_ms < horizon:
                try:
                    self.renew(job, job.lease.worker, done=job.lease.done, total=job.lease.total)
                except (IllegalTransition, UnknownJob):
                    pass  # the job ended meanwhile
        return taken

    def requeue_all(self) -> int:
        """Requeue, after a restore or a takeover, all jobs in flight; return how many.

        Their workers belong to another owner. No failure is counted: it is unknown how the attempts ended (A10).
        """
        in_flight, now = self.jobs(JobState.IN_FLIGHT), self._manifest.clock.now_ms()
        for job in in_flight:
            self.defer(job, now)
        return len(in_flight)

    def _take_back(self, is_lost: Any, why: str) -> int:
        taken = 0
        for job in self.jobs(JobState.IN_FLIGHT):
            if is_lost(job):
                try:
                    state = self.fail(job, why)
                except (IllegalTransition, UnknownJob):
                    continue  # the job ended meanwhile, or was already requeued
                taken += 1
                emit("warning", "job.lease_lost", job_id=job.job_id, kind=job.kind.name, state=state.name)
        return taken

    def forget(self, *, older_than_seconds: float, limit: int = 1_000) -> int:
        """Remove rows of jobs that ended long ago, at most `limit` in one batch; return how many."""
        horizon = self._manifest.clock.now_ms() - int(older_than_seconds * 1000)
        forgotten = 0
        for state in TERMINAL_JOB_STATES:
            while ops := self._ended_before(horizon, state, limit):
                self._manifest.submit(ops).result()
                forgotten += len(ops)
        return forgotten

    def _ended_before(self, horizon_ms: int, state: JobState, limit: int) -> list[ForgetJob]:
        with self._manifest.read() as txn:
            oldest = islice(_jobs(txn, state), limit)
            return [ForgetJob(job.job_id) for job in oldest if job.record.finished_at_ms < horizon_ms]

    # ── queries ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def get(self, job_id: int) -> Job:
        """Return a job by id."""
        with self._manifest.read() as txn:
            job = _job(txn, job_id)
        if job is None:
            raise UnknownJob("no job has this id", hint="`quire jobs ls` lists them", job_id=job_id)
        return job

    def jobs(self, state: JobState | None = None, *, db_id: int | None = None, newest: int = 0) -> list[Job]:
        """Return all jobs, or those in a state or of a database, oldest first; only the last `newest` of them, if that
        is not 0.

        The newest are read from the end of the queue.
        """
        with self._manifest.read() as txn:
            if not newest:
                return [job for job in _jobs(txn, state) if db_id in (None, job.db_id)]
            matching = (job for job in _jobs_back(txn, state) if db_id in (None, job.db_id))
            return list(islice(matching, newest))[::-1]

    def outstanding(self, db_id: int, kind: JobKind) -> int:
        """Return the outstanding job of an exclusive kind for a database; 0 if there is none."""
        assert kind in EXCLUSIVE_JOBS, "only exclusive kinds have a gate"
        with self._manifest.read() as txn:
            gate = txn.get(t.JOB_PENDING_INDEX, db_id, kind)
        return gate.value if gate else 0


def worker_name(role: str) -> str:
    """Return a name for a worker inside the owner's process."""
    return f"{OWNER_PREFIX}{os.getpid()}:{role}"


def _job(txn: ReadTxn, job_id: int) -> Job | None:
    record = txn.job(job_id)
    return None if record is None else Job(job_id, record, txn.get(t.JOB_LEASES, job_id))


def _jobs(txn: ReadTxn, state: JobState | None) -> Iterator[Job]:
    if state is None:
        for (job_id,), record in txn.scan(t.JOB_QUEUE):
            yield Job(job_id, record, txn.get(t.JOB_LEASES, job_id))
        return
    for (_, job_id), _ in txn.scan(t.JOBS_BY_STATE, state):
        if (job := _job(txn, job_id)) is not None:
            yield job


def _jobs_back(txn: ReadTxn, state: JobState | None) -> Iterator[Job]:
    table = t.JOB_QUEUE if state is None else t.JOBS_BY_STATE
    for key, _ in txn.raw_scan_back(table) if state is None else txn.raw_scan_back(table, state):
        if (job := _job(txn, table.key.unpack(key)[-1])) is not None:
            yield job
