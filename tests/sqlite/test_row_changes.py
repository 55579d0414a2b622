"""Changed rows are found by the pages that differ: whatever SQL did in between, none is missed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.sqlite.row_changes import Version, changed_rowids
from quire.sqlite.trees import EVERYTHING, Unreadable, free_pages, joined, walk

PAGE = 512


@dataclass
class Image:
    """A database as SQLite's own code serialises it."""

    data: bytes
    page_size: int = PAGE
    lsn: int = 0
    reads: int = 0

    @property
    def size_pages(self) -> int:
        return len(self.data) // self.page_size

    def read_page(self, page: int, /) -> bytes:
        self.reads += 1
        return self.data[page * self.page_size : (page + 1) * self.page_size]

    def close(self) -> None: ...


def version(connection: apsw.Connection) -> Version:
    data = connection.serialize("main")
    copy = apsw.Connection(":memory:")
    copy.deserialize("main", data)
    return Version(Image(data), copy)


def changed_pages(before: Version, after: Version) -> set[int]:
    size = max(before.pages.size_pages, after.pages.size_pages)
    return {page for page in range(1, size + 1) if before.read_page(page) != after.read_page(page)}


def rows(of: Version, table: str, first: int, last: int) -> dict[int, tuple[Any, ...]]:
    sql = f"SELECT rowid, * FROM {table} WHERE rowid BETWEEN ? AND ?"
    return {rowid: tuple((type(v), v) for v in row) for rowid, *row in of.connection.execute(sql, (first, last))}


def root(of: Version, table: str) -> int:
    (row,) = of.connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (table,))
    return int(row[0])


def ranges(before: Version, after: Version, table: str = "t", *, has_rowids: bool = True) -> list[tuple[int, int]]:
    roots, changed = (root(before, table), root(after, table)), changed_pages(before, after)
    return changed_rowids(before, after, table, roots, changed, has_rowids=has_rowids)


def reads(of: Version) -> int:
    assert isinstance(of.pages, Image)
    return of.pages.reads


def differing(before: Version, after: Version, table: str = "t") -> set[int]:
    one, other = rows(before, table, *EVERYTHING), rows(after, table, *EVERYTHING)
    return {rowid for rowid in one.keys() | other.keys() if one.get(rowid) != other.get(rowid)}


def covered(spans: list[tuple[int, int]], rowids: set[int]) -> bool:
    return all(any(first <= rowid <= last for first, last in spans) for rowid in rowids)


@pytest.fixture
def connection() -> apsw.Connection:
    made = apsw.Connection(":memory:")
    made.execute(f"PRAGMA page_size = {PAGE}")
    made.execute("CREATE TABLE t(a, b); CREATE TABLE other(a, b); CREATE INDEX by_b ON t(b)")
    made.execute(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2000) INSERT INTO t SELECT i, i % 7 FROM n"
    )
    return made


def test_neighbouring_rows_cost_few_pages(connection: apsw.Connection) -> None:
    before = version(connection)
    connection.execute("UPDATE t SET a = a + 1 WHERE rowid BETWEEN 700 AND 720")
    after = version(connection)
    changed, roots = changed_pages(before, after), (root(before, "t"), root(after, "t"))
    start = reads(before) + reads(after)
    spans = changed_rowids(before, after, "t", roots, changed, has_rowids=True)
    assert covered(spans, set(range(700, 721)))
    assert sum(last - first + 1 for first, last in spans) < 150
    assert reads(before) + reads(after) - start < 0.1 * (before.pages.size_pages + after.pages.size_pages)


def test_another_table_changes_nothing_here(connection: apsw.Connection) -> None:
    before = version(connection)
    connection.execute("INSERT INTO other SELECT * FROM t")
    assert ranges(before, version(connection)) == []


def test_an_overflow_page_that_changes_alone_is_followed_to_its_row(connection: apsw.Connection) -> None:
    """An UPDATE of the tail of a long value may leave its leaf as it was."""
    connection.execute("INSERT INTO t(rowid, a) VALUES (5000, ?), (5001, ?)", ("x" * 5000, "y" * 5000))
    before = version(connection)
    connection.execute("UPDATE t SET a = ? WHERE rowid = 5000", ("x" * 4990 + "z" * 10,))
    after = version(connection)
    leaves = before.tree(root(before, "t")).leaves.keys()
    assert changed_pages(before, after).isdisjoint(leaves), "else this shows nothing"
    spans = ranges(before, after)
    assert covered(spans, {5000})
    assert spans != [EVERYTHING]


