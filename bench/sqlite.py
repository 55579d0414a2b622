"""SQLite on quire against SQLite on a file: WAL mode, synchronous=FULL, the same apsw, the same disk, alternating.

Both have the same SQL, the same page size and the same cache of SQLite's, and a commit returns only when it is on disk. They
differ in their background work, which is part of the figures: native SQLite copies its WAL into the file every 1,000 pages, and
quire publishes and seals. Point reads are single SELECTs, each in its own read transaction.
"""

from __future__ import annotations

import http.client
import json
import logging
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import apsw

import quire
from bench.report import GIB, MIB, Report, alternate, rate, seconds
from quire.objects import ObjectStore, StoreOptions, list_objects, open_store
from quire.sqlite import dbapi, open_reader

SETTINGS = quire.StoreSettings(
    maintenance=quire.MaintenanceSettings(enabled=False),
    pages=quire.PagesSettings(wal_bytes_max=64 * GIB, store_wal_bytes_max=64 * GIB),
)
THREADS = 4
BLOCK = 50
"""Transactions in one turn of a contender."""
ACCOUNTS = 10_000


class Contenders:
    """The same database in a file and in a store."""

    def __init__(self, directory: Path, name: str, *statements: str) -> None:
        self.directory = directory / name
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        self.store: quire.Store = quire.open(self.directory / "store", settings=SETTINGS)
        self.native, self.ours = self.connect_native(), self.connect_ours()
        for connection in (self.native, self.ours):
            for statement in statements:
                connection.execute(statement)

    def connect_native(self) -> apsw.Connection:
        connection = apsw.Connection(str(self.directory / "native.db"))
        connection.set_busy_timeout(60_000)
        connection.pragma("journal_mode", "wal")
        connection.pragma("synchronous", "full")
        return connection

    def connect_ours(self) -> apsw.Connection:
        return self.store.sqlite("bench", create=True, timeout=60)

    def close(self) -> None:
        self.native.close()
        self.ours.close()
        self.store.close()


def filled(directory: Path, name: str, rows: int) -> Contenders:
    """Create contenders with a table of `rows` rows of about 100 bytes."""
    both = Contenders(directory, name, "create table t(id integer primary key, a integer, b text)")
    fill = (
        "with recursive n(i) as (select 1 union all select i + 1 from n where i < ?)"
        " insert into t select i, i * 7 % 1000003, printf('%080d', i) from n"
    )
    for connection in (both.native, both.ours):
        connection.execute(fill, (rows,))
    return both


def small_writes(report: Report, directory: Path, quick: bool) -> None:
    both = Contenders(directory, "small", "create table t(id integer primary key, a integer, b text)")
    blocks, rng = 6 if quick else 40, random.Random(1)

    def run(connection: apsw.Connection) -> Callable[[], float]:
        def block() -> float:
            def work() -> None:
                for _ in range(BLOCK):
                    key = rng.randrange(5_000)
                    connection.execute("insert or replace into t values (?, ?, ?)", (key, key, "x" * 80))

            return BLOCK / seconds(work)

        return block

    ours, native = alternate(blocks, run(both.ours), run(both.native))
    detail = f"{rate(ours)} against {rate(native)}, one row a transaction"
    report.ratio("small_writes_vs_native", ours / native, 0.9, "higher", detail)
    report.figure("small_writes_per_second", ours)
    both.close()


def bulk_insert(report: Report, directory: Path, quick: bool) -> None:
    rows = 50_000 if quick else 300_000
    both = Contenders(directory, "bulk", "create table t(id integer primary key, a integer, b text)")
    data = [(number * 7 % 1_000_003, f"{number:080d}") for number in range(rows)]

    def run(connection: apsw.Connection) -> Callable[[], float]:
        def work() -> None:
            with connection:
                connection.executemany("insert into t(a, b) values (?, ?)", data)

        return lambda: rows / seconds(work)

    ours, native = alternate(3 if quick else 5, run(both.ours), run(both.native))
    detail = f"{rate(ours)} against {rate(native)} rows, {rows:,} a transaction"
    report.ratio("bulk_insert_vs_native", ours / native, 0.5, "higher", detail)
    both.close()


