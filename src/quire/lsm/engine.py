"""The key-value databases of a store: opens and closes them, makes snapshots and forks, and removes dropped databases.

The store's manifest has a row of kind `lsm` for each database; the database's own manifest is authoritative for its contents
(S1). A database is opened once per process; if it becomes unusable (M12), the next `open` recovers it. Unused databases are
closed, least recently used first (N1). Files are written before rows: a fork or snapshot gets its row when its copy is
complete (snapshots.py), and a directory without a row is garbage. A drop removes the row; the next sweep removes the files.
Each fork has its own file names for the tables that it shares.

Threads: any. Raises `UnknownDatabase`, `WrongKind`, `DatabaseTombstoned`, `UnknownSnapshot`, `NameTaken`, `ReadOnly`,
`Corruption`, `StoreClosed`."""

from __future__ import annotations

import os
import shlex
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from quire.core.barrier import changes, may_change
from quire.core.clock import Clock
from quire.core.closing import close_all
from quire.core.errors import Corruption, StoreClosed
from quire.core.events import emit
from quire.core.open_databases import OpenSet
from quire.core.read_only import refuse
from quire.core.settings import LsmSettings
from quire.durable import quarantine
from quire.durable.files import Disk
from quire.durable.names import LSM, LsmHome, check_name, lsm_home, lsm_number, lsm_snapshot_dir
from quire.durable.object_names import kv_backups_prefix
from quire.lsm.block_cache import BlockCache
from quire.lsm.kv import Kv
from quire.lsm.maintenance import KvBackground
from quire.lsm.projection import CompactionJobs, KvProjection
from quire.lsm.read_only import ReadOnlyKv
from quire.lsm.snapshots import FrozenCopy, FrozenKv, copy_frozen, copy_live, remove_home
from quire.lsm.table_options import table_options
from quire.lsm.witnesses import NO_STORE, Owner, StoreFacts
from quire.manifest import tables as t
from quire.manifest.leases import LentVersion
from quire.manifest.ops.base import Op
from quire.manifest.ops.databases import RegisterDb, SetDbPageSize
from quire.manifest.records import DbKind, DbRecord, DbStatus
from quire.manifest.snapshots import Anchor, RolledBack
from quire.manifest.store import ManifestStore
from quire.manifest.writability import Writability

if TYPE_CHECKING:
    from quire.lsm.repair import RepairReport
    from quire.manifest.snapshots import ForkOptions, SnapshotInfo
    from quire.objects.api import ObjectStore

MakeFiles = Callable[[str], object]

FILES_CREATED = b"lsm-files-1"
"""In a row's `config_hash`: the database's directory is on disk."""


