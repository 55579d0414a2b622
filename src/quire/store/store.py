"""`Store`: an opened store, the public interface to all engines. How it is opened: open.py, opening.py.

Terms
  owner    the one process that holds the store's lock and may change it
  reader   a process that opened the store with mode="r": it sees snapshots, writes nothing, takes no lock

Rules
  1. `Store` only delegates: the work is done by the manifest, the engines and the object store.
  2. A handle belongs to the process that opened it: after fork(), using it in the child raises `StoreClosed` (M12), and
     the lock stays with the parent.
  3. The object store is loaded and opened on first use: light commands need no cloud client.

Threads: any; `close` must be called by one thread.
Raises `StoreClosed`, `ReadOnly`, `InvalidInput`, and for databases `UnknownDatabase`, `NameTaken`, `InvalidName`,
`StillReferenced`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from quire.core.barrier import changes, may_change
from quire.core.errors import InvalidInput, ReadOnly, StoreClosed, WrongKind
from quire.core.events import emit
from quire.core.ids import Epoch
from quire.core.settings import StoreSettings
from quire.jobs.mirror.change_detection import newest_versions
from quire.jobs.residency import evict_database, hydrate_database
from quire.manifest.ops.databases import SetDbOptions
from quire.manifest.records import DbKind, DbStatus, JobKind
from quire.manifest.snapshots import ForkOptions
from quire.service.tokens import Credentials
from quire.service.values import DatabaseFilter, DatabaseFilterOptions, DatabaseInfo, DroppedDatabase, StoreInfo
from quire.store import bulk, layout, object_location
from quire.store.backup import back_up
from quire.store.heavy import Heavy
from quire.store.info import (
    compression_named,
    database_info,
    dropped_databases,
    live_databases,
    recorded_archive_status,
    status_named,
    store_info,
)
from quire.store.kind_names import kind_named
from quire.store.mirrors import Mirrors
from quire.store.namespaces import Namespaces
from quire.store.why import why
from quire.store.wiring import Wiring

if TYPE_CHECKING:
    from quire.archive.archiver import Archiver
    from quire.archive.backup_recorder import BackupRecorder
    from quire.durable.files import Disk
    from quire.durable.locks import FileLock
    from quire.jobs.context import JobContext
    from quire.jobs.maintenance import Round, Upkeep
    from quire.jobs.worker import Worker
    from quire.lsm.engine import KvEngine
    from quire.lsm.kv import Kv
    from quire.manifest.feed import ChangeFeed
    from quire.manifest.jobqueue import Job
    from quire.manifest.reads import ReadTxn
    from quire.manifest.snapshots import RolledBack, SnapshotInfo
    from quire.manifest.store import ManifestStore
    from quire.objects.api import ObjectStore
    from quire.objects.options import StoreOptions
    from quire.objects.ownership import OwnerState
    from quire.pages.engine import PageEngine
    from quire.pages.view import SnapshotView
    from quire.service.server import Server
    from quire.service.web.server import WebServer
    from quire.sqlite.connect import At, Connection
    from quire.sqlite.followers import FileFollowers
    from quire.store.backup import BackedUp
    from quire.store.backup import Progress as BackupProgress
    from quire.store.restoring_database import CopyOpener, RestoredDatabase
    from quire.store.write_permission import ObjectRights
    from quire.stream.engine import StreamEngine
    from quire.stream.stream import Stream

Mode = Literal["rw", "r"]


class Store:
    """An opened store, returned by `quire.open`. Use it as a context manager."""

    _open_copy: CopyOpener
    """Opens an archived moment, for `restore_db` and drills. Set by `quire.open`: it opens stores, which this class cannot."""

    def __init__(
        self,
        path: str,
        settings: StoreSettings,
        manifest: ManifestStore,
        lock: FileLock | None,
        disk: Disk,
        backup_recorder: BackupRecorder | None = None,
    ) -> None:
        # constant after construction
        self.path = path
        self.settings = settings
        self._manifest = manifest
        self._lock = lock
        self._disk = disk
        self._backup_recorder = backup_recorder
        self.archive: Archiver | None = None
        """Keeps a copy of the store in its bucket; `None` if `archive.mode` is off."""
        self._pid = os.getpid()
        self.copy_of = ""
        """The URL of the archive that this is a read-only copy of (`quire.open_archive`)."""
        self.after_close: Callable[[], None] | None = None
        self.moved_objects = 0
        """Number of objects that were checked in their new place, if the store was opened with `moved=True`."""
        self._wiring = Wiring(
            path=path, settings=settings, manifest=manifest, disk=disk, objects_url=layout.objects_url(path, settings)
        )
        # owned by the threads that open and close the store
        self._upkeep_timer: threading.Timer | None = None
        self._servers: list[Server | WebServer] = []
        self._closed = False

    # ── lifecycle ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def close(self) -> None:
        """Commit what is queued, close all parts, release the lock. A second call, or one in a forked child, does nothing.

        A part that cannot be closed does not keep the others from being closed; its error is raised at the end.
        """
        if self._closed or self._pid != os.getpid():
            return
        if (
            not self._manifest.read_only
        ):  # before any part is closed: the manifest could not be, and would lose its lock
            self._manifest.writer.refuse_nested()
        with ExitStack() as closing:  # callbacks run in reverse order, all of them even if one raises
            if self.after_close is not None:
                closing.callback(self.after_close)
            if self._lock is not None:
                closing.callback(self._lock.close)
            closing.callback(self._manifest.close)
            closing.callback(self._wiring.close_stores)
            if self.archive is not None:  # closed after the databases and the writer, whose last changes it uploads
                closing.callback(self.archive.close)
                closing.callback(self._manifest.writer.close)
            closing.callback(self._wiring.close)
            closing.callback(self._refuse)
            for server in reversed(self._servers):  # first: servers answer pending calls from an open store
                closing.callback(server.close)

    def _refuse(self) -> None:
        self._closed = True
        if self._upkeep_timer is not None:
            self._upkeep_timer.cancel()

    @property
    def is_open(self) -> bool:
        """Whether this process can use the store."""
        return not self._closed and self._pid == os.getpid()

    def __enter__(self) -> Self:
        self._check()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise StoreClosed(
                "this store was opened by the parent of a fork()", hint="open it again in this process", path=self.path
            )
        if self._closed:
            raise StoreClosed("the store is closed", hint="open it again", path=self.path)

    # ── parts ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def mode(self) -> Mode:
        """ "rw" for the owner, "r" for a reader."""
        return "r" if self._lock is None else "rw"

    @property
    def disk(self) -> Disk:
        """The disk through which the store's files are opened."""
        return self._disk

    @property
    def backup_recorder(self) -> BackupRecorder:
        """Records changes for a backup. Only an owner has one."""
        if self._backup_recorder is None:
            raise ReadOnly("only the owner can back up a store", hint='open it with mode="rw"', path=self.path)
        return self._backup_recorder

    @property
    def manifest(self) -> ManifestStore:
        """The catalog of everything in the store."""
        self._check()
        return self._manifest

    @property
    def objects_url(self) -> str:
        """URL or path of the objects; a relative path in quire.toml is relative to the store."""
        return layout.objects_url(self.path, self.settings)

    @property
    def objects(self) -> ObjectStore:
        """The object store, opened on first use."""
        return self._parts.stores(self.objects_url)

    @property
    def namespaces(self) -> Namespaces:
        """Places in addition to the store's own object store, for the objects of some databases."""
        return Namespaces(self)

    @property
    def mirrors(self) -> Mirrors:
        """Lakehouse tables that follow a table of many databases: `create`, `run`, `status`, `list`, `drop`."""
        return Mirrors(self, self._parts)

    @property
    def rights(self) -> ObjectRights:
        """The right of this store to put and delete objects: its owner epoch and session."""
        return self._parts.rights

    @property
    def context(self) -> JobContext:
        """The store's parts that jobs use."""
        return self._parts.context

    def delete_objects(self, keys: Iterable[str], *, url: str = "") -> None:
        """Delete objects of this store by name, in its own place or at `url`; foreign names are refused (A3). They are deleted
        at once, even with archiving on: backups, and other objects that a user names, are not part of archived moments."""
        self._parts.collector.delete_now(url or self.objects_url, keys)

    @property
    def feed(self) -> ChangeFeed:
        """The change feed: every committed batch, in order."""
        return self.manifest.feed

    @property
    def pages(self) -> PageEngine:
        """The page databases."""
        return self._parts.pages

    @property
    def worker(self) -> Worker:
        """The worker that runs jobs, in its own threads or in the caller's."""
        return self._parts.worker

    @property
    def _parts(self) -> Wiring:
        self._check()
        return self._wiring

    # ── SQLite ────────────────────────────────────────────────────────────────────────────────────────────────────────
    @may_change
    def sqlite(
        self,
        name: str,
        *,
        at: At | None = None,
        create: bool = False,
        page_size: int = 0,
        fork_of: str | None = None,
        fork_at: At | None = None,
        read_only: bool = False,
        timeout: float = 5.0,
    ) -> Connection:
        """Open a SQLite connection (apsw) to a page database: to its newest version, or for reading to the one `at` a snapshot,
        lsn or time.

        `create=True` creates the database if it does not exist; `fork_of` creates it as a fork of another one, as of now or
        `fork_at` a snapshot, lsn or time. A `read_only` connection follows the newest version and cannot be made writable.
        `timeout` is SQLite's busy timeout in seconds. See `docs/sqlite.md`.
        """
        wiring = self._parts
        if fork_of is not None and fork_at is not None:
            wiring.sqlite.fork(fork_of, name, at=fork_at)
        elif fork_of is not None:
            self.fork(fork_of, name)
        elif fork_at is not None:
            raise InvalidInput(
                "`fork_at` needs `fork_of`", hint="to read an earlier version, use `at`", fork_at=str(fork_at)
            )
        return wiring.sqlite.connect(
            name, at=at, create=create, page_size=page_size, read_only=read_only, timeout=timeout
        )

    @property
    def sqlite_vfs(self) -> str:
        """Name of the VFS for other SQLite connections: `ATTACH 'file:shop?vfs=…'` with this name reads and writes `shop`."""
        return self._parts.sqlite.vfs_name

    @property
    def followers(self) -> FileFollowers:
        """SQLite files of other programs that this process follows: `follow`, `stop`, `files`; `resume` after a restart."""
        return self._parts.followers

    @property
    def kvs(self) -> KvEngine:
        """The key-value databases."""
        return self._parts.kv

    @may_change
    def kv(self, name: str, *, create: bool = False) -> Kv:
        """Open a key-value database; `create=True` creates it if it does not exist."""
        return self.kvs.open(name, create=create)

    @property
    def streams(self) -> StreamEngine:
        """The streams."""
        return self._parts.streams

    @may_change
    def stream(self, name: str, *, create: bool = False) -> Stream:
        """Open a stream; `create=True` creates it if it does not exist."""
        return self.streams.open(name, create=create)

    # ── upkeep ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def start_upkeep(self) -> None:
        """Start background maintenance after one interval: a command that ends within a second does not need it."""

        def begin() -> None:
            try:
                self.upkeep.start()
            except StoreClosed:
                pass  # closed while the timer expired
            except Exception as error:  # such as no thread: without upkeep nothing is ever deleted
                emit("error", "upkeep.not_started", path=self.path, error=error)
                self.start_upkeep()  # tries again after the next interval

        self._upkeep_timer = threading.Timer(self.settings.maintenance.interval_seconds, begin)
        self._upkeep_timer.daemon = True
        self._upkeep_timer.start()

    @property
    def upkeep(self) -> Upkeep:
        """The owner's maintenance: schedules, retention, leases, jobs."""
        return self._parts.upkeep

    @changes
    def maintain(self) -> Round:
        """Run one round of maintenance and the jobs that are due, in this thread, and return what was done."""
        return self.upkeep.run_once()

    # ── databases ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @changes
    def create(
        self, name: str, kind: DbKind | str, *, tags: dict[str, str] | None = None, namespace: str = ""
    ) -> DatabaseInfo:
        """Create a database of kind "pages" (or "sqlite"), "stream", or "lsm" (or "kv") with these tags.

        If `namespace` is given, all its objects go there instead of the store's own object store.
        """
        namespace_id = self.namespaces.id_of(namespace)
        db_id = self.manifest.register_db(name, kind_named(kind), tags=tags, namespace_id=namespace_id)
        return self.database(db_id)

    @changes
    def drop(self, name: str, *, snapshots: bool = False, undoable: bool = False) -> DatabaseInfo:
        """Drop a database and return its description. One that has snapshots is dropped only with `snapshots=True`.

        With `undoable` it keeps its space for a day (`maintenance.undrop_seconds`), and `undrop` brings it back until then.
        """
        info = self.database(name)
        if undoable and self.settings.maintenance.undrop_seconds:
            self.manifest.soft_drop_db(info.db_id, snapshots=snapshots).result()
            return info
        self.manifest.drop_db(info.db_id, snapshots=snapshots).result()
        self._parts.sweep_engines({info.kind})
        return info

    @changes
    def undrop(self, name: str | int, *, new_name: str = "") -> DatabaseInfo:
        """Bring back a database that was dropped with `undoable`, with its snapshots: the last one of this name, or by id. It
        gets its former name, or `new_name`."""
        db_id = self.manifest.find_dropped(name)
        self.manifest.undrop_db(db_id, new_name).result()
        return self.database(db_id)

    @changes
    def purge(self, name: str | int) -> DroppedDatabase:
        """Remove permanently a dropped database that could be brought back: the last one of this name, or by id."""
        db_id = self.manifest.find_dropped(name)
        gone = next(info for info in self.dropped() if info.db_id == db_id)
        self.manifest.drop_db(db_id, snapshots=True, only_dropped=True).result()
        self._parts.sweep_engines({gone.kind})
        return gone

    def dropped(self) -> list[DroppedDatabase]:
        """Return the dropped databases that can be brought back, the last dropped first."""
        with self.manifest.read() as txn:
            return dropped_databases(txn, self.settings.maintenance.undrop_seconds)

    @changes
    def drop_snapshot(self, db: int | str, snapshot: int | str, *, undoable: bool = False) -> SnapshotInfo:
        """Drop a snapshot and return its description. What only it held is deleted.

        With `undoable` that is kept for a day (`maintenance.undrop_seconds`), and `undrop_snapshot` brings the snapshot back.
        """
        if undoable and (seconds := self.settings.maintenance.undrop_seconds):
            until_ms = self.context.clock.now_ms() + int(seconds * 1000)
            return self.manifest.snapshots.soft_drop(db, snapshot, until_ms=until_ms)
        return self.manifest.snapshots.drop(db, snapshot)

    @changes
    def undrop_snapshot(self, db: int | str, snapshot: int | str, *, new_name: str = "") -> SnapshotInfo:
        """Bring back a snapshot that was dropped with `undoable`: the last one of this name, or by id. It gets its former
        name, or `new_name`."""
        return self.manifest.snapshots.undrop(db, snapshot, new_name=new_name)

    @changes
    def create_many(
        self,
        names: Iterable[str],
        kind: DbKind | str = DbKind.PAGES,
        *,
        tags: dict[str, str] | None = None,
        namespace: str = "",
    ) -> list[int]:
        """Create many databases in shared commits and return their ids, in the order of the names.

        The error of a refused name has in `where` how many names were `read` and `done`, and which were `refused`; a call
        with the names after the `read` ones continues. See `docs/scale.md`.
        """
        namespace_id = self.namespaces.id_of(namespace)
        return bulk.create_many(self.manifest, names, kind_named(kind), tags or {}, namespace_id)

    @changes
    def fork_many(
        self, template: str, names: Iterable[str], *, at: int | str | None = None, tags: dict[str, str] | None = None
    ) -> list[int]:
        """Fork a page database many times, all at one moment, in shared commits. Return the ids, in the order of the names.

        A refused name is reported as by `create_many`.
        """
        if (source := self.database(template)).kind is not DbKind.PAGES:
            text = "only page databases can be forked in bulk"
            raise WrongKind(text, hint="use `fork` for key-value databases", name=template, kind=source.kind.name)
        kept = self._parts.snapshot_for_forks(template) if at is None else None
        info = kept if kept is not None else self.manifest.snapshots.get(template, at if at is not None else 0)
        try:
            return bulk.fork_many(self.manifest, info.db_id, info.snapshot_id, names, tags or {})
        finally:
            if kept is not None:
                self.manifest.snapshots.drop(kept.db_id, kept.snapshot_id)

    @changes
    def drop_many(self, names: Iterable[str], *, snapshots: bool = False) -> list[int]:
        """Drop databases in shared commits and return their ids, in the order of the names. A repeated name is dropped once.

        A refused name is reported as by `create_many`.
        """
        dropped = bulk.drop_many(self.manifest, names, snapshots=snapshots)
        self._parts.sweep_engines({kind for _, kind in dropped})
        return [db_id for db_id, _ in dropped]

    @changes
    def rename(self, old: str, new: str) -> DatabaseInfo:
        """Rename a database and return its new description."""
        self.manifest.rename_db(self.database(old).db_id, new).result()
        return self.database(new)

    @changes
    def set_status(self, name: str, status: DbStatus | str) -> DatabaseInfo:
        """Make a database "read_only", which refuses every write, or "active" again. Upkeep continues in both states."""
        self.manifest.update_db_status(self.database(name).db_id, status_named(status)).result()
        return self.database(name)

    @changes
    def set_options(self, name: str, *, tags: dict[str, str] | None = None, compression: str = "") -> DatabaseInfo:
        """Replace the tags of a database, or change the compression of its future chunks ("none" or "zstd")."""
        chosen = compression_named(compression) if compression else None
        self.manifest.submit([SetDbOptions(self.database(name).db_id, tags, chosen)]).result()
        return self.database(name)

    # ── versions ──────────────────────────────────────────────────────────────────────────────────────────────────────
    @changes
    def snapshot(self, name: str, snapshot: str = "", *, tags: dict[str, str] | None = None) -> SnapshotInfo:
        """Take a snapshot of a database, with a name or without one."""
        return self._parts.snapshot(name, snapshot, tags)

    @changes
    def fork(
        self,
        name: str,
        new_name: str,
        *,
        at: int | str | Epoch | datetime | None = None,
        tags: dict[str, str] | None = None,
        compression: str = "",
    ) -> DatabaseInfo:
        """Fork a database as it is now, or was `at` a snapshot (id or name), an epoch or a time ("2 hours ago"). The two share
        what neither has changed.

        The fork inherits namespace, tags and compression ("none" or "zstd"); `tags` are added to the inherited ones.
        """
        options = ForkOptions(tags=tags or {}, compression=compression_named(compression) if compression else None)
        db_id = self._parts.fork(name, new_name, at=at, options=options)
        return self.database(db_id)

    @changes
    def rollback(self, name: str, *, to: At) -> RolledBack:
        """Undo everything since a version: a snapshot, an lsn, an epoch or a time; for a key-value set, a snapshot.

        The old state becomes a new version. The state before the rollback is kept as the snapshot named in the result; rolling
        back to it undoes the rollback. Connections stay valid: readers keep their version, others continue with the new one.
        """
        if (kind := self.database(name).kind) is DbKind.STREAM:
            raise WrongKind("a stream cannot be rolled back", hint="records cannot be undone", name=name)
        return self.kvs.rollback(name, to=to) if kind is DbKind.LSM else self._parts.sqlite.rollback(name, to=to)

    def view(self, name: str, snapshot: int | str, *, upload: bool = False) -> SnapshotView:
        """Return a snapshot of a page database as a picklable value. Use `upload` for processes that share no disk (P16)."""
        return self.pages.view(name, snapshot, upload=upload)

    @property
    def heavy(self) -> Heavy:
        """The jobs that read or write many bytes, over one database or all."""
        return Heavy(self, self._parts)

    @changes
    def checkpoint(self, name: str, *, runner: str = "") -> Job:
        """Checkpoint a database's WAL into chunks and return the finished job. `runner` is "auto", "threads" or "spark"."""
        return self.heavy.run_now(JobKind.CHECKPOINT, name, runner=runner)

    @changes
    def merge(self, name: str, *, runner: str = "") -> Job:
        """Rewrite slots of a database that consist of several chunks, and return the finished job."""
        return self.heavy.run_now(JobKind.MERGE, name, runner=runner)

    @changes
    def evict(self, name: str) -> list[Job]:
        """Remove local copies that only snapshots and chunk readers need and that have objects. Return the finished jobs."""
        return self._move_copies(name, evict_database)

    @changes
    def hydrate(self, name: str) -> list[Job]:
        """Make local copies of everything that a database has only in the object store. Return the finished jobs."""
        return self._move_copies(name, hydrate_database)

    def _move_copies(self, name: str, ask: Callable[[ManifestStore, int], list[int]]) -> list[Job]:
        with self.manifest.read() as txn:
            db_id = txn.database_id(name)
        return [self.worker.run_or_wait(job_id) for job_id in ask(self.manifest, db_id)]

    def databases(self, **wanted: Unpack[DatabaseFilterOptions]) -> list[DatabaseInfo]:
        """Return the live databases, filtered by `prefix`, `kind` and `tag` ("plan" or "plan=free"), sorted by `sort`: "name",
        "written" or "size". `limit` returns one page; `after`, the last name of a page, starts the next one."""
        with self.manifest.read() as txn:
            return live_databases(txn, DatabaseFilter(**wanted), lambda: self.streams.last_appends())

    def database(self, name: str | int) -> DatabaseInfo:
        """Return a database by name or id."""
        with self.manifest.read() as txn:
            return database_info(txn, name)

    # ── other processes ───────────────────────────────────────────────────────────────────────────────────────────────
    def serve(
        self,
        address: str | None = None,
        *,
        admin_token_file: str = "",
        read_token_file: str = "",
        tls_cert_file: str = "",
        tls_key_file: str = "",
    ) -> Server:
        """Serve this store to other processes (`quire.connect`), in the background, until the server or the store is closed.

        Without an address, listen on the store's Unix socket. `grpc://HOST:PORT` and `grpc+tls://HOST:PORT` require a token of
        every caller: missing token files are created, by default `admin.token` and `read.token` in the store.
        """
        from quire.service.server import Server

        self._check()
        credentials = Credentials(
            admin_token_file=admin_token_file,
            read_token_file=read_token_file,
            tls_cert_file=tls_cert_file,
            tls_key_file=tls_key_file,
        )
        self._servers.append(server := Server(self, address, credentials))
        return server

    def serve_http(self, address: str = "127.0.0.1:7448", credentials: Credentials | None = None) -> WebServer:
        """Serve SQL, metrics, health and the dashboard over HTTP until the server or the store is closed: docs/dashboard.md."""
        from quire.service.web.server import WebServer

        def explain(txn: ReadTxn, subject: str) -> Any:
            return why(txn, subject, reader_lookup=lambda db_id: [lease.info for lease in self.pages.readers(db_id)])

        self._check()
        self._servers.append(server := WebServer(self, address, credentials, explain=explain))
        return server

    # ── the whole store ───────────────────────────────────────────────────────────────────────────────────────────────
    def backup(
        self,
        target: str,
        *,
        since: str = "",
        options: StoreOptions | None = None,
        progress: BackupProgress | None = None,
    ) -> BackedUp:
        """Back up the store as it is now to a directory, a URL or a new `.tar` file, while it is in use.

        A directory or URL may have earlier backups: their objects are not copied again, and each can be restored. With `since`,
        an earlier backup elsewhere, its objects are not copied; a restore then needs both. Restore with `quire.restore`.
        `options` say how a URL is reached; default: as this store's own bucket, if it has the same scheme.
        """
        return back_up(self, target, since=since, options=options, progress=progress)

    def restore_db(
        self,
        url: str,
        name: str,
        *,
        new: str = "",
        at: datetime | str | int | None = None,
        at_ms: int | None = None,
        store_id: str = "",
        options: StoreOptions | None = None,
        progress: BackupProgress | None = None,
    ) -> RestoredDatabase:
        """Copy one database, stream or key-value set from the archive or backup at `url` into this store, as `new`.

        Its state is that of the newest archived moment, or the newest one not after `at`, which is given as to `quire.restore`.
        An empty `url` is this store's own bucket. Snapshots are not copied; records of a stream get new ids and times. It
        appears completely or not at all.
        """
        from quire.store.restoring_database import restore_database  # here: it loads Arrow

        return restore_database(
            self, url, name, new=new, at=at, at_ms=at_ms, store_id=store_id, options=options, progress=progress
        )

    def info(self) -> StoreInfo:
        """Return a summary of the store."""
        manifest = self.manifest
        with manifest.read() as txn:
            owner, figures = self._owner_state(txn), manifest.env.info()
            archive = (
                self.archive.status()
                if self.archive is not None
                else recorded_archive_status(txn, self.path, self.settings, owner, manifest.env.last_txn_id())
            )
            return store_info(
                txn,
                path=self.path,
                mode=self.mode,
                object_store=self.objects_url,
                owner=owner,
                figures=figures,
                archive=archive,
                now_ms=manifest.clock.now_ms(),
                newest=newest_versions(self.pages.stores()) if self.mode == "rw" else None,
            )

    def _owner_state(self, txn: ReadTxn) -> OwnerState:
        if self.mode == "rw":
            return self.rights.state
        return object_location.recorded_owner_state(txn, self._disk, self.path, self.settings.object_store)
