"""Sources read a store from its bucket alone: the rows are the owner's at that cut, and the owner's directory is not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import quire
from quire.core.settings import ArchiveSettings, MaintenanceSettings, StoreSettings
from quire.spark import options_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_rows_of_every_kind_come_from_the_bucket(spark: SparkSession, tmp_path: Path) -> None:
    settings = StoreSettings(
        object_store=str(tmp_path / "bucket"),
        maintenance=MaintenanceSettings(enabled=False),
        archive=ArchiveSettings(mode="async"),
    )
    with quire.open(tmp_path / "store", settings=settings) as store:
        with store.sqlite("shop", create=True) as db:
            db.execute("create table item(n integer primary key)")
            db.executemany("insert into item values (?)", [(n,) for n in range(300)])
        store.checkpoint("shop")
        with store.sqlite("shop") as db:
            db.execute("insert into item values (300)")  # in the WAL alone
        store.create("cart", "lsm")
        for n in range(100):
            store.kv("cart").put(b"%03d" % n, b"v", sync=False)
        store.kv("cart").flush()
        store.kv("cart").put(b"logged", b"w")
        store.create("events", "stream")
        store.stream("events").append([b"r%d" % n for n in range(50)]).result()
        store.stream("events").seal()
        store.stream("events").append(b"open").result()
        expected = dict(store.kv("cart").scan())
    os.rename(tmp_path / "store", tmp_path / "gone")
    with quire.open_archive(str(tmp_path / "bucket")) as archived:
        options = options_of(archived)
        assert options["store"] != str(tmp_path / "store")

        def rows(source: str, **given: str) -> list[tuple[Any, ...]]:
            frame = spark.read.format(source).options(**options, **given).load()
            return [tuple(row) for row in frame.collect()]

        numbers = rows("quire.sqlite", database="shop", table="item")
        assert sorted(numbers) == [(n,) for n in range(301)]
        pairs = {bytes(key): bytes(value) for key, value in rows("quire.kv", database="cart")}
        assert pairs == expected
        records = rows("quire.stream", stream="events", columns="payload")
        assert [bytes(payload) for (payload,) in records] == [*(b"r%d" % n for n in range(50)), b"open"]
        frame = spark.createDataFrame([("k", "v")], ["key", "value"])
        with pytest.raises(Exception, match="a copy of an archive"):
            frame.write.format("quire.kv").mode("append").options(**options, database="cart").save()
