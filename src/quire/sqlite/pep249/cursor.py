"""`Cursor`: one statement at a time, and its rows.

It is one row ahead: a statement is reset, and lets go of the version it reads, when its last row is fetched. A cursor that
is dropped or closed ends its statement at once.

A statement whose text is new to its connection is *examined* (`driver.py`): between preparing and running it, it is checked
to be a single one, and a transaction begins if it writes. What was learned is kept by its text, so that the next time it
costs a look into a dict.

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
"""What a transaction begins before, as in sqlite3: what begins otherwise (`with … insert`, say) is a transaction of its own."""
_BLANK = re.compile(r"(?:[ \t\f\n\r]+|--[^\n]*(?:\n|\Z)|/\*.*?(?:\*/|\Z))*", re.DOTALL)
"""White space and comments. A comment that nothing ends goes to the end."""
_PRAGMA = re.compile(_BLANK.pattern + r"pragma\s+(?:[^\s.=(;]+\.)?(\w+)", re.DOTALL | re.IGNORECASE)
_UNTYPED = (None,) * 6
"""Of a column in `description`: only its name is told, as in sqlite3."""


@dataclass(slots=True)
class Known:
    """What a connection knows of a statement by its text. Columns are looked at again when there is a row and they may be other
    ones: inside of a transaction nobody else can change the schema."""

    sql: str
    """The statement alone, without the comments behind it."""
    writes: bool
    columns: Columns = ()
    description: Any = None
    schema_number: int = -1
    """That of the connection (`_schema_number`) when the columns were looked at last."""


class _Idle:
    """Stands for the driver's cursor while there is no statement: that of an earlier one serves the next."""

    def close(self, force: bool, /) -> None:
        """Nothing is open."""


IDLE: DriverCursor = cast(DriverCursor, _Idle())


