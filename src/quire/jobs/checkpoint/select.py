"""Which segments a checkpoint absorbs now, and who keeps it from absorbing more.

Rules
  1. The floor is asked for after the job's lease was taken: it does not fall while the checkpoint works with it (M10).
  2. With a window of time travel everything up to the floor is sealed and kept before a plan is made: nobody gets a lease below
     a floor that was given out, and from then on the kept snapshot answers for those versions (P14). What is sealed is kept
     before the floor is asked for, so that only what was committed at that very moment has to be asked for twice.

The page-versions document calls this `CheckpointPlanner::select_mvcc_segments`; so is its span called.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from quire.core.errors import InternalError, StoreUnusable
from quire.jobs.checkpoint.plan import PLAN_FRAMES_MAX, candidates, first_step
from quire.jobs.checkpoint.window import keep_versions, set_readers_aside
from quire.jobs.context import JobContext, PagesOfStore
from quire.manifest import tables as t
from quire.manifest.records import WalRecord, WalState
from quire.pages.readers import Lease
from quire.pages.tracing import span

SPAN = "CheckpointPlanner.select_mvcc_segments"


def engine_of(ctx: JobContext) -> PagesOfStore:
    """The page engine."""
    if ctx.pages is None:
        raise InternalError("this worker has no page engine", hint="run the job in the owner's process")
    return ctx.pages


def select_segments(
    ctx: JobContext, db_id: int, *, frames_max: Callable[[int], int] = lambda _: PLAN_FRAMES_MAX
) -> tuple[list[tuple[int, WalRecord]], bool]:
    """(segment, row) of what the next plan absorbs, and whether there is more than it takes.

    `frames_max` says how many frames one plan takes if so many bytes of WAL wait.
    """
    pages = engine_of(ctx)
    keep_versions(ctx, db_id)
    with span(SPAN, db_id=db_id) as trace:
        floor = pages.floor(db_id)
        with ctx.manifest.read() as txn:
            found = candidates(txn, db_id, floor)
            indexed = [row.last_lsn for _, row in txn.scan(t.WAL_CATALOG, db_id) if row.state is WalState.INDEXED]
        waiting = len(indexed) - len(found)
        if waiting and pages.quota.is_half_full(db_id) and set_readers_aside(ctx, db_id, floor):
            floor = pages.floor(db_id)
            with ctx.manifest.read() as txn:
                found = candidates(txn, db_id, floor)
            waiting = len(indexed) - len(found)
        chosen = first_step(found, frames_max(sum(row.used_bytes for _, row in found))) if found else []
        trace.set(
            floor_lsn=floor,
            segments=[segment_id for segment_id, _ in chosen],
            waiting=waiting,
            blocking_readers=[lease.who for lease in blocking_readers(pages, db_id)] if waiting else [],
        )
    if ctx.settings.time_travel_seconds:
        if floor > max(indexed, default=0):
            with suppress(StoreUnusable):  # a database that takes no more writes has nothing more to seal
                pages.flush(db_id)
        keep_versions(ctx, db_id)
    return chosen, len(chosen) < len(found)


def blocking_readers(pages: PagesOfStore, db_id: int) -> list[Lease]:
    """The readers that hold the floor, oldest version first; those that were set aside do not."""
    return [lease for lease in pages.readers(db_id) if not lease.set_aside]


def waiting_for_readers(ctx: JobContext, db_id: int) -> dict[str, Any]:
    """What a checkpoint had to leave in the WAL because somebody reads below it, and who: for the job's result."""
    leases = blocking_readers(engine_of(ctx), db_id)
    with ctx.manifest.read() as txn:
        indexed = [row for _, row in txn.scan(t.WAL_CATALOG, db_id) if row.state is WalState.INDEXED]
    held = [row for row in indexed if leases and row.last_lsn > leases[0].lsn]
    if not held:
        return {}
    readers = [lease.info for lease in leases if lease.lsn < max(row.last_lsn for row in held)]
    return {"waiting_segments": len(held), "waiting_bytes": sum(row.used_bytes for row in held), "readers": readers}
