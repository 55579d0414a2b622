"""One page database: one writer at a time, and any number of readers, each on its own version.

Terms
  version    the database as of one commit, named by its lsn (P5)
  snapshot   a reader's lease on a version; it never blocks the writer and is never blocked by it

`begin` waits for the write lock and for room in the WAL budget; `commit` waits for neither (P7). A transaction sees everything
written before it and its own writes; readers see what is durable, through `versions`, which includes unpublished versions (P8).
Pages are numbered from 0; a page at or beyond the size of its version is an error, not zeros (P15).

Threads: any; a `WriteTxn` and a `Snapshot` belong to one thread at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from threading import get_ident
from typing import overload

from pyroaring import BitMap

from quire.core.clock import Clock
from quire.core.errors import (
    Corruption,
    EpochLost,
    InvalidInput,
    OutOfRange,
    SnapshotGone,
    StoreClosed,
    TimedOut,
)
from quire.manifest.records import DbStatus
from quire.manifest.store import ManifestStore
from quire.manifest.writability import Writability
from quire.pages.changes import changed_pages
from quire.pages.framemap import EMPTY_MAP, FrameMap, Regions
from quire.pages.page_source import Mark
from quire.pages.readers import LEASE_SECONDS, Readers
from quire.pages.snapshot import Snapshot
from quire.pages.sources import Sources
from quire.pages.timetravel import At, find_version
from quire.pages.transaction import SPILL_BYTES, WriteTxn
from quire.pages.versions import Versions
from quire.pages.view import SnapshotView, ViewReader
from quire.pages.view_build import open_kept, view_of
from quire.pages.wal import Wal

UNPUBLISHED_MAX = 36 << 20
"""Bytes: two segments and a step (P6). Above it, `begin` publishes before it starts a transaction."""

OPEN_TRIES = 20
OPEN_PAUSE_SECONDS = 0.005
"""How often, and with what pause, a version is looked up again if a checkpoint was just allowed to pass it."""


class PageStore:
    """An open page database; created by the engine."""

    def __init__(
        self,
        *,
        db_id: int,
        page_size: int,
        pages_per_chunk: int,
        manifest: ManifestStore,
        clock: Clock,
        wal: Wal,
        readers: Readers,
        sources: Sources,
        regions: Regions,
        objects_url: str,
        wait_for_room: Callable[[PageStore, float], None],
        inherited: FrameMap = EMPTY_MAP,
        spill_bytes: int = SPILL_BYTES,
    ) -> None:
        # constant after construction
        self.db_id = db_id
        self.page_size = page_size
        self.pages_per_chunk = pages_per_chunk
        self.wal = wal
        self.readers = readers
        self.sources = sources
        self._manifest = manifest
        self._clock = clock
        self._regions = regions
        self._objects_url = objects_url
        self._wait_for_room = wait_for_room
        self.versions = Versions(
            db_id=db_id,
            page_size=page_size,
            pages_per_chunk=pages_per_chunk,
            begin_read=manifest.read,
            sources=sources,
            objects_url=objects_url,
            inherited=inherited,
            unpublished=wal.newest,
        )
        """The pages of any version."""
        self._spill_pages = max(spill_bytes // page_size, 1)
        # written by the quota
        self.room_until = 0
        """The value of `wal.appended_bytes` from which on a writer must ask for room again."""
        # guarded by _write_lock
        self._write_lock = threading.Lock()
        self._writer = 0
        """The thread that holds the write lock, for messages."""
        self._writable = Writability(manifest, db_id)

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def begin(self, timeout: float = 30.0) -> WriteTxn:
        """Begin a write transaction; wait up to `timeout` seconds for the previous writer and for room in the WAL."""
        if not self._write_lock.acquire(blocking=False):
            timeout = self._wait_for_writer(timeout)
        try:
            self._writer = get_ident()
            wal = self.wal
            self._writable.require()
            if wal.failure is not None:
                wal.require()
            # Here and not in `commit` (P7). It bounds the versions in memory, and what recovery would have to verify.
            if wal.unpublished_bytes > UNPUBLISHED_MAX:
                wal.sync()
                wal.publish()
            if wal.appended_bytes >= self.room_until:
                self._wait_for_room(self, timeout)
            return WriteTxn(wal, self.versions, self._writable.require, self._write_lock.release, self._spill_pages)
        except BaseException:
            self._write_lock.release()
            raise

    def _wait_for_writer(self, timeout: float) -> float:
        """Take the write lock and return the time left, in seconds."""
        if timeout < 0:
            raise InvalidInput("a timeout must not be negative", timeout=timeout)
        started = self._clock.monotonic()
        if not self._write_lock.acquire(timeout=timeout):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            raise TimedOut(
                "another transaction is writing to the database",
                hint="commit it or roll it back, or try again",
                db_id=self.db_id,
                writer=names.get(self._writer, "a thread that has ended"),
                seconds=timeout,
            )
        return max(timeout - (self._clock.monotonic() - started), 0.0)

    @property
    def is_dropped(self) -> bool:
        """Whether the database is tombstoned or gone from the manifest; a read-only one is not dropped."""
        with self._manifest.read() as txn:
            record = txn.database(self.db_id)
        return record is None or record.status is DbStatus.TOMBSTONED

    @property
    def is_busy(self) -> bool:
        """Whether it has readers or a writer, or has failed and its users must still get the error."""
        return bool(len(self.readers)) or self._write_lock.locked() or self.wal.failure is not None

    @property
    def is_quiescent(self) -> bool:
        """Whether the ticker has nothing to do: there are no readers, and everything is sealed and published."""
        return not len(self.readers) and self.wal.is_quiescent

    def close(self) -> None:
        """Flush and close the WAL, so that nothing is left to recover; abandon it if the database was dropped.

        For the engine.
        """
        if self.is_dropped:
            self.wal.abandon(StoreClosed("the database was dropped", db_id=self.db_id))
        else:
            self.wal.close()

    # ── opening versions ──────────────────────────────────────────────────────────────────────────────────────────────
    @overload
    def open_snapshot(
        self,
        *,
        at: None = None,
        tags: dict[str, str] | None = None,
        ttl_seconds: float | None = LEASE_SECONDS,
        written: bool = False,
    ) -> Snapshot: ...

    @overload
    def open_snapshot(
        self, *, at: At, tags: dict[str, str] | None = None, ttl_seconds: float | None = LEASE_SECONDS
    ) -> Snapshot: ...

    def open_snapshot(
        self,
        *,
        at: At | None = None,
        tags: dict[str, str] | None = None,
        ttl_seconds: float | None = LEASE_SECONDS,
        written: bool = False,
    ) -> Snapshot:
        """Open a lease on the newest durable version, or on the one that was current `at` an lsn or a time (P14).

        With `written=True`, on the newest written version, which may not survive a crash (Q2).
        """
        if at is not None:
            return self._open_at(at, tags, ttl_seconds)
        wal = self.wal

        def newest() -> tuple[int, Mark]:
            mark = wal.written if written else wal.durable
            return mark.lsn, mark

        lease, mark = self.readers.open_newest(newest, tags=tags, ttl_seconds=ttl_seconds)
        return Snapshot(self.versions, mark, lease)

    def open_mark(
        self, mark: Mark, *, tags: dict[str, str] | None = None, ttl_seconds: float | None = LEASE_SECONDS
    ) -> Snapshot:
        """Open another lease on a version that is already open."""
        return Snapshot(self.versions, mark, self.readers.open(mark.lsn, tags=tags, ttl_seconds=ttl_seconds))

    def _open_at(self, at: At, tags: dict[str, str] | None, ttl_seconds: float | None) -> Snapshot:
        for tries_left in reversed(range(OPEN_TRIES)):
            try:
                return self._find_and_open(at, tags, ttl_seconds)
            except Corruption:
                break  # a segment was released during the search: search again below
            except SnapshotGone as gone:
                # With a time-travel window, a checkpoint that was given this floor is about to keep the versions below it.
                if "floor" not in gone.where or not tries_left:
                    raise
                time.sleep(OPEN_PAUSE_SECONDS)
        return self._find_and_open(at, tags, ttl_seconds)

    def _find_and_open(self, at: At, tags: dict[str, str] | None, ttl_seconds: float | None) -> Snapshot:
        # Before publication: the index regions are then complete up to this version.
        durable = self.wal.durable
        self._have_indexed()
        with self._manifest.read() as txn:
            version = find_version(txn, self._regions, self.db_id, at, durable, self._objects_url)
            view = (
                view_of(txn, self.db_id, version.snapshot_id, version.record, self._objects_url, at=version.mark)
                if version.record is not None
                else None
            )
        if view is not None:
            return self.read_view(view)
        lease = self.readers.open(version.mark.lsn, tags=tags, ttl_seconds=ttl_seconds)
        return Snapshot(self.versions, version.mark, lease)

    def _have_indexed(self) -> None:
        """Publish everything durable: earlier versions are searched in index regions, which must be complete."""
        wal = self.wal
        if wal.failure is None:
            wal.publish()
        elif wal.unpublished_bytes:
            wal.require()

    def read_view(self, view: SnapshotView) -> ViewReader:
        """Return a reader of a view of this database; it raises `SnapshotGone` after the view's snapshot is dropped."""

        return open_kept(self._manifest, view, self.sources, self._regions)

    def changed(self, since: int, upto: Mark) -> BitMap:
        """Return a superset of the pages below the size of `upto` that differ between the versions `since` and `upto`.

        That is all pages if `since` is 0 or older than the kept history (`changes.py`). REQUIRES that `upto` is open. Raises
        `EpochLost` if a takeover lies between the two, `OutOfRange` if `since` is above `upto`.
        """
        if not 0 <= since <= upto.lsn:
            raise OutOfRange("this version does not exist yet", hint="start again from 0", since=since, upto=upto.lsn)
        if not since:
            return BitMap(range(upto.size_pages))
        for tries_left in reversed(range(OPEN_TRIES)):
            try:
                return self._changed(since, upto)
            except Corruption:  # a segment was released while its region was read
                if not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")

    def _changed(self, since: int, upto: Mark) -> BitMap:
        # Unpublished versions first, then the transaction: versions published in between are in both (P8).
        newest = self.wal.newest
        pages = BitMap()
        for page in tuple(self.wal.unpublished):
            version = newest(page, upto.lsn)
            if version is not None and version[0] > since and page < upto.size_pages:
                pages.add(page)
        with self._manifest.read() as txn:
            begun = [first for first, _ in txn.timelines() if since < first <= upto.lsn]
            if begun:
                raise EpochLost(
                    "the store was taken over since this version",
                    hint="start again from 0",
                    db_id=self.db_id,
                    since=since,
                    first_lsn=begun[-1],
                )
            shape = (self.db_id, self.pages_per_chunk, self._objects_url)
            return pages | changed_pages(txn, self._regions, *shape, since, upto)

    def durable_version(self) -> tuple[int, int]:
        """Return (lsn, size in pages) of the newest durable version, read consistently."""
        mark = self.wal.durable
        return mark.lsn, mark.size_pages
