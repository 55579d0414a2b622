"""A child process that is killed: it compacts the key-value database of a store. Its message is `PATH FAILPOINTS`."""

from __future__ import annotations

import quire
from quire.core.settings import LsmSettings, MaintenanceSettings, StoreSettings
from quire.durable.failpoints import arm_from
from tests.fork_server import Channel

SETTINGS = StoreSettings(
    maintenance=MaintenanceSettings(enabled=False), lsm=LsmSettings(level0_tables=20, table_bytes=8 << 10)
)


def warm_up() -> None:
    """Import the modules that a compaction needs."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory, quire.open(f"{directory}/store", settings=SETTINGS) as store:
        kv = store.kv("warm", create=True)
        for value in (b"1", b"2"):
            kv.put(b"a", value)
            kv.flush()
        store.heavy.compact("warm")


def run(channel: Channel) -> None:
    path, failpoints = (channel.receive() or b"").decode().split(" ", 1)
    with quire.open(path, settings=SETTINGS) as store:
        store.kv("cart")
        arm_from(failpoints)
        store.heavy.compact("cart")
