"""A fork of any readable version: in the log, at a snapshot, or between two snapshots that a time-travel window keeps."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import apsw
import pytest

import quire
from quire.core.errors import InvalidInput, NameTaken, ReadOnly, SnapshotGone, UnknownDatabase, UnknownSnapshot
from quire.core.ids import Epoch
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.pages.pagestore import PageStore
from quire.sqlite import connect
from quire.sqlite.connect import At, SqliteDatabases
from quire.store.store import Store
from tests.sqlite.conftest import SETTINGS, assert_sound, count

WINDOW = StoreSettings(maintenance=MaintenanceSettings(enabled=False, time_travel_seconds=3_600.0))


def databases(store: Store) -> SqliteDatabases:
    return store._parts.sqlite


def forked(store: Store, new_name: str, at: At, name: str = "shop") -> apsw.Connection:
    databases(store).fork(name, new_name, at=at)
    return store.sqlite(new_name)


def epoch_of(connection: apsw.Connection) -> int:
    return int(str(connection.pragma("quire_epoch")))


def rows(connection: apsw.Connection) -> list[tuple[apsw.SQLiteValue, ...]]:
    return connection.execute("select * from t order by id").fetchall()


@pytest.fixture
def time_travel_store(root: Path) -> Iterator[Store]:
    """A store that keeps every version for an hour."""
    with quire.open(root, settings=WINDOW) as store:
        yield store


def test_a_fork_at_a_snapshot_an_epoch_and_a_time(store: Store, shop: apsw.Connection) -> None:
    store.snapshot("shop", "monday")
    epoch, before = epoch_of(shop), rows(shop)
    shop.execute("delete from t where id < 5")
    moment, between = datetime.now(UTC), rows(shop)
    time.sleep(0.01)  # commit times have a resolution of milliseconds
    shop.execute("delete from t")
    versions: list[tuple[At, list[tuple[apsw.SQLiteValue, ...]]]] = [
        ("monday", before),
        (epoch, before),
        (Epoch(epoch, 1), before),
        (moment, between),
    ]
    for number, (at, expected) in enumerate(versions):
        fork = forked(store, f"fork-{number}", at)
        assert rows(fork) == expected
        fork.execute("insert into t values (77, 'its own')")
        fork.close()
    assert count(shop) == 0


def test_a_commit_that_is_not_on_disk_yet_is_forked(store: Store, shop: apsw.Connection) -> None:
    shop.pragma("synchronous", "off")
    shop.execute("delete from t where id = 1")
    epoch = epoch_of(shop)
    shop.execute("delete from t")
    fork = forked(store, "fork", epoch)
    assert count(fork) == 9
    fork.close()


def test_a_fork_in_the_middle_of_a_segment_does_not_change(root: Path) -> None:
    """Through checkpoints of both, a fork of the fork, the drop of its parent, and reopening."""
    with quire.open(root, settings=SETTINGS) as store:
        shop = store.sqlite("shop", create=True)
        shop.execute("create table t(id integer primary key, b text)")
        shop.executemany("insert into t values (?, ?)", [(number, "x" * 900) for number in range(50)])
        epoch, expected = epoch_of(shop), rows(shop)
        shop.execute("update t set b = 'changed'; delete from t where id > 20; vacuum")
        fork = forked(store, "fork", epoch)
        store.checkpoint("shop")
        assert rows(fork) == expected
        store.checkpoint("fork")
        assert rows(fork) == expected
        fork.execute("insert into t values (1000, 'more')")
        child = forked(store, "child", epoch_of(fork), "fork")
        fork.execute("delete from t")
        assert rows(child) == [*expected, (1000, "more")]
        for connection in (shop, fork, child):
            connection.close()
        store.drop("shop")
        store.maintain()
    with quire.open(root, settings=SETTINGS) as store:
        child = store.sqlite("child")
        assert rows(child) == [*expected, (1000, "more")]
        child.close()


@pytest.mark.parametrize("seed", range(3))
def test_every_version_of_a_window_can_be_forked(time_travel_store: Store, seed: int) -> None:
    """Statements that grow and shrink the database, with checkpoints in between; then a fork of each version, in any
    order.
    """
    rng, store = random.Random(seed), time_travel_store
    shop = store.sqlite("shop", create=True, page_size=512)
    shop.execute("pragma auto_vacuum=full; create table t(id integer primary key, b text)")
    versions: list[tuple[int, list[tuple[apsw.SQLiteValue, ...]]]] = []
    for number in range(24):
        match rng.randrange(6):
            case 0:
                shop.execute("delete from t where id % 3 = 0")
            case 1:
                store.checkpoint("shop")
            case 2:
                shop.execute("vacuum")
            case _:
                shop.execute("insert into t(b) values (?)", ("x" * rng.randrange(3_000),))
                shop.execute("update t set b = b || ? where id = (select min(id) from t)", (str(number),))
        versions.append((epoch_of(shop), rows(shop)))
    shop.close()
    rng.shuffle(versions)
    for number, (epoch, expected) in enumerate(versions[:12]):
        fork = forked(store, f"fork-{number}", epoch)
        assert rows(fork) == expected, f"version {epoch}"
        if number % 3 == 0:
            store.checkpoint(f"fork-{number}")
            assert rows(fork) == expected, f"version {epoch}, after a checkpoint"
        fork.close()
    assert not [info.name for info in store.databases() if info.name.endswith(".unfinished")]
    assert_sound(store)


def superseded_version(store: Store) -> int:
    """Create a database with a version that only a later snapshot of the window holds, and return that version."""
    shop = store.sqlite("shop", create=True)
    shop.execute("create table t(id integer primary key, b text); insert into t values (1, 'first')")
    epoch = epoch_of(shop)
    shop.execute("update t set b = 'second'")
    store.checkpoint("shop")
    shop.execute("update t set b = 'third'")
    shop.close()
    return epoch


def test_a_fork_that_fails_while_it_is_rolled_back_leaves_nothing(
    time_travel_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = superseded_version(time_travel_store)
    begin = PageStore.begin

    def fail(self: PageStore, timeout: float = 30.0) -> object:
        if self.db_id != time_travel_store.database("shop").db_id:
            raise OSError("the disk is gone")
        return begin(self, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(PageStore, "begin", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            databases(time_travel_store).fork("shop", "fork", at=epoch)
    assert [info.name for info in time_travel_store.databases()] == ["shop"]
    fork = forked(time_travel_store, "fork", epoch)
    assert rows(fork) == [(1, "first")]
    fork.close()


def test_the_remains_of_an_interrupted_fork_are_dropped_by_the_next_attempt(time_travel_store: Store) -> None:
    epoch = superseded_version(time_travel_store)
    time_travel_store.fork("shop", connect.unfinished_name("fork"))
    fork = forked(time_travel_store, "fork", epoch)
    assert rows(fork) == [(1, "first")]
    fork.close()
    assert [info.name for info in time_travel_store.databases()] == ["fork", "shop"]


def test_failures_to_fork_have_a_reason(store: Store, shop: apsw.Connection) -> None:
    epoch = epoch_of(shop)
    fork = databases(store).fork
    with pytest.raises(NameTaken):
        fork("shop", "shop", at=epoch)
    with pytest.raises(UnknownDatabase):
        fork("nosuch", "fork", at=epoch)
    with pytest.raises(UnknownSnapshot):
        fork("shop", "fork", at="tuesday")
    with pytest.raises(InvalidInput, match="does not exist yet"):
        fork("shop", "fork", at=10_000_000)
    with pytest.raises(InvalidInput, match="zone"):
        fork("shop", "fork", at=datetime(2020, 1, 1))
    with pytest.raises(InvalidInput, match="unknown way"):
        fork("shop", "fork", at=True)
    with pytest.raises(InvalidInput):
        fork("shop", "a/b", at=epoch)
    with pytest.raises(SnapshotGone):
        fork("shop", "fork", at=datetime(2001, 1, 1, tzinfo=UTC))
    assert [info.name for info in store.databases()] == ["shop"]


def test_a_read_only_store_cannot_fork(root: Path) -> None:
    with quire.open(root, settings=SETTINGS) as store:
        store.sqlite("shop", create=True).close()
    with quire.open(root, "r") as reader, pytest.raises(ReadOnly):
        databases(reader).fork("shop", "fork", at=1)
