"""Settings: plain data, with defaults and reasons; quire.toml is the same data on disk.

Components (clock, disk, object store) are passed as arguments, never named here. A wrong value is refused when the
settings are made, with the name of the setting.

    >>> load(b'[manifest]\\ngroup_ops_max = 100').manifest.group_ops_max
    100
    >>> load(b'[manifest]\\nops_max = 100')
    Traceback (most recent call last):
        ...
    quire.core.errors.InvalidConfig: quire.toml: Object contains unknown field `ops_max` - at `$.manifest`; `quire init` \
writes a commented example
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from quire.core.errors import InvalidConfig
from quire.core.limits import BATCH_OPS_MAX, GIB, KIB, MIB

ENDPOINT = re.compile(r"https?://[^\s/@?#]+(/[^\s?#]*)?")
"""A service's address. With others obstore fails at the first request, or panics."""

_EXAMPLE_HINT = "`quire init` writes a commented example"


def _require(holds: bool, message: str, hint: str = _EXAMPLE_HINT) -> None:
    if not holds:
        raise InvalidConfig(message, hint=hint)


class ManifestSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the manifest's environment and writer behave."""

    map_bytes: int = 256 * GIB
    """Address space reserved for the manifest (M4). The file stays small; growing the map later is the emergency path."""
    map_bytes_max: int = 4096 * GIB
    """Where growing ends: beyond it a full map is `DiskFull`."""
    map_watermark: float = 0.8
    """The map is grown before it is fuller than this."""
    readers_max: int = 1024
    """Concurrent read transactions over all processes."""
    queue_ops_max: int = 2_048
    """Operations that may wait for the writer before `submit` blocks: bounds memory."""
    group_ops_max: int = 1_024
    """Operations in one commit: by then the sync is hidden behind the producers' work, and more only adds latency."""
    group_seconds_max: float = 0.02
    """A group stops taking batches when it has been applying for this long."""
    group_wait_seconds: float = 0.002
    """How long the writer waits for the callers it has just answered to come back, if they were more than one."""
    long_read_seconds: float = 30.0
    """A read transaction older than this is reported: it keeps LMDB from reusing pages."""
    grow_wait_seconds: float = 30.0
    """How long growing the map waits for read transactions of this process to end."""
    idempotency_seconds: float = 86_400.0
    """How long answers to keyed batches are remembered (M11)."""

    def __post_init__(self) -> None:
        _require(self.map_bytes >= MIB, "manifest.map_bytes must be at least 1 MiB")
        _require(self.map_bytes <= self.map_bytes_max, "manifest.map_bytes_max must not be below map_bytes")
        _require(0 < self.map_watermark <= 1, "manifest.map_watermark lies in (0, 1]")
        _require(1 <= self.readers_max <= 65_536, "manifest.readers_max lies in [1, 65536]")
        _require(self.queue_ops_max >= 1, "manifest.queue_ops_max must be positive")
        _require(1 <= self.group_ops_max <= BATCH_OPS_MAX, f"manifest.group_ops_max lies in [1, {BATCH_OPS_MAX}]")
        _require(self.group_seconds_max > 0, "manifest.group_seconds_max must be positive")
        _require(0 <= self.group_wait_seconds <= 1, "manifest.group_wait_seconds lies in [0, 1]")


class FeedSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the change feed keeps when no cursor asks for more (M9)."""

    retain_seconds: float = 7 * 86_400.0
    retain_bytes: int = GIB
    """Changes older than this, or beyond this many bytes, are trimmed."""


class MaintenanceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the owner does by itself: schedules, retention, leases, jobs, trimming."""

    enabled: bool = True
    """Whether an owner runs it in the background; `store.maintain()` does one round in any case."""
    interval_seconds: float = 5.0
    """Between two rounds."""
    workers: int = 1
    """Threads that run jobs."""
    runner: str = "auto"
    """Who does the heavy part of a job: threads, spark, or auto: threads for less than 256 MiB, else Spark."""
    executors_see_store: bool = False
    """Whether Spark's executors have the store's directory under its path; those of a local master always do."""
    checkpoint_bytes: int = 64 * MIB
    checkpoint_seconds: float = 300.0
    """A page database is checkpointed when it has this much sealed WAL, or when some of it is this old."""
    merge_chain: int = 6
    merge_ratio: float = 1.0
    """A slot is merged when its chunk and deltas are this many, or its deltas this heavy, measured by its chunk."""
    time_travel_seconds: float = 0.0
    """How far back every version of a page database can be opened (P14); 0: only what the WAL and snapshots happen to have."""
    evict_seconds: float = 0.0
    """Copies that only snapshots and readers of chunks need leave the disk for the object store when they are this old: WAL
    segments since they were sealed, what was hydrated since it was fetched (at most `jobs_keep_seconds`); 0: never."""
    undrop_seconds: float = 86_400.0
    """How long a person can bring back a database or a snapshot that was dropped (`quire undrop`); 0: not at all."""
    delete_grace_seconds: float = 60.0
    """Bytes stay this long after their last reference went (M8)."""
    jobs_keep_seconds: float = 7 * 86_400.0
    """How long jobs that ended are remembered."""
    audit_seconds: float = 400 * 86_400.0
    """How long the audit reaches back."""

    def __post_init__(self) -> None:
        _require(self.interval_seconds > 0, "maintenance.interval_seconds must be positive")
        _require(0 <= self.workers <= 64, "maintenance.workers lies in [0, 64]")
        _require(self.runner in ("auto", "threads", "spark"), "maintenance.runner is auto, threads or spark")
        _require(self.merge_chain >= 2, "maintenance.merge_chain must be at least 2: a chunk and a delta")
        _require(self.merge_ratio > 0, "maintenance.merge_ratio must be positive")
        _require(self.time_travel_seconds >= 0, "maintenance.time_travel_seconds must not be negative")
        _require(self.evict_seconds >= 0, "maintenance.evict_seconds must not be negative")
        _require(self.undrop_seconds >= 0, "maintenance.undrop_seconds must not be negative")
        _require(self.delete_grace_seconds >= 0, "maintenance.delete_grace_seconds must not be negative")
        _require(self.jobs_keep_seconds >= 0, "maintenance.jobs_keep_seconds must not be negative")
        _require(self.audit_seconds >= 0, "maintenance.audit_seconds must not be negative")


class PagesSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How page databases behave."""

    page_size: int = 4096
    """Of databases that do not say otherwise when they are first opened."""
    cache_bytes: int = 64 * MIB
    """Pages kept in memory, over all databases."""
    wal_bytes_max: int = GIB
    """WAL of one database that no checkpoint has absorbed: beyond it, writers wait."""
    store_wal_bytes_max: int = 16 * GIB
    """The same for all databases together."""
    publish_seconds: float = 1.0
    publish_bytes: int = 4 * MIB
    """The page index is at most so far behind what is durable (P6)."""
    seal_seconds: float = 60.0
    """An open segment is ended after this long, so that it can be checkpointed."""
    spill_bytes: int = 64 * MIB
    """Pages of one transaction kept in memory; more go to a scratch file until it commits (P6)."""
    cold_bytes_per_second: int = 128 * MIB
    """What cold scans may read, over all of them; 0 for no limit."""
    long_reader_seconds: float = 300.0
    """A snapshot that is open for longer is reported once: it keeps WAL from being given back."""
    attach_creates: bool = True
    """Whether SQL's ATTACH creates a database that does not exist, as SQLite creates a file."""
    open_max: int = 1024
    """Databases that are open at once; beyond it those that nobody uses are closed, the longest unused first."""
    idle_seconds: float = 90.0
    """A database that nobody has used for this long is closed; the next use opens it."""

    def __post_init__(self) -> None:
        _require(self.cache_bytes >= 0, "pages.cache_bytes must not be negative")
        _require(self.wal_bytes_max >= 16 * MIB, "pages.wal_bytes_max must be at least one segment, 16 MiB")
        _require(
            self.store_wal_bytes_max >= self.wal_bytes_max, "pages.store_wal_bytes_max must not be below wal_bytes_max"
        )
        _require(self.publish_seconds > 0 and self.seal_seconds > 0, "pages: intervals must be positive")
        _require(
            self.publish_bytes > 0 and self.spill_bytes > 0, "pages: publish_bytes and spill_bytes must be positive"
        )
        _require(self.cold_bytes_per_second >= 0, "pages.cold_bytes_per_second must not be negative")
        _require(self.open_max >= 1 and self.idle_seconds > 0, "pages: open_max and idle_seconds must be positive")


class ManifestLogSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the manifest logs of streams behave."""

    mode: Literal["off", "shadow", "on"] = "on"
    """`off`: no log. `shadow`: written and compared with the projection, not believed. `on`: the truth (S1)."""
    chunk_bytes: int = 256 * KIB
    """A chunk is sealed when it has so much. It begins with 16 KiB and grows; a sealed one keeps only its used bytes."""
    record_bytes_max: int = 4 * KIB
    """A chunk is rotated when it has less room than this left; a larger record makes its chunk grow instead."""
    rotation_seconds: float = 0.25
    """A chunk with news about data is rotated, and so uploaded, when nothing was committed for this long."""
    snapshot_chunks: int = 64
    """Sealed chunks between two snapshots: how much of the log recovery replays at most, and what stays on disk."""
    snapshots_kept: int = 2
    """Should the newest one be damaged there is another."""
    sealed_kept: int = 2
    """Sealed chunks that stay on disk although they are uploaded and older than the newest snapshot."""
    bundle_seconds: float = 7 * 86_400.0
    """Chunks of one such period become one object."""

    def __post_init__(self) -> None:
        _require(
            16 * KIB <= self.chunk_bytes <= MIB and self.chunk_bytes % 8 == 0,
            "manifest_log.chunk_bytes lies in [16 KiB, 1 MiB] and is a multiple of 8",
        )
        _require(
            64 <= self.record_bytes_max <= self.chunk_bytes // 2,
            "manifest_log.record_bytes_max lies in [64, chunk_bytes / 2]",
        )
        _require(self.rotation_seconds > 0, "manifest_log.rotation_seconds must be positive")
        _require(self.snapshot_chunks >= 1, "manifest_log.snapshot_chunks must be positive")
        _require(self.snapshots_kept >= 1, "manifest_log.snapshots_kept must be positive")
        _require(self.sealed_kept >= 0, "manifest_log.sealed_kept must not be negative")
        _require(self.bundle_seconds > 0, "manifest_log.bundle_seconds must be positive")


class ServiceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an owner serves other processes: everything a client can use up is bounded."""

    calls_max: int = 64
    """Calls that are worked on at once; more wait for `busy_seconds` and are then refused."""
    waits_max: int = 256
    """Long polls: they hold a thread each, and nothing else."""
    streams_max: int = 32
    """Tables that are being read; a slow client keeps its place."""
    connections_max: int = 512
    """Connections through the Unix socket: each holds a thread."""
    busy_seconds: float = 1.0
    body_bytes_max: int = 16 * MIB
    """Of a call. A batch of operations must fit."""
    batch_bytes: int = 8 * MIB
    """An Arrow batch ends with the row that passes this."""
    wait_seconds_max: float = 20.0
    """One long poll; clients that wait for longer ask again."""
    stop_seconds: float = 5.0
    """How long a closing server waits for calls to end; then it hangs up."""
    http_connections_max: int = 1024
    """Connections to the HTTP side at once; more are told to come again."""
    http_requests_max: int = 256
    """Requests that are worked on at once; more are told to come again."""
    http_threads: int = 16
    """Threads for what blocks: the dashboard, files, replicas. SQL has its own."""
    http_head_bytes_max: int = 32 * 1024
    """Of a request's line and headers."""
    http_head_seconds: float = 10.0
    """From the first byte of a request, or from the beginning of a connection, to the end of its headers."""
    http_body_seconds: float = 60.0
    """From the end of the headers to the end of the body."""
    http_idle_seconds: float = 30.0
    """How long a connection is kept open between two requests."""
    http_send_seconds: float = 30.0
    """How long a client may take to read any part of an answer."""
    http_events_max: int = 16
    """Pages that follow the store live: each holds a connection."""
    http_ask_readers: bool = False
    """Ask for a token even on loopback: for machines that others log in to."""
    http_anonymous_writes: bool = False
    """On loopback, databases can be written without a token, as well as read. For development, and for machines of one user."""
    jwt_keys: tuple[str, ...] = ()
    """Files of public keys (Ed25519, PEM or base64) whose signed tokens are accepted, beside the store's own key."""
    http_hosts: tuple[str, ...] = ()
    """Names the HTTP side is reached by, beside localhost and addresses: a name that is not listed is refused."""
    metrics_databases: int = 20
    """Databases that have series of their own in `/metrics`: those whose files take most. 0: none has."""
    metrics_tag: str = ""
    """A tag, such as "plan", by whose values `/metrics` adds databases up; empty: by none."""
    http_sample_seconds: float = 10.0
    """How often the dashboard remembers how many segments are in which state."""
    sql_threads: int = 16
    """Threads that run SQL of other programs; none of them ever waits for a lock."""
    sql_database_threads: int = 12
    """How many of them at most work for one database at a time; never all, if there are several."""
    sql_streams_max: int = 512
    """Streams of SQL at once, each with a connection of its own …"""
    sql_database_streams_max: int = 256
    """… and those of one database."""
    sql_idle_seconds: float = 10.0
    """A stream that nobody uses is closed after this long."""
    sql_transaction_seconds: float = 5.0
    """A transaction in which nothing is done is rolled back after this long: it may hold the lock to write."""
    sql_lock_seconds: float = 7.5
    """How long a statement waits for the lock before it is answered with `SQLITE_BUSY`."""
    sql_statement_seconds: float = 60.0
    """How long a statement may take until its first row, and for each bunch of rows; then it is interrupted."""
    sql_answer_rows_max: int = 1_000_000
    sql_answer_bytes_max: int = 32 * MIB
    """Of one answer; a cursor has neither limit."""
    sql_heap_bytes: int = 1024 * MIB
    """What SQLite takes in the whole process before it gives cached pages back, once a server runs; statements do not fail by
    it. 0: no limit."""
    sql_default_database: str = "default"
    """The database of clients that name none, made when it is first used; empty: they are refused."""

    def __post_init__(self) -> None:
        limits = (self.calls_max, self.waits_max, self.streams_max, self.connections_max)
        _require(min(limits) >= 1, "service: limits must be positive")
        _require(self.body_bytes_max >= 64 * 1024, "service.body_bytes_max must be at least 64 KiB")
        _require(self.batch_bytes >= 64 * 1024, "service.batch_bytes must be at least 64 KiB")
        _require(0 < self.wait_seconds_max <= 300, "service.wait_seconds_max lies in (0, 300]")
        _require(self.busy_seconds >= 0 and self.stop_seconds >= 0, "service: times must not be negative")
        _require(2 <= self.http_connections_max <= 16_384, "service.http_connections_max lies in [2, 16384]")
        _require(1 <= self.http_requests_max <= 16_384, "service.http_requests_max lies in [1, 16384]")
        _require(1 <= self.http_threads <= 256, "service.http_threads lies in [1, 256]")
        _require(1024 <= self.http_head_bytes_max <= MIB, "service.http_head_bytes_max lies in [1 KiB, 1 MiB]")
        seconds = (self.http_head_seconds, self.http_body_seconds, self.http_idle_seconds, self.http_send_seconds)
        _require(min(seconds) > 0, "service: http_…_seconds must be positive")
        _require(
            not (self.http_ask_readers and self.http_anonymous_writes),
            "service.http_anonymous_writes needs http_ask_readers = false",
        )
        _require(
            1 <= self.http_events_max < self.http_connections_max,
            "service.http_events_max lies in [1, http_connections_max)",
        )
        _require(self.http_sample_seconds > 0, "service.http_sample_seconds must be positive")
        _require(self.metrics_databases >= 0, "service.metrics_databases must not be negative")
        _require(
            self.sql_heap_bytes == 0 or self.sql_heap_bytes >= 16 * MIB,
            "service.sql_heap_bytes is at least 16 MiB, or 0",
        )
        _require(1 <= self.sql_threads <= 256, "service.sql_threads lies in [1, 256]")
        _require(self.sql_database_threads >= 1, "service.sql_database_threads is at least 1")
        _require(
            1 <= self.sql_database_streams_max <= self.sql_streams_max,
            "service.sql_database_streams_max lies in [1, sql_streams_max]",
        )
        times = (
            self.sql_idle_seconds,
            self.sql_transaction_seconds,
            self.sql_lock_seconds,
            self.sql_statement_seconds,
        )
        _require(min(times) > 0, "service: times of SQL streams must be positive")
        _require(
            min(self.sql_answer_rows_max, self.sql_answer_bytes_max) >= 1, "service: limits of answers must be positive"
        )


class LsmSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How key-value databases behave."""

    memtable_bytes: int = 32 * MIB
    """A memtable of this size is frozen and flushed."""
    frozen_max: int = 2
    """Frozen memtables that may wait for their flush; beyond it, writers wait."""
    table_bytes: int = 32 * MIB
    """A compaction begins a new table at this size, before compression."""
    block_bytes: int = 64 * 1024
    compression: str = "lz4"
    """Of tables: lz4, zstd or none."""
    bloom_bits_per_key: int = 10
    cache_bytes: int = 64 * MIB
    """Decoded blocks kept in memory, over all databases."""
    level0_tables: int = 4
    """So many overlapping tables are merged into level 1."""
    level0_stop: int = 20
    """With so many, writers wait for a compaction."""
    level_bytes: int = 256 * MIB
    """What level 1 may hold; each level below holds ten times more."""
    stall_seconds: float = 60.0
    """How long a writer waits for room before it is told."""
    manifest_log_bytes: int = 256 * 1024
    """A manifest whose log has grown to this is written as a snapshot."""
    backups_kept: int = 30
    """Of each label: the next backup removes older ones. 0 keeps all."""
    threads: int = 2
    """Threads that flush memtables, and as many that compact, over all databases."""
    open_max: int = 256
    """Databases that are open at once; beyond it those that nobody uses are closed, the longest unused first."""
    idle_seconds: float = 90.0
    """A database that nobody has used for this long is closed; the next use opens it."""

    def __post_init__(self) -> None:
        _require(self.backups_kept >= 0, "lsm.backups_kept must not be negative")
        _require(self.memtable_bytes >= 1024, "lsm.memtable_bytes must be at least 1 KiB")
        _require(self.table_bytes >= 1024, "lsm.table_bytes must be at least 1 KiB")
        _require(64 <= self.block_bytes <= 16 * MIB, "lsm.block_bytes lies in [64, 16 MiB]")
        _require(self.compression in ("lz4", "zstd", "none"), "lsm.compression is lz4, zstd or none")
        _require(1 <= self.bloom_bits_per_key <= 64, "lsm.bloom_bits_per_key lies in [1, 64]")
        _require(self.cache_bytes >= 0, "lsm.cache_bytes must not be negative")
        _require(self.frozen_max >= 1, "lsm.frozen_max must be positive")
        _require(1 < self.level0_tables <= self.level0_stop, "lsm.level0_tables lies in [2, level0_stop]")
        _require(self.level_bytes > 0 and self.stall_seconds >= 0, "lsm: level_bytes must be positive")
        _require(1 <= self.threads <= 64, "lsm.threads lies in [1, 64]")
        _require(self.open_max >= 1 and self.idle_seconds > 0, "lsm: open_max and idle_seconds must be positive")


class ArchiveSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the store is kept in its bucket (A9)."""

    mode: Literal["off", "async", "sync"] = "off"
    """`async`: the bucket is behind by `interval_seconds`. `sync`: every call that changes something waits for the bucket."""
    interval_seconds: float = 1.0
    """What was changed waits at most this long for its upload to begin."""
    retain_seconds: float = 86_400.0
    """How far back the whole store can be restored."""
    base_seconds: float = 3_600.0
    """A base is due after this long, if anything changed; sooner when the log outweighs the last one."""
    memory_bytes: int = 64 * MIB
    """What waits for the bucket in memory; more waits on disk."""
    backlog_bytes: int = 4 * GIB
    """What waits on disk; beyond it the log is broken off, and a base follows when the bucket answers again."""
    sync_seconds: float = 30.0
    """How long a call waits for the bucket in mode `sync` before it raises `NotArchived`."""
    close_seconds: float = 30.0
    """How long closing the store waits for the last upload."""

    def __post_init__(self) -> None:
        _require(self.interval_seconds > 0, "archive.interval_seconds must be positive")
        _require(self.retain_seconds >= 0, "archive.retain_seconds must not be negative")
        _require(self.base_seconds > 0, "archive.base_seconds must be positive")
        _require(self.memory_bytes >= MIB, "archive.memory_bytes must be at least 1 MiB")
        _require(self.backlog_bytes >= 0, "archive.backlog_bytes must not be negative")
        _require(self.sync_seconds > 0 and self.close_seconds >= 0, "archive: waits must be positive")


class StreamSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How streams behave."""

    record_bytes_max: int = MIB
    """A larger record is refused."""
    segment_bytes: int = 64 * MIB
    """A segment of this size is sealed, and the next one begun. The first ones of a quiet stream are smaller."""
    seal_seconds: float = 60.0
    """A segment with records is sealed after this long, so that it can move on."""
    sync_seconds: float = 0.05
    """Records that nobody waits for are durable this long after they were appended."""
    pending_bytes_max: int = 8 * MIB
    """Appended, and not written yet; beyond it the appending thread writes."""
    cache_bytes: int = 64 * MIB
    """Decompressed frames kept in memory, over all streams."""
    hot_bytes: int = GIB
    """What sealed segments of one stream may take as they were written; beyond it, those longest unused are evicted."""
    warm_bytes: int = 4 * GIB
    """The same for compressed ones that are in the object store too."""
    compress: bool = True
    upload: bool = True
    """Whether sealed segments are compressed, and uploaded, in the background."""
    tick_seconds: float = 1.0
    """Between two looks at what there is to move."""
    attempts: int = 5
    """How often a read asks an object store that does not answer."""
    retry_seconds: float = 0.1
    """Before the second attempt; each further one waits twice as long."""
    retain_seconds: float = 0.0
    retain_bytes: int = 0
    """Records older than this, and the oldest ones beyond so many bytes, go; 0: they stay. A stream can have its own."""
    threads: int = 4
    """Threads that sync and seal what nobody waits for, over all streams."""
    open_max: int = 512
    """Streams that are open at once; beyond it those that nobody uses are closed, the longest unused first."""
    idle_seconds: float = 90.0
    """A stream that nobody has used for this long is closed; the next use opens it."""

    def __post_init__(self) -> None:
        _require(1 <= self.record_bytes_max <= 64 * MIB, "stream.record_bytes_max lies in [1, 64 MiB]")
        _require(4 * KIB <= self.segment_bytes <= GIB, "stream.segment_bytes lies in [4 KiB, 1 GiB]")
        _require(self.seal_seconds > 0 and self.sync_seconds >= 0, "stream: seal_seconds must be positive")
        _require(self.tick_seconds > 0, "stream.tick_seconds must be positive")
        _require(self.pending_bytes_max >= 0 and self.cache_bytes >= 0, "stream: budgets must not be negative")
        _require(self.hot_bytes >= 0 and self.warm_bytes >= 0, "stream: budgets must not be negative")
        _require(self.attempts >= 1 and self.retry_seconds >= 0, "stream.attempts must be positive")
        _require(self.retain_seconds >= 0 and self.retain_bytes >= 0, "stream: retention must not be negative")
        _require(1 <= self.threads <= 64, "stream.threads lies in [1, 64]")
        _require(self.open_max >= 1 and self.idle_seconds > 0, "stream: open_max and idle_seconds must be positive")


class ObjectSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an object store is reached: the sections `objects` and `namespaces.NAME`. A directory needs none of it."""

    endpoint: str = ""
    """Of an S3-compatible service, an emulator or a private endpoint; empty: the provider's own."""
    region: str = ""
    """S3 only; empty: AWS_REGION, else us-east-1."""
    allow_http: bool = False
    """Whether an endpoint may be plain HTTP: credentials and data then travel in the clear."""
    connect_timeout_seconds: float = 5.0
    request_timeout_seconds: float = 60.0
    """How long a connection may take to be made, and a request with its answer."""
    credentials: dict[str, str] = {}
    """By obstore's names (`access_key_id`, `secret_access_key`, `account_name` …); a value `env:NAME` is that variable's.
    Empty: the provider's own variables (AWS_*, GOOGLE_*, AZURE_*)."""

    def check(self, section: str) -> None:
        """Refuse what cannot work, by the name of its section in quire.toml."""
        hint = "docs/objects.md has examples"
        timeouts = (self.connect_timeout_seconds, self.request_timeout_seconds)
        _require(min(timeouts) > 0, f"{section}: timeouts must be above zero seconds", hint)
        if self.endpoint:
            example = '"https://s3.example.com" or "http://127.0.0.1:9000"'
            _require(
                ENDPOINT.fullmatch(self.endpoint) is not None, f"{section}.endpoint is a URL such as {example}", hint
            )
            _require(
                self.allow_http or self.endpoint.startswith("https:"),
                f"{section}.endpoint is plain HTTP: set `allow_http = true` beside it if data may travel in the clear",
                hint,
            )


class FollowSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A SQLite file of another program that `quire serve` follows."""

    file: str
    """Its path; a relative one is relative to the store."""
    database: str = ""
    """The database that it becomes; empty: as the file is called, without `.db`."""
    interval_seconds: float = 0.25
    """Between two looks at the file."""

    def __post_init__(self) -> None:
        _require(bool(self.file), "follow.file must be a path")
        _require(0.01 <= self.interval_seconds <= 3_600, "follow.interval_seconds lies in [0.01, 3600]")


class StoreSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything in quire.toml."""

    object_store: str = ""
    """URL of the object store; empty means `objects/` inside the store."""
    open_files_max: int = 896
    """Files that databases of all kinds keep open to write to, and tables; what is idle is closed after a second."""
    manifest: ManifestSettings = ManifestSettings()
    feed: FeedSettings = FeedSettings()
    maintenance: MaintenanceSettings = MaintenanceSettings()
    pages: PagesSettings = PagesSettings()
    service: ServiceSettings = ServiceSettings()
    manifest_log: ManifestLogSettings = ManifestLogSettings()
    stream: StreamSettings = StreamSettings()
    lsm: LsmSettings = LsmSettings()
    archive: ArchiveSettings = ArchiveSettings()
    objects: ObjectSettings = ObjectSettings()
    """How the object store is reached."""
    namespaces: dict[str, ObjectSettings] = {}
    """How a namespace of this name is reached; one that is not here, as `objects` says if its URL has the same scheme."""
    follow: tuple[FollowSettings, ...] = ()
    """SQLite files of other programs that `quire serve` follows: `[[follow]]` in quire.toml."""

    def __post_init__(self) -> None:
        _require(4 <= self.open_files_max <= 65_536, "open_files_max lies in [4, 65536]")
        self.objects.check("objects")
        for name, reached in self.namespaces.items():
            reached.check(f"namespaces.{name}")


