"""`quire.rows` as a stream: all rows, then the changes, exactly once across restarts, with versions that its consumer
holds.

Most tests drive a reader as Spark's micro-batches do; one runs on Spark.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import quire
from quire.core.errors import CursorLost, InvalidInput, UnknownSnapshot
from quire.manifest import leases, writer
from quire.manifest import tables as t
from quire.pages import held_versions
from quire.spark.access import options_of
from quire.spark.sources import rows as rows_source
from quire.spark.sources.rows import RowsQueryReader, RowsSource
from quire.store.store import Store
from quire.store.why import why
from quire.testing.clock import ManualClock
from tests.spark.served_store import QUIET, open_served, serve_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAY = rows_source.STREAM_KEEP_SECONDS


_readers: list[RowsQueryReader] = []


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rows_source, "POLL_SECONDS", 0)
    yield
    while _readers:
        _readers.pop().stop()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(now_ms=1_750_000_000_000)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    with open_served(tmp_path / "store", clock) as store:
        yield store


def run(store: Store, database: str, *statements: str) -> None:
    with closing(store.sqlite(database, create=True)) as connection:
        for sql in statements:
            connection.execute(sql)


class Query:
    """What Spark does with a reader: an offset is recorded before its batch is planned, and committed when the next one
    is planned.
    """

    def __init__(self, store: Store, **options: Any) -> None:
        all_options = {"databases": "*", "table": "t", "consumer": "c", **options}
        self._options = {"store": store.path, **{name.rstrip("_"): str(value) for name, value in all_options.items()}}
        self.schema = RowsSource(self._options).schema()
        self.offsets: list[dict[str, Any]] = []
        self.restart()

    def restart(self) -> None:
        """Start again with the same checkpoint."""
        reader = RowsSource(self._options).streamReader(self.schema)
        self.reader: RowsQueryReader = pickle.loads(pickle.dumps(reader))
        _readers.append(self.reader)

    def plan(self) -> bool:
        """Whether there is a next batch; if so, its offset is recorded."""
        if not self.offsets:
            self.offsets.append(self.reader.initialOffset())
        end = self.reader.latestOffset(self.offsets[-1], ReadAllAvailable())
        if end == self.offsets[-1]:
            return False
        if len(self.offsets) > 1:
            self.reader.commit(self.offsets[-1])
        self.offsets.append(end)
        return True

    def rows(self) -> list[tuple[Any, ...]]:
        """The rows of the last batch."""
        start, end = self.offsets[-2:]
        if len(self.offsets) == 2:
            assert self.reader.initialOffset() == start, "Spark asks for the first batch again"
        return sorted(
            (row["_database"], row["_op"], row["_key"], row["a"])
            for part in self.reader.partitions(start, end)
            for batch in pickle.loads(pickle.dumps(self.reader)).read(part)
            for row in batch.to_pylist()
        )

    def next(self) -> list[tuple[Any, ...]]:
        """The rows of the next batch, or an empty list."""
        return self.rows() if self.plan() else []


def pins(store: Store) -> int:
    with store.manifest.read() as txn:
        return txn.count(t.SNAPSHOT_READERS)


def test_all_rows_are_followed_by_changes(store: Store) -> None:
    for name in ("east", "west"):
        run(store, name, "CREATE TABLE t(a)", "INSERT INTO t VALUES (1)")
    query = Query(store)
    everything = [("east", "insert", "1", 1), ("west", "insert", "1", 1)]
    assert query.next() == everything
    query.restart()
    assert query.rows() == everything, "as after a kill in the first batch"
    assert query.next() == []
    run(store, "west", "INSERT INTO t VALUES (2)")
    run(store, "west", "UPDATE t SET a = 7 WHERE a = 1")
    assert query.next() == [("west", "insert", "2", 2), ("west", "update", "1", 7)]
    assert query.next() == []
    run(store, "north", "CREATE TABLE t(a)", "INSERT INTO t VALUES (3)")
    run(store, "empty", "CREATE TABLE other(a)")
    assert query.next() == [("north", "insert", "1", 3)]
    run(store, "east", "DELETE FROM t")
    assert query.next() == [("east", "delete", "1", 1)]
    query.next()
    assert pins(store) == 5, "a version per database, and that of the previous batch"
    assert store.info().snapshots == 0


def test_checkpoints_and_merges_keep_the_versions_of_a_consumer(store: Store, clock: ManualClock) -> None:
    run(store, "shop", "CREATE TABLE t(a)", "INSERT INTO t VALUES (1), (2)")
    query = Query(store)
    assert len(query.next()) == 2
    for number in range(5):
        run(store, "shop", f"UPDATE t SET a = {number + 10} WHERE rowid = 1")
        store.checkpoint("shop")
        store.merge("shop")
        clock.advance(3_600)
        store.maintain()
    assert query.next() == [("shop", "update", "1", 14)]
    assert query.next() == []


def test_a_batch_is_the_same_when_planned_again(store: Store) -> None:
    run(store, "shop", "CREATE TABLE t(a)", "INSERT INTO t VALUES (1)")
    run(store, "gone", "CREATE TABLE t(a)", "INSERT INTO t VALUES (8)")
    query = Query(store)
    query.next()
    run(store, "shop", "INSERT INTO t VALUES (2)")
    assert query.plan()
    expected = [("shop", "insert", "2", 2)]
    assert query.rows() == expected
    run(store, "shop", "INSERT INTO t VALUES (3)")
    store.drop("gone")
    query.restart()
    assert query.rows() == expected, "as after a kill before the end of the batch"
    assert query.next() == [("gone", "delete", "1", 8), ("shop", "insert", "3", 3)]
    query.restart()
    assert query.rows() == [("gone", "delete", "1", 8), ("shop", "insert", "3", 3)]
    assert query.next() == []


def test_an_offset_that_was_never_recorded_is_released(store: Store) -> None:
    run(store, "shop", "CREATE TABLE t(a)", "INSERT INTO t VALUES (1)")
    query = Query(store)
    query.next()
    run(store, "shop", "INSERT INTO t VALUES (2)")
    lost = query.reader.latestOffset(query.offsets[-1], ReadAllAvailable())
    assert lost != query.offsets[-1]
    query.restart()
    run(store, "shop", "INSERT INTO t VALUES (3)")
    assert query.next() == [("shop", "insert", "2", 2), ("shop", "insert", "3", 3)]
    assert pins(store) == 2


def test_a_reopened_store_still_has_the_versions(store: Store, tmp_path: Path, clock: ManualClock) -> None:
    with quire.open(tmp_path / "other", settings=QUIET, clock=clock) as other:
        options_of(other)
        run(other, "shop", "CREATE TABLE t(a)", "INSERT INTO t VALUES (1), (2)")
        query = Query(other)
        assert len(query.next()) == 2
        run(other, "shop", "DELETE FROM t WHERE a = 1")
        other.checkpoint("shop")
        _readers.pop().stop()
    with quire.open(tmp_path / "other", settings=QUIET, clock=clock) as other:
        options_of(other)
        other.maintain()
        query.restart()
        assert query.next() == [("shop", "delete", "1", 1)]
        _readers.pop().stop()


def test_a_dropped_database_gives_deletes_and_a_new_one_with_its_name_is_compared_with_it(store: Store) -> None:
    run(store, "shop", "CREATE TABLE t(a)", "INSERT INTO t VALUES (1), (2), (3)")
    run(store, "other", "CREATE TABLE t(a)", "INSERT INTO t VALUES (5)")
    store.snapshot("shop", "monday")
    query = Query(store, notices="true")
    query.next()
    run(store, "shop", "DELETE FROM t WHERE a = 3", "INSERT INTO t VALUES (4)")
    assert query.next() == [("shop", "update", "3", 4)], "the rowid is reused"
    # Rewound: a fork of the snapshot takes over the name.
    store.fork("shop", "back", at="monday")
    store.rename("shop", "abandoned")
    store.rename("back", "shop")
    rows = query.next()
    assert [row for row in rows if row[0] == "shop"] == [
        ("shop", "replaced", "another database has this name now", None),
        ("shop", "update", "3", 3),
    ]
    assert len([row for row in rows if row[0] == "abandoned"]) == 3
    store.drop("abandoned", snapshots=True)
    store.drop("other")
    assert query.next() == [
        ("abandoned", "delete", "1", 1),
        ("abandoned", "delete", "2", 2),
        ("abandoned", "delete", "3", 4),
        ("abandoned", "dropped", "the database was dropped or renamed", None),
        ("other", "delete", "1", 5),
        ("other", "dropped", "the database was dropped or renamed", None),
    ]
    assert query.next() == []


def test_a_dropped_fork_without_data_of_its_own_gives_deletes_and_does_not_stop_the_query(
    store: Store, clock: ManualClock
) -> None:
    """Hazard: nothing of such a fork waits for deletion, so only the version that the query holds keeps its tombstone."""
    run(store, "shop", "CREATE TABLE t(a)", "INSERT INTO t VALUES (1)")
    store.snapshot("shop", "monday")
    store.fork("shop", "fork", at="monday")
    query = Query(store)
    query.next()
    store.drop("fork")
    clock.advance(100)
    store.maintain()
    run(store, "shop", "INSERT INTO t VALUES (2)")
    assert query.next() == [("fork", "delete", "1", 1), ("shop", "insert", "2", 2)]
    assert query.next() == []
    run(store, "shop", "INSERT INTO t VALUES (3)")
    assert query.next() == [("shop", "insert", "3", 3)]
    assert query.next() == []
    for _ in range(2):
        clock.advance(100)
        store.maintain()
    with store.manifest.read() as txn:
        assert [record.name for _, record in txn.databases()] == ["shop"]


def test_more_databases_can_be_dropped_than_a_batch_has_operations(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: all marks of dropped databases were one batch."""
    names = [f"shop-{number}" for number in range(5)]
    for name in names:
        run(store, name, "CREATE TABLE t(a)", "INSERT INTO t VALUES (1)")
    query = Query(store)
    query.next()
    for name in names:
        store.drop(name)
    monkeypatch.setattr(writer, "BATCH_OPS_MAX", 4)
    for module in (leases, held_versions):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 4)
    assert query.next() == [(name, "delete", "1", 1) for name in names]
    assert query.next() == []


