"""Runs in a child process that tests kill: threads write through SQLite and report what was committed.

Each transaction of a writer adds a row to its log, a blob of random size, and updates its counters, so that a partial
transaction
is detected. Writers that wait for the disk send `ack WRITER NUMBER` when the commit has returned. Some transactions are
rolled
back after SQLite's cache has spilled.
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
from tests.fork_server import Channel

SETTINGS = StoreSettings(
    maintenance=MaintenanceSettings(enabled=False), pages=PagesSettings(publish_seconds=0.01, seal_seconds=0.05)
)
SCHEMA = (
    "create table if not exists log(writer integer, number integer, size integer, data blob, primary key(writer, number));"
    "create table if not exists state(writer integer primary key, numbers integer, bytes integer)"
)


def warm_up() -> None:
    """Import the modules that a store loads on demand."""
    for module in ("quire.store.wiring", "quire.sqlite.connect", "quire.sqlite.live"):
        importlib.import_module(module)


def transaction(connection: apsw.Connection, writer: int, rng: random.Random) -> int:
    """Run one transaction, and return its number."""
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
            raise RollBack
    return number + 1


class RollBack(Exception):
    """Raised to roll a transaction back."""


def write(store: Store, channel: Channel, writer: int, seed: int) -> None:
    """Write until the process is killed."""
    rng = random.Random(seed * 100 + writer)
    connection = store.sqlite("shop", timeout=60)
    connection.transaction_mode = "IMMEDIATE"
    connection.execute("pragma cache_size=10")
    waits = writer != 0
    if not waits:
        connection.execute("pragma synchronous=normal")
    while True:
        with suppress(RollBack):
            number = transaction(connection, writer, rng)
            if waits:
                channel.send(f"ack {writer} {number}".encode())
        if rng.random() < 0.01:
            store.checkpoint("shop")
        if rng.random() < 0.005:
            connection.execute("vacuum")
        time.sleep(rng.random() * 0.002)


def write_and_report(store: Store, channel: Channel, writer: int, seed: int) -> None:
    """Write; a writer that ends has found an error, which is reported."""
    try:
        write(store, channel, writer, seed)
    except BaseException as error:
        channel.send(f"died {writer} {type(error).__name__}: {error}".encode())


def run(channel: Channel) -> None:
    """Open the store and start the writers."""
    options = json.loads(channel.receive() or b"{}")
    arm_from(options["failpoints"])
    store = quire.open(options["root"], settings=SETTINGS)
    store.sqlite("shop", create=True).execute(SCHEMA)
    threads = [
        threading.Thread(target=write_and_report, args=(store, channel, writer, options["seed"]), daemon=True)
        for writer in range(options["writers"])
    ]
    channel.send(b"open")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
