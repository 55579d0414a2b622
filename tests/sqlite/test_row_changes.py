"""Changed rows are found by the pages that differ: whatever the SQL in between, none is missed."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidInput
from quire.sqlite.row_changes import Candidates, ComparedVersion, RowChange, changed_rows, find_candidates, same_values
from quire.sqlite.trees import EVERYTHING, Unreadable, free_pages, joined, walk

PAGE = 512


@dataclass
class Image:
    """A database as serialised by SQLite."""

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


def version(connection: apsw.Connection) -> ComparedVersion:
    data = connection.serialize("main")
    copy = apsw.Connection(":memory:")
    copy.deserialize("main", data)
    return ComparedVersion(Image(data), copy)


def changed_pages(before: ComparedVersion, after: ComparedVersion) -> set[int]:
    size = max(before.pages.size_pages, after.pages.size_pages)
    return {page for page in range(1, size + 1) if before.read_page(page) != after.read_page(page)}


def rows(of: ComparedVersion, table: str, first: int, last: int) -> dict[int, tuple[Any, ...]]:
    sql = f"SELECT rowid, * FROM {table} WHERE rowid BETWEEN ? AND ?"
    return {rowid: tuple((type(v), v) for v in row) for rowid, *row in of.connection.execute(sql, (first, last))}


def root(of: ComparedVersion, table: str) -> int:
    (row,) = of.connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (table,))
    return int(row[0])


def candidates(before: ComparedVersion, after: ComparedVersion, table: str = "t") -> Candidates:
    return find_candidates(before, after, table, lambda: changed_pages(before, after))[2]


def changes(before: ComparedVersion, after: ComparedVersion, table: str = "t") -> list[RowChange]:
    old, new, candidates_ = find_candidates(before, after, table, lambda: changed_pages(before, after))
    table_ = new or old
    columns = [column.name for column in table_.columns] if table_ is not None else []
    return list(changed_rows(before, after, (old, new), columns, candidates_))


def reads(of: ComparedVersion) -> int:
    assert isinstance(of.pages, Image)
    return of.pages.reads


def differing(before: ComparedVersion, after: ComparedVersion, table: str = "t") -> set[int]:
    rows_before, rows_after = rows(before, table, *EVERYTHING), rows(after, table, *EVERYTHING)
    return {
        rowid for rowid in rows_before.keys() | rows_after.keys() if rows_before.get(rowid) != rows_after.get(rowid)
    }


def covered(spans: Sequence[tuple[int, int]], rowids: set[int]) -> bool:
    return all(any(first <= rowid <= last for first, last in spans) for rowid in rowids)


@pytest.fixture
def connection() -> apsw.Connection:
    connection = apsw.Connection(":memory:")
    connection.execute(f"PRAGMA page_size = {PAGE}")
    connection.execute("CREATE TABLE t(a, b); CREATE TABLE other(a, b); CREATE INDEX by_b ON t(b)")
    connection.execute(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2000) INSERT INTO t SELECT i, i % 7 FROM n"
    )
    return connection


def test_changes_of_neighbouring_rows_read_few_pages(connection: apsw.Connection) -> None:
    before = version(connection)
    connection.execute("UPDATE t SET a = a + 1 WHERE rowid BETWEEN 700 AND 720")
    after = version(connection)
    changed_numbers = changed_pages(before, after)
    start = reads(before) + reads(after)
    spans = find_candidates(before, after, "t", lambda: changed_numbers)[2].ranges
    assert covered(spans, set(range(700, 721)))
    assert sum(last - first + 1 for first, last in spans) < 150
    assert reads(before) + reads(after) - start < 0.1 * (before.pages.size_pages + after.pages.size_pages)


def test_changes_of_another_table_are_not_reported(connection: apsw.Connection) -> None:
    before = version(connection)
    connection.execute("INSERT INTO other SELECT * FROM t")
    assert candidates(before, version(connection)).is_empty


def test_a_changed_overflow_page_is_traced_to_its_row(connection: apsw.Connection) -> None:
    """An UPDATE of the end of a long value may leave its leaf unchanged."""
    connection.execute("INSERT INTO t(rowid, a) VALUES (5000, ?), (5001, ?)", ("x" * 5000, "y" * 5000))
    before = version(connection)
    connection.execute("UPDATE t SET a = ? WHERE rowid = 5000", ("x" * 4990 + "z" * 10,))
    after = version(connection)
    leaves = before.tree(root(before, "t")).leaves.keys()
    assert changed_pages(before, after).isdisjoint(leaves), "otherwise the test proves nothing"
    result = candidates(before, after)
    assert covered(result.ranges, {5000})
    assert not result.full_compare_reason


def test_after_vacuum_everything_is_compared(connection: apsw.Connection) -> None:
    connection.execute("DELETE FROM t WHERE rowid < 300")
    before = version(connection)
    connection.execute("VACUUM")
    result = candidates(before, version(connection))
    assert (result.ranges, result.full_compare_reason) == ((EVERYTHING,), "rewritten")


def test_keys_of_a_table_without_rowids_come_from_the_records_that_differ(connection: apsw.Connection) -> None:
    connection.execute("CREATE TABLE w(v, k TEXT COLLATE NOCASE PRIMARY KEY, x) WITHOUT ROWID")
    connection.execute("INSERT INTO w SELECT a, 'key' || a, b FROM t")
    before = version(connection)
    connection.execute("UPDATE t SET a = 0 WHERE rowid = 1")
    after = version(connection)
    assert candidates(before, after, "w").is_empty
    connection.execute("UPDATE w SET v = 100 WHERE k = 'key1500'")
    connection.execute("UPDATE w SET k = 'KEY1' WHERE k = 'key1'")
    connection.execute("DELETE FROM w WHERE k = 'key77'; INSERT INTO w VALUES (1, 'new', 2)")
    last = version(connection)
    assert len(candidates(after, last, "w").keys) < 20
    assert not candidates(after, last, "w").full_compare_reason
    changed_keys = {(change.op, change.key[0]) for change in changes(after, last, "w")}
    assert changed_keys == {
        ("update", "key1500"),
        ("insert", "KEY1"),
        ("delete", "key1"),
        ("delete", "key77"),
        ("insert", "new"),
    }


def test_a_damaged_record_causes_a_full_comparison(connection: apsw.Connection) -> None:
    connection.execute("CREATE TABLE w(k TEXT PRIMARY KEY, v) WITHOUT ROWID; INSERT INTO w SELECT 'k' || a, b FROM t")
    before = version(connection)
    connection.execute("UPDATE w SET v = 9 WHERE k = 'k5'")
    after = version(connection)
    (leaf,) = changed_pages(before, after) & after.tree(root(after, "w")).leaves.keys()
    assert isinstance(after.pages, Image)
    at = (leaf - 1) * PAGE
    after.pages.data = after.pages.data[: at + 8] + b"\xff" * 4 + after.pages.data[at + 12 :]
    assert candidates(before, after, "w").full_compare_reason == "unreadable"


def test_rows_are_equal_only_if_they_are_stored_alike() -> None:
    assert same_values((1, None, "a", b"x", 0.0), (1, None, "a", b"x", 0.0))
    for first, second in ((1, 1.0), ("a", "A"), ("1", 1), (0.0, -0.0), (b"a", "a"), (None, 0)):
        assert not same_values((first,), (second,))


def test_a_view_has_no_row_changes(connection: apsw.Connection) -> None:
    connection.execute("CREATE VIEW v AS SELECT * FROM t")
    before = version(connection)
    with pytest.raises(InvalidInput, match="no rowid that can be read"):
        candidates(before, before, "v")


def test_cyclic_pages_are_left_to_sqlite() -> None:
    circle = bytes([5, 0, 0, 0, 0, 0, 0, 0]) + (2).to_bytes(4) + bytes(500)
    with pytest.raises(Unreadable):
        walk(lambda _: circle, 2, 100)
    with pytest.raises(Unreadable):
        walk(lambda _: b"", 2, 100)
    with pytest.raises(Unreadable):
        free_pages(lambda page: bytes(32) + (2).to_bytes(4) if page == 1 else (2).to_bytes(4) + bytes(500), 100)


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 9)).map(lambda pair: (pair[0], sum(pair)))))
def test_joined_ranges_have_the_same_rowids(spans: list[tuple[int, int]]) -> None:
    def members(of: list[tuple[int, int]]) -> set[int]:
        return {rowid for first, last in of for rowid in range(first, last + 1)}

    merged = joined(spans)
    assert members(merged) == members(spans)
    assert all(left[1] + 1 < right[0] for left, right in pairwise(merged))


# ── random SQL on random schemas ──────────────────────────────────────────────────────────────────────────────────────
VALUE = st.one_of(
    st.none(),
    st.integers(-5, 5),
    st.floats(0, 2),
    st.text("aB", max_size=4),
    st.text("b\0", max_size=3).map(str.encode),
    st.integers(0, 3000).map(lambda n: "x" * n),
)
KEY = st.integers(1, 120) | st.sampled_from(("a", "A", "b", 1.0, 2.5, b"a"))

SCHEMAS = (
    "CREATE TABLE {t}(k INTEGER PRIMARY KEY, a, b)",
    "CREATE TABLE {t}(a, k UNIQUE, b)",
    "CREATE TABLE {t}(a TEXT, b REAL, k INT, g AS (a || b), s AS (k + 1) STORED)",
    "CREATE TABLE {t}(a NUMERIC, k BLOB PRIMARY KEY, b TEXT) WITHOUT ROWID",
    "CREATE TABLE {t}(k TEXT COLLATE NOCASE, a, b INTEGER, c DEFAULT 7, PRIMARY KEY(k, b DESC)) WITHOUT ROWID",
    "CREATE TABLE {t}(b, k REAL, a, PRIMARY KEY(k, b)) WITHOUT ROWID",
)

Statement = tuple[str, tuple[Any, ...]]


def statement(sql: str, *values: st.SearchStrategy[Any]) -> st.SearchStrategy[Statement]:
    return st.tuples(st.just(sql), st.tuples(*values))


STEP = st.one_of(
    statement("INSERT OR REPLACE INTO {t}(k, a, b) VALUES (?, ?, ?)", KEY, VALUE, VALUE),
    statement("INSERT OR IGNORE INTO {t}(k, a, b) SELECT i, ?, i % 3 FROM numbers WHERE i > ?", VALUE, KEY),
    statement("UPDATE OR IGNORE {t} SET a = ? WHERE k = ?", VALUE, KEY),
    statement("UPDATE OR IGNORE {t} SET a = substr(a, 1, length(a) - 1) || 'p' WHERE k = ?", KEY),
    statement("UPDATE OR IGNORE {t} SET k = upper(k), b = upper(b) WHERE k BETWEEN ? AND ?", KEY, KEY),
    statement("DELETE FROM {t} WHERE k BETWEEN ? AND ?", KEY, KEY),
    statement("CREATE INDEX IF NOT EXISTS extra ON {t}(a)"),
    statement("DROP INDEX IF EXISTS extra"),
    statement("VACUUM"),
    statement("ALTER TABLE {t} ADD COLUMN late DEFAULT 'd'"),
    statement("ALTER TABLE {t} ADD COLUMN empty"),
    statement("ALTER TABLE {t} RENAME COLUMN a TO a2"),
    statement("DROP TABLE {t}"),
    *(statement(sql) for sql in SCHEMAS),
)


CHANGING = (
    statement("INSERT OR REPLACE INTO {t}(k, a, b) VALUES (?, ?, ?)", st.integers(1, 250), VALUE, st.integers(0, 9)),
    statement("UPDATE OR IGNORE {t} SET a = ? WHERE k = ?", VALUE, KEY),
    statement("DELETE FROM {t} WHERE k BETWEEN ? AND ?", KEY, KEY),
    statement("VACUUM"),
)


def run(connection: apsw.Connection, steps: list[tuple[str, Statement]]) -> ComparedVersion:
    for table, (sql, values) in steps:
        try:
            connection.execute(sql.format(t=table), values)
        except apsw.Error:  # missing, existing already, or a constraint
            continue
    return version(connection)


def stored_as(connection: apsw.Connection, table: str) -> list[tuple[Any, ...]]:
    """All rows, with the types of their values."""
    rows_found = connection.execute(f"SELECT * FROM {table}")
    return sorted((tuple((type(value).__name__, value) for value in row) for row in rows_found), key=repr)


def replayed(before: ComparedVersion, after: ComparedVersion, table: str) -> list[tuple[Any, ...]]:
    """The rows of another SQLite database with the old rows, after the changes are applied."""
    old, new, _ = find_candidates(before, after, table, lambda: changed_pages(before, after))
    assert new is not None
    names = [column.name for column in new.columns]
    mirror = apsw.Connection(":memory:")
    ((sql,),) = after.definition(new.name)
    mirror.execute(sql)
    written = [row[1] for row in mirror.execute(f"PRAGMA table_info({new.name})")]
    width = len(written) + bool(new.rowid)
    into = f"INSERT INTO {new.name}({', '.join(([new.rowid] if new.rowid else []) + written)})"
    into = f"{into} VALUES ({', '.join('?' * width)})"
    condition = " AND ".join(f"{name} = ?" for name in ((new.rowid,) if new.rowid else new.key))

    def insert(key: Any, row: dict[str, Any]) -> None:
        mirror.execute(into, ((key,) if new.rowid else ()) + tuple(row[name] for name in written))

    is_matched = old is not None and bool(old.rowid) == bool(new.rowid) and (old.rowid or old.key == new.key)
    if is_matched:
        for change in changed_rows(
            None, before, (None, old), names, Candidates((EVERYTHING,), full_compare_reason="all")
        ):
            assert change.after is not None
            insert(change.key, dict(zip(names, change.after)))
    row_changes = changes(before, after, table)
    for change in row_changes if is_matched else ():
        mirror.execute(f"DELETE FROM {new.name} WHERE {condition}", (change.key,) if new.rowid else change.key)
    for change in row_changes:
        if change.after is not None:
            insert(change.key, dict(zip(names, change.after)))
    return stored_as(mirror, new.name)


@given(
    st.sampled_from((0, 1, 2)),
    st.sampled_from(SCHEMAS),
    st.lists(st.tuples(st.sampled_from(("t", "other")), STEP), max_size=12),
    st.lists(st.tuples(st.sampled_from(("t", "t", "other")), STEP), max_size=6),
)
def test_changes_replayed_into_another_sqlite_give_the_new_version(
    auto_vacuum: int, schema: str, first: list[tuple[str, Statement]], second: list[tuple[str, Statement]]
) -> None:
    connection = apsw.Connection(":memory:")
    connection.execute(f"PRAGMA page_size = {PAGE}; PRAGMA auto_vacuum = {auto_vacuum}")
    connection.execute(schema.format(t="t"))
    connection.execute(
        "CREATE TABLE numbers AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200) SELECT i FROM n"
    )
    connection.execute(
        "INSERT INTO t(k, a, b) SELECT i, CASE i % 9 WHEN 0 THEN printf('%.*c', i * 5, 'o') ELSE i END, i FROM numbers"
    )
    before, after = run(connection, first), run(connection, second)
    for table in ("t", "other"):
        if after.table(table) is not None:
            assert replayed(before, after, table) == stored_as(after.connection, table)
        else:
            assert {change.op for change in changes(before, after, table)} <= {"delete"}
        assert not changes(after, after, table)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("sqldiff") is None, reason="needs sqldiff: apt-get install sqlite3-tools")
@given(
    st.sampled_from([schema for schema in SCHEMAS if "k UNIQUE" not in schema and " AS (" not in schema]),
    st.lists(st.tuples(st.just("t"), st.one_of(*CHANGING)), max_size=8),
)
def test_sqldiff_finds_the_same_rows(schema: str, steps: list[tuple[str, Statement]]) -> None:
    """sqldiff compares by primary key or rowid as well; values that are equal in SQLite, such as 1 and 1.0, are the
    same for it.
    """
    with tempfile.TemporaryDirectory() as directory:
        connection = apsw.Connection(":memory:")
        connection.execute(f"PRAGMA page_size = {PAGE}")
        connection.execute(schema.format(t="t"))
        connection.execute("CREATE TABLE numbers(i)")
        connection.executemany("INSERT INTO numbers VALUES (?)", [(n,) for n in range(1, 200)])
        connection.execute("INSERT INTO t(k, a, b) SELECT i, i, i FROM numbers")
        before, after = version(connection), run(connection, [(table, _rounded(step)) for table, step in steps])
        files = [Path(directory, name) for name in ("before.db", "after.db")]
        for file, version_ in zip(files, (before, after)):
            assert isinstance(version_.pages, Image)
            file.write_bytes(version_.pages.data)
        sqldiff = subprocess.run(
            ["sqldiff", "--primarykey", "--table", "t", *map(str, files)], capture_output=True, text=True, check=True
        )
        count = len(re.findall(r"^(?:INSERT|UPDATE|DELETE) ", sqldiff.stdout, re.MULTILINE))
        row_changes = changes(before, after)
        assert count <= len(row_changes)
        assert bool(count) == any(not _equal(change) for change in row_changes)
        patched = apsw.Connection(":memory:")
        patched.deserialize("main", files[0].read_bytes())
        patched.execute(sqldiff.stdout)
        assert replayed(before, after, "t") == stored_as(after.connection, "t")
        patched.execute("ATTACH ? AS later", (str(files[1]),))
        for one, other in (("main", "later"), ("later", "main")):  # 1 and 1.0 are the same for EXCEPT, too
            assert not patched.execute(f"SELECT * FROM {one}.t EXCEPT SELECT * FROM {other}.t").fetchall()
        assert len(stored_as(patched, "t")) == len(stored_as(after.connection, "t"))


def _rounded(step: Statement) -> Statement:
    """The statement with reals that sqldiff writes exactly: it prints 15 digits."""
    sql, values = step
    return sql, tuple(round(value, 3) if isinstance(value, float) else value for value in values)


def _equal(change: RowChange) -> bool:
    """Whether the row is unchanged according to SQLite."""
    return change.op == "update" and change.before == change.after
