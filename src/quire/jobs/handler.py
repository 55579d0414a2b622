"""What a job handler is: a function from a job to its outcome.

A handler may be killed anywhere and is then run again from its start, so every step it takes can be repeated. It calls
`progress` between steps: there it is interrupted, and learns that it lost its lease. What it commits on its way goes through
`commit_step`, what it leads to into `Completed`: a handler whose job was taken from it changes nothing.

A handler that raises has failed this attempt. `HOPELESS` errors fail the job for good, if it is one that may be given up;
anything else is tried again.
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
"""Batches of `commit_each` that are under way at once."""

HOPELESS = (InvalidInput, NotFound, Corruption, DatabaseTombstoned, WouldDropEverything)
"""Errors that the next attempt would meet again: a person has to act first. Other conflicts are not here: the
next attempt plans on what is so by then."""


class Interrupted(Exception):  # never leaves the worker
    """The handler is to stop: the worker stops, or the lease is lost."""


@dataclass(frozen=True, slots=True)
class Completed:
    """The job has succeeded."""

    result: Any = None
    ops: tuple[Op, ...] = ()
    """Its effects, in the transaction that completes it."""
    after: tuple[Op, ...] = ()
    """Effects that need the job's gate to be open again."""
    events: tuple[tuple[str, dict[str, Any]], ...] = ()
    """(name, fields) of what is logged once that transaction is committed, never before."""

    def log(self) -> None:
        """Log the events. The caller has committed."""
        for name, fields in self.events:
            emit("info", name, **fields)


@dataclass(frozen=True, slots=True)
class Deferred:
    """It is too early; this is no failure."""

    until_ms: int


Outcome = Completed | Deferred
Progress = Callable[[int, int], None]
"""`progress(done, total)`; total 0 if unknown. Raises `Interrupted`."""

Handler = Callable[[JobContext, Job, Progress], Outcome]


def options(job: Job, **defaults: Any) -> dict[str, Any]:
    """The payload of a job, with these defaults: a mapping of what the handler knows, each of its default's type."""
    try:
        given = job.payload
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the payload of the job is not msgpack: {error}", job_id=job.job_id) from error
    if given is None:
        return defaults
    hint = f"it is a mapping with some of: {', '.join(defaults) or 'nothing'}"
    if not isinstance(given, dict) or not given.keys() <= defaults.keys():
        raise InvalidInput("the job does not know this payload", hint=hint, job_id=job.job_id, payload=given)
    wrong = [name for name, value in given.items() if type(value) is not type(defaults[name])]
    if wrong:
        raise InvalidInput("a part of the job's payload has another type", hint=hint, job_id=job.job_id, wrong=wrong)
    return {**defaults, **given}


def artifact_of(job: Job) -> ArtifactKey:
    """The artifact a job is about; `InvalidInput` if it names none with bytes."""
    if job.record.artifact is None:
        raise InvalidInput(
            "the job names no artifact", hint="enqueue it with artifact=…, see quire.jobs.enqueue", job_id=job.job_id
        )
    origin, kind, number, generation, delta = job.record.artifact
    return ArtifactKey(origin, ArtifactKind(kind), number, generation, delta)


def commit_step(ctx: JobContext, job: Job, ops: Iterable[Op]) -> None:
    """Commit effects of a job that goes on; `IllegalTransition` if it is no longer this attempt's.

    The lease is renewed in the same transaction, so a worker that lost its job changes nothing any more.
    """
    with ctx.manifest.read() as txn:
        lease = txn.get(t.JOB_LEASES, job.job_id)
    if lease is None or job.lease is None or lease.worker != job.lease.worker:
        raise IllegalTransition("the job is no longer this worker's", hint="stop working on it", job_id=job.job_id)
    renewal = RenewJobLease(job.job_id, lease.worker, lease.expires_at_ms, lease.done, lease.total)
    ctx.manifest.submit([renewal, *ops]).result()


def update(key: ArtifactKey, **changes: Any) -> UpdateArtifact:
    """The operation that changes what an artifact's row says of its bytes."""
    return UpdateArtifact(key.origin_db_id, key.kind, key.id, key.generation, key.delta_id, **changes)


def commit_each(
    manifest: ManifestStore, batches: Iterable[tuple[T, Sequence[Op]]]
) -> Iterator[tuple[T, QuireError | None]]:
    """Commit batches as they come, up to `PIPELINE` under way at once; each with its error or `None`, in their order."""
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
    except QuireError as error:  # it is too large, say
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
