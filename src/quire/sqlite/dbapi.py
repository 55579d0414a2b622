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
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
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
"""What a transaction begins before, as in sqlite3: what begins otherwise (`with … insert`, say) is a transaction of its own."""
_UNTOLD = (None,) * 6
"""Of a column in `description`: only its name is told, as in sqlite3."""
_BLANK = re.compile(r"(?:[ \t\f\n\r]+|--[^\n]*(?:\n|\Z)|/\*.*?(?:\*/|\Z))*", re.DOTALL)
"""White space and comments. A comment that nothing ends goes to the end."""


class _Translated:
    """A block whose errors of apsw's become those of PEP 249."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, apsw.Error):
            raise next(ours for theirs, ours in _KINDS if isinstance(error, theirs))(str(error)) from error


_TRANSLATED = _Translated()


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
        with _TRANSLATED:
            return Cursor(self)

    def execute(self, statement: str, parameters: Parameters = ()) -> Cursor:
        """Run a statement on a new cursor."""
        return self.cursor().execute(statement, parameters)

    def executemany(self, statement: str, rows: Iterable[Parameters]) -> Cursor:
        """Run a statement for each of these on a new cursor."""
        return self.cursor().executemany(statement, rows)

    def commit(self) -> None:
        """Commit; nothing without a transaction."""
        with _TRANSLATED:
            if self.apsw.in_transaction:
                self.apsw.execute("commit")

    def rollback(self) -> None:
        """Roll back; nothing without a transaction."""
        with _TRANSLATED:
            if self.apsw.in_transaction:
                self.apsw.execute("rollback")

    def close(self) -> None:
        """Close it; what was not committed is lost."""
        with _TRANSLATED:
            self.apsw.close()

    def create_function(
        self, name: str, narg: int, func: Callable[..., Any] | None, *, deterministic: bool = False
    ) -> None:
        """A function of Python's for SQL."""
        with _TRANSLATED:
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


class _Run:
    """What apsw calls when it has prepared a statement and is about to run it.

    It refers to no cursor: a cycle would leave a dropped cursor's statement, and with it the version that it reads, to the
    garbage collector.
    """

    __slots__ = ("_begin", "_database", "_many", "_prepared", "_statement", "description", "writes")

    def __init__(self, connection: Connection, statement: str, *, many: bool) -> None:
        self.description: tuple[tuple[Any, ...], ...] | None = None
        self.writes = _keyword(statement).startswith(_WRITING)
        self._database = connection.apsw
        self._statement = statement
        level = connection.isolation_level
        self._begin = f"begin {level}" if self.writes and level is not None else None
        self._many = many
        self._prepared = False

    def __call__(self, cursor: apsw.Cursor, text: str, _: Any) -> bool:
        if self._prepared:  # the next parameters of many, or a comment behind the statement
            return True
        self._prepared = True
        if _keyword(self._statement[len(text) :]):
            raise ProgrammingError("You can only execute one statement at a time.")
        if self._many and cursor.is_readonly:
            raise ProgrammingError("executemany() can only execute DML statements.")
        # The only moment at which a statement without rows tells its columns.
        self.description = tuple((name, *_UNTOLD) for name, *_ in cursor.description) or None
        # After it was prepared, so that a mistake in SQL leaves no transaction behind.
        if self._begin is not None and not self._database.in_transaction:
            self._database.execute(self._begin)
        return True


class Cursor:
    """See PEP 249. Made by `Connection.cursor`.

    It is one row ahead: a statement ends, and lets go of the version it reads, when its last row is fetched. A cursor that is
    dropped or closed ends its statement at once.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.arraysize = 1
        self.rowcount = -1
        self.lastrowid: int | None = None
        self.description: tuple[tuple[Any, ...], ...] | None = None
        self._apsw: apsw.Cursor | None = connection.apsw.cursor()
        self._ahead: tuple[Any, ...] | None = None
        self._writes = False

    def execute(self, statement: str, parameters: Parameters = ()) -> Cursor:
        """Run one statement, up to its first row."""
        database = self.connection.apsw
        with _TRANSLATED:
            cursor, run = self._prepare(statement, many=False)
            cursor.execute(statement, _bindings(parameters))
            self._writes, self.description = run.writes, run.description
            self.rowcount = 0 if run.writes else -1
            self._step(cursor)
            self.lastrowid = database.last_insert_rowid()
        return self

    def executemany(self, statement: str, rows: Iterable[Parameters]) -> Cursor:
        """Run one statement that writes for each of these. Rows that it returns are dropped."""
        database = self.connection.apsw
        changed = 0

        def bindings() -> Iterator[Any]:
            nonlocal changed
            for row in rows:
                yield _bindings(row)
                changed += database.changes()  # apsw asks for the next when it is done with this one

        with _TRANSLATED:
            cursor, run = self._prepare(statement, many=True)
            cursor.executemany(statement, bindings())
            cursor.fetchall()
            self.description = run.description
            self.rowcount = changed if run.writes else -1
        return self

    def executescript(self, script: str) -> Cursor:
        """Commit, then run several statements."""
        self.connection.commit()
        with _TRANSLATED:
            self.connection.apsw.execute(script).fetchall()
        return self

    def _prepare(self, statement: str, *, many: bool) -> tuple[apsw.Cursor, _Run]:
        """Forget the statement before; what is told when this one runs."""
        cursor = self._open()
        self._ahead, self.description, self.rowcount = None, None, -1
        run = _Run(self.connection, statement, many=many)
        cursor.exec_trace = run
        return cursor, run

    def _step(self, cursor: apsw.Cursor) -> None:
        """Go to the next row, or to the end: there apsw resets the statement."""
        self._ahead = None
        self._ahead = next(cursor, None)
        if self._ahead is None and self._writes:
            self.rowcount, self._writes = self.connection.apsw.changes(), False

    def _open(self) -> apsw.Cursor:
        if self._apsw is None:
            raise ProgrammingError("Cannot operate on a closed cursor.")
        return self._apsw

    def fetchone(self) -> tuple[Any, ...] | None:
        """The next row, if there is one."""
        cursor, row = self._open(), self._ahead
        if row is not None:
            with _TRANSLATED:
                self._step(cursor)
        return row

    def fetchmany(self, size: int | None = None) -> list[tuple[Any, ...]]:
        """So many rows, default `arraysize`, or as many as are left."""
        self._open()
        return list(islice(self, self.arraysize if size is None else size))

    def fetchall(self) -> list[tuple[Any, ...]]:
        """All rows that are left."""
        cursor, row = self._open(), self._ahead
        if row is None:
            return []
        self._ahead = None
        with _TRANSLATED:
            rows = [row, *cursor.fetchall()]
            self._step(cursor)
        return rows

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Any, ...]:
        if (row := self.fetchone()) is None:
            raise StopIteration
        return row

    def close(self) -> None:
        """Let go of what is left."""
        cursor, self._apsw, self._ahead = self._apsw, None, None
        if cursor is not None:
            with _TRANSLATED:
                cursor.close(True)

    def setinputsizes(self, sizes: Any) -> None:
        """Nothing: SQLite needs no sizes."""

    def setoutputsize(self, size: int, column: int | None = None) -> None:
        """Nothing: SQLite needs no sizes."""


def _keyword(statement: str) -> str:
    """How a statement begins, in lower case; "" if there is none.

    >>> _keyword("-- hint\\n /* and\\n another */ INSERT into t values (1)")
    'insert '
    """
    start = _BLANK.match(statement).end()  # type: ignore[union-attr]  # it matches everywhere
    return statement[start : start + 7].lower()


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
