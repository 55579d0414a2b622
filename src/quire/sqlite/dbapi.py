"""The interface of the standard library's `sqlite3` on databases of a store: PEP 249, for SQLAlchemy, pandas and others.

It behaves as sqlite3 does (docs/sqlite.md has the short list of differences): a transaction begins implicitly before the
first statement that writes, and ends with `commit` or `rollback`; with `isolation_level=None` no transaction begins
implicitly. `Connection.apsw` is the underlying connection, with all of SQLite.

    >>> import tempfile
    >>> from quire.sqlite import dbapi
    >>> connection = dbapi.connect(f"{tempfile.mkdtemp()}/shop")
    >>> _ = connection.execute("create table t(a)")
    >>> _ = connection.executemany("insert into t values (?)", [(1,), (2,)])
    >>> connection.rollback()
    >>> connection.execute("select count(*) from t").fetchone()
    (0,)
    >>> connection.close()

Threads: a connection belongs to one at a time. Raises the classes of `errors`; the cause is apsw's error, whose cause is
quire's, if any.
"""

from __future__ import annotations

import datetime as dt
import time as _time
from typing import TYPE_CHECKING

import apsw as _apsw
from apsw import complete as complete_statement

from quire.sqlite.pep249.adapters import (
    PrepareProtocol,
    adapt,
    adapters,
    converters,
    register_adapter,
    register_converter,
)
from quire.sqlite.pep249.blob import Blob
from quire.sqlite.pep249.callbacks import enable_callback_tracebacks
from quire.sqlite.pep249.connection import LEGACY_TRANSACTION_CONTROL, Connection, connect, wrap
from quire.sqlite.pep249.constants import CONSTANTS
from quire.sqlite.pep249.cursor import PARSE_COLNAMES, PARSE_DECLTYPES, Cursor
from quire.sqlite.pep249.errors import (
    DatabaseError,
    DataError,
    Error,
    IntegrityError,
    InterfaceError,
    InternalError,
    NotSupportedError,
    OperationalError,
    ProgrammingError,
    Warning,  # noqa: A004 - PEP 249 gives the name
)
from quire.sqlite.pep249.row import Row

__all__ = [
    "BINARY",
    "DATETIME",
    "LEGACY_TRANSACTION_CONTROL",
    "NUMBER",
    "PARSE_COLNAMES",
    "PARSE_DECLTYPES",
    "ROWID",
    "STRING",
    "Binary",
    "Blob",
    "Connection",
    "Cursor",
    "DataError",
    "DatabaseError",
    "Date",
    "DateFromTicks",
    "Error",
    "IntegrityError",
    "InterfaceError",
    "InternalError",
    "NotSupportedError",
    "OperationalError",
    "PrepareProtocol",
    "ProgrammingError",
    "Row",
    "Time",
    "TimeFromTicks",
    "Timestamp",
    "TimestampFromTicks",
    "Warning",
    "adapt",
    "adapters",
    "apilevel",
    "complete_statement",
    "connect",
    "converters",
    "enable_callback_tracebacks",
    "paramstyle",
    "register_adapter",
    "register_converter",
    "sqlite_version",
    "sqlite_version_info",
    "threadsafety",
    "version",
    "version_info",
    "wrap",
]

apilevel = "2.0"
threadsafety = 1
paramstyle = "qmark"
sqlite_version = _apsw.sqlite_lib_version()
sqlite_version_info = tuple(int(part) for part in sqlite_version.split("."))
version, version_info = "2.6.0", (2, 6, 0)
"""Version of sqlite3's interface."""

Date, Time, Timestamp, Binary = dt.date, dt.time, dt.datetime, memoryview
STRING, BINARY, NUMBER, DATETIME, ROWID = str, bytes, int, dt.datetime, int

if TYPE_CHECKING:

    def __getattr__(name: str) -> int:
        """Return one of SQLite's constants."""
else:
    globals().update(CONSTANTS)
    __all__ += CONSTANTS


def DateFromTicks(ticks: float) -> dt.date:  # noqa: N802 - PEP 249 gives the name
    """Return the local date of a moment."""
    return dt.date(*_time.localtime(ticks)[:3])


def TimeFromTicks(ticks: float) -> dt.time:  # noqa: N802 - PEP 249 gives the name
    """Return the local time of day of a moment."""
    return dt.time(*_time.localtime(ticks)[3:6])


def TimestampFromTicks(ticks: float) -> dt.datetime:  # noqa: N802 - PEP 249 gives the name
    """Return a moment in local time."""
    return dt.datetime(*_time.localtime(ticks)[:6])
