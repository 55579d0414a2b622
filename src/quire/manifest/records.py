"""Records of manifest tables: the fields of each row.

A record is frozen: the writer keeps decoded records across transactions, so no code may change one in place. Fields are
only appended, with defaults (M1): older bytes decode with the defaults, newer bytes decode by ignoring unknown fields. Any
other change raises the version and adds a migration. Times are in milliseconds, 0 is "never"; an id of 0 is "none".

The bytes (u16 version + msgpack array, or a packed struct for tables of plain numbers): docs/formats/manifest.md.
"""

# No `from __future__ import annotations`: msgspec would evaluate the text of each type in each process (see `ops/base.py`).

from enum import IntEnum
from typing import Annotated

import msgspec

UInt = Annotated[int, msgspec.Meta(ge=0)]
"""A number that is never negative; checked when bytes are decoded."""


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all records. `gc=False`: records hold no cycles, and millions of them must not slow the collector."""


# ── databases ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class DbKind(IntEnum):
    PAGES = 1
    STREAM = 2
    LSM = 3


class DbStatus(IntEnum):
    """ACTIVE ⇄ READ_ONLY → TOMBSTONED; a tombstone is removed once no artifact of the database is left."""

    ACTIVE = 1
    READ_ONLY = 2
    TOMBSTONED = 3


class Compression(IntEnum):
    NONE = 0
    ZSTD = 1


HIDDEN = "/dropped/"
"""Prefix of the names of dropped databases that can be undropped. Callers cannot choose such a name."""


class DbRecord(Record, frozen=True):
    """Identity, fixed configuration and per-database high-water marks (M5)."""

    name: str
    kind: DbKind
    created_at_ms: UInt
    status: DbStatus = DbStatus.ACTIVE
    config_hash: bytes = b""
    page_size: UInt = 0
    pages_per_chunk: UInt = 0
    compression: Compression = Compression.ZSTD
    namespace_id: UInt = 0
    parent_db_id: UInt = 0
    parent_snapshot_id: UInt = 0
    parent_generation: UInt = 0
    parent_lsn: UInt = 0
    next_generation: UInt = 1
    next_snapshot_id: UInt = 1
    dropped_at_ms: UInt = 0
    tags: dict[str, str] = {}
    snapshot_range: UInt = 0  # first number of the store's range (A10) in which the last snapshot was made
    former_name: str = ""  # the name before the drop, if the database can be undropped: `name` is then a hidden one
    former_status: DbStatus = DbStatus.ACTIVE

    @property
    def is_dropped(self) -> bool:
        """Whether a user dropped it; with a `former_name` it can be undropped."""
        return self.status is DbStatus.TOMBSTONED or bool(self.former_name)

    @property
    def title(self) -> str:
        """The name that users see, or saw before it was dropped."""
        return self.former_name or self.name


# ── artifacts ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class Residency(IntEnum):
    """Where an artifact's bytes are. EVICTED: the catalog remembers an object that must be hydrated before use."""

    LOCAL = 1
    LOCAL_AND_REMOTE = 2
    REMOTE_ARCHIVED = 3
    EVICTED = 4


class VerifyState(IntEnum):
    UNVERIFIED = 0
    VERIFIED = 1
    MISSING = 2
    ALTERED = 3


class ChunkRecord(Record, frozen=True):
    """One base chunk. The object's name follows from the row's key; `suffix` is set only where it does not."""

    residency: Residency
    size_bytes: UInt
    created_at_ms: UInt
    lsn_start: UInt = 0
    lsn_end: UInt = 0
    page_count: UInt = 0
    compression: Compression = Compression.ZSTD
    namespace_id: UInt = 0
    suffix: str = ""
    sha256: bytes = b""
    bitmap_hash: UInt = 0
    plan_digest: bytes = b""
    uploaded_at_ms: UInt = 0
    verified_at_ms: UInt = 0
    verify_state: VerifyState = VerifyState.UNVERIFIED
    purge_after_ms: UInt = 0
    changes: bytes = b""


class DeltaRecord(Record, frozen=True):
    """One delta over a base chunk: the pages of the slot that changed."""

    base_generation: UInt
    residency: Residency
    size_bytes: UInt
    created_at_ms: UInt
    lsn_start: UInt = 0
    lsn_end: UInt = 0
    page_count: UInt = 0
    dirty_pages: bytes = b""
    compression: Compression = Compression.ZSTD
    namespace_id: UInt = 0
    suffix: str = ""
    sha256: bytes = b""
    bitmap_hash: UInt = 0
    plan_digest: bytes = b""
    uploaded_at_ms: UInt = 0
    verified_at_ms: UInt = 0
    verify_state: VerifyState = VerifyState.UNVERIFIED
    purge_after_ms: UInt = 0


