"""The layer below a PEP 249 connection: SQLite in this process (apsw), or the server of a store.

The classes above use only a `Driver`, so a connection over a wire has the same class as a local one. The hot calls have
apsw's names and meanings: the local driver hands out apsw's own bound methods and cursors, and no Python runs between a row
and its reader. Features that need SQLite's memory (Python functions, blobs, backups) use `local`, which is None over a wire;
the classes above turn that into `NotSupportedError` with an explanation.

A driver raises apsw's errors or those of PEP 249 (`errors.error_of` builds one from SQLite's code and a message). Values of
other than SQLite's types pass through `adapters.adapt_parameter` before they are sent.

Threads: one at a time, except for `interrupt`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import apsw
from apsw.ext import query_info

from quire.core.lazy import lazy_names
from quire.sqlite.pep249.adapters import adapt_parameter

Row = tuple[Any, ...]
Parameters = Sequence[Any] | Mapping[str, Any]
Columns = tuple[tuple[str, str | None], ...]
"""Name and declared type of each column."""
Trace = Callable[[Callable[[], str | None], str], None]
"""Called with a function that returns the text with its parameters, and with the text without them."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Properties of a statement that are known before it runs."""

    text: str
    """The first statement of the given SQL."""
    is_readonly: bool
    columns: Columns


class DriverCursor(Protocol):
    """Runs one statement at a time: the subset of `apsw.Cursor` that is used here."""

    def execute(self, sql: str, bindings: Any, /) -> Any:
        """Run a statement that was examined before, up to its first row. An earlier statement is discarded."""

    def executemany(self, sql: str, bindings: Iterable[Any], /) -> Any:
        """Run it for each of these bindings; the next is requested when the statement has finished with the previous one."""

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any:
        """Return the next row. At the end the statement is reset, which ends its read transaction."""

    def fetchall(self) -> list[Any]:
        """Return the remaining rows."""

    def get_description(self) -> Any:
        """Return the `Columns` of the statement that is at a row."""

    def close(self, force: bool, /) -> None:
        """Reset the statement."""


class Driver(Protocol):
    """One connection."""

    local: apsw.Connection | None
    """SQLite's connection, if it is in this process."""
    cursor: Callable[[], DriverCursor]
    get_autocommit: Callable[[], bool]
    """True outside a transaction."""
    changes: Callable[[], int]
    total_changes: Callable[[], int]
    last_insert_rowid: Callable[[], int]
    interrupt: Callable[[], None]
    """May be called from any thread."""

    def examine(
        self, cursor: DriverCursor, sql: str, bindings: Any, prepared: Callable[[Prepared], None], *, many: bool = False
    ) -> None:
        """Execute a statement that is seen for the first time, with `executemany` if `many`. `prepared` is called between
        preparing and running it, and may raise or begin a transaction."""

    def script(self, sql: str) -> None:
        """Run all statements and drop their rows."""

    def close(self) -> None:
        """Release everything; uncommitted changes are rolled back."""


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
        # Also runs when the connection is dropped without being closed, as Python programs do.
        self._release = weakref.finalize(connection, release)
        connection.convert_binding = _adapt

    def examine(
        self, cursor: DriverCursor, sql: str, bindings: Any, prepared: Callable[[Prepared], None], *, many: bool = False
    ) -> None:
        """See `Driver`. apsw calls its tracer after a statement is prepared and bound, and before it runs. The connection's
        tracer is used, because a cursor whose own tracer was removed ignores the connection's from then on."""
        if many:
            # Prepared without parameters: there may be none, and the iterator that returns them may run other statements.
            prepared(self._described(sql))
            cursor.executemany(sql, bindings)
            return
        connection = self._connection
        tracer = connection.exec_trace

        def traced(ready: apsw.Cursor, text: str, _: Any) -> bool:
            if ready is not cursor:  # a statement that an adapter of the parameters runs
                return self._traced(ready, text, _)
            connection.exec_trace = tracer  # once: not for statements that `prepared` runs
            # Not `get_description`, which apsw would cache: SQLite detects a changed schema only when the statement runs.
            columns = tuple(column[:2] for column in ready.description)
            prepared(Prepared(text, ready.is_readonly, columns))
            return self._traced(ready, text, _)

        connection.exec_trace = traced
        try:
            cursor.execute(sql, bindings)
        finally:
            connection.exec_trace = tracer

    def prepare(self, sql: str) -> None:
        """Raise if a statement has mistakes."""
        self._described(sql)

    def _described(self, sql: str) -> Prepared:
        details = query_info(self._connection, sql)
        return Prepared(details.first_query, details.is_readonly, details.description)

    def set_trace(self, trace: Trace | None) -> None:
        """Report each statement, with its parameters in it, before it runs."""
        self._trace = trace
        self._connection.exec_trace = None if trace is None else self._traced

    def _traced(self, cursor: apsw.Cursor, text: str, _: Any) -> bool:
        if self._trace is not None:
            self._trace(lambda: cursor.expanded_sql, text)
        return True

    def script(self, sql: str) -> None:
        """Run all statements and drop their rows."""
        for _ in self._connection.execute(sql):
            pass

    def close(self) -> None:
        """Close SQLite's connection, then release the store."""
        self._connection.close(True)
        self._release()


def _adapt(_: apsw.Cursor, number: int, value: Any) -> Any:
    return adapt_parameter(number, value)


_load, _ = lazy_names(__name__, {"open_sqlite_path": "quire.store.sqlite_urls"})


def open_path(database: str, *, timeout: float, uri: bool) -> Driver:
    """Return the driver for the argument of `connect`. Stores are a layer above this one, so that module is loaded on first
    use, like the public names of quire."""
    driver: Driver = _load("open_sqlite_path")(database, timeout=timeout, uri=uri)
    return driver
