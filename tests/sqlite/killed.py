"""Runs in a process of its own, to be killed: threads write through SQLite and tell over the line what was committed.

Each transaction of a writer adds one row to its log, blobs of random size, and its counters: half of it would be noticed. It
tells `ack WRITER NUMBER` when the commit has returned, for writers that wait for the disk. Between them some transactions are
rolled back, after SQLite's cache has spilled.
"""

from __future__ import annotations

import importlib
import json
import random
import threading
import time
from contextlib import suppress

import apsw

import quire
from quire.core.settings import MaintenanceSettings, PagesSettings, StoreSettings
from quire.durable.failpoints import arm_from
from quire.store.store import Store
from tests.nursery import Line

SETTINGS = StoreSettings(
    maintenance=MaintenanceSettings(enabled=False), pages=PagesSettings(publish_seconds=0.01, seal_seconds=0.05)
)
SCHEMA = (
    "create table if not exists log(writer integer, number integer, size integer, data blob, primary key(writer, number));"
    "create table if not exists state(writer integer primary key, numbers integer, bytes integer)"
)


def warm_up() -> None:
    """Load what a store loads only when somebody needs it."""
    for module in ("quire.store.wiring", "quire.sqlite.connect", "quire.sqlite.live"):
        importlib.import_module(module)


def transaction(connection: apsw.Connection, writer: int, rng: random.Random) -> int:
    """One transaction; its number."""
    with connection:
        connection.execute("insert or ignore into state values (?, 0, 0)", (writer,))
        number = int(connection.execute("select numbers from state where writer = ?", (writer,)).get)
        data = rng.randbytes(rng.choice((10, 10, 1_000, 30_000, 150_000)))
        connection.execute("insert into log values (?, ?, ?, ?)", (writer, number + 1, len(data), data))
        connection.execute(
            "update state set numbers = numbers + 1, bytes = bytes + ? where writer = ?", (len(data), writer)
        )
        if rng.random() < 0.1:
            connection.execute("delete from log where writer = -1")
        if rng.random() < 0.15:
            raise Undone
    return number + 1


class Undone(Exception):
    """The transaction is to be rolled back."""


def write(store: Store, line: Line, writer: int, seed: int) -> None:
    """Write until death."""
    rng = random.Random(seed * 100 + writer)
    connection = store.sqlite("shop", timeout=60)
    connection.transaction_mode = "IMMEDIATE"
    connection.execute("pragma cache_size=10")
    waits = writer != 0
    if not waits:
        connection.execute("pragma synchronous=normal")
    while True:
        with suppress(Undone):
            number = transaction(connection, writer, rng)
            if waits:
                line.send(f"ack {writer} {number}".encode())
        if rng.random() < 0.01:
            store.checkpoint("shop")
        if rng.random() < 0.005:
            connection.execute("vacuum")
        time.sleep(rng.random() * 0.002)


def write_and_tell(store: Store, line: Line, writer: int, seed: int) -> None:
    """The same; a writer that ends has found something wrong."""
    try:
        write(store, line, writer, seed)
    except BaseException as error:
        line.send(f"died {writer} {type(error).__name__}: {error}".encode())


def run(line: Line) -> None:
    """Open the store and let the writers loose."""
    told = json.loads(line.receive() or b"{}")
    arm_from(told["failpoints"])
    store = quire.open(told["root"], settings=SETTINGS)
    store.sqlite("shop", create=True).execute(SCHEMA)
    threads = [
        threading.Thread(target=write_and_tell, args=(store, line, writer, told["seed"]), daemon=True)
        for writer in range(told["writers"])
    ]
    line.send(b"open")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
