"""Versions for who comes back for them: a consumer of row changes keeps the last one it has read of each database, and the
tasks of a query over very many databases ask for the versions of theirs, which its plan has had kept.

A holder's lease (`manifest/leases.py`) keeps what a version needs, and the version as a value: after a restart of the consumer,
or of the owner, the same pages are read. Its holder is done with a version when it has a newer one of the same label, and lets
it go; a holder that is not heard of for the length of its leases loses all of them together.

A database that was dropped is kept as a mark without a version, so that its holder hears of it once, whatever is restarted in
between.

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
from quire.manifest.leases import HOLDER_TAG, LentVersion
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
    """(id of the lease, a view of each database as it is now); the views are kept, by the names of the databases. Without a
    holder they are for whoever knows the lease."""
    tags = {HOLDER_TAG: holder} if holder else None
    lease_id, views = lend(engine, names, seconds, lease_id=lease_id, upload=upload, tags=tags, labels=names)
    engine._manifest.leases.keep_views(lease_id, {view.db_id: _encode(view) for view in views})
    return lease_id, views


def lend_snapshots(
    engine: PageEngine, snapshot: str, names: Sequence[str], seconds: float, *, lease_id: int = 0, upload: bool = False
) -> tuple[int, list[SnapshotView], tuple[str, ...]]:
    """(id of the lease, a view of each database at its own snapshot of this name or id, the databases that have none); the
    views are kept, by the names of the databases. The id is 0 if there was no lease, and none has the snapshot."""
    leases, before = engine._manifest.leases, lease_id
    with engine._manifest.read() as txn:
        db_ids = {find_database(txn, name)[0]: name for name in names}
    parts = [LentVersion(db_id, 1, label=name) for db_id, name in db_ids.items()]
    lease_id = leases.hold(
        parts, seconds, lease_id=lease_id
    )  # before they are looked up: what is dropped later is kept
    views: dict[int, SnapshotView] = {}
    try:
        for db_id in db_ids:
            if (view := _at_snapshot(engine, db_id, snapshot, upload)) is not None:
                views[db_id] = view
                leases.narrow(lease_id, db_id, origins_of(view))
        if views:
            leases.keep_views(lease_id, {db_id: _encode(view) for db_id, view in views.items()})
    finally:
        leases.let_go([(lease_id, db_id) for db_id in db_ids if db_id not in views])
    missing = tuple(name for db_id, name in db_ids.items() if db_id not in views)
    return lease_id if views else before, list(views.values()), missing


def _at_snapshot(engine: PageEngine, db_id: int, snapshot: str, upload: bool) -> SnapshotView | None:
    for wanted in (snapshot, int(snapshot)) if snapshot.isdecimal() else (snapshot,):
        with suppress(UnknownSnapshot):
            return engine.view(db_id, wanted, upload=upload)
    return None


def mark_dropped(engine: PageEngine, holder: str, dropped: Sequence[tuple[int, str]], seconds: float) -> int:
    """Keep for a holder that databases, (id, name), are not there any more; the id of the lease."""
    parts = [LentVersion(db_id, 0, label=name) for db_id, name in dropped]
    return engine._manifest.leases.hold(parts, seconds, tags={HOLDER_TAG: holder})


def held_view(engine: PageEngine, lease_id: int, db_id: int) -> SnapshotView:
    """A version that was kept. Segments may have been uploaded since, and their files removed: they are looked up again."""
    view = _decode(engine._manifest.leases.view(lease_id, db_id))
    with engine._manifest.read() as txn:
        pins = tuple(
            pin._replace(place=segment_place(txn, pin.origin_db_id, pin.segment_id, engine._objects_url) or pin.place)
            for pin in view.pins
        )
    return replace(view, pins=pins)


RANGE_MAX = 64
"""Versions of one answer."""


def held_range(engine: PageEngine, lease_id: int, after: str, last: str) -> list[tuple[str, SnapshotView]]:
    """The first kept versions of a lease behind one name of a database, up to another; none: there are no more."""
    found = engine._manifest.leases.labelled(lease_id, after, last, RANGE_MAX)
    return [(label, held_view(engine, lease_id, db_id)) for label, db_id in found]


def newest_lsns(engine: PageEngine, names: Sequence[str]) -> list[int]:
    """How far databases have been written. One that a crash has left with an open log is opened, others are not."""
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
