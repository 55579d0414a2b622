"""A database as a file that SQLite reads: pages become bytes at offsets.

`DatabaseFile` is the part that all files share. `ReadOnlyFile` is the read-only mode: one fixed version, or the newest
published version at the start of each transaction. `live.py` has the mode that writes, `open_reader` a connection over any
source of pages.

A connection *pins* a version for the duration of a read transaction. The *stamp* is sixteen bytes of the header (change
counter, sizes) by which SQLite decides whether its cached pages are still valid. SQLite counts pages from 1; its page n is
page n - 1 here. A read beyond the end is short, and SQLite fills it with zeros. Bytes 18 and 19 of the header are always
shown as 1, because a file imported in WAL mode would not open otherwise (Q3).

Executor-safe. Threads: one at a time, as SQLite's connections; `renew` and `release_idle` are called by the keeper's thread.
"""

# ruff: noqa: N802 - SQLite gives these names

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

import apsw

from quire.core.errors import OutOfRange, QuireError, UnknownDatabase
from quire.sqlite.pragmas import EPOCH, answer_pragma, log_once
from quire.sqlite.vfs import QuireVfs, VfsFile, apsw_error, sqlite_error

POWERSAFE = apsw.SQLITE_IOCAP_POWERSAFE_OVERWRITE
FIXED = POWERSAFE | apsw.SQLITE_IOCAP_IMMUTABLE
SHARED = apsw.SQLITE_LOCK_SHARED
PRAGMA = apsw.SQLITE_FCNTL_PRAGMA

LEGACY = b"\x01\x01"
_FORMATS = slice(18, 20)
"""Write and read version in the header: 1 is a rollback journal, 2 a write-ahead log."""
STAMP_OFFSET, STAMP_BYTES = 24, 16
STAMP = slice(STAMP_OFFSET, STAMP_OFFSET + STAMP_BYTES)


