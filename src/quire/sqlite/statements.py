"""Runs statements of other programs on one SQLite connection: one statement at a time, rows in batches, errors as plain
values. Every protocol by which a program sends SQL is a translation of this interface.

A *refused* statement found the database locked before it did anything, so it may be sent again unchanged (`LockRefused`).
That is the case for plain `SQLITE_BUSY`, and for any busy code outside a transaction, where nothing was read yet. Inside a
transaction that has read, `SQLITE_BUSY_SNAPSHOT` is final: only the program can restart its transaction, so it gets the error
(`StatementFailed`).

    >>> runner = StatementRunner(apsw.Connection(":memory:"))
    >>> statement = runner.run("select 1 as one, 'x'")
    >>> statement.columns, statement.rows(512)
    ((('one', None), ("'x'", None)), [(1, 'x')])
    >>> try:
    ...     runner.run("select absent")
    ... except StatementFailed as error:
    ...     error.code, error.extended_code, str(error)
    ('SQLITE_ERROR', 'SQLITE_ERROR', 'no such column: absent')

Threads: a runner belongs to one at a time. Raises `StatementFailed` and `LockRefused`, nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from operator import length_hint
from typing import Any, NoReturn

import apsw
from apsw.ext import query_info

from quire.core.errors import QuireError

SqlValue = None | int | float | str | bytes
Columns = tuple[tuple[str, str | None], ...]
"""(name, declared type) of each column."""

Deadline = Callable[[], AbstractContextManager[None]]

NO_STATEMENT, MANY_STATEMENTS = "SQL_NO_STATEMENT", "SQL_MANY_STATEMENTS"
ARGS_INVALID, UNICODE_ERROR, TOO_LARGE = "ARGS_INVALID", "UNICODE_ERROR", "RESPONSE_TOO_LARGE"
TRANSACTION_TIMEOUT = "TRANSACTION_TIMEOUT"

FETCH_ROWS, FETCH_BYTES = 512, 1 << 20
"""Rows and bytes that are fetched at a time, at most."""
FIRST_ROWS = 64
"""Rows in the first fetch of a statement."""
ROWS_AT_ONCE = 8
"""Small rows are measured in groups of this size: measuring each row separately would cost half as much as encoding it."""
SMALL_BYTES = 64 * 1024
"""After a group of rows larger than this, rows are read one by one."""
ROW_BYTES_MAX = 256 << 20
"""Bytes of a row that a remote program reads, at most. SQLite limits a value and a row of a table, but not the row that a
SELECT assembles: 2,000 values of the largest size would be 128 GB. So values of wide rows have a lower limit."""

MESSAGE_CHARACTERS_MAX = 1_000
"""Characters of an error's text, at most: SQLite quotes names and values in it, which may have megabytes."""

_BLANK = re.compile(r"(?:[\s;\ufeff]+|--[^\n]*(?:\n|\Z)|/\*.*?(?:\*/|\Z))*", re.DOTALL)
"""Text around a statement that is no part of it. SQLite takes a byte order mark for a space."""
_FIRST = re.compile(r"[A-Za-z]+")
_PREFIXES = ":@$?"
_PARAMETER = re.compile(r"[:@$?]((?:[\w$\x80-\U0010ffff]|::)+(?:\([^\s)]{0,64}\))?)")
"""A parameter with a name. The text in parentheses is bounded, so that a search takes linear time."""
_WORD = re.compile(r"(?<!^)(?=[A-Z])")


class StatementFailed(Exception):
    """A statement that was refused or failed: SQLite's own text, its base code and its extended code."""

    def __init__(self, message: str, code: str, extended_code: str = "") -> None:
        is_long = len(message) > MESSAGE_CHARACTERS_MAX
        super().__init__(message[:MESSAGE_CHARACTERS_MAX] + "…" if is_long else message)
        self.code = code
        self.extended_code = extended_code or code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.code, self.extended_code)


class LockRefused(Exception):
    """Another connection is writing. The statement has done nothing and may be run again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Properties of a statement that are known before it runs."""

    text: str
    """The statement and the blanks after it; the next statement of a script follows."""
    parameters: tuple[str | None, ...]
    columns: Columns
    is_explain: bool
    is_readonly: bool
    is_empty: bool
    """Whether the text has only comments."""


class _Preparation:
    """apsw's callback between preparing and running a statement: the only time when one without rows has its columns."""

    __slots__ = ("_bound", "_is_first", "_sql", "columns")

    def __init__(self, sql: str, bound: Callable[[int], None]) -> None:
        self._sql = sql
        self._bound = bound
        self._is_first = True
        self.columns: Columns = ()

    def __call__(self, cursor: apsw.Cursor, text: str, _: Any) -> bool:
        if not self._is_first:
            return True  # a comment after the statement
        self._is_first = False
        if not cursor.has_vdbe:
            raise StatementFailed("SQL string does not contain any statement", NO_STATEMENT)
        if len(text) < len(self._sql) and not _is_blank(self._sql, len(text)):
            raise StatementFailed("SQL string contains more than one statement", MANY_STATEMENTS)
        self.columns = cursor.get_description()
        self._bound(len(self.columns))
        return True


