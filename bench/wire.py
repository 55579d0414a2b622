"""SQL over the wire against the same SQL in the owner, and against a bare endpoint of the same server (W9).

The owner is a separate process that contains the server. This process is the clients: connections that stay open, each with
one outstanding request. On two cores, each side has one. The owner measures its own threads on command, alternating with the
clients, so that a slow moment of the machine affects both. A TPC-B transaction is sent as one batch, and to PostgreSQL (if it
is installed) as one pipeline, with synchronous commit.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import psutil

import quire
from bench.report import GIB, MIB, Report, alternate, rate

SETTINGS = quire.StoreSettings(
    maintenance=quire.MaintenanceSettings(enabled=False),
    pages=quire.PagesSettings(wal_bytes_max=64 * GIB, store_wal_bytes_max=64 * GIB),
    service=quire.ServiceSettings(http_anonymous_writes=True, sql_default_database="bench"),
)
INSERT = "insert into t(a, b) values (?, ?)"
PAYLOAD = "x" * 80
ACCOUNTS, TELLERS, BRANCHES = 10_000, 100, 10
GARBAGE_ALLOCATIONS = 50_000
"""Allocations between two garbage collections, as in `quire serve`."""


# ── the owner's process ───────────────────────────────────────────────────────────────────────────────────────────────
class Owner:
    """The commands of the owner's process, `python -m bench.wire DIRECTORY`."""

    def __init__(self, directory: str) -> None:
        self._store = quire.open(directory, settings=SETTINGS)
        connection = self._store.sqlite("bench", create=True)
        connection.execute("create table t(id integer primary key, a integer, b text)")
        for name, rows in (("accounts", ACCOUNTS), ("tellers", TELLERS), ("branches", BRANCHES)):
            connection.execute(f"create table {name}(id integer primary key, balance integer)")
            series = "with recursive n(i) as (select 1 union all select i + 1 from n where i < ?)"
            connection.execute(f"{series} insert into {name} select i, 0 from n", (rows,))
        connection.execute("create table history(account integer, teller integer, branch integer, delta integer)")
        connection.close()
        self._server: Any = None

    def serve(self, on: bool) -> str:
        if on and self._server is None:
            self._server = self._store.serve_http("127.0.0.1:0")
        if not on and self._server is not None:
            self._server.close()
            self._server = None
        return self._server.address if self._server is not None else ""

    def inserts(self, threads: int, seconds: float) -> float:
        """Return rows per second of `threads` threads. Each has its own connection, and each row is a transaction."""
        ended, counts = threading.Event(), [0] * threads

        def work(number: int) -> None:
            connection = self._store.sqlite("bench", timeout=60)
            while not ended.is_set():
                connection.execute(INSERT, (number, PAYLOAD))
                counts[number] += 1
            connection.close()

        return _timed(
            [threading.Thread(target=work, args=(number,)) for number in range(threads)], ended, counts, seconds
        )

    def fill(self, rows: int) -> int:
        connection = self._store.sqlite("bench")
        series = "with recursive n(i) as (select 1 union all select i + 1 from n where i < ?)"
        connection.execute("create table big(id integer primary key, a integer, b text)")
        connection.execute(f"{series} insert into big select i, i * 7, printf('%040d', i) from n", (rows,))
        connection.close()
        return rows

    def read(self) -> float:
        """Return rows per second of one connection that reads a table."""
        connection = self._store.sqlite("bench")
        started, count = time.perf_counter(), 0
        for _ in connection.execute("select id, a, b from big"):
            count += 1
        connection.close()
        return count / (time.perf_counter() - started)

    def memory(self) -> int:
        return int(psutil.Process().memory_info().rss)


def _timed(threads: list[threading.Thread], ended: threading.Event, counts: list[int], seconds: float) -> float:
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    ended.set()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - started)


def main(directory: str) -> None:
    gc.set_threshold(GARBAGE_ALLOCATIONS)  # for both contenders: the owner's threads and its clients
    owner = Owner(directory)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        sys.stdout.write(json.dumps(getattr(owner, name)(*arguments)) + "\n")
        sys.stdout.flush()


