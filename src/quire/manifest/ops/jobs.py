"""Operations on the durable job queue.

States move PENDING ⇄ IN_FLIGHT → SUCCEEDED | FAILED_PERMANENT | CANCELLED; a pending job may be cancelled. Terminal
jobs never change. An exclusive kind has at most one outstanding job per database, which `job_pending_index` names (M8).
The flush gate in `wal_state` changes with the checkpoint job, in the same transaction. Leases and progress are local
rows: they describe the current worker, not the history.

A job that needs an artifact's bytes (for example, an upload) holds its `pending_upload` from enqueue to its terminal
transaction, whatever the outcome.
"""

from msgspec.structs import replace

from quire.core.errors import AlreadyExists, IllegalTransition, JobAlreadyPending, StillReferenced, UnknownJob
from quire.manifest import tables as t
from quire.manifest.ops.base import Component, Counter, Op, raise_watermark
from quire.manifest.ops.refs import end_upload, hold_upload
from quire.manifest.overlay import Overlay
from quire.manifest.records import (
    EXCLUSIVE_JOBS,
    TERMINAL_JOB_STATES,
    DbStatus,
    IndexRecord,
    JobKind,
    JobLeaseRecord,
    JobRecord,
    JobState,
    UInt,
)


def job_of(tables: Overlay, job_id: int) -> tuple[bytes, JobRecord]:
    """Return key and row of a job."""
    key = t.JOB_QUEUE.key.pack(job_id)
    row = tables.job_queue.get(key)
    if row is None:
        raise UnknownJob("no job has this id", hint="`quire jobs ls` lists them", job_id=job_id)
    return key, row


def _put(tables: Overlay, job_id: int, before: JobRecord | None, after: JobRecord) -> None:
    if before is not None and before.state is not after.state:
        tables.jobs_by_state.delete(t.JOBS_BY_STATE.key.pack(before.state, job_id))
    tables.job_queue.put(t.JOB_QUEUE.key.pack(job_id), after)
    tables.jobs_by_state.put(t.JOBS_BY_STATE.key.pack(after.state, job_id), IndexRecord(job_id))


def _uploads(record: JobRecord) -> bytes | None:
    return None if record.artifact is None else t.GC_REFCOUNTS.key.pack(*record.artifact)


class EnqueueJob(Op, frozen=True, tag=70):
    """Add a job to the queue."""

    component = int(Component.JOB)
    job_id: UInt
    record: JobRecord

    def apply(self, tables: Overlay, at_ms: int) -> None:
        record = self.record
        if record.db_id:
            tables.database(record.db_id)
        key = t.JOB_QUEUE.key.pack(self.job_id)
        if self.job_id == 0 or tables.job_queue.has(key):
            raise AlreadyExists("a job with this id already exists", job_id=self.job_id)
        if record.state is not JobState.PENDING:
            raise IllegalTransition("a new job must be PENDING", state=record.state.name)
        if record.kind in EXCLUSIVE_JOBS:
            gate = t.JOB_PENDING_INDEX.key.pack(record.db_id, record.kind)
            if (holder := tables.job_pending_index.get(gate)) is not None:
                raise JobAlreadyPending(
                    "the database already has an unfinished job of this kind",
                    hint=f"wait for job {holder.value}, or `quire jobs cancel {holder.value}`",
                    job_id=holder.value,
                    kind=record.kind.name,
                    db_id=record.db_id,
                )
            tables.job_pending_index.put(gate, IndexRecord(self.job_id))
        if (artifact := _uploads(record)) is not None:
            hold_upload(tables, artifact)
        _put(tables, self.job_id, None, record)
        raise_watermark(tables, Counter.JOB, self.job_id)


