"""Publishing a snapshot or fork of an open database (P13).

Rules
  1. A hold is taken before the seal and given back when the transaction has committed, so no checkpoint passes the anchor.
  2. It never waits for an open write transaction: what that has not committed is not part of it.
  3. A segment below the hold may be absorbed and truncated meanwhile: then chunks have it, and the anchor is taken anew.

Threads: any. Raises what publishing raises; `StalePlan` if checkpoints come faster than an anchor can be taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from quire.core.errors import ArtifactGone, StalePlan, UnknownArtifact
from quire.manifest.snapshots import Anchor
from quire.manifest.store import ManifestStore
from quire.pages.anchors import anchor_at
from quire.pages.page_source import Mark
from quire.pages.pagestore import PageStore

ANCHOR_TRIES = 8
"""How often an anchor is taken anew; each time a checkpoint must have truncated one of its segments in between."""

R = TypeVar("R")


def anchored(
    manifest: ManifestStore,
    store: PageStore,
    flush: Callable[[PageStore], Mark],
    publish: Callable[[int, Anchor], R],
) -> R:
    """What `publish` makes of the database as it is now, written but not yet durable transactions included."""
    wal, tags = store.wal, {"hold": "snapshot"}
    hold, _ = store.readers.open_newest(lambda: (wal.durable.lsn, None), tags=tags, ttl_seconds=None)
    try:
        mark = flush(store)
        for tries_left in reversed(range(ANCHOR_TRIES)):
            with manifest.read() as txn:
                anchor = anchor_at(txn, store.db_id, mark)
            try:
                return publish(store.db_id, anchor)
            except (ArtifactGone, UnknownArtifact):  # rule 3
                if not tries_left:
                    raise
        raise StalePlan("checkpoints come faster than a snapshot can be taken", hint="try again")
    finally:
        store.readers.close(hold.reader_id)
