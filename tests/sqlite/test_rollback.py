"""A database is rolled back in place: as a new version, undoable, and consistent for all open connections."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quire
from quire.core.errors import Conflict, NotFound, ReadOnly, StoreUnusable, UnknownSnapshot, WrongKind
from quire.durable.failpoints import armed
from quire.manifest.records import AuditAction
from quire.testing.manifest import assert_clean
from tests.sqlite.conftest import extended


def rows(store: quire.Store, name: str = "shop", **options: Any) -> list[Any]:
    connection = store.sqlite(name, **options)
    try:
        assert connection.pragma("integrity_check") == "ok"
        return list(connection.execute("select * from item order by 1"))
    finally:
        connection.close()


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with quire.open(tmp_path / "store") as store:
        connection = store.sqlite("shop", create=True)
        connection.execute("create table item(id integer primary key, name text); insert into item values (1, 'pen')")
        store.snapshot("shop", "monday")
        connection.execute("alter table item add column price; update item set price = 3")
        connection.executemany("insert into item values (?, 'x', 1)", [(number,) for number in range(2, 2001)])
        connection.close()
        yield store
        assert_clean(store.manifest)


def test_a_migration_is_undone_and_the_rollback_can_be_undone(store: quire.Store) -> None:
    migrated = rows(store)
    result = store.rollback("shop", to="monday")
    assert rows(store) == [(1, "pen")]
    assert result.lsn > result.before_lsn > result.to_lsn
    assert rows(store, at=result.snapshot) == migrated
    assert rows(store, at=result.before_lsn) == migrated, "versions in between are kept"
    store.rollback("shop", to=result.snapshot)
    assert rows(store) == migrated


def test_a_rollback_to_the_current_state_changes_nothing(store: quire.Store) -> None:
    result = store.rollback("shop", to="monday")
    again = store.rollback("shop", to="monday")
    assert (again.changed_pages, again.snapshot, again.lsn) == (0, "", result.lsn)
    assert [info.name for info in store.manifest.snapshots.of("shop")] == ["monday", result.snapshot]


def test_a_rollback_works_between_chunks_and_log_in_both_directions(store: quire.Store) -> None:
    store.checkpoint("shop")
    result = store.rollback("shop", to="monday")
    store.checkpoint("shop")
    assert rows(store) == [(1, "pen")]
    store.rollback("shop", to=result.snapshot)
    assert len(rows(store)) == 2000


def test_a_rollback_to_an_lsn_an_epoch_and_a_time(store: quire.Store) -> None:
    with store.pages.open("shop").open_snapshot() as now:
        epoch, full = now.epoch, rows(store)
    before = datetime.fromtimestamp(now.time_ms / 1000, UTC)
    while store.manifest.clock.now_ms() <= now.time_ms:
        time.sleep(0.001)
    connection = store.sqlite("shop")
    connection.execute("delete from item")
    for to in (epoch, str(epoch), epoch.lsn, before, before.isoformat()):
        store.rollback("shop", to=to)
        assert rows(store) == full
        connection.execute("delete from item")
    connection.close()


def test_forks_and_their_origin_are_rolled_back_independently(store: quire.Store) -> None:
    store.fork("shop", "trial")
    store.rollback("shop", to="monday")
    assert (len(rows(store)), len(rows(store, "trial"))) == (1, 2000)
    store.snapshot("trial", "start")
    connection = store.sqlite("trial")
    connection.execute("delete from item where id > 5")
    connection.close()
    store.rollback("trial", to="start")
    assert len(rows(store, "trial")) == 2000


def test_readers_keep_their_version_and_idle_connections_see_the_new_one(store: quire.Store) -> None:
    reader, idle = store.sqlite("shop"), store.sqlite("shop")
    assert idle.execute("select count(*) from item where price > 0").get == 2000
    with reader:
        assert reader.execute("select count(*) from item").get == 2000
        store.rollback("shop", to="monday")
        assert reader.execute("select count(*), max(price) from item").fetchall() == [(2000, 3)]
    assert reader.execute("select * from item").fetchall() == [(1, "pen")]
    with pytest.raises(apsw.SQLError, match="no such column: price"):
        idle.execute("select count(*) from item where price > 0")
    idle.execute("insert into item values (2, 'cup')")
    assert reader.execute("select count(*) from item").get == 2
    reader.close()
    idle.close()


def test_an_idle_connection_sees_no_old_schema_and_no_old_page(store: quire.Store) -> None:
    """The next migration would reach the schema cookie and the change counter that an idle connection has in its cache."""
    sleeper = store.sqlite("shop")
    sleeper.execute("select price from item").fetchall()
    store.rollback("shop", to="monday")
    other = store.sqlite("shop")
    other.execute("alter table item add column colour; update item set colour = 'red'")
    other.close()
    assert sleeper.execute("select * from item").fetchall() == [(1, "pen", "red")]
    with pytest.raises(apsw.SQLError, match="no such column"):
        sleeper.execute("select price from item")
    sleeper.close()


def test_a_writer_that_has_read_before_gets_busy_snapshot(store: quire.Store) -> None:
    writer = store.sqlite("shop", timeout=0)
    writer.execute("begin")
    writer.execute("select count(*) from item").fetchall()
    store.rollback("shop", to="monday")
    with pytest.raises(apsw.BusyError) as caught:
        writer.execute("insert into item values (3, 'x', 1)")
    assert extended(caught) == apsw.SQLITE_BUSY_SNAPSHOT
    writer.execute("rollback")
    assert writer.execute("select count(*) from item").get == 1
    writer.execute("insert into item values (3, 'x')")
    writer.close()


def test_a_rollback_waits_for_the_writer_and_loses_none_of_its_rows(store: quire.Store) -> None:
    writer = store.sqlite("shop")
    writer.execute("begin immediate; insert into item values (5000, 'late', 1)")
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(store.rollback("shop", to="monday")))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive(), "it waits for the open transaction"
    writer.execute("commit")
    thread.join()
    writer.close()
    assert rows(store) == [(1, "pen")]
    assert (5000, "late", 1) in rows(store, at=results[0].snapshot)


def test_an_empty_version_has_no_tables(tmp_path: Path) -> None:
    with quire.open(tmp_path / "store") as store:
        store.create("shop", "pages")
        store.snapshot("shop", "empty")
        connection = store.sqlite("shop")
        connection.execute("create table item(id); insert into item values (1)")
        result = store.rollback("shop", to="empty")
        assert connection.execute("select count(*) from sqlite_schema").get == 0
        connection.execute("create table other(id)")
        store.rollback("shop", to=result.snapshot)
        assert connection.execute("select name from sqlite_schema").get == "item"
        connection.close()


def test_invalid_rollbacks_are_refused(store: quire.Store, tmp_path: Path) -> None:
    store.create("clicks", "stream")
    store.create("unborn", "pages")
    for name, to, error in (
        ("clicks", "monday", WrongKind),
        ("shop", "mundey", UnknownSnapshot),
        ("unborn", 0, NotFound),
    ):
        with pytest.raises(error):
            store.rollback(name, to=to)
    store.set_status("shop", "read_only")
    with pytest.raises(ReadOnly):
        store.rollback("shop", to="monday")
    store.set_status("shop", "active")
    file = tmp_path / "app.db"
    connection = apsw.Connection(str(file))
    connection.execute("create table t(a)")
    connection.close()
    store.followers.follow(file, "app")
    with pytest.raises(Conflict, match="follows a file"):
        store.rollback("app", to="1h")
    assert [info.name for info in store.manifest.snapshots.of("shop")] == ["monday"]


def test_a_rollback_with_an_unknown_outcome_can_be_undone(store: quire.Store) -> None:
    """Hazard: the commit fails after its frames are written, the snapshot is dropped, and recovery keeps the commit."""
    migrated = rows(store)
    with armed("pages.segment.frames", "raise:EIO"), pytest.raises(StoreUnusable):
        store.rollback("shop", to="monday")
    assert rows(store) == [(1, "pen")], "recovery keeps the commit"
    (snapshot,) = (info.name for info in store.manifest.snapshots.of("shop") if info.name != "monday")
    store.rollback("shop", to=snapshot)
    assert rows(store) == migrated


def test_a_rollback_that_was_not_written_leaves_no_snapshot(store: quire.Store) -> None:
    """Hazard: after a full disk the snapshot of a rollback that did not happen holds space."""
    migrated = rows(store)
    store.pages.open("shop").wal.seal()
    with armed("pages.segment.created", "raise:ENOSPC"), pytest.raises(OSError, match="failpoint"):
        store.rollback("shop", to="monday")
    assert rows(store) == migrated
    assert [info.name for info in store.manifest.snapshots.of("shop")] == ["monday"]


def test_a_rollback_is_in_the_audit_log_and_the_feed(store: quire.Store) -> None:
    cursor = store.feed.register(name="watch")
    result = store.rollback("shop", to="monday")
    entry = next(entry for entry in store.manifest.audit("shop") if entry.action is AuditAction.ROLLED_BACK)
    assert (entry.subject, entry.number) == (result.snapshot, result.to_lsn)
    page = store.feed.fetch(cursor.cursor_id)
    ops = [type(op).__name__ for change in page.changes for op in change.operations]
    assert ops.index("PublishSnapshot") < ops.index("RecordRollback")


STEP = st.sampled_from(["insert", "grow", "delete", "vacuum", "schema", "snapshot", "rollback", "checkpoint"])


@settings(max_examples=12, deadline=None)
@given(steps=st.lists(st.tuples(STEP, st.integers(0, 3)), max_size=14))
def test_any_history_can_be_rolled_back_to_each_of_its_snapshots(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    """Compared with a model: the dump at each snapshot. One connection stays open throughout."""
    with quire.open(tmp_path_factory.mktemp("rollback") / "store") as store:
        connection = store.sqlite("shop", create=True)
        connection.execute("create table item(id integer primary key, data)")
        dumps: dict[str, str] = {}

        def dump() -> str:
            return repr(
                (
                    connection.execute("select name, sql from sqlite_schema order by 1").fetchall(),
                    connection.execute("select id, hex(data) from item order by 1").fetchall(),
                )
            )

        for number, (step, size) in enumerate(steps):
            if step == "insert":
                connection.execute("insert into item(data) values (?)", (f"{number}" * 10,))
            elif step == "grow":
                connection.execute("insert into item(data) values (randomblob(?))", (size * 9_000,))
            elif step == "delete":
                connection.execute("delete from item where id % 3 = ?", (size,))
            elif step == "vacuum":
                connection.execute("vacuum")
            elif step == "schema":
                connection.execute(f"create table t{number}(a)")
            elif step == "checkpoint":
                store.checkpoint("shop")
            elif step == "snapshot":
                store.snapshot("shop", f"s{number}")
                dumps[f"s{number}"] = dump()
            elif dumps:
                to = list(dumps)[size % len(dumps)]
                present = dump()
                result = store.rollback("shop", to=to)
                assert dump() == dumps[to]
                if result.snapshot:
                    dumps[result.snapshot] = present
        assert connection.pragma("integrity_check") == "ok"
        connection.close()
        assert_clean(store.manifest)
