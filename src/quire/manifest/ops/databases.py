"""Operations on databases: register, rename, change the status, drop, remove; and the manifest's rows about key-value
databases.

The truth about a key-value database is its own log (S1). `FoldLsm` and `RecordLsmEnds` follow it, may be repeated, and
are applied again when the database is opened.

Audit rows are written by the operations that they record (`Overlay.write_notes`), and are removed by age.
"""

import shlex
from itertools import islice
from typing import Any

from msgspec.structs import replace

from quire.core.errors import (
    AlreadyExists,
    DatabaseTombstoned,
    IllegalTransition,
    NameTaken,
    OutOfRange,
    StillReferenced,
    WrongKind,
)
from quire.core.ids import some_u32
from quire.durable.names import check_name
from quire.manifest import tables as t
from quire.manifest.metrics import MetricKind
from quire.manifest.ops.base import Component, Counter, Op, raise_watermark
from quire.manifest.ops.refs import leaf_count_key, namespace_key, release, retain_namespace, wal_count_key
from quire.manifest.overlay import Overlay
from quire.manifest.records import (
    HIDDEN,
    AuditAction,
    Compression,
    DbKind,
    DbRecord,
    DbStatus,
    IndexRecord,
    LsmEndsRecord,
    LsmTableRecord,
    RetentionRecord,
    UInt,
    WalState,
    WalStateRecord,
)

PRUNE_ROWS = 4096
"""Maximum number of rows that one operation removes: a commit of a few milliseconds."""


def claim_name(tables: Overlay, name: str, db_id: int) -> None:
    """Add a database's name to the index, unless it is taken."""
    check_name("database", name)
    key = t.DB_NAMES.key.pack(name)
    holder = tables.db_names.get(key)
    if holder is not None and holder.value != db_id:
        raise NameTaken(
            "a database with this name already exists", hint="choose another name", name=name, db_id=holder.value
        )
    tables.db_names.put(key, IndexRecord(db_id))


class RegisterDb(Op, frozen=True, tag=10):
    """Add a database, with an empty WAL state."""

    component = int(Component.DATABASE)
    db_id: UInt
    record: DbRecord

    def apply(self, tables: Overlay, at_ms: int) -> None:
        some_u32("db_id", self.db_id)
        key = t.DB.key.pack(self.db_id)
        if tables.db.has(key):
            raise AlreadyExists("a database with this id already exists", db_id=self.db_id)
        if self.record.status is DbStatus.TOMBSTONED:
            raise IllegalTransition("only dropping a database sets this status", hint="use drop_db", db_id=self.db_id)
        claim_name(tables, self.record.name, self.db_id)
        if self.record.namespace_id:
            retain_namespace(tables, self.record.namespace_id)
        tables.put_db(self.db_id, self.record)
        tables.wal_state.put(t.WAL_STATE.key.pack(self.db_id, 0), WalStateRecord())
        raise_watermark(tables, Counter.DB, self.db_id)


class UpdateDbStatus(Op, frozen=True, tag=11):
    """Switch a database between ACTIVE and READ_ONLY. Use `DropDb` to drop it, which does more."""

    component = int(Component.DATABASE)
    db_id: UInt
    status: DbStatus

    def apply(self, tables: Overlay, at_ms: int) -> None:
        record = tables.writable(self.db_id, even="read_only")
        _refuse_dropped(self.db_id, record)
        if self.status is DbStatus.TOMBSTONED:
            raise IllegalTransition("only dropping a database sets this status", hint="use drop_db", db_id=self.db_id)
        tables.put_db(self.db_id, replace(record, status=self.status))


class SetDbOptions(Op, frozen=True, tag=161):
    """Set what a user may change of any database, forks included: its tags, and the compression of future chunks."""

    component = int(Component.DATABASE)
    db_id: UInt
    tags: dict[str, str] | None = None
    """All tags; `None` leaves them as they are."""
    compression: Compression | None = None

    def apply(self, tables: Overlay, at_ms: int) -> None:
        record = tables.writable(self.db_id, even="read_only")
        changes: dict[str, Any] = {} if self.tags is None else {"tags": self.tags}
        if self.compression is not None:
            changes["compression"] = self.compression
        tables.put_db(self.db_id, replace(record, **changes))


