"""Anchors of snapshots, forks and lent versions: an lsn, and pins on the WAL segments that no chunk contains yet (P12, P13).

An anchor is taken in one transaction, after everything up to its version was sealed and published, and while a lease at or
below it is held, so that no checkpoint passes it. It pins the segments that are not checkpointed, own and inherited ones, each
under its origin's id, at most up to the anchor. Segments opened later are omitted. Taking an anchor never waits for an open
write transaction, which is not part of it.

`lend` gives the newest versions of databases to readers in other processes, as views without a snapshot (P16). All databases of
a call get their rows in one commit (`manifest/leases.py`). A database that was not written since it was last sealed costs no
change. A closed one whose log is completely published is not even opened: once the rows of the lease are committed, one
transaction reads everything that its view consists of.

Threads: any. Raises what opening raises, `ReadOnly`, `LeaseExpired`, `InvalidInput`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from quire.core.errors import ArtifactGone, StalePlan, UnknownArtifact
from quire.manifest import tables as t
from quire.manifest.leases import LentVersion
from quire.manifest.reads import ReadTxn
from quire.manifest.records import Pin, SnapshotKind, SnapshotRecord, WalState
from quire.manifest.snapshots import Anchor
from quire.manifest.store import ManifestStore
from quire.pages.catalog import find_database, segment_place
from quire.pages.framemap import FrameMap, PinnedSegment, Regions
from quire.pages.page_source import Mark
from quire.pages.pagestore import PageStore
from quire.pages.readers import HOLD_TAG, Lease
from quire.pages.recovery import published_mark
from quire.pages.snapshot import Snapshot
from quire.pages.timetravel import At
from quire.pages.view import LINK_DTYPE, SnapshotView, ViewReader, without_object
from quire.pages.view_build import pinned, view_of

if TYPE_CHECKING:
    from quire.pages.engine import PageEngine

ANCHOR_TRIES = 8
"""How often taking an anchor is attempted. An attempt fails only if a checkpoint truncates one of its segments meanwhile."""

R = TypeVar("R")

_IN_WAL = (WalState.SEALED, WalState.INDEXED, WalState.CHECKPOINT_READY)


def anchor_at(txn: ReadTxn, db_id: int, mark: Mark, *, with_base: bool = False) -> Anchor:
    """Return the anchor of a version that is sealed and published.

    `with_base` also pins the segment in which the last checkpoint ended, if it still exists: the chunks have the version at its
    end, but only that segment has its size and time, which time travel needs (P14).
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
    """Call `publish` with an anchor of the current version, written but not yet durable transactions included; return its
    result."""
    # Before the flush: a checkpoint between the seal and the snapshot's commit could pass the anchor (P13).
    with closing(_hold(store, "snapshot")):
        return publish_at(manifest, store.db_id, flush(store), publish)


def publish_at(manifest: ManifestStore, db_id: int, mark: Mark, publish: Callable[[int, Anchor], R]) -> R:
    """Call `publish` with an anchor of a version that a lease holds; return its result."""
    for tries_left in reversed(range(ANCHOR_TRIES)):
        with manifest.read() as txn:
            anchor = anchor_at(txn, db_id, mark)
        try:
            return publish(db_id, anchor)
        except (ArtifactGone, UnknownArtifact):  # a segment was absorbed and truncated: chunks have its pages now
            if not tries_left:
                raise
    raise StalePlan("checkpoints are running too often to take the snapshot or fork", hint="try again", db_id=db_id)


def inherited_map(txn: ReadTxn, regions: Regions, db_id: int, objects_url: str) -> FrameMap:
    """Return page → newest version in segments that a fork has inherited and not absorbed yet (P12)."""
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


AT_ONCE = 8
"""Databases that are opened and sealed concurrently, because each waits for the disk."""


def lend(
    engine: PageEngine,
    databases: Sequence[int | str],
    seconds: float,
    *,
    lease_id: int = 0,
    upload: bool = False,
    tags: dict[str, str] | None = None,
    labels: Sequence[str] = (),
) -> tuple[int, list[SnapshotView]]:
    """Return (id of the lease, a view of each database's current version).

    Views include written transactions that are not yet durable.
    """
    manifest, objects_url = engine._manifest, engine._objects_url
    leases = manifest.leases
    with manifest.read() as txn:
        db_ids = [find_database(txn, db)[0] for db in databases]
        marks = {db_id: mark for db_id in db_ids if (mark := _mark_at_rest(engine, txn, db_id)) is not None}
    views: dict[int, SnapshotView] = {}
    with ExitStack() as undo:
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="quire-lend") as pool, ExitStack() as holds:
            stores = list(pool.map(engine.open, [db_id for db_id in db_ids if db_id not in marks]))
            for store in stores:
                holds.callback(_hold(store, "lend").close)
            marks.update(zip((store.db_id for store in stores), pool.map(engine._flush, stores)))
            called = dict(zip(db_ids, labels))
            parts = [LentVersion(db_id, marks[db_id].lsn, label=called.get(db_id, "")) for db_id in db_ids]
            # Committed before any view is read: from here on, artifacts that a view may name are kept when they reach zero
            # (decision 014).
            lease_id = leases.hold(parts, seconds, lease_id=lease_id, tags=tags)
            # After a failure (a database was dropped in the meantime, for example) no caller has these versions, so the lease
            # must not list them.
            undo.callback(leases.release_versions, [(lease_id, db_id) for db_id in db_ids])
            opened = {store.db_id for store in stores}
            for db_id in db_ids:
                with manifest.read() as txn:
                    # No lease in memory protects a closed database. If it was opened meanwhile, it is lent again below.
                    if db_id in opened or _mark_at_rest(engine, txn, db_id) == marks[db_id]:
                        views[db_id] = _view(txn, db_id, marks[db_id], objects_url)
        for db_id, view in views.items():
            leases.record_origins(lease_id, db_id, origins_of(view))
        if woken := [db_id for db_id in db_ids if db_id not in views]:  # opened by another thread in the meantime
            names = [called[db_id] for db_id in woken if db_id in called]
            _, late = lend(engine, woken, seconds, lease_id=lease_id, tags=tags, labels=names)
            views.update(zip(woken, late))
        ordered = [views[db_id] for db_id in db_ids]
        if upload:
            ordered = [_uploaded(engine, manifest, view, objects_url) for view in ordered]
        undo.pop_all()
        return lease_id, ordered


