"""A reader of one version of a database, which reads from a page source while its lease is alive.

Every read is of the same version, whatever is written, published or checkpointed in the meantime. Used as a context manager, a
snapshot renews itself; otherwise its holder calls `renew` at least every 30 s, or the lease expires and reading raises
`LeaseExpired`. A version that was set aside, because its reader held checkpoints back for too long, is read from the snapshot
that keeps it, transparently. A page at or beyond the size of the version is an error, not zeros (P15).

Threads: one at a time. Executor-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Protocol, Self

from quire.core.errors import Corruption, OutOfRange, ReadOnly, SnapshotGone
from quire.core.ids import Epoch
from quire.pages.page_source import Mark, PageSource

SCAN_PAGES = 1_024
"""Pages that `scan` reads at a time: 4 MiB of 4 KiB pages."""


class Hold(Protocol):
    """Keeps a version readable: a lease in memory, a lease file, or nothing (`Unleased`)."""

    reader_id: int
    tags: dict[str, str]
    open: bool

    def require(self) -> None:
        """Raise `LeaseExpired` or `UnknownReader` unless the version is still held."""

    def renew(self) -> None:
        """Extend the lease."""

    def keep_alive(self, holder: object) -> None:
        """Renew the lease automatically while `holder` exists."""

    def close(self) -> None:
        """End the lease. Does nothing if it is closed or has expired."""


class Unleased:
    """The hold of versions that a snapshot's row, or another lease, keeps."""

    def __init__(self) -> None:
        self.reader_id = 0
        self.tags: dict[str, str] = {}
        self.open = True

    def require(self) -> None: ...

    def renew(self) -> None: ...

    def keep_alive(self, _: object) -> None: ...

    def close(self) -> None: ...


class Snapshot:
    """One version of a database; created by `PageStore.open_snapshot` and `PageEngine.open_published`."""

    __slots__ = (
        "__weakref__",
        "_hits",
        "_lease",
        "_resolved",
        "_source",
        "lsn",
        "mark",
        "page_size",
        "size_pages",
    )

    def __init__(self, source: PageSource, mark: Mark, lease: Hold) -> None:
        # constant after construction
        self._lease = lease
        self._resolved = source.resolved
        self.page_size = source.page_size
        self._source = source
        """Replaced when the version is set aside."""
        self._hits = 0
        self._set(mark)

    def _set(self, mark: Mark) -> None:
        self.mark, self.lsn, self.size_pages = mark, mark.lsn, mark.size_pages

    @property
    def db_id(self) -> int:
        """The id of the database."""
        return self._source.db_id

    @property
    def epoch(self) -> Epoch:
        """The version, as the feed and messages print it."""
        return Epoch(self.mark.lsn, self.mark.segment_id)

    @property
    def time_ms(self) -> int:
        """When the version was committed, in milliseconds; 0 if nothing was ever committed."""
        return self.mark.commit_ms

    @property
    def reader_id(self) -> int:
        """The id of the lease."""
        return self._lease.reader_id

    @property
    def tags(self) -> dict[str, str]:
        """The tags set by its holder."""
        return dict(self._lease.tags)

    @property
    def is_open(self) -> bool:
        """Whether it can be read: neither closed nor retired."""
        return self._lease.open

    def read_page(self, page: int) -> bytes:
        """Return the page as of this snapshot."""
        entry = self._resolved.get(page)
        if entry is not None and entry[0] <= self.lsn <= entry[1] and page < self.size_pages and self._lease.open:
            self._hits += 1
            return entry[2]
        if not self._lease.open or not 0 <= page < self.size_pages:
            self._check(page)
        try:
            return self._source.read(page, self.lsn)
        except (Corruption, SnapshotGone):
            if not self._use_kept():
                raise
        return self._source.read(page, self.lsn)

    def read_pages(self, pages: Iterable[int], *, cold: bool = False) -> dict[int, bytes]:
        """Return several pages, page → image; adjacent pages share reads. `cold` bypasses caches and limits the bandwidth."""
        wanted = list(dict.fromkeys(pages))
        for page in wanted:
            self._check(page)
        try:
            return self._source.read_many(wanted, self.lsn, cold=cold)
        except (Corruption, SnapshotGone):
            if not self._use_kept():
                raise
        return self._source.read_many(wanted, self.lsn, cold=cold)

    def _use_kept(self) -> bool:
        """After a failed read, switch to the snapshot that keeps the version if it was set aside; return whether it was."""
        self._lease.require()  # an expired lease explains the failure
        kept = self._source.kept(self.mark)
        if kept is None:
            return False
        self._source = kept
        return True

    def scan(self, start: int = 0, stop: int | None = None, *, cold: bool = True) -> Iterator[tuple[int, bytes]]:
        """Yield (page, image) of a range of pages (default: all), in order; a few MiB are read at a time."""
        stop = self.size_pages if stop is None else min(stop, self.size_pages)
        for first in range(start, stop, SCAN_PAGES):
            wanted = range(first, min(first + SCAN_PAGES, stop))
            images = self.read_pages(wanted, cold=cold)
            for page in wanted:
                yield page, images[page]

    def write_page(self, page: int, _: bytes) -> None:
        """Raise `ReadOnly`."""
        raise ReadOnly("a snapshot is read-only", hint="to write, begin a transaction or fork the snapshot", page=page)

    def _check(self, page: int) -> None:
        if not self._lease.open:
            self._lease.require()
        if not 0 <= page < self.size_pages:
            raise OutOfRange("the database has no such page", page=page, size_pages=self.size_pages)

    def renew(self) -> None:
        """Extend the lease by another 30 seconds."""
        self._lease.renew()

    def close(self) -> None:
        """Release the version. Does nothing more if it is closed or its lease has expired."""
        self._source.sources.cache.resolved_hits += self._hits
        self._hits = 0
        self._lease.close()

    def __enter__(self) -> Self:
        self._lease.keep_alive(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