class RenameDb(Op, frozen=True, tag=12):
    """Give a database another name."""

    component = int(Component.DATABASE)
    db_id: UInt
    name: str

    def apply(self, tables: Overlay, at_ms: int) -> None:
        record = tables.writable(self.db_id, even="read_only")
        _refuse_dropped(self.db_id, record)
        claim_name(tables, self.name, self.db_id)
        if self.name != record.name:
            tables.db_names.delete(t.DB_NAMES.key.pack(record.name))
        tables.put_db(self.db_id, replace(record, name=self.name))


def burn_generation(tables: Overlay, db_id: int, generation: int) -> None:
    """Use up a generation that was not assigned before."""
    record = tables.writable(db_id, even="read_only")
    some_u32("generation", generation)
    if generation < record.next_generation:
        raise AlreadyExists(
            "this generation was already allocated",
            db_id=db_id,
            generation=generation,
            next=record.next_generation,
        )
    tables.put_db(db_id, replace(record, next_generation=generation + 1))


class ReserveGeneration(Op, frozen=True, tag=13):
    """Burn a generation of a database before a plan that uses it leaves the process (M5, P10)."""

    component = int(Component.DATABASE)
    db_id: UInt
    generation: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        burn_generation(tables, self.db_id, self.generation)


class SetDbPageSize(Op, frozen=True, tag=14):
    """Fix the page size: the first commit of a page database determines it permanently."""

    component = int(Component.DATABASE)
    db_id: UInt
    page_size: UInt
    pages_per_chunk: UInt
    config_hash: bytes

    def apply(self, tables: Overlay, at_ms: int) -> None:
        record = tables.writable(self.db_id)
        if record.page_size and record.page_size != self.page_size:
            raise OutOfRange(
                "the page size cannot be changed", db_id=self.db_id, is_=record.page_size, asked=self.page_size
            )
        changed = replace(
            record, page_size=self.page_size, pages_per_chunk=self.pages_per_chunk, config_hash=self.config_hash
        )
        tables.put_db(self.db_id, changed)


class SetRetention(Op, frozen=True, tag=17):
    """Set which snapshots of a database are kept and which are made automatically; `None` for neither."""

    component = int(Component.DATABASE)
    db_id: UInt
    record: RetentionRecord | None

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.writable(self.db_id, even="read_only")
        key = t.RETENTION.key.pack(self.db_id)
        if self.record is None:
            tables.retention.delete(key)
        else:
            tables.retention.put(key, self.record)


class SoftDropDb(Op, frozen=True, tag=18):
    """Drop a database so that it can be undropped.

    Its name is free, it accepts no writes, and it keeps everything, snapshots and policy included. `UndropDb` brings it
    back, `DropDb` drops it permanently.
    """

    component = int(Component.DATABASE)
    db_id: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        record = tables.writable(self.db_id, even="read_only")
        _refuse_dropped(self.db_id, record)
        hidden = hidden_name(self.db_id)
        tables.db_names.delete(t.DB_NAMES.key.pack(record.name))
        tables.db_names.put(t.DB_NAMES.key.pack(hidden), IndexRecord(self.db_id))
        tables.followed_files.delete(t.FOLLOWED_FILES.key.pack(self.db_id))
        tables.notes.append((self.component, self.db_id, AuditAction.DATABASE_DROPPED, record.name, self.db_id, 0))
        former = {"former_name": record.name, "former_status": record.status}
        tables.put_db(
            self.db_id, replace(record, name=hidden, status=DbStatus.READ_ONLY, dropped_at_ms=at_ms, **former)
        )


class UndropDb(Op, frozen=True, tag=19):
    """Undrop a database, under its former name or another."""

    component = int(Component.DATABASE)
    db_id: UInt
    name: str = ""

    def apply(self, tables: Overlay, at_ms: int) -> None:
        record = tables.writable(self.db_id, even="read_only")
        if not record.former_name:
            raise IllegalTransition("the database was not dropped", db_id=self.db_id, name=record.name)
        name = self.name or record.former_name
        tables.db_names.delete(t.DB_NAMES.key.pack(record.name))
        claim_name(tables, name, self.db_id)
        tables.notes.append((self.component, self.db_id, AuditAction.DATABASE_UNDROPPED, name, self.db_id, 0))
        back = {"former_name": "", "former_status": DbStatus.ACTIVE, "status": record.former_status}
        tables.put_db(self.db_id, replace(record, name=name, dropped_at_ms=0, **back))


