"""Settings: plain data, with defaults and reasons; quire.toml is the same data on disk.

Components (clock, disk, object store) are arguments, not settings. Construction refuses an invalid value by its name.

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

from quire.core.decoding import UNDECODABLE, described
from quire.core.errors import InvalidConfig
from quire.core.limits import BATCH_OPS_MAX, GIB, KIB, MIB

ENDPOINT = re.compile(r"https?://[^\s/@?#]+(/[^\s?#]*)?")
"""The form of a service's address. With any other, obstore fails at the first request, or panics."""

_EXAMPLE_HINT = "`quire init` writes a commented example"


def _require(holds: bool, message: str, hint: str = _EXAMPLE_HINT) -> None:
    if not holds:
        raise InvalidConfig(message, hint=hint)


class ManifestSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the manifest's LMDB environment and writer."""

    map_bytes: int = 256 * GIB
    """Address space reserved for the manifest, in bytes (M4). The file stays small; growing the map is an emergency measure."""
    map_bytes_max: int = 4096 * GIB
    """Size in bytes up to which the map is grown; beyond it, a full map raises `DiskFull`."""
    map_watermark: float = 0.8
    """Fraction of the map that may be used before the map is grown."""
    readers_max: int = 1024
    """Concurrent read transactions, over all processes."""
    queue_ops_max: int = 2_048
    """Operations that may wait for the writer before `submit` blocks; bounds memory."""
    group_ops_max: int = 1_024
    """Operations in one commit: at this size the producers' work hides the sync, and a larger group only adds latency."""
    group_seconds_max: float = 0.02
    """A group takes no further batches once it has been applying for this long."""
    group_wait_seconds: float = 0.002
    """How long the writer waits for the callers it has just answered to submit again, if there was more than one."""
    long_read_seconds: float = 30.0
    """A read transaction older than this is reported: it keeps LMDB from reusing pages."""
    grow_wait_seconds: float = 30.0
    """How long growing the map waits for the read transactions of this process to end."""
    idempotency_seconds: float = 86_400.0
    """How long the answers to keyed batches are kept (M11)."""

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
    """How much of the change feed is kept when no cursor needs more (M9)."""

    retain_seconds: float = 7 * 86_400.0
    retain_bytes: int = GIB
    """Changes older than `retain_seconds` are trimmed, as are the oldest changes beyond `retain_bytes`."""


class MaintenanceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the owner's maintenance: schedules, retention, leases, jobs, trimming."""

    enabled: bool = True
    """Whether the owner runs maintenance in the background; `store.maintain()` runs one round in any case."""
    interval_seconds: float = 5.0
    """Time between two rounds."""
    workers: int = 1
    """Threads that run jobs."""
    runner: str = "auto"
    """What runs the heavy part of a job: threads, spark, or auto, which means threads below 256 MiB and Spark otherwise."""
    executors_see_store: bool = False
    """Whether Spark's executors see the store's directory under the same path; those of a local master always do."""
    checkpoint_bytes: int = 64 * MIB
    checkpoint_seconds: float = 300.0
    """A page database is checkpointed when its sealed WAL reaches `checkpoint_bytes`, or `checkpoint_seconds` of age."""
    merge_chain: int = 6
    merge_ratio: float = 1.0
    """A slot is merged when its chain has `merge_chain` parts, or its deltas weigh `merge_ratio` times its base."""
    time_travel_seconds: float = 0.0
    """How far back every version of a page database can be opened (P14); 0: only versions that WAL and snapshots still have."""
    evict_seconds: float = 0.0
    """Age at which local copies of chunks, and of WAL segments that only snapshots and forks need, are evicted to the object
    store: segments count from their seal, hydrated copies from their fetch (at most `jobs_keep_seconds`); 0: never."""
    undrop_seconds: float = 86_400.0
    """How long a dropped database or snapshot can be brought back (`quire undrop`); 0: not at all."""
    delete_grace_seconds: float = 60.0
    """How long bytes are kept after the last reference to them is gone (M8)."""
    jobs_keep_seconds: float = 7 * 86_400.0
    """How long jobs that have ended are kept."""
    audit_seconds: float = 400 * 86_400.0
    """How long entries of the audit log are kept."""

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
    """Settings of page databases."""

    page_size: int = 4096
    """Page size in bytes of databases that do not specify one when they are first opened."""
    cache_bytes: int = 64 * MIB
    """Bytes of pages kept in memory, over all databases."""
    wal_bytes_max: int = GIB
    """Bytes of WAL in one database that no checkpoint has absorbed; beyond it, writers wait."""
    store_wal_bytes_max: int = 16 * GIB
    """The same limit for all databases together."""
    publish_seconds: float = 1.0
    publish_bytes: int = 4 * MIB
    """The page index is published `publish_seconds` or `publish_bytes` after the last time, whichever comes first (P6)."""
    seal_seconds: float = 60.0
    """Age at which an open segment is sealed, so that it can be checkpointed."""
    spill_bytes: int = 64 * MIB
    """Bytes of one transaction's pages kept in memory; the rest goes to a scratch file until the commit (P6)."""
    cold_bytes_per_second: int = 128 * MIB
    """Bytes per second that all cold scans together may read; 0: no limit."""
    long_reader_seconds: float = 300.0
    """A snapshot that is open for longer than this is reported once: it keeps WAL from being reclaimed."""
    attach_creates: bool = True
    """Whether SQL's ATTACH creates a database that does not exist, as SQLite creates a file."""
    open_max: int = 1024
    """Databases that are open at once; beyond it, unused ones are closed, longest unused first."""
    idle_seconds: float = 90.0
    """A database that has not been used for this long is closed; the next use opens it again."""

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
    """Settings of the manifest logs of streams."""

    mode: Literal["off", "shadow", "on"] = "on"
    """`off`: no log. `shadow`: written and compared with the projection, but not relied on. `on`: authoritative (S1)."""
    chunk_bytes: int = 256 * KIB
    """Size at which a chunk is sealed. A chunk begins with 16 KiB and grows; a sealed one keeps only its used bytes."""
    record_bytes_max: int = 4 * KIB
    """A chunk is rotated when it has less than this many bytes left; a larger record makes its chunk grow instead."""
    rotation_seconds: float = 0.25
    """A chunk with records about data segments is rotated, and so uploaded, after this long without a commit."""
    snapshot_chunks: int = 64
    """Sealed chunks between two snapshots; bounds how much of the log recovery replays and how much stays on disk."""
    snapshots_kept: int = 2
    """Snapshots that are kept, so that another one exists if the newest is damaged."""
    sealed_kept: int = 2
    """Sealed chunks that stay on disk although they are uploaded and older than the newest snapshot."""
    bundle_seconds: float = 7 * 86_400.0
    """Length of the period whose chunks are combined into one object."""

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
    """How an owner serves other processes: every resource that a client can use up is bounded."""

    calls_max: int = 64
    """Calls that are processed at once; further ones wait for `busy_seconds` and are then refused."""
    waits_max: int = 256
    """Long polls at once: each holds a thread, and nothing else."""
    streams_max: int = 32
    """Tables that are read at once; a slow client keeps its place."""
    connections_max: int = 512
    """Connections through the Unix socket: each holds a thread."""
    busy_seconds: float = 1.0
    """How long a call waits for a place before it is refused."""
    body_bytes_max: int = 16 * MIB
    """Bytes of one call; a batch of operations must fit."""
    batch_bytes: int = 8 * MIB
    """An Arrow batch ends with the row that exceeds this size."""
    wait_seconds_max: float = 20.0
    """Longest duration of one long poll; clients that wait longer poll again."""
    stop_seconds: float = 5.0
    """How long a closing server waits for calls to end before it drops their connections."""
    http_connections_max: int = 1024
    """HTTP connections at once; further ones are refused, and clients can retry."""
    http_requests_max: int = 256
    """HTTP requests that are processed at once; further ones are refused, and clients can retry."""
    http_threads: int = 16
    """Threads for blocking work: the dashboard, files, replicas. SQL has its own threads."""
    http_head_bytes_max: int = 32 * 1024
    """Bytes of a request line and its headers."""
    http_head_seconds: float = 10.0
    """Time from the first byte of a request, or the beginning of a connection, to the end of the headers."""
    http_body_seconds: float = 60.0
    """Time from the end of the headers to the end of the body."""
    http_idle_seconds: float = 30.0
    """How long a connection is kept open between two requests."""
    http_send_seconds: float = 30.0
    """How long a client may take to read any part of a response."""
    http_events_max: int = 16
    """Dashboard pages with live updates at once: each holds a connection."""
    http_ask_readers: bool = False
    """Whether a token is required even on loopback: for machines that other users log in to."""
    http_anonymous_writes: bool = False
    """Whether databases can also be written without a token on loopback: for development, and for single-user machines."""
    jwt_keys: tuple[str, ...] = ()
    """Files of public keys (Ed25519, PEM or base64) whose signed tokens are accepted in addition to the store's own key."""
    http_hosts: tuple[str, ...] = ()
    """Host names of the HTTP server in addition to localhost and addresses; a request for any other name is refused."""
    metrics_databases: int = 20
    """Number of databases with their own series in `/metrics`: those with the largest files. 0: none."""
    metrics_tag: str = ""
    """A tag, such as "plan", by whose values `/metrics` aggregates databases; empty: no aggregation."""
    http_sample_seconds: float = 10.0
    """How often the dashboard records how many segments are in which state."""
    sql_threads: int = 16
    """Threads that run the SQL of other programs; none of them ever waits for a lock."""
    sql_database_threads: int = 12
    """Threads out of `sql_threads` that one database may use at once; always fewer than all, unless there is only one."""
    sql_streams_max: int = 512
    """SQL streams at once, each with its own connection."""
    sql_database_streams_max: int = 256
    """SQL streams of one database at once."""
    sql_idle_seconds: float = 10.0
    """A stream that has not been used for this long is closed."""
    sql_transaction_seconds: float = 5.0
    """A transaction that is idle for this long is rolled back: it may hold the write lock."""
    sql_lock_seconds: float = 7.5
    """How long a statement waits for the write lock before it fails with `SQLITE_BUSY`."""
    sql_statement_seconds: float = 60.0
    """How long a statement may take for its first row, and for each further group of rows, before it is interrupted."""
    sql_answer_rows_max: int = 1_000_000
    sql_answer_bytes_max: int = 32 * MIB
    """One answer has at most `sql_answer_rows_max` rows and `sql_answer_bytes_max` bytes; a cursor has neither limit."""
    sql_heap_bytes: int = 1024 * MIB
    """Heap of SQLite in a serving process above which it frees cached pages; statements do not fail. 0: no limit."""
    sql_default_database: str = "default"
    """Database of clients that name none, created on first use; empty: such clients are refused."""

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
    """Settings of key-value databases."""

    memtable_bytes: int = 32 * MIB
    """Size at which a memtable is frozen and flushed."""
    frozen_max: int = 2
    """Frozen memtables that may wait to be flushed; beyond it, writers wait."""
    table_bytes: int = 32 * MIB
    """Size, before compression, at which a compaction begins a new table."""
    block_bytes: int = 64 * 1024
    """Size of a table's blocks, before compression."""
    compression: str = "lz4"
    """Compression of tables: lz4, zstd or none."""
    bloom_bits_per_key: int = 10
    cache_bytes: int = 64 * MIB
    """Bytes of decoded blocks kept in memory, over all databases."""
    level0_tables: int = 4
    """Number of overlapping tables in level 0 at which they are merged into level 1."""
    level0_stop: int = 20
    """Number of tables in level 0 at which writers wait for a compaction."""
    level_bytes: int = 256 * MIB
    """Bytes that level 1 may hold; each deeper level holds ten times more."""
    stall_seconds: float = 60.0
    """How long a writer waits for room before it fails with `Overloaded`."""
    manifest_log_bytes: int = 256 * 1024
    """Size of the manifest's log at which a snapshot of the manifest is written."""
    backups_kept: int = 30
    """Backups kept for each label: the next backup removes older ones. 0: all are kept."""
    threads: int = 2
    """Threads that flush memtables, over all databases; as many again run compactions."""
    open_max: int = 256
    """Databases that are open at once; beyond it, unused ones are closed, longest unused first."""
    idle_seconds: float = 90.0
    """A database that has not been used for this long is closed; the next use opens it again."""

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
    """Settings of the store's archive in its bucket (A9)."""

    mode: Literal["off", "async", "sync"] = "off"
    """`async`: the bucket lags by `interval_seconds`. `sync`: every call that changes the store waits for the bucket."""
    interval_seconds: float = 1.0
    """Longest time that a change waits before its upload begins."""
    retain_seconds: float = 86_400.0
    """How far back the whole store can be restored."""
    base_seconds: float = 3_600.0
    """A base is due after this long if anything has changed, and sooner when the log outweighs the last base."""
    memory_bytes: int = 64 * MIB
    """Bytes that wait for the bucket in memory; more wait on disk."""
    backlog_bytes: int = 4 * GIB
    """Bytes that wait on disk; beyond it the log is broken off, and a base follows when the bucket responds again."""
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
    """Settings of streams."""

    record_bytes_max: int = MIB
    """Size of the largest record; a larger one is refused."""
    segment_bytes: int = 64 * MIB
    """Size at which a segment is sealed and the next one begun. The first segments of a quiet stream are smaller."""
    seal_seconds: float = 60.0
    """Age at which a segment with records is sealed, so that it can move to the next tier."""
    archived_seal_seconds: float = 3600.0
    archived_seal_bytes: int = 8 * MIB
    """In an archived store, a segment smaller than `archived_seal_bytes` is sealed at the age of `archived_seal_seconds`: the
    archive already has its records, and every seal costs several requests to the bucket (A6)."""
    sync_seconds: float = 0.05
    """Records that no caller waits for become durable this long after they were appended."""
    pending_bytes_max: int = 8 * MIB
    """Bytes appended and not yet written; beyond it, the appending thread writes them itself."""
    cache_bytes: int = 64 * MIB
    """Bytes of decompressed frames kept in memory, over all streams."""
    hot_bytes: int = GIB
    """Bytes of uncompressed sealed segments that one stream keeps on disk; beyond it, the longest unused are evicted."""
    warm_bytes: int = 4 * GIB
    """The same limit for compressed segments; only those that are also in the object store are evicted."""
    compress: bool = True
    upload: bool = True
    """Whether sealed segments are compressed (`compress`) and uploaded (`upload`) in the background."""
    tick_seconds: float = 1.0
    """Interval between two checks for segments to move between tiers."""
    attempts: int = 5
    """How often a read is attempted while the object store does not respond."""
    retry_seconds: float = 0.1
    """Pause before the second attempt; each further pause is twice as long."""
    retain_seconds: float = 0.0
    retain_bytes: int = 0
    """Default retention: records older than `retain_seconds`, or the oldest beyond `retain_bytes`, are removed; 0: no limit."""
    threads: int = 4
    """Threads that sync and seal records that no caller waits for, over all streams."""
    open_max: int = 512
    """Streams that are open at once; beyond it, unused ones are closed, longest unused first."""
    idle_seconds: float = 90.0
    """A stream that has not been used for this long is closed; the next use opens it again."""

    def __post_init__(self) -> None:
        _require(1 <= self.record_bytes_max <= 64 * MIB, "stream.record_bytes_max lies in [1, 64 MiB]")
        _require(4 * KIB <= self.segment_bytes <= GIB, "stream.segment_bytes lies in [4 KiB, 1 GiB]")
        _require(self.seal_seconds > 0 and self.sync_seconds >= 0, "stream: seal_seconds must be positive")
        _require(self.archived_seal_seconds > 0, "stream: archived_seal_seconds must be positive")
        _require(self.archived_seal_bytes >= 0, "stream: archived_seal_bytes must not be negative")
        _require(self.tick_seconds > 0, "stream.tick_seconds must be positive")
        _require(self.pending_bytes_max >= 0 and self.cache_bytes >= 0, "stream: budgets must not be negative")
        _require(self.hot_bytes >= 0 and self.warm_bytes >= 0, "stream: budgets must not be negative")
        _require(self.attempts >= 1 and self.retry_seconds >= 0, "stream.attempts must be positive")
        _require(self.retain_seconds >= 0 and self.retain_bytes >= 0, "stream: retention must not be negative")
        _require(1 <= self.threads <= 64, "stream.threads lies in [1, 64]")
        _require(self.open_max >= 1 and self.idle_seconds > 0, "stream: open_max and idle_seconds must be positive")


class ObjectSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an object store is reached: the sections `objects` and `namespaces.NAME`. A directory needs no settings."""

    endpoint: str = ""
    """URL of an S3-compatible service, an emulator or a private endpoint; empty: the provider's own."""
    region: str = ""
    """Region of an S3 bucket; empty: AWS_REGION, else us-east-1."""
    allow_http: bool = False
    """Whether the endpoint may be plain HTTP: credentials and data then travel unencrypted."""
    connect_timeout_seconds: float = 5.0
    request_timeout_seconds: float = 60.0
    """How long a connection may take to be established, and a request to be answered."""
    credentials: dict[str, str] = {}
    """Credentials by obstore's names (`access_key_id`, `secret_access_key`, `account_name` …); a value `env:NAME` is read from
    that environment variable. Empty: the provider's own variables (AWS_*, GOOGLE_*, AZURE_*)."""

    def check(self, section: str) -> None:
        """Raise `InvalidConfig` for values that cannot work; `section` is the name of the section in quire.toml."""
        self.check_endpoint(f"{section}.endpoint", allow="set `allow_http = true` next to it")
        hint = "docs/objects.md has examples"
        timeouts = (self.connect_timeout_seconds, self.request_timeout_seconds)
        _require(min(timeouts) > 0, f"{section}: timeouts must be above zero seconds", hint)

    def check_endpoint(self, name: str, *, allow: str) -> None:
        """Raise `InvalidConfig` for an endpoint that cannot work. `name` is where it was given, `allow` how to allow HTTP."""
        if not self.endpoint:
            return
        hint, example = "docs/objects.md has examples", '"https://s3.example.com" or "http://127.0.0.1:9000"'
        _require(ENDPOINT.fullmatch(self.endpoint) is not None, f"{name} is a URL such as {example}", hint)
        is_allowed = self.allow_http or self.endpoint.startswith("https:")
        _require(is_allowed, f"{name} is plain HTTP: {allow} if data may be sent unencrypted", hint)


class FollowSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A SQLite file of another program that `quire serve` follows."""

    file: str
    """Path of the file; a relative path is relative to the store."""
    database: str = ""
    """Name of the database that the file becomes; empty: the name of the file without `.db`."""
    interval_seconds: float = 0.25
    """Time between two checks of the file for changes."""

    def __post_init__(self) -> None:
        _require(bool(self.file), "follow.file must be a path")
        _require(0.01 <= self.interval_seconds <= 3_600, "follow.interval_seconds lies in [0.01, 3600]")


class StoreSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of quire.toml."""

    object_store: str = ""
    """URL of the object store; empty: `objects/` inside the store."""
    open_files_max: int = 896
    """Files that databases of all kinds keep open for writing, and tables; idle ones are closed after a second."""
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
    """How namespaces are reached, by name; one that is not listed uses `objects` if its URL has the same scheme."""
    follow: tuple[FollowSettings, ...] = ()
    """SQLite files of other programs that `quire serve` follows: `[[follow]]` in quire.toml."""

    def __post_init__(self) -> None:
        _require(4 <= self.open_files_max <= 65_536, "open_files_max lies in [4, 65536]")
        self.objects.check("objects")
        for name, reached in self.namespaces.items():
            reached.check(f"namespaces.{name}")


def load(text: bytes) -> StoreSettings:
    """Parse the contents of a quire.toml; raise `InvalidConfig` if they are not valid."""
    try:
        return msgspec.toml.decode(text, type=described(StoreSettings))
    except UNDECODABLE as error:
        raise InvalidConfig(f"quire.toml: {error}", hint=_EXAMPLE_HINT) from error


