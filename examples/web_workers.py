"""Four web workers, each a process of its own, on one store that `quire serve` owns.

The app is an ordinary one: Flask with SQLAlchemy. A worker finds the store owned by another process and
sends its SQL through that process's socket. Each order is also a record of a stream and a counter in a key-value set. Writers
wait for each other in the owner: nobody hears "database is locked".

    python examples/web_workers.py                     starts the owner, gunicorn with four workers, and clients

By itself: `quire serve --store DIR` and `STORE=DIR gunicorn --workers 4 "examples.web_workers:app()"`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import flask
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import quire

WORKERS, CLIENTS = 4, 8


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]
    worker: Mapped[int]


def engine_of(root: str) -> sa.Engine:
    """SQLAlchemy on the database `shop` of a store, whoever owns that."""
    return sa.create_engine(f"quire:///{root}/shop")


def app() -> flask.Flask:
    """The app, as gunicorn makes it in each worker; the environment's STORE is the directory."""
    engine, store = engine_of(os.environ["STORE"]), quire.connect(os.environ["STORE"])
    log, counts = store.stream("log", create=True), store.kv("counts", create=True)
    shop = flask.Flask("shop")

    @shop.post("/orders")
    def add() -> Any:
        with Session(engine) as session, session.begin():
            order = Order(item=flask.request.get_json()["item"], worker=os.getpid())
            session.add(order)
            session.flush()
            number = order.id
        log.append(b"%d" % number).result()
        counts.put(b"%d" % os.getpid(), b"%d" % number)
        return {"id": number}

    @shop.get("/orders/<int:number>")
    def show(number: int) -> Any:
        with Session(engine) as session:
            order = session.get(Order, number)
            return {"item": order.item if order is not None else None, "worker": os.getpid()}

    return shop


@contextmanager
def running(*command: str, **environment: str) -> Iterator[None]:
    started = subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        started.terminate()
        started.wait(60)


def until(is_ready: Any) -> None:
    """Wait for a program, at most a minute."""
    deadline = time.monotonic() + 60
    while not is_ready():
        assert time.monotonic() < deadline, "it does not start"
        time.sleep(0.05)


def ask(url: str, body: Any = None) -> Any:
    """One request, by whichever worker takes it."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=60
    ) as answer:
        return json.load(answer)


def workers_at(url: str) -> set[int]:
    with suppress(OSError):
        return {ask(f"{url}/0")["worker"] for _ in range(4 * WORKERS)}
    return set()


def order_some(url: str, count: int) -> list[int]:
    """One client: orders, and looks at each order it has made."""
    made = [ask(url, {"item": f"tea {number}"})["id"] for number in range(count)]
    assert [ask(f"{url}/{order}")["item"] for order in made] == [f"tea {number}" for number in range(count)]
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Four web workers on one store.")
    parser.add_argument("--orders", type=int, default=400)
    orders = parser.parse_args(arguments).orders
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        bind = f"127.0.0.1:{free.getsockname()[1]}"
    url, python = f"http://{bind}/orders", (sys.executable, "-m")
    gunicorn = (*python, "gunicorn", "--workers", str(WORKERS), "--log-level", "error", "--bind", bind)
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(CLIENTS) as clients:
        quire.open(root).close()
        with running(*python, "quire", "serve", "--store", root):
            until(lambda: os.path.exists(f"{root}/quire.sock"))
            Base.metadata.create_all(engine := engine_of(root))  # once, before the workers, as a migration
            with running(*gunicorn, "examples.web_workers:app()", STORE=root):
                until(lambda: len(workers_at(url)) > 1)
                parts = clients.map(lambda _: order_some(url, orders // CLIENTS), range(CLIENTS))
                made = sorted(number for part in parts for number in part)
            with quire.connect(root) as store, Session(engine) as session:
                workers = set(session.scalars(sa.select(Order.worker)))
                assert made == sorted(session.scalars(sa.select(Order.id)))
                assert made == sorted(int(record.payload) for record in store.stream("log").read())
                assert workers == {int(key) for key, _ in store.kv("counts").scan()}
            engine.dispose()
    print(f"{len(made)} orders of {len(workers)} workers, all in the database and in the log")
    return 0


if __name__ == "__main__":
    sys.exit(main())
