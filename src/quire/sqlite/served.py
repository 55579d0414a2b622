"""A connection that another process uses: its statements, their rows in bunches, and its errors as values.

The other end is `service/remote_sqlite.py`, which is a driver below the classes of PEP 249: what is answered here is what that
driver must know to behave as the local one, rows ahead included.

Rules
  1. A call has a number. The same number again gets the same answer, and nothing is run: whoever has lost an answer asks again.
  2. Rows are read ahead in bunches, at most `BUNCH_ROWS` and about `BUNCH_BYTES`; a statement ends, and lets go of its version,
     when its last row is read or its cursor is closed.
  3. A transaction in which nothing was done for too long is rolled back; its program is told by the next statement.
  4. An error keeps its class, its code and its text.

Threads: one at a time, but for `interrupt`. Raises nothing of SQLite's: errors are part of answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import apsw
import msgspec
from apsw.ext import query_info

from quire.core.errors import QuireError
from quire.durable.failpoints import hit
from quire.sqlite.pep249.cursor import as_sqlite3
from quire.sqlite.pep249.errors import Error, OperationalError, translated
from quire.sqlite.statements import StatementFailed, next_rows

BUNCH_ROWS = 512
BUNCH_BYTES = 1 << 20
FIRST_ROWS = 64
"""Of a statement whose rows nobody has seen yet."""
CURSORS_MAX = 1_024
"""Statements of one connection that are not at their end."""

Bindings = Sequence[Any] | Mapping[str, Any]
Deadline = Callable[[], AbstractContextManager[None]]


class SqlError(msgspec.Struct, frozen=True, array_like=True):
    """An error of PEP 249 as a value."""

    kind: str
    """Its class."""
    message: str
    code: int = 0
    """SQLite's extended code; 0 if it is none of SQLite's."""


class SqlAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What a call has done, and how the connection stands after it."""

    is_autocommit: bool
    changes: int
    total_changes: int
    last_rowid: int
    error: SqlError | None = None
    columns: tuple[tuple[str, str | None], ...] | None = None
    """Of a statement that returns rows."""
    rows: list[tuple[Any, ...]] = []
    is_over: bool = True
    """Whether these were its last rows."""
    changed: int = 0
    """Of `many`: by all of them together."""
    text: str = ""
    """Of `prepare`: the first statement."""
    is_readonly: bool = False


class _OpenCursor:
    """A statement that is not at its end."""

    __slots__ = ("count", "cursor")

    def __init__(self, cursor: apsw.Cursor) -> None:
        self.cursor = cursor
        self.count = FIRST_ROWS


