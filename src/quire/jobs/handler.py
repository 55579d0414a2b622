"""Job handlers: functions from a job to its outcome.

A handler may be killed anywhere and is then run again from its start, so every step must be repeatable. It calls `progress`
between steps, which is where it is interrupted, also when its lease was lost. Intermediate effects are committed with
`commit_step`, final effects are returned in `Completed`: a handler whose job was taken away changes nothing.

If a handler raises, this attempt has failed. `PERMANENT_ERRORS` fail the job permanently, if the job has a limit on attempts;
after any other error it is retried.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from quire.core.errors import (
    Corruption,
    DatabaseTombstoned,
    IllegalTransition,
    InvalidInput,
    NotFound,
    QuireError,
    StoreClosed,
    StoreUnusable,
    UnknownJob,
    WouldDropEverything,
)
from quire.core.events import emit
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.jobs.context import JobContext
from quire.manifest import tables as t
from quire.manifest.guard import ManifestGuard
from quire.manifest.jobqueue import Job
from quire.manifest.ops.artifacts import UpdateArtifact
from quire.manifest.ops.base import Op
from quire.manifest.ops.jobs import RenewJobLease
from quire.manifest.store import ManifestStore

T = TypeVar("T")

PIPELINE = 1_024
"""Batches of `commit_each` in progress at once."""

PERMANENT_ERRORS = (InvalidInput, NotFound, Corruption, DatabaseTombstoned, WouldDropEverything)
"""Errors that the next attempt would raise again, until a user intervenes. Other conflicts are not listed: the next attempt
plans on the state at that time."""


class Interrupted(Exception):  # never leaves the worker
    """The handler must stop, because the worker stops or the lease is lost."""


@dataclass(frozen=True, slots=True)
class Completed:
    """The outcome of a job that has succeeded."""

    result: Any = None
    ops: tuple[Op, ...] = ()
    """Its effects, in the transaction that completes it."""
    after: tuple[Op, ...] = ()
    """Effects that need the job's gate to be open again."""
    events: tuple[tuple[str, dict[str, Any]], ...] = ()
    """(name, fields) of events that are logged after that transaction has committed, never before."""

    def log(self) -> None:
        """Log the events. The caller has committed."""
        for name, fields in self.events:
            emit("info", name, **fields)


@dataclass(frozen=True, slots=True)
class Deferred:
    """The outcome of a job that must wait until `until_ms`; not a failure."""

    until_ms: int


Outcome = Completed | Deferred
Progress = Callable[[int, int], None]
"""`progress(done, total)`; total 0 if unknown. Raises `Interrupted`."""

Handler = Callable[[JobContext, Job, Progress], Outcome]


def options(job: Job, **defaults: Any) -> dict[str, Any]:
    """Return the payload of a job over these defaults. `InvalidInput` if it has other names, or a value of another type."""
    try:
        given = job.payload
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the payload of the job is not msgpack: {error}", job_id=job.job_id) from error
    if given is None:
        return defaults
    hint = f"pass a mapping with some of: {', '.join(defaults) or 'nothing'}"
    if not isinstance(given, dict) or not given.keys() <= defaults.keys():
        raise InvalidInput("the job does not support this payload", hint=hint, job_id=job.job_id, payload=given)
    # Exact types: a payload comes from another process, and `isinstance` would accept `True` as a number.
    wrong = [name for name, value in given.items() if type(value) is not type(defaults[name])]
    if wrong:
        raise InvalidInput("a field of the job's payload has the wrong type", hint=hint, job_id=job.job_id, wrong=wrong)
    return {**defaults, **given}


def artifact_of(job: Job) -> ArtifactKey:
    """Return the artifact that a job names; `InvalidInput` if it names none."""
    if job.record.artifact is None:
        raise InvalidInput(
            "the job names no artifact", hint="enqueue it with artifact=…, see quire.jobs.enqueue", job_id=job.job_id
        )
    origin, kind, number, generation, delta = job.record.artifact
    return ArtifactKey(origin, ArtifactKind(kind), number, generation, delta)


def commit_step(ctx: JobContext, job: Job, ops: Iterable[Op]) -> None:
    """Commit effects of a job that continues; `IllegalTransition` if the job is no longer this attempt's.

    The lease is renewed in the same transaction, so a worker that has lost its job cannot change anything.
    """
    with ctx.manifest.read() as txn:
        lease = txn.get(t.JOB_LEASES, job.job_id)
    if lease is None or job.lease is None or lease.worker != job.lease.worker:
        raise IllegalTransition("the job is no longer this worker's", hint="stop working on it", job_id=job.job_id)
    # The check above is only a read: a job that is cancelled or taken before the commit must fail the batch, which
    # this operation does. Expiry and progress stay as they are; the keeper alone extends leases.
    renewal = RenewJobLease(job.job_id, lease.worker, lease.expires_at_ms, lease.done, lease.total)
    ctx.manifest.submit([renewal, *ops]).result()


def update(key: ArtifactKey, **changes: Any) -> UpdateArtifact:
    """Return the operation that changes an artifact's catalog row."""
    return UpdateArtifact(key.origin_db_id, key.kind, key.id, key.generation, key.delta_id, **changes)


def fail_attempt(manifest: ManifestStore, job: Job, error: Exception) -> None:
    """End a failed attempt. The job is retried, unless it has a limit on attempts and the error is one of
    `PERMANENT_ERRORS`."""
    emit("warning", "job.attempt_failed", job_id=job.job_id, kind=job.kind.name, error=str(error))
    # Without the second condition a delete job could fail permanently, and every round of maintenance would enqueue
    # another one.
    permanent = isinstance(error, PERMANENT_ERRORS) and job.record.max_attempts > 0
    try:
        manifest.jobs.fail(job, f"{type(error).__name__}: {error}", permanent=permanent)
    except (IllegalTransition, UnknownJob):
        pass  # its lease expired, or it was cancelled: its state is no longer ours to set


def commit_each(
    manifest: ManifestStore, batches: Iterable[tuple[T, Sequence[Op]]]
) -> Iterator[tuple[T, QuireError | None]]:
    """Commit batches with up to `PIPELINE` in progress at once; yield each subject with its error or `None`, in order."""
    under_way: deque[tuple[T, ManifestGuard | QuireError]] = deque()
    for subject, batch in batches:
        under_way.append((subject, _submitted(manifest, batch)))
        while under_way and (len(under_way) >= PIPELINE or _is_decided(under_way[0][1])):
            yield _decided(*under_way.popleft())
    while under_way:
        yield _decided(*under_way.popleft())


def _submitted(manifest: ManifestStore, batch: Sequence[Op]) -> ManifestGuard | QuireError:
    try:
        return manifest.submit(list(batch))
    except (StoreClosed, StoreUnusable):
        raise
    except QuireError as error:  # for example, the batch is too large
        return error


def _is_decided(guard: ManifestGuard | QuireError) -> bool:
    return isinstance(guard, QuireError) or guard.done


def _decided(subject: T, guard: ManifestGuard | QuireError) -> tuple[T, QuireError | None]:
    if isinstance(guard, QuireError):
        return subject, guard
    try:
        guard.result()
        return subject, None
    except (StoreClosed, StoreUnusable):
        raise
    except QuireError as error:
        return subject, error