def hidden_name(db_id: int) -> str:
    """Return the name of a dropped database that can be undropped; no database can be given such a name.

    >>> hidden_name(7)
    '/dropped/7'
    """
    return f"{HIDDEN}{db_id}"


def _refuse_dropped(db_id: int, record: DbRecord) -> None:
    if record.former_name:
        hint = f"`quire undrop {shlex.quote(record.former_name)}` restores it"
        raise DatabaseTombstoned("the database was dropped", hint=hint, db_id=db_id, name=record.former_name)


class DropDb(Op, frozen=True, tag=15):
    """Tombstone a database: free its name, release its live leaves and WAL segments. The gates of its jobs stay.

    Its snapshots must be dropped first, for example in the same batch: each snapshot is a promise of its own.
    """

    component = int(Component.DATABASE)
    db_id: UInt
    only_dropped: bool = False
    """Whether to refuse unless it was dropped before (`SoftDropDb`) and not undropped meanwhile."""

    def apply(self, tables: Overlay, at_ms: int) -> None:
        record = tables.writable(self.db_id, even="read_only")
        if self.only_dropped and not record.former_name:
            raise IllegalTransition("the database was restored in the meantime", db_id=self.db_id, name=record.name)
        if tables.snapshot_index.any(t.SNAPSHOT_INDEX.key.prefix(self.db_id)):
            raise StillReferenced(
                "the database has snapshots",
                hint="drop them first, or drop them with the database: `--snapshots`, over HTTP `?snapshots=true`",
                database=record.name,
            )
        for key, leaf in list(tables.live_leaf.scan(t.LIVE_LEAF.key.prefix(self.db_id))):
            _, number = t.LIVE_LEAF.key.unpack(key)
            release(tables, leaf_count_key(leaf.origin_db_id, number, leaf.generation), at_ms)
            tables.live_leaf.delete(key)
        self._release_wal(tables, at_ms)
        tables.retention.delete(t.RETENTION.key.pack(self.db_id))
        for key, _ in list(tables.lsm_catalog.scan(t.LSM_CATALOG.key.prefix(self.db_id))):
            tables.lsm_catalog.delete(key)
        tables.lsm_ends.delete(t.LSM_ENDS.key.pack(self.db_id))
        tables.followed_files.delete(t.FOLLOWED_FILES.key.pack(self.db_id))
        if not record.former_name:  # otherwise the soft drop was noted
            tables.notes.append((self.component, self.db_id, AuditAction.DATABASE_DROPPED, record.name, self.db_id, 0))
        tables.db_names.delete(t.DB_NAMES.key.pack(record.name))
        gone = {"status": DbStatus.TOMBSTONED, "former_name": "", "former_status": DbStatus.ACTIVE}
        tables.put_db(self.db_id, replace(record, name=record.title, dropped_at_ms=at_ms, **gone))

    def _release_wal(self, tables: Overlay, at_ms: int) -> None:
        for key, segment in list(tables.wal_catalog.scan(t.WAL_CATALOG.key.prefix(self.db_id))):
            _, segment_id = t.WAL_CATALOG.key.unpack(key)
            if segment.state is not WalState.TRUNCATED:
                release(tables, wal_count_key(segment.origin_db_id, segment_id), at_ms)
            # Its own row stays until the file is deleted: it names it. An inherited one only tracked the segment.
            if segment.origin_db_id == self.db_id:
                tables.wal_catalog.put(key, replace(segment, state=WalState.TRUNCATED))
            else:
                tables.wal_catalog.delete(key)
        for key, _ in list(tables.wal_manifest.scan(t.WAL_MANIFEST.key.prefix(self.db_id))):
            tables.wal_manifest.delete(key)


