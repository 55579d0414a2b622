"""Differences between two versions of a database, table by table, for display: counts of changed rows, and the first rows.

`row_changes.py` finds the rows that differ. Threads: one at a time on a connection.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import apsw

from quire.core.errors import InvalidInput
from quire.sqlite.row_changes import DELETE, INSERT, UPDATE, ComparedVersion, changed_rows, find_candidates


@dataclass(frozen=True, slots=True)
class ChangedRow:
    """A row that differs: `before` is None for an inserted row, `after` is None for a deleted one."""

    key: Any
    """The rowid, or the values of the primary key."""
    before: dict[str, Any] | None
    after: dict[str, Any] | None


@dataclass(slots=True)
class TableDiff:
    """The differences of one table."""

    table: str
    only: str = ""
    """The only version that has the table, "before" or "after"; empty if both have it."""
    altered: bool = False
    """Whether its definition differs."""
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    rows: list[ChangedRow] = field(default_factory=list)
    """The first rows that differ."""
    error: str = ""
    """Why its rows were not compared; empty if they were."""

    @property
    def changes(self) -> int:
        return self.inserted + self.updated + self.deleted


def table_names(connection: apsw.Connection) -> set[str]:
    """Return the tables that users have created: no views, and no tables that belong to SQLite or to a virtual table."""
    rows = connection.execute("SELECT name FROM pragma_table_list WHERE schema = 'main' AND type = 'table'")
    return {str(name) for (name,) in rows if not str(name).startswith("sqlite_")}


def diff_tables(
    before: ComparedVersion,
    after: ComparedVersion,
    names: Collection[str],
    changed: Callable[[], Collection[int]],
    *,
    limit: int | None,
) -> Iterator[TableDiff]:
    """Yield the differences of these tables, one table after another, omitting tables without any. `changed` returns the
    pages that may differ, with SQLite's numbers; `limit` is how many rows of each table are kept."""
    for name in sorted(names, key=str.lower):
        diff = TableDiff(name)
        try:
            _compare(diff, before, after, changed, limit)
        except InvalidInput as error:
            diff.error = error.what
        if diff.changes or diff.only or diff.altered or diff.error:
            yield diff


def _compare(
    diff: TableDiff,
    before: ComparedVersion,
    after: ComparedVersion,
    changed: Callable[[], Collection[int]],
    limit: int | None,
) -> None:
    old, new, candidates = find_candidates(before, after, diff.table, changed)
    if old is None or new is None:
        diff.only = "after" if old is None else "before"
    diff.altered = candidates.full_compare_reason == "altered"
    names: dict[str, str] = {}  # columns of both versions, without duplicates, those of the later version first
    for column in (column for table in (new, old) if table is not None for column in table.columns):
        names.setdefault(column.name.lower(), column.name)
    columns = list(names.values())
    for change in changed_rows(before, after, (old, new), columns, candidates):
        if limit is None or len(diff.rows) < limit:
            rows = (None if row is None else dict(zip(columns, row)) for row in (change.before, change.after))
            diff.rows.append(ChangedRow(change.key, *rows))
        diff.inserted += change.op == INSERT
        diff.updated += change.op == UPDATE
        diff.deleted += change.op == DELETE
