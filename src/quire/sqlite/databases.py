"""State shared by all connections to one database: the page engine's handle, the writer slot and the newest pages. Also the
version that one connection reads.

A database without a page size is unborn: the first page written fixes it. When the engine has given up a handle (a sync with
an unknown outcome, M12), opening the next connection recovers the database. Earlier connections continue with the new handle
from their next transaction on.

Threads: any. A `ReadPin` belongs to one thread at a time, except `renew` and `is_old`, which belong to the keeper.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from quire.core.errors import QuireError, UnknownDatabase
from quire.core.waiting import Waiters
from quire.manifest.store import ManifestStore
from quire.pages.engine import PageEngine
from quire.pages.page_source import Mark
from quire.pages.pagestore import PageStore
from quire.pages.readers import Lease, program
from quire.pages.snapshot import Snapshot

EARLY_MAX = 8
"""How often a sleep may end early for one lock. No sleep exceeds 0.1 s, so a timeout is never 0.8 s short."""

FIRST_SECONDS = 0.001
"""Seconds of SQLite's first sleep for a lock; later ones are longer."""


class WriterSlot:
    """The writer slot: held by one connection of this process at a time.

    SQLite requests its locks without waiting. A connection that is refused sleeps (`busy_timeout`) for 1, 2, 5, … 100 ms and
    tries again with a new snapshot. The sleep ends early when the slot is released, which happens after the transaction is
    appended and before it is synced (P7): the next transaction is built during that sync and shares the following sync with
    others. The slot is not handed to a particular waiter: the first running thread that requests it gets it, so it is never
    idle while a thread wakes up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: object = None
        self._waiters = Waiters()

    def try_acquire(self, who: object) -> bool:
        """Return whether `who` holds the slot, acquiring it if it is free."""
        if self._holder is who:
            return True
        if not self._lock.acquire(blocking=False):
            return False
        self._holder = who
        return True

    def release(self, who: object) -> None:
        """Release the slot and wake one waiter. Does nothing if another connection holds the slot."""
        if self._holder is who:
            self._holder = None
            # The holder is cleared first: after the release another connection may already be the holder.
            self._lock.release()
            self._waiters.wake_first()

    def wait(self, seconds: float) -> bool:
        """Sleep until the slot is released, for at most `seconds`; return whether it was released."""
        return self._waiters.sleep_unless(lambda: not self.is_held, seconds)

    @property
    def is_held(self) -> bool:
        """Whether a connection holds the slot."""
        return self._lock.locked()


class BusyWaiter:
    """How one connection waits for the writer slot.

    SQLite computes a busy timeout from the sleeps it has requested. A connection that was woken early and refused `EARLY_MAX`
    times for one lock sleeps for the full time from then on; otherwise its timeout would expire too soon.
    """

    def __init__(self, slot: WriterSlot) -> None:
        self._slot = slot
        self._early = 0

    def sleep(self, seconds: float) -> None:
        """Sleep as long as SQLite requests, or until the writer slot is released."""
        if seconds <= FIRST_SECONDS:
            self._early = 0
        if self._early < EARLY_MAX:
            self._early += self._slot.wait(seconds)
        else:
            time.sleep(seconds)


KEPT_BYTES = 8 << 20
"""Bytes of kept pages per database, at most. Pages that were read take up to half; the rest is for pages that are written."""


class CommitRun:
    """A run of commits, each built on the previous one, and the newest image of each page written or read during the run.

    An entry (lsn, image) is valid for versions from `lsn` to `upto`. Every commit of the run enters the pages it wrote and
    raises `upto` afterwards, so a reader loads `upto` first and the entry second.
    """

    __slots__ = ("pages", "room", "since", "upto")

    def __init__(self, lsn: int, room: int = 0) -> None:
        self.since = self.upto = lsn
        self.room = room
        self.pages: dict[int, tuple[int, bytes]] = {}

    def enter(self, page: int, lsn: int, image: bytes) -> None:
        """Enter a page as read in version `lsn`. A page without an entry has not been written in the run."""
        if self.since <= lsn <= self.upto and len(self.pages) * 2 < self.room:
            self.pages.setdefault(page, (lsn, image))


class NewestPages:
    """Pages of a database's newest version, for connections whose own caches are out of date.

    When a connection commits, SQLite drops every page in the other connections' caches and reads the ones it needs again.
    Here such a read is a dict lookup (docs/decisions/037-caches-of-a-page-read.md). `record_commit` is called by the
    holder of the writer slot, the other methods by any thread; single operations on a dict are atomic.
    """

    __slots__ = ("_checked_upto", "run")

    def __init__(self) -> None:
        self.run = CommitRun(-1)
        self._checked_upto = -1

    def record_commit(self, base_lsn: int, lsn: int, images: Mapping[int, bytes] | None, page_size: int) -> None:
        """Record that version `lsn` was committed on top of `base_lsn`. `images` is None if there were too many pages to
        keep, or if the database was truncated.

        A new, empty run begins if the commit is not built on the end of the current run (a writer bypassed SQLite). So no
        entry describes a page beyond the end of a version that may use it.
        """
        run, room = self.run, KEPT_BYTES // page_size
        if images is None or run.upto != base_lsn or len(run.pages) + len(images) > room:
            self.run = run = CommitRun(lsn, room)
        if images is not None and len(images) <= room:
            run.pages.update({page: (lsn, image) for page, image in images.items()})
        run.upto = lsn

    def drop_if_idle(self) -> bool:
        """Drop the pages if there was no commit since the last call, and return whether that was so. Pages are useful only
        while there are commits."""
        upto = self.run.upto
        is_idle = upto == self._checked_upto
        if is_idle:
            self.drop_all()
        self._checked_upto = self.run.upto
        return is_idle

    def drop_all(self) -> None:
        """Drop all pages and start an empty run."""
        self.run = CommitRun(-1)


def reader_tags() -> dict[str, str]:
    """Return the tags of leases held by SQLite connections. The lease itself records process and host."""
    return {"by": "sqlite", "program": program(), "thread": threading.current_thread().name[:64]}


class SharedDatabase:
    """One database, shared by all its connections."""

    def __init__(self, db_id: int, engine: PageEngine, manifest: ManifestStore) -> None:
        # constant after construction
        self.db_id = db_id
        self.writer_slot = WriterSlot()
        self.newest = NewestPages()
        self._engine = engine
        self._manifest = manifest
        # guarded by _lock
        self._lock = threading.Lock()
        self._store: PageStore | None = None
        # only ever set
        self.closed: QuireError | None = None

    def current(self) -> PageStore | None:
        """Return the handle, or None while the database is unborn. Raises the error that made the database unusable."""
        if self.closed is not None:
            raise self.closed
        store = self._store
        if store is None:
            return self.open() if self.page_size() else None
        store.wal.require()
        return store

    def open(self, page_size: int = 0) -> PageStore:
        """Open the database in the engine, again if its former handle was given up."""
        with self._lock:
            store = self._engine.open(self.db_id, page_size=page_size)
            if store is not self._store:
                self._store = store
                self.newest.drop_all()
            return store

    def page_size(self) -> int:
        """Return the page size recorded in the manifest; 0 if the database is unborn."""
        with self._manifest.read() as txn:
            record = txn.database(self.db_id)
        if record is None:
            raise UnknownDatabase("no database has this id", hint="`quire ls` lists the databases", db_id=self.db_id)
        return record.page_size


class ReadPin(Snapshot):
    """A snapshot of the newest written version that can move forward. Reads first check pages that connections just used.

    A lease keeps every version from its own on, because a checkpoint goes only as far as the lowest lease. So a connection
    keeps its lease from one transaction to the next and moves it forward, never back: one assignment instead of two leases. A
    floor that is computed concurrently sees the old or the new version; from then on the connection reads only the newer one.
    A version that was set aside (`pages/readers.py`) is read from the snapshot that keeps it. Its lease no longer holds
    anything, so it must not move.
    """

    __slots__ = ("_newest", "_versions", "is_old")
    _lease: Lease

    def __init__(self, store: PageStore, newest: NewestPages) -> None:
        wal = store.wal

        def written() -> tuple[int, Mark]:
            mark = wal.written
            return mark.lsn, mark

        lease, mark = store.readers.open_newest(written, tags=reader_tags())
        super().__init__(store.versions, mark, lease)
        # constant after construction
        self._versions = store.versions
        self._newest = newest
        # only ever set
        self.is_old = False
        """Set when the keeper found the pin in use. It is then closed with its transaction, so that a busy connection does
        not look like a long-running reader."""

    @property
    def is_set_aside(self) -> bool:
        """Whether a floor has passed this version."""
        return self._lease.set_aside

    def move(self, mark: Mark) -> None:
        """Move forward to a newer version."""
        self._lease.lsn = mark.lsn
        self._set(mark)
        # `_use_kept` may have replaced it by the snapshot of the former version.
        self._source = self._versions

    def read_page(self, page: int) -> bytes:
        """Return the page as of this version. Raises `OutOfRange` beyond its end."""
        # `upto` is read before the entry: a commit writes them in the opposite order.
        lsn, run = self.lsn, self._newest.run
        if lsn <= run.upto:
            entry = run.pages.get(page)
            if entry is not None and entry[0] <= lsn and self._lease.open:
                self._hits += 1
                return entry[1]
        image = super().read_page(page)
        if run.room:
            run.enter(page, lsn, image)
        return image
