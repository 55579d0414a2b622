"""What a write that cannot succeed says: the option that creates the database; and `NaN`, which SQLite stores as NULL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quire.spark.save_table import save
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
