"""`quire.rows`: rows that differ between two versions of one database or of many.

Most tests plan and read in this process, as Spark does in its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import quire
from quire.core.errors import InvalidInput, NotFound, UnknownSnapshot
from quire.objects.open import open_store
from quire.spark.access import options_of
from quire.spark.sources import rows as rows_source
from quire.spark.sources import views
from quire.spark.sources.rows import RowsSource
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.spark.served_store import QUIET, rows_of, serve_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOW_MS = 1_750_000_000_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with quire.open(tmp_path / "store", settings=QUIET, clock=ManualClock(now_ms=NOW_MS)) as store:
        options_of(store)
        yield store
        assert store.manifest.check() == []


def run(store: Store, database: str, *statements: str) -> None:
    with closing(store.sqlite(database, create=True)) as connection:
        for sql in statements:
            connection.execute(sql)


def read(store: Store, **options: Any) -> list[dict[str, Any]]:
    """The rows that tasks read."""
    return [row for part in parts_of(store, **options) for row in part]


def parts_of(store: Store, **options: Any) -> list[list[dict[str, Any]]]:
    source_options = {name.rstrip("_"): str(value) for name, value in options.items()}
    source = RowsSource({"store": store.path, **source_options})
    reader = source.reader(source.schema())
    return [[row for batch in reader.read(partition) for row in batch.to_pylist()] for partition in reader.partitions()]


def changes(rows: list[dict[str, Any]], *columns: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(row[name] for name in ("_op", "_key", *columns)) for row in rows)


def test_rows_between_two_versions(store: Store) -> None:
    run(
        store,
        "shop",
        "CREATE TABLE t(id INTEGER PRIMARY KEY, who TEXT)",
        "INSERT INTO t VALUES (1, 'a'), (2, 'b'), (3, 'c')",
    )
    store.snapshot("shop", "monday")
    run(
        store,
        "shop",
        "UPDATE t SET who = 'B' WHERE id = 2",
        "DELETE FROM t WHERE id = 1",
        "INSERT INTO t VALUES (9, 'z')",
    )
    store.snapshot("shop", "tuesday")
    run(store, "shop", "DELETE FROM t")
    rows = read(store, database="shop", table="t", from_="monday", to="tuesday", before="true")
    assert changes(rows, "id", "who") == [("delete", "1", 1, "a"), ("insert", "9", 9, "z"), ("update", "2", 2, "B")]
    assert {row["_op"]: row["_before"] for row in rows} == {
        "delete": {"id": 1, "who": "a"},
        "insert": None,
        "update": {"id": 2, "who": "b"},
    }
    version = store.manifest.snapshots.get("shop", "tuesday")
    assert {(row["_database"], row["_table"], row["_epoch"]) for row in rows} == {("shop", "t", version.anchor_lsn)}
    assert {row["_committed_at"] for row in rows} == {datetime.fromtimestamp(NOW_MS / 1000, UTC)}
    assert changes(read(store, database="shop", table="t", from_="tuesday")) == [
        ("delete", "2"), ("delete", "3"), ("delete", "9"),
    ]  # fmt: skip
    assert changes(read(store, database="shop", table="t", to="monday"), "who") == [
        ("insert", "1", "a"), ("insert", "2", "b"), ("insert", "3", "c"),
    ]  # fmt: skip
    assert read(store, database="shop", table="t", from_="monday", to="monday") == []


def test_keys_of_a_table_without_rowid_are_json(store: Store) -> None:
    run(
        store,
        "shop",
        "CREATE TABLE t(v, a TEXT, b, PRIMARY KEY(a, b)) WITHOUT ROWID",
        "INSERT INTO t VALUES (1, 'x', x'00ff')",
    )
    store.snapshot("shop", "monday")
    run(store, "shop", "UPDATE t SET v = 1.0", "INSERT INTO t VALUES (0, 'é\"', 2.5), (0, 'é\"', 3)")
    rows = read(store, database="shop", table="t", from_="monday", columns="v,a")
    assert changes(rows, "v") == [
        ("insert", '["é\\"",2.5]', 0.0), ("insert", '["é\\"",3]', 0.0), ("update", '["x",{"blob":"00ff"}]', 1.0),
    ]  # fmt: skip


def test_created_dropped_and_changed_tables_are_reported(store: Store) -> None:
    run(
        store,
        "shop",
        "CREATE TABLE a(x)",
        "INSERT INTO a VALUES (1), (2)",
        "CREATE TABLE b(x)",
        "INSERT INTO b VALUES (1), (2)",
    )
    run(store, "shop", "CREATE TABLE gone(x)", "INSERT INTO gone VALUES (7)")
    store.snapshot("shop", "monday")
    run(
        store, "shop", "ALTER TABLE a ADD COLUMN y DEFAULT 'd'", "ALTER TABLE b RENAME COLUMN x TO z", "DROP TABLE gone"
    )
    run(store, "shop", "CREATE TABLE late(x)", "INSERT INTO late VALUES (5)")
    source_options = {"database": "shop", "from_": "monday", "notices": "true"}
    assert changes(read(store, table="a", **source_options), "x", "y") == [
        ("compared", "altered", None, None), ("update", "1", 1, "d"), ("update", "2", 2, "d"),
    ]  # fmt: skip
    assert changes(read(store, table="b", **source_options), "z") == [
        ("compared", "altered", None), ("update", "1", 1), ("update", "2", 2),
    ]  # fmt: skip
    assert changes(read(store, table="gone", **source_options), "x") == [
        ("compared", "dropped", None),
        ("delete", "1", 7),
    ]
    assert changes(read(store, table="late", **source_options), "x") == [
        ("compared", "created", None),
        ("insert", "1", 5),
    ]
    run(store, "shop", "DROP TABLE b", "CREATE TABLE b(x PRIMARY KEY) WITHOUT ROWID", "INSERT INTO b VALUES (1)")
    assert changes(read(store, database="shop", from_="monday", table="b"), "x") == [
        ("delete", "1", 1), ("delete", "2", 2), ("insert", "[1]", 1),
    ]  # fmt: skip


def test_after_vacuum_everything_is_compared_with_a_notice(store: Store) -> None:
    run(store, "shop", "CREATE TABLE filler(x)", "CREATE TABLE t(x)")
    with closing(store.sqlite("shop")) as connection, connection:
        for table in ("filler", "t"):
            connection.executemany(f"INSERT INTO {table} VALUES (?)", [("x" * 500,) for _ in range(200)])
    run(store, "shop", "DROP TABLE filler")
    store.snapshot("shop", "monday")
    run(store, "shop", "VACUUM", "DELETE FROM t WHERE rowid = 5")
    rows = read(store, database="shop", table="t", from_="monday", notices="true")
    assert changes(rows) == [("compared", "rewritten"), ("delete", "5")]


def test_a_large_database_is_divided_where_its_rows_may_differ(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_source, "PIECE_BYTES", 8_192)
    run(store, "shop", "CREATE TABLE t(id INTEGER PRIMARY KEY, x)")
    with closing(store.sqlite("shop")) as connection, connection:
        connection.executemany("INSERT INTO t VALUES (?, ?)", [(n, "x" * 200) for n in range(2_000)])
    store.checkpoint("shop")
    store.snapshot("shop", "monday")
    run(store, "shop", "UPDATE t SET x = 'new' WHERE id IN (3, 700, 1900)")
    parts = parts_of(store, database="shop", table="t", from_="monday", partitions=2)
    assert len(parts) == 2
    assert changes([row for part in parts for row in part], "id") == [
        ("update", "1900", 1900),
        ("update", "3", 3),
        ("update", "700", 700),
    ]
    all_parts = parts_of(store, database="shop", table="t", partitions=3, notices="true")
    assert len(all_parts) == 3
    assert sorted(row["id"] for part in all_parts for row in part) == list(range(2_000))


def test_a_large_table_that_gets_rowids_is_compared_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: the new rows were divided by rowid, and each of the tasks deleted all old rows."""
    monkeypatch.setattr(rows_source, "PIECE_BYTES", 8_192)
    run(store, "shop", "CREATE TABLE t(id INTEGER PRIMARY KEY, x) WITHOUT ROWID", "INSERT INTO t VALUES (1, 'old')")
    store.snapshot("shop", "monday")
    run(store, "shop", "DROP TABLE t", "CREATE TABLE t(id INTEGER PRIMARY KEY, x)")
    with closing(store.sqlite("shop")) as connection, connection:
        connection.executemany("INSERT INTO t VALUES (?, ?)", [(n, "x" * 200) for n in range(500)])
    rows = read(store, database="shop", table="t", from_="monday", partitions=3)
    assert [row["_key"] for row in rows if row["_op"] == "delete"] == ["[1]"]
    assert sorted(row["id"] for row in rows if row["_op"] == "insert") == list(range(500))


