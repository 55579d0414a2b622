"""Very many databases in one query: partitions are ranges of names, and tasks ask the owner for the versions of theirs.

All tests but the last run without a session: readers plan here, and read from pickles as Spark's tasks do.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import quire
from quire.core.errors import InvalidInput, NotFound, SnapshotGone, UnknownDatabase, UnknownSnapshot
from quire.manifest import leases
from quire.manifest import tables as t
from quire.objects.open import open_store
from quire.pages import anchors, held_versions
from quire.service.client import Client
from quire.spark.access import options_of
from quire.spark.sources import pages, sqlite, views
from quire.spark.sources.base import KEEP_SECONDS
from quire.spark.sources.pages import PagesSource
from quire.spark.sources.sqlite import SqliteSource
from quire.spark.sources.views import LentRange, LocatedVersion, VersionReaders, joined
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.spark.served_store import QUIET, open_served, rows_of, serve_store

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
    return f"tenant-{number * 7 % DATABASES:03d}"  # names are not in the order of ids


def run(store: Store, database: str, *statements: str) -> None:
    with closing(store.sqlite(database, create=True)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def planned(store: Store, **options: Any) -> tuple[Any, list[Any]]:
    return planned_with(SqliteSource, store, table="t", **options)


def planned_with(kind: type[SqliteSource] | type[PagesSource], store: Store, **options: Any) -> tuple[Any, list[Any]]:
    all_options = {"store": store.path, "databases": "tenant-*", **options}
    source = kind({name: str(value) for name, value in all_options.items()})
    reader = source.reader(source.schema())
    return reader, list(reader.partitions())


def read(reader: Any, parts: list[Any]) -> list[tuple[Any, ...]]:
    """The rows that tasks read, from pickles."""
    tasks = pickle.loads(pickle.dumps([(reader, part) for part in parts]))
    return sorted(
        tuple(row.values()) for reader, part in tasks for batch in reader.read(part) for row in batch.to_pylist()
    )


def expected(numbers: Iterator[int] | range = range(DATABASES)) -> list[tuple[Any, ...]]:
    return [row for number in numbers for row in ((f"tenant-{number:03d}", 1, "x"), (f"tenant-{number:03d}", 2, "y"))]


class RecordingSubmit:
    """A `submit` that records the number of operations."""

    def __init__(self, submit: Any) -> None:
        self.submit, self.sizes = submit, list[int]()

    def __call__(self, ops: Any, *args: Any, **more: Any) -> Any:
        self.sizes.append(len(ops))
        return self.submit(ops, *args, **more)


def test_many_databases_are_ranges_of_names_of_even_weight(store: Store, clock: ManualClock) -> None:
    head = store.feed.head()
    reader, parts = planned(store, partitions=4)
    ranges = [range_ for part in parts for range_ in part.value]
    assert all(isinstance(range_, LentRange) for range_ in ranges)
    assert len(ranges) <= 32
    assert len(pickle.dumps(parts)) < 8_000, "the partitions do not list databases"
    weights = [sum(range_.size_bytes for range_ in part.value) for part in parts]
    assert len(parts) == 4
    assert max(weights) < 1.4 * min(weights)
    assert read(reader, parts) == expected()
    assert len(read(reader, parts[:1])) + len(read(reader, parts[1:])) == 2 * DATABASES
    assert store.manifest.leases.count() == 1
    assert store.feed.head() == head
    clock.advance(KEEP_SECONDS + 1)
    store.maintain()
    with store.manifest.read() as txn:
        assert txn.count(t.SNAPSHOT_READERS) == 0, "nothing is left after some minutes"
    with pytest.raises(SnapshotGone, match="load it again"):
        read(reader, parts)


def test_few_databases_are_listed_and_need_no_owner_to_be_read(store: Store) -> None:
    reader, parts = planned(store, databases="tenant-00*")
    assert not [piece for part in parts for piece in part.value if isinstance(piece, LentRange)]
    assert read(reader, parts) == expected(range(10))


def test_pages_of_many_databases_are_ranges_of_names_and_large_databases_are_cut(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(store, "tenant-large", "CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT)")
    run(store, "tenant-large", *(f"INSERT INTO t VALUES ({number}, '{'x' * 900}')" for number in range(60)))
    monkeypatch.setattr(pages, "SMALL_BYTES", 8 * 4_096)
    reader, parts = planned_with(PagesSource, store, partitions=4)
    assert len(parts) == 4
    pieces = [piece for part in parts for piece in part.value]
    assert {piece.version.database for piece in pieces if not isinstance(piece, LentRange)} == {"tenant-large"}
    run(store, "tenant-007", "INSERT INTO t VALUES (3, 'later')")
    store.drop("tenant-008")
    rows = read(reader, parts)
    assert len({database for database, _, _ in rows}) == DATABASES + 1
    listed, listed_parts = planned_with(PagesSource, store, databases="tenant-009,tenant-large")
    for name in ("tenant-009", "tenant-large"):
        assert [row for row in rows if row[0] == name] == [row for row in read(listed, listed_parts) if row[0] == name]
    bodies = {row[1:] for row in rows if row[0] == "tenant-009"}
    for name in ("tenant-007", "tenant-008"):
        assert {row[1:] for row in rows if row[0] == name} == bodies, "as of the plan"


def test_the_databases_of_a_task_share_a_batch(store: Store) -> None:
    """Spark has a cost per batch, however small."""
    for databases, rows in (("tenant-00*", 20), ("tenant-*", 2 * DATABASES)):
        reader, parts = planned(store, databases=databases, partitions=1)
        assert [batch.num_rows for part in parts for batch in reader.read(part)] == [rows]


def test_a_version_that_a_task_reads_in_several_ranges_is_opened_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(store, "large", "CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT)")
    run(store, "large", *(f"INSERT INTO t VALUES ({number}, '{'x' * 900}')" for number in range(400)))
    monkeypatch.setattr(sqlite, "PIECE_BYTES", 1)
    reader, parts = planned(store, databases="large", partitions=1)
    assert [len(part.value) for part in parts] == [2]
    versions: list[LocatedVersion] = []
    open_version = VersionReaders.open

    def recording_open(readers: VersionReaders, version: LocatedVersion) -> Any:
        versions.append(version)
        return open_version(readers, version)

    monkeypatch.setattr(VersionReaders, "open", recording_open)
    assert [row[1] for row in read(reader, parts)] == list(range(400))
    assert len(versions) == 1


def test_changes_after_the_plan_are_not_read(store: Store, clock: ManualClock) -> None:
    reader, parts = planned(store)
    run(store, "tenant-000", "INSERT INTO t VALUES (3, 'later')")
    run(store, "tenant-050", "DELETE FROM t")
    run(store, "tenant-050a", "CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT)", "INSERT INTO t VALUES (9, 'new')")
    store.drop_many(["tenant-001", "tenant-051", "tenant-119"])
    store.drop("template")
    store.maintain()
    assert read(reader, parts) == expected(), "as planned, including dropped databases"
    assert len(read(*planned(store))) == 2 * DATABASES + 1 - 2 + 1 - 6
    clock.advance(3_600.0)  # both queries have ended
    store.maintain()
    with store.manifest.read() as txn:
        assert txn.count(t.DB) < DATABASES, "dropped databases are removed completely"
    assert store.manifest.check() == []


def test_a_plan_outlives_its_owner(store: Store, tmp_path: Path, clock: ManualClock) -> None:
    reader, parts = planned(store)
    store.close()
    with open_served(tmp_path / "store", clock) as again:
        assert read(reader, parts) == expected()
        assert again.manifest.leases.count() == 1


def test_databases_that_are_dropped_while_a_query_is_planned_are_left_out(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_name(monkeypatch, "tenant-100", lambda: store.drop_many(["tenant-100", "tenant-110"]))
    rows = read(*planned(store))
    assert rows == expected(number for number in range(DATABASES) if number not in (100, 110))


def at_name(monkeypatch: pytest.MonkeyPatch, reached: str, callback: Callable[[], object]) -> None:
    """Run a callback when the listing of databases reaches a name."""
    each_name = views.DatabaseSelection.each_name

    def acting(self: Any, client: Any) -> Iterator[str]:
        for name in each_name(self, client):
            yield name
            if name == reached:
                callback()

    monkeypatch.setattr(views.DatabaseSelection, "each_name", acting)


def test_all_databases_of_a_call_can_be_dropped_without_listing_the_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty call was refused, and each dropped database caused all of them to be listed."""
    dropped = [0, 1, 2, 60, 61, 62, 119]
    at_name(monkeypatch, "tenant-015", lambda: store.drop_many([f"tenant-{number:03d}" for number in dropped]))
    monkeypatch.setattr(views.DatabaseSelection, "matching", lambda *_: pytest.fail("a list of all databases"))
    rows = read(*planned(store))
    assert rows == expected(number for number in range(DATABASES) if number not in dropped)
    assert store.manifest.leases.count() == 1


