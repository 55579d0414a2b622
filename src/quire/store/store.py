"""`Store`: a directory, opened; the packages below it, wired together. How it is opened: opening.py.

Terms
  owner    the one process that has the store's lock and may change it
  reader   a process that opened the store with mode="r": it sees snapshots, writes nothing, takes no lock

Rules
  1. `Store` only delegates: what it does is done by the manifest and the object store.
  2. A handle belongs to the process that opened it: after fork() the child's use of it raises `StoreClosed` (M12), and
     the parent's lock stays the parent's.
  3. The object store is loaded and opened when it is first asked for: light commands need no cloud client.

Threads: any; `close` is for one thread.
Raises `StoreClosed`, `ReadOnly`, `InvalidInput`, and of databases `UnknownDatabase`, `NameTaken`, `InvalidName`,
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
    archive_beside,
    compression_named,
    database_info,
    dropped_databases,
    kind_named,
    live_databases,
    status_named,
    store_info,
)
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
    from quire.objects.ownership import OwnerState
    from quire.pages.engine import PageEngine
    from quire.pages.view import SnapshotView
    from quire.service.server import Server
    from quire.service.web.server import WebServer
    from quire.sqlite.connect import At, Connection
    from quire.sqlite.followers import FileFollowers
    from quire.store.backup import BackedUp
    from quire.store.backup import Progress as BackupProgress
    from quire.store.restoring_database import RestoredDatabase
    from quire.store.write_permission import ObjectRights
    from quire.stream.engine import StreamEngine
    from quire.stream.stream import Stream

Mode = Literal["rw", "r"]


class Store:
    """An opened store. Made by `quire.open`; use it as a context manager."""

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
        """What keeps the store in its bucket, where `archive.mode` says so."""
        self._pid = os.getpid()
        self.copy_of = ""
        """The URL of the archive that this is a copy of, to be read (`quire.open_archive`)."""
        self.after_close: Callable[[], None] | None = None
        self.moved_objects = 0
        """How many objects were looked for in their new place, if the store was opened with `moved=True`."""
        self._wiring = Wiring(
            path=path, settings=settings, manifest=manifest, disk=disk, objects_url=layout.objects_url(path, settings)
        )
        # the opener's and the closer's
        self._upkeep_timer: threading.Timer | None = None
        self._servers: list[Server | WebServer] = []
        self._closed = False

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    def close(self) -> None:
        """Commit what is queued, close everything, give the lock back. A second time, and in a forked child: nothing."""
        if self._closed or self._pid != os.getpid():
            return
        for server in self._servers:  # who asks must be answered by a store that is open
            server.close()
        self._closed = True
        if self._upkeep_timer is not None:
            self._upkeep_timer.cancel()
        with ExitStack() as closing:  # runs from the last to the first, each whatever the others do
            if self.after_close is not None:
                closing.callback(self.after_close)
            if self._lock is not None:
                closing.callback(self._lock.close)
            closing.callback(self._manifest.close)
            closing.callback(self._wiring.close_stores)
            if self.archive is not None:  # it ships what closing the databases and the writer still changes
                closing.callback(self.archive.close)
                closing.callback(self._manifest.writer.close)
            closing.callback(self._wiring.close)

    @property
    def is_open(self) -> bool:
        """Whether this process can use it."""
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

    # ── its parts ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def mode(self) -> Mode:
        """ "rw" for the owner, "r" for a reader."""
        return "r" if self._lock is None else "rw"

    @property
    def disk(self) -> Disk:
        """What the store's files are opened with."""
        return self._disk

    @property
    def backup_recorder(self) -> BackupRecorder:
        """What records changes for a backup: an owner's alone."""
        if self._backup_recorder is None:
            raise ReadOnly("only the owner can back a store up", hint='open it with mode="rw"', path=self.path)
        return self._backup_recorder

    @property
    def manifest(self) -> ManifestStore:
        """The catalog of everything in the store."""
        self._check()
        return self._manifest

    @property
    def objects_url(self) -> str:
        """Where the objects are; a relative path in quire.toml is relative to the store."""
        return layout.objects_url(self.path, self.settings)

    @property
    def objects(self) -> ObjectStore:
        """The object store, opened now if it was not."""
        return self._parts.stores(self.objects_url)

    @property
    def namespaces(self) -> Namespaces:
        """Places beside the store's own object store, for the objects of some databases."""
        return Namespaces(self)

    @property
    def mirrors(self) -> Mirrors:
        """Lakehouse tables that follow a table of many databases: `create`, `run`, `status`, `list`, `drop`."""
        return Mirrors(self, self._parts)

    @property
    def rights(self) -> ObjectRights:
        """Whether this store may put and delete objects: its owner epoch and session."""
        return self._parts.rights

    @property
    def context(self) -> JobContext:
        """The store, as a job sees it."""
        return self._parts.context

    def delete_objects(self, keys: Iterable[str], *, url: str = "") -> None:
        """Remove objects of this store by their names, in its own place or another; a foreign one is refused (A3). They go at
        once, also with archiving on: backups, and whatever else a person names, are not part of archived moments."""
        self._parts.collector.delete_now(url or self.objects_url, keys)

    @property
    def feed(self) -> ChangeFeed:
        """Everything that was committed, in order, for subscribers."""
        return self.manifest.feed

    @property
    def pages(self) -> PageEngine:
        """The page databases."""
        return self._parts.pages

    @property
    def worker(self) -> Worker:
        """Runs jobs, in its own threads or in the caller's."""
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
        timeout: float = 5.0,
    ) -> Connection:
        """A SQLite connection (apsw) to a page database: its newest version, or for reading the one `at` a snapshot, lsn or
        time.

        With `create=True` it is made if there is none, with `fork_of` as a fork of another one, as that is now or was
        `fork_at` a snapshot, lsn or time. `timeout` is SQLite's busy timeout in seconds. `docs/sqlite.md` has the rest.
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
        return wiring.sqlite.connect(name, at=at, create=create, page_size=page_size, timeout=timeout)

    @property
    def sqlite_vfs(self) -> str:
        """For SQLite connections of other making: `ATTACH 'file:shop?vfs=…'` with this name reads and writes `shop`."""
        return self._parts.sqlite.vfs_name

    @property
    def followers(self) -> FileFollowers:
        """SQLite files of other programs, followed by this process: `follow`, `stop`, `files`; `resume` after a restart."""
        return self._parts.followers

    @property
    def kvs(self) -> KvEngine:
        """The key-value databases."""
        return self._parts.kv

    @may_change
    def kv(self, name: str, *, create: bool = False) -> Kv:
        """A key-value database; with `create=True` it is made if there is none."""
        return self.kvs.open(name, create=create)

    @property
    def streams(self) -> StreamEngine:
        """The streams."""
        return self._parts.streams

    @may_change
    def stream(self, name: str, *, create: bool = False) -> Stream:
        """A stream; with `create=True` it is made if there is none."""
        return self.streams.open(name, create=create)

    # ── upkeep ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def start_upkeep(self) -> None:
        """In the background, from one interval on: a command that is over in a second needs none of it."""

        def begin() -> None:
            try:
                self.upkeep.start()
            except StoreClosed:
                pass  # it was closed while the timer ran out

        self._upkeep_timer = threading.Timer(self.settings.maintenance.interval_seconds, begin)
        self._upkeep_timer.daemon = True
        self._upkeep_timer.start()

    @property
    def upkeep(self) -> Upkeep:
        """The owner's maintenance: schedules, retention, leases, jobs."""
        return self._parts.upkeep

    @changes
    def maintain(self) -> Round:
        """One round of maintenance now, and the jobs that are due, in this thread; what was done."""
        return self.upkeep.run_once()

    # ── databases ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @changes
    def create(
        self, name: str, kind: DbKind | str, *, tags: dict[str, str] | None = None, namespace: str = ""
    ) -> DatabaseInfo:
        """A new database of kind "pages", "stream" or "lsm"; `tags` are remembered with it.

        All its objects go to `namespace`, if one is given, instead of the store's own object store.
        """
        kind = kind if isinstance(kind, DbKind) else kind_named(kind)
        namespace_id = self.namespaces.get(namespace).namespace_id if namespace else 0
        db_id = self.manifest.register_db(name, kind, tags=tags, namespace_id=namespace_id)
        return self.database(db_id)

    @changes
    def drop(self, name: str, *, snapshots: bool = False, undoable: bool = False) -> DatabaseInfo:
        """Drop a database, as it was; one that has snapshots only together with them, if `snapshots` says so.

        With `undoable` it keeps its space, and `undrop` brings it back, for a day (`maintenance.undrop_seconds`).
        """
        info = self.database(name)
        if undoable and self.settings.maintenance.undrop_seconds:
            self.manifest.soft_drop_db(info.db_id, snapshots=snapshots).result()
            return info
        self.manifest.drop_db(info.db_id, snapshots=snapshots).result()
        if info.kind is not DbKind.PAGES:
            self._parts.engine_of(info.kind).sweep()
        return info

    @changes
    def undrop(self, name: str | int, *, new_name: str = "") -> DatabaseInfo:
        """Bring a database back that was dropped with `undoable`, with its snapshots: the last one of this name, or by its id;
        under its former name or another."""
        db_id = self.manifest.find_dropped(name)
        self.manifest.undrop_db(db_id, new_name).result()
        return self.database(db_id)

    @changes
    def purge(self, name: str | int) -> DroppedDatabase:
        """End a dropped database that could be brought back, the last one of this name or by its id; as it was."""
        db_id = self.manifest.find_dropped(name)
        gone = next(info for info in self.dropped() if info.db_id == db_id)
        self.manifest.drop_db(db_id, snapshots=True, only_dropped=True).result()
        if gone.kind is not DbKind.PAGES:
            self._parts.engine_of(gone.kind).sweep()
        return gone

    def dropped(self) -> list[DroppedDatabase]:
        """The dropped databases that can be brought back, the last one first."""
        with self.manifest.read() as txn:
            return dropped_databases(txn, self.settings.maintenance.undrop_seconds)

    @changes
    def drop_snapshot(self, db: int | str, snapshot: int | str, *, undoable: bool = False) -> SnapshotInfo:
        """Let a snapshot go, and have what only it held deleted; the snapshot as it was.

        With `undoable` it holds that for a day (`maintenance.undrop_seconds`), and `undrop_snapshot` brings it back.
        """
        if undoable and (seconds := self.settings.maintenance.undrop_seconds):
            until_ms = self.context.clock.now_ms() + int(seconds * 1000)
            return self.manifest.snapshots.soft_drop(db, snapshot, until_ms=until_ms)
        return self.manifest.snapshots.drop(db, snapshot)

    @changes
    def undrop_snapshot(self, db: int | str, snapshot: int | str, *, new_name: str = "") -> SnapshotInfo:
        """Bring a snapshot back that was dropped with `undoable`: the last one of this name, or by its id; under its former
        name or another."""
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
        """New databases, in commits that they share; their ids, in the order of the names. See `docs/scale.md`."""
        kind = kind if isinstance(kind, DbKind) else kind_named(kind)
        namespace_id = self.namespaces.get(namespace).namespace_id if namespace else 0
        return bulk.create_many(self.manifest, names, kind, tags or {}, namespace_id)

    @changes
    def fork_many(
        self, template: str, names: Iterable[str], *, at: int | str | None = None, tags: dict[str, str] | None = None
    ) -> list[int]:
        """Forks of a page database, all of one moment, in commits that they share; their ids, in the order of the names."""
        if (source := self.database(template)).kind is not DbKind.PAGES:
            text = "only page databases are forked by the thousand"
            raise WrongKind(text, hint="use `fork` for key-value databases", name=template, kind=source.kind.name)
        kept = self._parts.snapshot(template, "", {"by": "fork_many"}) if at is None else None
        info = kept if kept is not None else self.manifest.snapshots.get(template, at if at is not None else 0)
        try:
            return bulk.fork_many(self.manifest, info.db_id, info.snapshot_id, names, tags or {})
        finally:
            if kept is not None:
                self.manifest.snapshots.drop(kept.db_id, kept.snapshot_id)

    @changes
    def drop_many(self, names: Iterable[str], *, snapshots: bool = False) -> list[int]:
        """Drop databases, in commits that they share; their ids, in the order of the names."""
        dropped = bulk.drop_many(self.manifest, names, snapshots=snapshots)
        for kind in {kind for _, kind in dropped} - {DbKind.PAGES}:
            self._parts.engine_of(kind).sweep()
        return [db_id for db_id, _ in dropped]

    @changes
    def rename(self, old: str, new: str) -> DatabaseInfo:
        """Give a database another name; the database under its new one."""
        self.manifest.rename_db(self.database(old).db_id, new).result()
        return self.database(new)

    @changes
    def set_status(self, name: str, status: DbStatus | str) -> DatabaseInfo:
        """Make a database "read_only", so that every write is refused, or "active" again. Upkeep goes on in both."""
        self.manifest.update_db_status(self.database(name).db_id, status_named(status)).result()
        return self.database(name)

    @changes
    def set_options(self, name: str, *, tags: dict[str, str] | None = None, compression: str = "") -> DatabaseInfo:
        """Replace the tags of a database, or have its chunks compressed otherwise (none or zstd) from now on."""
        chosen = compression_named(compression) if compression else None
        self.manifest.submit([SetDbOptions(self.database(name).db_id, tags, chosen)]).result()
        return self.database(name)

    # ── versions ──────────────────────────────────────────────────────────────────────────────────────────────────────
    @changes
    def snapshot(self, name: str, snapshot: str = "", *, tags: dict[str, str] | None = None) -> SnapshotInfo:
        """Keep a database as it is now, under a name or without one."""
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
        """A new database that begins as another one is now, or was `at` a snapshot (its id or name), an epoch or a time
        ("2 hours ago"); they share what neither has changed.

        It has that one's namespace, tags and compression (none or zstd); `tags` come beside those.
        """
        options = ForkOptions(tags=tags or {}, compression=compression_named(compression) if compression else None)
        db_id = self._parts.fork(name, new_name, at=at, options=options)
        return self.database(db_id)

    @changes
    def rollback(self, name: str, *, to: At) -> RolledBack:
        """Undo everything since a version: a snapshot, an lsn, an epoch or a time; of a key-value set, a snapshot.

        It becomes what it was, as a new version. What it was before is kept as the snapshot that the result names; rolling back
        to that one undoes it. Connections go on: readers with the version they have, the others with the new one.
        """
        if (kind := self.database(name).kind) is DbKind.STREAM:
            raise WrongKind("a stream is not rolled back", hint="records are never undone", name=name)
        return self.kvs.rollback(name, to=to) if kind is DbKind.LSM else self._parts.sqlite.rollback(name, to=to)

    def view(self, name: str, snapshot: int | str, *, upload: bool = False) -> SnapshotView:
        """A snapshot of a page database as a value to be sent elsewhere; `upload` for processes that share no disk (P16)."""
        return self.pages.view(name, snapshot, upload=upload)

    @property
    def heavy(self) -> Heavy:
        """The jobs that read or write many bytes, over one database or all."""
        return Heavy(self, self._parts)

    @changes
    def checkpoint(self, name: str, *, runner: str = "") -> Job:
        """Bring what is in a database's WAL into chunks; the job, as it ended. `runner`: auto, threads or spark."""
        return self.heavy.run_now(JobKind.CHECKPOINT, name, runner=runner)

    @changes
    def merge(self, name: str, *, runner: str = "") -> Job:
        """Rewrite slots of a database that consist of several chunks; the job, as it ended."""
        return self.heavy.run_now(JobKind.MERGE, name, runner=runner)

    @changes
    def evict(self, name: str) -> list[Job]:
        """Remove local copies that only snapshots and chunk readers need, once their objects are there; the jobs, ended."""
        return self._move_copies(name, evict_database)

    @changes
    def hydrate(self, name: str) -> list[Job]:
        """Make local copies of everything a database has in the object store alone; the jobs, as they ended."""
        return self._move_copies(name, hydrate_database)

    def _move_copies(self, name: str, ask: Callable[[ManifestStore, int], list[int]]) -> list[Job]:
        with self.manifest.read() as txn:
            db_id = txn.database_id(name)
        jobs = ask(self.manifest, db_id)
        for job_id in jobs:
            self.worker.run(job_id)
        return [self.manifest.jobs.get(job_id) for job_id in jobs]

    def databases(self, **wanted: Unpack[DatabaseFilterOptions]) -> list[DatabaseInfo]:
        """The live databases, by name. `prefix`, `kind` and `tag` ("plan" or "plan=free") choose some of them; `sort` is
        "name", "written" or "size". With a `limit` a page of them; `after`, the last name of a page, begins the next one."""
        with self.manifest.read() as txn:
            return live_databases(txn, DatabaseFilter(**wanted))

    def database(self, name: str | int) -> DatabaseInfo:
        """A database by name, or by id."""
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
        """Let other processes use this store (`quire.connect`), in the background, until the server or the store is closed.

        Without an address on the store's Unix socket. `grpc://HOST:PORT` and `grpc+tls://HOST:PORT` ask every caller for a
        token: the files are made if they are not there, by default `admin.token` and `read.token` in the store.
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
        """Metrics, health and the dashboard, until the server or the store is closed: docs/dashboard.md."""
        from quire.service.web.server import WebServer

        def explain(txn: ReadTxn, subject: str) -> Any:
            return why(txn, subject, who=lambda db_id: [lease.info for lease in self.pages.readers(db_id)])

        self._check()
        self._servers.append(server := WebServer(self, address, credentials, explain=explain))
        return server

    # ── the whole ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def backup(self, target: str, *, since: str = "", progress: BackupProgress | None = None) -> BackedUp:
        """Copy the store as it is now to a directory, a URL or a new `.tar` file, while it is in use; what was done.

        A directory or URL may have earlier backups: what they have is not copied again, and each can be restored. With `since`,
        an earlier backup elsewhere, objects that it has are not copied; restoring then needs both. `quire.restore` restores it.
        """
        return back_up(self, target, since=since, progress=progress)

    def restore_db(
        self,
        url: str,
        name: str,
        *,
        new: str = "",
        at_ms: int | None = None,
        store_id: str = "",
        progress: BackupProgress | None = None,
    ) -> RestoredDatabase:
        """Copy one database, stream or key-value set out of the archive or backup at `url` into this store, as `new`.

        It is as it was at the newest archived moment, or the newest one not after `at_ms`. An empty `url` is this store's own
        bucket. Its snapshots are not copied; records of a stream get new ids and times. It appears whole or not at all.
        """
        from quire.store.restoring_database import restore_database  # which opens stores itself

        return restore_database(self, url, name, new=new, at_ms=at_ms, store_id=store_id, progress=progress)

    def info(self) -> StoreInfo:
        """The store in numbers."""
        manifest = self.manifest
        with manifest.read() as txn:
            owner, figures = self._owner_state(txn), manifest.env.info()
            archive = (
                self.archive.status()
                if self.archive is not None
                else archive_beside(txn, self.path, self.settings, owner, manifest.env.last_txn_id())
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
        return object_location.state_beside(txn, self._disk, self.path, self.settings.object_store)
