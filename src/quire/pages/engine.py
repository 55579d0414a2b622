"""The page engine of a store: opens its page databases and runs their periodic work.

A database is recovered before it is opened, and opened once per process; unused ones are closed, the longest unused first (N1).
The ticker visits active open databases, and less often quiescent ones: heartbeats, expired readers, syncs that no thread waited
for, publication (at 4 MiB, after a second, or when a segment has ended, P6), sealing, closing idle databases. A failure of one
database (a sync with an unknown outcome, corruption) affects only that one: the ticker reports it and continues with the next
(M12). Closing syncs, seals and publishes, so that nothing is left to recover. Readers in other processes (`published.py`,
`remote.py`) hold the floor as those in this one do (M10). After fork() the child's engine is closed: files and threads belong
to the parent (M12).

Threads: any; the ticker runs on its own. Raises `UnknownDatabase`, `DatabaseTombstoned`, `WrongKind`, `InvalidInput`,
`ConfigMismatch`, `StoreClosed`; `Corruption` for a damaged WAL: `open_damaged` reads the published versions, `salvage=True`
cuts the damage off.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from quire.core.barrier import changes
from quire.core.clock import Clock
from quire.core.errors import DatabaseTombstoned, QuireError, ReadOnly, StoreClosed
from quire.core.events import emit
from quire.core.ids import ArtifactKey
from quire.core.open_databases import OpenSet
from quire.core.settings import PagesSettings
from quire.durable.files import Disk
from quire.manifest.snapshots import Anchor, ForkOptions, SnapshotInfo
from quire.manifest.store import ManifestStore
from quire.objects.api import ObjectStore
from quire.pages.anchors import anchored, inherited_map, lend
from quire.pages.cache import PageCache
from quire.pages.catalog import PageShape, find_database, fix_shape, segment_place
from quire.pages.floors import Floors, passed_floor
from quire.pages.framemap import Regions
from quire.pages.leasefiles import LeaseFiles
from quire.pages.metrics import PagesFigures, database_figures
from quire.pages.page_source import Mark
from quire.pages.pagestore import PageStore
from quire.pages.published import PublishedReaders
from quire.pages.quota import StorageQuota
from quire.pages.readers import LEASE_SECONDS, Lease, Readers
from quire.pages.recovery import published_mark, recover
from quire.pages.remote import RemoteReader, RemoteReaders
from quire.pages.snapshot import Snapshot
from quire.pages.sources import SegmentPlace, Sources, Throttle
from quire.pages.timetravel import At
from quire.pages.view import SnapshotView, ViewReader, without_object
from quire.pages.view_build import open_kept, view_of
from quire.pages.wal import Wal, WalStart

TICK_TOGETHER = 64
"""Databases that are published together."""
TICK_SECONDS = 0.25
"""Between two ticks: a quarter of the shortest interval used here."""

QUIESCENT_TICKS = 20
"""Quiescent databases are visited, and idle ones closed, once in this many ticks: every five seconds."""

Upload = Callable[[Sequence[ArtifactKey]], None]
"""Uploads artifacts to the object store, and returns when they are uploaded."""

R = TypeVar("R")


class PageEngine:
    """The page databases of one store."""

    def __init__(
        self,
        *,
        manifest: ManifestStore,
        root: str,
        disk: Disk,
        clock: Clock,
        open_store: Callable[[str], ObjectStore],
        objects_url: str,
        settings: PagesSettings,
        ticking: bool = True,
        upload: Upload | None = None,
    ) -> None:
        """With `ticking=False` there is no ticker; tests call `tick`. `upload` uploads artifacts to the object store."""
        # constant after construction
        self._manifest = manifest
        self._root = root
        self._disk = disk
        self._clock = clock
        self._objects_url = objects_url
        self._settings = settings
        self._ticking = ticking
        self._upload = upload
        self.cache = PageCache(settings.cache_bytes)
        self._throttle = Throttle(settings.cold_bytes_per_second, clock)
        self.sources = Sources(
            root=root,
            disk=disk,
            open_store=open_store,
            cache=self.cache,
            locate=self._locate,
            throttle=self._throttle,
        )
        self._regions = Regions(self.sources)
        self._files = LeaseFiles(root, disk, clock)
        self._floors = Floors(manifest, clock, self._files, lambda db_id: self._remote.in_memory(db_id))
        self._remote = RemoteReaders(manifest, clock, self.open, self._floors.counts_as_alive)
        self._published = PublishedReaders(
            manifest=manifest,
            root=root,
            disk=disk,
            clock=clock,
            sources=self.sources,
            regions=self._regions,
            objects_url=objects_url,
            page_size=settings.page_size,
            ticking=ticking,
        )
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self.quota = StorageQuota(manifest, root, settings, clock, self.stores, self._stopping)
        # guarded by _lock
        self._lock = threading.Lock()
        self._gates: WeakValueDictionary[int, threading.Lock] = WeakValueDictionary()
        """A lock for each database that is being opened or closed, so that this does not block the others; whoever holds or
        awaits a gate keeps it. Order: a gate before `_lock`."""
        self._open: OpenSet[PageStore] = OpenSet(
            open_max=settings.open_max, idle_seconds=settings.idle_seconds, clock=clock
        )
        self._published_at: dict[int, float] = {}
        self._complaints: dict[int, str] = {}
        """The last error that the ticker reported for each database, so that it reports it once."""
        self._ticker: threading.Thread | None = None
        self._closed = False
        manifest.env.fork_hooks.append(self._forked)
        manifest.cover(self)

    # ── databases ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def open(self, db: int | str, *, page_size: int = 0, salvage: bool = False) -> PageStore:
        """Recover and open a page database. Its first open fixes the page size (default 4096) permanently.

        With `salvage=True`, damage in the WAL is cut off together with everything after it, instead of raising `Corruption`.
        """
        if self._manifest.read_only:  # recovery writes
            raise ReadOnly("this process only reads the store", hint="use open_published() or open_view()", db=db)
        with self._manifest.read() as txn:
            db_id, record = find_database(txn, db)
        shape = fix_shape(self._manifest, db_id, record, page_size, self._settings.page_size)
        with self._gate(db_id):
            with self._lock:
                opened = self._open.get(db_id)
            if opened is not None and opened.wal.failure is None:
                return opened
            store = self._open_anew(db_id, shape, opened, salvage=salvage)
            with self._lock:
                surplus = self._open.surplus()
        for other in surplus:
            self._close_unused(other)
        return store

    def _open_anew(self, db_id: int, shape: PageShape, former: PageStore | None, *, salvage: bool) -> PageStore:
        """Recover and open a database that is not open, or unusable. REQUIRES the database's gate."""
        if former is not None:
            # It has become unusable (M12). Existing handles stay unusable, but readers of versions that recovery keeps stay
            # protected and can continue.
            # Ends its publisher and its syncs: recovery must not see the segments change.
            former.wal.abandon(StoreClosed("the database was reopened", db_id=db_id))
        start = recover(self._manifest, self._disk, self._root, db_id, salvage=salvage)
        core = self._make(db_id, shape, start, former.readers if former is not None else None)
        with self._lock:
            # Under the lock, so that `close` either finds the database or this thread closes it.
            if not self._closed:
                store = self._open.add(db_id, core)
                self._start_ticker()
            closed = self._closed
        if closed:  # in the meantime, so `close` did not include this database
            core.wal.close()
            raise StoreClosed("the store is closed", hint="open it again")
        # A new WAL counts its appended bytes from zero.
        self.quota.forget(db_id)
        if former is not None:
            # Readers of a version that recovery has cut would read some of its pages and some of the version before.
            former.readers.retire_above(start.durable.lsn)
            # Recovery has published the others: their readers now find them in the index. Those above stay, so that a read that
            # has just begun finds its own version or none.
            former.wal.forget(list(former.wal.unpublished), start.durable.lsn)
        return store

    def close_idle(self) -> int:
        """Close databases that have not been used for a while, and return how many."""
        with self._lock:
            idle = self._open.idle()
        return sum(map(self._close_unused, idle))

    def _close_unused(self, db_id: int) -> bool:
        """Close a database unless it is held, read, written or being opened; return whether it was closed."""
        with self._lock:
            gate = self._gates.setdefault(db_id, threading.Lock())
        # Never waits: a gate is held for as long as a recovery takes, and the caller is the ticker or the opener of
        # another database.
        if not gate.acquire(blocking=False):
            return False
        try:
            with self._lock:  # handles are given out under the gate: no thread gets one from here on
                store = None if self._closed or self._open.is_held(db_id) else self._open.peek(db_id)
            if store is None or store.is_busy:
                return False
            try:
                store.close()
            except Exception as error:  # the next open recovers it, and the ticker and other databases go on (M12)
                emit("error", "pages.close_failed", db_id=db_id, error=error)
            self._forget(store)
            return True
        finally:
            gate.release()

    @contextmanager
    def _gate(self, db_id: int) -> Iterator[None]:
        with self._lock:
            gate = self._gates.setdefault(db_id, threading.Lock())
        with gate:
            if self._closed:
                raise StoreClosed("the store is closed", hint="open it again")
            yield

    def _make(self, db_id: int, shape: PageShape, start: WalStart, readers: Readers | None) -> PageStore:
        wal = Wal(
            db_id=db_id,
            page_size=shape.page_size,
            root=self._root,
            disk=self._disk,
            manifest=self._manifest,
            clock=self._clock,
            start=start,
            notify=self._wake.set,
            notify_bytes=self._settings.publish_bytes,
        )
        with self._manifest.read() as txn:
            inherited = inherited_map(txn, self._regions, db_id, self._objects_url)
        return PageStore(
            db_id=db_id,
            page_size=shape.page_size,
            pages_per_chunk=shape.pages_per_chunk,
            manifest=self._manifest,
            clock=self._clock,
            wal=wal,
            readers=readers or self._readers(db_id),
            sources=self.sources,
            regions=self._regions,
            objects_url=self._objects_url,
            wait_for_room=self.quota.wait,
            inherited=inherited,
            spill_bytes=self._settings.spill_bytes,
        )

    def _readers(self, db_id: int) -> Readers:
        return Readers(
            db_id,
            self._clock,
            lambda: self._floors.outside(db_id),
            others=lambda: self._floors.others(db_id),
            kept=lambda: self._floors.kept(db_id),
            long_seconds=self._settings.long_reader_seconds,
            given_floor=passed_floor(self._manifest, db_id),
        )

    def open_damaged(self, db: int | str) -> PageStore:
        """Open a database whose WAL cannot be recovered, as of its published state: read-only, changing nothing."""
        with self._manifest.read() as txn:
            db_id, record = find_database(txn, db)
            mark = published_mark(txn, self._disk, self._root, db_id)
        shape = fix_shape(self._manifest, db_id, record, 0, self._settings.page_size)
        store = self._make(db_id, shape, WalStart(mark.lsn + 1, 1, mark), None)
        hint = "open it with salvage=True to write to it again"
        store.wal.abandon(ReadOnly("the database was opened for reading", hint=hint, db_id=db_id))
        return store

    def close_database(self, db: int | str) -> None:
        """Flush and close a database and retire its readers. Does nothing if it is not open."""
        with self._manifest.read() as txn:
            db_id = txn.database_id(db) if isinstance(db, str) else db
        with self._gate(db_id):
            store = self._open.peek(db_id)
            if store is None:
                return
            try:
                store.wal.close()
            finally:
                self._forget(store)

    def _forget(self, store: PageStore) -> None:
        with self._lock:
            opened = self._open.peek(store.db_id)
            # If the database was reopened meanwhile, the new one stays.
            if opened is not None and opened.wal is store.wal:
                self._open.pop(store.db_id)
            self._published_at.pop(store.db_id, None)
            self._complaints.pop(store.db_id, None)
        store.readers.retire_all()
        self.quota.forget(store.db_id)
        self.cache.forget(store.db_id)

    def stores(self) -> list[PageStore]:
        """Return the open databases."""
        with self._lock:
            return self._open.cores()

    def _locate(self, origin: int, segment_id: int) -> SegmentPlace | None:
        with self._manifest.read() as txn:
            return segment_place(txn, origin, segment_id, self._objects_url)

    # ── for jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────
    @changes
    def flush(self, db_id: int) -> None:
        """Seal, sync and publish everything written. Does nothing if the database is not open."""
        if (store := self._open.peek(db_id)) is not None:
            self._flush(store)

    def _flush(self, store: PageStore) -> Mark:
        # Only up to the seal: under load, syncing everything written would wait for later commits too.
        store.wal.sync((mark := store.wal.seal()).lsn)
        store.wal.publish()
        return mark

    def floor(self, db_id: int) -> int:
        """Return how far a checkpoint may go: the lowest lsn that a live reader may need (P9)."""
        store = self._open.peek(db_id)
        if store is not None and store.wal.failure is None:
            store.wal.publish()  # no floor is above what is published
        return self._floors.floor(db_id, store)

    def readers(self, db_id: int) -> list[Lease]:
        """Return the readers of a database, oldest version first: in this process, in others, and clients."""
        store = self._open.peek(db_id)
        return store.readers.peek() if store is not None else self._floors.others(db_id)

    # ── snapshots and forks ───────────────────────────────────────────────────────────────────────────────────────────
    @changes
    def snapshot(
        self, db: int | str, name: str = "", *, tags: dict[str, str] | None = None, expires_at_ms: int = 0
    ) -> SnapshotInfo:
        """Take a snapshot of the database, including written transactions that are not yet durable, named or anonymous."""
        publish = partial(self._manifest.snapshots.publish, tags=tags, expires_at_ms=expires_at_ms)
        return self._anchored(db, lambda db_id, anchor: publish(db_id, name, anchor=anchor))

    @changes
    def fork(
        self, db: int | str, new_name: str, *, at: int | str | None = None, options: ForkOptions | None = None
    ) -> int:
        """Create a database that starts as `db` is now, or was at the snapshot `at`; return its id. Shares all artifacts."""
        fork = self._manifest.snapshots.fork
        if at is not None:
            return fork(db, new_name, at=at, options=options)
        return self._anchored(db, lambda db_id, anchor: fork(db_id, new_name, anchor=anchor, options=options))

    def _anchored(self, db: int | str, publish: Callable[[int, Anchor], R]) -> R:
        return anchored(self._manifest, self.open(db), self._flush, publish)

    def view(self, db: int | str, snapshot: int | str, *, upload: bool = False) -> SnapshotView:
        """Return a snapshot as a value that can be sent to other processes (P16).

        With `upload=True` also to processes that share no disk with this one: segments without an object are uploaded first.
        """
        with self._manifest.read() as txn:
            db_id, _ = find_database(txn, db)
            snapshot_id, record = txn.require_snapshot(db_id, snapshot)
            view = view_of(txn, db_id, snapshot_id, record, self._objects_url)
        if not (upload and (missing := without_object(view))):
            return view
        self.upload(missing)
        return self.view(db_id, snapshot_id)

    def upload(self, artifacts: Sequence[ArtifactKey]) -> None:
        """Upload artifacts to the object store."""
        if self._upload is None:
            raise ReadOnly("only the owner of a store can upload", hint='open the store with mode="rw"')
        self._upload(artifacts)

    def open_view(self, db: int | str, snapshot: int | str) -> ViewReader:
        """Return a reader of a snapshot, by name or id, in any process.

        It needs no lease: the snapshot's row keeps what it reads. After the snapshot is dropped, reading raises `SnapshotGone`.
        """
        return open_kept(self._manifest, self.view(db, snapshot), self.sources, self._regions)

    # ── readers of other processes ────────────────────────────────────────────────────────────────────────────────────
    def open_published(self, db: int | str, *, tags: dict[str, str] | None = None) -> Snapshot:
        """Open a lease on the newest published version, at most a second old. Works in read-only processes too."""
        return self._published.open(db, tags=tags)

    def open_published_at(self, db: int | str, at: At, *, tags: dict[str, str] | None = None) -> Snapshot:
        """Open a lease on the published version that was current `at` an lsn or a time (P14)."""
        return self._published.open_at(db, at, tags=tags)

    def lease_reader(
        self, db: int | str, tags: dict[str, str] | None = None, ttl: float = LEASE_SECONDS
    ) -> RemoteReader:
        """Open a client's lease on the newest durable version: a row, which outlives this process (M10)."""
        return self._remote.open(db, tags, ttl)

    def lend(
        self, databases: Sequence[int | str], seconds: float, *, lease_id: int = 0, upload: bool = False
    ) -> tuple[int, list[SnapshotView]]:
        """Return (id of a lease, a view of the current version of each database), for readers in other processes."""
        return lend(self, databases, seconds, lease_id=lease_id, upload=upload)

    def renew_reader(self, db: int | str, reader_id: int) -> RemoteReader:
        """Renew a client's lease; raises `LeaseExpired` if it was silent for too long, or its version may be gone."""
        return self._remote.renew(db, reader_id)

    def read_leased(self, db: int | str, reader_id: int) -> Snapshot:
        """Return a snapshot for reading on behalf of a client's lease; `close_reader` ends the lease."""
        return self._remote.snapshot(db, reader_id)

    def close_reader(self, db: int | str, reader_id: int) -> None:
        """End a client's lease."""
        self._remote.close(db, reader_id)

    # ── figures ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def figures(self) -> PagesFigures:
        """Return the current figures of the engine."""
        self.quota.total()
        with self._manifest.read() as txn:
            databases = tuple(
                database_figures(
                    txn,
                    store,
                    wal_bytes=self.quota.seen(store.db_id),
                    wait_for_floor_ms=self._floors.waited_ms(store.db_id),
                )
                for store in self.stores()
            )
        return PagesFigures(
            databases=databases,
            cache_bytes=self.cache.used_bytes,
            cache_bytes_max=self.cache.bytes_max,
            cache_hit_ratio=self.cache.hit_ratio,
            cold_wait_seconds=self._throttle.waited_seconds,
        )

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _start_ticker(self) -> None:
        if self._ticker is None and self._ticking:
            self._ticker = threading.Thread(target=self._run, name="quire-pages", daemon=True)
            self._ticker.start()

    def _run(self) -> None:
        ticks, reported = 0, ""
        while not self._stopping.is_set():
            self._wake.wait(TICK_SECONDS)
            # Before the work: a request that arrives during it starts the next tick at once.
            self._wake.clear()
            ticks += 1
            try:
                self.quota.tick()
                self._files.tick()
                self.sources.drop_unused()
                self.tick_all(include_quiescent=ticks % QUIESCENT_TICKS == 0)
            except Exception as error:  # if the ticker ended, nothing would be published or expire in any database
                complaint = f"{type(error).__name__}: {error}"
                if complaint != reported:  # once, not four times a second
                    reported = complaint
                    emit("error", "pages.ticker_failed", error=complaint)

    def tick_all(self, *, include_quiescent: bool = True) -> None:
        """Do everything that is due for open databases; `include_quiescent`: also for quiescent ones."""
        stores = [store for store in self.stores() if include_quiescent or not store.is_quiescent]
        for start in range(0, len(stores), TICK_TOGETHER):
            under_way = [(store, self._steps(store)) for store in stores[start : start + TICK_TOGETHER]]
            while under_way:
                under_way = [(store, steps) for store, steps in under_way if self._step_safely(store, steps)]
            if self._stopping.is_set():
                return
        if include_quiescent:
            self.close_idle()

    def _step_safely(self, store: PageStore, steps: Iterator[object]) -> bool:
        """Run the next step of one database's tick; return whether there is more to do.

        Failures are reported and not raised: if the ticker ended, nothing would be published anymore.
        """
        try:
            for _ in steps:
                return True
            self._complaints.pop(store.db_id, None)
        except DatabaseTombstoned:  # dropped between the check and the commit: the next tick closes it
            pass
        except Exception as error:
            complaint = f"{type(error).__name__}: {error}"
            if store.wal.failure is None and self._complaints.get(store.db_id) != complaint:
                self._complaints[store.db_id] = complaint
                emit("error", "pages.tick_failed", db_id=store.db_id, error=complaint)
        return False

    def tick(self, store: PageStore) -> None:
        """Do everything that is due for one database."""
        for _ in self._steps(store):
            pass

    def _steps(self, store: PageStore) -> Iterator[object]:
        """Do the same in steps; between two steps a commit is in progress, so databases ticked together share commits."""
        now, wal = self._clock.monotonic(), store.wal
        store.readers.beat()
        self._remote.tick(store.db_id, store.readers.expire())
        if wal.failure is not None:
            return
        if store.is_dropped:
            store.close()
            self._forget(store)
            return
        due = now - self._published_at.get(store.db_id, 0.0) >= self._settings.publish_seconds
        # Commits with `synchronous` below FULL have no thread that waits for them (Q2).
        if wal.written.lsn > wal.durable.lsn and due:
            wal.sync()
        if now - wal.opened_at >= self._settings.seal_seconds:
            wal.seal()
        if wal.has_ended() or wal.unpublished_bytes >= self._settings.publish_bytes or (due and wal.unpublished_bytes):
            yield from wal.publishing()
            self._published_at[store.db_id] = now
        wal.prepare()

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    def close(self) -> None:
        """Close every database, then raise the first failure, if any. Does nothing when called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._stopping.set()
        self._wake.set()
        # The ticker also publishes and closes databases, so it ends first.
        if self._ticker is not None:
            self._ticker.join()
        self._published.close()
        failures: list[QuireError] = []
        for store in self.stores():
            poisoned = store.wal.failure is not None
            try:
                store.close()
            except Exception as error:
                emit("error", "pages.close_failed", db_id=store.db_id, error=error)
                if isinstance(error, QuireError) and not poisoned:
                    failures.append(error)
            self._forget(store)
        self.sources.close()
        if failures:
            raise failures[0]

    def _forked(self) -> None:
        """Close the engine in a forked child: files and threads belong to the parent."""
        self._closed = True
        self._lock = threading.Lock()
        self._gates = WeakValueDictionary()
        for store in self._open.cores():
            store.wal.forked()
            store.readers.forked()
        self._published.forked()
        self._remote.forked()