class RefcountRecord(Record, frozen=True):
    """References to one artifact. Counts at zero never rise again (M8); the row is deleted when its object is gone."""

    in_use: UInt = 0
    pending_upload: UInt = 0
    zero_since_ms: UInt = 0


class LeafRecord(Record, frozen=True):
    """The chains of up to 256 slots, packed (see `slots.py`). Immutable: a change makes a new generation of the leaf."""

    entries: bytes


class LeafRef(Record, frozen=True):
    """The leaf version that a live database holds."""

    origin_db_id: UInt
    generation: UInt


# ── write-ahead log ───────────────────────────────────────────────────────────────────────────────────────────────────
class WalState(IntEnum):
    """OPEN → SEALED → INDEXED → CHECKPOINT_READY → CHECKPOINTED → TRUNCATED; back only CHECKPOINT_READY → INDEXED (P6)."""

    OPEN = 1
    SEALED = 2
    INDEXED = 3
    CHECKPOINT_READY = 4
    CHECKPOINTED = 5
    TRUNCATED = 6


class WalFormat(IntEnum):
    PAGER = 1
    APPEND_ONLY = 2


class WalStateRecord(Record, frozen=True):
    """Progress marks of a database's WAL, and the gate of its flush job."""

    next_segment_id: UInt = 1
    lsn_reserved: UInt = 0
    last_sealed_segment: UInt = 0
    last_applied_lsn: UInt = 0
    indexed_upto_lsn: UInt = 0
    checkpointed_lsn: UInt = 0
    last_checkpoint_generation: UInt = 0
    size_pages: UInt = 0
    active_job_id: UInt = 0
    last_success_at_ms: UInt = 0
    errored_since_ms: UInt = 0
    last_commit_ms: UInt = 0
    """Time of the commit at `last_applied_lsn`, which must be known when its segment is gone; 0: unknown."""


class WalRecord(Record, frozen=True):
    """One WAL artifact as one database tracks it. Residency, size and hashes belong to the artifact and are stored only in
    the row whose database is the origin; a fork's row names the origin and has its own state (P12)."""

    origin_db_id: UInt
    state: WalState
    format: WalFormat = WalFormat.PAGER
    created_at_ms: UInt = 0
    sealed_at_ms: UInt = 0
    first_lsn: UInt = 0
    last_lsn: UInt = 0
    used_bytes: UInt = 0
    file_bytes: UInt = 0
    frame_count: UInt = 0
    size_pages: UInt = 0
    residency: Residency = Residency.LOCAL
    namespace_id: UInt = 0
    suffix: str = ""
    sha256: bytes = b""
    crc64: UInt = 0
    uploaded_at_ms: UInt = 0
    verified_at_ms: UInt = 0
    verify_state: VerifyState = VerifyState.UNVERIFIED
    newest_reader_lsn: UInt = 0
    gc_ticket: UInt = 0
    salt: bytes = b""
    first_page: UInt = 0
    last_page: UInt = 0


class PlanRecord(Record, frozen=True):
    """A checkpoint's or merge's plan, stored before it runs (P10)."""

    job_id: UInt
    attempt: UInt
    covered_lsn: UInt
    size_pages: UInt
    digest: bytes
    segments: list[int] = []
    """Segments that the plan absorbs; empty for a merge."""
    artifacts: list[tuple[int, int, bool]] = []
    """(slot, delta_id, whether it is a delta) of every artifact that the plan writes."""
    created_at_ms: UInt = 0
    namespace_id: UInt = 0
    """The namespace it writes to; 0 is the store's configured object store, without a prefix."""


class WalChunkPointer(Record, frozen=True):
    """The position of one sealed WAL artifact in the order of its generation."""

    origin_db_id: UInt
    first_lsn: UInt
    last_lsn: UInt
    size_bytes: UInt
    sealed_at_ms: UInt = 0


# ── page versions ─────────────────────────────────────────────────────────────────────────────────────────────────────
class PageVersionRecord(Record, frozen=True):
    """The location of one version of one page in the WAL."""

    origin_db_id: UInt
    segment_id: UInt
    frame_no: UInt
    flags: UInt
    prev_lsn: UInt
    frame_crc64: UInt


class PageHeadRecord(Record, frozen=True):
    """The newest WAL-backed version of a page."""

    lsn: UInt
    segment_id: UInt
    source: UInt = 1


