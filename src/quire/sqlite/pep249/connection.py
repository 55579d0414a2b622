"""`Connection`: PEP 249 as the standard library's sqlite3 implements it, over a driver (`driver.py`).

Transactions, as in sqlite3: with `isolation_level` ("" by default) one begins implicitly before the first statement that
writes, and ends with `commit` or `rollback`; with None, none begins implicitly. With `autocommit=False` (3.12's) there is
always one; with `autocommit=True` there is only one that SQL begins.

Threads: the one that opened it, unless `check_same_thread=False`; then one at a time. `interrupt` may be called from any
thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from types import TracebackType
from typing import Any, Self

import apsw
from apsw import Connection as SqliteConnection

from quire.sqlite.pep249 import callbacks, driver, errors
from quire.sqlite.pep249.blob import Blob, open_blob
from quire.sqlite.pep249.cursor import IDLE, Cursor, Known, RowFactory, row_factory_of
from quire.sqlite.pep249.driver import Driver, DriverCursor, LocalDriver, Parameters
from quire.sqlite.pep249.dump import dump
from quire.sqlite.pep249.errors import TRANSLATED, DataError, NotSupportedError, OperationalError, ProgrammingError

LEGACY_TRANSACTION_CONTROL = -1
_new = object.__new__
_LEVELS = ("", "DEFERRED", "IMMEDIATE", "EXCLUSIVE")
Database = str | bytes | os.PathLike[str] | os.PathLike[bytes] | Driver | apsw.Connection


def connect(database: Database, *arguments: Any, **keywords: Any) -> Connection:
    """Open a connection: `connect(database, timeout=5.0, detect_types=0, isolation_level="", check_same_thread=True,
    factory=Connection, cached_statements=128, uri=False, *, autocommit=LEGACY_TRANSACTION_CONTROL)`.

    `database` is a URL, `quire:///path/of/store/shop?at=monday`, or the same as a path, `path/of/store/shop`. The store is
    opened once per process and closed with the last connection to it. A database that does not exist is created.
    """
    factory = arguments[4] if len(arguments) > 4 else keywords.get("factory", Connection)
    connection: Connection = factory(database, *arguments, **keywords)
    return connection


def wrap(connection: apsw.Connection, *, isolation_level: str | None = "") -> Connection:
    """Return a PEP 249 connection over a connection of a store, or any other of apsw's. Any thread may use it, one at a
    time."""
    return Connection(connection, isolation_level=isolation_level, check_same_thread=False)


class PreparedStatement:
    """The result of calling a connection; useful only to find mistakes in SQL."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Refuse direct construction."""
        raise TypeError(f"cannot create '{cls.__module__}.{cls.__qualname__}' instances")


