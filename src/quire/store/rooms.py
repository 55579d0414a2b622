"""The rooms a store has once somebody needs them: object stores, the page engine, the worker and its upkeep.

Kept apart from `store.py` because loading them (numpy, checksums, the page engine) takes longer than most commands do: `Store`
imports this module when it is first asked for one of them; the owner's background upkeep asks only after its first interval.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.core.ids import ArtifactKey
from quire.core.settings import StoreSettings
from quire.durable.files import Disk
from quire.jobs.context import JobContext, StorePool
from quire.jobs.handler import Handler, Outcome, Progress
from quire.jobs.handlers import HANDLERS
from quire.jobs.runner import Runner, Runners
from quire.jobs.sweep.handler import sweep_job
from quire.jobs.upkeep import Upkeep
from quire.jobs.uploads import upload_now
from quire.jobs.worker import Worker
from quire.manifest.jobqueue import Job
from quire.manifest.records import DbKind, JobKind
from quire.manifest.store import ManifestStore
from quire.objects.api import ObjectStore
from quire.objects.open import open_store
from quire.pages.engine import PageEngine
from quire.store.info import has_open_segment

if TYPE_CHECKING:
    from quire.lsm.engine import KvEngine
    from quire.sqlite.connect import SqliteRoom
    from quire.stream.engine import StreamEngine


HEAVY = (JobKind.CHECKPOINT, JobKind.MERGE, JobKind.VERIFY, JobKind.AUDIT, JobKind.RESTORE, JobKind.STATS)
"""Jobs whose bytes may be moved by Spark."""


class Rooms:
    """Everything above the manifest, of one opened store."""

    def __init__(
        self, *, path: str, settings: StoreSettings, manifest: ManifestStore, disk: Disk, objects_url: str
    ) -> None:
        self._disk = disk
        self.stores = StorePool(self._open)
        self.pages = PageEngine(
            manifest=manifest,
            root=path,
            disk=disk,
            clock=manifest.clock,
            open_store=self.stores,
            objects_url=objects_url,
            settings=settings.pages,
            upload=None if manifest.read_only else self._upload,
        )
        context = JobContext(
            manifest=manifest,
            root=path,
            disk=disk,
            objects_url=objects_url,
            open_store=self.stores,
            settings=settings.maintenance,
            pages=self.pages,
        )
        self.context = context
        self.runners = Runners(self._spark, settings.maintenance.runner)
        known: dict[JobKind, Any] = dict(HANDLERS)
        handlers: dict[JobKind, Handler] = {
            **HANDLERS,
            **{kind: partial(known[kind], runners=self.runners) for kind in HEAVY},
            JobKind.SWEEP: partial(sweep_job, runners=self.runners),
            JobKind.BUNDLE: self._bundle,
            JobKind.COMPACTION: self._compact,
        }
        self.handlers = handlers
        self.worker = Worker(context, handlers, threads=settings.maintenance.workers)
        self.upkeep = Upkeep(context, self.worker, self._snapshot, self._sweep_versions)
        self._manifest = manifest
        self._page_size = settings.pages.page_size
        self._path = path
        self._lsm = settings.lsm
        self._settings = settings
        self._objects_url = objects_url
        # guarded by _connecting
        self._connecting = threading.Lock()
        self._sqlite: SqliteRoom | None = None
        self._kv: KvEngine | None = None
        self._streams: StreamEngine | None = None

    @property
    def streams(self) -> StreamEngine:
        """The streams; loaded when somebody wants one."""
        from quire.stream.engine import StreamEngine

        with self._connecting:
            if self._streams is None:
                self._streams = StreamEngine(
                    manifest=self._manifest,
                    root=self._path,
                    disk=self._disk,
                    clock=self._manifest.clock,
                    store=lambda: self.stores(self._objects_url),
                    settings=self._settings.stream,
                    log_settings=self._settings.manifest_log,
                    background=self._settings.maintenance.enabled,
                )
            return self._streams

    def engine_of(self, kind: DbKind) -> KvEngine | StreamEngine:
        """Who looks after databases of a kind that are not made of pages."""
        return self.kv if kind is DbKind.LSM else self.streams

    @property
    def kv(self) -> KvEngine:
        """The key-value databases; loaded when somebody wants one."""
        from quire.lsm.engine import KvEngine

        with self._connecting:
            if self._kv is None:
                manifest = self._manifest
                self._kv = KvEngine(
                    manifest=manifest, root=self._path, disk=self._disk, clock=manifest.clock, settings=self._lsm
                )
            return self._kv

    def _compact(self, ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        """Compactions of key-value databases; the engine is loaded with the first of them."""
        from quire.jobs.compaction.handler import compaction_job

        return compaction_job(ctx, job, progress, runners=self.runners, kvs=lambda: self.kv)

    def _bundle(self, ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        """Bundles of streams' manifest logs; the engine is loaded with the first of them."""
        from quire.jobs.bundle.handler import bundle_job

        week = self._settings.manifest_log.bundle_seconds
        return bundle_job(ctx, job, progress, streams=lambda: self.streams, runners=self.runners, period_seconds=week)

    @property
    def sqlite(self) -> SqliteRoom:
        """SQLite connections; loaded when somebody wants one."""
        from quire.sqlite.connect import SqliteRoom

        with self._connecting:
            if self._sqlite is None:
                self._sqlite = SqliteRoom(
                    manifest=self._manifest,
                    engine=self.pages,
                    page_size=self._page_size,
                    read_only=self._manifest.read_only,
                )
            return self._sqlite

    def _spark(self) -> Runner:
        """The running Spark session's runner, or a new session's; loaded when a job is large enough, or asked for."""
        from quire.spark.runner import SparkRunner
        from quire.spark.session import session

        spark, context = session(), self.context
        sees = True if context.settings.executors_see_store else None
        return SparkRunner(spark, root=context.root, objects_url=context.objects_url, shares_disk=sees)

    def _upload(self, keys: Sequence[ArtifactKey]) -> None:
        upload_now(self._manifest, self.worker, keys)

    def _open(self, url: str) -> ObjectStore:
        return open_store(url, disk=self._disk)

    def _sweep_versions(self) -> int:
        """Files of dropped key-value snapshots; they can wait until the engine is loaded for something else."""
        return self._kv.sweep() if self._kv is not None else 0

    def _snapshot(self, db_id: int, name: str, tags: dict[str, str]) -> None:
        """A scheduled snapshot: through the engine, if some of the database is in an open segment (P13)."""
        with self._manifest.read() as txn:
            in_segment = has_open_segment(txn, db_id)
            record = txn.database(db_id)
        if record is not None and record.kind is DbKind.LSM:
            self.kv.snapshot(db_id, name, tags=tags)
        elif in_segment:
            self.pages.snapshot(db_id, name, tags=tags)
        else:
            self._manifest.snapshots.publish(db_id, name, tags=tags)

    def close(self) -> None:
        """Stop the work, close the databases, close the object stores; each whatever the others do."""
        with ExitStack() as closing:  # runs from the last to the first
            closing.callback(self.stores.close)
            closing.callback(self.pages.close)
            if self._kv is not None:
                closing.callback(self._kv.close)
            if self._streams is not None:
                closing.callback(self._streams.close)
            closing.callback(self.upkeep.stop)
            if self._sqlite is not None:
                closing.callback(self._sqlite.close)
