"""A store as it grows: what an open costs, by the length of the feed and the number of databases.

The opponent of an open is reading the same rows once, raw, and decoding them: what any check of everything has to do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import quire
from bench.manifest import chunk_op, fresh
from bench.report import Report, alternate
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG
from quire.manifest.checked_point import SUFFIX
from quire.manifest.store import ManifestStore


def opening(report: Report, directory: Path, quick: bool) -> None:
    """Opening a manifest with a long feed and many rows after a clean close, against reading its rows."""
    few, many = (5_000, 50_000) if quick else (100_000, 1_000_000)
    paths = {count: filled(directory, count) for count in (few, many)}
    rounds = 3 if quick else 5
    short, long, read, full = alternate(
        rounds,
        lambda: open_seconds(paths[few]),
        lambda: open_seconds(paths[many]),
        lambda: read_seconds(paths[many]),
        lambda: open_seconds(paths[many], whole=True),
    )
    detail = (
        f"{long * 1e3:.1f} ms with {many:,} changes, {read * 1e3:.0f} ms to read them, {full * 1e3:.0f} ms to check all"
    )
    report.ratio("open_vs_reading_rows", long / read, 0.2, "lower", detail)
    detail = f"{long * 1e3:.1f} ms with {many:,} changes, {short * 1e3:.1f} ms with {few:,}"
    report.ratio("open_long_feed_vs_short", long / short, 2, "lower", detail)
    report.figure("open_ms", long * 1e3)
    report.figure("check_all_ms", full * 1e3)


def filled(directory: Path, changes: int) -> str:
    """A manifest with a chunk and a change for each number, closed well."""
    with ManifestStore.open(fresh(directory, f"many-{changes}")) as manifest:
        manifest.register_db("bench", quire.DbKind.PAGES)
        for guard in [manifest.submit((chunk_op(number),)) for number in range(changes)]:
            guard.result()
        return manifest.env.path


def open_seconds(path: str, *, whole: bool = False) -> float:
    """Processor time: other work on the machine is not the open's."""
    if whole:
        os.unlink(path + SUFFIX)
    started = time.process_time()
    manifest = ManifestStore.open(path)
    taken = time.process_time() - started
    manifest.close()
    return taken


def read_seconds(path: str) -> float:
    """Every row of the log and of the chunks, decoded."""
    with ManifestStore.open(path, mode="r") as manifest, manifest.read() as txn:
        started = time.process_time()
        for _ in txn.scan(CHANGE_LOG):
            pass
        for _ in txn.scan(t.CHUNK_CATALOG):
            pass
        return time.process_time() - started


def creation(report: Report, directory: Path, quick: bool) -> None:
    """Databases by the thousand, against a loop of single calls; and opening the store that has them."""
    count, singles = (2_000, 100) if quick else (100_000, 1_000)
    with quire.open(directory / "store") as store:
        with store.sqlite("template", create=True) as database:
            database.execute("CREATE TABLE t(x)")
        one = timed(lambda: [store.fork("template", f"single-{number}") for number in range(singles)]) / singles
        names = [f"tenant-{number}" for number in range(count)]
        forks = timed(lambda: store.fork_many("template", names))
        created = timed(lambda: store.create_many([f"empty-{number}" for number in range(count)]))
        dropped = timed(lambda: store.drop_many(names[: count // 10]))
        files = sum(entry.stat().st_blocks * 512 for entry in (directory / "store").rglob("*") if entry.is_file())
    report.ratio("forks_together_vs_one_by_one", forks / count / one, 0.5, "lower", f"{count / forks:,.0f} forks/s")
    report.figure("seconds_for_100000_forks", forks / count * 100_000)
    report.figure("creations_per_second", count / created)
    report.figure("drops_per_second", count // 10 / dropped)
    report.figure("disk_bytes_per_database", files / (2 * count))
    opened: list[quire.Store] = []
    report.figure("open_store_seconds", timed(lambda: opened.append(quire.open(directory / "store"))))
    report.figure("round_of_upkeep_seconds", timed(lambda: opened[0].maintain()))
    opened[0].close()


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


PARTS = (opening, creation)