class Connection:
    """See above. Created by `connect`."""

    Warning, Error, InterfaceError, DatabaseError = (
        errors.Warning,
        errors.Error,
        errors.InterfaceError,
        errors.DatabaseError,
    )
    DataError, OperationalError, IntegrityError = errors.DataError, errors.OperationalError, errors.IntegrityError
    InternalError, ProgrammingError = errors.InternalError, errors.ProgrammingError
    NotSupportedError = errors.NotSupportedError

    _driver: Driver | None = None
    _initialised = False
    _makes_plain_cursors = False
    _thread = 0

    def __init__(
        self,
        database: Database,
        timeout: float = 5.0,
        detect_types: int = 0,
        isolation_level: str | None = "",
        check_same_thread: bool = True,
        factory: object = None,  # noqa: ARG002 - `connect` passes on what it was given
        cached_statements: int = 128,
        uri: bool = False,
        *,
        autocommit: bool | int = LEGACY_TRANSACTION_CONTROL,
    ) -> None:
        """See `connect`."""
        self._initialised, self._driver = False, None
        level = _level(isolation_level)
        control = _control(autocommit)
        with TRANSLATED:
            self._driver = _driver_of(database, timeout, uri)
        self._thread = get_ident() if check_same_thread else 0
        self._detect_types = detect_types
        self._statements: dict[str, Known] = {}
        self._schema_number = 0
        """Changes whenever a transaction begins, and after each statement of this connection that may change the schema."""
        self._spare: DriverCursor | None = None
        """The driver cursor for the next statement: a cursor whose statement has ended leaves its own here."""
        self._statements_max = max(cached_statements, 1)
        self._level = level
        self._control: bool | int = control
        self._begin: str | None = None
        self._text_factory: Any = str
        self._converts = bool(detect_types)
        self._makes_plain_cursors = type(self).cursor is Connection.cursor
        self.row_factory: RowFactory | None = None
        self._initialised = True
        self._set_begin()
        if control is False:
            self._script("BEGIN")

    # ── statements ────────────────────────────────────────────────────────────────────────────────────────────────────
    def cursor(self, factory: Callable[[Connection], Any] = Cursor) -> Any:
        """Return a new cursor."""
        self._require()
        cursor = factory(self)
        if factory is not Cursor:
            if not issubclass(type(cursor), Cursor):  # whatever its `__class__` says
                raise TypeError(f"factory must return a cursor, not {type(cursor).__name__}")
            if self.row_factory is not None:
                cursor.row_factory = row_factory_of(self)
        return cursor

    def execute(self, sql: str, parameters: Parameters = (), /) -> Any:
        """Run a statement on a new cursor."""
        if not self._makes_plain_cursors:
            return self.cursor().execute(sql, parameters)
        cursor = _new(Cursor)  # as `Cursor(self)`, in a third of the time
        cursor._cursor = IDLE
        cursor.connection = self
        cursor.row_factory = None if self.row_factory is None else row_factory_of(self)
        cursor._locked = False
        return cursor.execute(sql, parameters)

    def executemany(self, sql: str, rows: Iterable[Parameters], /) -> Any:
        """Run a statement for each set of parameters, on a new cursor."""
        return self.cursor().executemany(sql, rows)

    def executescript(self, script: str, /) -> Any:
        """Commit, then run several statements."""
        return self.cursor().executescript(script)

    def __call__(self, *arguments: str) -> PreparedStatement:
        """Prepare a statement to find mistakes in it."""
        self._require()
        (sql,) = arguments
        if not isinstance(sql, str):
            raise TypeError(f"argument 1 must be str, not {type(sql).__name__}")
        self._require_length(sql)
        self._local("a prepared statement")
        assert isinstance(self._driver, LocalDriver)
        with TRANSLATED:
            self._driver.prepare(sql)
        return object.__new__(PreparedStatement)  # its own `__new__` refuses

    # ── transactions ──────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def isolation_level(self) -> str | None:
        """How transactions begin implicitly: "", "DEFERRED", "IMMEDIATE", "EXCLUSIVE"; None: they do not."""
        self._require()
        return self._level

    @isolation_level.setter
    def isolation_level(self, level: str | None) -> None:
        self._level = _level(level)
        self._set_begin()
        if level is None:
            self.commit()

    @isolation_level.deleter
    def isolation_level(self) -> None:
        raise AttributeError("cannot delete attribute")

    @property
    def autocommit(self) -> bool | int:
        """Whether a transaction is always open: False always, True never, `LEGACY_TRANSACTION_CONTROL` by `isolation_level`."""
        self._require()
        return self._control

    @autocommit.setter
    def autocommit(self, value: bool | int) -> None:
        control = _control(value)
        driver = self._require()
        if control is True and not driver.get_autocommit():
            self._script("COMMIT")
        if control is False and driver.get_autocommit():
            self._script("BEGIN")
        self._control = control
        self._set_begin()

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""
        return not self._require().get_autocommit()

    def commit(self) -> None:
        """Commit; does nothing without a transaction."""
        self._finish("COMMIT")

    def rollback(self) -> None:
        """Roll back; does nothing without a transaction."""
        self._finish("ROLLBACK")

    def _finish(self, how: str) -> None:
        driver = self._require()
        if self._control is False:
            self._script(how)
            self._script("BEGIN")
        elif self._is_legacy and not driver.get_autocommit():
            self._script(how)

    def __enter__(self) -> Self:
        self._require()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._control is True:
            return
        if kind is not None:
            self.rollback()
            return
        try:
            self.commit()
        except BaseException:
            self.rollback()  # a refused commit leaves its transaction open
            raise

    @property
    def _is_legacy(self) -> bool:
        return self._control is LEGACY_TRANSACTION_CONTROL

    def _set_begin(self) -> None:
        self._begin = None if self._level is None or not self._is_legacy else f"BEGIN {self._level}"

    def _script(self, sql: str) -> None:
        with TRANSLATED:
            self._require().script(sql)
            self._schema_number += 1

    # ── state and settings ────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def total_changes(self) -> int:
        """Rows changed since the connection was opened."""
        return self._require().total_changes()

    @property
    def text_factory(self) -> Any:
        """How text is returned: `str`, or a function that is called with its bytes."""
        return self._text_factory

    @text_factory.setter
    def text_factory(self, factory: Any) -> None:
        self._text_factory = factory
        self._converts = factory is not str or bool(self._detect_types)

    @property
    def apsw(self) -> SqliteConnection:
        """The underlying connection, with all of SQLite. If it changes the schema inside a transaction, descriptions of
        statements that ran before are correct again only after that transaction."""
        return self._local("apsw")

    def interrupt(self) -> None:
        """Make the running statement fail. May be called from any thread."""
        self._require_open().interrupt()

    def getlimit(self, category: int, /) -> int:
        """Return one of SQLite's limits, `SQLITE_LIMIT_…`."""
        return self.setlimit(category, -1)

    def setlimit(self, category: int, limit: int, /) -> int:
        """Set one of SQLite's limits and return its former value."""
        local = self._local("setlimit")
        if category not in apsw.mapping_limits:
            raise ProgrammingError("'category' is out of bounds")
        self._statements.clear()
        before: int = local.limit(category, limit)
        return before

    def getconfig(self, op: int, /) -> bool:
        """Return one of SQLite's settings of a connection, `SQLITE_DBCONFIG_…`."""
        with TRANSLATED:
            return bool(self._local("getconfig").config(op, -1))

    def setconfig(self, op: int, enable: bool = True, /) -> None:
        """Set one of SQLite's settings of a connection."""
        with TRANSLATED:
            if bool(self._local("setconfig").config(op, int(enable))) != enable:
                raise OperationalError("Unable to set config")

    # ── Python code in SQLite ─────────────────────────────────────────────────────────────────────────────────────────
    def create_function(
        self, name: str, narg: int, func: Callable[..., Any] | None, *, deterministic: bool = False
    ) -> None:
        """Define a Python function for SQL."""
        if (name, narg) in getattr(self._require(), "functions", ()):
            return  # SQLAlchemy defines it on every connection; a server already has it
        local = self._local("create_function")
        call = None if func is None else callbacks.scalar(func)
        try:
            local.create_scalar_function(name, call, narg, deterministic=deterministic)
        except (apsw.Error, ValueError) as error:
            raise OperationalError("Error creating function") from error

    def create_aggregate(self, name: str, n_arg: int, aggregate_class: Callable[[], Any] | None) -> None:
        """Define an aggregate function: a class with `step` and `finalize`."""
        local = self._local("create_aggregate")
        factory = None if aggregate_class is None else lambda: _aggregate(aggregate_class)
        try:
            local.create_aggregate_function(name, factory, n_arg)
        except (apsw.Error, ValueError) as error:
            raise OperationalError("Error creating aggregate") from error

    def create_window_function(self, name: str, num_params: int, aggregate_class: Callable[[], Any] | None, /) -> None:
        """Define a window function: a class with `step`, `inverse`, `value` and `finalize`."""
        local = self._local("create_window_function")
        factory = None if aggregate_class is None else lambda: callbacks.Aggregate(aggregate_class)
        try:
            local.create_window_function(name, factory, num_params)
        except (apsw.Error, ValueError) as error:
            raise ProgrammingError(f"Error creating window function: {error}") from error

    def create_collation(self, name: str, callback: Callable[[str, str], int] | None, /) -> None:
        """Define a collation: a function that compares two texts."""
        local = self._local("create_collation")
        if callback is not None and not callable(callback):
            raise TypeError("parameter must be callable")
        with TRANSLATED:
            local.create_collation(name, None if callback is None else callbacks.collation(callback))

    def set_authorizer(self, authorizer_callback: Callable[..., int] | None) -> None:
        """Set a function that allows or denies the actions of statements, called while they are prepared."""
        local = self._local("set_authorizer")
        self._statements.clear()
        local.authorizer = None if authorizer_callback is None else callbacks.authorizer(authorizer_callback)

    def set_progress_handler(self, progress_handler: Callable[[], Any] | None, n: int) -> None:
        """Set a function called every `n` instructions of SQLite's virtual machine; a true result interrupts the statement."""
        local = self._local("set_progress_handler")
        call = None if progress_handler is None else callbacks.progress(progress_handler)
        local.set_progress_handler(call, n)

    def set_trace_callback(self, trace_callback: Callable[[str], Any] | None) -> None:
        """Set a function that is called with each statement that runs."""
        self._local("set_trace_callback")
        assert isinstance(self._driver, LocalDriver)
        self._driver.set_trace(None if trace_callback is None else callbacks.trace(trace_callback))

    def enable_load_extension(self, enable: bool, /) -> None:
        """Allow or forbid loading extensions."""
        with TRANSLATED:
            self._local("enable_load_extension").enable_load_extension(bool(enable))

    def load_extension(self, name: str, /, *, entrypoint: str | None = None) -> None:
        """Load an extension of SQLite."""
        with TRANSLATED:
            self._local("load_extension").load_extension(name, entrypoint)

    # ── whole databases and values ────────────────────────────────────────────────────────────────────────────────────
    def iterdump(self, *, filter: str | None = None) -> Iterator[str]:  # noqa: A002 - sqlite3's name
        """Yield the database as SQL text; only objects whose name is LIKE `filter`, if given."""
        self._require()
        return dump(self, filter)

    def backup(
        self,
        target: Connection,
        *,
        pages: int = -1,
        progress: Callable[[int, int, int], Any] | None = None,
        name: str = "main",
        sleep: float = 0.250,
    ) -> None:
        """Copy this database over another one, `pages` at a time; `progress` gets the status, the pages left and the total."""
        if not isinstance(target, Connection):
            raise TypeError(f"backup() argument 'target' must be a Connection, not {type(target).__name__}")
        if target is self:
            raise ValueError("target cannot be the same connection instance")
        if progress is not None and not callable(progress):
            raise TypeError("progress argument must be a callable")
        there, here = target._local("backup"), self._local("backup")
        with TRANSLATED, there.backup("main", here, name) as copy:
            while not copy.done:
                try:
                    copy.step(pages if pages != 0 else -1)
                    status = apsw.SQLITE_DONE if copy.done else apsw.SQLITE_OK
                except apsw.BusyError:
                    status = apsw.SQLITE_BUSY
                except apsw.LockedError:
                    status = apsw.SQLITE_LOCKED
                if progress is not None:
                    progress(status, copy.remaining, copy.page_count)
                if status not in (apsw.SQLITE_OK, apsw.SQLITE_DONE):
                    time.sleep(sleep)

    def blobopen(self, table: str, column: str, row: int, /, *, readonly: bool = False, name: str = "main") -> Blob:
        """Open a value to read and write it in place."""
        with TRANSLATED:
            return open_blob(self, self._local("blobopen").blob_open(name, table, column, row, not readonly))

    def serialize(self, *, name: str = "main") -> bytes:
        """Return the bytes of the file that this database would be."""
        with TRANSLATED:
            data: bytes = self._local("serialize").serialize(name)
        return data

    def deserialize(self, data: Any, /, *, name: str = "main") -> None:
        """Replace the database by one in memory with these bytes."""
        local = self._local("deserialize")
        image = memoryview(data)
        if not image.c_contiguous:
            raise BufferError("memoryview: underlying buffer is not C-contiguous")
        self._statements.clear()
        with TRANSLATED:
            local.deserialize(name, bytes(image))

    # ── closing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def close(self) -> None:
        """Close the connection; uncommitted changes are lost."""
        if not self._initialised:
            raise ProgrammingError("Base Connection.__init__ not called.")
        self._require_thread()
        driver, self._driver, self._spare = self._driver, None, None
        if driver is not None:
            with TRANSLATED:
                driver.close()

    def _require(self) -> Driver:
        """Return the driver; raise if the connection is closed or belongs to another thread."""
        driver, thread = self._driver, self._thread
        if driver is None or (thread and thread != get_ident()):
            self._require_open()
            self._require_thread()
        return driver  # type: ignore[return-value]  # else one of the two has raised

    def _require_open(self) -> Driver:
        if not self._initialised:
            raise ProgrammingError("Base Connection.__init__ not called.")
        if self._driver is None:
            raise ProgrammingError(errors.CLOSED)
        return self._driver

    def _require_thread(self) -> None:
        if self._thread and self._thread != (here := get_ident()):
            raise ProgrammingError(
                "SQLite objects created in a thread can only be used in that same thread. "
                f"The object was created in thread id {self._thread} and this is thread id {here}."
            )

    def _local(self, what: str) -> SqliteConnection:
        """Return SQLite's own connection, for features that do not work over a wire."""
        if (local := self._require().local) is None:
            why = "needs SQLite in this process, and this connection goes to a server"
            raise NotSupportedError(f"{what} {why}; open the store in this process to use it")
        return local

    def _require_length(self, sql: str) -> None:
        local = self._require().local
        if local is not None and len(sql) > local.limit(apsw.SQLITE_LIMIT_SQL_LENGTH, -1):
            raise DataError("query string is too large")

    def _remember(self, sql: str, known: Known) -> None:
        if len(self._statements) >= self._statements_max:
            self._statements.clear()
        self._statements[sql] = known


