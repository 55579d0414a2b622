"""A write transaction, which buffers page images until `commit`, and the guard that reports when a commit is durable.

A transaction sees everything written before it and its own writes; if it truncates the database and grows it again, the pages
in between are zeros, as they will be after the commit (P15). Images beyond a limit are moved to an unlinked scratch file (P6).
However the transaction ends (commit, rollback, an error in either, or garbage collection), the next writer can begin. A commit
that raises has been rolled back, unless the database is now unusable: then the outcome is unknown until it is reopened.

Threads: one at a time. Raises `DiskFull` and `StorageFault` when it spills; pages written before stay readable.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from quire.core.errors import ChecksumMismatch, InvalidInput, OutOfRange
from quire.core.events import emit
from quire.core.limits import MIB
from quire.core.tracing import TRACE_API, span
from quire.core.waiting import in_thread
from quire.durable.checksums import crc64
from quire.durable.files import Disk, File
from quire.durable.names import SCRATCH, scratch_dir
from quire.pages.page_source import Mark, PageSource
from quire.pages.wal import Wal

SPILL_BYTES = 64 * MIB
"""Bytes of images in memory above which they are moved to the scratch file (P6)."""

_names = itertools.count(1 << 63)
"""Scratch directories are named by job id; these numbers are never job ids."""


class Spill:
    """Page → image, on disk."""

    __slots__ = ("_end", "_file", "_places", "_size")

    def __init__(self, disk: Disk, root: str, page_size: int) -> None:
        disk.make_dirs(os.path.join(root, SCRATCH))
        path = os.path.join(root, scratch_dir(next(_names)))
        self._file: File = disk.open(path, exclusive=True)
        try:
            disk.remove(path)  # unlinked, so that neither a crash nor an abandoned transaction leaves it behind
        except BaseException:
            self._file.close()
            raise
        self._size = page_size
        self._places: dict[int, tuple[int, int]] = {}
        """Page → (offset, crc64)."""
        self._end = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __contains__(self, page: int) -> bool:
        return page in self._places

    def take(self, images: Mapping[int, bytes]) -> None:
        """Write these images to the scratch file."""
        moved = sorted(images.items())
        self._file.write_at(b"".join([image for _, image in moved]), self._end)
        # After the write: if it fails, the images are still in memory, and the earlier places are unchanged.
        for page, image in moved:
            self._places[page] = (self._end, crc64(image))
            self._end += self._size

    def drop(self, page: int) -> None:
        """Remove a page, if present."""
        self._places.pop(page, None)

    def drop_from(self, size: int) -> None:
        """Remove the pages at and beyond `size`."""
        self._places = {page: place for page, place in self._places.items() if page < size}

    def get(self, page: int) -> bytes | None:
        """Return the image of a page, `None` if it was not spilled."""
        place = self._places.get(page)
        if place is None:
            return None
        image = self._file.read_at(self._size, place[0])
        # The commit computes new checksums, so a byte that changed in the scratch file would become valid data.
        if crc64(image) != place[1]:
            raise ChecksumMismatch(
                "a page of a large transaction was altered in its scratch file",
                hint="check the disk; the transaction cannot be committed, nothing else is affected",
                page=page,
                path=self._file.path,
            )
        return image

    def close(self) -> None:
        """Close the file, which deletes it."""
        self._places = {}
        self._file.close()


PAGES_MAX = 2**32 - 1
"""A database's size in pages fits 32 bits."""


class PageGuard:
    """A commit that may not be durable yet: `result()` returns when it is, `await guard` suspends until then."""

    __slots__ = ("lsn", "mark", "size_pages", "wal")

    def __init__(self, wal: Wal, mark: Mark) -> None:
        self.wal = wal
        self.mark = mark
        self.lsn = mark.lsn
        self.size_pages = mark.size_pages

    def result(self) -> int:
        """Wait until the commit is durable and return its lsn."""
        lsn = self.lsn
        self.wal.wait_durable(lsn)
        if (barrier := self.wal.barrier) is not None:
            barrier.hold()
        return lsn

    def done(self) -> bool:
        """Return whether the commit is durable."""
        return self.wal.durable.lsn >= self.lsn

    def __await__(self) -> Generator[Any, None, int]:
        if self.done() and self.wal.barrier is None:
            return self.lsn
        return (yield from in_thread(self.result))


