"""A connection that a Python program in another process uses: numbered calls, cursors, and errors of PEP 249 as values.

The other end is `service/remote_sqlite.py`, a driver below the classes of PEP 249. The answers contain what that driver needs
to behave as the local one does, including rows read ahead. Statements run as for every other protocol (`statements.py`).

Rules
  1. A call has a number. A repeated number gets the same answer, and nothing runs: a client that lost an answer sends the
     call again.
  2. Rows are read ahead in batches. A statement ends, and releases its version, when its last row is read or its cursor is
     closed.
  3. A transaction that is idle for too long is rolled back; the next statement of its program reports it.
  4. An error keeps its class, its code and its text.

Threads: one at a time, except for `interrupt`. Raises none of SQLite's errors: they are part of answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import apsw
import msgspec

from quire.core.errors import QuireError
from quire.durable.failpoints import hit
from quire.sqlite.pep249.cursor import as_sqlite3
from quire.sqlite.pep249.errors import Error, OperationalError, translated
from quire.sqlite.statements import NO_STATEMENT, LockRefused, RunningStatement, StatementFailed, StatementRunner

CURSORS_MAX = 1_024
"""Unfinished statements of one connection, at most."""

Bindings = Sequence[Any] | Mapping[str, Any]


class SqlError(msgspec.Struct, frozen=True, array_like=True):
    """An error of PEP 249 as a value."""

    kind: str
    """Name of its class."""
    message: str
    code: int = 0
    """SQLite's extended code; 0 if the error is not SQLite's."""


class SqlAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The result of a call, and the state of the connection after it."""

    is_autocommit: bool
    changes: int
    total_changes: int
    last_rowid: int
    error: SqlError | None = None
    columns: tuple[tuple[str, str | None], ...] | None = None
    """Columns of a statement that returns rows."""
    rows: list[tuple[Any, ...]] = []
    is_over: bool = True
    """Whether these were its last rows."""
    changed: int = 0
    """For `many`: rows changed by all executions together."""
    text: str = ""
    """For `prepare`: the first statement."""
    is_readonly: bool = False