def test_after_vacuum_everything_is_compared(connection: apsw.Connection) -> None:
    connection.execute("DELETE FROM t WHERE rowid < 300")
    before = version(connection)
    connection.execute("VACUUM")
    assert ranges(before, version(connection)) == [EVERYTHING]


def test_a_table_without_rowids_is_all_or_nothing(connection: apsw.Connection) -> None:
    connection.execute("CREATE TABLE w(k PRIMARY KEY, v) WITHOUT ROWID; INSERT INTO w SELECT a, b FROM t")
    before = version(connection)
    connection.execute("UPDATE t SET a = 0 WHERE rowid = 1")
    after = version(connection)
    assert ranges(before, after, "w", has_rowids=False) == []
    connection.execute("UPDATE w SET v = 100 WHERE k = 1500")
    assert ranges(after, version(connection), "w", has_rowids=False) == [EVERYTHING]


def test_pages_that_lead_in_a_circle_are_left_to_sqlite() -> None:
    circle = bytes([5, 0, 0, 0, 0, 0, 0, 0]) + (2).to_bytes(4) + bytes(500)
    with pytest.raises(Unreadable):
        walk(lambda _: circle, 2, 100)
    with pytest.raises(Unreadable):
        walk(lambda _: b"", 2, 100)
    with pytest.raises(Unreadable):
        free_pages(lambda page: bytes(32) + (2).to_bytes(4) if page == 1 else (2).to_bytes(4) + bytes(500), 100)


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 9)).map(lambda pair: (pair[0], sum(pair)))))
def test_joined_ranges_hold_the_same_rowids(spans: list[tuple[int, int]]) -> None:
    def members(of: list[tuple[int, int]]) -> set[int]:
        return {rowid for first, last in of for rowid in range(first, last + 1)}

    merged = joined(spans)
    assert members(merged) == members(spans)
    assert all(one[1] + 1 < other[0] for one, other in pairwise(merged))


VALUE = st.one_of(
    st.none(),
    st.integers(-5, 5),
    st.floats(0, 2),
    st.text("aB", max_size=4),
    st.integers(0, 3000).map(lambda n: "x" * n),
)
ROWID = st.integers(1, 400)
STEP = st.one_of(
    st.tuples(st.just("INSERT OR REPLACE INTO {t}(rowid, a, b) VALUES (?, ?, ?)"), st.tuples(ROWID, VALUE, VALUE)),
    st.tuples(st.just("UPDATE {t} SET a = ? WHERE rowid = ?"), st.tuples(VALUE, ROWID)),
    st.tuples(st.just("UPDATE {t} SET a = substr(a, 1, length(a) - 1) || 'p' WHERE rowid = ?"), st.tuples(ROWID)),
    st.tuples(st.just("UPDATE {t} SET b = upper(b) WHERE rowid BETWEEN ? AND ? + 9"), st.tuples(ROWID, ROWID)),
    st.tuples(st.just("DELETE FROM {t} WHERE rowid BETWEEN ? AND ? + 5"), st.tuples(ROWID, ROWID)),
    st.tuples(st.just("CREATE INDEX IF NOT EXISTS extra ON {t}(a)"), st.just(())),
    st.tuples(st.just("DROP INDEX IF EXISTS extra"), st.just(())),
    st.tuples(st.just("VACUUM"), st.just(())),
    st.tuples(st.just("ALTER TABLE other ADD COLUMN c"), st.just(())),
)  # fmt: skip


@given(
    st.sampled_from((0, 1, 2)),
    st.lists(st.tuples(st.sampled_from(("t", "other")), STEP), max_size=25),
    st.lists(st.tuples(st.sampled_from(("t", "other")), STEP), max_size=12),
)
def test_no_row_that_differs_is_missed(
    auto_vacuum: int, first: list[tuple[str, Any]], second: list[tuple[str, Any]]
) -> None:
    connection = apsw.Connection(":memory:")
    connection.execute(f"PRAGMA page_size = {PAGE}; PRAGMA auto_vacuum = {auto_vacuum}")
    connection.execute("CREATE TABLE t(a, b); CREATE TABLE other(a, b); CREATE INDEX by_b ON t(b)")
    connection.execute(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300)"
        "INSERT INTO t SELECT CASE i % 9 WHEN 0 THEN printf('%.*c', i * 5, 'o') ELSE i END, i FROM n"
    )

    def run(steps: list[tuple[str, Any]]) -> Version:
        for table, (sql, values) in steps:
            try:
                connection.execute(sql.format(t=table), values)
            except apsw.SQLError:  # the column is there already
                continue
        return version(connection)

    before, after = run(first), run(second)
    for table in ("t", "other"):
        assert covered(ranges(before, after, table), differing(before, after, table))
