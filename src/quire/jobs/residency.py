"""Copies of artifacts: the jobs that move them, which copies of a page database can go or come back, and uploads on demand.

Terms
  evictable     has a file that nothing but snapshots, forks and readers of chunks need: a chunk that was hydrated, a segment
                that its own database has truncated
  hydratable    has an object and no file

A move holds its artifact from here to the end of its job, whatever the end: nothing of it is deleted meanwhile (M8). Asking
twice makes two jobs, and the second finds its work done. The policy (`maintenance.evict_seconds`) moves what `evict_database`
moves, when it is old enough: a segment counts from its seal, any copy that was hydrated from then. That is known as long as
the job's row is kept.

Threads: any; `upload_now` not in a worker's own. Raises `UnknownArtifact` (nothing refers to it), `ArtifactGone` (it is being
deleted), `InvalidInput`; `upload_now` also `Unavailable` with the job's own error, `TimedOut`, `StoreClosed`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from quire.core.errors import InvalidInput, TimedOut, Unavailable
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
"""Between two looks at a job that another thread has, or that waits for its next attempt."""


def request_upload(manifest: ManifestStore, key: ArtifactKey) -> int:
    """Have an artifact put into the object store; the job, durable on return."""
    return _move(manifest, JobKind.UPLOAD, key)


def request_evict(manifest: ManifestStore, key: ArtifactKey) -> int:
    """Have an artifact's file removed, once its object has been seen. An upload that is outstanding is waited for."""
    return _move(manifest, JobKind.EVICT, key)


def request_hydrate(manifest: ManifestStore, key: ArtifactKey) -> int:
    """Have an artifact's file made from its object again."""
    return _move(manifest, JobKind.HYDRATE, key)


def _move(manifest: ManifestStore, kind: JobKind, key: ArtifactKey) -> int:
    if key.kind not in (ArtifactKind.BASE, ArtifactKind.DELTA, ArtifactKind.WAL):
        raise InvalidInput("only chunks, deltas and WAL segments have bytes", artifact=key)
    return manifest.jobs.enqueue(kind, key.origin_db_id, artifact=key)


# ── of a database ─────────────────────────────────────────────────────────────────────────────────────────────────────


def evict_database(manifest: ManifestStore, db_id: int) -> list[int]:
    """Have every evictable copy of a database removed; the jobs, in the order in which they are to run."""
    with manifest.read() as txn:
        chunks = _chunks(txn, db_id, (Residency.LOCAL_AND_REMOTE,))
        segments = _segments(txn, db_id, _WITH_FILE)
    # A segment without an object is uploaded first; the eviction is a job of its own, behind that one.
    jobs = [request_upload(manifest, key) for key, residency, _ in segments if residency is Residency.LOCAL]
    return jobs + [request_evict(manifest, key) for key in [*chunks, *(key for key, *_ in segments)]]


def hydrate_database(manifest: ManifestStore, db_id: int) -> list[int]:
    """Have files made of every artifact of a database that has none; the jobs."""
    with manifest.read() as txn:
        keys = [*_chunks(txn, db_id, _WITHOUT_FILE), *(key for key, *_ in _segments(txn, db_id, _WITHOUT_FILE))]
    return [request_hydrate(manifest, key) for key in keys]


def apply_policy(manifest: ManifestStore, db_id: int, before_ms: int) -> int:
    """Ask for the next move of copies that were made before a moment, if none is outstanding; how many were asked for."""
    with manifest.read() as txn:
        due = [(key, residency) for key, residency, at_ms in _segments(txn, db_id, _WITH_FILE) if at_ms <= before_ms]
        due += [(key, Residency.LOCAL_AND_REMOTE) for key in _chunks(txn, db_id, (Residency.LOCAL_AND_REMOTE,))]
        spared = _busy_or_hydrated(txn, before_ms) if due else set()
    idle = [(key, residency) for key, residency in due if _named(key) not in spared]
    for key, residency in idle:
        (request_upload if residency is Residency.LOCAL else request_evict)(manifest, key)
    return len(idle)


def _busy_or_hydrated(txn: ReadTxn, since_ms: int) -> set[tuple[int, ...]]:
    """Artifacts that a job is to move, and those that somebody has fetched since a moment: they would go at once."""
    return {
        tuple(job.artifact)
        for _, job in txn.scan(t.JOB_QUEUE)
        if job.kind in (JobKind.UPLOAD, JobKind.EVICT, JobKind.HYDRATE)
        and job.artifact is not None
        and (job.state not in TERMINAL_JOB_STATES or (job.kind is JobKind.HYDRATE and job.finished_at_ms > since_ms))
    }


def _named(key: ArtifactKey) -> tuple[int, ...]:
    """An artifact as the rows of jobs have it."""
    return key.origin_db_id, int(key.kind), key.id, key.generation, key.delta_id


def _segments(txn: ReadTxn, db_id: int, where: tuple[Residency, ...]) -> list[tuple[ArtifactKey, Residency, int]]:
    """(segment, residency, when it was sealed) of those that the database has truncated and somebody else holds."""
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
    """Bases and deltas that the database made and that something holds."""
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
    """Return when each of these artifacts has its object: before something is sent that needs them (P16).

    Whoever gets there first runs the job, this thread or a worker's. One that was given up is an error; one that is tried
    again is waited for.
    """
    deadline = manifest.clock.monotonic() + timeout
    # All are asked for before the first one is run, so that workers of the store help.
    for job_id in [request_upload(manifest, key) for key in keys]:
        while not _is_done(manifest, worker, job_id):
            if manifest.clock.monotonic() >= deadline:
                raise TimedOut("an upload takes too long", hint="`quire jobs` shows why", job_id=job_id)
            threading.Event().wait(LOOK_SECONDS)


def _is_done(manifest: ManifestStore, worker: Worker, job_id: int) -> bool:
    worker.run(job_id)
    record = manifest.jobs.get(job_id).record
    if record.state in TERMINAL_JOB_STATES and record.state is not JobState.SUCCEEDED:
        hint = "`quire jobs` shows the error; remove its cause, then try again"
        raise Unavailable("a WAL segment could not be uploaded", hint=hint, job_id=job_id, error=record.error)
    return record.state is JobState.SUCCEEDED
