"""Describes a store and its databases as frozen values, read from one snapshot of the manifest.

Pure functions of a read transaction, and `StoreReader`, which opens one. Raises the errors of opening a store for reading.
"""

from __future__ import annotations

import os
from collections import Counter as Tally
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, TypeVar, Unpack

import msgspec

from quire.core.clock import SystemClock
from quire.core.errors import InvalidInput, ManifestDamaged
from quire.core.reader_info import ReaderInfo
from quire.durable import names
from quire.durable.files import OsDisk
from quire.durable.locks import is_held
from quire.durable.space import walk_allocated
from quire.manifest import tables as t
from quire.manifest.env import CHANGE_LOG_NAME
from quire.manifest.reads import ReadTxn
from quire.manifest.records import Compression, DbKind, DbRecord, DbStatus
from quire.pages.leasefiles import live_leases
from quire.service.values import (
    DatabaseFilter,
    DatabaseFilterOptions,
    DatabaseInfo,
    DroppedDatabase,
    MirrorStatus,
    StoreInfo,
)
from quire.store import layout
from quire.store.exclusive_artifacts import own_bytes
from quire.store.listing import matching
from quire.store.manifest_reader import ManifestReader
from quire.store.object_location import recorded_owner_state

if TYPE_CHECKING:
    from quire.archive.status import ArchiveStatus
    from quire.core.settings import StoreSettings
    from quire.objects.ownership import OwnerState

E = TypeVar("E", bound=Enum)

EVERYTHING = DatabaseFilter()


class StoreReader(ManifestReader):
    """A store opened for listing, with the same results as a `Store` opened with mode "r". A context manager."""

    def databases(self, **wanted: Unpack[DatabaseFilterOptions]) -> list[DatabaseInfo]:
        """Return the live databases, by name; see `Store.databases`."""
        with self.read() as txn:
            return live_databases(txn, DatabaseFilter(**wanted))

    def dropped(self) -> list[DroppedDatabase]:
        """Return the dropped databases that can be brought back."""
        with self.read() as txn:
            return dropped_databases(txn, self._settings.maintenance.undrop_seconds)

    def info(self) -> StoreInfo:
        """Return a summary of the store."""
        url = layout.objects_url(self.path, self._settings)
        with self.read() as txn:
            owner = recorded_owner_state(txn, OsDisk(), self.path, self._settings.object_store)
            figures = self._env.info()
            archive = recorded_archive_status(txn, self.path, self._settings, owner, self._env.last_txn_id())
            return store_info(
                txn,
                path=self.path,
                mode="r",
                object_store=url,
                owner=owner,
                figures=figures,
                archive=archive,
                now_ms=SystemClock().now_ms(),
            )


def database_info(txn: ReadTxn, db: int | str) -> DatabaseInfo:
    """Describe one database."""
    return _describe(txn, *txn.require_database(db))


def _describe(txn: ReadTxn, db_id: int, record: DbRecord) -> DatabaseInfo:
    followed = txn.get(t.FOLLOWED_FILES, db_id)
    return DatabaseInfo(
        db_id=db_id,
        name=record.name,
        kind=record.kind,
        status=record.status,
        created_at_ms=record.created_at_ms,
        page_size=record.page_size,
        snapshots=sum(1 for _ in txn.raw_scan(t.SNAPSHOT_INDEX, db_id)),
        parent_db_id=record.parent_db_id,
        parent=_parent_name(txn, record.parent_db_id),
        tags=dict(record.tags),
        follows=followed.path if followed is not None else "",
        namespace=_namespace(txn, record),
    )


def _parent_name(txn: ReadTxn, db_id: int) -> str:
    try:
        parent = txn.database(db_id) if db_id else None
    except ManifestDamaged:  # reported when the parent itself is described
        return txn.indexed_name(db_id)
    return parent.name if parent is not None and not parent.is_dropped else ""


def _namespace(txn: ReadTxn, record: DbRecord) -> str:
    row = txn.namespace(record.namespace_id) if record.namespace_id else None
    return "" if row is None else row.name or str(record.namespace_id)


def live_databases(
    txn: ReadTxn, wanted: DatabaseFilter = EVERYTHING, appends: Callable[[], Mapping[int, int]] = dict
) -> list[DatabaseInfo]:
    """Return the live databases that match the filter, in its order. Databases with damaged rows are left out and reported.

    `appends` is that of `matching`.
    """
    live = []
    for db_id, record in matching(txn, wanted, appends):
        try:
            live.append(_describe(txn, db_id, record))
        except ManifestDamaged as error:
            txn.report_damage(db_id, error)
    return live