class ServedConnection:
    """One connection. Made by the handlers of a server."""

    def __init__(
        self, connection: apsw.Connection, *, transaction_seconds: float, deadline: Deadline = nullcontext
    ) -> None:
        """`deadline` bounds how long SQLite works on one call."""
        # constant after construction
        self._connection = connection
        self._deadline = deadline
        self._transaction_seconds = transaction_seconds
        self.interrupt = connection.interrupt
        # the calling thread's
        self._cursors: dict[int, _OpenCursor] = {}
        self._number = 0
        self._answer: SqlAnswer | None = None
        self._lost: OperationalError | None = None

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""
        return self._connection.in_transaction

    def answered(self, number: int, run: Callable[[], SqlAnswer]) -> SqlAnswer:
        """The answer to a call (rules 1 and 4)."""
        if number == self._number and self._answer is not None:
            return self._answer
        try:
            if self._lost is not None:
                lost, self._lost = self._lost, None
                raise lost
            with self._deadline():
                answer = run()
        except Exception as error:
            answer = self._state(error=_error_of(error))
        self._number, self._answer = number, answer
        hit("sql.served")
        return answer

    # ── statements ────────────────────────────────────────────────────────────────────────────────────────────────────
    def prepare(self, sql: str) -> SqlAnswer:
        """What the first statement of a text is; nothing is run."""
        details = query_info(self._connection, sql)
        return self._state(
            columns=tuple(details.description), text=details.first_query, is_readonly=bool(details.is_readonly)
        )

    def execute(self, cursor_id: int, sql: str, bindings: Bindings, begin: str, closed: Sequence[int]) -> SqlAnswer:
        """Run one statement, up to its first rows; `begin` is run before it."""
        self.close_cursors((*closed, cursor_id))
        if len(self._cursors) >= CURSORS_MAX:
            raise OperationalError("too many statements of this connection are not at their end: close cursors")
        if begin and self._connection.getautocommit():
            self._connection.execute(begin)
        cursor = self._connection.cursor()
        cursor.execute(sql, bindings)
        columns = _columns(cursor)
        if columns is None:
            return self._state()
        opened = _OpenCursor(cursor)
        rows, is_over = _bunch(opened)
        if not is_over:
            self._cursors[cursor_id] = opened
        return self._state(columns=columns, rows=rows, is_over=is_over)

    def fetch(self, cursor_id: int) -> SqlAnswer:
        """The next rows of a statement."""
        opened = self._cursors.get(cursor_id)
        if opened is None:
            return self._state()
        rows, is_over = _bunch(opened)
        if is_over:
            del self._cursors[cursor_id]
        return self._state(rows=rows, is_over=is_over)

    def many(self, sql: str, rows: Sequence[Bindings], begin: str, closed: Sequence[int]) -> SqlAnswer:
        """Run one statement for each of these; rows that it returns are dropped."""
        self.close_cursors(closed)
        if begin and self._connection.getautocommit():
            self._connection.execute(begin)
        changed = 0

        def counted() -> Iterator[Bindings]:
            nonlocal changed
            for row in rows:
                yield row
                changed += self._connection.changes()

        for _ in self._connection.executemany(sql, counted()):
            pass
        return self._state(changed=changed)

    def script(self, sql: str, closed: Sequence[int]) -> SqlAnswer:
        """Run all statements, and drop their rows."""
        self.close_cursors(closed)
        for _ in self._connection.execute(sql):
            pass
        return self._state()

    def close_cursors(self, cursor_ids: Sequence[int]) -> None:
        """End statements where they are."""
        for cursor_id in cursor_ids:
            if (opened := self._cursors.pop(cursor_id, None)) is not None:
                opened.cursor.close(True)

    def _state(self, **facts: Any) -> SqlAnswer:
        connection = self._connection
        return SqlAnswer(
            connection.getautocommit(),
            connection.changes(),
            connection.total_changes(),
            connection.last_insert_rowid(),
            **facts,
        )

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def is_idle(self, seconds: float) -> None:
        """Roll back a transaction that nobody goes on with (rule 3)."""
        if seconds >= self._transaction_seconds and self._connection.in_transaction:
            self._drop_cursors()
            self._connection.execute("rollback")
            self._lost = OperationalError(
                "the transaction was rolled back: nothing was done in it for too long (service.sql_transaction_seconds)"
            )

    def _drop_cursors(self) -> None:
        self.close_cursors(list(self._cursors))

    def close(self) -> None:
        """Close it; what was not committed is rolled back."""
        self._drop_cursors()
        self._connection.close(True)


def define_regexp(connection: apsw.Connection) -> None:
    """`x REGEXP pattern`, as SQLAlchemy defines it. Only for programs of this machine: matching may take for ever."""
    connection.create_scalar_function("regexp", _regexp, 2, deterministic=True)


def _regexp(*values: Any) -> bool | None:
    pattern, text = values
    return None if text is None else re.search(pattern, text) is not None


def _columns(cursor: apsw.Cursor) -> tuple[tuple[str, str | None], ...] | None:
    """Of a statement that stands at its first row; None if it is over."""
    try:
        columns: tuple[tuple[str, str | None], ...] = cursor.get_description()
    except apsw.ExecutionCompleteError:
        return None
    return columns


def _bunch(opened: _OpenCursor) -> tuple[list[tuple[Any, ...]], bool]:
    """The next rows, and whether they are the last (rule 2)."""
    count, opened.count = opened.count, BUNCH_ROWS
    try:
        return next_rows(opened.cursor, count, BUNCH_BYTES)
    except StatementFailed as failed:
        raise OperationalError(str(failed)) from None


def _error_of(error: Exception) -> SqlError:
    """An error as it is told (rule 4). What is none of SQLite's, of PEP 249 or of ours is a bug, and raised."""
    wanted = translated(error) if isinstance(error, apsw.Error | QuireError) else as_sqlite3(error)
    if isinstance(wanted, Error):
        return SqlError(type(wanted).__name__, str(wanted), getattr(wanted, "sqlite_errorcode", 0))
    if isinstance(wanted, OverflowError | TypeError | ValueError):
        return SqlError(type(wanted).__name__, str(wanted))
    raise error
