"""A SQL connection to a database of a store that another process owns: the driver below a PEP 249 connection (W8).

`quire.sqlite.dbapi.Connection` on top of it is the same class as in the owner's process, with the same errors. One statement is
one call, whose response has the first rows and the state of the connection. BEGIN is sent with the statement that needs it, and
closed cursors with the next statement.

Rules
  1. A call is sent until it is answered; the owner executes it once (`sqlite/served.py`).
  2. A connection ends at its owner with its client or its server, and uncommitted changes are rolled back. The next statement
     opens another connection. A statement that was in progress is run again only if that changes nothing: if it reads outside a
     transaction, or is the first of one. Otherwise `OperationalError` states what is known; the outcome of a COMMIT is unknown.
  3. A call that is refused before it runs leaves the connection and its transaction as they are. After any other failure, an
     interrupt included, the connection is abandoned. If a transaction was open, the next statement other than ROLLBACK
     reports that it was rolled back: a COMMIT must not succeed without it.
  4. The time of a statement is bounded by `STATEMENT_SECONDS` only; an owner that is gone has the channel's time to return.

Threads: one at a time, except for `interrupt`. Raises errors of PEP 249, with SQLite's codes.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from quire.core.errors import AccessDenied, InvalidInput, LeaseExpired, QuireError, Unauthenticated
from quire.service import sql_actions as s
from quire.service.channel import Channel
from quire.service.data_actions import OfHolding
from quire.service.lease_renewal import LeaseRenewal
from quire.sqlite.pep249 import errors
from quire.sqlite.pep249.adapters import adapt_parameter
from quire.sqlite.pep249.driver import Columns, DriverCursor, Prepared
from quire.sqlite.served import SqlAnswer, SqlError

STATEMENT_SECONDS = 7 * 86_400.0
MANY_ROWS = 1_024
"""Rows of `executemany` that are sent in one call."""
MANY_BYTES = 1 << 20
_NOT_RUN = (InvalidInput, AccessDenied, Unauthenticated, UnicodeEncodeError)
"""Errors of calls that could not be sent, or that the owner refused before it looked at their connection."""
_ABANDONED = "abandoned"
"""Instead of a connection's id. No holding has it: the next call gets `LeaseExpired`, and opens another connection."""
_COMMITS = re.compile(r"\s*(commit|end|release)\b", re.IGNORECASE)
_EXACT = frozenset({int, float, str, bytes, type(None)})
_BUILTIN: dict[str, type[Exception]] = {
    "OverflowError": OverflowError,
    "TypeError": TypeError,
    "ValueError": ValueError,
}


FUNCTIONS = frozenset({("floor", 1), ("regexp", 2)})
"""Functions that SQLAlchemy defines on every connection. SQLite has `floor`; the owner defines `regexp` for its Unix socket."""


