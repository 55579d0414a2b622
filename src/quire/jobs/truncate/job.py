"""The truncate job: drops the page-index rows that a checkpoint has absorbed, then releases their segments.

Chains serve reads at or below `checkpointed_lsn` (P8), so these rows can be dropped at any time after the checkpoint, in
bounded commits between which other batches commit. All rows above it stay, superseded or not: any of their versions may be
opened by lsn or time. A segment is TRUNCATED when it is CHECKPOINTED and no row names it; its bytes are deleted with its last
reference: snapshots and forks hold their own (P12). Every step can be repeated, and requires the job's lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.core.limits import SCAN_ROWS_MAX
from quire.durable.failpoints import hit
from quire.jobs.context import JobContext
from quire.jobs.handler import Completed, Outcome, Progress, commit_step
from quire.manifest import tables as t
from quire.manifest.jobqueue import Job
from quire.manifest.ops.base import Op
from quire.manifest.ops.pageindex import VERSION_NAME, DropPageVersions
from quire.manifest.ops.wal import MoveWalState
from quire.manifest.reads import ReadTxn
from quire.manifest.records import WalRecord, WalState

STEP_ROWS = 8_192
STEP_SEGMENTS = 256


def truncate_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Drop absorbed rows, then move their segments to TRUNCATED."""
    db_id, dropped, upto_lsn = job.db_id, 0, -1
    while True:
        with ctx.manifest.read() as txn:
            done = [(k[1], row) for k, row in txn.scan(t.WAL_CATALOG, db_id) if row.state is WalState.CHECKPOINTED]
            wal = txn.wal_state(db_id)
        absorbed_lsn = wal.checkpointed_lsn if wal is not None else 0
        # Only when no row names these segments: a row of the page index promises that its segment can be read. A checkpoint
        # that ends meanwhile absorbs more of them, and enqueues no other truncation.
        if absorbed_lsn == upto_lsn:
            break
        upto_lsn = absorbed_lsn
        dropped += _drop_absorbed(ctx, job, progress)
    if ctx.settings.time_travel_seconds and wal is not None:
        # The segment in which the last checkpoint ended has the size and time of the version in the chunks (P14): keep it.
        done = [(segment_id, row) for segment_id, row in done if row.last_lsn != wal.checkpointed_lsn]
    freed = sum(row.used_bytes for _, row in done)
    result = {"rows": dropped, "segments": len(done), "bytes": freed}
    while len(done) > STEP_SEGMENTS:
        progress(dropped, 0)
        step, done = done[:STEP_SEGMENTS], done[STEP_SEGMENTS:]
        commit_step(ctx, job, _release(ctx, job, step))
        hit("jobs.truncate.moved")
        Completed(events=_events(db_id, step)).log()
    return Completed(result, ops=tuple(_release(ctx, job, done)) if done else (), events=_events(db_id, done))


def _drop_absorbed(ctx: JobContext, job: Job, progress: Progress) -> int:
    """Drop the rows that the last checkpoint has absorbed, and return their number."""
    dropped = 0
    place: tuple[int, int] | None = (0, 0)
    while place is not None:
        progress(dropped, 0)
        with ctx.manifest.read() as txn:
            names, place = _absorbed(txn, job.db_id, place)
        if names:
            commit_step(ctx, job, [DropPageVersions(job.db_id, b"".join(names))])
            hit("jobs.truncate.dropped")
            dropped += len(names)
    return dropped


def _release(ctx: JobContext, job: Job, segments: Sequence[tuple[int, WalRecord]]) -> list[Op]:
    """Return the operations that truncate these segments for this database and enqueue the deletion of unreferenced ones."""
    moves: list[Op] = [
        MoveWalState(job.db_id, segment_id, WalState.TRUNCATED, gc_ticket=job.job_id) for segment_id, _ in segments
    ]
    return [*moves, *ctx.manifest.jobs.deletions({row.origin_db_id for _, row in segments})]


def _events(db_id: int, segments: Sequence[tuple[int, WalRecord]]) -> tuple[tuple[str, dict[str, Any]], ...]:
    return tuple(
        ("wal.truncated", {"db_id": db_id, "segment_id": segment_id, "bytes": row.used_bytes})
        for segment_id, row in segments
    )


def _absorbed(txn: ReadTxn, db_id: int, start: tuple[int, int]) -> tuple[list[bytes], tuple[int, int] | None]:
    """Return the names of absorbed versions from a (page, lsn) on, at most one step, and the next start; `None` at the end."""
    wal = txn.wal_state(db_id)
    names: list[bytes] = []
    for looked, ((owner, page, lsn), _) in enumerate(txn.scan(t.PAGE_VERSION_INDEX, start=(db_id, *start))):
        if owner != db_id:
            break
        if len(names) >= STEP_ROWS or looked >= SCAN_ROWS_MAX:
            return names, (page, lsn)
        if wal is not None and lsn <= wal.checkpointed_lsn:
            names.append(VERSION_NAME.pack(page, lsn))
    return names, None
