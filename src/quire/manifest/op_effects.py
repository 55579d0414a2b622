"""The effects of each operation (the tables it may write, the databases it concerns), and filters of the feed based on
them.

The tables are all that an operation may write in any case; `generation_watermarks` is written by the writer from the
change record, by no operation.

An operation concerns every database that it names in a field: its own, an artifact's origin, the source of a fork, the
origin of a pinned segment. Databases that it finds through other rows do not count: operations that name only a job
(start, requeue, complete, forget), a namespace, a counter or nothing concern no database, and changed reference counts
of another database's artifacts do not concern that database.

Threads: constants and pure functions, callable from any thread. `ChangeFilter.resolve` raises `UnknownDatabase` and
`InvalidInput`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import replace

from quire.core.errors import InvalidInput, UnknownDatabase
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG, ChangeRecord
from quire.manifest.ops import (
    artifacts,
    corrections,
    cursors,
    databases,
    jobs,
    local,
    mirrors,
    pageindex,
    plans,
    refs,
    slots,
    timeline,
    wal,
)
from quire.manifest.ops import snapshots as snaps
from quire.manifest.ops.base import Counter, Op, ReserveIds, ReserveLocalIds
from quire.manifest.reads import ReadTxn, table_named

Concerns = Callable[[Any], Iterable[int]]
Names = Iterable[str | int] | str | int
"""Databases by name or id; a single one needs no list."""


class Touches(msgspec.Struct, frozen=True):
    """The effects of one type of operation."""

    tables: frozenset[str]
    databases: Concerns
    """Returns the databases that an operation names; may include 0, which stands for none."""


def _nothing(_op: Any) -> tuple[int, ...]:
    return ()


def _fields(*names: str) -> Concerns:
    """Return a function for databases named in fields of the operation, or of its record: `record.db_id`."""
    if len(names) == 1:
        only = attrgetter(*names)
        return lambda op: (only(op),)
    return attrgetter(*names)


def _touches(*tables: t.Table[Any], databases: Concerns = _nothing) -> Touches:
    return Touches(frozenset(table.name for table in tables), databases)


def _pinned(*names: str) -> Concerns:
    """Return a function for databases named in fields, and the origins of pinned segments."""
    own = _fields(*names)
    return lambda op: (*own(op), *(pin.origin_db_id for pin in op.pins))


def _of_job(op: jobs.EnqueueJob) -> tuple[int, ...]:
    artifact = op.record.artifact
    return (op.record.db_id,) if artifact is None else (op.record.db_id, artifact[0])


def _of_count(op: corrections.CorrectRefcount) -> tuple[int, ...]:
    return (int.from_bytes(op.key[:4], "big"),)


def _of_mirrored(op: mirrors.BeginMirrorBatch) -> list[int]:
    return [db_id for db_id, _ in op.databases]


_COUNTS = (t.GC_REFCOUNTS, t.GC_ZERO)
_CATALOGS = (t.CHUNK_CATALOG, t.CHUNK_DELTA_INDEX, t.WAL_CATALOG)
_JOB = (t.JOB_QUEUE, t.JOBS_BY_STATE)
_CURSOR = (t.CHANGE_CURSORS, t.META, CHANGE_LOG)
_PAGES = (t.PAGE_VERSION_INDEX, t.PAGE_VERSION_HEAD)


def _of_row(op: corrections.RestoreRow | corrections.RestoreLocalRow) -> tuple[int, ...]:
    """Return the database that a row belongs to, if the table's keys begin with one."""
    table = t.TABLES.get(op.table)
    if table is None or table.key.fields[0][0] not in ("db_id", "origin_db_id"):
        return ()
    return (int.from_bytes(op.key[:4], "big"),)


_DERIVED = tuple(table for table in t.TABLES.values() if table.policy is t.Policy.DERIVED)
_DB, _ORIGIN = _fields("db_id"), _fields("origin_db_id")
_ENQUEUED = _touches(*_JOB, t.JOB_PENDING_INDEX, t.GC_REFCOUNTS, t.ID_WATERMARKS, databases=_of_job)

