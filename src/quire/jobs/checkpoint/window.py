"""The window of time travel: what a checkpoint is about to pass is kept first, as an anonymous, expiring snapshot (P14).

Terms
  window   `maintenance.time_travel_seconds`: how far back every version can be opened
  kept     such a snapshot: the leaves of before the checkpoint, and every segment from the last absorbed one up to its anchor

Rules
  1. It is kept before the plan is stored, so no checkpoint is published without it, whatever crashes in between. Whoever comes
     again finds it by its anchor and makes no second one.
  2. Its anchor is the newest version that is sealed and indexed, at or above everything the checkpoint will cover. It answers
     for all versions since the last checkpoint, the one that checkpoint ended at included: the segment that it ended in is
     pinned too, because only that knows its size and time (the truncate job leaves it there for this).
  3. It expires a window after the commit that it is anchored at: by then each version before that was replaced a window ago.
     One that has expired already is not made at all. Retention drops it, by its time alone.
  4. A reader that stays holds the floor, and with it every checkpoint. When half of the WAL budget is used, its version is set
     aside in the same way, whatever the window is: the snapshot answers for every version from the last checkpoint to its
     anchor, and from its commit on readers of those versions hold no floor (`pages/readers.py`, rule 4). So no version is
     without one of the two. It lives as long as such a reader: each round of upkeep extends it, or drops it if nobody is left;
     after a crash it expires by itself.

Threads: any. Raises what publishing a snapshot raises: `StalePlan`, `ArtifactGone` and `UnknownArtifact` say that a newer
attempt has overtaken this one.
"""

from __future__ import annotations

from contextlib import suppress

from quire.core.errors import UnknownSnapshot
from quire.core.events import emit
from quire.durable.failpoints import hit
from quire.jobs.context import JobContext
from quire.manifest import tables as t
from quire.manifest.ops.snapshots import ExtendSnapshot
from quire.manifest.retention import WINDOW_TAG
from quire.pages.anchors import anchor_at
from quire.pages.framemap import Regions
from quire.pages.readers import is_kept
from quire.pages.timetravel import newest_sealed
from quire.pages.view_build import FROM_TAG, KEPT_FOR_READER, kept_range, reader_snapshots

ASIDE_MS = 600_000
"""How long a version that was set aside is kept without a sign of life of its reader: ten rounds of upkeep."""


def set_readers_aside(ctx: JobContext, db_id: int, floor: int) -> bool:
    """Keep the versions of readers that hold a checkpoint back, so that it may pass them (rule 4); whether it may now."""
    if ctx.pages is None:
        return False
    with ctx.manifest.read() as txn:
        mark, wal = newest_sealed(txn, Regions(ctx.pages.sources), db_id, ctx.objects_url), txn.wal_state(db_id)
        if mark is None or wal is None or mark.lsn <= floor:
            return False
        if any(row.anchor_lsn >= mark.lsn for _, row in reader_snapshots(txn, db_id)):
            return False
        anchor = anchor_at(txn, db_id, mark, with_base=True)
    readers = [lease.who for lease in ctx.pages.readers(db_id) if lease.lsn <= mark.lsn and not lease.set_aside]
    tags = {WINDOW_TAG: KEPT_FOR_READER, FROM_TAG: str(wal.checkpointed_lsn)}
    expires = ctx.clock.now_ms() + ASIDE_MS
    info = ctx.manifest.snapshots.publish(db_id, anchor=anchor, tags=tags, expires_at_ms=expires)
    hit("jobs.checkpoint.set_aside")
    emit("info", "reader.set_aside", db_id=db_id, snapshot_id=info.snapshot_id, lsn=mark.lsn, readers=readers)
    return True


def review_set_aside(ctx: JobContext) -> int:
    """Keep what readers that were set aside still read, drop what nobody reads any more; how many were dropped."""
    if ctx.pages is None:
        return 0
    with ctx.manifest.read() as txn:
        kept = [(db_id, *each) for db_id in txn.owners(t.SNAPSHOT_INDEX) for each in reader_snapshots(txn, db_id)]
    dropped, now = 0, ctx.clock.now_ms()
    for db_id, snapshot_id, row in kept:
        if any(is_kept(lease.lsn, [kept_range(row)]) for lease in ctx.pages.readers(db_id)):
            if row.expires_at_ms < now + ASIDE_MS // 2:
                ctx.manifest.submit([ExtendSnapshot(db_id, snapshot_id, now + ASIDE_MS)]).result()
        else:
            with suppress(UnknownSnapshot):  # somebody was quicker
                ctx.manifest.snapshots.drop(db_id, snapshot_id)
                dropped += 1
    return dropped


def keep_versions(ctx: JobContext, db_id: int) -> int:
    """Keep what is sealed, if a window is configured and nothing keeps it yet; the snapshot's id, or 0."""
    window_ms = int(ctx.settings.time_travel_seconds * 1000)
    if not window_ms or ctx.pages is None:
        return 0
    with ctx.manifest.read() as txn:
        mark = newest_sealed(txn, Regions(ctx.pages.sources), db_id, ctx.objects_url)
        if mark is None or mark.commit_ms + window_ms <= ctx.clock.now_ms():
            return 0
        kept = (row for _, row in txn.scan(t.SNAPSHOT_INDEX, db_id) if row.tags.get(WINDOW_TAG) == "window")
        if any(row.anchor_lsn >= mark.lsn for row in kept):
            return 0
        anchor = anchor_at(txn, db_id, mark, with_base=True)
    info = ctx.manifest.snapshots.publish(
        db_id, anchor=anchor, tags={WINDOW_TAG: "window"}, expires_at_ms=mark.commit_ms + window_ms
    )
    hit("jobs.checkpoint.kept")
    return info.snapshot_id