class KvVersion(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot of a database as a value: its directory and its tables. `snapshot_id` is 0 for a version held by a lease."""

    db_id: int
    snapshot_id: int
    lsn: int
    directory: str
    sst_ids: tuple[int, ...]


class KvEngine:
    """The key-value databases of one store."""

    def __init__(self, *, manifest: ManifestStore, root: str, disk: Disk, clock: Clock, settings: LsmSettings) -> None:
        # constant after construction
        self._manifest = manifest
        self._root = root
        self._disk = disk
        self._clock = clock
        self._settings = settings
        self._store_id = _store_id(manifest)
        self.cache = BlockCache(settings.cache_bytes)
        self._background = KvBackground(settings.threads)
        # guarded by _lock
        self._lock = threading.RLock()
        self._open: OpenSet[Kv] = OpenSet(open_max=settings.open_max, idle_seconds=settings.idle_seconds, clock=clock)
        self._seen: set[int] = set()
        """Ids of databases that this process has opened for writing."""
        self._closed = False
        self._copies: weakref.WeakSet[FrozenKv] = weakref.WeakSet()
        """Snapshots that are open for reading."""
        manifest.env.fork_hooks.append(self._forked)
        manifest.cover(self)
        if not manifest.read_only:
            self.sweep()

    # ── databases ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @may_change
    def open(self, db: int | str, *, create: bool = False) -> Kv:
        """Return a key-value database, recovering it if it is not open. With `create`, register it if the name is unknown.

        In a store that was opened for reading, return the database for reading only."""
        with self._lock:
            self._require()
            if create and isinstance(db, str):
                db = self._manifest.find_or_register(db, DbKind.LSM)
            with self._manifest.read() as txn:
                db_id, record = txn.live(db, DbKind.LSM)
            kv = self._open.get(db_id)
            if kv is not None and kv.failure is None:
                return kv
            if kv is not None:
                kv.abandon()
            if self._manifest.read_only:
                return self._open.add(db_id, self._open_to_read(db_id, record))
            kv = self._open.add(db_id, self._recover(db_id, record))
            self._seen.add(db_id)
            self._close_unused(self._open.surplus())
            return kv

    def close_idle(self) -> int:
        """Close the databases that have been idle for `idle_seconds`. Return how many were closed."""
        with self._lock:
            return 0 if self._closed else self._close_unused(self._open.idle())

    def _close_unused(self, db_ids: Iterable[int]) -> int:
        """Close the databases that are not busy. REQUIRES the lock, so that none of them is opened meanwhile."""
        count = 0
        for db_id in db_ids:
            kv = self._open.peek(db_id)
            if kv is None or kv.is_busy:
                continue
            self._open.pop(db_id)
            count += 1
            try:
                kv.close()
            except Exception as error:  # the next `open` recovers it, and the other databases are closed
                emit("error", "lsm.close_failed", db_id=db_id, error=error)
        return count

    def _open_to_read(self, db_id: int, record: DbRecord) -> Kv:
        def line() -> int:
            with self._manifest.read() as txn:
                return txn.first_number()

        return ReadOnlyKv(
            self._disk,
            LsmHome(self._path(lsm_home(db_id))),
            self._owner(db_id),
            record.name,
            self._settings,
            self.cache,
            files_created=record.config_hash == FILES_CREATED,
            line=line,
        )

    def _recover(self, db_id: int, record: DbRecord) -> Kv:
        home = self._path(lsm_home(db_id))
        files_created = record.config_hash == FILES_CREATED
        if files_created and not self._disk.exists(home):
            hint = f"`quire kv repair {shlex.quote(record.name)}` shows what can be recovered"
            raise Corruption("the database's files are missing", hint=hint, path=home, name=record.name)
        jobs, projection = CompactionJobs(self._manifest, db_id), KvProjection(self._manifest, db_id)
        facts = self._facts(db_id, projection, files_created=files_created)
        try:
            kv = Kv.open(
                self._disk,
                home,
                self._settings,
                clock=self._clock,
                cache=self.cache,
                background=self._background,
                jobs=jobs,
                facts=facts,
            )
        except Corruption as error:
            error.hint = f"`quire kv repair {shlex.quote(record.name)}` shows what can be recovered"
            raise
        try:
            kv.check_owner = self._manifest.writer.check_owner
            kv.require_writable = Writability(self._manifest, db_id).require
            kv.barrier = self._manifest.barrier
            with self._manifest.read() as txn:
                kv.first_lsn = txn.first_number()
            self._manifest.cover(kv)
            kv.fold()
            # After the files exist: with this mark, missing files are damage and not a new database.
            if not files_created and record.status is DbStatus.ACTIVE:
                self._manifest.submit([SetDbPageSize(db_id, 0, 0, FILES_CREATED)]).result()
        except BaseException:
            kv.abandon()  # it is not registered as open: nothing else would close its files, and the next open writes to them
            raise
        return kv

    def _facts(self, db_id: int, projection: KvProjection, *, files_created: bool) -> StoreFacts:
        """Return the store's records of a database, with which its files are compared (witnesses.py)."""

        def set_aside(path: str, why: str) -> None:
            relative = os.path.relpath(path, self._root)
            quarantine.move(self._disk, self._root, relative, why=why, at_ms=self._clock.now_ms(), database=db_id)

        return StoreFacts(
            self._owner(db_id), files_created, projection.ends(), projection.rows(), set_aside, projection
        )

    def _owner(self, db_id: int) -> Owner:
        return Owner(self._store_id, db_id)

    def record_ends(self) -> None:
        """Record how far the logs of all open databases are durable.

        From then on, damage to records acknowledged before this call can be distinguished from a torn tail. Costs one commit
        for each database that was written to, and none per write."""
        for kv in self.databases().values():
            if kv.failure is None and kv.projection is not None:
                kv.projection.record(kv.ends)

    @may_change
    def repair(self, db: int | str, *, apply: bool = False, objects: ObjectStore | None = None) -> RepairReport:
        """Report what can be recovered of a database whose files are inconsistent. With `apply`, repair it and open it.

        Without `apply` nothing is changed. `objects`: the object store that is searched for backups of the database by name.
        """
        from quire.lsm.backup import find_table  # both load Arrow, and repairs are rare
        from quire.lsm.repair import apply_repair, survey

        if self._manifest.read_only:
            refuse("the store", path=self._root)
        with self._lock:
            self._require()
            with self._manifest.read() as txn:
                db_id, record = txn.live(db, DbKind.LSM)
            kv = self._open.pop(db_id)
            if kv is not None:
                kv.close()  # no thread may write while files are compared; holders have to open it again
            facts = self._facts(db_id, KvProjection(self._manifest, db_id), files_created=True)
            home = kv_backups_prefix(self._manifest.feed.store_id())
            fetch = partial(find_table, objects, record.name, home) if objects is not None else None
            with closing(survey(self._disk, LsmHome(self._path(lsm_home(db_id))), facts, fetch)) as state:
                needed = state.report(applied=False).is_needed
                if apply and needed:
                    apply_repair(state, table_options(self._settings))
                report = state.report(applied=apply and needed)
            if report.applied:
                emit("warning", "lsm.repaired", name=record.name, db_id=db_id, lost=len(report.lost))
                self.open(db_id)
            return report

    def _path(self, relative: str) -> str:
        return f"{self._root}/{relative}"

    def close_database(self, db: int | str) -> None:
        """Close a database if it is open."""
        with self._manifest.read() as txn:
            db_id = txn.database_id(db) if isinstance(db, str) else db
        with self._lock:
            kv = self._open.pop(db_id)
        if kv is not None:
            kv.close()

    def databases(self) -> dict[int, Kv]:
        """Return the open databases by id."""
        with self._lock:
            return {db_id: kv for db_id in self._open if (kv := self._open.peek(db_id)) is not None}

    # ── versions ──────────────────────────────────────────────────────────────────────────────────────────────────────
    @changes
    def snapshot(
        self, db: int | str, name: str = "", *, tags: dict[str, str] | None = None, expires_at_ms: int = 0
    ) -> SnapshotInfo:
        """Take a snapshot of a database, named or anonymous, that expires at `expires_at_ms` if that is not 0."""
        with self._lock:
            if name:
                check_name("snapshot", name)
            with self._copied(db) as (db_id, copy):
                anchor = Anchor(copy.lsn, copy.number)
                return self._manifest.snapshots.publish(
                    db_id, name, anchor=anchor, tags=tags, expires_at_ms=expires_at_ms
                )

    @changes
    def rollback(self, name: str, *, to: object) -> RolledBack:
        """Roll a database back to one of its snapshots, as a new version (`rollback.py`)."""
        self._require()
        from quire.lsm.rollback import roll_back  # loads Arrow, which few programs that open a store need

        return roll_back(self._manifest, self, name, to)

    def lend(self, db: int | str, seconds: float, *, lease_id: int = 0) -> tuple[int, KvVersion]:
        """Copy a database as it is now, without a snapshot row, under a lease. Return (id of the lease, the copy).

        A sweep removes the copy after the lease has expired. With `lease_id` the copy is added to that lease."""
        with self._lock, self._copied(db) as (db_id, copy):
            tables = copy.state(self._disk).sstables
            version = LentVersion(db_id, copy.lsn, copy.number)
            lease_id = self._manifest.leases.hold([version], seconds, lease_id=lease_id)
        return lease_id, KvVersion(db_id, 0, copy.lsn, copy.path, tuple(entry.id for entry in tables))

    @contextmanager
    def _copied(self, db: int | str) -> Iterator[tuple[int, FrozenCopy]]:
        """Yield (id, a new copy of a database as it is now). The copy is removed if the block fails. REQUIRES the lock."""
        kv = self.open(db)
        with self._manifest.read() as txn:
            db_id, _ = txn.live(db, DbKind.LSM)
        # By directories, not by rows: the copy of a failed or dropped snapshot may still be there.
        number = 1 + max(self._snapshot_numbers(db_id), default=0)
        target = self._path(lsm_snapshot_dir(db_id, number))
        with self._removed_on_failure(target):
            lsn = copy_live(kv, target, self._owner(db_id), number)
            yield db_id, FrozenCopy(target, self._owner(db_id), number, lsn)

    @contextmanager
    def _removed_on_failure(self, target: str) -> Iterator[None]:
        """Remove the directory `target` if the block, which makes it and commits its row, fails."""
        try:
            yield
        except Exception:
            # Not if the commit may have happened: a row without files is damage, files without a row are left to a sweep.
            if self._manifest.writer.failure is None:
                remove_home(self._disk, target)
            raise

    def open_snapshot(self, db: int | str, snapshot: int | str) -> FrozenKv:
        """Open a snapshot, by name or id, for reading."""
        self._require()
        opened = FrozenKv(self._disk, self._copy(db, snapshot), self.cache)
        self._copies.add(opened)
        return opened

    def version(self, db: int | str, snapshot: int | str) -> KvVersion:
        """Return a snapshot as a value, sufficient to read it from another process that can access the directory."""
        info, copy = self._manifest.snapshots.get(db, snapshot), self._copy(db, snapshot)
        ids = tuple(entry.id for entry in copy.state(self._disk).sstables)
        return KvVersion(info.db_id, info.snapshot_id, info.anchor_lsn, copy.path, ids)

    def _copy(self, db: int | str, snapshot: int | str) -> FrozenCopy:
        """Return where a snapshot's files are, with the number and lsn from its row."""
        info = self._manifest.snapshots.get(db, snapshot)
        with self._manifest.read() as txn:
            txn.live(info.db_id, DbKind.LSM)
            record = txn.snapshot(info.db_id, info.snapshot_id)
        assert record is not None
        number = record.anchor_segment_id
        path = self._path(lsm_snapshot_dir(info.db_id, number))
        return FrozenCopy(path, self._owner(info.db_id), number, record.anchor_lsn)

    @changes
    def fork(
        self, db: int | str, new_name: str, *, at: int | str | None = None, options: ForkOptions | None = None
    ) -> int:
        """Fork a database as it is now, or as of snapshot `at`. Return the id of the new database.

        It inherits the namespace and tags of its source."""
        check_name("database", new_name)
        with self._lock:
            self._require()
            with self._manifest.read() as txn:
                source, record = txn.live(db, DbKind.LSM)
            new_id = self._manifest.reserve_db_id()
            target = self._path(lsm_home(new_id))
            with self._removed_on_failure(target):
                snapshot_id, lsn = 0, 0
                if at is None:
                    lsn = copy_live(self.open(source), target, self._owner(new_id))
                else:
                    info = self._manifest.snapshots.get(source, at)
                    snapshot_id, lsn = info.snapshot_id, info.anchor_lsn
                    copy_frozen(self._disk, self._copy(source, at), target, self._owner(new_id))
                kept = {
                    "namespace_id": record.namespace_id,
                    "tags": {**record.tags, **(options.tags if options else {})},
                }
                row = self._registration(new_id, new_name, source, snapshot_id, lsn, **kept)
                self._manifest.submit([row]).result()
        emit("info", "lsm.forked", source=record.name, name=new_name, db_id=new_id)
        return new_id

    def _registration(
        self, db_id: int, name: str, parent: int = 0, snapshot_id: int = 0, lsn: int = 0, **kept: Any
    ) -> Op:
        """Return the operation that registers a database whose files exist."""
        return RegisterDb(
            db_id,
            DbRecord(
                name=name,
                kind=DbKind.LSM,
                created_at_ms=self._clock.now_ms(),
                config_hash=FILES_CREATED,
                parent_db_id=parent,
                parent_snapshot_id=snapshot_id,
                parent_lsn=lsn,
                **kept,
            ),
        )

    @changes
    def adopt(self, name: str, make: MakeFiles, *, namespace_id: int = 0) -> int:
        """Register a new database whose files are written by `make(directory)`, e.g. a restored backup. Return its id."""
        check_name("database", name)
        with self._lock:
            self._require()
            db_id = self._manifest.reserve_db_id()
            target = self._path(lsm_home(db_id))
            with self._removed_on_failure(target):
                make(target)
                self._manifest.submit([self._registration(db_id, name, namespace_id=namespace_id)]).result()
            return db_id

    # ── dropped databases ─────────────────────────────────────────────────────────────────────────────────────────────
    def sweep(self) -> int:
        """Remove the directories of databases and snapshots that have no row. Return how many were removed."""
        # A commit's outcome may be unknown then: a row that cannot be read now may be there after the next open.
        if self._manifest.writer.failure is not None:
            return 0
        removed = 0
        with self._lock:
            try:
                names = self._disk.names(self._path(LSM))
            except FileNotFoundError:
                return 0
            with self._manifest.read() as txn:
                leases, refused = self._manifest.leases, txn.refused_databases()
                live: dict[int, set[int]] = {}
                for db_id in map(_hex8, names):
                    record = txn.database(db_id) if db_id is not None and db_id not in refused else None
                    if db_id is None or record is None or record.kind is not DbKind.LSM:
                        continue
                    if record.status is not DbStatus.TOMBSTONED:
                        kept = {row.anchor_segment_id for _, row in txn.scan(t.SNAPSHOT_INDEX, db_id)}
                        live[db_id] = kept | leases.copies(db_id)
            first_unused_id = self._manifest.first_db_id
            for name in names:
                db_id = _hex8(name)
                if db_id is None or db_id in refused or not (db_id in self._seen or db_id < first_unused_id):
                    continue
                if db_id not in live:
                    kv = self._open.pop(db_id)
                    if kv is not None:
                        kv.abandon()
                    remove_home(self._disk, self._path(lsm_home(db_id)))
                    removed += 1
                    continue
                for number in set(self._snapshot_numbers(db_id)) - live[db_id]:
                    remove_home(self._disk, self._path(lsm_snapshot_dir(db_id, number)))
                    removed += 1
        return removed

    def _snapshot_numbers(self, db_id: int) -> list[int]:
        try:
            names = self._disk.names(f"{self._path(lsm_home(db_id))}/snapshots")
        except FileNotFoundError:
            return []
        return [number for name in names if (number := lsm_number(name, "")) is not None]

    # ── lifecycle ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def close(self) -> None:
        """Close every database, then raise the first failure if there was one. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            opened = [kv for db_id in self._open if (kv := self._open.pop(db_id)) is not None]
        try:
            close_all(opened)
        finally:
            self._background.stop()

    def _require(self) -> None:
        if self._closed:
            raise StoreClosed("the store is closed", hint="open it again")

    def _forked(self) -> None:
        """Invalidate everything open in the child of a fork(): the files belong to the parent."""
        self._closed = True
        self._lock = threading.RLock()
        failure = StoreClosed("the database was opened by the parent of a fork()", hint="open the store again")
        self._background.forked()
        for kv in self._open.cores():
            kv.forked(failure)
        for copy in list(self._copies):
            copy.failure = failure


def _store_id(manifest: ManifestStore) -> bytes:
    with manifest.read() as txn:
        row = txn.get(t.META, "store_id")
    return uuid.UUID(row.text).bytes if row is not None and row.text else NO_STORE


def _hex8(name: str) -> int | None:
    with suppress(ValueError):
        if len(name) == 8 and name == name.lower():
            return int(name, 16) or None
    return None