class ServedConnection:
    """One connection. Created by the handlers of a server."""

    def __init__(self, runner: StatementRunner, transaction_seconds: float) -> None:
        # constant after construction
        self._runner = runner
        self._transaction_seconds = transaction_seconds
        self.interrupt = runner.interrupt
        # owned by the calling thread
        self._cursors: dict[int, RunningStatement] = {}
        """Statements that have not ended."""
        self._number = 0
        self._answer: SqlAnswer | None = None

    def answered(self, number: int, run: Callable[[], SqlAnswer]) -> SqlAnswer:
        """Return the answer to a call, running it unless it is a repeat (rules 1 and 4)."""
        if number == self._number and self._answer is not None:
            return self._answer
        try:
            self._runner.raise_if_abandoned()
            answer = run()
        except Exception as error:
            # An error is an answer too: a repeated call must not run the statement a second time.
            answer = self._state(error=_error_of(error))
        self._number, self._answer = number, answer
        hit("sql.served")
        return answer

    # ── statements ────────────────────────────────────────────────────────────────────────────────────────────────────
    def prepare(self, sql: str) -> SqlAnswer:
        """Describe the first statement of a text without running it."""
        description = self._runner.describe(sql)
        return self._state(columns=description.columns, text=description.text, is_readonly=description.is_readonly)

    def execute(self, cursor_id: int, sql: str, bindings: Bindings, begin: str, closed: Sequence[int]) -> SqlAnswer:
        """Run one statement up to its first rows. `begin` is run before it if no transaction is open."""
        self.close_cursors((*closed, cursor_id))
        if len(self._cursors) >= CURSORS_MAX:
            raise OperationalError("too many unfinished statements on this connection: close cursors")
        self._begin(begin)
        try:
            statement = self._runner.run(sql, bindings, is_examined=True)
        except StatementFailed as failed:
            if failed.code != NO_STATEMENT:
                raise
            return self._state()  # to PEP 249 a comment is a statement that does nothing
        if not statement.columns:
            return self._state()
        rows = statement.fetch_next()
        if not statement.is_over:
            self._cursors[cursor_id] = statement
        return self._state(columns=statement.columns, rows=rows, is_over=statement.is_over)

    def _begin(self, begin: str) -> None:
        if begin and self._runner.is_autocommit():
            self._runner.run(begin)

    def fetch(self, cursor_id: int) -> SqlAnswer:
        """Return the next rows of a statement."""
        statement = self._cursors.get(cursor_id)
        if statement is None:
            return self._state()
        rows = statement.fetch_next()
        if statement.is_over:
            del self._cursors[cursor_id]
        return self._state(rows=rows, is_over=statement.is_over)

    def many(self, sql: str, rows: Sequence[Bindings], begin: str, closed: Sequence[int]) -> SqlAnswer:
        """Run one statement for each of these bindings; rows that it returns are dropped."""
        self.close_cursors(closed)
        self._begin(begin)
        changed = 0

        def counted() -> Iterator[Bindings]:
            nonlocal changed
            for row in rows:
                self._runner.limit_value_bytes(0)  # as in `run`
                yield row
                changed += self._runner.changes()

        with self._runner.deadline():
            for _ in self._runner.cursor().executemany(sql, counted()):
                pass
        return self._state(changed=changed)

    def script(self, sql: str, closed: Sequence[int]) -> SqlAnswer:
        """Run all statements and drop their rows."""
        self.close_cursors(closed)
        with self._runner.deadline():
            for _ in self._runner.cursor().execute(sql):
                pass
        return self._state()

    def close_cursors(self, cursor_ids: Sequence[int]) -> None:
        """End statements at their current row."""
        for cursor_id in cursor_ids:
            if (statement := self._cursors.pop(cursor_id, None)) is not None:
                statement.close()

    def _state(self, **facts: Any) -> SqlAnswer:
        runner = self._runner
        return SqlAnswer(
            runner.is_autocommit(), runner.changes(), runner.total_changes(), runner.last_insert_rowid(), **facts
        )

    # ── closing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def on_idle(self, seconds: float) -> None:
        """Roll back a transaction that has been idle for too long (rule 3)."""
        if seconds >= self._transaction_seconds and not self._runner.is_autocommit():
            self._drop_cursors()
            self._runner.abandon(self._transaction_seconds)

    def _drop_cursors(self) -> None:
        self.close_cursors(list(self._cursors))

    def close(self) -> None:
        """Close the connection; uncommitted changes are rolled back."""
        self._drop_cursors()
        self._runner.close()


def define_regexp(connection: apsw.Connection) -> None:
    """Define `x REGEXP pattern` as SQLAlchemy does. Only for programs on this machine: matching may never end."""
    connection.create_scalar_function("regexp", _regexp, 2, deterministic=True)


def _regexp(*values: Any) -> bool | None:
    pattern, text = values
    return None if text is None else re.search(pattern, text) is not None


_WITH_HINT = (apsw.ReadOnlyError, apsw.TooBigError)
"""Errors to which the runner adds a hint."""


def _error_of(error: Exception) -> SqlError:
    """Return an error as a value (rule 4). An error that is not SQLite's, PEP 249's or quire's is a bug, and is raised."""
    if isinstance(error, StatementFailed | LockRefused):
        cause = error.__cause__
        if not isinstance(cause, apsw.Error | QuireError | OverflowError | TypeError | ValueError):
            return SqlError("OperationalError", str(error))
        sql_error = _error_of(cause)
        return SqlError(sql_error.kind, str(error), sql_error.code) if isinstance(cause, _WITH_HINT) else sql_error
    wanted = translated(error) if isinstance(error, apsw.Error | QuireError) else as_sqlite3(error)
    if isinstance(wanted, Error):
        return SqlError(type(wanted).__name__, str(wanted), getattr(wanted, "sqlite_errorcode", 0))
    if isinstance(wanted, OverflowError | TypeError | ValueError):
        return SqlError(type(wanted).__name__, str(wanted))
    raise error
