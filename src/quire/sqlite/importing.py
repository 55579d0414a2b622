"""Import: an ordinary SQLite database file becomes a page database, or a new version of one.

Rules
  1. The file is read in one read transaction of SQLite (`dbfile`), so other programs may use it meanwhile.
  2. One commit (`copying`): a new version holds the whole file or nothing of it. Of a database that is there already only the
     pages that differ are written; its snapshots, forks and earlier versions stay.
  3. What was written is read back and compared before the import is said to be done.
  4. A database that was made for an import which then failed is dropped again.

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

Thread: one. Raises what `dbfile` does, `ConfigMismatch` for another page size, `WrongKind`, `InvalidName`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from quire.core.errors import ConfigMismatch, UnknownDatabase
from quire.manifest.records import DbKind
from quire.manifest.store import ManifestStore
from quire.pages.catalog import find_database
from quire.pages.engine import PageEngine
from quire.pages.pagestore import PageStore
from quire.sqlite.dbfile import open_source
from quire.sqlite.page_copy import Progress, bring, quiet, verify

SUFFIXES = (".db", ".sqlite", ".sqlite3", ".db3", ".s3db")
"""Endings that a database's name does without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What an import did."""

    name: str
    db_id: int
    path: str
    created: bool
    page_size: int
    size_pages: int
    changed_pages: int
    wal_frames: int
    """Committed frames of the -wal file that were part of it."""
    lsn: int
    sha256: str
    """Of all pages, in order."""
    note: str
    """What people should know about the -wal file, if it was not used."""


def import_file(
    manifest: ManifestStore,
    pages: PageEngine,
    path: str | os.PathLike[str],
    name: str = "",
    *,
    lock: bool = True,
    progress: Progress = quiet,
) -> Imported:
    """Import a SQLite database with its -wal, as `name`, else as the file is called. See the rules above.

    `lock=False` is for files that no program uses, where SQLite cannot take a lock: on read-only disks, say.
    """
    path = os.path.abspath(os.fspath(path))
    name = name or name_for(path)
    with open_source(path, lock=lock) as source:
        size_pages = source.size_pages  # reads the log, and refuses what is cut off, before anything is made
        target, created = target_for(manifest, pages, name, source.page_size)
        try:
            brought = bring(target, source, progress)
            verify(target, brought, progress)
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
            changed_pages=brought.changed_pages,
            wal_frames=source.map.end.frame if source.map is not None else 0,
            lsn=brought.lsn,
            sha256=brought.sha256,
            note=source.note,
        )


def name_for(path: str) -> str:
    """What a database is called after its file.

    >>> name_for("shop.db"), name_for("data/shop.v2.sqlite3"), name_for("shop")
    ('shop', 'shop.v2', 'shop')
    """
    base = os.path.basename(path)
    stem, ending = os.path.splitext(base)
    return stem if stem and ending.lower() in SUFFIXES else base


def target_for(manifest: ManifestStore, pages: PageEngine, name: str, page_size: int) -> tuple[PageStore, bool]:
    """The database to write to, open, and whether it was made for this."""
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
    """A database keeps its page size for ever."""
    if page_size != of_file:
        raise ConfigMismatch(
            "the file has another page size than the database",
            hint="import it under another name, or change the file's: `PRAGMA page_size`, then `VACUUM`",
            name=name,
            page_size=page_size,
            file_page_size=of_file,
        )
