"""`Cursor`: one statement at a time, and its rows.

A cursor is one row ahead: a statement is reset, and releases the version it reads, when its last row is fetched. A cursor
that is dropped or closed ends its statement at once.

A statement whose text is new to its connection is *examined* (`driver.py`): between preparing and running it, the cursor
checks that it is a single statement, and begins a transaction if it writes. The result is cached by text, so that the next
time it costs a dict lookup.

Threads: as its connection.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from threading import get_ident
from typing import TYPE_CHECKING, Any, Never, Self, cast

import apsw
from apsw.ext import query_info

from quire.core.errors import QuireError
from quire.sqlite.pep249.adapters import Converter, adapt_all, as_bindings, convert, converter_of, overrides
from quire.sqlite.pep249.driver import Columns, DriverCursor, Parameters, Prepared
from quire.sqlite.pep249.errors import TRANSLATED, OperationalError, ProgrammingError, translated
from quire.sqlite.pep249.row import standard_row
from quire.sqlite.pragmas import ANSWERED

if TYPE_CHECKING:
    from quire.sqlite.pep249.connection import Connection

RowFactory = Callable[[Any, tuple[Any, ...]], Any]
Description = tuple[tuple[str, None, None, None, None, None, None], ...]

PARSE_DECLTYPES, PARSE_COLNAMES = 1, 2
_WRITING = ("insert", "update", "delete", "replace")
"""Statements that begin a transaction implicitly, as in sqlite3. Any other (`with … insert`, for example) commits alone."""
_BLANK = re.compile(r"(?:[ \t\f\n\r]+|--[^\n]*(?:\n|\Z)|/\*.*?(?:\*/|\Z))*+", re.DOTALL)
"""White space and comments. An unterminated comment extends to the end. Possessive: where `_PRAGMA` does not match, any other
way to split n blanks would be tried, which takes 2ⁿ steps."""
_PRAGMA = re.compile(_BLANK.pattern + r"pragma\s+(?:[^\s.=(;]+\.)?(\w+)", re.DOTALL | re.IGNORECASE)
_UNTYPED = (None,) * 6
"""The other fields of a column in `description`: only its name is given, as in sqlite3."""


@dataclass(slots=True)
class Known:
    """Properties of a statement that a connection caches by its text. Columns are checked again when the schema may have
    changed: inside a transaction no other connection can change it."""

    sql: str
    """The statement alone, without the comments after it."""
    writes: bool
    columns: Columns = ()
    description: Any = None
    schema_number: int = -1
    """The connection's `_schema_number` when the columns were last checked."""
    empty_version: tuple[int, int] = (-1, -1)
    """That number, and SQLite's number of the version, when they were last checked after a result without rows."""


class _Idle:
    """A placeholder for the driver's cursor while there is no statement: the cursor of an earlier one serves the next."""

    def close(self, force: bool, /) -> None:
        """Do nothing: no statement is open."""


IDLE: DriverCursor = cast(DriverCursor, _Idle())


