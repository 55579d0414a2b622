"""The databases of a store and their snapshots, as tools list them: Datasette, sqlite-utils, fsspec.

A tool that reads does not take the store from its owner: it uses the store that this process has open, or reads alongside the
owner.

Threads: any. Raises the errors of opening a store.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from urllib.parse import quote

from quire.manifest.records import DbKind, SnapshotKind
from quire.pages.snapshot import Snapshot
from quire.service.version_address import DatabaseVersion
from quire.store.store import Store

TAGS = {"reader": "file"}


@dataclass(frozen=True, slots=True)
class ListedVersion:
    """A database as it is now, or at one of its snapshots."""

    name: str
    snapshot: str
    """Empty for the newest version."""
    db_id: int
    snapshot_id: int
    size_bytes: int
    """Published size: for a database that is being written, up to a second old."""
    lsn: int
    time_ms: int
    """When the snapshot was made; 0 for the newest version, which changes."""

    @property
    def label(self) -> str:
        """`shop`, `shop@monday`."""
        return f"{self.name}@{self.snapshot}" if self.snapshot else self.name

    def url(self, root: str) -> str:
        """Return the URL for `quire.sqlite.dbapi.connect`.

        >>> ListedVersion("shop", "monday", 1, 1, 0, 0, 0).url("/data/store")
        'quire:////data/store/shop?at=monday'
        """
        return f"quire:///{quote(root)}/{quote(self.name)}" + (f"?at={quote(self.snapshot)}" if self.snapshot else "")


def list_versions(store: Store, pattern: str = "*", *, snapshots: bool = True) -> Iterator[ListedVersion]:
    """Yield the databases of a store whose names match, each followed by its named snapshots, oldest first."""
    for info in store.databases():
        if info.kind is not DbKind.PAGES or not fnmatchcase(info.name, pattern):
            continue
        with store.manifest.read() as txn:
            wal = txn.wal_state(info.db_id)
        size, lsn = (wal.size_pages * info.page_size, wal.last_applied_lsn) if wal is not None else (0, 0)
        yield ListedVersion(info.name, "", info.db_id, 0, size, lsn, 0)
        if snapshots and info.snapshots:
            for kept in store.manifest.snapshots.of(info.db_id):
                if kept.kind is SnapshotKind.NAMED:
                    size = kept.size_pages * kept.page_size
                    yield ListedVersion(
                        info.name, kept.name, info.db_id, kept.snapshot_id, size, kept.anchor_lsn, kept.created_at_ms
                    )


def open_version(store: Store, version: DatabaseVersion) -> Snapshot:
    """Open a reader of a version, which keeps the version unchanged until it is closed."""
    pages = store.pages
    if isinstance(version.at, str):
        return pages.open_view(version.name, version.at)
    if store.mode != "r":
        opened = pages.open(version.name)
        opened.wal.sync()  # commits below `synchronous=FULL` are visible at once, but only durable versions are opened
        return opened.open_snapshot(at=version.at, tags=TAGS).__enter__()  # to renew its lease
    if version.at is None:
        return pages.open_published(version.name, tags=TAGS).__enter__()
    return pages.open_published_at(version.name, version.at, tags=TAGS).__enter__()
