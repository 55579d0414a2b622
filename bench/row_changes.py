"""Row changes of SQLite tables: how many pages are read to find them, and Spark against a loop by hand.

Run as part of `python -m bench lakehouse`. `neighbouring_rows` counts the pages of both versions that `quire.rows` reads, as a
share of all pages: one per cent of the rows, next to each other, has changed, and the changes are in the WAL or checkpointed.
Only the count matters, so the source runs in this process. `many_databases` compares `quire.rows` on Spark with as many
processes as the session has cores. Each finds the changed rows of its share of the databases with the same functions.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pyspark.sql import SparkSession

import quire
from bench.report import Report, alternate, seconds
from quire.pages.view import ViewReader
from quire.pages.view_changes import changed_pages
from quire.spark import options_of, session
from quire.spark.sources.rows import RowsSource
from quire.spark.sources.views import opened
from quire.sqlite.row_changes import ComparedVersion, changed_rows, find_candidates
from quire.sqlite.tables import connected

SETTINGS = quire.StoreSettings(maintenance=quire.MaintenanceSettings(enabled=False))
CORES = os.cpu_count() or 1

MAKE = "create table orders(id integer primary key, who text, price real)"
FILL = (
    "with recursive n(i) as (select 1 union all select i + 1 from n where i < ?)"
    " insert into orders select i, printf('customer %012d', i * 7919 % 1000003), i / 4.0 from n"
)


@cache
def spark() -> SparkSession:
    """Return the session that all parts share."""
    return session(f"local[{CORES}]", app="quire-bench")


# ── pages ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def neighbouring_rows(report: Report, directory: Path, quick: bool) -> None:
    """Measure the share of pages that are read to find one per cent of the rows, next to each other."""
    rows = 30_000 if quick else 300_000
    with quire.open(directory / "pages", settings=SETTINGS) as store:
        for name, checkpointed in (("in the WAL", False), ("checkpointed", True)):
            database = f"shop-{checkpointed}"
            _fill(store, database, rows)
            store.checkpoint(database)
            store.snapshot(database, "monday")
            _change(store, database, rows // 2, rows // 100)
            if checkpointed:
                store.checkpoint(database)
            options = {**options_of(store), "database": database, "table": "orders", "from": "monday"}
            source = RowsSource(options)
            reader = source.reader(source.schema())
            with _counting() as reads:
                changed = sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part))
            _check(changed, rows // 100)
            with store.pages.open(database).open_snapshot() as newest:
                size = newest.size_pages
            detail = f"{len(reads)} of 2 × {size} pages, asked for {reads.total()} times; {changed} rows"
            report.ratio(f"pages read, {name}", len(reads) / (2 * size), 0.06, "lower", detail)


@contextmanager
def _counting() -> Iterator[Counter[tuple[int, int]]]:
    """Count the reads of each page of each version, by (lsn, page). Only the first read of a page reaches the disk: a view
    keeps its pages."""
    reads = Counter[tuple[int, int]]()
    read_page, read_pages = ViewReader.read_page, ViewReader.read_pages

    def one(self: ViewReader, page: int) -> bytes:
        reads[self.lsn, page] += 1
        return read_page(self, page)

    def many(self: ViewReader, pages: Any, **options: Any) -> dict[int, bytes]:
        images = read_pages(self, pages, **options)
        reads.update((self.lsn, page) for page in images)
        return images

    with patch.object(ViewReader, "read_page", one), patch.object(ViewReader, "read_pages", many):
        yield reads


# ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def many_databases(report: Report, directory: Path, quick: bool) -> None:
    """Find the row changes of many databases on Spark, against processes that do the same by hand."""
    databases, rows = (100, 1_000) if quick else (1_000, 10_000)
    with quire.open(directory / "many", settings=SETTINGS) as store:
        for number in range(databases):
            _fill(store, f"tenant-{number:04}", rows)
            store.snapshot(f"tenant-{number:04}", "monday")
            _change(store, f"tenant-{number:04}", rows // 3, max(rows // 100, 1))
        options = {**options_of(store), "databases": "tenant-*", "table": "orders", "from": "monday"}
        expected = databases * max(rows // 100, 1)
        pairs = [
            piece.pair for part in RowsSource(options).reader(RowsSource(options).schema()).plan() for piece in part
        ]
        planned = directory / "pairs.pickle"
        planned.write_bytes(pickle.dumps(pairs))

        def on_spark() -> float:
            frame = spark().read.format("quire.rows").options(**options).load()
            return seconds(lambda: _check(frame.count(), expected))

        on_spark()
        ours, theirs = alternate(1 if quick else 5, on_spark, lambda: _by_hand(planned, expected))
        detail = f"{ours:.2f} s, by hand {theirs:.2f} s, {databases} databases of {rows:,} rows"
        report.ratio("row changes, Spark against by hand", theirs / ours, 0.5, "higher", detail)
        report.figure("databases compared in a second", databases / ours)


def _by_hand(planned: Path, expected: int) -> float:
    """Return the seconds of the loop by hand, in processes that have started and loaded their modules before."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.row_changes", str(planned), str(number), str(CORES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(CORES)
    ]
    for worker in workers:
        assert worker.stdout is not None
        worker.stdout.readline()

    def run() -> None:
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
        counts = [int(worker.stdout.readline()) for worker in workers if worker.stdout is not None]
        _check(sum(counts), expected)

    took = seconds(run)
    for worker in workers:
        worker.communicate()
    return took


def count_changes(planned: str, number: int, workers: int) -> None:
    """Count the changed rows of one worker's share of the pairs of versions in a file, after a line on standard input."""
    pairs = pickle.loads(Path(planned).read_bytes())[number::workers]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    count = 0
    for pair in pairs:
        with ExitStack() as stack:
            old, new = (stack.enter_context(opened(version)) for version in (pair.before, pair.after))
            before, after = (ComparedVersion(reader, stack.enter_context(connected(reader))) for reader in (old, new))
            changed = partial(_changed_pages, old, new)
            table_before, table_after, candidates = find_candidates(before, after, "orders", changed)
            tables, columns = (table_before, table_after), ["id", "who", "price"]
            count += sum(1 for _ in changed_rows(before, after, tables, columns, candidates))
    sys.stdout.write(f"{count}\n")
    sys.stdout.flush()


def _changed_pages(old: ViewReader, new: ViewReader) -> set[int]:
    """Return the changed pages, by SQLite's numbers."""
    size = max(old.size_pages, new.size_pages)
    return {page + 1 for page, _, _ in changed_pages(old, new, 0, size)}


def _check(count: int, expected: int) -> None:
    if count != expected:
        raise AssertionError(f"{count} rows instead of {expected}")


def _fill(store: quire.Store, database: str, rows: int) -> None:
    with closing(store.sqlite(database, create=True)) as connection, connection:
        connection.execute(MAKE)
        connection.execute(FILL, (rows,))


def _change(store: quire.Store, database: str, first: int, count: int) -> None:
    with closing(store.sqlite(database)) as connection, connection:
        connection.execute("update orders set price = -1 where id between ? and ?", (first, first + count - 1))


PARTS = (neighbouring_rows, many_databases)

if __name__ == "__main__":
    count_changes(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
