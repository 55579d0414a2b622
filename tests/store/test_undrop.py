"""A dropped database is brought back: as it was, of every kind, after a restart and a crash, for as long as settings say."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.core.errors import DatabaseTombstoned, NameTaken, StillReferenced, UnknownDatabase, UnknownSnapshot
from quire.testing.clock import ManualClock
from quire.testing.manifest import assert_clean
from tests.nursery import Line, Nursery

DAY_MS = 86_400_000
QUIET = quire.StoreSettings(maintenance=quire.MaintenanceSettings(enabled=False))


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with quire.open(tmp_path / "store", settings=QUIET) as made:
        fill(made)
        yield made
        assert_clean(made.manifest)


def fill(store: quire.Store) -> None:
    """A database of each kind, `shop` with a snapshot and a policy."""
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


def test_every_kind_comes_back_as_it_was(store: quire.Store) -> None:
    before = contents(store)
    for name in ("shop", "prices", "clicks"):
        store.drop(name, snapshots=True, undoable=True)
        with pytest.raises(UnknownDatabase):
            store.database(name)
    assert [info.name for info in store.dropped()] == ["clicks", "prices", "shop"]
    assert store.databases() == []
    assert store.info().dropped == 3
    store.maintain()  # takes nothing away, and makes no scheduled snapshot
    for name in ("shop", "prices", "clicks"):
        assert store.undrop(name).name == name
    assert contents(store) == before
    assert [info.name for info in store.manifest.snapshots.of("shop")] == ["monday"]
    assert store.manifest.retention.get("shop") == quire.RetentionRecord(keep_last=1, schedules=["hourly"])
    assert store.dropped() == []


def test_after_a_restart_and_with_what_was_not_checkpointed(tmp_path: Path) -> None:
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


def test_open_connections_are_told_and_go_on_after_it_is_back(store: quire.Store) -> None:
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


def test_a_name_may_be_given_to_another_meanwhile(store: quire.Store) -> None:
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


def test_snapshots_are_dropped_by_mistake_only_if_somebody_says_so(store: quire.Store) -> None:
    with pytest.raises(StillReferenced, match="--snapshots"):
        store.drop("shop", undoable=True)


def test_it_goes_for_good_after_a_day_or_when_it_is_purged(tmp_path: Path) -> None:
    clock = ManualClock()
    with quire.open(tmp_path / "store", clock=clock) as store:
        store.create("shop", "pages")
        store.create("trial", "pages")
        store.drop("shop", undoable=True)
        store.drop("trial", undoable=True)
        assert store.purge("trial").name == "trial"
        (left,) = store.dropped()
        assert left.until_ms - left.dropped_at_ms == DAY_MS
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


def killed(line: Line) -> None:
    """In a process of its own: drop and bring back until it is killed."""
    told = json.loads(line.receive() or b"{}")
    from quire.durable.failpoints import arm_from

    with quire.open(told["root"]) as store:
        connection = store.sqlite("shop")
        connection.execute("insert into item values ('more')")
        line.send(b"ready")
        arm_from(told["failpoints"])
        store.drop("shop", snapshots=True, undoable=True)
        line.send(b"dropped")
        store.undrop("shop")
        line.send(b"back")


def test_killed_at_a_step_it_is_there_or_can_be_brought_back(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with quire.open(root) as store:
        fill(store)
    with Nursery("tests.store.test_undrop:killed") as nursery:
        for number, point in enumerate(f"manifest.commit.{step}" for step in ("applied", "flushed", "durable")):
            for hits in (0, 1):
                with nursery.spawn() as child:
                    script = f"{point}={hits}*off->kill" if hits else f"{point}=kill"
                    child.line.send(json.dumps({"root": str(root), "failpoints": script}).encode())
                    said = []
                    while (message := child.line.receive()) is not None:
                        said.append(message)
                    assert child.wait() == -signal.SIGKILL, (point, said)
                with quire.open(root) as store:
                    if store.dropped():
                        store.undrop("shop")
                    rows = contents(store)[0]
                    assert rows.count(("more",)) == 2 * number + hits + 1, "every commit that was acknowledged"
                    assert_clean(store.manifest)


def test_a_snapshot_comes_back_as_it_was(store: quire.Store) -> None:
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
    store.maintain()  # the policy of `shop` keeps one snapshot: what was dropped is not counted, and stays
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


def test_the_name_of_a_dropped_snapshot_is_free(store: quire.Store) -> None:
    first = store.drop_snapshot("shop", "monday", undoable=True)
    second = store.snapshot("shop", "monday")
    with pytest.raises(NameTaken, match="snapshot with this name"):
        store.undrop_snapshot("shop", "monday")
    store.drop_snapshot("shop", "monday", undoable=True)
    assert store.undrop_snapshot("shop", "monday").snapshot_id == second.snapshot_id  # the last one of this name
    assert store.undrop_snapshot("shop", f"#{first.snapshot_id}", new_name="older").name == "older"
    assert [info.name for info in store.manifest.snapshots.of("shop")] == ["older", "monday"]


def test_a_dropped_snapshot_goes_when_its_day_is_over_and_with_its_database(tmp_path: Path) -> None:
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
        store.drop("shop")  # what is only waiting to go does not keep its database
        assert_clean(store.manifest)


def test_a_snapshot_that_ends_by_itself_is_dropped_for_good(store: quire.Store) -> None:
    lent = store.manifest.snapshots.publish("shop", tags={"by": "lend"}, expires_at_ms=1 << 42)
    store.drop_snapshot("shop", lent.snapshot_id, undoable=True)
    assert [info.name for info in store.manifest.snapshots.of("shop")] == ["monday"]


def test_a_client_drops_a_snapshot_and_brings_it_back(store: quire.Store) -> None:
    with store.serve() as server, quire.connect(server.address) as client:
        assert client.drop_snapshot("shop", "monday", undoable=True).name == "monday"
        assert client.undrop_snapshot("shop", "monday", new_name="tuesday").name == "tuesday"
        assert client.drop_snapshot("shop", "tuesday").name == "tuesday"
        with pytest.raises(UnknownSnapshot):
            client.undrop_snapshot("shop", "tuesday")