def dropped_databases(txn: ReadTxn, undrop_seconds: float) -> list[DroppedDatabase]:
    """Return the dropped databases that can be brought back, the last dropped first."""
    rows = [(db_id, record) for db_id, record in txn.dropped()]
    return [
        DroppedDatabase(
            db_id=db_id,
            name=record.former_name,
            kind=record.kind,
            dropped_at_ms=record.dropped_at_ms,
            until_ms=record.dropped_at_ms + int(undrop_seconds * 1000),
            snapshots=sum(1 for _ in txn.raw_scan(t.SNAPSHOT_INDEX, db_id)),
            size_bytes=own_bytes(txn, db_id),
        )
        for db_id, record in sorted(rows, key=lambda row: (row[1].dropped_at_ms, row[0]), reverse=True)
    ]


def store_info(
    txn: ReadTxn,
    *,
    path: str,
    mode: str,
    object_store: str,
    owner: OwnerState,
    figures: dict[str, int],
    archive: ArchiveStatus | None,
    now_ms: int,
    newest: Mapping[int, int] | None = None,
) -> StoreInfo:
    """Summarise the store. `figures` are LMDB's own; `newest` is that of `mirror_status`."""
    kinds: Tally[str] = Tally()
    dropped = 0
    for _, record in txn.databases():
        if record.is_dropped:
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
        owner_epoch=owner.epoch,
        owner_session=owner.session,
        owner_state=owner.state,
        databases={kind.name.lower(): kinds[kind.name.lower()] for kind in DbKind},
        dropped=dropped,
        snapshots=txn.count(t.SNAPSHOT_INDEX),
        chunks=txn.count(t.CHUNK_CATALOG),
        deltas=txn.count(t.CHUNK_DELTA_INDEX),
        wal_segments=txn.count(t.WAL_CATALOG),
        jobs=txn.count(t.JOB_QUEUE),
        unreferenced=txn.count(t.GC_ZERO),
        oldest_change=oldest if txn.count(CHANGE_LOG_NAME) else 0,
        newest_change=head,
        manifest_bytes=figures["file_bytes"],
        map_bytes=figures["map_size"],
        readers=figures["num_readers"],
        disk_bytes=sum(size for _, size in walk_allocated(path)),
        followed_files=txn.count(t.FOLLOWED_FILES),
        page_readers=_page_readers(txn, path),
        archive=archive,
        mirrors=_mirrors(txn, now_ms, newest),
    )


def _mirrors(txn: ReadTxn, now_ms: int, newest: Mapping[int, int] | None) -> tuple[MirrorStatus, ...]:
    if not txn.count(t.MIRROR):
        return ()

    from quire.store.mirrors import mirror_statuses  # loads the jobs, which a store without mirrors does not need

    return tuple(mirror_statuses(txn, now_ms, newest))


def recorded_archive_status(
    txn: ReadTxn, path: str, settings: StoreSettings, owner: OwnerState, transaction: int
) -> ArchiveStatus | None:
    """Return the archive's status from the directory alone, for a process that does not own the store."""
    if settings.archive.mode == "off":
        return None

    from quire.archive.state_files import (
        status_from_directory,  # loads codecs, which a store without an archive does not need
    )

    return status_from_directory(
        OsDisk(),
        path,
        settings.archive,
        store_id=txn.store_id(),
        epoch=txn.owner_epoch(),
        transaction=transaction,
        owner_state=owner.state,
        is_owned=is_held(os.path.join(path, names.LOCK)),
    )


def _page_readers(txn: ReadTxn, path: str) -> tuple[ReaderInfo, ...]:
    """Return the readers with lease files, each with its database's name as a tag."""
    if not os.path.isdir(os.path.join(path, names.READERS)):
        return ()

    leases = sorted(live_leases(path), key=lambda lease: lease.opened_ms)
    readers = ((lease.info, txn.database(lease.db_id)) for lease in leases)
    return tuple(
        msgspec.structs.replace(info, tags={"database": record.name if record else "", **info.tags})
        for info, record in readers
    )


def _number(txn: ReadTxn, name: str, default: int) -> int:
    row = txn.get(t.META, name)
    return row.number if row else default


# ── names as users write them ─────────────────────────────────────────────────────────────────────────────────────────
def status_named(name: DbStatus | str) -> DbStatus:
    """Return the status with this name. Raises `InvalidInput` for one that a user must not set."""
    status = name if isinstance(name, DbStatus) else _named(DbStatus, name, "status", "active, read_only")
    if status is DbStatus.TOMBSTONED:
        raise InvalidInput("setting the status cannot drop a database", hint="use `drop`")
    return status


def compression_named(name: str) -> Compression:
    """Return the compression with this name."""
    return _named(Compression, name, "compression", "none, zstd")


def _named(kind: type[E], name: str, what: str, names: str) -> E:
    members = {member.name.lower(): member for member in kind}
    if name not in members:
        raise InvalidInput(f"unknown {what}", hint=f"one of: {names}", name=name)
    return members[name]
