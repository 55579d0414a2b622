"""A key-value database: a sorted map from bytes to bytes, written in atomic batches, with snapshot reads.

A batch has one lsn. It is appended to the WAL, inserted into the memtable, synced if requested, then acknowledged; other
threads see it once it is in the memtable. With `sync=False` a batch survives the death of the process at once, and power loss
after the next sync. One sync covers every batch appended before it.

What is on disk after each step, and what a crash leaves
  a batch is appended     in the WAL, or a torn tail that recovery cuts: the batch was not acknowledged
  it is synced            in the WAL
  the memtable freezes    the old WAL is synced first; the manifest lists it and names the new WAL before that is used
  it is flushed           the table is synced before the manifest names it; the WAL is removed after that (maintenance.py)

After a failed append or sync of the WAL, or a manifest write with an unknown outcome, the database refuses writes until it is
opened again (M12); it can still be read. So it does if a signal handler raises (Ctrl-C) after a change was logged and before
it is complete in memory. Reads take no lock, except `_visibility` to begin a scan or a snapshot, which is
never held during a write to disk or a wait.

    >>> import tempfile
    >>> from quire.durable.files import OsDisk
    >>> with Kv.open(OsDisk(), tempfile.mkdtemp()) as kv:
    ...     kv.put(b"a", b"1")
    ...     with kv.snapshot() as before:
    ...         lsn = kv.write({b"a": b"2", b"b": b"3"})
    ...         print(kv.get(b"a"), before.get(b"a"), list(kv.scan()))
    b'2' b'1' [(b'a', b'2'), (b'b', b'3')]

Threads: any. Raises `StoreUnusable`, `StoreClosed`, `InvalidInput`, `OutOfRange`, `Overloaded`, `DiskFull`, `Corruption`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from quire.core.barrier import Barrier, changes
from quire.core.clock import Clock, SystemClock
from quire.core.closing import ClosedOnExit
from quire.core.errors import (
    InvalidInput,
    OutOfRange,
    QuireError,
    StorageFault,
    StoreClosed,
    StoreFenced,
    StoreUnusable,
    poisoned_by,
)
from quire.core.events import emit
from quire.core.recent_keys import call_number
from quire.core.settings import LsmSettings
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.durable.names import LsmHome
from quire.lsm.block_cache import BlockCache
from quire.lsm.maintenance import KvBackground, KvMaintenance, Stalls
from quire.lsm.memtable import Memtable
from quire.lsm.reading import HeldLsns, KvIterator, KvRanges, KvSnapshot
from quire.lsm.recovery import RecoveredKv, open_files
from quire.lsm.short_scan import Pair
from quire.lsm.view import LSN_MAX, Frozen, KvView
from quire.lsm.wal import Buffer, Items, KvWal, as_bytes, checked_batch, encode_batch, encode_carried
from quire.lsm.witnesses import StoreFacts, end_row
from quire.manifest.records import LsmEndsRecord

if TYPE_CHECKING:
    import pyarrow as pa

    from quire.lsm.projection import CompactionJobs
    from quire.lsm.sst_reader import SSTable


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a database."""

    last_lsn: int
    rows: int
    """Versions in tables, tombstones included."""
    tombstones: int
    tables: int
    table_bytes: int
    levels: tuple[int, ...]
    """Number of tables in each level, from level 0."""
    memtable_keys: int
    memtable_bytes: int
    frozen: int
    manifest_log_bytes: int
    manifest_version: int
    """Rises with every change of the manifest."""
    flushes: int
    """Since the database was opened."""
    compactions: int
    stalled_writers: int
    """Writers that are waiting for a flush or a compaction."""
    stalls: int
    stall_seconds: float


def stats_of(
    view: KvView,
    last_lsn: int,
    log_bytes: int,
    version: int,
    upkeep: KvMaintenance | None = None,
    stalls: Stalls | None = None,
) -> Stats:
    """Compute the statistics of a view. A read-only database has neither `upkeep` nor `stalls`."""
    memtables = [view.memtable, *(frozen.memtable for frozen in view.frozen)]
    tables = list(view.levels)
    return Stats(
        last_lsn=last_lsn,
        rows=sum(table.meta.rows for table in tables),
        tombstones=sum(table.meta.tombstones for table in tables),
        tables=len(tables),
        table_bytes=sum(table.size_bytes for table in tables),
        levels=(len(view.levels.level0), *map(len, view.levels.deeper)),
        memtable_keys=sum(len(memtable.entries) for memtable in memtables),
        memtable_bytes=sum(memtable.bytes for memtable in memtables),
        frozen=len(view.frozen),
        manifest_log_bytes=log_bytes,
        manifest_version=version,
        flushes=upkeep.flushes if upkeep else 0,
        compactions=upkeep.compactions if upkeep else 0,
        stalled_writers=stalls.waiting if stalls else 0,
        stalls=stalls.count if stalls else 0,
        stall_seconds=stalls.seconds if stalls else 0.0,
    )


