"""A SQLite table as Spark sees it: its columns, their types, whether its rows have rowids, and ranges of those.

- The declared type decides: …INT… is `bigint`; …CHAR…, …CLOB…, …TEXT…, …DATE…, …TIME… and nothing at all are `string`; …BLOB…
  is `binary`; …REAL…, …FLOA…, …DOUB…, NUMERIC and DECIMAL are `double`; …BOOL… is `boolean`. Anything else is `string`.
  SQLite takes it as advice, and stores any value in any column. A schema that the user gives goes before.
- Columns that SQLite computes are columns like any other; hidden ones of virtual tables are not read.
- Ranges of rowids are cut at the upper pages of the table's own tree, so that gaps and dense stretches of rowids do no harm;
  at most `PAGES_MAX` pages are read for that. A page that is not what it should be makes one range of all: SQLite decides
  what a row is. Views, virtual tables and tables WITHOUT ROWID are read in one piece. The format of pages is SQLite's own
  (https://www.sqlite.org/fileformat2.html#b_tree_pages).

Importable on executors. Raises `NotFound` for a table that is not there, `InvalidInput` for a column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from struct import error as StructError  # noqa: N812 - it is a class
from struct import unpack_from
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from quire.core.errors import InvalidInput, NotFound, OutOfRange

if TYPE_CHECKING:
    from quire.sqlite.connect import Connection

DATABASE = "_database"
"""The column that says which database a row is of, when there are several."""

ROWID_NAMES = ("rowid", "_rowid_", "oid")

_HIDDEN = 1

LEAST, MOST = -(2**63), 2**63 - 1
"""Of rowids."""

Rowids = tuple[int, int]
"""(first, last), both inclusive."""
EVERYTHING: Rowids = (LEAST, MOST)

PAGES_MAX = 600
INTERIOR = 5
_FIRST_HEADER = 100

Node = tuple[int, int | None]
"""A page of a table's tree, and the largest rowid below it; `None` for the last."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column, and what was declared."""

    name: str
    declared: str


@dataclass(frozen=True, slots=True)
class SqliteTable:
    """A table of a database."""

    name: str
    columns: tuple[Column, ...]
    root: int
    """SQLite's page where its tree begins; 0 if it has none."""
    rowid: str
    """By what name rows are counted; empty if they are not."""
    key: tuple[str, ...]
    """The columns of its primary key."""

    def column(self, name: str) -> Column | None:
        """A column by name, as SQLite compares names."""
        return next((column for column in self.columns if column.name.lower() == name.lower()), None)


def quoted(name: str) -> str:
    """A name as SQL has it.

    >>> quoted('odd"name')
    '"odd""name"'
    """
    return '"' + name.replace('"', '""') + '"'


def find_table(connection: Connection, name: str, database: str) -> SqliteTable:
    """A table of a database, by the name SQLite knows it by."""
    rows = _all(connection, "SELECT schema, name, type, wr FROM pragma_table_list(?)", name)
    listed = next((row for row in rows if row[0] == "main"), None)
    if listed is None:
        known = [row[0] for row in _all(connection, "SELECT name FROM sqlite_schema WHERE type = 'table' LIMIT 10")]
        raise NotFound(
            "the database has no such table", hint=f"it has: {', '.join(known)}", table=name, database=database
        )
    _, name, kind, without_rowid = listed
    info = _all(connection, "SELECT name, type, pk, hidden FROM pragma_table_xinfo(?)", name)
    columns = tuple(Column(column, declared or "") for column, declared, _, hidden in info if hidden != _HIDDEN)
    taken = {column.name.lower() for column in columns}
    free = next((alias for alias in ROWID_NAMES if alias not in taken), "")
    has_rowid = kind == "table" and not without_rowid
    root = _all(connection, "SELECT rootpage FROM sqlite_schema WHERE type = 'table' AND name = ?", name)
    key = tuple(row[0] for row in sorted((row for row in info if row[2]), key=lambda row: row[2]))
    return SqliteTable(
        name=name,
        columns=columns,
        root=(root[0][0] or 0) if root else 0,
        rowid=free if has_rowid else "",
        key=key,
    )