def _mark_at_rest(engine: PageEngine, txn: ReadTxn, db_id: int) -> Mark | None:
    """Return the newest version of a closed database whose log is completely published; otherwise `None`."""
    database, state = txn.database(db_id), txn.wal_state(db_id)
    if engine._open.peek(db_id) is not None or database is None or not database.page_size or state is None:
        return None
    rows = [row for _, row in txn.scan(t.WAL_CATALOG, db_id)]
    is_known = all(row.origin_db_id != db_id or row.state not in (WalState.OPEN, WalState.SEALED) for row in rows)
    if not is_known or not state.last_applied_lsn:
        return None
    return published_mark(txn, engine._disk, engine._root, db_id)


def lend_reader(
    engine: PageEngine, db: int | str, at: str | At, seconds: float, *, tags: dict[str, str] | None = None
) -> tuple[int, Snapshot]:
    """Return (id of a lease, a reader of the version `at` a snapshot's name, an lsn or a time).

    Neither dropping the snapshot nor a checkpoint removes what the reader needs. The id is 0 if the reader has its own lease,
    in memory.
    """
    manifest = engine._manifest
    with manifest.read() as txn:
        db_id, _ = find_database(txn, db)
    # Before the version is looked up, so that artifacts dropped from now on are kept.
    lease_id = manifest.leases.hold([LentVersion(db_id, 0)], seconds, tags=tags)
    try:
        if isinstance(at, str):
            reader: Snapshot = engine.open_view(db_id, at)
        else:
            reader = engine.open(db_id).open_snapshot(at=at, tags=tags)
        if isinstance(reader, ViewReader):
            manifest.leases.record_origins(lease_id, db_id, origins_of(reader.view))
            return lease_id, reader
    except BaseException:
        manifest.leases.release(lease_id)
        raise
    manifest.leases.release(lease_id)
    return 0, reader


def _hold(store: PageStore, why: str) -> Lease:
    """Hold the newest version from before its seal until the batch that names it has committed, so that no checkpoint passes it
    (P13)."""
    return store.readers.open_newest(lambda: (store.wal.durable.lsn, None), tags={HOLD_TAG: why}, ttl_seconds=None)[0]


def _view(txn: ReadTxn, db_id: int, mark: Mark, objects_url: str) -> SnapshotView:
    """Return a view of a database's live set, up to a version that is sealed and published."""
    database = txn.database(db_id)
    anchor = anchor_at(txn, db_id, mark)
    record = SnapshotRecord(
        name="",
        kind=SnapshotKind.ANONYMOUS,
        created_at_ms=mark.commit_ms,
        generation=0,
        anchor_lsn=anchor.lsn,
        anchor_segment_id=anchor.segment_id,
        size_pages=anchor.size_pages,
        page_size=database.page_size if database is not None else 0,
        leaves=[(key[1], leaf.origin_db_id, leaf.generation) for key, leaf in txn.scan(t.LIVE_LEAF, db_id)],
        pins=list(anchor.pins),
        anchor_time_ms=anchor.time_ms,
    )
    return view_of(txn, db_id, 0, record, objects_url)


def origins_of(view: SnapshotView) -> set[int]:
    """Return the databases that created the artifacts of a view."""
    links = np.frombuffer(view.links, LINK_DTYPE)
    return {view.db_id, *(pin.origin_db_id for pin in view.pins), *map(int, np.unique(links["origin_db_id"]))}


def _uploaded(engine: PageEngine, manifest: ManifestStore, view: SnapshotView, objects_url: str) -> SnapshotView:
    """Upload the segments of a view and return it with their new places.

    Chunks keep their places, so only the pins are looked up again: the leaves may be gone by now.
    """
    if not (missing := without_object(view)):
        return view
    engine.upload(missing)
    with manifest.read() as txn:
        pins = [Pin(pin.origin_db_id, pin.segment_id, pin.upto_lsn) for pin in view.pins]
        return replace(view, pins=tuple(pinned(txn, pins, objects_url, upto_lsn=view.lsn)))
