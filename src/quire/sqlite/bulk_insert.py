"""Writes many rows to one table in one transaction, exactly once: a *load*, identified by a number that its caller draws, or
a *batch* of a streaming query, identified by the query's id and a number that only rises.

All rows are written, or none. The same transaction records what was done, in a table of the same database:

- loads in `quire_loads`, for `KEPT_MS`: a repeat is answered from there when the record is durable, and nothing is written;
- the last batch of each query in `quire_sinks`, permanently: a query may be restarted after months and then repeats its last
  batch. A batch that is not newer than the recorded one is not written.

With `keys` a row replaces the row with the same key values. With `delete`, the name of a column, rows in which that column is
true are deleted. Rows are applied in the order given.

Thread: the connection's. Raises `NotFound`, `Conflict` (a constraint), `AlreadyExists`, `Overloaded` (another connection is
writing), `InvalidInput`, and the errors of the page engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

import apsw

from quire.core.errors import AlreadyExists, Conflict, InvalidInput, NotFound, Overloaded, QuireError
from quire.durable.failpoints import hit
from quire.sqlite.connect import newest_commit
from quire.sqlite.where_clause import quoted

LOADS, SINKS = "quire_loads", "quire_sinks"
OWN_TABLES = (LOADS, SINKS, "quire_idempotency")
"""Tables that quire itself keeps in databases. No load writes to them."""

KEPT_MS = 7 * 24 * 3_600 * 1_000

_MAKE_LOADS = (
    f"CREATE TABLE IF NOT EXISTS {LOADS}(load INTEGER PRIMARY KEY, rows INTEGER NOT NULL, at_ms INTEGER NOT NULL)"
)
_MAKE_SINKS = (
    f"CREATE TABLE IF NOT EXISTS {SINKS}(query TEXT PRIMARY KEY, batch INTEGER NOT NULL, rows INTEGER NOT NULL, "
    "at_ms INTEGER NOT NULL) WITHOUT ROWID"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableWrite:
    """The target table and how to write to it."""

    table: str
    columns: Sequence[tuple[str, str]]
    """(name, declared type), in the order of the rows."""
    keys: Sequence[str] = ()
    """Columns that identify the row to replace or delete; without any, rows are inserted."""
    delete: str = ""
    """The column that marks rows to delete; it is not stored."""
    overwrite: bool = False
    """Delete the existing rows first."""
    create: bool = False
    """Create the table if it does not exist."""
    exists: Literal["", "error", "ignore"] = ""
    """What to do if the table exists: write to it, refuse, or write nothing."""


def load_rows(
    connection: apsw.Connection,
    load: int,
    write: TableWrite,
    rows: Iterable[Sequence[Any]],
    *,
    now_ms: int,
    query: str = "",
    batch: int = 0,
) -> int:
    """Write the rows of a load or of a query's batch, and return how many there were."""
    if write.table.lower() in OWN_TABLES:
        raise InvalidInput(
            "this table is reserved for quire's own records", hint="write to another table", table=write.table
        )
    with _explained(write), _transaction(connection):
        done = _recorded_batch(connection, query, batch) if query else _recorded_load(connection, load)
        if done is not None:
            return done
        counted = _Counted(rows)
        if _prepare(connection, write):
            if write.overwrite:
                connection.execute(f"DELETE FROM main.{quoted(write.table)}")
            _apply(connection, write, counted)
        hit("sqlite.load.written")
        if query:
            connection.execute(
                f"INSERT INTO {SINKS} VALUES (?, ?, ?, ?) ON CONFLICT(query) DO UPDATE SET "
                "batch = excluded.batch, rows = excluded.rows, at_ms = excluded.at_ms",
                (query, batch, counted.count, now_ms),
            )
        else:
            connection.execute(f"DELETE FROM {LOADS} WHERE at_ms < ?", (now_ms - KEPT_MS,))
            connection.execute(f"INSERT INTO {LOADS} VALUES (?, ?, ?)", (load, counted.count, now_ms))
        return counted.count


def _recorded_load(connection: apsw.Connection, load: int) -> int | None:
    """Return how many rows a load has written; `None` if it is not recorded."""
    connection.execute(_MAKE_LOADS)
    done = connection.execute(f"SELECT rows FROM {LOADS} WHERE load = ?", (load,)).get
    return None if done is None else int(done)


def _recorded_batch(connection: apsw.Connection, query: str, batch: int) -> int | None:
    """Return how many rows a query's batch has written, 0 for one before the last; `None` if it is not recorded."""
    connection.execute(_MAKE_SINKS)
    last = connection.execute(f"SELECT batch, rows FROM {SINKS} WHERE query = ?", (query,)).fetchone()
    if last is None or last[0] < batch:
        return None
    return int(last[1]) if last[0] == batch else 0


class _Counted:
    """Counts rows as they are consumed."""

    def __init__(self, rows: Iterable[Sequence[Any]]) -> None:
        self._rows = rows
        self.count = 0

    def __iter__(self) -> Iterator[Sequence[Any]]:
        for row in self._rows:
            self.count += 1
            yield row