class WriteTxn:
    """An open write transaction; created by `PageStore.begin`."""

    __slots__ = (
        "__weakref__",
        "_base",
        "_base_pages_end",
        "_images",
        "_open",
        "_release",
        "_require",
        "_spill",
        "_spill_pages",
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
        self.size_pages = self._base_pages_end = base.size_pages
        """`_base_pages_end`: pages below it are unchanged unless this transaction wrote them; pages from it on are new."""
        self._open = True

    @property
    def base_lsn(self) -> int:
        """The lsn of the version that the transaction builds on."""
        return self._base.lsn

    def read_page(self, page: int) -> bytes:
        """Return the page as this transaction sees it."""
        self._check()
        image = self._images.get(page)
        if image is None and self._spill is not None:
            image = self._spill.get(page)
        if image is not None:
            return image
        if not 0 <= page < self.size_pages:
            raise OutOfRange("the database has no such page", page=page, size_pages=self.size_pages)
        return self._versions.read(page, self._base.lsn) if page < self._base_pages_end else bytes(self._wal.page_size)

    def write_page(self, page: int, image: bytes | bytearray | memoryview) -> None:
        """Replace a page; writing beyond the end grows the database."""
        if not self._open:
            self._check()
        if type(image) is not bytes:
            image = bytes(image)
        if len(image) != self._wal.page_size:
            raise InvalidInput(
                "a page has the wrong length", page=page, bytes=len(image), page_size=self._wal.page_size
            )
        if not 0 <= page < PAGES_MAX:
            raise OutOfRange("a page's number does not fit 32 bits", page=page)
        self._images[page] = image
        if page >= self.size_pages:
            self.size_pages = page + 1
        if self._spill is not None or len(self._images) > self._spill_pages:
            self._spill_over(page)

    def write_pages(self, images: Mapping[int, bytes]) -> None:
        """Replace several pages; if one is invalid, none is replaced."""
        self._check()
        if not images:
            return
        page_size, first, last = self._wal.page_size, min(images), max(images)
        if {*map(len, images.values())} != {page_size} or {*map(type, images.values())} != {bytes}:
            wrong = next((page for page, image in images.items() if len(image) != page_size), None)
            raise InvalidInput("a page must be bytes of the page size", page=wrong, page_size=page_size)
        if first < 0 or last >= PAGES_MAX:
            raise OutOfRange("a page's number does not fit 32 bits", min=first, max=last)
        self._images.update(images)
        if last >= self.size_pages:
            self.size_pages = last + 1
        if self._spill is not None or len(self._images) > self._spill_pages:
            self._spill_over(*images)

    def _spill_over(self, *written: int) -> None:
        """Drop spilled images of pages just written, and spill all images if too many are in memory."""
        # A page may be in memory or in the spill, not in both: `Wal.append` would write a frame for each.
        if self._spill is not None:
            for page in written:
                self._spill.drop(page)
        if len(self._images) > self._spill_pages:
            if self._spill is None:
                self._spill = Spill(self._wal.disk, self._wal.root, self._wal.page_size)
            self._spill.take(self._images)
            self._images = {}

    def truncate(self, size_pages: int) -> None:
        """Set the size of the database: pages beyond it are removed, new pages are zeros."""
        self._check()
        if not 1 <= size_pages <= PAGES_MAX:
            raise OutOfRange("a database must have at least one page", size_pages=size_pages, max=PAGES_MAX)
        if size_pages < self.size_pages:
            self._images = {page: image for page, image in self._images.items() if page < size_pages}
            if self._spill is not None:
                self._spill.drop_from(size_pages)
            # If the database grows again in this transaction, these pages are zeros, whatever the base has (P15).
            self._base_pages_end = min(self._base_pages_end, size_pages)
        self.size_pages = size_pages

    def commit(self) -> PageGuard:
        """Append the transaction; return a guard that resolves when it is durable. The next writer may begin at once (P7)."""
        if not self._open:
            self._check()
        if TRACE_API in sys.modules:
            with span("PageStore.commit", db_id=self._wal.db_id, pages=len(self._images)):
                return self._commit()
        return self._commit()

    def _commit(self) -> PageGuard:
        wal, size = self._wal, self.size_pages
        try:
            # Checked again, because the database may have been dropped or made read-only since `begin`.
            self._require()
            if not self._images and not self._spill and self._base_pages_end >= size:
                base = self._base
                if size == base.size_pages:
                    return PageGuard(wal, base)
                self._images[0] = self._versions.read(0, base.lsn)  # a commit needs a frame to carry the new size
            return PageGuard(wal, wal.append(self._images, size, self._base_pages_end, self._spill))
        finally:
            self._end()

    def rollback(self) -> None:
        """Discard all changes. Does nothing if the transaction has ended."""
        if self._open:
            self._end()

    def _end(self) -> None:
        self._open = False
        self._images = {}
        if self._spill is not None:
            self._spill.close()
        # Last, because the next writer may begin at once.
        self._release()

    def _check(self) -> None:
        if not self._open:
            raise InvalidInput("the transaction has ended", hint="begin a new one")

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
