"""The truncate job: what a checkpoint absorbed leaves the page index, then its segments are let go.

Rules
  1. Rows at or below `checkpointed_lsn` are answered by chains (P8), so they can go at any time after the checkpoint; in
     commits of at most 8,192 rows, between which others write.
  2. A segment is TRUNCATED when it is CHECKPOINTED and no row names it; its bytes go when its last reference does: snapshots
     and forks hold their own (P12).
  3. Every step may be repeated.
"""

from __future__ import annotations

from quire.core.events import emit
from quire.durable.failpoints import hit
from quire.jobs.context import JobContext
from quire.jobs.handler import Done, Outcome, Progress
from quire.manifest import tables as t
from quire.manifest.jobqueue import Job
from quire.manifest.ops.base import Op
from quire.manifest.ops.pageindex import VERSION_NAME, DropPageVersions
from quire.manifest.ops.wal import MoveWalState
from quire.manifest.reads import ReadTxn
from quire.manifest.records import WalState

STEP_ROWS = 8_192


def truncate_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Drop absorbed rows, then move their segments to TRUNCATED."""
    manifest, db_id, dropped = ctx.manifest, job.db_id, 0
    page: int | None = 0
    while page is not None:
        progress(dropped, 0)
        with manifest.read() as txn:
            names, page = _absorbed(txn, db_id, page)
        if names:
            manifest.submit([DropPageVersions(db_id, b"".join(names))]).result()
            hit("jobs.truncate.dropped")
            dropped += len(names)
    with manifest.read() as txn:
        done = [(k[1], row) for k, row in txn.scan(t.WAL_CATALOG, db_id) if row.state is WalState.CHECKPOINTED]
    if not done:
        return Done({"rows": dropped, "segments": 0})
    ops: list[Op] = [MoveWalState(db_id, segment_id, WalState.TRUNCATED) for segment_id, _ in done]
    origins = {row.origin_db_id for _, row in done}
    for segment_id, row in done:
        emit("info", "wal.truncated", db_id=db_id, segment_id=segment_id, bytes=row.used_bytes)
    freed = sum(row.used_bytes for _, row in done)
    result = {"rows": dropped, "segments": len(done), "bytes": freed}
    return Done(result, ops=(*ops, *manifest.jobs.deletions(origins)))


def _absorbed(txn: ReadTxn, db_id: int, from_page: int) -> tuple[list[bytes], int | None]:
    """Names of absorbed versions from a page on, at most a step of them, and the page to go on with; `None` at the end."""
    wal = txn.wal_state(db_id)
    names: list[bytes] = []
    for (owner, page, lsn), _ in txn.scan(t.PAGE_VERSION_INDEX, start=(db_id, from_page, 0)):
        if owner != db_id:
            break
        if len(names) >= STEP_ROWS:
            return names, page
        if wal is not None and lsn <= wal.checkpointed_lsn:
            names.append(VERSION_NAME.pack(page, lsn))
    return names, None
