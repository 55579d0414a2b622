"""Enqueues exclusive jobs, durable on return, and prepares databases for a checkpoint.

Threads: any. Raises `UnknownDatabase`, and what opening a database raises.
"""

from __future__ import annotations

from quire.core.errors import JobAlreadyPending
from quire.jobs.context import JobContext
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbKind, JobKind, WalState


def start(ctx: JobContext, kind: JobKind, db_id: int, *, runner: str = "") -> int:
    """Return the outstanding job of an exclusive kind for a database, or enqueue one. A checkpoint's database is prepared."""
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
    """Recover a segment that a crashed owner left open; bring a stream's rows, which the job reads, up to date with its log."""
    with ctx.manifest.read() as txn:
        record = txn.database(db_id)
        left_open = has_open_segment(txn, db_id)
    if record is not None and record.kind is DbKind.STREAM and ctx.streams is not None:
        ctx.streams().open(db_id).ledger.project_now()
    if ctx.pages is None or not left_open or any(store.db_id == db_id for store in ctx.pages.stores()):
        return
    ctx.pages.open(db_id)
    if not leave_open:  # ten thousand open databases would need as many open files
        ctx.pages.flush(db_id)
        ctx.pages.close_database(db_id)


def has_open_segment(txn: ReadTxn, db_id: int) -> bool:
    """Return whether a page database has an open segment: commits, or what a crashed owner left of them, not yet sealed."""
    record = txn.database(db_id)
    if record is None or record.kind is not DbKind.PAGES:
        return False
    return any(row.state is WalState.OPEN for _, row in txn.scan(t.WAL_CATALOG, db_id))
