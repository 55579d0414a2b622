"""Jobs and queries on Spark over very many small databases, each with its own table and rows (N4).

The other parts of `many` use forks of one template, which have no rows of their own. Here every database was written through
SQLite, so that it has its own WAL, its own pages and, after a checkpoint, its own chunk.

`QUIRE_BENCH_DATABASES` changes their number.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import quire
from bench.report import Report
from quire.spark import options_of, session

CORES = 2
WRITERS = 16
"""Threads that create databases: their commits share syncs."""
ROWS = 3
"""Rows in each database."""

T = TypeVar("T")


def real_databases(report: Report, directory: Path, quick: bool) -> None:
    """Create many real databases; on Spark, read them as one DataFrame, sum up their space, checkpoint and verify them."""
    count = int(os.environ.get("QUIRE_BENCH_DATABASES", 300 if quick else 20_000))
    with quire.open(directory / "real") as store:
        with measured(report, "real_create"):
            create_databases(store, count)
        spark = session(f"local[{CORES}]", app="quire-bench-many", memory="2g")
        try:
            spark.range(1).count()  # the start of the executors is not part of the first job
            table = spark.read.format("quire.sqlite").options(**options_of(store))
            with measured(report, "real_query"):
                rows = table.options(databases="tenant-*", table="orders").load().count()
            assert rows == ROWS * count, rows
            with measured(report, "real_stats"):
                usages = store.heavy.stats(runner="spark")
            assert len(usages) == count, len(usages)
            with measured(report, "real_checkpoint_all"):
                checkpoints = store.heavy.checkpoint_all(runner="spark")
            assert not checkpoints.failed, checkpoints.failures
            report.figure("real_checkpointed", checkpoints.changed)  # upkeep has checkpointed the others
            with measured(report, "real_verify"):
                verified = store.heavy.verify(runner="spark").result
            assert verified["missing"] == verified["altered"] == 0, verified
            with measured(report, "real_query_of_chunks"):
                rows = table.options(databases="tenant-*", table="orders").load().count()
            assert rows == ROWS * count, rows
        finally:
            spark.stop()
    report.figure("real_databases", count)


def create_databases(store: quire.Store, count: int) -> None:
    """Create databases with a table and `ROWS` rows each, in one transaction of each."""
    names = [f"tenant-{number:06}" for number in range(count)]
    store.create_many(names)

    def fill(name: str) -> None:
        with store.sqlite(name) as connection, connection:
            connection.execute("CREATE TABLE orders(id INTEGER PRIMARY KEY, item TEXT)")
            connection.executemany("INSERT INTO orders(item) VALUES (?)", [(f"{name} {row}",) for row in range(ROWS)])

    with ThreadPoolExecutor(WRITERS, thread_name_prefix="bench-create") as pool:
        for _ in pool.map(fill, names, chunksize=100):
            pass


@contextmanager
def measured(report: Report, name: str) -> Iterator[None]:
    """Report the wall time of the block, the processor time of this process, and its largest memory without mapped files."""
    used, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    with largest(anonymous_bytes) as peak:
        yield
    after = resource.getrusage(resource.RUSAGE_SELF)
    report.figure(f"{name}_seconds", time.perf_counter() - began)
    report.figure(f"{name}_owner_cpu_seconds", after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime)
    report.figure(f"{name}_owner_memory_mib", peak() / 2**20)


@contextmanager
def largest(read: Callable[[], int]) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the largest value that `read` returned during the block, ten times a second."""
    values, is_over = [read()], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.1):
            values[0] = max(values[0], read())

    thread = threading.Thread(target=watch, name="bench-memory")
    thread.start()
    try:
        yield lambda: values[0]
    finally:
        is_over.set()
        thread.join()


def anonymous_bytes() -> int:
    """Return the process's memory without the pages of mapped files, which the system reclaims when it needs them."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


PARTS = (real_databases,)
