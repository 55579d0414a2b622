"""Which rows of a table differ between two versions of a SQLite database.

Rules
  1. Both versions are walked in the order of their rowids, side by side; nothing is kept.
  2. A table WITHOUT ROWID is matched by its primary key, through a dictionary of the earlier version's rows.
  3. A value equals another if type and value are the same: 1 and 1.0 are not.

Importable on executors. Raises `NotFound` for a table that the later version does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import LongType, StringType, StructField, StructType

from quire.core.errors import InvalidInput, NotFound
from quire.spark.sources.sqlite_tables import Table, find_table, quoted

if TYPE_CHECKING:
    from quire.sqlite.connect import Connection

ROW_FIELDS = [StructField("_change", StringType(), nullable=False), StructField("_rowid", LongType())]

Row = tuple[Any, ...]
Keyed = tuple[Any, Row]

_END: Keyed = (None, ())


def changed_rows(
    first: Connection, second: Connection, name: str, rowids: tuple[int, int], schema: StructType, database: str
) -> Iterator[Row]:
    """(change, rowid, values …) of the rows that differ."""
    columns = schema.names[len(ROW_FIELDS) :]
    later = find_table(second, name, database)
    try:
        earlier: Table | None = find_table(first, name, database)
    except NotFound:
        earlier = None
    if later.rowid and (earlier is None or earlier.rowid):
        before = iter(()) if earlier is None else _by_rowid(first, earlier, columns, rowids)
        yield from merged(before, _by_rowid(second, later, columns, rowids))
        return
    if not later.key or (earlier is not None and earlier.key != later.key):
        raise InvalidInput(
            "rows without rowid are compared by a primary key, and the two have none in common", table=name
        )
    before_rows = {} if earlier is None else dict(_by_key(first, earlier, columns))
    yield from looked_up(before_rows, _by_key(second, later, columns))


def merged(before: Iterator[Keyed], after: Iterator[Keyed]) -> Iterator[Row]:
    """Differences of a table with rowids: both versions are walked side by side, and nothing is kept (rule 1).

    >>> list(merged(iter([(1, ("a",)), (2, ("b",))]), iter([(2, ("c",)), (3, ("d",))])))
    [('delete', 1, 'a'), ('update_before', 2, 'b'), ('update_after', 2, 'c'), ('insert', 3, 'd')]
    """
    old, new = next(before, _END), next(after, _END)
    while old is not _END or new is not _END:
        if new is _END or (old is not _END and old[0] < new[0]):
            yield "delete", old[0], *old[1]
            old = next(before, _END)
        elif old is _END or new[0] < old[0]:
            yield "insert", new[0], *new[1]
            new = next(after, _END)
        else:
            if not _same(old[1], new[1]):
                yield "update_before", old[0], *old[1]
                yield "update_after", new[0], *new[1]
            old, new = next(before, _END), next(after, _END)


def looked_up(before: dict[Any, Row], after: Iterator[Keyed]) -> Iterator[Row]:
    """Differences of a table without rowids, matched by primary key through a dictionary (rule 2)."""
    for key, row in after:
        old = before.pop(key, None)
        if old is None:
            yield "insert", None, *row
        elif not _same(old, row):
            yield "update_before", None, *old
            yield "update_after", None, *row
    for old in before.values():
        yield "delete", None, *old


def _same(one: Row, other: Row) -> bool:
    """Whether type and value of every column are the same: 1 and 1.0 are not (rule 3)."""
    return one == other and all(type(a) is type(b) for a, b in zip(one, other))


def _by_rowid(connection: Connection, table: Table, columns: list[str], rowids: tuple[int, int]) -> Iterator[Keyed]:
    sql = (
        f"SELECT {table.rowid}, {_selected(table, columns)} FROM main.{quoted(table.name)} "
        f"WHERE {table.rowid} BETWEEN ? AND ? ORDER BY {table.rowid}"
    )
    for rowid, *row in connection.execute(sql, rowids):
        yield rowid, tuple(row)


def _by_key(connection: Connection, table: Table, columns: list[str]) -> Iterator[Keyed]:
    key = ", ".join(quoted(name) for name in table.key)
    for row in connection.execute(f"SELECT {key}, {_selected(table, columns)} FROM main.{quoted(table.name)}"):
        yield tuple((type(value), value) for value in row[: len(table.key)]), row[len(table.key) :]


def _selected(table: Table, columns: list[str]) -> str:
    """The columns, NULL for those that this version does not have."""
    found = [table.column(name) for name in columns]
    return ", ".join(quoted(column.name) if column is not None else "NULL" for column in found)
