"""The rooms a store has once somebody needs them: object stores, the page engine, the worker and its upkeep.

Kept apart from `store.py` because loading them (numpy, checksums, the page engine) takes longer than most commands do: `Store`
imports this module when it is first asked for one of them; the owner's background upkeep asks only after its first interval.
"""

from __future__ import annotations

from contextlib import ExitStack

from quire.core.settings import StoreSettings
from quire.durable.files import Disk
from quire.jobs.context import JobContext, StorePool
from quire.jobs.handlers import HANDLERS
from quire.jobs.upkeep import Upkeep
from quire.jobs.worker import Worker
from quire.manifest.store import ManifestStore
from quire.objects.api import ObjectStore
from quire.objects.open import open_store
from quire.pages.engine import PageEngine
from quire.store.info import has_open_segment


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
        self.worker = Worker(context, HANDLERS, threads=settings.maintenance.workers)
        self.upkeep = Upkeep(context, self.worker, self._snapshot)
        self._manifest = manifest

    def _open(self, url: str) -> ObjectStore:
        return open_store(url, disk=self._disk)

    def _snapshot(self, db_id: int, name: str, tags: dict[str, str]) -> None:
        """A scheduled snapshot: through the engine, if some of the database is in an open segment (P13)."""
        with self._manifest.read() as txn:
            in_segment = has_open_segment(txn, db_id)
        if in_segment:
            self.pages.snapshot(db_id, name, tags=tags)
        else:
            self._manifest.snapshots.publish(db_id, name, tags=tags)

    def close(self) -> None:
        """Stop the work, close the databases, close the object stores; each whatever the others do."""
        with ExitStack() as closing:  # runs from the last to the first
            closing.callback(self.stores.close)
            closing.callback(self.pages.close)
            closing.callback(self.upkeep.stop)
