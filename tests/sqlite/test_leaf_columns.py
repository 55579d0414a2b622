"""Columns decoded from leaves equal SQLite's rows, whatever is in the table, and in damaged pages."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire.core.errors import InvalidInput, OutOfRange
from quire.sqlite import c_extensions, leaf_columns
from quire.sqlite.arrow_rows import ColumnQuery, coalesced, row_batches, table_batches
from quire.sqlite.column_types import sampled
from quire.sqlite.leaf_columns import LeafDecoder, leaf_batches
from quire.sqlite.leaf_runs import leaves_within
from quire.sqlite.tables import connected, find_table
from quire.sqlite.trees import EVERYTHING, LEAST, MOST, Rowids, Unreadable, by_number

SOURCE = Path(leaf_columns.__file__).with_suffix(".c")


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The decoder, built from its current source."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    target = tmp_path_factory.mktemp("leaves") / "libquireleaves.so"
    flags = os.environ.get("QUIRE_TEST_CFLAGS", "-O2").split()
    subprocess.run(["cc", *flags, "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-o", target, SOURCE], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c_extensions, "LEAVES_LIBRARY", target)
        patch.delenv(c_extensions.SWITCH, raising=False)
        yield


class Pages:
    """The pages of a database in memory."""

    lsn = 1

    def __init__(self, data: bytes) -> None:
        size = int.from_bytes(data[16:18])
        self.page_size = 65_536 if size == 1 else size
        self.images = [data[at : at + self.page_size] for at in range(0, len(data), self.page_size)]

    @property
    def size_pages(self) -> int:
        return len(self.images)

    def read_page(self, page: int) -> bytes:
        if not 0 <= page < len(self.images):
            raise OutOfRange("no such page", page=page)
        return self.images[page]

    def read_rows(self, pages: NDArray[np.int64]) -> NDArray[np.uint8]:
        return rows_of([self.read_page(page) for page in pages.tolist()])

    def close(self) -> None:
        pass


def rows_of(images: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(images), np.uint8).reshape(len(images), -1)


def pages_of(connection: apsw.Connection) -> Pages:
    return Pages(connection.serialize("main"))


class TableReads:
    """A table, read both ways: from leaves and by SQLite."""

    def __init__(
        self, pages: Pages, columns: list[tuple[str, pa.DataType]] | None = None, *, null_misfits: bool = True
    ):
        self.pages, self.null_misfits = pages, null_misfits
        with connected(pages) as connection:
            self.table = find_table(connection, "t", "db")
            self.schema = pa.schema(
                columns or [(column.name, column.type) for column in sampled(connection, self.table, pages)]
            )
        self.left_to_sqlite: list[Rowids] = []
        """The ranges that were left to SQLite."""

    def leaves(self, span: Rowids = EVERYTHING) -> list[tuple[Any, ...]]:
        query = ColumnQuery(self.table, self.schema)
        decoder = LeafDecoder.of(self.pages, self.table, query.decoded)
        assert decoder is not None
        with connected(self.pages) as connection:

            def as_rows(rowids: Rowids) -> Iterator[pa.RecordBatch]:
                self.left_to_sqlite.append(rowids)
                return self._rows(connection, rowids)

            batches = leaf_batches(self.pages, self.table.root, decoder, span, query.batch_of_leaves, as_rows)
            return listed(batches)

    def rows(self, span: Rowids = EVERYTHING) -> list[tuple[Any, ...]]:
        with connected(self.pages) as connection:
            return listed(self._rows(connection, span))

    def _rows(self, connection: apsw.Connection, span: Rowids) -> Iterator[pa.RecordBatch]:
        names = ", ".join(f'"{name}"' for name in self.schema.names)
        condition = "" if span == EVERYTHING else f" WHERE {self.table.rowid} BETWEEN {span[0]} AND {span[1]}"
        cursor = connection.execute(f"SELECT {names} FROM t NOT INDEXED{condition} ORDER BY {self.table.rowid}")
        return row_batches(iter(cursor), self.schema, null_misfits=self.null_misfits)


def listed(unmerged: Iterator[pa.RecordBatch]) -> list[tuple[Any, ...]]:
    """Rows as text, which distinguishes -0.0 from 0.0 and True from 1."""
    batches = []
    for batch in coalesced(unmerged):
        batch.validate(full=True)
        batches.append(batch)
    return [tuple(map(repr, row.values())) for batch in batches for row in batch.to_pylist()]


def outcome(read: Any, *arguments: Any) -> Any:
    """The result of a call, or the name of its error."""
    try:
        return read(*arguments)
    except (apsw.Error, InvalidInput, UnicodeDecodeError) as error:
        return type(error).__name__


# ── the same as SQLite's rows ─────────────────────────────────────────────────────────────────────────────────────────
DECLARED = ("INTEGER", "REAL", "TEXT", "BLOB", "NUMERIC", "", "BOOLEAN", "VARCHAR(9)", "DOUBLE", "DECIMAL(9,2)")
KINDS = (pa.int64(), pa.float64(), pa.string(), pa.binary(), pa.bool_())

numbers = st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1), st.sampled_from([2**n for n in range(63)]))
reals = st.one_of(st.floats(allow_nan=False), st.sampled_from([1.0, -0.0, 1e300, 2.0**53]))
strings = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=8),
    st.sampled_from(["", "a\0b", "12", "1.5", "ä€𝄞", "x" * 57, "x" * 58, "y" * 130, "z" * 700, "ü" * 3_000]),
)
blobs = st.one_of(st.binary(max_size=6), st.sampled_from([bytes(60), bytes(range(256)) * 9]))
values = {"INTEGER": numbers, "REAL": reals, "TEXT": strings, "BLOB": blobs, "BOOLEAN": st.integers(0, 1)}


def value_of(declared: str, is_tidy: bool) -> st.SearchStrategy[Any]:
    """Values of a column: mostly of its declared type."""
    likely = values.get(declared, numbers)
    return st.one_of(st.none(), likely) if is_tidy else st.one_of(likely, likely, numbers, reals, strings, blobs)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """SQL that creates a table `t`."""
    is_tidy = draw(st.sampled_from([True, True, False]))
    declared = draw(st.lists(st.sampled_from(DECLARED), min_size=1, max_size=6))
    columns = [f"c{number} {kind}" for number, kind in enumerate(declared)]
    key = draw(st.sampled_from(["", "id INTEGER PRIMARY KEY", "id INTEGER PRIMARY KEY DESC", "id INT PRIMARY KEY"]))
    if key:
        columns.insert(draw(st.integers(0, len(columns))), key)
    for number, generated in enumerate(draw(st.lists(st.sampled_from(["VIRTUAL", "STORED"]), max_size=2))):
        columns.insert(draw(st.integers(0, len(columns))), f"g{number} INT AS (c0 || 'g') {generated}")
    size = draw(st.sampled_from([512, 1_024, 4_096, 65_536]))
    steps: list[tuple[str, Any]] = [(f"PRAGMA page_size = {size}", ()), (f"CREATE TABLE t({', '.join(columns)})", ())]
    names = [f"c{number}" for number in range(len(declared))]
    for added in range(draw(st.integers(1, 3))):
        placeholders = ", ".join("?" * (len(names) + 1))
        near = set(range(draw(st.integers(-50, 50)), draw(st.integers(0, 200))))
        ids = near | draw(st.sets(st.integers(-(2**63), 2**63 - 1), max_size=4))
        some = draw(st.lists(st.tuples(*[value_of(kind, is_tidy) for kind in declared]), min_size=1, max_size=8))
        rows = [(rowid, *some[i % len(some)]) for i, rowid in enumerate(sorted(ids))]
        sql = f"INSERT OR REPLACE INTO t(rowid, {', '.join(names)}) VALUES ({placeholders})"
        steps += [(sql, row) for row in rows]
        if draw(st.booleans()):
            steps.append(("DELETE FROM t WHERE rowid % 3 = ?", (draw(st.integers(0, 2)),)))
        kind = draw(st.sampled_from(DECLARED))
        defaults = ["", " DEFAULT NULL", " DEFAULT 7", " DEFAULT 'd'", " DEFAULT 2.5"]
        default = draw(st.sampled_from(defaults[:2] if is_tidy else defaults))
        steps.append((f"ALTER TABLE t ADD COLUMN a{added} {kind}{default}", ()))
        names.append(f"a{added}")
        declared.append(kind)
    return steps


def pages_after(steps: list[tuple[str, Any]]) -> Pages:
    with closing(apsw.Connection(":memory:")) as connection:
        for sql, bindings in steps:
            connection.execute(sql, bindings)
        return pages_of(connection)


@given(steps=histories(), data=st.data(), null_misfits=st.booleans())
def test_decoded_columns_equal_sqlites_rows(
    steps: list[tuple[str, Any]], data: st.DataObject, null_misfits: bool
) -> None:
    """All types, NULLs, overflow pages, added columns, gaps and misfits: the same values, or the same error."""
    pages = pages_after(steps)
    with connected(pages) as connection:
        table = find_table(connection, "t", "db")
        types = {column.name: column.type for column in sampled(connection, table, pages)}
    stored = [column.name for column in table.columns if column.place is not None]
    names = data.draw(st.lists(st.sampled_from(stored), min_size=1, unique=True))
    columns = [
        (name, data.draw(st.sampled_from([types[name]] * 4 + list(KINDS))))
        for name in names
        if leaf_columns.WantedColumn.of(table, name, types[name]) is not None
    ]
    columns = [(name, kind) for name, kind in columns if leaf_columns.WantedColumn.of(table, name, kind) is not None]
    if not columns:
        return
    read = TableReads(pages, columns, null_misfits=null_misfits)
    assert outcome(read.leaves) == outcome(read.rows)
    middle = data.draw(st.integers(-60, 300))
    for span in ((LEAST, middle), (middle, MOST), (middle, middle + 40)):
        assert outcome(read.leaves, span) == outcome(read.rows, span)


def plain(rows: int = 5_000, page_size: int = 1_024) -> Pages:
    with closing(apsw.Connection(":memory:")) as connection:
        connection.execute(f"PRAGMA page_size = {page_size}")
        connection.execute("CREATE TABLE t(id INTEGER PRIMARY KEY, n INT, r REAL, s TEXT, b BLOB, x, f BOOLEAN)")
        sql = "INSERT INTO t VALUES (?, ?, ?, ?, ?, ?, ?)"
        rising = ((n, n * n, n / 4, f"text {n}" * (n % 9), b"%d" % n, None, n % 2) for n in range(rows))
        connection.executemany(sql, rising)
        return pages_of(connection)


def test_a_plain_table_is_decoded_without_sqlite() -> None:
    read = TableReads(plain())
    assert read.leaves() == read.rows()
    assert read.left_to_sqlite == []
    assert read.leaves((1_234, 3_456)) == read.rows((1_234, 3_456))
    assert read.left_to_sqlite == []


def test_only_unusual_rows_are_left_to_sqlite() -> None:
    """A misfit and a long text are read by SQLite; their neighbours are not."""
    with closing(apsw.Connection(":memory:")) as connection:
        connection.execute("CREATE TABLE t(n INTEGER, s TEXT)")
        connection.executemany("INSERT INTO t VALUES (?, ?)", [(n, f"text {n}") for n in range(20_000)])
        connection.execute("UPDATE t SET n = 'many' WHERE rowid = 7000")
        connection.execute("UPDATE t SET s = ? WHERE rowid = 9000", ("long" * 5_000,))
        pages = pages_of(connection)
    read = TableReads(pages, [("n", pa.int64()), ("s", pa.string())])
    assert read.leaves() == read.rows()
    assert read.left_to_sqlite == [(7_000, 7_000), (9_000, 9_000)]
    with pytest.raises(InvalidInput, match="many"):
        TableReads(pages, [("n", pa.int64())], null_misfits=False).leaves()


def test_a_column_before_a_long_text_needs_no_overflow_page() -> None:
    with closing(apsw.Connection(":memory:")) as connection:
        connection.execute("CREATE TABLE t(n INTEGER, s TEXT)")
        connection.executemany("INSERT INTO t VALUES (?, ?)", [(n, "long" * 5_000) for n in range(50)])
        read = TableReads(pages_of(connection), [("n", pa.int64())])
    assert read.leaves() == read.rows()
    assert read.left_to_sqlite == []


def test_pages_can_have_reserved_bytes() -> None:
    with closing(apsw.Connection(":memory:")) as connection:
        reserved = ctypes.c_int(24)
        connection.file_control("main", apsw.SQLITE_FCNTL_RESERVE_BYTES, ctypes.addressof(reserved))
        connection.execute("PRAGMA page_size = 512; CREATE TABLE t(n INTEGER, s TEXT)")
        connection.executemany("INSERT INTO t VALUES (?, ?)", [(n, "x" * (n % 500)) for n in range(900)])
        pages = pages_of(connection)
    assert pages.images[0][20] == 24
    read = TableReads(pages)
    assert read.leaves() == read.rows()


def test_columns_that_records_do_not_contain_are_left_to_sqlite() -> None:
    with closing(apsw.Connection(":memory:")) as connection:
        connection.execute("CREATE TABLE t(id INTEGER PRIMARY KEY, r REAL, n INT, v INT AS (n + 1), d DATE)")
        connection.execute("CREATE TABLE w(a INT PRIMARY KEY) WITHOUT ROWID; CREATE VIEW o AS SELECT n FROM t")
        pages = pages_of(connection)

        def allowed(table: str, name: str, kind: pa.DataType, pages: Pages = pages) -> bool:
            return LeafDecoder.of(pages, find_table(connection, table, "db"), [(name, kind)]) is not None

        assert allowed("t", "ID", pa.int64())
        assert allowed("t", "r", pa.float64())
        assert not allowed("t", "r", pa.int64()), "SQLite converts them to doubles"
        assert not allowed("t", "id", pa.string())
        assert not allowed("t", "v", pa.int64()), "it is not in the record"
        assert not allowed("t", "d", pa.date32())
        assert not allowed("t", "absent", pa.int64())
        assert not allowed("w", "a", pa.int64())
        assert not allowed("o", "n", pa.int64())
        other = Pages(b"".join([pages.images[0][:56], b"\0\0\0\2", pages.images[0][60:], *pages.images[1:]]))
        assert not allowed("t", "n", pa.int64(), other), "UTF-16"


def test_without_the_c_library_rows_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = plain()
    read = TableReads(pages)

    def batches() -> list[tuple[Any, ...]]:
        with connected(pages) as connection:
            return listed(table_batches(connection, ColumnQuery(read.table, read.schema), pages=pages, in_order=True))

    with_library = batches()
    monkeypatch.setenv(c_extensions.SWITCH, "1")
    assert LeafDecoder.of(pages, read.table, [("n", pa.int64())]) is None
    assert "switched off" in c_extensions.leaves_build().reason
    assert batches() == with_library


def test_databases_and_missing_columns_are_added() -> None:
    pages = plain(100)
    schema = pa.schema([("_database", pa.string()), ("n", pa.int64()), ("later", pa.float64())])
    with connected(pages) as connection:
        query = ColumnQuery(find_table(connection, "t", "shop"), schema, "shop", null_missing=True)
        (batch,) = coalesced(table_batches(connection, query, pages=pages))
        assert batch.slice(2, 1).to_pylist() == [{"_database": "shop", "n": 4, "later": None}]
        with pytest.raises(InvalidInput, match="no such column"):
            list(table_batches(connection, ColumnQuery(query.table, schema, "shop"), pages=pages))


# ── damaged pages ─────────────────────────────────────────────────────────────────────────────────────────────────────
def tree_pages(pages: Pages, root: int) -> list[int]:
    """The pages of a table's tree, as quire finds them."""
    leaves = leaves_within(by_number(pages), root, EVERYTHING, pages.size_pages)
    return [root - 1, *(page - 1 for some in leaves for page in some.pages.tolist())]


