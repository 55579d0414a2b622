"""Finds which rows of a table differ between two versions of its database, by the pages that differ (L1).

Terms
  version      the pages of a database at one moment, and a connection that reads them
  changed      the pages whose bytes differ between the two versions, including pages that only one of them has
  candidates   where rows may differ: ranges of rowids, or keys; or everything, with the reason

A row is in a leaf of its table's tree; the part that does not fit there is in a chain of overflow pages. So a row that
differs is in a leaf that differs, that only one version's tree has, or that leads to overflow pages which differ. Interior
pages define which rowids those leaves hold; SQLite reads these ranges in both versions, and the rows are compared.

Rules
  1. Candidates cover every row that differs; rows that do not differ may be among them.
  2. A changed page that no tree, free list or pointer map of either version accounts for is an overflow page in both. An UPDATE
     can change it without touching a leaf. SQLite then finds the leaves whose rows lead to such pages (`dbstat`), which
     reads the whole table once.
  3. If about half of the leaves differ, comparing everything is as fast; after VACUUM, and if the table was altered,
     nothing else is possible.
  4. A table WITHOUT ROWID has rows in interior pages, too. The records of these and of differing leaves are compared as bytes;
     records that only one version has give keys, and SQLite looks up the rows. If overflow pages changed, all is compared.
  5. Rows are the same if SQLite stores the same values: 1 and 1.0, `abc` and `ABC` differ whatever the collation.
  6. Rows are matched by rowid, in tables WITHOUT ROWID by primary key. If a table has become one of the other kind, or has
     another key, all old rows are deleted and all new ones inserted.

Malformed pages are left to SQLite: everything is compared.

A text that is not UTF-8 is `InvalidText` (`row_reads.py`).

Threads: one at a time on a connection. Executor-safe. Raises `InvalidInput` for tables whose rows have no key, and for tables
that need functions or collations of their application.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.core.errors import InvalidInput, NotFound, OutOfRange
from quire.sqlite.dbfile import PENDING_BYTE
from quire.sqlite.index_cells import IndexFormat, key_of, payloads
from quire.sqlite.row_reads import naming, read_rows
from quire.sqlite.tables import SqliteTable, find_table
from quire.sqlite.trees import (
    EVERYTHING,
    BTree,
    ReadPage,
    Rowids,
    Unreadable,
    by_number,
    free_pages,
    joined,
    pointer_map_pages,
    walk,
)
from quire.sqlite.where_clause import quoted

if TYPE_CHECKING:
    import apsw

    from quire.sqlite.files import PageReader

SHARE_MAX = 0.5
"""Share of the leaves that differ above which everything is compared."""

SCHEMA_ROOT = 1
"""Root page of sqlite_schema."""

INSERT, UPDATE, DELETE = "insert", "update", "delete"

Row = tuple[Any, ...]
KeyedRow = tuple[Any, Row]

_END: KeyedRow = (None, ())


class RowChange(NamedTuple):
    """A row that differs."""

    op: str
    key: Any
    """The rowid, or the values of the primary key."""
    before: Row | None
    after: Row | None


@dataclass(frozen=True, slots=True)
class Candidates:
    """Where the rows of a table may differ."""

    ranges: tuple[Rowids, ...] = ()
    """For a table with rowids: ascending, without overlaps."""
    keys: tuple[Row, ...] = ()
    """For a table WITHOUT ROWID."""
    full_compare_reason: str = ""
    """Why everything is compared; empty if it is not."""

    @property
    def is_empty(self) -> bool:
        """Whether no row differs."""
        return not (self.ranges or self.keys or self.full_compare_reason)


@dataclass(slots=True)
class ComparedVersion:
    """A database at one moment. Caches the trees it has walked."""

    pages: PageReader
    connection: apsw.Connection
    database: str = ""
    """Its name, for errors."""
    _trees: dict[int, BTree] = field(default_factory=dict)

    @property
    def read_page(self) -> ReadPage:
        """Reads pages by SQLite's numbers."""
        return by_number(self.pages)

    def table(self, name: str) -> SqliteTable | None:
        """Return a table, or None if this version does not have it. Raises `InvalidInput` if its rows have no key."""
        try:
            table = find_table(self.connection, name, self.database)
        except NotFound:
            return None
        if not table.root or not (table.rowid or table.key):
            raise InvalidInput(
                "its rows cannot be matched: they have no rowid that can be read",
                hint="views and virtual tables have no row changes, nor does a table whose columns use all names of the rowid "
                "(rowid, _rowid_, oid)",
                table=name,
                database=self.database,
            )
        return table

    def tree(self, root: int) -> BTree:
        """Return the tree with this root page."""
        if root not in self._trees:
            self._trees[root] = walk(self.read_page, root, self.pages.size_pages)
        return self._trees[root]

    def accounted(self) -> set[int]:
        """Return all pages except those of overflow chains."""
        size = self.pages.size_pages
        pages = free_pages(self.read_page, size) | pointer_map_pages(self.read_page(1), size)
        pages.add(PENDING_BYTE // self.pages.page_size + 1)
        roots = [row[0] for row in self.connection.execute("SELECT rootpage FROM sqlite_schema WHERE rootpage > 0")]
        for root in (SCHEMA_ROOT, *roots):
            pages |= self.tree(root).pages()
        return pages

    def definition(self, table: str) -> list[tuple[str]]:
        """Return the SQL that defines a table."""
        return list(
            self.connection.execute("SELECT sql FROM sqlite_schema WHERE type = 'table' AND name = ?", (table,))
        )

    def owners(self, table: str, overflow: Collection[int]) -> set[int]:
        """Return the leaves of a table whose rows continue in one of these pages. Reads the whole table."""
        sql = "SELECT pageno, pagetype FROM dbstat WHERE schema = 'main' AND name = ?"
        leaf, owners = 0, set[int]()
        for page, kind in self.connection.execute(sql, (table,)):
            if kind != "overflow":
                leaf = page  # the overflow pages of its rows follow
            elif page in overflow:
                owners.add(leaf)
        return owners

    def records(self, pages: Iterable[int], form: IndexFormat) -> set[bytes]:
        """Return the rows in these pages of a table WITHOUT ROWID, as they are stored."""
        return set(payloads(self.read_page, pages, form))


# ── where rows may differ ─────────────────────────────────────────────────────────────────────────────────────────────
def find_candidates(
    before: ComparedVersion, after: ComparedVersion, name: str, changed: Callable[[], Collection[int]]
) -> tuple[SqliteTable | None, SqliteTable | None, Candidates]:
    """Return (the table in each version, where its rows may differ). `changed` returns SQLite's numbers of pages that
    differ."""
    old, new = before.table(name), after.table(name)
    if old is None and new is None:
        return None, None, Candidates()
    if old is None or new is None:
        return old, new, _everything("created" if old is None else "dropped", old or new)
    if before.pages.page_size != after.pages.page_size:
        return old, new, _everything("page size", new)
    # A column that was added has a value also in rows that were not written.
    if before.definition(old.name) != after.definition(new.name):
        return old, new, _everything("altered", new)
    try:
        return old, new, _in_trees(before, after, old, new, changed())
    except (Unreadable, OutOfRange):
        return old, new, _everything("unreadable", new)


def _everything(reason: str, table: SqliteTable | None) -> Candidates:
    return Candidates(ranges=(EVERYTHING,) if table is not None and table.rowid else (), full_compare_reason=reason)


def _in_trees(
    before: ComparedVersion, after: ComparedVersion, old: SqliteTable, new: SqliteTable, changed: Collection[int]
) -> Candidates:
    trees = before.tree(old.root), after.tree(new.root)
    own = trees[0].pages() | trees[1].pages()
    others = set(changed) - own
    # Walking every tree is needed only if a page outside this table has changed.
    overflow = others - before.accounted() - after.accounted() if others else set[int]()
    same = {page for page in trees[0].leaves.keys() & trees[1].leaves.keys() if page not in changed}
    if overflow and new.rowid:
        # The new version alone is asked: if a page has moved from one row's chain to another's, the leaf or an overflow
        # page before it in the old chain differs too.
        same -= after.owners(new.name, overflow)
    leaves = [tree.leaves.keys() - same for tree in trees]
    share = sum(map(len, leaves)) / max(sum(len(tree.leaves) for tree in trees), 1)
    if share > SHARE_MAX and (sum(map(len, leaves)) > 2 or not new.rowid):
        return _everything("rewritten", new)
    if new.rowid:
        return Candidates(
            ranges=tuple(joined([tree.leaves[page] for tree, some in zip(trees, leaves) for page in some]))
        )
    if overflow:
        return _everything("overflow", new)
    if own.isdisjoint(changed) and trees[0].leaves.keys() == trees[1].leaves.keys():
        return Candidates()
    versions = before, after
    forms = [IndexFormat.of(version.read_page(1), version.pages.size_pages) for version in versions]
    records = [
        version.records(some | tree.interior, form) for version, tree, some, form in zip(versions, trees, leaves, forms)
    ]
    return Candidates(keys=_keys(records, len(new.key), forms))


def _keys(records: list[set[bytes]], columns: int, forms: list[IndexFormat]) -> tuple[Row, ...]:
    """Return the keys of the records that only one version has, without duplicates; 1 and 1.0 are the same key."""
    keys: dict[Row, None] = {}
    for mine, others, form in zip(records, reversed(records), forms):
        for record in mine - others:
            keys.setdefault(key_of(record, columns, form.encoding))
    return tuple(keys)


# ── the rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def changed_rows(
    before: ComparedVersion | None,
    after: ComparedVersion | None,
    tables: tuple[SqliteTable | None, SqliteTable | None],
    columns: Sequence[str],
    candidates: Candidates,
) -> Iterator[RowChange]:
    """Yield the rows that differ in these columns. A column that a version does not have counts as NULL there.

    A version is `None` if it has no table: all rows are then inserted, or deleted.
    """
    old = _TableVersion(before.connection, tables[0], columns) if before is not None and tables[0] is not None else None
    new = _TableVersion(after.connection, tables[1], columns) if after is not None and tables[1] is not None else None
    if old is None or new is None or not old.is_matched_like(new):
        if old is not None:
            for key, row in old.rows(candidates.ranges):
                yield RowChange(DELETE, key, row, None)
        if new is not None:
            for key, row in new.rows(candidates.ranges):
                yield RowChange(INSERT, key, None, row)
    elif new.table.rowid:
        for rowids in candidates.ranges:
            yield from diff_sorted(old.by_rowid(rowids), new.by_rowid(rowids))
    elif candidates.full_compare_reason:
        yield from diff_by_key({_typed(key): (key, row) for key, row in old.by_key()}, new.by_key())
    else:
        keyed = {_typed(key): (key, row) for key, row in old.of_keys(candidates.keys)}
        yield from diff_by_key(keyed, new.of_keys(candidates.keys))


