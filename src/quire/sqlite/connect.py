"""SQLite connections to the databases of a store, and forks of a database at any version that can still be read.

A connection is a plain apsw connection opened with our VFS: `shop`, or `file:shop?at=monday`, `?epoch=4711`,
`?time=2026-01-31T12:00`. Attached names are resolved in the same way. A version other than the newest is read-only and is
held for as long as the connection is open: by its snapshot's row or by a lease. Names are resolved when a connection is
opened, so renaming a database does not affect its connections. When the store is closed, connections that are still open fail
with `SQLITE_IOERR` and the reason. The *keeper* is a thread that renews the leases of long read transactions and releases
versions that are no longer read.

Threads: any; a connection belongs to one thread at a time. Raises `UnknownDatabase`, `WrongKind`, `UnknownSnapshot`,
`SnapshotGone`, `OutOfRange`, `InvalidInput`, `ReadOnly`, `NameTaken`, and apsw's errors.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from urllib.parse import quote, urlencode

import apsw

from quire.core.barrier import Barrier
from quire.core.errors import InvalidInput, NameTaken, QuireError, ReadOnly, StoreClosed, UnknownDatabase
from quire.core.ids import Epoch
from quire.core.time_parsing import parse_epoch_or_time, requested_version, version_parameter
from quire.durable.names import check_name
from quire.manifest.records import DbKind
from quire.manifest.snapshots import Anchor, ForkOptions, RolledBack, SnapshotInfo
from quire.manifest.store import ManifestStore
from quire.pages.anchors import publish_at
from quire.pages.catalog import find_database
from quire.pages.engine import PageEngine
from quire.pages.framemap import FrameMap, Regions
from quire.pages.snapshot import Snapshot
from quire.pages.transaction import PageGuard
from quire.pages.view import ViewReader
from quire.sqlite.databases import SharedDatabase, reader_tags
from quire.sqlite.files import PageReader, ReadOnlyFile
from quire.sqlite.live import LiveFile
from quire.sqlite.rollback import roll_back
from quire.sqlite.vfs import QuireVfs, VfsFile
from quire.sqlite.vfs_shim import shim_library

KEEPER_SECONDS = 1.0
RENEW_ROUNDS = 5
"""Idle versions are released within a second or two; leases of 30 s are renewed every five."""

SQLITE_PAGE_SIZE = 4096
"""SQLite's default page size for a new database, in bytes."""

CACHE_KIB = 65_536
"""KiB of pages that a connection caches, at most. SQLite's 2 MiB are meant for files: here a page read is a Python call."""

Connection = apsw.Connection
At = str | int | Epoch | datetime
"""A snapshot's name or another text that `snapshots.find` accepts (2 hours ago), an lsn, an epoch, or a time with its zone."""


_live_files: weakref.WeakKeyDictionary[Connection, LiveFile] = weakref.WeakKeyDictionary()
"""The main database of each read-write connection."""


def is_usable(connection: Connection) -> bool:
    """Return whether the database of a connection has not failed (M12) and its store was not closed. If it has failed, a new
    connection opens it again."""
    file = _live_files.get(connection)
    return file is None or file.is_usable


def newest_commit(connection: Connection) -> PageGuard | None:
    """Return the newest commit of a connection's database, which may not be durable yet. Waiting for it covers everything that
    the connection has written or read: the log has one order. None if nothing was ever committed, or for a version."""
    file = _live_files.get(connection)
    return None if file is None else file.newest_commit()


