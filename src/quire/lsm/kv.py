"""A key-value database: bytes to bytes, sorted, in atomic batches, readable as of any moment that somebody holds on to.

A batch has one lsn. It is appended to the WAL, entered into the memtable, synced if asked for, then acknowledged; others see
it from the second step on. With `sync=False` it survives the death of the process, and power loss after the next sync. One
sync serves everyone who had written by then.

What is on disk, step by step, and what a crash there leaves
  a batch is appended     in the WAL, or a torn end that recovery cuts: it was not acknowledged
  it is synced            in the WAL
  the memtable freezes    the old WAL is synced first; the manifest lists it and names the new one before that is used
  it is flushed           the table is synced before the manifest names it; the WAL goes after that (maintenance.py)

After a failed append or sync of the WAL, or a manifest in doubt, the database takes nothing more until it is opened again
(M12); what it holds can still be read. Reads take no lock, except to begin a scan or a snapshot; that one (`_visibility`) is
never held over a write to disk or a wait.

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
from typing import TYPE_CHECKING, Self

import msgspec

from quire.core.barrier import Barrier, changes
from quire.core.clock import Clock, SystemClock
from quire.core.errors import (
    InvalidInput,
    OutOfRange,
    QuireError,
    StorageFault,
    StoreClosed,
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
    """A database in numbers."""

    last_lsn: int
    rows: int
    """In tables: versions, tombstones included."""
    tombstones: int
    tables: int
    table_bytes: int
    levels: tuple[int, ...]
    """Tables in each, from level 0 on."""
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
    """Writers that wait for a flush or a compaction, now."""
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
    """What a database consists of, now; a read-only one has neither upkeep nor stalls."""
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


class Kv(KvRanges):
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
        self.follower = facts.follower
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
        # guarded by _visibility, which comes after _writing: a snapshot sees whole batches, and holds their versions at once
        self._visibility = threading.Lock()
        self._lsn = opened.last_lsn
        self._loading: set[int] = set()
        """Lsns of bulk loads that are under way."""
        # replaced under _viewing, read by all
        self._viewing = threading.Condition()
        self.view: KvView = opened.view
        # only ever set
        self.failure: QuireError | None = None
        self.check_owner: Callable[[], None] = lambda: None
        """Raises if the store has another owner by now; set by the engine."""
        self.require_writable: Callable[[], None] = lambda: None
        """Raises if the database takes no writes; set by the engine."""
        self.barrier: Barrier | None = None
        """What acknowledgements wait behind in mode `sync` of the archive; set by the engine."""
        self.first_lsn = 0
        """The first number of the store's current range (A10): the next lsn is not below it; set by the engine."""
        self.is_recorded = True
        """Whether LMDB has what the last fold was about; while it has not, no file goes."""
        self._own_background: KvBackground | None = None
        """Its threads, if they are not those of a store."""
        self.upkeep = KvMaintenance(self, jobs, background)

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────────────
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
        """The database below `path`, recovered; an empty one if there is none. Nobody else may have it open.

        `background=False`: nothing is flushed or compacted by itself; who wants it calls `flush` and `compact`. A store's
        databases share their threads.
        `jobs`: shows every compaction as a job. `facts`: what the store knows of the database; its files are compared with it.
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
        """Sync, stop the background and close the files. Memtables stay in their WALs. A second time: nothing."""
        if isinstance(self.failure, StoreClosed):
            return  # also in the child of a fork(), whose upkeep must not touch the parent's files
        self._stop_background()
        with self._writing:
            if isinstance(self.failure, StoreClosed):
                return
            failed, self.failure = self.failure, StoreClosed("the database is closed", hint="open it again")
            try:
                if failed is None:
                    self._wal.close()
                    self.manifest.close()
                    self._durable_lsn = self._lsn
                    if self.follower is not None:
                        self.follower.record(self.ends())
            finally:
                self._wal.abandon()
                self.manifest.abandon()
                for table in self.view.levels:
                    table.close()

    def abandon(self) -> None:
        """Let everything go and write nothing more, as a crash would."""
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
        """Whether something goes on that closing would wait for, or break off."""
        return bool(self._loading or self.snapshots.lsns() or self.upkeep.is_busy)

    def forked(self, failure: StoreClosed) -> None:
        """This process is the child of a fork(): the database is the parent's (M12)."""
        self.failure = failure
        self._writing = threading.Lock()  # another thread of the parent may have held it, and is not here to let it go
        self._visibility = threading.Lock()
        self._viewing = threading.Condition()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    @changes
    def put(self, key: Buffer, value: Buffer, *, sync: bool = True) -> None:
        """Set the value of a key."""
        if value is None:
            raise InvalidInput("a value must be bytes, not None", hint="`delete` removes a key", key=key)
        self.write({as_bytes(key): value}, sync=sync)

    @changes
    def delete(self, key: Buffer, *, sync: bool = True) -> None:
        """Remove a key; one that is not there is fine."""
        self.write({as_bytes(key): None}, sync=sync)

    @changes
    def write(self, batch: Mapping[bytes, Buffer | None], *, sync: bool = True, key: bytes = b"") -> int:
        """Make changes together: new values of keys, `None` for a key to delete; their lsn (0 for an empty batch).

        A `key` of 16 random bytes makes the call safe to repeat: a batch whose key was written lately is not written again.
        """
        items, call = checked_batch(batch), call_number(key) if key else 0
        if not items:
            return 0
        self.require_writable()
        with self._writing:
            if self.failure is not None:
                self.require()
            if self.view.memtable.bytes >= self.settings.memtable_bytes:
                self._make_room()
            if call and (done := self._calls.get(call)) is not None:
                wal, end, lsn = self._wal, self._wal.end, done
            else:
                wal, end, lsn = self._append(items, call)
        if sync:
            self._sync(wal, end)
        return lsn

    def _append(self, items: Items, call: int) -> tuple[KvWal, int, int]:
        """Write a batch and have readers see it: where, where its record ends, its lsn. REQUIRES the write lock."""
        wal, lsn = self._wal, self._next_lsn()
        record = encode_batch(lsn, items, call)
        try:
            end = wal.append(record)
        except BaseException as error:
            self._doubt(error)
            raise
        with self._visibility:
            self._lsn = lsn
            self.view.memtable.put_all(lsn, items, len(record), self.snapshots.newest)
        if call:
            self._calls.add(call, lsn)
        return wal, end, lsn

    def _next_lsn(self) -> int:
        """After a takeover not one that the former owner may have given to a batch that is lost."""
        return max(self._lsn + 1, self.first_lsn)

    @changes
    def sync(self) -> None:
        """Have everything that was written durable."""
        with self._writing:
            self.require()
            wal = self._wal
        self._sync(wal, wal.end)

    def _sync(self, wal: KvWal, end: int) -> None:
        try:
            wal.sync(end)
            self.check_owner()  # nothing is acknowledged that a second owner may already have cut off
        except BaseException as error:
            self._doubt(error)
            raise

    # ── memtables ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _make_room(self) -> None:
        """Wait while too many memtables or tables wait. REQUIRES the write lock, and lets it go meanwhile: nobody else
        waits behind a stalled writer."""
        while self.stalls.is_due:
            self._writing.release()
            try:
                self.stalls.wait(self._viewing)
            finally:
                self._writing.acquire()
            self.require()
        if self.view.memtable.bytes >= self.settings.memtable_bytes:  # else another writer has made room meanwhile
            self._freeze()

    def _freeze(self) -> None:
        """Go on in a new memtable and a new WAL. REQUIRES the write lock."""
        old, number = self._wal, self._wal.number + 1
        path = self.home.wal(number)
        new = KvWal.create(self.disk, path, number, self.owner)
        hit("lsm.freeze.created")
        try:
            # Else power loss could keep a batch of the new one and lose one of the old.
            self._sync(old, old.end)
            self._durable_lsn = self._lsn
            hit("lsm.freeze.synced")
            self.manifest.rotate_wal(old.number, number, self._lsn)
        except Exception as error:
            new.abandon()
            if isinstance(error, StoreUnusable):
                self._doubt(error)
            else:
                with suppress(StorageFault, FileNotFoundError):
                    self.disk.remove(path)
            raise
        hit("lsm.freeze.rotated")
        if self._calls:  # before the old log can be flushed, and go
            try:
                new.sync(new.append(encode_carried(self._lsn, self._calls.newest())))
            except BaseException as error:
                self._doubt(error)
                raise
        with self._viewing:
            view = self.view
            view.memtable.freeze()
            self.view = KvView(
                Memtable(), (Frozen(view.memtable, old.number, old.durable_end()), *view.frozen), view.levels
            )
        self._wal = new
        with suppress(StoreUnusable):  # it is synced; its closing mark is a courtesy
            old.close()
        self.upkeep.wake()

    @changes
    def flush(self) -> None:
        """Have everything that was written in tables."""
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

    # ── what upkeep and loads need ────────────────────────────────────────────────────────────────────────────────────
    def install(
        self, *, flushed: Frozen | None = None, added: Sequence[SSTable] = (), removed: Sequence[SSTable] = ()
    ) -> None:
        """Swap the view for one with a memtable less, tables more, tables less; and tell who waits for room."""
        with self._viewing:
            view = self.view
            frozen = tuple(memtable for memtable in view.frozen if memtable is not flushed)
            levels = view.levels.changed(added, removed) if added or removed else view.levels
            self.view = KvView(view.memtable, frozen, levels)
            self._viewing.notify_all()

    def fold(self) -> None:
        """Tell who follows the tables that they, or the logs, have changed."""
        if self.follower is not None:
            life = self.manifest.life
            self.is_recorded = self.follower.fold(lambda: self.view.levels, self.ends)
            if self.is_recorded:
                self.manifest.recorded(life)

    def ends(self) -> LsmEndsRecord:
        """How far the logs are durable, now: to be recorded outside of them (witnesses.py)."""
        lsn = self._durable_lsn
        manifest, snapshot = self.manifest.durable_end()
        wals = {frozen.wal: frozen.end for frozen in self.view.frozen}
        wal = self._wal
        wals[wal.number] = wal.durable_end()
        return LsmEndsRecord(
            end_row(0, manifest), snapshot, lsn, tuple(end_row(number, wals[number]) for number in sorted(wals))
        )

    def notify(self) -> None:
        """Something that writers wait for may have changed."""
        with self._viewing:
            self._viewing.notify_all()

    @changes
    def begin_load(self) -> int:
        """The lsn of a bulk load: everything written before is older than what it brings, everything after is newer."""
        self.require_writable()
        with self._writing:
            self.require()
            if self.view.memtable.entries:
                self._freeze()
            lsn = self._next_lsn()
            self.manifest.update_lsn(lsn)
            with self._visibility:
                self._lsn = lsn
                self._loading.add(lsn)
            return lsn

    def end_load(self, lsn: int) -> None:
        """A load is over, one way or the other."""
        with self._visibility:
            self._loading.discard(lsn)

    @property
    def loading(self) -> frozenset[int]:
        """Lsns of loads that are under way."""
        return frozenset(self._loading)

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def get(self, key: Buffer) -> bytes | None:
        """The value of a key, `None` if there is none."""
        if self.failure is not None:
            self.require_open()
        if type(key) is not bytes:
            key = as_bytes(key)
        view = self.view
        entry = view.memtable.entries.get(key)
        if entry is None:
            if not view.frozen:  # most reads: nothing is in memory but the memtable
                best = view.levels.get(key, LSN_MAX, None)
                return best[1] if best is not None else None
        elif entry[0] > view.levels.lsn_max:
            return entry[1]
        return view.get(key, LSN_MAX)

    def get_many(self, keys: Sequence[Buffer]) -> list[bytes | None]:
        """The values of keys, in their order, all as of one moment; `None` for a key that is not there."""
        with self.snapshot() as snapshot:
            return snapshot.get_many(keys)

    @property
    def last_lsn(self) -> int:
        """The lsn of the newest batch."""
        return self._lsn

    def snapshot(self) -> KvSnapshot:
        """The database as it is now, until the snapshot is closed."""
        with self._visibility:
            self.require_open()
            lsn, hidden = self._lsn, frozenset(self._loading)
            held = self.snapshots.hold((lsn, *(load - 1 for load in hidden)))
        return KvSnapshot(self, lsn, hidden, held)

    def batches(self, low: bytes, high: bytes | None, reverse: bool) -> Iterator[pa.RecordBatch]:
        """The range as of this call: the snapshot keeps what the scan reads from being overwritten in the memtable."""
        return self.snapshot().batches_then_close(low, high, reverse)

    def pairs(self, low: bytes, high: bytes | None, reverse: bool) -> Iterator[Iterable[Pair]]:
        """The same as pairs, some at a time."""
        return self.snapshot().pairs_then_close(low, high, reverse)

    def iterator(self) -> KvIterator:
        """A cursor over the database as it is now."""
        return KvIterator(self.snapshot())

    def stats(self) -> Stats:
        """What the database consists of, now."""
        manifest = self.manifest
        return stats_of(self.view, self.last_lsn, manifest.log_bytes, manifest.version, self.upkeep, self.stalls)

    # ── trouble ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def require(self) -> None:
        """Raise what has made the database unusable, if something has."""
        if (why := self.failure) is not None:
            raise type(why)(why.what, hint=why.hint, **why.where) from why.__cause__

    def require_open(self) -> None:
        """Raise if the database is closed: one that takes no more writes can still be read."""
        if isinstance(self.failure, StoreClosed):
            self.require()

    def _doubt(self, error: BaseException) -> None:
        """Take no more writes until the database is opened again: what is on disk is unknown."""
        if isinstance(error, (OutOfRange, StoreClosed)):
            return  # refused before anything was written
        hint = "fix the cause, then reopen the database"
        self._fail(poisoned_by(error, f"the database's log failed: {error}", hint=hint, path=self.home.path))

    def _fail(self, failure: QuireError) -> None:
        if self.failure is None:
            self.failure = failure
            if not isinstance(failure, StoreClosed):
                emit("error", "lsm.failed", path=self.home.path, error=str(failure))
        self.notify()

    def fail(self, error: BaseException) -> None:
        """The background met something after which nobody knows what is on disk."""
        self._doubt(error)
