"""Server and client of Spark Connect, each in its own process, because they cannot share one with a classic session.

python -m tests.spark.connect_child serve PORT     a Spark with a Connect server, until its input ends
python -m tests.spark.connect_child use URL BASE   quire as a client, with a store in BASE; prints its results
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import quire
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.spark.access import options_of
from quire.spark.sessions import attach, session


def serve(port: str) -> None:
    """Rows of sources are read by the workers of this Spark."""
    config = {
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": port,
    }
    spark = session("local[2]", memory="1g", config=config)
    print("listens", flush=True)
    sys.stdin.read()
    spark.stop()


def use(url: str, base: str) -> None:
    """What a user does, without a JVM in this process."""
    from pyspark.sql import SparkSession

    remote_session = SparkSession.builder.remote(url).getOrCreate()
    settings = StoreSettings(maintenance=MaintenanceSettings(enabled=False, executors_see_store=True))
    with quire.open(Path(base) / "store", settings=settings) as store:
        with store.sqlite("shop", create=True) as shop:
            shop.execute("create table orders(id integer primary key, who text)")
            shop.executemany("insert into orders values (?, ?)", [(n, f"w{n % 3}") for n in range(1_000)])
        store.snapshot("shop", "monday")
        spark = attach(remote_session)
        is_connect = type(spark).__module__.startswith("pyspark.sql.connect") and session() is spark
        options = options_of(store)
        orders = spark.read.format("quire.sqlite").options(
            **options, database="shop", table="orders", snapshot="monday"
        )
        counts = [tuple(row) for row in orders.load().groupBy("who").count().orderBy("who").collect()]
        few = orders.load().filter("id >= 998").count()
        changes = spark.read.format("quire.changes").options(**options).load()
        sequences = [row.sequence for row in changes.select("sequence").orderBy("sequence").collect()]
        job = store.checkpoint("shop", runner="spark")
        again = orders.load().count()
        problems = [str(problem) for problem in store.manifest.check()]
    report = {
        "is_connect": is_connect,
        "counts": counts,
        "few": few,
        "whole": sequences == list(range(1, len(sequences) + 1)) and len(sequences) > 3,
        "job": [job.state.name, job.result["slots"]],
        "again": again,
        "problems": problems,
    }
    print(json.dumps(report), flush=True)
    spark.stop()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        use(*sys.argv[2:])