def test_a_rollback_gives_the_rows_that_it_changed(store: Store) -> None:
    run(store, "shop", "CREATE TABLE t(a)", "INSERT INTO t VALUES (1), (2)")
    store.snapshot("shop", "monday")
    query = Query(store)
    query.next()
    run(store, "shop", "UPDATE t SET a = 7 WHERE rowid = 2", "INSERT INTO t VALUES (3)")
    assert len(query.next()) == 2
    store.rollback("shop", to="monday")
    assert query.next() == [("shop", "delete", "3", 3), ("shop", "update", "2", 2)]
    assert query.next() == []


def test_an_owner_that_ends_before_a_version_is_recorded_leaves_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease exists but the version's row does not: Spark never got it."""
    run(store, "shop", "CREATE TABLE t(a)", "INSERT INTO t VALUES (1)")
    query = Query(store)
    query.next()
    run(store, "shop", "INSERT INTO t VALUES (2)")

    def killed(*_: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(store.manifest.leases, "keep_views", killed)
        with pytest.raises(Exception, match="a bug at the owner"):
            query.plan()
    assert pins(store) == 2
    query.restart()
    assert query.next() == [("shop", "insert", "2", 2)]
    assert pins(store) == 2


def test_a_silent_consumer_releases_everything(store: Store, clock: ManualClock) -> None:
    for name in ("east", "west"):
        run(store, name, "CREATE TABLE t(a)", "INSERT INTO t VALUES (1)")
    query = Query(store)
    query.next()
    run(store, "west", "INSERT INTO t VALUES (2)")
    query.next()
    for _ in range(3):
        clock.advance(DAY - 60)
        assert query.next() == [], "an idle query keeps all of its versions"
    assert pins(store) == 3
    with store.manifest.read() as txn:
        assert "is the consumer c of row changes" in str(why(txn, "west"))
    clock.advance(DAY + 1)
    store.maintain()
    assert pins(store) == 0
    query.restart()
    with pytest.raises(CursorLost, match="no longer kept"):
        query.next()


def test_an_older_checkpoint_is_refused(store: Store) -> None:
    run(store, "shop", "CREATE TABLE t(a)", "INSERT INTO t VALUES (1)")
    query = Query(store)
    for number in range(4):
        run(store, "shop", f"INSERT INTO t VALUES ({number})")
        query.next()
    del query.offsets[2:]
    query.restart()
    with pytest.raises(CursorLost, match="older checkpoint"):
        query.next()
    again = Query(store)
    assert len(again.next()) == 5, "a new checkpoint starts with all rows"
    assert pins(store) == 1
    other = Query(store)
    other.offsets = [{**query.offsets[0], "store": "another"}]
    with pytest.raises(InvalidInput, match="checkpoint belongs to another"):
        other.next()


def test_the_databases_of_a_batch_are_limited_and_none_is_starved(store: Store) -> None:
    for number in range(5):
        run(store, f"d{number}", "CREATE TABLE t(a)", "INSERT INTO t VALUES (0)")
    query = Query(store, max_databases=2)
    databases: list[str] = []
    for _ in range(5):
        run(store, "d0", "INSERT INTO t VALUES (1)")
        databases += sorted({row[0] for row in query.next()})
    assert set(databases[:6]) == {"d0", "d1", "d2", "d3", "d4"}


def test_the_changes_of_a_batch_are_limited(store: Store) -> None:
    """A batch ends before the database with which it would exceed `max_pages`; a larger database is a batch by itself."""
    for number in range(4):
        run(store, f"d{number}", "CREATE TABLE t(a TEXT)", "INSERT INTO t VALUES (0)")
    query = Query(store, max_pages=1_000)
    assert {row[0] for row in query.next()} == {"d0", "d1", "d2", "d3"}
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1500)"
    many = f"{numbers} INSERT INTO t SELECT printf('%4000d', i) FROM n"
    for number in range(4):
        run(store, f"d{number}", many if number in (1, 2) else "INSERT INTO t VALUES (1)")
    batches = [sorted({row[0] for row in query.next()}) for _ in range(5)]
    assert batches == [["d0"], ["d1"], ["d2"], ["d3"], []]


