"""How much WAL may wait for a checkpoint: per database and for the store; who is over it waits in `begin` (P7).

*Used* is what the file system has given to a database's own segments that no checkpoint has absorbed, an open one's zeros
included; what a fork has inherited is its origin's. A database is given room when its rows are looked at, and asks again
when that is used up: passing costs a comparison. Room is what its own budget and the store's leave, so its own is overrun by
at most one transaction. The store's is shared by all who are given room between two ticks; each tick gives it anew.

The first writer of all has every database looked at; after it a database is looked at alone. The store's total may then be too
high (a checkpoint of a database that is not open made it smaller), never too low: so who is refused by it looks at all again.

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
from quire.durable.space import given_bytes
from quire.manifest import tables as t
from quire.manifest.records import WalFormat, WalState
from quire.manifest.store import ManifestStore
from quire.pages.pagestore import PageStore

LOOK_SECONDS = 0.05
"""Between two looks of who waits."""
LOOK_SHARE = 10
"""Looking at all databases takes at most one part in so many of the time: with very many of them it takes long."""

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
        """Database → bytes, at the last look."""
        self._appended: dict[int, int] = {}
        """Database → what it had appended by then."""
        self._total = 0
        self._left = 0
        """What the store's budget left at the last tick or look."""
        self._next_look = 0.0
        """When all databases may be looked at again."""

    def used(self, db_id: int) -> int:
        """Bytes of WAL of a database that no checkpoint has absorbed."""
        self._look_at(db_id)
        return self._used.get(db_id, 0)

    def seen(self, db_id: int) -> int:
        """The same, as of the last look."""
        return self._used.get(db_id, 0)

    def total(self) -> int:
        """The same for the store."""
        self._look()
        return self._total

    def is_half_full(self, db_id: int) -> bool:
        """Whether half of a database's own budget is used, or of the store's."""
        used = self.used(db_id)
        return 2 * used >= self._settings.wal_bytes_max or 2 * self._total >= self._settings.store_wal_bytes_max

    def tick(self) -> None:
        """Give room anew, by what open databases have appended since the last look."""
        with self._lock:
            self._give()

    def forget(self, db_id: int) -> None:
        """The database was closed, or opened anew: what it has appended is counted from zero."""
        with self._lock:
            self._appended.pop(db_id, None)

    def wait(self, store: PageStore, timeout: float) -> None:
        """Return when the database and the store have room, or raise. Called when a database has used up what it was given."""
        deadline = self._clock.monotonic() + timeout
        self._look_at(store.db_id, store)
        if store.wal.appended_bytes >= store.room_until:
            self._look()
        while store.wal.appended_bytes >= store.room_until:
            if self._stopping.is_set():
                raise StoreClosed("the store is closed", hint="open it again")
            if self._clock.monotonic() >= deadline:
                raise self._exceeded(store)
            self._stopping.wait(LOOK_SECONDS)
            self._look()

    def _look(self) -> None:
        """Look at all databases, unless that was done a moment ago."""
        with self._lock:
            if (started := self._clock.monotonic()) < self._next_look:
                return
            stores = {store.db_id: store for store in self._stores()}
            used: dict[int, int] = {}
            # Before the manifest is asked: what is appended meanwhile is counted twice rather than not at all.
            appended = {db_id: store.wal.appended_bytes for db_id, store in stores.items()}
            with self._manifest.read() as txn:
                for (db_id, segment_id), row in txn.scan(t.WAL_CATALOG):
                    if row.origin_db_id == db_id and row.state in _UNABSORBED and row.format is WalFormat.PAGER:
                        used[db_id] = used.get(db_id, 0) + given_bytes(self._path(db_id, segment_id))
            self._used, self._appended, self._total = used, appended, sum(used.values())
            self._next_look = started + (self._clock.monotonic() - started) * LOOK_SHARE
            self._give()

    def _look_at(self, db_id: int, store: PageStore | None = None) -> None:
        """Look at one database; at all of them if nobody has done that."""
        if not self._next_look:
            self._look()
        with self._lock:
            appended = store.wal.appended_bytes if store is not None else 0
            with self._manifest.read() as txn:
                used = sum(
                    given_bytes(self._path(db_id, segment_id))
                    for (_, segment_id), row in txn.scan(t.WAL_CATALOG, db_id)
                    if row.origin_db_id == db_id and row.state in _UNABSORBED and row.format is WalFormat.PAGER
                )
            more = used - self._used.get(db_id, 0)
            self._total += more
            self._left -= more
            self._used[db_id] = used
            if store is not None:
                self._appended[db_id] = appended
                self._give_to(store)

    def _path(self, db_id: int, segment_id: int) -> str:
        return os.path.join(self._root, WalSegmentFile(db_id=db_id, segment_id=segment_id).path)

    def _give(self) -> None:
        """Give each database the room its budget and the store's leave. REQUIRES the lock. A database that was never
        looked at gets nothing: its first writer looks."""
        stores = [store for store in self._stores() if store.db_id in self._appended]
        fresh = sum(store.wal.appended_bytes - self._appended[store.db_id] for store in stores)
        self._left = self._settings.store_wal_bytes_max - self._total - fresh
        for store in stores:
            self._give_to(store)

    def _give_to(self, store: PageStore) -> None:
        """Give one database room. REQUIRES the lock."""
        appended = store.wal.appended_bytes
        fresh = appended - self._appended[store.db_id]
        own = self._settings.wal_bytes_max - self._used.get(store.db_id, 0) - fresh
        # One byte more: who has exactly used its budget may still begin.
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
        """The open database with most WAL: it is the one to look at when the store is over its budget."""
        return max(self._stores(), key=lambda other: self._used.get(other.db_id, 0), default=store)

    def _blocking(self, store: PageStore) -> str:
        name = f"database {store.db_id}: "
        leases = store.readers.peek()
        with self._manifest.read() as txn:
            rows = [(key[1], row) for key, row in txn.scan(t.WAL_CATALOG, store.db_id) if row.state in _WAITING]
        rows.sort(key=lambda item: item[1].first_lsn)
        if rows and leases and leases[0].lsn < rows[0][1].last_lsn:
            return name + leases[0].who
        if rows:
            return f"{name}segment {rows[0][0]}, {rows[0][1].state.name}: no checkpoint has absorbed it"
        return name + "its open segment: no checkpoint has run"