class SqliteDatabases:
    """The SQLite front end of one opened store."""

    def __init__(
        self,
        *,
        manifest: ManifestStore,
        engine: PageEngine,
        page_size: int = SQLITE_PAGE_SIZE,
        read_only: bool = False,
        attach_creates: bool = True,
    ) -> None:
        # constant after construction
        self._manifest = manifest
        self._engine = engine
        self._page_size = page_size
        self._read_only = read_only
        self._attach_creates = attach_creates
        self._pid = os.getpid()
        self._shim = None if read_only else shim_library()
        self._vfs = QuireVfs("quire", self._open_file, self._shim)
        self._stopping = threading.Event()
        # per thread: the file it opened last
        self._opened = threading.local()
        # guarded by _lock
        self._lock = threading.Lock()
        self._databases: weakref.WeakValueDictionary[int, SharedDatabase] = weakref.WeakValueDictionary()
        """Databases that have connections: without any, the page engine may close the database."""
        self._recently_used: dict[int, SharedDatabase] = {}
        """Databases that had a connection recently, kept for the next one until a second or two pass without a commit."""
        self._files: weakref.WeakSet[LiveFile | ReadOnlyFile] = weakref.WeakSet()
        self._keeper: threading.Thread | None = None
        self._closed = False

    @property
    def vfs_name(self) -> str:
        """The name of the VFS, for `ATTACH 'file:shop?vfs=…'` in a connection that we did not open."""
        return self._vfs.name

    # ── connecting ────────────────────────────────────────────────────────────────────────────────────────────────────
    def connect(
        self,
        name: str,
        *,
        at: At | None = None,
        create: bool = False,
        page_size: int = 0,
        read_only: bool = False,
        timeout: float = 5.0,
    ) -> Connection:
        """Open a connection to a database, to its newest version or to the version that was current `at` a moment."""
        self._check()
        if name == ":memory:":
            raise InvalidInput("SQLite reserves this name for databases in memory", hint="use another name", name=name)
        if at is None and not self._read_only and not read_only:
            return self._connect_newest(name, create, page_size, timeout)
        if create or page_size:
            raise ReadOnly(
                "only the owner can create a database, and only without `at` and `read_only`",
                hint="omit create and page_size",
                name=name,
            )
        if at is None:
            return self._open(name, {}, timeout, read_only=True)
        return self._open(name, dict([version_parameter(at)]) | {"immutable": "1"}, timeout, read_only=True)

    def fork(self, name: str | int, new_name: str, *, at: At, options: ForkOptions | None = None) -> int:
        """Create a database that begins as another one was `at` a snapshot, an lsn, an epoch or a time. Return its id."""
        self._check()
        if self._read_only:
            raise ReadOnly("only the owner can fork a database", hint='open the store with mode="rw"', name=new_name)
        version_parameter(at)  # raises if `at` does not name a version
        return fork_at(self._manifest, self._engine, name, new_name, at, options)

    def rollback(self, name: str, *, to: At) -> RolledBack:
        """Set a database back to its state at a snapshot, an lsn, an epoch or a time, as a new version (`rollback.py`)."""
        self._check()
        if self._read_only:
            raise ReadOnly("only the owner can roll a database back", hint='open the store with mode="rw"', name=name)
        version_parameter(to)  # raises if `to` does not name a version
        return roll_back(self._manifest, self._engine, name, to)

    def _connect_newest(self, name: str, create: bool, page_size: int, timeout: float) -> Connection:
        database = self._database(self._find(name, create=create))
        if page_size or database.page_size():
            database.open(page_size)
        connection = self._open(name, {}, timeout)
        try:
            store = database.current()
            wanted = self._page_size if store is None else store.page_size
            if wanted != SQLITE_PAGE_SIZE and (store is None or not store.wal.written.size_pages):
                connection.pragma("page_size", wanted)
        except BaseException:
            connection.close()
            raise
        return connection

    def _open(self, name: str, parameters: Mapping[str, str], timeout: float, *, read_only: bool = False) -> Connection:
        uri = f"file:{quote(name, safe='')}" + (f"?{urlencode(parameters, quote_via=quote)}" if parameters else "")
        # ATTACH uses the flags of its connection: with CREATE it makes a database, as it would make a file.
        writing = apsw.SQLITE_OPEN_READWRITE | (apsw.SQLITE_OPEN_CREATE if self._attach_creates else 0)
        access = apsw.SQLITE_OPEN_READONLY if read_only else writing
        self._opened.file, self._opened.main = None, True
        try:
            connection = apsw.Connection(uri, flags=access | apsw.SQLITE_OPEN_URI, vfs=self._vfs.name)
        except apsw.CantOpenError as error:
            if isinstance(error.__cause__, QuireError):
                raise error.__cause__ from None  # callers handle quire's errors, not apsw's
            raise
        finally:
            self._opened.main = False
        if self._opened.file is not None and (file := self._opened.file()) is not None:
            file.connection = weakref.ref(connection)
            _live_files[connection] = file
        connection.set_busy_timeout(int(timeout * 1000))
        if (barrier := self._manifest.barrier) is not None and not read_only:
            _wait_after_commits(connection, barrier)
        # The pragma reads the schema. A malformed schema is reported by the first statement, as in SQLite, so that a user can
        # connect and repair it (`PRAGMA writable_schema`). Such a connection keeps SQLite's default cache.
        try:
            connection.pragma("cache_size", -CACHE_KIB)
        except apsw.CorruptError as error:
            if isinstance(error.__cause__, QuireError):  # not the schema: stored data is damaged
                raise
        return connection

    def _find(self, name: str, *, create: bool = False) -> int:
        db = self._manifest.find_or_register(name, DbKind.PAGES) if create else name
        with self._manifest.read() as txn:
            return find_database(txn, db)[0]

    def _database(self, db_id: int) -> SharedDatabase:
        with self._lock:
            database = self._databases.get(db_id)
            if database is None:
                database = self._databases[db_id] = SharedDatabase(db_id, self._engine, self._manifest)
            self._recently_used[db_id] = database
            return database

    # ── files that SQLite opens ───────────────────────────────────────────────────────────────────────────────────────
    def _open_file(self, name: str, parameters: Mapping[str, str], create: bool) -> tuple[VfsFile, bool]:
        """Open a file for the VFS: for our own connections, and for ATTACH and VACUUM INTO, which alone may create."""
        self._check()
        if requested_version(parameters) is not None:
            return self._register_file(ReadOnlyFile.fixed(self._version(self._find(name), parameters))), True
        if self._read_only:
            return self._register_file(self._published(self._find(name))), True
        create = create and not getattr(self._opened, "main", False)
        database = self._database(self._find(name, create=create))
        file = LiveFile(database, self._vfs, self._shim)
        self._opened.file = weakref.ref(file)
        return self._register_file(file), False

    def _version(self, db_id: int, parameters: Mapping[str, str]) -> PageReader:
        """Open a version that does not change."""
        kind, text = requested_version(parameters) or ("at", "")
        moment: SnapshotInfo | Epoch | datetime | int
        if kind == "at":
            moment = self._manifest.snapshots.find(db_id, text)
        else:
            moment = parse_epoch_or_time(kind, text, now_ms=self._manifest.clock.now_ms())
        if isinstance(moment, SnapshotInfo):
            return self._engine.open_view(db_id, moment.snapshot_id)
        if self._read_only:
            return self._engine.open_published_at(db_id, moment, tags=reader_tags())
        store = self._engine.open(db_id)
        if not isinstance(moment, int) or moment <= store.wal.written.lsn:
            store.wal.sync()  # `at` may lie in commits that are written but not durable; only durable ones are found
        return store.open_snapshot(at=moment, tags=reader_tags()).__enter__()  # entered, so that it renews its lease

    def _published(self, db_id: int) -> ReadOnlyFile:
        def newest_lsn() -> int:
            with self._manifest.read() as txn:
                state = txn.wal_state(db_id)
            return state.last_applied_lsn if state is not None else 0

        return ReadOnlyFile.published(lambda: self._engine.open_published(db_id, tags=reader_tags()), newest_lsn)

    # ── the keeper ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _register_file(self, file: LiveFile | ReadOnlyFile) -> VfsFile:
        file.vfs = self._vfs
        with self._lock:
            self._files.add(file)
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._keeper_loop, name="quire-sqlite", daemon=True)
                self._keeper.start()
        return file

    def _keeper_loop(self) -> None:
        rounds = 0
        while not self._stopping.wait(KEEPER_SECONDS):
            rounds += 1
            self.run_keeper_round(renew=rounds % RENEW_ROUNDS == 0)

    def run_keeper_round(self, *, renew: bool = True) -> None:
        """Run one round of the keeper."""
        with self._lock:
            files, databases = list(self._files), list(self._databases.values())
        for database in databases:
            if database.newest.drop_if_idle():
                with self._lock:
                    self._recently_used.pop(database.db_id, None)
        for file in files:
            if renew:
                file.renew()
            with suppress(QuireError):
                file.release_idle()

    # ── closing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def close(self) -> None:
        """Refuse new connections; open ones fail from now on."""
        self._closed = True
        self._stopping.set()
        if self._keeper is not None:
            self._keeper.join()
        why = StoreClosed("the store is closed", hint="open it again, and connect again")
        for database in list(self._databases.values()):
            database.closed = why
        for file in list(self._files):
            file.shut_down(why)
        self.run_keeper_round(renew=False)

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise StoreClosed("this store was opened by the parent of a fork()", hint="open it again in this process")
        if self._closed:
            raise StoreClosed("the store is closed", hint="open it again")


