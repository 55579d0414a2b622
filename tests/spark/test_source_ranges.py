"""Very many databases in one query: partitions are ranges of names, and tasks ask the owner for the versions of theirs.

Without a session, but for the last test: readers plan here, and read from pickles as Spark's tasks do.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import quire
from quire.core.errors import InvalidInput, NotFound, SnapshotGone, UnknownDatabase
from quire.manifest import leases
from quire.manifest import tables as t
from quire.pages import held_versions
from quire.spark.access import options_of
from quire.spark.sources import sqlite, views
from quire.spark.sources.base import KEEP_SECONDS
from quire.spark.sources.sqlite import SqliteSource
from quire.spark.sources.views import LentRange, joined
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.spark.sourced import QUIET, opened, owned, rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DATABASES = 120


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(now_ms=1_750_000_000_000)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of few databases, and few ranges."""
    monkeypatch.setattr(views, "LISTED_MAX", 20)
    monkeypatch.setattr(views, "LENT_AT_ONCE", 3)
    monkeypatch.setattr(views, "RANGES_MAX", 32)
    monkeypatch.setattr(held_versions, "RANGE_MAX", 5)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock, small: None) -> Iterator[Store]:
    with quire.open(tmp_path / "store", settings=QUIET, clock=clock) as store:
        options_of(store)
        run(
            store,
            "template",
            "CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT)",
            "INSERT INTO t VALUES (1, 'x'), (2, 'y')",
        )
        store.fork_many("template", [name(number) for number in range(DATABASES)])
        yield store


def name(number: int) -> str:
    return f"tenant-{number * 7 % DATABASES:03d}"  # the order of names is not that of ids