class RemoteOwner:
    """The owner's process, as the clients' process controls it."""

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, "-m", "bench.wire", str(directory)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def call(self, name: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


# ── clients ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def post(path: str, body: Any) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def one_shot(*requests: dict[str, Any]) -> bytes:
    return post("/v3/pipeline", {"requests": [*requests, {"type": "close"}]})


def stmt(sql: str, *args: int | str) -> dict[str, Any]:
    values = [{"type": "integer" if isinstance(arg, int) else "text", "value": str(arg)} for arg in args]
    return {"sql": sql, "args": values}


def requests_per_second(address: str, connections: int, seconds: float, request: Callable[[], bytes]) -> float:
    """Return requests per second of some connections, each with one outstanding request."""
    host, _, port = address.removeprefix("http://").partition(":")

    async def client(deadline: float) -> int:
        reader, writer = await asyncio.open_connection(host, int(port))
        count = 0
        while time.perf_counter() < deadline:
            writer.write(request())
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            place = head.index(b"content-length:") + 15
            body = await reader.readexactly(int(head[place : head.index(b"\r\n", place)]))
            if b" 200 " not in head[:16] or b'"error":{' in body:
                raise AssertionError(body[:300])
            count += 1
        writer.close()
        return count

    async def run() -> float:
        started = time.perf_counter()
        counts = await asyncio.gather(*[client(started + seconds) for _ in range(connections)])
        return sum(counts) / (time.perf_counter() - started)

    return asyncio.run(run())


def rows_per_second(address: str) -> float:
    """Return rows per second of one cursor, whose lines are counted as they arrive."""
    host, _, port = address.removeprefix("http://").partition(":")

    async def lines() -> AsyncIterator[int]:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(post("/v3/cursor", {"batch": {"steps": [{"stmt": stmt("select id, a, b from big")}]}}))
        end = b""
        while data := await reader.read(1 << 18):
            yield data.count(b'"type":"row"')
            end = (end + data)[-7:]
            if end.endswith(b"0\r\n\r\n"):
                break
        writer.close()

    async def run() -> float:
        started, count = time.perf_counter(), 0
        async for rows in lines():
            count += rows
        return count / (time.perf_counter() - started)

    return asyncio.run(run())


# ── the parts ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@contextmanager
def served(directory: Path, name: str) -> Iterator[tuple[RemoteOwner, str]]:
    with RemoteOwner(directory / name) as owner:
        yield owner, owner.call("serve", True)


def select_one(report: Report, directory: Path, quick: bool) -> None:
    rounds, seconds = (2, 0.5) if quick else (5, 2.0)
    bare = b"GET /v2 HTTP/1.1\r\nhost: localhost\r\n\r\n"
    select = one_shot({"type": "execute", "stmt": stmt("select 1")})
    with served(directory, "select") as (_, address):
        ours, floor = alternate(
            rounds,
            lambda: requests_per_second(address, 16, seconds, lambda: select),
            lambda: requests_per_second(address, 16, seconds, lambda: bare),
        )
    report.ratio(
        "select_one_vs_bare", ours / floor, 0.4, "higher", f"{rate(ours)} against {rate(floor)}, 16 connections"
    )
    report.figure("select_one_per_second", ours)


def durable_inserts(report: Report, directory: Path, quick: bool) -> None:
    rounds, seconds = (2, 0.5) if quick else (5, 2.0)
    insert = one_shot({"type": "execute", "stmt": stmt(INSERT, 1, PAYLOAD)})
    with served(directory, "inserts") as (owner, address):
        few, many, threads = alternate(
            rounds,
            lambda: requests_per_second(address, 16, seconds, lambda: insert),
            lambda: requests_per_second(address, 64, seconds, lambda: insert),
            lambda: owner.call("inserts", 16, seconds),
        )
    detail = f"{rate(few)} against {rate(threads)} of 16 threads in the owner"
    report.ratio("inserts_16_vs_threads", few / threads, 0.5, "higher", detail)
    report.ratio("inserts_64_vs_threads", many / threads, 0.7, "higher", f"{rate(many)} with 64 connections")
    report.figure("inserts_64_per_second", many)


def cursor(report: Report, directory: Path, quick: bool) -> None:
    rows = 100_000 if quick else 500_000
    with served(directory, "cursor") as (owner, address):
        owner.call("fill", rows)
        rows_per_second(address)
        before = owner.call("memory")
        ours, local = alternate(2 if quick else 5, lambda: rows_per_second(address), lambda: owner.call("read"))
        grown = (owner.call("memory") - before) / MIB
    report.ratio("cursor_vs_owner", ours / local, 0.15, "higher", f"{rate(ours)} against {rate(local)} rows")
    report.ratio("cursor_memory_mib", max(grown, 0.0), 32, "lower", f"grown over {rows:,} rows a time")


def idle_server(report: Report, directory: Path, quick: bool) -> None:
    # Many short rounds: the effect to be found is smaller than the disk's changes from one second to the next.
    rounds, seconds = (2, 0.5) if quick else (21, 0.7)

    with RemoteOwner(directory / "idle") as owner:

        def measured(on: bool) -> float:
            owner.call("serve", on)
            return float(owner.call("inserts", 4, seconds))

        beside, alone = alternate(rounds, lambda: measured(True), lambda: measured(False))
    detail = f"{rate(beside)} beside an idle server, {rate(alone)} without"
    report.ratio("writers_beside_idle_server", beside / alone, 0.95, "higher", detail)


# ── TPC-B ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def transaction(rng: random.Random) -> list[tuple[str, tuple[int, ...]]]:
    account, teller, branch = rng.randint(1, ACCOUNTS), rng.randint(1, TELLERS), rng.randint(1, BRANCHES)
    delta = rng.randint(-5_000, 5_000)
    return [
        ("update accounts set balance = balance + ? where id = ?", (delta, account)),
        ("select balance from accounts where id = ?", (account,)),
        ("update tellers set balance = balance + ? where id = ?", (delta, teller)),
        ("update branches set balance = balance + ? where id = ?", (delta, branch)),
        ("insert into history values (?, ?, ?, ?)", (account, teller, branch, delta)),
    ]


def batch(rng: random.Random) -> bytes:
    """Return one transaction as clients of libSQL send it."""
    texts = [stmt("begin immediate"), *(stmt(sql, *args) for sql, args in transaction(rng)), stmt("commit")]
    steps = [
        {"stmt": text} | ({"condition": {"type": "ok", "step": number - 1}} if number else {})
        for number, text in enumerate(texts)
    ]
    return one_shot({"type": "batch", "batch": {"steps": steps}})


def tpcb(report: Report, directory: Path, quick: bool) -> None:
    seconds, rng = 1.0 if quick else 3.0, random.Random(3)
    with served(directory, "tpcb") as (_, address):

        def ours() -> float:
            return requests_per_second(address, 8, seconds, lambda: batch(rng))

        binaries = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)
        if binaries is None or importlib.util.find_spec("psycopg") is None:
            report.figure("tpcb_per_second", alternate(1 if quick else 3, ours)[0])
            report.ratio("tpcb_vs_postgresql", None, 0.4, "higher", "PostgreSQL or psycopg is not installed")
            return
        with postgresql(directory / "postgresql", binaries) as dsn:
            mine, theirs = alternate(2 if quick else 5, ours, lambda: postgresql_rate(dsn, 8, seconds))
    detail = f"{rate(mine)} against {rate(theirs)}, 8 connections"
    report.ratio("tpcb_vs_postgresql", mine / theirs, 0.4, "higher", detail)
    report.figure("tpcb_per_second", mine)


