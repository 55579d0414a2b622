"""`Row`: a row whose values can also be read by column name, in any case, like sqlite3's.

A program may also use `sqlite3.Row` itself: its rows are then the standard library's.

Threads: any.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from typing import Any, Self, overload


class Row:
    """A row for `row_factory`. Equal to another row with equal names and values.

    >>> class Asked:
    ...     description = (("Id",), ("name",))
    >>> row = Row(Asked, (7, "tea"))
    >>> row["ID"], row[-1], row.keys(), dict(row)
    (7, 'tea', ['Id', 'name'], {'Id': 7, 'name': 'tea'})
    """

    __slots__ = ("_description", "_values")
    _description: tuple[tuple[Any, ...], ...]
    _values: tuple[Any, ...]

    def __new__(cls, cursor: Any, data: tuple[Any, ...], /) -> Self:
        """Create a row from a cursor that has run a statement and a tuple of its values."""
        if not hasattr(cursor, "description"):
            raise TypeError(f"Row() argument 1 must be a Cursor, not {type(cursor).__name__}")
        if not isinstance(data, tuple):
            raise TypeError(f"Row() argument 2 must be tuple, not {type(data).__name__}")
        row = super().__new__(cls)
        row._description, row._values = cursor.description or (), data
        return row

    def keys(self) -> list[str]:
        """Return the names of the columns."""
        return [column[0] for column in self._description]

    @overload
    def __getitem__(self, key: int | str) -> Any: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, key: int | str | slice) -> Any:
        if not isinstance(key, str):
            try:
                return self._values[key]
            except TypeError:
                raise IndexError("Index must be int or string") from None
            except IndexError as error:
                big = isinstance(key, int) and not -(1 << 63) <= key < 1 << 63
                raise IndexError("Index is too large" if big else str(error)) from None
        for number, column in enumerate(self._description):
            if column[0] == key or _same(column[0], key):
                return self._values[number]
        raise IndexError("No item with that key")

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __hash__(self) -> int:
        return hash(self._description) ^ hash(self._values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Row):
            return NotImplemented
        return self._description == other._description and self._values == other._values

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__qualname__} object at {id(self):#x}>"


def standard_row(cursor: Any, data: tuple[Any, ...]) -> sqlite3.Row:
    """Return the standard library's row of these values, for `row_factory = sqlite3.Row`.

    >>> class Asked:
    ...     description = (("Id",), ('a "b"',))
    >>> row = standard_row(Asked, (7, "tea"))
    >>> type(row), row["ID"], row.keys()
    (<class 'sqlite3.Row'>, 7, ['Id', 'a "b"'])
    """
    return sqlite3.Row(_standard_cursor(tuple(column[0] for column in cursor.description)), data)


@lru_cache(maxsize=256)
def _standard_cursor(names: tuple[str, ...]) -> sqlite3.Cursor:
    """Return a cursor whose columns have these names. `sqlite3.Row` takes names from nothing else."""
    columns = ", ".join('0 AS "{}"'.format(name.replace('"', '""')) for name in names)
    with closing(sqlite3.connect(":memory:")) as connection:
        return connection.execute(f"SELECT {columns}")


def _same(name: str, key: str) -> bool:
    """Compare names ignoring the case of ASCII letters only, as SQLite does."""
    return len(name) == len(key) and name.isascii() and key.isascii() and name.lower() == key.lower()


Sequence.register(Row)