def _columns(cursor: apsw.Cursor) -> Columns:
    """Return the columns of a statement that is at its first row; none if it has ended."""
    try:
        columns: Columns = cursor.get_description()
    except apsw.ExecutionCompleteError:
        return ()
    return columns


def _next_rows(
    cursor: Iterator[tuple[SqlValue, ...]], count: int, bytes_max: int, at_once: int
) -> tuple[list[Any], bool]:
    """Return up to `count` rows of about `bytes_max` bytes, and whether they are the last.

    Rows are measured while they are read: a few values of SQLite's largest size would take all available memory.
    """
    rows: list[Any] = []
    size = 0
    while size < bytes_max and (wanted := min(count - len(rows), at_once)) > 0:
        some = list(islice(cursor, wanted))
        rows += some
        more = sum(map(length_hint, chain.from_iterable(some)))
        size += more
        if len(some) < wanted:
            return rows, True
        at_once = ROWS_AT_ONCE if more <= SMALL_BYTES else 1
    return rows, False


class RunningStatement:
    """A statement that was started: its columns, and its rows in batches."""

    __slots__ = ("_cursor", "_fetch_rows", "_runner", "columns", "is_over")

    def __init__(self, cursor: apsw.Cursor, columns: Columns, runner: StatementRunner) -> None:
        self._cursor = cursor
        self._runner = runner
        self._fetch_rows = FIRST_ROWS
        self.columns = columns
        self.is_over = False
        """Whether its last row was read."""

    def rows(self, count: int) -> list[tuple[SqlValue, ...]]:
        """Return the next rows, at most `count` and about `FETCH_BYTES`; none when the statement has ended."""
        runner = self._runner
        try:
            runner.limit_value_bytes(len(self.columns))  # another statement may have run meanwhile
            with runner.deadline():
                rows, self.is_over = _next_rows(self._cursor, count, FETCH_BYTES, runner.first_rows)
        except Exception as error:
            runner.raise_translated(error)
        return rows

    def fetch_next(self) -> list[tuple[SqlValue, ...]]:
        """Return the next rows: a few at first, for a program that wants no more, then as many as are worth a message."""
        count, self._fetch_rows = self._fetch_rows, FETCH_ROWS
        return self.rows(count)

    def drain(self) -> int:
        """Run to the end and return the number of rows."""
        count = 0
        try:
            self._runner.limit_value_bytes(len(self.columns))
            with self._runner.deadline():
                for _ in self._cursor:
                    count += 1
        except Exception as error:
            self._runner.raise_translated(error)
        return count

    def close(self) -> None:
        """End the statement at its current row."""
        self._cursor.close(True)