class PageReader(Protocol):
    """One version of a database: a snapshot, a view on an executor, or any other source of pages."""

    @property
    def lsn(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def size_pages(self) -> int: ...

    def read_page(self, page: int, /) -> bytes: ...

    def close(self) -> None: ...


class LeasedPages(PageReader, Protocol):
    """A version whose lease may expire."""

    @property
    def is_open(self) -> bool: ...


R = TypeVar("R", bound=PageReader)


def with_legacy_header(header: bytes) -> bytes:
    """Return the first page with WAL mode turned off, as SQLite may see it (Q3)."""
    return header if header[_FORMATS] == LEGACY else header[: _FORMATS.start] + LEGACY + header[_FORMATS.stop :]


def read_part(read: Callable[[int], bytes], page_size: int, size_pages: int, amount: int, offset: int) -> bytes:
    """Return any bytes of a version; fewer than requested at its end.

    >>> read_part(lambda page: bytes([page]) * 4, 4, 2, 3, 3).hex()
    '000101'
    >>> read_part(lambda page: bytes([page]) * 4, 4, 2, 3, 6).hex()
    '0101'
    """
    end = min(offset + amount, size_pages * page_size)
    if end <= offset:
        return b""
    first, last = offset // page_size, (end - 1) // page_size
    pages = [with_legacy_header(read(page)) if page == 0 else read(page) for page in range(first, last + 1)]
    start = offset - first * page_size
    return b"".join(pages)[start : start + end - offset]


class DatabaseFile(Generic[R]):
    """The common part of live and read-only files: reading a pinned version, and pragmas."""

    def __init__(self) -> None:
        # constant once opened
        self.vfs: QuireVfs | None = None
        """The VFS through which the file was opened: a VFS that a shim calls must outlive every connection that may call it."""
        # owned by the connection
        self._level = 0
        self._page_size = 0
        self._pin: R | None = None
        self._read: Callable[[int], bytes] = no_pages
        self._seen: tuple[int, bytes] = (-1, b"")
        """(lsn, stamp) of SQLite's cached pages."""
        # shared with the keeper: the thread that pops a pin owns it
        self._idle: list[R] = []

    xDeviceCharacteristics = staticmethod(POWERSAFE.conjugate)  # noqa: N815 - a call that returns a number and no Python runs

    # ── pins ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _take_pin(self) -> None:
        """Pin the newest version."""
        raise NotImplementedError

    def _put_pin(self) -> None:
        """Unpin the version; it stays open for a moment, for the next transaction."""
        pin = self._pin
        if pin is not None:
            self._pin, self._read = None, no_pages
            self._idle.append(pin)

    def _pinned_lsn(self) -> int:
        return self._pin.lsn if self._pin is not None else 0

    def renew(self) -> None:
        """Renew the lease of the read transaction in progress."""

    def release_idle(self) -> None:
        """Close pins that are not in use: they would hold back checkpoints."""
        while self._idle:
            try:
                pin = self._idle.pop()
            except IndexError:
                return
            pin.close()

    def shut_down(self, why: QuireError) -> None:
        """Fail every read from now on: the store is being closed."""

        def refuse(_: int) -> bytes:
            raise why

        self._read = refuse

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def xRead(self, amount: int, offset: int) -> bytes:
        """Return the bytes at an offset of the version, or of the transaction."""
        try:
            if amount == self._page_size and offset:
                return self._read(offset // amount)
            if amount == STAMP_BYTES and offset == STAMP_OFFSET:
                return self._stamp()
            return self._read_part(amount, offset)
        except OutOfRange:
            return b""
        except QuireError as error:
            raise sqlite_error(error) from error

    def _stamp(self) -> bytes:
        """Return the stamp that SQLite is shown.

        SQLite must drop its cached pages whenever another writer changed the version, and some writers do not change the
        change counter (`sqlite follow` copies pages unmodified). In that case the stamp is altered.
        """
        lsn, (seen_lsn, seen) = self._pinned_lsn(), self._seen
        if lsn == seen_lsn:
            return seen
        if self._pin is None:
            return self._read_part(STAMP_BYTES, STAMP_OFFSET)
        stamp = self._read(0)[STAMP] if self._size() else b""
        self._seen = (lsn, stamp)
        return bytes([stamp[0] ^ 0xFF]) + stamp[1:] if stamp and stamp == seen else stamp

    def _read_part(self, amount: int, offset: int) -> bytes:
        if self._pin is None and not self._level:
            return self._read_unlocked(amount, offset)
        if amount == self._page_size and not offset and self._size():
            part = with_legacy_header(self._read(0))
        else:
            part = read_part(self._read, self._page_size or 1, self._size(), amount, offset)
        if not offset and len(part) >= STAMP.stop:
            self._note_stamp(part[STAMP])
        return part

    def _note_stamp(self, stamp: bytes) -> None:
        self._seen = (self._pinned_lsn(), stamp)

    def _read_unlocked(self, amount: int, offset: int) -> bytes:
        """Read bytes of the newest version without a lock: SQLite reads the header before it takes any."""
        self._take_pin()
        try:
            return read_part(self._read, self._page_size or 1, self._size(), amount, offset)
        finally:
            self._put_pin()

    def xFileSize(self) -> int:
        """Return the size in bytes of the version, or of the transaction."""
        return self._size() * self._page_size

    def _size(self) -> int:
        return self._pin.size_pages if self._pin is not None else 0

    # ── other calls ───────────────────────────────────────────────────────────────────────────────────────────────────
    def xFileControl(self, operation: int, pointer: int) -> bool:
        """Handle a file control; return whether it was handled here."""
        if operation != PRAGMA:
            return False
        pragma = apsw.VFSFcntlPragma(pointer)
        name, value = pragma.name.lower(), pragma.value
        answer = answer_pragma(name, value, page_size=self._page_size)
        if answer.refusal is not None:
            pragma.result = answer.refusal
            raise apsw_error(apsw.SQLITE_ERROR, answer.refusal)
        if answer.reply is not None:
            pragma.result = answer.reply
        if answer.note is not None:
            log_once(name, str(value).strip().lower(), str(answer.reply), answer.note)
        if value is not None:
            self._pragma_set(name, value)
        elif name == EPOCH:
            pragma.result = str(self._current_lsn())
            return True
        return answer.reply is not None

    def _pragma_set(self, name: str, value: str) -> None:
        """Called before SQLite sets a pragma."""

    def _current_lsn(self) -> int:
        """Return the version that this connection reads, or would read now."""
        raise NotImplementedError

    def xSync(self, _: int) -> None:
        """Do nothing: SQLite may still roll back afterwards (Q1)."""

    def xSectorSize(self) -> int:
        """Return SQLite's default."""
        return 4096


class ReadOnlyFile(DatabaseFile[PageReader]):
    """A read-only file. Created by `fixed` or `published`."""

    def __init__(
        self,
        open_newest: Callable[[], LeasedPages] | None = None,
        newest_lsn: Callable[[], int] = lambda: 0,
        *,
        version: PageReader | None = None,
        refusal: str = "the store is open for reading; only its owner can write",
    ) -> None:
        super().__init__()
        # constant after construction
        self._open_newest = open_newest
        self._newest_lsn = newest_lsn
        self._refusal = refusal
        if version is not None:
            self._use(version)
            # SQLite then takes no locks and never reads the stamp.
            self.xDeviceCharacteristics = FIXED.conjugate

    @classmethod
    def fixed(cls, version: PageReader) -> ReadOnlyFile:
        """Return a file of one version that does not change; the version is closed with the file."""
        return cls(version=version, refusal="this is an earlier version of the database; it cannot be changed")

    @classmethod
    def published(cls, open_newest: Callable[[], LeasedPages], newest_lsn: Callable[[], int]) -> ReadOnlyFile:
        """Return a file of the owner's published versions, at most a second old (P6). Each read transaction sees the newest."""
        return cls(open_newest, newest_lsn)

    def _use(self, version: PageReader) -> None:
        self._pin, self._read, self._page_size = version, version.read_page, version.page_size

    def xLock(self, level: int) -> None:
        """Pin the newest published version."""
        if level > SHARED:
            raise apsw_error(apsw.SQLITE_READONLY, self._refusal)
        try:
            self._take_pin()
        except QuireError as error:
            raise sqlite_error(error) from error

    def _take_pin(self) -> None:
        if self._open_newest is not None:
            self._use(self._idle_pin(self._newest_lsn()) or self._open_newest())

    def _idle_pin(self, newest_lsn: int) -> PageReader | None:
        """Return the pin of the previous transaction, if it is still the newest version."""
        while self._idle:
            try:
                pin = self._idle.pop()
            except IndexError:
                return None
            if pin.lsn == newest_lsn and pin.is_open:  # type: ignore[attr-defined]  # `open_newest` made it
                return pin
            pin.close()
        return None

    def xUnlock(self, level: int) -> None:
        """Unpin the version."""
        if not level and self._open_newest is not None:
            self._put_pin()

    def xCheckReservedLock(self) -> bool:
        """Return False: there is no writer here."""
        return False

    def _current_lsn(self) -> int:
        return self._pin.lsn if self._pin is not None else self._newest_lsn()

    def xWrite(self, _: bytes, __: int) -> None:
        """Refuse."""
        raise apsw_error(apsw.SQLITE_READONLY, self._refusal)

    def xTruncate(self, _: int) -> None:
        """Refuse."""
        raise apsw_error(apsw.SQLITE_READONLY, self._refusal)

    def xClose(self) -> None:
        """Close every version."""
        self._put_pin()
        self.release_idle()


def no_pages(page: int) -> bytes:
    """Raise `OutOfRange`: no version is pinned, or it has no pages."""
    raise OutOfRange("the database has no pages yet", page=page)


_numbers = itertools.count(1)


class _PendingSources:
    """Sources that are about to be opened, by the name that SQLite will open. One VFS for all, created on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: dict[str, PageReader] = {}
        self._vfs: QuireVfs | None = None

    def put(self, source: PageReader) -> tuple[str, str]:
        """Register a source; return (name of the source, name of the VFS)."""
        with self._lock:
            self._vfs = self._vfs or QuireVfs("quire-reader", self._open)
            name = f"view-{next(_numbers)}"
            self._sources[name] = source
            return name, self._vfs.name

    def _open(self, name: str, _: Mapping[str, str], __: bool) -> tuple[VfsFile, bool]:
        source = self._sources.pop(name, None)
        if source is None:
            hint = "attach a file on this machine by its path"
            raise UnknownDatabase("a reader of one version cannot attach other databases", hint=hint, name=name)
        return ReadOnlyFile.fixed(source), True


_pending_sources = _PendingSources()


def open_reader(source: PageReader) -> apsw.Connection:
    """Open a read-only connection over a source."""
    name, vfs = _pending_sources.put(source)
    flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    return apsw.Connection(f"file:{name}?immutable=1", flags=flags, vfs=vfs)