TOUCHES: dict[type[Op], Touches] = {
    ReserveIds: _touches(t.ID_WATERMARKS, t.META),
    # databases
    databases.RegisterDb: _touches(
        t.DB,
        t.WAL_STATE,
        t.DB_NAMES,
        t.GC_REFCOUNTS,
        t.ID_WATERMARKS,
        databases=_fields("db_id", "record.parent_db_id"),
    ),
    databases.UpdateDbStatus: _touches(t.DB, databases=_DB),
    databases.SoftDropDb: _touches(t.DB, t.DB_NAMES, t.FOLLOWED_FILES, t.AUDIT, databases=_DB),
    databases.UndropDb: _touches(t.DB, t.DB_NAMES, t.AUDIT, databases=_DB),
    databases.RecordRollback: _touches(t.AUDIT, databases=_DB),
    databases.SetDbOptions: _touches(t.DB, databases=_DB),
    databases.RenameDb: _touches(t.DB, t.DB_NAMES, databases=_DB),
    databases.ReserveGeneration: _touches(t.DB, databases=_DB),
    databases.SetDbPageSize: _touches(t.DB, databases=_DB),
    databases.SetRetention: _touches(t.RETENTION, databases=_DB),
    databases.DropDb: _touches(
        t.DB,
        t.DB_NAMES,
        t.LIVE_LEAF,
        t.WAL_CATALOG,
        t.WAL_MANIFEST,
        t.RETENTION,
        t.AUDIT,
        t.LSM_CATALOG,
        t.LSM_ENDS,
        t.FOLLOWED_FILES,
        *_COUNTS,
        databases=_DB,
    ),
    databases.FoldLsm: _touches(t.LSM_CATALOG, databases=_DB),
    databases.RecordLsmEnds: _touches(t.LSM_ENDS, databases=_DB),
    local.FollowSqliteFile: _touches(t.FOLLOWED_FILES, databases=_DB),
    databases.RemoveDb: _touches(
        t.DB, t.WAL_STATE, t.SNAPSHOT_FLOOR, t.SNAPSHOT_READERS, t.REPLICA_POSITIONS, t.METRICS, *_COUNTS, databases=_DB
    ),
    # artifacts, slots, counts
    artifacts.PutChunk: _touches(t.CHUNK_CATALOG, t.GC_REFCOUNTS, databases=_ORIGIN),
    artifacts.PutDelta: _touches(
        t.CHUNK_DELTA_INDEX, t.GC_REFCOUNTS, databases=_fields("origin_db_id", "base_origin_db_id")
    ),
    artifacts.RecordUploads: _touches(t.AUDIT, databases=_ORIGIN),
    artifacts.UpdateArtifact: _touches(*_CATALOGS, t.AUDIT, *_COUNTS, databases=_ORIGIN),
    artifacts.PutNamespace: _touches(t.REMOTE_NAMESPACE, t.ID_WATERMARKS, t.GC_REFCOUNTS),
    artifacts.DropNamespace: _touches(t.REMOTE_NAMESPACE, *_COUNTS),
    artifacts.RetireObjects: _touches(t.RETIRED),
    artifacts.ForgetRetired: _touches(t.RETIRED),
    timeline.Timeline: _touches(t.TIMELINE, t.ID_WATERMARKS),
    artifacts.BeginOwnerEpoch: _touches(t.REMOTE_NAMESPACE, t.ID_WATERMARKS, *_COUNTS),
    slots.SetSlots: _touches(t.SLOT_LEAF, t.LIVE_LEAF, *_COUNTS, databases=_fields("db_id", "expected_origin_db_id")),
    slots.CollectLeaf: _touches(t.SLOT_LEAF, *_COUNTS, databases=_ORIGIN),
    refs.RemoveArtifact: _touches(*_CATALOGS, t.REMOTE_NAMESPACE, t.AUDIT, *_COUNTS, databases=_ORIGIN),
    corrections.CorrectRefcount: _touches(*_COUNTS, databases=_of_count),
    corrections.CorrectIndex: _touches(*_DERIVED),
    corrections.RestoreRow: _touches(*corrections.RESTORED, databases=_of_row),
    corrections.RestoreLocalRow: _touches(*corrections.RESTORED_LOCAL, databases=_of_row),
    databases.PruneAudit: _touches(t.AUDIT, databases=_DB),
    # write-ahead log and pages
    wal.OpenSegment: _touches(t.WAL_CATALOG, t.WAL_STATE, t.GC_REFCOUNTS, databases=_DB),
    wal.AppendWalChunk: _touches(t.WAL_CATALOG, t.WAL_MANIFEST, t.WAL_STATE, t.GC_REFCOUNTS, databases=_DB),
    wal.MoveWalState: _touches(t.WAL_CATALOG, t.WAL_MANIFEST, *_COUNTS, databases=_DB),
    wal.AdvanceWal: _touches(t.WAL_STATE, databases=_DB),
    wal.AdvanceCheckpoint: _touches(t.WAL_STATE, t.METRICS, databases=_DB),
    plans.BeginPlan: _touches(t.CHECKPOINT_PLAN, t.DB, t.WAL_CATALOG, databases=_DB),
    plans.FinishPlan: _touches(t.CHECKPOINT_PLAN, t.WAL_CATALOG, t.METRICS, databases=_DB),
    plans.AbandonPlan: _touches(t.CHECKPOINT_PLAN, *_CATALOGS, *_COUNTS, databases=_DB),
    wal.DiscardSegment: _touches(t.WAL_CATALOG, *_COUNTS, databases=_DB),
    pageindex.PublishPages: _touches(*_PAGES, databases=_DB),
    pageindex.DropPageVersions: _touches(*_PAGES, databases=_DB),
    pageindex.ForgetPages: _touches(*_PAGES, databases=_DB),
    # snapshots and forks
    snaps.PublishSnapshot: _touches(
        t.SNAPSHOT_INDEX, t.SNAPSHOT_NAMES, t.DB, t.AUDIT, t.METRICS, t.GC_REFCOUNTS, databases=_pinned("db_id")
    ),
    snaps.DropSnapshot: _touches(t.SNAPSHOT_INDEX, t.SNAPSHOT_NAMES, t.AUDIT, t.METRICS, *_COUNTS, databases=_DB),
    snaps.SoftDropSnapshot: _touches(t.SNAPSHOT_INDEX, t.SNAPSHOT_NAMES, t.AUDIT, databases=_DB),
    snaps.UndropSnapshot: _touches(t.SNAPSHOT_INDEX, t.SNAPSHOT_NAMES, t.AUDIT, databases=_DB),
    snaps.ExtendSnapshot: _touches(t.SNAPSHOT_INDEX, databases=_DB),
    snaps.ForkDb: _touches(
        t.DB,
        t.DB_NAMES,
        t.LIVE_LEAF,
        t.WAL_CATALOG,
        t.WAL_STATE,
        t.AUDIT,
        t.GC_REFCOUNTS,
        t.ID_WATERMARKS,
        databases=_pinned("db_id", "source_db_id"),
    ),
    # mirrors
    mirrors.PutMirror: _touches(t.MIRROR),
    mirrors.DropMirror: _touches(t.MIRROR, t.MIRROR_DATABASE, t.MIRROR_BATCH),
    mirrors.MarkMirror: _touches(t.MIRROR),
    mirrors.BeginMirrorBatch: _touches(t.MIRROR, t.MIRROR_BATCH, databases=_of_mirrored),
    mirrors.AdoptMirrorBatch: _touches(t.MIRROR, t.MIRROR_DATABASE, t.MIRROR_BATCH),
    # jobs
    jobs.EnqueueJob: _ENQUEUED,
    jobs.EnsureJob: _ENQUEUED,
    jobs.StartJob: _touches(*_JOB, t.JOB_LEASES, t.WAL_STATE),
    jobs.RequeueJob: _touches(*_JOB, t.JOB_LEASES, t.WAL_STATE),
    jobs.CompleteJob: _touches(*_JOB, t.JOB_LEASES, t.JOB_PENDING_INDEX, t.WAL_STATE, *_COUNTS),
    jobs.ForgetJob: _touches(*_JOB),
    jobs.RenewJobLease: _touches(t.JOB_LEASES),
    # local: never in a change record
    ReserveLocalIds: _touches(t.META),
    local.RecordMetric: _touches(t.METRICS),
    local.PutReader: _touches(t.SNAPSHOT_READERS, t.META, databases=_DB),
    local.DropReader: _touches(t.SNAPSHOT_READERS, databases=_DB),
    local.SetFloor: _touches(t.SNAPSHOT_FLOOR, databases=_DB),
    local.PruneIdempotency: _touches(t.IDEMPOTENCY),
    local.PutReplicaPosition: _touches(t.REPLICA_POSITIONS, databases=_DB),
    local.DropReplicaPositions: _touches(t.REPLICA_POSITIONS, databases=_DB),
    local.SetObjectPlace: _touches(t.META),
    local.RecordVerification: _touches(t.META),
    cursors.RegisterCursor: _touches(t.CHANGE_CURSORS, t.CURSOR_NAMES, t.META),
    cursors.AcknowledgeChanges: _touches(*_CURSOR),
    cursors.DropCursor: _touches(*_CURSOR, t.CURSOR_NAMES),
    cursors.LoseCursor: _touches(*_CURSOR),
    cursors.ClampCursor: _touches(*_CURSOR),
    cursors.ResumeCursor: _touches(t.CHANGE_CURSORS),
    cursors.RetainChanges: _touches(t.META, CHANGE_LOG),
    cursors.TrimChanges: _touches(CHANGE_LOG),
}
"""The effects of every type of operation. A type that is missing passes every filter: a subscriber sees too much, never
too little (a test names missing types)."""