def point_reads(report: Report, directory: Path, quick: bool) -> None:
    rows, count = 20_000, 10_000 if quick else 50_000
    both = filled(directory, "points", rows)

    def run(connection: apsw.Connection) -> Callable[[], float]:
        keys = random.Random(2).choices(range(1, rows + 1), k=count)

        def work() -> None:
            execute = connection.execute
            for key in keys:
                execute("select a from t where id = ?", (key,)).get  # noqa: B018 - reads the row

        return lambda: count / seconds(work)

    for connection in (both.ours, both.native):
        connection.execute("select sum(a) from t").get  # noqa: B018 - warms the caches
    ours, native = alternate(5 if quick else 9, run(both.ours), run(both.native))
    detail = f"{rate(ours)} against {rate(native)}"
    report.ratio("point_reads_vs_native", ours / native, 2 if reads_in_c() else 0.7, "higher", detail)
    _threaded_reads(report, both, rows, count // 2)
    both.close()


def reads_in_c() -> bool:
    """Return whether quire's C part, which answers small reads, is built and enabled; `quire doctor` reports it."""
    command = [sys.executable, "-m", "quire", "doctor", "--no-objects", "--json"]
    output = subprocess.run(command, check=False, stdout=subprocess.PIPE).stdout  # exits with 1 without a store
    (detail,) = (row["detail"] for row in json.loads(output) if row["check"] == "sqlite")
    language = detail.partition("small reads are answered in ")[2]
    return {"C": True, "Python": False}[language.partition(":")[0]]


def _threaded_reads(report: Report, both: Contenders, rows: int, count: int) -> None:
    def run(connect: Callable[[], apsw.Connection]) -> Callable[[], float]:
        connections = [connect() for _ in range(THREADS)]
        for connection in connections:
            connection.execute("select sum(a) from t").get  # noqa: B018 - warms the caches

        def reader(connection: apsw.Connection, seed: int) -> None:
            for key in random.Random(seed).choices(range(1, rows + 1), k=count):
                connection.execute("select a from t where id = ?", (key,)).get  # noqa: B018 - reads the row

        def work() -> None:
            threads = [
                threading.Thread(target=reader, args=(connection, seed)) for seed, connection in enumerate(connections)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return lambda: THREADS * count / seconds(work)

    ours, native = alternate(5, run(both.connect_ours), run(both.connect_native))
    detail = f"{rate(ours)} against {rate(native)}"
    report.ratio("point_reads_4_threads_vs_native", ours / native, 1, "higher", detail)


def full_scan(report: Report, directory: Path, quick: bool) -> None:
    rows = 50_000 if quick else 400_000
    both = filled(directory, "scan", rows)

    def run(connection: apsw.Connection) -> Callable[[], float]:
        return lambda: rows / seconds(lambda: connection.execute("select sum(length(b)) from t").get)

    ours, native = alternate(5 if quick else 9, run(both.ours), run(both.native))
    detail = f"{rate(ours)} against {rate(native)} rows"
    report.ratio("full_scan_vs_native", ours / native, 0.5, "higher", detail)
    both.close()


def dbapi_cost(report: Report, directory: Path, quick: bool) -> None:
    """Compare `quire.sqlite.dbapi` with the standard library's `sqlite3`, on the same file, in processor time.

    Small statements are SELECTs by key, each with its own cursor: first each in its own read transaction, then all in one.
    """
    path = directory / "dbapi.db"
    path.unlink(missing_ok=True)
    rows = [(number, f"row {number}", number / 2) for number in range(20_000 if quick else 100_000)]
    count = len(rows) // 10
    standard, ours = sqlite3.connect(path), dbapi.wrap(apsw.Connection(str(path)))
    standard.execute("create table t(id integer primary key, a, b)")
    standard.executemany("insert into t values (?, ?, ?)", rows)
    standard.commit()

    def insert(connection: Any) -> None:
        connection.execute("delete from t")
        connection.executemany("insert into t values (?, ?, ?)", rows)
        connection.rollback()

    def fetch(connection: Any) -> None:
        for _ in connection.execute("select * from t"):
            pass
        connection.execute("select * from t").fetchall()

    def small(connection: Any) -> None:
        for number in range(count):
            connection.execute("select a from t where id = ?", (number,)).fetchone()

    def in_transaction(connection: Any) -> None:
        connection.execute("begin")
        small(connection)
        connection.rollback()

    for name, work, target in (
        ("dbapi_executemany", insert, 1.15),
        ("dbapi_fetched_rows", fetch, 1.15),
        ("dbapi_small_statements", small, 1.15),
        ("dbapi_small_in_transaction", in_transaction, 1.15),
    ):
        mine, theirs = alternate(5 if quick else 9, partial(_cpu, work, ours), partial(_cpu, work, standard))
        report.ratio(name, mine / theirs, target, "lower", f"{mine * 1e3:.0f} ms against {theirs * 1e3:.0f}")
    ours.close()
    standard.close()


def _cpu(work: Callable[[Any], None], connection: Any) -> float:
    started = time.process_time()
    work(connection)
    return time.process_time() - started


def tpcb(report: Report, directory: Path, quick: bool) -> None:
    """Run a write-bound load: each transaction changes balances and adds a row of history."""
    both = Contenders(
        directory,
        "tpcb",
        "create table accounts(id integer primary key, balance integer, filler text)",
        "create table tellers(id integer primary key, balance integer)",
        "create table branches(id integer primary key, balance integer)",
        "create table history(account integer, teller integer, branch integer, delta integer, at text)",
        "insert into branches values (1, 0)",
        *(f"insert into tellers values ({number}, 0)" for number in range(1, 11)),
        "with recursive n(i) as (select 1 union all select i + 1 from n where i < 10000)"
        " insert into accounts select i, 0, printf('%060d', i) from n",
    )
    count = 25 if quick else 150

    def transaction(connection: apsw.Connection, rng: random.Random) -> None:
        account, teller, delta = rng.randint(1, ACCOUNTS), rng.randint(1, 10), rng.randint(-99_999, 99_999)
        connection.execute("begin immediate")
        connection.execute("update accounts set balance = balance + ? where id = ?", (delta, account))
        connection.execute("select balance from accounts where id = ?", (account,)).get  # noqa: B018 - TPC-B reads the balance
        connection.execute("update tellers set balance = balance + ? where id = ?", (delta, teller))
        connection.execute("update branches set balance = balance + ? where id = 1", (delta,))
        connection.execute("insert into history values (?, ?, 1, ?, datetime())", (account, teller, delta))
        connection.execute("commit")

    def run(connect: Callable[[], apsw.Connection]) -> Callable[[], float]:
        connections = [connect() for _ in range(THREADS)]

        def client(connection: apsw.Connection, seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(count):
                transaction(connection, rng)

        def work() -> None:
            threads = [
                threading.Thread(target=client, args=(connection, seed)) for seed, connection in enumerate(connections)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return lambda: THREADS * count / seconds(work)

    ours, native = alternate(4 if quick else 12, run(both.connect_ours), run(both.connect_native))
    detail = f"{rate(ours)} against {rate(native)}, {THREADS} threads"
    report.ratio("tpcb_4_threads_vs_native", ours / native, 1.1, "higher", detail)
    for connection in (both.ours, both.native):
        sums = [connection.execute(f"select sum({column}) from {table}").get for table, column in _BALANCES]
        assert len(set(sums)) == 1, "money was lost"
    both.close()


_BALANCES = (("accounts", "balance"), ("tellers", "balance"), ("branches", "balance"), ("history", "delta"))


class Counted:
    """An object store that records the length of each ranged read."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner
        self.reads: list[int] = []

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self.reads.append(length)
        return self._inner.get_range(key, offset, length)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Touched:
    """A version that records which pages SQLite reads."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.lsn, self.page_size, self.size_pages = reader.lsn, reader.page_size, reader.size_pages
        self.pages: set[int] = set()

    def read_page(self, page: int) -> bytes:
        self.pages.add(page)
        image: bytes = self._reader.read_page(page)
        return image

    def close(self) -> None:
        self._reader.close()


def cold_from_s3(report: Report, directory: Path, quick: bool) -> None:
    """Read a snapshot whose chunks are on S3 (moto's server) through the VFS, with empty caches."""
    rows, queries = 5_000 if quick else 40_000, 5 if quick else 20
    store = quire.open(directory / "cold", settings=SETTINGS)
    connection = store.sqlite("bench", create=True)
    connection.execute("create table t(id integer primary key, b blob)")
    connection.executemany("insert into t values (?, randomblob(1000))", ((number,) for number in range(rows)))
    connection.close()
    store.checkpoint("bench")
    store.snapshot("bench", "cold")
    view, local = store.view("bench", "cold"), store.objects
    if view.pins:
        report.ratio("cold_s3_requests_per_page", None, 2, "lower", "the checkpoint has not absorbed everything")
        return
    with s3() as options:
        remote = open_store("s3://bench/objects", options=options)
        for info in list_objects(local):
            remote.put(info.key, local.get(info.key))
        counted = Counted(remote)
        moved = replace(view, spaces=tuple(("s3://bench/objects", prefix) for _, prefix in view.spaces))
        requests, fetched, touched = 0, 0, 0
        for number in range(queries):
            counted.reads.clear()
            source = Touched(moved.open_alone(lambda _: counted, cache_bytes=8 * MIB))
            reader = open_reader(source)
            assert reader.execute("select length(b) from t where id = ?", (number * 97 % rows,)).get == 1000
            reader.close()
            requests += len(counted.reads)
            fetched += sum(counted.reads)
            touched += len(source.pages)
        remote.close()
    size = view.size_pages * view.page_size
    detail = (
        f"{requests / queries:.1f} requests, {fetched / queries / 1024:.0f} KiB for {touched / queries:.1f} pages a query,"
        f" of {size / MIB:.0f} MiB"
    )
    report.ratio("cold_s3_requests_per_page", requests / touched, 2, "lower", detail)
    report.figure("cold_s3_bytes_per_query", fetched / queries)
    store.close()


@contextmanager
def s3() -> Iterator[StoreOptions]:
    """Run an S3 endpoint on this machine with a bucket `bench`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from moto and its dependencies
        from moto.moto_server.threaded_moto_server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
    host, port = server.get_host_and_port()
    connection = http.client.HTTPConnection(host, port, timeout=10)
    connection.request("PUT", "/bench")
    connection.getresponse().read()
    connection.close()
    keys = {"access_key_id": "bench", "secret_access_key": "bench"}
    yield StoreOptions(endpoint=f"http://{host}:{port}", region="us-east-1", allow_http=True, settings=keys)
    server.stop()


PARTS = (small_writes, bulk_insert, point_reads, full_scan, dbapi_cost, tpcb, cold_from_s3)
