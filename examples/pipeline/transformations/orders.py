"""JSON files with changes of orders become rows of a table `orders` in the database `shop`: replaced by id, deleted by flag."""

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

from quire.spark import attach

spark = attach(SparkSession.active())

dp.create_sink(
    name="orders",
    format="quire.sqlite",
    options={
        "store": os.environ["QUIRE_STORE"],
        "database": "shop",
        "table": "orders",
        "key": "id",
        "delete": "gone",
        "create": "database",
    },
)


@dp.append_flow(target="orders")
def incoming_orders() -> DataFrame:
    files = spark.readStream.schema("id bigint, who string, price double, gone boolean")
    return files.json(os.environ["QUIRE_INBOX"])
