"""What is below a connection of PEP 249: SQLite in this process (apsw), or the server of a store.

The classes above know a `Driver` only, so that a connection over a wire is the same class as a local one. Its hot calls
have apsw's names and meanings, so that the local driver hands out apsw's own bound methods and its own cursors, and no
Python runs between a row and its reader. What needs SQLite's memory (functions of Python's, blobs, backups) asks for
`local`, which is None over a wire: the classes above turn that into `NotSupportedError` with a sentence.

A driver raises apsw's errors or those of PEP 249 (`errors.error_of` makes one of SQLite's code and a message).
Values that are none of SQLite's types go through `adapters.adapt_parameter` before they are sent.

Threads: one at a time, but for `interrupt`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import apsw

from quire.core.lazy import lazy_names
from quire.sqlite.pep249.adapters import adapt_parameter

Row = tuple[Any, ...]
Parameters = Sequence[Any] | Mapping[str, Any]
Columns = tuple[tuple[str, str | None], ...]
"""Name and declared type of each."""
Trace = Callable[[Callable[[], str | None], str], None]
"""Given how to get the text with its parameters, and the text without."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known of a statement before it runs."""

    text: str
    """The first statement of the SQL that was given."""
    is_readonly: bool
    columns: Columns


class DriverCursor(Protocol):
    """One statement at a time: what `apsw.Cursor` does of it."""

    def execute(self, sql: str, bindings: Any, /) -> Any:
        """Run a statement that was examined before, up to its first row. What ran before is forgotten."""

    def executemany(self, sql: str, bindings: Iterable[Any], /) -> Any:
        """Run it for each of these; the next is asked for when the statement is done with the one before."""

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any:
        """The next row. At the end the statement is reset, which ends its read transaction."""

    def fetchall(self) -> list[Any]:
        """The rows that are left."""

    def get_description(self) -> Any:
        """`Columns` of the statement that is at a row."""

    def close(self, force: bool, /) -> None:
        """Reset the statement."""


class Driver(Protocol):
    """One connection."""

    local: apsw.Connection | None
    """SQLite's connection, where there is one in this process."""
    cursor: Callable[[], DriverCursor]
    get_autocommit: Callable[[], bool]
    """True outside of a transaction."""
    changes: Callable[[], int]
    total_changes: Callable[[], int]
    last_insert_rowid: Callable[[], int]
    interrupt: Callable[[], None]
    """From any thread."""

    def examine(
        self, cursor: DriverCursor, sql: str, bindings: Any, prepared: Callable[[Prepared], None], *, many: bool = False
    ) -> None:
        """`execute` or `executemany` of a statement that is seen for the first time: `prepared` is called between preparing
        and running it, and may raise, or begin a transaction."""

    def script(self, sql: str) -> None:
        """Run all statements, and drop their rows."""

    def close(self) -> None:
        """Give everything back; what is not committed is rolled back."""


class LocalDriver:
    """SQLite in this process."""

    def __init__(self, connection: apsw.Connection, release: Callable[[], None] = lambda: None) -> None:
        self.local: apsw.Connection | None = connection
        self.cursor: Callable[[], DriverCursor] = connection.cursor
        self.get_autocommit = connection.get_autocommit
        self.changes = connection.changes
        self.total_changes = connection.total_changes
        self.last_insert_rowid = connection.last_insert_rowid
        self.interrupt = connection.interrupt
        self._connection = connection
        self._trace: Trace | None = None
        # Also when the connection is dropped and not closed, as Python programs do.
        self._release = weakref.finalize(connection, release)
        connection.convert_binding = _adapt

    def examine(
        self, cursor: DriverCursor, sql: str, bindings: Any, prepared: Callable[[Prepared], None], *, many: bool = False
    ) -> None:
        """apsw calls its tracer when a statement is prepared and bound, and before it runs: the connection's, because a cursor
        whose own was taken away ignores the connection's from then on."""
        connection = self._connection
        tracer = None if self._trace is None else self._traced

        def traced(ready: apsw.Cursor, text: str, _: Any) -> bool:
            connection.exec_trace = tracer  # once: not for what `prepared` runs, nor for the next parameters
            # Not `get_description`, which apsw would keep: if the schema has changed, SQLite finds out when the statement runs.
            columns = tuple(column[:2] for column in ready.description)
            prepared(Prepared(text, ready.is_readonly, columns))
            return self._traced(ready, text, _)

        connection.exec_trace = traced
        try:
            if many:
                cursor.executemany(sql, bindings)
            else:
                cursor.execute(sql, bindings)
        finally:
            connection.exec_trace = tracer

    def prepare(self, sql: str) -> None:
        """Find mistakes in a statement. What is wrong with its parameters, which nobody has given yet, is no mistake."""
        cursor = self._connection.cursor()
        cursor.exec_trace = lambda *_: False
        with suppress(apsw.ExecTraceAbort, apsw.BindingsError):
            cursor.execute(sql)

    def set_trace(self, trace: Trace | None) -> None:
        """Have each statement reported, with its parameters in it, before it runs."""
        self._trace = trace
        self._connection.exec_trace = None if trace is None else self._traced

    def _traced(self, cursor: apsw.Cursor, text: str, _: Any) -> bool:
        if self._trace is not None:
            self._trace(lambda: cursor.expanded_sql, text)
        return True

    def script(self, sql: str) -> None:
        """Run all statements, and drop their rows."""
        for _ in self._connection.execute(sql):
            pass

    def close(self) -> None:
        """Close SQLite's connection, then let go of the store."""
        self._connection.close(True)
        self._release()


def _adapt(_: apsw.Cursor, number: int, value: Any) -> Any:
    return adapt_parameter(number, value)


_load, _ = lazy_names(__name__, {"open_sqlite_path": "quire.store.sqlite_urls"})


def open_path(database: str, *, timeout: float, uri: bool) -> Driver:
    """The driver for what `connect` was given. Stores are a layer above this one: it is loaded when somebody opens one, as
    the public names of quire are."""
    driver: Driver = _load("open_sqlite_path")(database, timeout=timeout, uri=uri)
    return driver
