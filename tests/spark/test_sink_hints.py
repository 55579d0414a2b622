"""What a write that cannot succeed says: the option that creates the database; and `NaN`, which SQLite stores as NULL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import AnalysisException

from quire.core.errors import NameTaken
from quire.spark.save_table import save
from quire.spark.sources.kv_load import bulk_load
from tests.spark.served_store import ServedStore, serve_store
from tests.spark.sinks import FileQuery

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def owner(spark: SparkSession, tmp_path: Path) -> Iterator[ServedStore]:
    with serve_store(spark, tmp_path / "store") as owner:
        yield owner


@pytest.mark.slow
def test_a_missing_database_is_reported_with_the_option_that_creates_it(owner: ServedStore) -> None:
    frame = owner.spark.createDataFrame([(1, float("nan"))], "id bigint, price double")
    with pytest.raises(Exception, match=r'no database has this name.*create="database" creates it'):
        save(frame, owner.store, "shop", "t", create=False)
    save(frame, owner.store, "shop", "t")
    assert owner.query("shop", "SELECT id, price FROM t") == [(1, None)]


@pytest.mark.slow
def test_the_record_of_a_query_is_no_row_of_its_set(owner: ServedStore, tmp_path: Path) -> None:
    query = FileQuery(owner, tmp_path, "key string, value string", "quire.kv", {"database": "cart"})
    query.add({"key": "a", "value": "1"}, {"key": "b", "value": "2"})
    query.run()
    assert owner.read("quire.kv", database="cart").count() == 2
    query.add({"key": "c", "value": "3"})
    query.run()
    assert owner.read("quire.kv", database="cart", columns="value").count() == 3


@pytest.mark.slow
def test_the_documentation_has_the_error_of_a_write_without_a_mode(owner: ServedStore) -> None:
    frame = owner.spark.createDataFrame([("a", "1")], "key string, value string")
    explained = (Path(__file__).parents[2] / "docs" / "spark.md").read_text("utf-8")
    writer = frame.write.format("quire.sqlite").options(**owner.options, database="shop", table="t", create="database")
    with pytest.raises(AnalysisException) as refused:
        writer.save()
    assert str(refused.value).split(" SQLSTATE")[0] in explained
    for exists, rows in (("error", 1), ("ignore", 1), ("append", 2)):
        writer.mode("append").option("exists", exists).save()
        assert owner.query("shop", "SELECT count(*) FROM t") == [(rows,)]
    with pytest.raises(AnalysisException, match="the table already exists"):
        writer.mode("append").option("exists", "error").save()
    owner.store.create("cart", "kv")
    with pytest.raises(NameTaken):
        owner.store.create("cart", "kv")
    bulk_load(frame, owner.store, "cart")
    assert owner.read("quire.kv", database="cart").count() == 1