def _wait_after_commits(connection: Connection, barrier: Barrier) -> None:
    """Make every statement that commits wait for the archive (A9).

    SQLite reports the end of a statement after its commit, when its locks are released, and apsw propagates an exception from
    there. So the caller gets the error for a transaction that is committed.
    """
    ended = weakref.ref(connection)

    def after(_: object) -> None:
        if (open_connection := ended()) is not None and open_connection.getautocommit():
            barrier.settle()

    connection.trace_v2(apsw.SQLITE_TRACE_PROFILE, after, id=barrier)


RESTORED_AT_ONCE = 1_024
"""Pages that are read together while a fork is set back."""
TAGS = {"hold": "fork"}


def fork_at(
    manifest: ManifestStore,
    engine: PageEngine,
    name: str | int,
    new_name: str,
    at: At,
    options: ForkOptions | None = None,
) -> int:
    """Create a database that begins as another one was `at` a snapshot's name, an lsn, an epoch or a time. Return its id."""
    with manifest.read() as txn:
        db_id, _ = find_database(txn, name)
    if isinstance(at, str):
        moment = manifest.snapshots.find(db_id, at)
        if isinstance(moment, SnapshotInfo):
            return engine.fork(db_id, new_name, at=moment.snapshot_id, options=options)
        at = moment
    _require_free(manifest, new_name)
    store = engine.open(db_id)
    lsn = at.lsn if isinstance(at, Epoch) else at
    if not isinstance(lsn, int) or lsn <= store.wal.written.lsn:
        store.wal.sync()  # `at` may lie in commits that are written but not durable; only durable ones are found
    with store.open_snapshot(at=at, tags=TAGS) as version:
        if isinstance(version, ViewReader):
            return _from_kept(manifest, engine, db_id, new_name, version, options)
        return _anchored(manifest, engine, db_id, new_name, version, options)


