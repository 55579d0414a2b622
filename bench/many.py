"""A store with many databases: creating them, and what they cost if few of them are active (N4).

The opponent of a thousand active databases is ten active databases in the same store. The other ratios are of a measurement to
its bound: 1 is the limit. Opening by the length of the feed and after a kill is measured in `many_opening.py`.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import apsw

import quire
from bench.report import Report, alternate, drop_page_cache


def creation(report: Report, directory: Path, quick: bool) -> None:
    """Create databases by the thousand, against a loop of single calls, and open the store that has them."""
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
    seconds = forks / count * 100_000
    report.ratio("forks_vs_30_seconds", seconds / 30, 1, "lower", f"{seconds:.1f} s for 100,000 forks")
    report.figure("creations_per_second", count / created)
    dropping = dropped / (count // 10)
    report.ratio("drops_vs_forks", dropping / (forks / count), None, "lower", f"{1 / dropping:,.0f} drops/s")
    report.figure("disk_bytes_per_database", files / (2 * count))
    opened: list[quire.Store] = []
    report.figure("open_store_seconds", timed(lambda: opened.append(quire.open(directory / "store"))))
    report.figure("round_of_upkeep_seconds", timed(lambda: opened[0].maintain()))
    opened[0].close()


def idle(report: Report, directory: Path, quick: bool) -> None:
    """Measure a store of many databases, some of them active: memory, disk, descriptors, threads, upkeep, lists, commits."""
    count, active = (2_000, 100) if quick else (100_000, 1_000)
    path = directory / "idle"
    with quire.open(path) as store:
        with store.sqlite("template", create=True) as database:
            database.execute("CREATE TABLE t(x)")
        store.fork_many("template", [f"tenant-{number}" for number in range(count)])
    opened: list[quire.Store] = []
    if why := drop_page_cache():
        report.ratio("open_cold_vs_3_seconds", None, 1, "lower", why)
    else:
        cold = timed(lambda: quire.open(path).close())
        report.ratio("open_cold_vs_3_seconds", cold / 3, 1, "lower", f"{cold:.2f} s to open and close, no page cached")
    warm = timed(lambda: opened.append(quire.open(path)))
    with opened[0] as store:
        report.ratio("open_vs_3_seconds", warm / 3, 1, "lower", f"{warm:.2f} s with {count:,} databases")
        few, many = alternate(
            1 if quick else 5,
            lambda: commits_per_second(store, [f"tenant-{number}" for number in range(10)], quick),
            lambda: commits_per_second(store, [f"tenant-{number}" for number in range(active)], quick),
        )
        detail = f"{many:,.0f} commits/s on {active:,} databases, {few:,.0f} on 10"
        report.ratio("commits_many_active_vs_ten", many / few, 0.8, "higher", detail)
        memory = anonymous_bytes()
        report.ratio("memory_vs_512_mib", memory / (512 << 20), 1, "lower", f"{memory >> 20} MiB, with {active:,} open")
        files = len(os.listdir("/proc/self/fd"))
        report.ratio("descriptors_vs_1024", files / 1_024, 1, "lower", f"{files} descriptors")
        report.figure("threads", threading.active_count())
        while not store.manifest.recount.is_done:
            store.manifest.recount.round()
        rounds = sorted(processor_seconds(store.upkeep.round) for _ in range(11))
        detail = f"{rounds[5] * 1e3:.1f} ms of processor time, {active:,} of {count:,} databases open"
        report.ratio("upkeep_round_vs_50_ms", rounds[5] / 0.05, 1, "lower", detail)
        store.pages.close_idle()
    listing = min(processor_seconds(lambda: run_ls(path), children=True) for _ in range(3 if quick else 5))
    detail = f"`quire ls -n 10`: {listing * 1e3:.0f} ms of processor time"
    report.ratio("ls_head_vs_300_ms", listing / 0.3, 1, "lower", detail)
    size = sum(entry.stat().st_blocks * 512 for entry in path.rglob("*") if entry.is_file()) / count
    report.ratio("disk_vs_64_kib", size / (64 << 10), 1, "lower", f"{size:,.0f} bytes for each of {count:,} databases")


WRITERS = 16


def commits_per_second(store: quire.Store, names: list[str], quick: bool) -> float:
    """Return durable one-row inserts per second. Each thread writes to its own databases in rotation; all of them are opened
    before."""
    per_thread = 200 if quick else 1_000

    def work(own: list[apsw.Connection]) -> None:
        for number in range(per_thread):
            own[number % len(own)].execute("INSERT INTO t VALUES (1)")

    connections = [store.sqlite(name) for name in names]
    for connection in connections:
        connection.execute("INSERT INTO t VALUES (0)")
    writers = min(WRITERS, len(names))
    threads = [threading.Thread(target=work, args=(connections[number::writers],)) for number in range(writers)]

    def run() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    taken = timed(run)
    for connection in connections:
        connection.close()
    return writers * per_thread / taken


def anonymous_bytes() -> int:
    """Return the process's memory without the pages of mapped files, which the system reclaims when it needs them."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def processor_seconds(work: Callable[[], object], *, children: bool = False) -> float:
    """Return the processor time of this process, or of the processes that it starts."""

    def now() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    started = now()
    work()
    return now() - started


def run_ls(path: Path) -> None:
    command = [sys.executable, "-m", "quire", "ls", "--store", str(path), "-n", "10"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


PARTS = (creation, idle)
