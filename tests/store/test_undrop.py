"""A dropped database is undropped: unchanged, for every kind, after a restart and a crash, within the configured
period."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.core.errors import (
    DatabaseTombstoned,
    NameTaken,
    StalePlan,
    StillReferenced,
    UnknownDatabase,
    UnknownSnapshot,
)
from quire.testing.clock import ManualClock
from quire.testing.manifest import assert_clean
from tests.fork_server import Channel, ForkServer

DAY_MS = 86_400_000
QUIET = quire.StoreSettings(maintenance=quire.MaintenanceSettings(enabled=False))


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with quire.open(tmp_path / "store", settings=QUIET) as opened:
        fill(opened)
        yield opened
        assert_clean(opened.manifest)


def fill(store: quire.Store) -> None:
    """Create a database of each kind, `shop` with a snapshot and a policy."""
    connection = store.sqlite("shop", create=True)
    connection.execute("create table item(name); insert into item values ('pen')")
    store.snapshot("shop", "monday")
    store.manifest.retention.set("shop", quire.RetentionRecord(keep_last=1, schedules=["hourly"]))
    connection.execute("insert into item values ('cup')")  # in the log only
    connection.close()
    with store.kv("prices", create=True) as prices:
        prices.put(b"pen", b"3")
    store.stream("clicks", create=True).append([b"one"]).result()


def contents(store: quire.Store) -> tuple[Any, ...]:
    connection = store.sqlite("shop")
    rows = connection.execute("select name from item").fetchall()
    connection.close()
    clicks = [record.payload for record in store.stream("clicks").read(1)]
    return rows, store.kv("prices").get(b"pen"), clicks


def test_every_kind_is_restored_unchanged(store: quire.Store) -> None:
    before = contents(store)
    for name in ("shop", "prices", "clicks"):
        store.drop(name, snapshots=True, undoable=True)
        with pytest.raises(UnknownDatabase):
            store.database(name)
    assert [info.name for info in store.dropped()] == ["clicks", "prices", "shop"]
    assert store.databases() == []
    assert store.info().dropped == 3
    store.maintain()  # deletes nothing, and creates no scheduled snapshot
    for name in ("shop", "prices", "clicks"):
        assert store.undrop(name).name == name
    assert contents(store) == before
    assert [info.name for info in store.manifest.snapshots.of("shop")] == ["monday"]
    assert store.manifest.retention.get("shop") == quire.RetentionRecord(keep_last=1, schedules=["hourly"])
    assert store.dropped() == []


def test_undrop_after_a_restart_and_with_commits_that_were_not_checkpointed(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with quire.open(root, settings=QUIET) as store:
        fill(store)
        before = contents(store)
        for name in ("shop", "prices", "clicks"):
            store.drop(name, snapshots=True, undoable=True)
    with quire.open(root) as store:
        store.maintain()
    with quire.open(root) as store:
        for name in ("shop", "prices", "clicks"):
            store.undrop(name)
        assert contents(store) == before
        assert_clean(store.manifest)


def test_open_connections_fail_and_continue_after_the_undrop(store: quire.Store) -> None:
    connection, stream, prices = store.sqlite("shop"), store.stream("clicks"), store.kv("prices")
    for name in ("shop", "clicks", "prices"):
        store.drop(name, snapshots=True, undoable=True)
    with pytest.raises(Exception, match="dropped") as caught:
        connection.execute("insert into item values ('late')")
    assert isinstance(caught.value.__cause__, DatabaseTombstoned)
    for write in (lambda: stream.append([b"late"]), lambda: prices.put(b"late", b"1")):
        with pytest.raises(DatabaseTombstoned, match="undrop"):
            write()
    for name in ("shop", "clicks", "prices"):
        store.undrop(name)
    connection.execute("insert into item values ('again')")
    stream.append([b"again"])
    prices.put(b"again", b"1")
    connection.close()


def test_the_name_can_be_used_by_another_database_meanwhile(store: quire.Store) -> None:
    store.drop("shop", snapshots=True, undoable=True)
    store.create("shop", "pages")
    with pytest.raises(NameTaken):
        store.undrop("shop")
    assert store.undrop("shop", new_name="old-shop").name == "old-shop"
    with pytest.raises(UnknownDatabase, match="no dropped database"):
        store.undrop("shop")
    first = store.database("shop").db_id
    store.drop("shop", undoable=True)
    store.drop("old-shop", snapshots=True, undoable=True)
    assert store.undrop(f"#{first}").db_id == first


def test_snapshots_are_dropped_only_on_request(store: quire.Store) -> None:
    with pytest.raises(StillReferenced, match="--snapshots"):
        store.drop("shop", undoable=True)


def test_a_dropped_database_is_removed_after_a_day_or_when_purged(tmp_path: Path) -> None:
    clock = ManualClock()
    with quire.open(tmp_path / "store", clock=clock) as store:
        store.create("shop", "pages")
        store.create("trial", "pages")
        store.drop("shop", undoable=True)
        store.drop("trial", undoable=True)
        assert store.purge("trial").name == "trial"
        (dropped,) = store.dropped()
        assert dropped.until_ms - dropped.dropped_at_ms == DAY_MS
        clock.advance(DAY_MS / 1000 - 1)
        assert store.maintain().purged == 0
        clock.advance(2)
        assert store.maintain().purged == 1
        with pytest.raises(UnknownDatabase):
            store.undrop("shop")


def test_a_setting_of_zero_drops_at_once(tmp_path: Path) -> None:
    settings = quire.StoreSettings(maintenance=quire.MaintenanceSettings(undrop_seconds=0))
    with quire.open(tmp_path / "store", settings=settings) as store:
        store.create("shop", "pages")
        store.drop("shop", undoable=True)
        assert store.dropped() == []
    with pytest.raises(quire.InvalidConfig, match="undrop_seconds"):
        quire.MaintenanceSettings(undrop_seconds=-1)


def killed(channel: Channel) -> None:
    """In a separate process: drop and undrop until it is killed."""
    request = json.loads(channel.receive() or b"{}")
    from quire.durable.failpoints import arm_from

    with quire.open(request["root"]) as store:
        connection = store.sqlite("shop")
        connection.execute("insert into item values ('more')")
        channel.send(b"ready")
        arm_from(request["failpoints"])
        store.drop("shop", snapshots=True, undoable=True)
        channel.send(b"dropped")
        store.undrop("shop")
        channel.send(b"back")


def test_killed_at_any_step_the_database_exists_or_can_be_undropped(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with quire.open(root) as store:
        fill(store)
    with ForkServer("tests.store.test_undrop:killed") as fork_server:
        for number, point in enumerate(f"manifest.commit.{step}" for step in ("applied", "flushed", "durable")):
            for hits in (0, 1):
                with fork_server.spawn() as child:
                    script = f"{point}={hits}*off->kill" if hits else f"{point}=kill"
                    child.channel.send(json.dumps({"root": str(root), "failpoints": script}).encode())
                    messages = []
                    while (message := child.channel.receive()) is not None:
                        messages.append(message)
                    assert child.wait() == -signal.SIGKILL, (point, messages)
                with quire.open(root) as store:
                    if store.dropped():
                        store.undrop("shop")
                    rows = contents(store)[0]
                    assert rows.count(("more",)) == 2 * number + hits + 1, "every acknowledged commit is present"
                    assert_clean(store.manifest)


def test_a_snapshot_is_restored_unchanged(store: quire.Store) -> None:
    before = store.manifest.snapshots.get("shop", "monday")
    with store.kv("prices") as prices:
        store.snapshot("prices", "monday", tags={"by": "ann"})
        prices.put(b"pen", b"9")
    for name in ("shop", "prices"):
        store.drop_snapshot(name, "monday", undoable=True)
        with pytest.raises(UnknownSnapshot):
            store.manifest.snapshots.get(name, "monday")
        with pytest.raises(UnknownSnapshot, match="no dropped snapshot"):
            store.undrop_snapshot(name, "tuesday")
    store.maintain()  # the policy of `shop` keeps one snapshot: the dropped one is not counted, and stays
    assert store.undrop_snapshot("shop", "monday") == before
    assert store.undrop_snapshot("prices", "monday").tags == {"by": "ann"}
    connection = store.sqlite("shop", at="monday")
    assert connection.execute("select name from item").fetchall() == [("pen",)]
    connection.close()
    store.fork("prices", "prices-of-monday", at="monday")
    with store.kv("prices-of-monday") as prices:
        assert prices.get(b"pen") == b"3"
    with pytest.raises(UnknownSnapshot):
        store.undrop_snapshot("shop", "monday")


def test_the_name_of_a_dropped_snapshot_is_available(store: quire.Store) -> None:
    first = store.drop_snapshot("shop", "monday", undoable=True)
    second = store.snapshot("shop", "monday")
    with pytest.raises(NameTaken, match="snapshot with this name"):
        store.undrop_snapshot("shop", "monday")
    store.drop_snapshot("shop", "monday", undoable=True)
    assert store.undrop_snapshot("shop", "monday").snapshot_id == second.snapshot_id  # the last one of this name
    assert store.undrop_snapshot("shop", f"#{first.snapshot_id}", new_name="older").name == "older"
    assert [info.name for info in store.manifest.snapshots.of("shop")] == ["older", "monday"]


def test_a_dropped_snapshot_is_removed_after_its_period_and_with_its_database(tmp_path: Path) -> None:
    clock = ManualClock(1_700_000_000_000)
    with quire.open(tmp_path / "store", settings=QUIET, clock=clock) as store:
        fill(store)
        store.manifest.retention.set("shop", None)
        store.drop_snapshot("shop", "monday", undoable=True)
        clock.advance(DAY_MS / 1000 - 1)
        store.maintain()
        assert store.undrop_snapshot("shop", "monday").name == "monday"
        store.drop_snapshot("shop", "monday", undoable=True)
        clock.advance(DAY_MS / 1000 + 1)
        store.maintain()
        assert store.manifest.snapshots.of("shop") == []
        store.drop_snapshot("shop", store.snapshot("shop").snapshot_id, undoable=True)
        store.drop("shop")  # a dropped snapshot does not hold its database
        assert_clean(store.manifest)


def test_a_snapshot_undropped_while_its_database_is_dropped_keeps_the_database(
    store: quire.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.drop_snapshot("shop", "monday", undoable=True)
    origins = store.manifest.snapshots.origins

    def origins_after_an_undrop(db_id: int, snapshot_ids: Iterable[int]) -> set[int]:
        store.undrop_snapshot("shop", "monday")
        return origins(db_id, snapshot_ids)

    with monkeypatch.context() as patch:
        patch.setattr(store.manifest.snapshots, "origins", origins_after_an_undrop)
        with pytest.raises(StalePlan):
            store.drop("shop")
    assert [info.name for info in store.manifest.snapshots.of("shop")] == ["monday"]
    with pytest.raises(StillReferenced):
        store.drop("shop")


def test_a_snapshot_with_an_expiry_is_dropped_immediately(store: quire.Store) -> None:
    leased = store.manifest.snapshots.publish("shop", tags={"by": "lend"}, expires_at_ms=1 << 42)
    store.drop_snapshot("shop", leased.snapshot_id, undoable=True)
    assert [info.name for info in store.manifest.snapshots.of("shop")] == ["monday"]


def test_a_client_drops_and_undrops_a_snapshot(store: quire.Store) -> None:
    with store.serve() as server, quire.connect(server.address) as client:
        assert client.drop_snapshot("shop", "monday", undoable=True).name == "monday"
        assert client.undrop_snapshot("shop", "monday", new_name="tuesday").name == "tuesday"
        assert client.drop_snapshot("shop", "tuesday").name == "tuesday"
        with pytest.raises(UnknownSnapshot):
            client.undrop_snapshot("shop", "tuesday")