class RecordRollback(Op, frozen=True, tag=162):
    """Note that a database was rolled back to an earlier version, and the snapshot of its state before."""

    component = int(Component.DATABASE)
    db_id: UInt
    to_lsn: UInt
    to_ms: UInt
    lsn: UInt
    before_lsn: UInt
    snapshot: str
    changed_pages: UInt
    changed_keys: UInt = 0

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.writable(self.db_id, even="read_only")
        tables.notes.append((self.component, self.db_id, AuditAction.ROLLED_BACK, self.snapshot, self.to_lsn, 0))


class RemoveDb(Op, frozen=True, tag=16):
    """Remove the tombstone of a database that has no artifacts left."""

    component = int(Component.DATABASE)
    db_id: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        record = tables.database(self.db_id)
        if record.status is not DbStatus.TOMBSTONED:
            raise IllegalTransition(
                "the database has not been dropped", hint="drop it first", db_id=self.db_id, name=record.name
            )
        # These rows name bytes, or a job that may still write some; nothing would find them without the database.
        for view in (
            tables.gc_refcounts,
            tables.slot_leaf,
            tables.wal_catalog,
            tables.chunk_catalog,
            tables.chunk_delta_index,
            tables.page_version_index,
            tables.page_version_head,
            tables.checkpoint_plan,
            tables.job_pending_index,
        ):
            if view.any(t.DB.key.pack(self.db_id)):
                raise StillReferenced(
                    "the database still owns rows",
                    hint="wait for its delete job to finish",
                    db_id=self.db_id,
                    table=view.table.name,
                )
        tables.active_ids.discard(self.db_id)
        tables.db.delete(t.DB.key.pack(self.db_id))
        tables.wal_state.delete(t.WAL_STATE.key.pack(self.db_id, 0))
        tables.snapshot_floor.delete(t.SNAPSHOT_FLOOR.key.pack(self.db_id))
        for key, row in list(tables.snapshot_readers.scan(t.SNAPSHOT_READERS.key.prefix(self.db_id))):
            # The end of the lease removes the others: a version stored as a value is read until then.
            if not row.view and not row.marks_drop:
                tables.snapshot_readers.delete(key)
        for key, _ in list(tables.replica_positions.scan(t.REPLICA_POSITIONS.key.prefix(self.db_id))):
            tables.replica_positions.delete(key)
        for kind in MetricKind:
            tables.metrics.delete(t.METRICS.key.pack(self.db_id, kind))
        if record.namespace_id:
            release(tables, namespace_key(record.namespace_id), at_ms)


class PruneAudit(Op, frozen=True, tag=63):
    """Remove the oldest `limit` audit rows of a database from before a moment."""

    component = int(Component.DATABASE)
    db_id: UInt
    before_ms: UInt
    limit: UInt = PRUNE_ROWS

    def apply(self, tables: Overlay, at_ms: int) -> None:
        end = t.AUDIT.key.prefix(self.db_id, self.before_ms)
        rows = tables.audit.scan(t.AUDIT.key.prefix(self.db_id))
        for key, _ in list(islice(rows, self.limit)):
            if key >= end:
                return
            tables.audit.delete(key)


class FoldLsm(Op, frozen=True, tag=83):
    """Add and remove tables of a key-value database."""

    component = int(Component.CHUNK)
    db_id: UInt
    added: list[tuple[UInt, LsmTableRecord]]
    removed: list[UInt] = []

    def apply(self, tables: Overlay, at_ms: int) -> None:
        _require_lsm(tables, self.db_id)
        for sst_id in self.removed:
            tables.lsm_catalog.delete(t.LSM_CATALOG.key.pack(self.db_id, sst_id))
        for sst_id, row in self.added:
            tables.lsm_catalog.put(t.LSM_CATALOG.key.pack(self.db_id, sst_id), row)


class RecordLsmEnds(Op, frozen=True, tag=130):
    """Record how far the logs of a key-value database are durable."""

    logged = False
    db_id: UInt
    ends: LsmEndsRecord

    def apply(self, tables: Overlay, at_ms: int) -> None:
        _require_lsm(tables, self.db_id)
        tables.lsm_ends.put(t.LSM_ENDS.key.pack(self.db_id), self.ends)


def _require_lsm(tables: Overlay, db_id: int) -> None:
    record = tables.writable(db_id, even="read_only")
    if record.kind is not DbKind.LSM:
        raise WrongKind("not a key-value database", db_id=db_id, kind=record.kind.name.lower())
