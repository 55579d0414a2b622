"""Columns assembled by SQLite equal its rows, whatever is in the table and however it is divided."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import apsw
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidInput
from quire.sqlite import arrow_rows
from quire.sqlite.arrow_rows import ColumnQuery, coalesced, row_batches, split_at_nuls, texts, windows
from quire.sqlite.tables import find_table
from quire.sqlite.trees import LEAST, MOST, Rowids

WANTED = pa.schema([("id", pa.int64()), ("n", pa.int64()), ("s", pa.string())])
MAKE = "CREATE TABLE t(id INTEGER PRIMARY KEY, n INTEGER, s TEXT, big BLOB)"

odd_texts = st.sampled_from(['"', '","', "\\", "a\0b", "\n", "", "ä€𝄞", "]", '["', "null", "\x7f", '\\"'])
plain_texts = st.text(st.characters(codec="utf-8"), max_size=6)
whole = st.integers(-(2**63), 2**63 - 1)
rowids = st.sets(st.one_of(st.integers(1, 60), st.integers(-5, 10**6), whole), max_size=40)


class TableReads:
    """A table, read both ways: as columns and as rows."""

    def __init__(self, connection: apsw.Connection, schema: pa.Schema = WANTED, *, null_misfits: bool = False) -> None:
        self.connection, self.schema, self.null_misfits = connection, schema, null_misfits
        self.by_rows: list[Rowids] = []
        """Windows that were read as rows."""

    def rows(self, span: Rowids) -> Iterator[pa.RecordBatch]:
        names = ", ".join(self.schema.names)
        cursor = self.connection.execute(f"SELECT {names} FROM t WHERE rowid BETWEEN ? AND ?", span)
        return row_batches(iter(cursor), self.schema, null_misfits=self.null_misfits)

    def again(self, span: Rowids) -> Iterator[pa.RecordBatch]:
        self.by_rows.append(span)
        return self.rows(span)

    def columns(self, span: Rowids = (LEAST, MOST)) -> list[dict[str, Any]]:
        query = ColumnQuery(find_table(self.connection, "t", "db"), self.schema)
        assert query.is_allowed
        return listed(windows(self.connection, query, span, self.again))


def listed(batches: Iterator[pa.RecordBatch]) -> list[dict[str, Any]]:
    return [row for batch in coalesced(batches) for row in batch.to_pylist()]


@given(
    ids=rowids,
    values=st.lists(
        st.tuples(
            st.one_of(st.none(), whole, st.just(2.5)), st.one_of(st.none(), plain_texts, odd_texts, st.just(b"\xff"))
        ),
        min_size=1,
        max_size=40,
    ),
    first=st.sampled_from([1, 7, 1_024]),
)
def test_decoded_columns_equal_sqlites_rows(ids: set[int], values: list[tuple[Any, Any]], first: int) -> None:
    """Gaps, NULLs, escapes and misfits: the same values, each row once."""
    with closing(apsw.Connection(":memory:")) as connection, pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_rows, "FIRST_ROWIDS", first)
        connection.execute(MAKE)
        rows = [(number, *values[i % len(values)]) for i, number in enumerate(sorted(ids))]
        connection.executemany("INSERT INTO t(id, n, s) VALUES (?, ?, ?)", rows)
        reads = TableReads(connection, null_misfits=True)
        assert reads.columns() == listed(reads.rows((LEAST, MOST)))
        middle = sorted(ids)[len(ids) // 2] if ids else 0
        for span in ((LEAST, middle), (middle, MOST), (middle, middle)):
            assert reads.columns(span) == listed(reads.rows(span))


def test_a_misfit_is_named_and_affects_only_its_window() -> None:
    with closing(apsw.Connection(":memory:")) as connection:
        connection.execute(MAKE)
        connection.executemany("INSERT INTO t(id, n, s) VALUES (?, ?, ?)", [(n, n, str(n)) for n in range(50_000)])
        connection.execute("UPDATE t SET n = 'many' WHERE id = 30000")
        with pytest.raises(InvalidInput, match="many"):
            TableReads(connection).columns()
        lenient = TableReads(connection, null_misfits=True)
        rows = lenient.columns()
        assert [row["n"] for row in rows] == [None if n == 30_000 else n for n in range(50_000)]
        ((first, last),) = lenient.by_rows
        assert first <= 30_000 <= last < first + 50_000 // 2


def test_large_values_are_read_in_small_windows() -> None:
    """The text of a window has a limit; a larger value, even of a column that is not requested, is read as a row."""
    with closing(apsw.Connection(":memory:")) as connection:
        connection.execute(MAKE)
        connection.executemany("INSERT INTO t(id, n, s) VALUES (?, ?, ?)", [(n * 1_000, n, "x") for n in range(3_000)])
        late = 3_000_000
        connection.executemany("INSERT INTO t(id, s) VALUES (?, ?)", [(late + n, "y" * 50_000) for n in range(600)])
        connection.execute("INSERT INTO t(id, s) VALUES (?, ?)", (late + 600, "z" * (9 << 20)))
        connection.execute("INSERT INTO t(id, big) VALUES (?, zeroblob(?))", (late + 601, 9 << 20))
        rows = TableReads(connection).columns()
        assert [len(row["s"] or "") for row in rows[3_000:]] == [50_000] * 600 + [9 << 20, 0]
        assert len(rows) == 3_602


def test_only_integers_and_texts_of_tables_with_rowids_are_read_as_columns() -> None:
    with closing(apsw.Connection(":memory:")) as connection:
        connection.execute(MAKE)
        connection.execute("CREATE TABLE w(a INT PRIMARY KEY) WITHOUT ROWID; CREATE VIEW v AS SELECT id FROM t")
        connection.execute("CREATE TABLE u(r REAL, x)")

        def allowed(table: str, name: str, kind: pa.DataType) -> bool:
            return ColumnQuery(find_table(connection, table, "db"), pa.schema([(name, kind)])).is_allowed

        assert allowed("t", "N", pa.int64())
        assert not allowed("t", "n", pa.string()), "numbers as text are reported by `sqlite_rows`"
        assert not allowed("t", "big", pa.binary())
        assert not allowed("w", "a", pa.int64())
        assert not allowed("v", "id", pa.int64())
        assert not allowed("u", "r", pa.float64()), "JSON has no exact doubles"
        assert not allowed("u", "x", pa.string()), "a column without a type may hold numbers"


def test_the_database_name_takes_precedence_over_a_column_of_that_name() -> None:
    with closing(apsw.Connection(":memory:")) as connection:
        connection.execute("CREATE TABLE t(_database TEXT, s TEXT); INSERT INTO t VALUES ('theirs', 'a'), (NULL, 'b')")
        schema = pa.schema([("_database", pa.string()), ("s", pa.string())])
        table = find_table(connection, "t", "db")
        reads = TableReads(connection, schema)
        many = ColumnQuery(table, schema, "shop")
        assert [row["_database"] for row in listed(windows(connection, many, (LEAST, MOST), reads.again))] == [
            "shop"
        ] * 2
        assert [row["_database"] for row in reads.columns()] == ["theirs", None]


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), min_size=1))
def test_joined_texts_are_separated_correctly(values: list[str]) -> None:
    assert texts(values).to_pylist() == values


def test_a_text_with_a_nul_is_not_truncated() -> None:
    with pytest.raises(ValueError, match="NUL"):
        texts(["a\0b", "c"])
    with pytest.raises(ValueError, match="NUL"):
        split_at_nuls(b"a\0b\0c", 2)
