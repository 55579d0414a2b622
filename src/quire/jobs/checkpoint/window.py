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

Threads: any. Raises what publishing a snapshot raises: `StalePlan`, `ArtifactGone` and `UnknownArtifact` say that a newer
attempt has overtaken this one.
"""

from __future__ import annotations

from quire.durable.failpoints import hit
from quire.jobs.context import JobContext
from quire.manifest import tables as t
from quire.manifest.retention import WINDOW_TAG
from quire.pages.anchors import anchor_at
from quire.pages.framemap import Regions
from quire.pages.timetravel import newest_sealed


def keep_versions(ctx: JobContext, db_id: int) -> int:
    """Keep what is sealed, if a window is configured and nothing keeps it yet; the snapshot's id, or 0."""
    window_ms = int(ctx.settings.time_travel_seconds * 1000)
    if not window_ms or ctx.pages is None:
        return 0
    with ctx.manifest.read() as txn:
        mark = newest_sealed(txn, Regions(ctx.pages.sources), db_id, ctx.objects_url)
        if mark is None or mark.commit_ms + window_ms <= ctx.clock.now_ms():
            return 0
        kept = (row for _, row in txn.scan(t.SNAPSHOT_INDEX, db_id) if WINDOW_TAG in row.tags)
        if any(row.anchor_lsn >= mark.lsn for row in kept):
            return 0
        anchor = anchor_at(txn, db_id, mark, with_base=True)
    info = ctx.manifest.snapshots.publish(
        db_id, anchor=anchor, tags={WINDOW_TAG: "window"}, expires_at_ms=mark.commit_ms + window_ms
    )
    hit("jobs.checkpoint.kept")
    return info.snapshot_id
