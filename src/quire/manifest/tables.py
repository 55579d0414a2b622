"""Every table of the manifest: its key, its record, and whether its changes are part of the feed.

Terms
  logged    changes enter the change log; replaying the log reproduces these tables byte for byte (M2)
  local     never logged: about this environment, its subscribers and its readers, not about the data
  derived   an index that can be rebuilt from other tables; written in the same transaction, never logged itself

This list is the schema: `docs/formats/manifest.md` shows it and a test compares the two. A table is added by a line
here and nothing else, in existing stores too: tables are created at open.
"""

from __future__ import annotations

from enum import Enum
from functools import cached_property
from hashlib import blake2b
from typing import Any, Generic

from quire.core.errors import InvalidInput
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.manifest import records as r
from quire.manifest.codec import R, RecordCodec
from quire.manifest.keys import KeyCodec
from quire.manifest.rows import RowCodec


class Policy(Enum):
    LOGGED = "logged"
    LOCAL = "local"
    DERIVED = "derived"


class Table(Generic[R]):
    """One LMDB database: name, typed key, typed record."""

    def __init__(
        self,
        name: str,
        key: str,
        record: type[R],
        policy: Policy,
        purpose: str,
        *,
        version: int = 1,
        packed: str | None = None,
    ) -> None:
        self.name = name
        self.key = KeyCodec.of(key)
        self._record, self._version, self._packed = record, version, packed
        self.policy = policy
        self.purpose = purpose
        TABLES[name] = self

    @cached_property
    def codec(self) -> RecordCodec[R]:
        """The codec of records. Built on first use: most commands read few tables, and building a decoder takes time."""
        return RecordCodec(self._record, version=self._version, packed=self._packed)

    @cached_property
    def rows(self) -> RowCodec[R]:
        """The codec of rows as LMDB stores them: a record's bytes and a checksum."""
        return RowCodec(self.name, self.key, self.codec)

    def __repr__(self) -> str:
        return f"Table({self.name})"


TABLES: dict[str, Table[Any]] = {}
"""All tables by name, in order of declaration."""

_LOGGED, _LOCAL, _DERIVED = Policy.LOGGED, Policy.LOCAL, Policy.DERIVED
_ARTIFACT = "origin_db_id u32, kind u8, id u32, generation u32, delta_id u16"

