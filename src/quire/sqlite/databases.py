"""What all connections to one database share: the page engine's handle, the turn to write, the newest pages; and the version
that one connection reads.

A database without a page size is unborn: the first page written decides it. When the engine has given a handle up (a doubtful
sync, M12), the next connection to be opened has the database recovered, and earlier ones go on with the new handle from their
next transaction on.

Threads: any; a `ReadPin` belongs to one at a time, but for `renew` and `is_old`, which are the keeper's.
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
"""How often a sleep may end early for one lock. None lasts longer than 0.1 s, so a timeout is never 0.8 s short."""

FIRST_SECONDS = 0.001
"""SQLite's first sleep for a lock; the next ones are longer."""


class Turn:
    """Whose turn it is to write: one connection of this process at a time.

    SQLite asks for its locks without waiting; who is refused sleeps (`busy_timeout`) for 1, 2, 5, … 100 ms and asks again, with
    a new snapshot. Such a sleep ends when the turn is given back, which is when the transaction is appended and before it is
    synced (P7): the next one is made during that sync, and shares the one after it with others. Nobody is handed the turn:
    whoever runs already and asks first has it, so that it is never idle while a thread wakes up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: object = None
        self._waiters = Waiters()

    def take(self, who: object) -> bool:
        """Whether it is the turn of `who`, who holds it from now on if so."""
        if self._holder is who:
            return True
        if not self._lock.acquire(blocking=False):
            return False
        self._holder = who
        return True

    def give(self, who: object) -> None:
        """Give the turn back, and wake somebody; somebody else's stays."""
        if self._holder is who:
            self._holder = None
            self._lock.release()
            self._waiters.wake_first()

    def wait(self, seconds: float) -> bool:
        """Sleep until the turn is given back, or so many seconds; whether it was."""
        return self._waiters.sleep_unless(lambda: not self.is_taken, seconds)

    @property
    def is_taken(self) -> bool:
        """Whether somebody writes."""
        return self._lock.locked()


