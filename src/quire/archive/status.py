"""The status of an archive, for reports and metrics (A13).

Terms
  lag          the age of the oldest change that is not in the bucket; 0 if there is none
  restorable   the newest moment that can be restored from the bucket alone
  drill        a restore into scratch, compared with the live store; the last one is drill.json in the store's directory

Threads: any. Imports little, because `quire info` loads it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

import msgspec

from quire.core.decoding import UNDECODABLE, described
from quire.core.errors import StoreFenced
from quire.core.hourly import HourlyTotals
from quire.core.settings import ArchiveSettings
from quire.durable.files import Disk, read_all, write_atomic

if TYPE_CHECKING:
    from quire.objects.requests import RequestCount

DRILL = "drill.json"
"""In a store's directory: the last drill. It concerns this directory only, so it is not shipped."""
MONTH_HOURS = 730
OWNER_STATES = ("archived", "uploading", "behind", "no base", "stopped")
"""States that only the owner of a store can report. A directory remembers that it was fenced."""
LATE_INTERVALS = 10
"""A lag of more intervals than this is an outage, not an upload in progress."""
WRITE_DOLLARS, READ_DOLLARS = 0.005 / 1_000, 0.0004 / 1_000
"""Prices of requests in S3 Standard (PUT and LIST; GET and HEAD); for estimates in reports, never for decisions."""


class DrillRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a drill."""

    at_ms: int
    """When it began."""
    seconds: float
    """Duration of the whole drill."""
    restore_seconds: float
    """Duration of the restore alone: how long a real restore takes until the store can be read."""
    restored_at_ms: int
    """The moment that was restored."""
    databases: int
    bytes: int
    """Bytes compared."""
    changed_keys: int = 0
    """Keys that were overwritten during the drill and could not be compared."""
    problems: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether the restored state equals the live store."""
        return not self.problems


class ArchiveStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a store's archive, from its owner or from its directory alone."""

    mode: str
    """`off`, `async` or `sync`."""
    state: str
    """`off`, `archived` (everything is in the bucket), `uploading`, `behind` (the bucket does not respond), `no base` (nothing
    can be restored yet), `fenced`, `stopped`. From the directory alone: `owned` (only the owner has the status), `closed`,
    `not closed cleanly`, or, if another directory is the owner, `standby` or `restored`."""
    interval_seconds: float = 1.0
    retain_seconds: float = 0.0
    """How far back the whole store can be restored."""
    lag_seconds: float = 0.0
    memory_bytes: int = 0
    """Bytes in memory that wait to be uploaded."""
    backlog_bytes: int = 0
    """Bytes on disk that wait to be uploaded."""
    last_cut_at_ms: int = 0
    """Time of the newest log object in the bucket."""
    restorable_at_ms: int = 0
    """The newest moment that can be restored; 0: none, or unknown."""
    puts: int = 0
    put_bytes: int = 0
    """Both since the store was opened."""
    puts_per_hour: float = 0.0
    put_bytes_per_hour: float = 0.0
    """Both from the last hour, or since the store was opened."""
    writes_per_hour: float = 0.0
    reads_per_hour: float = 0.0
    """All requests of the store to its object stores, not only those of the archive: puts and listings, and reads."""
    last_error: str = ""
    fenced: bool = False
    last_drill: DrillRecord | None = None

    @property
    def is_safe(self) -> bool:
        """Whether no change would be lost if the disk failed now."""
        return self.state in ("archived", "closed")

    @property
    def is_live(self) -> bool:
        """Whether the owner reported it: from the directory alone, lag and traffic are unknown."""
        return self.state in OWNER_STATES

    @property
    def puts_per_month(self) -> int:
        """An estimate, from the last hour."""
        return round(self.puts_per_hour * MONTH_HOURS)

    @property
    def put_bytes_per_month(self) -> int:
        """An estimate, from the last hour."""
        return round(self.put_bytes_per_hour * MONTH_HOURS)

    @property
    def dollars_per_month(self) -> float:
        """Estimated cost of a month's requests at the list price of S3 Standard."""
        dollars_per_hour = self.writes_per_hour * WRITE_DOLLARS + self.reads_per_hour * READ_DOLLARS
        return dollars_per_hour * MONTH_HOURS


