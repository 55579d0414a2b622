"""Our errors as SQLite's: which code a `QuireError` is, for whoever calls SQLite and knows only those.

Rules
  1. SQLite's own code where it has one; `SQLITE_IOERR` for anything else. The message is ours, the original is the cause.
  2. An error in `COMMIT_PHASETWO` is `SQLITE_FULL` or of the `SQLITE_IOERR` family, whatever it was: after those two alone
     SQLite throws away the pages it has changed in memory (Q1).

    >>> from quire.core.errors import DiskFull
    >>> error = sqlite_error(DiskFull("no space left", hint="make room"))
    >>> type(error).__name__, error.extendedresult, str(error)
    ('FullError', 13, 'no space left; make room')

Executor-safe.
"""

from __future__ import annotations

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
    """The same for an error of a commit (rule 2), whose transaction was already in the log, or was not."""
    code = code_of(error)
    what = "nobody knows whether the transaction is on disk" if appended else "the transaction was rolled back"
    return apsw_error(code if code == SQLITE_FULL else SQLITE_IOERR_COMMIT_ATOMIC, f"{what}: {error}")


def apsw_error(code: int, message: str) -> Exception:
    """An error of SQLite's with this extended code."""
    error = exception_for(code)
    error.args = (message,)
    return error
