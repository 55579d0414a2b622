"""Mirrors of a thousand databases of ten thousand rows: what an incremental run takes against a full load.

Both are runs of one mirror into a Delta table, by the same runner, whose session is running. A full load reads every database;
incremental runs come after one in a hundred databases has changed, and after one row in a hundred has changed in each of them,
where copy-on-write rewrites everything. At the end the table is compared with the databases, row by row. Row changes are in
`row_changes.py`.
"""

from __future__ import annotations

import random
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

import quire
from bench import row_changes
from bench.report import Report
from quire.core.limits import MIB

DATABASES, ROWS = 1_000, 10_000
QUICK_DATABASES = 100
SHARE = 0.01
INCREMENTS = 3
COMPARED_BY_SQLITE = 100
"""Databases that are compared row by row; of all of them, counts and sums are."""


def settings() -> Any:
    """Nothing happens by itself."""
    return quire.StoreSettings(maintenance=quire.MaintenanceSettings(enabled=False, workers=2))


def fill(store: quire.Store, databases: int) -> list[str]:
    """Databases with orders."""
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
    """Change so many neighbouring rows of each of these databases."""
    for name in names:
        first = rng.randrange(ROWS - rows)
        with closing(store.sqlite(name)) as connection, connection:
            connection.execute(
                "UPDATE orders SET price = price + 1 WHERE id BETWEEN ? AND ?", (first, first + rows - 1)
            )


def timed(store: quire.Store, runner: str) -> tuple[float, quire.MirrorRun]:
    """One run, and how long it took."""
    started = time.perf_counter()
    ended = store.mirrors.run("lake", runner=runner)
    return time.perf_counter() - started, ended


def require_equal(store: quire.Store, names: list[str], target: Path, rng: random.Random) -> None:
    """Compare the table with the databases."""
    table: pa.Table = DeltaTable(str(target)).to_pyarrow_table()
    assert table.num_rows == len(names) * ROWS
    for name in names if len(names) <= COMPARED_BY_SQLITE else rng.sample(names, COMPARED_BY_SQLITE):
        rows = table.filter(pc.equal(table["_database"], name)).drop_columns("_database").sort_by("id")
        with closing(store.sqlite(name)) as connection:
            assert list(zip(*rows.to_pydict().values())) == connection.execute("SELECT * FROM orders").fetchall(), name
    with_sums = table.group_by("_database").aggregate([("price", "sum"), ("amount", "sum")])
    sums = {row["_database"]: row for row in with_sums.to_pylist()}
    for name in names:
        with closing(store.sqlite(name)) as connection:
            amount, price = next(connection.execute("SELECT sum(amount), sum(price) FROM orders"))
        assert sums[name]["amount_sum"] == amount, name
        assert abs(sums[name]["price_sum"] - price) < 1e-3, name


def mirrored(report: Report, directory: Path, quick: bool, runner: str) -> None:
    """A full load, increments, and everything once more."""
    rng = random.Random(7)
    target = directory / f"lake-{runner}"
    with quire.open(directory / f"store-{runner}", settings=settings()) as store:
        names = fill(store, QUICK_DATABASES if quick else DATABASES)
        if runner == "spark":  # starting a JVM and its Python workers is not what is measured
            fill_one = store.sqlite("warm-up", create=True)
            fill_one.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
            fill_one.close()
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
        increments.sort(key=lambda increment: increment[0])
        taken, ended = increments[len(increments) // 2]
        said = f"{taken:.2f} s after {full:.1f} s; {ended.changed} changed, {ended.copied} copied"
        report.ratio(f"mirror_{runner}_1pct_databases", taken / full, 0.15, "lower", said)
        change(store, names, rng, int(ROWS * SHARE))
        everything, rewritten = timed(store, runner)
        said = f"{everything:.1f} s; {rewritten.bytes_written / MIB:.1f} MiB rewritten in {rewritten.files_added} files"
        report.ratio(f"mirror_{runner}_1pct_rows", everything / full, None, "lower", said)
        report.figure(f"{runner}_1pct_rows_mib", rewritten.bytes_written / MIB)
        nothing, _ = timed(store, runner)
        report.figure(f"{runner}_nothing_changed_seconds", nothing)
        require_equal(store, names, target, rng)


def mirror_threads(report: Report, directory: Path, quick: bool) -> None:
    """Threads of this process."""
    mirrored(report, directory, quick, "threads")


def mirror_spark(report: Report, directory: Path, quick: bool) -> None:
    """Spark, in local mode."""
    mirrored(report, directory, quick, "spark")


PARTS = [mirror_threads, mirror_spark, *row_changes.PARTS]
