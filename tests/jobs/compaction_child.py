"""Runs in a process of its own, to be killed: compacts the key-value database of a store. It is told `PATH FAILPOINTS`."""

from __future__ import annotations

import quire
from quire.core.settings import LsmSettings, MaintenanceSettings, StoreSettings
from quire.durable.failpoints import arm_from
from tests.nursery import Line

SETTINGS = StoreSettings(
    maintenance=MaintenanceSettings(enabled=False), lsm=LsmSettings(level0_tables=20, table_bytes=8 << 10)
)


def warm_up() -> None:
    """Import what a compaction imports."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory, quire.open(f"{directory}/store", settings=SETTINGS) as store:
        kv = store.kv("warm", create=True)
        for value in (b"1", b"2"):
            kv.put(b"a", value)
            kv.flush()
        store.heavy.compact("warm")


def run(line: Line) -> None:
    path, points = (line.receive() or b"").decode().split(" ", 1)
    with quire.open(path, settings=SETTINGS) as store:
        store.kv("cart")
        arm_from(points)
        store.heavy.compact("cart")
