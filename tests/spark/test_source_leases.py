"""What reading from Spark leaves in a store: nothing that users see, and after some minutes nothing at all.

Without a session: readers plan and read in this process, as Spark does in its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import InvalidInput, LeaseExpired, SnapshotGone, UnknownSnapshot
from quire.manifest import tables as t
from quire.spark.access import access_of
from quire.spark.sources import base
from quire.spark.sources.base import KEEP_SECONDS, has_ended, kept
from quire.spark.sources.diff import DiffSource
from quire.spark.sources.kv import KvSource
from quire.spark.sources.pages import PagesSource
from quire.spark.sources.rows import RowsSource
from quire.spark.sources.sqlite import SqliteSource
from quire.spark.sources.stream import StreamSource
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.spark.served_store import open_served

DATABASES = 40
"""More than all leases of these tests, so that a lease per database would be noticed."""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(now_ms=1_750_000_000_000)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    with open_served(tmp_path / "store", clock) as store:
        yield store


def fill(store: Store, name: str, rows: int = 3) -> None:
    with closing(store.sqlite(name, create=True)) as connection, connection:
        connection.execute("CREATE TABLE IF NOT EXISTS t(a INTEGER PRIMARY KEY, b TEXT)")
        connection.executemany("INSERT OR REPLACE INTO t VALUES (?, ?)", [(n, f"{name} {n}") for n in range(rows)])


def planned(store: Store, kind: Any, **options: Any) -> tuple[Any, list[Any]]:
    """(reader, partitions), as Spark creates them when it plans the first query on a DataFrame."""
    source = kind({"store": store.path, **{name.rstrip("_"): str(value) for name, value in options.items()}})
    reader = source.reader(source.schema())
    return reader, list(reader.partitions())


def read(reader: Any, parts: list[Any]) -> list[tuple[Any, ...]]:
    """The rows that tasks read."""
    return sorted(tuple(row.values()) for part in parts for batch in reader.read(part) for row in batch.to_pylist())


def rows(store: Store) -> int:
    with store.manifest.read() as txn:
        return txn.count(t.SNAPSHOT_READERS)


def test_many_reads_of_many_databases_leave_no_snapshot_and_no_change(store: Store, clock: ManualClock) -> None:
    """A few reads of 200 databases left 1,216 snapshots and 3,883 changes, visible to users as their own."""
    for number in range(DATABASES):
        fill(store, f"tenant-{number:03d}")
    read(*planned(store, SqliteSource, databases="tenant-*", table="t"))  # seals open logs
    head, info_before = store.feed.head(), store.info()
    for _ in range(5):
        rows_read = read(*planned(store, SqliteSource, databases="tenant-*", table="t"))
        assert len(rows_read) == 3 * DATABASES
        assert read(*planned(store, PagesSource, databases="tenant-00*"))
        assert store.info().snapshots == 0
        assert not any(store.manifest.snapshots.of(f"tenant-{number:03d}") for number in range(0, DATABASES, 20))
    assert store.feed.head() == head, "readers cause no changes in the feed"
    assert store.info().databases == info_before.databases
    assert store.manifest.leases.count() == 11, "one per query, not per database"
    assert rows(store) == 6 * DATABASES + 5 * 10
    clock.advance(KEEP_SECONDS + 1)
    store.maintain()
    assert (store.manifest.leases.count(), rows(store)) == (0, 0), "after some minutes nothing is left"
    with store.manifest.read() as txn:
        assert txn.count(t.SNAPSHOT_INDEX) == 0
        assert not [row for _, row in txn.scan(t.AUDIT) if "SNAPSHOT" in row.action.name]


def test_key_value_sets_and_differences_leave_nothing_either(store: Store, clock: ManualClock) -> None:
    cart = store.kv("cart", create=True)
    cart.write({b"k%03d" % n: b"v" for n in range(100)})
    fill(store, "shop")
    store.snapshot("shop", "monday")
    fill(store, "shop", 5)
    directory = Path(store.path, "lsm", f"{store.database('cart').db_id:08x}", "snapshots")
    reader, parts = planned(store, KvSource, database="cart")
    assert len(read(reader, parts)) == 100
    cart.write({b"k%03d" % n: b"w" for n in range(100)})
    cart.compact()
    assert {value for _, value in read(reader, parts)} == {b"v"}, "the version that was planned"
    assert len(read(*planned(store, RowsSource, database="shop", from_="monday", table="t"))) == 2
    assert read(*planned(store, DiffSource, database="shop", from_="monday"))
    assert [snapshot.name for snapshot in store.manifest.snapshots.of("shop")] == ["monday"]
    assert store.manifest.snapshots.of("cart") == []
    assert len(list(directory.iterdir())) == 1
    clock.advance(KEEP_SECONDS + 1)
    store.maintain()
    assert (rows(store), list(directory.iterdir())) == (0, [])
    with pytest.raises(SnapshotGone, match="load it again"):
        read(reader, parts)


def test_key_value_sets_are_read_together_under_one_lease(store: Store) -> None:
    for number in range(3):
        cart = store.kv(f"cart-{number}", create=True)
        cart.write({b"k": b"%d" % number})
        if number:
            store.snapshot(f"cart-{number}", "nightly")
        cart.write({b"k": b"new"})
    store.set_options("cart-2", tags={"tier": "gold"})
    reader, parts = planned(store, KvSource, databases="cart-*", partitions=2)
    assert len(parts) == 2
    assert read(reader, parts) == [(f"cart-{number}", b"k", b"new") for number in range(3)]
    assert store.manifest.leases.count() == 1
    assert read(*planned(store, KvSource, tags="tier=gold")) == [("cart-2", b"k", b"new")]
    source_options = {"databases": "cart-*", "snapshot": "nightly"}
    assert read(*planned(store, KvSource, **source_options, absent="skip")) == [
        ("cart-1", b"k", b"1"),
        ("cart-2", b"k", b"2"),
    ]
    with pytest.raises(UnknownSnapshot):
        planned(store, KvSource, **source_options)


def test_streams_are_read_together(store: Store) -> None:
    for number in range(3):
        clicks = store.stream(f"clicks-{number}", create=True)
        clicks.append([b"%d" % number, b"more"]).result()
    reader, parts = planned(store, StreamSource, databases="clicks-*", columns="id,payload", partitions=2)
    assert len(parts) == 2
    expected = [
        (f"clicks-{number}", id_, load) for number in range(3) for id_, load in ((1, b"%d" % number), (2, b"more"))
    ]
    assert [(name, load) for name, _, load in read(reader, parts)] == [(name, load) for name, _, load in expected]
    with pytest.raises(InvalidInput, match="`start` is for one stream"):
        planned(store, StreamSource, databases="clicks-*", start=1)


def test_a_frame_reads_the_version_of_its_first_query_as_long_as_it_is_kept(store: Store, clock: ManualClock) -> None:
    """Spark plans a source once, and every query on the DataFrame has those partitions."""
    fill(store, "shop")
    reader, parts = planned(store, SqliteSource, database="shop", table="t")
    before = read(reader, parts)
    for _ in range(4):
        fill(store, "shop", 50)
        store.checkpoint("shop")
        clock.advance(KEEP_SECONDS - 60)
        store.maintain()
        assert read(reader, parts) == before
        lease_id = parts[0].value[0].version.lease_id
        assert not has_ended(reader.access, lease_id), "reading renews the lease"
    clock.advance(KEEP_SECONDS + 1)
    store.maintain()
    clock.advance(KEEP_SECONDS)
    store.maintain()
    with pytest.raises(SnapshotGone, match="no longer kept"):
        read(reader, parts)
    assert len(read(*planned(store, SqliteSource, database="shop", table="t"))) == 50


def test_a_task_renews_while_it_reads(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, "shop")
    reader, parts = planned(store, SqliteSource, database="shop", table="t")
    renewed: list[int] = []
    enough = threading.Event()
    renew = store.manifest.leases.renew

    def recording_renew(lease_id: int) -> None:
        renew(lease_id)
        renewed.append(lease_id)
        if len(renewed) == 3:
            enough.set()

    monkeypatch.setattr(store.manifest.leases, "renew", recording_renew)
    lease_id = parts[0].value[0].version.lease_id
    with kept(reader.access, lease_id, 0.04):
        assert enough.wait(60)
    assert set(renewed) == {lease_id}
    with kept(reader.access, 0, 1):  # a named snapshot needs no lease
        pass


def test_an_unreachable_owner_fails_no_task(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "RENEW_SECONDS", 0.1)
    access = access_of({"store": store.path})
    assert has_ended(access, 12_345), "a reachable owner knows that the lease has ended"
    unreachable = type(access)(uri="grpc+unix:///nowhere.sock")
    assert not has_ended(unreachable, 12_345)
    with pytest.raises(LeaseExpired):
        store.manifest.leases.renew(12_345)
