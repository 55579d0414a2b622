"""Versions held by a lease across requests: a consumer of row changes holds the last version it has read of each database, and
the tasks of a query over very many databases fetch the versions that its plan had held for them.

A holder's lease (`manifest/leases.py`) keeps the artifacts of a version, and the version as a value: after a restart of the
consumer, or of the owner, the same pages are read. A holder releases a version when it has a newer one with the same label; a
holder that does not renew its leases in time loses all of them together.

A dropped database is held as a mark without a version, so that its holder is notified once, whatever is restarted in between.

Threads: any. Raises what opening raises, `LeaseExpired`, `InvalidInput`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from quire.core.errors import UnknownSnapshot
from quire.manifest import tables as t
from quire.manifest.leases import HOLDER_TAG, ROWS_AT_ONCE, LentVersion
from quire.manifest.reads import ReadTxn
from quire.manifest.records import WalState
from quire.pages.anchors import lend, origins_of
from quire.pages.catalog import find_database, segment_place
from quire.pages.view import SnapshotView

if TYPE_CHECKING:
    from quire.pages.engine import PageEngine

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SnapshotView).decode


def lend_to(
    engine: PageEngine, holder: str, names: Sequence[str], seconds: float, *, lease_id: int = 0, upload: bool = False
) -> tuple[int, list[SnapshotView]]:
    """Return (id of the lease, a view of each database's current version).

    The lease keeps the views, labelled by database name. Without a holder, any caller with the id of the lease may fetch them.
    """
    tags = {HOLDER_TAG: holder} if holder else None
    lease_id, views = lend(engine, names, seconds, lease_id=lease_id, upload=upload, tags=tags, labels=names)
    engine._manifest.leases.keep_views(lease_id, {view.db_id: _encode(view) for view in views})
    return lease_id, views


def lend_snapshots(
    engine: PageEngine, snapshot: str, names: Sequence[str], seconds: float, *, lease_id: int = 0, upload: bool = False
) -> tuple[int, list[SnapshotView], tuple[str, ...]]:
    """Return (id of the lease, a view of each database at its snapshot of this name or id, the databases without one).

    The lease keeps the views, labelled by database name. The id is 0 if no lease was given and no database has the snapshot.
    """
    leases, before = engine._manifest.leases, lease_id
    with engine._manifest.read() as txn:
        db_ids = {find_database(txn, name)[0]: name for name in names}
    parts = [LentVersion(db_id, 1, label=name) for db_id, name in db_ids.items()]
    # Before the look-up, so that artifacts dropped later are kept.
    lease_id = leases.hold(parts, seconds, lease_id=lease_id)
    views: dict[int, SnapshotView] = {}
    try:
        for db_id in db_ids:
            if (view := _at_snapshot(engine, db_id, snapshot, upload)) is not None:
                views[db_id] = view
                leases.record_origins(lease_id, db_id, origins_of(view))
        if views:
            leases.keep_views(lease_id, {db_id: _encode(view) for db_id, view in views.items()})
    finally:
        # Also after an error: a version that no caller can fetch must not keep artifacts.
        leases.release_versions([(lease_id, db_id) for db_id in db_ids if db_id not in views])
    missing = tuple(name for db_id, name in db_ids.items() if db_id not in views)
    return lease_id if views else before, list(views.values()), missing


def _at_snapshot(engine: PageEngine, db_id: int, snapshot: str, upload: bool) -> SnapshotView | None:
    for wanted in (snapshot, int(snapshot)) if snapshot.isdecimal() else (snapshot,):
        with suppress(UnknownSnapshot):
            return engine.view(db_id, wanted, upload=upload)
    return None


def mark_dropped(engine: PageEngine, holder: str, dropped: Sequence[tuple[int, str]], seconds: float) -> int:
    """Record for a holder that databases, (id, name), were dropped; return the id of the lease."""
    parts = [LentVersion(db_id, 0, label=name) for db_id, name in dropped]
    lease_id = 0
    for at in range(0, len(parts), ROWS_AT_ONCE):
        some = parts[at : at + ROWS_AT_ONCE]
        lease_id = engine._manifest.leases.hold(some, seconds, lease_id=lease_id, tags={HOLDER_TAG: holder})
    return lease_id


def held_view(engine: PageEngine, lease_id: int, db_id: int) -> SnapshotView:
    """Return a held version. Its segments are looked up again: they may have been uploaded since, and their files removed."""
    view = _decode(engine._manifest.leases.view(lease_id, db_id))
    with engine._manifest.read() as txn:
        pins = tuple(
            pin._replace(place=segment_place(txn, pin.origin_db_id, pin.segment_id, engine._objects_url) or pin.place)
            for pin in view.pins
        )
    return replace(view, pins=pins)


RANGE_MAX = 64
"""Versions in one response."""


def held_range(engine: PageEngine, lease_id: int, after: str, last: str) -> list[tuple[str, SnapshotView]]:
    """Return the first held versions of a lease with a database name in (after, last]; empty if there are no more."""
    labelled = engine._manifest.leases.labelled(lease_id, after, last, RANGE_MAX)
    return [(label, held_view(engine, lease_id, db_id)) for label, db_id in labelled]


def newest_lsns(engine: PageEngine, names: Sequence[str]) -> list[int]:
    """Return the newest durable lsn of each database. One that a crash left with an open segment is opened, others are not."""
    opened = {store.db_id: store for store in engine.stores()}
    lsns, unsure = list[int](), list[int]()
    with engine._manifest.read() as txn:
        for place, name in enumerate(names):
            db_id, _ = find_database(txn, name)
            store = opened.get(db_id)
            if store is not None:
                lsns.append(store.durable_version()[0])
                continue
            wal = txn.wal_state(db_id)
            lsns.append(wal.indexed_upto_lsn if wal is not None else 0)
            if _has_open_log(txn, db_id):
                unsure.append(place)
    for place in unsure:
        lsns[place] = engine.open(names[place]).durable_version()[0]
    return lsns


def _has_open_log(txn: ReadTxn, db_id: int) -> bool:
    return any(row.state is WalState.OPEN for _, row in txn.scan(t.WAL_CATALOG, db_id))
