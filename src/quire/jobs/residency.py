"""Which local copies of a page database's artifacts can go, which can come back, and the jobs that do it.

Terms
  evictable     has a file that nothing but snapshots, forks and readers of chunks need: a chunk that was hydrated, a segment
                that its own database has truncated
  hydratable    has an object and no file

Rules
  1. A segment without an object is uploaded first; the eviction is a job of its own, behind that one.
  2. The policy (`maintenance.evict_seconds`) is about segments alone: a chunk has a file only if somebody asked for it.

Threads: any. Raises what enqueueing a job raises.
"""

from __future__ import annotations

from quire.core.ids import ArtifactKey, ArtifactKind
from quire.jobs.enqueue import request_evict, request_hydrate, request_upload
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import TERMINAL_JOB_STATES, JobKind, Residency, WalFormat, WalState
from quire.manifest.store import ManifestStore

_WITH_FILE = (Residency.LOCAL, Residency.LOCAL_AND_REMOTE)
_WITHOUT_FILE = (Residency.EVICTED, Residency.REMOTE_ARCHIVED)


def evict_database(manifest: ManifestStore, db_id: int) -> list[int]:
    """Have every evictable copy of a database removed; the jobs, in the order in which they are to run."""
    with manifest.read() as txn:
        chunks = _chunks(txn, db_id, (Residency.LOCAL_AND_REMOTE,))
        segments = _segments(txn, db_id, _WITH_FILE)
    jobs = [request_upload(manifest, key) for key, residency, _ in segments if residency is Residency.LOCAL]
    return jobs + [request_evict(manifest, key) for key in [*chunks, *(key for key, *_ in segments)]]


def hydrate_database(manifest: ManifestStore, db_id: int) -> list[int]:
    """Have files made of every artifact of a database that has none; the jobs."""
    with manifest.read() as txn:
        keys = [*_chunks(txn, db_id, _WITHOUT_FILE), *(key for key, *_ in _segments(txn, db_id, _WITHOUT_FILE))]
    return [request_hydrate(manifest, key) for key in keys]


def apply_policy(manifest: ManifestStore, db_id: int, sealed_before_ms: int) -> int:
    """Ask for the next move of segments that are old enough, if none is outstanding (rule 2); how many were asked for."""
    with manifest.read() as txn:
        due = [each for each in _segments(txn, db_id, _WITH_FILE) if each[2] <= sealed_before_ms]
        busy = {
            job.artifact
            for _, job in (txn.scan(t.JOB_QUEUE) if due else ())
            if job.kind in (JobKind.UPLOAD, JobKind.EVICT) and job.state not in TERMINAL_JOB_STATES
        }
    idle = [(key, residency) for key, residency, _ in due if (db_id, int(key.kind), key.id, 0, 0) not in busy]
    for key, residency in idle:
        (request_upload if residency is Residency.LOCAL else request_evict)(manifest, key)
    return len(idle)


def _segments(txn: ReadTxn, db_id: int, where: tuple[Residency, ...]) -> list[tuple[ArtifactKey, Residency, int]]:
    """(segment, residency, when it was sealed) of those that the database has truncated and somebody else holds."""
    found = []
    for (_, segment_id), row in txn.scan(t.WAL_CATALOG, db_id):
        if row.origin_db_id != db_id or row.state is not WalState.TRUNCATED or row.format is not WalFormat.PAGER:
            continue
        key = ArtifactKey(db_id, ArtifactKind.WAL, segment_id, 0)
        counts = txn.refcount(key)
        if row.residency in where and counts is not None and counts.in_use:
            found.append((key, row.residency, row.sealed_at_ms))
    return found


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
