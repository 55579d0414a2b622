"""Streaming `quire.rows` over databases and columns that are replaced while the query runs: no delete is late, and no change is
lost without an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from quire.core.errors import InvalidInput, StalePlan
from quire.core.limits import MIB
from quire.spark.sources import rows as rows_source
from quire.spark.sources.row_columns import key_text
from quire.spark.sources.rows import RowsQueryReader, RowsSource
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.spark.served_store import open_served


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(rows_source, "POLL_SECONDS", 0)
    with open_served(tmp_path / "store", ManualClock(now_ms=1_750_000_000_000)) as store:
        yield store


def run(store: Store, database: str, *statements: str) -> None:
    with closing(store.sqlite(database, create=True)) as connection:
        for sql in statements:
            connection.execute(sql)


class Query:
    """A streaming query, driven as Spark drives it: each batch is committed before the next one is planned."""

    def __init__(self, store: Store, **options: str) -> None:
        self._options = {"store": store.path, "databases": "t-*", "table": "t", "consumer": "c", **options}
        self._reader: RowsQueryReader | None = None
        self.start()
        self._offset = self.reader.initialOffset()

    def start(self, **options: str) -> None:
        """Start the query, or start it again with the same checkpoint."""
        self._options |= options
        source = RowsSource(self._options)
        schema = source.schema()
        if self._reader is not None:
            self._reader.stop()
        self._reader = source.streamReader(schema)

    @property
    def reader(self) -> RowsQueryReader:
        """The reader of the current run."""
        assert self._reader is not None
        return self._reader

    def batch(self) -> list[tuple[Any, ...]]:
        """Read the next batch: (database, operation, key, other columns in their order)."""
        end = self.reader.latestOffset(self._offset, ReadAllAvailable())
        parts = self.reader.partitions(self._offset, end)
        rows = [row for part in parts for batch in self.reader.read(part) for row in batch.to_pylist()]
        self.reader.commit(end)
        self._offset = end
        own = ("_table", "_epoch", "_committed_at", "id")
        return sorted(tuple(value for name, value in row.items() if name not in own) for row in rows)


@pytest.fixture
def query(store: Store) -> Iterator[Query]:
    """A query that has read the databases `t-1` and `t-2`."""
    for name in ("t-1", "t-2"):
        run(store, name, "CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT)", "INSERT INTO t VALUES (1, 'a')")
    query = Query(store)
    assert query.batch() == [("t-1", "insert", "1", "a"), ("t-2", "insert", "1", "a")]
    yield query
    query.reader.stop()


def test_rows_of_a_dropped_database_are_deleted_though_an_empty_one_has_its_name(store: Store, query: Query) -> None:
    store.drop("t-1")
    store.create("t-1", "pages")
    assert query.batch() == [("t-1", "delete", "1", "a")]
    assert query.batch() == []
    run(store, "t-1", "CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT)", "INSERT INTO t VALUES (5, 'n')")
    assert query.batch() == [("t-1", "insert", "5", "n")]


def test_a_run_of_the_available_data_reads_a_database_that_has_replaced_another(store: Store, query: Query) -> None:
    """Hazard: the version of the new database was compared with the number of the old one's, so no run of the available data
    read it before it had been written as often as the old one."""
    run(store, "t-1", *(f"INSERT INTO t VALUES ({number}, 'b')" for number in range(2, 9)))
    assert len(query.batch()) == 7
    store.drop("t-1")
    run(store, "t-1", "CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT)", "INSERT INTO t VALUES (1, 'n')")
    query.reader.prepareForTriggerAvailableNow()
    run(store, "t-2", "UPDATE t SET v = 'later'")
    assert ("t-1", "update", "1", "n") in query.batch()
    assert query.batch() == [], "what came later does not belong to this run"


@pytest.mark.parametrize("piece_bytes", [16 * MIB, 4_096])
@pytest.mark.parametrize("change", ["SELECT 1", "UPDATE t SET v = 'new' WHERE id = 900"])
def test_a_replaced_database_has_one_notice_wherever_its_rows_differ(
    store: Store, monkeypatch: pytest.MonkeyPatch, piece_bytes: int, change: str
) -> None:
    """Hazard: a fork that replaced its parent differs in few rows, and the notice was given only with the first rowids."""
    monkeypatch.setattr(rows_source, "PIECE_BYTES", piece_bytes)
    rows = "WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n WHERE id < 1000) INSERT INTO t "
    run(store, "t-1", "CREATE TABLE t(id INTEGER PRIMARY KEY, v)", rows + "SELECT id, hex(zeroblob(100)) FROM n")
    query = Query(store, notices="true", partitions="3")
    assert len(query.batch()) == 1_000
    store.fork("t-1", "other")
    store.drop("t-1")
    store.rename("other", "t-1")
    run(store, "t-1", change)
    changed = [("t-1", "update", "900", "new")] if "UPDATE" in change else []
    assert query.batch() == [("t-1", "replaced", "another database has this name now", None), *changed]
    query.reader.stop()


def test_a_renamed_column_stops_the_query_until_it_is_started_again(store: Store, query: Query) -> None:
    run(store, "t-1", "ALTER TABLE t RENAME COLUMN v TO w", "UPDATE t SET w = 'b'")
    run(store, "t-2", "UPDATE t SET v = 'c'")
    with pytest.raises(StalePlan, match=r"renamed or replaced.*t-1.*merge_schema"):
        query.batch()
    query.start(merge_schema="true")
    assert query.batch() == [("t-1", "update", "1", "b", None), ("t-2", "update", "1", None, "c")]


def test_added_and_dropped_columns_do_not_stop_the_query(store: Store, query: Query) -> None:
    run(store, "t-1", "ALTER TABLE t ADD COLUMN w TEXT", "UPDATE t SET w = 'b'")
    assert query.batch() == []
    run(store, "t-1", "ALTER TABLE t DROP COLUMN v")
    assert query.batch() == [("t-1", "update", "1", None)]


def test_a_streaming_query_has_no_end(store: Store, query: Query) -> None:
    with pytest.raises(InvalidInput, match="`to` is for batch queries"):
        query.start(to="monday")


def test_a_key_is_json_whatever_its_value() -> None:
    assert key_text((float("inf"), float("-inf"), 'a"b', b"\xff", None)) == '[9e999,-9e999,"a\\"b",{"blob":"ff"},null]'


def test_rows_without_a_readable_rowid_are_refused(store: Store) -> None:
    run(
        store,
        "odd",
        "CREATE TABLE t(rowid TEXT, _rowid_ TEXT, oid TEXT PRIMARY KEY)",
        "INSERT INTO t VALUES (1, 2, NULL)",
    )
    run(store, "odd", "INSERT INTO t VALUES (3, 4, NULL)")
    with pytest.raises(InvalidInput, match="no rowid that can be read"):
        rows(store, "odd")


def test_a_rowid_is_read_through_its_column_if_its_names_are_taken(store: Store) -> None:
    run(store, "odd", "CREATE TABLE t(rowid TEXT, _rowid_ TEXT, oid TEXT, n INTEGER PRIMARY KEY)")
    run(store, "odd", "INSERT INTO t VALUES ('x', 'y', 'z', 7)")
    assert [row["_key"] for row in rows(store, "odd")] == ["7"]


def rows(store: Store, database: str) -> list[dict[str, Any]]:
    """All rows of a database, as inserts."""
    source = RowsSource({"store": store.path, "database": database, "table": "t"})
    reader = source.reader(source.schema())
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
