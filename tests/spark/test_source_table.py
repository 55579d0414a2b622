"""`quire.table`: every table of the manifest, as a whole and in parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quire.core.errors import InvalidInput
from quire.manifest import tables as t
from quire.manifest.arrow import schema as arrow_schema_of
from quire.manifest.ops.jobs import EnqueueJob
from quire.manifest.records import JobKind
from quire.service import tables as owner_tables
from quire.spark import sessions
from quire.spark.sources.base import spark_schema
from quire.spark.sources.table import prefix_of
from tests.spark.served_store import ServedStore, rows_of, serve_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def owner(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    with serve_store(spark, tmp_path_factory.mktemp("table") / "store") as owner:
        for number in range(5):
            owner.store.create(f"db{number}", "stream", tags={"n": str(number)})
        record = owner.store.manifest.jobs.record(JobKind.VERIFY, 0, b"payload")
        owner.store.manifest.submit([EnqueueJob(number, record) for number in range(1, 3_001)]).result()
        yield owner


def test_rows_are_those_of_the_manifest(owner: ServedStore) -> None:
    with owner.store.manifest.read() as txn:
        local = txn.to_arrow("db").to_pydict()
    rows = rows_of(owner.read("quire.table", table="db"), "db_id")
    assert rows == list(zip(*local.values()))


def test_every_table_has_a_schema_that_spark_accepts(owner: ServedStore) -> None:
    """An empty table is an empty frame."""
    for table in t.TABLES.values():
        assert spark_schema(arrow_schema_of(table)).names == arrow_schema_of(table).names
    assert rows_of(owner.read("quire.table", table="snapshot_index")) == []


def test_a_large_table_is_read_in_parts_that_are_complete(owner: ServedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_tables, "CUT_ROWS_MIN", 100)
    frame = owner.read("quire.table", table="job_queue", columns="job_id", partitions=4)
    assert frame.rdd.getNumPartitions() == 4
    assert [row.job_id for row in frame.orderBy("job_id").collect()] == list(range(1, 3_001))
    assert frame.filter("job_id >= 1000 and job_id < 1010").count() == 10


def test_columns_are_selected_by_an_option(owner: ServedStore) -> None:
    frame = owner.read("quire.table", table="db", columns="name, db_id")
    assert frame.columns == ["name", "db_id"]
    assert rows_of(frame.filter("db_id = 2")) == [("db1", 2)]


WAL, NAMES = t.TABLES["wal_catalog"], t.TABLES["db_names"]


def test_rows_are_selected_by_the_first_fields_of_their_key(owner: ServedStore) -> None:
    assert rows_of(owner.read("quire.table", table="db", columns="db_id,name", key=2)) == [(2, "db1")]
    assert rows_of(owner.read("quire.table", table="db", columns="db_id", key=99)) == []
    assert rows_of(owner.read("quire.table", table="db_names", columns="name", key="db3")) == [("db3",)]
    assert owner.read("quire.table", table="db_names", key="db").count() == 5, "a prefix of a text is enough"
    assert prefix_of(WAL, "") == ()
    assert prefix_of(WAL, "4294967295,0") == (2**32 - 1, 0)


@pytest.mark.parametrize("key", ["x", "-1", "4294967296", "1,2,3", ",", "1,"])
def test_a_key_that_does_not_fit_is_refused(key: str) -> None:
    with pytest.raises(InvalidInput, match="does not fit"):
        prefix_of(WAL, key)
    assert prefix_of(NAMES, key) == (key,), "any text is valid"


def test_filters_mean_the_same_where_a_session_pushes_them(owner: ServedStore) -> None:
    """A user's own session may enable it; our readers accept no filters, so none is kept."""
    spark, setting = owner.spark, "spark.sql.python.filterPushdown.enabled"
    spark.conf.set(setting, "true")
    try:
        sessions.attach(spark)
        frame = owner.read("quire.table", table="db", columns="db_id")
        assert [frame.count(), frame.filter("db_id = 2").count(), frame.count()] == [5, 1, 5]
        assert rows_of(frame.filter("db_id = 2").union(frame.filter("db_id > 3")), "db_id") == [(2,), (4,), (5,)]
    finally:
        spark.conf.unset(setting)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs the option `table`"),
        ({"table": "nope"}, "the manifest has no such table"),
        ({"table": "db", "key": "shop"}, "does not fit the table's key.*db_id .u32."),
        ({"table": "db", "columns": "nope"}, "the table has no such column"),
        ({"table": "db", "tabel": "db"}, "has no such option"),
        ({"table": "db", "token": "secret"}, "a token cannot be an option"),
        ({"table": "db", "partitions": "many"}, "a whole number of at least 1"),
    ],
)
def test_invalid_options_are_refused_with_a_reason(owner: ServedStore, options: dict[str, str], message: str) -> None:
    with pytest.raises(Exception, match=message):
        owner.read("quire.table", **options).collect()


def test_a_missing_store_or_owner_is_an_error(owner: ServedStore, tmp_path: Path) -> None:
    read = owner.spark.read.format("quire.table").option("table", "db")
    with pytest.raises(Exception, match="no store was given"):
        read.load().collect()
    with pytest.raises(Exception, match=r"StoreNotFound.*no store found"):
        read.option("store", str(tmp_path)).load().collect()
    with serve_store(owner.spark, tmp_path / "other") as other:
        pass
    with pytest.raises(Exception, match=r"Unavailable.*no owner listens for this store"):
        read.option("store", other.store.path).load().collect()
