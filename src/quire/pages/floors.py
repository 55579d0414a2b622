"""How far checkpoints may go, for open databases and for those that are not; and how long they had to wait.

Rules
  1. An open database's floor comes from its readers; that of one that is not open is what the manifest has applied: whoever
     opens it later reads at or above that.
  2. Remote readers are rows (M10). One that was there when this owner started is believed for a whole lease, whatever its row
     says: its renewals may have been lost with the former owner.
  3. A plan that finds indexed segments, all of them above the floor, has begun to wait; the next one that does not has stopped.
  4. A floor that was given out is written down in `snapshot_floor`, for people and for the command line; nobody waits for that,
     and nobody decides by it.

Threads: any.
"""

from __future__ import annotations

import threading

from quire.core.clock import Clock
from quire.manifest import tables as t
from quire.manifest.ops.local import SetFloor
from quire.manifest.records import WalState
from quire.manifest.store import ManifestStore
from quire.pages.pagestore import PageStore
from quire.pages.readers import LEASE_SECONDS


class Floors:
    """See the rules above."""

    def __init__(self, manifest: ManifestStore, clock: Clock) -> None:
        self._manifest = manifest
        self._clock = clock
        self._started_at = clock.monotonic()
        self._started_ms = clock.now_ms()
        self._lock = threading.Lock()
        self._waiting_since: dict[int, float] = {}
        self._waited: dict[int, float] = {}
        self._written: dict[int, tuple[int, int]] = {}

    def outside(self, db_id: int) -> int | None:
        """The lowest version a remote reader may ask for; `None` without any (rule 2)."""
        now, young = self._clock.now_ms(), self._clock.monotonic() - self._started_at < LEASE_SECONDS
        with self._manifest.read() as txn:
            return min(
                (
                    row.snapshot_lsn
                    for _, row in txn.scan(t.SNAPSHOT_READERS, db_id)
                    if row.expires_at_ms > now or (young and row.opened_at_ms <= self._started_ms)
                ),
                default=None,
            )

    def floor(self, db_id: int, store: PageStore | None) -> int:
        """The floor of a database (rule 1); whoever asks may act on it."""
        if store is not None:
            applied = store.wal.durable.lsn
            floor = store.readers.floor(applied)
        else:
            with self._manifest.read() as txn:
                wal = txn.wal_state(db_id)
            outside = self.outside(db_id)
            applied = wal.last_applied_lsn if wal is not None else 0
            floor = applied if outside is None else min(applied, outside)
        self._note(db_id, floor, applied)
        return floor

    def _note(self, db_id: int, floor: int, high: int) -> None:
        """Rules 3 and 4."""
        with self._manifest.read() as txn:
            rows = [row for _, row in txn.scan(t.WAL_CATALOG, db_id) if row.state is WalState.INDEXED]
        blocked = bool(rows) and all(row.last_lsn > floor for row in rows)
        now = self._clock.monotonic()
        with self._lock:
            if self._written.get(db_id) != (floor, high):
                self._written[db_id] = (floor, high)
                self._manifest.submit([SetFloor(db_id, floor, high)])
            since = self._waiting_since.pop(db_id, None)
            if since is not None:
                self._waited[db_id] = self._waited.get(db_id, 0.0) + now - since
            if blocked:
                self._waiting_since[db_id] = now

    def waited_ms(self, db_id: int) -> int:
        """How long plans have waited for readers of this database."""
        with self._lock:
            since = self._waiting_since.get(db_id)
            running = self._clock.monotonic() - since if since is not None else 0.0
            return int((self._waited.get(db_id, 0.0) + running) * 1000)