class EnsureJob(EnqueueJob, frozen=True, tag=76):
    """Add a job, unless one of its kind is outstanding for the database, or there is nothing for a delete job to delete."""

    def apply(self, tables: Overlay, at_ms: int) -> None:
        record = self.record
        needed = not tables.job_pending_index.has(t.JOB_PENDING_INDEX.key.pack(record.db_id, record.kind))
        if record.kind is JobKind.DELETE:
            needed = needed and _has_deletions(tables, record.db_id, at_ms)
        if needed:
            EnqueueJob.apply(self, tables, at_ms)
        else:
            raise_watermark(tables, Counter.JOB, self.job_id)


def _has_deletions(tables: Overlay, db_id: int, at_ms: int) -> bool:
    """Return whether a delete job has work: artifacts at zero, or a tombstone that is new, or that nothing holds."""
    prefix = t.DB.key.pack(db_id)
    if tables.gc_zero.any(prefix):
        return True
    db = tables.db.get(prefix)
    if db is None or db.status is not DbStatus.TOMBSTONED:
        return False
    return db.dropped_at_ms == at_ms or not tables.gc_refcounts.any(prefix)


class StartJob(Op, frozen=True, tag=71):
    """Start the next attempt of a pending job."""

    component = int(Component.JOB)
    job_id: UInt
    worker: str
    lease_expires_at_ms: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        _, record = job_of(tables, self.job_id)
        if record.state is not JobState.PENDING:
            raise IllegalTransition("only a pending job can be started", job_id=self.job_id, state=record.state.name)
        started = replace(record, state=JobState.IN_FLIGHT, attempt=record.attempt + 1, started_at_ms=at_ms)
        _put(tables, self.job_id, record, started)
        tables.job_leases.put(
            t.JOB_LEASES.key.pack(self.job_id), JobLeaseRecord(self.worker, self.lease_expires_at_ms, at_ms)
        )
        if record.kind is JobKind.CHECKPOINT and record.db_id:
            _move_gate(tables, record.db_id, active_job_id=self.job_id)


class RequeueJob(Op, frozen=True, tag=72):
    """Return a job to the queue after an attempt that did not succeed, or whose lease expired."""

    component = int(Component.JOB)
    job_id: UInt
    attempt: UInt
    not_before_ms: UInt
    error: str = ""
    deferred: bool = False
    """Whether the attempt was only too early, which is not a failure."""

    def apply(self, tables: Overlay, at_ms: int) -> None:
        _, record = job_of(tables, self.job_id)
        if record.state is not JobState.IN_FLIGHT or record.attempt != self.attempt:
            raise IllegalTransition(
                "only the running attempt of a job can be requeued",
                job_id=self.job_id,
                state=record.state.name,
                attempt=record.attempt,
                asked=self.attempt,
            )
        _put(
            tables,
            self.job_id,
            record,
            replace(
                record,
                state=JobState.PENDING,
                not_before_ms=self.not_before_ms,
                error=self.error,
                failures=record.failures + (not self.deferred),
            ),
        )
        tables.job_leases.delete(t.JOB_LEASES.key.pack(self.job_id))
        if record.kind is JobKind.CHECKPOINT and record.db_id:
            _move_gate(tables, record.db_id, active_job_id=0, errored_at_ms=0 if self.deferred else at_ms)


