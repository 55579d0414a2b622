"""SQLite's window to its files, with databases of quire behind it.

Terms
  opener   says what file a database's name and parameters mean; of a store, or of one source on an executor

Rules
  1. A name without a slash is a database of quire. One with a slash is a file of the machine's, and a file without a name is
     temporary: both are the default VFS's, so `ATTACH '/path/file.db'`, `VACUUM INTO '/path/file.db'` and sorting work as ever.
  2. A database of quire has no journal beside it: SQLite is told that it lives in memory, so that the journal does too, for an
     attached one as well. A journal that SQLite opens all the same is a temporary file: a pragma for all databases of a
     connection reaches those that are attached without asking them.
  3. A sleep of a connection that was refused ends when its turn to write comes (`locks.py`).
  4. An error while opening is SQLite's `CANTOPEN` with our message.

Threads: any. Executor-safe.
"""

# ruff: noqa: N802 - SQLite gives these names

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import apsw

from quire.core.errors import QuireError
from quire.sqlite.error_codes import apsw_error

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
    """See the rules above. It is registered for as long as somebody holds it."""

    def __init__(self, prefix: str, opener: Opener) -> None:
        # constant after construction
        self.name = f"{prefix}-{next(_numbers)}"
        self._opener = opener
        # each thread's own
        self.refused = threading.local()
        super().__init__(self.name, base="", maxpathname=NAME_BYTES_MAX)

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        """Open a database, or a file of the default VFS (rule 1)."""
        if name is None:
            return super().xOpen(name, flags)
        path, parameters = _parts(name)
        if "/" in path:
            return super().xOpen(name, flags)
        if not flags[0] & apsw.SQLITE_OPEN_MAIN_DB:
            return super().xOpen(None, [TEMPORARY, 0])  # rule 2
        try:
            file, read_only = self._opener(path, parameters, bool(flags[0] & apsw.SQLITE_OPEN_CREATE))
        except QuireError as error:
            raise apsw_error(apsw.SQLITE_CANTOPEN, str(error)) from error
        access = apsw.SQLITE_OPEN_READONLY if read_only else apsw.SQLITE_OPEN_READWRITE
        flags[1] = access | apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_MEMORY  # rule 2
        return file  # type: ignore[return-value]  # any object with the methods will do

    def xAccess(self, pathname: str, flags: int) -> bool:
        """Whether a file is there: no journal ever is (rule 2)."""
        return super().xAccess(pathname, flags) if "/" in pathname else False

    def xFullPathname(self, name: str) -> str:
        """Databases have no directory."""
        return super().xFullPathname(name) if "/" in name else name

    def xDelete(self, filename: str, syncdir: bool) -> None:
        """Only files of the default VFS are deleted."""
        if "/" in filename:
            super().xDelete(filename, syncdir)

    def xSleep(self, microseconds: int) -> int:
        """Sleep, or wait for one's turn (rule 3)."""
        wait: Callable[[float], None] = self.refused.__dict__.pop("wait", time.sleep)
        wait(microseconds / 1_000_000)
        return microseconds


def _parts(name: str | apsw.URIFilename) -> tuple[str, dict[str, str]]:
    if isinstance(name, str):
        return name, {}
    return name.filename(), {key: name.uri_parameter(key) or "" for key in name.parameters}
