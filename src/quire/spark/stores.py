"""Several stores in one Spark run: the rows of all of them as one DataFrame, and jobs of all of them on one session.

A store is written by one process. Where one is not enough, databases are spread over several stores, which may share a bucket
(docs/scale.md). One run can still read or maintain all of them.

    orders = quire.spark.read_stores(spark, [shop, "/data/other"], "quire.sqlite", databases="tenant-*", table="orders")
    orders.groupBy("_store").count()
    quire.spark.run_stores([shop, other], lambda store: store.heavy.verify(runner="spark"))

Threads: any. Raises the errors of reading a store, or of the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import TYPE_CHECKING, TypeVar

from quire.core.errors import InvalidInput
from quire.spark.access import StoreLike, options_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STORES_AT_ONCE = 8
"""Stores whose jobs run at the same time: each has a thread on the driver that waits for Spark."""

S = TypeVar("S")
T = TypeVar("T")


def read_stores(spark: SparkSession, stores: Iterable[StoreLike], source: str, **options: str) -> DataFrame:
    """Return the rows that a source (`quire.sqlite`, `quire.kv` …) reads from each store; the column `_store` is its path or
    URL.

    A store is an open one, the path or URL of one that another process serves, or the options of a source. Columns that a
    store does not have are null.
    """
    frames = [_read(spark, store, source, options) for store in stores]
    if not frames:
        raise InvalidInput("no store was given", hint="pass at least one")
    return reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), frames)


def _read(spark: SparkSession, store: StoreLike, source: str, options: dict[str, str]) -> DataFrame:
    from pyspark.sql.functions import lit  # slow to import, and absent without Spark

    reached = options_of(store)
    return spark.read.format(source).options(**reached, **options).load().withColumn("_store", lit(reached["store"]))


def run_stores(stores: Sequence[S], work: Callable[[S], T]) -> list[T]:
    """Run `work` for several stores at once, with one Spark session; return the results in order.

    If some fail, the others finish first, and the error of the first one that failed is raised.
    """
    with ThreadPoolExecutor(STORES_AT_ONCE, thread_name_prefix="quire-stores") as pool:
        return list(pool.map(work, stores))