def test_dropped_databases_count_towards_the_limit(store: Store) -> None:
    for number in range(5):
        run(store, f"d{number}", "CREATE TABLE t(a)", "INSERT INTO t VALUES (0)")
    query = Query(store, max_databases=2)
    while query.next():
        pass
    for number in range(4):
        store.drop(f"d{number}")
    run(store, "d4", "INSERT INTO t VALUES (1)")
    batches = [query.next() for _ in range(4)]
    assert [len({row[0] for row in batch}) for batch in batches] == [2, 2, 1, 0]
    assert sorted(row[:2] for batch in batches for row in batch) == [
        *((f"d{number}", "delete") for number in range(4)),
        ("d4", "insert"),
    ]
    query.reader.commit(query.offsets[-1])
    assert pins(store) == 1


def test_a_run_of_the_available_data_ends(store: Store) -> None:
    for number in range(3):
        run(store, f"d{number}", "CREATE TABLE t(a)", "INSERT INTO t VALUES (0)")
    query = Query(store, max_databases=1)
    query.reader.prepareForTriggerAvailableNow()
    batches = []
    while query.plan():
        batches.append({row[0] for row in query.rows()})
        for number in range(3):
            run(store, f"d{number}", "INSERT INTO t VALUES (9)")
    assert sorted(map(sorted, batches)) == [["d0"], ["d1"], ["d2"]]
    query.restart()
    query.reader.prepareForTriggerAvailableNow()
    remaining = []
    while query.plan():
        remaining += query.rows()
    assert {row[0] for row in remaining} == {"d0", "d1", "d2"}


