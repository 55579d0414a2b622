"""A SQLite VFS that serves quire's databases, and the translation of quire's errors to SQLite's.

A name without a slash is a quire database. A name with a slash is a file of the machine, and a file without a name is
temporary. Both are passed to the default VFS, so `ATTACH '/path/file.db'`, `VACUUM INTO '/path/file.db'` and sorting work as
usual.

    >>> from quire.core.errors import DiskFull
    >>> error = sqlite_error(DiskFull("no space left", hint="make room"))
    >>> type(error).__name__, error.extendedresult, str(error)
    ('FullError', 13, 'no space left; make room')

With a *shim* (`vfs_shim.py`) SQLite sees the shim under our name, and the shim calls us. It resolves names as we do.

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
"""The nearest base class decides; errors that are not listed are `SQLITE_IOERR`."""


def code_of(error: BaseException) -> int:
    """Return SQLite's extended result code for an error."""
    return next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), SQLITE_IOERR)


def sqlite_error(error: BaseException) -> Exception:
    """Return the error to raise towards SQLite, `from error`."""
    return apsw_error(code_of(error), str(error))


def commit_error(error: BaseException, *, appended: bool) -> Exception:
    """Return the error to raise for a failed commit; `appended` means that its transaction was already in the log.

    It is always `SQLITE_FULL` or of the `SQLITE_IOERR` family: only after these does SQLite discard the pages it has changed
    in memory (Q1).
    """
    code = code_of(error)
    what = "it is unknown whether the transaction is on disk" if appended else "the transaction was rolled back"
    return apsw_error(code if code == SQLITE_FULL else SQLITE_IOERR_COMMIT_ATOMIC, f"{what}: {error}")


def apsw_error(code: int, message: str) -> Exception:
    """Return an apsw error with this extended code."""
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
"""The flags with which SQLite opens a file that is deleted when it is closed."""

_numbers = itertools.count(1)


class VfsFile(Protocol):
    """The methods that SQLite calls on an open file."""

    def xRead(self, amount: int, offset: int) -> bytes: ...
    def xWrite(self, data: bytes, offset: int) -> None: ...
    def xFileSize(self) -> int: ...
    def xLock(self, level: int) -> None: ...
    def xUnlock(self, level: int) -> None: ...
    def xClose(self) -> None: ...


Opener = Callable[[str, Mapping[str, str], bool], tuple[VfsFile, bool]]
"""(name, URI parameters, whether it may be created) → the file, and whether it is read-only."""


class QuireVfs(apsw.VFS):
    """The VFS. It is registered for as long as it is referenced."""

    def __init__(self, prefix: str, opener: Opener, shim: ShimLibrary | None = None) -> None:
        # constant after construction
        self.name = f"{prefix}-{next(_numbers)}"
        self._opener = opener
        # per thread
        self.refused = threading.local()
        under = self.name if shim is None else f"{self.name}-python"
        super().__init__(under, base="", maxpathname=NAME_BYTES_MAX)
        if shim is not None:
            registered = shim.register(under.encode(), self.name.encode())
            if not registered:
                raise MemoryError("the VFS cannot be registered")
            # A connection keeps apsw's VFS alive but cannot see that this one is behind the shim: its files keep it alive.
            weakref.finalize(self, shim.unregister, registered)

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        """Open a database, or a file of the default VFS."""
        if name is None:
            return super().xOpen(name, flags)
        path, parameters = _parts(name)
        if "/" in path:
            return super().xOpen(name, flags)
        if not flags[0] & apsw.SQLITE_OPEN_MAIN_DB:
            # A journal after all: a pragma for all databases of a connection is applied to attached ones without asking their
            # files.
            return super().xOpen(None, [TEMPORARY, 0])
        try:
            file, read_only = self._opener(path, parameters, bool(flags[0] & apsw.SQLITE_OPEN_CREATE))
        except QuireError as error:
            raise apsw_error(apsw.SQLITE_CANTOPEN, str(error)) from error
        read_only = read_only or bool(flags[0] & apsw.SQLITE_OPEN_READONLY)  # `?mode=ro`, and ATTACH of remote users
        access = apsw.SQLITE_OPEN_READONLY if read_only else apsw.SQLITE_OPEN_READWRITE
        # Declared as in memory, so that SQLite keeps its journal there too: a quire database has no journal file.
        flags[1] = access | apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_MEMORY
        return file  # type: ignore[return-value]  # any object with the methods will do

    def xAccess(self, pathname: str, flags: int) -> bool:
        """Return whether a file exists: a database never has a journal."""
        return super().xAccess(pathname, flags) if "/" in pathname else False

    def xFullPathname(self, name: str) -> str:
        """Return the full path; databases have no directory."""
        return super().xFullPathname(name) if "/" in name else name

    def xDelete(self, filename: str, syncdir: bool) -> None:
        """Delete a file of the default VFS; ignore other names."""
        if "/" in filename:
            super().xDelete(filename, syncdir)

    def xSleep(self, microseconds: int) -> int:
        """Sleep, or wait for the writer slot if it was refused."""
        wait: Callable[[float], None] = self.refused.__dict__.pop("wait", time.sleep)
        wait(microseconds / 1_000_000)
        return microseconds


def _parts(name: str | apsw.URIFilename) -> tuple[str, dict[str, str]]:
    if isinstance(name, str):
        return name, {}
    return name.filename(), {key: name.uri_parameter(key) or "" for key in name.parameters}