def test_a_database_that_is_renamed_while_a_query_is_planned_is_read_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large one was found under both names."""
    monkeypatch.setattr(sqlite, "PIECE_BYTES", 64 << 10)
    numbers = "WITH RECURSIVE n(i) AS (VALUES(10) UNION ALL SELECT i + 1 FROM n WHERE i < 3000)"
    run(store, "tenant-005", f"{numbers} INSERT INTO t SELECT i, printf('%0100d', i) FROM n")

    def rename() -> None:
        store.rename("tenant-005", "tenant-200")  # a large one
        store.rename("tenant-006", "tenant-201")

    monkeypatch.setattr(views, "LISTED_AT_ONCE", 50)  # the listing has not reached the new names
    at_name(monkeypatch, "tenant-070", rename)
    rows_read = read(*planned(store))
    assert len(rows_read) == len(set(rows_read)) == 2 * DATABASES + 2_991
    assert len({row[0] for row in rows_read}) == DATABASES
    assert {row[0] for row in rows_read if row[0] >= "tenant-2"} == {"tenant-200", "tenant-201"}


def test_a_plan_that_fails_keeps_nothing(store: Store) -> None:
    with pytest.raises(UnknownDatabase, match="has this name"):
        planned(store, databases="tenant-*,tenants-of-nobody")
    assert store.manifest.leases.count() == 0
    with store.manifest.read() as txn:
        assert txn.count(t.SNAPSHOT_READERS) == 0


def test_a_database_that_is_dropped_before_its_log_is_uploaded_is_left_out(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (4, 50, 51):
        run(store, f"tenant-{number:03d}", "UPDATE t SET b = 'z'")
    lend, dropped = Client.lend, ["tenant-050"]

    def late(self: Client, *args: Any, upload: bool = False, **more: Any) -> Any:
        if upload and "tenant-050" in args[0] and dropped:
            store.drop(dropped.pop())
        return lend(self, *args, upload=upload, **more)

    monkeypatch.setattr(Client, "lend", late)
    reader, parts = planned(store, upload="true")
    assert not dropped
    changed_names = {"tenant-004", "tenant-051"}
    rows = [row for row in expected() if row[0] != "tenant-050"]
    assert read(reader, parts) == sorted((*row[:2], "z" if row[0] in changed_names else row[2]) for row in rows)


def test_a_call_that_fails_after_its_rows_were_written_keeps_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database was opened and dropped between the rows of the lease and the read of its version: its row had no
    version, and the error for its reader was that the lease had ended.
    """
    at_rest, looks = anchors._mark_at_rest, list[int]()

    def dropped_at_second(engine: Any, txn: Any, db_id: int) -> Any:
        looks.append(db_id)
        if looks.count(db_id) == 1 or db_id != db_id_1:
            return at_rest(engine, txn, db_id)
        store.drop("tenant-001")
        return None

    db_id_1 = store.database("tenant-001").db_id
    monkeypatch.setattr(anchors, "_mark_at_rest", dropped_at_second)
    reader, parts = planned(store)
    assert looks.count(db_id_1) == 2
    assert read(reader, parts) == expected(number for number in range(DATABASES) if number != 1)


