"""Readers and the floor: who still reads which version of a database, and how far a checkpoint may go.

A *lease* is a reader's right to one version until a moment, renewed by its heartbeat; a *hold* is a lease of the engine's own
that never expires. A lease is taken at a version that is readable at that moment, under the lock that also computes the floor:
so a floor that was given out is never above a lease that exists, and never falls while a checkpoint works with it. A lease
that was not renewed in time is retired with a warning, and reading through it raises `LeaseExpired`: the pages it needs may be
gone. It protects until it is retired, however late that is: no clock takes part in a read.

Readers of this process live in memory and die with it (M10); those of other processes are rows and files that the owner folds
in through `outside`. A lease whose version a snapshot keeps (`kept`: the checkpoint job *set it aside* because the WAL budget
was half used) holds the floor no longer: what the floor passes is read from that snapshot. A hold is never set aside.

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
"""M10: how long a reader may be silent, and how often it speaks."""

HOLD_TAG = "hold"
"""On leases that keep a version for a commit, not for reading: they are never set aside."""

RETIRED_MAX = 4_096
"""Reader ids remembered as retired, so that a late `renew` hears why."""

HOST = os.uname().nodename

_ids = itertools.count(1)


def program() -> str:
    """What this process is called, for tags."""
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
    """Whether somebody was told that it is old."""
    set_aside: bool = False
    """Whether a floor has passed it. Only ever set; the lease must not move to another version from then on."""
    pid: int = 0
    """Its process; 0 if nobody said."""
    host: str = ""
    readers: Readers | None = field(default=None, repr=False)
    """Where it was opened; none for a lease of another process."""

    def require(self) -> None:
        """`LeaseExpired` unless the lease is alive."""
        self._owner.require(self)

    def renew(self) -> None:
        """Extend the lease."""
        self._owner.renew(self.reader_id)

    def keep_alive(self, holder: object) -> None:
        """Renew the lease automatically for as long as `holder` exists."""
        self._owner.keep_alive(holder, self)

    def close(self) -> None:
        """Give the lease up; closing twice, or after it ran out, is fine."""
        if self.open:
            self._owner.close(self.reader_id)

    @property
    def _owner(self) -> Readers:
        assert self.readers is not None, "a lease of another process is only shown"
        return self.readers

    @property
    def who(self) -> str:
        """For messages: who reads which version, since when."""
        return reader_text(self.info)

    @property
    def info(self) -> ReaderInfo:
        """The same as a value."""
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
    """Whether a version is among those that snapshots keep for readers."""
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
        """`kept`: (lowest, highest) version of what snapshots keep for readers.
        `given_floor`: what an earlier life of the database may have acted on, and may go on with."""
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
        """The highest floor that was given out: no lease may be taken below it."""

    # ── leases ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def open(self, lsn: int, *, tags: dict[str, str] | None = None, ttl_seconds: float | None = LEASE_SECONDS) -> Lease:
        """A lease on version `lsn`; with `ttl_seconds=None` a hold. `SnapshotGone` below the floor, unless a snapshot keeps
        the version for readers that were set aside: then the lease is one of them."""
        # Before the lock, as in `floor`. A snapshot that goes meanwhile makes reads raise; the floor stays right.
        kept = self._kept() if ttl_seconds is not None and lsn < self._given_floor else []
        with self._lock:
            if lsn < self._given_floor and kept and is_kept(lsn, kept):
                lease = self._add(lsn, tags, ttl_seconds)
                lease.set_aside = True
                return lease
            if lsn < self._given_floor:
                raise SnapshotGone(
                    "this version may already be gone: a checkpoint was allowed to pass it",
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
        """A lease on what `newest` says at a moment when no floor is computed: it is never too late for that."""
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
        """The reader is alive."""
        with self._lock:
            lease = self._leases.get(reader_id)
            if lease is None:
                raise self._unknown(reader_id)
            if lease.expires_at is not None:
                lease.expires_at = self._clock.monotonic() + lease.ttl_seconds

    def close(self, reader_id: int) -> None:
        """The reader is done. Closing one that was retired is fine; it was told."""
        with self._lock:
            lease = self._leases.pop(reader_id, None)
            if lease is None:
                if reader_id in self._retired:
                    return
                raise self._unknown(reader_id)
            lease.open = False

    def require(self, lease: Lease) -> None:
        """`LeaseExpired` unless the lease is alive."""
        if not lease.open:
            raise self._expired(lease.reader_id) if lease.retired else self._closed(lease.reader_id)

    def _unknown(self, reader_id: int) -> LeaseExpired | UnknownReader:
        return self._expired(reader_id) if reader_id in self._retired else self._closed(reader_id)

    def _expired(self, reader_id: int) -> LeaseExpired:
        return LeaseExpired(
            "the reader's lease has run out",
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
        """Renew a lease automatically from now on, for as long as `holder` exists."""
        with self._lock:
            self._beating[holder] = lease

    def beat(self) -> None:
        """Renew the leases that are kept alive, if it is time."""
        now = self._clock.monotonic()
        if now - self._beat_at < HEARTBEAT_SECONDS and self._beat_at:
            return
        with self._lock:
            self._beat_at = now
            for lease in list(self._beating.values()):
                if lease.open and lease.expires_at is not None:
                    lease.expires_at = now + lease.ttl_seconds

    def expire(self) -> list[Lease]:
        """Retire leases that ran out; which. Old ones that are still alive are reported once."""
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
            emit("info", "reader.long", db_id=self.db_id, reader=lease.who, seconds=round(now - lease.opened_at))
        return late

    def retire_all(self) -> None:
        """The database is being closed: nothing protects its readers any more."""
        with self._lock:
            self._retire(list(self._leases.values()))

    def _retire(self, leases: list[Lease]) -> None:
        for lease in leases:
            lease.open, lease.retired = False, True
            del self._leases[lease.reader_id]
            self._retired[lease.reader_id] = None
            if len(self._retired) > RETIRED_MAX:
                self._retired.popitem(last=False)

    # ── the floor ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def floor(self, high_lsn: int) -> int:
        """The floor now. Whoever asks may act on it: no lease is taken below it from here on."""
        outside, kept = self._outside(), self._kept()
        with self._lock:
            self._given_floor = self._lowest(high_lsn, outside, kept)
            return self._given_floor

    def lowest(self, high_lsn: int) -> int:
        """What `floor` would say now; nobody may act on it."""
        outside, kept = self._outside(), self._kept()
        with self._lock:
            return self._lowest(high_lsn, outside, kept)

    def _lowest(self, high_lsn: int, outside: int | None, kept: list[tuple[int, int]]) -> int:
        floor = high_lsn
        for lease in self._leases.values():
            if kept and lease.expires_at is not None and HOLD_TAG not in lease.tags and is_kept(lease.lsn, kept):
                # The mark first, then the version once more: whoever moves a lease moves it first and looks for the mark then,
                # so one of the two is seen.
                lease.set_aside = True
                if is_kept(lease.lsn, kept):
                    continue
            floor = min(floor, lease.lsn)
        floor = min(floor, high_lsn, high_lsn if outside is None else outside)
        return max(self._given_floor, floor)

    @property
    def given_floor(self) -> int:
        """The highest floor anybody was given."""
        return self._given_floor

    def peek(self) -> list[Lease]:
        """The live leases, those of other processes included, oldest version first: who holds the floor back."""
        others = self._others()
        with self._lock:
            return sorted([*self._leases.values(), *others], key=lambda lease: lease.lsn)

    def __len__(self) -> int:
        return len(self._leases)

    def forked(self) -> None:
        """In the child of a fork(): nobody holds the lock, and the readers are the parent's."""
        self._lock = threading.Lock()
        self.retire_all()
