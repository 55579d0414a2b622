"""The components of data sources, without Spark: ranges of rowids, rows as columns, distribution, opening, options."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quire
from quire.core.errors import InvalidInput, OutOfRange
from quire.core.json_values import plain
from quire.manifest.change import ChangeRecord, change_json
from quire.manifest.ops.base import Component, Counter, ReserveIds
from quire.manifest.ops.cursors import TrimChanges
from quire.manifest.ops.databases import RegisterDb
from quire.manifest.records import DbKind, DbRecord
from quire.spark.access import access_of, options_of
from quire.spark.sources.base import Options, arrow_schema, fitted, spark_schema
from quire.spark.sources.changes import SCHEMA, as_batch, operations_json
from quire.spark.sources.views import LocatedVersion, ViewPiece, balanced_groups, opened
from quire.sqlite.arrow_rows import coalesced, column, row_batches
from quire.sqlite.read_ahead import ReadAhead
from quire.sqlite.row_changes import RowChange, diff_sorted
from quire.sqlite.row_reads import STEP_ROWS
from quire.sqlite.trees import LEAST, MOST, rowid_ranges, varint
from tests.spark.served_store import QUIET


# ── ranges ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def image_of(rowids: list[int], page_size: int = 512) -> Iterator[tuple[apsw.Connection, Any, int]]:
    connection = apsw.Connection(":memory:")
    connection.execute(f"PRAGMA page_size = {page_size}; CREATE TABLE t(id INTEGER PRIMARY KEY, a TEXT)")
    connection.executemany("INSERT INTO t VALUES (?, 'some text to fill pages')", [(number,) for number in rowids])
    image = connection.serialize("main")
    root = connection.execute("SELECT rootpage FROM sqlite_schema").get
    yield connection, lambda page: image[(page - 1) * page_size : page * page_size], root
    connection.close()


@given(
    st.sets(st.integers(LEAST, MOST), max_size=400) | st.sets(st.integers(0, 500), max_size=400),
    st.integers(1, 9),
)
def test_ranges_cover_every_rowid_once(rowids: set[int], count: int) -> None:
    for connection, read, root in image_of(sorted(rowids)):
        ranges = rowid_ranges(read, root, count)
        assert 1 <= len(ranges) <= count
        assert (ranges[0][0], ranges[-1][1]) == (LEAST, MOST)
        assert all(left[1] + 1 == right[0] for left, right in zip(ranges, ranges[1:]))  # noqa: RUF007 - pairs of pairs
        rowids_read = [
            row[0]
            for bounds in ranges
            for row in connection.execute("SELECT id FROM t WHERE id BETWEEN ? AND ? ORDER BY id", bounds)
        ]
        assert rowids_read == sorted(rowids)


def test_ranges_are_of_about_the_same_size_whatever_the_rowids() -> None:
    """Half of the rows are close together, half far apart: ranges of equal width would give one task nearly all of
    them.
    """
    rowids = [*range(5_000), *(10**12 + number * 10**9 for number in range(5_000))]
    for connection, read, root in image_of(rowids):
        counts = [
            connection.execute("SELECT count(*) FROM t WHERE id BETWEEN ? AND ?", bounds).get
            for bounds in rowid_ranges(read, root, 4)
        ]
        assert len(counts) == 4
        assert max(counts) < 2 * min(counts)


def test_a_page_that_is_not_a_tree_gives_one_range() -> None:
    assert rowid_ranges(lambda _: b"\5" + b"\xff" * 50, 2, 4) == [(LEAST, MOST)]
    assert rowid_ranges(lambda _: b"", 2, 4) == [(LEAST, MOST)]


@given(st.integers(LEAST, MOST))
def test_varints_of_sqlite_are_decoded(number: int) -> None:
    unsigned = number % (1 << 64)
    if unsigned >= 1 << 56:
        written = [0x80 | (unsigned >> shift) & 0x7F for shift in range(57, 7, -7)] + [unsigned & 0xFF]
    else:
        digits = [unsigned >> shift & 0x7F for shift in range(49, -1, -7)]
        first = next((i for i, digit in enumerate(digits) if digit), len(digits) - 1)
        written = [0x80 | digit for digit in digits[first:-1]] + [digits[-1]]
    assert varint(bytes(written), 0) == number


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
VALUES = st.none() | st.integers(LEAST, MOST) | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
KINDS = [pa.int64(), pa.int32(), pa.float64(), pa.string(), pa.binary(), pa.bool_()]


@given(st.lists(VALUES, min_size=1, max_size=8), st.sampled_from(KINDS))
def test_a_value_is_read_unchanged_or_as_null_whatever_its_neighbours(values: list[Any], kind: pa.DataType) -> None:
    cells = column(tuple(values), kind, "c", null_misfits=True).to_pylist()
    for value, read in zip(values, cells):
        (single,) = column((value,), kind, "c", null_misfits=True).to_pylist()
        assert single == read or (math.isinf(single) and math.isinf(read))
        if read is None:
            continue
        if kind == pa.string():
            assert read == (value if isinstance(value, str) else repr(value))
        elif kind == pa.binary():
            assert read == (value if isinstance(value, bytes) else str(value).encode())
        elif kind == pa.bool_():
            assert read is bool(value)
        else:
            assert read == (float(value) if kind == pa.float64() else value)
            assert not isinstance(value, str) or kind == pa.string()


def test_a_misfit_is_an_error_that_names_it() -> None:
    with pytest.raises(InvalidInput, match=r"column='c'.*value=2\.5|value='2\.5'"):
        column((1, 2.5), pa.int64(), "c", null_misfits=False)


def test_batches_have_all_rows_in_order() -> None:
    schema = pa.schema([("n", pa.int64()), ("s", pa.string())])
    rows = [(number, None if number % 5 else str(number)) for number in range(3 * STEP_ROWS + 7)]
    batches = list(coalesced(row_batches(iter(rows), schema, null_misfits=False)))
    assert len(batches) == 1, "small batches are joined into one"
    assert list(zip(*batches[0].to_pydict().values())) == rows
    wide = [(number, "x" * 100_000) for number in range(200)]
    batches = list(coalesced(row_batches(iter(wide), schema, null_misfits=False)))
    assert [row for batch in batches for row in zip(*batch.to_pydict().values())] == wide


# ── changes ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_operations_are_encoded_as_everywhere_else() -> None:
    record = DbRecord("shop", DbKind.PAGES, 7, config_hash=b"\x00\xff", tags={"a": "b"})
    ops = [ReserveIds(Counter.JOB, 7), RegisterDb(3, record), ReserveIds(Counter.CURSOR, 2**63), TrimChanges()]
    assert [json.loads(text) for text in operations_json(ops)] == plain(ops)
    assert [text.encode() for text in operations_json(ops)] == [msgspec.json.encode(plain(op)) for op in ops], (
        "byte for byte"
    )
    change = ChangeRecord(
        5, 1_700_000_000_123, (RegisterDb(3, record),), ((int(Component.DATABASE), 2), (9_999, 1)), "t"
    )
    (row,) = as_batch([change], arrow_schema(SCHEMA)).to_pylist()
    assert dict(row["generations"]) == change_json(change)["generations"]
    assert row["kinds"] == ["RegisterDb"]
    odd = ChangeRecord(6, 0, (RegisterDb(4, DbRecord("two\nlines", DbKind.PAGES, 7)),), ())
    rows = as_batch([odd, ChangeRecord(7, 0, (), ()), change], arrow_schema(SCHEMA)).to_pylist()
    operations = [json.loads(record_row["operations"]) for record_row in rows]
    assert operations == [plain(odd.operations), [], plain(change.operations)]


# ── versions ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_pieces_are_distributed_evenly() -> None:
    pieces: list[ViewPiece[int]] = [ViewPiece(None, number, number % 13 * 100) for number in range(200)]  # type: ignore[arg-type]
    heaps = balanced_groups(pieces, 7)
    assert sorted(piece.part for heap in heaps for piece in heap) == list(range(200))
    loads = [sum(piece.size_bytes for piece in heap) for heap in heaps]
    assert max(loads) < 1.1 * min(loads)
    assert balanced_groups([], 7) == []


def test_reading_ahead_gives_the_same_with_and_without_the_stores_directory(tmp_path: Path) -> None:
    with quire.open(tmp_path / "store", settings=QUIET) as store:
        with closing(store.sqlite("shop", create=True)) as connection:
            connection.execute("CREATE TABLE t(a)")
            with connection:
                connection.executemany("INSERT INTO t VALUES (?)", [(f"{number:0100}",) for number in range(20_000)])
            store.checkpoint("shop")
            connection.execute("UPDATE t SET a = 'new' WHERE rowid % 1000 = 0")
        store.snapshot("shop", "monday")
        view = store.view("shop", "monday", upload=True)
        with store.pages.open_view("shop", "monday") as local:
            expected = [local.read_page(page) for page in range(local.size_pages)]
        for root in (store.path, str(tmp_path / "elsewhere")):
            with opened(LocatedVersion("shop", view, root)) as reader:
                ahead = ReadAhead(reader)
                assert [ahead.read_page(page) for page in range(ahead.size_pages)] == expected
                assert [ahead.read_page(page) for page in (7, 400, 3)] == [expected[page] for page in (7, 400, 3)]
                rows = ahead.read_rows(np.array([7, 400, 3]))
                assert [row.tobytes() for row in rows] == [expected[page] for page in (7, 400, 3)]
                with pytest.raises(OutOfRange):
                    ahead.read_page(ahead.size_pages)
                ahead.close()


def test_a_store_is_served_once(tmp_path: Path) -> None:
    with quire.open(tmp_path / "store", settings=QUIET) as store:
        first, second = access_of(options_of(store)), access_of(options_of(store))
        assert first == second
        with first.connect() as client:
            assert client.path == store.path


# ── small things ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_unsigned_numbers_become_signed_with_the_same_bits() -> None:
    batch = pa.RecordBatch.from_pydict(
        {"h": pa.array([1, 2**64 - 1], pa.uint64()), "k": pa.array([1, 255], pa.uint8())}
    )
    target_schema = arrow_schema(spark_schema(batch.schema))
    assert fitted(batch, target_schema).to_pydict() == {"h": [1, -1], "k": [1, 255]}


def test_two_parallel_scans_find_the_differences() -> None:
    before = {1: ("a",), 2: (1,), 4: (None,)}
    after = {2: (1.0,), 3: ("c",), 4: (None,)}
    assert list(diff_sorted(iter(before.items()), iter(after.items()))) == [
        RowChange("delete", 1, ("a",), None),
        RowChange("update", 2, (1,), (1.0,)),
        RowChange("insert", 3, None, ("c",)),
    ]


def test_options_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    given_ = Options({"Columns": "a, b ,,c", "N": "7"}, source="s", known=("columns", "n"))
    assert (given_.names("columns"), given_.number("n", 1), given_.number("m", 1)) == (["a", "b", "c"], 7, 1)
    with pytest.raises(InvalidInput, match="no such option"):
        Options({"x": "1"}, source="s", known=())
    with pytest.raises(InvalidInput, match="cannot be an option"):
        access_of({"store": "grpc://host:1", "token": "secret"})
    monkeypatch.setenv("QUIRE_TOKEN_FILE", "/some/token")
    assert access_of({"store": "grpc://host:1"}).token_file == "/some/token"
    assert access_of({"store": "grpc+unix:///x.sock"}).token_file == "", "clients of the socket need no token"
