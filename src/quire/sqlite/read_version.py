"""The version that a connection reads, and the lease that keeps it.

Rules
  1. A lease keeps every version from its own on, because a checkpoint goes as far as the lowest one. So a connection keeps its
     lease from one transaction to the next and moves it forward, never back: one assignment instead of two leases. Whoever
     computes the floor meanwhile sees the one version or the other; from here on this connection reads the newer only.
  2. A lease that has run out, or whose database was closed, reads nothing any more, wherever the page would have come from.
  3. A page comes from what others have just written or read (`shared_pages.py`), from what the engine has resolved for this
     version, or from where the engine finds it.
  4. A pin that the keeper has found in use is old: it is given back with its transaction, so that nothing looks like a long
     reader that is only a busy one.
  5. A version that was set aside (`pages/readers.py`, rule 4) is read from the snapshot that keeps it. Its lease holds nothing
     any more, so it must not move: a transaction that finds the mark after it has moved its pin takes a new one.

Thread: one at a time; `renew` and `is_old` are the keeper's.
"""

from __future__ import annotations

from quire.core.errors import Corruption, OutOfRange, SnapshotGone
from quire.pages.pagestore import PageStore
from quire.pages.publication import Mark
from quire.pages.view import ViewReader
from quire.sqlite.databases import reader_tags
from quire.sqlite.shared_pages import NewestPages


class Pin:
    """See the rules above. It begins at the newest written version."""

    __slots__ = (
        "_hits",
        "_kept",
        "_lease",
        "_newest",
        "_resolved",
        "_store",
        "is_old",
        "lsn",
        "page_size",
        "size_pages",
    )

    def __init__(self, store: PageStore, newest: NewestPages) -> None:
        wal = store.wal

        def written() -> tuple[int, Mark]:
            mark = wal.written
            return mark.lsn, mark

        # constant after construction
        self._store = store
        self._newest = newest
        self._resolved = store.sources.cache.resolved(store.db_id)
        self._lease, mark = store.readers.open_newest(written, tags=reader_tags())
        self.page_size = store.page_size
        # moved by the connection
        self.lsn = mark.lsn
        self.size_pages = mark.size_pages
        self._hits = 0
        self._kept: ViewReader | None = None
        """The version, where it was set aside."""
        # only ever set
        self.is_old = False

    @property
    def is_open(self) -> bool:
        """Whether it can be read: not closed, not retired."""
        return self._lease.open

    @property
    def is_set_aside(self) -> bool:
        """Whether a floor has passed it (rule 5)."""
        return self._lease.set_aside

    def move(self, lsn: int, size_pages: int) -> None:
        """Go on to a newer version (rule 1)."""
        self.lsn = self._lease.lsn = lsn
        self.size_pages, self._kept = size_pages, None

    def read_page(self, page: int) -> bytes:
        """The page as of this version; beyond its end `OutOfRange`."""
        lsn, recall = self.lsn, self._newest.recall
        if lsn <= recall.upto:
            entry = recall.pages.get(page)
            if entry is not None and entry[0] <= lsn and self._lease.open:
                self._hits += 1
                return entry[1]
        image = self._find(page, lsn)
        if recall.room:
            recall.enter(page, lsn, image)
        return image

    def _find(self, page: int, lsn: int) -> bytes:
        lease = self._lease
        if not lease.open:
            self._store.readers.require(lease)
        if not 0 <= page < self.size_pages:
            raise OutOfRange("the database has no such page", page=page, size_pages=self.size_pages)
        resolved = self._resolved.get(page)
        if resolved is not None and resolved[0] <= lsn <= resolved[1]:
            self._hits += 1
            return resolved[2]
        if self._kept is not None:
            return self._kept.read_page(page)
        try:
            return self._store.read(page, lsn)
        except (Corruption, SnapshotGone):
            self._store.readers.require(lease)  # rule 2
            self._kept = self._kept or self._store.kept(Mark(lsn, self.size_pages))
            if self._kept is None:
                raise
            return self._kept.read_page(page)

    def renew(self) -> None:
        """The reader is alive."""
        self._store.readers.renew(self._lease.reader_id)

    def close(self) -> None:
        """Give the version back; closing twice, or after it ran out, is fine."""
        self._store.sources.cache.resolved_hits += self._hits
        self._hits = 0
        if self._lease.open:
            self._store.readers.close(self._lease.reader_id)