def test_names_of_any_alphabet_are_at_the_ends_of_ranges(store: Store) -> None:
    names = [
        "tenant-",
        "tenant-~",
        "tenant-é",
        "tenant-ￜ",
        "tenant-\U0001f600",
        "tenant-\U0001f600z",
        "tenant-zz, too",
    ]
    store.fork_many("template", names)
    reader, parts = planned(store)
    ends = {range_.last for part in parts for range_ in part.value}
    assert max(ends) == "tenant-\U0001f600z"
    assert {row[0] for row in read(reader, parts)} == {*names, *(row[0] for row in expected())}
    assert len(read(reader, parts)) == 2 * (DATABASES + len(names))


def test_a_repeated_or_abandoned_task_reads_the_same(store: Store) -> None:
    reader, parts = planned(store, partitions=2)
    started = reader.read(parts[0])
    assert next(started).num_rows, "the task fails here"
    started.close()
    first = read(reader, parts[:1])
    run(store, first[0][0], "DELETE FROM t")
    assert read(reader, [parts[0], parts[0]]) == sorted(first * 2), "two attempts at once, as with speculation"


def test_a_task_opens_the_object_store_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was opened per database, and what forks share was read repeatedly."""
    opened_stores = list[str]()

    def recording_open(url: str, **more: Any) -> Any:
        opened_stores.append(url)
        return open_store(url, **more)

    reader, parts = planned(store, upload="true", partitions=2)
    monkeypatch.setattr(views, "open_store", recording_open)
    rows_read = [tuple(row.values()) for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
    assert sorted(rows_read) == expected()
    assert len(opened_stores) == len(parts) == 2


def test_patterns_and_tags_select_within_ranges(store: Store) -> None:
    odd = [number for number in range(DATABASES) if number % 2]
    for number in odd:
        store.set_options(f"tenant-{number:03d}", tags={"plan": "paid"})
    reader, parts = planned(store, tags="plan=paid")
    assert all(isinstance(range_, LentRange) for part in parts for range_ in part.value)
    store.set_options("tenant-000", tags={"plan": "paid"})
    store.set_options("tenant-001", tags={})
    assert read(reader, parts) == expected(iter(odd))
    rows = read(*planned(store, databases="tenant-0[0-4]*,tenant-11?"))
    assert rows == expected(number for number in range(DATABASES) if number < 50 or number >= 110)


def test_snapshots_of_many_databases_are_ranges_too(store: Store) -> None:
    """All their versions were in the partitions."""
    without = {3, 4, 5, 70}
    for number in set(range(DATABASES)) - without:
        store.snapshot(f"tenant-{number:03d}", "nightly")
    for number in (0, 1, 50):
        run(store, f"tenant-{number:03d}", "DELETE FROM t")
    with pytest.raises(UnknownSnapshot, match="no such snapshot"):
        planned(store, snapshot="nightly")
    assert store.manifest.leases.count() == 0
    reader, parts = planned(store, snapshot="nightly", absent="skip", partitions=3)
    assert all(isinstance(range_, LentRange) for part in parts for range_ in part.value)
    assert len(pickle.dumps(parts)) < 8_000
    for number in (1, 50, 119):
        store.drop_snapshot(f"tenant-{number:03d}", "nightly")
    store.snapshot("tenant-003", "nightly")
    store.drop("tenant-006", snapshots=True)
    store.maintain()
    present = [number for number in range(DATABASES) if number not in without]
    assert read(reader, parts) == expected(iter(present)), "as planned, including dropped databases"
    assert store.manifest.leases.count() == 1
    remaining = [number for number in range(DATABASES) if number not in (1, 4, 5, 6, 50, 70, 119)]
    assert read(*planned(store, snapshot=1, absent="skip", upload="true")) == expected(iter(remaining)), (
        "by snapshot id"
    )
    assert store.manifest.check() == []


def test_columns_of_all_databases_are_read_in_waves(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """All names were listed at once, and the columns of each database kept."""
    monkeypatch.setattr(sqlite, "COLUMNS_AT_ONCE", 10)
    each_name, columns = views.DatabaseSelection.each_name, sqlite._columns
    ahead = [0, 0]  # current and maximum

    def counting_names(self: Any, client: Any) -> Iterator[str]:
        for name in each_name(self, client):
            ahead[0] += 1
            ahead[1] = max(ahead)
            yield name

    def counting_columns(*args: Any) -> Any:
        result = columns(*args)
        ahead[0] -= 1
        return result

    monkeypatch.setattr(views.DatabaseSelection, "each_name", counting_names)
    monkeypatch.setattr(sqlite, "_columns", counting_columns)
    source = SqliteSource({"store": store.path, "table": "t", "databases": "tenant-*", "merge_schema": "true"})
    assert source.schema().names == ["_database", "a", "b"]
    assert ahead[1] <= 10


def test_large_databases_among_many_are_divided(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "PIECE_BYTES", 64 << 10)
    numbers = "WITH RECURSIVE n(i) AS (VALUES(10) UNION ALL SELECT i + 1 FROM n WHERE i < 3000)"
    more = f"{numbers} INSERT INTO t SELECT i, hex(i) FROM n"
    big = ["tenant-000", "tenant-007", "tenant-008", "tenant-119"]
    for database in big:
        run(store, database, more, "INSERT INTO t SELECT a + 5000, printf('%0100d', a) FROM t")
    reader, parts = planned(store, partitions=8)
    pieces = [piece_ for part in parts for piece_ in part.value if not isinstance(piece_, LentRange)]
    assert {piece.version.database for piece in pieces} == set(big)
    assert len(pieces) > len(big)
    rows_read = read(reader, parts)
    assert len(rows_read) == len(set(rows_read)), "no row is read twice"
    assert [row for row in rows_read if row[1] < 10] == expected()
    assert len([row for row in rows_read if row[1] >= 10]) == len(big) * (2 * 2_991 + 2)


def test_options_mean_the_same_for_many_databases(store: Store) -> None:
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
    monkeypatch.setattr(store.manifest, "submit", submits := RecordingSubmit(store.manifest.submit))
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
        return [(range_.after, range_.last, range_.size_bytes) for range_ in ranges]

    ranges = [LentRange(1, str(number), str(number + 1), 10, "") for number in range(5)]
    assert cuts(joined(ranges, 25)) == [("0", "2", 20), ("2", "4", 20), ("4", "5", 10)]
    assert cuts(joined(ranges, 100)) == [("0", "5", 50)]
    apart = [LentRange(1, "a", "b", 10, ""), LentRange(1, "c", "d", 10, "")]
    assert joined(apart, 100) == apart, "a large database lies between them"


def test_spark_reads_more_databases_than_it_lists(spark: SparkSession, tmp_path: Path) -> None:
    """With the default limits: other processes plan and read."""
    with serve_store(spark, tmp_path / "many") as many:
        many.run("template", "CREATE TABLE t(a INTEGER PRIMARY KEY)", "INSERT INTO t VALUES (1), (2)")
        many.store.fork_many("template", [f"tenant-{number:04d}" for number in range(1_100)])
        frame = many.read("quire.sqlite", databases="tenant-*", table="t")
        many.run("tenant-0003", "INSERT INTO t VALUES (3)")
        total = frame.selectExpr("count(*)", "count(distinct _database)", "sum(a)")
        assert rows_of(total) == [(2_201, 1_100, 3_303)]
        many.run("tenant-0004", "INSERT INTO t VALUES (4)")
        assert rows_of(total) == [(2_201, 1_100, 3_303)], "a frame reads the versions of its first query"
        assert many.store.manifest.leases.count() <= 2
