"""Creates the parts of an opened store on first use: object stores, engines, the worker and upkeep.

Each part is created at most once, and only when it is needed: appending to a stream creates neither the page engine nor jobs.
On close, the existing parts are closed in a fixed order, and no new ones are created.

Threads: any. Raises `StoreClosed`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from quire.archive.clones import clone_keys
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
from quire.manifest.records import FORKS_TAGS, DbKind
from quire.manifest.snapshots import SnapshotInfo
from quire.objects.open import open_store
from quire.spark.sessions import spark_runner
from quire.store.object_access import options_by_url, options_of
from quire.store.object_location import needs_owner, place_of
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

FORKS_MS = 86_400_000
"""How long the snapshot from which many forks are made is kept if the process that makes them is killed."""

STORES, FILES, RIGHTS = "stores", "files", "rights"
"""Parts that may still be created after `close`: others need them while they are being closed."""


class Wiring:
    """All parts of one opened store above the manifest."""

    def __init__(
        self, *, path: str, settings: StoreSettings, manifest: ManifestStore, disk: Disk, objects_url: str
    ) -> None:
        # constant after construction
        self._path = path
        self._settings = settings
        self._manifest = manifest
        self._disk = disk
        self._objects_url = objects_url
        self.before_retire: Callable[[], None] | None = None
        """Raises until the archive's last moment is known; set once, with archiving on."""
        # guarded by _create_lock
        self._create_lock = threading.RLock()  # reentrant: creating one part may create another
        self._created: dict[str, Any] = {}
        self._closed = False

    def _get_or_create(self, name: str, make: Callable[[], R]) -> R:
        """Return the part `name`, creating it on first use."""
        part: R | None = self._created.get(name)
        if part is None:
            with self._create_lock:
                part = self._created.get(name)
                if part is None:
                    if self._closed and name not in (STORES, FILES, RIGHTS):
                        raise StoreClosed("the store is closed", hint="open it again", path=self._path)
                    part = self._created[name] = make()
        return part

    # ── object stores and files ───────────────────────────────────────────────────────────────────────────────────────
    @property
    def stores(self) -> StorePool:
        """The object stores, by their URLs."""
        return self._get_or_create(STORES, lambda: StorePool(self._open))

    def _open(self, url: str) -> ObjectStore:
        url = url or self._objects_url  # empty for a namespace of a restored backup: its objects are with all others
        with self._manifest.read() as txn:
            options = options_of(txn, self._settings, url)
        store = open_store(url, options=options, disk=self._disk, clock=self._manifest.clock)
        return store if self._manifest.read_only else self.rights.guarded(store)

    @property
    def rights(self) -> ObjectRights:
        """The right of this process to put and delete objects."""
        return self._get_or_create(
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
        """The disk that engines use: files they write are kept open only while in use (durable/open_files.py)."""

        def make() -> OpenFiles:
            allowed = descriptor_limits()[0]
            most = self._settings.open_files_max
            # A quarter of the process's descriptors: the rest is for files being read, connections, and the program itself.
            return OpenFiles(self._disk, min(most, max(allowed // 4, 4)) if allowed > 0 else most)

        return self._disk if self._manifest.read_only else self._get_or_create(FILES, make)

    @property
    def collector(self) -> Collector:
        """The only component that deletes objects. The guarded stores confirm the session before each batch (A2)."""
        return self._get_or_create(
            "collector",
            lambda: collector_of(
                self._manifest,
                self._objects_url,
                self.stores,
                confirm=lambda: None,
                claims_former=self.rights.owns_legacy,
                retires=self._retires,
            ),
        )

    def _retires(self) -> bool:
        """Return whether archived moments or clones may need objects that this store does not need any more."""
        if self.before_retire is not None:
            self.before_retire()
        if self._settings.archive.mode != "off":
            return True
        if not needs_owner(self._path, place_of(self._path, self._settings.object_store)):
            return False  # clones are made of archives, and there is none inside the directory
        return bool(clone_keys(self.stores(self._objects_url), self._manifest.feed.store_id()))

    # ── engines ───────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def pages(self) -> PageEngine:
        """The page databases."""
        from quire.pages.engine import PageEngine

        return self._get_or_create(
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
        return self._get_or_create(
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
                is_archived=self._settings.archive.mode != "off",
            ),
        )

    @property
    def kv(self) -> KvEngine:
        """The key-value databases."""
        return self._get_or_create(
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
        """Return the engine of a kind of database other than pages."""
        return self.kv if kind is DbKind.LSM else self.streams

    def sweep_engines(self, kinds: set[DbKind]) -> None:
        """Let the engines remove the files of dropped databases of these kinds. Those of pages are left to delete jobs."""
        for kind in kinds - {DbKind.PAGES}:
            self.engine_of(kind).sweep()

    @property
    def sqlite(self) -> SqliteDatabases:
        """SQLite connections."""
        from quire.sqlite.connect import SqliteDatabases

        return self._get_or_create(
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

        return self._get_or_create(
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
        """The store's parts that jobs use."""
        return self._get_or_create(
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
        """The worker that runs jobs."""
        return self._get_or_create(
            "worker", lambda: Worker(self.context, HANDLERS, threads=self._settings.maintenance.workers)
        )

    @property
    def upkeep(self) -> Upkeep:
        """The owner's maintenance."""
        return self._get_or_create(
            "upkeep",
            lambda: Upkeep(
                self.context, self.worker, self.snapshot, self._sweep_versions, self.window, self._close_idle
            ),
        )

    @property
    def window(self) -> ArchiveWindow:
        """Trims the archive and deletes retired objects that no restorable moment needs."""
        return self._get_or_create("window", lambda: ArchiveWindow(self.context, self._settings.archive))

    def _spark(self) -> Runner:
        """Return a runner on the current Spark session, or on a new one. Called only for a job that is large or requests it."""
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
        """Return a database's name, or its number if it was dropped in the meantime."""
        with self._manifest.read() as txn:
            record = txn.database(db_id)
        return record.name if record is not None else str(db_id)

    def _upload(self, keys: Sequence[ArtifactKey]) -> None:
        upload_now(self._manifest, self.worker, keys)

    def _sweep_versions(self) -> int:
        """Remove what dropped streams left behind if the process that dropped them was killed, and files of dropped key-value
        snapshots; record the ends of key-value logs. The key-value part is skipped until that engine is loaded."""
        if has_dropped_streams(self.context):
            self.streams.sweep()
        if "kv" not in self._created:
            return 0
        self.kv.record_ends()
        return self.kv.sweep()

    def _close_idle(self) -> int:
        """Close idle key-value sets. Page databases and streams are closed by their engines' own threads."""
        return self.kv.close_idle() if "kv" in self._created else 0

    # ── versions ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def snapshot(self, db: int | str, name: str, tags: dict[str, str] | None) -> SnapshotInfo:
        """Take a snapshot of a database, through its engine if the manifest does not have all of it."""
        db_id, kind, in_segment = self._locate_database(db)
        if kind is not DbKind.PAGES:
            return self.engine_of(kind).snapshot(db, name, tags=tags)
        keep = self.pages.snapshot if in_segment else self._manifest.snapshots.publish
        return keep(db_id, name, tags=tags)

    def snapshot_for_forks(self, template: str) -> SnapshotInfo:
        """Take a snapshot of a page database from which many forks are made. The caller drops it."""
        db_id, _, in_segment = self._locate_database(template)
        expires_at_ms = self._manifest.clock.now_ms() + FORKS_MS
        keep = self.pages.snapshot if in_segment else self._manifest.snapshots.publish
        return keep(db_id, "", tags=FORKS_TAGS, expires_at_ms=expires_at_ms)

    def fork(
        self, db: int | str, new_name: str, *, at: int | str | Epoch | datetime | None, options: ForkOptions
    ) -> int:
        """Fork a database, as it is now or was at a snapshot (id or name) or a moment, and return the new database's id."""
        db_id, kind, in_segment = self._locate_database(db)
        if isinstance(at, str):
            version = self._manifest.snapshots.find(db_id, at)
            at = version.snapshot_id if isinstance(version, SnapshotInfo) else version
        if isinstance(at, Epoch | datetime):
            if kind is not DbKind.PAGES:
                hint = "name one of its snapshots"
                raise WrongKind("only page databases can be forked between snapshots", hint=hint, db_id=db_id)
            return self.sqlite.fork(db_id, new_name, at=at, options=options)
        if kind is not DbKind.PAGES:
            return self.engine_of(kind).fork(db, new_name, at=at, options=options)
        if at is None and in_segment:
            return self.pages.fork(db_id, new_name, options=options)
        return self._manifest.snapshots.fork(db_id, new_name, at=at, options=options)

    def _locate_database(self, db: int | str) -> tuple[int, DbKind, bool]:
        """Return a database's id and kind, and whether it has an open segment, which only the page engine can seal (P13)."""
        with self._manifest.read() as txn:
            db_id, record = txn.require_database(db)
            return db_id, record.kind, has_open_segment(txn, db_id)

    # ── lifecycle ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def close(self) -> None:
        """Stop background work and close the databases. A part that fails does not keep the others from being closed.

        The object stores stay open until `close_stores`.
        """
        with self._create_lock:
            # Under the lock: a part that is created meanwhile is in `parts`, or its creation is refused.
            self._closed = True
            parts = dict(self._created)
        with ExitStack() as closing:  # callbacks run in reverse order
            if FILES in parts:
                closing.callback(parts[FILES].close)
            for name in ("pages", "kv", "streams"):
                if name in parts:
                    closing.callback(parts[name].close)
            if "upkeep" in parts:  # stopping it also stops the worker
                closing.callback(parts["upkeep"].stop)
            elif "worker" in parts:
                closing.callback(parts["worker"].stop)
            if "sqlite" in parts:
                closing.callback(parts["sqlite"].close)

    def close_stores(self) -> None:
        """Close the object stores, after the last upload."""
        with ExitStack() as closing:
            if RIGHTS in self._created:
                closing.callback(self.rights.close)
            if STORES in self._created:
                closing.callback(self.stores.close)
