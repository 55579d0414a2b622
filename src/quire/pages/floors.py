"""Computes how far checkpoints may go, for open and closed databases, and how long they had to wait.

Terms
  floor  min(readers in memory, readers as rows, lease files), at most what is published (M10, P9). For a database that is not
         open there are no readers in memory, and the limit is what the manifest has applied
  row    `snapshot_floor`, which is not the floor: no reader that opens from now on gets a version below it

Before a floor is given out, the row is raised to it and committed, and then the lease files are read again: a process that
opens a version in the meantime sees the row, or its lease is seen (`leasefiles.py`). The floor is what remains after this
second read. The row is never lowered, because work that an earlier floor allowed may still be running; and it is never above
what is published, so a reader that finds a row above its version finds a high enough version in the same transaction.

Threads: any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from quire.core.clock import Clock
from quire.durable.failpoints import hit
from quire.manifest import tables as t
from quire.manifest.leases import is_view, reader_rows
from quire.manifest.ops.local import SetFloor
from quire.manifest.records import ReaderRecord, WalState
from quire.manifest.store import ManifestStore
from quire.pages.leasefiles import LeaseFiles
from quire.pages.pagestore import PageStore
from quire.pages.readers import LEASE_SECONDS, Lease, is_kept
from quire.pages.view_build import kept_range, reader_snapshots


class Floors:
    """The floors of one store's databases."""

    def __init__(
        self,
        manifest: ManifestStore,
        clock: Clock,
        files: LeaseFiles,
        in_memory: Callable[[int], set[int]] = lambda _: set(),
    ) -> None:
        """`in_memory` returns the ids of a database's remote readers that have a lease in memory; their rows do not count."""
        # constant after construction
        self._manifest = manifest
        self._clock = clock
        self._files = files
        self._in_memory = in_memory
        self._started_at = clock.monotonic()
        self._started_ms = clock.now_ms()
        with manifest.read() as txn:
            # Before this run writes any row: the newest heartbeat shows when the former owner was last alive.
            rows = [row for _, row in reader_rows(txn) if row is not None]
        self._former_ms = max((row.heartbeat_at_ms for row in rows), default=0)
        """When an earlier run of the owner last wrote a reader's row."""
        self._raising = threading.Lock()
        # guarded by _lock
        self._lock = threading.Lock()
        self._waiting_since: dict[int, float] = {}
        self._waited: dict[int, float] = {}

    # ── readers of other processes ────────────────────────────────────────────────────────────────────────────────────
    def counts_as_alive(self, row: ReaderRecord) -> bool:
        """Return whether a remote reader counts as alive, from its row.

        A row written in an earlier run of the owner, and alive when that run last wrote one, counts for a whole lease from the
        start of this run, whatever it contains: its renewals may have been lost with the former owner. A row written in this
        run counts until it expires.
        """
        if row.heartbeat_at_ms >= self._started_ms and row.expires_at_ms > self._clock.now_ms():
            return True
        is_young = self._clock.monotonic() - self._started_at < LEASE_SECONDS
        return is_young and row.heartbeat_at_ms <= self._started_ms and row.expires_at_ms > self._former_ms

    def outside(self, db_id: int) -> int | None:
        """Return the lowest version that a reader in another process may need; `None` without readers.

        A reader that was set aside does not count (`readers.py`): the row of the snapshot shows this, also to the next owner.
        """
        return min((lease.lsn for lease in self.others(db_id) if not lease.set_aside), default=None)

    def others(self, db_id: int) -> list[Lease]:
        """Return the readers in other processes, from rows and lease files."""
        leased, now = self._in_memory(db_id), self._clock.monotonic()
        kept = self.kept(db_id)
        leases = []
        for held in self._files.of(db_id):
            lease = Lease(0, held.lsn, held.opened_ms, now, None, 0.0, held.shown_tags)
            lease.pid, lease.host, lease.set_aside = held.pid, held.host, is_kept(held.lsn, kept)
            leases.append(lease)
        with self._manifest.read() as txn:
            rows = [(reader_id, row) for (_, reader_id), row in reader_rows(txn, db_id) if reader_id not in leased]
        for reader_id, row in rows:
            if row is None:  # damaged: to be safe, it holds every version
                leases.append(Lease(reader_id, 0, 0, now, None, 0.0, {"damaged": "quire manifest check"}))
            elif not is_view(row) and self.counts_as_alive(row):
                lease = Lease(reader_id, row.snapshot_lsn, row.opened_at_ms, now, None, 0.0, row.tags)
                lease.set_aside = is_kept(row.snapshot_lsn, kept)
                leases.append(lease)
        return sorted(leases, key=lambda lease: lease.lsn)

    def kept(self, db_id: int) -> list[tuple[int, int]]:
        """Return (lowest, highest) of the versions that snapshots keep for readers that were set aside."""
        with self._manifest.read() as txn:
            return [kept_range(row) for _, row in reader_snapshots(txn, db_id)]

    # ── the floor ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def floor(self, db_id: int, store: PageStore | None) -> int:
        """Return the floor of a database. The caller may act on it."""
        with self._raising:
            highest = self._raise_floor_row(db_id, store)
        hit("pages.floor.announced")
        # Reads the lease files again, now that the row is committed (see `leasefiles.py`).
        # A reader may have taken its lease after the first look and before the commit of the row, which it then did not
        # see.
        floor = store.readers.floor(highest) if store is not None else self._lowest(db_id, None, highest)
        self._note(db_id, floor)
        return floor

    def _raise_floor_row(self, db_id: int, store: PageStore | None) -> int:
        """Raise the row to the highest possible floor and return that. REQUIRES `_raising`: a late call would lower it."""
        with self._manifest.read() as txn:
            wal, row = txn.wal_state(db_id), txn.get(t.SNAPSHOT_FLOOR, db_id)
        high = wal.last_applied_lsn if wal is not None else 0
        highest = self._lowest(db_id, store, high)
        if row is None or highest > row.min_snapshot_lsn or high != row.writer_high_lsn:
            # Never lowered: work that an earlier floor allowed may still be running.
            raised = max(highest, row.min_snapshot_lsn if row is not None else 0)
            self._manifest.submit([SetFloor(db_id, raised, high)]).result()
        return highest

    def _lowest(self, db_id: int, store: PageStore | None, high: int) -> int:
        if store is not None:
            return store.readers.lowest(high)
        outside = self.outside(db_id)
        return high if outside is None else min(high, outside)

    def _note(self, db_id: int, floor: int) -> None:
        """Record whether a plan waits for the floor: there are indexed segments, and all of them end above it."""
        with self._manifest.read() as txn:
            rows = [row for _, row in txn.scan(t.WAL_CATALOG, db_id) if row.state is WalState.INDEXED]
        blocked = bool(rows) and all(row.last_lsn > floor for row in rows)
        now = self._clock.monotonic()
        with self._lock:
            since = self._waiting_since.pop(db_id, None)
            if since is not None:
                self._waited[db_id] = self._waited.get(db_id, 0.0) + now - since
            if blocked:
                self._waiting_since[db_id] = now

    def waited_ms(self, db_id: int) -> int:
        """Return how long plans have waited for readers of this database, in milliseconds."""
        with self._lock:
            since = self._waiting_since.get(db_id)
            running = self._clock.monotonic() - since if since is not None else 0.0
            return int((self._waited.get(db_id, 0.0) + running) * 1000)


def passed_floor(manifest: ManifestStore, db_id: int) -> int:
    """Return the highest lsn that a checkpoint has passed or a stored plan may pass: no reader may open below it (P10)."""
    with manifest.read() as txn:
        wal = txn.wal_state(db_id)
        plans = [record.covered_lsn for _, record in txn.scan(t.CHECKPOINT_PLAN, db_id)]
    return max([wal.checkpointed_lsn if wal is not None else 0, *plans])
