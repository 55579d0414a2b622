"""The parts of an opened store, each made when it is first needed: object stores, the engines, the worker and its upkeep.

A part is made when it is first needed, alone: appending to a stream needs neither the page engine nor jobs. There is one of
each; what was made is closed, the last first, and nothing is made any more.

Threads: any. Raises `StoreClosed`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from quire.archive.clones import CloneKeeper
from quire.core.errors import StoreClosed, WrongKind
from quire.core.ids import Epoch
from quire.durable.files import descriptor_limits
from quire.durable.open_files import OpenFiles
from quire.jobs.archive_window import ArchiveWindow
from quire.jobs.context import JobContext, no_fencing
from quire.jobs.enqueue import has_open_segment
from quire.jobs.leftovers import has_dropped_streams
from quire.jobs.locations import StorePool
from quire.jobs.maintenance import Upkeep
from quire.jobs.registry import HANDLERS
from quire.jobs.residency import upload_now
from quire.jobs.runner import Runners
from quire.jobs.worker import Worker
from quire.lsm.engine import KvEngine
from quire.manifest.namespaces import collector_of
from quire.manifest.records import DbKind
from quire.manifest.snapshots import SnapshotInfo
from quire.objects.open import open_store
from quire.spark.sessions import spark_runner
from quire.store.object_access import options_by_url, options_of
from quire.store.write_permission import ObjectRights
from quire.stream.engine import StreamEngine

if TYPE_CHECKING:
    from quire.core.ids import ArtifactKey
    from quire.core.settings import StoreSettings
    from quire.durable.files import Disk
    from quire.jobs.runner import Runner
    from quire.manifest.snapshots import ForkOptions
    from quire.manifest.store import ManifestStore
    from quire.objects.api import ObjectStore
    from quire.objects.collector import Collector
    from quire.pages.engine import PageEngine
    from quire.sqlite.connect import SqliteDatabases
    from quire.sqlite.followers import FileFollowers

R = TypeVar("R")

STORES, FILES, RIGHTS = "stores", "files", "rights"
"""Parts that others may need while they are closed."""


class Wiring:
    """Everything above the manifest, of one opened store."""

    def __init__(
        self, *, path: str, settings: StoreSettings, manifest: ManifestStore, disk: Disk, objects_url: str
    ) -> None:
        # constant after construction
        self._path = path
        self._settings = settings
        self._manifest = manifest
        self._disk = disk
        self._objects_url = objects_url
        # guarded by _making
        self._making = threading.RLock()  # a part may need another one
        self._made: dict[str, Any] = {}
        self._closed = False

    def _once(self, name: str, make: Callable[[], R]) -> R:
        """Make a part when it is first asked for, once, and remember it to be closed."""
        part: R | None = self._made.get(name)
        if part is None:
            with self._making:
                part = self._made.get(name)
                if part is None:
                    if self._closed and name not in (STORES, FILES, RIGHTS):
                        raise StoreClosed("the store is closed", hint="open it again", path=self._path)
                    part = self._made[name] = make()
        return part

    # ── where bytes are ───────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def stores(self) -> StorePool:
        """The object stores, by their URLs."""
        return self._once(STORES, lambda: StorePool(self._open))

    def _open(self, url: str) -> ObjectStore:
        url = url or self._objects_url  # of a namespace whose objects a restored backup has with the others
        with self._manifest.read() as txn:
            options = options_of(txn, self._settings, url)
        store = open_store(url, options=options, disk=self._disk, clock=self._manifest.clock)
        return store if self._manifest.read_only else self.rights.guarded(store)

    @property
    def rights(self) -> ObjectRights:
        """Whether this process may put and delete objects."""
        return self._once(
            RIGHTS,
            lambda: ObjectRights(
                path=self._path,
                settings=self._settings,
                manifest=self._manifest,
                disk=self._disk,
                url=self._objects_url,
            ),
        )

    @property
    def files(self) -> Disk:
        """The disk as engines see it: what they write to is open only while it is used (durable/open_files.py)."""

        def make() -> OpenFiles:
            allowed = descriptor_limits()[0]
            most = self._settings.open_files_max
            # A quarter of what the process has: the rest is for what is read, for connections, and for the program itself.
            return OpenFiles(self._disk, min(most, max(allowed // 4, 4)) if allowed > 0 else most)

        return self._disk if self._manifest.read_only else self._once(FILES, make)

    @property
    def collector(self) -> Collector:
        """Who deletes objects; the guarded stores have the session confirmed before each batch (A2)."""
        return self._once(
            "collector",
            lambda: collector_of(
                self._manifest,
                self._objects_url,
                self.stores,
                confirm=lambda: None,
                claims_former=self.rights.owns_legacy,
                archived=self._settings.archive.mode != "off",
            ),
        )

    # ── engines ───────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def pages(self) -> PageEngine:
        """The page databases."""
        from quire.pages.engine import PageEngine

        return self._once(
            "pages",
            lambda: PageEngine(
                manifest=self._manifest,
                root=self._path,
                disk=self.files,
                clock=self._manifest.clock,
                open_store=self.stores,
                objects_url=self._objects_url,
                settings=self._settings.pages,
                upload=None if self._manifest.read_only else self._upload,
            ),
        )

    @property
    def streams(self) -> StreamEngine:
        """The streams."""
        return self._once(
            "streams",
            lambda: StreamEngine(
                manifest=self._manifest,
                root=self._path,
                disk=self.files,
                clock=self._manifest.clock,
                objects_url=self._objects_url,
                open_store=self.stores,
                collect=lambda url, keys: self.collector.delete(url, keys),
                settings=self._settings.stream,
                log_settings=self._settings.manifest_log,
                background=self._settings.maintenance.enabled,
                store_locked=True,
            ),
        )

    @property
    def kv(self) -> KvEngine:
        """The key-value databases."""
        return self._once(
            "kv",
            lambda: KvEngine(
                manifest=self._manifest,
                root=self._path,
                disk=self.files,
                clock=self._manifest.clock,
                settings=self._settings.lsm,
            ),
        )

    def engine_of(self, kind: DbKind) -> KvEngine | StreamEngine:
        """Who looks after databases of a kind that are not made of pages."""
        return self.kv if kind is DbKind.LSM else self.streams

    @property
    def sqlite(self) -> SqliteDatabases:
        """SQLite connections."""
        from quire.sqlite.connect import SqliteDatabases

        return self._once(
            "sqlite",
            lambda: SqliteDatabases(
                manifest=self._manifest,
                engine=self.pages,
                page_size=self._settings.pages.page_size,
                read_only=self._manifest.read_only,
                attach_creates=self._settings.pages.attach_creates,
            ),
        )

    @property
    def followers(self) -> FileFollowers:
        """SQLite files that are followed."""
        from quire.sqlite.followers import FileFollowers

        return self._once(
            "followers",
            lambda: FileFollowers(
                manifest=self._manifest,
                root=self._path,
                pages=lambda: self.pages,
                configured=self._settings.follow,
            ),
        )

    # ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def context(self) -> JobContext:
        """The store, as a job sees it."""
        return self._once(
            "context",
            lambda: JobContext(
                manifest=self._manifest,
                root=self._path,
                disk=self._disk,
                objects_url=self._objects_url,
                open_store=self.stores,
                collector=self.collector,
                settings=self._settings.maintenance,
                pages=self.pages,
                before_put=self.rights.before_put if not self._manifest.read_only else no_fencing,
                kv=lambda: self.kv,
                streams=lambda: self.streams,
                runners=Runners(self._spark, self._settings.maintenance.runner),
                bundle_seconds=self._settings.manifest_log.bundle_seconds,
            ),
        )

    @property
    def worker(self) -> Worker:
        """Runs jobs."""
        return self._once("worker", lambda: Worker(self.context, HANDLERS, threads=self._settings.maintenance.workers))

    @property
    def upkeep(self) -> Upkeep:
        """The owner's maintenance."""
        return self._once(
            "upkeep",
            lambda: Upkeep(
                self.context, self.worker, self.snapshot, self._sweep_versions, self.window, self._close_idle
            ),
        )

    @property
    def window(self) -> ArchiveWindow:
        """Trims the archive, and deletes what no moment of it needs."""
        return self._once("window", lambda: ArchiveWindow(self.context, self._settings.archive, self._kept_for_clones))

    def _kept_for_clones(self, url: str, name: str, since_ms: int) -> int:
        keeper = self._once("clones", lambda: CloneKeeper(self.stores(self._objects_url), self._manifest.feed.store_id))
        return keeper.kept_until(self.stores(url), name, since_ms)

    def _spark(self) -> Runner:
        """The running Spark session's runner, or a new session's; loaded when a job is large enough, or asked for."""
        context = self.context
        with self._manifest.read() as txn:
            options = options_by_url(txn, context.root, self._settings)
        sees = True if context.settings.executors_see_store else None
        return spark_runner(
            root=context.root,
            objects_url=context.objects_url,
            shares_disk=sees,
            options=options,
            name_of=self._name_of,
        )

    def _name_of(self, db_id: int) -> str:
        """A database's name, or its number if it was dropped meanwhile."""
        with self._manifest.read() as txn:
            record = txn.database(db_id)
        return record.name if record is not None else str(db_id)

    def _upload(self, keys: Sequence[ArtifactKey]) -> None:
        upload_now(self._manifest, self.worker, keys)

    def _sweep_versions(self) -> int:
        """What dropped streams have left if whoever dropped them was killed; files of dropped key-value snapshots, and how far
        the logs have come, which wait until that engine is loaded."""
        if has_dropped_streams(self.context):
            self.streams.sweep()
        if "kv" not in self._made:
            return 0
        self.kv.record_ends()
        return self.kv.sweep()

    def _close_idle(self) -> int:
        """Key-value sets that nobody uses; page databases and streams are closed by the threads of their engines."""
        return self.kv.close_idle() if "kv" in self._made else 0

    # ── versions ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def snapshot(self, db: int | str, name: str, tags: dict[str, str] | None) -> SnapshotInfo:
        """Keep a database as it is, by whoever can say what that is."""
        db_id, kind, in_segment = self._look(db)
        if kind is not DbKind.PAGES:
            return self.engine_of(kind).snapshot(db, name, tags=tags)
        if in_segment:
            return self.pages.snapshot(db_id, name, tags=tags)
        return self._manifest.snapshots.publish(db_id, name, tags=tags)

    def fork(
        self, db: int | str, new_name: str, *, at: int | str | Epoch | datetime | None, options: ForkOptions
    ) -> int:
        """A new database that begins as another one is, or was at a snapshot (its id or name) or a moment; its id."""
        db_id, kind, in_segment = self._look(db)
        if isinstance(at, str):
            version = self._manifest.snapshots.find(db_id, at)
            at = version.snapshot_id if isinstance(version, SnapshotInfo) else version
        if isinstance(at, Epoch | datetime):
            if kind is not DbKind.PAGES:
                hint = "name one of its snapshots"
                raise WrongKind("only page databases are forked between snapshots", hint=hint, db_id=db_id)
            return self.sqlite.fork(db_id, new_name, at=at, options=options)
        if kind is not DbKind.PAGES:
            return self.engine_of(kind).fork(db, new_name, at=at, options=options)
        if at is None and in_segment:
            return self.pages.fork(db_id, new_name, options=options)
        return self._manifest.snapshots.fork(db_id, new_name, at=at, options=options)

    def _look(self, db: int | str) -> tuple[int, DbKind, bool]:
        """Id and kind of a database, and whether some of it is in an open segment: then the page engine must be asked (P13)."""
        with self._manifest.read() as txn:
            db_id, record = txn.require_database(db)
            return db_id, record.kind, has_open_segment(txn, db_id)

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    def close(self) -> None:
        """Stop the work, close the databases; each whatever the others do. The object stores: `close_stores`."""
        with self._making:
            self._closed = True
            parts = dict(self._made)
        with ExitStack() as closing:  # runs from the last to the first
            if FILES in parts:
                closing.callback(parts[FILES].close)
            for name in ("pages", "kv", "streams"):
                if name in parts:
                    closing.callback(parts[name].close)
            if "upkeep" in parts:  # which stops the worker
                closing.callback(parts["upkeep"].stop)
            elif "worker" in parts:
                closing.callback(parts["worker"].stop)
            if "sqlite" in parts:
                closing.callback(parts["sqlite"].close)

    def close_stores(self) -> None:
        """Close the object stores, when nobody uploads any more."""
        if STORES in self._made:
            self.stores.close()
        if RIGHTS in self._made:
            self.rights.close()
