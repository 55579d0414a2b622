"""Rows read from a table equal SQLite's own, also if a column is computed, and if a text is not UTF-8."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import apsw
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidInput
from quire.sqlite.arrow_rows import ColumnQuery, table_batches
from quire.sqlite.column_types import sampled
from quire.sqlite.files import open_reader
from quire.sqlite.row_changes import ComparedVersion, RowChange, changed_rows, find_candidates
from quire.sqlite.row_reads import STEP_ROWS, InvalidText, naming, read_rows
from quire.sqlite.tables import find_table
from tests.sqlite.test_leaf_columns import Pages, pages_of

JSON_EXPRESSIONS = (
    "body -> '$.name'",
    "body ->> '$.name'",
    "json_quote(body)",
    "json_array(body, 1)",
    "json_object('a', body)",
    "json(json_quote(body))",
    "json_extract(body, '$')",
    "json_set('{}', '$.x', body)",
)


@pytest.fixture
def memory() -> Iterator[apsw.Connection]:
    with closing(apsw.Connection(":memory:")) as connection:
        yield connection


def table_of(pages: Pages, chosen: tuple[str, ...] = (), *, null_misfits: bool = False) -> list[tuple[Any, ...]]:
    """The rows of the table `t`, in the types that its columns get."""
    with closing(open_reader(pages)) as connection:
        table = find_table(connection, "t", "shop")
        columns = [
            column for column in sampled(connection, table, pages, chosen) if column.name in (chosen or column.name)
        ]
        query = ColumnQuery(table, pa.schema([(column.name, column.type) for column in columns]))
        batches = list(table_batches(connection, query, pages=pages, null_misfits=null_misfits))
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


@given(
    expressions=st.lists(st.sampled_from(JSON_EXPRESSIONS), min_size=1, max_size=3),
    storage=st.sampled_from(["VIRTUAL", "STORED"]),
    values=st.lists(
        st.recursive(st.text(max_size=4) | st.integers(-5, 5) | st.none(), st.lists, max_leaves=4), max_size=9
    ),
)
def test_computed_json_equals_what_sqlite_returns(expressions: list[str], storage: str, values: list[Any]) -> None:
    with closing(apsw.Connection(":memory:")) as connection:
        computed = ", ".join(f"c{n} TEXT AS ({text}) {storage}" for n, text in enumerate(expressions))
        connection.execute(f"CREATE TABLE t (body TEXT, {computed})")
        bodies = [(json.dumps({"name": value}),) for value in values]
        connection.executemany("INSERT INTO t VALUES (?)", bodies)
        assert table_of(pages_of(connection)) == connection.execute("SELECT * FROM t").fetchall()


def test_a_computed_column_with_quotes_keeps_them(memory: apsw.Connection) -> None:
    memory.execute("CREATE TABLE t (body TEXT, name TEXT AS (body -> '$.name'))")
    memory.execute("""INSERT INTO t VALUES ('{"name": "Ann"}')""")
    assert table_of(pages_of(memory)) == [('{"name": "Ann"}', '"Ann"')]


@pytest.mark.parametrize("encoding", ["UTF-8", "UTF-16le", "UTF-16be"])
def test_a_text_with_invalid_bytes_is_read_again_and_no_row_is_lost_or_doubled(
    memory: apsw.Connection, encoding: str
) -> None:
    memory.execute(f"PRAGMA encoding = '{encoding}'")
    memory.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, v)")
    rows = 3 * STEP_ROWS
    values: list[Any] = [None, 5, 2.5, "tëxt", b"\xff", "", b"", "a\0b"]
    memory.executemany("INSERT INTO t VALUES (?, ?)", [(n, values[n % 8]) for n in range(rows)])
    invalid = b"\xff" if encoding == "UTF-8" else "x\ud800".encode(encoding, "surrogatepass")
    at = STEP_ROWS + 100
    memory.execute(f"UPDATE t SET v = CAST(x'{invalid.hex()}' AS TEXT) WHERE id = ?", (at,))
    found = list(read_rows(memory, ["id", "v"], "FROM t WHERE id >= ? ORDER BY id", (1,)))
    assert found == [(n, invalid if n == at else values[n % 8]) for n in range(1, rows)]
    assert [type(value) for number, value in found if number == at] == [InvalidText]


def invalid_texts(memory: apsw.Connection) -> Pages:
    memory.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)")
    memory.executemany("INSERT INTO t VALUES (?, ?)", [(n, f"text {n}") for n in range(2_000)])
    memory.execute("UPDATE t SET v = CAST(x'ff41' AS TEXT) WHERE id = 1500")
    return pages_of(memory)


def test_a_text_that_is_not_utf8_is_a_misfit(memory: apsw.Connection) -> None:
    pages = invalid_texts(memory)
    with pytest.raises(InvalidInput, match="not valid in the encoding") as caught:
        table_of(pages)
    assert caught.value.where == {"column": "v", "value": r"b'\xffA'", "table": "t", "database": "shop"}
    assert "misfits=null" in caught.value.hint
    assert "binary" in caught.value.hint
    assert table_of(pages, null_misfits=True) == [(n, None if n == 1500 else f"text {n}") for n in range(2_000)]


def changes(before: Pages, after: Pages, table: str = "t") -> list[RowChange]:
    with closing(open_reader(before)) as one, closing(open_reader(after)) as other:
        versions = ComparedVersion(before, one, "shop"), ComparedVersion(after, other, "shop")
        everything = range(1, max(before.size_pages, after.size_pages) + 1)
        old, new, candidates = find_candidates(*versions, table, lambda: everything)
        assert new is not None
        return list(changed_rows(*versions, (old, new), [column.name for column in new.columns], candidates))


@pytest.mark.parametrize("form", ["(id INTEGER PRIMARY KEY, v TEXT)", "(id TEXT PRIMARY KEY, v TEXT) WITHOUT ROWID"])
def test_changes_of_texts_that_are_not_utf8_are_found(memory: apsw.Connection, form: str) -> None:
    memory.execute(f"CREATE TABLE t {form}")
    memory.execute("INSERT INTO t VALUES (1, CAST(x'ff' AS TEXT)), (2, CAST(x'fe' AS TEXT)), (3, x'ff')")
    before = pages_of(memory)
    memory.execute("UPDATE t SET v = CAST(x'fd' AS TEXT) WHERE id = 1")
    memory.execute("UPDATE t SET v = CAST(v AS TEXT) WHERE id = 3")
    found = changes(before, pages_of(memory))
    assert [(change.op, change.before and change.before[1]) for change in found] == [("update", b"\xff")] * 2
    assert [change.after and (type(change.after[1]), change.after[1]) for change in found] == [
        (InvalidText, b"\xfd"),
        (InvalidText, b"\xff"),
    ]


# ── features that only an application has ─────────────────────────────────────────────────────────────────────────────
def _twice(*values: Any) -> Any:
    return 2 * values[0]


@pytest.fixture
def application(memory: apsw.Connection) -> Pages:
    memory.create_scalar_function("twice", _twice, deterministic=True)
    memory.create_collation("mine", lambda one, other: (one > other) - (one < other))
    memory.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, n INTEGER, m AS (twice(n)), c TEXT COLLATE mine)")
    memory.execute("CREATE TABLE w (k TEXT COLLATE mine PRIMARY KEY, v) WITHOUT ROWID")
    memory.execute("CREATE VIEW seen AS SELECT twice(n) AS m FROM t")
    memory.execute("INSERT INTO t VALUES (1, 5, 'x'), (2, 6, 'y')")
    memory.execute("INSERT INTO w VALUES ('a', 1)")
    return pages_of(memory)


def test_a_function_of_the_application_is_named(application: Pages) -> None:
    with pytest.raises(InvalidInput, match=r"only its application registers: unknown function: twice\(\)") as caught:
        table_of(application)
    assert caught.value.where == {"table": "t", "database": "shop"}
    assert "`columns`" in caught.value.hint


def test_other_columns_of_such_a_table_are_read(application: Pages) -> None:
    assert table_of(application, ("id", "n", "c")) == [(1, 5, "x"), (2, 6, "y")]


@pytest.mark.parametrize("table", ["w", "seen"])
def test_a_table_that_cannot_be_read_at_all_is_named(application: Pages, table: str) -> None:
    refused = pytest.raises(InvalidInput, match="only its application registers")
    with closing(open_reader(application)) as connection, refused as caught:
        sampled(connection, find_table(connection, table, "shop"), application)
    assert caught.value.where == {"table": table, "database": "shop"}


def test_changes_of_such_a_table_name_it(application: Pages) -> None:
    with pytest.raises(InvalidInput, match="only its application registers"):
        changes(Pages(b"".join(application.images)), application, "w")


def test_columns_whose_names_differ_in_the_case_of_other_letters_are_not_confused(memory: apsw.Connection) -> None:
    memory.execute("CREATE TABLE t (É TEXT, é TEXT)")
    memory.execute("INSERT INTO t VALUES ('big', 'small')")
    assert table_of(pages_of(memory)) == [("big", "small")]


def test_other_errors_of_sqlite_stay_as_they_are(memory: apsw.Connection) -> None:
    with pytest.raises(apsw.SQLError, match="incomplete input"), naming("t", "shop"):
        list(read_rows(memory, ["1"], "FROM"))