@pytest.mark.parametrize("seed", range(300))
def test_damaged_pages_give_the_same_result_as_sqlite(seed: int) -> None:
    """Some bytes of leaves, mostly of their headers and cell pointers, are changed: decoding gives the same result as
    SQLite.
    """
    chance = random.Random(seed)
    pages = plain(400, chance.choice([512, 1_024, 4_096]))
    read = TableReads(pages)
    leaf_pages = tree_pages(pages, read.table.root)[1:]
    for _ in range(chance.randint(1, 4)):
        page = chance.choice(leaf_pages)
        image = bytearray(pages.images[page])
        at = chance.choice([chance.randrange(8), chance.randrange(8, 40), chance.randrange(len(image)), len(image) - 1])
        image[at] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        pages.images[page] = bytes(image)
    for span in (EVERYTHING, (100, 300)):
        read.left_to_sqlite.clear()
        expected, decoded = outcome(read.rows, span), outcome(read.leaves, span)
        # A pointer past the end of its page makes SQLite read arbitrary memory: its result may differ between two reads.
        assert decoded == expected or (read.left_to_sqlite and "CorruptError" in (decoded, expected))


@pytest.mark.parametrize("seed", range(50))
def test_garbage_is_never_decoded_past_its_page(seed: int) -> None:
    """Leaves of random bytes with a valid header: no access outside the page; what is not refused has the right number
    of rows.
    """
    chance = random.Random(seed)
    pages = plain(400, 512)
    read = TableReads(pages)
    decoder = LeafDecoder.of(pages, read.table, ColumnQuery(read.table, read.schema).decoded)
    assert decoder is not None
    refused = 0
    for _ in range(100):
        count = chance.choice([1, 2, 3, 84, 85, 252, 65_535])
        pointers = b"".join(chance.randrange(8, 520).to_bytes(2) for _ in range(min(count, 250)))
        image = (bytes([13, 0, 0]) + count.to_bytes(2) + bytes(3) + pointers + chance.randbytes(512))[:512]
        try:
            decoded = decoder.decode(rows_of([image, pages.images[-1]][: chance.choice([1, 2])]))
        except Unreadable:
            refused += 1
            continue
        for array in decoded.arrays:
            array.validate(full=True)
            assert len(array) == len(decoded.rowids)
    assert refused