def _prepare(connection: apsw.Connection, write: TableWrite) -> bool:
    """Check or create the table; return whether to write."""
    known = connection.execute("SELECT name FROM pragma_table_list(?) WHERE schema = 'main'", (write.table,)).get
    if known is not None:
        if write.exists == "error":
            hint = "write with mode append or overwrite, or to another table"
            raise AlreadyExists("the table already exists", hint=hint, table=write.table)
        if write.exists != "ignore":
            _need_columns(connection, write)
        return write.exists != "ignore"
    if not write.create:
        hint = "create it, or write with the option create"
        raise NotFound("the database has no such table", hint=hint, table=write.table)
    declared = [f"{quoted(name)} {kind}" for name, kind in write.columns if name != write.delete]
    if write.keys:
        declared.append(f"PRIMARY KEY({', '.join(map(quoted, write.keys))})")
    connection.execute(f"CREATE TABLE main.{quoted(write.table)}({', '.join(declared)})")
    return True


def _need_columns(connection: apsw.Connection, write: TableWrite) -> None:
    """Refuse columns that the table does not have."""
    known = [
        str(name) for (name,) in connection.execute("SELECT name FROM pragma_table_info(?, 'main')", (write.table,))
    ]
    lowered = {name.lower() for name in known}
    unknown = [name for name, _ in write.columns if name.lower() not in lowered and name != write.delete]
    if unknown:
        hint = f"columns: {', '.join(known)}"
        raise InvalidInput("the table has no such column", hint=hint, table=write.table, columns=unknown[:5])


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _apply(connection: apsw.Connection, write: TableWrite, rows: Iterable[Sequence[Any]]) -> None:
    names = [name for name, _ in write.columns]
    if not write.keys:
        connection.executemany(_insert(write.table, names), rows)
        return
    keys_of = [names.index(key) for key in write.keys]
    kept = [place for place, name in enumerate(names) if name != write.delete]
    upsert = _upsert(write.table, [names[place] for place in kept], write.keys)
    if not write.delete:
        connection.executemany(upsert, _with_keys(rows, keys_of, write.keys))
        return
    matches = " AND ".join(f"{quoted(key)} = ?" for key in write.keys)
    remove = f"DELETE FROM main.{quoted(write.table)} WHERE {matches}"
    flag = itemgetter(names.index(write.delete))
    # In the order of the rows: a key may be deleted and inserted again within one batch.
    for is_gone, run in groupby(_with_keys(rows, keys_of, write.keys), key=lambda row: bool(flag(row))):
        if is_gone:
            connection.executemany(remove, ([row[place] for place in keys_of] for row in run))
        else:
            connection.executemany(upsert, ([row[place] for place in kept] for row in run))


def _with_keys(rows: Iterable[Sequence[Any]], keys_of: Sequence[int], keys: Sequence[str]) -> Iterator[Sequence[Any]]:
    """Yield the rows, refusing one without a key: SQLite treats no two NULLs as equal, so each repeat would insert it again."""
    for row in rows:
        if any(row[place] is None for place in keys_of):
            raise InvalidInput("a row has no key", hint="filter out rows whose key is NULL", keys=list(keys))
        yield row


def _insert(table: str, names: Sequence[str]) -> str:
    places = ", ".join("?" * len(names))
    return f"INSERT INTO main.{quoted(table)}({', '.join(map(quoted, names))}) VALUES ({places})"


def _upsert(table: str, names: Sequence[str], keys: Sequence[str]) -> str:
    changes = ", ".join(f"{quoted(name)} = excluded.{quoted(name)}" for name in names if name not in keys)
    action = f"UPDATE SET {changes}" if changes else "NOTHING"
    return f"{_insert(table, names)} ON CONFLICT({', '.join(map(quoted, keys))}) DO {action}"


@contextmanager
def _transaction(connection: apsw.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
        # A repeat commits nothing. The call that it found recorded may still be waiting for the disk.
        if (commit := newest_commit(connection)) is not None:
            commit.result()
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextmanager
def _explained(write: TableWrite) -> Iterator[None]:
    """Translate SQLite's errors to quire's."""
    table = write.table
    try:
        yield
    except apsw.Error as error:
        if isinstance(error.__cause__, QuireError):
            raise error.__cause__ from None
        if isinstance(error, apsw.ConstraintError):
            raise Conflict(
                f"the table rejected a row: {error}",
                hint="fix the row and try again; nothing was inserted",
                table=table,
            ) from error
        if isinstance(error, apsw.BusyError | apsw.LockedError):
            raise Overloaded("another connection is writing to the database", hint="try again", table=table) from error
        hint = "fix the row and try again; nothing was inserted"
        if "ON CONFLICT clause" in str(error):
            hint = f"CREATE UNIQUE INDEX … ON {quoted(table)}({', '.join(map(quoted, write.keys))}) first"
        raise InvalidInput(f"SQLite rejected the statement: {error}", hint=hint, table=table) from error
