"""The exceptions of PEP 249, with SQLite's code and its name, and the translation of apsw's and quire's errors to them.

    >>> try:
    ...     with TRANSLATED:
    ...         _ = apsw.Connection("").execute("select * from nosuch")
    ... except OperationalError as error:
    ...     print(error, error.sqlite_errorcode, error.sqlite_errorname)
    no such table: nosuch 1 SQLITE_ERROR

Each is also the standard library's exception of the same name, so `except sqlite3.IntegrityError` in a program, or in a
library that it uses, works for these connections too.

Threads: any.
"""

from __future__ import annotations

import sqlite3
from types import TracebackType

import apsw

from quire.core.errors import QuireError, StoreClosed, StoreUnusable


class Warning(sqlite3.Warning):  # noqa: A001 - PEP 249 gives the name
    """An important warning."""


class Error(sqlite3.Error):
    """The base class of all exceptions raised here. Errors reported by SQLite have its extended code and that code's name."""

    sqlite_errorcode: int
    sqlite_errorname: str


class InterfaceError(Error, sqlite3.InterfaceError):
    """The module was used wrongly."""


class DatabaseError(Error, sqlite3.DatabaseError):
    """An error of the database."""


class DataError(DatabaseError, sqlite3.DataError):
    """A value that does not fit."""


class OperationalError(DatabaseError, sqlite3.OperationalError):
    """An error outside the programmer's control: locked, full, gone; also a mistake in SQL."""


class IntegrityError(DatabaseError, sqlite3.IntegrityError):
    """A violated constraint."""


class InternalError(DatabaseError, sqlite3.InternalError):
    """A bug."""


class ProgrammingError(DatabaseError, sqlite3.ProgrammingError):
    """Wrong use: a closed connection, a wrong number of parameters."""


class NotSupportedError(DatabaseError, sqlite3.NotSupportedError):
    """Not supported by SQLite or by this connection."""


_BY_CODE: dict[int, type[Error]] = {
    apsw.SQLITE_INTERNAL: InternalError,
    apsw.SQLITE_NOTFOUND: InternalError,
    apsw.SQLITE_CORRUPT: DatabaseError,
    apsw.SQLITE_TOOBIG: DataError,
    apsw.SQLITE_CONSTRAINT: IntegrityError,
    apsw.SQLITE_MISMATCH: IntegrityError,
    apsw.SQLITE_MISUSE: InterfaceError,
    apsw.SQLITE_RANGE: InterfaceError,
}
"""SQLite's primary codes by class, as in sqlite3. Codes of the next set are operational; any other is a DatabaseError."""
_OPERATIONAL = {
    apsw.SQLITE_ERROR,
    apsw.SQLITE_PERM,
    apsw.SQLITE_ABORT,
    apsw.SQLITE_BUSY,
    apsw.SQLITE_LOCKED,
    apsw.SQLITE_READONLY,
    apsw.SQLITE_INTERRUPT,
    apsw.SQLITE_IOERR,
    apsw.SQLITE_FULL,
    apsw.SQLITE_CANTOPEN,
    apsw.SQLITE_PROTOCOL,
    apsw.SQLITE_EMPTY,
    apsw.SQLITE_SCHEMA,
}
CLOSED = "Cannot operate on a closed database."


def error_of(code: int, message: str) -> Error:
    """Return the exception for one of SQLite's extended codes."""
    primary = code & 0xFF
    kind = _BY_CODE.get(primary) or (OperationalError if primary in _OPERATIONAL else DatabaseError)
    error = kind(message)
    error.sqlite_errorcode, error.sqlite_errorname = code, error_name(code)
    return error


def error_name(code: int) -> str:
    """Return the name of a code, such as `SQLITE_CONSTRAINT_UNIQUE` for 2067.

    >>> error_name(2067), error_name(5), error_name(999_999)
    ('SQLITE_CONSTRAINT_UNIQUE', 'SQLITE_BUSY', 'unknown')
    """
    name = apsw.mapping_extended_result_codes.get(code) or apsw.mapping_result_codes.get(code)
    return str(name or "unknown")


def translated(error: Exception) -> Exception:
    """Return the exception of PEP 249 for one of apsw's or quire's; any other is returned unchanged."""
    if isinstance(error, apsw.ConnectionClosedError):
        return ProgrammingError(CLOSED)
    if isinstance(error, apsw.CursorClosedError):
        return ProgrammingError("Cannot operate on a closed cursor.")
    if isinstance(error, apsw.ThreadingViolationError | apsw.BindingsError):
        return ProgrammingError(str(error))
    if isinstance(error, apsw.Error):
        code = getattr(error, "extendedresult", -1)
        return error_of(code, _message(error)) if code > 0 else OperationalError(str(error))
    return OperationalError(str(error)) if isinstance(error, QuireError) else error


def ends_connection(error: BaseException | None) -> bool:
    """Return whether an error ends its connection, so that a program needs a new one: the store was closed, or the database
    failed and is opened again by the next connection (M12)."""
    while error is not None and not isinstance(error, StoreClosed | StoreUnusable):
        error = error.__cause__
    return error is not None


def _message(error: apsw.Error) -> str:
    """Return the message without the name of the apsw class, which apsw prepends where SQLite has no message."""
    return str(error).removeprefix(f"{type(error).__name__}: ")


class _Translated:
    """A block whose apsw and quire errors become those of PEP 249."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, apsw.Error | QuireError):
            raise translated(error) from error


TRANSLATED = _Translated()