class ChangeFilter(msgspec.Struct, frozen=True):
    """Selects the changes that a subscriber sees. Make one with `resolve`."""

    databases: frozenset[int] | None
    """`None`: any, and operations without a database."""
    kinds: frozenset[type[Op]] | None
    """Types of operations that may write one of the tables; `None`: all."""

    @classmethod
    def resolve(cls, txn: ReadTxn, databases: Names | None, tables: Iterable[str] | str | None) -> ChangeFilter | None:
        """Return the filter for these databases and tables; `None` if there is nothing to filter by.

        Names are resolved now: a database that is renamed or dropped later stays the one that was meant.
        """
        if databases is None and tables is None:
            return None
        ids = (
            None
            if databases is None
            else frozenset(_database(txn, database) for database in _listed(databases, "databases"))
        )
        kinds = None if tables is None else _kinds(frozenset(_listed(tables, "tables")))
        return cls(ids, kinds)

    def of(self, record: ChangeRecord) -> ChangeRecord | None:
        """Return the change with only the operations that pass; sequence, time and generations stay. `None` if none passes."""
        passing = tuple([op for op in record.operations if self.passes(op)])
        if len(passing) == len(record.operations):
            return record
        return replace(record, operations=passing) if passing else None

    def passes(self, op: Op) -> bool:
        """Return whether an operation passes."""
        declared = TOUCHES.get(type(op))
        if declared is None:
            return True
        if self.kinds is not None and type(op) not in self.kinds:
            return False
        return self.databases is None or not self.databases.isdisjoint(declared.databases(op))


def _listed(given: Any, what: str) -> list[Any]:
    listed = [given] if isinstance(given, str | int) else list(given)
    if not listed:
        raise InvalidInput(f"a filter by {what} must name at least one", hint=f"omit {what} to see all")
    return listed


def _database(txn: ReadTxn, database: str | int) -> int:
    """Return the id of a database that exists or existed: its changes may still be in the feed."""
    if isinstance(database, str):
        return txn.database_id(database)
    if not 0 < database < txn.next_id(Counter.DB):
        raise UnknownDatabase("no database has this id", hint="`quire ls` lists the databases", db_id=database)
    return database


def _kinds(names: frozenset[str]) -> frozenset[type[Op]]:
    for name in names:
        table = table_named(name)
        if table.name not in FILTERABLE:
            raise InvalidInput(
                "no change in the feed writes this table",
                hint=f"filter by one of {', '.join(sorted(FILTERABLE))}",
                table=name,
            )
    return frozenset(op for op, declared in TOUCHES.items() if not names.isdisjoint(declared.tables))


FILTERABLE = frozenset(name for op, declared in TOUCHES.items() if op.logged for name in declared.tables)
"""Tables that logged operations write: a filter by any other table would never let a change through."""