class StatementRunner:
    """Runs statements on one connection."""

    def __init__(
        self,
        connection: apsw.Connection,
        deadline: Deadline = nullcontext,
        *,
        read_only_hint: str = "",
        lock_seconds: float = 0.0,
        value_bytes: int = 0,
        on_too_large: Callable[[], None] = lambda: None,
    ) -> None:
        """`deadline` bounds what SQLite does inside it: starting a statement, and each fetch of its rows.
        `read_only_hint` is appended to SQLite's error when a program writes where only reading is allowed. The calling thread
        waits for a lock for `lock_seconds`. `value_bytes` bounds values, and with `ROW_BYTES_MAX` rows; 0 means no bound.
        `on_too_large` is called for each refusal by these bounds."""
        # constant after construction
        self.connection = connection
        self.deadline = deadline
        self._read_only_hint = read_only_hint
        self._value_bytes = value_bytes
        self.first_rows = 1 if value_bytes else ROWS_AT_ONCE
        """Rows that are read before the first ones of a batch are measured."""
        self._on_too_large = on_too_large
        self.is_autocommit: Callable[[], bool] = connection.getautocommit
        self.changes: Callable[[], int] = connection.changes
        self.total_changes: Callable[[], int] = connection.total_changes
        self.last_insert_rowid: Callable[[], int] = connection.last_insert_rowid
        connection.set_busy_timeout(round(lock_seconds * 1000))
        # owned by the connection
        self._value_limit = value_bytes
        self._abandoned_error: StatementFailed | None = None
        """Why the transaction is gone; raised once, by the next statement."""
        self._counts_from_reset = False
        """Whether SQL's `changes()` and `total_changes()` are those of this object."""

    def run(
        self, sql: str, bindings: Sequence[SqlValue] | Mapping[str, SqlValue] = (), *, is_examined: bool = False
    ) -> RunningStatement:
        """Start the only statement of a text. It is then at its first row or at its end.

        `is_examined` means that the program has checked that there is one statement. If there is no bound on values either,
        nothing is checked before the statement runs.
        """
        self.raise_if_abandoned()
        is_autocommit = self.is_autocommit()
        self.limit_value_bytes(0)  # parameters are bound before the columns are known
        cursor = self.connection.cursor()
        run = None if is_examined and not self._value_bytes else _Preparation(sql, self.limit_value_bytes)
        if run is not None:
            cursor.exec_trace = run
        try:
            with self.deadline():
                cursor.execute(sql, bindings)
        except apsw.BusyError as error:
            if is_autocommit or getattr(error, "extendedresult", 0) == apsw.SQLITE_BUSY:
                raise LockRefused(str(error)) from error
            self.raise_translated(error)
        except apsw.ReadOnlyError as error:
            failed = statement_failed(error)
            hint = f": {self._read_only_hint}" if self._read_only_hint else ""
            raise StatementFailed(f"{failed}{hint}", failed.code, failed.extended_code) from error
        except Exception as error:
            self.raise_translated(error)
        return RunningStatement(cursor, _columns(cursor) if run is None else run.columns, self)

    def limit_value_bytes(self, columns: int) -> None:
        """Limit the values of the next statement so that a row of `columns` columns stays within `ROW_BYTES_MAX`."""
        allowed = min(self._value_bytes, ROW_BYTES_MAX // max(columns, 1))
        if allowed != self._value_limit:
            self.connection.limit(apsw.SQLITE_LIMIT_LENGTH, allowed)
            self._value_limit = allowed

    def cursor(self) -> apsw.Cursor:
        """Return a cursor for several statements or executions, of which each is limited like one that `run` starts."""
        cursor = self.connection.cursor()
        if self._value_bytes:
            cursor.exec_trace = self._limit_by_columns
        return cursor

    def _limit_by_columns(self, cursor: apsw.Cursor, _: str, __: Any) -> bool:
        self.limit_value_bytes(len(cursor.get_description()))
        return True

    def raise_translated(self, error: Exception) -> NoReturn:
        """Raise an error as one that can be sent to the program."""
        if isinstance(error, apsw.TooBigError) and self._value_bytes:
            message = f"{error}: values have at most {self._value_limit:,} bytes"
            if self._value_limit < self._value_bytes:
                message += " in a row of so many columns; ask for fewer, or for parts of values"
            raise self.too_large(message, "SQLITE_TOOBIG") from error
        _raise_translated(error)

    def too_large(self, message: str, code: str = TOO_LARGE) -> StatementFailed:
        """Count a refusal for size and return its error."""
        self._on_too_large()
        return StatementFailed(message, code)

    def describe(self, sql: str) -> Description:
        """Describe the first statement of a text without running it."""
        try:
            details = query_info(self.connection, sql)
        except Exception as error:
            _raise_translated(error)
        return Description(
            text=details.first_query,
            parameters=details.bindings_names,
            columns=details.description,
            is_explain=bool(details.is_explain),
            is_readonly=details.is_readonly,
            is_empty=not details.has_vdbe,
        )

    def bindings(self, sql: str, args: Sequence[SqlValue], named: Mapping[str, SqlValue]) -> Sequence[SqlValue]:
        """Return the arguments in the order of the statement's parameters. Named ones may be given without their prefix."""
        if not named:
            return args
        names = self.describe(sql).parameters
        values: list[SqlValue] = [*args[: len(names)], *[None] * (len(names) - len(args))]
        if len(args) > len(names):
            raise StatementFailed(f"Required {len(names)} but {len(args)} arguments were provided", ARGS_INVALID)
        missing = set(range(len(args), len(names)))
        places_of: dict[str | None, list[int]] = {}
        for place, known in enumerate(names):
            places_of.setdefault(known, []).append(place)
        for name, value in named.items():
            places = places_of.get(name[1:] if name[:1] in _PREFIXES else name)
            if places is None:
                raise StatementFailed(f"Parameter with name {name!r} was not found", ARGS_INVALID)
            for place in places:
                values[place] = value
            missing -= set(places)
        if missing:
            text = f"Required {len(names)} arguments but {len(names) - len(missing)} were provided"
            raise StatementFailed(text, ARGS_INVALID)
        return values

    def parameter_names(self, description: Description) -> list[str | None]:
        """Return the parameter names as written in the text, with their prefix."""
        written = _written_names(description.text)
        return [None if name is None else written.get(name, f":{name}") for name in description.parameters]

    def rollback(self) -> None:
        """Roll back the transaction, if there is one."""
        if not self.is_autocommit():
            try:
                self.connection.execute("rollback")
            except apsw.Error as error:
                _raise_translated(error)

    def abandon(self, seconds: float) -> None:
        """Roll back a transaction that was idle for `seconds`. The next statement of its program raises the reason."""
        self.rollback()
        text = f"the transaction was rolled back: nothing was done in it for {seconds:g} s (service.sql_transaction_seconds)"
        self._abandoned_error = StatementFailed(text, TRANSACTION_TIMEOUT)

    def raise_if_abandoned(self) -> None:
        """Raise `StatementFailed` if the transaction was abandoned, once."""
        if self._abandoned_error is not None:
            error, self._abandoned_error = self._abandoned_error, None
            raise error

    def reset(self) -> None:
        """Reset the connection before another program uses it, so that nothing of this program's work is visible."""
        self.rollback()
        self._abandoned_error = None
        self.connection.set_last_insert_rowid(0)
        if self.total_changes():
            self._reset_changes()

    def _reset_changes(self) -> None:
        """Count changes from 0. SQLite cannot reset its counters, so those of the programs before are deducted."""
        changes, total_changes = self.connection.changes, self.connection.total_changes
        before = total_changes()
        self.total_changes = lambda: total_changes() - before
        # Until the total rises, SQLite's number is that of a program before, or 0.
        self.changes = lambda: changes() if total_changes() != before else 0
        if not self._counts_from_reset:  # once: each time, SQLite compiles all cached statements again
            # Innocuous, as SQLite's own functions are: views and triggers may call them.
            counts: tuple[tuple[str, Callable[..., int]], ...] = (
                ("changes", lambda: self.changes()),
                ("total_changes", lambda: self.total_changes()),
            )
            for name, count in counts:
                self.connection.create_scalar_function(name, count, 0, flags=apsw.SQLITE_INNOCUOUS)
            self._counts_from_reset = True

    def release(self) -> None:
        """Free the memory of cached pages that no statement needs."""
        self.connection.release_memory()

    def interrupt(self) -> None:
        """End the running statement, from another thread."""
        self.connection.interrupt()

    def close(self) -> None:
        """Close the connection; uncommitted changes are lost."""
        self.connection.close(True)


def first_word(sql: str) -> str:
    """Return the first word of a statement, in lower case.

    >>> first_word("-- hint\\n INSERT into t values (1)")
    'insert'
    """
    word = _FIRST.match(sql) or _FIRST.match(sql, _BLANK.match(sql).end())  # type: ignore[union-attr]  # it matches everywhere
    return word[0].lower() if word is not None else ""


def _written_names(sql: str) -> dict[str, str]:
    """Return the names of parameters as written in the text, with their prefix, by the names without it.

    >>> _written_names("select :a, $b, ?3, $x::y(z)")
    {'a': ':a', 'b': '$b', '3': '?3', 'x::y(z)': '$x::y(z)'}
    """
    written: dict[str, str] = {}
    for match in _PARAMETER.finditer(sql):
        written.setdefault(match[1], match[0])
    return written


def _is_blank(sql: str, start: int) -> bool:
    return _BLANK.match(sql, start).end() == len(sql)  # type: ignore[union-attr]  # it matches everywhere


def _raise_translated(error: Exception) -> NoReturn:
    raise statement_failed(error) from error


def statement_failed(error: Exception) -> StatementFailed:
    """Return any error of a statement as one that can be sent to the program."""
    if isinstance(error, StatementFailed):
        return error
    if isinstance(error, QuireError):  # `NotArchived`, for example: the statement was committed here
        return StatementFailed(str(error), _WORD.sub("_", type(error).__name__).upper())
    if isinstance(error, apsw.BindingsError):
        return StatementFailed(str(error), ARGS_INVALID)
    if isinstance(error, UnicodeDecodeError):
        text = error.object.decode("utf-8", "replace")
        return StatementFailed(f"Could not decode to UTF-8 column with text {text!r}", UNICODE_ERROR)
    if isinstance(error, apsw.Error):
        code = getattr(error, "result", apsw.SQLITE_ERROR)
        extended = getattr(error, "extendedresult", code)
        base_name = str(apsw.mapping_result_codes.get(code, "SQLITE_ERROR"))
        name = apsw.mapping_extended_result_codes.get(extended) or apsw.mapping_result_codes.get(extended, base_name)
        return StatementFailed(str(error), base_name, str(name))
    if isinstance(error, OverflowError | TypeError | ValueError):
        return StatementFailed(str(error), ARGS_INVALID)
    if isinstance(error, MemoryError):
        return StatementFailed("out of memory", "SQLITE_NOMEM")
    raise error