def spark_type(declared: str) -> DataType:
    """Spark's type of a declared SQLite type; `string` for what is unknown.

    >>> [spark_type(name).simpleString() for name in ("VARCHAR(20)", "integer", "Decimal(10,2)", "", "boolean", "blob")]
    ['string', 'bigint', 'double', 'string', 'boolean', 'binary']
    """
    text = declared.upper()
    if "INT" in text:
        return LongType()
    if any(word in text for word in ("CHAR", "CLOB", "TEXT", "DATE", "TIME")):
        return StringType()
    if "BLOB" in text:
        return BinaryType()
    if any(word in text for word in ("REAL", "FLOA", "DOUB", "NUMERIC", "DECIMAL")):
        return DoubleType()
    return BooleanType() if "BOOL" in text else StringType()


def affinity(declared: str) -> str:
    """What SQLite itself makes of a declared type (https://www.sqlite.org/datatype3.html#determination_of_column_affinity).

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


def table_schema(table: SqliteTable, columns: list[str], *, with_database: bool) -> StructType:
    """The schema of these columns, or of all."""
    unknown = [name for name in columns if table.column(name) is None and name != DATABASE]
    if unknown:
        hint = f"columns: {', '.join(column.name for column in table.columns)}"
        raise InvalidInput("the table has no such column", hint=hint, table=table.name, columns=unknown[:5])
    chosen = [column for name in columns if (column := table.column(name))] if columns else list(table.columns)
    fields = [StructField(column.name, spark_type(column.declared)) for column in chosen]
    return StructType([StructField(DATABASE, StringType()), *fields] if with_database else fields)


def _all(connection: Connection, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    return list(connection.execute(sql, values))


# ── ranges of rowids ──────────────────────────────────────────────────────────────────────────────────────────────────
def rowid_ranges(read_page: Callable[[int], bytes], root: int, wanted: int) -> list[Rowids]:
    """Ranges of rowids that together are all of them, and take about the same time to read."""
    cuts = _spread(_cuts(read_page, root, wanted), wanted)
    firsts = [LEAST, *(cut + 1 for cut in cuts)]
    return list(zip(firsts, [*cuts, MOST]))


def _cuts(read_page: Callable[[int], bytes], root: int, wanted: int) -> list[int]:
    """The rowids that separate the subtrees of the highest level that has enough of them."""
    level: list[Node] = [(root, None)]
    reads = 0
    while reads + len(level) <= PAGES_MAX:
        below: list[Node] = []
        for page, most in level:
            children = _children(read_page, page, most)
            if children is None:
                return _separators(level)
            below += children
        reads += len(level)
        level = below
        if len(level) >= 4 * wanted:
            break
    return _separators(level)


def _separators(level: list[Node]) -> list[int]:
    return [most for _, most in level[:-1] if most is not None and most < MOST]


def _children(read_page: Callable[[int], bytes], page: int, most: int | None) -> list[Node] | None:
    """What an interior page leads to; `None` if it is none."""
    try:
        image = read_page(page - 1)
        at = _FIRST_HEADER if page == 1 else 0
        kind, _, cells = unpack_from(">BHH", image, at)
        if kind != INTERIOR:
            return None
        children: list[Node] = []
        for number in range(cells):
            (cell,) = unpack_from(">H", image, at + 12 + 2 * number)
            (child,) = unpack_from(">I", image, cell)
            children.append((child, _varint(image, cell + 4)))
        (last,) = unpack_from(">I", image, at + 8)
    except (StructError, IndexError, OutOfRange):
        return None
    return [*children, (last, most)]


def _varint(image: bytes, at: int) -> int:
    """A number of SQLite's: seven bits a byte, at most nine bytes, signed.

    >>> _varint(bytes([0x81, 0x00]), 0)
    128
    """
    value = 0
    for number in range(8):
        byte = image[at + number]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value
    value = value << 8 | image[at + 8]
    return value - (1 << 64) if value >= 1 << 63 else value


def _spread(cuts: list[int], wanted: int) -> list[int]:
    """At most `wanted - 1` of the cuts, evenly.

    >>> _spread([10, 20, 30, 40, 50, 60, 70], 4)
    [20, 40, 60]
    """
    rising = [cut for place, cut in enumerate(cuts) if place == 0 or cut > cuts[place - 1]]
    if len(rising) < wanted:
        return rising
    return [rising[(len(rising) + 1) * number // wanted - 1] for number in range(1, wanted)]
