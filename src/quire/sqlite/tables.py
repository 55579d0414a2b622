"""A SQLite table as other programs see it: its columns, their declared types, and whether its rows have rowids.

- A declared type is only advice about the values of a column: `column_types.py` also samples the values.
- Columns that SQLite computes are columns like any other; hidden columns of virtual tables are not read.
- Ranges of rowids are cut at the upper pages of the table's own tree (`sqlite/trees.py`), so gaps and dense stretches of
  rowids do no harm. Views, virtual tables and tables WITHOUT ROWID are read in one piece.

Importable on executors. Raises `NotFound` for a table that does not exist, `InvalidInput` for a view that cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import apsw
import pyarrow as pa

from quire.core.errors import InvalidInput, NotFound
from quire.sqlite.files import open_reader
from quire.sqlite.row_reads import naming
from quire.sqlite.where_clause import quoted

if TYPE_CHECKING:
    from quire.sqlite.connect import Connection

DATABASE = "_database"
"""The column that names the database of a row when there are several databases."""

ROWID_NAMES = ("rowid", "_rowid_", "oid")

ROWID = -1
"""The place of a column that is an alias of the rowid."""

_REMOVED = ("no such table", "no such column")
"""How SQLite's messages begin if a view refers to what its database does not have."""

_HIDDEN, _VIRTUAL = 1, 2
"""Values of `hidden` in `pragma_table_xinfo`: a hidden column of a virtual table; a column computed when it is read."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column and its declaration."""

    name: str
    declared: str
    place: int | None
    """Position of its value in a record; `ROWID` if it is the rowid, `None` if it is not stored in records."""
    default: str | None
    """Its value in records that were written before the column was added; `None` for NULL."""


@dataclass(frozen=True, slots=True)
class SqliteTable:
    """A table of a database."""

    name: str
    columns: tuple[Column, ...]
    root: int
    """SQLite's number of the root page of its tree; 0 if it has none."""
    rowid: str
    """A name by which the rowid can be used in SQL; empty if rows have none."""
    key: tuple[str, ...]
    """The columns of its primary key, if it is WITHOUT ROWID. That of another table may have rows with the same NULLs."""
    database: str
    """The name of its database, for errors."""

    def column(self, name: str) -> Column | None:
        """Return a column by name, without regard to case. The exact name goes first: for SQLite `É` and `é` differ."""
        named = [column for column in self.columns if column.name.lower() == name.lower()]
        return next((column for column in named if column.name == name), named[0] if named else None)


def find_table(connection: Connection, name: str, database: str) -> SqliteTable:
    """Return a table of a database. Its name is matched as SQLite does."""
    with naming(name, database):
        try:
            return _find_table(connection, name, database)
        except apsw.SQLError as error:
            if not str(error).startswith(_REMOVED):
                raise
            raise InvalidInput(f"the view cannot be read: {error}", hint="correct the view, or drop it") from error


def _find_table(connection: Connection, name: str, database: str) -> SqliteTable:
    rows = _all(connection, "SELECT schema, name, type, wr FROM pragma_table_list(?)", name)
    listed = next((row for row in rows if row[0] == "main"), None)
    if listed is None:
        table_names = [
            row[0] for row in _all(connection, "SELECT name FROM sqlite_schema WHERE type = 'table' LIMIT 10")
        ]
        raise NotFound(
            "the database has no such table", hint=f"it has: {', '.join(table_names)}", table=name, database=database
        )
    _, name, kind, without_rowid = listed
    info = _all(connection, "SELECT name, type, pk, hidden, dflt_value FROM pragma_table_xinfo(?)", name)
    alias = _rowid_alias(connection, name, info) if not without_rowid else ""
    columns = tuple(_columns(info, alias))
    taken = {column.name.lower() for column in columns}
    # If all names of the rowid are those of columns, it is reached by a column that is the rowid, or not at all.
    free = next((rowid for rowid in ROWID_NAMES if rowid not in taken), quoted(alias) if alias else "")
    has_rowid = kind == "table" and not without_rowid
    root = _all(connection, "SELECT rootpage FROM sqlite_schema WHERE type = 'table' AND name = ?", name)
    key = tuple(row[0] for row in sorted((row for row in info if row[2]), key=lambda row: row[2]))
    return SqliteTable(
        name=name,
        columns=columns,
        root=(root[0][0] or 0) if root else 0,
        rowid=free if has_rowid else "",
        key=key if without_rowid else (),
        database=database,
    )


def _columns(info: list[tuple[Any, ...]], alias: str) -> Iterator[Column]:
    stored = 0
    for name, declared, _, hidden, default in info:
        if hidden == _HIDDEN:
            continue
        place = None if hidden == _VIRTUAL else ROWID if name == alias else stored
        stored += hidden != _VIRTUAL  # the alias of the rowid is stored too, as NULL
        yield Column(name, declared or "", place, None if (default or "").upper() == "NULL" else default)


def _rowid_alias(connection: Connection, table: str, info: list[tuple[Any, ...]]) -> str:
    """Return the column that is the rowid; empty if there is none."""
    key = [(name, declared) for name, declared, pk, *_ in info if pk]
    if len(key) != 1 or (key[0][1] or "").upper() != "INTEGER":
        return ""
    # `INTEGER PRIMARY KEY DESC` is no alias of the rowid: it is an ordinary column with an index.
    has_index = _all(connection, "SELECT 1 FROM pragma_index_list(?) WHERE origin = 'pk'", table)
    return "" if has_index else str(key[0][0])


def declared_type(declared: str) -> pa.DataType | None:
    """Return the Arrow type of a declared SQLite type; `None` if it is not known.

    >>> [str(declared_type(name)) for name in ("VARCHAR(20)", "integer", "Decimal(10,2)", "", "boolean", "blob")]
    ['string', 'int64', 'double', 'None', 'bool', 'binary']
    """
    text = declared.upper()
    if "INT" in text:
        return pa.int64()
    if any(word in text for word in ("CHAR", "CLOB", "TEXT", "DATE", "TIME")):
        return pa.string()
    if "BLOB" in text:
        return pa.binary()
    if any(word in text for word in ("REAL", "FLOA", "DOUB", "NUMERIC", "DECIMAL")):
        return pa.float64()
    return pa.bool_() if "BOOL" in text else None


def affinity(declared: str) -> str:
    """Return the affinity SQLite gives a declared type
    (https://www.sqlite.org/datatype3.html#determination_of_column_affinity).

    >>> [affinity(name) for name in ("VARCHAR(20)", "integer", "Decimal(10,2)", "", "DATE", "double")]
    ['text', 'integer', 'numeric', 'blob', 'numeric', 'real']
    """
    text = declared.upper()
    if "INT" in text:
        return "integer"
    if any(word in text for word in ("CHAR", "CLOB", "TEXT")):
        return "text"
    if "BLOB" in text or not text:
        return "blob"
    return "real" if any(word in text for word in ("REAL", "FLOA", "DOUB")) else "numeric"


@contextmanager
def connected(source: Any) -> Iterator[Connection]:
    """Yield a SQLite connection over a version."""
    with closing(open_reader(source)) as connection:
        yield connection


def _all(connection: Connection, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    return list(connection.execute(sql, values))
