"""Limits the WAL that waits for a checkpoint, per database and per store; a writer over the limit waits in `begin` (P7).

Terms
  used  the blocks that the file system has allocated to a database's own segments that no checkpoint has absorbed, including
        the zeros of an open one; segments that a fork has inherited count for their origin
  room  the bytes that a database may append before it must ask again: what its own budget and the store's leave

A database gets room when its rows are read, and requests more when it has used it up: until then, a check costs one comparison.
Its own budget is exceeded by at most one transaction. The store's is shared by all databases that get room between two ticks;
each tick assigns it again.

The first writer measures every database; after that, a database is measured alone. The store's total may then be too high (a
checkpoint of a database that is not open has reduced it), never too low: so a writer that it refuses measures all again.

Threads: any. Raises `QuotaExceeded`, which names what blocks: the oldest reader, or the oldest segment.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from quire.core.clock import Clock
from quire.core.errors import QuotaExceeded, StoreClosed
from quire.core.settings import PagesSettings
from quire.durable.names import WalSegmentFile
from quire.durable.space import allocated_bytes
from quire.manifest import tables as t
from quire.manifest.records import WalFormat, WalState
from quire.manifest.store import ManifestStore
from quire.pages.pagestore import PageStore

POLL_SECONDS = 0.05
"""Between two checks of a waiting writer."""
MEASURE_SHARE = 10
"""Measuring all databases, which takes long if there are very many, may use at most one part in this many of the time."""

_UNABSORBED = (WalState.OPEN, WalState.SEALED, WalState.INDEXED, WalState.CHECKPOINT_READY)
_WAITING = (WalState.SEALED, WalState.INDEXED, WalState.CHECKPOINT_READY)


class StorageQuota:
    """The WAL budgets of one store."""

    def __init__(
        self,
        manifest: ManifestStore,
        root: str,
        settings: PagesSettings,
        clock: Clock,
        stores: Callable[[], list[PageStore]],
        stopping: threading.Event,
    ) -> None:
        # constant after construction
        self._manifest = manifest
        self._root = root
        self._settings = settings
        self._clock = clock
        self._stores = stores
        self._stopping = stopping
        # guarded by _lock, read by all
        self._lock = threading.Lock()
        self._used: dict[int, int] = {}
        """Database → bytes used, at its last measurement."""
        self._appended: dict[int, int] = {}
        """Database → its `appended_bytes` at that time."""
        self._total = 0
        self._left = 0
        """Bytes left of the store's budget at the last tick or measurement."""
        self._next_measurement = 0.0
        """When all databases may be measured again."""

    def used(self, db_id: int) -> int:
        """Measure and return the bytes of a database's WAL that no checkpoint has absorbed."""
        self._measure_one(db_id)
        return self._used.get(db_id, 0)

    def seen(self, db_id: int) -> int:
        """Return the same as of the last measurement."""
        return self._used.get(db_id, 0)

    def total(self) -> int:
        """Measure and return the same for the whole store."""
        self._measure_all()
        return self._total

    def is_half_full(self, db_id: int) -> bool:
        """Return whether half of the database's own budget, or of the store's, is used."""
        used = self.used(db_id)
        return 2 * used >= self._settings.wal_bytes_max or 2 * self._total >= self._settings.store_wal_bytes_max

    def tick(self) -> None:
        """Assign room again, from what open databases have appended since they were measured."""
        with self._lock:
            self._grant_room()

    def forget(self, db_id: int) -> None:
        """Forget what a database has appended, because it was closed or reopened and counts from zero."""
        with self._lock:
            self._appended.pop(db_id, None)

    def wait(self, store: PageStore, timeout: float) -> None:
        """Wait until the database and the store have room, or raise. Called when a database has used up its room."""
        deadline = self._clock.monotonic() + timeout
        self._measure_one(store.db_id, store)
        if store.wal.appended_bytes >= store.room_until:
            self._measure_all()
        while store.wal.appended_bytes >= store.room_until:
            if self._stopping.is_set():
                raise StoreClosed("the store is closed", hint="open it again")
            if self._clock.monotonic() >= deadline:
                raise self._exceeded(store)
            self._stopping.wait(POLL_SECONDS)
            self._measure_all()

    def _measure_all(self) -> None:
        """Measure all databases, unless that was done recently."""
        with self._lock:
            if (started := self._clock.monotonic()) < self._next_measurement:
                return
            stores = {store.db_id: store for store in self._stores()}
            used: dict[int, int] = {}
            # Before the manifest is read: concurrent appends are counted twice rather than not at all.
            appended = {db_id: store.wal.appended_bytes for db_id, store in stores.items()}
            with self._manifest.read() as txn:
                for (db_id, segment_id), row in txn.scan(t.WAL_CATALOG):
                    if row.origin_db_id == db_id and row.state in _UNABSORBED and row.format is WalFormat.PAGER:
                        used[db_id] = used.get(db_id, 0) + allocated_bytes(self._path(db_id, segment_id))
            self._used, self._appended, self._total = used, appended, sum(used.values())
            self._next_measurement = started + (self._clock.monotonic() - started) * MEASURE_SHARE
            self._grant_room()

    def _measure_one(self, db_id: int, store: PageStore | None = None) -> None:
        """Measure one database, or all of them if that was never done."""
        if not self._next_measurement:
            self._measure_all()
        with self._lock:
            # Before the files are measured: bytes appended meanwhile count twice rather than not at all.
            appended = store.wal.appended_bytes if store is not None else 0
            with self._manifest.read() as txn:
                used = sum(
                    allocated_bytes(self._path(db_id, segment_id))
                    for (_, segment_id), row in txn.scan(t.WAL_CATALOG, db_id)
                    if row.origin_db_id == db_id and row.state in _UNABSORBED and row.format is WalFormat.PAGER
                )
            more = used - self._used.get(db_id, 0)
            self._total += more
            self._left -= more
            self._used[db_id] = used
            if store is not None:
                self._appended[db_id] = appended
                self._grant_room_to(store)

    def _path(self, db_id: int, segment_id: int) -> str:
        return os.path.join(self._root, WalSegmentFile(db_id=db_id, segment_id=segment_id).path)

    def _grant_room(self) -> None:
        """Give each database the room that its budget and the store's leave. REQUIRES the lock.

        A database that was never measured gets none: its first writer measures it.
        """
        stores = [store for store in self._stores() if store.db_id in self._appended]
        fresh = sum(store.wal.appended_bytes - self._appended[store.db_id] for store in stores)
        self._left = self._settings.store_wal_bytes_max - self._total - fresh
        for store in stores:
            self._grant_room_to(store)

    def _grant_room_to(self, store: PageStore) -> None:
        """Give one database room. REQUIRES the lock."""
        appended = store.wal.appended_bytes
        fresh = appended - self._appended[store.db_id]
        own = self._settings.wal_bytes_max - self._used.get(store.db_id, 0) - fresh
        # One byte more: a writer that has used exactly its budget may still begin.
        store.room_until = appended + max(min(own, self._left) + 1, 0)

    def _exceeded(self, store: PageStore) -> QuotaExceeded:
        used = self._used.get(store.db_id, 0)
        own = used > self._settings.wal_bytes_max
        setting = "wal_bytes_max" if own else "store_wal_bytes_max"
        return QuotaExceeded(
            f"the {'database' if own else 'store'}'s WAL budget is used up",
            hint=f"run a checkpoint, close old snapshots, or raise pages.{setting}",
            db_id=store.db_id,
            used_bytes=used if own else self._total,
            budget_bytes=getattr(self._settings, setting),
            blocking=self._blocking(store if own else self._largest(store)),
        )

    def _largest(self, store: PageStore) -> PageStore:
        """Return the open database with the most WAL, which an error names if the store is over its budget."""
        return max(self._stores(), key=lambda other: self._used.get(other.db_id, 0), default=store)

    def _blocking(self, store: PageStore) -> str:
        name = f"database {store.db_id}: "
        leases = store.readers.peek()
        with self._manifest.read() as txn:
            rows = [(key[1], row) for key, row in txn.scan(t.WAL_CATALOG, store.db_id) if row.state in _WAITING]
        rows.sort(key=lambda item: item[1].first_lsn)
        if rows and leases and leases[0].lsn < rows[0][1].last_lsn:
            return name + leases[0].description
        if rows:
            return f"{name}segment {rows[0][0]}, {rows[0][1].state.name}: no checkpoint has absorbed it"
        return name + "its open segment: no checkpoint has run"
