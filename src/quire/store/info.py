"""What a store says about itself and its databases: frozen values, read from one snapshot of the manifest.

Pure functions of a read transaction; the values outlive it. Raises what reading the manifest raises.
"""

from __future__ import annotations

from collections import Counter as Tally
from dataclasses import dataclass

from quire.core.errors import UnknownDatabase
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbKind, DbRecord, DbStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseInfo:
    """One live database."""

    db_id: int
    name: str
    kind: DbKind
    status: DbStatus
    created_at_ms: int
    page_size: int
    """Of a page database, in bytes; 0 until its first commit decides it."""
    snapshots: int
    parent_db_id: int
    """The database it was forked from; 0 if it is no fork."""
    parent: str
    """That database's name; empty if it is no fork, or the parent is gone."""
    tags: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreInfo:
    """A store as a whole."""

    path: str
    mode: str
    store_id: str
    schema: int
    object_store: str
    databases: dict[str, int]
    """Live databases of each kind."""
    dropped: int
    """Dropped databases of which something is left."""
    snapshots: int
    chunks: int
    deltas: int
    wal_segments: int
    jobs: int
    unreferenced: int
    """Artifacts at zero references, waiting for the collector."""
    oldest_change: int
    newest_change: int
    manifest_bytes: int
    map_bytes: int
    readers: int
    """Reader slots of the manifest in use, over all processes."""


def database_info(txn: ReadTxn, db_id: int) -> DatabaseInfo:
    """What the snapshot says about one database."""
    record = txn.database(db_id)
    if record is None:
        raise UnknownDatabase("no database has this id", hint="`quire ls` lists the databases", db_id=db_id)
    return _describe(txn, db_id, record)


def _describe(txn: ReadTxn, db_id: int, record: DbRecord) -> DatabaseInfo:
    parent = txn.database(record.parent_db_id) if record.parent_db_id else None
    return DatabaseInfo(
        db_id=db_id,
        name=record.name,
        kind=record.kind,
        status=record.status,
        created_at_ms=record.created_at_ms,
        page_size=record.page_size,
        snapshots=sum(1 for _ in txn.raw_scan(t.SNAPSHOT_INDEX, db_id)),
        parent_db_id=record.parent_db_id,
        parent=parent.name if parent is not None and parent.status is not DbStatus.TOMBSTONED else "",
        tags=dict(record.tags),
    )


def live_databases(txn: ReadTxn) -> list[DatabaseInfo]:
    """The live databases, by name."""
    live = (each for each in txn.databases() if each[1].status is not DbStatus.TOMBSTONED)
    return sorted((_describe(txn, *each) for each in live), key=lambda info: info.name)


def store_info(txn: ReadTxn, *, path: str, mode: str, object_store: str, figures: dict[str, int]) -> StoreInfo:
    """What the snapshot, with the manifest's own figures, says about the store."""
    kinds: Tally[str] = Tally()
    dropped = 0
    for _, record in txn.databases():
        if record.status is DbStatus.TOMBSTONED:
            dropped += 1
        else:
            kinds[record.kind.name.lower()] += 1
    oldest, head = txn.feed_bounds()
    identity = txn.get(t.META, "store_id")
    return StoreInfo(
        path=path,
        mode=mode,
        store_id=identity.text if identity else "",
        schema=_number(txn, "schema", 0),
        object_store=object_store,
        databases={kind.name.lower(): kinds[kind.name.lower()] for kind in DbKind},
        dropped=dropped,
        snapshots=txn.count(t.SNAPSHOT_INDEX),
        chunks=txn.count(t.CHUNK_CATALOG),
        deltas=txn.count(t.CHUNK_DELTA_INDEX),
        wal_segments=txn.count(t.WAL_CATALOG),
        jobs=txn.count(t.JOB_QUEUE),
        unreferenced=txn.count(t.GC_ZERO),
        oldest_change=oldest if txn.count(CHANGE_LOG) else 0,
        newest_change=head,
        manifest_bytes=figures["file_bytes"],
        map_bytes=figures["map_size"],
        readers=figures["num_readers"],
    )


def _number(txn: ReadTxn, name: str, default: int) -> int:
    row = txn.get(t.META, name)
    return row.number if row else default