class Cursor:
    """See PEP 249. Created by `Connection.cursor`."""

    # Initial values. On the class, because creating a cursor is a good part of the cost of a small statement.
    arraysize = 1
    rowcount = -1
    lastrowid: int | None = None
    description: Description | None = None
    _cursor: DriverCursor | None = None
    _ahead: Any = None
    _writes = False
    _converters: list[Converter | None] | None = None
    _locked = False
    row_factory: RowFactory | None = None

    def __init__(self, connection: Connection, /) -> None:
        """Create a cursor of a connection."""
        if self._locked:
            raise ProgrammingError("Recursive use of cursors not allowed.")
        try:
            require = connection._require
        except AttributeError:
            raise TypeError(f"Cursor() argument 1 must be a Connection, not {type(connection).__name__}") from None
        require()
        self._cursor = IDLE
        self.connection = connection
        self.row_factory = row_factory_of(connection)

    # ── running ───────────────────────────────────────────────────────────────────────────────────────────────────────
    # This and `fetchone`, with `Connection.execute`, are most of the cost of a small statement. They repeat the checks of
    # `_open` inline and read attributes of the instance, which Python finds in half the time that class attributes take.
    def execute(self, sql: str, parameters: Parameters = (), /) -> Self:
        """Run one statement, up to its first row. If code that runs inside it uses this cursor again, apsw refuses."""
        cursor = self._cursor
        if cursor is None or self._locked:
            self._refuse()
        connection = self.connection
        driver = connection._driver
        if driver is None or (connection._thread and connection._thread != get_ident()):
            driver = connection._require()
        if cursor is IDLE:
            cursor, connection._spare = connection._spare or driver.cursor(), None
            self._cursor = cursor
        try:
            if self._ahead is not None:
                cursor = self._reset(cursor)
            if overrides or (type(parameters) is not tuple and type(parameters) is not dict):
                parameters = self._adapted(parameters)
            known = connection._statements.get(sql)
            if known is None:
                known = self._examine(cursor, sql, parameters)
            else:
                if known.writes and connection._begin is not None and driver.get_autocommit():
                    driver.script(connection._begin)
                    connection._schema_number += 1
                cursor.execute(known.sql, parameters)
            self.rowcount, self._writes, self.description = -1, False, known.description
            if known.columns:
                if known.writes:
                    self.rowcount, self._writes = 0, True
                self._ahead = next(cursor, None)
                if self._ahead is None:
                    self._end()
                    if driver.local is not None:
                        self._describe_empty(driver.local, known)
                elif known.schema_number != connection._schema_number or driver.get_autocommit():
                    known.schema_number = connection._schema_number
                    self._describe_anew(cursor.get_description(), known)
                if connection._detect_types:
                    self._find_converters(known.columns)
            else:
                self._ahead = None
                if known.writes:
                    self.rowcount = driver.changes()
                else:
                    connection._schema_number += 1
                self._cursor, connection._spare = IDLE, cursor
            self.lastrowid = driver.last_insert_rowid()
        except Exception as error:
            self._fail(error)
        return self

    def _reset(self, cursor: DriverCursor) -> DriverCursor:
        """End the previous statement at its current row, as sqlite3 does first. Otherwise a BEGIN for the next statement
        would start on that statement's version, where nothing can be written once another connection has committed."""
        cursor.close(True)
        self._ahead, self._writes = None, False
        self._cursor = renewed = self.connection._require().cursor()
        return renewed

    def _adapted(self, parameters: Any) -> Any:
        """Return the parameters in a form that apsw accepts. A user's sequence or adapter must not use the cursor, so it is
        locked."""
        self._locked = True
        try:
            if type(parameters) is not tuple and type(parameters) is not dict:
                parameters = as_bindings(parameters)
            return adapt_all(parameters) if overrides else parameters
        finally:
            self._locked = False

    def executemany(self, sql: str, rows: Iterable[Parameters], /) -> Self:
        """Run one statement that writes, for each set of parameters. Rows that it returns are dropped."""
        cursor = self._begin()
        many = _Many(rows, self.connection._require().changes)
        self._locked = True
        try:
            known = self._examine(cursor, sql, many.bindings(), many=True)
            for _ in cursor:
                pass
            self.description = known.description
            changed = getattr(cursor, "changed_by_many", many.changed)  # over a wire one call runs many of them
            self.rowcount = changed if known.writes else -1
        except Exception as error:
            if error is many.error:
                self.rowcount = -1
                raise
            self._fail(error)
        finally:
            self._locked = False
        return self

    def executescript(self, script: str, /) -> Self:
        """Commit, then run several statements."""
        self._begin()
        if not isinstance(script, str):
            raise TypeError(f"executescript() argument must be str, not {type(script).__name__}")
        if "\0" in script:
            raise ValueError("embedded null character")
        connection = self.connection
        connection._require_length(script)
        driver = connection._require()
        with TRANSLATED:
            if connection._is_legacy and not driver.get_autocommit():
                driver.script("COMMIT")
            try:
                driver.script(script)
            finally:
                connection._schema_number += 1
        return self

    def _begin(self) -> DriverCursor:
        """Discard the previous statement."""
        if (cursor := self._open()) is IDLE:
            cursor = self._cursor = self.connection._require().cursor()
        elif self._ahead is not None:
            cursor = self._reset(cursor)
        self._ahead = self.description = self._converters = None
        self._writes, self.rowcount = False, -1
        return cursor

    def _examine(self, cursor: DriverCursor, sql: str, parameters: Any, *, many: bool = False) -> Known:
        """Run a statement whose text is new to the connection."""
        connection = self.connection
        driver = connection._require()
        if not isinstance(sql, str):
            raise TypeError(f"execute() argument 1 must be str, not {type(sql).__name__}")
        connection._require_length(sql)
        known = Known(_first_statement(sql), _keyword(sql).startswith(_WRITING))

        def prepared(statement: Prepared) -> None:
            if _keyword(known.sql[len(statement.text) :]):
                raise ProgrammingError("You can only execute one statement at a time.")
            if many and statement.is_readonly:
                raise ProgrammingError("executemany() can only execute DML statements.")
            known.columns = _named_as_sqlite_does(statement)
            known.description = self._described(known.columns)
            # After preparing, so that a mistake in SQL leaves no transaction open.
            if known.writes and connection._begin is not None and driver.get_autocommit():
                driver.script(connection._begin)
                connection._schema_number += 1

        driver.examine(cursor, known.sql, parameters, prepared, many=many)
        connection._remember(sql, known)
        return known

    def _describe_anew(self, columns: Columns, known: Known) -> None:
        """Update the description if the schema has changed since the last time."""
        if columns != known.columns:
            known.columns = _named_as_sqlite_does(Prepared(known.sql, True, columns))
            known.description = self.description = self._described(known.columns)

    def _describe_empty(self, local: apsw.Connection, known: Known) -> None:
        """Do the same after a statement that has ended: its columns are gone, so it is prepared again, after a change."""
        version = self.connection._schema_number, local.data_version()
        if version != known.empty_version:
            known.empty_version = version
            self._describe_anew(query_info(local, known.sql).description, known)

    def _described(self, columns: Columns) -> Description | None:
        cut = self.connection._detect_types & PARSE_COLNAMES
        names = [name.partition(" [")[0] if cut else name for name, _ in columns]
        return tuple((name, *_UNTYPED) for name in names) or None

    def _find_converters(self, columns: Columns) -> None:
        detect = self.connection._detect_types
        by_name, by_type = bool(detect & PARSE_COLNAMES), bool(detect & PARSE_DECLTYPES)
        self._converters = [converter_of(name, declared, by_name, by_type) for name, declared in columns]

    # ── fetching ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def fetchone(self) -> Any:
        """Return the next row, or None."""
        cursor, row, connection = self._cursor, self._ahead, self.connection
        if cursor is None or self._locked:
            self._refuse()
        if connection._driver is None or (connection._thread and connection._thread != get_ident()):
            connection._require()
        if row is None:
            return None
        if connection._converts:
            row = self._converted(row)
        try:
            self._ahead = next(cursor, None)
        except Exception as error:
            self._fail(error)
        if self._ahead is None:
            if self._writes:
                self._end()
            else:
                self._cursor, connection._spare = IDLE, cursor
        factory = self.row_factory
        return row if factory is None else factory(self, row)

    def __next__(self) -> Any:
        if self._ahead is None:
            self._open()
            raise StopIteration
        return self.fetchone()

    def fetchmany(self, size: int | None = None) -> list[Any]:
        """Return up to `size` rows, by default `arraysize`."""
        cursor, row = self._open(), self._ahead
        size = self.arraysize if size is None else size
        if row is None or size == 0:
            return []
        if size < 0:  # as sqlite3: all
            return self.fetchall()
        return self._converted_rows(cursor, islice(chain((row,), cursor), size))

    def fetchall(self) -> list[Any]:
        """Return all remaining rows."""
        cursor, row = self._open(), self._ahead
        return [] if row is None else self._converted_rows(cursor, chain((row,), cursor))

    def _converted_rows(self, cursor: DriverCursor, rows: Iterator[Any]) -> list[Any]:
        """Return these rows, the first of which was the row ahead, through the row factory."""
        if self.connection._converts:
            rows = map(self._converted, rows)
        try:
            taken = list(rows)
            self._ahead = next(cursor, None)
        except Exception as error:
            self._fail(error)
        if self._ahead is None:
            self._end()
        factory = self.row_factory
        return taken if factory is None else [factory(self, row) for row in taken]

    def _converted(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """Apply converters and the text factory. The cursor is locked in the meantime."""
        text = self.connection._text_factory
        converters = self._converters or [None] * len(row)
        self._locked = True
        try:
            return tuple(
                convert(converter, value)
                if converter is not None
                else text(value.encode())
                if text is not str and isinstance(value, str)
                else value
                for value, converter in zip(row, converters)
            )
        finally:
            self._locked = False

    def _end(self) -> None:
        """End the statement after its last row: another cursor may use its driver cursor."""
        connection = self.connection
        if self._writes:
            self.rowcount, self._writes = connection._require().changes(), False
        connection._spare, self._cursor = self._cursor, IDLE

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining rows, in half the time of `__next__`. Both use the same row ahead, so they may be mixed."""
        self._open()
        connection = self.connection
        while (row := self._ahead) is not None:
            if self.row_factory is not None or connection._converts:
                yield self.fetchone()
                continue
            if (cursor := self._cursor) is None:
                self._refuse()
            try:
                self._ahead = next(cursor, None)
            except Exception as error:
                self._fail(error)
            if self._ahead is None:
                self._end()
            yield row

    # ── closing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def close(self) -> None:
        """Discard the remaining rows and close the cursor."""
        if not hasattr(self, "connection"):
            raise ProgrammingError("Base Cursor.__init__ not called.")
        if self._locked:
            raise ProgrammingError("Recursive use of cursors not allowed.")
        self.connection._require()
        cursor, self._cursor, self._ahead = self._cursor, None, None
        if cursor is not None:
            with TRANSLATED:
                cursor.close(True)

    def setinputsizes(self, sizes: Any, /) -> None:
        """Do nothing: SQLite needs no sizes."""

    def setoutputsize(self, size: int, column: int | None = None, /) -> None:
        """Do nothing: SQLite needs no sizes."""

    def _open(self) -> DriverCursor:
        """Return the driver's cursor; raise if this cursor or its connection cannot be used now by this thread."""
        cursor = self._cursor
        if cursor is None or self._locked:
            self._refuse()
        self.connection._require()
        return cursor

    def _refuse(self) -> Never:
        if not hasattr(self, "connection"):
            raise ProgrammingError("Base Cursor.__init__ not called.")
        self.connection._require()
        if self._locked:
            raise ProgrammingError("Recursive use of cursors not allowed.")
        raise ProgrammingError("Cannot operate on a closed cursor.")

    def _fail(self, error: Exception) -> Never:
        """Raise the error that sqlite3 would, and leave the cursor usable."""
        cursor, description = self._cursor, self.description
        self._ahead, self.rowcount, self._writes, self.description = None, -1, False, None
        if cursor is not None and not isinstance(error, apsw.ThreadingViolationError):
            # Closed, not only dropped: as long as the error is handled its traceback has references to the cursor.
            cursor.close(True)
            self._cursor = IDLE
        if isinstance(error, UnicodeDecodeError):
            names = "' or '".join(column[0] for column in description or ())
            text = bytes(error.object).decode(errors="replace")
            raise OperationalError(f"Could not decode to UTF-8 column '{names}' with text '{text}'") from error
        if isinstance(error, apsw.Error | QuireError):
            raise translated(error) from error
        wanted = as_sqlite3(error)
        try:
            if wanted is error:
                raise error
            raise wanted from error
        finally:
            # The traceback has this frame: through its locals it would keep the caller's cursors, and what they read, until
            # the next garbage collection.
            del error, wanted


def row_factory_of(connection: Connection) -> RowFactory | None:
    """Return the row factory for cursors of a connection. `sqlite3.Row` accepts only the standard library's cursors."""
    factory = connection.row_factory
    return standard_row if factory is sqlite3.Row else factory


class _Many:
    """The parameters of `executemany`, and how many rows they have changed."""

    def __init__(self, rows: Iterable[Parameters], changes: Callable[[], int]) -> None:
        self.changed = 0
        self.error: BaseException | None = None
        self._rows = iter(rows)
        self._changes = changes

    def bindings(self) -> Iterator[Any]:
        """Yield the parameters one by one. The next is requested when the statement has finished with the previous one."""
        changes, changed = self._changes, 0
        try:
            for row in self._rows:
                if type(row) is not tuple and type(row) is not dict:
                    row = as_bindings(row)
                yield adapt_all(row) if overrides else row
                changed += changes()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.changed = changed


def as_sqlite3(error: Exception) -> Exception:
    """Return sqlite3's exception where apsw reports an error of parameters or texts by a Python exception."""
    text = str(error)
    if isinstance(error, KeyError) and error.args:
        return ProgrammingError(f"You did not supply a value for binding parameter :{error.args[0]}.")
    if isinstance(error, TypeError) and text.startswith("You must supply a dict or a sequence"):
        return ProgrammingError("parameters are of unsupported type")
    if isinstance(error, ValueError) and text == "null character in query":
        return ProgrammingError("the query contains a null character")
    if isinstance(error, OverflowError) and text == "int too big to convert":
        return OverflowError("Python int too large to convert to SQLite INTEGER")
    return error


def _named_as_sqlite_does(statement: Prepared) -> Columns:
    """Return the columns of a statement. Where the store answers a pragma instead of SQLite, SQLite names the column after
    its value; here it gets the pragma's name, as on a file."""
    if len(statement.columns) == 1 and (pragma := _PRAGMA.match(statement.text)) is not None:
        name = pragma[1].lower()
        return ((name, None),) if name in ANSWERED else statement.columns
    return statement.columns


def _first_statement(sql: str) -> str:
    """Return the text without comments after its statement, which apsw takes for another one; all of it if there is another.

    >>> _first_statement("select ';' /* one; */; -- two; three"), _first_statement("select 1; select 2")
    ("select ';' /* one; */;", 'select 1; select 2')
    """
    for end in (match.end() for match in re.finditer(";", sql)):
        # Blanks first: testing for a complete statement at each semicolon of a long literal would take quadratic time.
        if _BLANK.match(sql, end).end() == len(sql) and apsw.complete(sql[:end]):  # type: ignore[union-attr]  # as below
            return sql[:end]
    return sql


def _keyword(statement: str) -> str:
    """Return the first characters of a statement, in lower case; "" if there is none.

    >>> _keyword("-- hint\\n /* and\\n another */ INSERT into t values (1)")
    'insert '
    """
    start = _BLANK.match(statement).end()  # type: ignore[union-attr]  # it matches everywhere
    return statement[start : start + 7].lower()
