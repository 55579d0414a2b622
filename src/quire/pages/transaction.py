"""A write transaction: buffers page images until `commit`, and the guard that tells when they are durable.

Rules
  1. A transaction sees what was written before it and what it writes itself.
  2. A transaction that cuts pages off and grows again finds zeros there, as it will after the commit (P15).
  3. However it ends (commit, rollback, an error in either, or being forgotten) the next writer may begin. A commit that raises
     has rolled back, unless the database is unusable now: then nobody knows, and reopening it tells.

Thread: one at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from types import TracebackType
from typing import Any, Self

from quire.core.errors import InvalidInput, OutOfRange
from quire.core.events import emit
from quire.core.tracing import TRACE_API, span
from quire.pages.page_source import Mark, PageSource
from quire.pages.spill import Spill
from quire.pages.wal import Wal

PAGES_MAX = 2**32 - 1
"""A database's size in pages fits 32 bits."""


class PageGuard:
    """A commit on its way to disk: `result()` returns when it is durable, `await guard` suspends until then."""

    __slots__ = ("_wal", "lsn", "mark", "size_pages")

    def __init__(self, wal: Wal, mark: Mark) -> None:
        self._wal = wal
        self.mark = mark
        self.lsn = mark.lsn
        self.size_pages = mark.size_pages

    def result(self) -> int:
        """The commit's lsn, once it is durable."""
        lsn = self.lsn
        self._wal.until(lsn)
        return lsn

    def done(self) -> bool:
        """Whether it is durable."""
        return self._wal.durable.lsn >= self.lsn

    def __await__(self) -> Generator[Any, None, int]:
        if self.done():
            return self.lsn
        import asyncio  # 40 ms that a program without an event loop need not pay

        return (yield from asyncio.to_thread(self.result).__await__())


class WriteTxn:
    """See the rules above. Made by `PageStore.begin`."""

    __slots__ = (
        "__weakref__",
        "_base",
        "_images",
        "_open",
        "_release",
        "_require",
        "_spill",
        "_spill_pages",
        "_uncut",
        "_versions",
        "_wal",
        "size_pages",
    )

    def __init__(
        self,
        wal: Wal,
        versions: PageSource,
        require: Callable[[], None],
        release: Callable[[], None],
        spill_pages: int,
    ) -> None:
        self._wal = wal
        self._versions = versions
        self._require = require
        self._release = release
        self._spill_pages = spill_pages
        base = self._base = wal.written
        self._images: dict[int, bytes] = {}
        self._spill: Spill | None = None
        self.size_pages = self._uncut = base.size_pages
        """`_uncut`: pages below it are as they were unless they were written; those from it on are new."""
        self._open = True

    @property
    def base_lsn(self) -> int:
        """The version it builds on."""
        return self._base.lsn

    def read_page(self, page: int) -> bytes:
        """The page as this transaction sees it."""
        self._check()
        image = self._images.get(page)
        if image is None and self._spill is not None:
            image = self._spill.get(page)
        if image is not None:
            return image
        if not 0 <= page < self.size_pages:
            raise OutOfRange("the database has no such page", page=page, size_pages=self.size_pages)
        return self._versions.read(page, self._base.lsn) if page < self._uncut else bytes(self._wal.page_size)

    def write_page(self, page: int, image: bytes | bytearray | memoryview) -> None:
        """Replace a page; one beyond the end grows the database."""
        if not self._open:
            self._check()
        if type(image) is not bytes:
            image = bytes(image)
        if len(image) != self._wal.page_size:
            raise InvalidInput("a page has another length", page=page, bytes=len(image), page_size=self._wal.page_size)
        if not 0 <= page < PAGES_MAX:
            raise OutOfRange("a page's number does not fit 32 bits", page=page)
        self._images[page] = image
        if page >= self.size_pages:
            self.size_pages = page + 1
        if self._spill is not None or len(self._images) > self._spill_pages:
            self._spill_over(page)

    def write_pages(self, images: Mapping[int, bytes]) -> None:
        """Replace several pages: all of them, or none if one cannot be."""
        self._check()
        if not images:
            return
        page_size, first, last = self._wal.page_size, min(images), max(images)
        if {*map(len, images.values())} != {page_size} or {*map(type, images.values())} != {bytes}:
            wrong = next((page for page, image in images.items() if len(image) != page_size), None)
            raise InvalidInput("a page is bytes of the page size", page=wrong, page_size=page_size)
        if first < 0 or last >= PAGES_MAX:
            raise OutOfRange("a page's number does not fit 32 bits", min=first, max=last)
        self._images.update(images)
        if last >= self.size_pages:
            self.size_pages = last + 1
        if self._spill is not None or len(self._images) > self._spill_pages:
            self._spill_over(*images)

    def _spill_over(self, *written: int) -> None:
        """Pages just written replace what was spilled of them; and if there are too many in memory, all of them go."""
        if self._spill is not None:
            for page in written:
                self._spill.drop(page)
        if len(self._images) > self._spill_pages:
            if self._spill is None:
                self._spill = Spill(self._wal.disk, self._wal.root, self._wal.page_size)
            self._spill.take(self._images)
            self._images = {}

    def truncate(self, size_pages: int) -> None:
        """Set the size of the database; what lies beyond is gone, what is new is zeros."""
        self._check()
        if not 1 <= size_pages <= PAGES_MAX:
            raise OutOfRange("a database has at least one page", size_pages=size_pages, max=PAGES_MAX)
        if size_pages < self.size_pages:
            self._images = {page: image for page, image in self._images.items() if page < size_pages}
            if self._spill is not None:
                self._spill.drop_from(size_pages)
            self._uncut = min(self._uncut, size_pages)
        self.size_pages = size_pages

    def commit(self) -> PageGuard:
        """Append the transaction; the guard resolves when it is durable. The next writer may begin at once (P7)."""
        if not self._open:
            self._check()
        if TRACE_API in sys.modules:
            with span("PageStore.commit", db_id=self._wal.db_id, pages=len(self._images)):
                return self._commit()
        return self._commit()

    def _commit(self) -> PageGuard:
        wal, size = self._wal, self.size_pages
        try:
            self._require()
            if not self._images and not self._spill and self._uncut >= size:
                base = self._base
                if size == base.size_pages:
                    return PageGuard(wal, base)
                self._images[0] = self._versions.read(0, base.lsn)  # a commit needs a frame to say the new size
            return PageGuard(wal, wal.append(self._images, size, self._uncut, self._spill))
        finally:
            self._end()

    def rollback(self) -> None:
        """Forget everything; rolling back twice, or after a commit, is fine."""
        if self._open:
            self._end()

    def _end(self) -> None:
        self._open = False
        self._images = {}
        if self._spill is not None:
            self._spill.close()
        self._release()

    def _check(self) -> None:
        if not self._open:
            raise InvalidInput("the transaction has ended", hint="begin another one")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._open:
            self.commit().result()
        else:
            self.rollback()

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            emit("warning", "transaction.forgotten", db_id=self._wal.db_id, pages=len(self._images))
            self._end()