def test_a_stream_can_start_now_or_at_a_snapshot(store: Store) -> None:
    run(store, "shop", "CREATE TABLE t(a)", "INSERT INTO t VALUES (1)")
    store.snapshot("shop", "monday")
    run(store, "shop", "INSERT INTO t VALUES (2)")
    latest = Query(store, consumer="latest", start="latest")
    since = Query(store, consumer="since", from_="monday")
    assert latest.next() == []
    run(store, "shop", "INSERT INTO t VALUES (3)")
    assert latest.next() == [("shop", "insert", "3", 3)]
    assert since.next() == [("shop", "insert", "2", 2), ("shop", "insert", "3", 3)]
    run(store, "late", "CREATE TABLE t(a)", "INSERT INTO t VALUES (4)")
    assert since.next() == [("late", "insert", "1", 4)]
    strict = Query(store, consumer="strict", from_="monday", absent="error")
    assert strict.plan()
    with pytest.raises(UnknownSnapshot):
        strict.rows()


@pytest.mark.slow
def test_on_spark(spark: SparkSession, tmp_path: Path) -> None:
    with serve_store(spark, tmp_path / "store") as owner:
        owner.run("east", "CREATE TABLE t(id INTEGER PRIMARY KEY, a)", "INSERT INTO t VALUES (1, 1), (2, 2)")

        def read_all() -> None:
            source_options = {"databases": "*", "table": "t", "consumer": "lake", "notices": "false"}
            frame = spark.readStream.format("quire.rows").options(**owner.options, **source_options).load()
            writer = frame.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
            query = writer.trigger(availableNow=True).start(str(tmp_path / "out"))
            query.awaitTermination()

        read_all()
        owner.run("east", "UPDATE t SET a = 7 WHERE id = 2")
        owner.run("west", "CREATE TABLE t(id INTEGER PRIMARY KEY, a)", "INSERT INTO t VALUES (3, 3)")
        read_all()
        read_all()
        out = spark.read.parquet(str(tmp_path / "out")).select("_database", "_op", "id", "a")
        assert sorted(tuple(row) for row in out.collect()) == [
            ("east", "insert", 1, 1), ("east", "insert", 2, 2), ("east", "update", 2, 7), ("west", "insert", 3, 3),
        ]  # fmt: skip
