"""A feature store: computed in bulk by Spark, served by key in microseconds, and reproducible for training.

Every night Spark computes the features of all customers from their orders and loads them into a key-value set: tasks
write sorted tables, and all of them are added atomically, so a request sees either yesterday's or today's features.
During the day, single customers are updated. Each load is kept as a snapshot (no bytes are copied), and a model is
trained, again on Spark, on exactly what was served.

    python examples/feature_store.py [--customers N] [--orders N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import quire
from quire.spark import bulk_load, options_of, session

FEATURES = "orders bigint, spent double, largest double, days_since bigint"


def orders(spark: SparkSession, customers: int, count: int, night: int) -> DataFrame:
    """Random orders up to a night, in place of a warehouse."""
    frame = spark.range(count * night)
    return frame.select(
        f.pmod(f.hash("id"), f.lit(customers)).cast("long").alias("customer"),
        (f.pmod(f.xxhash64("id"), f.lit(20_000)) / 100).alias("price"),
        (f.lit(night) - (f.col("id") / count).cast("long")).alias("days_ago"),
    )


def features(of: DataFrame) -> DataFrame:
    """One row for each customer: its key, and its features as JSON."""
    grouped = of.groupBy("customer").agg(
        f.count("*").alias("orders"),
        f.round(f.sum("price"), 2).alias("spent"),
        f.max("price").alias("largest"),
        f.min("days_ago").alias("days_since"),
    )
    value = f.to_json(f.struct("orders", "spent", "largest", "days_since"))
    return grouped.select(f.format_string("customer/%08d", "customer").alias("key"), value.alias("value"))


class Serving:
    """The application's access, one customer at a time."""

    def __init__(self, kv: quire.Kv) -> None:
        self._kv = kv

    def of(self, customer: int) -> dict[str, Any] | None:
        """The features of a customer."""
        found = self._kv.get(f"customer/{customer:08d}".encode())
        return json.loads(found) if found is not None else None

    def ordered(self, customer: int, price: float) -> None:
        """Update a customer after an order."""
        known = self.of(customer) or {"orders": 0, "spent": 0.0, "largest": 0.0}
        known["orders"] += 1
        known["spent"] = round(known["spent"] + price, 2)
        known["largest"] = max(known["largest"], price)
        known["days_since"] = 0
        self._kv.put(f"customer/{customer:08d}".encode(), json.dumps(known).encode())


def training_set(spark: SparkSession, store: quire.Store, snapshot: str) -> DataFrame:
    """The features served after a night, as columns."""
    options = {"database": "features", "snapshot": snapshot, "keys": "string", "values": "string"}
    rows = spark.read.format("quire.kv").options(**options_of(store), **options).load()
    return rows.select("key", f.from_json("value", FEATURES).alias("features")).select("key", "features.*")


def main(arguments: Sequence[str] | None = None) -> int:
    """Two nights, a day between them, and a training run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--customers", type=int, default=5_000)
    parser.add_argument("--orders", type=int, default=50_000, help="orders a day")
    given = parser.parse_args(arguments)
    spark = session("local[2]", memory="1g")
    with tempfile.TemporaryDirectory() as directory, quire.open(directory) as store:
        for night in (1, 2):
            began = time.perf_counter()
            bulk_load(features(orders(spark, given.customers, given.orders, night)), store, "features", partitions=2)
            store.snapshot("features", f"night-{night}")
            print(f"night {night}: loaded in {time.perf_counter() - began:.1f} s, kept as night-{night}")
            serving = Serving(store.kv("features"))
            if night == 1:
                customer = next(number for number in range(given.customers) if serving.of(number))
                print(f"customer {customer}: {serving.of(customer)}")
                serving.ordered(customer, 999.99)
                print(f"  after an order by day: {serving.of(customer)}")
        print(f"  after night 2: {serving.of(customer)}")

        keys = [number for number in range(given.customers) if serving.of(number)][:1_000]
        times = []
        for number in keys:
            began = time.perf_counter()
            serving.of(number)
            times.append(time.perf_counter() - began)
        print(f"served: {len(keys)} customers, median {statistics.median(times) * 1e6:.0f} µs each")

        for snapshot in ("night-1", "night-2"):
            row = (
                training_set(spark, store, snapshot)
                .agg(f.count("*"), f.round(f.avg("spent"), 2), f.max("largest"))
                .first()
            )
            assert row is not None, "an aggregate has one row"
            print(
                f"training set of {snapshot}: {row[0]} customers, {row[1]} spent on average, {row[2]} at most at once"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