def test_cyclic_interior_pages_are_left_to_sqlite() -> None:
    pages = plain(5_000, 512)
    read = TableReads(pages)
    root = pages.images[read.table.root - 1]
    looped = bytearray(root)
    looped[8:12] = read.table.root.to_bytes(4)
    pages.images[read.table.root - 1] = bytes(looped)
    assert outcome(read.leaves) == outcome(read.rows) == "CorruptError"
    with pytest.raises(Unreadable):
        list(leaves_within(by_number(pages), read.table.root, EVERYTHING, pages.size_pages))


@pytest.mark.parametrize("page_size", [512, 65_536])
def test_leaves_are_read_some_mib_at_a_time(monkeypatch: pytest.MonkeyPatch, page_size: int) -> None:
    """Hazard: all children of an interior page are read at once, up to 450 MB if pages have 64 KiB."""
    pages, reads = plain(20_000, page_size), list[int]()
    monkeypatch.setattr(leaf_columns, "READ_BYTES", 4 * 65_536)

    def read_rows(numbers: NDArray[np.int64]) -> NDArray[np.uint8]:
        reads.append(len(numbers) * page_size)
        return rows_of([pages.read_page(page) for page in numbers.tolist()])

    monkeypatch.setattr(pages, "read_rows", read_rows)
    read = TableReads(pages)
    assert read.leaves() == read.rows()
    assert len(reads) > 2
    assert set(reads[:-1]) == {leaf_columns.READ_BYTES}, "the children of small interior pages are read together"
    assert reads[-1] <= leaf_columns.READ_BYTES
    assert read.left_to_sqlite == []


def test_the_leaves_of_a_range_are_found() -> None:
    pages = plain(5_000, 512)
    root = TableReads(pages).table.root

    def leaves_of(rowids: Rowids) -> list[tuple[int, int, int]]:
        """(page, first rowid, last rowid)."""
        runs = list(leaves_within(by_number(pages), root, rowids, pages.size_pages))
        one_by_one = [run.part(at, at + 1) for run in runs for at in range(len(run))]
        return [(int(leaf.pages[0]), leaf.first, leaf.last) for leaf in one_by_one]

    every = leaves_of(EVERYTHING)
    assert (every[0][1], every[-1][2]) == EVERYTHING
    assert all(left[2] + 1 == right[1] for left, right in pairwise(every))
    some = leaves_of((100, 200))
    assert some == [leaf for leaf in every if leaf[1] <= 200 and leaf[2] >= 100]
    assert 1 < len(some) < len(every) / 10
    with pytest.raises(Unreadable):
        list(leaves_within(by_number(pages), root, EVERYTHING, len(every) - 1))
