"""Reads rows through SQLite: texts that are not UTF-8 as their bytes, and errors that name the table and its database.

SQLite does not check texts: `CAST(x'ff' AS TEXT)` stores a byte that no UTF-8 text contains. apsw decodes every text and
raises `UnicodeDecodeError` for such a row. The statement is then run again from that row on, with texts fetched as BLOBs and
BLOBs as hexadecimal digits, so that the two can be distinguished. The versions that are read do not change, so the second run
finds the same rows in the same order.

Functions, collations and modules that an application has registered in its own connections do not exist here: statements that
need them are refused.

Executor-safe. Raises `InvalidInput`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import apsw

from quire.core.errors import InvalidInput

if TYPE_CHECKING:
    from quire.sqlite.connect import Connection

Row = tuple[Any, ...]

STEP_ROWS = 512
"""Rows that are fetched at once: few enough to stay in the processor's cache and to leave the garbage collector nothing to
scan. With 65,536 it takes five times as long."""

_MISSING = ("no such function", "unknown function", "no such collation", "no such module", "no query solution")
"""How SQLite's messages begin if a function, a collation or a module is not registered. The last one is its message for a
table WITHOUT ROWID whose key has an unknown collation."""


class InvalidText(bytes):
    """A text that is not valid in the encoding of its database, as it is stored."""


def read_rows(connection: Connection, shown: Sequence[str], rest: str, values: Sequence[Any] = ()) -> Iterator[Row]:
    """Return the rows of `SELECT {shown} {rest}`; `shown` are expressions without parameters.

    >>> connection = apsw.Connection(":memory:")
    >>> list(read_rows(connection, ["1", "CAST(x'ff41' AS TEXT)", "x'ff'", "'ok'"], ""))
    [(1, b'\\xffA', b'\\xff', 'ok')]
    """
    return chain.from_iterable(_steps(connection, shown, rest, values))


def _steps(connection: Connection, shown: Sequence[str], rest: str, values: Sequence[Any]) -> Iterator[list[Row]]:
    rows: Iterator[Row] = iter(connection.execute(f"SELECT {', '.join(shown)} {rest}", values))
    done = 0
    try:
        while step := list(islice(rows, STEP_ROWS)):
            yield step
            done += len(step)
        return
    except UnicodeDecodeError:
        pass  # the rows of this step are read again
    rows = islice(_undecoded_rows(connection, shown, rest, values), done, None)
    while step := list(islice(rows, STEP_ROWS)):
        yield step


def _undecoded_rows(connection: Connection, shown: Sequence[str], rest: str, values: Sequence[Any]) -> Iterator[Row]:
    """Yield the same rows, with texts decoded here."""
    encoding = str(connection.execute("PRAGMA encoding").fetchall()[0][0])
    swapped = (
        f"CASE typeof({value}) WHEN 'text' THEN CAST({value} AS BLOB) WHEN 'blob' THEN hex({value}) ELSE {value} END"
        for value in shown
    )
    for row in connection.execute(f"SELECT {', '.join(swapped)} {rest}", values):
        yield tuple(_unswapped(value, encoding) for value in row)


def _unswapped(value: Any, encoding: str) -> Any:
    if isinstance(value, str):
        return bytes.fromhex(value)
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode(encoding)
    except UnicodeDecodeError:
        return InvalidText(value)


@contextmanager
def naming(table: str, database: str) -> Iterator[None]:
    """Name the table and its database in errors of the block; explain those of features that only an application has."""
    try:
        yield
    except InvalidInput as error:
        error.where = {**error.where, "table": table, "database": database}
        raise
    except apsw.SQLError as error:
        if not str(error).startswith(_MISSING):
            raise
        raise InvalidInput(
            f"the table needs a function, collation or module that only its application registers: {error}",
            hint="leave out the column that needs it, with `columns`; if that is not possible, as in mirrors and for keys, let "
            "the application copy what it needs into another table",
            table=table,
            database=database,
        ) from error