def unfinished_name(new_name: str) -> str:
    """Return the name of a fork while it is being set back."""
    return f"{new_name}.unfinished"


def _require_free(manifest: ManifestStore, name: str) -> None:
    """Raise early if a name is taken. The manifest checks again when the fork is committed."""
    check_name("database", name)
    if (db_id := _named(manifest, name)) is not None:
        raise NameTaken("a database with this name already exists", hint="choose another name", name=name, db_id=db_id)


def _named(manifest: ManifestStore, name: str) -> int | None:
    with suppress(UnknownDatabase), manifest.read() as txn:
        return txn.database_id(name)
    return None


def _anchored(
    manifest: ManifestStore,
    engine: PageEngine,
    db_id: int,
    new_name: str,
    version: Snapshot,
    options: ForkOptions | None,
) -> int:
    """Fork, without copying, a version that the log still holds. `version` is its lease."""
    engine.flush(db_id)  # a fork pins sealed segments

    def fork(db_id: int, anchor: Anchor) -> int:
        return manifest.snapshots.fork(db_id, new_name, anchor=anchor, options=options)

    return publish_at(manifest, db_id, version.mark, fork)


def _from_kept(
    manifest: ManifestStore,
    engine: PageEngine,
    db_id: int,
    new_name: str,
    version: ViewReader,
    options: ForkOptions | None,
) -> int:
    """Fork the snapshot behind a kept version and set later pages back. Until that is done the fork has an unfinished name.

    A fork that fails is dropped. One left by a crash is listed by `quire ls` and dropped by the next attempt.
    """
    snapshot_id = version.view.snapshot_id
    with engine.open_view(db_id, snapshot_id) as snapshot:
        if snapshot.lsn == version.lsn:
            return engine.fork(db_id, new_name, at=snapshot_id, options=options)
        unfinished = unfinished_name(new_name)
        if (left := _named(manifest, unfinished)) is not None:
            manifest.drop_db(left).result()
        fork_id = engine.fork(db_id, unfinished, at=snapshot_id, options=options)
        try:
            _restore_pages(engine, fork_id, version, snapshot)
            manifest.rename_db(fork_id, new_name).result()
        except BaseException:
            manifest.drop_db(fork_id).result()
            raise
    return fork_id


def _restore_pages(engine: PageEngine, fork_id: int, version: ViewReader, snapshot: ViewReader) -> None:
    with engine.open(fork_id).begin() as txn:
        if version.size_pages < snapshot.size_pages:
            txn.truncate(version.size_pages)
        pages = list(_changed_since(engine, version, snapshot))
        for start in range(0, len(pages), RESTORED_AT_ONCE):
            txn.write_pages(version.read_pages(pages[start : start + RESTORED_AT_ONCE], cold=True))
        guard = txn.commit()
    guard.result()


def _changed_since(engine: PageEngine, version: ViewReader, snapshot: ViewReader) -> Iterator[int]:
    """Yield the pages of a version that differ in its snapshot: written after the version, or truncated."""
    newest = FrameMap.of(Regions(engine.sources), snapshot.view.pins, snapshot.lsn)
    for page in newest:
        location = newest.find(page)
        if location is not None and location[0] > version.lsn and page < min(version.size_pages, snapshot.size_pages):
            yield page
    yield from range(snapshot.size_pages, version.size_pages)
