"""Import: an ordinary SQLite database file becomes a page database, or a new version of one.

The file is read in one read transaction of SQLite (`dbfile`), so other programs may use it in the meantime. It becomes one
commit: readers and crashes see the database before or after it. If the database already exists, only pages that differ are
written, and its snapshots, forks and earlier versions stay. Written pages are read back and compared before the import
returns. A database that was created for an import which then failed is dropped again.

    >>> import os, sqlite3, tempfile
    >>> import quire
    >>> folder = tempfile.mkdtemp()
    >>> file = os.path.join(folder, "shop.db")
    >>> connection = sqlite3.connect(file)
    >>> _ = connection.execute("CREATE TABLE item (name)")
    >>> connection.close()
    >>> with quire.open(os.path.join(folder, "store")) as store:
    ...     done = import_file(store.manifest, store.pages, file)
    >>> done.name, done.created, done.size_pages, done.changed_pages
    ('shop', True, 2, 2)

Threads: one; the database's write lock is held from the first page to the commit. Raises the errors of `dbfile`,
`ConfigMismatch` for another page size, `WrongKind`, `InvalidName`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from quire.core.errors import ConfigMismatch, Corruption, UnknownDatabase
from quire.manifest.records import DbKind
from quire.manifest.store import ManifestStore
from quire.pages.catalog import find_database
from quire.pages.engine import PageEngine
from quire.pages.pagestore import PageStore
from quire.pages.snapshot import Snapshot
from quire.pages.transaction import PageGuard, WriteTxn
from quire.sqlite.dbfile import open_source

STEP_BYTES = 4 << 20
"""Bytes that are compared, written or hashed at a time."""

Progress = Callable[[str, int, int], None]
"""Called as (current step, bytes done, total bytes)."""


class ImportedPages(Protocol):
    """A source of pages, such as `dbfile.FileSource`."""

    @property
    def page_size(self) -> int: ...

    @property
    def size_pages(self) -> int: ...

    def read(self, first: int, count: int) -> dict[int, bytes]: ...

    def read_page(self, page: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class WrittenPages:
    """The result of writing pages."""

    lsn: int
    size_pages: int
    changed_pages: int
    sha256: str
    """Hash of all pages; empty if only some were read."""


def no_progress(_: str, __: int, ___: int) -> None:
    """Report no progress."""


def import_source(target: PageStore, source: ImportedPages, progress: Progress = no_progress) -> WrittenPages:
    """Make the database equal to the source, in one commit that is durable when this returns."""
    step = max(STEP_BYTES // source.page_size, 1)
    digest = hashlib.sha256()
    changed = 0
    with target.begin() as txn:
        # Opened under the write lock, so this is the version that the transaction builds on.
        with target.open_snapshot(written=True, tags={"reader": "sqlite import"}) as before:
            for first in range(0, source.size_pages, step):
                images = source.read(first, step)
                for image in images.values():
                    digest.update(image)
                changed += write_changed(txn, before, images)
                progress("copying", (first + len(images)) * source.page_size, source.size_pages * source.page_size)
        guard = _commit(txn, source.size_pages)
    return WrittenPages(guard.result(), source.size_pages, changed, digest.hexdigest())


def import_pages(target: PageStore, source: ImportedPages, pages: Iterable[int], base_lsn: int) -> WrittenPages | None:
    """Do the same as `import_source`, where only some pages can differ from our version `base_lsn`. Return `None` if the
    database is at another version."""
    step = max(STEP_BYTES // source.page_size, 1)
    wanted = sorted(page for page in set(pages) if page < source.size_pages)
    changed = 0
    with target.begin() as txn:
        if txn.base_lsn != base_lsn:
            txn.rollback()
            return None
        with target.open_snapshot(written=True, tags={"reader": "sqlite follow"}) as before:
            for start in range(0, len(wanted), step):
                images = {page: source.read_page(page) for page in wanted[start : start + step]}
                changed += write_changed(txn, before, images)
        guard = _commit(txn, source.size_pages)
    return WrittenPages(guard.result(), source.size_pages, changed, "")


def write_changed(txn: WriteTxn, before: Snapshot, images: dict[int, bytes]) -> int:
    """Write the pages that differ from the database and return how many there were."""
    existing = before.read_pages([page for page in images if page < before.size_pages], cold=True)
    changed = {page: image for page, image in images.items() if existing.get(page) != image}
    txn.write_pages(changed)
    return len(changed)


def _commit(txn: WriteTxn, size_pages: int) -> PageGuard:
    if txn.size_pages != size_pages:
        txn.truncate(size_pages)
    return txn.commit()


def verify(target: PageStore, written: WrittenPages, progress: Progress = no_progress) -> None:
    """Read the version back and compare it."""
    with target.open_snapshot(at=written.lsn) as reader:
        digest = hash_of(reader, progress) if reader.size_pages == written.size_pages else f"{reader.size_pages} pages"
    if digest != written.sha256:
        raise Corruption(
            "the imported database does not match the file",
            hint="import it again under another name; `quire manifest check` looks for damage",
            db_id=target.db_id,
            lsn=written.lsn,
            expected=written.sha256,
            found=digest,
        )


def hash_of(reader: Snapshot, progress: Progress = no_progress) -> str:
    """Return the SHA-256 of all pages of a version."""
    digest = hashlib.sha256()
    step = max(STEP_BYTES // reader.page_size, 1)
    for first in range(0, reader.size_pages, step):
        stop = min(first + step, reader.size_pages)
        images = reader.read_pages(range(first, stop), cold=True)
        for page in range(first, stop):
            digest.update(images[page])
        progress("verifying", stop * reader.page_size, reader.size_pages * reader.page_size)
    return digest.hexdigest()


SUFFIXES = (".db", ".sqlite", ".sqlite3", ".db3", ".s3db")
"""File extensions that are not part of the database's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The result of an import."""

    name: str
    db_id: int
    path: str
    created: bool
    page_size: int
    size_pages: int
    changed_pages: int
    wal_frames: int
    """Committed frames of the -wal file that were imported."""
    lsn: int
    sha256: str
    """Hash of all pages, in order."""
    note: str
    """Why the -wal file was not used, for the user; empty if it was."""