def load(text: bytes) -> StoreSettings:
    """The settings that a quire.toml says."""
    try:
        return msgspec.toml.decode(text, type=StoreSettings)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidConfig(f"quire.toml: {error}", hint=_EXAMPLE_HINT) from error


EXAMPLE = """\
# quire.toml: the configuration of this store. Everything has a default; uncomment to change.

# Where objects live: a path, s3://bucket/prefix, gs://…, az://… Empty: the directory objects/ of this store.
object_store = "{object_store}"

# Files that databases keep open, at most a quarter of `ulimit -n`; beyond it the oldest is closed until its next use.
# open_files_max = 896

[objects]
# endpoint = ""                # of an S3-compatible service: "https://s3.example.com"
# allow_http = false           # let an endpoint be plain HTTP: "http://127.0.0.1:9000"
# region = ""
# credentials = {{}}             # {{ access_key_id = "env:MY_ID", secret_access_key = "env:MY_SECRET" }}; else AWS_* …
# A section [namespaces.NAME] says the same of a namespace (`quire namespace create NAME URL`); without it, [objects] does.

[archive]
# mode = "off"                 # keep the whole store in the bucket: async (a second behind) or sync (calls wait for it)
# interval_seconds = 1.0
# retain_seconds = 86400.0     # how far back the store can be restored

[manifest]
# queue_ops_max = 2048         # operations that may wait before submit blocks
# group_ops_max = 1024         # operations in one commit
# readers_max = 1024           # concurrent read transactions over all processes
# long_read_seconds = 30.0     # older read transactions are reported

[feed]
# retain_seconds = 604800.0    # change records kept when no cursor needs them: 7 days …
# retain_bytes = 1073741824    # … or 1 GiB, whichever is less

[service]
# calls_max = 64               # calls of other processes that are worked on at once …
# waits_max = 256              # … long polls …
# streams_max = 32             # … and tables that are being read
# body_bytes_max = 16777216    # of one call
# http_hosts = []              # names by which the dashboard is reached, beside localhost and addresses: "data.lan"
# http_ask_readers = false     # ask for a token even on this machine

[maintenance]
# enabled = true               # schedules, retention, leases and jobs, in the background of the owner
# interval_seconds = 5.0
# workers = 1                  # threads that run jobs
# runner = "auto"              # who does the heavy part of jobs: threads, spark, or auto by their size
# time_travel_seconds = 0.0    # how far back every version of a page database can be opened
# evict_seconds = 0.0          # copies that only snapshots need leave the disk for the object store at this age; 0: never
# undrop_seconds = 86400.0     # what a person has dropped can be brought back for so long
# delete_grace_seconds = 60.0  # bytes stay this long after their last reference went

[pages]
# open_max = 1024              # databases that are open at once; those longest unused are closed
# idle_seconds = 90.0          # … and those that nobody has used for this long

[lsm]
# memtable_bytes = 33554432    # key-value databases: a memtable of this size is flushed
# cache_bytes = 67108864       # decoded blocks kept in memory, over all of them
# backups_kept = 30            # of each label; the next backup removes older ones, 0 keeps all

[manifest_log]
# mode = "on"                  # streams' manifest logs: off, shadow or on
# rotation_seconds = 0.25      # a quiet chunk with news is sealed and uploaded after this long

[stream]
# segment_bytes = 67108864     # a segment of this size is sealed …
# seal_seconds = 60.0          # … or one this old
# hot_bytes = 1073741824       # sealed segments of one stream as they were written …
# warm_bytes = 4294967296      # … and compressed ones, before they are evicted
# upload = true                # to the object store, in the background
# retain_seconds = 0.0         # older records go; 0: they stay

# SQLite files of other programs that `quire serve` follows, each in a block of its own:
# [[follow]]
# file = "/srv/app/app.db"
# database = "app"
"""
