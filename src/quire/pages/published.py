"""Snapshots of the published state of a database, for read-only processes; the owner may use them as well.

Published is everything up to `last_applied_lsn` in the manifest, at most a second behind what is durable (P6). Reading works as
in the owner (`versions.py`, P8), without unpublished versions. A snapshot's lease file is renewed while the snapshot is
referenced; an abandoned one is released when it is garbage-collected. On a standby, a snapshot also holds the rows that it
started with. If the owner has retired the lease (because this process was stopped for too long), reading raises `LeaseExpired`,
at the latest when a needed page is gone; wrong data is never returned (P8). After fork() the child's snapshots are closed; the
parent's stay open (M12).

Threads: opening by any, a snapshot by one at a time; heartbeats have their own thread. Raises `UnknownDatabase`,
`DatabaseTombstoned`, `WrongKind`, `SnapshotGone`, `LeaseExpired`, `StoreClosed`, `NotWritable` if this process may not write to
the store's `readers/`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

from quire.core.clock import Clock
from quire.core.errors import Corruption, SnapshotGone, StoreClosed
from quire.core.events import emit
from quire.durable import names
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.store import ManifestStore
from quire.pages.anchors import inherited_map
from quire.pages.catalog import PageShape, find_database, shape_of
from quire.pages.framemap import Regions
from quire.pages.leasefiles import FileLease
from quire.pages.page_source import Mark
from quire.pages.readers import HEARTBEAT_SECONDS
from quire.pages.recovery import published_mark
from quire.pages.snapshot import Snapshot
from quire.pages.sources import Sources
from quire.pages.timetravel import At, find_version
from quire.pages.versions import Versions
from quire.pages.view import SnapshotView
from quire.pages.view_build import open_kept, view_of

OPEN_TRIES = 64
"""How often opening a version is attempted. An attempt fails only if a floor above it is given out just before its lease."""


class HeldRows:
    """The manifest's rows of one moment: keeps a read transaction open as long as the snapshot that uses it."""

    def __init__(self, txn: ReadTxn) -> None:
        self._txn = txn
        self._lock = threading.Lock()  # an LMDB transaction may be used by one thread at a time

    def __call__(self) -> HeldRows:
        return self

    def __enter__(self) -> ReadTxn:
        self._lock.acquire()
        return self._txn

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def close(self) -> None:
        """End the read transaction, after waiting for a thread that is using it."""
        with self._lock:
            self._txn.close()


