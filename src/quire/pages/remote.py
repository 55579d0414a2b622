"""Leases of the owner's clients, stored as rows so that they outlive the owner (M10).

While the owner runs, its memory is authoritative: a lease like any other (`readers.py`), backed by a row of `snapshot_readers`.
The row is written last when a reader opens and removed first when it ends; in between both exist, so protection has no gap. A
row's horizon is two lease periods ahead, so renewals commit once per period and not with every heartbeat. After a restart, a
row that counts as alive (`Floors.counts_as_alive`) holds the floor on its own; the first renewal *adopts* it: the reader has a
lease in memory again. A renewal is refused if the reader was retired, or if a checkpoint was allowed to pass its version: a
lease that protects nothing is worse than none.

Threads: any. Raises `UnknownReader`, `LeaseExpired`, `InvalidInput`, and what opening a database raises.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quire.core.clock import Clock
from quire.core.errors import InvalidInput, LeaseExpired, SnapshotGone, UnknownReader
from quire.core.events import emit
from quire.durable.failpoints import hit
from quire.manifest import tables as t
from quire.manifest.leases import is_view, reader_rows
from quire.manifest.ops.base import Counter
from quire.manifest.ops.local import DropReader, PutReader
from quire.manifest.records import ReaderRecord
from quire.manifest.store import ManifestStore
from quire.pages.page_source import Mark
from quire.pages.pagestore import PageStore
from quire.pages.readers import HEARTBEAT_SECONDS, LEASE_SECONDS, RETIRED_MAX, Lease
from quire.pages.snapshot import Snapshot

OWN_TAGS = "quire."
"""The prefix of tags reserved for the engine."""
MARK_TAG = "quire.mark"
"""What a row stores in addition to its version: size in pages, segment, commit time, length of the lease in ms."""

TTL_SECONDS_MAX = 3_600.0
"""A longer lease would hold WAL for more than an hour after its client died: use a snapshot instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteReader:
    """A client's lease, as returned to the client."""

    reader_id: int
    db_id: int
    lsn: int
    size_pages: int
    page_size: int
    ttl_seconds: float
    """The lease must be renewed within this time; a third of it is a good interval."""
    tags: dict[str, str]


@dataclass(slots=True, eq=False)
class _Held:
    """A reader with a lease in memory."""

    store: PageStore
    snapshot: Snapshot
    lease: Lease
    ttl_seconds: float
    horizon_ms: int