class Kv(KvRanges, ClosedOnExit):
    """An open key-value database; made by `Kv.open`, or by `store.kv(name)`."""

    def __init__(
        self,
        disk: Disk,
        home: LsmHome,
        opened: RecoveredKv,
        settings: LsmSettings,
        clock: Clock,
        cache: BlockCache,
        *,
        background: KvBackground | None,
        jobs: CompactionJobs | None = None,
        facts: StoreFacts | None = None,
    ) -> None:
        # constant after construction
        self.disk = disk
        self.home = home
        facts = facts or StoreFacts()
        self.owner = facts.owner
        self.projection = facts.projection
        self.settings = settings
        self.clock = clock
        self.cache = cache
        self.manifest = opened.manifest
        self.snapshots = HeldLsns()
        self.stalls = Stalls(self)
        # guarded by _writing
        self._writing = threading.Lock()
        self._wal = opened.wal
        self._durable_lsn = opened.last_lsn
        self._calls = opened.calls
        # guarded by _visibility, which is taken after _writing: a snapshot sees whole batches, and their versions are held
        # from the moment it has its lsn
        self._visibility = threading.Lock()
        self._lsn = opened.last_lsn
        self._loading: set[int] = set()
        """Lsns of bulk loads in progress."""
        # replaced under _viewing, read without a lock
        self._viewing = threading.Condition()
        self.view: KvView = opened.view
        # only ever set
        self.failure: QuireError | None = None
        self.check_owner: Callable[[], None] = lambda: None
        """Raises if another owner has taken over the store; set by the engine."""
        self.require_writable: Callable[[], None] = lambda: None
        """Raises if the database is not writable; set by the engine."""
        self.barrier: Barrier | None = None
        """The barrier that delays acknowledgements in archive mode `sync`; set by the engine."""
        self.first_lsn = 0
        """The first number of the store's current range (A10), a lower bound for the next lsn; set by the engine."""
        self.is_fold_committed = True
        """Whether the last fold has been committed to LMDB. No file is removed until it has."""
        self._own_background: KvBackground | None = None
        """The database's own threads, if it does not use those of a store."""
        self.upkeep = KvMaintenance(self, jobs, background)

    # ── lifecycle ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @classmethod
    def open(
        cls,
        disk: Disk,
        path: str,
        settings: LsmSettings | None = None,
        *,
        clock: Clock | None = None,
        cache: BlockCache | None = None,
        background: bool | KvBackground = True,
        jobs: CompactionJobs | None = None,
        facts: StoreFacts | None = None,
    ) -> Kv:
        """Open and recover the database in directory `path`, or create an empty one. It must not be open anywhere else.

        `background`: `True` for threads of its own, or the threads that a store's databases share; with `False`, nothing is
        flushed or compacted except by calls of `flush` and `compact`.
        `jobs`: records every compaction as a job. `facts`: the store's records of the database, compared with its files.
        """
        settings = settings or LsmSettings()
        cache = cache if cache is not None else BlockCache(settings.cache_bytes)
        home = LsmHome(path)
        opened = open_files(disk, home, cache, facts)
        clock = clock or SystemClock()
        own = KvBackground(settings.threads) if background is True else None
        shared = background if isinstance(background, KvBackground) else own
        kv = cls(disk, home, opened, settings, clock, cache, background=shared, jobs=jobs, facts=facts)
        kv._own_background = own
        return kv

    def close(self) -> None:
        """Stop background work, sync and close the files. Memtables are not flushed: their WALs hold them. Idempotent."""
        if isinstance(self.failure, StoreClosed):
            return  # also in the child of a fork(), whose upkeep must not touch the parent's files
        self._stop_background()
        with self._writing:
            if isinstance(self.failure, StoreClosed):
                return
            failed, self.failure = self.failure, StoreClosed("the database is closed", hint="open it again")
            try:
                if failed is None:
                    # Logs first, LMDB second: a recorded end that is not durable in the file would be taken for damage.
                    self._wal.close()
                    self.manifest.close()
                    self._durable_lsn = self._lsn
                    if self.projection is not None:
                        self.projection.record(self.ends)
            finally:
                self._wal.abandon()
                self.manifest.abandon()
                for table in self.view.levels:
                    table.close()

    def abandon(self) -> None:
        """Release all resources without another write, as a crash would."""
        self._fail(StoreClosed("the database is closed", hint="open it again"))
        self._stop_background()
        with self._writing:
            self.failure = StoreClosed("the database is closed", hint="open it again")
            self._wal.abandon()
            self.manifest.abandon()
            for table in self.view.levels:
                table.close()

    def _stop_background(self) -> None:
        self.upkeep.stop()
        if self._own_background is not None:
            self._own_background.stop()

    @property
    def is_busy(self) -> bool:
        """Whether work is in progress that closing would have to wait for or interrupt."""
        return bool(self._loading or self.snapshots.lsns() or self.upkeep.is_busy)

    def forked(self, failure: StoreClosed) -> None:
        """Invalidate the database in the child of a fork(): it belongs to the parent (M12)."""
        self.failure = failure
        self._writing = threading.Lock()  # a thread of the parent that does not exist in the child may have held it
        self._visibility = threading.Lock()
        self._viewing = threading.Condition()

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    @changes
    def put(self, key: Buffer, value: Buffer, *, sync: bool = True) -> None:
        """Set the value of a key."""
        if value is None:
            raise InvalidInput("a value must be bytes, not None", hint="`delete` removes a key", key=key)
        self.write({as_bytes(key): value}, sync=sync)

    @changes
    def delete(self, key: Buffer, *, sync: bool = True) -> None:
        """Remove a key if it exists."""
        self.write({as_bytes(key): None}, sync=sync)

    @changes
    def write(self, batch: Mapping[bytes, Buffer | None], *, sync: bool = True, key: bytes = b"") -> int:
        """Apply a batch atomically: new values by key, `None` to delete. Return its lsn (0 for an empty batch).

        A `key` of 16 random bytes makes the call idempotent: a batch whose key was written recently is not written again.
        """
        items, call = checked_batch(batch), call_number(key) if key else 0
        if not items:
            return 0
        self.require_writable()
        with self._writing:
            if self.failure is not None:
                self.require()
            if self.view.memtable.bytes >= self.settings.memtable_bytes:
                self._stall_and_freeze()
            # After a possible stall, which releases the lock: the same call may have been written meanwhile. It may not
            # have been synced, so this log is synced to its end; earlier logs were when they were frozen.
            if call and (done := self._calls.get(call)) is not None:
                wal, end, lsn = self._wal, self._wal.end, done
            else:
                wal, end, lsn = self._append(items, call)
        if sync:
            self._sync(wal, end)
        return lsn

    def _append(self, items: Items, call: int) -> tuple[KvWal, int, int]:
        """Write a batch and make it visible. Return (WAL, end of the record in it, lsn). REQUIRES the write lock."""
        wal, lsn = self._wal, self._next_lsn()
        record = encode_batch(lsn, items, call)
        try:
            end = wal.append(record)
            # Together: a snapshot with this lsn must find the whole batch, and one without it must hold the versions that
            # the batch replaces.
            with self._visibility:
                self._lsn = lsn
                self.view.memtable.put_all(lsn, items, len(record), self.snapshots.newest)
            if call:
                self._calls.add(call, lsn)
        except BaseException as error:
            # Also if a signal interrupts the insertion: a flush would make half of the batch permanent.
            self._mark_unusable(error)
            raise
        return wal, end, lsn

    def _next_lsn(self) -> int:
        """Return the next lsn. After a takeover it is not one that the former owner may have given to a lost batch."""
        return max(self._lsn + 1, self.first_lsn)

    @changes
    def sync(self) -> None:
        """Make everything written so far durable."""
        with self._writing:
            self.require()
            wal = self._wal
        self._sync(wal, wal.end)

    def _sync(self, wal: KvWal, end: int) -> None:
        try:
            wal.sync(end)
            self.check_owner()  # do not acknowledge a batch that a second owner may already have cut off
        except BaseException as error:
            self._mark_unusable(error)
            raise

    # ── memtables ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _stall_and_freeze(self) -> None:
        """Wait until few enough memtables and tables are pending, then freeze the memtable if it is still full.

        REQUIRES the write lock, and releases it while waiting, so that a stalled writer blocks no other thread."""
        while self.stalls.is_due:
            self._writing.release()
            try:
                self.stalls.wait(self._viewing)
            finally:
                self._writing.acquire()
            self.require()
        if self.view.memtable.bytes >= self.settings.memtable_bytes:  # else another writer has frozen it meanwhile
            self._freeze()

    def _freeze(self) -> None:
        """Switch to a new memtable and a new WAL. REQUIRES the write lock."""
        old, number = self._wal, self._wal.number + 1
        path = self.home.wal(number)
        # First, because it can fail without consequences: on a full disk the old log stays in use.
        new = KvWal.create(self.disk, path, number, self.owner)
        hit("lsm.freeze.created")
        try:
            # Otherwise power loss could keep a batch of the new WAL and lose an earlier one of the old WAL.
            self._sync(old, old.end)
            self._durable_lsn = self._lsn
            hit("lsm.freeze.synced")
            self.manifest.rotate_wal(old.number, number, self._lsn)
            hit("lsm.freeze.rotated")
            if self._calls:  # before the old WAL can be flushed and removed
                new.sync(new.append(encode_carried(self._lsn, self._calls.newest())))
            with self._viewing:
                view = self.view
                view.memtable.freeze()
                self.view = KvView(
                    Memtable(), (Frozen(view.memtable, old.number, old.durable_end()), *view.frozen), view.levels
                )
            self._wal = new
        except BaseException as error:
            new.abandon()
            # Only a change of the manifest that was certainly not logged raises this: nothing names the new log.
            if isinstance(error, StorageFault):
                with suppress(StorageFault, FileNotFoundError):
                    self.disk.remove(path)
            else:
                self._mark_unusable(error)
            raise
        with suppress(StoreUnusable):  # it is already synced; the closing mark is optional
            old.close()
        self.upkeep.wake()

    @changes
    def flush(self) -> None:
        """Flush everything written so far to tables."""
        with self._writing:
            self.require()
            if self.view.memtable.entries:
                self._freeze()
        self.upkeep.flush_all()

    @changes
    def compact(self) -> None:
        """Flush, and merge all tables into one level."""
        self.flush()
        self.upkeep.compact_all()

    # ── for maintenance and bulk loads ────────────────────────────────────────────────────────────────────────────────
    def install(
        self, *, flushed: Frozen | None = None, added: Sequence[SSTable] = (), removed: Sequence[SSTable] = ()
    ) -> None:
        """Replace the view: without the memtable `flushed`, with tables `added` and without `removed`. Wake stalled writers."""
        with self._viewing:
            view = self.view
            frozen = tuple(memtable for memtable in view.frozen if memtable is not flushed)
            levels = view.levels.changed(added, removed) if added or removed else view.levels
            self.view = KvView(view.memtable, frozen, levels)
            self._viewing.notify_all()

    def fold(self) -> None:
        """Notify the projection, if there is one, that the tables or the logs have changed."""
        if self.projection is not None:
            # Before the fold: a checkpoint meanwhile starts a log that the recorded end does not name.
            log_salt = self.manifest.log_salt
            self.is_fold_committed = self.projection.fold(lambda: self.view.levels, self.ends)
            if self.is_fold_committed:
                self.manifest.mark_recorded(log_salt)

    def ends(self) -> LsmEndsRecord:
        """Return how far the logs are durable, to be recorded outside of them (witnesses.py)."""
        lsn = self._durable_lsn
        manifest, snapshot = self.manifest.durable_end()
        wals = {frozen.wal: frozen.end for frozen in self.view.frozen}
        wal = self._wal
        wals[wal.number] = wal.durable_end()
        return LsmEndsRecord(
            end_row(0, manifest), snapshot, lsn, tuple(end_row(number, wals[number]) for number in sorted(wals))
        )

    def notify(self) -> None:
        """Wake stalled writers: a condition that they wait for may have changed."""
        with self._viewing:
            self._viewing.notify_all()

    @changes
    def begin_load(self) -> int:
        """Begin a bulk load and return its lsn. Earlier writes are older than the loaded rows, later ones newer."""
        self.require_writable()
        with self._writing:
            self.require()
            # Earlier writes get a memtable of their own, which is flushed before the load is published (`add_tables`).
            if self.view.memtable.entries:
                self._freeze()
            lsn = self._next_lsn()
            # Durable before it is used: the lsn is in no WAL, and after a crash no batch may get that of a load.
            self.manifest.update_lsn(lsn)
            with self._visibility:
                self._lsn = lsn
                self._loading.add(lsn)
            return lsn

    def end_load(self, lsn: int) -> None:
        """End a load, successful or not."""
        with self._visibility:
            self._loading.discard(lsn)

    @property
    def loading(self) -> frozenset[int]:
        """Lsns of loads in progress."""
        return frozenset(self._loading)

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def get(self, key: Buffer) -> bytes | None:
        """Return the value of a key, or `None`."""
        if self.failure is not None:
            self.require_open()
        if type(key) is not bytes:
            key = as_bytes(key)
        view = self.view
        entry = view.memtable.entries.get(key)
        if entry is None:
            if not view.frozen:  # the common case: no memtable is waiting to be flushed
                best = view.levels.get(key, LSN_MAX, None)
                return best[1] if best is not None else None
        elif entry[0] > view.levels.lsn_max:
            return entry[1]
        return view.get(key, LSN_MAX)

    def get_many(self, keys: Sequence[Buffer]) -> list[bytes | None]:
        """Return the values of keys, in their order, from one snapshot; `None` for a missing key."""
        with self.snapshot() as snapshot:
            return snapshot.get_many(keys)

    @property
    def last_lsn(self) -> int:
        """The lsn of the newest batch."""
        return self._lsn

    def snapshot(self) -> KvSnapshot:
        """Return a snapshot of the database as it is now, readable until it is closed."""
        with self._visibility:
            self.require_open()
            lsn, hidden = self._lsn, frozenset(self._loading)
            # For a hidden load also the versions just below it: a compaction after its publication would keep only its
            # rows, which this snapshot does not see.
            held = self.snapshots.hold((lsn, *(load - 1 for load in hidden)))
        return KvSnapshot(self, lsn, hidden, held)

    def batches(self, low: bytes, high: bytes | None, reverse: bool) -> Iterator[pa.RecordBatch]:
        """Return the range as of this call. The snapshot keeps the versions it reads from being overwritten in the memtable."""
        return self.snapshot().batches_then_close(low, high, reverse)

    def pairs(self, low: bytes, high: bytes | None, reverse: bool) -> Iterator[Iterable[Pair]]:
        """Return the range as groups of (key, value) pairs."""
        return self.snapshot().pairs_then_close(low, high, reverse)

    def iterator(self) -> KvIterator:
        """Return a cursor over the database as it is now."""
        return KvIterator(self.snapshot())

    def stats(self) -> Stats:
        """Return the current statistics."""
        manifest = self.manifest
        return stats_of(self.view, self.last_lsn, manifest.log_bytes, manifest.version, self.upkeep, self.stalls)

    # ── failures ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def require(self) -> None:
        """Raise the error that made the database unusable, if it is."""
        if (why := self.failure) is not None:
            raise why.copied() from why.__cause__

    def require_open(self) -> None:
        """Raise if the database is closed. A database that refuses writes can still be read."""
        if isinstance(self.failure, StoreClosed):
            self.require()

    def _mark_unusable(self, error: BaseException) -> None:
        """Refuse writes until the database is opened again: the state on disk is unknown."""
        if isinstance(error, (OutOfRange, StoreClosed)):
            return  # refused before anything was written
        hint = "fix the cause, then reopen the database"
        self._fail(poisoned_by(error, f"the database's log failed: {error}", hint=hint, path=self.home.path))

    def _fail(self, failure: QuireError) -> None:
        if self.failure is None:
            self.failure = failure
            if not isinstance(
                failure, (StoreClosed, StoreFenced)
            ):  # one event for the store is enough: manifest.fenced
                emit("error", "lsm.failed", path=self.home.path, error=str(failure))
        self.notify()

    def fail(self, error: BaseException) -> None:
        """Refuse writes after an error in background work that leaves the state on disk unknown."""
        self._mark_unusable(error)
