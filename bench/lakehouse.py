"""Mirrors of a thousand databases of ten thousand rows: an incremental run against a full load.

Both are runs of one mirror into a Delta table, by the same runner, whose session has started. A full load reads every database.
Incremental runs follow after one database in a hundred has changed, and after one row in a hundred has changed in every
database, where copy-on-write rewrites everything. At the end all rows of the table are compared with those that SQLite
selects in the databases. Row changes are measured in `row_changes.py`.
"""

from __future__ import annotations

import random
import time
from contextlib import closing
from operator import itemgetter
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

import quire
from bench.report import MIB, Report

DATABASES, ROWS = 1_000, 10_000
QUICK_DATABASES = 100
SHARE = 0.01
INCREMENTS = 3
COMPARED_AT_ONCE = 50
"""Databases whose rows are in memory while the table is compared with them."""


def settings() -> quire.StoreSettings:
    """Return settings without background maintenance."""
    return quire.StoreSettings(maintenance=quire.MaintenanceSettings(enabled=False, workers=2))


def fill(store: quire.Store, databases: int) -> list[str]:
    """Create databases with a table of orders, and return their names."""
    names = [f"tenant-{number:05}" for number in range(databases)]
    rng = random.Random(5)
    for name in names:
        rows = [
            (number, f"item {rng.randrange(500)}", rng.randrange(1, 9), rng.random() * 100, "2026-11-17")
            for number in range(ROWS)
        ]
        with closing(store.sqlite(name, create=True)) as connection, connection:
            connection.execute(
                "CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT, amount INTEGER, price REAL, day TEXT)"
            )
            connection.executemany("INSERT INTO orders VALUES (?, ?, ?, ?, ?)", rows)
    return names


def change(store: quire.Store, names: list[str], rng: random.Random, rows: int) -> None:
    """Change `rows` neighbouring rows in each of these databases."""
    for name in names:
        first = rng.randrange(ROWS - rows)
        with closing(store.sqlite(name)) as connection, connection:
            connection.execute(
                "UPDATE orders SET price = price + 1 WHERE id BETWEEN ? AND ?", (first, first + rows - 1)
            )


def timed(store: quire.Store, runner: str) -> tuple[float, quire.MirrorRun]:
    """Run the mirror; return the duration and the result."""
    started = time.perf_counter()
    run = store.mirrors.run("lake", runner=runner)
    return time.perf_counter() - started, run


def require_equal(store: quire.Store, names: list[str], target: Path) -> None:
    """Compare all rows of the table with what SQLite selects in the databases."""
    dataset = DeltaTable(str(target)).to_pyarrow_dataset()
    assert dataset.count_rows() == len(names) * ROWS, "no rows of other databases"
    for start in range(0, len(names), COMPARED_AT_ONCE):
        some = names[start : start + COMPARED_AT_ONCE]
        rows = dataset.to_table(filter=pc.field("_database").isin(some))
        rows = rows.sort_by([("_database", "ascending"), ("id", "ascending")])
        expected = pa.concat_tables([selected(store, name, rows.schema) for name in some])
        for column in rows.column_names:
            assert rows[column].equals(expected[column]), (column, some[0], some[-1])


def selected(store: quire.Store, name: str, schema: pa.Schema) -> pa.Table:
    """Return the rows of a database, as SQLite selects them, in the columns of the table."""
    with closing(store.sqlite(name)) as connection:
        cursor = connection.execute("SELECT * FROM orders ORDER BY id")
        names = [column[0] for column in cursor.description]
        columns = dict(zip(names, zip(*cursor.fetchall(), strict=True), strict=True))
    columns["_database"] = [name] * ROWS
    assert columns.keys() == set(schema.names), "the columns of the database, and its name"
    return pa.table([pa.array(columns[field.name], field.type) for field in schema], schema=schema)


def mirrored(report: Report, directory: Path, quick: bool, runner: str) -> None:
    """Measure a full load, increments, and a run after a change in every database."""
    rng = random.Random(7)
    target = directory / f"lake-{runner}"
    with quire.open(directory / f"store-{runner}", settings=settings()) as store:
        names = fill(store, QUICK_DATABASES if quick else DATABASES)
        if runner == "spark":  # the start of a JVM and of its Python workers is not measured
            with closing(store.sqlite("warm-up", create=True)) as connection:
                connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
            store.mirrors.create("warm-up", "warm-up", "orders", f"parquet:{directory}/warm-up")
            store.mirrors.run("warm-up", runner=runner)
        store.mirrors.create("lake", "tenant-*", "orders", f"delta:{target}")
        full, loaded = timed(store, runner)
        assert loaded.full
        report.figure(f"{runner}_full_seconds", full)
        report.figure(f"{runner}_full_rows_per_second", loaded.rows_written / full)
        report.figure(f"{runner}_full_mib", loaded.bytes_written / MIB)
        increments = []
        for _ in range(INCREMENTS):
            change(store, rng.sample(names, max(int(len(names) * SHARE), 1)), rng, 50)
            increments.append(timed(store, runner))
        increments.sort(key=itemgetter(0))
        taken, increment = increments[len(increments) // 2]
        detail = f"{taken:.2f} s after {full:.1f} s; {increment.changed} changed, {increment.copied} copied"
        report.ratio(f"mirror_{runner}_1pct_databases", taken / full, 0.15, "lower", detail)
        change(store, names, rng, int(ROWS * SHARE))
        everything, rewritten = timed(store, runner)
        detail = (
            f"{everything:.1f} s; {rewritten.bytes_written / MIB:.1f} MiB rewritten in {rewritten.files_added} files"
        )
        report.ratio(f"mirror_{runner}_1pct_rows", everything / full, None, "lower", detail)
        report.figure(f"{runner}_1pct_rows_mib", rewritten.bytes_written / MIB)
        nothing, _ = timed(store, runner)
        report.figure(f"{runner}_nothing_changed_seconds", nothing)
        require_equal(store, names, target)


def mirror_threads(report: Report, directory: Path, quick: bool) -> None:
    """Measure mirrors that run in threads of this process."""
    mirrored(report, directory, quick, "threads")


def mirror_spark(report: Report, directory: Path, quick: bool) -> None:
    """Measure mirrors that run on Spark, in local mode."""
    mirrored(report, directory, quick, "spark")


PARTS = (mirror_threads, mirror_spark)