def test_many_databases_share_tasks_and_each_has_its_own_versions(store: Store) -> None:
    for number in range(30):
        run(store, f"tenant-{number:02}", "CREATE TABLE t(a)", f"INSERT INTO t VALUES ({number})")
        if number != 7:
            store.snapshot(f"tenant-{number:02}", "monday")
        run(store, f"tenant-{number:02}", "INSERT INTO t VALUES (-1)")
    run(store, "other", "CREATE TABLE u(a)")
    source_options: dict[str, Any] = {"databases": "tenant-*", "table": "t", "from_": "monday"}
    with pytest.raises(UnknownSnapshot, match="monday"):
        read(store, **source_options)
    parts = parts_of(store, **source_options, absent="skip", partitions=4)
    rows = [row for part in parts for row in part]
    assert len(parts) == 4
    assert sorted(row["_database"] for row in rows) == [f"tenant-{number:02}" for number in range(30) if number != 7]
    assert {(row["_op"], row["a"]) for row in rows} == {("insert", -1)}
    assert len(read(store, **source_options, absent="empty")) == 29 + 2
    with pytest.raises(NotFound, match="no such table"):
        read(store, databases="*", table="t")
    assert len(read(store, databases="*", table="t", absent="skip")) == 60


def test_the_databases_of_a_task_share_an_object_store_and_a_batch(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(10):
        run(store, f"tenant-{number}", "CREATE TABLE t(a)")
        store.snapshot(f"tenant-{number}", "monday")
        run(store, f"tenant-{number}", f"INSERT INTO t VALUES ({number})")
    opened_stores = list[str]()

    def recording_open(url: str, **more: Any) -> Any:
        opened_stores.append(url)
        return open_store(url, **more)

    source_options = {"databases": "tenant-*", "table": "t", "from": "monday", "upload": "true", "partitions": "2"}
    source = RowsSource({"store": store.path, **source_options})
    reader = source.reader(source.schema())
    parts = list(reader.partitions())
    monkeypatch.setattr(views, "open_store", recording_open)
    batches = [batch for part in parts for batch in reader.read(part)]
    assert sorted(value for batch in batches for value in batch.column("a").to_pylist()) == list(range(10))
    assert len(opened_stores) == len(batches) == len(parts) == 2


def test_databases_are_selected_by_tags(store: Store) -> None:
    for name, tags in (("a", {"tier": "gold"}), ("b", {"tier": "gold", "eu": "1"}), ("c", {"tier": "free"})):
        run(store, name, "CREATE TABLE t(a)", "INSERT INTO t VALUES (1)")
        store.set_options(name, tags=tags)
    assert [row["_database"] for row in read(store, tags="tier=gold", table="t")] == ["a", "b"]
    assert [row["_database"] for row in read(store, databases="*", tags="tier=gold, eu", table="t")] == ["b"]
    assert sorted(row["_database"] for row in read(store, tags="tier", table="t")) == ["a", "b", "c"]
    with pytest.raises(NotFound, match="no page database matches"):
        read(store, tags="tier=silver", table="t")


def test_invalid_options_are_refused_with_a_reason(store: Store) -> None:
    run(store, "shop", "CREATE TABLE t(_op)", "CREATE VIEW v AS SELECT 1 AS a")
    with pytest.raises(InvalidInput, match="names that this source reserves"):
        read(store, database="shop", table="t")
    with pytest.raises(InvalidInput, match="no rowid that can be read"):
        read(store, database="shop", table="v")
    with pytest.raises(NotFound, match="no such table"):
        read(store, database="shop", table="nope")


def test_on_spark(spark: SparkSession, tmp_path: Path) -> None:
    with serve_store(spark, tmp_path / "store") as owner:
        for name in ("east", "west"):
            owner.run(name, "CREATE TABLE t(id INTEGER PRIMARY KEY, price)", "INSERT INTO t VALUES (1, 2.5), (2, 3)")
            owner.store.snapshot(name, "monday")
            owner.run(name, "UPDATE t SET price = 4 WHERE id = 2")
        frame = owner.read("quire.rows", databases="*", table="t", from_="monday", before="true")
        selected = frame.selectExpr("_database", "_op", "_key", "price * 2", "_before.price")
        assert rows_of(selected, "_database") == [("east", "update", "2", 8.0, 3.0), ("west", "update", "2", 8.0, 3.0)]
        assert frame.where("_committed_at > timestamp '2020-01-01'").count() == 2