def run(store: Store, database: str, *statements: str) -> None:
    with closing(store.sqlite(database, create=True)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def planned(store: Store, **options: Any) -> tuple[Any, list[Any]]:
    given = {"store": store.path, "table": "t", "databases": "tenant-*", **options}
    source = SqliteSource({name: str(value) for name, value in given.items()})
    reader = source.reader(source.schema())
    return reader, list(reader.partitions())


def read(reader: Any, parts: list[Any]) -> list[tuple[Any, ...]]:
    """What tasks read, by way of pickles."""
    tasks = pickle.loads(pickle.dumps([(reader, part) for part in parts]))
    return sorted(
        tuple(row.values()) for reader, part in tasks for batch in reader.read(part) for row in batch.to_pylist()
    )


def expected(numbers: Iterator[int] | range = range(DATABASES)) -> list[tuple[Any, ...]]:
    return [row for number in numbers for row in ((f"tenant-{number:03d}", 1, "x"), (f"tenant-{number:03d}", 2, "y"))]


class Counted:
    """A `submit` that notes how much it is given."""

    def __init__(self, submit: Any) -> None:
        self.submit, self.sizes = submit, list[int]()

    def __call__(self, ops: Any, *args: Any, **more: Any) -> Any:
        self.sizes.append(len(ops))
        return self.submit(ops, *args, **more)


def test_many_databases_are_ranges_of_names_of_even_weight(store: Store, clock: ManualClock) -> None:
    head = store.feed.head()
    reader, parts = planned(store, partitions=4)
    ranges = [each for part in parts for each in part.value]
    assert all(isinstance(each, LentRange) for each in ranges)
    assert len(ranges) <= 32
    assert len(pickle.dumps(parts)) < 8_000, "no list of databases"
    weights = [sum(each.size_bytes for each in part.value) for part in parts]
    assert len(parts) == 4
    assert max(weights) < 1.4 * min(weights)
    assert read(reader, parts) == expected()
    assert len(read(reader, parts[:1])) + len(read(reader, parts[1:])) == 2 * DATABASES
    assert store.manifest.leases.count() == 1
    assert store.feed.head() == head
    clock.advance(KEEP_SECONDS + 1)
    store.maintain()
    with store.manifest.read() as txn:
        assert txn.count(t.SNAPSHOT_READERS) == 0, "no trace some minutes later"
    with pytest.raises(SnapshotGone, match="load it again"):
        read(reader, parts)


def test_few_databases_are_listed_and_need_no_owner_to_be_read(store: Store) -> None:
    reader, parts = planned(store, databases="tenant-00*")
    assert not [each for part in parts for each in part.value if isinstance(each, LentRange)]
    assert read(reader, parts) == expected(range(10))


def test_what_happens_after_the_plan_is_not_read(store: Store) -> None:
    reader, parts = planned(store)
    run(store, "tenant-000", "INSERT INTO t VALUES (3, 'later')")
    run(store, "tenant-050", "DELETE FROM t")
    run(store, "tenant-050a", "CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT)", "INSERT INTO t VALUES (9, 'new')")
    store.drop_many(["tenant-001", "tenant-051", "tenant-119"])
    store.drop("template")
    store.maintain()
    with store.manifest.read() as txn:
        assert txn.count(t.DB) < DATABASES, "what was dropped is removed: nothing of its own is left"
    assert read(reader, parts) == expected(), "as planned: what was dropped, too"
    assert len(read(*planned(store))) == 2 * DATABASES + 1 - 2 + 1 - 6
    assert store.manifest.check() == []


def test_a_plan_outlives_its_owner(store: Store, tmp_path: Path, clock: ManualClock) -> None:
    reader, parts = planned(store)
    store.close()
    with opened(tmp_path / "store", clock) as again:
        assert read(reader, parts) == expected()
        assert again.manifest.leases.count() == 1


def test_databases_that_are_dropped_while_a_query_is_planned_are_left_out(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    each_name = views.DatabaseSelection.each_name

    def dropping(self: Any, client: Any) -> Iterator[str]:
        for name in each_name(self, client):
            yield name
            if name == "tenant-100":
                store.drop_many(["tenant-100", "tenant-110"])

    monkeypatch.setattr(views.DatabaseSelection, "each_name", dropping)
    rows = read(*planned(store))
    assert rows == expected(number for number in range(DATABASES) if number not in (100, 110))


def test_large_databases_among_many_are_cut_as_ever(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "PIECE_BYTES", 64 << 10)
    numbers = "WITH RECURSIVE n(i) AS (VALUES(10) UNION ALL SELECT i + 1 FROM n WHERE i < 3000)"
    more = f"{numbers} INSERT INTO t SELECT i, hex(i) FROM n"
    big = ["tenant-000", "tenant-007", "tenant-008", "tenant-119"]
    for each in big:
        run(store, each, more, "INSERT INTO t SELECT a + 5000, printf('%0100d', a) FROM t")
    reader, parts = planned(store, partitions=8)
    pieces = [each for part in parts for each in part.value if not isinstance(each, LentRange)]
    assert {piece.version.database for piece in pieces} == set(big)
    assert len(pieces) > len(big)
    found = read(reader, parts)
    assert len(found) == len(set(found)), "no row twice"
    assert [row for row in found if row[1] < 10] == expected()
    assert len([row for row in found if row[1] >= 10]) == len(big) * (2 * 2_991 + 2)


def test_options_mean_the_same_over_many(store: Store) -> None:
    run(store, "tenant-005", "ALTER TABLE t ADD COLUMN c", "UPDATE t SET c = 7")
    run(store, "tenant-006", "DROP TABLE t")
    with pytest.raises(NotFound):
        read(*planned(store))
    without = [number for number in range(DATABASES) if number != 6]
    assert read(*planned(store, absent="skip")) == expected(iter(without))
    merged = read(*planned(store, absent="skip", merge_schema="true"))
    assert [row[:3] for row in merged] == expected(iter(without))
    assert {row[3] for row in merged if row[0] == "tenant-005"} == {7}
    assert {row[3] for row in merged if row[0] != "tenant-005"} == {None}
    assert len(read(*planned(store, absent="skip", where="a = 2"))) == len(without)
    with pytest.raises(InvalidInput):
        planned(store, absent="skip", where="nothing = 2")
    for number in (3, 70):
        store.snapshot(f"tenant-{number:03d}", "nightly")
        run(store, f"tenant-{number:03d}", "DELETE FROM t")
    assert read(*planned(store, snapshot="nightly", absent="skip")) == expected(iter((3, 70)))
    with pytest.raises(UnknownDatabase, match="has this name"):
        planned(store, databases="tenant-*,nobody", absent="skip")


def test_a_lease_on_more_databases_than_a_batch_has_rows_is_renewed_and_ends(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.manifest, "submit", submits := Counted(store.manifest.submit))
    monkeypatch.setattr(leases, "ROWS_AT_ONCE", 50)
    reader, parts = planned(store)
    for _ in range(3):
        clock.advance(KEEP_SECONDS - 1)
        store.manifest.leases.renew(parts[0].value[0].lease_id)
    assert read(reader, parts) == expected()
    clock.advance(KEEP_SECONDS + 1)
    store.maintain()
    with store.manifest.read() as txn:
        assert txn.count(t.SNAPSHOT_READERS) == 0
    assert max(submits.sizes) <= 50


def test_neighbours_are_joined_up_to_a_size() -> None:
    def cuts(ranges: list[LentRange]) -> list[tuple[str, str, int]]:
        return [(each.after, each.last, each.size_bytes) for each in ranges]

    ranges = [LentRange(1, str(number), str(number + 1), 10, "") for number in range(5)]
    assert cuts(joined(ranges, 25)) == [("0", "2", 20), ("2", "4", 20), ("4", "5", 10)]
    assert cuts(joined(ranges, 100)) == [("0", "5", 50)]
    apart = [LentRange(1, "a", "b", 10, ""), LentRange(1, "c", "d", 10, "")]
    assert joined(apart, 100) == apart, "a large database is between them"


def test_spark_reads_more_databases_than_it_lists(spark: SparkSession, tmp_path: Path) -> None:
    """With the limits as they are: other processes plan and read."""
    with owned(spark, tmp_path / "many") as many:
        many.run("template", "CREATE TABLE t(a INTEGER PRIMARY KEY)", "INSERT INTO t VALUES (1), (2)")
        many.store.fork_many("template", [f"tenant-{number:04d}" for number in range(1_100)])
        frame = many.read("quire.sqlite", databases="tenant-*", table="t")
        many.run("tenant-0003", "INSERT INTO t VALUES (3)")
        total = frame.selectExpr("count(*)", "count(distinct _database)", "sum(a)")
        assert rows_of(total) == [(2_201, 1_100, 3_303)]
        many.run("tenant-0004", "INSERT INTO t VALUES (4)")
        assert rows_of(total) == [(2_201, 1_100, 3_303)], "a frame reads the versions of its first query"
        assert many.store.manifest.leases.count() <= 2
