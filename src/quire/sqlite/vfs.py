"""SQLite's VFS with databases of quire behind it, and our errors as SQLite's.

A name without a slash is a database of quire. One with a slash is a file of the machine's, and a file without a name is
temporary: both are the default VFS's, so `ATTACH '/path/file.db'`, `VACUUM INTO '/path/file.db'` and sorting work as ever.

    >>> from quire.core.errors import DiskFull
    >>> error = sqlite_error(DiskFull("no space left", hint="make room"))
    >>> type(error).__name__, error.extendedresult, str(error)
    ('FullError', 13, 'no space left; make room')

With a *shim* (`vfs_shim.py`) SQLite meets that under our name, and the shim calls us; it answers for names as we do.

Threads: any. Executor-safe.
"""

# ruff: noqa: N802 - SQLite gives these names

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Protocol

import apsw
from apsw import (
    SQLITE_BUSY,
    SQLITE_CANTOPEN,
    SQLITE_CORRUPT,
    SQLITE_FULL,
    SQLITE_IOERR,
    SQLITE_IOERR_COMMIT_ATOMIC,
    SQLITE_READONLY,
    SQLITE_READONLY_DBMOVED,
    exception_for,
)

from quire.core import errors as e
from quire.core.errors import QuireError
from quire.sqlite.vfs_shim import ShimLibrary

CODES: dict[type[e.QuireError], int] = {
    e.QuotaExceeded: SQLITE_FULL,
    e.DiskFull: SQLITE_FULL,
    e.Corruption: SQLITE_CORRUPT,
    e.DatabaseTombstoned: SQLITE_READONLY_DBMOVED,
    e.ReadOnly: SQLITE_READONLY,
    e.TimedOut: SQLITE_BUSY,
    e.Overloaded: SQLITE_BUSY,
    e.UnknownDatabase: SQLITE_CANTOPEN,
    e.UnknownSnapshot: SQLITE_CANTOPEN,
    e.WrongKind: SQLITE_CANTOPEN,
}
"""The nearest class on the way up decides; what is not listed is `SQLITE_IOERR`."""


def code_of(error: BaseException) -> int:
    """SQLite's extended result code for an error."""
    return next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), SQLITE_IOERR)


def sqlite_error(error: BaseException) -> Exception:
    """What to raise towards SQLite, `from error`."""
    return apsw_error(code_of(error), str(error))


def commit_error(error: BaseException, *, appended: bool) -> Exception:
    """The same for an error of a commit, whose transaction was already in the log, or was not. `SQLITE_FULL` or the
    `SQLITE_IOERR` family, whatever it was: after those two alone SQLite throws away the pages it has changed in memory
    (Q1)."""
    code = code_of(error)
    what = "it is unknown whether the transaction is on disk" if appended else "the transaction was rolled back"
    return apsw_error(code if code == SQLITE_FULL else SQLITE_IOERR_COMMIT_ATOMIC, f"{what}: {error}")


def apsw_error(code: int, message: str) -> Exception:
    """An error of SQLite's with this extended code."""
    error = exception_for(code)
    error.args = (message,)
    return error


NAME_BYTES_MAX = 4096

TEMPORARY = (
    apsw.SQLITE_OPEN_TEMP_JOURNAL
    | apsw.SQLITE_OPEN_READWRITE
    | apsw.SQLITE_OPEN_CREATE
    | apsw.SQLITE_OPEN_EXCLUSIVE
    | apsw.SQLITE_OPEN_DELETEONCLOSE
)
"""How SQLite itself opens a file that is gone when it is closed."""

_numbers = itertools.count(1)


class VfsFile(Protocol):
    """What SQLite calls on an opened file."""

    def xRead(self, amount: int, offset: int) -> bytes: ...
    def xWrite(self, data: bytes, offset: int) -> None: ...
    def xFileSize(self) -> int: ...
    def xLock(self, level: int) -> None: ...
    def xUnlock(self, level: int) -> None: ...
    def xClose(self) -> None: ...


Opener = Callable[[str, Mapping[str, str], bool], tuple[VfsFile, bool]]
"""(name, parameters of the URI, whether it may be made) → the file, and whether it is for reading only."""


class QuireVfs(apsw.VFS):
    """It is registered for as long as somebody holds it."""

    def __init__(self, prefix: str, opener: Opener, shim: ShimLibrary | None = None) -> None:
        # constant after construction
        self.name = f"{prefix}-{next(_numbers)}"
        self._opener = opener
        # each thread's own
        self.refused = threading.local()
        under = self.name if shim is None else f"{self.name}-python"
        super().__init__(under, base="", maxpathname=NAME_BYTES_MAX)
        if shim is not None:
            registered = shim.register(under.encode(), self.name.encode())
            if not registered:
                raise MemoryError("the VFS cannot be registered")
            # A connection holds a VFS of apsw's, but it does not know that this one is behind the shim: its files hold it.
            weakref.finalize(self, shim.unregister, registered)

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        """Open a database, or a file of the default VFS."""
        if name is None:
            return super().xOpen(name, flags)
        path, parameters = _parts(name)
        if "/" in path:
            return super().xOpen(name, flags)
        if not flags[0] & apsw.SQLITE_OPEN_MAIN_DB:
            # A journal all the same: a pragma for all databases of a connection reaches attached ones without asking them.
            return super().xOpen(None, [TEMPORARY, 0])
        try:
            file, read_only = self._opener(path, parameters, bool(flags[0] & apsw.SQLITE_OPEN_CREATE))
        except QuireError as error:
            raise apsw_error(apsw.SQLITE_CANTOPEN, str(error)) from error
        read_only = read_only or bool(flags[0] & apsw.SQLITE_OPEN_READONLY)  # `?mode=ro`, and ATTACH of remote users
        access = apsw.SQLITE_OPEN_READONLY if read_only else apsw.SQLITE_OPEN_READWRITE
        # SQLite is told that it lives in memory, so that its journal does too: none lies beside a database of quire.
        flags[1] = access | apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_MEMORY
        return file  # type: ignore[return-value]  # any object with the methods will do

    def xAccess(self, pathname: str, flags: int) -> bool:
        """Whether a file is there: no journal ever is."""
        return super().xAccess(pathname, flags) if "/" in pathname else False

    def xFullPathname(self, name: str) -> str:
        """Databases have no directory."""
        return super().xFullPathname(name) if "/" in name else name

    def xDelete(self, filename: str, syncdir: bool) -> None:
        """Only files of the default VFS are deleted."""
        if "/" in filename:
            super().xDelete(filename, syncdir)

    def xSleep(self, microseconds: int) -> int:
        """Sleep, or wait for one's turn."""
        wait: Callable[[float], None] = self.refused.__dict__.pop("wait", time.sleep)
        wait(microseconds / 1_000_000)
        return microseconds


def _parts(name: str | apsw.URIFilename) -> tuple[str, dict[str, str]]:
    if isinstance(name, str):
        return name, {}
    return name.filename(), {key: name.uri_parameter(key) or "" for key in name.parameters}