class RemoteDriver:
    """A remote connection. Created by `client.sqlite(name)`."""

    def __init__(self, channel: Channel, renewing: LeaseRenewal, request: s.OpenSql, close: Callable[[], None]) -> None:
        """`close` is called when the connection is closed."""
        # the interface that the classes above use
        self.functions = FUNCTIONS
        self.local: Any = None
        self.cursor: Callable[[], DriverCursor] = self._new_cursor
        self.get_autocommit: Callable[[], bool] = lambda: self._state.is_autocommit and not self._begin
        self.changes: Callable[[], int] = lambda: self._state.changes
        self.total_changes: Callable[[], int] = lambda: self._state.total_changes
        self.last_insert_rowid: Callable[[], int] = lambda: self._state.last_rowid
        self.interrupt: Callable[[], None] = self._interrupt
        # constant after construction
        self._channel = channel
        self._renewing = renewing
        self._request = request
        self._close = close
        # state of the connection
        self.number = 0
        """The number of the current call."""
        self.connection = ""
        """Its id at the owner."""
        self._cursors = 0
        self._begin = ""
        """A BEGIN that has not been sent yet."""
        self._closed: deque[int] = deque()
        """Cursors that the owner may close: appended by finalizers, which take no lock."""
        self._state = SqlAnswer(True, 0, 0, 0)
        self._may_have_committed = False
        """Whether the call that abandoned the connection may have committed its transaction."""
        self._open()

    def _new_cursor(self) -> DriverCursor:
        self._cursors += 1
        return _RemoteCursor(self, self._cursors)

    def _interrupt(self) -> None:
        self._channel.call("sql.interrupt", s.OfSql(self.connection))

    def examine(
        self, cursor: DriverCursor, sql: str, bindings: Any, prepared: Callable[[Prepared], None], *, many: bool = False
    ) -> None:
        """Prepare a statement that is used for the first time, then run it."""
        answer = self._prepare(sql)
        prepared(Prepared(answer.text, answer.is_readonly, answer.columns or ()))
        if many:
            cursor.executemany(sql, bindings)
        else:
            cursor.execute(sql, bindings)

    def _prepare(self, sql: str) -> SqlAnswer:
        if "\0" in sql:
            raise errors.ProgrammingError("the query contains a null character")
        return self.ask("sql.prepare", lambda: s.PrepareSql(self.connection, self.number, sql), is_safe=True)

    def prepare(self, sql: str) -> None:
        """Check a statement for errors."""
        self._prepare(sql)

    def script(self, sql: str) -> None:
        """Run all statements. A BEGIN waits for its first statement; a COMMIT of an empty transaction is not sent."""
        if sql.startswith("BEGIN"):
            self._begin = sql
            return
        if self._begin and sql in ("COMMIT", "ROLLBACK"):
            self._begin = ""
            return
        if sql == "ROLLBACK" and self._state.is_autocommit:
            return  # the owner has rolled it back, and an earlier statement has reported that
        closed = self.take_closed()
        is_safe = sql == "ROLLBACK"
        self.ask(
            "sql.script", lambda: s.ScriptSql(self.connection, self.number, sql, closed), is_safe=is_safe, what=sql
        )

    def close(self) -> None:
        """Release the connection; uncommitted changes are rolled back."""
        self._renewing.discard(self.connection)
        try:
            if self.connection:
                self._channel.call("holding.release", OfHolding(self.connection))
        except QuireError:
            pass  # an owner that cannot be reached ends it when it expires
        finally:
            self.connection = ""
            self._close()

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def take_begin(self) -> str:
        """Return the BEGIN to send with the next statement."""
        begin, self._begin = self._begin, ""
        return begin

    def take_closed(self) -> tuple[int, ...]:
        """Return the cursors that the owner shall close with the next call."""
        closed: list[int] = []
        while self._closed:
            closed.append(self._closed.popleft())
        return tuple(closed)

    def forget(self, cursor_id: int) -> None:
        """Mark a cursor to be closed at the owner."""
        self._closed.append(cursor_id)

    def _open(self) -> None:
        self.connection = self._channel.call("sql.open", self._request)
        self._renewing.add(self.connection)
        self._state = SqlAnswer(True, 0, 0, 0)

    def ask(
        self, action: str, request: Callable[[], Any], *, is_safe: bool | None, what: str = "", begin: str = ""
    ) -> SqlAnswer:
        """Send a call and return its answer.

        If the connection was lost outside a transaction, the call is sent again if `is_safe`; with `None`, if the owner reports
        that the statement `what` only reads. If the call is not run, the BEGIN in it is sent with the next one.
        """
        may_commit = action == "sql.script" or _COMMITS.match(what) is not None
        self.number += 1
        try:
            answer = self._answer_reopened(action, request, is_safe, what, may_commit)
        except _NOT_RUN:
            self._begin = begin or self._begin
            raise
        except errors.OperationalError:
            raise  # the connection was lost, and another one is open
        except BaseException:  # interrupted, or given up: whether it runs is unknown
            self._abandon(may_commit)
            raise
        self._state = answer
        if answer.error is not None:
            raise _raised(answer.error)
        return answer

    def _answer_reopened(
        self, action: str, request: Callable[[], Any], is_safe: bool | None, what: str, may_commit: bool
    ) -> SqlAnswer:
        """Return the answer to a call; if its connection does not exist any more, open another one (rule 2)."""
        was_autocommit, was_abandoned = self._state.is_autocommit, self.connection == _ABANDONED
        try:
            return self._answer(action, request)
        except LeaseExpired as lost:
            self._renewing.discard(self.connection)
            self._open()
            if what == "ROLLBACK":
                return self._state  # it was rolled back with its connection
            if was_abandoned:  # this call has not been run
                may_commit, is_safe = self._may_have_committed, action != "sql.fetch"
            if not was_autocommit or not (self._only_reads(what) if is_safe is None else is_safe):
                raise _lost(was_autocommit, what, may_commit) from lost
        return self._answer(action, request)

    def _only_reads(self, sql: str) -> bool:
        """Ask the owner whether a statement only reads. Only SQLite knows: `WITH … DELETE` and `PRAGMA user_version = 1` begin
        like statements that read. False if it can no longer be prepared."""
        answer = self._answer("sql.prepare", lambda: s.PrepareSql(self.connection, self.number, sql))
        self.number += 1  # the call that is repeated is another one on this connection
        return answer.error is None and answer.is_readonly

    def _answer(self, action: str, request: Callable[[], Any]) -> SqlAnswer:
        return self._channel.call(action, request(), timeout=STATEMENT_SECONDS, attempt_seconds=STATEMENT_SECONDS)

    def _abandon(self, may_commit: bool) -> None:
        """Abandon the connection. The state is kept: it shows whether a transaction was open (rule 3)."""
        if self.connection != _ABANDONED:
            self._renewing.forget(self.connection)
            self.connection, self._may_have_committed = _ABANDONED, may_commit


