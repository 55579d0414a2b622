"""Export: any version of a page database becomes an ordinary SQLite file.

The file appears under its name complete, synced and verified, or not at all. A file is overwritten only with `force`, and
never if a -wal or -journal file is next to it: SQLite would apply that to the new file.

Threads: one. Raises `AlreadyExists`, `InvalidInput` for a database that is not SQLite's, `SnapshotGone`, `StorageFault`,
`Corruption`.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import closing
from dataclasses import dataclass

import apsw

from quire.core.errors import AlreadyExists, Corruption, InvalidInput
from quire.durable.files import Disk, File, OsDisk, remove_if_exists
from quire.durable.names import TEMPORARY
from quire.pages.engine import PageEngine
from quire.pages.snapshot import Snapshot
from quire.pages.timetravel import At
from quire.sqlite.dbfile import MAGIC
from quire.sqlite.files import with_legacy_header
from quire.sqlite.importing import STEP_BYTES, Progress, no_progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The result of an export."""

    name: str
    path: str
    page_size: int
    size_pages: int
    lsn: int
    epoch: str
    time_ms: int
    sha256: str
    """Hash of the file."""
    checked: bool
    """Whether SQLite's integrity_check ran and found nothing."""


def export_file(
    pages: PageEngine,
    name: str,
    path: str | os.PathLike[str],
    *,
    snapshot: int | str | None = None,
    at: At | None = None,
    published: bool = False,
    force: bool = False,
    check: bool = False,
    progress: Progress = no_progress,
    disk: Disk | None = None,
) -> Exported:
    """Write a database to a SQLite file: as it is now, at a snapshot, or `at` an lsn, an epoch or a time.

    `published` is for a process that only reads the store: it exports what the owner has published.
    """
    if snapshot is not None and at is not None:
        raise InvalidInput("a version must be a snapshot or a time, not both", snapshot=snapshot, at=str(at))
    path, disk = os.path.abspath(os.fspath(path)), disk or OsDisk()
    _refuse_taken(disk, path, force)
    with _reader(pages, name, snapshot, at, published=published) as reader:
        digest = _write(disk, path, reader, name, check, progress)
        return Exported(
            name=name,
            path=path,
            page_size=reader.page_size,
            size_pages=reader.size_pages,
            lsn=reader.lsn,
            epoch=str(reader.epoch),
            time_ms=reader.time_ms,
            sha256=digest,
            checked=check,
        )


def _reader(pages: PageEngine, name: str, snapshot: int | str | None, at: At | None, *, published: bool) -> Snapshot:
    tags = {"reader": "sqlite export"}
    if snapshot is not None:
        return pages.open_view(name, snapshot)
    if published:
        return pages.open_published(name, tags=tags) if at is None else pages.open_published_at(name, at, tags=tags)
    store = pages.open(name)
    store.wal.sync()  # commits below `synchronous=FULL` are visible at once, but only durable versions are opened
    return store.open_snapshot(tags=tags) if at is None else store.open_snapshot(at=at, tags=tags)


def _refuse_taken(disk: Disk, path: str, force: bool) -> None:
    """Refuse to overwrite a file without `force`, or to write where a -wal or -journal file is next to the target."""
    if os.path.isdir(path):
        raise InvalidInput("the path is a directory", hint="name the file to write", path=path)
    if disk.exists(path) and not force:
        raise AlreadyExists("the file already exists", hint="use `--force` to replace it", path=path)
    for ending in ("-wal", "-journal"):
        if disk.exists(path + ending):
            raise AlreadyExists(
                "the file has a write-ahead log of another database next to it",
                hint="choose another name, or remove the log if no program is using it",
                path=path + ending,
            )


def _write(disk: Disk, path: str, reader: Snapshot, name: str, check: bool, progress: Progress) -> str:
    temporary = path + TEMPORARY  # overwrites what a killed export left
    try:
        file = disk.open(temporary, create=True)
    except FileNotFoundError:
        raise InvalidInput("the directory does not exist", hint="create it first", path=os.path.dirname(path)) from None
    try:
        with closing(file):
            digest = _stream(file, reader, name, progress)
            file.sync()
            _read_back(file, digest, progress)
        if check:
            _integrity(temporary, path)
    except BaseException:
        remove_if_exists(disk, temporary)
        raise
    # Only now: under its name the file is always complete, synced and verified.
    disk.rename(temporary, path)
    disk.sync_dir(os.path.dirname(path))
    return digest


def _stream(file: File, reader: Snapshot, name: str, progress: Progress) -> str:
    """Write all pages, some MiB at a time, and return the hash of what was written."""
    if not reader.size_pages or not reader.read_page(0).startswith(MAGIC):
        raise InvalidInput(
            "this version holds no SQLite database", hint="create one with `quire sqlite import`", name=name
        )
    digest, step = hashlib.sha256(), max(STEP_BYTES // reader.page_size, 1)
    file.truncate(0)
    for first in range(0, reader.size_pages, step):
        stop = min(first + step, reader.size_pages)
        images = reader.read_pages(range(first, stop), cold=True)
        if first == 0:
            # As SQLite sees it in the store: the file then opens without a log, also on a read-only disk.
            images[0] = with_legacy_header(images[0])
        data = b"".join(images[page] for page in range(first, stop))
        file.write_at(data, first * reader.page_size)
        digest.update(data)
        progress("writing", stop * reader.page_size, reader.size_pages * reader.page_size)
    return digest.hexdigest()


def _read_back(file: File, expected: str, progress: Progress) -> None:
    digest, offset, size = hashlib.sha256(), 0, file.size()
    while data := file.read_at(STEP_BYTES, offset):
        digest.update(data)
        offset += len(data)
        progress("verifying", offset, size)
    if digest.hexdigest() != expected:
        raise Corruption("the exported file does not match the database", hint="check the disk", path=file.path)


def _integrity(temporary: str, path: str) -> None:
    """Raise if SQLite's integrity_check finds damage."""
    # A URI with `immutable` keeps SQLite from looking for a log; every byte is escaped, so no part of the path is taken for
    # URI syntax.
    uri = "file:" + "".join(f"%{byte:02x}" for byte in os.fsencode(temporary)) + "?immutable=1"
    connection = apsw.Connection(uri, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
    try:
        findings = [row[0] for row in connection.execute("PRAGMA integrity_check(20)")]
    except apsw.Error as error:
        findings = [str(error)]
    finally:
        connection.close()
    if findings != ["ok"]:
        raise Corruption(
            "SQLite reports that the exported database is damaged",
            hint="export an earlier version",
            path=path,
            found=findings,
        )