@contextmanager
def postgresql(directory: Path, binaries: Path) -> Iterator[str]:
    """Run a new PostgreSQL server, as the user `postgres` if this process is root's: PostgreSQL refuses to run as root."""
    directory.mkdir()
    user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
    if user:
        shutil.chown(directory, "postgres")
        for parent in directory.parents[:2]:
            parent.chmod(0o755)
    data, log = directory / "data", directory / "log"
    subprocess.run(
        [*user, binaries / "initdb", "-D", data, "-A", "trust", "-U", "postgres"], check=True, capture_output=True
    )
    options = f"-k {directory} -c listen_addresses='' -c synchronous_commit=on"
    control = [*user, str(binaries / "pg_ctl"), "-D", str(data), "-l", str(log), "-w"]
    subprocess.run([*control, "-o", options, "start"], check=True, capture_output=True)
    try:
        yield f"host={directory} user=postgres dbname=postgres"
    finally:
        subprocess.run([*control, "-m", "fast", "stop"], check=True, capture_output=True)


def postgresql_rate(dsn: str, connections: int, seconds: float) -> float:
    """Return transactions per second of PostgreSQL, whose server is a separate process as ours is.

    The clients are threads, because psycopg waits in C.
    """
    psycopg = importlib.import_module("psycopg")
    with psycopg.connect(dsn, autocommit=True) as connection:
        for name, rows in (("accounts", ACCOUNTS), ("tellers", TELLERS), ("branches", BRANCHES)):
            connection.execute(f"create table if not exists {name}(id integer primary key, balance bigint)")
            insert = f"insert into {name} select i, 0 from generate_series(1, {rows}) i on conflict do nothing"
            connection.execute(insert)
        connection.execute("create table if not exists history(account int, teller int, branch int, delta int)")
    ended, counts = threading.Event(), [0] * connections

    def work(number: int) -> None:
        rng = random.Random(number)
        with psycopg.connect(dsn, autocommit=True) as connection:
            while not ended.is_set():
                with connection.pipeline(), connection.transaction():
                    for sql, args in transaction(rng):
                        connection.execute(sql.replace("?", "%s"), args)
                counts[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(connections)]
    return _timed(threads, ended, counts, seconds)


PARTS = [select_one, durable_inserts, cursor, idle_server, tpcb]

if __name__ == "__main__":
    main(sys.argv[1])