class _RemoteCursor:
    """Runs one statement at a time and reads its rows in batches."""

    __slots__ = ("_columns", "_driver", "_id", "_is_over", "_rows", "changed_by_many")

    def __init__(self, driver: RemoteDriver, cursor_id: int) -> None:
        self._driver = driver
        self._id = cursor_id
        self._rows: Iterator[tuple[Any, ...]] = iter(())
        self._columns: Columns = ()
        self._is_over = True
        self.changed_by_many = 0

    def execute(self, sql: str, bindings: Any, /) -> Any:
        """Run a statement, up to its first rows."""
        driver = self._driver
        values, begin, closed = _values(bindings), driver.take_begin(), driver.take_closed()
        self._rows, self._is_over = iter(()), True
        answer = driver.ask(
            "sql.execute",
            lambda: s.ExecuteSql(driver.connection, driver.number, self._id, sql, values, begin, closed),
            is_safe=True if begin else None,
            what=sql,
            begin=begin,
        )
        self._rows, self._columns, self._is_over = iter(answer.rows), answer.columns or (), answer.is_over
        return self

    def executemany(self, sql: str, bindings: Iterable[Any], /) -> Any:
        """Run a statement for each of the parameters, up to `MANY_ROWS` in one call."""
        driver = self._driver
        self._rows, self._is_over, self.changed_by_many = iter(()), True, 0
        source = iter(bindings)
        while rows := _next_parameters(source):
            begin, closed = driver.take_begin(), driver.take_closed()
            answer = driver.ask(
                "sql.many",
                lambda: s.ManySql(driver.connection, driver.number, sql, rows, begin, closed),  # noqa: B023 - called here
                is_safe=bool(begin),
                what=sql,
                begin=begin,
            )
            self.changed_by_many += answer.changed
        return self

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        for row in self._rows:
            return row
        if self._is_over:
            raise StopIteration
        driver = self._driver
        answer = driver.ask(
            "sql.fetch", lambda: s.FetchSql(driver.connection, driver.number, self._id), is_safe=False, what="fetch"
        )
        self._rows, self._is_over = iter(answer.rows), answer.is_over
        return next(self)

    def fetchall(self) -> list[Any]:
        """Return the remaining rows."""
        return list(self)

    def get_description(self) -> Any:
        """Return the columns of the current statement."""
        return self._columns

    def close(self, _: bool, /) -> None:
        """Have the owner close the statement, if it has not ended."""
        self._rows = iter(())
        if not self._is_over:
            self._is_over = True
            self._driver.forget(self._id)

    def __del__(self) -> None:
        if not getattr(self, "_is_over", True):
            self._driver.forget(self._id)


# ── values and errors ─────────────────────────────────────────────────────────────────────────────────────────────────
def _next_parameters(source: Iterator[Any]) -> list[s.Values]:
    """Return the parameters of the next call of `executemany`."""
    rows: list[s.Values] = []
    size = 0
    for bindings in islice(source, MANY_ROWS):
        rows.append(values := _values(bindings))
        items = values.values() if isinstance(values, dict) else values
        size += sum(len(value) for value in items if isinstance(value, str | bytes)) + 16
        if size >= MANY_BYTES:
            break
    return rows


def _values(bindings: Any) -> s.Values:
    """Return parameters in the form in which they are sent."""
    if isinstance(bindings, Mapping):
        return {str(name): _value(number, value) for number, (name, value) in enumerate(bindings.items(), 1)}
    if not hasattr(bindings, "__len__") or not hasattr(bindings, "__getitem__"):
        raise errors.ProgrammingError("parameters are of unsupported type")
    return [_value(number, value) for number, value in enumerate(bindings, 1)]


def _value(number: int, value: Any) -> Any:
    """Return a value of a type that SQLite has; other types are adapted, as in a local connection."""
    if type(value) not in _EXACT:
        value = value if isinstance(value, int | float | str | bytes) else adapt_parameter(number, value)
        for kind in (int, float, str):
            if isinstance(value, kind):
                value = kind(value)
                break
        else:
            value = None if value is None else bytes(value)
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise OverflowError("Python int too large to convert to SQLite INTEGER")
    return value


def _raised(error: SqlError) -> Exception:
    """Return the error in an answer, with the class and code that it has at the owner."""
    if error.code:
        return errors.error_of(error.code, error.message)
    kind = getattr(errors, error.kind, None) or _BUILTIN.get(error.kind, errors.OperationalError)
    raised: Exception = kind(error.message)
    return raised


def _lost(was_autocommit: bool, what: str, may_commit: bool) -> errors.OperationalError:
    """Return the error of a call whose connection was lost: it states what is known (rule 2)."""
    gone = "the connection to the store's owner was lost"
    if not was_autocommit:
        known = "whether the transaction was committed is unknown" if may_commit else "the transaction was rolled back"
        return errors.OperationalError(f"{gone}: {known}" + ("" if may_commit else "; begin it again"))
    if what == "fetch":
        return errors.OperationalError(f"{gone}: the remaining rows must be queried again")
    return errors.OperationalError(f"{gone} while a statement ran: whether it took effect is unknown")
