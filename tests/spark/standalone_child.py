"""A driver on a standalone cluster of other processes, for the tests that kill it or its executors.

python -m tests.spark.standalone_child MASTER count OPTIONS       reads a table, and prints its results as a line of
JSON
python -m tests.spark.standalone_child MASTER stream OPTIONS DIR  writes the files of DIR/in to a table, in a streaming
query
python -m tests.spark.standalone_child MASTER mirror OPTIONS DIR [POINT]  changes the store in DIR and runs its mirror;
is killed
                                                                  at a failpoint, or prints its results as a line of
                                                                  JSON
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import closing, nullcontext

import msgspec

import quire
from quire.durable.failpoints import armed
from quire.spark.sessions import session
from tests.jobs.mirrored_store import fill
from tests.spark.cluster_child import BUCKET, unseen_store

LAKE = f"s3://{BUCKET}/lake"


def main(master: str, action: str, options_json: str, *more: str) -> None:
    """Run the driver; see the module's docstring."""
    config = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.memory": "600m",
        "spark.cores.max": "2",
        "spark.executor.cores": "1",
        "spark.task.maxFailures": "8",
    }
    spark = session(master, memory="600m", config=config)
    options: dict[str, str] = json.loads(options_json)
    print("started", flush=True)
    if action == "count":
        orders = spark.read.format("quire.sqlite").options(**options, database="shop", table="orders", partitions="8")
        counts = orders.load().groupBy("who").count().orderBy("who").collect()
        print(json.dumps([tuple(row) for row in counts]), flush=True)
    elif action == "mirror":
        print(mirrored(*more), flush=True)
    else:
        (base,) = more
        files = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).json(f"{base}/in")
        writer = files.writeStream.format("quire.sqlite").options(**options, database="shop", table="copied")
        writer.option("checkpointLocation", f"{base}/checkpoint").trigger(availableNow=True).start().awaitTermination()
        print("written", flush=True)
    spark.stop()


def mirrored(path: str, point: str = "") -> str:
    """The result of a run of the mirror, after changes."""
    with quire.open(path, settings=unseen_store("mirrored")) as store:
        if not store.mirrors.list():
            for number in range(8):
                fill(store, f"tenant-{number}", 2_000)
            options = {"file_bytes": "65536"}
            store.mirrors.create("lake", "tenant-*", "orders", f"delta:{LAKE}", options=options)
        else:
            with closing(store.sqlite("tenant-3")) as tenant:
                tenant.execute("UPDATE orders SET price = price + 1")
        killed = armed(point, lambda _: os.killpg(0, signal.SIGKILL)) if point else nullcontext()
        with killed:
            return msgspec.json.encode(store.mirrors.run("lake", runner="spark")).decode()


if __name__ == "__main__":
    main(*sys.argv[1:])
