"""Reads an ordinary SQLite database file, with its -wal file if present, as one consistent array of pages.

A *source* is the file at one moment: its pages, overlaid with the newest images of the log. It is *locked* while SQLite's own
read transaction is held. Frames that SQLite reports as committed are read and verified by `walfile`; an invalid frame among
them is damage, not a torn tail. While committed frames have not been copied into the file, no process can restart the log or
copy frames beyond those the lock sees. A source is *settled* if all frames are copied or there is no log. The file alone is
then the database, and no process can copy more into it.

Pages are numbered from 0: SQLite's page n is page n - 1 here. Bytes are returned as they are in the file, including bytes 18
and 19 (Q3). Two copies of SQLite in one process do not see each other's locks: a file that this process also has open through
the standard library's `sqlite3` cannot be protected against it.

Threads: one. Raises `NotFound`, `InvalidInput` for a file that is not a SQLite database, `Corruption` for a damaged one, and
`Unavailable` if it cannot be locked now or SQLite must recover it first.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property

import apsw

from quire.core.closing import ClosedOnExit
from quire.core.errors import Corruption, InvalidInput, NotFound, StorageFault, Unavailable
from quire.core.limits import PAGE_SIZE_MAX
from quire.durable.files import Disk, File, OsDisk
from quire.sqlite.walfile import FRAME_HEAD, HEADER_BYTES, WalHeader, WalMap, newest_pages, parse_header

MAGIC = b"SQLite format 3\x00"
HEADER_SIZE = 100
JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
"""The first bytes of a rollback journal that was not finalised."""
WAL_MODE = 2
"""Value of bytes 18 and 19 in WAL mode: readers must read the log."""
BUSY_MS = 5_000
"""How long to wait for a lock, in ms. A program that commits holds its own for milliseconds."""
PENDING_BYTE = 1 << 30
"""Offset of SQLite's locks. The page at this offset is never used."""

RECOVERY_CODES = (apsw.SQLITE_READONLY_ROLLBACK, apsw.SQLITE_READONLY_RECOVERY)
"""SQLite's errors for a read-only connection that would have to recover the database first."""

_FIELDS = struct.Struct(">HBB")
_U32 = struct.Struct(">I")


@dataclass(frozen=True, slots=True, kw_only=True)
class DbHeader:
    """Fields of the first 100 bytes of a database."""

    page_size: int
    write_version: int
    read_version: int
    change_counter: int
    size_pages: int
    """0 if the field is not valid: the header was last written by a version of SQLite from before 2010."""

    @property
    def wal_mode(self) -> bool:
        """Whether the database is in WAL mode."""
        return self.read_version == WAL_MODE


def parse_db_header(data: bytes, path: str) -> DbHeader:
    """Parse the header of a database file. `path` is for error messages."""
    if len(data) < HEADER_SIZE or not data.startswith(MAGIC):
        what = "the file is empty" if not data else "the file does not start like a SQLite database"
        hint = (
            "write something to it first"
            if not data
            else "use a SQLite database file; decrypt an encrypted one first, for example with `VACUUM INTO`"
        )
        raise InvalidInput(what, hint=hint, path=path)
    size, write_version, read_version = _FIELDS.unpack_from(data, 16)
    page_size = PAGE_SIZE_MAX if size == 1 else size
    if page_size < 512 or page_size & (page_size - 1):
        raise Corruption(
            "the database's header has an invalid page size", hint="`sqlite3 FILE .recover`", path=path, page_size=size
        )
    counter, size_pages = _U32.unpack_from(data, 24)[0], _U32.unpack_from(data, 28)[0]
    valid_for = _U32.unpack_from(data, 92)[0]
    return DbHeader(
        page_size=page_size,
        write_version=write_version,
        read_version=read_version,
        change_counter=counter,
        size_pages=size_pages if counter == valid_for else 0,
    )


@dataclass(frozen=True, slots=True)
class Signature:
    """Values that change when a program writes to the file: inode, size, modification time, and SQLite's change counter."""

    inode: int
    size: int
    mtime_ns: int
    change_counter: int


def signature_of(path: str) -> Signature:
    """Return the current signature of the file. Opens it through SQLite's VFS."""
    with DbFile(path) as file:
        return file.signature()