# ── snapshots ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class SnapshotKind(IntEnum):
    """Whether a user named the snapshot. 3 is reserved: it was LEASED, and rows that still have it are read as ANONYMOUS."""

    NAMED = 1
    ANONYMOUS = 2

    @classmethod
    def _missing_(cls, value: object) -> "SnapshotKind | None":
        return cls.ANONYMOUS if value == 3 else None


SCHEDULE_TAG = "schedule"
"""Tag of a scheduled snapshot; its value is the name of the schedule."""

WINDOW_TAG = "time-travel"
"""Tag of a snapshot that a checkpoint keeps: `window` for time travel, `reader` for a reader that was set aside."""

LENT_TAGS = {"by": "lend"}
"""Tags of a snapshot that the service made for a reader."""

FORKS_TAGS = {"by": "fork_many"}
"""Tags of the snapshot from which many forks are being made. Its expiry removes it if the process that makes them is killed."""

DROPPED_TAG = "former-name"
"""Tag of a dropped snapshot that can be undropped; its value is the name before the drop."""


class Pin(Record, frozen=True):
    """A WAL segment that a snapshot or fork needs, up to an lsn."""

    origin_db_id: UInt
    segment_id: UInt
    upto_lsn: UInt
    used_bytes: UInt = 0


class SnapshotRecord(Record, frozen=True):
    """An immutable view: leaf keys and pinned segments. Holds references, never the floor (P13)."""

    name: str
    kind: SnapshotKind
    created_at_ms: UInt
    generation: UInt
    anchor_lsn: UInt = 0
    anchor_segment_id: UInt = 0
    size_pages: UInt = 0
    page_size: UInt = 0
    leaves: list[tuple[int, int, int]] = []
    """(leaf number, origin_db_id, generation) of every leaf."""
    pins: list[Pin] = []
    expires_at_ms: UInt = 0
    anchor_time_ms: UInt = 0
    tags: dict[str, str] = {}


class RetentionRecord(Record, frozen=True):
    """Which snapshots of a database are kept, and which are made automatically. A rule of 0 keeps nothing; a record without
    any rule keeps everything."""

    keep_last: UInt = 0
    keep_generations: UInt = 0
    hourly: UInt = 0
    daily: UInt = 0
    weekly: UInt = 0
    keep_seconds: UInt = 0
    keep_named: bool = True
    """Whether snapshots that a user named are kept regardless of the other rules."""
    schedules: list[str] = []
    """When the owner creates snapshots: "hourly", "daily", "daily at 03:00 Europe/Zurich", "weekly on sunday at 04:30"."""


# ── audit and retired objects ─────────────────────────────────────────────────────────────────────────────────────────
class AuditAction(IntEnum):
    SNAPSHOT_CREATED = 1
    SNAPSHOT_DROPPED = 2
    FORKED = 3
    FORKED_FROM = 4
    UPLOADED = 5
    EVICTED = 6
    HYDRATED = 7
    DELETED = 8
    DATABASE_DROPPED = 9
    FOUND_DAMAGED = 10
    ROLLED_BACK = 11
    DATABASE_UNDROPPED = 12
    SNAPSHOT_UNDROPPED = 13


class AuditRecord(Record, frozen=True):
    """One event in the life of a database, with the generation that its component reached by it."""

    action: AuditAction
    component: UInt
    generation: UInt
    subject: str = ""
    number: UInt = 0
    """`subject`, `number`: name and id of a snapshot or another database; for an object its name, and its slot or segment."""
    size_bytes: UInt = 0


class RetiredRecord(Record, frozen=True):
    """An object that is deleted once no archived moment needs it. Without a URL it is in the store's own object store."""

    since_ms: UInt
    name: str
    url: str = ""
    db_id: UInt = 0


# ── remote namespaces ─────────────────────────────────────────────────────────────────────────────────────────────────
class NamespaceRecord(Record, frozen=True):
    """A location of remote objects: joined with a compact suffix, it gives the canonical object name."""

    url: str
    """Empty for the store's configured object store, wherever it currently is."""
    prefix: str = ""
    encryption_profile: str = ""
    created_at_ms: UInt = 0
    owner_epoch: UInt = 0
    """The owner epoch whose objects are here; 0 for a place as a user registered it."""
    place_id: UInt = 0
    """For an epoch's namespace: the place it belongs to; 0 is the store's configured object store."""
    ancestors: tuple[UInt, ...] = ()
    """For an epoch's namespace: the owner epochs that this one follows, oldest first. All others are of another line."""
    legacy: bool = False
    """For an epoch's namespace: the store is older than epochs, and may have objects without a prefix of its own."""
    name: str = ""
    """For a place: its name, and its section in quire.toml; empty if it was registered before places had names."""
    dropped_at_ms: UInt = 0
    """For a place: when a user dropped it; until then a place with a name holds itself."""

    @property
    def holds_itself(self) -> bool:
        """Whether this is a place with a name that was not dropped."""
        return bool(self.name) and not self.dropped_at_ms


