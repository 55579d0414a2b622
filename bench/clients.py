"""Clients of a store's owner: Flask with four workers against the same app on a SQLite file, and single calls (W9).

Both run the same app, SQLAlchemy included. A request is one insert with its commit, or one SELECT by primary key. The file has
`journal_mode=WAL` and `synchronous=FULL`, which is as durable as quire. Single calls are made by this process to an owner in
another process, and by an owner within its own process.
"""

from __future__ import annotations

import http.client
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import flask
import sqlalchemy as sa
from sqlalchemy.pool import ConnectionPoolEntry

import quire
from bench.report import Report, alternate
from quire.sqlite import dbapi

WORKERS, CLIENTS, ROWS = 4, 8, 1_000
DATABASE = "BENCH_DATABASE"
TABLE = sa.Table(
    "t",
    sa.MetaData(),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("a", sa.Integer),
    sa.Column("b", sa.Text),
)


# ── the app ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def engine_of(database: str) -> sa.Engine:
    """Return an engine for `quire:STORE/NAME` or `file:PATH`."""
    kind, _, path = database.partition(":")
    if kind == "quire":
        creator = partial(dbapi.connect, path, check_same_thread=False)
        return sa.create_engine("sqlite://", module=dbapi, poolclass=sa.QueuePool, creator=creator)
    engine = sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": 60})

    @sa.event.listens_for(engine, "connect")
    def connect(connection: Any, _: ConnectionPoolEntry) -> None:
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = full")

    return engine


def app() -> flask.Flask:
    """Create the app; gunicorn calls this in each worker."""
    engine, web = engine_of(os.environ[DATABASE]), flask.Flask("bench")

    @web.post("/rows")
    def add() -> Any:
        with engine.begin() as connection:
            connection.execute(sa.insert(TABLE).values(a=os.getpid(), b="x" * 80))
        return {"done": True}

    @web.get("/rows/<int:number>")
    def show(number: int) -> Any:
        with engine.connect() as connection:
            row = connection.execute(sa.select(TABLE).where(TABLE.c.id == number)).one()
        return {"b": row.b}

    return web


@contextmanager
def running(*command: str, **environment: str) -> Iterator[None]:
    started = subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        started.terminate()
        started.wait(60)


@contextmanager
def serving(database: str) -> Iterator[int]:
    """Run the app under gunicorn, and yield its port when it responds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    bind = ("--workers", str(WORKERS), "--bind", f"127.0.0.1:{port}", "--log-level", "error")
    with running(sys.executable, "-m", "gunicorn", *bind, "bench.clients:app()", **{DATABASE: database}):
        until(lambda: is_answered(port))
        yield port


def until(is_ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_ready():
        assert time.monotonic() < deadline, "it does not start"
        time.sleep(0.1)


def is_answered(port: int) -> bool:
    try:
        ask(port, "GET", "/rows/1")
    except OSError:
        return False
    return True


def ask(port: int, method: str, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    assert answer.status == 200, text


def requests_per_second(port: int, seconds: float, request: Callable[[int], None]) -> float:
    """Return requests per second of all clients. Each sends one request after the other."""
    counts, ended = [0] * CLIENTS, threading.Event()

    def work(number: int) -> None:
        while not ended.is_set():
            request(port)
            counts[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(CLIENTS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    ended.set()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - began)


# ── the parts ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def flask_with_four_workers(report: Report, directory: Path, quick: bool) -> None:
    """Compare the app on a store that `quire serve` owns with the app on a file."""
    root, rounds, seconds = directory / "store", 2 if quick else 5, 2.0 if quick else 5.0
    quire.open(root).close()
    databases = {"quire": f"quire:{root}/shop", "native": f"file:{directory}/shop.db"}
    with ExitStack() as stack:
        stack.enter_context(running(sys.executable, "-m", "quire", "serve", "--store", str(root)))
        until((root / "quire.sock").exists)
        ports = {}
        for name, database in databases.items():
            engine = engine_of(database)
            TABLE.metadata.create_all(engine)
            with engine.begin() as connection:
                connection.execute(sa.insert(TABLE), [{"a": 0, "b": "x" * 80}] * ROWS)
            engine.dispose()
            ports[name] = stack.enter_context(serving(database))

        def reads(port: int) -> None:
            ask(port, "GET", f"/rows/{random.randint(1, ROWS)}")

        for what, request, target in (
            ("inserts", partial(ask, method="POST", path="/rows"), 1.2),
            ("reads", reads, 2.0),
        ):
            contenders = [partial(requests_per_second, ports[name], seconds, request) for name in ("quire", "native")]
            for contender in contenders:
                contender()  # not measured: workers may still be starting
            ours, native = alternate(rounds, *contenders)
            detail = f"{ours:,.0f}/s, native {native:,.0f}/s, load {os.getloadavg()[0]:.0f}"
            report.ratio(f"Flask, {WORKERS} workers: {what}, native / ours", native / ours, target, "lower", detail)
            report.figure(f"flask_{what}_per_second", ours)
            report.figure(f"flask_{what}_native_per_second", native)


def single_calls(report: Report, directory: Path, quick: bool) -> None:
    """Compare single calls from another process with the same calls in the owner's process."""
    root, count, rounds = directory / "calls", 200 if quick else 2_000, 1 if quick else 5
    with quire.open(root) as store:
        kv, stream = store.kv("k", create=True), store.stream("s", create=True)
        kv.put(b"key", b"value")
        connection = dbapi.wrap(store.sqlite("shop", create=True))
        connection.execute("create table t(id integer primary key, b)")
        connection.execute("insert into t values (1, 'x')")
        connection.commit()
        by_owner = {name: timed(call, count, rounds) for name, call in calls(kv, stream, connection).items()}
        connection.close()
    with running(sys.executable, "-m", "quire", "serve", "--store", str(root)):
        until((root / "quire.sock").exists)
        with quire.connect(root) as client:
            remote = calls(client.kv("k"), client.stream("s"), client.sqlite("shop"))
            for name, call in remote.items():
                micros = timed(call, count, rounds)
                detail = f"{micros:,.0f} µs, in the owner {by_owner[name]:,.0f} µs, load {os.getloadavg()[0]:.0f}"
                report.ratio(f"{name}, by a client / by the owner", micros / by_owner[name], None, "lower", detail)
                report.figure(f"client_{name.replace(' ', '_')}_us", micros)


def calls(kv: Any, stream: Any, connection: Any) -> dict[str, Callable[[], Any]]:
    def insert() -> None:
        connection.execute("insert into t(b) values ('x')")
        connection.commit()

    return {
        "get": lambda: kv.get(b"key"),
        "put": lambda: kv.put(b"key", b"value"),
        "append": lambda: stream.append(b"x" * 100).result(),
        "select": lambda: connection.execute("select b from t where id = 1").fetchone(),
        "insert and commit": insert,
    }


def timed(call: Callable[[], Any], count: int, rounds: int) -> float:
    """Return the microseconds of one call: the mean of the best round, which other load on the machine affects least."""
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(count // 10):
            call()
        best = min(best, (time.perf_counter() - began) / (count // 10) * 1e6)
    return best


PARTS = [flask_with_four_workers, single_calls]
