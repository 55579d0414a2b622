"""Brings an array of pages from elsewhere into a page database: as one transaction, of the pages that differ.

Rules
  1. One commit, or nothing: readers see the database before or after, a crash leaves one of the two.
  2. Only pages that differ from what the database holds are written; a few MiB are compared at a time.
  3. What was read is hashed on its way (SHA-256, all pages in order); `verify` reads the version back and compares.

Thread: one; the database's write lock is held from the first page to the commit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from quire.core.errors import Corruption
from quire.pages.pagestore import PageStore
from quire.pages.snapshot import Snapshot
from quire.pages.transaction import PageGuard, WriteTxn

STEP_BYTES = 4 << 20
"""Compared, written or hashed at a time."""

Progress = Callable[[str, int, int], None]
"""Called as (what is being done, bytes done, bytes in all)."""


class PageArray(Protocol):
    """Where pages come from: `dbfile.Source`, for one."""

    @property
    def page_size(self) -> int: ...

    @property
    def size_pages(self) -> int: ...

    def read(self, first: int, count: int) -> dict[int, bytes]: ...

    def read_page(self, page: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Brought:
    """What came of it."""

    lsn: int
    size_pages: int
    changed_pages: int
    sha256: str
    """Of all pages; empty where only some were looked at."""


def quiet(_: str, __: int, ___: int) -> None:
    """For who wants no progress."""


def bring(target: PageStore, source: PageArray, progress: Progress = quiet) -> Brought:
    """Make the database what the source is, in one commit that is durable when this returns."""
    step = max(STEP_BYTES // source.page_size, 1)
    digest = hashlib.sha256()
    changed = 0
    with target.begin() as txn:
        # Opened under the write lock: this is the version that the transaction builds on.
        with target.open_snapshot(written=True, tags={"reader": "sqlite import"}) as before:
            for first in range(0, source.size_pages, step):
                images = source.read(first, step)
                for image in images.values():
                    digest.update(image)
                changed += _write_changed(txn, before, images)
                progress("copying", (first + len(images)) * source.page_size, source.size_pages * source.page_size)
        guard = _commit(txn, source.size_pages)
    return Brought(guard.result(), source.size_pages, changed, digest.hexdigest())


def bring_some(target: PageStore, source: PageArray, pages: Iterable[int]) -> Brought:
    """As `bring`, where only some pages can have changed."""
    step = max(STEP_BYTES // source.page_size, 1)
    wanted = sorted(page for page in set(pages) if page < source.size_pages)
    changed = 0
    with target.begin() as txn:
        with target.open_snapshot(written=True, tags={"reader": "sqlite follow"}) as before:
            for start in range(0, len(wanted), step):
                images = {page: source.read_page(page) for page in wanted[start : start + step]}
                changed += _write_changed(txn, before, images)
        guard = _commit(txn, source.size_pages)
    return Brought(guard.result(), source.size_pages, changed, "")


def _write_changed(txn: WriteTxn, before: Snapshot, images: dict[int, bytes]) -> int:
    """Write the pages that differ from what the database holds (rule 2); how many there were."""
    known = before.read_pages([page for page in images if page < before.size_pages], cold=True)
    changed = {page: image for page, image in images.items() if known.get(page) != image}
    txn.write_pages(changed)
    return len(changed)


def _commit(txn: WriteTxn, size_pages: int) -> PageGuard:
    if txn.size_pages != size_pages:
        txn.truncate(size_pages)
    return txn.commit()


def verify(target: PageStore, brought: Brought, progress: Progress = quiet) -> None:
    """Read the version back and compare (rule 3)."""
    with target.open_snapshot(at=brought.lsn) as reader:
        found = hash_of(reader, progress) if reader.size_pages == brought.size_pages else f"{reader.size_pages} pages"
    if found != brought.sha256:
        raise Corruption(
            "what was written reads back differently",
            hint="import again, under another name; `quire manifest check` looks for damage",
            db_id=target.db_id,
            lsn=brought.lsn,
            expected=brought.sha256,
            found=found,
        )


def hash_of(reader: Snapshot, progress: Progress = quiet) -> str:
    """SHA-256 of all pages of a version."""
    digest = hashlib.sha256()
    step = max(STEP_BYTES // reader.page_size, 1)
    for first in range(0, reader.size_pages, step):
        stop = min(first + step, reader.size_pages)
        images = reader.read_pages(range(first, stop), cold=True)
        for page in range(first, stop):
            digest.update(images[page])
        progress("verifying", stop * reader.page_size, reader.size_pages * reader.page_size)
    return digest.hexdigest()
