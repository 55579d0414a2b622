"""Bulk loads on Spark against pyarrow: the part of `python -m bench kv` that needs a JVM.

Both begin with the same Parquet files, rows in random order, and end with synced files. The opponent is two processes that have
started: each reads half of the files, sorts its rows by key, and writes them as Arrow IPC, with batches of the same size and
the same compression as ours. Its two files overlap, and have no filter, no index and no checksum. Ours includes finding the
ranges, shuffling rows to them, and the event that publishes them. The session has started, and has loaded something before.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import quire
import quire.spark
from bench.report import Report, rate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILES = 8
PROCESSES = 2
ROWS = int(os.environ.get("QUIRE_BENCH_KV_ROWS", "10000000"))
QUIET = quire.StoreSettings(maintenance=quire.MaintenanceSettings(enabled=False))

OPPONENT = """
import os, sys
import pyarrow as pa, pyarrow.compute as pc, pyarrow.parquet as pq
pa.set_cpu_count(1)
print("ready", flush=True)
sys.stdin.readline()
rows = pa.concat_tables([pq.read_table(path, use_threads=False) for path in sys.argv[2:]]).combine_chunks()
rows = rows.take(pc.sort_indices(rows, sort_keys=[("key", "ascending")]))
most = len(rows) * 65536 // max(1, rows.nbytes)
options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
with pa.ipc.new_file(sys.argv[1], rows.schema, options=options) as writer:
    for batch in rows.to_batches(max_chunksize=most):
        writer.write_batch(batch)
fd = os.open(sys.argv[1], os.O_RDONLY)
os.fdatasync(fd)
print(len(rows), flush=True)
"""


@cache
def spark() -> SparkSession:
    """Return a session with as many cores as the opponent has processes."""
    return quire.spark.session(f"local[{PROCESSES}]", app="quire-bench-kv")


def make_files(directory: Path, rows: int) -> list[str]:
    """Write Parquet files with keys of 16 bytes in random order and values of 100 bytes, half of which are noise."""
    rng = np.random.default_rng(1)
    order = rng.permutation(rows)
    paths = []
    for number in range(FILES):
        mine = order[number * rows // FILES : (number + 1) * rows // FILES]
        values = np.full((len(mine), 100), ord("x"), np.uint8)
        values[:, :50] = rng.integers(0, 256, (len(mine), 50), np.uint8)
        columns = {
            "key": pa.array(np.char.mod(b"%016d", mine).astype("S16")).cast(pa.binary()),
            "value": pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(100), len(mine), [None, pa.py_buffer(values.tobytes())]
            ).cast(pa.binary()),
        }
        paths.append(str(directory / f"rows{number}.parquet"))
        pq.write_table(pa.table(columns), paths[-1], compression="lz4", use_dictionary=False)
    return paths


def opponent(directory: Path, paths: list[str], rows: int) -> float:
    """Return the seconds of the two processes, from the signal to start to the last synced byte."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", OPPONENT, str(directory / f"sorted{number}.arrow"), *paths[number::PROCESSES]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(PROCESSES)
    ]
    count = 0
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    started = time.perf_counter()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        assert process.stdout is not None
        count += int(process.stdout.readline())
    took = time.perf_counter() - started
    for process in processes:
        process.communicate()
    assert count == rows
    return took


def spark_load(report: Report, directory: Path, quick: bool) -> None:
    """Load rows into a key-value database, against two processes that sort the same rows."""
    if importlib.util.find_spec("pyspark") is None:
        report.ratio("spark_bulk_load_vs_pyarrow", None, 0.9, "higher", "pyspark is not installed")
        return
    rows = min(ROWS, 500_000) if quick else ROWS
    folder = directory / "bulk"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    paths = make_files(folder, rows)
    ours, theirs = list[float](), list[float]()
    with quire.open(folder / "store", settings=QUIET) as store:
        quire.spark.bulk_load(
            spark().range(1_000).selectExpr("CAST(id AS STRING) AS key", "'x' AS value"), store, "warm"
        )
        frame = spark().read.parquet(*paths)
        for turn in range(1 if quick else 3):
            theirs.append(opponent(folder, paths, rows))
            started = time.perf_counter()
            quire.spark.bulk_load(frame, store, f"turn{turn}", partitions=2 * PROCESSES if quick else 0)
            ours.append(time.perf_counter() - started)
            stats = store.kv(f"turn{turn}").stats()
            assert (stats.rows, stats.levels[0]) == (rows, 0)
            store.drop(f"turn{turn}")
    shutil.rmtree(folder)
    mine, other = rows / statistics.median(ours), rows / statistics.median(theirs)
    report.figure("spark_bulk_load_rows", mine)
    report.figure("pyarrow_two_processes_rows", other)
    detail = f"{rate(mine)} of {rows:,} rows against {rate(other)}"
    report.ratio("spark_bulk_load_vs_pyarrow", mine / other, 0.9, "higher", detail)


PARTS = (spark_load,)