# ── logged ────────────────────────────────────────────────────────────────────────────────────────────────────────────
DB = Table("db", "db_id u32", r.DbRecord, _LOGGED, "identity, configuration and status of a database")
WAL_STATE = Table("wal_state", "db_id u32, shard u16", r.WalStateRecord, _LOGGED, "progress of the WAL; flush gate")
WAL_CATALOG = Table("wal_catalog", "db_id u32, segment_id u32", r.WalRecord, _LOGGED, "WAL artifacts and their states")
WAL_MANIFEST = Table(
    "wal_manifest",
    "db_id u32, generation u32, segment_id u32",
    r.WalChunkPointer,
    _LOGGED,
    "order of sealed WAL artifacts per generation",
)
CHUNK_CATALOG = Table(
    "chunk_catalog",
    "origin_db_id u32, chunk_id u32, generation u32",
    r.ChunkRecord,
    _LOGGED,
    "base chunks: residency, size, hashes",
)
CHUNK_DELTA_INDEX = Table(
    "chunk_delta_index",
    "origin_db_id u32, chunk_id u32, generation u32, delta_id u16",
    r.DeltaRecord,
    _LOGGED,
    "deltas over base chunks",
)
CHECKPOINT_PLAN = Table(
    "checkpoint_plan",
    "db_id u32, generation u32",
    r.PlanRecord,
    _LOGGED,
    "plans of checkpoints and merges that are running",
)
SLOT_LEAF = Table(
    "slot_leaf",
    "origin_db_id u32, leaf u32, generation u32",
    r.LeafRecord,
    _LOGGED,
    "immutable leaves of 256 slots: slot → chain of base and deltas",
)
LIVE_LEAF = Table("live_leaf", "db_id u32, leaf u32", r.LeafRef, _LOGGED, "the leaf versions a live database holds")
REMOTE_NAMESPACE = Table("remote_namespace", "namespace_id u32", r.NamespaceRecord, _LOGGED, "buckets and prefixes")
TIMELINE = Table(
    "timeline",
    "first_number u64",
    r.TimelineRecord,
    _LOGGED,
    "takeovers and restores: where numbering continues, and where it ended before",
)
SNAPSHOT_INDEX = Table(
    "snapshot_index",
    "db_id u32, snapshot_id u32",
    r.SnapshotRecord,
    _LOGGED,
    "snapshots: leaf keys, pinned segments, anchor",
)
RETENTION = Table("retention", "db_id u32", r.RetentionRecord, _LOGGED, "which snapshots are kept, which are created")
LSM_CATALOG = Table(
    "lsm_catalog",
    "db_id u32, sst_id u64",
    r.LsmTableRecord,
    _LOGGED,
    "live tables of key-value databases, folded from their own manifests",
)
MIRROR = Table("mirror", "mirror_id u64", r.MirrorRecord, _LOGGED, "lakehouse tables that follow databases")
MIRROR_DATABASE = Table(
    "mirror_database",
    "mirror_id u64, db_id u32",
    r.MirrorDatabaseRecord,
    _LOGGED,
    "version of a database that a mirror's target holds",
)
MIRROR_BATCH = Table(
    "mirror_batch",
    "mirror_id u64, batch_id u64, db_id u32",
    r.MirrorDatabaseRecord,
    _LOGGED,
    "databases that a run writes, in a batch that may not be in the target yet",
)
AUDIT = Table(
    "audit",
    "db_id u32, at_ms u64, sequence u64, ordinal u32",
    r.AuditRecord,
    _LOGGED,
    "history of a database: snapshots, forks, uploads, deletions",
)
RETIRED = Table(
    "retired", "digest raw", r.RetiredRecord, _LOGGED, "unreferenced objects that archived moments still need"
)
JOB_QUEUE = Table("job_queue", "job_id u64", r.JobRecord, _LOGGED, "durable work items")
JOB_PENDING_INDEX = Table(
    "job_pending_index",
    "db_id u32, job_kind u16",
    r.IndexRecord,
    _LOGGED,
    "gate: the outstanding job of an exclusive kind",
    packed="Q",
)
GC_REFCOUNTS = Table("gc_refcounts", _ARTIFACT, r.RefcountRecord, _LOGGED, "references to artifacts", packed="IIQ")
PAGE_VERSION_INDEX = Table(
    "page_version_index",
    "db_id u32, page u32, lsn u64",
    r.PageVersionRecord,
    _LOGGED,
    "page versions that live in the WAL",
    packed="IIIIQQ",
)
PAGE_VERSION_HEAD = Table(
    "page_version_head",
    "db_id u32, page u32",
    r.PageHeadRecord,
    _LOGGED,
    "newest WAL-backed version of a page",
    packed="QII",
)
GENERATION_WATERMARKS = Table(
    "generation_watermarks", "component u32", r.GenerationRecord, _LOGGED, "batches that touched a component"
)
ID_WATERMARKS = Table("id_watermarks", "counter u16", r.WatermarkRecord, _LOGGED, "next ids, never reused")

