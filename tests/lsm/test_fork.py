"""After fork(), the child's key-value databases are closed, whatever they have in memory (M12)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import quire
from quire.core.errors import StoreClosed
from quire.core.settings import MaintenanceSettings, StoreSettings

SETTINGS = StoreSettings(maintenance=MaintenanceSettings(enabled=False))


def in_child(uses: dict[str, Callable[[], object]]) -> str:
    """The uses that do not raise `StoreClosed` in the child of a fork(), as text; empty if all of them do."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        unexpected = []
        for name, use in uses.items():
            try:
                use()
                unexpected.append(f"{name} answered")
            except StoreClosed:
                pass
            except BaseException as error:
                unexpected.append(f"{name}: {error!r}")
        os.write(write, "; ".join(unexpected).encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answers:
        text = answers.read()
    os.waitpid(child, 0)
    return text


def test_every_use_of_a_database_raises_in_the_child(tmp_path: Path) -> None:
    with quire.open(tmp_path / "store", settings=SETTINGS) as store:
        kv = store.kv("cart", create=True)
        kv.put(b"table", b"1")
        kv.flush()
        store.snapshot("cart", "monday")
        kv.put(b"memory", b"2")
        snapshot, cursor = kv.snapshot(), kv.iterator()
        frozen = store.kvs.open_snapshot("cart", "monday")
        uses: dict[str, Callable[[], object]] = {
            "get from memory": lambda: kv.get(b"memory"),
            "get from a table": lambda: kv.get(b"table"),
            "get of nothing": lambda: kv.get(b"nothing"),
            "scan": lambda: list(kv.scan()),
            "batches": lambda: list(kv.scan_batches()),
            "put": lambda: kv.put(b"a", b"b"),
            "sync": kv.sync,
            "flush": kv.flush,
            "compact": kv.compact,
            "snapshot": kv.snapshot,
            "snapshot's get": lambda: snapshot.get(b"memory"),
            "snapshot's scan": lambda: list(snapshot.scan()),
            "cursor": lambda: list(cursor),
            "frozen get": lambda: frozen.get(b"table"),
            "frozen scan": lambda: list(frozen.scan()),
            "open": lambda: store.kv("cart"),
            "open snapshot": lambda: store.kvs.open_snapshot("cart", "monday"),
            "repair": lambda: store.kvs.repair("cart"),
        }
        assert in_child(uses) == ""
        snapshot.close()
        cursor.close()
        assert dict(frozen.scan()) == {b"table": b"1"}
        frozen.close()
        assert kv.get(b"memory") == b"2", "the parent continues"


def test_closing_in_the_child_touches_nothing_of_the_parent(tmp_path: Path) -> None:
    with quire.open(tmp_path / "store", settings=SETTINGS) as store:
        kv = store.kv("cart", create=True)
        for n in range(3):
            kv.put(b"%d" % n, b"v")
            kv.flush()
        before = sorted(os.listdir(f"{kv.home.path}/sst"))

        def close() -> None:
            kv.close()
            raise StoreClosed("so that the harness is content")

        assert in_child({"close": close}) == ""
        assert sorted(os.listdir(f"{kv.home.path}/sst")) == before
        kv.put(b"more", b"v")


def test_a_write_in_progress_in_another_thread_does_not_hang_the_child(tmp_path: Path) -> None:
    with quire.open(tmp_path / "store", settings=SETTINGS) as store:
        kv = store.kv("cart", create=True)
        lock_held, release = threading.Event(), threading.Event()

        def hold() -> None:
            with kv._writing:
                lock_held.set()
                release.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        lock_held.wait()
        assert in_child({"put": lambda: kv.put(b"a", b"b"), "snapshot": kv.snapshot}) == ""
        release.set()
        thread.join()
