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

import msgspec

from quire.core.errors import InvalidConfig
from quire.core.limits import BATCH_OPS_MAX, GIB, MIB


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidConfig(message, hint="`quire init` writes a commented example")


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


class MaintenanceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the owner does by itself: schedules, retention, leases, jobs, trimming."""

    enabled: bool = True
    """Whether an owner runs it in the background; `store.maintain()` does one round in any case."""
    interval_seconds: float = 5.0
    """Between two rounds."""
    workers: int = 1
    """Threads that run jobs."""
    checkpoint_bytes: int = 64 * MIB
    checkpoint_seconds: float = 300.0
    """A page database is checkpointed when it has this much sealed WAL, or when some of it is this old."""
    delete_grace_seconds: float = 60.0
    """Bytes stay this long after their last reference went (M8)."""
    jobs_keep_seconds: float = 7 * 86_400.0
    """How long jobs that ended are remembered."""
    audit_seconds: float = 400 * 86_400.0
    """How long the audit reaches back."""

    def __post_init__(self) -> None:
        _require(self.interval_seconds > 0, "maintenance.interval_seconds must be positive")
        _require(0 <= self.workers <= 64, "maintenance.workers lies in [0, 64]")
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


class StoreSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything in quire.toml."""

    object_store: str = ""
    """URL of the object store; empty means `objects/` inside the store."""
    manifest: ManifestSettings = ManifestSettings()
    feed: FeedSettings = FeedSettings()
    maintenance: MaintenanceSettings = MaintenanceSettings()
    pages: PagesSettings = PagesSettings()


def load(text: bytes) -> StoreSettings:
    """The settings that a quire.toml says."""
    try:
        return msgspec.toml.decode(text, type=StoreSettings)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"quire.toml: {error}", hint="`quire init` writes a commented example") from error


EXAMPLE = """\
# quire.toml: the configuration of this store. Everything has a default; uncomment to change.

# Where objects live: a path, s3://bucket/prefix, gs://…, az://… Empty: the directory objects/ of this store.
object_store = "{object_store}"

[manifest]
# queue_ops_max = 2048         # operations that may wait before submit blocks
# group_ops_max = 1024         # operations in one commit
# readers_max = 1024           # concurrent read transactions over all processes
# long_read_seconds = 30.0     # older read transactions are reported

[feed]
# retain_seconds = 604800.0    # change records kept when no cursor needs them: 7 days …
# retain_bytes = 1073741824    # … or 1 GiB, whichever is less

[maintenance]
# enabled = true               # schedules, retention, leases and jobs, in the background of the owner
# interval_seconds = 5.0
# workers = 1                  # threads that run jobs
# delete_grace_seconds = 60.0  # bytes stay this long after their last reference went
"""
