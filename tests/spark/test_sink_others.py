"""`writeStream` to key-value sets and streams, and saving with Spark's modes, on Spark itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quire.service.tickets import QUERY_KEYS
from quire.spark.save_table import save
from tests.spark.served_store import ServedStore, serve_store
from tests.spark.sinks import FileQuery

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


@pytest.fixture
def owner(spark: SparkSession, tmp_path: Path) -> Iterator[ServedStore]:
    with serve_store(spark, tmp_path / "store") as owner:
        yield owner


def test_a_set_has_each_batch_once(owner: ServedStore, tmp_path: Path) -> None:
    options = {"database": "cart", "delete": "gone"}
    query = FileQuery(owner, tmp_path, "key string, value string, gone boolean", "quire.kv", options)
    query.add({"key": "a", "value": "1"}, {"key": "b", "value": "2"})
    query.run()
    owner.store.kv("cart").put(b"a", b"by hand")
    query.forget_commit()
    query.run()
    assert owner.store.kv("cart").get(b"a") == b"by hand", "a repeated batch is not written again"
    query.add({"key": "b", "gone": True})
    query.run()
    assert [key for key, _ in owner.store.kv("cart").scan() if not key.startswith(QUERY_KEYS)] == [b"a"]


def test_a_stream_has_each_batch_once(owner: ServedStore, tmp_path: Path) -> None:
    query = FileQuery(owner, tmp_path, "payload string", "quire.stream", {"stream": "log"})
    query.add({"payload": "one"}, {"payload": "two"})
    query.run()
    query.forget_commit()
    query.run()
    assert [record.payload for record in owner.store.stream("log").read()] == [b"one", b"two"]


def test_saving_supports_all_of_sparks_modes(owner: ServedStore) -> None:
    frame = owner.spark.sql("SELECT 1 AS id, 'x' AS who")
    save(frame, owner.store, "shop", "t")  # the database is created, too
    with pytest.raises(Exception, match="the table already exists"):
        save(frame, owner.options, "shop", "t")
    save(owner.spark.sql("SELECT 2 AS id, 'y' AS who"), owner.store, "shop", "t", mode="ignore")
    assert owner.query("shop", "SELECT * FROM t") == [(1, "x")]
    save(frame, owner.store, "shop", "t", mode="overwrite")
    save(frame, owner.store, "shop", "t", mode="append")
    assert owner.query("shop", "SELECT * FROM t") == [(1, "x"), (1, "x")]
