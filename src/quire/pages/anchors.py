"""Where a snapshot or a fork stands: the version, and the WAL segments that hold what no chunk holds yet (P12, P13).

An anchor is taken in one transaction, after everything up to its version was sealed and published, and while a lease at or
below it is held, so that no checkpoint goes beyond it. It pins what is not checkpointed: own segments and inherited ones, each
under its origin's name, at most up to the anchor. Segments that were opened later are left out. Taking one never waits for an
open write transaction: what that has not committed is not part of it.

Threads: any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from quire.core.errors import ArtifactGone, StalePlan, UnknownArtifact, UnknownSnapshot
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import Pin, SnapshotRecord, WalState
from quire.manifest.snapshots import Anchor
from quire.manifest.store import ManifestStore
from quire.pages.framemap import FrameMap, PinnedSegment, Regions
from quire.pages.locations import segment_place
from quire.pages.page_source import Mark
from quire.pages.pagestore import PageStore

ANCHOR_TRIES = 8
"""How often an anchor is taken anew; each time a checkpoint must have truncated one of its segments in between."""

R = TypeVar("R")

_IN_WAL = (WalState.SEALED, WalState.INDEXED, WalState.CHECKPOINT_READY)


def anchor_at(txn: ReadTxn, db_id: int, mark: Mark, *, with_base: bool = False) -> Anchor:
    """The anchor of a version that is sealed and published.

    `with_base` also pins the segment that the last checkpoint ended in, as long as it is there: chunks hold the version it
    ended with, and only that segment knows its size and time, which time travel needs (P14).
    """
    wal = txn.wal_state(db_id)
    checkpointed = wal.checkpointed_lsn if wal is not None else 0
    pins = tuple(
        Pin(row.origin_db_id, segment_id, min(row.last_lsn, mark.lsn), row.used_bytes)
        for (_, segment_id), row in txn.scan(t.WAL_CATALOG, db_id)
        if row.first_lsn <= mark.lsn
        and (
            (row.state in _IN_WAL and row.last_lsn > checkpointed)
            or (with_base and row.state is WalState.CHECKPOINTED and row.last_lsn == checkpointed)
        )
    )
    return Anchor(mark.lsn, mark.segment_id, mark.size_pages, pins, mark.commit_ms)


def anchored(
    manifest: ManifestStore,
    store: PageStore,
    flush: Callable[[PageStore], Mark],
    publish: Callable[[int, Anchor], R],
) -> R:
    """What `publish` makes of the database as it is now, written but not yet durable transactions included."""
    wal, tags = store.wal, {"hold": "snapshot"}
    # Held from before the seal until the publishing transaction has committed: no checkpoint passes the anchor.
    hold, _ = store.readers.open_newest(lambda: (wal.durable.lsn, None), tags=tags, ttl_seconds=None)
    try:
        return publish_at(manifest, store.db_id, flush(store), publish)
    finally:
        hold.close()


def publish_at(manifest: ManifestStore, db_id: int, mark: Mark, publish: Callable[[int, Anchor], R]) -> R:
    """What `publish` makes of a version that a lease holds."""
    for tries_left in reversed(range(ANCHOR_TRIES)):
        with manifest.read() as txn:
            anchor = anchor_at(txn, db_id, mark)
        try:
            return publish(db_id, anchor)
        except (ArtifactGone, UnknownArtifact):  # absorbed and truncated meanwhile: then chunks have it
            if not tries_left:
                raise
    raise StalePlan("checkpoints outpace the snapshot or fork", hint="try again", db_id=db_id)


def find_snapshot(txn: ReadTxn, db_id: int, snapshot: int | str) -> tuple[int, SnapshotRecord]:
    """A snapshot of a database, by id or name."""
    snapshot_id = snapshot
    if isinstance(snapshot, str):
        index = txn.get(t.SNAPSHOT_NAMES, db_id, snapshot) if snapshot else None
        snapshot_id = index.value if index is not None else 0
    record = txn.snapshot(db_id, int(snapshot_id))
    if record is None:
        hint = "`quire snapshot ls` lists them"
        raise UnknownSnapshot("the database has no such snapshot", hint=hint, db_id=db_id, snapshot=snapshot)
    return int(snapshot_id), record


def inherited_map(txn: ReadTxn, regions: Regions, db_id: int, objects_url: str) -> FrameMap:
    """Page → newest version in segments that a fork has inherited and not absorbed yet (P12)."""
    rows = [
        (row.first_lsn, PinnedSegment(row.origin_db_id, key[1], row.last_lsn))
        for key, row in txn.scan(t.WAL_CATALOG, db_id)
        if row.origin_db_id != db_id and row.state in _IN_WAL
    ]
    pins = [
        pin._replace(place=segment_place(txn, pin.origin_db_id, pin.segment_id, objects_url))
        for _, pin in sorted(rows, key=lambda item: item[0])
    ]
    return FrameMap.of(regions, pins, max((pin.upto_lsn for pin in pins), default=0))
