"""The version that a connection reads, and the lease that keeps it.

A lease keeps every version from its own on, because a checkpoint goes as far as the lowest one. So a connection keeps its lease
from one transaction to the next and moves it forward, never back: one assignment instead of two leases. A floor that is
computed meanwhile sees the one version or the other; from here on this connection reads the newer only.

A version that was set aside (`pages/readers.py`) is read from the snapshot that keeps it. Its lease holds nothing any more, so
it must not move: a transaction that finds the mark after it has moved its pin takes a new one.

Thread: one at a time; `renew` and `is_old` are the keeper's.
"""

from __future__ import annotations

from quire.pages.page_source import Mark
from quire.pages.pagestore import PageStore
from quire.pages.readers import Lease
from quire.pages.snapshot import Snapshot
from quire.sqlite.databases import reader_tags
from quire.sqlite.shared_pages import NewestPages


class Pin(Snapshot):
    """A snapshot of the newest written version that can move forward. It looks into the pages that other connections have just
    written or read first (`shared_pages.py`)."""

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