class PublishedReaders:
    """Opens published snapshots of one store, and keeps them alive."""

    def __init__(
        self,
        *,
        manifest: ManifestStore,
        root: str,
        disk: Disk,
        clock: Clock,
        sources: Sources,
        regions: Regions,
        objects_url: str,
        page_size: int,
        ticking: bool,
    ) -> None:
        # constant after construction
        self._manifest = manifest
        self._root = root
        self._disk = disk
        self._clock = clock
        self._sources = sources
        self._regions = regions
        self._objects_url = objects_url
        self._page_size = page_size
        self._ticking = ticking
        # guarded by _lock
        self._lock = threading.Lock()
        self._versions: dict[int, Versions] = {}
        self._open: weakref.WeakSet[FileLease] = weakref.WeakSet()
        self._heart: threading.Thread | None = None
        self._stopping = threading.Event()

    # ── opening ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def open(self, db: int | str, *, tags: dict[str, str] | None = None) -> Snapshot:
        """Open a snapshot of the newest published version."""
        return self._open_version(db, self._newest, tags)

    def open_at(self, db: int | str, at: At, *, tags: dict[str, str] | None = None) -> Snapshot:
        """Open the version that was current `at` an lsn or a time: a live one through a lease, an older one from the snapshot
        that still has it (P14)."""

        def find(txn: ReadTxn, db_id: int) -> Mark | SnapshotView:
            newest = self._newest(txn, db_id)
            version = find_version(txn, self._regions, db_id, at, newest, self._objects_url)
            if version.record is None:
                return version.mark
            return view_of(txn, db_id, version.snapshot_id, version.record, self._objects_url, at=version.mark)

        try:
            return self._open_version(db, find, tags)
        except Corruption:
            return self._open_version(db, find, tags)  # a segment was released during the search

    def _open_version(
        self, db: int | str, find: Callable[[ReadTxn, int], Mark | SnapshotView], tags: dict[str, str] | None
    ) -> Snapshot:
        """Take a lease on a version, then check it against the floor's row; try again if a checkpoint may have passed it."""
        with self._manifest.read() as txn:
            db_id, record = find_database(txn, db)
            version = find(txn, db_id)
        if self._disk.exists(os.path.join(self._root, names.STANDBY)):
            return self._open_held(db_id, find, version, tags)
        shape, lsn = shape_of(db_id, record, 0, self._page_size), -1
        for _ in range(OPEN_TRIES):
            if isinstance(version, SnapshotView):
                return open_kept(self._manifest, version, self._sources, self._regions)
            if version.lsn <= lsn:
                break  # an earlier version was requested, so there is no newer one to use instead
            lsn = version.lsn
            file = FileLease.take(self._disk, self._clock, self._root, db_id=db_id, lsn=lsn, tags=dict(tags or {}))
            try:
                hit("pages.published.leased")
                with self._manifest.read() as txn:  # after the lease is written: see `leasefiles.py`
                    find_database(txn, db_id)
                    floor = txn.get(t.SNAPSHOT_FLOOR, db_id)
                    is_late = floor is not None and floor.min_snapshot_lsn > lsn
                    again = find(txn, db_id) if is_late else version
                if not is_late:
                    return self._make(db_id, shape, file, version)
            except BaseException:
                file.close()
                raise
            file.close()
            version = again
        raise SnapshotGone(
            "a checkpoint passed this version before it could be held",
            hint="open a newer one, or a snapshot",
            db_id=db_id,
            lsn=lsn,
        )

    def _open_held(
        self,
        db_id: int,
        find: Callable[[ReadTxn, int], Mark | SnapshotView],
        version: Mark | SnapshotView,
        tags: dict[str, str] | None,
    ) -> Snapshot:
        """Open a version on a standby.

        The owner does not see leases on a standby and does not wait for them. So the rows of this moment are held instead, and
        the standby keeps the files that they name (`archive/kept_files.py`): first the lease is taken, then the rows are read.
        """
        lsn = version.lsn if isinstance(version, Mark) else 0
        file = FileLease.take(self._disk, self._clock, self._root, db_id=db_id, lsn=lsn, tags=dict(tags or {}))
        try:
            hit("pages.published.leased")
            rows = HeldRows(self._manifest.read())
            file.when_closed(rows.close)
            with rows as txn:
                record = find_database(txn, db_id)[1]
                version = find(txn, db_id)
            if isinstance(version, Mark):
                return self._make(db_id, shape_of(db_id, record, 0, self._page_size), file, version, rows)
        except BaseException:
            file.close()
            raise
        file.close()
        return open_kept(self._manifest, version, self._sources, self._regions)

    def _newest(self, txn: ReadTxn, db_id: int) -> Mark:
        return published_mark(txn, self._disk, self._root, db_id)

    def _make(
        self, db_id: int, shape: PageShape, file: FileLease, mark: Mark, rows: HeldRows | None = None
    ) -> Snapshot:
        versions = self._versions_of(db_id, shape)
        if rows is not None:
            versions = versions.as_of(rows)
        with self._lock:
            # Under the lock: `close` finds this lease, or it is refused here.
            if self._stopping.is_set():
                raise StoreClosed("the store is closed", hint="open it again")
            self._open.add(file)
            if self._heart is None and self._ticking:
                self._heart = threading.Thread(target=self._beat_on, name="quire-leases", daemon=True)
                self._heart.start()
        return Snapshot(versions, mark, file)

    def _versions_of(self, db_id: int, shape: PageShape) -> Versions:
        versions = self._versions.get(db_id)
        if versions is None:
            try:
                versions = self._new_versions(db_id, shape)
            except Corruption:  # a segment was truncated in the meantime
                versions = self._new_versions(db_id, shape)
            if self._manifest_knows(db_id):
                versions = self._versions.setdefault(db_id, versions)
        return versions

    def _new_versions(self, db_id: int, shape: PageShape) -> Versions:
        with self._manifest.read() as txn:
            inherited = inherited_map(txn, self._regions, db_id, self._objects_url)
        return Versions(
            db_id=db_id,
            page_size=shape.page_size,
            pages_per_chunk=shape.pages_per_chunk,
            begin_read=self._manifest.read,
            sources=self._sources,
            objects_url=self._objects_url,
            inherited=inherited,
        )

    def _manifest_knows(self, db_id: int) -> bool:
        """Return whether the database's shape is fixed. The default shape of a database that was never opened is not cached."""
        with self._manifest.read() as txn:
            record = txn.database(db_id)
        return record is not None and bool(record.page_size)

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    def beat(self) -> None:
        """Renew all open leases, and report those that were lost."""
        for lease in self._leases():
            where = {"db_id": lease.record.db_id, "lsn": lease.record.lsn}
            try:
                if lease.open and not lease.beat() and lease.was_lost:  # and not just closed by its holder
                    emit("warning", "reader.lease_lost", **where, tags=lease.tags)
            except Exception as error:  # if the thread ended, all leases of the process would expire
                emit("warning", "reader.heartbeat_failed", **where, error=error)

    def _beat_on(self) -> None:
        while not self._stopping.wait(HEARTBEAT_SECONDS):
            self.beat()

    def _leases(self) -> list[FileLease]:
        with self._lock:
            return list(self._open)

    def __len__(self) -> int:
        return sum(lease.open for lease in self._leases())

    def close(self) -> None:
        """End every lease; reading through them raises from now on."""
        with self._lock:
            self._stopping.set()
            heart, self._heart = self._heart, None
        if heart is not None:
            heart.join()
        for lease in self._leases():
            lease.close()

    def forked(self) -> None:
        """Close the snapshots in a forked child. The lease files have their own fork hook."""
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._stopping.set()
        self._heart = None
