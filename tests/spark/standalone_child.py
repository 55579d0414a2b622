"""A driver on a standalone cluster that other processes run, for the tests that kill it or its executors.

python -m tests.spark.standalone_child MASTER count OPTIONS       reads a table, and says what it found as a line of JSON
python -m tests.spark.standalone_child MASTER stream OPTIONS DIR  writes files of DIR/in to a table, in a streaming query
"""

from __future__ import annotations

import json
import sys

from quire.spark.sessions import session


def main(master: str, what: str, given: str, *more: str) -> None:
    """See above."""
    config = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.memory": "600m",
        "spark.cores.max": "2",
        "spark.executor.cores": "1",
        "spark.task.maxFailures": "8",
    }
    spark = session(master, memory="600m", config=config)
    options: dict[str, str] = json.loads(given)
    print("started", flush=True)
    if what == "count":
        orders = spark.read.format("quire.sqlite").options(**options, database="shop", table="orders", partitions="8")
        counts = orders.load().groupBy("who").count().orderBy("who").collect()
        print(json.dumps([tuple(row) for row in counts]), flush=True)
    else:
        (base,) = more
        files = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).json(f"{base}/in")
        writer = files.writeStream.format("quire.sqlite").options(**options, database="shop", table="copied")
        writer.option("checkpointLocation", f"{base}/checkpoint").trigger(availableNow=True).start().awaitTermination()
        print("written", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