EXAMPLE = """\
# quire.toml: the configuration of this store. Everything has a default; uncomment to change.

# Location of the objects: a path, s3://bucket/prefix, gs://…, az://… Empty: objects/ in this store.
object_store = "{object_store}"

# Files that databases keep open, at most a quarter of `ulimit -n`; beyond that, one is closed until its next use.
# open_files_max = 896

[objects]
# endpoint = ""                # of an S3-compatible service: "https://s3.example.com"
# allow_http = false           # allow a plain HTTP endpoint: "http://127.0.0.1:9000"
# region = ""
# credentials = {{}}             # {{ access_key_id = "env:MY_ID", secret_access_key = "env:MY_SECRET" }}; else AWS_* …
# A section [namespaces.NAME] has the same settings for one namespace (`quire namespace create NAME URL`); default: [objects].

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
# calls_max = 64               # concurrent calls from other processes …
# waits_max = 256              # … long polls …
# streams_max = 32             # … and table reads
# body_bytes_max = 16777216    # size of one call
# http_hosts = []              # host names of the dashboard, besides localhost and IP addresses: "data.lan"
# http_ask_readers = false     # require a token even on this machine

[maintenance]
# enabled = true               # schedules, retention, leases and jobs, in the background of the owner
# interval_seconds = 5.0
# workers = 1                  # threads that run jobs
# runner = "auto"              # runs the heavy part of jobs: threads, spark, or auto (by size)
# time_travel_seconds = 0.0    # how far back every version of a page database can be opened
# evict_seconds = 0.0          # evict files that only snapshots need at this age; 0: never
# undrop_seconds = 86400.0     # how long a dropped database or snapshot can be restored
# delete_grace_seconds = 60.0  # how long data is kept after its last reference is removed

[pages]
# open_max = 1024              # databases open at once; the least recently used are closed
# idle_seconds = 90.0          # … and those unused for this long

[lsm]
# memtable_bytes = 33554432    # key-value databases: a memtable of this size is flushed
# cache_bytes = 67108864       # decoded blocks kept in memory, over all of them
# backups_kept = 30            # of each label; the next backup removes older ones, 0 keeps all

[manifest_log]
# mode = "on"                  # streams' manifest logs: off, shadow or on
# rotation_seconds = 0.25      # a chunk with new records is sealed and uploaded after this long

[stream]
# segment_bytes = 67108864     # a segment of this size is sealed …
# seal_seconds = 60.0          # … or one this old
# hot_bytes = 1073741824       # uncompressed sealed segments of one stream …
# warm_bytes = 4294967296      # … and compressed ones, before they are evicted
# upload = true                # to the object store, in the background
# retain_seconds = 0.0         # older records are dropped; 0: never

# SQLite files of other programs for `quire serve` to follow, one block each:
# [[follow]]
# file = "/srv/app/app.db"
# database = "app"
"""
