"""Which rows of a table differ between two versions of its database, found by the pages that differ (L1).

Terms
  version    the pages of a database at one moment, and a connection that reads them
  changed    the pages whose bytes differ between the two versions, a page that only one of them has included

A row is in a leaf of its table's tree, and what does not fit there in a chain of overflow pages. So a row that differs is in a
leaf that differs, that is in one version's tree only, or that leads to overflow pages which differ. Interior pages say which
rowids those leaves hold; SQLite reads these ranges in both versions, and the rows are compared.

Rules
  1. What is given back covers every row that differs; rows that do not differ may be among them.
  2. A changed page that no tree, free list or pointer map of either version accounts for is an overflow page in both. An UPDATE
     can change it without touching a leaf: then the leaves whose rows lead to such pages are asked of SQLite (`dbstat`), which
     reads the whole table once.
  3. Where about half of the leaves differ a comparison of everything is as fast; after VACUUM, and if the table was altered,
     nothing else is possible.

Tables WITHOUT ROWID, and pages that are not what they should be: everything, or nothing if no page of the tree differs.

Threads: one at a time on a connection.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.core.errors import OutOfRange
from quire.sqlite.dbfile import PENDING_BYTE
from quire.sqlite.trees import (
    EVERYTHING,
    ReadPage,
    Rowids,
    Tree,
    Unreadable,
    by_number,
    free_pages,
    joined,
    pointer_map_pages,
    walk,
)

if TYPE_CHECKING:
    import apsw

    from quire.sqlite.files import PageReader

SHARE_MAX = 0.5
"""Of the leaves: if more of them differ, everything is compared."""

SCHEMA_ROOT = 1
"""Where the tree of sqlite_schema begins."""


@dataclass(slots=True)
class Version:
    """A database at one moment. Remembers the trees that it was asked for."""

    pages: PageReader
    connection: apsw.Connection
    _trees: dict[int, Tree] = field(default_factory=dict)

    @property
    def read_page(self) -> ReadPage:
        """By SQLite's numbers."""
        return by_number(self.pages)

    def tree(self, root: int) -> Tree:
        """The tree that begins at a page."""
        if root not in self._trees:
            self._trees[root] = walk(self.read_page, root, self.pages.size_pages)
        return self._trees[root]

    def accounted(self) -> set[int]:
        """All pages but those of overflow chains."""
        size = self.pages.size_pages
        pages = free_pages(self.read_page, size) | pointer_map_pages(self.read_page(1), size)
        pages.add(PENDING_BYTE // self.pages.page_size + 1)
        roots = [row[0] for row in self.connection.execute("SELECT rootpage FROM sqlite_schema WHERE rootpage > 0")]
        for root in (SCHEMA_ROOT, *roots):
            pages |= self.tree(root).pages()
        return pages

    def definition(self, table: str) -> list[tuple[str]]:
        """The SQL by which a table was made and changed."""
        return list(
            self.connection.execute("SELECT sql FROM sqlite_schema WHERE type = 'table' AND name = ?", (table,))
        )

    def owners(self, table: str, overflow: Collection[int]) -> set[int]:
        """The leaves of a table whose rows continue in one of these pages. Reads the whole table."""
        sql = "SELECT pageno, pagetype FROM dbstat WHERE schema = 'main' AND name = ?"
        leaf, owners = 0, set[int]()
        for page, kind in self.connection.execute(sql, (table,)):
            if kind != "overflow":
                leaf = page  # what follows until the next one are the overflow pages of its rows
            elif page in overflow:
                owners.add(leaf)
        return owners


def changed_rowids(
    before: Version, after: Version, table: str, roots: tuple[int, int], changed: Collection[int], *, has_rowids: bool
) -> list[Rowids]:
    """The rowids among which all rows are that differ: rising, without overlaps; `[EVERYTHING]` if the whole table has to be
    compared. `roots`: where its tree begins in each version; `changed`: the pages that differ, by SQLite's numbers."""
    if before.definition(table) != after.definition(table):
        return [EVERYTHING]  # a column that was added has a value in rows that nobody touched
    try:
        old, new = before.tree(roots[0]), after.tree(roots[1])
        own = old.pages() | new.pages()
        others = set(changed) - own
        overflow = others - before.accounted() - after.accounted() if others else set()
        if not has_rowids:
            is_same = not overflow and own.isdisjoint(changed) and old.leaves.keys() == new.leaves.keys()
            return [] if is_same else [EVERYTHING]
        same = {page for page in old.leaves.keys() & new.leaves.keys() if page not in changed}
        if overflow:
            same -= after.owners(table, overflow)
        differing = [old.leaves[page] for page in old.leaves.keys() - same]
        differing += [new.leaves[page] for page in new.leaves.keys() - same]
    except (Unreadable, OutOfRange):
        return [EVERYTHING]
    if len(differing) > SHARE_MAX * (len(old.leaves) + len(new.leaves)):
        return [EVERYTHING]
    return joined(differing)
