"""Starting jobs: every function enqueues one and returns its id, durable on return.

A move holds its artifact from here to the end of its job, whatever the end: nothing of it is deleted meanwhile (M8). Asking
twice makes two jobs, and the second finds its work done; with a `token` it makes one.

Threads: any. Raises `UnknownArtifact` (nothing refers to it), `ArtifactGone` (it is being deleted), `UnknownDatabase`,
`InvalidInput`, `JobAlreadyPending` (a retention job is outstanding).
"""

from __future__ import annotations

from typing import Any

from quire.core.errors import DatabaseTombstoned, InvalidInput, JobAlreadyPending, UnknownDatabase
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.jobs.context import JobContext
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbKind, DbStatus, JobKind, WalState
from quire.manifest.store import ManifestStore


def start(ctx: JobContext, kind: JobKind, db_id: int, *, runner: str = "") -> int:
    """The outstanding job of an exclusive kind for a database, else a new one. A checkpoint finds its database in order."""
    if kind is JobKind.CHECKPOINT:
        prepare_checkpoint(ctx, db_id)
    jobs, payload = ctx.manifest.jobs, {"runner": runner} if runner else None
    while True:
        try:
            return jobs.enqueue(kind, db_id, payload)
        except JobAlreadyPending:
            if job_id := jobs.outstanding(db_id, kind):
                return job_id


def prepare_checkpoint(ctx: JobContext, db_id: int, *, leave_open: bool = True) -> None:
    """Recover a segment that a crashed owner left open; bring the rows of a stream, which are what is read, up to its log."""
    with ctx.manifest.read() as txn:
        record = txn.database(db_id)
        left_open = has_open_segment(txn, db_id)
    if record is not None and record.kind is DbKind.STREAM and ctx.streams is not None:
        ctx.streams().open(db_id).ledger.project_now()
    if ctx.pages is None or not left_open or any(store.db_id == db_id for store in ctx.pages.stores()):
        return
    ctx.pages.open(db_id)
    if not leave_open:  # ten thousand open databases would be as many open files
        ctx.pages.flush(db_id)
        ctx.pages.close_database(db_id)


def has_open_segment(txn: ReadTxn, db_id: int) -> bool:
    """Whether a page database has commits, or a crashed owner's remains of them, that no sealed segment holds."""
    record = txn.database(db_id)
    if record is None or record.kind is not DbKind.PAGES:
        return False
    return any(row.state is WalState.OPEN for _, row in txn.scan(t.WAL_CATALOG, db_id))


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
