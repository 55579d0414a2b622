"""The Python database API (PEP 249) over a SQLite connection of a store, for SQLAlchemy, pandas and whoever else speaks it.

It behaves as the standard library's sqlite3 does: a transaction begins by itself before the first statement that writes, and
ends with `commit` or `rollback`; with `isolation_level=None` nothing begins by itself. What is underneath, with all of
SQLite, is `Connection.apsw`.

    >>> import tempfile, quire
    >>> from quire.sqlite import dbapi
    >>> with quire.open(tempfile.mkdtemp()) as store:
    ...     connection = dbapi.wrap(store.sqlite("shop", create=True))
    ...     _ = connection.execute("create table t(a)")
    ...     _ = connection.executemany("insert into t values (?)", [(1,), (2,)])
    ...     connection.rollback()
    ...     connection.execute("select count(*) from t").fetchone()
    ...     connection.close()
    (0,)

Threads: a connection belongs to one at a time.
Raises the classes below, with apsw's error, and ours behind it, as the cause.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import apsw

apilevel = "2.0"
threadsafety = 1
paramstyle = "qmark"
sqlite_version = apsw.sqlite_lib_version()
sqlite_version_info = tuple(int(part) for part in sqlite_version.split("."))

Date, Time, Timestamp, Binary = dt.date, dt.time, dt.datetime, bytes
STRING, BINARY, NUMBER, DATETIME, ROWID = str, bytes, int, dt.datetime, int

Parameters = Sequence[Any] | Mapping[str, Any]


class Warning(Exception):  # noqa: A001 - PEP 249 gives the name
    """Something important to say."""


class Error(Exception):
    """The root of everything raised here."""


class InterfaceError(Error):
    """The module was used wrongly."""


class DatabaseError(Error):
    """Something about the database."""


class DataError(DatabaseError):
    """A value that does not fit."""


class OperationalError(DatabaseError):
    """Not of the programmer's making: locked, full, gone, a mistake in SQL."""


class IntegrityError(DatabaseError):
    """A constraint."""


class InternalError(DatabaseError):
    """A bug."""


class ProgrammingError(DatabaseError):
    """A closed connection, a wrong number of parameters."""


class NotSupportedError(DatabaseError):
    """SQLite cannot."""


_KINDS: tuple[tuple[tuple[type[Exception], ...], type[Error]], ...] = (
    ((apsw.ConstraintError,), IntegrityError),
    ((apsw.MismatchError, apsw.TooBigError, apsw.RangeError), DataError),
    ((apsw.InternalError,), InternalError),
    ((apsw.MisuseError, apsw.ConnectionClosedError, apsw.CursorClosedError, apsw.BindingsError), ProgrammingError),
    ((apsw.CorruptError, apsw.NotADBError), DatabaseError),
    ((apsw.Error,), OperationalError),
)

_WRITING = ("insert", "update", "delete", "replace")


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except apsw.Error as error:
        kind = next(ours for theirs, ours in _KINDS if isinstance(error, theirs))
        raise kind(str(error)) from error


def wrap(connection: apsw.Connection, *, isolation_level: str | None = "") -> Connection:
    """A connection of a store, or any other of apsw's, as PEP 249 describes it."""
    return Connection(connection, isolation_level)


class Connection:
    """See above. Made by `wrap`."""

    Warning, Error, InterfaceError, DatabaseError = Warning, Error, InterfaceError, DatabaseError
    DataError, OperationalError, IntegrityError = DataError, OperationalError, IntegrityError
    InternalError, ProgrammingError, NotSupportedError = InternalError, ProgrammingError, NotSupportedError

    def __init__(self, connection: apsw.Connection, isolation_level: str | None) -> None:
        self.apsw = connection
        self.isolation_level = isolation_level
        """How transactions begin by themselves: "", "DEFERRED", "IMMEDIATE", "EXCLUSIVE"; None: not at all."""

    @property
    def in_transaction(self) -> bool:
        """Whether there is something to commit."""
        return self.apsw.in_transaction

    @property
    def total_changes(self) -> int:
        """Rows changed since it was opened."""
        return self.apsw.total_changes()

    def cursor(self) -> Cursor:
        """A new cursor."""
        with _translated():
            return Cursor(self)

    def execute(self, statement: str, parameters: Parameters = ()) -> Cursor:
        """Run a statement on a new cursor."""
        return self.cursor().execute(statement, parameters)

    def executemany(self, statement: str, rows: Iterable[Parameters]) -> Cursor:
        """Run a statement for each of these on a new cursor."""
        return self.cursor().executemany(statement, rows)

    def commit(self) -> None:
        """Commit; nothing without a transaction."""
        with _translated():
            if self.apsw.in_transaction:
                self.apsw.execute("commit")

    def rollback(self) -> None:
        """Roll back; nothing without a transaction."""
        with _translated():
            if self.apsw.in_transaction:
                self.apsw.execute("rollback")

    def close(self) -> None:
        """Close it; what was not committed is lost."""
        with _translated():
            self.apsw.close()

    def create_function(
        self, name: str, narg: int, func: Callable[..., Any] | None, *, deterministic: bool = False
    ) -> None:
        """A function of Python's for SQL."""
        with _translated():
            self.apsw.create_scalar_function(name, func, narg, deterministic=deterministic)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.rollback()