class _TableVersion:
    """The rows of a table in one version."""

    def __init__(self, connection: apsw.Connection, table: SqliteTable, columns: Sequence[str]) -> None:
        self.table = table
        self._connection = connection
        self._key = [table.rowid] if table.rowid else [quoted(name) for name in table.key]
        stored = [table.column(name) for name in columns]
        self._shown = self._key + [quoted(column.name) if column is not None else "NULL" for column in stored]

    def is_matched_like(self, other: _TableVersion) -> bool:
        """Return whether rows of this version can be matched with rows of the other."""
        if self.table.rowid or other.table.rowid:
            return bool(self.table.rowid and other.table.rowid)
        return [name.lower() for name in self.table.key] == [name.lower() for name in other.table.key]

    def rows(self, ranges: Iterable[Rowids]) -> Iterator[KeyedRow]:
        """Yield all rows; for a table with rowids, those of these ranges."""
        if not self.table.rowid:
            yield from self.by_key()
            return
        for rowids in ranges or (EVERYTHING,):
            yield from self.by_rowid(rowids)

    def by_rowid(self, rowids: Rowids) -> Iterator[KeyedRow]:
        """Yield the rows of a range, in order."""
        (name,) = self._key
        where = "" if rowids == EVERYTHING else f"WHERE {name} BETWEEN ? AND ? "
        for row in self._read(f"{where}ORDER BY {name}", rowids if where else ()):
            yield row[0], row[1:]

    def by_key(self) -> Iterator[KeyedRow]:
        """Yield all rows of a table WITHOUT ROWID."""
        yield from self._keyed("", ())

    def of_keys(self, keys: Iterable[Row]) -> Iterator[KeyedRow]:
        """Yield the rows with these keys, compared by the collations of their columns; each row once."""
        where = f"WHERE {' AND '.join(f'{name} = ?' for name in self._key)}"
        seen = set[Row]()
        for wanted in keys:
            for key, row in self._keyed(where, wanted):
                if (typed := _typed(key)) not in seen:
                    seen.add(typed)
                    yield key, row

    def _keyed(self, where: str, values: Row) -> Iterator[KeyedRow]:
        width = len(self._key)
        for row in self._read(where, values):
            yield row[:width], row[width:]

    def _read(self, rest: str, values: Row) -> Iterator[Row]:
        with naming(self.table.name, self.table.database):
            yield from read_rows(self._connection, self._shown, f"FROM main.{quoted(self.table.name)} {rest}", values)