class Sleeper:
    """How one connection waits for its turn. SQLite counts a busy timeout in the sleeps it has asked for: who was woken and
    refused all the same, some times in a row, sleeps as long as it is told from then on, or its timeout would be over too
    soon."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._early = 0

    def sleep(self, seconds: float) -> None:
        """As long as SQLite says, or until the turn is given back."""
        if seconds <= FIRST_SECONDS:
            self._early = 0
        if self._early < EARLY_MAX:
            self._early += self._turn.wait(seconds)
        else:
            time.sleep(seconds)


KEPT_BYTES = 8 << 20
"""Pages of one database, at most; what was read takes half of it and leaves the other half to what is written."""


class Recall:
    """A run of commits, each built on the one before it, and the newest image of each page that was written or read in it.

    An entry (lsn, image) is the page as versions from `lsn` to `upto` have it. Every commit of the run enters what it has
    written, and raises `upto` afterwards: so whoever reads looks at `upto` first, and at the entry behind it.
    """

    __slots__ = ("pages", "room", "since", "upto")

    def __init__(self, lsn: int, room: int = 0) -> None:
        self.since = self.upto = lsn
        self.room = room
        self.pages: dict[int, tuple[int, bytes]] = {}

    def enter(self, page: int, lsn: int, image: bytes) -> None:
        """A page was read, as the version `lsn` has it. Where there is no entry nobody in the run has written the page."""
        if self.since <= lsn <= self.upto and len(self.pages) * 2 < self.room:
            self.pages.setdefault(page, (lsn, image))


class NewestPages:
    """Pages of a database's newest version, for connections whose own pages are out of date.

    When somebody has committed, SQLite drops all pages that another connection has in its cache, and asks for those it needs
    again. Here they are a look into a dict (docs/decisions/037-caches-of-a-page-read.md). `note` is called by who has the turn
    to write, the rest by any thread; single steps on dicts are atomic.
    """

    __slots__ = ("_rested", "recall")

    def __init__(self) -> None:
        self.recall = Recall(-1)
        self._rested = -1

    def note(self, base_lsn: int, lsn: int, images: Mapping[int, bytes] | None, page_size: int) -> None:
        """Somebody has committed the version `lsn` on top of another one. Without images: too much to be kept, or cut off.

        The next run begins empty where the commit is not built on the end of the last (somebody has written past SQLite), so
        that no entry is of a page beyond the end of a version that may use it.
        """
        recall, room = self.recall, KEPT_BYTES // page_size
        if images is None or recall.upto != base_lsn or len(recall.pages) + len(images) > room:
            self.recall = recall = Recall(lsn, room)
        if images is not None and len(images) <= room:
            recall.pages.update({page: (lsn, image) for page, image in images.items()})
        recall.upto = lsn

    def rest(self) -> bool:
        """Forget the pages when nobody has committed since the last call: they are of use as long as somebody commits. Whether
        that was so."""
        upto = self.recall.upto
        rests = upto == self._rested
        if rests:
            self.forget()
        self._rested = self.recall.upto
        return rests

    def forget(self) -> None:
        """Begin anew."""
        self.recall = Recall(-1)


def reader_tags() -> dict[str, str]:
    """What leases of SQLite's connections say about themselves; their process and host are the lease's own."""
    return {"by": "sqlite", "program": program(), "thread": threading.current_thread().name[:64]}


class SharedDatabase:
    """One database, for all its connections."""

    def __init__(self, db_id: int, engine: PageEngine, manifest: ManifestStore) -> None:
        # constant after construction
        self.db_id = db_id
        self.turn = Turn()
        self.newest = NewestPages()
        self._engine = engine
        self._manifest = manifest
        # guarded by _lock
        self._lock = threading.Lock()
        self._store: PageStore | None = None
        # only ever set
        self.closed: QuireError | None = None

    def current(self) -> PageStore | None:
        """The handle; none while the database is unborn. Raises what has made it unusable."""
        if self.closed is not None:
            raise self.closed
        store = self._store
        if store is None:
            return self.open() if self.page_size() else None
        store.wal.require()
        return store

    def open(self, page_size: int = 0) -> PageStore:
        """Open the database in the engine, anew if its former handle was given up."""
        with self._lock:
            store = self._engine.open(self.db_id, page_size=page_size)
            if store is not self._store:
                self._store = store
                self.newest.forget()
            return store

    def page_size(self) -> int:
        """As the manifest has it; 0 for an unborn one."""
        with self._manifest.read() as txn:
            record = txn.database(self.db_id)
        if record is None:
            raise UnknownDatabase("no database has this id", hint="`quire ls` lists the databases", db_id=self.db_id)
        return record.page_size


class ReadPin(Snapshot):
    """A snapshot of the newest written version that can move forward. It looks into the pages that other connections have just
    written or read first.

    A lease keeps every version from its own on, because a checkpoint goes as far as the lowest one. So a connection keeps its
    lease from one transaction to the next and moves it forward, never back: one assignment instead of two leases. A floor that
    is computed meanwhile sees the one version or the other; from then on this connection reads the newer only. A version that
    was set aside (`pages/readers.py`) is read from the snapshot that keeps it; its lease holds nothing any more, so it must
    not move.
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
        """The keeper found it in use: it is closed with its transaction, so that a busy connection does not look like a long
        reader."""

    @property
    def is_set_aside(self) -> bool:
        """Whether a floor has passed it."""
        return self._lease.set_aside

    def move(self, mark: Mark) -> None:
        """Go on to a newer version."""
        self._lease.lsn = mark.lsn
        self._set(mark)
        self._source = self._versions

    def read_page(self, page: int) -> bytes:
        """The page as of this version; beyond its end `OutOfRange`."""
        lsn, recall = self.lsn, self._newest.recall
        if lsn <= recall.upto:
            entry = recall.pages.get(page)
            if entry is not None and entry[0] <= lsn and self._lease.open:
                self._hits += 1
                return entry[1]
        image = super().read_page(page)
        if recall.room:
            recall.enter(page, lsn, image)
        return image