class Cursor:
    """See PEP 249. Made by `Connection.cursor`."""

    # Of a new cursor. On the class, because making one is a good part of what a small statement costs.
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
        """A cursor of a connection."""
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
    # This and `fetchone`, with `Connection.execute`, are most of what a small statement costs. They check in place what `_open`
    # checks, and read attributes of the instance, which Python finds in half the time that those of a class take.
    def execute(self, sql: str, parameters: Parameters = (), /) -> Self:
        """Run one statement, up to its first row. What runs inside of it and uses this cursor again is refused by apsw."""
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
                elif known.schema_number != connection._schema_number or driver.get_autocommit():
                    known.schema_number = connection._schema_number
                    if cursor.get_description() != known.columns:
                        self._describe_anew(cursor, known)
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
        """End the statement before where it is, as sqlite3 does first. The BEGIN that the next one may need would else begin on
        its version, where nothing can be written any more once another connection has committed."""
        cursor.close(True)
        self._ahead, self._writes = None, False
        self._cursor = renewed = self.connection._require().cursor()
        return renewed

    def _adapted(self, parameters: Any) -> Any:
        """Parameters as apsw takes them. Somebody's sequence or adapter must not use the cursor meanwhile."""
        self._locked = True
        try:
            if type(parameters) is not tuple and type(parameters) is not dict:
                parameters = as_bindings(parameters)
            return adapt_all(parameters) if overrides else parameters
        finally:
            self._locked = False

    def executemany(self, sql: str, rows: Iterable[Parameters], /) -> Self:
        """Run one statement that writes for each of these. Rows that it returns are dropped."""
        cursor = self._begin()
        many = _Many(rows, self.connection._require().changes)
        self._locked = True
        try:
            known = self._examine(cursor, sql, many.bindings(), many=True)
            for _ in cursor:
                pass
            self.description = known.description
            changed = getattr(cursor, "changed_by_many", many.changed)  # a wire has many of them in one call
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
        """Forget the statement before."""
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
            # After it was prepared, so that a mistake in SQL leaves no transaction behind.
            if known.writes and connection._begin is not None and driver.get_autocommit():
                driver.script(connection._begin)
                connection._schema_number += 1

        driver.examine(cursor, known.sql, parameters, prepared, many=many)
        connection._remember(sql, known)
        return known

    def _describe_anew(self, cursor: DriverCursor, known: Known) -> None:
        """The schema is another one than the last time."""
        known.columns = _named_as_sqlite_does(Prepared(known.sql, True, cursor.get_description()))
        known.description = self.description = self._described(known.columns)

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
        """The next row, if there is one."""
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
        """So many rows, default `arraysize`, or as many as are left."""
        cursor, row = self._open(), self._ahead
        size = self.arraysize if size is None else size
        if row is None or size == 0:
            return []
        if size < 0:  # as sqlite3: all
            return self.fetchall()
        return self._taken(cursor, islice(chain((row,), cursor), size))

    def fetchall(self) -> list[Any]:
        """All rows that are left."""
        cursor, row = self._open(), self._ahead
        return [] if row is None else self._taken(cursor, chain((row,), cursor))

    def _taken(self, cursor: DriverCursor, rows: Iterator[Any]) -> list[Any]:
        """These, of which the first is the one that was ahead, as the row factory wants them."""
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
        """Through converters and the text factory, meanwhile the cursor must not be used."""
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
        """The statement has returned its last row: another cursor may have what it ran on."""
        connection = self.connection
        if self._writes:
            self.rowcount, self._writes = connection._require().changes(), False
        connection._spare, self._cursor = self._cursor, IDLE

    def __iter__(self) -> Iterator[Any]:
        """The rows that are left. A generator takes half the time of `__next__`; it looks at the same row ahead, so both may
        be mixed."""
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

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    def close(self) -> None:
        """Let go of what is left."""
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
        """Nothing: SQLite needs no sizes."""

    def setoutputsize(self, size: int, column: int | None = None, /) -> None:
        """Nothing: SQLite needs no sizes."""

    def _open(self) -> DriverCursor:
        """What is below, if this may be used now and here."""
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
        """Raise what sqlite3 would, and leave a cursor that can be used again."""
        cursor, description = self._cursor, self.description
        self._ahead, self.rowcount, self._writes, self.description = None, -1, False, None
        if isinstance(error, UnicodeDecodeError):
            names = "' or '".join(column[0] for column in description or ())
            text = bytes(error.object).decode(errors="replace")
            raise OperationalError(f"Could not decode to UTF-8 column '{names}' with text '{text}'") from error
        if cursor is not None and not isinstance(error, apsw.ThreadingViolationError):
            self._cursor = IDLE  # the old one, dropped here, ends its statement
        if isinstance(error, apsw.Error | QuireError):
            raise translated(error) from error
        if (wanted := as_sqlite3(error)) is error:
            raise error
        raise wanted from error


def row_factory_of(connection: Connection) -> RowFactory | None:
    """What makes rows for the cursors of a connection. `sqlite3.Row` takes no cursor but the standard library's."""
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
        """Each in its turn. Whoever runs the statement asks for the next when it is done with the one before."""
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
    """What apsw reports of parameters and texts by Python's own exceptions, as sqlite3 does."""
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
    """The columns of a statement. Where the store answers a pragma in SQLite's place, SQLite calls the column as its value:
    here it has the pragma's name, as on a file."""
    if len(statement.columns) == 1 and (pragma := _PRAGMA.match(statement.text)) is not None:
        name = pragma[1].lower()
        return ((name, None),) if name in ANSWERED else statement.columns
    return statement.columns


def _first_statement(sql: str) -> str:
    """Without comments behind it: to apsw they are another statement. If there is one, all of the text.

    >>> _first_statement("select ';' /* one; */; -- two; three"), _first_statement("select 1; select 2")
    ("select ';' /* one; */;", 'select 1; select 2')
    """
    end = sql.find(";")
    while end >= 0 and not apsw.complete(sql[: end + 1]):
        end = sql.find(";", end + 1)
    return sql if end < 0 or _keyword(sql[end + 1 :]) else sql[: end + 1]


def _keyword(statement: str) -> str:
    """How a statement begins, in lower case; "" if there is none.

    >>> _keyword("-- hint\\n /* and\\n another */ INSERT into t values (1)")
    'insert '
    """
    start = _BLANK.match(statement).end()  # type: ignore[union-attr]  # it matches everywhere
    return statement[start : start + 7].lower()
