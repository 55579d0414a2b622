"""The data sources on Spark against what they are built on: SQLite and Spark's own floor. The feed: `spark_changes.py`.

Both contenders have the same rows, the same machine, and as many processes as the session has cores. The JVM has started, and
each query has run once. `scan` compares with apsw, which reads the same table from an ordinary file: each process its share of
the rowids, every row as a tuple. `micro_batch` compares the time that Spark reports for a batch of one change with that of a
source that has its rows in memory.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import apsw
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

import quire
from bench.report import GIB, Report, alternate, seconds
from quire.spark import options_of, session

SETTINGS = quire.StoreSettings(
    maintenance=quire.MaintenanceSettings(enabled=False),
    pages=quire.PagesSettings(wal_bytes_max=64 * GIB, store_wal_bytes_max=64 * GIB),
)
CORES = os.cpu_count() or 1

MAKE = "create table t(id integer primary key, a integer, b text)"
FILL = (
    "with recursive n(i) as (select ? union all select i + 1 from n where i < ?)"
    " insert into t select i, i * 7 % 1000003, printf('%020d', i) from n"
)
STEP = 1_000_000
"""Rows in each transaction that fills the table."""

NATIVE = """
import sys, apsw
connection = apsw.Connection(sys.argv[1], flags=apsw.SQLITE_OPEN_READONLY)
sys.stdin.readline()
count = 0
for row in connection.execute("select id, a, b from t where id between ? and ?", (int(sys.argv[2]), int(sys.argv[3]))):
    count += 1
print(count, flush=True)
"""


@cache
def spark() -> SparkSession:
    """Return the session that all parts share."""
    return session(f"local[{CORES}]", app="quire-bench")


def drain(frame: DataFrame) -> None:
    """Read all rows of a DataFrame and discard them."""
    frame.write.format("noop").mode("overwrite").save()


def scan(report: Report, directory: Path, quick: bool) -> None:
    rows, rounds = (500_000, 1) if quick else (10_000_000, 3)
    native = directory / "native.db"
    with quire.open(directory / "scan", settings=SETTINGS) as store:
        with closing(apsw.Connection(str(native))) as connection:
            connection.execute(MAKE)
            for first in range(1, rows + 1, STEP):
                connection.execute(FILL, (first, min(first + STEP - 1, rows)))
        with closing(store.sqlite("bench", create=True)) as connection:
            connection.execute(MAKE)
            connection.execute("attach ? as native", (str(native),))
            connection.execute("insert into t select * from native.t")
            connection.execute("detach native")
        store.checkpoint("bench")
        store.snapshot("bench", "whole")
        options = {**options_of(store), "database": "bench", "snapshot": "whole", "table": "t"}
        frame = spark().read.format("quire.sqlite").options(**options).load()
        assert frame.count() == rows
        drain(frame)
        times = alternate(rounds, lambda: seconds(lambda: _native(native, rows)), lambda: seconds(lambda: drain(frame)))
    theirs, ours = times
    report.figure("sqlite_rows_per_second", rows / ours)
    report.figure("apsw_rows_per_second", rows / theirs)
    detail = f"{rows / ours:,.0f} rows/s; apsw in {CORES} processes {rows / theirs:,.0f}"
    report.ratio("sqlite_scan_vs_apsw", theirs / ours, 0.9, "higher", detail)


def _native(path: Path, rows: int) -> None:
    """Read the same rows with apsw, in as many processes as the session has cores. Each waits for a line before it reads."""
    share = -(-rows // CORES)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", NATIVE, str(path), str(first), str(min(first + share - 1, rows))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for first in range(1, rows + 1, share)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    counted = sum(int(process.communicate()[0]) for process in processes)
    assert counted == rows


# ── micro-batches ─────────────────────────────────────────────────────────────────────────────────────────────────────
class TrivialReader(DataSourceStreamReader):
    """Returns one row for each batch, from memory: the time that Spark itself takes."""

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark gives these names
        return {"n": 0}

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:  # noqa: ARG002, N802
        return {"n": start["n"] + 1}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:  # noqa: ARG002
        return [InputPartition(end["n"])]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        yield (partition.value,)


class TrivialSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "bench.trivial"

    def schema(self) -> str:
        return "n int"

    def streamReader(self, schema: Any) -> TrivialReader:  # noqa: ARG002, N802
        return TrivialReader()


def micro_batch(report: Report, directory: Path, quick: bool) -> None:
    batches = 12 if quick else 40
    spark().dataSource.register(TrivialSource)
    with quire.open(directory / "stream", settings=SETTINGS) as store:
        store.create_many(f"db-{number}" for number in range(8 * batches))  # each is one change
        options = {**options_of(store), "cursor": "bench", "max_changes": "1"}
        turns: dict[str, list[float]] = {"trivial": [], "ours": []}
        for turn in range(2 if quick else 3):  # the contenders alternate, each with a new checkpoint
            for name in turns:
                reader = spark().readStream.format("bench.trivial" if name == "trivial" else "quire.changes")
                if name == "ours":
                    reader = reader.options(**{**options, "cursor": f"bench-{turn}"})
                turns[name] += _batches(reader.load(), directory / f"{name}-{turn}", batches)
    floor, ours = statistics.median(turns["trivial"]), statistics.median(turns["ours"])
    report.figure("micro_batch_ms", ours)
    report.figure("trivial_batch_ms", floor)
    report.ratio("micro_batch_vs_floor", ours / floor, 1.5, "lower", f"{ours:.0f} ms; a trivial source {floor:.0f} ms")


def _batches(frame: DataFrame, checkpoint: Path, wanted: int) -> list[float]:
    """Return the duration of each batch in ms, without the first four."""
    query = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint)).start()
    try:
        while not query.exception() and (query.lastProgress is None or query.lastProgress["batchId"] < wanted):
            time.sleep(0.1)
        batches = [progress for progress in query.recentProgress if progress["numInputRows"]]
    finally:
        query.stop()
    return [float(batch["durationMs"]["triggerExecution"]) for batch in batches[4:]]


PARTS = (scan, micro_batch)
