"""A store with an archive against the same store without one, and against a bare loop of puts.

The bucket is S3 over HTTP on this machine: moto's server in a separate process, which shares the cores. The contenders of the
commit rates alternate in blocks. Both stores stay open, and the archiver of one continues between its turns. Lag is observed
without waiting for the archive, because a waiting caller would make it upload at once.
"""

from __future__ import annotations

import http.client
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import quire
from bench.report import MIB, Report, rate, seconds
from quire.objects import ObjectStore, list_objects, open_store

BUCKET = "bench"
PAGE = 4096
BLOCK = 25
"""Commits in one turn of a contender."""
WRITERS = 32
PUTS_PER_HOUR = 1.2 * 3_600

SERVER = """
import logging, sys, warnings
warnings.simplefilter("ignore")
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(*server.get_host_and_port(), flush=True)
sys.stdin.read()
"""


@contextmanager
def s3() -> Iterator[Callable[[str], str]]:
    """Run an S3 endpoint in a separate process; yield a function from the name of a prefix to its URL."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdin is not None
    host, port = server.stdout.readline().split()
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request("PUT", f"/{BUCKET}")
    connection.getresponse().read()
    connection.close()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield lambda prefix: f"s3://{BUCKET}/{prefix}"
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        server.stdin.close()
        server.wait(30)


ArchiveMode = Literal["off", "async", "sync"]


def opened(directory: Path, name: str, url: str = "", mode: ArchiveMode = "off", **archive: Any) -> quire.Store:
    """Create a store without background maintenance, with an archive or without one."""
    root = directory / name
    shutil.rmtree(root, ignore_errors=True)
    settings = quire.StoreSettings(
        object_store=url,
        archive=quire.ArchiveSettings(mode=mode, **archive),
        maintenance=quire.MaintenanceSettings(enabled=False),
    )
    store = quire.open(root, settings=settings)
    if store.archive is not None:
        store.archive.wait(120)  # for its base: after it, only log objects are uploaded
    return store


# ── commit rates ──────────────────────────────────────────────────────────────────────────────────────────────────────
class Work:
    """Commits of each engine in one store."""

    def __init__(self, store: quire.Store) -> None:
        self.store = store
        store.create("pages", "pages")
        self.pages = store.pages.open("pages", page_size=PAGE)
        self.kv = store.kv("kv", create=True)
        self.stream = store.stream("stream", create=True)
        self.image, self.value = os.urandom(PAGE), os.urandom(100)
        self.number = 0

    def commit(self, engine: str) -> None:
        self.number += 1
        number = self.number
        match engine:
            case "pages":
                txn = self.pages.begin()
                txn.write_page(number % 512, self.image)
                txn.write_page(number * 7 % 512, self.image)
                txn.commit().result()
            case "kv":
                self.kv.put(b"%08d" % number, self.value)
            case "stream":
                self.stream.append(self.value).result()
            case "manifest":
                self.store.set_options("pages", tags={"number": str(number)})


def commit_rates(report: Report, directory: Path, quick: bool) -> None:
    turns = 6 if quick else 40
    with s3() as url:
        plain, archived = opened(directory, "plain"), opened(directory, "archived", url("rates"), "async")
        both = [Work(plain), Work(archived)]
        for engine in ("pages", "kv", "stream", "manifest"):
            times: list[list[float]] = [[], []]
            for _ in range(turns):
                for work, durations in zip(both, times, strict=True):
                    started = time.perf_counter()
                    for _ in range(BLOCK):
                        work.commit(engine)
                    durations.append((time.perf_counter() - started) / BLOCK)
            without, with_archive = (statistics.median(durations) for durations in times)
            detail = f"{rate(1 / with_archive)} against {rate(1 / without)}"
            report.ratio(f"async_{engine}_commits_vs_without", without / with_archive, 0.85, "higher", detail)
            report.figure(f"async_{engine}_commits_per_second", 1 / with_archive)
        plain.close()
        archived.close()


# ── sync ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def sync_writers(report: Report, directory: Path, quick: bool) -> None:
    duration = 3.0 if quick else 20.0
    with s3() as url:
        store = opened(directory, "sync", url("sync"), "sync")
        kv = store.kv("kv", create=True)
        bucket = open_store(url("sync"))
        before = {info.key for info in list_objects(bucket)}
        commits = [0] * WRITERS
        ends = time.perf_counter() + duration

        def write(writer: int) -> None:
            while time.perf_counter() < ends:
                kv.put(b"%d-%d" % (writer, commits[writer]), bytes(100))
                commits[writer] += 1

        started = time.perf_counter()
        _together([partial(write, writer) for writer in range(WRITERS)])
        took = time.perf_counter() - started
        added = [info.key for info in list_objects(bucket) if info.key not in before]
        bodies = [bucket.get(key) for key in added]
        bare = seconds(lambda: _put_all(bucket, bodies))
        store.close()
        bucket.close()
    detail = (
        f"{rate(sum(commits) / took)} commits in {len(bodies) / took:.0f} objects/s against {len(bodies) / bare:.0f}"
    )
    report.ratio("sync_32_writers_vs_bare_puts", bare / took, 0.7, "higher", detail)
    report.figure("sync_commits_per_second", sum(commits) / took)


def _put_all(bucket: ObjectStore, bodies: list[bytes]) -> None:
    for number, body in enumerate(bodies):
        bucket.put(f"bare/{number:08x}", body, create_only=True)


def _together(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ── lag, requests, bytes ──────────────────────────────────────────────────────────────────────────────────────────────
class Lag:
    """Samples how long it takes until a change is in the bucket, without waiting for the archive."""

    def __init__(self, store: quire.Store) -> None:
        assert store.archive is not None
        self._archiver = store.archive
        self._samples: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            end, at = self._archiver.queue.end, time.perf_counter()
            while self._archiver.archived < end and not self._stop.is_set():
                self._stop.wait(0.005)
            self._samples.append(time.perf_counter() - at)
            self._stop.wait(0.01)

    def stop(self) -> list[float]:
        self._stop.set()
        self._thread.join()
        return sorted(self._samples)


def paced(store: quire.Store, databases: int, per_second: float, duration: float) -> int:
    """Commit to the databases in rotation, `per_second` times a second, without syncs. Return the number of commits."""
    kvs = [store.kv(f"d{number}", create=True) for number in range(databases)]
    assert store.archive is not None
    store.archive.wait(300)
    started, done = time.perf_counter(), 0
    while (now := time.perf_counter() - started) < duration:
        due = int(now * per_second)
        while done < due:
            kvs[done % databases].put(b"k%d" % (done % 1000), b"%0100d" % done, sync=False)
            done += 1
        time.sleep(0.005)
    return done


def lag(report: Report, directory: Path, quick: bool) -> None:
    databases, per_second, duration = (100, 2_000, 6.0) if quick else (1_000, 2_000, 60.0)
    with s3() as url:
        store = opened(directory, "lag", url("lag"), "async")
        paced(store, databases, 1, 0.1)
        assert store.archive is not None
        measured, puts = Lag(store), store.archive.status().puts
        started = time.perf_counter()
        done = paced(store, databases, per_second, duration)
        took = time.perf_counter() - started
        puts = store.archive.status().puts - puts
        samples = measured.stop()
        store.close()
    p99 = samples[min(int(len(samples) * 0.99), len(samples) - 1)]
    detail = f"{done / took:.0f} commits/s over {databases} databases, median {statistics.median(samples):.2f} s"
    report.ratio("lag_p99_seconds", p99, 1.5, "lower", detail)
    report.ratio("puts_per_second", puts / took, 1.2, "lower", f"{puts} puts in {took:.0f} s")


def standby(report: Report, directory: Path, quick: bool) -> None:
    """Measure the lag of a standby behind an owner that commits, and the time of its promotion. Both are in this process."""
    duration = 5.0 if quick else 30.0
    with s3() as url:
        store = opened(directory, "first", url("standby"), "async")
        interval = store.settings.archive.interval_seconds
        with quire.Standby(url("standby"), directory / "second") as following:
            following.poll()
            done, behind = threading.Event(), list[float]()

            def look() -> None:
                while not done.wait(0.05):
                    behind.append(time.time() - following.status.at_ms / 1_000)

            threads = [threading.Thread(target=look), threading.Thread(target=following.run, kwargs={"stop": done})]
            for thread in threads:
                thread.start()
            paced(store, 10, 200, 3.0)  # not measured: the standby catches up
            behind.clear()
            paced(store, 10, 200, duration)
            done.set()
            for thread in threads:
                thread.join()
            store.close()
            promoted = following.promote()
    behind.sort()
    p99 = behind[int(len(behind) * 0.99)]
    detail = f"p99 {p99:.2f} s, median {statistics.median(behind):.2f} s, with cuts every {interval:g} s"
    report.ratio("standby_lag_vs_interval", p99 / interval, 2.0, "lower", detail)
    report.ratio("promotion_seconds", promoted.seconds, 5.0, "lower")


def cost(report: Report, directory: Path, quick: bool) -> None:
    """Commit once a second to each of some databases, and count requests and bytes."""
    duration = 5.0 if quick else 60.0
    for databases in (1, 100) if quick else (1, 100, 1_000):
        with s3() as url:
            store = opened(directory, "cost", url("cost"), "async")
            paced(store, databases, 1, 0.1)
            assert store.archive is not None
            before, started = store.archive.status(), time.perf_counter()
            done = paced(store, databases, databases, duration)
            hours = (time.perf_counter() - started) / 3_600
            after = store.archive.status()
            puts, size = after.puts - before.puts, after.put_bytes - before.put_bytes
            store.close()
        # A busy machine commits less often than once a second: bytes are scaled to one commit a second.
        achieved = done / databases / hours / 3_600
        detail = f"{size / hours / achieved / MIB:.1f} MiB per hour; {achieved:.2f} commits a second to each were made"
        report.ratio(f"requests_per_hour_{databases}_databases", puts / hours, PUTS_PER_HOUR, "lower", detail)
        report.figure(f"bytes_per_hour_{databases}_databases", size / hours / achieved)
        report.figure(f"commits_per_second_to_each_of_{databases}_databases", achieved)


PARTS = (commit_rates, sync_writers, lag, standby, cost)
