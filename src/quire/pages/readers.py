"""Leases of readers on versions of a database, and the floor that they impose on checkpoints.

Terms
  lease      a reader's right to one version until a deadline, which its heartbeat extends
  hold       a lease of the engine itself, which never expires
  set aside  a lease is set aside when a snapshot keeps its version (`kept`; the checkpoint job takes one when the WAL budget
             is half used). It no longer holds the floor: what the floor passes is read from that snapshot. Never for a hold

A lease is taken on a version that is readable at that moment, under the lock that also computes the floor: so a floor that was
given out is never above an existing lease, and never falls while a checkpoint works with it. A lease that was not renewed in
time is retired with a warning, and reading through it raises `LeaseExpired`: the pages it needs may be gone. It protects its
version until it is retired, however late that is: no clock takes part in a read.

Readers in this process are kept in memory and end with it (M10); those in other processes are rows and files that the owner
includes through `outside`.

Threads: any; one lock per database, held for a few operations on dicts.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from quire.core.clock import Clock
from quire.core.errors import LeaseExpired, SnapshotGone, UnknownReader
from quire.core.events import emit
from quire.core.reader_info import ReaderInfo, reader_text

LEASE_SECONDS = 30.0
HEARTBEAT_SECONDS = 5.0
"""M10: how long a lease is valid without a heartbeat, and the interval of heartbeats."""

HOLD_TAG = "hold"
"""The tag of leases that keep a version for a commit, not for reading: they are never set aside."""

RETIRED_MAX = 4_096
"""Ids of retired readers kept in memory, so that a late `renew` raises `LeaseExpired`."""

HOST = os.uname().nodename

_ids = itertools.count(1)


def program() -> str:
    """Return the name of this process, for tags."""
    return os.path.basename(sys.argv[0] if sys.argv else "")[:64] or "python"


@dataclass(slots=True, eq=False)
class Lease:
    """One reader. `expires_at` is monotonic; `None` for a hold."""

    reader_id: int
    lsn: int
    opened_at_ms: int
    opened_at: float
    expires_at: float | None
    ttl_seconds: float
    tags: dict[str, str] = field(default_factory=dict)
    open: bool = True
    retired: bool = False
    reported: bool = False
    """Whether it was reported as long-running."""
    set_aside: bool = False
    """Whether a floor has passed it. Never cleared; the lease must not move to another version afterwards."""
    pid: int = 0
    """Its process; 0 if unknown."""
    host: str = ""
    readers: Readers | None = field(default=None, repr=False)
    """The `Readers` that it belongs to; `None` for a lease of another process."""

    def require(self) -> None:
        """Raise `LeaseExpired` unless the lease is alive."""
        self._owner.require(self)

    def renew(self) -> None:
        """Extend the lease."""
        self._owner.renew(self.reader_id)

    def keep_alive(self, holder: object) -> None:
        """Renew the lease automatically while `holder` exists."""
        self._owner.keep_alive(holder, self)

    def close(self) -> None:
        """End the lease. Does nothing if it is closed or has expired."""
        if self.open:
            self._owner.close(self.reader_id)

    @property
    def _owner(self) -> Readers:
        assert self.readers is not None, "a lease of another process is only shown"
        return self.readers

    @property
    def description(self) -> str:
        """The reader, its version and its age, for messages."""
        return reader_text(self.info)

    @property
    def info(self) -> ReaderInfo:
        """The same as a `ReaderInfo`."""
        return ReaderInfo(
            reader=str(self.reader_id or self.pid),
            lsn=self.lsn,
            pid=self.pid,
            host=self.host,
            since_ms=self.opened_at_ms,
            tags=dict(self.tags),
            set_aside=self.set_aside,
        )


M = TypeVar("M")


def is_kept(lsn: int, kept: list[tuple[int, int]]) -> bool:
    """Return whether a version is among those that snapshots keep for readers."""
    return any(lowest <= lsn <= highest for lowest, highest in kept)


class Readers:
    """The readers of one database."""

    def __init__(
        self,
        db_id: int,
        clock: Clock,
        outside: Callable[[], int | None] = lambda: None,
        *,
        others: Callable[[], list[Lease]] = list,
        kept: Callable[[], list[tuple[int, int]]] = list,
        long_seconds: float = 300.0,
        given_floor: int = 0,
    ) -> None:
        """`kept` returns (lowest, highest) of the versions that snapshots keep for readers. `given_floor` is a floor that was
        given out before the database was opened and may still be acted on."""
        self.db_id = db_id
        self._clock = clock
        self._outside = outside
        self._others = others
        self._kept = kept
        self._long_seconds = long_seconds
        self._lock = threading.Lock()
        self._leases: dict[int, Lease] = {}
        self._beating: weakref.WeakKeyDictionary[object, Lease] = weakref.WeakKeyDictionary()
        self._beat_at = 0.0
        self._retired: OrderedDict[int, None] = OrderedDict()
        self._given_floor = given_floor
        """The highest floor given out: no lease may be taken below it."""

    # ── leases ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def open(self, lsn: int, *, tags: dict[str, str] | None = None, ttl_seconds: float | None = LEASE_SECONDS) -> Lease:
        """Open a lease on version `lsn`; with `ttl_seconds=None` a hold.

        Raises `SnapshotGone` below the floor, unless a snapshot keeps the version for readers that were set aside: then the
        lease is set aside too.
        """
        # Read before taking the lock, as in `floor`. If the snapshot is dropped in between, reads raise; the floor stays
        # correct.
        kept = self._kept() if ttl_seconds is not None and lsn < self._given_floor else []
        with self._lock:
            if lsn < self._given_floor and kept and is_kept(lsn, kept):
                lease = self._add(lsn, tags, ttl_seconds)
                lease.set_aside = True
                return lease
            if lsn < self._given_floor:
                raise SnapshotGone(
                    "this version may already be lost: a checkpoint was allowed to pass it",
                    hint="open a newer one, or a snapshot",
                    db_id=self.db_id,
                    lsn=lsn,
                    floor=self._given_floor,
                )
            return self._add(lsn, tags, ttl_seconds)

    def open_newest(
        self,
        newest: Callable[[], tuple[int, M]],
        *,
        tags: dict[str, str] | None = None,
        ttl_seconds: float | None = LEASE_SECONDS,
    ) -> tuple[Lease, M]:
        """Open a lease on the version that `newest` returns. It is called under the lock, when no floor is computed, so the
        version is never below the floor."""
        with self._lock:
            lsn, version = newest()
            return self._add(lsn, tags, ttl_seconds), version

    def _add(self, lsn: int, tags: dict[str, str] | None, ttl_seconds: float | None) -> Lease:
        now = self._clock.monotonic()
        expires = None if ttl_seconds is None else now + ttl_seconds
        lease = Lease(next(_ids), lsn, self._clock.now_ms(), now, expires, ttl_seconds or 0.0, dict(tags or {}))
        lease.pid, lease.host, lease.readers = os.getpid(), HOST, self
        self._leases[lease.reader_id] = lease
        return lease

    def renew(self, reader_id: int) -> None:
        """Extend a reader's lease."""
        with self._lock:
            lease = self._leases.get(reader_id)
            if lease is None:
                raise self._unknown(reader_id)
            if lease.expires_at is not None:
                lease.expires_at = self._clock.monotonic() + lease.ttl_seconds

    def close(self, reader_id: int) -> None:
        """End a reader's lease. Does nothing if it was retired."""
        with self._lock:
            lease = self._leases.pop(reader_id, None)
            if lease is None:
                if reader_id in self._retired:
                    return
                raise self._unknown(reader_id)
            lease.open = False

    def require(self, lease: Lease) -> None:
        """Raise `LeaseExpired` unless the lease is alive."""
        if not lease.open:
            raise self._expired(lease.reader_id) if lease.retired else self._closed(lease.reader_id)

    def _unknown(self, reader_id: int) -> LeaseExpired | UnknownReader:
        return self._expired(reader_id) if reader_id in self._retired else self._closed(reader_id)

    def _expired(self, reader_id: int) -> LeaseExpired:
        return LeaseExpired(
            "the reader's lease has expired",
            hint="open a new snapshot, and renew it at least every 30 s",
            reader_id=reader_id,
            db_id=self.db_id,
        )

    def _closed(self, reader_id: int) -> UnknownReader:
        return UnknownReader(
            "no reader has this id: it was closed, or never opened",
            hint="open a snapshot first",
            reader_id=reader_id,
            db_id=self.db_id,
        )

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    def keep_alive(self, holder: object, lease: Lease) -> None:
        """Renew a lease automatically from now on, while `holder` exists."""
        with self._lock:
            self._beating[holder] = lease

    def beat(self) -> None:
        """Renew the leases that are kept alive, if a heartbeat is due."""
        now = self._clock.monotonic()
        if now - self._beat_at < HEARTBEAT_SECONDS and self._beat_at:
            return
        with self._lock:
            self._beat_at = now
            for lease in list(self._beating.values()):
                if lease.open and lease.expires_at is not None:
                    lease.expires_at = now + lease.ttl_seconds

    def expire(self) -> list[Lease]:
        """Retire expired leases and return them. Long-running leases that are still alive are reported once."""
        now = self._clock.monotonic()
        with self._lock:
            late = [
                lease for lease in self._leases.values() if lease.expires_at is not None and lease.expires_at <= now
            ]
            self._retire(late)
            old = [
                lease
                for lease in self._leases.values()
                if not lease.reported and now - lease.opened_at >= self._long_seconds and lease.expires_at is not None
            ]
            for lease in old:
                lease.reported = True
        for lease in late:
            where = {"db_id": self.db_id, "reader_id": lease.reader_id, "lsn": lease.lsn, "tags": lease.tags}
            emit("warning", "reader.heartbeat_lost", **where)
        for lease in old:
            emit(
                "info", "reader.long", db_id=self.db_id, reader=lease.description, seconds=round(now - lease.opened_at)
            )
        return late

    def retire_all(self) -> None:
        """Retire all leases, because the database is being closed and no longer protects its readers."""
        with self._lock:
            self._retire(list(self._leases.values()))

    def retire_above(self, lsn: int) -> None:
        """Retire the leases on versions above an lsn, because recovery has cut them."""
        with self._lock:
            self._retire([lease for lease in self._leases.values() if lease.lsn > lsn])

    def _retire(self, leases: list[Lease]) -> None:
        for lease in leases:
            lease.open, lease.retired = False, True
            del self._leases[lease.reader_id]
            self._retired[lease.reader_id] = None
            if len(self._retired) > RETIRED_MAX:
                self._retired.popitem(last=False)

    # ── the floor ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def floor(self, high_lsn: int) -> int:
        """Return the current floor. The caller may act on it: no lease is taken below it from here on."""
        # Read before the lock is taken, since both read files or the manifest. A process that opens a version
        # afterwards finds the floor's row, which is committed by now (`floors.py`).
        outside, kept = self._outside(), self._kept()
        with self._lock:
            self._given_floor = self._lowest(high_lsn, outside, kept)
            return self._given_floor

    def lowest(self, high_lsn: int) -> int:
        """Return what `floor` would return now. The caller must not act on it."""
        outside, kept = self._outside(), self._kept()
        with self._lock:
            return self._lowest(high_lsn, outside, kept)

    def _lowest(self, high_lsn: int, outside: int | None, kept: list[tuple[int, int]]) -> int:
        floor = high_lsn
        for lease in self._leases.values():
            if kept and lease.expires_at is not None and HOLD_TAG not in lease.tags and is_kept(lease.lsn, kept):
                # Set the mark, then check the version again: a thread that moves a lease changes its version first and checks
                # the mark afterwards, so at least one of the two notices the other.
                lease.set_aside = True
                if is_kept(lease.lsn, kept):
                    continue
            floor = min(floor, lease.lsn)
        floor = min(floor, high_lsn, high_lsn if outside is None else outside)
        # Never below a floor that was given out: a checkpoint may already have acted on it.
        return max(self._given_floor, floor)

    @property
    def given_floor(self) -> int:
        """The highest floor given out."""
        return self._given_floor

    def peek(self) -> list[Lease]:
        """Return the live leases, including those of other processes, oldest version first: these hold the floor back."""
        others = self._others()
        with self._lock:
            return sorted([*self._leases.values(), *others], key=lambda lease: lease.lsn)

    def __len__(self) -> int:
        return len(self._leases)

    def forked(self) -> None:
        """Retire all leases in the child of a fork(), where no thread holds the lock: the readers are the parent's."""
        self._lock = threading.Lock()
        self.retire_all()