# ── key-value databases ───────────────────────────────────────────────────────────────────────────────────────────────
class LsmTableRecord(Record, frozen=True):
    """A live table of a key-value database, as its own manifest and the table's file describe it (S1)."""

    level: UInt
    rows: UInt
    """Number of versions, tombstones included."""
    tombstones: UInt
    size_bytes: UInt
    lsn_min: UInt
    lsn_max: UInt
    key_min: bytes = b""
    """The first 256 bytes of the lowest key."""
    key_max: bytes = b""
    checksum: UInt = 0
    """crc64 of the section of the table's file that has the checksums of its blocks; 0 in older rows."""


class LsmLogEnd(Record, frozen=True):
    """The durable end of one log of a key-value database: valid while the file has this salt."""

    number: UInt
    """Number of a write-ahead log; 0 for the log of the database's own manifest."""
    salt: UInt
    end: UInt
    link: UInt
    """The checksum that ends there; checksums are chained, so it covers all bytes before it."""


class LsmEndsRecord(Record, frozen=True):
    """The acknowledged ends of a key-value database's logs, stored separately, so that a lost end is detected."""

    manifest: LsmLogEnd
    snapshot_crc32: UInt = 0
    """crc32 of the manifest snapshot that the log continues from; 0 if there is none."""
    last_lsn: UInt = 0
    """A lower bound of the durable lsn."""
    wals: tuple[LsmLogEnd, ...] = ()


# ── followed SQLite files ─────────────────────────────────────────────────────────────────────────────────────────────
class FollowedFileRecord(Record, frozen=True):
    """A SQLite file that the owner follows into a page database while it serves."""

    path: str
    interval_ms: UInt
    """Interval between two checks of the file."""
    since_ms: UInt
    configured: bool = False
    """Whether it comes from quire.toml: it is removed when its entry is removed there."""


# ── mirrors ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class MirrorRecord(Record, frozen=True):
    """A lakehouse table that is kept in step with a table of many databases."""

    name: str
    databases: list[str]
    """Names and patterns of page databases."""
    table: str
    target: str
    """`delta:URL`, `iceberg:CATALOG.NAMESPACE.TABLE` or `parquet:URL`."""
    created_at_ms: UInt
    every_ms: UInt = 0
    """Interval between the starts of two scheduled runs; 0: it runs only on request."""
    options: dict[str, str] = {}
    batch_id: UInt = 0
    """The last batch that is known to be in the target."""
    last_batch_id: UInt = 0
    """The last batch that was begun."""
    started_at_ms: UInt = 0
    """When the last run began."""
    synced_at_ms: UInt = 0
    """When the last run ended that brought the target up to date."""


class MirrorDatabaseRecord(Record, frozen=True):
    """What a mirror's target holds of one database: the version, and the files it is in."""

    name: str
    lsn: UInt
    rows: UInt = 0
    files: list[str] = []
    """Paths relative to the table's own; empty if the database has no rows."""
    is_gone: bool = False
    """In a batch: the database is no longer in the target."""
    size_bytes: UInt = 0
    """The database's share of the files."""


# ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
class JobKind(IntEnum):
    CHECKPOINT = 1
    MERGE = 2
    DELETE = 3
    UPLOAD = 4
    EVICT = 5
    HYDRATE = 6
    VERIFY = 7
    RETENTION = 8
    TRUNCATE = 9
    COMPACTION = 10
    BUNDLE = 11
    SWEEP = 12
    AUDIT = 13
    RESTORE = 14
    STATS = 15
    MIRROR = 16


EXCLUSIVE_JOBS = frozenset({JobKind.CHECKPOINT, JobKind.MERGE, JobKind.DELETE, JobKind.RETENTION, JobKind.TRUNCATE})
"""At most one of each may be outstanding per database: two would do the same work, or work against each other."""


class JobState(IntEnum):
    """PENDING ⇄ IN_FLIGHT → SUCCEEDED | FAILED_PERMANENT | CANCELLED."""

    PENDING = 1
    IN_FLIGHT = 2
    SUCCEEDED = 3
    FAILED_PERMANENT = 4
    CANCELLED = 5


TERMINAL_JOB_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED_PERMANENT, JobState.CANCELLED})


