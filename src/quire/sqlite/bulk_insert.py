"""Inserts many rows into one table in one transaction, once: a *load*, named by a number that its caller draws.

All rows of a load are inserted, or none. The load is remembered in `quire_loads`, a table of the same database, by the same
transaction, for `KEPT_MS`: a repeat is answered from there, and nothing is inserted.

Thread: the connection's. Raises `NotFound`, `Conflict` (a constraint), `Overloaded` (somebody else writes), `InvalidInput`,
and what the page engine raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import apsw

from quire.core.errors import Conflict, InvalidInput, NotFound, Overloaded, QuireError
from quire.sqlite.where_clause import quoted

LOADS = "quire_loads"
KEPT_MS = 7 * 24 * 3_600 * 1_000

_MAKE = f"CREATE TABLE IF NOT EXISTS {LOADS}(load INTEGER PRIMARY KEY, rows INTEGER NOT NULL, at_ms INTEGER NOT NULL)"


def load_rows(
    connection: apsw.Connection,
    load: int,
    table: str,
    columns: Sequence[tuple[str, str]],
    rows: Iterable[Sequence[Any]],
    *,
    now_ms: int,
    overwrite: bool = False,
    create: bool = False,
) -> int:
    """Insert rows of (name, declared type) columns; how many they were."""
    with _explained(table), _transaction(connection):
        connection.execute(_MAKE)
        done = connection.execute(f"SELECT rows FROM {LOADS} WHERE load = ?", (load,)).get
        if done is not None:
            return int(done)
        _prepare(connection, table, columns, create)
        if overwrite:
            connection.execute(f"DELETE FROM main.{quoted(table)}")
        names = ", ".join(quoted(name) for name, _ in columns)
        places = ", ".join("?" * len(columns))
        counted = _Counted(rows)
        connection.executemany(f"INSERT INTO main.{quoted(table)}({names}) VALUES ({places})", counted)
        connection.execute(f"DELETE FROM {LOADS} WHERE at_ms < ?", (now_ms - KEPT_MS,))
        connection.execute(f"INSERT INTO {LOADS} VALUES (?, ?, ?)", (load, counted.count, now_ms))
        return counted.count


class _Counted:
    """Rows, counted as they pass."""

    def __init__(self, rows: Iterable[Sequence[Any]]) -> None:
        self._rows = rows
        self.count = 0

    def __iter__(self) -> Iterator[Sequence[Any]]:
        for row in self._rows:
            self.count += 1
            yield row


def _prepare(connection: apsw.Connection, table: str, columns: Sequence[tuple[str, str]], create: bool) -> None:
    """See that the table is there."""
    known = connection.execute("SELECT name FROM pragma_table_list(?) WHERE schema = 'main'", (table,)).get
    if known is not None:
        return
    if not create:
        raise NotFound("the database has no such table", hint="make it, or write with the option create", table=table)
    declared = ", ".join(f"{quoted(name)} {kind}" for name, kind in columns)
    connection.execute(f"CREATE TABLE main.{quoted(table)}({declared})")


@contextmanager
def _transaction(connection: apsw.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextmanager
def _explained(table: str) -> Iterator[None]:
    """SQLite's errors as ours."""
    try:
        yield
    except apsw.Error as error:
        if isinstance(error.__cause__, QuireError):
            raise error.__cause__ from None
        if isinstance(error, apsw.ConstraintError):
            raise Conflict(f"the table refuses a row: {error}", hint="nothing was inserted", table=table) from error
        if isinstance(error, apsw.BusyError | apsw.LockedError):
            raise Overloaded("somebody else writes to the database", hint="try again", table=table) from error
        raise InvalidInput(f"SQLite refuses: {error}", hint="nothing was inserted", table=table) from error
