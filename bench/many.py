"""A store as it grows: what an open costs, by the length of the feed and the number of databases; what many databases cost, of
which few are active (N4).

The opponent of an open is reading the same rows once, raw, and decoding them: what any check of everything has to do. That of a
thousand active databases is the same rate of commits on ten of them. Bounds are ratios of what was measured to what was
promised: 1 is the limit.
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

import quire
from bench.manifest import chunk_op, fresh
from bench.report import Report, alternate
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG
from quire.manifest.checked_point import SUFFIX
from quire.manifest.store import ManifestStore
from quire.sqlite.connect import Connection


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


def idle(report: Report, directory: Path, quick: bool) -> None:
    """Many databases, some of them active: memory, disk, descriptors, threads, a round of upkeep, lists, commits."""
    count, active = (2_000, 100) if quick else (100_000, 1_000)
    path = directory / "idle"
    with quire.open(path) as store:
        with store.sqlite("template", create=True) as database:
            database.execute("CREATE TABLE t(x)")
        store.fork_many("template", [f"tenant-{number}" for number in range(count)])
    opened: list[quire.Store] = []
    cold = timed(lambda: opened.append(quire.open(path)))
    with opened[0] as store:
        report.ratio("open_vs_3_seconds", cold / 3, 1, "lower", f"{cold:.2f} s with {count:,} databases")
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
    given = sum(entry.stat().st_blocks * 512 for entry in path.rglob("*") if entry.is_file()) / count
    report.ratio(
        "disk_vs_64_kib", given / (64 << 10), 1, "lower", f"{given:,.0f} bytes for each of {count:,} databases"
    )


WRITERS = 16


def commits_per_second(store: quire.Store, names: list[str], quick: bool) -> float:
    """Durable one-row inserts of some threads, each with databases of its own, in turn; they are all open before."""
    each = 200 if quick else 1_000

    def work(own: list[Connection]) -> None:
        for number in range(each):
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
    return writers * each / taken


def anonymous_bytes() -> int:
    """Memory of the process without the pages of mapped files, which the system takes back when it needs them."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def processor_seconds(work: Callable[[], object], *, children: bool = False) -> float:
    """Of this process, or of those that it starts."""

    def now() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    started = now()
    work()
    return now() - started


def run_ls(path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", "from quire.cli.main import main; main()", "ls", "--store", str(path), "-n", "10"],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


PARTS = (opening, creation, idle)