# ── local ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
# change_log is declared in change.py: its records consist of operations, which depend on these tables.
CHANGE_CURSORS = Table("change_cursors", "cursor_id u64", r.CursorRecord, _LOCAL, "subscribers of the feed")
SNAPSHOT_READERS = Table(
    "snapshot_readers", "db_id u32, reader_id u64", r.ReaderRecord, _LOCAL, "leases of remote readers"
)
SNAPSHOT_FLOOR = Table("snapshot_floor", "db_id u32", r.FloorRecord, _LOCAL, "lowest version still readable")
METRICS = Table("metrics", "scope u32, metric_kind u32", r.MetricRecord, _LOCAL, "rolling metrics")
IDEMPOTENCY = Table("idempotency", "key raw", r.IdempotencyRecord, _LOCAL, "results of batches with an idempotency key")
JOB_LEASES = Table("job_leases", "job_id u64", r.JobLeaseRecord, _LOCAL, "worker and progress of a running job")
LSM_ENDS = Table("lsm_ends", "db_id u32", r.LsmEndsRecord, _LOCAL, "acknowledged ends of key-value databases' logs")
FOLLOWED_FILES = Table(
    "followed_files", "db_id u32", r.FollowedFileRecord, _LOCAL, "SQLite files that the owner follows"
)
REPLICA_POSITIONS = Table(
    "replica_positions",
    "db_id u32, generation u32, frame u32",
    r.ReplicaPositionRecord,
    _LOCAL,
    "versions that embedded replicas hold",
)
META = Table("meta", "name text", r.MetaRecord, _LOCAL, "facts about this environment")
LAST_VERIFICATION = "last_verification"
"""The row of `meta` with the problems that the last verification of the whole store found in files that are not artifacts."""
OBJECT_PLACE = "object_place"
"""The row of `meta` with the location of the store's objects."""
PARENTS = "parents"
"""The row of `meta` of a clone: its parent stores as JSON, oldest first (`reads.ParentStore`)."""
MIGRATIONS = Table("migrations", "name text", r.MigrationRecord, _LOCAL, "the migration ledger")

# ── derived ───────────────────────────────────────────────────────────────────────────────────────────────────────────
DB_NAMES = Table("db_names", "name text", r.IndexRecord, _DERIVED, "name → db_id", packed="Q")
SNAPSHOT_NAMES = Table(
    "snapshot_names", "db_id u32, name text", r.IndexRecord, _DERIVED, "name → snapshot_id", packed="Q"
)
CURSOR_NAMES = Table("cursor_names", "name text", r.IndexRecord, _DERIVED, "name → cursor_id", packed="Q")
JOBS_BY_STATE = Table(
    "jobs_by_state", "state u8, job_id u64", r.IndexRecord, _DERIVED, "jobs in each state", packed="Q"
)
GC_ZERO = Table("gc_zero", _ARTIFACT, r.IndexRecord, _DERIVED, "artifacts at zero → since when", packed="Q")

NOT_ARCHIVED = frozenset(
    {
        SNAPSHOT_READERS.name,
        SNAPSHOT_FLOOR.name,
        METRICS.name,
        JOB_LEASES.name,
        FOLLOWED_FILES.name,
        REPLICA_POSITIONS.name,
    }
)
"""Tables about processes of this machine, or about this history: a restored store starts without their rows."""


def retired_digest(url: str, name: str) -> bytes:
    """Return the key of a retired object: a digest, because names may be longer than a key."""
    return blake2b(f"{url}\0{name}".encode(), digest_size=16).digest()


def catalog_key(artifact: ArtifactKey) -> tuple[Table[Any], tuple[int, ...]]:
    """Return the table with the row of an artifact that has bytes, and its key: at the origin, shared by all holders (M6)."""
    if artifact.kind is ArtifactKind.BASE:
        return CHUNK_CATALOG, (artifact.origin_db_id, artifact.id, artifact.generation)
    if artifact.kind is ArtifactKind.DELTA:
        return CHUNK_DELTA_INDEX, (artifact.origin_db_id, artifact.id, artifact.generation, artifact.delta_id)
    if artifact.kind is ArtifactKind.WAL:
        return WAL_CATALOG, (artifact.origin_db_id, artifact.id)
    raise InvalidInput("only chunks, deltas and WAL segments have bytes", kind=artifact.kind.name)


OWNED = tuple(table for table in TABLES.values() if table.key.fields[0][0] in ("db_id", "origin_db_id"))
"""Tables whose rows each belong to one database, whose id begins the key."""
