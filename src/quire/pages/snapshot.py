"""A reader: one version of a database, for as long as its lease lives.

Rules
  1. Every read is of the same version, whatever is written, published or checkpointed meanwhile.
  2. Used as a context manager it renews itself; otherwise its holder calls `renew` at least every 30 s, or it runs out.
  3. A lease that has run out raises `LeaseExpired`, also when that is noticed only because the pages are gone.
  4. A version that was set aside, because its reader held checkpoints back for too long, is read from the snapshot that keeps
     it. The reader notices nothing.
  5. A page at or beyond the size of the version is an error, not zeros (P15).

Thread: one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Protocol, Self

from quire.core.errors import Corruption, OutOfRange, ReadOnly, SnapshotGone
from quire.core.ids import Epoch
from quire.pages.cache import PageCache, Resolved
from quire.pages.publication import Mark
from quire.pages.readers import Lease, Readers
from quire.pages.view import ViewReader
from quire.pages.view_build import KeptVersion

SCAN_PAGES = 1_024
"""Pages that `scan` reads at a time: 4 MiB of 4 KiB pages."""


class VersionReader(Protocol):
    """Reads any version: the database."""

    def read(self, page: int, lsn: int) -> bytes: ...

    def read_many(self, pages: Iterable[int], lsn: int, *, cold: bool = False) -> dict[int, bytes]: ...

    def kept(self, mark: Mark) -> ViewReader | None: ...


class Snapshot:
    """See the rules above. Made by `PageStore.open_snapshot`."""

    __slots__ = (
        "__weakref__",
        "_cache",
        "_hits",
        "_lease",
        "_readers",
        "_resolved",
        "_source",
        "epoch",
        "lsn",
        "page_size",
        "size_pages",
        "time_ms",
    )

    def __init__(
        self,
        source: VersionReader,
        readers: Readers,
        lease: Lease,
        mark: Mark,
        *,
        page_size: int,
        cache: PageCache,
    ) -> None:
        # constant after construction
        self._source: VersionReader = source
        self._readers = readers
        self._lease = lease
        self._cache = cache
        self._resolved: dict[int, Resolved] = cache.resolved(readers.db_id)
        self._hits = 0
        self.page_size = page_size
        self.lsn = mark.lsn
        self.size_pages = mark.size_pages
        self.time_ms = mark.commit_ms
        """When the version was committed; 0 if nothing ever was."""
        self.epoch = Epoch(mark.lsn, mark.segment_id)
        """The version, as the feed and messages print it."""

    @property
    def reader_id(self) -> int:
        """The lease's name."""
        return self._lease.reader_id

    @property
    def tags(self) -> dict[str, str]:
        """What its holder said about itself."""
        return dict(self._lease.tags)

    @property
    def is_open(self) -> bool:
        """Whether it can be read: not closed, not retired."""
        return self._lease.open

    def read_page(self, page: int) -> bytes:
        """The page as of this snapshot."""
        entry = self._resolved.get(page)
        if entry is not None and entry[0] <= self.lsn <= entry[1] and page < self.size_pages and self._lease.open:
            self._hits += 1
            return entry[2]
        if not self._lease.open or not 0 <= page < self.size_pages:
            self._check(page)
        try:
            return self._source.read(page, self.lsn)
        except (Corruption, SnapshotGone):
            self._readers.require(self._lease)  # rule 3
            if self._is_set_aside():
                return self._source.read(page, self.lsn)
            raise

    def read_pages(self, pages: Iterable[int], *, cold: bool = False) -> dict[int, bytes]:
        """Several pages at once, page → image; neighbours share reads. `cold` leaves caches alone, under a limit."""
        wanted = list(dict.fromkeys(pages))
        for page in wanted:
            self._check(page)
        try:
            return self._source.read_many(wanted, self.lsn, cold=cold)
        except (Corruption, SnapshotGone):
            self._readers.require(self._lease)
            if self._is_set_aside():
                return self._source.read_many(wanted, self.lsn, cold=cold)
            raise

    def _is_set_aside(self) -> bool:
        """Whether a snapshot keeps the version that a checkpoint has passed (rule 4): then it is read from there."""
        mark = Mark(self.lsn, self.size_pages, self.epoch.segment_id, self.time_ms)
        if (reader := self._source.kept(mark)) is None:
            return False
        self._source = KeptVersion(reader)
        return True

    def scan(self, start: int = 0, stop: int | None = None, *, cold: bool = True) -> Iterator[tuple[int, bytes]]:
        """(page, image) of a range of pages, default all, in order; some MiB are read at a time."""
        stop = self.size_pages if stop is None else min(stop, self.size_pages)
        for first in range(start, stop, SCAN_PAGES):
            wanted = range(first, min(first + SCAN_PAGES, stop))
            images = self.read_pages(wanted, cold=cold)
            for page in wanted:
                yield page, images[page]

    def write_page(self, page: int, _: bytes) -> None:
        """Always `ReadOnly`: snapshots are for reading."""
        raise ReadOnly("a snapshot is for reading", hint="begin a transaction to write", page=page)

    def _check(self, page: int) -> None:
        if not self._lease.open:
            self._readers.require(self._lease)
        if not 0 <= page < self.size_pages:
            raise OutOfRange("the database has no such page", page=page, size_pages=self.size_pages)

    def renew(self) -> None:
        """The reader is alive: another 30 seconds."""
        self._readers.renew(self.reader_id)

    def close(self) -> None:
        """Give the version back; closing twice, or after it ran out, is fine."""
        self._readers.let_go(self)
        self._cache.resolved_hits += self._hits
        self._hits = 0
        if self._lease.open:
            self._readers.close(self.reader_id)

    def __enter__(self) -> Self:
        self._readers.keep_alive(self, self._lease)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
