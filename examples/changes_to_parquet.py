"""What happens to a store, as a table in Parquet that grows: the change feed through Spark's structured streaming.

Every commit of a store's manifest is one change record: databases that come and go, snapshots, forks, checkpoints,
retention. The source `quire.changes` reads them as a stream, from a cursor that keeps them until they are read. This
program takes over what is new, spreads each change into its operations, appends them to Parquet files, and ends
(`availableNow`); run it every hour, or leave the trigger out and it goes on. Nothing is lost or doubled when it is
killed: Spark's checkpoint says how far it was.

    python examples/changes_to_parquet.py [--store DIRECTORY] [--out DIRECTORY]

Without a store it makes one, lets something happen to it, and follows it twice. With `delta-spark` in the session,
write `.format("delta")` and a path of your own instead of the Parquet sink: nothing else changes.
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
"""What we want of an operation; the feed has all of its fields, as JSON."""
TOLD = ("RegisterDb", "DropDb", "PublishSnapshot", "ForkDb", "OpenSegment", "PutChunk", "AdvanceCheckpoint")
"""Operations that people understand; there are many more."""


def spread(changes: DataFrame) -> DataFrame:
    """One row for each operation of each change."""
    operations = f.posexplode(f.from_json("operations", OPERATION)).alias("part", "operation")
    return changes.select("sequence", "committed_at", operations).select(
        "sequence", "part", "committed_at", f.to_date("committed_at").alias("day"), "operation.*"
    )


def take_over(spark: SparkSession, store: quire.Store, out: Path) -> int:
    """Append what is new to the table; how many changes that were."""
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
    """A day in a store."""
    with contextlib.closing(store.sqlite("shop", create=True)) as shop:
        shop.execute("create table if not exists orders(id integer primary key, day text)")
        shop.executemany("insert into orders(day) values (?)", [(day,)] * 100)
    store.snapshot("shop", day)
    store.fork("shop", f"report-{day}", at=day)
    store.checkpoint("shop", runner="threads")
    if day != "monday":
        store.drop("report-monday")


def report(table: DataFrame) -> None:
    """What the table knows by now."""
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
