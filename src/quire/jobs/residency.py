"""Requests for jobs that upload, evict and hydrate artifacts, for single ones and for page databases; and uploads on demand.

Terms
  evictable     has a file that only snapshots, forks and readers of chunks need: a chunk that was hydrated, a segment that its
                own database has truncated
  hydratable    has an object and no file

A job holds its artifact from the request until the job ends, whatever the outcome: the artifact is not deleted in the meantime
(M8). A repeated request makes a second job, which finds its work done. The policy (`maintenance.evict_seconds`) moves what
`evict_database` moves once it is old enough: a segment's age counts from its seal, that of a hydrated copy from its hydration,
which is known while the row of that job is kept.

Threads: any; `upload_now` not on a worker's thread. Raises `UnknownArtifact` (nothing refers to it), `ArtifactGone` (it is
being deleted), `InvalidInput`; `upload_now` also `Unavailable` with the job's own error, `TimedOut`, `StoreClosed`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress

from quire.core.errors import (
    ArtifactGone,
    InvalidInput,
    ManifestDamaged,
    TimedOut,
    Unavailable,
    UnknownArtifact,
    UnknownDatabase,
)
from quire.core.events import emit
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.jobs.worker import Worker
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import TERMINAL_JOB_STATES, JobKind, JobState, Residency, WalFormat, WalState
from quire.manifest.store import ManifestStore

_WITH_FILE = (Residency.LOCAL, Residency.LOCAL_AND_REMOTE)
_WITHOUT_FILE = (Residency.EVICTED, Residency.REMOTE_ARCHIVED)

WAIT_SECONDS = 600.0
LOOK_SECONDS = 0.02
"""Time between two checks of a job that another thread runs, or that waits for its next attempt."""


def request_upload(manifest: ManifestStore, key: ArtifactKey) -> int:
    """Enqueue the upload of an artifact to the object store; return the job's id, durable on return."""
    return _move(manifest, JobKind.UPLOAD, key)


def request_evict(manifest: ManifestStore, key: ArtifactKey) -> int:
    """Enqueue the removal of an artifact's file, which checks that the object exists and waits for an outstanding upload."""
    return _move(manifest, JobKind.EVICT, key)


def request_hydrate(manifest: ManifestStore, key: ArtifactKey) -> int:
    """Enqueue the restoration of an artifact's file from its object."""
    return _move(manifest, JobKind.HYDRATE, key)


def _move(manifest: ManifestStore, kind: JobKind, key: ArtifactKey) -> int:
    if key.kind not in (ArtifactKind.BASE, ArtifactKind.DELTA, ArtifactKind.WAL):
        raise InvalidInput("only chunks, deltas and WAL segments have bytes", artifact=key)
    return manifest.jobs.enqueue(kind, key.origin_db_id, artifact=key)


# ── page databases ────────────────────────────────────────────────────────────────────────────────────────────────────


def evict_database(manifest: ManifestStore, db_id: int) -> list[int]:
    """Enqueue the eviction of every evictable copy of a database; return the jobs in the order in which they must run."""
    with manifest.read() as txn:
        chunks = _chunks(txn, db_id, (Residency.LOCAL_AND_REMOTE,))
        segments = _segments(txn, db_id, _WITH_FILE)
    # A segment without an object is uploaded first; its eviction is a separate job after the upload.
    jobs = [request_upload(manifest, key) for key, residency, _ in segments if residency is Residency.LOCAL]
    return jobs + [request_evict(manifest, key) for key in [*chunks, *(key for key, *_ in segments)]]


def hydrate_database(manifest: ManifestStore, db_id: int) -> list[int]:
    """Enqueue the hydration of every artifact of a database that has no file; return the jobs."""
    with manifest.read() as txn:
        keys = [*_chunks(txn, db_id, _WITHOUT_FILE), *(key for key, *_ in _segments(txn, db_id, _WITHOUT_FILE))]
    return [request_hydrate(manifest, key) for key in keys]