class Archive(Protocol):
    """The archive of an open store: `store.archive`, which is `None` if `archive.mode` is off."""

    def status(self) -> ArchiveStatus:
        """Return the state of the archive: its backlog, its restorable moments, its traffic."""

    def wait(self, timeout: float | None = None) -> None:
        """Block until everything that was changed before this call is in the bucket. Raises `NotArchived` after `timeout`
        seconds (default: `archive.sync_seconds`), `StoreFenced` if another directory has taken over the store."""

    def base(self) -> None:
        """Upload the whole store again, under new names, and return when it can be restored from that alone."""

    def drill(self) -> DrillRecord:
        """Restore into scratch without claiming anything, compare every database with the live store, and record the
        result. A restore that fails is recorded too, and raises."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an archiver at one moment."""

    failure: BaseException | None
    is_complete: bool
    """Whether everything that was handed over is in the bucket."""
    has_base: bool
    waiting_bytes: int
    backlog_bytes: int
    last_cut_ms: int
    restorable_ms: int
    last_error: str


def status_of(
    settings: ArchiveSettings,
    figures: Figures,
    traffic: Traffic,
    requests: RequestCount,
    lag: float,
    now_ms: int,
    drill: DrillRecord | None,
) -> ArchiveStatus:
    """Return the status of an archive whose owner is this process. `traffic` is the archive's, `requests` the whole store's."""
    puts, size = traffic.per_hour()
    writes, reads = requests.per_hour()
    return ArchiveStatus(
        mode=settings.mode,
        state=_state(settings, figures, lag),
        interval_seconds=settings.interval_seconds,
        retain_seconds=settings.retain_seconds,
        lag_seconds=lag,
        memory_bytes=figures.waiting_bytes,
        backlog_bytes=figures.backlog_bytes,
        last_cut_at_ms=figures.last_cut_ms,
        # If nothing has changed since, a restore yields the current state, however old the last object is.
        restorable_at_ms=now_ms if figures.is_complete and figures.has_base else figures.restorable_ms,
        puts=traffic.puts,
        put_bytes=traffic.put_bytes,
        puts_per_hour=puts,
        put_bytes_per_hour=size,
        writes_per_hour=writes,
        reads_per_hour=reads,
        last_error=str(figures.failure) if figures.failure is not None else figures.last_error,
        fenced=isinstance(figures.failure, StoreFenced),
        last_drill=drill,
    )


def _state(settings: ArchiveSettings, figures: Figures, lag: float) -> str:
    if figures.failure is not None:
        return "fenced" if isinstance(figures.failure, StoreFenced) else "stopped"
    if not figures.has_base:
        return "no base"
    if figures.is_complete:
        return "archived"
    late = lag > LATE_INTERVALS * settings.interval_seconds
    return "behind" if late or figures.last_error else "uploading"


class Traffic(HourlyTotals):
    """Counts the objects and bytes that the archiver puts."""

    def count(self, size_bytes: int) -> None:
        """Count an object that was put."""
        self._add(1, size_bytes)

    @property
    def puts(self) -> int:
        """Objects put since the store was opened."""
        return self._first

    @property
    def put_bytes(self) -> int:
        """Their bytes."""
        return self._second


def read_drill(disk: Disk, root: str) -> DrillRecord | None:
    """Return the last drill, or `None` if there was none."""
    try:
        return msgspec.json.decode(read_all(disk, os.path.join(root, DRILL)), type=described(DrillRecord))
    except (FileNotFoundError, *UNDECODABLE):
        return None


def write_drill(disk: Disk, root: str, drill: DrillRecord) -> None:
    """Record a drill."""
    write_atomic(disk, os.path.join(root, DRILL), msgspec.json.encode(drill))
