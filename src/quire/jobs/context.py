"""What a job needs of the store it works for, in one value.

The owner makes one `JobContext` and passes it to the worker and to maintenance; nothing here opens a store or a manifest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from quire.core.clock import Clock
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.settings import MaintenanceSettings
from quire.durable.files import Disk
from quire.jobs.locations import ArtifactLocation, OpenStore, local_name, remote_name
from quire.jobs.runner import Runner, Runners, ThreadRunner, Tools
from quire.manifest.reads import ReadTxn
from quire.manifest.store import ManifestStore
from quire.objects.collector import Collector
from quire.pages.cache import PageCache
from quire.pages.sources import Sources

if TYPE_CHECKING:
    from quire.lsm.engine import KvEngine
    from quire.pages.pagestore import PageStore
    from quire.pages.quota import StorageQuota
    from quire.pages.readers import Lease
    from quire.pages.view import SnapshotView
    from quire.stream.engine import StreamEngine


def no_fencing() -> None:
    """Nobody else could be writing."""


class PagesOfStore(Protocol):
    """What jobs about page databases need of the page engine."""

    @property
    def sources(self) -> Sources: ...

    def stores(self) -> Sequence[PageStore]:
        """The databases that are open."""

    def open(self, db: int | str) -> PageStore: ...

    def close_database(self, db_id: int) -> None: ...

    def flush(self, db_id: int) -> None:
        """Have everything that is written sealed, durable and published; nothing if the database is not open."""

    def floor(self, db_id: int) -> int:
        """How far a checkpoint may go: the lowest version a live reader may ask for (P9)."""

    def readers(self, db_id: int) -> list[Lease]:
        """Who reads the database, oldest version first."""

    def lend(
        self, databases: Sequence[int | str], seconds: float, *, lease_id: int = 0, upload: bool = False
    ) -> tuple[int, list[SnapshotView]]:
        """(id of a lease, a view of each database as it is now)."""

    @property
    def quota(self) -> StorageQuota: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """The store, as a job sees it."""

    manifest: ManifestStore
    root: str
    """The store's directory."""
    disk: Disk
    objects_url: str
    """Of the store's own object store."""
    open_store: OpenStore
    settings: MaintenanceSettings
    collector: Collector
    """Who deletes objects: nobody else can (A3)."""
    pages: PagesOfStore | None = None
    """The page engine; `None` where there is none."""
    before_put: Callable[[], None] = no_fencing
    """Raises if this process may not put objects any more. Object stores of this process ask by themselves; a job whose tasks
    put elsewhere asks before they start, and before it publishes what they wrote."""
    kv: Callable[[], KvEngine] | None = None
    """Gives the key-value engine, which is made when it is first needed; `None` where there is none."""
    streams: Callable[[], StreamEngine] | None = None
    """Gives the stream engine, likewise."""
    runners: Runners = field(default_factory=Runners)
    """Who may run the tasks of a job."""
    bundle_seconds: float = 7 * 86_400.0
    """The period whose manifest-log chunks become one bundle, unless a job names another."""

    @property
    def clock(self) -> Clock:
        """The owner's clock: the only one that decides (M8)."""
        return self.manifest.clock

    def thread_runner(self, label: str = "quire-run") -> ThreadRunner:
        """A runner with threads of this process."""
        if self.pages is not None:
            sources = self.pages.sources
        else:  # a worker without a page engine still moves and verifies bytes
            sources = Sources(root=self.root, disk=self.disk, open_store=self.open_store, cache=PageCache(0))
        return ThreadRunner(Tools(sources, self.open_store, self.disk, self.root), self.settings.workers, label=label)

    def choose_runner(self, name: str, size_bytes: int, *, label: str) -> Runner:
        """The runner of this name for so many bytes of work; without a name the one that settings or size suggest."""
        return self.runners.choose(name, size_bytes, lambda: self.thread_runner(label))

    def place(self, txn: ReadTxn, key: ArtifactKey) -> ArtifactLocation | None:
        """Where an artifact's bytes are; `None` if the catalog does not know it."""
        row = txn.artifact(key)
        return None if row is None else self.place_of(txn, key, row)

    def place_of(self, txn: ReadTxn, key: ArtifactKey, row: Any) -> ArtifactLocation:
        """Where an artifact's bytes are, or would be, if this was its row."""
        namespace = txn.namespace(row.namespace_id) if row.namespace_id else None
        url, name = remote_name(key, row, namespace, self.objects_url)
        return ArtifactLocation(
            key=key,
            residency=row.residency,
            local=os.path.join(self.root, local_name(key, row)),
            url=url,
            object_key=name,
            size_bytes=row.used_bytes if key.kind is ArtifactKind.WAL else row.size_bytes,
            sha256=row.sha256,
            crc64=getattr(row, "crc64", 0),
            is_announced=bool(row.suffix),
        )
