"""Lends the newest versions of databases to readers of other processes, as views (P16), without a snapshot.

Rules
  1. All databases of a call get their rows in one commit (`manifest/leases.py`); then their views are looked up.
  2. Each is held in memory from before its seal until its view is made, so that no checkpoint goes beyond it (P13).
  3. A database that nobody has written to since it was last sealed costs no change: the feed hears of lending nothing.
  4. With `upload` segments that a view needs and that have no object yet get one first: for readers that share no disk.

Threads: any. Raises what opening raises, `ReadOnly`, `LeaseExpired`, `InvalidInput`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from quire.core.errors import ReadOnly
from quire.manifest import tables as t
from quire.manifest.leases import Lent, leases_of
from quire.manifest.reads import ReadTxn
from quire.manifest.records import Pin, SnapshotKind, SnapshotRecord
from quire.manifest.store import ManifestStore
from quire.pages.anchors import anchor_at
from quire.pages.page_source import Mark
from quire.pages.pagestore import PageStore
from quire.pages.readers import Lease
from quire.pages.view import LINK_DTYPE, SnapshotView, without_object
from quire.pages.view_build import pinned, view_of

if TYPE_CHECKING:
    from quire.pages.engine import PageEngine

AT_ONCE = 8
"""Databases that are opened and sealed side by side: each waits for the disk."""


def lend(
    engine: PageEngine,
    databases: Sequence[int | str],
    seconds: float,
    *,
    lease_id: int = 0,
    upload: bool = False,
    tags: dict[str, str] | None = None,
) -> tuple[int, list[SnapshotView]]:
    """(id of the lease, a view of each database as it is now), written but not yet durable transactions included."""
    manifest, objects_url = engine._manifest, engine._objects_url
    leases = leases_of(manifest)
    with ThreadPoolExecutor(AT_ONCE) as pool, ExitStack() as holds:
        stores = list(pool.map(engine.open, databases))
        for store in stores:
            holds.callback(store.readers.close, _hold(store).reader_id)
        marks = dict(zip((store.db_id for store in stores), pool.map(engine._flush, stores)))
        parts = [Lent(db_id, mark.lsn) for db_id, mark in marks.items()]
        lease_id = leases.hold(parts, seconds, lease_id=lease_id, tags=tags)
        views = []
        for store in stores:
            with manifest.read() as txn:
                views.append(_view(txn, store.db_id, marks[store.db_id], objects_url))
    for view in views:
        leases.narrow(lease_id, view.db_id, _origins(view))
    return lease_id, [_uploaded(engine, manifest, view, objects_url) for view in views] if upload else views


def _hold(store: PageStore) -> Lease:
    """Hold a version in memory from before its seal until its view is made (rule 2)."""

    def newest() -> tuple[int, None]:
        return store.wal.durable.lsn, None

    return store.readers.open_newest(newest, tags={"hold": "lend"}, ttl_seconds=None)[0]


def _view(txn: ReadTxn, db_id: int, mark: Mark, objects_url: str) -> SnapshotView:
    """The live set of a database, up to a version that is sealed and published."""
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


def _origins(view: SnapshotView) -> set[int]:
    """The databases that made what a view needs."""
    links = np.frombuffer(view.links, LINK_DTYPE)
    return {view.db_id, *(pin.origin_db_id for pin in view.pins), *map(int, np.unique(links["origin_db_id"]))}


def _uploaded(engine: PageEngine, manifest: ManifestStore, view: SnapshotView, objects_url: str) -> SnapshotView:
    """Upload the segments a view needs. Chunks keep their places, so only the pins are looked up again: the leaves may
    be gone by now."""
    if not (missing := without_object(view)):
        return view
    if engine._upload is None:
        raise ReadOnly("only the owner of a store uploads", hint='open the store with mode="rw"', db_id=view.db_id)
    engine._upload(missing)
    with manifest.read() as txn:
        pins = [Pin(pin.origin_db_id, pin.segment_id, pin.upto_lsn) for pin in view.pins]
        return replace(view, pins=tuple(pinned(txn, pins, objects_url, upto_lsn=view.lsn)))