class RemoteReaders:
    """The clients' leases on one store's databases."""

    def __init__(
        self,
        manifest: ManifestStore,
        clock: Clock,
        open_store: Callable[[int | str], PageStore],
        counts_as_alive: Callable[[ReaderRecord], bool],
    ) -> None:
        # constant after construction
        self._manifest = manifest
        self._clock = clock
        self._open_store = open_store
        self._counts_as_alive = counts_as_alive
        # guarded by _lock
        self._lock = threading.RLock()
        self._held: dict[tuple[int, int], _Held] = {}
        self._retired: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._looked_at: dict[int, float] = {}

    # ── for the service ───────────────────────────────────────────────────────────────────────────────────────────────
    def open(self, db: int | str, tags: dict[str, str] | None = None, ttl: float = LEASE_SECONDS) -> RemoteReader:
        """Open a lease on the newest durable version, in memory and as a row."""
        if not 0 < ttl <= TTL_SECONDS_MAX:
            raise InvalidInput("a lease must last from 0 to 3600 seconds", ttl=ttl)
        if reserved := [name for name in tags or {} if name.startswith(OWN_TAGS)]:
            raise InvalidInput("a tag's name may not start with 'quire.'", tags=reserved)
        store = self._open_store(db)

        def newest() -> tuple[int, Mark]:
            mark = store.wal.durable
            return mark.lsn, mark

        lease, mark = store.readers.open_newest(newest, tags=tags, ttl_seconds=ttl)
        try:
            reader_id = self._manifest.allocate(Counter.READER)
            held = self._hold(store, reader_id, lease, mark, ttl)
        except BaseException:
            store.readers.close(lease.reader_id)
            raise
        return self._describe(reader_id, held)

    def _hold(self, store: PageStore, reader_id: int, lease: Lease, mark: Mark, ttl: float) -> _Held:
        snapshot = Snapshot(store.versions, mark, lease)
        held = _Held(store, snapshot, lease, ttl, 0)
        # The row is written while the lease in memory protects the version: there is no moment without either.
        self._persist(store.db_id, reader_id, held)
        with self._lock:
            self._held[store.db_id, reader_id] = held
        return held

    def _persist(self, db_id: int, reader_id: int, held: _Held) -> None:
        """Write the reader's row with a horizon two lease periods ahead, so that the next write is due after one period."""
        mark = held.snapshot.mark
        horizon = self._clock.now_ms() + int(2_000 * held.ttl_seconds)
        words = (mark.size_pages, mark.segment_id, mark.commit_ms, int(held.ttl_seconds * 1000))
        tags = {**held.lease.tags, MARK_TAG: ":".join(map(str, words))}
        self._manifest.submit([PutReader(db_id, reader_id, held.lease.lsn, horizon, tags)]).result()
        hit("pages.remote.persisted")
        held.horizon_ms = horizon

    def renew(self, db: int | str, reader_id: int) -> RemoteReader:
        """Renew a client's lease."""
        store = self._open_store(db)
        with self._lock:
            held = self._find(store, reader_id)
            held.snapshot.renew()
            if self._clock.now_ms() + int(1_000 * held.ttl_seconds) > held.horizon_ms:
                self._persist(store.db_id, reader_id, held)
        return self._describe(reader_id, held)

    def snapshot(self, db: int | str, reader_id: int) -> Snapshot:
        """Return a snapshot of the leased version. It belongs to the lease, so the caller must not close it."""
        store = self._open_store(db)
        with self._lock:
            return self._find(store, reader_id).snapshot

    def close(self, db: int | str, reader_id: int) -> None:
        """End a client's lease. One that was retired may be closed too."""
        store = self._open_store(db)
        key = (store.db_id, reader_id)
        with self._lock:
            held = self._held.pop(key, None)
            if held is None and key not in self._retired and self._row(*key) is None:
                raise self._unknown(*key)
            # The row first: the lease in memory still holds the version if this fails.
            self._manifest.submit([DropReader(*key)]).result()
            self._looked_at.pop(store.db_id, None)
        if held is not None:
            held.snapshot.close()

    # ── finding ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _find(self, store: PageStore, reader_id: int) -> _Held:
        """Return the reader, adopting it if necessary. REQUIRES the lock."""
        key = (store.db_id, reader_id)
        held = self._held.get(key)
        if held is not None and held.lease.open:
            return held
        if held is not None and held.store.readers is store.readers:
            self._give_up(key, "its lease expired")
            raise self._expired(*key)
        return self._adopt(store, reader_id)

    def _adopt(self, store: PageStore, reader_id: int) -> _Held:
        """Give a reader from an earlier run of the owner a lease in memory; refuse if a checkpoint was allowed to pass its
        version."""
        key = (store.db_id, reader_id)
        self._held.pop(key, None)
        row = self._row(*key)
        if row is None or is_view(row):
            raise self._expired(*key) if key in self._retired else self._unknown(*key)
        if not self._counts_as_alive(row):
            self._give_up(key, "it was silent")
            raise self._expired(*key)
        size, segment_id, commit_ms, ttl_ms = map(int, row.tags.get(MARK_TAG, "0:0:0:0").split(":"))
        ttl, mark = ttl_ms / 1000 or LEASE_SECONDS, Mark(row.snapshot_lsn, size, segment_id, commit_ms)
        try:
            lease = store.readers.open(row.snapshot_lsn, tags=_shown(row.tags), ttl_seconds=ttl)
        except SnapshotGone as error:
            self._give_up(key, "a checkpoint was allowed to pass its version")
            raise self._expired(*key, floor=store.readers.given_floor) from error
        try:
            return self._hold(store, reader_id, lease, mark, ttl)
        except BaseException:
            store.readers.close(lease.reader_id)
            raise

    def _row(self, db_id: int, reader_id: int) -> ReaderRecord | None:
        with self._manifest.read() as txn:
            return txn.get(t.SNAPSHOT_READERS, db_id, reader_id)

    def in_memory(self, db_id: int) -> set[int]:
        """Return the readers of a database that have a lease in memory; their rows need not be read."""
        with self._lock:
            return {reader for (db, reader), held in self._held.items() if db == db_id and held.lease.open}

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    def tick(self, db_id: int, retired: Iterable[Lease] = ()) -> None:
        """Remove the rows of readers that were just retired in memory and, with a warning, rows that no longer count."""
        now = self._clock.monotonic()
        late = set(map(id, retired))
        with self._lock:
            for key in [key for key, held in self._held.items() if key[0] == db_id and id(held.lease) in late]:
                self._give_up(key, "its lease expired", warn=False)  # `Readers.expire` has already warned
            if now - self._looked_at.get(db_id, -HEARTBEAT_SECONDS) < HEARTBEAT_SECONDS:
                return
            self._looked_at[db_id] = now
            with self._manifest.read() as txn:
                rows = [(key[1], row) for key, row in reader_rows(txn, db_id) if row is not None and not is_view(row)]
            leased = self.in_memory(db_id)
            for reader_id, row in rows:
                if reader_id not in leased and not self._counts_as_alive(row):
                    self._give_up((db_id, reader_id), "it was silent", row)

    def _give_up(self, key: tuple[int, int], why: str, row: ReaderRecord | None = None, *, warn: bool = True) -> None:
        """Retire a reader and drop its row. REQUIRES the lock."""
        held = self._held.pop(key, None)
        self._retired[key] = None
        if len(self._retired) > RETIRED_MAX:
            self._retired.popitem(last=False)
        if warn:
            lsn = held.lease.lsn if held is not None else row.snapshot_lsn if row is not None else 0
            tags = held.lease.tags if held is not None else _shown(row.tags) if row is not None else {}
            emit("warning", "reader.heartbeat_lost", db_id=key[0], reader_id=key[1], lsn=lsn, tags=tags, why=why)
        self._manifest.submit([DropReader(*key)])  # not awaited: a row that remains is expired, and dropped later

    def _describe(self, reader_id: int, held: _Held) -> RemoteReader:
        return RemoteReader(
            reader_id=reader_id,
            db_id=held.store.db_id,
            lsn=held.lease.lsn,
            size_pages=held.snapshot.size_pages,
            page_size=held.store.page_size,
            ttl_seconds=held.ttl_seconds,
            tags=dict(held.lease.tags),
        )

    def _expired(self, db_id: int, reader_id: int, **more: int) -> LeaseExpired:
        hint = "open a new one, and renew it in time"
        return LeaseExpired("the reader's lease has expired", hint=hint, db_id=db_id, reader_id=reader_id, **more)

    def _unknown(self, db_id: int, reader_id: int) -> UnknownReader:
        what = "no reader has this id: it was closed, or never opened"
        return UnknownReader(what, hint="open a snapshot first", db_id=db_id, reader_id=reader_id)

    def forked(self) -> None:
        """Forget all readers in the child of a fork(): they are the parent's."""
        self._lock = threading.RLock()
        self._held.clear()


def _shown(tags: dict[str, str]) -> dict[str, str]:
    """Return the tags without those of the engine."""
    return {name: value for name, value in tags.items() if not name.startswith(OWN_TAGS)}