def _driver_of(database: Database, timeout: float, uri: bool) -> Driver:
    if isinstance(database, apsw.Connection):
        return LocalDriver(database)
    if isinstance(database, str | bytes | os.PathLike):
        return driver.open_path(os.fsdecode(database), timeout=timeout, uri=uri)
    if hasattr(database, "examine"):
        return database
    raise TypeError(f"expected str, bytes or os.PathLike object, not {type(database).__name__}")


def _aggregate(made_by: Callable[[], Any]) -> tuple[Any, Any, Any]:
    use = callbacks.Aggregate(made_by)
    return use, lambda _, *arguments: use.step(*arguments), lambda _: use.final()


def _level(level: str | None) -> str | None:
    if level is None:
        return None
    if not isinstance(level, str):
        raise TypeError(f"isolation_level must be str or None, not {type(level).__name__}")
    if "\0" in level:
        raise ValueError("embedded null character")
    if str.upper(level) not in _LEVELS:
        raise ValueError("isolation_level string must be '', 'DEFERRED', 'IMMEDIATE', or 'EXCLUSIVE'")
    return str.upper(level)


def _control(value: object) -> bool | int:
    if value is True or value is False:
        return value
    if isinstance(value, int) and value == LEGACY_TRANSACTION_CONTROL:
        return LEGACY_TRANSACTION_CONTROL
    raise ValueError("autocommit must be True, False, or sqlite3.LEGACY_TRANSACTION_CONTROL")
