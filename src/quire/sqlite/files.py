"""A version of a database as a file that SQLite reads: pages become bytes at offsets.

Terms
  source   anything that has the pages of one version: a snapshot, a view on an executor, a published version
  part     a read that is not one whole page: the header when a database is opened, the change counter, a guess at the page size

Rules
  1. SQLite counts pages from 1 and asks for bytes; page n of SQLite is page n - 1 here. What lies beyond the end is a short
     read, which SQLite fills with zeros.
  2. Bytes 18 and 19 of the header are shown as 1 (Q3): a file that was imported in WAL mode would not open otherwise.
  3. A version never changes, so SQLite is told so (`IMMUTABLE`): it takes no locks and asks for no change counter.

Executor-safe. Thread: one at a time, as SQLite's connections.
"""

# ruff: noqa: N802 - SQLite gives these names

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import apsw

from quire.core.errors import OutOfRange, QuireError
from quire.sqlite.error_codes import made, sqlite_error
from quire.sqlite.pragmas import EPOCH, Verdict, look, tell_once

POWERSAFE = apsw.SQLITE_IOCAP_POWERSAFE_OVERWRITE
FIXED = POWERSAFE | apsw.SQLITE_IOCAP_IMMUTABLE

LEGACY = b"\x01\x01"
_FORMATS = slice(18, 20)


class PageSource(Protocol):
    """One version of a database, to be read; made of nothing that an executor lacks."""

    @property
    def lsn(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def size_pages(self) -> int: ...

    def read_page(self, page: int, /) -> bytes: ...

    def close(self) -> None: ...


def shown(header: bytes) -> bytes:
    """The first page as SQLite may see it (rule 2)."""
    return header if header[_FORMATS] == LEGACY else header[:18] + LEGACY + header[20:]


def read_part(read: Callable[[int], bytes], page_size: int, size_pages: int, amount: int, offset: int) -> bytes:
    """Any bytes of a version; fewer than asked for at its end (rule 1).

    >>> read_part(lambda page: bytes([page]) * 4, 4, 2, 3, 3).hex()
    '000101'
    >>> read_part(lambda page: bytes([page]) * 4, 4, 2, 3, 6).hex()
    '0101'
    """
    end = min(offset + amount, size_pages * page_size)
    if end <= offset:
        return b""
    first, last = offset // page_size, (end - 1) // page_size
    pages = [shown(read(page)) if page == 0 else read(page) for page in range(first, last + 1)]
    start = offset - first * page_size
    return b"".join(pages)[start : start + end - offset]


def answer_pragma(pointer: int, page_size: int) -> tuple[str, str | None, Verdict]:
    """Look at a pragma and give SQLite our reply, if we have one; its name, its value, and what became of it."""
    pragma = apsw.VFSFcntlPragma(pointer)
    verdict = look(pragma.name, pragma.value, page_size=page_size)
    if verdict.refusal is not None:
        pragma.result = verdict.refusal
        raise made(apsw.SQLITE_ERROR, verdict.refusal)
    if verdict.reply is not None:
        pragma.result = verdict.reply
    if verdict.note is not None:
        tell_once(pragma.name.lower(), str(pragma.value).strip().lower(), str(verdict.reply), verdict.note)
    return pragma.name, pragma.value, verdict


class SourceFile:
    """One version, for reading; see the rules above."""

    def __init__(self, source: PageSource) -> None:
        # constant after construction
        self._source = source
        self._read: Callable[[int], bytes] = source.read_page
        self._page_size = source.page_size
        self._size_pages = source.size_pages

    xDeviceCharacteristics = staticmethod(FIXED.conjugate)  # noqa: N815 - a call that returns a number and no Python runs

    def xRead(self, amount: int, offset: int) -> bytes:
        """The bytes at an offset."""
        try:
            if amount == self._page_size and offset:
                return self._read(offset // amount)
            return read_part(self._read, self._page_size, self._size_pages, amount, offset)
        except OutOfRange:
            return b""
        except QuireError as error:
            raise sqlite_error(error) from error

    def xFileSize(self) -> int:
        """The size of the version in bytes."""
        return self._size_pages * self._page_size

    def xFileControl(self, operation: int, pointer: int) -> bool:
        """Whether the operation was ours."""
        if operation != apsw.SQLITE_FCNTL_PRAGMA:
            return False
        name, value, verdict = answer_pragma(pointer, self._page_size)
        if name.lower() == EPOCH and value is None:
            apsw.VFSFcntlPragma(pointer).result = str(self._source.lsn)
            return True
        return verdict.reply is not None

    def xLock(self, _: int) -> None:
        """Nothing changes, so nothing is locked."""

    xUnlock = xLock  # noqa: N815 - SQLite gives the name

    def xCheckReservedLock(self) -> bool:
        """Nobody writes."""
        return False

    def xWrite(self, _: bytes, __: int) -> None:
        """Refused."""
        raise made(apsw.SQLITE_READONLY, "this is an earlier version of the database, for reading")

    def xTruncate(self, _: int) -> None:
        """Refused."""
        raise made(apsw.SQLITE_READONLY, "this is an earlier version of the database, for reading")

    def xSync(self, _: int) -> None:
        """Nothing to do."""

    def xSectorSize(self) -> int:
        """SQLite's usual."""
        return 4096

    def xClose(self) -> None:
        """Give the version back."""
        self._source.close()

    def shut(self, why: QuireError) -> None:
        """Read no more: what the pages come from is closed."""

        def refuse(_: int) -> bytes:
            raise why

        self._read = refuse