def import_file(
    manifest: ManifestStore,
    pages: PageEngine,
    path: str | os.PathLike[str],
    name: str = "",
    *,
    lock: bool = True,
    progress: Progress = no_progress,
) -> Imported:
    """Import a SQLite database with its -wal file, as `name`, or under the name of the file. See the rules above.

    `lock=False` is for files that no program uses and where SQLite cannot take a lock, such as on a read-only disk.
    """
    path = os.path.abspath(os.fspath(path))
    name = name or name_for(path)
    with open_source(path, lock=lock) as source:
        size_pages = source.size_pages  # reads the log and refuses a truncated file before anything is created
        target, created = target_for(manifest, pages, name, source.page_size)
        try:
            written = import_source(target, source, progress)
            verify(target, written, progress)
        except BaseException:
            if created:
                pages.close_database(target.db_id)
                manifest.drop_db(target.db_id).result()
            raise
        return Imported(
            name=name,
            db_id=target.db_id,
            path=path,
            created=created,
            page_size=source.page_size,
            size_pages=size_pages,
            changed_pages=written.changed_pages,
            wal_frames=source.map.end.frame if source.map is not None else 0,
            lsn=written.lsn,
            sha256=written.sha256,
            note=source.note,
        )


def name_for(path: str) -> str:
    """Return the name of a database for a file.

    >>> name_for("shop.db"), name_for("data/shop.v2.sqlite3"), name_for("shop")
    ('shop', 'shop.v2', 'shop')
    """
    base = os.path.basename(path)
    stem, ending = os.path.splitext(base)
    return stem if stem and ending.lower() in SUFFIXES else base


def target_for(manifest: ManifestStore, pages: PageEngine, name: str, page_size: int) -> tuple[PageStore, bool]:
    """Open the database to write to; return it and whether it was created for this."""
    try:
        with manifest.read() as txn:
            db_id, record = find_database(txn, name)
        created = False
    except UnknownDatabase:
        db_id, created = manifest.register_db(name, DbKind.PAGES), True
        return pages.open(db_id, page_size=page_size), created
    require_page_size(name, record.page_size or page_size, page_size)
    return pages.open(db_id, page_size=page_size), created


def require_page_size(name: str, page_size: int, of_file: int) -> None:
    """Raise if the file's page size differs: a database never changes its page size."""
    if page_size != of_file:
        raise ConfigMismatch(
            "the page size of the file differs from that of the database",
            hint="import it under another name, or change the file's: `PRAGMA page_size`, then `VACUUM`",
            name=name,
            page_size=page_size,
            file_page_size=of_file,
        )