class Cursor:
    """See PEP 249. Made by `Connection.cursor`."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.arraysize = 1
        self.rowcount = -1
        self.lastrowid: int | None = None
        self.description: tuple[tuple[Any, ...], ...] | None = None
        self._cursor = connection.apsw.cursor()
        self._cursor.exec_trace = self._begins
        self._rows: Iterator[tuple[Any, ...]] = iter(())

    def execute(self, statement: str, parameters: Parameters = ()) -> Cursor:
        """Run one statement."""
        return self._run(statement, lambda: self._cursor.execute(statement, _bindings(parameters)))

    def executemany(self, statement: str, rows: Iterable[Parameters]) -> Cursor:
        """Run one statement for each of these."""
        return self._run(statement, lambda: self._cursor.executemany(statement, (_bindings(row) for row in rows)))

    def executescript(self, script: str) -> Cursor:
        """Commit, then run several statements."""
        self.connection.commit()
        return self._run("", lambda: self._cursor.execute(script).fetchall())

    def _run(self, statement: str, run: Callable[[], Any]) -> Cursor:
        writes = statement.lstrip().lower().startswith(_WRITING)
        database = self.connection.apsw
        with _translated():
            before = database.total_changes()
            if writes and self.connection.isolation_level is not None and not database.in_transaction:
                database.execute(f"begin {self.connection.isolation_level}")
            self.description = None
            run()
            # What returns rows is read now if it writes: all of it happens, whether somebody fetches them or not.
            self._rows = iter(self._cursor.fetchall()) if writes else self._cursor
        self.rowcount = database.total_changes() - before if writes else -1
        if writes:
            self.lastrowid = database.last_insert_rowid()
        return self

    def _begins(self, cursor: apsw.Cursor, _: str, __: Any) -> bool:
        """SQLite is about to run a statement: the only moment at which one without rows tells its columns."""
        self.description = cursor.description or None
        return True

    def fetchone(self) -> tuple[Any, ...] | None:
        """The next row, if there is one."""
        with _translated():
            return next(self._rows, None)

    def fetchmany(self, size: int | None = None) -> list[tuple[Any, ...]]:
        """So many rows, default `arraysize`, or as many as are left."""
        with _translated():
            return [row for _, row in zip(range(self.arraysize if size is None else size), self._rows)]

    def fetchall(self) -> list[tuple[Any, ...]]:
        """All rows that are left."""
        with _translated():
            return list(self._rows)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        while (row := self.fetchone()) is not None:
            yield row

    def close(self) -> None:
        """Let go of what is left."""
        with _translated():
            self._rows = iter(())
            self._cursor.close(True)

    def setinputsizes(self, sizes: Any) -> None:
        """Nothing: SQLite needs no sizes."""

    def setoutputsize(self, size: int, column: int | None = None) -> None:
        """Nothing: SQLite needs no sizes."""


def _bindings(parameters: Parameters) -> Any:
    return parameters if isinstance(parameters, Mapping) else tuple(_plain(value) for value in parameters)


def _plain(value: Any) -> Any:
    """Dates as ISO text, as sqlite3 did by default."""
    if isinstance(value, dt.datetime):
        return value.isoformat(" ")
    return value.isoformat() if isinstance(value, dt.date | dt.time) else value


def DateFromTicks(ticks: float) -> dt.date:  # noqa: N802 - PEP 249 gives the name
    """The day of a moment, here."""
    return dt.date(*time.localtime(ticks)[:3])


def TimeFromTicks(ticks: float) -> dt.time:  # noqa: N802 - PEP 249 gives the name
    """The time of day of a moment, here."""
    return dt.time(*time.localtime(ticks)[3:6])


def TimestampFromTicks(ticks: float) -> dt.datetime:  # noqa: N802 - PEP 249 gives the name
    """A moment, here."""
    return dt.datetime(*time.localtime(ticks)[:6])
