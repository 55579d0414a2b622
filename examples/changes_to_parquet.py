"""Write the change feed of a store to a growing Parquet table, with Spark's structured streaming.

Every commit of a store's manifest is one change record: databases, snapshots, forks, checkpoints, retention. The source
`quire.changes` reads them as a stream, from a cursor that keeps them until they are read. This program reads new
changes, splits each into its operations, appends them to Parquet files, and ends (`availableNow`). Run it every hour,
or omit the trigger to run it continuously. Spark's checkpoint records the progress, so nothing is lost or repeated if
it is killed.

    python examples/changes_to_parquet.py [--store DIRECTORY] [--out DIRECTORY]

Without `--store` it creates a store, changes it, and follows it twice. With `delta-spark` in the session, write
`.format("delta")` and a path instead of the Parquet sink; nothing else changes.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import quire
from quire.spark import options_of, session

CURSOR = "parquet"
OPERATION = "array<struct<op: string, db_id: bigint, name: string, snapshot_id: bigint, source_db_id: bigint>>"
"""The fields to extract from an operation; the feed has all of them, as JSON."""
TOLD = ("RegisterDb", "DropDb", "PublishSnapshot", "ForkDb", "OpenSegment", "PutChunk", "AdvanceCheckpoint")
"""The operations to report; there are many more."""


def spread(changes: DataFrame) -> DataFrame:
    """One row for each operation of each change."""
    operations = f.posexplode(f.from_json("operations", OPERATION)).alias("part", "operation")
    return changes.select("sequence", "committed_at", operations).select(
        "sequence", "part", "committed_at", f.to_date("committed_at").alias("day"), "operation.*"
    )


def take_over(spark: SparkSession, store: quire.Store, out: Path) -> int:
    """Append new changes to the table; return their number."""
    changes = spark.readStream.format("quire.changes").options(**options_of(store), cursor=CURSOR).load()
    query = (
        spread(changes)
        .writeStream.format("parquet")
        .option("path", str(out / "operations"))
        .option("checkpointLocation", str(out / "checkpoint"))
        .partitionBy("day")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return sum(progress.numInputRows for progress in query.recentProgress)


def let_something_happen(store: quire.Store, day: str) -> None:
    """Change a store."""
    with contextlib.closing(store.sqlite("shop", create=True)) as shop:
        shop.execute("create table if not exists orders(id integer primary key, day text)")
        shop.executemany("insert into orders(day) values (?)", [(day,)] * 100)
    store.snapshot("shop", day)
    store.fork("shop", f"report-{day}", at=day)
    store.checkpoint("shop", runner="threads")
    if day != "monday":
        store.drop("report-monday")


def report(table: DataFrame) -> None:
    """Print a summary of the table."""
    counts = table.groupBy("op").agg(f.count("*").alias("times"), f.max("sequence").alias("last"))
    rows = counts.orderBy(f.desc("times"), "op").collect()
    print(f"  {sum(row.times for row in rows)} operations of {len(rows)} kinds")
    for row in rows:
        if row.op in TOLD:
            print(f"  {row.op:<18} {row.times:>4} ×   last in change {row.last}")
    forks = table.where("op = 'ForkDb'").orderBy("sequence").select("name", "committed_at").collect()
    print("  forks:", ", ".join(f"{row.name} at {row.committed_at:%H:%M:%S}" for row in forks) or "none")


def main(arguments: Sequence[str] | None = None) -> int:
    """Follow a store into Parquet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="", help="a store that nobody else has open; if not given, one to play with")
    parser.add_argument("--out", default="", help="where the table and Spark's checkpoint are; temporary if not given")
    given = parser.parse_args(arguments)
    spark = session("local[2]", memory="1g")
    with tempfile.TemporaryDirectory() as temporary, quire.open(given.store or f"{temporary}/store") as store:
        out = Path(given.out or f"{temporary}/out").absolute()
        for day in ("monday", "tuesday") if not given.store else ("",):
            if day:
                let_something_happen(store, day)
            print(f"{day or 'now'}: {take_over(spark, store, out)} changes are new")
        table = spark.read.parquet(str(out / "operations"))
        report(table)
        twice = table.groupBy("sequence", "part").count().where("count > 1").count()
        cursor = store.feed.cursor(CURSOR)
        print(f"  operations that came twice: {twice}")
        print(
            f"  acknowledged up to change {cursor.acked_sequence} of {cursor.head_sequence}; the rest with the next batch"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
