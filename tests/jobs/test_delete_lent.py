"""A dropped fork that is lent keeps its tombstone: without it, a restarted owner forgets what the lease keeps."""

from __future__ import annotations

from pathlib import Path

import quire
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.manifest import tables as t
from quire.pages.anchors import lend
from quire.testing.clock import ManualClock

SETTINGS = StoreSettings(maintenance=MaintenanceSettings(enabled=False, delete_grace_seconds=0.0))
HOUR = 3600.0


def is_there(store: quire.Store) -> bool:
    with store.manifest.read() as txn:
        return next(iter(txn.scan(t.CHUNK_CATALOG)), None) is not None


def test_a_lease_on_a_dropped_fork_outlives_the_owner(tmp_path: Path) -> None:
    """Hazard: the fork had no artifacts of its own, so its tombstone went at once, and the rows of its leases with it. After a
    restart the owner deleted what the reader was reading."""
    clock = ManualClock()
    with quire.open(tmp_path, settings=SETTINGS, clock=clock) as store:
        with store.sqlite("shop", create=True) as connection:
            connection.execute("create table t(a)")
        store.checkpoint("shop")
        store.fork("shop", "branch")
        lease_id, _ = lend(store.pages, ["branch"], 3 * HOUR)
        store.drop("shop")
        store.drop("branch")
        store.maintain()
        assert is_there(store)
    with quire.open(tmp_path, settings=SETTINGS, clock=clock) as store:
        clock.advance(2 * HOUR)
        store.maintain()
        assert is_there(store)
        store.manifest.leases.renew(lease_id)
        store.manifest.leases.release(lease_id)
        for _round in range(3):
            clock.advance(HOUR)
            store.maintain()
        assert not is_there(store)
        with store.manifest.read() as txn:
            assert list(txn.databases()) == []