class CompleteJob(Op, frozen=True, tag=73):
    """End a job as succeeded, failed or cancelled."""

    component = int(Component.JOB)
    job_id: UInt
    state: JobState
    attempt: UInt = 0
    """The attempt that ends; 0 for an external cancellation."""
    error: str = ""
    result: bytes = b""

    def apply(self, tables: Overlay, at_ms: int) -> None:
        _, record = job_of(tables, self.job_id)
        outside = self.attempt == 0 and self.state is JobState.CANCELLED
        running = record.state is JobState.IN_FLIGHT and record.attempt == self.attempt
        if self.state not in TERMINAL_JOB_STATES or not (
            running or (outside and record.state not in TERMINAL_JOB_STATES)
        ):
            raise IllegalTransition(
                "the job cannot change to this state",
                job_id=self.job_id,
                at=record.state.name,
                asked=self.state.name,
                attempt=record.attempt,
            )
        if record.kind is JobKind.DELETE and self.state is JobState.SUCCEEDED:
            self._refuse_left_over(tables, record.db_id)
        ended = replace(
            record,
            state=self.state,
            finished_at_ms=at_ms,
            error=self.error,
            result=self.result,
            failures=record.failures + (self.state is JobState.FAILED_PERMANENT),
        )
        _put(tables, self.job_id, record, ended)
        tables.job_leases.delete(t.JOB_LEASES.key.pack(self.job_id))
        if record.kind in EXCLUSIVE_JOBS:
            tables.job_pending_index.delete(t.JOB_PENDING_INDEX.key.pack(record.db_id, record.kind))
        if (artifact := _uploads(record)) is not None:
            end_upload(tables, artifact, at_ms)
        if record.kind is JobKind.CHECKPOINT and record.db_id:
            if self.state is JobState.SUCCEEDED:
                _move_gate(tables, record.db_id, active_job_id=0, succeeded_at_ms=at_ms)
            else:  # a job that was cancelled before a worker took it has not failed
                failed = record.state is JobState.IN_FLIGHT or self.state is JobState.FAILED_PERMANENT
                _move_gate(tables, record.db_id, active_job_id=0, errored_at_ms=at_ms if failed else 0)

    def _refuse_left_over(self, tables: Overlay, db_id: int) -> None:
        """Refuse to end a delete job while artifacts of its database are at zero (M8).

        An artifact that reaches zero while the job is outstanding is its work; after that the gate is open for a new job.
        """
        if tables.gc_zero.any(t.DB.key.pack(db_id)):
            raise StillReferenced(
                "artifacts of the database are still to be deleted", hint="delete them first", job_id=self.job_id
            )


class ForgetJob(Op, frozen=True, tag=74):
    """Remove the row of a job that ended."""

    component = int(Component.JOB)
    job_id: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        key, record = job_of(tables, self.job_id)
        if record.state not in TERMINAL_JOB_STATES:
            raise IllegalTransition("the job has not ended", job_id=self.job_id, state=record.state.name)
        tables.job_queue.delete(key)
        tables.jobs_by_state.delete(t.JOBS_BY_STATE.key.pack(record.state, self.job_id))


class RenewJobLease(Op, frozen=True, tag=75):
    """Renew a worker's lease and record its progress."""

    logged = False
    job_id: UInt
    worker: str
    expires_at_ms: UInt
    done: UInt = 0
    total: UInt = 0

    def apply(self, tables: Overlay, at_ms: int) -> None:
        _, record = job_of(tables, self.job_id)
        key = t.JOB_LEASES.key.pack(self.job_id)
        lease = tables.job_leases.get(key)
        if record.state is not JobState.IN_FLIGHT or lease is None or lease.worker != self.worker:
            raise IllegalTransition(
                "the worker no longer holds this job", hint="stop working on it", job_id=self.job_id, worker=self.worker
            )
        tables.job_leases.put(key, JobLeaseRecord(self.worker, self.expires_at_ms, at_ms, self.done, self.total))


def _move_gate(
    tables: Overlay, db_id: int, *, active_job_id: int, succeeded_at_ms: int = 0, errored_at_ms: int = 0
) -> None:
    key = t.WAL_STATE.key.pack(db_id, 0)
    state = tables.wal_state.get(key)
    if state is None:
        return
    # The first failure since the last success stays, not the latest one.
    errored = 0 if succeeded_at_ms else (state.errored_since_ms or errored_at_ms)
    tables.wal_state.put(
        key,
        replace(
            state,
            active_job_id=active_job_id,
            last_success_at_ms=succeeded_at_ms or state.last_success_at_ms,
            errored_since_ms=errored,
        ),
    )