def apply_policy(manifest: ManifestStore, databases: Iterable[int], before_ms: int) -> int:
    """Enqueue the next move of each copy made before a moment that has no outstanding one; return how many were enqueued.

    A database with damaged rows is reported and passed over.
    """
    due: list[tuple[ArtifactKey, Residency]] = []
    with manifest.read() as txn:
        for db_id in databases:
            try:
                segments = _segments(txn, db_id, _WITH_FILE)
                chunks = _chunks(txn, db_id, (Residency.LOCAL_AND_REMOTE,))
            except ManifestDamaged as error:
                emit("error", "upkeep.skipped", db_id=db_id, step="evictions", error=str(error))
                continue
            due += [(key, residency) for key, residency, sealed_ms in segments if sealed_ms <= before_ms]
            due += [(key, Residency.LOCAL_AND_REMOTE) for key in chunks]
        # The whole queue is read: once for all databases, and only if anything is due.
        spared = _busy_or_hydrated(txn, before_ms) if due else set()
    requested = 0
    for key, residency in due:
        if _named(key) in spared:
            continue
        # It, or its database, was deleted or closed meanwhile.
        with suppress(UnknownArtifact, ArtifactGone, UnknownDatabase, ManifestDamaged):
            (request_upload if residency is Residency.LOCAL else request_evict)(manifest, key)
            requested += 1
    return requested


def _busy_or_hydrated(txn: ReadTxn, since_ms: int) -> set[tuple[int, ...]]:
    """Return artifacts with an outstanding move, and those hydrated since a moment, which must not be evicted at once."""
    return {
        tuple(job.artifact)
        for _, job in txn.scan(t.JOB_QUEUE)
        if job.kind in (JobKind.UPLOAD, JobKind.EVICT, JobKind.HYDRATE)
        and job.artifact is not None
        and (job.state not in TERMINAL_JOB_STATES or (job.kind is JobKind.HYDRATE and job.finished_at_ms > since_ms))
    }


def _named(key: ArtifactKey) -> tuple[int, ...]:
    """Return an artifact's key in the form that job rows use."""
    return key.origin_db_id, int(key.kind), key.id, key.generation, key.delta_id


def _segments(txn: ReadTxn, db_id: int, where: tuple[Residency, ...]) -> list[tuple[ArtifactKey, Residency, int]]:
    """Return (segment, residency, seal time) of segments that the database has truncated and other holders still reference."""
    segments = []
    for (_, segment_id), row in txn.scan(t.WAL_CATALOG, db_id):
        if row.origin_db_id != db_id or row.state is not WalState.TRUNCATED or row.format is not WalFormat.PAGER:
            continue
        key = ArtifactKey(db_id, ArtifactKind.WAL, segment_id, 0)
        counts = txn.refcount(key)
        if row.residency in where and counts is not None and counts.in_use:
            segments.append((key, row.residency, row.sealed_at_ms))
    return segments


def _chunks(txn: ReadTxn, db_id: int, where: tuple[Residency, ...]) -> list[ArtifactKey]:
    """Return the bases and deltas that originate in the database and are referenced."""
    keys = [
        ArtifactKey(db_id, ArtifactKind.BASE, slot, generation)
        for (_, slot, generation), row in txn.scan(t.CHUNK_CATALOG, db_id)
        if row.residency in where
    ]
    keys += [
        ArtifactKey(db_id, ArtifactKind.DELTA, slot, generation, delta_id)
        for (_, slot, generation, delta_id), row in txn.scan(t.CHUNK_DELTA_INDEX, db_id)
        if row.residency in where
    ]
    return [key for key in keys if (counts := txn.refcount(key)) is not None and counts.in_use]


# ── uploads on demand ─────────────────────────────────────────────────────────────────────────────────────────────────
def upload_now(
    manifest: ManifestStore, worker: Worker, keys: Sequence[ArtifactKey], *, timeout: float = WAIT_SECONDS
) -> None:
    """Upload these artifacts and return when each has its object, before a value that needs the objects is sent (P16).

    This thread or a worker runs each job, whichever claims it first. A job that was given up is an error; one that is retried
    is waited for.
    """
    deadline = manifest.clock.monotonic() + timeout
    # All jobs are enqueued before the first one runs, so that the store's workers can help.
    for job_id in [request_upload(manifest, key) for key in keys]:
        while not _is_done(manifest, worker, job_id):
            if manifest.clock.monotonic() >= deadline:
                raise TimedOut("the upload timed out", hint="`quire jobs ls` shows why", job_id=job_id)
            threading.Event().wait(LOOK_SECONDS)


def _is_done(manifest: ManifestStore, worker: Worker, job_id: int) -> bool:
    worker.run(job_id)
    record = manifest.jobs.get(job_id).record
    if record.state in TERMINAL_JOB_STATES and record.state is not JobState.SUCCEEDED:
        hint = "`quire jobs ls` shows the error; fix its cause, then try again"
        raise Unavailable("a WAL segment could not be uploaded", hint=hint, job_id=job_id, error=record.error)
    return record.state is JobState.SUCCEEDED
