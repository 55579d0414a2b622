"""The parts of a store that jobs need, as one value.

The owner creates one `JobContext` and passes it to the worker and to maintenance; nothing here opens a store or a manifest.
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
    """Do nothing: no other process can write."""


class PagesOfStore(Protocol):
    """The part of the page engine that jobs use."""

    @property
    def sources(self) -> Sources: ...

    def stores(self) -> Sequence[PageStore]:
        """Return the databases that are open."""

    def open(self, db: int | str) -> PageStore: ...

    def close_database(self, db_id: int) -> None: ...

    def flush(self, db_id: int) -> None:
        """Make everything that is written sealed, durable and published; do nothing if the database is not open."""

    def floor(self, db_id: int) -> int:
        """Return the lsn that a checkpoint may not pass: the lowest version that a live reader may need (P9)."""

    def readers(self, db_id: int) -> list[Lease]:
        """Return the leases of the database's readers, oldest version first."""

    def lend(
        self, databases: Sequence[int | str], seconds: float, *, lease_id: int = 0, upload: bool = False
    ) -> tuple[int, list[SnapshotView]]:
        """Return (id of a lease, a view of the current version of each database)."""

    @property
    def quota(self) -> StorageQuota: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """The store as jobs see it."""

    manifest: ManifestStore
    root: str
    """The store's directory."""
    disk: Disk
    objects_url: str
    """URL of the store's own object store."""
    open_store: OpenStore
    settings: MaintenanceSettings
    collector: Collector
    """The only way to delete objects (A3)."""
    pages: PagesOfStore | None = None
    """The page engine, or `None`."""
    before_put: Callable[[], None] = no_fencing
    """Raises if this process may no longer put objects. Object stores of this process call it themselves; a job whose tasks put
    objects from other processes calls it before the tasks start, and before it publishes what they wrote."""
    kv: Callable[[], KvEngine] | None = None
    """Returns the key-value engine, which is created on first use; or `None`."""
    streams: Callable[[], StreamEngine] | None = None
    """Returns the stream engine, which is created on first use; or `None`."""
    runners: Runners = field(default_factory=Runners)
    """The runners that may run the tasks of a job."""
    bundle_seconds: float = 7 * 86_400.0
    """The period whose manifest-log chunks become one bundle, unless a job names another."""

    @property
    def clock(self) -> Clock:
        """The owner's clock: the only one that decides (M8)."""
        return self.manifest.clock

    def thread_runner(self, label: str = "quire-run") -> ThreadRunner:
        """Return a runner that uses threads of this process."""
        if self.pages is not None:
            sources = self.pages.sources
        else:  # a worker without a page engine still moves and verifies bytes
            sources = Sources(root=self.root, disk=self.disk, open_store=self.open_store, cache=PageCache(0))
        return ThreadRunner(Tools(sources, self.open_store, self.disk, self.root), self.settings.workers, label=label)

    def choose_runner(self, name: str, size_bytes: int, *, label: str) -> Runner:
        """Return the named runner; without a name, the one that the settings and `size_bytes` of work select."""
        return self.runners.choose(name, size_bytes, lambda: self.thread_runner(label))

    def place(self, txn: ReadTxn, key: ArtifactKey) -> ArtifactLocation | None:
        """Return where an artifact's bytes are; `None` if it has no catalog row."""
        row = txn.artifact(key)
        return None if row is None else self.place_of(txn, key, row)

    def place_of(self, txn: ReadTxn, key: ArtifactKey, row: Any) -> ArtifactLocation:
        """Return where an artifact's bytes are, or would be, if `row` were its catalog row."""
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