class DbFile(ClosedOnExit):
    """A database file, read through SQLite's VFS and not locked. A context manager.

    A descriptor of our own would not do: closing it drops the locks that SQLite holds on the same file in this process (POSIX
    locks belong to the process).
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        if not os.path.isfile(self.path):
            raise _missing(path)
        flags = [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READONLY, 0]
        try:
            self._file = apsw.VFSFile("", self.path, flags)
        except apsw.CantOpenError as error:
            raise StorageFault("the file cannot be opened", hint="check its owner and mode", path=path) from error

    def read_at(self, size: int, offset: int) -> bytes:
        """Return `size` bytes from `offset`; fewer at the end of the file."""
        try:
            # apsw takes trailing zeros for missing bytes: a read beyond the end of the file would return too little.
            size = min(size, self._file.xFileSize() - offset)
            return self._file.xRead(size, offset) if size > 0 else b""
        except apsw.IOError as error:
            raise StorageFault("the file cannot be read", hint="check the disk", path=self.path) from error

    def size(self) -> int:
        """Return the size of the file in bytes."""
        return self._file.xFileSize()

    def signature(self) -> Signature:
        """Return the current `Signature`."""
        try:
            status = os.stat(self.path)  # by path: another file under the name has another signature
        except OSError as error:  # gone since it was opened
            raise _missing(self.path) from error
        counter = self.read_at(4, 24)
        number = _U32.unpack(counter)[0] if len(counter) == 4 else 0
        return Signature(status.st_ino, status.st_size, status.st_mtime_ns, number)

    def close(self) -> None:
        """Close the file. SQLite closes the descriptor when no lock of this process needs it any more."""
        self._file.xClose()


def _missing(path: str) -> NotFound:
    return NotFound("the file does not exist", hint="name the database file", path=path)


class ReadLock(ClosedOnExit):
    """A read transaction of SQLite on a file. Use it as a context manager or close it."""

    def __init__(self, path: str, header: DbHeader) -> None:
        self.path = path
        self._closing = ExitStack()
        has_log = os.path.exists(path + "-wal") or os.path.exists(path + "-journal")
        # SQLite creates an empty log for a WAL-mode database without one; only a read-write connection can remove it again.
        flags = apsw.SQLITE_OPEN_READWRITE if header.wal_mode and not has_log else apsw.SQLITE_OPEN_READONLY
        try:
            with self._closing:
                held = self._connect(flags)
                held.execute("BEGIN")
                held.execute("PRAGMA schema_version").fetchall()
                # A second connection: SQLite refuses every checkpoint inside a transaction, even one that does nothing.
                self._probe = self._connect(flags)
                self._probe.execute("PRAGMA schema_version").fetchall()
                self._closing = self._closing.pop_all()
        except apsw.Error as error:
            raise _translated(error, path) from error

    def _connect(self, flags: int) -> apsw.Connection:
        connection = apsw.Connection(self.path, flags=flags)
        self._closing.callback(connection.close)
        connection.set_busy_timeout(BUSY_MS)
        if flags & apsw.SQLITE_OPEN_READONLY:
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        return connection

    def frames(self) -> tuple[int, int]:
        """Return (committed frames of the log, how many of them are already in the file); -1 each if there is no log."""
        try:
            return self._probe.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
        except apsw.Error as error:
            raise _translated(error, self.path) from error

    def close(self) -> None:
        """End the transaction."""
        self._closing.close()


def _translated(error: apsw.Error, path: str) -> Corruption | InvalidInput | Unavailable | StorageFault:
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        hint = "try again, or wait until the program that holds it is idle"
        return Unavailable("the database cannot be locked for reading now", hint=hint, path=path)
    if getattr(error, "extendedresult", 0) in RECOVERY_CODES:
        hint = f"open it once with SQLite, which recovers it: `sqlite3 {path} 'PRAGMA schema_version'`"
        return Unavailable("a program crashed while writing this database: it needs recovery", hint=hint, path=path)
    if isinstance(error, apsw.CantOpenError | apsw.ReadOnlyError):
        hint = "SQLite needs to write next to the file to lock it; if no program uses the file, use `--no-lock`"
        return Unavailable("the database cannot be locked", hint=hint, path=path, sqlite=str(error))
    if isinstance(error, apsw.NotADBError):
        return InvalidInput("SQLite does not recognise the file as a database", hint="it may be encrypted", path=path)
    if isinstance(error, apsw.CorruptError):
        return Corruption("SQLite reports that the database is damaged", hint="`sqlite3 FILE .recover`", path=path)
    hint = "check it with SQLite"
    return StorageFault(f"SQLite cannot read the database: {error}", hint=hint, path=path)


class FileSource:
    """A database file at one moment. Opened by the context manager `open_source`."""

    def __init__(self, file: DbFile, lock: ReadLock | None, wal: File | None) -> None:
        self.path = file.path
        self.lock = lock
        self.wal = wal
        self.note = ""
        """Why the log was not used, for the user; empty if it was."""
        self._file = file
        self.signature = file.signature()
        self.file_header = parse_db_header(file.read_at(HEADER_SIZE, 0), file.path)
        self.page_size = self.file_header.page_size
        # Before the frames are counted: a commit that comes later changes size or time, and the next look notices it.
        self.wal_seen = size_and_time(wal)
        self.committed, copied = lock.frames() if lock is not None else (-1, -1)
        self.settled = lock is not None and self.committed == copied
        """Whether the file alone is the database. False without a lock, since it is unknown then."""
        # Read after `frames()`: if there are frames to read, the header does not change from then on.
        self.wal_raw = wal.read_at(HEADER_BYTES, 0) if wal is not None else b""
        self.wal_header = self._parse_wal_header()

    def _parse_wal_header(self) -> WalHeader | None:
        header = parse_header(self.wal_raw)
        if isinstance(header, WalHeader):
            return header
        if self.wal_raw:
            self.note = f"the -wal file was not used: {header}"
        return None

    @cached_property
    def map(self) -> WalMap | None:
        """The newest images in the log; None if the log adds nothing. The first access reads the whole log."""
        if self.settled or self.wal is None or self.wal_header is None:
            return None
        upto = self.committed if self.lock is not None else None
        wal_map = newest_pages(self.wal.read_at, self.wal_header, upto)
        if upto is not None and wal_map.end.frame != upto:
            raise Corruption(
                "the write-ahead log has a damaged frame",
                hint="copy the database with `sqlite3 FILE '.backup COPY'` and import the copy",
                path=self.wal.path,
                frame=wal_map.end.frame + 1,
                committed=upto,
            )
        if not wal_map.size_pages:
            if self.wal.size() > HEADER_BYTES:
                self.note = "the -wal file was not used: it holds no committed transaction with its own salts"
            return None
        if self.wal_header.page_size != self.page_size:
            raise Corruption(
                "the database and its write-ahead log have different page sizes",
                hint="the log belongs to another database: move it away",
                path=self.wal.path,
                page_size=self.page_size,
                wal_page_size=self.wal_header.page_size,
            )
        self.check_size(wal_map.size_pages)
        return wal_map

    def check_size(self, size_pages: int) -> None:
        """Refuse a size that no transaction of the log can have produced.

        A page that is in neither file nor log is on the free list, where a page names one such page per four bytes. More
        pages than that would be zeros that fill the disk.
        """
        written = (
            self._file.size() // self.page_size + (self.wal.size() if self.wal is not None else 0) // self.page_size
        )
        if size_pages > (written + 1) * (self.page_size // 4):
            raise Corruption(
                "the write-ahead log gives the database an impossible number of pages",
                hint="copy the database with `sqlite3 FILE '.backup COPY'` and import the copy",
                path=self.path,
                pages=size_pages,
                written=written,
            )

    @cached_property
    def size_pages(self) -> int:
        """Pages of the database."""
        if self.map is not None:
            return self.map.size_pages
        bytes_ = self._file.size()
        size = self.file_header.size_pages or bytes_ // self.page_size
        if size * self.page_size > bytes_ or (not self.file_header.size_pages and bytes_ % self.page_size):
            raise _cut_off(self.path, bytes_, size * self.page_size)
        return size

    def read(self, first: int, count: int) -> dict[int, bytes]:
        """Return up to `count` consecutive pages as page → image."""
        wanted = range(first, min(first + count, self.size_pages))
        size = self.page_size
        frames = self.map.frames if self.map is not None else {}
        data = self._file.read_at(len(wanted) * size, first * size) if any(n + 1 not in frames for n in wanted) else b""
        images: dict[int, bytes] = {}
        for page in wanted:
            frame = frames.get(page + 1)
            offset = (page - first) * size
            images[page] = self._of_log(page, frame) if frame else data[offset : offset + size]
            if len(images[page]) < size:
                images[page] = self._absent(page, images[page])
        return images

    def read_page(self, page: int) -> bytes:
        """Return one page."""
        return self.read(page, 1)[page]

    def _of_log(self, page: int, frame: int) -> bytes:
        assert self.wal is not None
        assert self.wal_header is not None
        data = self.wal.read_at(self.wal_header.frame_bytes, self.wal_header.offset(frame))
        if len(data) == self.wal_header.frame_bytes:
            number, _, salts, _, _ = FRAME_HEAD.unpack_from(data)
            if number == page + 1 and salts == self.wal_header.salts:
                return data[FRAME_HEAD.size :]
        raise Corruption(
            "the write-ahead log changed while it was read", hint="try again", path=self.wal.path, frame=frame
        )

    def _absent(self, page: int, part: bytes) -> bytes:
        """Return a page that is in neither log nor file: zeros if the log's transactions added it without writing it, else
        raise."""
        if page >= self.file_header.size_pages or page == PENDING_BYTE // self.page_size:
            return part + bytes(self.page_size - len(part))
        raise Corruption(
            "the file is truncated: a page is missing", hint="use a complete copy", path=self.path, page=page + 1
        )


@contextmanager
def open_source(path: str, *, lock: bool = True, disk: Disk | None = None) -> Iterator[FileSource]:
    """Open a database file for reading. It is locked unless `lock=False`; no program may write to it in the meantime then."""
    disk = disk or OsDisk()
    with ExitStack() as closing:
        file = closing.enter_context(DbFile(path))
        header = parse_db_header(file.read_at(HEADER_SIZE, 0), path)
        held = closing.enter_context(_locked(file, header)) if lock else None
        if held is None:
            _refuse_hot_journal(disk, file.path + "-journal")
        wal = open_or_none(disk, file.path + "-wal")
        if wal is not None:
            closing.callback(wal.close)
        yield FileSource(file, held, wal)


def _locked(file: DbFile, header: DbHeader) -> ReadLock:
    try:
        return ReadLock(file.path, header)
    except Corruption as error:
        expected = header.size_pages * header.page_size
        if file.size() < expected:  # SQLite reports only that it is damaged
            raise _cut_off(file.path, file.size(), expected) from error
        raise


def _cut_off(path: str, size: int, expected: int) -> Corruption:
    return Corruption(
        "the file is truncated: it is shorter than its header states",
        hint="use a complete copy; `sqlite3 FILE .recover` salvages the rest",
        path=path,
        bytes=size,
        expected=expected,
    )


def _refuse_hot_journal(disk: Disk, path: str) -> None:
    """Raise if a rollback journal was not finalised: it begins with its magic. Without a lock SQLite cannot check this."""
    journal = open_or_none(disk, path)
    if journal is None:
        return
    try:
        hot = journal.read_at(len(JOURNAL_MAGIC), 0) == JOURNAL_MAGIC
    finally:
        journal.close()
    if hot:
        hint = "open it once with SQLite, which recovers it"
        raise Unavailable("the database has a rollback journal: it needs recovery", hint=hint, path=path)


def size_and_time(file: File | None) -> tuple[int, int]:
    """Return size in bytes and modification time in ns of a file; zeros for None."""
    if file is None:
        return 0, 0
    stat = os.fstat(file.fileno())
    return stat.st_size, stat.st_mtime_ns


def open_or_none(disk: Disk, path: str) -> File | None:
    """Open a file for reading; return `None` if it does not exist."""
    try:
        return disk.open(path, write=False)
    except FileNotFoundError:
        return None
