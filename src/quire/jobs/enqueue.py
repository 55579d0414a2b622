"""Asking for work on artifacts and databases: each call enqueues one job and returns its id, durable on return.

A move holds its artifact from here to the end of its job, whatever the end: nothing of it is deleted meanwhile (M8). Asking
twice makes two jobs, and the second finds its work done; with a `token` it makes one.

Threads: any. Raises `UnknownArtifact` (nothing refers to it), `ArtifactGone` (it is being deleted), `UnknownDatabase`,
`InvalidInput`, `JobAlreadyPending` (a retention job is outstanding).
"""

from __future__ import annotations

from typing import Any

from quire.core.errors import DatabaseTombstoned, InvalidInput, UnknownDatabase
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.manifest.records import DbStatus, JobKind
from quire.manifest.store import ManifestStore


def request_upload(manifest: ManifestStore, key: ArtifactKey, *, bitmap_hash: int = 0, token: bytes = b"") -> int:
    """Have an artifact put into the object store; `bitmap_hash` is recorded with it."""
    return _move(manifest, JobKind.UPLOAD, key, {"bitmap_hash": bitmap_hash} if bitmap_hash else None, token)


def request_evict(manifest: ManifestStore, key: ArtifactKey, *, token: bytes = b"") -> int:
    """Have an artifact's file removed, once its object has been seen. An upload that is outstanding is waited for."""
    return _move(manifest, JobKind.EVICT, key, None, token)


def request_hydrate(manifest: ManifestStore, key: ArtifactKey, *, token: bytes = b"") -> int:
    """Have an artifact's file made from its object again."""
    return _move(manifest, JobKind.HYDRATE, key, None, token)


def request_verify(manifest: ManifestStore, what: int | str | ArtifactKey, *, token: bytes = b"") -> int:
    """Have every byte of a database (by id or name), or of one artifact, compared with what the catalog says."""
    if isinstance(what, ArtifactKey):
        return _move(manifest, JobKind.VERIFY, what, None, token)
    return manifest.jobs.enqueue(JobKind.VERIFY, _database(manifest, what), {"scope": "database"}, token=token)


def request_retention(manifest: ManifestStore, db: int | str, *, force: bool = False, token: bytes = b"") -> int:
    """Have a database's retention policy applied now; `force` if it may take the last snapshots."""
    payload = {"force": True} if force else None
    return manifest.jobs.enqueue(JobKind.RETENTION, _database(manifest, db), payload, token=token)


def _move(manifest: ManifestStore, kind: JobKind, key: ArtifactKey, payload: Any, token: bytes) -> int:
    if key.kind not in (ArtifactKind.BASE, ArtifactKind.DELTA, ArtifactKind.WAL):
        raise InvalidInput("only chunks, deltas and WAL segments have bytes", artifact=key)
    return manifest.jobs.enqueue(kind, key.origin_db_id, payload, artifact=key, token=token)


def _database(manifest: ManifestStore, db: int | str) -> int:
    with manifest.read() as txn:
        db_id = txn.database_id(db) if isinstance(db, str) else db
        record = txn.database(db_id)
    if record is None:
        raise UnknownDatabase("no database has this id", hint="`quire ls` lists the databases", db_id=db_id)
    if record.status is DbStatus.TOMBSTONED:
        raise DatabaseTombstoned("the database was dropped", db_id=db_id, name=record.name)
    return db_id