class JobRecord(Record, frozen=True):
    """One piece of work that survives crashes."""

    kind: JobKind
    db_id: UInt
    created_at_ms: UInt
    state: JobState = JobState.PENDING
    payload: bytes = b""
    attempt: UInt = 0
    max_attempts: UInt = 5
    not_before_ms: UInt = 0
    started_at_ms: UInt = 0
    finished_at_ms: UInt = 0
    error: str = ""
    result: bytes = b""
    token: bytes = b""
    artifact: tuple[int, int, int, int, int] | None = None
    """The artifact (origin, kind, id, generation, delta) whose bytes this job needs: the job holds its `pending_upload`."""
    failures: UInt = 0
    """Failed attempts, limited by `max_attempts`. A postponed attempt does not count."""


class JobLeaseRecord(Record, frozen=True):
    """The worker of a job, the expiry of its lease, and its progress."""

    worker: str
    expires_at_ms: UInt
    heartbeat_at_ms: UInt
    done: UInt = 0
    total: UInt = 0


# ── the change feed ───────────────────────────────────────────────────────────────────────────────────────────────────
class CursorState(IntEnum):
    LIVE = 1
    LOST = 2


class CursorRecord(Record, frozen=True):
    """A subscriber and the highest sequence it has acknowledged."""

    acked_sequence: UInt
    created_at_ms: UInt
    updated_at_ms: UInt
    name: str = ""
    state: CursorState = CursorState.LIVE
    ttl_ms: UInt = 0
    max_lag: UInt = 0
    lost_reason: str = ""


class TimelineRecord(Record, frozen=True):
    """A takeover or restore: where the previous owner ended. Numbers continue at the key (A10). `owner_epoch` is the epoch that
    begins, or was restored; `parent_number` the last archive object included; changes after `ended_at_ms` are lost."""

    owner_epoch: UInt
    parent_epoch: UInt
    parent_number: UInt
    ended_at_ms: UInt
    last_sequence: UInt
    began_at_ms: UInt


class ReplicaPositionRecord(Record, frozen=True):
    """The version that a frame number of an embedded replica stands for, in a range of the timeline (W6). `used_below`, of
    frame 0 only: lower numbers of the generation are not assigned any more, because one of them was a removed position."""

    lsn: UInt
    range_start: UInt
    at_ms: UInt
    used_below: UInt = 0


class IdempotencyRecord(Record, frozen=True):
    """The answer to the batch with this key (M11)."""

    sequence: UInt
    expires_at_ms: UInt
    generations: tuple[tuple[int, int], ...] = ()
    result: bytes = b""


# ── readers, metrics, housekeeping ────────────────────────────────────────────────────────────────────────────────────
LABEL_TAG = "quire.label"
"""The tag with the name under which a holder of leases requests a version (`leases.py`)."""


class ReaderRecord(Record, frozen=True):
    """A remote reader's lease on a version of a database; `view` is the version as a value, if the reader requests it later."""

    snapshot_lsn: UInt
    opened_at_ms: UInt
    heartbeat_at_ms: UInt
    expires_at_ms: UInt
    tags: dict[str, str] = {}
    view: bytes = b""

    @property
    def marks_drop(self) -> bool:
        """Whether this is a holder's mark that the database was dropped, which outlives the database."""
        return not self.snapshot_lsn and LABEL_TAG in self.tags


class FloorRecord(Record, frozen=True):
    """The lowest version that a reader may still request."""

    min_snapshot_lsn: UInt
    writer_high_lsn: UInt


class MetricRecord(Record, frozen=True):
    """A rolling metric. Bucket i counts observations in [2^(i-1), 2^i); bucket 0 those below 1."""

    sum: float = 0.0
    count: UInt = 0
    min: float = 0.0
    max: float = 0.0
    buckets: list[int] = []
    last: float = 0.0
    updated_at_ms: UInt = 0


class GenerationRecord(Record, frozen=True):
    """How many batches have touched a component, and the time of the last one."""

    generation: UInt
    updated_at_ms: UInt


class WatermarkRecord(Record, frozen=True):
    """The next id to assign; never decreases (M5)."""

    next_id: UInt


class MigrationRecord(Record, frozen=True):
    """A completed step of the migration ledger."""

    applied_at_ms: UInt
    quire_version: str


class MetaRecord(Record, frozen=True):
    """A named fact about this environment (store id, schema version, bounds of the change log)."""

    number: UInt = 0
    text: str = ""


class IndexRecord(Record, frozen=True):
    """The value of a derived index row: the id (or time) it maps to."""

    value: UInt