def diff_sorted(before: Iterator[KeyedRow], after: Iterator[KeyedRow]) -> Iterator[RowChange]:
    """Yield the differences between two sequences of rows with ascending keys, walked in parallel; no row is kept.

    >>> changes = diff_sorted(iter([(1, ("a",)), (2, ("b",))]), iter([(2, ("c",)), (3, ("d",))]))
    >>> [(change.op, change.key) for change in changes]
    [('delete', 1), ('update', 2), ('insert', 3)]
    """
    old, new = next(before, _END), next(after, _END)
    while old is not _END or new is not _END:
        if new is _END or (old is not _END and old[0] < new[0]):
            yield RowChange(DELETE, old[0], old[1], None)
            old = next(before, _END)
        elif old is _END or new[0] < old[0]:
            yield RowChange(INSERT, new[0], None, new[1])
            new = next(after, _END)
        else:
            if not same_values(old[1], new[1]):
                yield RowChange(UPDATE, new[0], old[1], new[1])
            old, new = next(before, _END), next(after, _END)


def diff_by_key(before: dict[Row, KeyedRow], after: Iterator[KeyedRow]) -> Iterator[RowChange]:
    """Yield the differences between rows in any order, matched through the dictionary `before`, which is emptied."""
    for key, row in after:
        old = before.pop(_typed(key), None)
        if old is None:
            yield RowChange(INSERT, key, None, row)
        elif not same_values(old[1], row):
            yield RowChange(UPDATE, key, old[1], row)
    for key, row in before.values():
        yield RowChange(DELETE, key, row, None)


def same_values(one: Row, other: Row) -> bool:
    """Return whether type and value of every column are the same: 1 and 1.0 are not, nor are 0.0 and -0.0."""
    if one != other:
        return False
    return all(type(a) is type(b) and (bool(a) or type(a) is not float or str(a) == str(b)) for a, b in zip(one, other))


def _typed(key: Row) -> Row:
    """Return a key that distinguishes 1 from 1.0."""
    return tuple((type(value), value) for value in key)
